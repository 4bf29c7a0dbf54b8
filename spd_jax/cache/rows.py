"""Caches of all layers of one device without an in-flight window: keys `[B, K, H, S]` and values `[B, K, S, H]` of
attention, the memory of gated delta nets.

What autoregressive decoding keeps. Which positions are valid is kept elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from spd_jax import struct
from spd_jax.cache.batch import each_sequence
from spd_jax.config.model import AttentionConfig, LayerConfig
from spd_jax.nn.deltanet import Memory, empty_memory


@struct.dataclass
class LayerCaches:
    """Keys and values of the layers with attention, memories of the others, each in the order of the layers."""

    k: tuple[Array, ...]
    v: tuple[Array, ...]
    memories: tuple[Memory, ...]

    @property
    def capacity(self) -> int:
        """Positions that there is room for."""
        return self.v[0].shape[2]


def empty_caches(layers: Sequence[LayerConfig], batch: int, capacity: int, dtype: Any) -> LayerCaches:
    """Caches of nothing."""
    mixers = [layer.mixer for layer in layers]
    attention = [mixer for mixer in mixers if isinstance(mixer, AttentionConfig)]
    return LayerCaches(
        tuple(jnp.zeros((batch, c.num_kv_heads, c.head_dim, capacity), dtype) for c in attention),
        tuple(jnp.zeros((batch, c.num_kv_heads, capacity, c.head_dim), dtype) for c in attention),
        tuple(empty_memory(c, batch, dtype) for c in mixers if not isinstance(c, AttentionConfig)),
    )


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

    return each_sequence(start_B.shape[0], write, (k, v))


def grow_caches(caches: LayerCaches, capacity: int) -> LayerCaches:
    """The same caches with room for `capacity` positions."""
    room = (0, capacity - caches.capacity)
    return LayerCaches(
        tuple(jnp.pad(x, ((0, 0), (0, 0), (0, 0), room)) for x in caches.k),
        tuple(jnp.pad(x, ((0, 0), (0, 0), room, (0, 0))) for x in caches.v),
        caches.memories,
    )
