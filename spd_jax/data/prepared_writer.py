"""Writing a folder of prepared conversations: a killed run loses little, and a mixed-up folder cannot come about.

Until the manifest is there, `unfinished.json` says what is being prepared and `part-*.json` which shards are done. The
same specification goes on behind the last finished shard; another one is an error that says what differs.

Knows rows of arrays; what the folder means is `spd_jax.data.prepared`'s business.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spd_jax.data.prepared import (
    FORMAT,
    FORMAT_VERSION,
    MANIFEST,
    UNFINISHED,
    Counts,
    PreparedError,
    Row,
    check_shard,
    lengths_of,
    read_manifest,
    read_object,
    rows_of_split,
    shard_columns,
    spec_digest,
)
from spd_jax.files import write_whole


class PreparedWriter:
    """Fills a folder shard by shard, and takes a killed run up behind its last finished shard.

    `complete`: the folder holds all of it already. `done`: counts of each finished shard, in order.
    """

    def __init__(self, path: str | os.PathLike[str], spec: Mapping[str, Any], *, overwrite: bool = False):
        """Start, or go on.

        Args:
            spec: everything that the rows depend on, JSON values only; `tokenizer`, `held_out` and `shuffle_seed` are
                read here.

        Raises:
            PreparedError: the folder holds something else, or data of another specification; says what differs.
        """
        self.path, self.spec = Path(path), dict(spec)
        if overwrite:
            self._remove_all()
        self.complete = (self.path / MANIFEST).is_file()
        started = (self.path / UNFINISHED).is_file()
        if self.complete or started:
            self._compare(read_manifest(self.path) if self.complete else read_object(self.path / UNFINISHED))
        elif self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise PreparedError(f"{self.path}: exists and holds no prepared conversations; choose another folder")
        self._parts = self._finished_parts() if not self.complete else []
        self._made = not self.path.exists()
        if not self.complete:
            self.path.mkdir(parents=True, exist_ok=True)
            _write_json(self.path / UNFINISHED, {"format": FORMAT, "format_version": FORMAT_VERSION, "spec": self.spec})

    @property
    def done(self) -> list[Counts]:
        """Counts of each finished shard."""
        return [Counts(**part["counts"]) for part in self._parts]

    def write(self, rows: Sequence[Row], counts: Counts) -> None:
        """Write the next shard; `counts` are those of all source rows that it stands for."""
        number = len(self._parts)
        part: dict[str, Any] = {"rows": len(rows), "counts": dataclasses.asdict(counts)}
        if rows:
            file = self.path / f"shard-{number:05d}.arrow"
            partial = file.with_suffix(".partial")
            _write_arrow(partial, rows)
            os.replace(partial, file)
            part |= {"file": file.name, "bytes": file.stat().st_size}
        _write_json(self.path / f"part-{number:05d}.json", part)
        self._parts.append(part)

    def finish(self, about: Mapping[str, Any]) -> None:
        """Write the manifest: the folder is complete. `about` is for the reader's eyes.

        Raises:
            PreparedError: everything would be held out.
        """
        shards = [{name: part[name] for name in ("file", "rows", "bytes")} for part in self._parts if part["rows"]]
        columns = shard_columns(self.path, shards)
        splits = {}
        for split in ("train", "held_out"):
            rows = rows_of_split(split, columns, self.spec)
            supervised = np.asarray(columns["num_supervised"], np.int64)[rows]
            tokens = lengths_of(columns)[rows]
            splits[split] = {"rows": len(rows), "tokens": int(tokens.sum()), "supervised": int(supervised.sum())}
        if not splits["train"]["rows"]:
            raise PreparedError(
                f"{self.path}: held_out {self.spec['held_out']} takes all {splits['held_out']['rows']} conversations"
            )
        manifest = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "digest": spec_digest(self.spec),
            "spec": self.spec,
            "about": dict(about),
            "counts": dataclasses.asdict(sum(self.done, Counts())),
            "splits": splits,
            "shards": shards,
        }
        _write_json(self.path / MANIFEST, manifest)
        self.complete = True
        for file in (self.path / UNFINISHED, *self.path.glob("part-*.json")):
            file.unlink()

    def abandon(self) -> None:
        """Remove what was written, because nothing came of it."""
        self._remove_all()
        if self._made:
            self.path.rmdir()

    def _remove_all(self) -> None:
        if not ((self.path / MANIFEST).is_file() or (self.path / UNFINISHED).is_file()):
            return  # not ours: nothing to remove
        # The manifest goes first: what is left of a folder must not look complete.
        for pattern in (MANIFEST, "shard-*.arrow", "shard-*.partial", "part-*.json", ".*.partial", UNFINISHED):
            for file in self.path.glob(pattern):
                file.unlink()

    def _compare(self, found: Mapping[str, Any]) -> None:
        before = found.get("spec", {})
        differ = [
            f"{name} {before.get(name)!r} there, {self.spec.get(name)!r} asked for"
            for name in {**before, **self.spec}
            if before.get(name) != self.spec.get(name)
        ]
        if differ:
            raise PreparedError(
                f"{self.path}: holds conversations prepared from something else: {'; '.join(differ)}. Choose another "
                "folder, or overwrite it (--overwrite true)"
            )

    def _finished_parts(self) -> list[dict[str, Any]]:
        """Parts in a row from the first; whatever is behind a gap or a damaged shard is made again."""
        parts = []
        while (file := self.path / f"part-{len(parts):05d}.json").is_file():
            try:
                part = read_object(file)
                if part["rows"]:
                    check_shard(self.path, part)
            except PreparedError:
                break
            parts.append(part)
        return parts


def _write_arrow(file: Path, rows: Sequence[Row]) -> None:
    import datasets  # slow to import
    from datasets.arrow_writer import ArrowWriter

    kinds = {"ids": datasets.List(datasets.Value("int32")), "supervised": datasets.List(datasets.Value("bool"))}
    kinds |= {"origin": datasets.Value("string"), "key": datasets.Value("int64")}
    kinds |= {"num_supervised": datasets.Value("int32")}
    with ArrowWriter(path=str(file), features=datasets.Features(kinds)) as writer:
        for row in rows:
            example = row.example
            counted = int(example.supervised.sum())
            writer.write(
                {"ids": example.ids, "supervised": example.supervised, "num_supervised": counted}
                | {"origin": row.origin, "key": row.key}
            )
        writer.finalize()


def _write_json(file: Path, tree: Mapping[str, Any]) -> None:
    write_whole(file, (json.dumps(tree, indent=2, ensure_ascii=False) + "\n").encode())
