"""The memory of one gated-delta-net slot by position: a ring, so that undoing drafts is only a change of counters.

Column p mod C holds the memories after position p, one a row (branch), which go on from their parents' in column
(p - 1) mod C.
C = n columns are enough for n stages: when position u is replaced, the layer has seen at most u + n - 2, so that the
memory after u - 1 is still there. Nothing is committed: what is verified stays until it is overwritten.

This module does not know which positions are in flight: callers pass columns.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from spd_jax import struct
from spd_jax.cache.batch import each_sequence
from spd_jax.config.model import DeltaNetConfig
from spd_jax.nn.deltanet import Memory, empty_memory


@struct.dataclass
class RecurrentCache:
    """Memories of the last positions, `[B, C, W, ...]` each."""

    ring: Memory


def empty_recurrent_cache(
    kind: DeltaNetConfig, batch: int, columns: int, width: int, dtype: Any, leading: tuple[int, ...] = ()
) -> RecurrentCache:
    """Memories of nothing; `leading` axes (the rank axis) come first."""
    return RecurrentCache(empty_memory(kind, width, dtype, (*leading, batch, columns)))


def read_memory(cache: RecurrentCache, column_B: Int[Array, " B"], row_BW: Int[Array, "B W"] | None = None) -> Memory:
    """The memories `[B, W, ...]` of each sequence in these rows of its column (None: in all)."""

    def read(x: Array) -> Array:
        column = jax.vmap(lambda columns, at: jax.lax.dynamic_index_in_dim(columns, at, keepdims=False))(x, column_B)
        if row_BW is None or x.shape[2] == 1:
            return column
        return jnp.take_along_axis(column, row_BW.reshape(*row_BW.shape, *[1] * (column.ndim - 2)), axis=1)

    return jax.tree.map(read, cache.ring)


def write_memory(cache: RecurrentCache, column_B: Int[Array, " B"], memory: Memory) -> RecurrentCache:
    """Put each sequence's memories `[B, W, ...]` into its column."""

    def write(row: Any, ring: Memory) -> Memory:
        def put(old: Array, new: Array) -> Array:
            at = (row, column_B[row], *[0] * (old.ndim - 2))
            one = jax.lax.dynamic_slice_in_dim(new, row, 1)[:, None].astype(old.dtype)
            return jax.lax.dynamic_update_slice(old, one, at)

        return jax.tree.map(put, ring, memory)

    return RecurrentCache(each_sequence(column_B.shape[0], write, cache.ring))


def running_memory(cache: RecurrentCache) -> Memory:
    """What a prefill keeps in the first row of column 0, `[B, ...]`."""
    return jax.tree.map(lambda ring: ring[:, 0, 0], cache.ring)


def keep_running(cache: RecurrentCache, memory: Memory) -> RecurrentCache:
    """The cache with this running memory."""
    return RecurrentCache(jax.tree.map(lambda ring, x: ring.at[:, 0, 0].set(x.astype(ring.dtype)), cache.ring, memory))


def end_running(cache: RecurrentCache) -> RecurrentCache:
    """The running memory in all rows of all columns: what the next position goes on from, wherever it looks."""
    memory = running_memory(cache)
    return RecurrentCache(
        jax.tree.map(lambda ring, x: jnp.broadcast_to(x[:, None, None], ring.shape), cache.ring, memory)
    )
