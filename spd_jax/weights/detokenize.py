"""Text out of a stream of ids, in pieces that never have to be taken back.

Knows the tokenizer's decoding only; when a generation ends is the caller's business.
"""

from __future__ import annotations

from collections.abc import Sequence

from spd_jax.weights.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"


class IncrementalDetokenizer:
    """Ids in, text out; the pieces joined are the decoding of all ids.

    A character whose bytes are spread over several ids comes out once it is complete; what is still incomplete when the
    stream ends comes out of `finish` as U+FFFD, as in the decoding of all ids. One object serves one stream.

    Invariant: the text of ids before `_clean` is out, and it ended with a whole character. Only ids from `_start` on
    are decoded again, which is enough context for tokenizers that treat the first id of a text differently.

    (Tokenizers with byte tokens `<0x..>` decode a run of them as a whole: a run with an incomplete end becomes U+FFFD
    throughout in their decoding of all ids, while here its whole characters were already out.)
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True):
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._ids: list[int] = []
        self._start = 0
        self._clean = 0

    def push(self, ids: Sequence[int]) -> str:
        """The text that these further ids complete; may be empty."""
        return "".join(self._push_one(index) for index in ids)

    def finish(self) -> str:
        """What was held back, with U+FFFD for an incomplete character."""
        text = self._fresh_text()
        self._start = self._clean = len(self._ids)
        return text

    def _push_one(self, index: int) -> str:
        self._ids.append(int(index))
        text = self._fresh_text()
        if not text or text.endswith(_REPLACEMENT):
            return ""
        self._start, self._clean = self._clean, len(self._ids)
        return text

    def _fresh_text(self) -> str:
        """Text of the ids that are not out yet."""
        known = self._decode(self._ids[self._start : self._clean])
        return self._decode(self._ids[self._start :])[len(known) :]

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special=self._skip_special)
