"""What a caller asks of a decoder, and what comes back; plain host values, no arrays on devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from spd_jax.decode.sampling import Sampling
from spd_jax.decode.state import ACCEPTED, REJECTED, UNDRAFTED
from spd_jax.decode.tree import CHAIN, Tree

StopCheck = Callable[[int, Sequence[int]], int | None]
"""(sequence, generated ids) -> how many ids to keep if the sequence must end here, else None."""
ForcedColumn = int | Sequence[tuple[int, int]]
"""A token as the only child of row 0 (-1: the module's own column), or (parent's row, token) for each row."""


@dataclasses.dataclass(frozen=True)
class Options:
    """One generation request.

    `max_new_tokens` None means to the end of the context. `eos_ids` end a sequence and are kept as its last token;
    `ignore_eos` forbids them instead, to the target and the draft alike. `seed` and `sequences` (a number for each
    prompt, default its index) fix the random numbers. `stop` is asked after every dispatch. `forced_drafts` replaces
    drafts: for each sequence, the column to propose at each generated position (tests and demonstrations). `tree` says
    how drafts branch.

    Raises:
        ValueError: max_new_tokens below 0; forced drafts where a tree's drafts are drawn, which would not be exact.
    """

    max_new_tokens: int | None = None
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    eos_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int = 0
    sequences: tuple[int, ...] | None = None
    log_probs: bool = False
    stop: StopCheck | None = None
    forced_drafts: Sequence[Sequence[ForcedColumn]] | None = None
    tree: Tree = CHAIN

    def __post_init__(self) -> None:
        drawn = self.sampling.temperature > 0.0 and self.tree.width > 1 and self.tree.proposal == "sample"
        if self.forced_drafts is not None and drawn:
            raise ValueError("forced drafts are not drawn from q: give the tree proposal 'top', or temperature 0")
        if self.max_new_tokens is not None and self.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens must be >= 0, or none for the whole context, found {self.max_new_tokens}")


@dataclasses.dataclass(frozen=True)
class Token:
    """One generated token: its id, the cycle that verified it (0: prefill), how (`state.Log` events; the first token
    counts as undrafted), its log-probability under the target if asked for, and the rank among its siblings of the
    draft that was right (0 the best, -1 none)."""

    id: int
    cycle: int
    event: int
    log_prob: float
    branch: int = -1


@dataclasses.dataclass(frozen=True)
class CycleRecord:
    """What one cycle did to one sequence, as `state.Log` has it: event, token verified (-1: none), the column drafted
    (tokens and their parents' rows, -1: no node), columns that the verdict dropped, columns and live rows in flight
    after it."""

    event: int
    token: int
    drafts: tuple[int, ...]
    parents: tuple[int, ...]
    dropped: int
    columns: int
    live: int

    @property
    def draft(self) -> int:
        """The best drafted token (-1: none)."""
        return self.drafts[0]


@dataclasses.dataclass
class SequenceResult:
    """A finished (or growing) sequence; counters speak of the tokens that are kept."""

    prompt_ids: list[int]
    tokens: list[Token] = dataclasses.field(default_factory=list)
    records: list[CycleRecord] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None

    @property
    def ids(self) -> list[int]:
        """Generated ids."""
        return [token.id for token in self.tokens]

    @property
    def cycles(self) -> int:
        """K: the cycle that verified the last kept token; 0 if that came from the prefill."""
        return self.tokens[-1].cycle if self.tokens else 0

    def _count(self, event: int) -> int:
        return sum(token.event == event for token in self.tokens[1:])

    @property
    def accepted(self) -> int:
        """Kept tokens whose draft was right."""
        return self._count(ACCEPTED)

    @property
    def rejected(self) -> int:
        """Kept tokens whose draft was wrong."""
        return self._count(REJECTED)

    @property
    def undrafted(self) -> int:
        """Kept tokens that no draft was tested for, without the first."""
        return self._count(UNDRAFTED)


@dataclasses.dataclass
class Generation:
    """Results of a batch with the wall-clock seconds of its two phases (compilation included on first use)."""

    results: list[SequenceResult]
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Piece:
    """New tokens of one sequence since the last piece, for streaming."""

    sequence: int
    tokens: tuple[Token, ...]
    finish_reason: str | None
