"""Decoders of the published tiny head, made once a process, and what its caches must hold."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spd_jax.decode.loop import PipelineDecoder
from spd_jax.decode.options import Options
from spd_jax.decode.state import DecodeState
from spd_jax.models.decoder import rows_only, run_layers
from spd_jax.nn.rope import rope_table
from spd_jax.plan import Layout
from spd_jax.testing.weights import DecoderWeights
from tests.decode.engine import OWN, make_pipeline
from tests.decode.stepwise import Stepper
from tests.fixtures import Fixture, load_fixture

CHUNK, LONGEST = 16, 160


@functools.cache
def fixture() -> Fixture:
    return load_fixture("tiny_llama")


@functools.cache
def decoder(layout: Layout) -> PipelineDecoder:
    loaded = fixture()
    plan = dataclasses.replace(loaded.plan, layout=layout)
    return make_pipeline(DecoderWeights(loaded.target), loaded.head, plan, cycles_per_dispatch=32, prefill_chunk=CHUNK)


@functools.cache
def stepper(layout: Layout) -> Stepper:
    return Stepper(decoder(layout), max(golden["cycles"] for golden in fixture().prompts))


def prompts() -> list[list[int]]:
    return [golden["prompt_ids"] for golden in fixture().prompts]


def texts() -> list[list[int]]:
    """The target's own greedy text for every prompt, 80 tokens."""
    return [golden["autoregressive_ids"] for golden in fixture().prompts]


def options(count: int, forced: list[list[int]] | None = None, **changes: Any) -> Options:
    drafts = [OWN] * len(prompts()) if forced is None else forced
    eos = fixture().target.config.eos_token_ids
    return Options(**({"max_new_tokens": count, "eos_ids": eos, "forced_drafts": drafts} | changes))


# What caches hold. A cache is a list over layers of (keys, values), each [positions, K, H].
Cache = list[tuple[np.ndarray, np.ndarray]]


def committed(decoder: PipelineDecoder, state: DecodeState, row: int) -> tuple[Cache, Cache]:
    """One sequence's committed keys and values: of the target's layers on all stages, of the draft's layers."""
    slots, plan, control = decoder.program.slots, decoder.program.plan, state.control

    def cut(rank: int, slot: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        k, v = np.asarray(state.caches[slot].k[rank, row]), np.asarray(state.caches[slot].v[rank, row])
        return k[..., :length].transpose(2, 0, 1), v[:, :length].transpose(1, 0, 2)

    length, drafted = int(control.committed[row]), int(control.drafted[row])
    by_stage = range(1, plan.num_stages + 1)
    target = [cut(r, slot, length) for r in map(plan.rank_of_stage, by_stage) for slot in slots.stage[r]]
    return target, [cut(plan.draft_rank, slot, drafted) for slot in slots.draft[plan.draft_rank]]


def rebuilt(ids: list[int]) -> tuple[Cache, Cache]:
    """Keys and values of whole sequences without any cache; the draft's from full-depth features."""
    target, draft, _ = _forward(ids)
    return target, draft


def next_token(ids: list[int]) -> int:
    """The target's greedy choice after these ids."""
    return int(_forward(ids)[2][-1].argmax())


def _forward(ids: list[int]) -> tuple[Cache, Cache, np.ndarray]:
    padded = np.zeros(LONGEST, np.int32)  # one compilation for all lengths
    padded[: len(ids)] = ids
    return jax.tree.map(lambda x: np.asarray(x)[: len(ids)], _whole_sequences()(jnp.asarray(padded)))


@functools.cache
def _whole_sequences() -> Any:
    loaded = fixture()
    target, head, plan = loaded.target, loaded.head, loaded.plan

    def of_layers(layers: Any, x_BTD: jax.Array, rope: Any, head_dim: int) -> tuple[list[jax.Array], Cache]:
        attend = rows_only(jnp.tril(jnp.ones((1, LONGEST, LONGEST), bool)))
        kept = []

        def remember(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
            kept.append((k[0], v[0]))
            return attend(q, k, v)

        table = rope_table(rope, head_dim, jnp.arange(LONGEST, dtype=jnp.int32)[None])
        hiddens, _ = run_layers(layers, x_BTD, table, [remember] * len(layers))
        return [x_BTD, *hiddens], kept

    def forward(ids: jax.Array) -> Any:
        embedding = target.embedding[...][ids][None]
        hiddens, kept = of_layers(target.layers, embedding, target.config.rope, target.config.layer.head_dim)
        taps = [hiddens[anchor] for anchor in plan.anchors[: plan.anchor_type[-1] + 1]]
        config = head.config
        _, drafted = of_layers(head.layers, head.aggregate(taps), config.rope, config.layer.head_dim)
        return kept, drafted, target.logits(hiddens[-1])[0]

    return jax.jit(forward)


def assert_close(ours: Cache, expected: Cache, atol: float = 1e-5) -> None:
    assert len(ours) == len(expected)
    for mine, theirs in zip(ours, expected, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert np.abs(b).max() > 0.1  # numbers that say something
            np.testing.assert_allclose(a, b, atol=atol, rtol=0)
