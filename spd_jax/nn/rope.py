"""Rotary position embeddings (arXiv 2104.09864) in the half-split layout, with the scalings of the field.

Scalings: `linear` (position interpolation, arXiv 2306.15595), `llama3` (Llama 3.1's wavelength-dependent factor) and
`yarn` (arXiv 2309.00071, attention factor included). Inverse frequencies are host constants computed in float32, the
arithmetic that models are trained and published with: an angle grows with the position, and with it the last bit of a
frequency. (From float64 they differ in that bit, and draft logits of the published fixture by 7e-6 instead of 5e-6.)
A rotary embedding may turn only the front of each head. This module knows nothing of layers.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from spd_jax import struct
from spd_jax.config.model import AttentionConfig, RopeConfig


@struct.dataclass
class RopeTable:
    """Cosines and sines `[B, T, h]` in float32, h pairs of dimensions, the attention factor multiplied in."""

    cos: Array
    sin: Array


def _yarn(config: RopeConfig, rotary_dim: int, inv_freq: np.ndarray) -> tuple[np.ndarray, float]:
    original = _original_max_position(config)

    def correction_dim(rotations: float) -> float:
        return rotary_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = correction_dim(config.beta_fast), correction_dim(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    ramp = np.clip((np.arange(rotary_dim // 2) - low) / max(high - low, 0.001), 0.0, 1.0)
    scaled = inv_freq / config.factor * ramp + inv_freq * (1.0 - ramp)

    def mscale(factor: float, scale: float = 1.0) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0

    if config.attention_factor is not None:
        attention_factor = config.attention_factor
    elif config.mscale and config.mscale_all_dim:
        attention_factor = mscale(config.factor, config.mscale) / mscale(config.factor, config.mscale_all_dim)
    else:
        attention_factor = mscale(config.factor)
    return scaled, attention_factor


def _llama3(config: RopeConfig, inv_freq: np.ndarray) -> np.ndarray:
    original = _original_max_position(config)
    wavelength = 2 * math.pi / inv_freq
    low, high = original / config.low_freq_factor, original / config.high_freq_factor
    smooth = (original / wavelength - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    between = (1.0 - smooth) * inv_freq / config.factor + smooth * inv_freq
    return np.where(wavelength > low, inv_freq / config.factor, np.where(wavelength < high, inv_freq, between))


def _original_max_position(config: RopeConfig) -> int:
    if config.original_max_position is None:
        raise ValueError(f"rope type {config.kind!r} needs original_max_position_embeddings, found none")
    return config.original_max_position


def inverse_frequencies(config: RopeConfig, rotary_dim: int) -> tuple[np.ndarray, float]:
    """Inverse frequencies of so many dimensions, a half as many (radians a position), and the factor on cosines and
    sines."""
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    inv_freq = np.float32(1.0) / np.power(np.float32(config.theta), exponents)
    if config.kind == "default":
        return inv_freq, 1.0
    if config.kind == "linear":
        return inv_freq / config.factor, 1.0
    if config.kind == "llama3":
        return _llama3(config, inv_freq), 1.0
    if config.kind == "yarn":
        return _yarn(config, rotary_dim, inv_freq)
    raise ValueError(f"rope type {config.kind!r} is not supported; supported: default, linear, llama3, yarn")


def rope_table(config: AttentionConfig, positions: Int[Array, "B T"]) -> RopeTable:
    """The table for absolute token positions; a negative position (an empty row) gets that of position 0."""
    inv_freq, factor = inverse_frequencies(config.rope, config.rotary_dim)
    angles = jnp.maximum(positions, 0).astype(jnp.float32)[..., None] * jnp.asarray(inv_freq, jnp.float32)
    return RopeTable(jnp.cos(angles) * jnp.float32(factor), jnp.sin(angles) * jnp.float32(factor))


def apply_rope(x: Float[Array, "... H"], cos: Float[Array, "... h"], sin: Float[Array, "... h"]) -> Array:
    """Rotate the pairs (x[i], x[i + h]) by the table's h angles; arithmetic in float32, result in x's dtype.

    Dimensions from 2 h on stay as they are.
    """
    pairs = cos.shape[-1]
    x32 = x.astype(jnp.float32)
    first, second, rest = x32[..., :pairs], x32[..., pairs : 2 * pairs], x32[..., 2 * pairs :]
    turned = [first * cos - second * sin, second * cos + first * sin, rest]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
