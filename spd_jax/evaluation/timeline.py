"""Which position was in which stage in every cycle, reconstructed from what the decode loop logged.

The log says what happened in each cycle and which token was drafted; the schedule says the rest: positions climb one
stage a cycle, a wrong draft empties the pipeline, the target's own token starts alone. So this is also a check of the
log: what cannot have happened is an error. Chains only (width 1). It draws nothing.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from spd_jax.decode.options import CycleRecord, SequenceResult
from spd_jax.decode.state import ACCEPTED, FILL, REJECTED, UNDRAFTED

Fate = Literal["verified", "accepted", "rejected", "flushed", "in flight"]
"""What became of a token: verified before it entered (from the prefill, or the target's own after a wrong draft),
drafted and accepted, drafted and rejected, dropped because a token before it was wrong, or in flight at the end."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """A token in a stage (1..n) in a cycle (counted from 1). `index` counts generated tokens from 0."""

    cycle: int
    stage: int
    index: int
    token: int
    fate: Fate


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The token that a cycle verified, and whether it had been drafted."""

    cycle: int
    index: int
    token: int
    accepted: bool


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The pipeline over the cycles of one sequence."""

    num_stages: int
    num_cycles: int
    cells: tuple[Cell, ...]
    verdicts: tuple[Verdict, ...]

    def stages(self, cycle: int) -> list[int | None]:
        """Generated index in stage 1..n in a cycle, None for an empty stage."""
        found: list[int | None] = [None] * self.num_stages
        for cell in self.cells:
            if cell.cycle == cycle:
                found[cell.stage - 1] = cell.index
        return found


@dataclasses.dataclass
class _Entry:
    """One token on its way through the pipeline."""

    index: int
    token: int
    fate: Fate = "in flight"


def reconstruct(result: SequenceResult, num_stages: int) -> Timeline:
    """The timeline of a sequence.

    Raises:
        ValueError: the log contradicts the schedule or the tokens; says in which cycle.
    """
    if not result.tokens:
        return Timeline(num_stages, 0, (), ())
    stages: list[_Entry | None] = [_Entry(0, result.tokens[0].id, "verified"), *[None] * (num_stages - 1)]
    placed: list[tuple[int, int, _Entry]] = []
    verdicts: list[Verdict] = []
    for cycle, record in enumerate(result.records, start=1):
        placed += [(cycle, stage, entry) for stage, entry in enumerate(stages, start=1) if entry is not None]
        index = len(verdicts) + 1
        _check(record, stages, index, cycle, result)
        if record.event != FILL:
            verdicts.append(Verdict(cycle, index, record.token, record.event == ACCEPTED))
        stages = _advance(record, stages, index)
    if len(verdicts) != len(result.tokens) - 1:
        raise ValueError(f"the log verifies {len(verdicts)} tokens, the sequence has {len(result.tokens)}")
    cells = tuple(Cell(cycle, stage, entry.index, entry.token, entry.fate) for cycle, stage, entry in placed)
    return Timeline(num_stages, len(result.records), cells, tuple(verdicts))


def _advance(record: CycleRecord, stages: list[_Entry | None], index: int) -> list[_Entry | None]:
    """What is in the stages in the next cycle; gives the entries of this one their fates."""
    in_flight = [entry for entry in stages if entry is not None]  # youngest first
    if record.event in (REJECTED, UNDRAFTED):
        for entry in in_flight:
            if entry.fate == "in flight":
                entry.fate = "rejected" if entry.index == index else "flushed"
        return [_Entry(index, record.token, "verified"), *[None] * (len(stages) - 1)]
    if record.event == ACCEPTED:
        tested = stages[-2] if len(stages) > 1 else None
        assert tested is not None, "checked before"
        tested.fate = "accepted"
    return [_Entry(in_flight[0].index + 1, record.draft), *stages[:-1]]


def _check(record: CycleRecord, stages: list[_Entry | None], index: int, cycle: int, result: SequenceResult) -> None:
    leaving = stages[-1]
    tested = stages[-2] if len(stages) > 1 else None
    wrong = None
    if record.event == FILL:
        wrong = None if leaving is None else "a cycle without a verdict while the last stage was busy"
    elif record.event not in (ACCEPTED, REJECTED, UNDRAFTED):
        wrong = f"unknown event {record.event}"
    elif leaving is None or leaving.index != index - 1:
        wrong = f"a verdict on token {index} while its predecessor was not in the last stage"
    elif index >= len(result.tokens) or result.tokens[index].id != record.token:
        wrong = f"token {record.token} verified, which is not token {index} of the sequence"
    elif record.event == UNDRAFTED:
        wrong = None if tested is None else f"token {index} called undrafted while a draft was in flight"
    elif tested is None:
        wrong = f"a verdict on token {index}, which was not in flight"
    elif (tested.token == record.token) != (record.event == ACCEPTED):
        wrong = f"draft {tested.token} against verified {record.token}, logged as {record.event}"
    if wrong is not None:
        raise ValueError(f"cycle {cycle}: {wrong}")
