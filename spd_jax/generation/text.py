"""Text of a generation while it is made: incremental detokenizing and stop strings.

One object serves one batch of one decoder. Its `check` is the decoder's `StopCheck`, its `push` turns pieces into the
text that can be shown: text that may still become a stop string is held back, so nothing ever has to be taken back.

A stop string cuts ids and text at one place: the ids end with the token that completes the string, the text ends right
before it. Worked example: stop "bc", tokens "ab" and "cd": both ids stay, the text is "a". Special tokens have no text,
so those that end a sequence are looked for among the ids.
"""

from __future__ import annotations

from collections.abc import Sequence

from spd_jax.decode.options import Piece, SequenceResult
from spd_jax.weights.detokenize import IncrementalDetokenizer
from spd_jax.weights.ids import Stops
from spd_jax.weights.tokenizer import Tokenizer

NO_STOPS = Stops()


class TextStream:
    """Texts of the sequences of one batch.

    Args:
        size: number of sequences.
        stops: what ends a sequence.
    """

    def __init__(self, tokenizer: Tokenizer, size: int, stops: Stops = NO_STOPS):
        self._texts = [_Text(IncrementalDetokenizer(tokenizer), stops) for _ in range(size)]

    def check(self, sequence: int, ids: Sequence[int]) -> int | None:
        """How many ids to keep if a stop has come, else None (a `StopCheck`)."""
        return self._texts[sequence].take(ids)

    def push(self, piece: Piece) -> str:
        """The further text that a piece makes certain; all that is left when the piece ends its sequence."""
        text = self._texts[piece.sequence]
        text.add(piece)
        return text.release(ended=piece.finish_reason is not None)

    def finish(self, sequence: int, result: SequenceResult) -> str:
        """The text of a sequence of which nothing has been pushed, as a whole."""
        return self.push(Piece(sequence, tuple(result.tokens), result.finish_reason or "length"))

    def text(self, sequence: int) -> str:
        """Everything that `push` has returned for a sequence."""
        return self._texts[sequence].shown


class IdStream:
    """What stands for the texts of a batch where there is no tokenizer: the ids, with spaces between."""

    def __init__(self, size: int):
        self._shown = [""] * size

    def push(self, piece: Piece) -> str:
        """The ids of a piece."""
        fresh = "".join(f"{token.id} " for token in piece.tokens)
        self._shown[piece.sequence] += fresh
        return fresh

    def text(self, sequence: int) -> str:
        """Everything that `push` has returned for a sequence."""
        return self._shown[sequence]


class _Text:
    """One sequence. `whole` is the text of the first `read` ids, cut before the stop string if there is one."""

    def __init__(self, detokenizer: IncrementalDetokenizer, stops: Stops):
        self._detokenizer, self._stop, self._stop_ids = detokenizer, stops.strings, stops.ids
        self._longest = max(map(len, stops.strings), default=0)
        self._read, self._pushed, self._length = 0, 0, 0
        self._stopped = False
        self._whole = ""

    @property
    def shown(self) -> str:
        return self._whole[: self._length]

    def take(self, ids: Sequence[int]) -> int | None:
        """Read ids up to and including the one that is a stop or completes a stop string."""
        while (self._stop or self._stop_ids) and not self._stopped and self._read < len(ids):
            self._read_one(ids[self._read])
        return self._read if self._stopped else None

    def add(self, piece: Piece) -> None:
        """Read the ids of a piece that `take` has not seen."""
        unread = piece.tokens[max(self._read - self._pushed, 0) :]
        self._pushed += len(piece.tokens)
        for token in unread:
            self._read_one(token.id)

    def _read_one(self, index: int) -> None:
        new = self._detokenizer.push([index])
        self._read += 1
        start = max(0, len(self._whole) - self._longest + 1)
        self._whole += new
        if index in self._stop_ids:
            self._whole, self._stopped = self._whole + self._detokenizer.finish(), True
        found = [place for stop in self._stop if (place := self._whole.find(stop, start)) >= 0]
        if found:
            self._whole, self._stopped = self._whole[: min(found)], True

    def release(self, *, ended: bool) -> str:
        """Text not shown yet, without an end that may become a stop string."""
        if ended and not self._stopped:
            self._whole += self._detokenizer.finish()
        certain = len(self._whole) - (0 if ended or self._stopped else self._open_end())
        fresh = self._whole[self._length : certain]
        self._length = max(self._length, certain)
        return fresh

    def _open_end(self) -> int:
        """Length of the longest end of the text that is a proper beginning of a stop string."""
        return max(
            (
                size
                for stop in self._stop
                for size in range(1, min(len(stop), len(self._whole) + 1))
                if self._whole.endswith(stop[:size])
            ),
            default=0,
        )
