"""The attention cache of one layer slot: a committed region and an in-flight window.

Committed region (keys `[B, K, H, S]`, values `[B, K, S, H]`): positions that are final, append only, read up to a
length that is kept elsewhere. Window (keys `[B, K, H, C, W]`, values `[B, K, C, W, H]`): position p in flight sits in
column p mod C (C = n + 1), so undoing drafts is only a change of counters. Committing copies a window column to its
place in the committed region; it always happens, at the place where the next position will go, and counts only if the
length is advanced: no branch, hence no copy of the cache.

This module does not know which positions are in flight: callers pass columns, lengths and masks.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from spd_jax import struct
from spd_jax.cache.batch import each_sequence
from spd_jax.config.model import AttentionConfig


@struct.dataclass
class Window:
    """Keys `[B, K, H, C, W]` and values `[B, K, C, W, H]` of in-flight columns."""

    k: Array
    v: Array


@struct.dataclass
class AttentionCache:
    """Committed keys `[B, K, H, S]` and values `[B, K, S, H]`, and the in-flight window, of one layer slot."""

    k: Array
    v: Array
    window: Window


def empty_cache(
    kind: AttentionConfig,
    batch: int,
    capacity: int,
    columns: int,
    width: int,
    dtype: Any,
    leading: tuple[int, ...] = (),
) -> AttentionCache:
    """Zeros; `leading` axes (the rank axis) come first."""
    front, size = (*leading, batch, kind.num_kv_heads), kind.head_dim
    return AttentionCache(
        jnp.zeros((*front, size, capacity), dtype),
        jnp.zeros((*front, capacity, size), dtype),
        Window(jnp.zeros((*front, size, columns, width), dtype), jnp.zeros((*front, columns, width, size), dtype)),
    )


def write_column(window: Window, column_B: Int[Array, " B"], valid_B: Bool[Array, " B"], k: Array, v: Array) -> Window:
    """Put new rows (keys `[B, K, H, W]`, values `[B, K, W, H]`; one row alone goes to all) into a column of each
    sequence.

    Sequences that are not valid keep their window as it is.
    """
    columns = window.v.shape[2]
    here = (jnp.arange(columns) == column_B[:, None]) & valid_B[:, None]
    return Window(
        jnp.where(here[:, None, None, :, None], k[:, :, :, None], window.k),
        jnp.where(here[:, None, :, None, None], v[:, :, None], window.v),
    )


def window_rows(window: Window) -> tuple[Array, Array]:
    """The window as plain rows: keys `[B, K, H, C * W]`, values `[B, K, C * W, H]`."""
    batch, heads, columns, width, size = window.v.shape
    rows = columns * width
    return window.k.reshape(batch, heads, size, rows), window.v.reshape(batch, heads, rows, size)


def commit_column(
    cache: AttentionCache, column_B: Int[Array, " B"], row_B: Int[Array, " B"], position_B: Int[Array, " B"]
) -> AttentionCache:
    """Copy one row of a window column of each sequence to a position of the committed region.

    Positions must be below the capacity (dynamic_update_slice would clamp them onto live rows): callers keep spare
    rows.
    """
    _, heads, _, _, size = cache.window.v.shape

    def commit(row: Any, committed: tuple[Array, Array]) -> tuple[Array, Array]:
        k, v = committed
        column, branch, position = column_B[row], row_B[row], position_B[row]
        new_k = jax.lax.dynamic_slice(cache.window.k, (row, 0, 0, column, branch), (1, heads, size, 1, 1))[..., 0]
        new_v = jax.lax.dynamic_slice(cache.window.v, (row, 0, column, branch, 0), (1, heads, 1, 1, size))[:, :, :, 0]
        k = jax.lax.dynamic_update_slice(k, new_k, (row, 0, 0, position))
        return k, jax.lax.dynamic_update_slice(v, new_v, (row, 0, position, 0))

    k, v = each_sequence(cache.k.shape[0], commit, (cache.k, cache.v))
    return AttentionCache(k, v, cache.window)


def write_chunk(
    cache: AttentionCache, start: Int[Array, ""], valid: Bool[Array, ""], k: Array, v: Array
) -> AttentionCache:
    """Write rows (keys `[B, K, H, T]`, values `[B, K, T, H]`) at `start` of the committed region; it must fit.

    Nothing is written if not valid.
    """

    def write(old: Array, new: Array, at: tuple[Any, ...]) -> Array:
        kept = jax.lax.dynamic_slice(old, at, new.shape)
        return jax.lax.dynamic_update_slice(old, jnp.where(valid, new, kept), at)

    return AttentionCache(write(cache.k, k, (0, 0, 0, start)), write(cache.v, v, (0, 0, start, 0)), cache.window)


def grow_cache(cache: AttentionCache, capacity: int) -> AttentionCache:
    """The same cache with room for more positions."""

    def pad(x: Array, axis: int) -> Array:
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, capacity - x.shape[axis])
        return jnp.pad(x, widths)

    return AttentionCache(pad(cache.k, -1), pad(cache.v, -2), cache.window)
