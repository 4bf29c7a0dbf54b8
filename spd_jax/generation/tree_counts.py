"""What a draft tree did, as counts over sequences: which branch was right, what was dropped, how many rows idled."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from spd_jax.decode.options import SequenceResult
from spd_jax.decode.state import ACCEPTED, REJECTED


@dataclasses.dataclass(frozen=True)
class TreeCounts:
    """`accepted_by_branch[i]`: accepted drafts that were the i-th best of their siblings; `partial_flushes`:
    acceptances that dropped columns without a live row; `full_flushes`: rejections; `dropped_columns` of both;
    `dead_rows`: rows without a live node, of all rows of columns in flight, summed over cycles, a fraction."""

    accepted_by_branch: tuple[int, ...]
    partial_flushes: int
    full_flushes: int
    dropped_columns: int
    dead_rows: float

    def __str__(self) -> str:
        branches = " ".join(map(str, self.accepted_by_branch))
        return (
            f"accepted by branch {branches}; {self.partial_flushes} partial and {self.full_flushes} full flushes; "
            f"{self.dead_rows:.0%} of rows dead"
        )


def tree_counts(results: Sequence[SequenceResult], width: int) -> TreeCounts:
    """Counts over the cycles and tokens that are kept."""
    branches = [token.branch for result in results for token in result.tokens if token.event == ACCEPTED]
    records = [record for result in results for record in result.records]
    rows = width * sum(record.columns for record in records)
    return TreeCounts(
        tuple(branches.count(branch) for branch in range(width)),
        sum(record.event == ACCEPTED and record.dropped > 0 for record in records),
        sum(record.event == REJECTED for record in records),
        sum(record.dropped for record in records),
        1.0 - sum(record.live for record in records) / rows if rows else 0.0,
    )
