"""Weights without files: a random model of any shape, to measure with and to test with."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from spd_jax.config.model import AttentionConfig, LayerConfig, MlpConfig, ModelConfig, NormConfig, RopeConfig
from spd_jax.models.shapes import parameter_shapes


def dense_layer(
    hidden_size: int,
    intermediate_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    eps: float = 1e-5,
    rope: RopeConfig | None = None,
    **attention: Any,
) -> LayerConfig:
    """The plain layer of most families; `attention` are further fields of its attention."""
    mixer = AttentionConfig(num_heads, num_kv_heads, head_dim, rope or RopeConfig(), **attention)
    return LayerConfig(hidden_size, NormConfig(eps), mixer, MlpConfig(intermediate_size))


class RandomWeights:
    """`TargetWeights` of a random model: the same seed and path give the same numbers, whatever else is asked for.

    Attention is sharp and the MLP strong (three times unit gain), since with plain unit gain greedy text soon repeats
    one token and a test on it proves little. Norms lie around 1 and biases around 0, so that a forgotten one shows.
    """

    def __init__(self, config: ModelConfig, seed: int = 0):
        self.config = config
        self.origin = f"random weights, seed {seed}"
        self._seed = seed
        self._shapes = parameter_shapes(config)

    def paths(self) -> list[str]:
        """Every canonical path, in the order of the forward pass."""
        return list(self._shapes)

    def tensor(self, path: str) -> np.ndarray:
        """One parameter in float32."""
        shape = self._shapes[path]
        noise = np.random.default_rng([self._seed, zlib.crc32(path.encode())]).standard_normal(shape, np.float32)
        if path.endswith("delta.norm.weight"):  # never zero-centred
            return 1.0 + np.float32(0.1) * noise
        if path.endswith("norm.weight"):
            return np.float32(not self.config.norm.zero_centred) + np.float32(0.1) * noise
        if path.endswith("a_log"):  # decays that leave something of many positions
            return np.float32(-2.0) + np.float32(0.5) * noise
        if path.endswith("bias"):
            return np.float32(0.1) * noise
        if path == "embedding":
            return np.float32(0.3) * noise
        gain = 3.0 if path.endswith(("qkv.weight", "down.weight", "mlp.down")) else 1.0
        return noise * np.float32(gain * shape[-1] ** -0.5)
