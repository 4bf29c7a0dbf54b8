"""Layer slots: which of a rank's parameter and cache arrays hold which layer.

A slot is a place for one layer of one kind, present on every rank (a rank without a layer for it holds zeros that
nobody computes with). Draft layers of the target's own kind use the target's slots: the draft rank is just another rank
that runs its slots. Pure integers and layer descriptions, no arrays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from spd_jax.config.model import LayerConfig
from spd_jax.plan import StagePlan


@dataclasses.dataclass(frozen=True)
class Role:
    """What a rank computes in a step: stage layers in these slots, draft layers in those; either may be empty."""

    stage: tuple[int, ...] = ()
    draft: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class SlotTable:
    """Slots of a plan.

    `kinds[slot]` is the layer kind of a slot; `stage[rank]` and `draft[rank]` are the slots of the rank's target layers
    and draft layers in the order they run.
    """

    kinds: tuple[LayerConfig, ...]
    stage: tuple[tuple[int, ...], ...]
    draft: tuple[tuple[int, ...], ...]

    @property
    def num_ranks(self) -> int:
        """Ranks R."""
        return len(self.stage)

    @property
    def max_stage_slots(self) -> int:
        """Target layers of the largest stage."""
        return max(len(slots) for slots in self.stage)

    @property
    def roles(self) -> tuple[Role, ...]:
        """The distinct things a rank can be asked to do; index 0 is to do nothing."""
        found = {Role(): None}
        for stage, draft in zip(self.stage, self.draft, strict=True):
            for role in (Role(stage), Role((), draft), Role(stage, draft)):
                found.setdefault(role)
        return tuple(found)

    def role_index(self) -> list[list[list[int]]]:
        """`[rank][stage active][draft active]` -> index into `roles`."""
        roles = self.roles
        return [
            [[roles.index(Role(stage if s else (), draft if d else ())) for d in (0, 1)] for s in (0, 1)]
            for stage, draft in zip(self.stage, self.draft, strict=True)
        ]

    def padding_share(self) -> float:
        """Share of all slots on all ranks that hold no layer."""
        used = sum(len(s) + len(d) for s, d in zip(self.stage, self.draft, strict=True))
        return 1.0 - used / (self.num_ranks * len(self.kinds))


def slot_table(plan: StagePlan, layers: Sequence[LayerConfig], draft_layer: LayerConfig) -> SlotTable:
    """Give every layer of the plan a slot, as few slots of each kind as the fullest rank needs."""
    per_rank: list[tuple[list[LayerConfig], list[LayerConfig]]] = []
    for rank in range(plan.num_ranks):
        stage = plan.stage_of_rank(rank)
        own = [layers[i] for i in plan.layers_of_stage(stage)] if stage is not None else []
        per_rank.append((own, [draft_layer] * plan.num_draft_layers if rank == plan.draft_rank else []))
    kinds = list(dict.fromkeys([*layers, draft_layer]))
    counts = [max([*own, *draft].count(kind) for own, draft in per_rank) for kind in kinds]
    first = [sum(counts[:i]) for i in range(len(kinds))]
    stage_slots, draft_slots = [], []
    for own, draft in per_rank:
        used = dict(zip(kinds, first, strict=True))
        assigned = []
        for kind in [*own, *draft]:
            assigned.append(used[kind])
            used[kind] += 1
        stage_slots.append(tuple(assigned[: len(own)]))
        draft_slots.append(tuple(assigned[len(own) :]))
    flat_kinds = tuple(kind for kind, count in zip(kinds, counts, strict=True) for _ in range(count))
    return SlotTable(flat_kinds, tuple(stage_slots), tuple(draft_slots))
