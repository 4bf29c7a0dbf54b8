"""What became of each token of an answer, in letters: from prefill, draft accepted, draft rejected, no draft tested."""

from __future__ import annotations

from spd_jax.decode.options import SequenceResult
from spd_jax.decode.state import ACCEPTED, REJECTED

PREFILLED, RIGHT, WRONG, NO_DRAFT = "p", "a", "r", "u"


def verdicts_of(result: SequenceResult) -> str:
    """A letter for each token."""
    letters = {ACCEPTED: RIGHT, REJECTED: WRONG}
    return "".join(
        PREFILLED if place == 0 else letters.get(token.event, NO_DRAFT) for place, token in enumerate(result.tokens)
    )
