"""The draft tree by its definition, for scripted drafts: nodes that know their parents, columns that know their stage.

Knows the right text, so it needs no model; nothing is shared with the decode loop. What it predicts is exact: events,
cycles, which branch was right, how many columns a verdict dropped and how many live nodes it left.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from spd_jax.decode.options import SequenceResult
from spd_jax.decode.state import ACCEPTED, FILL, REJECTED, UNDRAFTED

Column = list[tuple[int, int]]  # (parent's row, token), the best first


@dataclasses.dataclass
class Node:
    token: int
    parent: "Node | None"
    row: int
    alive: bool = True

    def descends_from(self, other: "Node") -> bool:
        node: Node | None = self
        while node is not None:
            if node is other:
                return True
            node = node.parent
        return False


@dataclasses.dataclass
class InFlight:
    position: int  # generated tokens before it
    nodes: list[Node]

    @property
    def live(self) -> list[Node]:
        return [node for node in self.nodes if node.alive]


@dataclasses.dataclass(frozen=True)
class Expected:
    """One cycle: event, verified token, branch, columns dropped, columns and live nodes in flight after it."""

    event: int
    token: int
    branch: int
    dropped: int
    columns: int
    live: int


def simulate(text: Sequence[int], script: Sequence[Column], stages: int) -> list[Expected]:
    """The cycles of a text whose column for token i is always `script[i]`."""
    flight: list[InFlight | None] = [InFlight(0, [Node(text[0], None, 0)]), *[None] * (stages - 1)]
    cycles: list[Expected] = []
    verified = 1
    while verified < len(text):
        leaving = flight[-1]
        columns = [column for column in flight if column is not None]
        newest = max(column.position for column in columns)
        entering: InFlight | None = None
        event, token, branch, dropped = FILL, -1, -1, 0
        if leaving is not None:
            (chosen,) = leaving.live
            token = text[verified]
            verified += 1
            after = [column for column in columns if column.position > leaving.position]
            siblings = [s for column in after if column.position == leaving.position + 1 for s in column.live]
            right = next((s for s in siblings if s.token == token), None)
            event = UNDRAFTED if not siblings else REJECTED if right is None else ACCEPTED
            branch = -1 if right is None else siblings.index(right)
            for column in after:
                for node in column.nodes:
                    node.alive = node.alive and right is not None and node.descends_from(right)
            dead = [column for column in after if not column.live]
            dropped = len(dead)
            flight = [None if column in dead else column for column in flight]
            if right is None:
                entering = InFlight(leaving.position + 1, [Node(token, chosen, 0)])
        if entering is None and not dropped:
            last = next(column for column in columns if column.position == newest)
            places = {node.row: node for node in last.live}
            nodes = [
                Node(token, places[parent], row)
                for row, (parent, token) in enumerate(script[newest + 1] if newest + 1 < len(script) else [])
                if parent in places
            ]
            entering = InFlight(newest + 1, nodes) if nodes else None
        flight = [entering, *flight[:-1]]
        goes_on = verified < len(text)
        after = [column for column in flight if column is not None and goes_on]
        live = sum(len(column.live) for column in after)
        cycles.append(Expected(event, token, branch, dropped if goes_on else 0, len(after), live))
    return cycles


def happened(result: SequenceResult) -> list[Expected]:
    """What a decoder logged."""
    branches = iter(token.branch for token in result.tokens[1:])
    return [
        Expected(r.event, r.token, next(branches) if r.token >= 0 else -1, r.dropped, r.columns, r.live)
        for r in result.records
    ]


def random_script(
    text: Sequence[int], width: int, vocab: int, *, seed: int, hit: float = 0.8, astray: float = 0.1, beyond: int = 9
) -> list[Column]:
    """Columns in which the right token stands, with probability `hit`, in some row behind the right row before.

    Other rows hold wrong tokens, or the right one behind a wrong parent; some parents have no row at all. With
    probability `astray` no row of a column has the right parent. `beyond` columns follow the text.
    """
    rng = np.random.default_rng(seed)
    script: list[Column] = [[]]
    row = 0
    for token in [*text[1:], *[0] * beyond]:
        wrong = [t for t in rng.permutation(vocab).tolist() if t != token]
        lost = rng.random() < astray
        parents = rng.choice([p for p in range(width) if not (lost and p == row)], width).tolist()
        column = [(parent, wrong[i]) for i, parent in enumerate(parents)]
        for i, parent in enumerate(parents):
            if parent != row and rng.random() < 0.3 and (parent, token) not in column:
                column[i] = (parent, token)
        place = int(rng.integers(0, width))
        if lost or rng.random() >= hit:
            row = 0
        else:
            column[place] = (row, token)
            row = place
        script.append(column)
    return script


def filled(script: Sequence[Column], width: int) -> list[Any]:
    """A script as forced drafts: columns filled up with rows that hold nothing."""
    return [[*column, *[(0, -1)] * (width - len(column))] if column else -1 for column in script]
