"""Halves of surrogate pairs on their way through a JSON parser that knows none.

`ijson`'s fast parser turns the escape of half a pair (an emoji that was cut) into a question mark, or ends with an
error that names no place. `Halves` replaces such escapes in the bytes by a mark and four digits, `restored` puts the
halves back into what was parsed. Knows nothing of records.
"""

from __future__ import annotations

import re
from io import BufferedIOBase
from typing import Any

_MARK = "\ufdd0"  # a noncharacter: Unicode keeps it for uses like this one
_OF_ESCAPES = b"\\uU0123456789abcdefABCDEF"
_LONE = re.compile(
    rb"(?<!\\)((?:\\\\)*)\\u(?:"
    rb"([dD][89abAB][0-9a-fA-F]{2})(?!\\u[dD][c-fC-F])|"
    rb"(?<!\\u[dD][89abAB][0-9a-fA-F]{2}\\u)([dD][c-fC-F][0-9a-fA-F]{2}))"
)
_MARKED = re.compile(_MARK + "([0-9a-fA-F]{4})")


class Halves:
    """A file of JSON whose lone surrogates are marked; `found` says whether there was one so far."""

    def __init__(self, file: BufferedIOBase):
        self._file, self._held = file, b""
        self.found = False

    def read(self, size: int = -1) -> bytes:
        """Some bytes, as many as `size` or more or fewer; none at the end."""
        if size == 0:
            return b""
        while True:
            new = self._file.read(size)
            data, self._held = self._held + new, b""
            if new and size > 0:  # an escape may go on in the bytes to come
                cut = len(data.rstrip(_OF_ESCAPES))
                data, self._held = data[:cut], data[cut:]
            if data or not new:
                return self._marked(data)

    def _marked(self, data: bytes) -> bytes:
        if b"\\ud" not in data and b"\\uD" not in data:
            return data
        marked, count = _LONE.subn(lambda match: match[1] + rb"\ufdd0" + (match[2] or match[3]), data)
        self.found |= count > 0
        return marked


def restored(tree: Any) -> Any:
    """A tree of JSON with the halves that were marked."""
    if isinstance(tree, str):
        return _MARKED.sub(lambda match: chr(int(match[1], 16)), tree)
    if isinstance(tree, list):
        return [restored(one) for one in tree]
    if isinstance(tree, dict):
        return {restored(key): restored(value) for key, value in tree.items()}
    return tree
