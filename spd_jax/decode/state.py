"""The state of pipelined decoding: one frozen pytree of static shapes.

Sharded part (`[R, ...]` over axis `stage`): caches, the hidden state that enters each rank's stage, stored draft
distributions. Replicated part: control, the same on every rank, because every rank decides by itself.

Axes: B sequences, C = n + 1 window columns (position p in column p mod C), W branches. Stage entries are explicit:
which position is in which stage, -1 for none; a position's depth is the number of stages it has completed.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from spd_jax import struct

# What happened to a sequence in a cycle (`Log.event`).
IDLE, FILL, ACCEPTED, REJECTED, UNDRAFTED = 0, 1, 2, 3, 4


@struct.dataclass
class Control:
    """Replicated control.

    `stage_position` `[B, n]`: position in stage s + 1, -1 none; `departed` `[B]`: position that left in the last cycle
    and whose draft keys are still to be committed, -1 none; `committed`, `drafted` `[B]`: lengths of the target's and
    the draft's committed caches; `newest` `[B]`: youngest position in flight; `token` `[B, C, W]`: tokens of the
    columns; `emitted` `[B]`: generated tokens so far; `active` `[B]`; `limit` `[B]`: tokens to generate; `keys` `[B]`;
    `cycle` `[]`: cycles done; `fault` `[R, 3]`: a number that is not finite came from a rank's stage, from its draft
    layers, from its share of the heads.
    """

    stage_position: Array
    departed: Array
    committed: Array
    drafted: Array
    newest: Array
    token: Array
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
    """Everything that a cycle reads and writes. `log_q` `[R, B, C, V/R]` is None when greedy."""

    control: Control
    taps: Taps
    hidden: Array
    caches: tuple[Any, ...]
    log_q: Array | None


@struct.dataclass
class Log:
    """What each of up to K cycles of a dispatch did, `[K, B]`: event, the verified token (-1 none), its log-probability
    under the target, and the token drafted for the position after the newest (-1 none)."""

    event: Array
    token: Array
    log_prob: Array
    draft: Array


def empty_log(cycles: int, batch: int) -> Log:
    """A log in which nothing has happened."""
    shape = (cycles, batch)
    nothing = jnp.full(shape, -1, jnp.int32)
    return Log(jnp.zeros(shape, jnp.int32), nothing, jnp.zeros(shape, jnp.float32), nothing)
