"""Another head on a target in place: the same arrays as stacking it afresh, and the target's not copied."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from spd_jax.parallel.mesh import stage_mesh
from spd_jax.parallel.stack import make_program, stack_params
from spd_jax.parallel.swap import swap_head
from spd_jax.plan import make_plan
from spd_jax.weights.random_model import RandomWeights
from tests.decode.engine import LAYER, model_config, random_head

OLD: dict[str, Any] = {"stage_layers": [1, 3, 2, 1], "num_draft_layers": 2}
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "other numbers": ({}, {"seed": 8}),
    "more draft layers than a stage has": ({"num_draft_layers": 4}, {}),
    "fewer draft layers and anchors": ({"num_draft_layers": 1, "anchors": (0, 4)}, {}),
    "layers of another kind": ({}, {"layer": LAYER.with_attention(qk_norm=True)}),
    "the target's head": ({}, {"lm_head": "target"}),
    "some of the target's rows": ({}, {"lm_head": "target", "draft_ids": (1, 5, 9, 33, 60)}),
    "some rows of its own": ({}, {"draft_ids": (0, 2, 3, 4, 59)}),
}


@pytest.mark.parametrize("layout", ["separate", "beside"])
@pytest.mark.parametrize("change", CHANGES)
def test_swapping_is_stacking_without_moving_the_target(layout: str, change: str):
    plan_changes, head_changes = CHANGES[change]
    weights = RandomWeights(model_config(7, tie_embeddings=change == "some of the target's rows"), seed=2)
    old_plan = make_plan(7, **OLD, layout=layout)
    plan = make_plan(7, **OLD | plan_changes, layout=layout)
    mesh = stage_mesh(plan.num_ranks)
    old_head, head = random_head(weights.config, old_plan), random_head(weights.config, plan, **head_changes)
    old, program = make_program(weights.config, old_head, old_plan), make_program(weights.config, head, plan)
    before = stack_params(old, weights, old_head, mesh, num_tokens=58, suppress=(5,))
    found = swap_head(before, old, program, head, mesh)
    expected = stack_params(program, weights, head, mesh, num_tokens=58, suppress=(5,))
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (one.dtype, one.sharding) == (other.dtype, other.sharding)
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    stages, old_stages = program.slots.stage, old.slots.stage
    for rank, device in enumerate(mesh.devices.flat):
        for slot, old_slot in zip(stages[rank], old_stages[rank], strict=True):
            for one, other in zip(
                leaves_on(found.slots[slot], device), leaves_on(before.slots[old_slot], device), strict=True
            ):
                assert one == other, "a layer of the target was copied"
    assert found.embedding is before.embedding


def leaves_on(state: Any, device: Any) -> list[int]:
    """Addresses of a slot's parameters on a device."""
    return [
        next(shard.data.unsafe_buffer_pointer() for shard in value[...].addressable_shards if shard.device == device)
        for _, value in nnx.to_flat_state(state)
    ]


def test_a_head_takes_the_targets_dtype():
    weights = RandomWeights(model_config(3), seed=2)
    plan = make_plan(3, 2, num_draft_layers=1)
    head, mesh = random_head(weights.config, plan), stage_mesh(3)
    program = make_program(weights.config, head, plan)
    params = stack_params(program, weights, head, mesh, dtype=jnp.bfloat16)
    found = swap_head(params, program, program, head, mesh)
    assert {x.dtype for x in jax.tree.leaves(found)} == {x.dtype for x in jax.tree.leaves(params)}
    assert found.newest.dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stage_layers": [2, 1]}, r"in stages \[1, 2\] \(separate\); found stages \[2, 1\] \(separate\)$"),
        ({"layout": "beside"}, r"found stages \[1, 2\] \(beside\)$"),
    ],
)
def test_another_cut_is_refused(changes: dict[str, Any], message: str):
    weights = RandomWeights(model_config(3), seed=2)
    options: dict[str, Any] = {"stage_layers": [1, 2], "num_draft_layers": 1, "layout": "separate"}
    programs, mesh = [], stage_mesh(3)
    for plan in (make_plan(3, **options), make_plan(3, **options | changes)):
        head = random_head(weights.config, plan)
        programs.append(make_program(weights.config, head, plan))
    params = stack_params(programs[0], weights, random_head(weights.config, programs[0].plan), mesh)
    with pytest.raises(ValueError, match=message):
        swap_head(params, *programs, random_head(weights.config, programs[1].plan), mesh)
    other = dataclasses.replace(programs[0], target=dataclasses.replace(weights.config, max_position=7))
    with pytest.raises(ValueError, match="of another target"):
        swap_head(params, programs[0], other, random_head(weights.config, programs[0].plan), mesh)
