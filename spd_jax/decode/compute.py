"""The compute step of a cycle: this rank's stage layers on its one column, or the draft layers on the staircase.

Stage: the column's new keys go into its window column; it attends to the committed region and to the columns before it.
Draft: one row for each depth 0..n (row k is the position that has completed k stages; row n has just left the
pipeline); rows attend to the draft's committed region and to each other by position. Only the departed row's keys are
kept: they are final, the rest of the staircase is recomputed in every cycle. A gated delta net goes on from the memory
after the position before its column's, and keeps the memory after it.
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
from spd_jax.models.decoder import Ropes
from spd_jax.nn.attention import attend_by_position, cache_layout
from spd_jax.nn.decoder_layer import Past
from spd_jax.nn.deltanet import Recurrence
from spd_jax.nn.layers import Attend, project
from spd_jax.parallel.stack import PipelineParams, Program


def column_positions(control: Control, columns: int) -> Array:
    """`[B, C]`: the latest position <= newest that lives in each window column (it may have left the window's use)."""
    newest = control.newest[:, None]
    return newest - (newest - jnp.arange(columns, dtype=jnp.int32)) % columns


def _stage_attend(cache: AttentionCache, control: Control, position_B: Array) -> Attend:
    columns = cache.window.v.shape[2]
    positions = column_positions(control, columns)
    inside_BC = positions >= control.committed[:, None]

    def attend(q: Array, k: Array, v: Array, config: AttentionConfig) -> tuple[Array, Window]:
        k, v = cache_layout(k, v)
        window = write_column(cache.window, position_B % columns, position_B >= 0, k, v)
        asking = jnp.broadcast_to(position_B[:, None], q.shape[:2])
        prefix, rows = (cache.k, cache.v), window_rows(window)
        mixed = attend_by_position(q, prefix, control.committed, rows, asking, positions, config, live_BC=inside_BC)
        return mixed, window

    return attend


def _stage_past(cache: LayerCache, control: Control, position_B: Array) -> Past:
    if isinstance(cache, AttentionCache):
        return _stage_attend(cache, control, position_B)
    # A row without a position changes nothing: it gets the memory of the column that it will be written back to.
    before_B = jnp.where(position_B >= 0, position_B - 1, position_B)
    memory = read_memory(cache, before_B % cache.ring.state.shape[1])
    return Recurrence(memory, valid=(position_B >= 0)[:, None])


def _unchanged(cache: LayerCache, position_B: Array) -> Any:
    """What a slot keeps that did not run."""
    if isinstance(cache, AttentionCache):
        return cache.window
    return read_memory(cache, position_B % cache.ring.state.shape[1])


def _draft_past(cache: LayerCache, control: Control, positions_BT: Array) -> Past:
    assert isinstance(cache, AttentionCache)  # draft layers attend to everything
    return _draft_attend(cache, control, positions_BT)


def _draft_attend(cache: AttentionCache, control: Control, positions_BT: Array) -> Attend:
    columns = cache.window.v.shape[2]

    def attend(q: Array, k: Array, v: Array, config: AttentionConfig) -> tuple[Array, Window]:
        k, v = cache_layout(k, v)  # rows by depth, n + 1 of them
        prefix = (cache.k, cache.v)
        mixed = attend_by_position(q, prefix, control.drafted, (k, v), positions_BT, positions_BT, config)
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
        state at the newest position `[B, W, D]` (zeros elsewhere), what all slots keep (the window of attention, the
        memory of a gated delta net), and whether all that counts is finite: `[2]`, of the stage and of the draft.
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

    positions = jnp.concatenate([control.stage_position, control.departed[:, None]], axis=1)  # by depth 0..n

    def draft(slots: tuple[int, ...]) -> tuple[Array, dict[int, Any]]:
        newest = project(taps.newest, params.newest)
        x_BTD = jnp.concatenate([newest[:, None], taps.features], axis=1)[:, :, 0]
        hiddens, kept = run_slots(
            slots,
            kinds,
            params.slots,
            x_BTD,
            Ropes(positions),
            lambda s: _draft_past(state.caches[s], control, positions),
        )
        row = jnp.argmax(control.stage_position, axis=1)  # depth of the newest position: 0 without bubbles
        return jnp.take_along_axis(hiddens[-1], row[:, None, None], axis=1), kept

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
    stage_finite = jnp.all(jnp.isfinite(hiddens[-1]) | (position_B < 0)[:, None, None])
    draft_finite = jnp.all(jnp.isfinite(drafted) | ~control.active[:, None, None])
    return hiddens, drafted, windows, jnp.stack([stage_finite, draft_finite])
