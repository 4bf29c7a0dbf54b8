"""Decoders of the published tiny head, made once a process, and what its caches must hold."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spd_jax.cache.recurrent import RecurrentCache
from spd_jax.config.model import AttentionConfig
from spd_jax.decode.loop import PipelineDecoder
from spd_jax.decode.options import Options
from spd_jax.decode.state import DecodeState
from spd_jax.models.decoder import Ropes, rows_only, run_layers
from spd_jax.nn.deltanet import Memory, Recurrence
from spd_jax.plan import Layout
from tests.decode.engine import OWN, make_pipeline
from tests.decode.stepwise import Stepper
from tests.fixtures import Fixture, load_fixture
from tests.memory_weights import DecoderWeights

CHUNK, LONGEST = 16, 160


LLAMA = "tiny_llama"


@functools.cache
def fixture(name: str = LLAMA) -> Fixture:
    return load_fixture(name)


@functools.cache
def decoder(layout: Layout, name: str = LLAMA) -> PipelineDecoder:
    loaded = fixture(name)
    plan = dataclasses.replace(loaded.plan, layout=layout)
    return make_pipeline(DecoderWeights(loaded.target), loaded.head, plan, cycles_per_dispatch=32, prefill_chunk=CHUNK)


@functools.cache
def stepper(layout: Layout, name: str = LLAMA) -> Stepper:
    return Stepper(decoder(layout, name), max(golden["cycles"] for golden in fixture(name).prompts))


def prompts(name: str = LLAMA) -> list[list[int]]:
    return [golden["prompt_ids"] for golden in fixture(name).prompts]


def texts(name: str = LLAMA) -> list[list[int]]:
    """The target's own greedy text for every prompt, 80 tokens."""
    return [golden["autoregressive_ids"] for golden in fixture(name).prompts]


def options(count: int, forced: list[list[int]] | None = None, *, name: str = LLAMA, **changes: Any) -> Options:
    drafts = [OWN] * len(prompts(name)) if forced is None else forced
    eos = fixture(name).target.config.eos_token_ids
    return Options(**({"max_new_tokens": count, "eos_ids": eos, "forced_drafts": drafts} | changes))


# What caches hold. A cache is a list over layers: of attention (keys, values), each [positions, K, H], of a gated delta
# net (inputs of the convolution, state) after the last position.
Cache = list[tuple[np.ndarray, np.ndarray]]


def committed(decoder: PipelineDecoder, state: DecodeState, row: int) -> tuple[Cache, Cache]:
    """One sequence's committed part of the caches: of the target's layers on all stages, of the draft's layers."""
    slots, plan, control = decoder.program.slots, decoder.program.plan, state.control

    def cut(rank: int, slot: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        cache = state.caches[slot]
        if isinstance(cache, RecurrentCache):
            assert cache.ring.state.shape[2] == plan.num_stages  # K03: n memories are enough
            conv, memory = (np.asarray(x)[rank, row, (length - 1) % plan.num_stages, 0] for x in jax.tree.leaves(cache))
            return conv, memory
        k, v = np.asarray(cache.k[rank, row]), np.asarray(cache.v[rank, row])
        return k[..., :length].transpose(2, 0, 1), v[:, :length].transpose(1, 0, 2)

    length, drafted = int(control.committed[row]), int(control.drafted[row])
    by_stage = range(1, plan.num_stages + 1)
    target = [cut(r, slot, length) for r in map(plan.rank_of_stage, by_stage) for slot in slots.stage[r]]
    return target, [cut(plan.draft_rank, slot, drafted) for slot in slots.draft[plan.draft_rank]]


def rebuilt(ids: list[int], name: str = LLAMA) -> tuple[Cache, Cache]:
    """What caches hold after whole sequences, made without any cache; the draft's from full-depth features."""
    target, draft, _ = _forward(ids, name)
    return target, draft


def next_token(ids: list[int]) -> int:
    """The target's greedy choice after these ids."""
    return int(_forward(ids, LLAMA)[2][-1].argmax())


def _forward(ids: list[int], name: str) -> tuple[Cache, Cache, np.ndarray]:
    padded = np.zeros(LONGEST, np.int32)  # one compilation for all lengths
    padded[: len(ids)] = ids
    target, draft, logits = jax.tree.map(np.asarray, _whole_sequences(name)(jnp.asarray(padded), jnp.int32(len(ids))))

    def whole(cache: list[Any]) -> Cache:
        of_attention = [entry for entry in cache if not isinstance(entry, Memory)]
        rows = iter([(k[: len(ids)], v[: len(ids)]) for k, v in of_attention])
        return [(e.conv[0], e.state[0]) if isinstance(e, Memory) else next(rows) for e in cache]

    return whole(target), whole(draft), logits[: len(ids)]


@functools.cache
def _whole_sequences(name: str) -> Any:
    loaded = fixture(name)
    target, head, plan = loaded.target, loaded.head, loaded.plan

    def of_layers(layers: Any, x_BTD: jax.Array, length: jax.Array) -> tuple[list[jax.Array], list[Any]]:
        attend = rows_only(jnp.tril(jnp.ones((1, LONGEST, LONGEST), bool)))
        positions = jnp.arange(LONGEST, dtype=jnp.int32)[None]

        def remember(q: jax.Array, k: jax.Array, v: jax.Array, config: AttentionConfig) -> Any:
            return attend(q, k, v, config)[0], (k[0], v[0])

        recurrence = Recurrence(valid=positions < length)
        pasts = [remember if isinstance(c.config.mixer, AttentionConfig) else recurrence for c in layers]
        hiddens, kept = run_layers(layers, x_BTD, Ropes(positions), pasts)
        return [x_BTD, *hiddens], kept

    def forward(ids: jax.Array, length: jax.Array) -> Any:
        embedding = target.embedding[...][ids][None]
        hiddens, kept = of_layers(target.layers, embedding, length)
        taps = [hiddens[anchor] for anchor in plan.anchors[: plan.anchor_type[-1] + 1]]
        _, drafted = of_layers(head.layers, head.aggregate(taps), length)
        return kept, drafted, target.logits(hiddens[-1])[0]

    return jax.jit(forward)


def assert_close(ours: Cache, expected: Cache, atol: float = 1e-5) -> None:
    assert len(ours) == len(expected)
    for mine, theirs in zip(ours, expected, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert np.abs(b).max() > 1000 * atol  # numbers that say something
            np.testing.assert_allclose(a, b, atol=atol, rtol=0)
