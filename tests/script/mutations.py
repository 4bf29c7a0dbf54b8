"""Ways to break an input, drawn by hypothesis: files that cannot be right, and files that may or may not be.

Knows formats, not what is right in them.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from hypothesis import strategies as st

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 4242\n"
HTML = b"<!DOCTYPE html><html><body>404: Not Found</body></html>"
VALUES: list[Any] = [None, True, False, 0, 1, -1, 2, 3, 7, 64, 257, 1000, 10**6, 2**31, 2**63, 10**30, 0.5, -0.5, 1.5]
VALUES += [
    1e308,
    1e-320,
    float("nan"),
    float("inf"),
    "",
    "x",
    "1",
    "null",
    "\ud83d",
    "\0",
    "é😀",
    "a" * 5000,
    "float16",
]
VALUES += [
    [],
    {},
    [None],
    [[1]],
    ["x"],
    [0],
    [1, 2, 3],
    {"x": 1},
    {"a": {"b": []}},
    [0] * 300,
    [-1, 2**40],
    "../..",
    "/",
]
TEMPLATES = [
    "{{ raise_exception('no') }}", "{{ 1 / 0 }}", "{% for %}", "{{ messages[7]['content'] }}", "{{ nothing.at.all }}",
    "", "hello", "{{ messages }}", "{{ messages[0]['content'] | tojson }}", "{% if %}", "{{ '\ud83d' }}", "{{ bos",
    "{{ messages[0]['content'][0]['text'] }}", "{% for m in messages %}{{ m.content.nothing }}{% endfor %}",
    "{{ strftime_now('%Y') }}{{ messages[0]['content'] }}", "{{ messages[0]['content'] * 1000 }}", "{{ unknown() }}",
    "{% generation %}{{ messages[0]['content'] }}{% endgeneration %}", "{% include 'x' %}", "{{ range(9999999999) }}",
    "{{ ().__class__.__bases__ }}",
]  # fmt: skip
ODD = ["\ud83d".encode("utf-8", "surrogatepass"), b"\xff", b"\0", b"\xef\xbb\xbf", "\u2028".encode(), b"}", b"\n", b'"']


@dataclasses.dataclass(frozen=True)
class Broken:
    """One file with other contents: None for no file, a folder where `folder` is set."""

    file: str
    data: bytes | None = dataclasses.field(repr=False)
    how: str
    folder: bool = False

    def apply(self, root: Path) -> None:
        """Break the file of this name under `root`."""
        path = root / self.file
        path.unlink()
        if self.folder:
            path.mkdir()
        elif self.data is not None:
            path.write_bytes(self.data)


@st.composite
def ruined(draw: st.DrawFn, root: Path, files: tuple[str, ...]) -> Broken:
    """A file that is no such file any more."""
    file = draw(st.sampled_from(files))
    data = (root / file).read_bytes()
    how = draw(st.sampled_from(["missing", "empty", "folder", "pointer", "page", "cut", "zeros", "other"]))
    if how == "folder":
        return Broken(file, None, how, folder=True)
    if how == "other":
        other = draw(st.sampled_from([name for name in files if Path(name).suffix != Path(file).suffix] or ["."]))
        return Broken(file, HTML if other == "." else (root / other).read_bytes(), f"is {other}")
    length = draw(st.integers(1, len(data) - 1)) if how == "cut" else 0
    found = {
        "missing": None,
        "empty": b"",
        "pointer": LFS,
        "page": HTML,
        "cut": data[:length],
        "zeros": bytes(len(data)),
    }
    return Broken(file, found[how], f"{how} {length}" if how == "cut" else how)


@st.composite
def changed(draw: st.DrawFn, root: Path, files: tuple[str, ...]) -> Broken:
    """A file in which something is different."""
    file = draw(st.sampled_from(files))
    data, kind = (root / file).read_bytes(), Path(file).suffix
    if kind in (".json", ".jsonl", ".yaml", ".safetensors") and draw(st.integers(0, 3)):
        made = {".json": _json, ".jsonl": _jsonl, ".yaml": _yaml, ".safetensors": _safetensors}[kind]
        found, how = draw(made(data))
        return Broken(file, found, how)
    place = draw(st.integers(0, len(data) - 1))
    if draw(st.booleans()):
        bit = draw(st.integers(0, 7))
        return Broken(file, data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :], f"bit {bit} of {place}")
    odd = draw(st.sampled_from(ODD))
    return Broken(file, data[:place] + odd + data[place:], f"{odd!r} at {place}")


@st.composite
def _tree(draw: st.DrawFn, tree: Any) -> tuple[Any, str]:
    """A tree of JSON with one value replaced, left out, renamed or doubled."""
    tree = copy.deepcopy(tree)
    *way, last = draw(st.sampled_from(list(_places(tree)) or [()])) or (None,)
    if last is None:
        value = draw(st.sampled_from(VALUES))
        return value, f"is {value!r:.40}"
    at = tree
    for step in way:
        at = at[step]
    where, how = (
        ".".join(map(str, [*way, last])),
        draw(st.sampled_from(["value"] * 4 + ["left out", "renamed", "deep"])),
    )
    if last == "chat_template":
        at[last] = draw(st.sampled_from(TEMPLATES))
        return tree, f"template {at[last]!r}"
    if how == "value":
        at[last] = draw(st.sampled_from(VALUES))
        return tree, f"{where} = {at[last]!r:.40}"
    value = at.pop(last)
    if how == "renamed" and isinstance(at, dict):
        at[f"{last}_"] = value
    elif how == "deep" and isinstance(at, dict):
        at[last] = {"deep": {last: value}}
    return tree, f"{where} {how}"


def _places(tree: Any) -> Iterator[tuple[Any, ...]]:
    """Ways to all values in a tree, those of long lists by their first two."""
    items = (
        list(tree.items()) if isinstance(tree, dict) else list(enumerate(tree))[:2] if isinstance(tree, list) else []
    )
    for key, value in items:
        yield (key,)
        yield from ((key, *rest) for rest in _places(value))


def _dump(tree: Any) -> bytes:
    return json.dumps(tree).encode()  # surrogates as escapes, NaN and Infinity as Python writes them


@st.composite
def _json(draw: st.DrawFn, data: bytes) -> tuple[bytes, str]:
    tree, how = draw(_tree(json.loads(data)))
    return _dump(tree), how


@st.composite
def _jsonl(draw: st.DrawFn, data: bytes) -> tuple[bytes, str]:
    lines = data.splitlines()
    number = draw(st.integers(0, len(lines) - 1))
    lines[number], how = draw(_json(lines[number]))
    return b"\n".join(lines) + b"\n", f"line {number + 1}: {how}"


@st.composite
def _yaml(draw: st.DrawFn, data: bytes) -> tuple[bytes, str]:
    tree, how = draw(_tree(yaml.safe_load(data)))
    return yaml.safe_dump(tree).encode("utf-8", "surrogatepass"), how


@st.composite
def _safetensors(draw: st.DrawFn, data: bytes) -> tuple[bytes, str]:
    """Another header, or a number that is none."""
    (size,) = struct.unpack("<Q", data[:8])
    header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    names = [name for name in header if name != "__metadata__"]
    if draw(st.booleans()):
        name = draw(st.sampled_from(names))
        start, end = header[name]["data_offsets"]
        number = draw(st.sampled_from([np.nan, np.inf, -np.inf, 3e38]))
        filled = np.full((end - start) // 4, number, np.float32).tobytes()
        return data[: 8 + size] + body[:start] + filled + body[end:], f"{name} is {number}"
    header, how = draw(_tree(header))
    text = _dump(header)
    return struct.pack("<Q", len(text)) + text + body, f"header: {how}"
