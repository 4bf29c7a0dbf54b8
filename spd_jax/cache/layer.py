"""The cache of one layer slot, of whatever kind its layer is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from spd_jax.cache.entries import AttentionCache, empty_cache, grow_cache
from spd_jax.cache.recurrent import RecurrentCache, empty_recurrent_cache
from spd_jax.config.model import AttentionConfig, LayerConfig

LayerCache = AttentionCache | RecurrentCache


def empty_layer_cache(
    kind: LayerConfig,
    batch: int,
    capacity: int,
    num_stages: int,
    width: int,
    dtype: Any,
    leading: tuple[int, ...] = (),
) -> LayerCache:
    """Zeros for a pipeline of `num_stages`; `leading` axes (the rank axis) come first."""
    if isinstance(kind.mixer, AttentionConfig):
        return empty_cache(kind.mixer, batch, capacity, num_stages + 1, width, dtype, leading)
    return empty_recurrent_cache(kind.mixer, batch, num_stages, width, dtype, leading)


def grow_layer_cache(cache: LayerCache, capacity: int) -> LayerCache:
    """The same cache with room for more positions; a ring has room for all."""
    return grow_cache(cache, capacity) if isinstance(cache, AttentionCache) else cache


def capacity_of(caches: Iterable[LayerCache]) -> int:
    """Positions that the committed regions hold."""
    return next(cache.v.shape[-2] for cache in caches if isinstance(cache, AttentionCache))
