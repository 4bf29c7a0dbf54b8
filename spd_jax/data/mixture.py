"""Several prepared folders as one: examples of the first, then of the second, and so on.

Packing shuffles, so an epoch sees them mixed, each conversation once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spd_jax.data.prepared import Example, PreparedData


class Mixture:
    """Examples of `parts` in turn; `lengths` in tokens, as in `PreparedData`."""

    def __init__(self, parts: Sequence[PreparedData]):
        self.parts = tuple(parts)
        self.lengths = np.concatenate([np.asarray(part.lengths) for part in parts])
        self._ends = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Example:
        part, place = self._place(index)
        return part[place]

    def origin(self, index: int) -> str:
        """Where an example came from."""
        part, place = self._place(index)
        return part.origin(place)

    def _place(self, index: int) -> tuple[PreparedData, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        number = int(np.searchsorted(self._ends, index, side="right"))
        return self.parts[number], index - (int(self._ends[number - 1]) if number else 0)
