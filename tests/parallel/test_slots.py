"""Slot tables: every layer has exactly one slot of its kind, and no more slots exist than the fullest rank needs."""

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from spd_jax.config.model import LayerConfig, MlpConfig
from spd_jax.parallel.slots import Role, SlotTable, slot_table
from spd_jax.plan import StagePlan, make_plan
from spd_jax.weights.random_model import dense_layer

LAYER = dense_layer(16, 24, 4, 2, 4, 1e-5)
KINDS = [LAYER, LAYER.with_attention(qk_norm=True), dataclasses.replace(LAYER, mlp=MlpConfig(32))]


# Plain values: the run-time checks on the library use random numbers, which hypothesis forbids while it draws.
CASES = st.tuples(
    st.lists(
        st.tuples(st.integers(1, 5), st.lists(st.sampled_from(KINDS), min_size=5, max_size=5)), min_size=1, max_size=9
    ),
    st.integers(1, 4),
    st.sampled_from(["separate", "beside"]),
    st.sampled_from(KINDS),
)


def make_case(case: tuple) -> tuple[StagePlan, list[LayerConfig], LayerConfig]:
    """A plan with stages of any size, layers of any kinds, and the kind of the draft layers."""
    stages, num_draft_layers, layout, draft = case
    sizes = [size for size, _ in stages]
    plan = make_plan(sum(sizes), stage_layers=sizes, num_draft_layers=num_draft_layers, layout=layout)
    return plan, [kind for size, kinds in stages for kind in kinds[:size]], draft


@given(CASES)
@settings(max_examples=200, deadline=None)
def test_every_layer_has_a_slot_of_its_kind(case: tuple):
    plan, layers, draft = make_case(case)
    table = slot_table(plan, layers, draft)
    assert table.num_ranks == plan.num_ranks
    for rank in range(plan.num_ranks):
        stage = plan.stage_of_rank(rank)
        own = [] if stage is None else [layers[i] for i in plan.layers_of_stage(stage)]
        assert [table.kinds[slot] for slot in table.stage[rank]] == own
        drafts = plan.num_draft_layers if rank == plan.draft_rank else 0
        assert [table.kinds[slot] for slot in table.draft[rank]] == [draft] * drafts
        used = [*table.stage[rank], *table.draft[rank]]
        assert len(set(used)) == len(used), "two layers of a rank in one slot"
        for kind in set(table.kinds):  # the lowest slots of a kind are taken first: fewer distinct structures
            mine = sorted(slot for slot in used if table.kinds[slot] == kind)
            assert mine == [slot for slot, k in enumerate(table.kinds) if k == kind][: len(mine)]
    for kind in set(KINDS):
        fullest = max(
            sum(table.kinds[slot] == kind for slot in (*table.stage[rank], *table.draft[rank]))
            for rank in range(plan.num_ranks)
        )
        assert table.kinds.count(kind) == fullest
    assert table.max_stage_slots == max(plan.stage_layers)


@given(CASES)
@settings(max_examples=100, deadline=None)
def test_roles_are_the_distinct_structures(case: tuple):
    table = slot_table(*make_case(case))
    roles, index = table.roles, table.role_index()
    assert roles[0] == Role()
    assert len(set(roles)) == len(roles)
    for rank in range(table.num_ranks):
        for stage in (0, 1):
            for draft in (0, 1):
                wanted = Role(table.stage[rank] if stage else (), table.draft[rank] if draft else ())
                assert roles[index[rank][stage][draft]] == wanted


@given(CASES)
@settings(max_examples=100, deadline=None)
def test_the_share_of_padding_counts_empty_slots(case: tuple):
    plan, kinds, draft = make_case(case)
    table = slot_table(plan, kinds, draft)
    layers = plan.num_layers + plan.num_draft_layers
    empty = table.num_ranks * len(table.kinds) - layers
    assert abs(table.padding_share() - empty / (table.num_ranks * len(table.kinds))) < 1e-12


def test_a_dense_model_shares_slots_with_its_draft_layers():
    plan = make_plan(8, 4, num_draft_layers=2)
    table = slot_table(plan, [LAYER] * 8, LAYER)
    assert table == SlotTable((LAYER,) * 2, ((), *[(0, 1)] * 4), ((0, 1), *[()] * 4))
    assert table.padding_share() == 0
    assert table.roles == (Role(), Role((), (0, 1)), Role((0, 1)))
