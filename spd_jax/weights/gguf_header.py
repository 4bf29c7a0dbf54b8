"""The header of a GGUF file: metadata and the table of tensors (format: docs/gguf.md of github.com/ggml-org/ggml).

Our own, because the gguf package's reader makes an array of every string: 4 s for a vocabulary of 49,000 tokens, where
this takes 0.1 s. Knows the container only, not what names and values mean.
"""

from __future__ import annotations

import dataclasses
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_ALIGNMENT = 32  # unless the file says otherwise


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """One tensor: shape (outermost axis first), the number of its type, and where its data starts in the file."""

    shape: tuple[int, ...]
    kind: int
    start: int


@dataclasses.dataclass(frozen=True)
class Header:
    """What a file says about itself; `data` is the whole file, mapped."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorEntry]
    data: mmap.mmap


def read_header(path: Path) -> Header:
    """Map a file and read its header.

    Raises:
        ValueError: not a GGUF file of version 2 or 3, or it ends within its header.
    """
    with path.open("rb") as file:
        if file.read(4) != _MAGIC:
            raise ValueError("it does not start with GGUF")
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        return _parse(data)
    except (struct.error, KeyError, UnicodeDecodeError) as error:
        raise ValueError(f"its header is damaged or ends too early ({type(error).__name__}: {error})") from error


def _parse(data: mmap.mmap) -> Header:
    cursor = _Cursor(data, 4)
    version = cursor.scalar("I")
    if version not in _VERSIONS:
        raise ValueError(f"it has GGUF version {version}, supported: 2 and 3, little-endian")
    num_tensors, num_fields = cursor.scalar("Q"), cursor.scalar("Q")
    metadata = {}
    for _ in range(num_fields):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("I"))
    entries = {}
    for _ in range(num_tensors):
        name = cursor.string()
        axes = cursor.scalars("Q", cursor.scalar("I"))  # innermost axis first
        entries[name] = (tuple(reversed(axes)), cursor.scalar("I"), cursor.scalar("Q"))
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    start = -(-cursor.place // alignment) * alignment
    tensors = {name: TensorEntry(shape, kind, start + offset) for name, (shape, kind, offset) in entries.items()}
    return Header(metadata, tensors, data)


class _Cursor:
    """A place in the file that moves over what is read."""

    def __init__(self, data: mmap.mmap, place: int):
        self.data = data
        self.place = place

    def scalars(self, code: str, count: int) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{count}{code}", self.data, self.place)
        self.place += struct.calcsize(f"<{count}{code}")
        return values

    def scalar(self, code: str) -> Any:
        return self.scalars(code, 1)[0]

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        """One after the other, in one loop: a vocabulary has hundreds of thousands."""
        found, data, place, size = [], self.data, self.place, len(self.data)
        for _ in range(count):
            start = place + 8
            place = start + int.from_bytes(data[place:start], "little")
            if place > size:
                raise struct.error(f"a string at byte {start} goes beyond the end")
            found.append(data[start:place].decode("utf-8"))
        self.place = place
        return found

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        item, count = self.scalar("I"), self.scalar("Q")
        if item in _SCALARS:
            return list(self.scalars(_SCALARS[item], count))
        return self.strings(count) if item == _STRING else [self.value(item) for _ in range(count)]
