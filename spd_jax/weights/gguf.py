"""Tensors and metadata of a GGUF file, dequantised one tensor at a time by the gguf package.

Knows the number formats, but no model: what names and metadata mean is in `spd_jax.models`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

from spd_jax.files import cause_of
from spd_jax.models.shapes import Shape
from spd_jax.weights.errors import WeightsError, listed
from spd_jax.weights.gguf_header import read_header

_PLAIN: dict[str, Any] = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F64": np.float64,
    "I8": np.int8,
    "I16": np.int16,
    "I32": np.int32,
    "I64": np.int64,
}


class GgufFile:
    """A GGUF file as a `DescribedSource`: F32, F16 and BF16 in their stored dtype, every quantised type as float32.

    Raises:
        WeightsError: not a GGUF file, a truncated one, or one with a type that the gguf package cannot dequantise.
    """

    def __init__(self, path: Path):
        self.origin = str(path)
        try:
            header = read_header(path)
        except ValueError as error:
            raise WeightsError(f"{path}: {error}; it has {path.stat().st_size} bytes{cause_of(path)}") from error
        self.metadata: Mapping[str, Any] = header.metadata
        self._data = np.frombuffer(header.data, np.uint8)
        self._tensors = header.tensors
        self._shapes = {name: entry.shape for name, entry in header.tensors.items()}
        self._kinds = {name: _kind_name(entry.kind) for name, entry in header.tensors.items()}
        readable = {kind: kind in _PLAIN or _can_dequantise(kind) for kind in set(self._kinds.values())}
        unreadable = [f"{name} is {kind}" for name, kind in self._kinds.items() if not readable[kind]]
        if unreadable:
            raise WeightsError(
                f"{path}: tensors of types that the gguf package cannot dequantise: {listed(unreadable)}; "
                "supported: F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, the K-quants and most IQ types"
            )
        cut = [name for name, entry in self._tensors.items() if entry.start + self._size(name) > len(self._data)]
        if cut:
            size = len(self._data)
            raise WeightsError(f"{path}: truncated: its {size} bytes end within {len(cut)} tensor(s): {listed(cut)}")

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Shape of every tensor, outermost axis first (GGUF writes it the other way round)."""
        return self._shapes

    @property
    def dtypes(self) -> Mapping[str, str]:
        """GGUF's name of the type of every tensor, such as Q4_1."""
        return self._kinds

    def read(self, name: str) -> np.ndarray:
        """One tensor on the host; a view of the mapped file where the type needs no dequantising."""
        entry, kind = self._tensors[name], self._kinds[name]
        raw = self._data[entry.start : entry.start + self._size(name)]
        if kind in _PLAIN:
            return raw.view(_PLAIN[kind]).reshape(entry.shape)
        rows = raw.reshape(math.prod(entry.shape[:-1]), -1)
        return dequantize(rows, GGMLQuantizationType[kind]).astype(np.float32, copy=False).reshape(entry.shape)

    def _size(self, name: str) -> int:
        """Bytes of a tensor's data."""
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[self._kinds[name]]]
        return math.prod(self._tensors[name].shape) // block * block_bytes


def _kind_name(number: int) -> str:
    try:
        return GGMLQuantizationType(number).name
    except ValueError:
        return f"of unknown type {number}"


def _can_dequantise(kind: str) -> bool:
    """Whether the gguf package has code for a type: tried on one block of zeros."""
    if kind not in GGMLQuantizationType.__members__:
        return False
    number = GGMLQuantizationType[kind]
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[number][1]), np.uint8), number)
    except (RuntimeError, KeyError):
        return False
    return True
