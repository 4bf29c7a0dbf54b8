"""Files that are whole or not there, and what is wrong with one that cannot be read. Knows no format but JSON."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any


def read_text(path: str | Path) -> str:
    """The text of a file in UTF-8.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not UTF-8, or something that stands in for a file; names the file, the place and the cause.
    """
    data = Path(path).read_bytes()
    if data and (cause := likely_cause(data)):
        raise ValueError(f"{path}: not the file that it should be{cause}")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        found = f"byte 0x{data[error.start]:02x} at offset {error.start}"
        raise ValueError(f"{path}: not UTF-8 text ({found}); save it as UTF-8") from error


def read_json(path: str | Path) -> Any:
    """What a JSON file holds.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no JSON; names the file, the place and, where the contents tell it, the cause.
    """
    text = read_text(path)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON: {error}{likely_cause(text.encode())}") from error


def read_object(path: str | Path) -> dict[str, Any]:
    """The object that a JSON file holds.

    Raises:
        OSError, ValueError: as `read_json`, or it holds something else.
    """
    found = read_json(path)
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected an object, found a {type(found).__name__}")
    return found


def cause_of(path: str | Path) -> str:
    """`likely_cause` of a file that a library could not read; says so of a folder."""
    if Path(path).is_dir():
        return "; it is a folder, expected a file"
    with Path(path).open("rb") as file:
        return likely_cause(file.read(4096))


def likely_cause(data: bytes) -> str:
    """What a file is instead of what it should be, to be added to an error; empty where nobody can tell."""
    if not data:
        return "; the file is empty"
    if data.startswith(b"version https://git-lfs"):
        return "; it is a Git LFS pointer, not the file itself: fetch that with `git lfs pull`"
    if data[:200].lstrip().lower().startswith((b"<!doctype html", b"<html")):
        return "; it is a web page, perhaps that of a download that was refused"
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "; it is UTF-16 text: save it as UTF-8"
    if not any(data[:4096]):
        return "; it holds zeros only, as a download that was broken off leaves it"
    return ""


def no_text(text: str) -> str:
    """What is wrong with a text that UTF-8 cannot hold, to be added to an error; empty for any other.

    JSON and YAML can spell half of a surrogate pair (an emoji that was cut), and bytes of a command line that are not
    UTF-8 become one.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        found = f"U+{ord(text[error.start]):04X}, at character {error.start}"
        return f"half of a surrogate pair, {found}: it is no text"
    return ""


def write_whole(path: str | Path, data: bytes) -> None:
    """Write a file beside its place and rename it, so that nobody ever sees half of it.

    A killed process may leave `.NAME.*.partial` beside it.
    """
    path = Path(path)
    descriptor, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".partial")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        Path(partial).chmod(0o644)
        Path(partial).replace(path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
