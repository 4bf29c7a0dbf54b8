"""The speculation module: what its features are made of, what it can propose, and where it starts from."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from spd_jax.config.model import AttentionConfig, DeltaNetConfig, ExpertsConfig, MlpConfig, ModelConfig, RopeConfig
from spd_jax.models.decoder import Decoder
from spd_jax.nn.decoder_layer import DecoderLayer
from spd_jax.nn.rope import rope_table
from spd_jax.plan import StagePlan
from spd_jax.speculation.checkpoint import named_tensors
from spd_jax.speculation.module import (
    HeadConfig,
    SpeculationModule,
    copied_layers,
    draft_layer_config,
    head_from_target,
)
from spd_jax.weights.mapping import TensorMap
from spd_jax.weights.random_model import RandomWeights, dense_layer
from tests.naive import NaiveDecoder

LAYER = dense_layer(32, 48, 4, 2, 8, 1e-6)
TARGET = ModelConfig("llama", 64, (LAYER,) * 8, 256, tie_embeddings=False)
PLAN = StagePlan((2, 2, 2, 2), 2, "separate", (0, 2, 6, 8))
CONFIG = HeadConfig(LAYER, 2, PLAN.anchors, 64, draft_ids=(3, 9, 40))


def tensors_of(target: Decoder) -> dict[str, np.ndarray]:
    return {".".join(map(str, path)): np.asarray(param[...]) for path, param in nnx.to_flat_state(nnx.state(target))}


@pytest.fixture(scope="module")
def target() -> Decoder:
    return Decoder(TARGET, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def module(target: Decoder) -> SpeculationModule:
    return head_from_target(CONFIG, TARGET, tensors_of(target))


def random_taps(count: int, seed: int = 0) -> list[jnp.ndarray]:
    return list(jnp.asarray(np.random.default_rng(seed).standard_normal((count, 2, 3, 32), np.float32)))


# What a head can be


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "at least one draft layer, found 0"),
        ({"draft_ids": (3, 3, 99)}, r"must lie in 0..63, found 3..99"),  # C07
        ({"draft_ids": (3, 3, 9)}, "sorted without duplicates, found 3 before 3"),
        ({"draft_ids": (9, 3)}, "sorted without duplicates, found 9 before 3"),
        ({"draft_ids": (-1, 3)}, r"must lie in 0..63, found -1..3"),
        ({"draft_ids": ()}, r"must lie in 0..63, found none"),
        ({"anchors": ()}, r"anchors must start at 0 and increase strictly, found \[\]"),
        ({"anchors": (2, 6)}, r"anchors must start at 0 .* found \[2, 6\]"),
        ({"anchors": (0, 6, 6)}, r"anchors must start at 0 .* found \[0, 6, 6\]"),
    ],
)
def test_configs_that_cannot_be_are_refused(changes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **changes)


def test_draft_vocabulary_is_a_subset_or_all():
    assert CONFIG.draft_vocab_size == 3
    assert dataclasses.replace(CONFIG, draft_ids=None).draft_vocab_size == 64


def test_one_projection_a_type_without_bias(module: SpeculationModule):
    assert [p.weight.shape for p in module.projections] == [(32, 32 * (i + 1)) for i in range(4)]
    assert all(p.bias is None for p in module.projections)


def test_parameters_are_of_the_asked_dtype():
    module = SpeculationModule(CONFIG, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert {value.dtype for value in named_tensors(module).values()} == {jnp.dtype(jnp.bfloat16)}


# Features


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_feature_is_a_projection_of_all_taps_so_far(count: int):
    module = SpeculationModule(CONFIG, rngs=nnx.Rngs(1))
    taps = random_taps(count)
    expected = sum(
        np.asarray(tap) @ np.asarray(module.projections[count - 1].weight[...])[:, 32 * i : 32 * (i + 1)].T
        for i, tap in enumerate(taps)
    )
    np.testing.assert_allclose(module.aggregate(taps), expected, atol=1e-5)


@pytest.mark.parametrize("count", [0, 5])
def test_a_wrong_number_of_taps_is_refused(module: SpeculationModule, count: int):
    with pytest.raises(ValueError, match=rf"found {count} taps for anchors \[0, 2, 6, 8\]"):
        module.aggregate(random_taps(count))


# The start from the target's own weights


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_untrained_feature_is_the_deepest_tap(module: SpeculationModule, count: int):
    taps = random_taps(count)
    np.testing.assert_array_equal(module.aggregate(taps), taps[-1])


def test_noise_is_added_to_projections_only_and_repeatable(target: Decoder, module: SpeculationModule):
    tensors = tensors_of(target)
    noisy, again, other = (
        named_tensors(head_from_target(CONFIG, TARGET, tensors, seed=seed, noise=0.02)) for seed in (0, 0, 1)
    )
    for name, plain in named_tensors(module).items():
        difference = np.asarray(noisy[name] - plain)
        if name.startswith("projections."):
            assert difference.std() == pytest.approx(0.02, rel=0.1)
            assert not np.array_equal(noisy[name], other[name])
        else:
            assert not difference.any()
        np.testing.assert_array_equal(noisy[name], again[name])
    first, second = noisy["projections.0.weight"], noisy["projections.1.weight"][:, 32:]
    assert not np.array_equal(first, second), "every projection has noise of its own"


def test_draft_layers_are_the_targets_last(target: Decoder, module: SpeculationModule):
    tensors, copied = tensors_of(target), named_tensors(module)
    for draft, source in ((0, 6), (1, 7)):
        names = [name for name in copied if name.startswith(f"layers.{draft}.")]
        assert len(names) == 6
        for name in names:
            np.testing.assert_array_equal(copied[name], tensors[name.replace(f".{draft}.", f".{source}.", 1)])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("ids", [(3, 9, 40), None])
def test_head_rows_are_the_targets(tied: bool, ids: tuple[int, ...] | None):
    config = dataclasses.replace(TARGET, tie_embeddings=tied)
    tensors = tensors_of(Decoder(config, rngs=nnx.Rngs(0)))
    assert ("head" in tensors) is not tied
    module = head_from_target(dataclasses.replace(CONFIG, draft_ids=ids), config, tensors)
    rows = tensors["embedding" if tied else "head"]  # D01: a tied target's rows are its embedding's
    np.testing.assert_array_equal(module.lm_head[...], rows if ids is None else rows[list(ids)])


def test_head_of_the_targets_rows_has_none_of_its_own(target: Decoder):
    module = head_from_target(dataclasses.replace(CONFIG, lm_head="target"), TARGET, tensors_of(target))
    assert module.lm_head is None
    assert "lm_head" not in named_tensors(module)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer": LAYER.with_attention(qk_norm=True)}, "cannot be copied from target layers"),
        ({"num_layers": 9}, "9 draft layers cannot be copied from 8 target layers"),
        ({"vocab_size": 60}, "vocabulary has 60 tokens, the target's 64"),
        ({"anchors": (0, 9)}, "anchor 9 is beyond the last hidden state index 8"),
    ],
)
def test_a_head_of_another_target_cannot_start_from_this(target: Decoder, changes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        head_from_target(dataclasses.replace(CONFIG, **changes), TARGET, tensors_of(target))


def test_draft_layer_is_the_targets_dense_layer():
    assert draft_layer_config(TARGET) == LAYER


def test_draft_layer_has_no_window():
    """The last layer that attends to everything; where all have a window, the last one without it."""
    near, far = LAYER.with_attention(window=4, rope=RopeConfig(theta=1e3)), LAYER.with_attention(qk_norm=True)
    mixed = dataclasses.replace(TARGET, layers=(LAYER, near, far, near))
    assert draft_layer_config(mixed) == far
    assert draft_layer_config(dataclasses.replace(TARGET, layers=(near,) * 3)) == near.with_attention(window=None)


def test_draft_layers_of_experts_are_dense():
    """As wide as a dense layer of the target, as what its description says, or as what a position runs."""
    sparse = dataclasses.replace(LAYER, mlp=ExpertsConfig(4, 2, 12, shared_intermediate_size=5))
    delta = dataclasses.replace(sparse, mixer=DeltaNetConfig(2, 2, 4, 4, 4))
    target = dataclasses.replace(TARGET, layers=(delta, sparse, delta))
    assert draft_layer_config(target) == dataclasses.replace(LAYER, mlp=MlpConfig(29))
    assert draft_layer_config(dataclasses.replace(target, dense_size=17)).mlp == MlpConfig(17)
    assert draft_layer_config(dataclasses.replace(target, layers=(LAYER, sparse))) == LAYER
    with pytest.raises(ValueError, match="no layer of this target does"):
        draft_layer_config(dataclasses.replace(target, layers=(delta,)))


def test_a_head_of_a_target_with_experts_begins_with_their_rows():
    """Attention and norms are copied; the MLP has the experts' rows inside and gives nothing yet."""
    sparse = dataclasses.replace(LAYER, mlp=ExpertsConfig(3, 2, 20))
    delta = dataclasses.replace(sparse, mixer=DeltaNetConfig(2, 2, 4, 4, 4))
    target = dataclasses.replace(TARGET, layers=(sparse, delta, delta, sparse, delta))
    config = HeadConfig(draft_layer_config(target), 2, (0, 2), 64, lm_head="target")
    weights = RandomWeights(target, 0)
    module = head_from_target(config, target, TensorMap(weights))
    assert copied_layers(config, target) == (0, 3)
    values = named_tensors(module)
    for name in ("attention.qkv.weight", "mlp_norm.weight"):
        np.testing.assert_array_equal(values[f"layers.1.{name}"], weights.tensor(f"layers.3.{name}"))
    experts = weights.tensor("layers.3.mlp.gate_up").reshape(3, 2, 20, 32)
    gate, up = np.split(np.asarray(values["layers.1.mlp.gate_up.weight"]), 2)
    np.testing.assert_array_equal(gate, np.concatenate([experts[0, 0], experts[1, 0]]))  # 2 of 3 experts: 40 rows
    np.testing.assert_array_equal(up, np.concatenate([experts[0, 1], experts[1, 1]]))
    assert not np.any(values["layers.1.mlp.down.weight"])


def test_layers_with_the_same_parameters_are_copied():
    """A window and a rotary base are no parameters; a norm of the heads is."""
    near, other = LAYER.with_attention(window=4), LAYER.with_attention(qk_norm=True)
    target = dataclasses.replace(TARGET, layers=(LAYER, near, other, LAYER, other, near, other, other))
    assert copied_layers(CONFIG, target) == (3, 5)
    assert copied_layers(CONFIG, target, first_layer=1) == (1, 3)
    with pytest.raises(ValueError, match="2 layers can be copied from layer 0 to 3 on, found 4"):
        copied_layers(CONFIG, target, first_layer=4)


# Positions: the head's own rotary embedding (E01, E06)


def test_draft_uses_its_own_rope(target: Decoder):
    """Target and head with different bases: each rotates by its own table."""

    def draft_logits(head_rope: RopeConfig, target_rope: RopeConfig) -> np.ndarray:
        config = dataclasses.replace(TARGET, layers=(LAYER.with_attention(rope=target_rope),) * TARGET.num_layers)
        changed = Decoder(config, rngs=nnx.Rngs(0))
        own = dataclasses.replace(CONFIG, layer=LAYER.with_attention(rope=head_rope), anchors=(0,))
        head = head_from_target(own, config, tensors_of(target))
        plan = dataclasses.replace(PLAN, anchors=(0,))  # embeddings only: the target's rope cannot reach the features
        decoder = NaiveDecoder(changed, plan, head, length=16)
        return decoder.generate([5, 6, 7, 8, 9], max_new_tokens=2).draft_logits[0]

    own, scaled = RopeConfig(theta=1e4), RopeConfig(kind="llama3", factor=8.0, original_max_position=4)
    np.testing.assert_array_equal(draft_logits(own, RopeConfig(theta=1e6)), draft_logits(own, own))
    assert np.abs(draft_logits(scaled, own) - draft_logits(own, own)).max() > 1e-6
    tables = [rope_table(AttentionConfig(1, 1, 8, rope), jnp.asarray([[3]])) for rope in (own, RopeConfig(theta=1e6))]
    assert not np.array_equal(tables[0].cos, tables[1].cos)


# Which hidden state is which (F01, F02)


class Marked(DecoderLayer):
    """Adds 100 k: whoever captures a state can say after which layer."""

    def __init__(self, number: int):
        self.number, self.config = number, LAYER

    def __call__(self, x_BTD: jnp.ndarray, rope: Any, attend: Callable[..., Any]) -> tuple[jnp.ndarray, None]:
        return x_BTD + jnp.float32(100 * self.number), None


def mark_after(layer: int) -> float:
    return 100.0 * sum(range(1, layer + 1))


def marked_target() -> Decoder:
    target = Decoder(TARGET, rngs=nnx.Rngs(0))
    target.layers = nnx.List([Marked(k) for k in range(1, 9)])
    target.final_norm.weight[...] = jnp.full((32,), 0.5)
    return target


def test_hidden_state_l_is_the_output_of_layer_l_before_the_final_norm():
    target = marked_target()
    ids = jnp.asarray([[5, 6, 7]])
    hiddens = target.hidden_states(ids)
    assert len(hiddens) == 9
    for layer, hidden in enumerate(hiddens):  # 0 is the embedding, 8 = L is captured and not normed
        np.testing.assert_allclose(hidden - target.embedding[...][ids], mark_after(layer), rtol=1e-6)


def test_every_depth_sees_the_anchors_it_has_passed():
    target = marked_target()
    decoder = NaiveDecoder(target, PLAN, SpeculationModule(CONFIG, rngs=nnx.Rngs(0)), length=8)
    tokens, depths = [5, 6, 7, 8, 9], [4, 3, 2, 1, 0]
    hidden, _ = decoder._run(tokens, depths)
    for position, depth in enumerate(depths):
        taps = [hidden[anchor, position] for anchor in PLAN.anchors[: PLAN.anchor_type[depth] + 1]]
        marks = [float(jnp.round(jnp.mean(tap) / 100) * 100) for tap in taps]
        assert marks == [mark_after(anchor) for anchor in PLAN.anchors if anchor <= 2 * depth]
    assert np.isnan(np.asarray(hidden[1:, 4])).all(), "the newest position has its embedding only"
