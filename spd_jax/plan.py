"""The stage plan: which layers run where, and what each depth knows.

Pure integers, no arrays, no devices. Mask, cycle, cache, weights and cost model all ask the plan; nobody recomputes it.

Vocabulary (arXiv 2605.30852): the target's L layers are cut into n stages; stage s in 1..n owns layers
(l_{s-1}, l_s]. A position's depth k is the number of stages it has completed. Anchors B = [b_0 = 0 < b_1 < ...] are the
hidden state indices that are kept (taps); f(k) = max{i : b_i <= l_k} is the richest fusion type a depth can have.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Literal

Layout = Literal["separate", "beside"]


@dataclasses.dataclass(frozen=True)
class StagePlan:
    """Layers of each stage, number of draft layers, layout and anchors.

    Layouts: `separate` puts the draft layers on rank 0 and stage s on rank s (R = n + 1 ranks); `beside` puts stage s
    on rank s - 1 and the draft layers on rank 0 beside stage 1 (R = n).

    Raises:
        ValueError: a stage without layers, no stage, or anchors that are not 0 = b_0 < b_1 < ... <= L.
    """

    stage_layers: tuple[int, ...]
    num_draft_layers: int
    layout: Layout
    anchors: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.stage_layers or min(self.stage_layers) < 1:
            raise ValueError(f"every stage needs at least one layer, found stage_layers {list(self.stage_layers)}")
        if self.num_draft_layers < 1:
            raise ValueError(f"num_draft_layers must be at least 1, found {self.num_draft_layers}")
        if self.layout not in ("separate", "beside"):
            raise ValueError(f"layout must be 'separate' or 'beside', found {self.layout!r}")
        steps = zip(self.anchors, self.anchors[1:], strict=False)
        if not self.anchors or self.anchors[0] != 0 or any(a >= b for a, b in steps):
            raise ValueError(f"anchors must start at 0 and increase strictly, found {list(self.anchors)}")
        if self.anchors[-1] > self.num_layers:
            raise ValueError(f"anchor {self.anchors[-1]} is beyond the last hidden state index {self.num_layers}")

    @property
    def num_layers(self) -> int:
        """Layers L of the target."""
        return sum(self.stage_layers)

    @property
    def num_stages(self) -> int:
        """Pipeline stages n."""
        return len(self.stage_layers)

    @property
    def num_columns(self) -> int:
        """Columns of the in-flight window: n in flight and the one that has just left."""
        return self.num_stages + 1

    @property
    def num_ranks(self) -> int:
        """Devices R that the plan needs."""
        return self.num_stages + (self.layout == "separate")

    @property
    def boundaries(self) -> tuple[int, ...]:
        """l_0 = 0, l_1, ..., l_n = L."""
        bounds = [0]
        for size in self.stage_layers:
            bounds.append(bounds[-1] + size)
        return tuple(bounds)

    @property
    def anchor_type(self) -> tuple[int, ...]:
        """f(k) for every depth k in 0..n."""
        return tuple(max(i for i, anchor in enumerate(self.anchors) if anchor <= bound) for bound in self.boundaries)

    @property
    def types(self) -> tuple[int, ...]:
        """The fusion types that some depth maps to, ascending; the others never need a projection."""
        return tuple(sorted(set(self.anchor_type)))

    @property
    def changes(self) -> tuple[int, ...]:
        """Depths k >= 1 whose fusion type differs from that of depth k - 1 (depth 1 always counts)."""
        types = self.anchor_type
        return tuple(k for k in range(1, len(types)) if k == 1 or types[k] != types[k - 1])

    @property
    def draft_rank(self) -> int:
        """The rank that runs the draft layers."""
        return 0

    def rank_of_stage(self, stage: int) -> int:
        """The rank that hosts a stage (1..n)."""
        self._check_stage(stage)
        return stage if self.layout == "separate" else stage - 1

    def stage_of_rank(self, rank: int) -> int | None:
        """The stage (1..n) on a rank, or None for a rank that only drafts."""
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"rank {rank} is outside 0..{self.num_ranks - 1}")
        stage = rank if self.layout == "separate" else rank + 1
        return stage if stage >= 1 else None

    def layers_of_stage(self, stage: int) -> range:
        """0-based target layer indices that a stage (1..n) owns."""
        self._check_stage(stage)
        return range(self.boundaries[stage - 1], self.boundaries[stage])

    def stage_of_anchor(self, index: int) -> int:
        """The stage whose layers produce anchor number `index` (>= 1); anchor 0 is the embedding and has none."""
        anchor = self.anchors[index]
        if anchor == 0:
            raise ValueError("anchor 0 is the token embedding, no stage produces it")
        return next(s for s in range(1, self.num_stages + 1) if anchor <= self.boundaries[s])

    def _check_stage(self, stage: int) -> None:
        if not 1 <= stage <= self.num_stages:
            raise ValueError(f"stage {stage} is outside 1..{self.num_stages}")

    def describe(self) -> str:
        """One line for logs and errors."""

        def count(number: int, what: str) -> str:
            return f"{number} {what}{'' if number == 1 else 's'}"

        return (
            f"{count(self.num_stages, 'stage')} {list(self.stage_layers)} on {count(self.num_ranks, 'rank')} "
            f"({count(self.num_draft_layers, 'draft layer')}, {self.layout}), "
            f"anchors (hidden state index) {list(self.anchors)}"
        )


def default_anchors(boundaries: Sequence[int]) -> tuple[int, ...]:
    """{0, l_1, l_3, l_6, L - 1} with stage indices clipped to n, without anchors whose type no depth maps to."""
    last = len(boundaries) - 1
    chosen = sorted(
        {0, boundaries[min(1, last)], boundaries[min(3, last)], boundaries[min(6, last)], boundaries[-1] - 1}
    )
    reached = {max(anchor for anchor in chosen if anchor <= bound) for bound in boundaries}
    return tuple(anchor for anchor in chosen if anchor in reached)


def even_stages(num_layers: int, num_stages: int, num_beside: int = 0) -> tuple[int, ...]:
    """Stage sizes as even as they go; `num_beside` draft layers share the first rank and count as its layers.

    The remainder goes to the first stages (10 layers in 3 stages: [4, 3, 3]); the first stage keeps at least one layer.
    """
    if num_stages < 1:
        raise ValueError(f"num_stages must be at least 1, found {num_stages}")
    if num_layers < num_stages:
        raise ValueError(f"{num_layers} layers cannot fill {num_stages} stages: choose at most {num_layers} stages")

    def spread(layers: int, stages: int) -> list[int]:
        return [layers // stages + (i < layers % stages) for i in range(stages)]

    if num_stages == 1 or num_beside == 0:
        return tuple(spread(num_layers, num_stages))
    # The largest first stage among those with the smallest bottleneck.
    candidates = range(num_layers - num_stages + 1, 0, -1)
    first = min(candidates, key=lambda s: (max(s + num_beside, -(-(num_layers - s) // (num_stages - 1))), -s))
    return (first, *spread(num_layers - first, num_stages - 1))


def balanced_stages(
    layer_costs: Sequence[float], num_stages: int, stage_overheads: Sequence[float] | None = None
) -> tuple[int, ...]:
    """Stage sizes that minimise the slowest stage exactly (dynamic programming); ties go to the smaller sum of squares.

    Args:
        layer_costs: time of each target layer, any unit.
        stage_overheads: what each stage's rank does besides its layers (draft layers that live beside it, heads).

    Raises:
        ValueError: fewer layers than stages, overheads for another number of stages, a cost negative or not finite.
    """
    length = len(layer_costs)
    if num_stages < 1 or length < num_stages:
        raise ValueError(f"{length} layers cannot fill {num_stages} stages: choose 1 to {length} stages")
    overheads = [0.0] * num_stages if stage_overheads is None else list(stage_overheads)
    if len(overheads) != num_stages:
        raise ValueError(f"stage_overheads has {len(overheads)} entries for {num_stages} stages")
    bad = [cost for cost in [*layer_costs, *overheads] if not (math.isfinite(cost) and cost >= 0)]
    if bad:
        raise ValueError(f"costs must be finite numbers >= 0, found {bad[0]}")
    prefix = [0.0]
    for cost in layer_costs:
        prefix.append(prefix[-1] + cost)

    def cut(combine: Callable[[float, float], float], limit: float) -> tuple[float, tuple[int, ...]]:
        """The smallest combined cost over stages that each cost at most `limit`, and its stage sizes."""
        best: dict[int, tuple[float, tuple[int, ...]]] = {
            0: (0.0, ())
        }  # by end: the first stages cover layers [0, end)
        for stage in range(num_stages):
            following: dict[int, tuple[float, tuple[int, ...]]] = {}
            for start, (value, sizes) in best.items():
                for end in range(start + 1, length - (num_stages - stage - 1) + 1):
                    cost = prefix[end] - prefix[start] + overheads[stage]
                    candidate = combine(value, cost)
                    if cost <= limit and (end not in following or candidate < following[end][0]):
                        following[end] = (candidate, (*sizes, end - start))
            best = following
        return best[length]

    # In two passes: the cut with the smallest squares may begin with stages that a greedy tie-break would have dropped.
    slowest, _ = cut(max, math.inf)
    _, sizes = cut(lambda squares, cost: squares + cost * cost, slowest)
    return sizes


def make_plan(
    num_layers: int,
    num_stages: int | None = None,
    *,
    num_draft_layers: int,
    layout: Layout = "separate",
    stage_layers: Sequence[int] | None = None,
    anchors: Sequence[int] | None = None,
) -> StagePlan:
    """A plan from what a user gives: a number of stages or an explicit list, a layout, optional anchors.

    Raises:
        ValueError: fewer layers than stages, or a list whose sum or length is not the model's (both values named).
    """
    if stage_layers is None:
        if num_stages is None:
            raise ValueError("give num_stages or stage_layers")
        stage_layers = even_stages(num_layers, num_stages, num_draft_layers if layout == "beside" else 0)
    if num_stages is not None and len(stage_layers) != num_stages:
        raise ValueError(
            f"stage_layers {list(stage_layers)} has {len(stage_layers)} entries, num_stages is {num_stages}"
        )
    if sum(stage_layers) != num_layers:
        raise ValueError(
            f"stage_layers {list(stage_layers)} sums to {sum(stage_layers)}, the model has {num_layers} layers"
        )
    plan = StagePlan(tuple(stage_layers), num_draft_layers, layout, anchors=(0,))
    return dataclasses.replace(plan, anchors=default_anchors(plan.boundaries) if anchors is None else tuple(anchors))


def balanced_plan(
    layer_costs: Sequence[float],
    num_stages: int,
    *,
    num_draft_layers: int,
    draft_layer_cost: float,
    head_cost: float = 0.0,
    layout: Layout = "separate",
    anchors: Sequence[int] | None = None,
) -> StagePlan:
    """A plan whose slowest stage rank is as fast as it can be, by cost of each layer.

    Args:
        layer_costs: time of each target layer, any unit; the other costs are in the same.
        draft_layer_cost: of one draft layer; they count on the first stage's rank in layout `beside`.
        head_cost: of both heads on one device; they are sharded, so every rank carries its share.

    Raises:
        ValueError: as `make_plan` and `balanced_stages`.
    """
    num_ranks = num_stages + (layout == "separate")
    overheads = [head_cost / max(num_ranks, 1)] * num_stages
    if layout == "beside" and overheads:
        overheads[0] += num_draft_layers * draft_layer_cost
    stage_layers = balanced_stages(layer_costs, num_stages, overheads)
    return make_plan(
        len(layer_costs), num_draft_layers=num_draft_layers, layout=layout, stage_layers=stage_layers, anchors=anchors
    )
