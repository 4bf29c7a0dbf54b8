"""Stacked parameters: every tensor on the rank that the plan gives it, zeros elsewhere, nothing lost."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from spd_jax.parallel.mesh import sharded, stage_mesh
from spd_jax.parallel.stack import PipelineParams, Program, make_program, stack_params
from spd_jax.plan import Layout, StagePlan, make_plan
from spd_jax.weights.random_model import RandomWeights
from tests.decode.engine import LAYER, model_config, random_head

PLANS: list[dict[str, Any]] = [
    {"num_stages": 1, "layout": "beside", "num_draft_layers": 1},
    {"num_stages": 3, "layout": "separate", "num_draft_layers": 2},
    {"stage_layers": [1, 3, 2, 1], "layout": "beside", "num_draft_layers": 3},
]


def stacked(
    options: dict[str, Any], tie: bool = False, **changes: Any
) -> tuple[StagePlan, RandomWeights, Any, Program, PipelineParams]:
    weights = RandomWeights(model_config(7, tie_embeddings=tie), seed=2)
    plan = make_plan(7, **options)
    head = random_head(weights.config, plan, **changes)
    program = make_program(weights.config, head, plan)
    mesh = stage_mesh(plan.num_ranks)
    params = stack_params(program, weights, head, mesh, num_tokens=58, suppress=(5,))
    assert params.embedding.sharding == sharded(mesh)
    return plan, weights, head, program, params


@pytest.mark.parametrize("options", PLANS)
@pytest.mark.parametrize("draft_kind", ["the target's", "its own"])
def test_every_layer_is_on_its_rank(options: dict[str, Any], draft_kind: str):
    layer = LAYER if draft_kind == "the target's" else LAYER.with_attention(qk_norm=True)
    plan, weights, head, program, params = stacked(options, layer=layer)
    expected: dict[tuple[int, int], dict[str, np.ndarray]] = {}
    for stage in range(1, plan.num_stages + 1):
        rank = plan.rank_of_stage(stage)
        for number, slot in zip(plan.layers_of_stage(stage), program.slots.stage[rank], strict=True):
            prefix = f"layers.{number}."
            names = [path for path in weights.paths() if path.startswith(prefix)]
            expected[rank, slot] = {name.removeprefix(prefix): weights.tensor(name) for name in names}
    for number, slot in enumerate(program.slots.draft[plan.draft_rank]):
        flat = nnx.to_flat_state(nnx.state(head.layers[number]))
        expected[plan.draft_rank, slot] = {".".join(map(str, path)): np.asarray(p[...]) for path, p in flat}
    assert len(expected) == plan.num_layers + plan.num_draft_layers
    for slot, state in enumerate(params.slots):
        for path, value in nnx.to_flat_state(state):
            whole = np.asarray(value[...])
            assert len(whole) == plan.num_ranks
            for rank in range(plan.num_ranks):
                layer_here = expected.get((rank, slot))
                wanted = 0 if layer_here is None else layer_here.pop(".".join(map(str, path)))
                np.testing.assert_array_equal(whole[rank], np.broadcast_to(wanted, whole[rank].shape))
    assert not any(expected.values()), "a tensor was left behind"


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("draft_ids", [None, (1, 5, 9, 33, 60)])
@pytest.mark.parametrize("lm_head", ["own", "target"])
def test_vocabulary_tables_are_spread_over_the_ranks(tie: bool, draft_ids: tuple[int, ...] | None, lm_head: str):
    plan, weights, head, _, params = stacked(PLANS[1], tie, draft_ids=draft_ids, lm_head=lm_head)
    ranks = plan.num_ranks
    embedding, rows = weights.tensor("embedding"), weights.tensor("embedding" if tie else "head")

    def row(table: Any, token: int) -> np.ndarray:
        return np.asarray(table)[token % ranks, token // ranks]

    assert (params.head is None) == tie
    for token in range(61):
        np.testing.assert_array_equal(row(params.embedding, token), embedding[token])
        if not tie:
            np.testing.assert_array_equal(row(params.head, token), rows[token])
        assert row(params.allowed, token) == (token < 58 and token != 5)
    assert np.asarray(params.allowed).sum() == 57  # padding of the shares is not allowed either
    ids = range(61) if draft_ids is None else draft_ids
    if lm_head == "target" and draft_ids is None:
        assert params.draft_head is None
        return
    own = rows[list(ids)] if lm_head == "target" else np.asarray(head.lm_head[...])
    for place, token in enumerate(ids):
        at = row(params.draft_row, token)
        assert np.asarray(params.draft_share)[token % ranks, at] == token // ranks
        np.testing.assert_array_equal(np.asarray(params.draft_head)[token % ranks, at], own[place])
    assert (np.asarray(params.draft_row) >= 0).sum() == len(ids)


@pytest.mark.parametrize("options", PLANS)
def test_projections_are_spread_over_their_outputs(options: dict[str, Any]):
    """Only types that a depth changes to are there; type 0 is whole on the draft rank."""
    plan, _, head, _, params = stacked(options)
    assert set(params.aggregate) == {kind for kind in plan.anchor_type[1:]}
    for kind, slices in params.aggregate.items():
        whole = np.asarray(slices).reshape(-1, slices.shape[-1])
        weight = np.asarray(head.projections[kind].weight[...])
        np.testing.assert_array_equal(whole[: len(weight)], weight)
        assert not whole[len(weight) :].any()
    newest = np.asarray(params.newest)
    np.testing.assert_array_equal(newest[plan.draft_rank], np.asarray(head.projections[0].weight[...]))
    assert not np.delete(newest, plan.draft_rank, axis=0).any()


def test_parameters_are_cast_and_progress_reaches_its_end():
    weights = RandomWeights(model_config(3), seed=2)
    layout: Layout = "separate"
    plan = make_plan(3, 2, num_draft_layers=1, layout=layout)
    head, seen = random_head(weights.config, plan), []
    program = make_program(weights.config, head, plan)
    params = stack_params(
        program,
        weights,
        head,
        stage_mesh(3),
        dtype=jnp.bfloat16,
        progress=lambda done, total, name: seen.append((done, total)),
    )
    assert params.embedding.dtype == params.newest.dtype == params.final_norm.dtype == jnp.bfloat16
    assert params.draft_row.dtype == jnp.int32
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert all(done <= total for done, total in seen)
    assert len({total for _, total in seen}) == 1
