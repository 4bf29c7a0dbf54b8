"""Layers of other kinds than plain attention, and several in one pipeline: the text is still the target's own.

Gated delta nets between attention (Qwen3.5), experts beside dense layers (Qwen3-MoE) and with a shared one
(Qwen3.5-MoE), windows and capped scores (Gemma, Mistral), in stages that differ.
"""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from spd_jax.config.model import (
    DeltaNetConfig,
    ExpertsConfig,
    LayerConfig,
    MlpConfig,
    ModelConfig,
    NormConfig,
    RopeConfig,
)
from spd_jax.decode.autoregressive import AutoregressiveDecoder
from spd_jax.decode.loop import PipelineDecoder
from spd_jax.decode.options import Options
from spd_jax.decode.tree import Tree
from spd_jax.plan import StagePlan, default_anchors
from spd_jax.weights.load import load_decoder
from spd_jax.weights.random_model import RandomWeights
from tests.decode.engine import (
    BATCH,
    CHUNK,
    CYCLES,
    LAYER,
    OWN,
    VOCAB,
    assert_cycles_exact,
    in_batches,
    make_pipeline,
    model_config,
    random_head,
    random_prompts,
    run_on_many_ranks,
    script,
    verdicts,
)
from tests.decode.tree_model import filled, happened, random_script, simulate
from tests.tiny import decoder_logits

TOKENS = 20
PROMPTS = random_prompts(BATCH * 2, longest=11)  # some shorter than a convolution, some longer than a window
SCRIPTS = {"oracle": "1", "anti": "0", "mixed": "1101", "mostly wrong": "0010011"}

GATED = dataclasses.replace(
    LAYER.with_attention(gated=True, qk_norm=True, rope=RopeConfig(partial_rotary_factor=0.5)),
    norm=NormConfig(1e-6, zero_centred=True),
)
LINEAR = dataclasses.replace(GATED, mixer=DeltaNetConfig(2, 4, 4, 6, 3))
FAR = dataclasses.replace(
    LAYER.with_attention(score_cap=3.0, scale=0.6), norm=NormConfig(1e-6, zero_centred=True), post_norms=True
)
NEAR = FAR.with_attention(window=5, rope=RopeConfig(theta=100.0))

SPARSE = dataclasses.replace(LAYER.with_attention(qk_norm=True), mlp=ExpertsConfig(5, 2, 12))
SHARED = dataclasses.replace(LINEAR, norm=LAYER.norm, mlp=ExpertsConfig(5, 2, 12, shared_intermediate_size=8))
DENSE = dataclasses.replace(SPARSE, mlp=MlpConfig(24))

KINDS: dict[str, tuple[LayerConfig, ...]] = {
    "delta nets": (LINEAR, LINEAR, LINEAR, GATED) * 2,
    "windows": (NEAR, FAR) * 4,
    "experts": (SPARSE, DENSE, SHARED, SPARSE, SHARED, SHARED, SPARSE, DENSE),
    "32 layers": (LINEAR, LINEAR, LINEAR, GATED) * 8,
}
SEEDS = {"delta nets": 0, "windows": 5, "experts": 6, "32 layers": 0}  # weights whose greedy text keeps changing
IN_GATE = ["delta nets", "experts", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("windows", "32 layers"))]
CASES = [
    pytest.param("delta nets", (1, 4, 3), "beside", marks=pytest.mark.slow),
    ("experts", (3, 2, 3), "separate"),
    pytest.param("delta nets", (2, 2, 2, 2), "separate", marks=pytest.mark.slow),
    pytest.param("windows", (3, 5), "beside", marks=pytest.mark.slow),
    pytest.param("delta nets", (3, 5), "separate", marks=pytest.mark.slow),
    pytest.param("delta nets", (1,) * 8, "beside", marks=pytest.mark.slow),
    pytest.param("delta nets", (8,), "beside", marks=pytest.mark.slow),
    pytest.param("windows", (2, 2, 1, 3), "separate", marks=pytest.mark.slow),
]


@functools.cache
def weights(kind: str) -> RandomWeights:
    changes = {"layers": KINDS[kind], "tie_embeddings": True}
    changes |= {"embedding_scale": 2.0, "logit_cap": 8.0} if kind == "windows" else {}
    config: ModelConfig = model_config(8, **changes)
    return RandomWeights(config, SEEDS[kind])


@functools.cache
def reference(kind: str) -> list[list[int]]:
    """The target's own greedy text for every prompt, token by token on one device."""
    decoder = AutoregressiveDecoder(load_decoder(weights(kind)), steps_per_dispatch=CYCLES, prefill_chunk=CHUNK)
    return [result.ids for result in in_batches(decoder, PROMPTS, {"max_new_tokens": TOKENS})]


@functools.cache
def pipeline(kind: str, stage_layers: tuple[int, ...], layout: str) -> PipelineDecoder:
    plan = StagePlan(stage_layers, 2, layout, (0,))
    plan = dataclasses.replace(plan, anchors=default_anchors(plan.boundaries))
    return make_pipeline(weights(kind), random_head(weights(kind).config, plan), plan)


@pytest.mark.parametrize("kind", IN_GATE)
def test_reference_text_says_something(kind: str):
    texts = reference(kind)
    assert min(len(set(text)) for text in texts) >= 5
    assert len({token for text in texts for token in text}) > 25


@pytest.mark.parametrize(
    "kind", ["delta nets", *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS if kind != "delta nets")]
)
def test_token_by_token_is_the_whole_sequence(kind: str):
    """The reference itself: every token is the likeliest one after a forward pass over all before it."""
    model = load_decoder(weights(kind), jnp.float32)
    for prompt, text in zip(PROMPTS[3:6], reference(kind)[3:6], strict=True):
        logits = decoder_logits(model, np.asarray([prompt + text]))[0]
        assert logits[len(prompt) - 1 : -1].argmax(axis=-1).tolist() == text


def check(kind: str, stage_layers: tuple[int, ...], layout: str):
    """Batches of prompts of different lengths, every script of right and wrong drafts and the head's own."""
    decoder, texts = pipeline(kind, stage_layers, layout), reference(kind)
    stages = len(stage_layers)
    for bits in SCRIPTS.values():
        forced = [script(bits, text) for text in texts]
        results = in_batches(decoder, PROMPTS, {"max_new_tokens": TOKENS, "forced_drafts": forced})
        for result, text in zip(results, texts, strict=True):
            assert result.ids == text
            assert_cycles_exact(result, stages)
            if stages > 1:
                assert verdicts(result)[1:] == [bits[i % len(bits)] == "1" for i in range(TOKENS - 1)]
    own = in_batches(decoder, PROMPTS, {"max_new_tokens": TOKENS, "forced_drafts": [OWN] * len(PROMPTS)})
    assert [result.ids for result in own] == texts


@pytest.mark.parametrize(("kind", "stage_layers", "layout"), CASES)
def test_text_and_cycles_are_exact(kind: str, stage_layers: tuple[int, ...], layout: str):
    check(kind, stage_layers, layout)


TREES = [("delta nets", (1, 4, 3), "beside", 3)]
REST = [
    ("delta nets", (3, 5), "separate", 2),
    ("windows", (2, 2, 1, 3), "separate", 4),
    ("experts", (3, 2, 3), "separate", 4),
]


@pytest.mark.parametrize(
    ("kind", "stage_layers", "layout", "width"), [*TREES, *(pytest.param(*one, marks=pytest.mark.slow) for one in REST)]
)
def test_trees_of_every_kind_of_layer(kind: str, stage_layers: tuple[int, ...], layout: str, width: int):
    """A memory for each row, read from its parent's; rows of a column see their own ancestors."""
    decoder, texts = pipeline(kind, stage_layers, layout), reference(kind)
    scripts = [random_script(text, width, VOCAB, seed=i) for i, text in enumerate(texts)]
    forced = [filled(one, width) for one in scripts]
    options = {"max_new_tokens": TOKENS, "forced_drafts": forced, "tree": Tree(width)}
    for result, text, one in zip(in_batches(decoder, PROMPTS, options), texts, scripts, strict=True):
        assert result.ids == text
        assert happened(result) == simulate(text, one, len(stage_layers))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["separate", "beside"])
def test_sixteen_stages_of_two_layers(layout: str):
    """Two delta nets in one stage, a delta net and attention in the next."""
    run_on_many_ranks("test_layer_kinds", f"check('32 layers', (2,) * 16, {layout!r})")


@pytest.mark.slow
def test_a_batch_of_one_is_the_batch_of_four():
    text = reference("delta nets")[6]
    options = Options(max_new_tokens=TOKENS, forced_drafts=[script("110", text)])
    assert pipeline("delta nets", (1, 4, 3), "beside").generate(PROMPTS[6:7], options).results[0].ids == text
