"""The mask of training against the sentence that defines it, by brute force; ranges and dense mask are the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spd_jax.nn.blockwise import Ranges
from spd_jax.plan import StagePlan, make_plan
from spd_jax.speculation.staircase import Staircase, dense_mask, staircase_of, staircase_ranges


def by_definition(plan: StagePlan, low: list[int], fill: list[int]) -> np.ndarray:
    """`[A S, A S]` of one row, key by key (algorithm, section 7); blocks from the richest type to type 0.

    A query of type a, of which d is the smallest depth, sees the key of position T <= t of its document in exactly one
    block: with j = d + t - T that of f(j) if j < F, else the deepest.
    """
    length, kinds = len(low), sorted(set(plan.anchor_type), reverse=True)
    deepest = plan.anchor_type[plan.num_stages]
    mask = np.zeros((len(kinds) * length, len(kinds) * length), bool)
    for block, kind in enumerate(kinds):
        d = next(k for k in range(plan.num_stages + 1) if plan.anchor_type[k] == kind)
        for t in range(length):
            for T in range(low[t], t + 1):
                j = d + t - T
                seen_in = plan.anchor_type[j] if j < fill[t] else deepest
                mask[block * length + t, kinds.index(seen_in) * length + T] = True
    return mask


def spread(staircase: Staircase, ranges: Ranges) -> np.ndarray:
    """`[B, A S, A S]`: ranges written out as a mask."""
    far_low, far_high, near_low, near_high = (np.asarray(x) for x in jax.tree.leaves(ranges))
    batch, length, kinds = far_high.shape
    key = np.arange(length)
    mask = np.zeros((batch, kinds, length, staircase.num_blocks, length), bool)
    far = (key >= far_low[:, :, None, None]) & (key <= far_high[..., None])
    mask[:, :, :, staircase.richest] = np.moveaxis(far, 2, 1)
    near = (key >= near_low[..., None]) & (key <= near_high[..., None])
    for index, block in enumerate(staircase.near):
        mask[:, :, :, block] = np.moveaxis(near[..., index, :], 2, 1)
    return mask.reshape(batch, kinds * length, -1)


def check(plan: StagePlan, low: np.ndarray, fill: np.ndarray) -> np.ndarray:
    """Both forms equal the definition; returns the mask."""
    staircase = staircase_of(plan)
    both = jax.jit(lambda *given: (dense_mask(staircase, *given), staircase_ranges(staircase, *given)))
    dense, ranges = jax.device_get(both(jnp.asarray(low, jnp.int32), jnp.asarray(fill, jnp.int32)))
    for row in range(len(low)):
        expected = by_definition(plan, low[row].tolist(), fill[row].tolist())
        assert np.array_equal(dense[row], expected), (plan, row)
    assert np.array_equal(spread(staircase, ranges), dense)
    # What the attention takes for granted: nothing after t, no near range that begins before t - back.
    t = np.arange(low.shape[1])
    assert (np.asarray(ranges.far_high) <= t[:, None]).all()
    assert (np.asarray(ranges.near_high) <= t[:, None, None]).all()
    assert (np.asarray(ranges.near_low) >= np.maximum(t - ranges.back, 0)[:, None, None]).all()
    return dense


PLANS = {
    "a type for every depth": StagePlan((2, 2, 2, 2), 2, "separate", (0, 2, 4, 6, 7)),
    "default anchors, four stages": make_plan(8, 4, num_draft_layers=1),
    "default anchors, eight stages": make_plan(30, 8, num_draft_layers=3),
    "every boundary": StagePlan((2, 2, 2, 2), 2, "separate", (0, 2, 4, 6, 8)),
    "only the embedding": StagePlan((2, 1), 1, "separate", (0,)),
    "two types, five depths": StagePlan((2, 2, 2, 2), 1, "beside", (0, 5)),
    "uneven stages": StagePlan((1, 4, 3), 1, "separate", (0, 2, 8)),
    "types that no depth has": StagePlan((4, 4), 1, "separate", (0, 1, 2, 3, 8)),
    "inside stages": StagePlan((5, 3), 3, "beside", (0, 1, 4, 5, 7)),
    "a single stage": StagePlan((3,), 1, "separate", (0, 2)),
}


def test_the_mask_of_six_positions_in_four_stages():
    """A06: S = 6, n = 4, every fill."""
    fill = np.repeat(np.arange(1, 5)[:, None], 6, axis=1)
    masks = check(PLANS["a type for every depth"], np.zeros((4, 6), int), fill)
    assert len({mask.tobytes() for mask in masks}) == 4


@pytest.mark.parametrize("name", PLANS)
def test_both_masks_are_the_definition(name: str):
    """Every fill, and documents of 1, 4, 3 and 9 positions in one row, each with a fill of its own."""
    plan = PLANS[name]
    n = plan.num_stages
    low = np.asarray([[0] * 17] * n + [[0, *[1] * 4, *[5] * 3, *[8] * 9]])
    fill = [[number] * 17 for number in range(1, n + 1)] + [[n, *[max(n - 1, 1)] * 4, *[1] * 3, *[(n + 1) // 2] * 9]]
    check(plan, low, np.asarray(fill))


def test_a_query_sees_every_position_of_its_document_once():
    plan = PLANS["default anchors, eight stages"]
    low = np.asarray([[0] * 4 + [4] * 8])
    mask = check(plan, low, np.full((1, 12), 8)).reshape(len(plan.types), 12, len(plan.types), 12)
    seen, t = mask.sum(axis=2), np.arange(12)
    assert np.array_equal(seen[0], (t <= t[:, None]) & (t >= low[0][:, None]))
    assert (seen == seen[0]).all()


def test_the_staircase_of_a_small_pipeline_written_out():
    """The newest position is seen as an embedding, the one before after one stage, all others after the last."""
    staircase = staircase_of(StagePlan((1, 1), 1, "separate", (0, 1, 2)))
    assert (staircase.types, staircase.depths, staircase.richest) == ((2, 1, 0), (2, 1, 0), 0)
    masks = np.asarray(dense_mask(staircase, jnp.zeros((2, 4), jnp.int32), jnp.asarray([[1] * 4, [2] * 4], jnp.int32)))
    newest = masks[:, -1].reshape(2, 3, 4)  # what type 0 at position 3 sees, by fill, block and position
    assert newest.argmax(axis=1).tolist() == [[0, 0, 0, 2], [0, 0, 1, 2]]


def test_types_that_no_depth_has_get_no_block():
    staircase = staircase_of(PLANS["types that no depth has"])
    assert staircase.types == (4, 3, 0)
    assert staircase.depths == (2, 1, 0)
    assert staircase.block_of_depth == (2, 1, 0)
