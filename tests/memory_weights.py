"""Weights of a model in memory, in the place of those of a file."""

from __future__ import annotations

import jax
import numpy as np
from flax import nnx

from spd_jax.models.decoder import Decoder
from spd_jax.weights.load import canonical_path


class DecoderWeights:
    """`TargetWeights` of a model in memory; the numbers are the model's own."""

    def __init__(self, decoder: Decoder):
        self.config = decoder.config
        self.origin = "model in memory"
        flat = nnx.to_flat_state(nnx.state(decoder, nnx.Param))
        self._values = {canonical_path(path): variable for path, variable in flat}

    def paths(self) -> list[str]:
        """Every canonical path."""
        return list(self._values)

    def tensor(self, path: str) -> np.ndarray:
        """One parameter in the model's dtype."""
        return np.asarray(jax.device_get(self._values[path][...]))
