"""Conversations with the target's own answers, written to a JSONL file that can be continued.

A speculation head learns the target's distribution, and on text that the target wrote itself more of its drafts are
right than on text of others (arXiv 2401.15077, section 4).

The order of the file follows from the specification alone: greedy and sampled conversations fill a pool each, a full
pool is sorted by prompt length and cut into batches, and the batches come in an order drawn from the seed, so that a
run that is stopped anywhere leaves a fair sample. A batch is written at once; a later run cuts the file back to its
last whole batch and goes on. What decodes is handed in as an `Answerer`; this module knows no models.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from spd_jax.data.conversations import Conversation, Skipped
from spd_jax.data.dialogue import Answer, Dialogue
from spd_jax.files import read_json, write_whole

FORMAT = "spd_jax regenerated conversations"
FORMAT_VERSION = 2  # raise it when the same specification would give other lines or another order
POOL = 8  # batches; the more, the less padding


@runtime_checkable
class Answerer(Protocol):
    """Answers prompts (token ids) that all fit; `numbers` name the conversations, whose random numbers depend on them
    and on the position alone."""

    def __call__(self, prompts: Sequence[Sequence[int]], numbers: Sequence[int], greedy: bool) -> Sequence[Answer]: ...


class RegenerateError(ValueError):
    """A file that cannot be continued; says which, and what differs."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What decides about the lines of a file. `facts` is all that a file must have in common with a run that continues
    it, `sampling` what a line says about its answers, except that greedy ones have temperature 0."""

    batch: int
    greedy_share: float
    seed: int
    sampling: Mapping[str, Any]
    facts: Mapping[str, Any]

    def is_greedy(self, number: int) -> bool:
        """Whether conversation `number` is answered greedily: the share of them, as evenly as it goes."""
        return int((number + 1) * self.greedy_share) > int(number * self.greedy_share)


@dataclasses.dataclass
class Progress:
    """Where a run stands. `lines` are all in the file, `kept` those that were there before; `tokens` and `turns` were
    written by the target in this run; `skipped` and `ended` count conversations left out and cut short, by reason, and
    `first` says where the first of each stands."""

    lines: int = 0
    kept: int = 0
    turns: int = 0
    tokens: int = 0
    stopped: int = 0
    skipped: Counter[str] = dataclasses.field(default_factory=Counter)
    ended: Counter[str] = dataclasses.field(default_factory=Counter)
    first: dict[str, str] = dataclasses.field(default_factory=dict)

    def describe(self, seconds: float, limit: int | None = None) -> str:
        """One line: what is there, how fast it is written, and when `limit` will be reached."""
        written = self.lines - self.kept
        there = f"{self.lines:,}" + ("" if limit is None else f" of {limit:,}")
        text = f"{there} conversations, {self.tokens:,} new tokens in {seconds:,.0f} s ({self.tokens / seconds:,.0f}/s)"
        if written and limit is not None and self.lines < limit:
            text += f", {seconds * (limit - self.lines) / written:,.0f} s to go"
        return text + (f"; {self.kept:,} were there already" if self.kept else "")

    def left_out(self) -> list[str]:
        """A line for each reason why conversations were left out or cut short."""
        first = self.first
        left = [f"{n:,} skipped: {reason} (first: {first[reason]})" for reason, n in self.skipped.most_common()]
        cut = [f"{n:,} end early: {reason} (first: {first[reason]})" for reason, n in self.ended.most_common()]
        answers = [f"{self.stopped:,} of {self.turns:,} answers end by themselves, the others were cut"]
        return [*(answers if self.turns else []), *left, *cut]


def regenerate(
    path: Path,
    plan: Plan,
    records: Iterator[Conversation | Skipped],
    begin: Callable[[int, Conversation], Dialogue | Skipped],
    answer: Answerer,
    *,
    limit: int | None = None,
    source: str = "the source",
    on_batch: Callable[[Progress], None] = lambda progress: None,
) -> Progress:
    """Write the conversations of `records` with new answers to `path`; what is there already is kept.

    Args:
        records: in the order of the source.
        begin: opens conversation number i, or says why it is skipped (`open_dialogue`).
        limit: stop after the batch with which the file has so many lines.
        source: what errors call the source.
        on_batch: called after every batch, and once before the first.

    Raises:
        RegenerateError: the file was made from something else; what differs is named. It is left as it is. Or no
            conversation can be answered; then there is no file.
        OSError: it cannot be written.
    """
    progress = Progress()
    there = _continue(path, plan)
    batches = _batches(plan, _opened(records, begin, progress))
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        _write(path, plan, there, batches, answer, limit, progress, on_batch)
        if not progress.lines:
            reasons = "; ".join(progress.left_out()) or "there is none"
            raise RegenerateError(f"{source}: no conversation can be answered: {reasons}")
    except Exception:
        if not (path.exists() and path.stat().st_size):  # nothing to go on with
            path.unlink(missing_ok=True)
            manifest_path(path).unlink(missing_ok=True)
        raise
    return progress


def _write(
    path: Path,
    plan: Plan,
    there: Sequence[_Line],
    batches: Iterator[list[Dialogue]],
    answer: Answerer,
    limit: int | None,
    progress: Progress,
    on_batch: Callable[[Progress], None],
) -> None:
    """All batches that are missing, each written at once."""
    with path.open("ab") as file:
        size = 0
        for batch in batches:
            if limit is not None and progress.lines >= limit:
                break
            lines = there[progress.lines : progress.lines + len(batch)]
            if len(lines) == len(batch):
                _compare(path, lines, batch, progress.lines)
                size += sum(line.size for line in lines)
                progress.lines = progress.kept = progress.lines + len(batch)
                continue
            if file.tell() != size:
                file.truncate(size)
            if progress.lines == progress.kept:
                on_batch(progress)
            _answer(batch, plan, answer, progress)
            written = b"".join(_line(dialogue, plan) for dialogue in batch)
            file.write(written)
            file.flush()
            os.fsync(file.fileno())
            size += len(written)
            progress.lines += len(batch)
            on_batch(progress)


def _opened(
    records: Iterator[Conversation | Skipped],
    begin: Callable[[int, Conversation], Dialogue | Skipped],
    progress: Progress,
) -> Iterator[Dialogue]:
    for number, record in enumerate(records):
        opened = begin(number, record) if isinstance(record, Conversation) else record
        if isinstance(opened, Skipped):
            progress.skipped[opened.reason] += 1
            progress.first.setdefault(opened.reason, opened.where)
        else:
            yield opened


def _batches(plan: Plan, dialogues: Iterator[Dialogue]) -> Iterator[list[Dialogue]]:
    """All batches in the order of the file."""
    rng = np.random.default_rng(plan.seed)
    pools: dict[bool, list[Dialogue]] = {True: [], False: []}

    def cut(pools: Sequence[list[Dialogue]]) -> Iterator[list[Dialogue]]:
        found = []
        for pool in pools:
            pool.sort(key=lambda dialogue: (len(dialogue.ids), dialogue.number))
            found += [pool[start : start + plan.batch] for start in range(0, len(pool), plan.batch)]
        for index in rng.permutation(len(found)):
            yield sorted(found[index], key=lambda dialogue: dialogue.number)

    for dialogue in dialogues:
        pool = pools[plan.is_greedy(dialogue.number)]
        pool.append(dialogue)
        if len(pool) == POOL * plan.batch:
            yield from cut([pool.copy()])
            pool.clear()
    yield from cut([pools[True], pools[False]])


def _answer(batch: Sequence[Dialogue], plan: Plan, answer: Answerer, progress: Progress) -> None:
    """All turns of a batch."""
    greedy = plan.is_greedy(batch[0].number)
    while asking := [dialogue for dialogue in batch if dialogue.asks]:
        answers = answer([dialogue.ids for dialogue in asking], [dialogue.number for dialogue in asking], greedy)
        for dialogue, given in zip(asking, answers, strict=True):
            dialogue.take(given)
            progress.turns += 1
            progress.tokens += len(given.ids)
            progress.stopped += given.stopped
    for dialogue in batch:
        if dialogue.ended is not None:
            progress.ended[dialogue.ended] += 1
            progress.first.setdefault(dialogue.ended, dialogue.origin)


def _line(dialogue: Dialogue, plan: Plan) -> bytes:
    greedy = plan.is_greedy(dialogue.number)
    sampling = {"temperature": 0.0} if greedy else dict(plan.sampling)
    record = dialogue.record() | {"number": dialogue.number, "sampling": sampling}
    return json.dumps(record, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"


@dataclasses.dataclass(frozen=True)
class _Line:
    """A line that is there: which conversation it holds, and its bytes in the file."""

    number: int
    size: int


def manifest_path(path: Path) -> Path:
    """Where the facts about a file are kept."""
    return path.with_name(path.name + ".run.json")


def _continue(path: Path, plan: Plan) -> list[_Line]:
    """The lines of a file that was made from the same facts; its manifest is written if there is none yet."""
    facts = json.loads(json.dumps({"format": FORMAT, "version": FORMAT_VERSION, **plan.facts}))
    manifest = manifest_path(path)
    if not manifest.exists():
        if path.exists() and path.stat().st_size:
            raise RegenerateError(f"{path} is there, but not {manifest} that would say what it was made from")
        manifest.parent.mkdir(parents=True, exist_ok=True)
        write_whole(manifest, (json.dumps(facts, indent=1) + "\n").encode())
        return []
    try:
        found = read_json(manifest)
    except ValueError as error:
        raise RegenerateError(str(error)) from error
    if not isinstance(found, dict):
        raise RegenerateError(f"{manifest}: expected an object, found a {type(found).__name__}")
    missing = "nothing"
    differ = [
        f"{name} was {found.get(name, missing)!r}, now {facts.get(name, missing)!r}"
        for name in facts | found
        if found.get(name) != facts.get(name)
    ]
    if differ:
        raise RegenerateError(
            f"{path} was made from something else: {'; '.join(differ)}. Give another file, or remove both"
        )
    return list(_whole_lines(path)) if path.exists() else []


def _whole_lines(path: Path) -> Iterator[_Line]:
    """Lines up to the first that was not written to its end."""
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            try:
                yield _Line(json.loads(line)["number"], len(line))
            except (ValueError, KeyError, TypeError):
                return


def _compare(path: Path, lines: Sequence[_Line], batch: Sequence[Dialogue], before: int) -> None:
    for index, (line, dialogue) in enumerate(zip(lines, batch, strict=True), start=before + 1):
        if line.number != dialogue.number:
            raise RegenerateError(
                f"{path}:{index}: expected conversation {dialogue.number}, found {line.number}: lines were added, "
                "removed or moved since, so it cannot be continued"
            )
