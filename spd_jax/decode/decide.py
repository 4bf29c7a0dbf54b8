"""The control of a cycle: what is asked of the heads, and what their answer does to every sequence.

Replicated: every rank computes the same from the same numbers, there is no controller. Knows positions, rows and
events, no hidden states and no caches.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array

from spd_jax import struct
from spd_jax.decode.heads import Forced, Question, Request
from spd_jax.decode.state import ACCEPTED, FILL, IDLE, REJECTED, UNDRAFTED, Control, Log
from spd_jax.decode.tree import (
    Children,
    Nodes,
    Proposals,
    Tree,
    best_children,
    choose,
    column_positions,
    enter_column,
    first_row,
    forced_children,
    in_column,
    lone_child,
    survive,
)
from spd_jax.decode.verify import Siblings, Verdict


def ask(request: Request, control: Control) -> Question:
    """What the heads are to verify and to draft for."""
    nodes = control.nodes
    leaving = control.stage_position[:, -1]
    target_position, draft_position = leaving + 1, control.newest + 1
    is_tested = (leaving >= 0) & (control.newest > leaving)
    tested = Siblings(
        in_column(nodes.token, target_position), in_column(nodes.alive, target_position) & is_tested[:, None]
    )
    rows = jnp.arange(nodes.token.shape[2], dtype=jnp.int32)
    draw = control.drops[:, None] * len(rows) + rows
    leaving_row = first_row(in_column(nodes.alive, leaving))
    forced = None if request.forced is None else _forced_column(request.forced, draft_position)
    return Question(tested, target_position, leaving_row, draft_position, draw, control.keys, forced)


def _forced_column(forced: Forced, position_B: Array) -> Forced:
    last = forced.token.shape[1] - 1
    at = jnp.minimum(position_B, last)[:, None, None]
    token = jnp.take_along_axis(forced.token, at, axis=1)[:, 0]
    is_chain = token.shape[1] == 1
    parent = jnp.zeros_like(token) if is_chain else jnp.take_along_axis(forced.parent, at, axis=1)[:, 0]
    return Forced(jnp.where((position_B <= last)[:, None], token, -1), parent)


def decide(
    tree: Tree, request: Request, control: Control, question: Question, verdict: Verdict, found: Proposals
) -> tuple[Control, Log]:
    """Accept, reject, refill or end: the replicated control of the next cycle, and what happened in this one."""
    nodes, width = control.nodes, control.nodes.token.shape[2]
    has_stages = control.stage_position.shape[1] > 1
    leaves = control.active & (control.stage_position[:, -1] >= 0)
    is_tested = jnp.any(question.tested.alive, axis=1)
    accepted = leaves & is_tested & verdict.accept
    rejected = leaves & is_tested & ~verdict.accept
    undrafted = leaves & ~is_tested

    kept, youngest = survive(
        nodes, control.newest, question.target_position, verdict.row, leaves, accepted, tree.survivors
    )
    youngest = jnp.where(leaves, youngest, control.newest)
    dropped = jnp.where(accepted | rejected, control.newest - youngest, 0)
    flushed = rejected | undrafted
    if tree.rollback == "full":
        flushed |= accepted & (dropped > 0)
        dropped = jnp.where(flushed & accepted, control.newest - question.target_position, dropped)
    whole = ~flushed & (dropped == 0)
    parents = jnp.where(whole[:, None], in_column(kept.alive, control.newest), in_column(nodes.alive, control.newest))
    drafted = _drafted(kept, control, question, parents, found)
    grows = whole & jnp.any(drafted.alive, axis=1)
    position = jnp.where(flushed, question.target_position, question.draft_position)
    lone = lone_child(verdict.token, question.leaving_row, width)
    entering = choose(flushed, lone, drafted)
    enters = flushed | grows
    newest = jnp.where(enters, position, youngest)

    emitted = control.emitted + leaves.astype(jnp.int32)
    is_eos = jnp.any(verdict.token[:, None] == request.eos, axis=1)
    active = control.active & ~(leaves & (is_eos | (emitted >= control.limit)))
    moved = control.stage_position[:, :-1]
    moved = jnp.where((moved > youngest[:, None]) | flushed[:, None], -1, moved)
    stage_position = jnp.concatenate([jnp.where(enters, position, -1)[:, None], moved], axis=1)
    kept = enter_column(kept, position, enters & active, entering)
    event = jnp.select([~control.active, accepted, rejected, undrafted], [IDLE, ACCEPTED, REJECTED, UNDRAFTED], FILL)
    before = question.tested.alive & (jnp.arange(width) < verdict.row[:, None])
    branch = jnp.sum(before, axis=1, dtype=jnp.int32) if width > 1 else jnp.zeros_like(newest)
    columns = jnp.sum(stage_position >= 0, axis=1, dtype=jnp.int32)
    live = _live_rows(kept, newest, stage_position) if width > 1 else columns
    shown = (control.active & has_stages)[:, None] & drafted.alive
    log = Log(
        event.astype(jnp.int32),
        jnp.where(leaves, verdict.token, -1),
        jnp.zeros(leaves.shape, jnp.float32),
        jnp.where(accepted, branch, -1),
        jnp.where(active, dropped, 0),
        jnp.where(active, columns, 0),
        jnp.where(active, live, 0),
        jnp.where(shown, drafted.token, -1),
        jnp.where(shown, drafted.parent, -1),
    )
    return struct.replace(
        control,
        stage_position=jnp.where(active[:, None], stage_position, -1),
        departed=jnp.where(leaves & active, control.stage_position[:, -1], -1),
        committed=control.committed + leaves.astype(jnp.int32),
        drafted=control.drafted + (control.departed >= 0).astype(jnp.int32),
        newest=jnp.where(active, newest, control.newest),
        nodes=kept,
        drops=control.drops + (dropped > 0).astype(jnp.int32),
        emitted=emitted,
        active=active,
        cycle=control.cycle + 1,
    ), log


def _drafted(kept: Nodes, control: Control, question: Question, parents_BW: Array, found: Proposals) -> Children:
    """The next column: the best of what the draft proposes for its parents, or what a script puts in its place."""
    children = best_children(kept, control.newest, parents_BW, found)
    if question.forced is None:
        return children
    forced = forced_children(kept, control.newest, parents_BW, question.forced.token, question.forced.parent)
    return choose(jnp.any(question.forced.token >= 0, axis=1), forced, children)


def _live_rows(nodes: Nodes, newest_B: Array, stage_position_BS: Array) -> Array:
    """Live rows of all columns in flight."""
    positions = column_positions(newest_B, nodes.token.shape[1])
    in_flight = jnp.any(positions[:, :, None] == stage_position_BS[:, None], axis=2)
    return jnp.sum(nodes.alive & in_flight[..., None], axis=(1, 2), dtype=jnp.int32)
