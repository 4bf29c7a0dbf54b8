"""Rows of a fixed number of tokens out of conversations of any length, and batches of them by step.

    stream = BatchStream(data, rows=B, row_length=S, seed=0)
    stream.steps_per_epoch; stream.batch_at(step) -> Batch; for batch in stream.batches(start, stop)

Several conversations share a row; each is a document of its own, with positions from 0, that sees nothing of the
others. A conversation longer than a row is cut into pieces, which are documents of their own too: a later piece has
only its own context. It repeats one token, the last of the piece before, because that is the one whose row predicts its
first new token; so every supervised token of a conversation (but its very first token, which nothing predicts) is
predicted in exactly one place an epoch.

`batch_at(step)` depends on the step alone, so a run that is resumed reads what it would have read, and every process of
several can take its rows of the same batch. The last batch of an epoch is filled up with empty rows.

Plain numpy: knows neither tokenizers nor files nor devices. `data` is anything with `lengths` and `[i]` as in
`spd_jax.data.prepared.PreparedData`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Int32

from spd_jax.data.prepared import Example
from spd_jax.struct import dataclass

Piece = tuple[int, int, int]
"""(example, start, stop): tokens start..stop-1 of an example."""
PackedRow = tuple[Piece, ...]


@runtime_checkable
class Examples(Protocol):
    """What can be packed."""

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each example."""
        ...

    def __getitem__(self, index: int, /) -> Example: ...


@dataclasses.dataclass(frozen=True)
class Packing:
    """Rows of pieces; `fill` is the share of row positions that hold a token, `dropped` the pieces left out."""

    rows: tuple[PackedRow, ...]
    fill: float
    dropped: int


@dataclass
class Batch:
    """Packed rows (a pytree of numpy arrays).

    `segments` counts the documents of a row from 1, 0 is padding; `positions` restart at 0 in each. `scored[b, t]` is
    true where position t predicts a supervised token: t+1 belongs to the same document and the assistant wrote it. So
    the last position of a document is never scored, and labels need no further shift: row t's label is `ids[b, t+1]`.
    """

    ids: Int32[np.ndarray, "B S"]
    segments: Int32[np.ndarray, "B S"]
    positions: Int32[np.ndarray, "B S"]
    scored: Bool[np.ndarray, "B S"]


def cut(lengths: Sequence[int] | np.ndarray, row_length: int) -> list[Piece]:
    """Every example as pieces of at most `row_length` tokens; each later piece begins one token early.

    Raises:
        ValueError: rows of fewer than two tokens, in which nothing can be predicted.
    """
    if row_length < 2:
        raise ValueError(f"row_length must be at least 2, found {row_length}: one token predicts the next")
    pieces = []
    for example, length in enumerate(np.asarray(lengths).tolist()):
        start = 0
        while start + row_length < length:
            pieces.append((example, start, start + row_length))
            start += row_length - 1
        pieces.append((example, start, length))
    return pieces


def pack(
    lengths: Sequence[int] | np.ndarray,
    row_length: int,
    *,
    seed: int | Sequence[int],
    scored: Callable[[Piece], bool] | None = None,
) -> Packing:
    """Put all examples into rows of `row_length` tokens.

    Best fit, longest first (arXiv 2404.10830): each piece goes into the fullest row that has room for it. Among pieces
    of equal length, and for the rows, the order is random, so the number of rows is the same for every seed.

    Args:
        seed: the same seed gives the same rows.
        scored: says of a piece whether it holds a position to score; pieces without one are dropped.

    Raises:
        ValueError: as `cut`.
    """
    every = cut(lengths, row_length)
    pieces = [piece for piece in every if piece[2] - piece[1] > 1 and (scored is None or scored(piece))]
    random = np.random.default_rng(seed)
    order = random.permutation(len(pieces))
    sizes = np.asarray([pieces[index][2] - pieces[index][1] for index in order], np.int64)
    rows: list[list[Piece]] = []
    open_rows: list[list[int]] = [[] for _ in range(row_length + 1)]  # by the room that is left
    rooms = 0  # bit r is set where some row has room r
    for index in order[np.argsort(-sizes, kind="stable")].tolist():
        piece = pieces[index]
        size = piece[2] - piece[1]
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            row = open_rows[room].pop()
            if not open_rows[room]:
                rooms &= ~(1 << room)
        else:
            room, row = row_length, len(rows)
            rows.append([])
        rows[row].append(piece)
        open_rows[room - size].append(row)
        rooms |= 1 << (room - size)
    shuffled = tuple(tuple(rows[row]) for row in random.permutation(len(rows)).tolist())
    fill = float(sizes.sum()) / (len(rows) * row_length) if rows else 0.0
    return Packing(shuffled, fill, len(every) - len(pieces))


def make_batch(rows: Sequence[Sequence[Example]], row_length: int, num_rows: int | None = None) -> Batch:
    """A batch of rows, each of one document after the other.

    Args:
        num_rows: rows of the batch; those that are not given are empty. None for as many as are given.

    Raises:
        ValueError: more rows than `num_rows`, or documents that are longer than a row together.
    """
    count = len(rows) if num_rows is None else num_rows
    if len(rows) > count:
        raise ValueError(f"{len(rows)} rows do not fit into a batch of {count}")
    ids, segments, positions = (np.zeros((count, row_length), np.int32) for _ in range(3))
    scored = np.zeros((count, row_length), bool)
    for row, documents in enumerate(rows):
        start = 0
        for segment, document in enumerate(documents, start=1):
            stop = start + len(document.ids)
            if stop > row_length:
                raise ValueError(f"row {row}: document {segment} ends at {stop}, a row has {row_length} positions")
            ids[row, start:stop] = document.ids
            segments[row, start:stop] = segment
            positions[row, start:stop] = np.arange(stop - start)
            scored[row, start : max(stop - 1, start)] = document.supervised[1:]
            start = stop
    return Batch(ids, segments, positions, scored)


class BatchStream:
    """Batches of `rows` packed rows, epoch after epoch; each epoch packs anew.

    `steps_per_epoch`, `fill` and `dropped` (pieces without a scored position) are the same in every epoch.
    """

    def __init__(self, data: Examples, *, rows: int, row_length: int, seed: int = 0):
        """Pack the first epoch.

        Raises:
            ValueError: no row at all, or `rows` or `row_length` too small.
        """
        if rows < 1:
            raise ValueError(f"a batch needs at least one row, found rows {rows}")
        self._data, self._batch_rows, self._row_length, self._seed = data, rows, row_length, seed
        self._lengths = np.asarray(data.lengths)
        self._unscored = self._find_unscored()
        self._epoch, self._packing = 0, self._pack(0)
        self.fill, self.dropped = self._packing.fill, self._packing.dropped
        self.steps_per_epoch = -(-len(self._packing.rows) // rows)
        if not self.steps_per_epoch:
            raise ValueError(f"nothing to learn: no piece of {len(self._lengths)} examples holds a supervised token")

    def rows_at(self, step: int) -> tuple[PackedRow, ...]:
        """The pieces in each row of a step's batch, without the empty rows that fill it up.

        Raises:
            ValueError: a negative step.
        """
        if step < 0:
            raise ValueError(f"step must not be negative, found {step}")
        epoch, index = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._packing = epoch, self._pack(epoch)
        return self._packing.rows[index * self._batch_rows : (index + 1) * self._batch_rows]

    def batch_at(self, step: int) -> Batch:
        """The batch of a step, counted from 0 over all epochs."""
        rows = [[self._document(piece) for piece in row] for row in self.rows_at(step)]
        return make_batch(rows, self._row_length, self._batch_rows)

    def batches(self, start: int = 0, stop: int | None = None) -> Iterator[Batch]:
        """The batches of steps start, start + 1, ..., stop - 1; without `stop` for ever."""
        step = start
        while stop is None or step < stop:
            yield self.batch_at(step)
            step += 1

    def _document(self, piece: Piece) -> Example:
        example, start, stop = piece
        whole = self._data[example]
        return Example(whole.ids[start:stop], whole.supervised[start:stop])

    def _pack(self, epoch: int) -> Packing:
        return pack(self._lengths, self._row_length, seed=(self._seed, epoch), scored=self._is_scored)

    def _is_scored(self, piece: Piece) -> bool:
        return piece[:2] not in self._unscored

    def _find_unscored(self) -> frozenset[tuple[int, int]]:
        """Pieces without a scored position, by example and start, looked for once for all epochs."""
        unscored, supervised, known = [], np.zeros(0, bool), -1
        for example, start, stop in cut(self._lengths, self._row_length):
            if example != known:
                supervised, known = self._data[example].supervised, example
            if not supervised[start + 1 : stop].any():
                unscored.append((example, start))
        return frozenset(unscored)
