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
from spd_jax.decode.heads import Mode, Question, Request, answer
from spd_jax.decode.state import ACCEPTED, FILL, IDLE, REJECTED, UNDRAFTED, Control, DecodeState, Log, Taps
from spd_jax.decode.verify import Verdict
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
    hiddens, drafted, kept, finite = compute(program, params, state)
    with jax.named_scope("exchange"):
        incoming = shift(hiddens[-1])
        final, drafted, new_taps, fault = _exchange(program, hiddens, drafted, finite)
    question = _question(program, request, control)
    with jax.named_scope("heads"):
        verdict, log_prob, log_q = answer(
            program, params, mode, request, final[:, 0], drafted[:, 0], question, state.log_q
        )
    new_control, log = decide(program, request, control, question, verdict)
    fault = jnp.concatenate([fault, verdict.fault[:, None]], axis=1)
    new_control = struct.replace(new_control, fault=control.fault | fault)
    with jax.named_scope("enter"):
        entering = jnp.take_along_axis(
            new_control.token, (new_control.newest % program.plan.num_columns)[:, None, None], axis=1
        )[:, 0]
        taps = enter(program, params, state.taps, new_taps, entering)
        hidden = jnp.where(ranks.stage_number(program) == 1, taps.newest, incoming)
    with jax.named_scope("commit"):
        caches = _commit(program, state, kept)
    return DecodeState(new_control, taps, hidden, caches, log_q), struct.replace(log, log_prob=log_prob)


def _exchange(program: Program, hiddens: Array, drafted: Array, finite: Array) -> tuple[Array, Array, Array, Array]:
    """One packet: final hidden state `[B, W, D]`, draft hidden state, taps `[B, W, m - 1, D]`, faults `[R, 2]`."""
    output = hiddens[-1]
    is_last = ranks.stage_number(program) == program.plan.num_stages
    final = jnp.where(is_last, output, jnp.zeros_like(output))
    where, owned = ranks.tap_slots(program)
    taps = jnp.moveaxis(hiddens[where], 0, 2)
    taps = jnp.where(owned[:, None], taps, jnp.zeros_like(taps))
    here = jnp.arange(program.plan.num_ranks) == jax.lax.axis_index(AXIS)
    fault = (here[:, None] & ~finite).astype(output.dtype)
    final, drafted, taps, fault = psum_packed((final, drafted, taps, fault))
    return final, drafted, taps, fault != 0


def _question(program: Program, request: Request, control: Control) -> Question:
    columns = program.plan.num_columns
    leaving = control.stage_position[:, -1]
    target_position = leaving + 1
    draft_position = control.newest + 1
    tested = jnp.take_along_axis(control.token[:, :, 0], (target_position % columns)[:, None], axis=1)[:, 0]
    is_tested = (leaving >= 0) & (control.newest > leaving)
    forced = None
    if request.forced is not None:
        last = request.forced.shape[1] - 1
        forced = jnp.take_along_axis(request.forced, jnp.minimum(draft_position, last)[:, None], axis=1)[:, 0]
        forced = jnp.where(draft_position <= last, forced, -1)
    return Question(tested, is_tested, target_position, draft_position, control.keys, forced)


def decide(
    program: Program, request: Request, control: Control, question: Question, verdict: Verdict
) -> tuple[Control, Log]:
    """Accept, reject, refill or end: the replicated control of the next cycle, and what happened in this one."""
    columns = program.plan.num_columns
    leaves = control.active & (control.stage_position[:, -1] >= 0)
    accepted = leaves & question.is_tested & verdict.accept
    rejected = leaves & question.is_tested & ~verdict.accept
    undrafted = leaves & ~question.is_tested
    flushed = rejected | undrafted
    verified = jnp.where(accepted, question.tested, verdict.token)
    newest = jnp.where(flushed, question.target_position, question.draft_position)
    entering = jnp.where(flushed, verdict.token, verdict.draft)
    emitted = control.emitted + leaves.astype(jnp.int32)
    is_eos = jnp.any(verified[:, None] == request.eos, axis=1)
    active = control.active & ~(leaves & (is_eos | (emitted >= control.limit)))

    following = jnp.where(flushed[:, None], -1, control.stage_position[:, :-1])
    stage_position = jnp.concatenate([newest[:, None], following], axis=1)
    here = jnp.arange(columns) == (newest % columns)[:, None]
    token = jnp.where(here[..., None], entering[:, None, None], control.token)
    running = active[:, None]
    event = jnp.select([~control.active, accepted, rejected, undrafted], [IDLE, ACCEPTED, REJECTED, UNDRAFTED], FILL)
    log = Log(
        event.astype(jnp.int32),
        jnp.where(leaves, verified, -1),
        jnp.zeros(verified.shape, jnp.float32),
        jnp.where(control.active & (program.plan.num_stages > 1), verdict.draft, -1),
    )
    return Control(
        stage_position=jnp.where(running, stage_position, -1),
        departed=jnp.where(leaves & active, control.stage_position[:, -1], -1),
        committed=control.committed + leaves.astype(jnp.int32),
        drafted=control.drafted + (control.departed >= 0).astype(jnp.int32),
        newest=jnp.where(active, newest, control.newest),
        token=jnp.where(running[..., None], token, control.token),
        emitted=emitted,
        active=active,
        limit=control.limit,
        keys=control.keys,
        cycle=control.cycle + 1,
        fault=control.fault,
    ), log


def enter(program: Program, params: PipelineParams, taps: Taps, new: Array, token_BW: Array) -> Taps:
    """Move taps one depth on, add those of this cycle, fuse where the type changes; look up what enters stage 1.

    The fused features are sharded over their output dimension: each rank computes its slice from the same taps, and one
    packet carries the slices and the embedding.
    """
    plan, changes = program.plan, program.changes
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


def _commit(program: Program, state: DecodeState, kept: tuple[Any, ...]) -> tuple[LayerCache, ...]:
    control, columns = state.control, program.plan.num_columns
    draft_slot = ranks.is_draft_slot(program)
    here = stage_position(program, control)
    caches = []
    for slot, (cache, new) in enumerate(zip(state.caches, kept, strict=True)):
        if not isinstance(cache, AttentionCache):
            caches.append(write_memory(cache, here % cache.ring.state.shape[1], new))
            continue
        position = jnp.where(draft_slot[slot], control.drafted, control.committed)
        caches.append(commit_column(AttentionCache(cache.k, cache.v, new), position % columns, position))
    return tuple(caches)
