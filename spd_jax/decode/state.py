"""The state of pipelined decoding: one frozen pytree of static shapes.

Sharded part (`[R, ...]` over axis `stage`): caches, the hidden state that enters each rank's stage, stored draft
distributions. Replicated part: control, the same on every rank, because every rank decides by itself.

Axes: B sequences, C = n + 1 window columns (position p in column p mod C), W branches. Stage entries are explicit:
which position is in which stage, -1 for none; a position's depth is the number of stages it has completed.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from spd_jax import struct
from spd_jax.decode.tree import Nodes

# What happened to a sequence in a cycle (`Log.event`).
IDLE, FILL, ACCEPTED, REJECTED, UNDRAFTED = 0, 1, 2, 3, 4


@struct.dataclass
class Control:
    """Replicated control.

    `stage_position` `[B, n]`: position in stage s + 1, -1 none; `departed` `[B]`: position that left in the last cycle
    and whose draft keys are still to be committed, -1 none; `committed`, `drafted` `[B]`: lengths of the target's and
    the draft's committed caches; `newest` `[B]`: youngest position in flight; `nodes`: the draft tree; `drops` `[B]`:
    verdicts so far that dropped columns; `emitted` `[B]`: generated tokens so far; `active` `[B]`; `limit` `[B]`:
    tokens to generate; `keys` `[B]`; `cycle` `[]`: cycles done; `fault` `[R, 3, B]`: a number that is not finite
    came from a rank's stage, from its draft layers, from its share of the heads.
    """

    stage_position: Array
    departed: Array
    committed: Array
    drafted: Array
    newest: Array
    nodes: Nodes
    drops: Array
    emitted: Array
    active: Array
    limit: Array
    keys: Array
    cycle: Array
    fault: Array


@struct.dataclass
class Taps:
    """What the draft reads, by depth 1..n (depth n is the departed position): taps `[B, n, W, m, D]`, fused features
    `[B, n, W, D]`, and the embedding of the newest position `[B, W, D]` (depth 0)."""

    taps: Array
    features: Array
    newest: Array


@struct.dataclass
class DecodeState:
    """Everything that a cycle reads and writes. `log_q` `[R, B, C, W, V/R]`, what each node of the
    column before drew its children from, is None where nothing is drawn."""

    control: Control
    taps: Taps
    hidden: Array
    caches: tuple[Any, ...]
    log_q: Array | None


@struct.dataclass
class Log:
    """What each of up to K cycles of a dispatch did, `[K, B]`.

    Event; the verified token (-1 none); its log-probability under the target; the rank among its siblings of the draft
    that was right (0 the best, -1 none); how many columns the verdict dropped while the text went on; how many columns
    and how many live rows are in flight after it. `[K, B, W]`: the column drafted for the position after the newest,
    tokens and their parents' rows (-1: no node). It enters where the event is a fill or an acceptance and nothing was
    dropped.
    """

    event: Array
    token: Array
    log_prob: Array
    branch: Array
    dropped: Array
    columns: Array
    live: Array
    draft: Array
    parent: Array


def empty_log(cycles: int, batch: int, width: int) -> Log:
    """A log in which nothing has happened."""
    shape = (cycles, batch)
    nothing, zero = jnp.full(shape, -1, jnp.int32), jnp.zeros(shape, jnp.int32)
    column = jnp.full((*shape, width), -1, jnp.int32)
    return Log(zero, nothing, jnp.zeros(shape, jnp.float32), nothing, zero, zero, zero, column, column)


def undrafted_entry(event_B: Array, token_B: Array, log_prob_B: Array) -> Log:
    """What one step did that drafts nothing."""
    nothing = jax.tree.map(lambda x: x[0], empty_log(1, token_B.shape[0], 1))
    return struct.replace(nothing, event=event_B, token=token_B, log_prob=log_prob_B)
