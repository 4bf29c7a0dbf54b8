"""Conversations from sources to a folder of prepared data: read, label, cut, write.

    prepare(config, report) -> Prepared

Sources are worked through in blocks of rows, a shard each; a run that was killed goes on behind its last whole block,
and gives what it would have given. Running it again on a finished folder does nothing. Knows the order of the work;
each step is a module of its own.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spd_jax.config.prepare import PrepareConfig
from spd_jax.data.conversations import Conversation, Skipped
from spd_jax.data.labels import Labeller
from spd_jax.data.prepared import FORMAT_VERSION, KEY_BITS, Counts, Example, Row, read_manifest
from spd_jax.data.prepared_writer import PreparedWriter
from spd_jax.data.sources import read_conversations, source_digest
from spd_jax.weights.tokenizer import Tokenizer, load_tokenizer

TOO_FEW = "too few supervised tokens"
BLOCK_ROWS = 2048
REPORT_ROWS = 32

Report = Callable[[Counts], None]
"""Called now and then with what has been done so far, finished blocks of an earlier run included."""


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A finished folder: its manifest, and whether it had been finished before."""

    path: Path
    manifest: dict[str, Any]
    was_there: bool

    def summary(self) -> list[tuple[str, str, str]]:
        """Lines for a table: what, how many, and a remark."""
        counts, splits = self.manifest["counts"], self.manifest["splits"]
        sources = self.manifest["about"].get("sources")
        alone = isinstance(sources, list) and len(sources) == 1 and isinstance(sources[0], str)
        given = sources[0] if alone else ""  # of one source the place in it is enough
        lines = [("rows read", counts["rows"], "")]
        for reason, number in sorted(counts["skipped"].items(), key=lambda item: (-item[1], item[0])):
            first = counts["first"][reason].removeprefix(given).lstrip(": ")
            lines.append((f"skipped: {reason}", number, f"first: {first}"))
        lines.append(("conversations kept", counts["kept"], ""))
        lines.append((f"cut at {self.manifest['spec']['max_length']} tokens", counts["cut"], "of those kept"))
        lines.append(("assistant turns left out", counts["turns_left_out"], "not as generation would see them"))
        for name in ("train", "held_out"):
            split = splits[name]
            if split["rows"]:
                lines.append((f"{name}: conversations", split["rows"], ""))
                lines.append((f"{name}: tokens", split["tokens"], ""))
                lines.append((f"{name}: supervised tokens", split["supervised"], ""))
        return [(what, f"{number:,}", remark) for what, number, remark in lines]


def prepare(config: PrepareConfig, report: Report | None = None, *, block_rows: int = BLOCK_ROWS) -> Prepared:
    """Prepare conversations as asked, or go on with it.

    Raises:
        FileNotFoundError: a target or a source that is not there.
        ValueError: everything that `read_conversations`, `Labeller` and `PreparedWriter` refuse, or that no
            conversation can be used; the folder is then left as it was.
    """
    tokenizer = load_tokenizer(config.target)
    digests = [source_digest(source, split=config.split) for source in config.sources]
    spec = _specification(config, tokenizer, digests, block_rows)
    writer = PreparedWriter(config.out, spec, overwrite=config.overwrite)
    was_there = writer.complete
    if not was_there:
        try:
            counts = _fill(writer, config, Labeller(tokenizer), report or (lambda counts: None), block_rows)
        except Exception:
            if not writer.done:  # nothing to go on with
                writer.abandon()
            raise
        if not counts.kept:
            writer.abandon()
            reasons = "; ".join(f"{reason}: {number}" for reason, number in counts.skipped.items())
            first = "; ".join(counts.first[reason] for reason in counts.skipped)
            raise ValueError(
                f"{', '.join(config.sources)}: none of {counts.rows} rows can be used with the tokenizer of "
                f"{config.target} ({reasons or 'the sources are empty'})" + (f", first: {first}" if first else "")
            )
        writer.finish({"sources": list(config.sources), "target": config.target})
    return Prepared(writer.path, read_manifest(writer.path), was_there)


def _specification(config: PrepareConfig, tokenizer: Tokenizer, digests: list[str], block_rows: int) -> dict[str, Any]:
    template = tokenizer.inner.chat_template
    names = ("max_length", "min_supervised", "limit", "skip_invalid", "shuffle_seed", "held_out")
    return {
        "version": FORMAT_VERSION,
        "sources": digests,
        "tokenizer": tokenizer.digest,
        "chat_template": None if template is None else hashlib.sha256(json.dumps(template).encode()).hexdigest(),
        "block_rows": block_rows,
        **{name: getattr(config, name) for name in names},
    }


def _fill(writer: PreparedWriter, config: PrepareConfig, labeller: Labeller, report: Report, block_rows: int) -> Counts:
    """Write the shards that are missing; returns what became of all rows."""
    reading = (
        read_conversations(source, split=config.split, skip_invalid=config.skip_invalid) for source in config.sources
    )
    found = itertools.chain.from_iterable(reading)
    total = Counts()
    for counts in writer.done:
        total += counts
        next(itertools.islice(found, counts.rows, counts.rows), None)  # passes over them
        report(total)
    while config.limit is None or total.kept < config.limit:
        rows, counts = [], Counts()
        for one in itertools.islice(found, block_rows):
            row, change = _row(one, labeller, config)
            counts += change
            if row is not None:
                rows.append(row)
            if counts.rows % REPORT_ROWS == 0:
                report(total + counts)
            if config.limit is not None and total.kept + counts.kept >= config.limit:
                break
        if not counts.rows:
            break
        writer.write(rows, counts)
        total += counts
        report(total)
    return total


def _row(one: Conversation | Skipped, labeller: Labeller, config: PrepareConfig) -> tuple[Row | None, Counts]:
    found = labeller.label(one) if isinstance(one, Conversation) else one
    if isinstance(found, Skipped) or isinstance(one, Skipped):
        assert isinstance(found, Skipped)
        return None, Counts(rows=1, skipped={found.reason: 1}, first={found.reason: found.where})
    ids, supervised = found.ids[: config.max_length], found.supervised[: config.max_length]
    # Nothing predicts the first token of all.
    if int(supervised[1:].sum()) < config.min_supervised:
        return None, Counts(rows=1, skipped={TOO_FEW: 1}, first={TOO_FEW: found.origin})
    counts = Counts(
        rows=1,
        kept=1,
        cut=int(found.ids.size > config.max_length),
        tokens=int(ids.size),
        supervised=int(supervised.sum()),
        turns_left_out=found.turns_left_out,
    )
    return Row(Example(ids, supervised), found.origin, opening_key(one)), counts


def opening_key(conversation: Conversation) -> int:
    """A number from 0 to 2^63 - 1 out of what was said before the first answer (without text: its ids).

    Equal openings have equal keys, so a question and another answer to it are held out together or not at all.
    """
    messages = itertools.takewhile(lambda message: message.role != "assistant", conversation.messages)
    opening: Any = [[message.role, message.content] for message in messages]
    if not opening:
        opening = list((conversation.ids or ())[: (conversation.supervised or ((0, 0),))[0][0]])
    digest = hashlib.blake2b(json.dumps(opening).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - KEY_BITS)
