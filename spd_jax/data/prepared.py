"""Prepared conversations on disk: token ids and labels in Arrow files, and a manifest that says what they are.

    data = open_prepared(path, split="train", tokenizer_digest=None) -> PreparedData
    len(data); data[i] -> Example(ids int32 [T], supervised bool [T]); data.lengths; data.manifest; data.digest

A folder holds `shard-*.arrow` (the `datasets` library reads them too: columns `ids`, `supervised`, `origin`, `key`,
`num_supervised`) and `manifest.json`, which is written last: a folder with a manifest is complete. The digest is that
of the specification: sources, options, tokenizer, chat template and `FORMAT_VERSION`. Held-out conversations are a view
of the same shards: those with the smallest keys.

Knows arrays and files, not conversations. `spd_jax.data.prepared_writer` writes such a folder.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Int32, Int64

from spd_jax import files

FORMAT = "spd_jax prepared conversations"
FORMAT_VERSION = 2  # raise it when the same sources and options would give other rows
MANIFEST, UNFINISHED = "manifest.json", "unfinished.json"
KEY_BITS = 63
COLUMNS = {"ids": "list<item: int32>", "supervised": "list<item: bool>", "origin": "string", "key": "int64"}
COLUMNS |= {"num_supervised": "int32"}
Split = Literal["train", "held_out"]


@dataclasses.dataclass(frozen=True)
class Example:
    """One conversation: its tokens and, for each, whether the assistant wrote it."""

    ids: Int32[np.ndarray, " T"]
    supervised: Bool[np.ndarray, " T"]


@dataclasses.dataclass(frozen=True)
class Row:
    """An example with where it came from and the key that decides about holding it out (0 to 2^63 - 1)."""

    example: Example
    origin: str
    key: int


@dataclasses.dataclass(frozen=True)
class Counts:
    """What became of the rows of the sources; `first` has the origin of the first row skipped for each reason."""

    rows: int = 0
    kept: int = 0
    cut: int = 0
    tokens: int = 0
    supervised: int = 0
    turns_left_out: int = 0
    skipped: Mapping[str, int] = dataclasses.field(default_factory=dict)
    first: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __add__(self, other: Counts) -> Counts:
        numbers = ("rows", "kept", "cut", "tokens", "supervised", "turns_left_out")
        skipped = {reason: self.skipped.get(reason, 0) + other.skipped.get(reason, 0) for reason in other.skipped}
        return Counts(
            **{name: getattr(self, name) + getattr(other, name) for name in numbers},
            skipped={**self.skipped, **skipped},
            first={**other.first, **self.first},
        )


class PreparedError(ValueError):
    """A folder of prepared data that is not there, not complete, damaged, or of another specification."""


@dataclasses.dataclass(frozen=True, eq=False)
class PreparedData:
    """Examples of one split, read from memory-mapped files as they are asked for.

    `lengths` are the numbers of tokens, `num_supervised` those of supervised ones, by example. `digest` tells this data
    from any other, splits apart.
    """

    path: Path
    split: Split
    manifest: Mapping[str, Any]
    lengths: Int64[np.ndarray, " N"]
    num_supervised: Int64[np.ndarray, " N"]
    _rows: Int64[np.ndarray, " N"]
    _columns: Mapping[str, Any]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Example:
        row = int(self._rows[index])
        ids, supervised = (self._columns[name][row].values for name in ("ids", "supervised"))
        return Example(ids.to_numpy(), supervised.to_numpy(zero_copy_only=False))

    def origin(self, index: int) -> str:
        """Where an example came from."""
        return self._columns["origin"][int(self._rows[index])].as_py()

    def refuse_unknown_ids(self, vocab_size: int, what: Callable[[int], str]) -> None:
        """Refuse data, of either split, with an id outside 0..vocab_size - 1.

        Args:
            what: says what is wrong with such an id.

        Raises:
            PreparedError: names the first such id, where it came from, and what is wrong.
        """
        row = 0
        for chunk in self._columns["ids"].chunks:
            ids = chunk.flatten().to_numpy(zero_copy_only=False)
            wrong = np.flatnonzero((ids < 0) | (ids >= vocab_size))
            if wrong.size:
                ends = np.cumsum(chunk.value_lengths().to_numpy())
                row += int(np.searchsorted(ends, wrong[0], side="right"))
                origin = self._columns["origin"][row].as_py()
                raise PreparedError(f"{self.path}: conversation {origin}: {what(int(ids[wrong[0]]))}")
            row += len(chunk)

    @property
    def digest(self) -> str:
        """sha256 of the specification, in hexadecimal."""
        return self.manifest["digest"]


def open_prepared(
    path: str | os.PathLike[str], *, split: Split = "train", tokenizer_digest: str | None = None
) -> PreparedData:
    """The prepared data of a folder.

    Args:
        tokenizer_digest: of the target that is to be trained for; None skips the comparison.

    Raises:
        PreparedError: no prepared data, an unfinished run, another format version, another tokenizer, a shard that is
            missing or of another size, or a split that was not held out.
    """
    path = Path(path)
    manifest = read_manifest(path)
    found = manifest["spec"]["tokenizer"]
    if tokenizer_digest is not None and tokenizer_digest != found:
        raise PreparedError(
            f"{path}: prepared with the tokenizer whose digest is {found}, expected {tokenizer_digest}; prepare the "
            "conversations with the tokenizer of the target that is to be trained for"
        )
    for shard in manifest["shards"]:
        check_shard(path, shard)
    columns = shard_columns(path, manifest["shards"])
    rows = rows_of_split(split, columns, manifest["spec"])
    if split == "held_out" and not len(rows):
        raise PreparedError(f"{path}: nothing was held out; prepare it again with held_out")
    lengths, num_supervised = lengths_of(columns)[rows], np.asarray(columns["num_supervised"], np.int64)[rows]
    return PreparedData(path, split, manifest, lengths, num_supervised, rows, columns)


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a complete folder.

    Raises:
        PreparedError: as `open_prepared`.
    """
    if not (path / MANIFEST).is_file():
        if (path / UNFINISHED).is_file():
            raise PreparedError(f"{path}: preparing was not finished; run it again with the same options to go on")
        raise PreparedError(f"{path}: holds no prepared conversations ({MANIFEST} is missing)")
    manifest = read_object(path / MANIFEST)
    if manifest.get("format") != FORMAT or manifest.get("format_version") != FORMAT_VERSION:
        raise PreparedError(
            f"{path / MANIFEST}: format {manifest.get('format')!r} version {manifest.get('format_version')!r}, "
            f"expected {FORMAT!r} version {FORMAT_VERSION}"
        )
    _check_manifest(path / MANIFEST, manifest)
    return manifest


def _check_manifest(file: Path, manifest: Mapping[str, Any]) -> None:
    """Refuse a manifest without what is read from it, or with something of another kind."""

    def check(where: str, tree: Any, kinds: Mapping[str, Any]) -> None:
        if not isinstance(tree, dict):
            raise PreparedError(f"{file}: {where} must be an object, found {tree!r:.80}")
        for name, kind in kinds.items():
            value = tree.get(name)
            if name not in tree or not isinstance(value, kind) or isinstance(value, bool):
                raise PreparedError(f"{file}: {name} in {where} cannot be {value!r:.80}")

    check("it", manifest, {"digest": str, "shards": list})
    check("spec", manifest.get("spec"), {"tokenizer": str, "held_out": int | float, "shuffle_seed": int | None})
    check("about", manifest.get("about"), {})
    counted = ("rows", "kept", "cut", "tokens", "supervised", "turns_left_out")
    check("counts", manifest.get("counts"), dict.fromkeys(counted, int) | {"skipped": dict, "first": dict})
    check("counts.skipped", manifest["counts"]["skipped"], dict.fromkeys(manifest["counts"]["skipped"], int))
    check("counts.first", manifest["counts"]["first"], dict.fromkeys(manifest["counts"]["skipped"], str))
    for number, shard in enumerate(manifest["shards"]):
        check(f"shards[{number}]", shard, {"file": str, "rows": int, "bytes": int})
    for split in ("train", "held_out"):
        found = manifest["splits"].get(split) if isinstance(manifest.get("splits"), dict) else None
        check(f"splits.{split}", found, dict.fromkeys(("rows", "tokens", "supervised"), int))
    held_out, seed = manifest["spec"]["held_out"], manifest["spec"]["shuffle_seed"]
    if not manifest["shards"] or not 0 <= held_out < 2**KEY_BITS or (seed is not None and seed < 0):
        raise PreparedError(f"{file}: no shards, or a held_out {held_out} or shuffle_seed {seed} that cannot be")


def read_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        PreparedError: something else is in it.
    """
    try:
        return files.read_object(file)
    except ValueError as error:
        raise PreparedError(str(error)) from error


def check_shard(path: Path, shard: Mapping[str, Any]) -> None:
    """Refuse a shard that is missing or not of the size that was written."""
    file = path / shard["file"]
    size = file.stat().st_size if file.is_file() else None
    if size != shard["bytes"]:
        found = "missing" if size is None else f"{size} bytes{files.cause_of(file)}"
        raise PreparedError(f"{file}: {found}, expected {shard['bytes']} bytes")


def shard_columns(path: Path, shards: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Arrow columns of all shards by name, mapped from the files."""
    import datasets  # slow to import

    parts = []
    for one in shards:
        file = path / one["file"]
        try:
            part = datasets.Dataset.from_file(str(file))
        except Exception as error:  # arrow's own for its blocks, any other for what datasets keeps beside them
            text = " ".join(str(error).split())
            raise PreparedError(f"{file}: damaged, it cannot be read as an Arrow file ({text:.200})") from error
        found = {name: str(kind) for name, kind in zip(part.data.column_names, part.data.schema.types, strict=True)}
        if found != COLUMNS or len(part) != one["rows"]:
            raise PreparedError(
                f"{file}: damaged, it has {len(part)} rows of {found}, expected {one['rows']} of {COLUMNS}"
            )
        parts.append(part)
    table = datasets.concatenate_datasets(parts).data
    return {name: table.column(name) for name in table.column_names}


def lengths_of(columns: Mapping[str, Any]) -> np.ndarray:
    """Number of tokens of every row."""
    return np.concatenate([chunk.value_lengths().to_numpy() for chunk in columns["ids"].chunks]).astype(np.int64)


def rows_of_split(split: Split, columns: Mapping[str, Any], spec: Mapping[str, Any]) -> np.ndarray:
    """Row numbers of a split: below 1 `held_out` is a share, from 1 on a count; equal keys stay together."""
    keys, wanted = np.asarray(columns["key"], np.int64), spec["held_out"]
    if wanted < 1:
        held = keys < int(wanted * 2**KEY_BITS)
    else:
        held = keys <= np.sort(keys)[min(int(wanted), len(keys)) - 1]
    rows = np.flatnonzero(held if split == "held_out" else ~held)
    seed = spec["shuffle_seed"]
    return rows if seed is None else np.random.default_rng(seed).permutation(rows)


def spec_digest(spec: Mapping[str, Any]) -> str:
    """sha256 of a specification (JSON values only) in hexadecimal."""
    return hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()
