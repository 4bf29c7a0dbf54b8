"""Which position was in which stage in every cycle, reconstructed from what the decode loop logged.

The log says what happened in each cycle and which column was drafted; the schedule says the rest: columns climb one
stage a cycle, a verdict leaves the nodes that descend from the right one, a column without a live node is dropped, a
wrong draft empties the pipeline, the target's own token starts alone. So this is also a check of the log: what cannot
have happened is an error. It draws nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from spd_jax.decode.options import CycleRecord, SequenceResult
from spd_jax.decode.state import ACCEPTED, FILL, REJECTED, UNDRAFTED

Fate = Literal["verified", "accepted", "not taken", "rejected", "flushed", "in flight"]
"""What became of a token: verified before it entered (from the prefill, or the target's own after a wrong draft),
drafted and accepted, drafted on a branch that another one beat, drafted and rejected, dropped because a token before it
was wrong, or in flight at the end."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """A live token in a row of the column in a stage (1..n) in a cycle (counted from 1). `index` counts generated
    tokens from 0."""

    cycle: int
    stage: int
    index: int
    token: int
    fate: Fate
    row: int = 0


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The token that a cycle verified, and whether it had been drafted."""

    cycle: int
    index: int
    token: int
    accepted: bool


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The pipeline over the cycles of one sequence; a column has `width` rows."""

    num_stages: int
    num_cycles: int
    cells: tuple[Cell, ...]
    verdicts: tuple[Verdict, ...]
    width: int = 1

    def stages(self, cycle: int) -> list[int | None]:
        """Generated index in stage 1..n in a cycle, None for an empty stage."""
        found: list[int | None] = [None] * self.num_stages
        for cell in self.cells:
            if cell.cycle == cycle:
                found[cell.stage - 1] = cell.index
        return found


@dataclasses.dataclass
class _Node:
    """One token on its way through the pipeline."""

    row: int
    token: int
    parent: _Node | None = None
    fate: Fate = "in flight"
    alive: bool = True

    def descends_from(self, other: _Node) -> bool:
        node: _Node | None = self
        while node is not None and node is not other:
            node = node.parent
        return node is other


@dataclasses.dataclass
class _Column:
    """The nodes of one generated token."""

    index: int
    nodes: list[_Node]

    @property
    def live(self) -> list[_Node]:
        return [node for node in self.nodes if node.alive]


_Stages = list[_Column | None]


def reconstruct(result: SequenceResult, num_stages: int) -> Timeline:
    """The timeline of a sequence.

    Raises:
        ValueError: the log contradicts the schedule or the tokens; says in which cycle.
    """
    if not result.tokens:
        return Timeline(num_stages, 0, (), ())
    width = max((len(record.drafts) for record in result.records), default=1)
    first = _Column(0, [_Node(0, result.tokens[0].id, fate="verified")])
    stages: _Stages = [first, *[None] * (num_stages - 1)]
    placed: list[tuple[int, int, int, _Node]] = []
    verdicts: list[Verdict] = []
    for cycle, record in enumerate(result.records, start=1):
        for stage, column in enumerate(stages, start=1):
            placed += [] if column is None else [(cycle, stage, column.index, node) for node in column.live]
        index = len(verdicts) + 1
        wrong = _contradiction(record, stages, index, result)
        if wrong is None:
            if record.event != FILL:
                verdicts.append(Verdict(cycle, index, record.token, record.event == ACCEPTED))
            stages, wrong = _advance(record, stages, index, is_last=len(verdicts) == len(result.tokens) - 1)
        if wrong is not None:
            raise ValueError(f"cycle {cycle}: {wrong}")
    if len(verdicts) != len(result.tokens) - 1:
        raise ValueError(f"the log verifies {len(verdicts)} tokens, the sequence has {len(result.tokens)}")
    cells = tuple(Cell(cycle, stage, index, n.token, n.fate, n.row) for cycle, stage, index, n in placed)
    return Timeline(num_stages, len(result.records), cells, tuple(verdicts), width)


def _advance(record: CycleRecord, stages: _Stages, index: int, *, is_last: bool) -> tuple[_Stages, str | None]:
    """What is in the stages in the next cycle, and what is wrong; gives the nodes of this cycle their fates."""
    in_flight = [column for column in stages if column is not None]  # youngest first
    if record.event in (REJECTED, UNDRAFTED):
        for column in in_flight:
            for node in column.live:
                if node.fate == "in flight":
                    node.fate = "rejected" if column.index == index else "flushed"
        return [_Column(index, [_Node(0, record.token, fate="verified")]), *[None] * (len(stages) - 1)], None
    kept = stages
    if record.event == ACCEPTED:
        tested = next(column for column in in_flight if column.index == index)
        right = next(node for node in tested.live if node.token == record.token)
        right.fate = "accepted"
        for column in in_flight:
            for node in column.live:
                if column.index >= index and not node.descends_from(right):
                    node.fate, node.alive = "not taken", False
        kept = [None if column is None or not column.live else column for column in stages]
        dropped = sum(column is None for column in kept) - sum(column is None for column in stages)
        if not is_last and record.dropped != dropped:  # of the last cycle nothing is logged: the text has ended
            return kept, f"{dropped} columns died, {record.dropped} logged"
        if dropped or is_last:
            return [None, *kept[:-1]], None
    parents = {node.row: node for node in in_flight[0].live}
    nodes = _entering(record.drafts, record.parents, parents)
    if nodes is None:
        return kept, f"a draft behind a row that is not there, parents {list(record.parents)}"
    entering = _Column(in_flight[0].index + 1, nodes) if nodes else None
    return [entering, *kept[:-1]], None


def _entering(tokens: Sequence[int], parents: Sequence[int], live: dict[int, _Node]) -> list[_Node] | None:
    """The nodes of a drafted column; None where one has no parent."""
    found = [
        (row, token, parent) for row, (token, parent) in enumerate(zip(tokens, parents, strict=True)) if token >= 0
    ]
    if any(parent not in live for _, _, parent in found):
        return None
    return [_Node(row, token, live[parent]) for row, token, parent in found]


def _contradiction(record: CycleRecord, stages: _Stages, index: int, result: SequenceResult) -> str | None:
    """What a record says that cannot be."""
    leaving = stages[-1]
    tested = next((column.live for column in stages if column is not None and column.index == index), None)
    if record.event == FILL:
        return None if leaving is None else "a cycle without a verdict while the last stage was busy"
    if record.event not in (ACCEPTED, REJECTED, UNDRAFTED):
        return f"unknown event {record.event}"
    if leaving is None or leaving.index != index - 1:
        return f"a verdict on token {index} while its predecessor was not in the last stage"
    if index >= len(result.tokens) or result.tokens[index].id != record.token:
        return f"token {record.token} verified, which is not token {index} of the sequence"
    if record.event == UNDRAFTED:
        return None if tested is None else f"token {index} called undrafted while a draft was in flight"
    if tested is None:
        return f"a verdict on token {index}, which was not in flight"
    drafts = [node.token for node in tested]
    if (record.token in drafts) != (record.event == ACCEPTED):
        said = f"draft {drafts[0]}" if len(drafts) == 1 else f"drafts {drafts}"
        return f"{said} against verified {record.token}, logged as {record.event}"
    return None
