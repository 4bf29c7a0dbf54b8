"""The error of weight files that cannot be used."""

from __future__ import annotations

from collections.abc import Sequence

_SHOWN = 20


class WeightsError(ValueError):
    """Weights that cannot be used; the message names the file, the tensors and what would be right."""


def listed(items: Sequence[str], separator: str = ", ") -> str:
    """The first items of a list, and how many more there are."""
    more = len(items) - _SHOWN
    return separator.join(items[:_SHOWN]) + (f"{separator}and {more} more" if more > 0 else "")
