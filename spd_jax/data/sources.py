"""Conversations from where they are kept: files, folders, installed packages and the Hugging Face hub.

    read_conversations(source, *, split=None, skip_invalid=False) -> Iterator[Conversation | Skipped]
    source_digest(source, *, split=None) -> str

| source | read as |
|---|---|
| `org/name`, `org/name:config` | a data set of the hub, through `datasets` |
| a folder | what `datasets` wrote there with `save_to_disk` |
| `.parquet` | rows, streamed |
| `.json`, `.json.gz` | an array of records, or an object with one array of them, streamed |
| `.jsonl`, `.jsonl.gz` | a record a line; lines end at line feeds only |
| `package:name/path` | one of these files in an installed package |

Origins begin with the source as it was given. Every reader holds one record (or one block of rows) at a time. Rows
that the format allows but that are no usable conversation come out as `Skipped`; knows nothing of tokens.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Iterator
from io import BufferedIOBase
from pathlib import Path
from typing import Any

import ijson

from spd_jax.data.conversations import Conversation, ConversationError, Skipped, parse_conversation
from spd_jax.data.surrogates import Halves, restored
from spd_jax.files import likely_cause
from spd_jax.weights.location import PACKAGE, resolve

CUT_OFF = "file is cut off"
NOT_JSON = "not valid JSON"
BROKEN_IDS = "broken ids"
SUFFIXES = (".parquet", ".json", ".jsonl", ".json.gz", ".jsonl.gz")

_HUB_ID = re.compile(r"([\w.-]+/[\w.-]+)(?::([\w.-]+))?")
_GZIP = b"\x1f\x8b"
_BOM = b"\xef\xbb\xbf"
_Row = tuple[str, Any] | Skipped  # origin and record


def read_conversations(
    source: str | Path, *, split: str | None = None, skip_invalid: bool = False
) -> Iterator[Conversation | Skipped]:
    """Every record of a source, in its order, as a conversation or as `Skipped` with a reason.

    A file that ends in the middle of an array gives all whole records, then `Skipped(CUT_OFF, ...)` that says where.

    Args:
        split: of a data set with several; left out, its only one or `train`.
        skip_invalid: count what cannot be parsed as `Skipped` instead of raising.

    Raises:
        FileNotFoundError: nothing is there.
        SourceError: an unknown kind of file, a split that is not there, a line or record that cannot be parsed; names
            the path and the line or record.
    """
    for row in _rows(source, split, skip_invalid):
        if isinstance(row, Skipped):
            yield row
            continue
        origin, record = row
        try:
            yield parse_conversation(record, origin)
        except ConversationError as error:
            if not skip_invalid:
                raise SourceError(str(error)) from error
            yield Skipped(BROKEN_IDS, origin)


def source_digest(source: str | Path, *, split: str | None = None) -> str:
    """What tells a source from its next version: sha256 of a file, the fingerprint that `datasets` keeps of others.

    Raises:
        FileNotFoundError, SourceError: as `read_conversations`.
    """
    path = _local(source)
    if path is not None and path.is_file():
        _kind(path)
        _refuse_split(source, split)
        with path.open("rb") as file:
            return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
    return f"datasets:{_dataset(source, path, split)._fingerprint}"


class SourceError(ValueError):
    """A source that cannot be read; the message starts with the path and, where there is one, the line or record."""


def _local(source: str | Path) -> Path | None:
    """The local path of a source, None for a hub name."""
    text = str(source)
    if text.startswith(PACKAGE):
        return resolve(text)
    path = Path(source).expanduser()
    if path.exists():
        return path
    if isinstance(source, str) and _HUB_ID.fullmatch(text) and not text.startswith(".") and not _suffix(path):
        return None
    raise FileNotFoundError(
        f"{text}: no such file or folder, and not a hub name (org/name) or {PACKAGE}name/file. Files that can be read: "
        f"{', '.join(SUFFIXES)}"
    )


def _rows(source: str | Path, split: str | None, skip_invalid: bool) -> Iterator[_Row]:
    path = _local(source)
    if path is None or path.is_dir():
        for number, record in enumerate(_dataset(source, path, split)):
            yield f"{source}: row {number}", record
        return
    _refuse_split(source, split)
    kind = _kind(path)
    with path.open("rb") as file:
        begin = file.read(4096)
    if begin and (cause := likely_cause(begin)):
        raise SourceError(f"{source}: no conversations{cause}")
    if begin and kind.endswith(".gz") and not begin.startswith(_GZIP):
        raise SourceError(f"{source}: no gzip file, whatever its name says")
    if kind == ".parquet":
        yield from _parquet_rows(path, str(source))
        return
    opener = gzip.open if kind.endswith(".gz") else open
    with opener(path, "rb") as file:
        yield from (_json_lines if kind.startswith(".jsonl") else _json_array)(file, str(source), skip_invalid)


def _suffix(path: Path) -> str | None:
    return next((suffix for suffix in sorted(SUFFIXES, key=len) if path.name.endswith(suffix)), None)


def _kind(path: Path) -> str:
    kind = _suffix(path)
    if kind is None:
        raise SourceError(f"{path}: not a kind of file that can be read; expected one of {', '.join(SUFFIXES)}")
    return kind


def _refuse_split(source: str | Path, split: str | None) -> None:
    if split is not None:
        raise SourceError(f"{source}: a file has no splits, found split {split!r}; leave it out")


def _dataset(source: str | Path, path: Path | None, split: str | None) -> Any:
    import datasets  # slow to import

    if path is not None:
        try:
            found = datasets.load_from_disk(str(path))
        except FileNotFoundError as error:
            raise SourceError(
                f"{path}: a folder that `datasets` did not write with save_to_disk; give the path of a file in it"
            ) from error
    else:
        matched = _HUB_ID.fullmatch(str(source))
        assert matched is not None, source
        try:
            found = datasets.load_dataset(matched[1], matched[2])
        except Exception as error:
            raise FileNotFoundError(
                f"{source!r} is no local path, and loading it from the Hugging Face hub failed "
                f"({type(error).__name__}: {error})"
            ) from error
    if isinstance(found, datasets.Dataset):
        _refuse_split(source, split)
        return found
    names = list(found)
    chosen = split if split is not None else names[0] if len(names) == 1 else "train"
    if chosen not in names:
        raise SourceError(f"{source}: found splits {names}, not {chosen!r}; choose one with split")
    return found[chosen]


def _parquet_rows(path: Path, name: str) -> Iterator[_Row]:
    import datasets  # slow to import

    try:
        rows = datasets.load_dataset("parquet", data_files=str(path), split="train", streaming=True)
        for number, record in enumerate(rows):
            yield f"{name}: row {number}", record
    except (OSError, ValueError, RuntimeError) as error:
        raise SourceError(f"{name}: no parquet file that can be read: {error}") from error


def _json_lines(file: BufferedIOBase, name: str, skip_invalid: bool) -> Iterator[_Row]:
    number = 0
    try:
        # A binary file's lines end at b"\n" only; str.splitlines would cut records at U+2028, U+2029 and U+0085.
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = line.removeprefix(_BOM)
            if not line.strip():
                continue
            origin = f"{name}:{number}"
            try:
                yield origin, json.loads(line.decode("utf-8"))
            except ValueError as error:  # not UTF-8 or not JSON
                if not skip_invalid:
                    raise SourceError(f"{origin}: {NOT_JSON}: {error}") from error
                yield Skipped(NOT_JSON, origin)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        yield Skipped(CUT_OFF, f"{name}: after line {number}: {error}")


def _json_array(file: BufferedIOBase, name: str, skip_invalid: bool) -> Iterator[_Row]:
    number = 0
    try:
        prefix = _array_prefix(file, name)
        _to_start(file)
        halves = Halves(file)
        for record in ijson.items(halves, prefix, use_float=True):
            yield f"{name}: record {number}", restored(record) if halves.found else record
            number += 1
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        yield Skipped(CUT_OFF, f"{name}: after {number} whole records: {error}")
    except (ijson.JSONError, UnicodeDecodeError) as error:
        found = " ".join(str(error).split())
        if "premature EOF" in found or "Incomplete JSON" in found:
            yield Skipped(CUT_OFF, f"{name}: after {number} whole records, at byte {file.tell()}")
        elif skip_invalid:
            # Where the next record would begin cannot be told, so this is the end of the file.
            yield Skipped(NOT_JSON, f"{name}: record {number} and everything behind it")
        else:
            raise SourceError(f"{name}: record {number}: {NOT_JSON}: {found}") from error


def _to_start(file: BufferedIOBase) -> None:
    file.seek(0)
    if file.read(len(_BOM)) != _BOM:
        file.seek(0)


def _array_prefix(file: BufferedIOBase, name: str) -> str:
    """ijson's name for the records: those of the file's own array, or of the first array of its object."""
    _to_start(file)
    for prefix, event, _ in ijson.parse(Halves(file)):
        if event == "start_array" and "." not in prefix:
            return f"{prefix}.item" if prefix else "item"
        if not prefix and event not in ("start_map", "map_key"):
            break
    raise SourceError(f"{name}: expected an array of records, or an object with one array of them")
