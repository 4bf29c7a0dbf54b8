"""Tensors and metadata of a GGUF file, dequantised one tensor at a time.

Knows the container and its number formats, but no model: what names and metadata mean is in `spd_jax.models`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, dequantize

from spd_jax.models.family import Shape
from spd_jax.weights.errors import WeightsError

_PLAIN: dict[GGMLQuantizationType, Any] = {
    GGMLQuantizationType.F32: np.float32,
    GGMLQuantizationType.F16: np.float16,
    GGMLQuantizationType.BF16: ml_dtypes.bfloat16,
}


class GgufFile:
    """A GGUF file as a `DescribedSource`: F32, F16 and BF16 in their stored dtype, every quantised type as float32.

    Raises:
        WeightsError: not a GGUF file, or a truncated one.
    """

    def __init__(self, path: Path):
        self.origin = str(path)
        try:
            reader = GGUFReader(path)
        except (ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError) as error:
            size = path.stat().st_size
            raise WeightsError(f"{path}: not a GGUF file, damaged or truncated ({size} bytes): {error}") from error
        self.metadata: Mapping[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Shape of every tensor, outermost axis first (GGUF writes it the other way round)."""
        return {name: tuple(int(size) for size in reversed(tensor.shape)) for name, tensor in self._tensors.items()}

    @property
    def dtypes(self) -> Mapping[str, str]:
        """GGUF's name of the type of every tensor, such as Q4_1."""
        return {name: tensor.tensor_type.name for name, tensor in self._tensors.items()}

    def read(self, name: str) -> np.ndarray:
        """One tensor on the host.

        Raises:
            WeightsError: its quantised type is one that the gguf package cannot dequantise.
        """
        tensor = self._tensors[name]
        shape = tuple(int(size) for size in reversed(tensor.shape))
        plain = _PLAIN.get(tensor.tensor_type)
        if plain is not None:
            return np.ascontiguousarray(tensor.data).view(plain).reshape(shape)
        try:
            return dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False).reshape(shape)
        except (RuntimeError, KeyError) as error:
            raise WeightsError(
                f"{self.origin}: tensor {name} has type {tensor.tensor_type.name}, which the gguf package cannot "
                "dequantise; supported: F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 and the K-quants"
            ) from error
