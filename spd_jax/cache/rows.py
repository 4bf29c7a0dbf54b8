"""Caches of all layers of one device, keys `[B, K, H, S]` and values `[B, K, S, H]`, without an in-flight window.

What autoregressive decoding keeps. Which positions are valid is kept elsewhere.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

UNROLLED_WRITES = 8  # sequences
Layers = tuple[Array, ...]


def write_rows(k: Layers, v: Layers, new_k: Layers, new_v: Layers, start_B: Int[Array, " B"]) -> tuple[Layers, Layers]:
    """Put new rows (keys `[B, K, H, T]`, values `[B, K, T, H]`) at each sequence's start, where they must fit."""

    def write(b: Any, caches: tuple[Layers, Layers]) -> tuple[Layers, Layers]:
        def put(old: Array, new: Array, at: tuple[Any, ...]) -> Array:
            return jax.lax.dynamic_update_slice(old, jax.lax.dynamic_slice_in_dim(new, b, 1), at)

        k, v = caches
        return (
            tuple(put(old, new, (b, 0, 0, start_B[b])) for old, new in zip(k, new_k, strict=True)),
            tuple(put(old, new, (b, 0, start_B[b], 0)) for old, new in zip(v, new_v, strict=True)),
        )

    # One write a sequence: a batched update would become a scatter. Unrolled for few, since a loop costs time of its
    # own; for many it is a loop, since so many writes times so many layers would take minutes to compile.
    if start_B.shape[0] > UNROLLED_WRITES:
        return jax.lax.fori_loop(0, start_B.shape[0], write, (k, v))
    for b in range(start_B.shape[0]):
        k, v = write(b, (k, v))
    return k, v


def grow_rows(k: Layers, v: Layers, capacity: int) -> tuple[Layers, Layers]:
    """The same caches with room for `capacity` positions."""
    room = (0, capacity - v[0].shape[2])
    return (
        tuple(jnp.pad(x, ((0, 0), (0, 0), (0, 0), room)) for x in k),
        tuple(jnp.pad(x, ((0, 0), (0, 0), room, (0, 0))) for x in v),
    )
