"""The attention cache of one layer slot: a committed region and an in-flight window.

Committed region `[B, K, S, H]`: keys and values of positions that are final, append only, read up to a length that
is kept elsewhere. Window `[B, K, C, W, H]`: position p in flight sits in column p mod C (C = n + 1), so undoing drafts
is only a change of counters. Committing copies a window column to its place in the committed region; it always
happens, at the place where the next position will go, and counts only if the length is advanced: no branch, hence no
copy of the cache.

This module does not know which positions are in flight: callers pass columns, lengths and masks.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from spd_jax import struct
from spd_jax.config.model import LayerConfig


@struct.dataclass
class Window:
    """Keys and values of in-flight columns, `[B, K, C, W, H]` each."""

    k: Array
    v: Array


@struct.dataclass
class AttentionCache:
    """Committed keys and values `[B, K, S, H]` and the in-flight window of one layer slot."""

    k: Array
    v: Array
    window: Window


def empty_cache(
    kind: LayerConfig, batch: int, capacity: int, columns: int, width: int, dtype: Any, leading: tuple[int, ...] = ()
) -> AttentionCache:
    """Zeros; `leading` axes (the rank axis) come first."""
    committed = (*leading, batch, kind.num_kv_heads, capacity, kind.head_dim)
    window = (*leading, batch, kind.num_kv_heads, columns, width, kind.head_dim)
    return AttentionCache(
        jnp.zeros(committed, dtype),
        jnp.zeros(committed, dtype),
        Window(jnp.zeros(window, dtype), jnp.zeros(window, dtype)),
    )


def write_column(window: Window, column_B: Int[Array, " B"], valid_B: Bool[Array, " B"], k: Array, v: Array) -> Window:
    """Put new rows `[B, K, W, H]` into a column of each sequence; rows that are not valid leave the window as it is."""
    columns = window.k.shape[2]
    here = (jnp.arange(columns) == column_B[:, None]) & valid_B[:, None]
    here = here[:, None, :, None, None]
    return Window(jnp.where(here, k[:, :, None], window.k), jnp.where(here, v[:, :, None], window.v))


def window_rows(window: Window) -> tuple[Array, Array]:
    """The window as plain rows `[B, K, C * W, H]`."""
    batch, heads, columns, width, size = window.k.shape
    shape = (batch, heads, columns * width, size)
    return window.k.reshape(shape), window.v.reshape(shape)


def commit_column(cache: AttentionCache, column_B: Int[Array, " B"], position_B: Int[Array, " B"]) -> AttentionCache:
    """Copy branch 0 of a window column of each sequence to a position of the committed region.

    Positions must be below the capacity (dynamic_update_slice would clamp them onto live rows): callers keep spare
    rows.
    """
    k, v = cache.k, cache.v
    for row in range(k.shape[0]):  # unrolled: a batched update would become a scatter
        start = (row, 0, position_B[row], 0)

        def column(x: Array, row: int = row) -> Array:
            size = (1, x.shape[1], 1, 1, x.shape[4])
            return jax.lax.dynamic_slice(x, (row, 0, column_B[row], 0, 0), size)[:, :, :, 0]

        k = jax.lax.dynamic_update_slice(k, column(cache.window.k), start)
        v = jax.lax.dynamic_update_slice(v, column(cache.window.v), start)
    return AttentionCache(k, v, cache.window)


def write_chunk(
    cache: AttentionCache, start: Int[Array, ""], valid: Bool[Array, ""], k: Array, v: Array
) -> AttentionCache:
    """Write rows `[B, K, T, H]` at `start` of the committed region, or nothing if not valid (start must fit)."""

    def write(old: Array, new: Array) -> Array:
        at = (0, 0, start, 0)
        kept = jax.lax.dynamic_slice(old, at, new.shape)
        return jax.lax.dynamic_update_slice(old, jnp.where(valid, new, kept), at)

    return AttentionCache(write(cache.k, k), write(cache.v, v), cache.window)


def grow_cache(cache: AttentionCache, capacity: int) -> AttentionCache:
    """The same cache with room for more positions (the axis before the last of the committed region)."""

    def pad(x: Array) -> Array:
        widths = [(0, 0)] * x.ndim
        widths[-2] = (0, capacity - x.shape[-2])
        return jnp.pad(x, widths)

    return AttentionCache(pad(cache.k), pad(cache.v), cache.window)
