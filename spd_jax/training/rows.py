"""A packed batch as the training pass reads it, and how full the simulated pipeline is.

Knows arrays of documents, not where they come from.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Int

from spd_jax import struct


@struct.dataclass
class Rows:
    """Packed documents, `[B, S]` each: token ids, position in the document, index in the row at which the document
    starts, positions in flight F (1..n), all int32; and whether a position is scored, bool."""

    ids: Any
    positions: Any
    low: Any
    fill: Any
    scored: Any


def document_starts(segments_BS: Int[np.ndarray, "B S"]) -> Int[np.ndarray, "B S"]:
    """Index at which the document of every position starts; documents are runs of equal numbers."""
    index = np.arange(segments_BS.shape[1], dtype=np.int32)
    begins = np.ones(segments_BS.shape, bool)
    begins[:, 1:] = segments_BS[:, 1:] != segments_BS[:, :-1]
    return np.maximum.accumulate(np.where(begins, index, np.int32(0)), axis=1)


def draw_fill(
    low_BS: Int[np.ndarray, "B S"], num_stages: int, *, seed: int, step: int, full: bool = False
) -> Int[np.ndarray, "B S"]:
    """Positions in flight of every document: n with probability 1/2, else uniform in 1..n-1 (algorithm, section 7).

    The same numbers for the same seed, step and place in the batch, on whatever devices. `full` gives n everywhere.
    """
    fill = np.full(low_BS.shape, num_stages, np.int32)
    if full or num_stages == 1:
        return fill
    rng = np.random.default_rng([seed, step])
    partly = rng.random(low_BS.shape) < 0.5
    drawn = rng.integers(1, num_stages, low_BS.shape, dtype=np.int32)
    drawn = np.where(partly, drawn, fill)
    return np.take_along_axis(drawn, low_BS, axis=1)  # what was drawn where the document starts
