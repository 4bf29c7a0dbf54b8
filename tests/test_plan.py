"""The stage plan: every layer exactly once, every question answered alike, balance checked by trying everything."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spd_jax.plan import (
    Layout,
    StagePlan,
    balanced_plan,
    balanced_stages,
    default_anchors,
    even_stages,
    make_plan,
)

LAYOUTS = ("separate", "beside")
PLAN = StagePlan((3, 2, 2, 1), 2, "separate", (0, 3, 7))


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Every way to write total as a sum of that many positive numbers."""
    for cuts in itertools.combinations(range(1, total), parts - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *cuts, total)))


def assert_covers(plan: StagePlan, num_layers: int) -> None:
    owned = [layer for stage in range(1, plan.num_stages + 1) for layer in plan.layers_of_stage(stage)]
    assert owned == list(range(num_layers))
    assert [len(plan.layers_of_stage(s)) for s in range(1, plan.num_stages + 1)] == list(plan.stage_layers)


# StagePlan


def test_answers_of_an_uneven_plan():
    assert (PLAN.num_layers, PLAN.num_stages, PLAN.num_columns, PLAN.num_ranks) == (8, 4, 5, 5)
    assert PLAN.boundaries == (0, 3, 5, 7, 8)
    assert PLAN.anchor_type == (0, 1, 1, 2, 2)
    assert PLAN.types == (0, 1, 2)
    assert [list(PLAN.layers_of_stage(s)) for s in (1, 2, 3, 4)] == [[0, 1, 2], [3, 4], [5, 6], [7]]
    assert [PLAN.stage_of_anchor(i) for i in (1, 2)] == [1, 3]


def test_layouts_place_stages_and_draft():
    beside = StagePlan((2, 3, 3), 1, "beside", (0, 2, 5, 7))
    assert (beside.num_ranks, beside.draft_rank) == (3, 0)
    assert [beside.rank_of_stage(s) for s in (1, 2, 3)] == [0, 1, 2]
    assert [beside.stage_of_rank(r) for r in range(3)] == [1, 2, 3]
    separate = StagePlan((2, 3, 3), 1, "separate", (0, 2, 5, 7))
    assert (separate.num_ranks, separate.draft_rank) == (4, 0)
    assert [separate.rank_of_stage(s) for s in (1, 2, 3)] == [1, 2, 3]
    assert [separate.stage_of_rank(r) for r in range(4)] == [None, 1, 2, 3]


def test_a_plan_is_a_value():
    same = StagePlan((3, 2, 2, 1), 2, "separate", (0, 3, 7))
    assert same == PLAN
    assert hash(same) == hash(PLAN)


def test_description_names_anchors_as_hidden_state_indices():
    assert "4 stages [3, 2, 2, 1] on 5 ranks" in PLAN.describe()
    assert "anchors (hidden state index) [0, 3, 7]" in PLAN.describe()  # F05


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((), 1, "separate", (0,)), r"at least one layer, found stage_layers \[\]"),
        (((2, 0, 1), 1, "separate", (0,)), r"at least one layer, found stage_layers \[2, 0, 1\]"),
        (((2, -1), 1, "separate", (0,)), r"at least one layer, found stage_layers \[2, -1\]"),
        (((2, 2), 0, "separate", (0,)), "num_draft_layers must be at least 1, found 0"),
        (((2, 2), 1, "separate", ()), r"start at 0 and increase strictly, found \[\]"),
        (((2, 2), 1, "separate", (1, 2)), r"start at 0 and increase strictly, found \[1, 2\]"),
        (((2, 2), 1, "separate", (0, 2, 2)), r"start at 0 and increase strictly, found \[0, 2, 2\]"),
        (((2, 2), 1, "separate", (0, 3, 2)), r"start at 0 and increase strictly, found \[0, 3, 2\]"),
        (((2, 2), 1, "separate", (0, 5)), "anchor 5 is beyond the last hidden state index 4"),
    ],
)
def test_plans_that_cannot_be_are_refused(arguments: tuple[Any, ...], message: str):
    with pytest.raises(ValueError, match=message):
        StagePlan(*arguments)


@pytest.mark.parametrize(
    ("question", "argument", "message"),
    [
        ("rank_of_stage", 0, r"stage 0 is outside 1..4"),
        ("rank_of_stage", 5, r"stage 5 is outside 1..4"),
        ("layers_of_stage", 0, r"stage 0 is outside 1..4"),
        ("layers_of_stage", 5, r"stage 5 is outside 1..4"),
        ("stage_of_rank", -1, r"rank -1 is outside 0..4"),
        ("stage_of_rank", 5, r"rank 5 is outside 0..4"),
        ("stage_of_anchor", 0, "anchor 0 is the token embedding"),
    ],
)
def test_questions_about_what_is_not_there_are_refused(question: str, argument: int, message: str):
    with pytest.raises(ValueError, match=message):
        getattr(PLAN, question)(argument)


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_any_plan_is_consistent(data: st.DataObject):
    stage_layers = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=8)))
    num_layers = sum(stage_layers)
    anchors = (0, *sorted(data.draw(st.sets(st.integers(1, num_layers), max_size=6))))
    plan = StagePlan(stage_layers, data.draw(st.integers(1, 4)), data.draw(st.sampled_from(LAYOUTS)), anchors)
    assert_covers(plan, num_layers)
    assert plan.boundaries[0] == 0
    assert plan.boundaries[-1] == plan.num_layers == num_layers
    assert plan.num_columns == plan.num_stages + 1
    stages = range(1, plan.num_stages + 1)
    assert [plan.stage_of_rank(plan.rank_of_stage(s)) for s in stages] == list(stages)
    assert len({plan.rank_of_stage(s) for s in stages}) == plan.num_stages
    assert all(0 <= plan.rank_of_stage(s) < plan.num_ranks for s in stages)
    for depth, kind in enumerate(plan.anchor_type):  # f(k) = max{i : b_i <= l_k}
        assert anchors[kind] <= plan.boundaries[depth]
        assert kind + 1 == len(anchors) or anchors[kind + 1] > plan.boundaries[depth]
    assert list(plan.anchor_type) == sorted(plan.anchor_type)
    assert plan.anchor_type[0] == 0
    assert plan.types == tuple(sorted(set(plan.anchor_type)))
    for index, anchor in enumerate(anchors[1:], start=1):  # hidden state `anchor` is the output of layer anchor - 1
        assert anchor - 1 in plan.layers_of_stage(plan.stage_of_anchor(index))


# Anchors


def test_default_anchors_of_the_paper():
    assert make_plan(32, 8, num_draft_layers=4).anchors == (0, 4, 12, 24, 31)
    assert make_plan(32, 8, num_draft_layers=4).anchor_type == (0, 1, 1, 2, 2, 2, 3, 3, 4)


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "anchors"),
    [
        (32, 4, (0, 8, 24, 32)),  # stage 6 clipped to n is L itself, which hides L - 1
        (32, 16, (0, 2, 6, 12, 31)),
        (32, 1, (0, 32)),
        (8, 8, (0, 1, 3, 6, 7)),
        (1, 1, (0, 1)),
        (2, 2, (0, 1, 2)),
        (10, 3, (0, 4, 10)),
    ],
)
def test_default_anchors(num_layers: int, num_stages: int, anchors: tuple[int, ...]):
    assert make_plan(num_layers, num_stages, num_draft_layers=1).anchors == anchors


def test_default_anchors_are_all_reached_and_start_at_the_embedding():
    for num_layers in range(1, 21):
        for num_stages in range(1, num_layers + 1):
            plan = make_plan(num_layers, num_stages, num_draft_layers=1)
            assert plan.types == tuple(range(len(plan.anchors)))
            assert len(plan.anchors) <= min(5, num_stages + 1)
            assert plan.anchors == default_anchors(plan.boundaries)


def test_given_anchors_are_taken_as_they_are():
    plan = make_plan(8, 4, num_draft_layers=2, anchors=[0, 2, 6, 7])
    assert plan.anchors == (0, 2, 6, 7)
    assert plan.anchor_type == (0, 1, 1, 2, 3)
    assert make_plan(8, 4, num_draft_layers=2, anchors=[0, 2, 4, 6, 7]).anchor_type == (0, 1, 2, 3, 4)
    assert make_plan(8, 2, num_draft_layers=2, anchors=[0, 3, 4, 8]).types == (0, 2, 3)  # no depth has type 1
    assert make_plan(8, 4, num_draft_layers=2, anchors=[0]).anchor_type == (0, 0, 0, 0, 0)


# Even stages


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "sizes"),
    [(10, 3, (4, 3, 3)), (7, 2, (4, 3)), (8, 4, (2, 2, 2, 2)), (30, 4, (8, 8, 7, 7)), (5, 1, (5,))],  # M01
)
def test_even_stages(num_layers: int, num_stages: int, sizes: tuple[int, ...]):
    assert even_stages(num_layers, num_stages) == sizes


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layer_exactly_once_for_every_number_of_stages(layout: Any):
    for num_layers in range(1, 17):
        for num_stages in range(1, num_layers + 1):
            plan = make_plan(num_layers, num_stages, num_draft_layers=3, layout=layout)
            assert plan.num_stages == num_stages
            assert_covers(plan, num_layers)
            assert plan.num_ranks == num_stages + (layout == "separate")
            later = plan.stage_layers if layout == "separate" else plan.stage_layers[1:]
            assert not later or max(later) - min(later) <= 1


@pytest.mark.parametrize("beside", [0, 1, 2, 4, 9])
def test_even_stages_have_the_smallest_bottleneck_with_draft_layers_beside(beside: int):
    def bottleneck(sizes: tuple[int, ...]) -> int:
        return max(sizes[0] + beside, *sizes[1:], 0)

    for num_layers in range(1, 11):
        for num_stages in range(1, num_layers + 1):
            sizes = even_stages(num_layers, num_stages, beside)
            assert bottleneck(sizes) == min(map(bottleneck, compositions(num_layers, num_stages)))


def test_draft_layers_beside_make_the_first_stage_smaller():
    assert make_plan(32, 4, num_draft_layers=4, layout="beside").stage_layers == (5, 9, 9, 9)
    assert make_plan(8, 4, num_draft_layers=20, layout="beside").stage_layers[0] == 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fewer_layers_than_stages_is_an_error_that_says_so(layout: Any):
    with pytest.raises(ValueError, match="3 layers cannot fill 4 stages: choose at most 3 stages"):  # M01
        make_plan(3, 4, num_draft_layers=1, layout=layout)
    with pytest.raises(ValueError, match="num_stages must be at least 1, found 0"):
        make_plan(3, 0, num_draft_layers=1, layout=layout)


# Explicit stages


def test_explicit_stages():
    assert make_plan(8, num_draft_layers=1, stage_layers=[3, 2, 2, 1]).stage_layers == (3, 2, 2, 1)  # M02
    assert make_plan(8, 4, num_draft_layers=1, stage_layers=[3, 2, 2, 1]).num_stages == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stage_layers": [3, 2, 2]}, r"\[3, 2, 2\] sums to 7, the model has 8 layers"),  # M02
        ({"stage_layers": [3, 3, 2], "num_stages": 4}, r"\[3, 3, 2\] has 3 entries, num_stages is 4"),  # M02
        ({"stage_layers": [9, -1]}, r"at least one layer, found stage_layers \[9, -1\]"),
        ({"stage_layers": [-1, 9]}, r"at least one layer, found stage_layers \[-1, 9\]"),
        ({"stage_layers": []}, r"\[\] sums to 0, the model has 8 layers"),
        ({}, "give num_stages or stage_layers"),
        ({"num_stages": 4, "anchors": [0, 9]}, "anchor 9 is beyond the last hidden state index 8"),
        ({"num_stages": 4, "anchors": [2, 4]}, r"start at 0 and increase strictly, found \[2, 4\]"),
    ],
)
def test_wrong_requests_name_what_was_found(arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        make_plan(8, num_draft_layers=1, **arguments)


# Balanced stages


def stage_costs(sizes: tuple[int, ...], costs: list[float], overheads: list[float]) -> list[float]:
    ends = list(itertools.accumulate(sizes, initial=0))
    return [sum(costs[a:b]) + extra for (a, b), extra in zip(itertools.pairwise(ends), overheads, strict=True)]


def assert_balanced(costs: list[float], overheads: list[float]) -> None:
    """No other cut has a faster slowest stage, nor among equals a smaller sum of squares."""

    def rank(sizes: tuple[int, ...]) -> tuple[float, float]:
        of_stage = stage_costs(sizes, costs, overheads)
        return max(of_stage), sum(cost * cost for cost in of_stage)

    sizes = balanced_stages(costs, len(overheads), overheads)
    assert len(sizes) == len(overheads)
    assert rank(sizes) == min(map(rank, compositions(len(costs), len(overheads))))


# Whole numbers as floats: sums are exact, so equality means equality.
whole = st.integers(0, 9).map(float)


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_balance_is_the_best_of_all_cuts(data: st.DataObject):
    costs = data.draw(st.lists(whole, min_size=1, max_size=8))
    count = data.draw(st.integers(1, len(costs)))
    assert_balanced(costs, data.draw(st.lists(whole, min_size=count, max_size=count)))


def test_ties_go_to_the_smaller_sum_of_squares():
    # Both cuts have a stage of 6. The better one starts with three stages of which one is slower than it need be, which
    # a search that keeps only the fastest start of each length loses.
    costs = [2.0, 3.0, 5.0, 1.0, 5.0, 1.0]
    assert stage_costs((2, 1, 1, 2), costs, [0.0] * 4) == [5.0, 5.0, 1.0, 6.0]
    assert stage_costs((1, 1, 2, 2), costs, [0.0] * 4) == [2.0, 3.0, 6.0, 6.0]
    assert balanced_stages(costs, 4) == (1, 1, 2, 2)
    assert_balanced(costs, [0.0] * 4)


def test_balance_without_overheads_is_even():
    assert sorted(balanced_stages([1.0] * 10, 3)) == [3, 3, 4]
    assert balanced_stages([1.0] * 8, 4) == (2, 2, 2, 2)


def test_balance_leaves_room_for_what_else_a_rank_does():
    assert balanced_stages([1.0] * 7, 3, [2.0, 0.0, 0.0]) == (1, 3, 3)
    assert balanced_stages([4.0, 1.0, 1.0, 1.0, 1.0], 2) == (1, 4)


@pytest.mark.parametrize(
    ("costs", "num_stages", "overheads", "message"),
    [
        ([1.0, 1.0], 3, None, "2 layers cannot fill 3 stages: choose 1 to 2 stages"),
        ([1.0, 1.0], 0, None, "2 layers cannot fill 0 stages"),
        ([1.0, 1.0], -1, None, "2 layers cannot fill -1 stages"),
        ([1.0, 1.0], 2, [1.0], "stage_overheads has 1 entries for 2 stages"),
        ([1.0, -1.0], 2, None, r"finite numbers >= 0, found -1.0"),
        ([1.0, float("nan")], 2, None, "finite numbers >= 0, found nan"),
        ([1.0, float("inf")], 2, None, "finite numbers >= 0, found inf"),
        ([1.0, 1.0], 2, [0.0, float("inf")], "finite numbers >= 0, found inf"),
    ],
)
def test_costs_that_cannot_be_are_refused(costs: Any, num_stages: int, overheads: Any, message: str):
    with pytest.raises(ValueError, match=message):
        balanced_stages(costs, num_stages, overheads)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_a_balanced_plan_has_the_fastest_slowest_rank(layout: Layout, num_stages: int) -> None:
    costs, draft, heads = [3.0, 1.0, 1.0, 1.0, 3.0, 1.0, 1.0, 1.0], 1.5, 2.0
    plan = balanced_plan(costs, num_stages, num_draft_layers=2, draft_layer_cost=draft, head_cost=heads, layout=layout)

    def slowest(sizes: tuple[int, ...]) -> float:
        ends = list(itertools.accumulate(sizes))
        ranks = [sum(costs[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
        ranks[0] += 2 * draft if layout == "beside" else 0.0
        return max(ranks) + heads / plan.num_ranks

    assert slowest(plan.stage_layers) == min(map(slowest, compositions(8, num_stages)))
    assert (plan.layout, plan.num_draft_layers, plan.num_layers) == (layout, 2, 8)
