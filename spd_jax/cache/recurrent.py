"""The memory of one gated-delta-net slot by position: a ring, so that undoing drafts is only a change of counters.

Column p mod C holds the memory after position p, which goes on from that in column (p - 1) mod C.
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
from spd_jax.config.model import DeltaNetConfig
from spd_jax.nn.deltanet import Memory, empty_memory


@struct.dataclass
class RecurrentCache:
    """Memories of the last positions, `[B, C, ...]` each."""

    ring: Memory


def empty_recurrent_cache(
    kind: DeltaNetConfig, batch: int, columns: int, dtype: Any, leading: tuple[int, ...] = ()
) -> RecurrentCache:
    """Memories of nothing; `leading` axes (the rank axis) come first."""
    one = empty_memory(kind, batch, dtype, leading)
    axis = len(leading) + 1
    return RecurrentCache(jax.tree.map(lambda x: jnp.stack([x] * columns, axis), one))


def read_memory(cache: RecurrentCache, column_B: Int[Array, " B"]) -> Memory:
    """The memory of each sequence in its column."""

    def read(x: Array) -> Array:
        rows = [jax.lax.dynamic_slice_in_dim(x[row], column_B[row], 1, axis=0) for row in range(x.shape[0])]
        return jnp.concatenate(rows)

    return jax.tree.map(read, cache.ring)


def write_memory(cache: RecurrentCache, column_B: Int[Array, " B"], memory: Memory) -> RecurrentCache:
    """Put each sequence's memory into its column."""

    def write(ring: Array, new: Array) -> Array:
        for row in range(ring.shape[0]):  # unrolled: a batched update would become a scatter
            at = (row, column_B[row], *[0] * (ring.ndim - 2))
            ring = jax.lax.dynamic_update_slice(ring, new[row][None, None].astype(ring.dtype), at)
        return ring

    return RecurrentCache(jax.tree.map(write, cache.ring, memory))


def fill_columns(cache: RecurrentCache, memory: Memory) -> RecurrentCache:
    """The same memory in every column: what the next position goes on from, wherever it looks."""
    return RecurrentCache(jax.tree.map(lambda ring, x: jnp.broadcast_to(x[:, None], ring.shape), cache.ring, memory))
