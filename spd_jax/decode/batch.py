"""Host-side bookkeeping of a batch: checks of the request, padded arrays, and logs turned into sequences.

Shared by the pipelined and the autoregressive decoder, so that both end sequences in exactly the same places.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from spd_jax.decode.options import CycleRecord, ForcedColumn, Options, Piece, SequenceResult, Token
from spd_jax.decode.state import IDLE, UNDRAFTED, Log

SMALLEST_CAPACITY = 256


class BatchError(ValueError):
    """A prompt that cannot be decoded; says which and why."""


def bucket(length: int, smallest: int = SMALLEST_CAPACITY) -> int:
    """The smallest power of two >= length (and >= `smallest`): one compilation serves a bucket."""
    return max(smallest, 1 << (length - 1).bit_length())


def padded_list(ids: Sequence[int], multiple: int = 8) -> np.ndarray:
    """Ids as an array padded with -1, so that the number of ids seldom asks for another program."""
    padded = np.full(max(1, -(-len(ids) // multiple)) * multiple, -1, np.int32)
    padded[: len(ids)] = list(ids)
    return padded


@dataclasses.dataclass
class Batch:
    """A checked request: `limits[b]` tokens may be generated, `reasons[b]` says why so few (for `finish_reason`)."""

    prompts: list[list[int]]
    options: Options
    limits: np.ndarray
    results: list[SequenceResult]
    active: np.ndarray

    @property
    def size(self) -> int:
        """Number of sequences."""
        return len(self.prompts)

    @property
    def lengths(self) -> np.ndarray:
        """Prompt lengths."""
        return np.asarray([len(prompt) for prompt in self.prompts], np.int32)

    @property
    def eos_ids(self) -> np.ndarray:
        """Ids that end a sequence (none when they are ignored), padded as `padded_list`."""
        return padded_list(() if self.options.ignore_eos else self.options.eos_ids)

    @property
    def banned_ids(self) -> np.ndarray:
        """Ids that must not be emitted or drafted, padded as `padded_list`."""
        return padded_list(self.options.eos_ids if self.options.ignore_eos else ())

    def padded_ids(self, length: int) -> np.ndarray:
        """Prompts padded on the right with 0."""
        ids = np.zeros((self.size, length), np.int32)
        for row, prompt in enumerate(self.prompts):
            ids[row, : len(prompt)] = prompt
        return ids

    def seeds(self) -> np.ndarray:
        """One seed a sequence, from (seed, sequence number) alone."""
        numbers = self.options.sequences or tuple(range(self.size))
        words = [np.random.SeedSequence([self.options.seed, number]).generate_state(1)[0] for number in numbers]
        return np.asarray(words, np.uint32)

    def forced(self, length: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Forced columns by absolute position, tokens and parents' rows, `[B, length, W]`; token -1 for no node, and
        everywhere for the module's own column."""
        if self.options.forced_drafts is None:
            return None
        shape = (self.size, length, self.options.tree.width)
        tokens, parents = np.full(shape, -1, np.int32), np.zeros(shape, np.int32)
        for row, drafts in enumerate(self.options.forced_drafts):
            for position, column in zip(range(len(self.prompts[row]), length), drafts, strict=False):
                for place, (parent, token) in enumerate(_nodes(column)):
                    tokens[row, position, place], parents[row, position, place] = token, parent
        return tokens, parents

    def longest(self) -> int:
        """Positions used so far by the longest sequence that is still active."""
        used = [len(r.prompt_ids) + len(r.tokens) for r, on in zip(self.results, self.active, strict=True) if on]
        return max(used, default=0)

    def first(self, ids: np.ndarray, log_probs: np.ndarray) -> list[Piece]:
        """Take in the tokens of the prefill."""
        for row in np.flatnonzero(self.active):
            self.results[row].tokens.append(Token(int(ids[row]), 0, UNDRAFTED, float(log_probs[row])))
        return self._close(dict.fromkeys(map(int, np.flatnonzero(self.active)), 0))

    def extend(self, cycle: int, log: Log) -> list[Piece]:
        """Take in the log of a dispatch that started after `cycle` cycles."""
        log = jax.tree.map(np.asarray, log)
        before = {int(row): len(self.results[row].tokens) for row in np.flatnonzero(self.active)}
        for row in before:
            result = self.results[row]
            for step in np.flatnonzero(log.event[:, row] != IDLE):
                at = (int(step), row)
                event, verified = int(log.event[at]), int(log.token[at])
                drafts, parents = (tuple(column[at].tolist()) for column in (log.draft, log.parent))
                counts = (int(count[at]) for count in (log.dropped, log.columns, log.live))
                result.records.append(CycleRecord(event, verified, drafts, parents, *counts))
                if verified >= 0:
                    log_prob, branch = float(log.log_prob[at]), int(log.branch[at])
                    result.tokens.append(Token(verified, cycle + at[0] + 1, event, log_prob, branch))
        return self._close(before)

    def _close(self, before: dict[int, int]) -> list[Piece]:
        pieces = []
        for row, start in before.items():
            result = self.results[row]
            stop = self.options.stop(row, result.ids) if self.options.stop is not None else None
            if stop is not None:
                del result.tokens[stop:]
                del result.records[result.cycles :]
                result.finish_reason = "stop"
            elif result.tokens and result.tokens[-1].id in self.eos_ids:
                result.finish_reason = "stop"
            elif len(result.tokens) >= self.limits[row]:
                result.finish_reason = "length"
            self.active[row] = result.finish_reason is None
            if len(result.tokens) > start or result.finish_reason is not None:
                pieces.append(Piece(row, tuple(result.tokens[start:]), result.finish_reason))
        return pieces


def make_batch(prompts: Sequence[Sequence[int]], options: Options, vocab_size: int, max_length: int) -> Batch:
    """Check prompts and options against the model.

    Raises:
        BatchError: no prompt, an empty prompt, an id outside the vocabulary, a prompt that leaves no room (which one,
            what was found, what is allowed), or lists whose lengths differ from the number of prompts.
    """
    if not prompts:
        raise BatchError("no prompt was given")
    rows = [[int(token) for token in prompt] for prompt in prompts]
    for index, row in enumerate(rows):
        if not row:
            raise BatchError(f"prompt {index} of {len(rows)} is empty: it needs at least one token")
        if min(row) < 0 or max(row) >= vocab_size:
            wrong = min(row) if min(row) < 0 else max(row)
            raise BatchError(f"prompt {index} holds id {wrong}, the vocabulary is 0..{vocab_size - 1}")
        if len(row) >= max_length:
            raise BatchError(
                f"prompt {index} has {len(row)} tokens, at most {max_length - 1} leave room for one more "
                f"(context {max_length})"
            )
    for name, given in (("sequences", options.sequences), ("forced_drafts", options.forced_drafts)):
        if given is not None and len(given) != len(rows):
            raise BatchError(f"{name} has {len(given)} entries for {len(rows)} prompts")
    for index, drafts in enumerate(options.forced_drafts or ()):
        _check_forced(index, drafts, options.tree.width, vocab_size)
    room = np.asarray([max_length - len(row) for row in rows], np.int32)
    limits = room if options.max_new_tokens is None else np.minimum(room, options.max_new_tokens)
    batch = Batch(rows, options, limits.astype(np.int32), [SequenceResult(row) for row in rows], limits > 0)
    if options.max_new_tokens == 0:
        for result in batch.results:
            result.finish_reason = "length"
    return batch


def _nodes(column: ForcedColumn) -> Sequence[tuple[int, int]]:
    return [(0, column)] if isinstance(column, int | np.integer) else column


def _check_forced(index: int, drafts: Sequence[ForcedColumn], width: int, vocab_size: int) -> None:
    for column in drafts:
        nodes = _nodes(column)
        if len(nodes) > width:
            raise BatchError(
                f"forced_drafts of prompt {index} hold a column of {len(nodes)} rows, the width is {width}"
            )
        for parent, token in nodes:
            if not -1 <= token < vocab_size:
                raise BatchError(f"forced_drafts of prompt {index} hold id {token}, allowed are -1..{vocab_size - 1}")
            if not 0 <= parent < width:
                raise BatchError(f"forced_drafts of prompt {index} hold parent {parent}, rows are 0..{width - 1}")
