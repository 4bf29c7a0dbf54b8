"""Samples of an evaluation, and the files that they are kept in: one JSON object a line, written as results come.

The first line of a file says what it holds, so that a second run knows whether it may go on there. A line that was cut
off when a run was killed is dropped. Knows neither decoders nor figures over several samples.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spd_jax.generation.verdicts import NO_DRAFT, RIGHT, WRONG
from spd_jax.metrics import (
    acceptance_rate,
    alpha,
    equivalent_accept_length,
    published_acceptance_rate,
)

FORMAT, FORMAT_VERSION = "spd_jax evaluation samples", 1
NO_ROOM = "context"
"""`finish_reason` of a later turn for which the context had no room: it has no tokens."""

Key = tuple[str, int, int]
"""(data set, line of the prompt in it from 0, turn from 1)"""


class FolderError(ValueError):
    """A folder that holds another evaluation, or files that are none; says what differs."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """One answer.

    `verdicts` has a letter for each token: p from prefill, a draft accepted, r draft rejected, u no draft was tested;
    `token_cycles` the cycle that verified it (0: prefill). Seconds are the sample's share of its batch's. `equal` says
    whether the ids are those of autoregressive decoding (None: not compared), `difference` where they part.
    """

    dataset: str
    index: int
    question_id: Any
    category: str | None
    turn: int
    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    text: str | None
    verdicts: str
    token_cycles: tuple[int, ...]
    finish_reason: str
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    equal: bool | None = None
    difference: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if not len(self.ids) == len(self.verdicts) == len(self.token_cycles):
            raise ValueError(
                f"a sample needs a verdict and a cycle for each of its {len(self.ids)} tokens, found "
                f"{len(self.verdicts)} and {len(self.token_cycles)}"
            )

    @property
    def key(self) -> Key:
        """What tells it from the other samples of a file."""
        return self.dataset, self.index, self.turn

    @property
    def cycles(self) -> int:
        """K"""
        return self.token_cycles[-1] if self.ids else 0

    def record(self, num_stages: int) -> dict[str, Any]:
        """The line of a file, with the counts that follow from verdicts and cycles."""
        counts = {"accepted": RIGHT, "rejected": WRONG, "undrafted": NO_DRAFT}
        counted = {name: self.verdicts.count(letter) for name, letter in counts.items()}
        rate = acceptance_rate(len(self.ids), self.cycles)
        record = {
            "dataset": self.dataset,
            "index": self.index,
            "question_id": self.question_id,
            "category": self.category,
            "turn": self.turn,
            "prompt_tokens": len(self.prompt_ids),
            "tokens": len(self.ids),
            "cycles": self.cycles,
            **counted,
            "acceptance_rate": rate,
            "published_acceptance_rate": published_acceptance_rate(len(self.ids), self.cycles),
            "alpha": alpha(counted["accepted"], counted["rejected"]),
            "s0": equivalent_accept_length(num_stages, rate),
            "equal": self.equal,
            "finish_reason": self.finish_reason,
            "prefill_seconds": self.prefill_seconds,
            "decode_seconds": self.decode_seconds,
            "verdicts": self.verdicts,
            "token_cycles": list(self.token_cycles),
            "prompt_ids": list(self.prompt_ids),
            "ids": list(self.ids),
            "text": self.text,
        }
        return record if self.difference is None else record | {"difference": self.difference}


def sample_of_record(record: Any) -> Sample:
    """What `Sample.record` wrote.

    Raises:
        ValueError: a key is missing or a value is none of a sample's.
    """
    if not isinstance(record, Mapping):
        raise ValueError(f"expected a sample, found {_shown(record)}")
    given: dict[str, Any] = {field.name: record.get(field.name) for field in dataclasses.fields(Sample)}
    missing = sorted(set(given) - set(record) - {"difference"})
    if missing:
        raise ValueError(f"a sample without {', '.join(missing)}")
    for name in ("prompt_ids", "ids", "token_cycles"):
        given[name] = tuple(given[name])
    return Sample(**given)


class SampleFile:
    """The samples of one decoder, in memory and in a file.

    Args:
        header: what the file is for: `settings`, the same for all files of a folder, and `decoder`, of this one.
        num_stages: for the figures in the file.
        writes: whether this process writes (one of several does).

    Raises:
        FolderError: the file holds samples of another decoder or other settings, or lines that are no samples.
    """

    def __init__(self, path: Path, header: Mapping[str, Any], num_stages: int, *, writes: bool = True):
        self.path, self._num_stages, self._writes = path, num_stages, writes
        self._header = {"format": FORMAT, "format_version": FORMAT_VERSION, **_as_json(header)}
        self.samples: dict[Key, Sample] = {}
        found, lines, self._length = _read(path)
        if found is not None:
            _refuse_other(path, found, self._header, ("settings", "decoder"))
        for number, line in enumerate(lines, start=2):
            try:
                sample = sample_of_record(line)
            except (TypeError, ValueError) as error:
                raise FolderError(f"{path}:{number}: {error}") from error
            self.samples[sample.key] = sample
        self._fresh = found is None

    def add(self, sample: Sample) -> None:
        """Keep a sample; it is in the file when this returns."""
        self.samples[sample.key] = sample
        if not self._writes:
            return
        lines = [self._header] if self._fresh else []
        lines.append(sample.record(self._num_stages))
        data = b"".join(json.dumps(line, ensure_ascii=False, allow_nan=False).encode("utf-8") + b"\n" for line in lines)
        with self.path.open("ab") as file:
            file.truncate(self._length)  # behind the last whole line
            file.write(data)
        self._length += len(data)
        self._fresh = False


def check_folder(folder: Path, settings: Mapping[str, Any]) -> None:
    """Refuse a folder whose files were written under other settings.

    Raises:
        FolderError: names the settings that differ, or a file that is no sample file.
    """
    for path in sorted(folder.glob("*.jsonl")):
        found, _, _ = _read(path)
        if found is not None:
            now = {"format_version": FORMAT_VERSION, "settings": _as_json(settings)}
            _refuse_other(path, found, now, ("settings",))


def _read(path: Path) -> tuple[dict[str, Any] | None, list[Any], int]:
    """Header (None: there is none yet), the other lines, and the length of all of them in bytes."""
    if not path.exists():
        return None, [], 0
    *lines, rest = path.read_bytes().split(b"\n")  # what stands behind the last line feed was cut off
    records: list[Any] = []
    length = 0
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line.decode("utf-8")))
        except ValueError as error:
            if number == len(lines) > 1:
                break
            raise FolderError(f"{path}:{number}: not valid JSON: {error}; expected a file of samples") from error
        length += len(line) + 1
    begin = json.dumps({"format": FORMAT})[:-1].encode()
    ours = begin.startswith(rest[: len(begin)]) if not records else _is_header(records[0])
    if not ours:
        raise FolderError(f"{path}:1: this is no file of samples; choose another folder with --out")
    return (records[0] if records else None), records[1:], length


def _is_header(record: Any) -> bool:
    return isinstance(record, dict) and record.get("format") == FORMAT


def _as_json(tree: Mapping[str, Any]) -> dict[str, Any]:
    """As it will be read again: lists for tuples."""
    return json.loads(json.dumps(tree))


def _refuse_other(path: Path, found: Mapping[str, Any], now: Mapping[str, Any], parts: tuple[str, ...]) -> None:
    if found.get("format_version") != now["format_version"]:
        raise FolderError(
            f"{path}: format_version {found.get('format_version')}, this program writes {now['format_version']}"
        )
    differ = []
    for part in parts:
        before, after = found.get(part, {}), now[part]
        names = [name for name in dict.fromkeys([*before, *after]) if before.get(name) != after.get(name)]
        differ += [f"{name} was {_shown(before.get(name))}, now {_shown(after.get(name))}" for name in names]
    if differ:
        raise FolderError(
            f"{path} is of another evaluation: {'; '.join(differ)}. Choose another folder with --out, or run what the "
            "folder is for"
        )


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."
