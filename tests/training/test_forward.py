"""The training pass leaks nothing: who sees whom is the mask, nothing comes from later tokens or other documents."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from spd_jax import struct
from spd_jax.data.packing import make_batch
from spd_jax.data.prepared import Example
from spd_jax.plan import StagePlan
from spd_jax.speculation.staircase import dense_mask, staircase_of
from spd_jax.training.forward import dense_attention, draft_pass
from spd_jax.training.rows import Rows
from tests.decode.engine import random_head, weights
from tests.training.passes import (
    PLAN,
    VOCAB,
    hidden_of,
    logits_of,
    random_ids,
    rows_of,
    tiny_head,
    tiny_target,
    whole_rows,
)

SHAPE = (2, 16)  # of every batch here; 16 positions are one tile


def hidden(rows: Rows, **options: Any) -> np.ndarray:
    return hidden_of(tiny_head(), PLAN, tiny_target(), rows, **({"newest_only": False} | options))


def logits(rows: Rows) -> np.ndarray:
    return logits_of(tiny_head(), PLAN, tiny_target(), rows)


@pytest.mark.parametrize("fill", [1, 3])
def test_no_row_depends_on_a_later_token(fill: int):
    """A02: new tokens at positions p >= 7 leave all rows before 7 bitwise as they were, in every block."""
    ids = random_ids(*SHAPE)
    before = hidden(whole_rows(ids, fill))
    for first in range(7, 12):
        other = ids.copy()
        other[:, first:] = (other[:, first:] + 1) % VOCAB
        after = hidden(whole_rows(other, fill))
        assert np.array_equal(after[:, :, :first], before[:, :, :first])
        assert (np.abs(after - before)[:, :, first:].max(axis=-1) > 1e-4).all()


def test_gradients_flow_exactly_where_the_mask_says():
    """One draft layer whose features are one anchor each: d row / d feature is zero but where the mask says.

    And for the row itself, which passes the attention by. Two documents in a row, one with two positions in flight, one
    with all four.
    """
    plan = StagePlan((2, 2, 2, 2), 1, "separate", (0, 2, 4, 6, 7))
    module = random_head(weights(8).config, plan)
    for projection in module.projections:  # the identity on the deepest anchor of the type: feature i is anchor i
        size, width = projection.weight.shape
        projection.weight.set_value(jnp.eye(size, width, k=width - size))
    low, fill = np.asarray([[0] * 3 + [3] * 5], np.int32), np.asarray([[2] * 3 + [4] * 5], np.int32)
    position = np.asarray([[*range(3), *range(5)]], np.int32)
    rows = Rows(np.zeros_like(low), position, low, fill, np.ones_like(low, bool))
    staircase, (graphdef, params) = staircase_of(plan), nnx.split(module)
    rng = np.random.default_rng(1)
    features = [jnp.asarray(rng.standard_normal((1, 8, 16)), jnp.float32) for _ in plan.anchors]
    weight = jnp.asarray(rng.standard_normal(16), jnp.float32)

    def outputs(features: list[jax.Array], params: Any, rows: Rows) -> jax.Array:
        hidden = draft_pass(nnx.merge(graphdef, params), staircase, features, rows, newest_only=False)
        return (hidden @ weight).reshape(-1)

    by_anchor = jax.jit(jax.jacrev(outputs))(features, params, rows)  # [A S, 1, S, D] each
    found = np.stack([np.abs(by_anchor[kind]).max(axis=(1, 3)) for kind in staircase.types], axis=1).reshape(40, 40)
    mask = np.asarray(dense_mask(staircase, jnp.asarray(low), jnp.asarray(fill)))[0]
    assert np.array_equal(found > 0, mask | np.eye(40, dtype=bool))


def documents() -> Rows:
    """Documents of 5, 8 and 1 positions, each with a fill of its own."""
    three = [Example(random_ids(length, seed=length), np.ones(length, bool)) for length in (5, 8, 1)]
    batch = make_batch([three, three[1:]], SHAPE[1])
    return rows_of(batch, np.asarray([[2] * 5 + [3] * 8 + [1] * 3, [1] * 8 + [2] * 8], np.int32))


@pytest.mark.slow
def test_ranges_and_dense_mask_give_the_same():
    np.testing.assert_allclose(hidden(documents()), hidden(documents(), attention=dense_attention), atol=2e-5)


def test_asking_for_type_0_alone_changes_nothing():
    newest = hidden(documents(), newest_only=True)
    assert newest.shape == (2, 1, 16, 16)
    np.testing.assert_allclose(newest, hidden(documents())[:, -1:], atol=1e-5)


def test_packed_documents_are_separate_documents():
    """N01: [5, 6, 7] and [8, 9] in one row and each alone give the same logits."""
    both = [Example(np.asarray(ids, np.int32), np.ones(len(ids), bool)) for ids in ((5, 6, 7), (8, 9))]
    packed, alone = make_batch([both, []], SHAPE[1]), make_batch([both[:1], both[1:]], SHAPE[1])
    together, apart = (logits(rows_of(batch, 3)) for batch in (packed, alone))
    assert np.abs(apart).max() > 0.5
    np.testing.assert_allclose(together[0, :3], apart[0, :3], atol=1e-5)
    np.testing.assert_allclose(together[0, 3:5], apart[1, :2], atol=1e-5)
    # And they would differ if one saw the other.
    merged = make_batch([[Example(packed.ids[0, :5], np.ones(5, bool))], []], SHAPE[1])
    assert np.abs(logits(rows_of(merged, 3))[0, 3:5] - together[0, 3:5]).max() > 1e-2


def test_what_pads_a_row_changes_nothing():
    """A05: the logits of a document do not depend on what stands behind it."""
    ids = random_ids(*SHAPE)
    whole = logits(whole_rows(ids, 2))
    padded = logits(whole_rows(np.where(np.arange(16) < 9, ids, 0), 2))
    assert np.array_equal(padded[:, :9], whole[:, :9])


def test_the_feature_of_the_last_anchor_is_taken_before_the_norm():
    """A09: another final norm changes nothing of what the head reads."""
    assert PLAN.anchors[-1] == PLAN.num_layers
    rows, target = whole_rows(random_ids(*SHAPE), 3), tiny_target()
    other = struct.replace(target, final_norm=2 * target.final_norm)
    assert np.array_equal(hidden(rows), hidden_of(tiny_head(), PLAN, other, rows, newest_only=False))
