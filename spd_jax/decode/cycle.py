"""One decode cycle on one rank (arXiv 2605.30852; input-state schedule).

In order: compute (stage and draft behind one switch), exchange (hidden states to the next stage; one packet with the
final hidden state, the draft's and the taps), heads (sharded over the vocabulary on all ranks), decide (replicated),
enter (embedding of what enters stage 1, and the fused features), commit (caches, outside any conditional).

Runs inside a shard_map over axis `stage`; knows nothing of prompts, text or how many cycles follow.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from spd_jax import struct
from spd_jax.cache.entries import AttentionCache, commit_column
from spd_jax.cache.layer import LayerCache
from spd_jax.cache.recurrent import write_memory
from spd_jax.decode import ranks
from spd_jax.decode.compute import compute, stage_position
from spd_jax.decode.decide import ask, decide
from spd_jax.decode.heads import Mode, Request, answer
from spd_jax.decode.state import DecodeState, Log, Taps
from spd_jax.decode.tree import first_row, in_column, pick_row
from spd_jax.models.decoder import embed
from spd_jax.nn.layers import project
from spd_jax.parallel.mesh import AXIS, psum_packed, shift
from spd_jax.parallel.stack import PipelineParams, Program
from spd_jax.parallel.vocab import local_embedding


def cycle(
    program: Program, mode: Mode, params: PipelineParams, request: Request, state: DecodeState
) -> tuple[DecodeState, Log]:
    """Advance every sequence by one cycle; the log has one entry a sequence (`[B]` leaves)."""
    control = state.control
    question = ask(request, control)
    hiddens, drafted, kept, finite = compute(program, params, state)
    with jax.named_scope("exchange"):
        incoming = shift(hiddens[-1])
        final, drafted, new_taps, fault = exchange(program, question.leaving_row, hiddens, drafted, finite)
    with jax.named_scope("heads"):
        verdict, found, log_prob, log_q = answer(program, params, mode, request, final, drafted, question, state.log_q)
    new_control, log = decide(mode.tree, request, control, question, verdict, found)
    fault = jnp.concatenate([fault, verdict.fault[:, None]], axis=1)
    new_control = struct.replace(new_control, fault=control.fault | fault)
    with jax.named_scope("enter"):
        entering = in_column(new_control.nodes.token, new_control.newest)
        taps = enter(program, params, state.taps, new_taps, entering)
        hidden = jnp.where(ranks.stage_number(program) == 1, taps.newest, incoming)
    with jax.named_scope("commit"):
        caches = _commit(program, state, question.leaving_row, kept)
    return DecodeState(new_control, taps, hidden, caches, log_q), struct.replace(log, log_prob=log_prob)


def exchange(
    program: Program, leaving_row_B: Array, hiddens: Array, drafted: Array, finite: Array
) -> tuple[Array, Array, Array, Array]:
    """One packet: final hidden state `[B, D]` of the row that leaves, draft hidden states `[B, W, D]`, taps
    `[B, W, m - 1, D]`, faults `[R, 2, B]`."""
    output = pick_row(hiddens[-1], leaving_row_B)
    is_last = ranks.stage_number(program) == program.plan.num_stages
    final = jnp.where(is_last, output, jnp.zeros_like(output))
    where, owned = ranks.tap_slots(program)
    taps = jnp.moveaxis(hiddens[where], 0, 2)
    taps = jnp.where(owned[:, None], taps, jnp.zeros_like(taps))
    here = jnp.arange(program.plan.num_ranks) == jax.lax.axis_index(AXIS)
    fault = (here[:, None, None] & ~finite).astype(output.dtype)
    final, drafted, taps, fault = psum_packed((final, drafted, taps, fault))
    return final, drafted, taps, fault != 0


def enter(program: Program, params: PipelineParams, taps: Taps, new: Array, token_BW: Array) -> Taps:
    """Move taps one depth on, add those of this cycle, fuse where the type changes; look up what enters stage 1.

    The fused features are sharded over their output dimension: each rank computes its slice from the same taps, and one
    packet carries the slices and the embedding.
    """
    plan, changes = program.plan, program.plan.changes
    batch, depths, width, anchors, size = taps.taps.shape
    first = jnp.concatenate([taps.newest[:, :, None], jnp.zeros_like(new)], axis=2)[:, None]
    moved = jnp.concatenate([first, taps.taps[:, :-1]], axis=1)  # depths 1..n
    for index in range(1, anchors):
        moved = moved.at[:, plan.stage_of_anchor(index) - 1, :, index].set(new[:, :, index - 1])
    here = jnp.arange(plan.num_ranks) == jax.lax.axis_index(AXIS)
    slices = []
    for depth in changes:
        kind = plan.anchor_type[depth]
        known = moved[:, depth - 1, :, : kind + 1].reshape(batch, width, (kind + 1) * size)
        part = project(known, params.aggregate[kind])
        slices.append(jnp.where(here[:, None], part[:, :, None], jnp.zeros((), part.dtype)))
    embedding = local_embedding(params.embedding, token_BW)
    embedding, fused = psum_packed((embedding, jnp.stack(slices, axis=1)))
    embedding = embed(embedding, program.target)
    fused = fused.reshape(batch, len(changes), width, -1)[..., :size]
    features = [
        fused[:, changes.index(depth)] if depth in changes else taps.features[:, depth - 2]
        for depth in range(1, depths + 1)
    ]
    return Taps(moved, jnp.stack(features, axis=1), embedding)


def _commit(
    program: Program, state: DecodeState, leaving_row_B: Array, kept: tuple[Any, ...]
) -> tuple[LayerCache, ...]:
    """Write what this cycle made; the draft commits the column that departed before, the others what leaves now."""
    control, columns = state.control, program.plan.num_columns
    departed_row = first_row(in_column(control.nodes.alive, control.departed))
    draft_slot = ranks.is_draft_slot(program)
    here = stage_position(program, control)
    caches = []
    for slot, (cache, new) in enumerate(zip(state.caches, kept, strict=True)):
        if not isinstance(cache, AttentionCache):
            caches.append(write_memory(cache, here % cache.ring.state.shape[1], new))
            continue
        position = jnp.where(draft_slot[slot], control.drafted, control.committed)
        row = jnp.where(draft_slot[slot], departed_row, leaving_row_B)
        caches.append(commit_column(AttentionCache(cache.k, cache.v, new), position % columns, row, position))
    return tuple(caches)
