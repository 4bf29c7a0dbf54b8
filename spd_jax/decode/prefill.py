"""Chunked, pipelined prefill on one rank.

The prompt is cut into chunks; at tick t stage s works on chunk t - (s - 1), so all stages are busy on a long prompt,
and the draft layers follow as one more stage. Hidden state and taps travel together to the next rank; the ring closes
from the last stage to the draft rank, where every prompt position is complete (type f(n) features). A gated delta net
keeps its running memory in column 0 of its ring, and leaves it in all.

Runs inside a shard_map over axis `stage`. The number of chunks is data: one compilation serves all prompt lengths of a
cache capacity.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from spd_jax import struct
from spd_jax.cache.entries import AttentionCache, write_chunk
from spd_jax.cache.layer import LayerCache
from spd_jax.cache.recurrent import RecurrentCache, end_running, keep_running, running_memory
from spd_jax.config.model import AttentionConfig
from spd_jax.decode import ranks
from spd_jax.decode.heads import Mode, Request, first_token
from spd_jax.decode.roles import run_slots, stack_hiddens, switch_roles
from spd_jax.decode.state import Control, DecodeState, Taps
from spd_jax.decode.tree import enter_column, lone_child, no_nodes
from spd_jax.models.decoder import Ropes, embed
from spd_jax.nn.attention import PREFILL_BLOCK, attend_by_position, cache_layout
from spd_jax.nn.decoder_layer import Past
from spd_jax.nn.deltanet import Recurrence
from spd_jax.nn.layers import Attend, project
from spd_jax.parallel.mesh import AXIS, gather_ranks, psum_packed, shift, varying
from spd_jax.parallel.stack import PipelineParams, Program
from spd_jax.parallel.vocab import local_embedding


@struct.dataclass
class _Carry:
    """`ring` `[B, T, 1 + m, D]`: hidden state and taps from the rank before; `final` `[B, D]`: last stage's output at
    the last prompt position; `finite` `[B]`: so is all that this rank's stage has made of a prompt."""

    caches: tuple[LayerCache, ...]
    ring: Array
    final: Array
    finite: Array


def _attend(cache: AttentionCache, start: Array, batch: int, length: int) -> Attend:
    prefix = jnp.full((batch,), 1, jnp.int32) * start
    positions = jnp.broadcast_to(start + jnp.arange(length, dtype=jnp.int32), (batch, length))

    def attend(q: Array, k: Array, v: Array, config: AttentionConfig) -> tuple[Array, tuple[Array, Array]]:
        rows = cache_layout(k, v)
        mixed = attend_by_position(
            q, (cache.k, cache.v), prefix, rows, positions, positions, config, block=PREFILL_BLOCK
        )
        return mixed, rows

    return attend


def _past(cache: LayerCache, start: Array, lengths_B: Array, length: int) -> Past:
    if isinstance(cache, AttentionCache):
        return _attend(cache, start, lengths_B.shape[0], length)
    memory = jax.tree.map(lambda x: jnp.where(start == 0, jnp.zeros((), x.dtype), x), running_memory(cache))
    return Recurrence(memory, valid=start + jnp.arange(length, dtype=jnp.int32) < lengths_B[:, None])


@dataclasses.dataclass(frozen=True)
class _Work:
    """What a rank may run in one tick: its stage on one chunk, the draft layers on another."""

    program: Program
    params: PipelineParams
    caches: tuple[LayerCache, ...]
    lengths: Array
    stage_start: Array
    stage_input: Array
    draft_start: Array
    draft_taps: Array
    projection: Array

    def _rows(self, x_BTD: Array, start: Array, slots: tuple[int, ...]) -> Any:
        batch, length, _ = x_BTD.shape
        positions = jnp.broadcast_to(start + jnp.arange(length, dtype=jnp.int32), (batch, length))
        return run_slots(
            slots,
            self.program.slots.kinds,
            self.params.slots,
            x_BTD,
            Ropes(positions),
            lambda slot: _past(self.caches[slot], start, self.lengths, length),
        )

    def stage(self, slots: tuple[int, ...]) -> tuple[Array, dict[int, Any]]:
        """Hidden state after each layer, new keys and values."""
        hiddens, kept = self._rows(self.stage_input, self.stage_start, slots)
        return stack_hiddens(hiddens, self.program.slots.max_stage_slots), kept

    def draft(self, slots: tuple[int, ...]) -> tuple[Array, dict[int, Any]]:
        """New keys and values; the hidden states are of no use."""
        features = project(self.draft_taps.reshape(*self.draft_taps.shape[:2], -1), self.projection)
        _, kept = self._rows(features, self.draft_start, slots)
        return jnp.zeros((), features.dtype), kept

    def idle(self, slot: int) -> Any:
        """What a slot keeps that does not run: keys and values of nothing, or the memory that it had."""
        cache = self.caches[slot]
        if isinstance(cache, RecurrentCache):
            return running_memory(cache)
        kind, (batch, length, _) = self.program.slots.kinds[slot].attention, self.stage_input.shape
        front, dtype = (batch, kind.num_kv_heads), self.stage_input.dtype
        return jnp.zeros((*front, kind.head_dim, length), dtype), jnp.zeros((*front, length, kind.head_dim), dtype)

    def run(self, stage_valid: Array, draft_valid: Array) -> tuple[Array, tuple[Any, ...]]:
        """Hidden states after each stage layer `[slots, B, T, D]` and the rows of every slot."""
        shape, dtype = self.stage_input.shape, self.stage_input.dtype
        slots = self.program.slots
        hiddens, _, kept = switch_roles(
            slots,
            stage_valid,
            draft_valid,
            self.stage,
            self.draft,
            self.idle,
            jax.ShapeDtypeStruct((slots.max_stage_slots, *shape), dtype),
            jax.ShapeDtypeStruct((), dtype),
        )
        return hiddens, kept


def prefill_chunks(
    program: Program,
    params: PipelineParams,
    caches: tuple[LayerCache, ...],
    ids_BP: Int[Array, "B P"],
    lengths_B: Int[Array, " B"],
    chunk: int,
) -> tuple[tuple[LayerCache, ...], Array, Array]:
    """Fill the committed caches of all stages and of the draft.

    Returns them, the final hidden state `[B, D]`, and of which prompts all that this rank's stage made is finite.

    Args:
        ids_BP: prompts, padded on the right; P is at least the longest length rounded up to whole chunks, and at most
            the capacity of the caches.
    """
    plan = program.plan
    batch, anchors, size = ids_BP.shape[0], len(plan.anchors), program.target.hidden_size
    stage_index = ranks.stage_number(program) - 1
    where, owned = ranks.tap_slots(program)
    draft_slot = ranks.is_draft_slot(program)
    chunks = (jnp.max(lengths_B) + chunk - 1) // chunk
    projection = _whole_projection(params.aggregate[plan.anchor_type[-1]], size)
    dtype, last_start = params.embedding.dtype, ids_BP.shape[1] - chunk

    def tick(index: Array, carry: _Carry) -> _Carry:
        stage_chunk, draft_chunk = index - stage_index, index - plan.num_stages
        stage_valid = (stage_index >= 0) & (stage_chunk >= 0) & (stage_chunk < chunks)
        draft_valid = (draft_chunk >= 0) & ranks.is_draft_rank(program)
        stage_start = jnp.clip(stage_chunk * chunk, 0, last_start)
        draft_start = jnp.clip(draft_chunk * chunk, 0, last_start)
        entering = jax.lax.dynamic_slice_in_dim(ids_BP, jnp.clip(index * chunk, 0, last_start), chunk, axis=1)
        embedding = embed(jax.lax.psum(local_embedding(params.embedding, entering), AXIS), program.target)
        is_first = stage_index == 0
        x_BTD = jnp.where(is_first, embedding, carry.ring[:, :, 0])
        arrived = carry.ring[:, :, 1:]
        work = _Work(program, params, carry.caches, lengths_B, stage_start, x_BTD, draft_start, arrived, projection)
        hiddens, kept = work.run(stage_valid, draft_valid)

        taps = jnp.where(is_first & (jnp.arange(anchors) == 0)[:, None], embedding[:, :, None], arrived)
        made = jnp.where(owned[:, None], jnp.moveaxis(hiddens[where], 0, 2), taps[:, :, 1:])
        ring = shift(jnp.concatenate([hiddens[-1][:, :, None], taps[:, :, :1], made], axis=2))
        inside = lengths_B - 1 - stage_start
        picked = jnp.take_along_axis(hiddens[-1], jnp.clip(inside, 0, chunk - 1)[:, None, None], axis=1)[:, 0]
        ends_here = stage_valid & (stage_index == plan.num_stages - 1) & (inside >= 0) & (inside < chunk)
        final = jnp.where(ends_here[:, None], picked, carry.final)
        valid_BT = stage_valid & (stage_start + jnp.arange(chunk, dtype=jnp.int32) < lengths_B[:, None])
        finite = carry.finite & jnp.all(jnp.isfinite(hiddens[-1]) | ~valid_BT[..., None], axis=(1, 2))
        written: list[LayerCache] = []
        for slot, cache in enumerate(carry.caches):
            if isinstance(cache, RecurrentCache):
                written.append(keep_running(cache, kept[slot]))
                continue
            where_to = jnp.where(draft_slot[slot], draft_start, stage_start)
            valid = jnp.where(draft_slot[slot], draft_valid, stage_valid)
            written.append(write_chunk(cache, where_to, valid, *kept[slot]))
        return _Carry(tuple(written), ring, final, finite)

    ring = jnp.zeros((batch, chunk, 1 + anchors, size), dtype)
    start = _Carry(caches, varying(ring), varying(jnp.zeros((batch, size), dtype)), varying(jnp.ones((batch,), bool)))
    end = jax.lax.fori_loop(0, chunks + plan.num_stages, tick, start)
    caches = tuple(end_running(c) if isinstance(c, RecurrentCache) else c for c in end.caches)
    return caches, jax.lax.psum(end.final, AXIS), end.finite


def _whole_projection(slice_DF: Array, size: int) -> Array:
    """The projection whose output rows are spread over the ranks, whole on every rank (for the time of the prefill)."""
    ranks_total = jax.lax.axis_size(AXIS)
    here = jnp.arange(ranks_total) == jax.lax.axis_index(AXIS)
    placed = jnp.where(here[:, None, None], slice_DF, jnp.zeros((), slice_DF.dtype))
    return jax.lax.psum(placed, AXIS).reshape(-1, slice_DF.shape[1])[:size]


def prefill(
    program: Program,
    mode: Mode,
    params: PipelineParams,
    request: Request,
    caches: tuple[LayerCache, ...],
    ids_BP: Array,
    lengths_B: Array,
    limit_B: Array,
    keys_B: Array,
    chunk: int,
) -> tuple[DecodeState, Array, Array]:
    """Prefill, draw the first token, set up the first cycle; returns the state, the token and its log-probability."""
    plan = program.plan
    batch, size, stages, columns = ids_BP.shape[0], program.target.hidden_size, plan.num_stages, plan.num_columns
    caches, final, finite = prefill_chunks(program, params, caches, ids_BP, lengths_B, chunk)
    dtype = final.dtype
    token, log_prob, head_fault = first_token(program, params, mode, request, final, lengths_B, keys_B)
    finished = jnp.any(token[:, None] == request.eos, axis=1) | (limit_B <= 1)
    stage_fault = gather_ranks((~finite).astype(jnp.int32)) != 0
    fault = jnp.stack([stage_fault, jnp.zeros_like(stage_fault), head_fault], axis=1)
    width = mode.tree.width
    root = lone_child(token, jnp.zeros_like(lengths_B), width)
    alone = jnp.concatenate([lengths_B[:, None], jnp.full((batch, stages - 1), -1, jnp.int32)], axis=1)
    control = Control(
        stage_position=jnp.where(finished[:, None], -1, alone),
        departed=jnp.full((batch,), -1, jnp.int32),
        committed=lengths_B,
        drafted=lengths_B,
        newest=lengths_B,
        nodes=enter_column(no_nodes(batch, columns, width), lengths_B, jnp.ones((batch,), bool), root),
        drops=jnp.zeros((batch,), jnp.int32),
        emitted=jnp.ones((batch,), jnp.int32),
        active=~finished,
        limit=limit_B,
        keys=keys_B,
        cycle=jnp.int32(0),
        fault=fault,
    )
    embedding = embed(psum_packed(local_embedding(params.embedding, root.token)), program.target)
    taps = Taps(
        taps=jnp.zeros((batch, stages, width, len(plan.anchors), size), dtype),
        features=jnp.zeros((batch, stages, width, size), dtype),
        newest=embedding,
    )
    log_q = None
    if mode.draws:
        log_q = varying(jnp.full((batch, columns, width, params.embedding.shape[0]), -jnp.inf, jnp.float32))
    return DecodeState(control, taps, varying(embedding), caches, log_q), token, log_prob
