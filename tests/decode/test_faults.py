"""A number that is not finite stops decoding with an error that says where it came from."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from spd_jax import struct
from spd_jax.decode.host import FaultError
from spd_jax.decode.loop import PipelineDecoder
from spd_jax.decode.options import Options
from spd_jax.decode.sampling import Sampling
from spd_jax.decode.tree import Tree
from spd_jax.parallel.mesh import sharded
from spd_jax.parallel.stack import PipelineParams
from tests.decode.engine import BATCH, CYCLES, OWN, autoregressive, pipeline, random_prompts
from tests.decode.test_sampled_text import SMALL
from tests.decode.test_sampled_text import decoder as sampler

PROMPTS = random_prompts(BATCH, seed=1)
OPTIONS = Options(max_new_tokens=12, forced_drafts=[OWN] * BATCH)


BAD = jnp.nan


def nan_at(array: jax.Array, *index: Any) -> jax.Array:
    return jax.device_put(array.at[index].set(BAD), array.sharding)


def in_slot(decoder: PipelineDecoder, rank: int, slot: int) -> PipelineParams:
    """Parameters with one NaN in the layer of a slot."""
    slots = list(decoder.params.slots)
    leaves, structure = jax.tree.flatten(slots[slot])
    slots[slot] = jax.tree.unflatten(structure, [nan_at(leaves[0], rank, 0), *leaves[1:]])
    return struct.replace(decoder.params, slots=tuple(slots))


def message(
    decoder: PipelineDecoder, params: PipelineParams, monkeypatch: pytest.MonkeyPatch, options: Options = OPTIONS
) -> str:
    monkeypatch.setattr(decoder, "params", params)
    prompts = [[token % decoder.program.target.vocab_size for token in prompt] for prompt in PROMPTS]
    with pytest.raises(FaultError) as caught:
        decoder.generate(prompts, options)
    return str(caught.value)


@pytest.mark.parametrize(("stage", "layers"), [(1, "0..0"), (2, "1..1"), (3, "2..2")])
def test_a_nan_in_a_stage_is_named(stage: int, layers: str, monkeypatch: pytest.MonkeyPatch):
    """The stages after it see NaN too, but it is the first that is named."""
    decoder = pipeline(3, 3, "separate")
    text = message(decoder, in_slot(decoder, stage, decoder.program.slots.stage[stage][0]), monkeypatch)
    assert text.startswith(f"stage {stage} (layers {layers}) on rank {stage} produced NaN or infinity")
    assert f"verified lengths were {[len(prompt) for prompt in PROMPTS]}" in text


def test_a_nan_in_the_draft_layers_is_named(monkeypatch: pytest.MonkeyPatch):
    decoder = pipeline(3, 3, "separate")
    text = message(decoder, in_slot(decoder, 0, decoder.program.slots.draft[0][-1]), monkeypatch)
    assert text.startswith("the speculation module on rank 0 produced NaN")


def test_stage_and_draft_beside_each_other_are_told_apart(monkeypatch: pytest.MonkeyPatch):
    decoder = pipeline(3, 2, "beside")
    slots = decoder.program.slots
    text = message(decoder, in_slot(decoder, 0, slots.draft[0][0]), monkeypatch)
    assert text.startswith("the speculation module on rank 0 produced NaN")
    text = message(decoder, in_slot(decoder, 0, slots.stage[0][0]), monkeypatch)
    assert text.startswith("stage 1 (layers 0..0) on rank 0 produced NaN")


def head_rows(params: PipelineParams) -> PipelineParams:
    assert params.head is not None
    return struct.replace(params, head=nan_at(params.head, 2, 1, 0))


def draft_rows(params: PipelineParams) -> PipelineParams:
    assert params.draft_head is not None
    return struct.replace(params, draft_head=nan_at(params.draft_head, 1, 0, 0))


def final_norm(params: PipelineParams) -> PipelineParams:
    return struct.replace(params, final_norm=nan_at(params.final_norm, 0))


@pytest.mark.parametrize(
    ("change", "ranks"),
    [(head_rows, [2]), (draft_rows, [1]), (final_norm, [0, 1, 2, 3])],
    ids=["head", "draft head", "norm"],
)
def test_a_nan_in_the_heads_is_named(
    change: Callable[[PipelineParams], PipelineParams], ranks: list[int], monkeypatch: pytest.MonkeyPatch
):
    decoder = pipeline(3, 3, "separate")
    text = message(decoder, change(decoder.params), monkeypatch)
    assert text.startswith(f"the final norm or the heads on ranks {ranks} produced NaN")


MODES = [Options(8, Sampling(1.0)), Options(8, Sampling(0.7, 4, 0.95), tree=Tree(2)), Options(8, tree=Tree(2))]


@pytest.mark.parametrize("options", MODES, ids=["sampled", "filtered tree", "greedy tree"])
def test_no_mode_hides_a_nan_in_the_heads(options: Options, monkeypatch: pytest.MonkeyPatch):
    """Filters and the order of siblings must not put it aside; infinity counts, -inf does not just lose."""
    decoder = sampler(3, "separate", SMALL)
    for bad in (jnp.nan, -jnp.inf):
        for change, ranks in ((head_rows, [2]), (draft_rows, [1]), (final_norm, [0, 1, 2, 3])):
            with monkeypatch.context() as patch:
                patch.setattr(f"{__name__}.BAD", bad)
                text = message(decoder, change(decoder.params), patch, options)
            assert text.startswith(f"the final norm or the heads on ranks {ranks} produced NaN")


def only_here(row: int) -> int:
    """A token of one prompt that no other prompt has, and that pads none."""
    others = {0} | {token for other, prompt in enumerate(PROMPTS) if other != row for token in prompt}
    return next(token for token in PROMPTS[row] if token not in others)


def test_the_prompt_is_named(monkeypatch: pytest.MonkeyPatch):
    decoder = pipeline(3, 3, "separate")
    token, ranks = only_here(2), decoder.program.plan.num_ranks
    embedding = nan_at(decoder.params.embedding, token % ranks, token // ranks)
    text = message(decoder, struct.replace(decoder.params, embedding=embedding), monkeypatch)
    assert text.startswith("stage 1 (layers 0..0) on rank 1 produced NaN or infinity for prompt(s) [2] of 4; ")


SAMPLED = Options(12, Sampling(1.5, 7))


@pytest.mark.parametrize("options", [Options(12), SAMPLED], ids=["greedy", "filtered"])
@pytest.mark.parametrize(
    ("part", "where"),
    [("layers/1", "the layers"), ("final_norm", "the final norm or the head"), ("head", "the final norm or the head")],
)
def test_the_autoregressive_decoder_names_it_too(
    part: str, where: str, options: Options, monkeypatch: pytest.MonkeyPatch
):
    decoder = autoregressive(3)
    monkeypatch.setattr(decoder, "weights", weights_with_nan(decoder.weights, part))
    with pytest.raises(FaultError, match=rf"^{where} produced NaN or infinity for prompt\(s\) \[0, 1, 2, 3\] of 4; "):
        decoder.generate(PROMPTS, options)


def weights_with_nan(weights: Any, part: str, index: int = 3) -> Any:
    def changed(path: Any, value: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return value.at[index].set(jnp.nan) if name.startswith(part) else value

    return jax.tree_util.tree_map_with_path(changed, weights)


def test_a_step_of_the_autoregressive_decoder_names_the_sequence(monkeypatch: pytest.MonkeyPatch):
    """Prefill passes; a token that only one text has is the fault, and what came before has been streamed."""
    decoder = autoregressive(3)
    texts = [result.ids for result in decoder.generate(PROMPTS, OPTIONS).results]
    seen = {token for prompt in PROMPTS for token in prompt} | {0}
    row, at, token = next(
        (row, at, token)
        for row, text in enumerate(texts)
        for at, token in enumerate(text[:-1])
        if at > 8 and token not in seen | {t for r, other in enumerate(texts) for t in other[: at if r == row else -1]}
    )
    monkeypatch.setattr(decoder, "weights", weights_with_nan(decoder.weights, "embedding", token))
    pieces = []
    with pytest.raises(FaultError, match=rf"^the layers produced NaN or infinity for prompt\(s\) \[{row}\] of 4; "):
        pieces.extend(decoder.stream(PROMPTS, OPTIONS))
    assert [t.id for piece in pieces if piece.sequence == row for t in piece.tokens] == texts[row][: 1 + CYCLES]
    assert at > CYCLES


def test_a_nan_that_only_a_later_token_meets_is_found(monkeypatch: pytest.MonkeyPatch):
    """Prefill passes; the embedding of a generated token is the fault. Tokens before it have been streamed."""
    decoder = pipeline(3, 3, "separate")
    texts = [result.ids for result in decoder.generate(PROMPTS, OPTIONS).results]
    seen = {token for prompt in PROMPTS for token in prompt} | {text[0] for text in texts} | {0}
    token = next(token for token in texts[0][4:] if token not in seen)
    ranks = decoder.program.plan.num_ranks
    embedding = nan_at(decoder.params.embedding, token % ranks, token // ranks)
    text = message(decoder, struct.replace(decoder.params, embedding=embedding), monkeypatch)
    assert text.startswith("stage 1 (layers 0..0) on rank 1 produced NaN")
    assert decoder.params.embedding.sharding == sharded(decoder.mesh)
