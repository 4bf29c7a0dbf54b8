"""A packed batch as the training pass reads it, and how full the simulated pipeline is.

Knows arrays of documents, not where they come from.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

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


def fill_shares(num_stages: int, acceptance: float | None = None) -> Float[np.ndarray, "n"]:
    """How often 1..n positions are in flight: n half of the time, else uniform (algorithm, section 7); or, where a
    share `acceptance` of all drafts is right, as often as decoding drafts with so many, all of them right.

    A rejection leaves one position in flight and every right draft adds one until the pipeline is full, so F = k has
    the share (1 - a) a^(k-1), and F = n what is left, a^(n-1). What is drafted behind a wrong token is thrown away.

    Raises:
        ValueError: acceptance is not in [0, 1].
    """
    if acceptance is None:
        return np.asarray([0.5 / (num_stages - 1)] * (num_stages - 1) + [0.5]) if num_stages > 1 else np.ones(1)
    if not 0 <= acceptance <= 1:
        raise ValueError(f"fill_acceptance is {acceptance}: a share of drafts from 0 to 1 is needed")
    reached = np.float64(acceptance) ** np.arange(num_stages)
    return reached - np.append(reached[1:], 0.0)


class Fills(NamedTuple):
    """Shares of 1..n positions in flight, `[n]`, of what is trained on and of held-out data."""

    trained: Float[np.ndarray, "n"]
    held_out: Float[np.ndarray, "n"]


def make_fills(num_stages: int, acceptance: float | None = None) -> Fills:
    """Those of `fill_shares` for both; held-out data of the published draw are read with a full pipeline.

    Raises:
        ValueError: as `fill_shares`.
    """
    trained = fill_shares(num_stages, acceptance)
    return Fills(trained, trained if acceptance is not None else fill_shares(num_stages, 1.0))


def draw_fill(
    low_BS: Int[np.ndarray, "B S"], shares_n: Float[np.ndarray, "n"], *, seed: int, step: int
) -> Int[np.ndarray, "B S"]:
    """Positions in flight of every document, k as often as `shares_n[k - 1]` says.

    The same numbers for the same seed, step and place in the batch, on whatever devices.
    """
    drawn = np.random.default_rng([seed, step]).random(low_BS.shape)
    # The last bound is beyond every number drawn: sums of shares may end a little below 1.
    fill = 1 + np.searchsorted(np.cumsum(shares_n)[:-1], drawn, side="right")
    return np.take_along_axis(fill.astype(np.int32), low_BS, axis=1)  # what was drawn where the document starts
