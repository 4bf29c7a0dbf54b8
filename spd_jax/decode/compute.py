"""The compute step of a cycle: this rank's stage layers on its one column, or the draft layers on the staircase.

Stage: the column's new keys go into its window column; its rows attend to the committed region and to the nodes that
they descend from. Draft: the rows of every column in flight by depth 0..n - 1 (the position that has completed so many
stages), and of the column that has just left the pipeline the one row that was right; they attend to the draft's
committed region and to the nodes that they descend from. Only the departed row's keys are kept: they are final, the
rest of the staircase is recomputed in every cycle. A gated delta net goes on from the memory of each row's parent, and
keeps the memories after its column.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from spd_jax.cache.entries import AttentionCache, Window, window_rows, write_column
from spd_jax.cache.layer import LayerCache
from spd_jax.cache.recurrent import read_memory
from spd_jax.config.model import AttentionConfig
from spd_jax.decode import ranks
from spd_jax.decode.roles import run_slots, stack_hiddens, switch_roles
from spd_jax.decode.state import Control, DecodeState
from spd_jax.decode.tree import column_positions, first_row, in_column, pick_row
from spd_jax.models.decoder import Ropes
from spd_jax.nn.attention import attend_by_position, cache_layout
from spd_jax.nn.decoder_layer import Past
from spd_jax.nn.deltanet import Recurrence
from spd_jax.nn.layers import Attend, project
from spd_jax.parallel.stack import PipelineParams, Program


def _descends(lineage_BTC: Array, width: int) -> Array:
    """`[B, T, C * W]`: which nodes rows descend from (or are)."""
    is_row = lineage_BTC[..., None] == jnp.arange(width, dtype=jnp.int32)
    return is_row.reshape(*is_row.shape[:2], -1)


def _stage_attend(cache: AttentionCache, control: Control, position_B: Array) -> Attend:
    columns, width = cache.window.v.shape[2:4]
    positions = column_positions(control.newest, columns)
    inside = positions >= control.committed[:, None]
    live = jnp.repeat(inside, width, axis=1)[:, None]
    if width > 1:
        live = live & _descends(in_column(control.nodes.lineage, position_B), width)
    positions = jnp.repeat(positions, width, axis=1)

    def attend(q: Array, k: Array, v: Array, config: AttentionConfig) -> tuple[Array, Window]:
        k, v = cache_layout(k, v)
        window = write_column(cache.window, position_B % columns, position_B >= 0, k, v)
        asking = jnp.broadcast_to(position_B[:, None], q.shape[:2])
        prefix, rows = (cache.k, cache.v), window_rows(window)
        mixed = attend_by_position(q, prefix, control.committed, rows, asking, positions, config, live_BTC=live)
        return mixed, window

    return attend


def _stage_past(cache: LayerCache, control: Control, position_B: Array) -> Past:
    if isinstance(cache, AttentionCache):
        return _stage_attend(cache, control, position_B)
    lineage, is_there = in_column(control.nodes.lineage, position_B), position_B >= 0
    rows = jnp.broadcast_to(jnp.arange(lineage.shape[1], dtype=jnp.int32), lineage.shape[:2])
    before = jnp.broadcast_to(((position_B - 1) % lineage.shape[2])[:, None, None], (*rows.shape, 1))
    parents = jnp.take_along_axis(lineage, before, axis=2)[..., 0]
    # A row without a position changes nothing: it gets the memory of the column that it will be written back to.
    column = jnp.where(is_there, position_B - 1, position_B) % cache.ring.state.shape[1]
    memory = read_memory(cache, column, jnp.where(is_there[:, None], parents, rows))
    return Recurrence(memory, valid=jnp.broadcast_to(is_there[:, None], rows.shape), branches=True)


def _unchanged(cache: LayerCache, position_B: Array) -> Any:
    """What a slot keeps that did not run."""
    if isinstance(cache, AttentionCache):
        return cache.window
    return read_memory(cache, position_B % cache.ring.state.shape[1])


def _staircase(control: Control) -> tuple[Array, Array | None]:
    """Positions of the draft's rows `[B, n W + 1]` (by depth and row, the departed one last; -1: no column), and which
    of them each descends from `[B, n W + 1, n W + 1]` (None: all before it)."""
    nodes = control.nodes
    columns, width = nodes.token.shape[1:]
    in_flight = jnp.repeat(control.stage_position, width, axis=1)
    positions = jnp.concatenate([in_flight, control.departed[:, None]], axis=1)
    if width == 1:
        return positions, None
    stages = control.stage_position.shape[1]
    lineage = jnp.take_along_axis(nodes.lineage, (control.stage_position % columns)[..., None, None], axis=1)
    lineage = lineage.reshape(lineage.shape[0], stages * width, columns)
    of_keys = jnp.take_along_axis(lineage, (in_flight % columns)[:, None], axis=2)  # [B, n W, n W]
    descends = of_keys == jnp.tile(jnp.arange(width, dtype=jnp.int32), stages)
    # All descend from the departed node; what it does not descend from comes after it.
    return positions, jnp.pad(descends, ((0, 0), (0, 1), (0, 1)), constant_values=True)


def _draft_past(cache: LayerCache, control: Control, positions_BT: Array, live_BTT: Array | None) -> Past:
    assert isinstance(cache, AttentionCache)  # draft layers attend to everything
    columns = cache.window.v.shape[2]

    def attend(q: Array, k: Array, v: Array, config: AttentionConfig) -> tuple[Array, Window]:
        k, v = cache_layout(k, v)
        prefix = (cache.k, cache.v)
        mixed = attend_by_position(
            q, prefix, control.drafted, (k, v), positions_BT, positions_BT, config, live_BTC=live_BTT
        )
        departed = (control.drafted % columns, control.departed >= 0)
        return mixed, write_column(cache.window, *departed, k[..., -1:], v[:, :, -1:])

    return attend


def stage_position(program: Program, control: Control) -> Array:
    """`[B]`: the position in this rank's stage, -1 for none."""
    index = ranks.stage_number(program) - 1
    position_B = jnp.take(control.stage_position, jnp.maximum(index, 0), axis=1)
    return jnp.where(index >= 0, position_B, -1)


def compute(
    program: Program, params: PipelineParams, state: DecodeState
) -> tuple[Array, Array, tuple[Any, ...], Array]:
    """Run this rank's role.

    Returns:
        hidden states after each of the stage's layers `[slots, B, W, D]` (zeros without a stage), the draft's hidden
        states of the newest column `[B, W, D]` (zeros elsewhere), what all slots keep (the window of attention, the
        memories of a gated delta net), and whether all that counts of a sequence is finite: `[2, B]`, of the stage and
        of the draft.
    """
    control, taps, table = state.control, state.taps, program.slots
    batch, width, size = state.hidden.shape
    position_B = stage_position(program, control)
    kinds = table.kinds

    def stage(slots: tuple[int, ...]) -> tuple[Array, dict[int, Any]]:
        hiddens, kept = run_slots(
            slots,
            kinds,
            params.slots,
            state.hidden,
            Ropes(jnp.broadcast_to(position_B[:, None], (batch, width))),
            lambda s: _stage_past(state.caches[s], control, position_B),
        )
        return stack_hiddens(hiddens, table.max_stage_slots), kept

    positions, live = _staircase(control)

    def draft(slots: tuple[int, ...]) -> tuple[Array, dict[int, Any]]:
        newest = project(taps.newest, params.newest)
        in_flight = jnp.concatenate([newest[:, None], taps.features[:, :-1]], axis=1).reshape(batch, -1, size)
        row = first_row(in_column(control.nodes.alive, control.departed))
        departed = pick_row(taps.features[:, -1], row)[:, None]
        hiddens, kept = run_slots(
            slots,
            kinds,
            params.slots,
            jnp.concatenate([in_flight, departed], axis=1),
            Ropes(positions),
            lambda s: _draft_past(state.caches[s], control, positions, live),
        )
        depth = jnp.argmax(control.stage_position, axis=1)  # of the newest position: 0 without bubbles
        rows = hiddens[-1][:, :-1].reshape(batch, -1, width, size)
        return jnp.take_along_axis(rows, depth[:, None, None, None], axis=1)[:, 0], kept

    dtype = state.hidden.dtype
    drafting = jnp.any(control.active) & (program.plan.num_stages > 1)
    with jax.named_scope("compute"):
        hiddens, drafted, windows = switch_roles(
            table,
            jnp.any(position_B >= 0),
            drafting & ranks.is_draft_rank(program),
            stage,
            draft,
            lambda slot: _unchanged(state.caches[slot], position_B),
            jax.ShapeDtypeStruct((table.max_stage_slots, batch, width, size), dtype),
            jax.ShapeDtypeStruct((batch, width, size), dtype),
        )
    stage_finite = jnp.all(jnp.isfinite(hiddens[-1]), axis=(1, 2)) | (position_B < 0)
    draft_finite = jnp.all(jnp.isfinite(drafted), axis=(1, 2)) | ~control.active
    return hiddens, drafted, windows, jnp.stack([stage_finite, draft_finite])
