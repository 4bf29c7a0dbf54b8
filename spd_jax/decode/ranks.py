"""Per-rank constants of a plan as arrays, looked up with this rank's index inside the program."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from spd_jax.parallel.mesh import AXIS
from spd_jax.parallel.stack import Program


def _here(table: np.ndarray) -> Array:
    return jnp.asarray(table)[jax.lax.axis_index(AXIS)]


def stage_number(program: Program) -> Array:
    """The stage (1..n) of this rank, 0 where there is none."""
    stages = [program.plan.stage_of_rank(rank) or 0 for rank in range(program.plan.num_ranks)]
    return _here(np.asarray(stages, np.int32))


def is_draft_rank(program: Program) -> Array:
    """Whether this rank runs the draft layers."""
    return jax.lax.axis_index(AXIS) == program.plan.draft_rank


def is_draft_slot(program: Program) -> Array:
    """`[slots]`: whether a slot holds a draft layer on this rank."""
    table = np.zeros((program.plan.num_ranks, len(program.slots.kinds)), bool)
    for rank, slots in enumerate(program.slots.draft):
        table[rank, list(slots)] = True
    return _here(table)


def tap_slots(program: Program) -> tuple[Array, Array]:
    """For anchors 1..m-1: which of the stage's layers produces it here, and whether this rank does at all."""
    plan = program.plan
    count = len(plan.anchors) - 1
    where = np.zeros((plan.num_ranks, count), np.int32)
    owned = np.zeros((plan.num_ranks, count), bool)
    for index in range(1, count + 1):
        stage = plan.stage_of_anchor(index)
        rank = plan.rank_of_stage(stage)
        where[rank, index - 1] = plan.anchors[index] - plan.boundaries[stage - 1] - 1
        owned[rank, index - 1] = True
    return _here(where), _here(owned)
