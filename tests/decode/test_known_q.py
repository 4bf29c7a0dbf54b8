"""On a target and a head whose p and q are known, drafts are accepted as often as enumeration says."""

from typing import Any

import numpy as np
import pytest

from spd_jax.decode.options import Options
from spd_jax.decode.sampling import Sampling
from spd_jax.decode.tree import Tree
from spd_jax.metrics import acceptance_rate, projected_accept_length
from spd_jax.plan import make_plan
from tests.bigram import BigramWeights, Tables, bigram_head, tables
from tests.decode.engine import make_pipeline

VOCAB, LAYERS, ROWS, TOKENS = 8, 8, 16, 240


def test_enumeration_on_distributions_that_can_be_done_by_hand():
    even = np.full((2, 2), 0.5)
    apart = Tables(even, np.asarray([[0.9, 0.1], [0.9, 0.1]]))
    assert apart.alpha(1, "sample") == pytest.approx(0.6)  # min(0.5, 0.9) + min(0.5, 0.1)
    assert apart.alpha(1, "top") == pytest.approx(0.5)
    assert apart.alpha(2, "top") == pytest.approx(1.0)
    assert apart.alpha(2, "sample") == pytest.approx(1.0)
    assert Tables(even, even).alpha(1, "sample") == pytest.approx(1.0)


def measured(num_stages: int, tree: Tree, repeats: int, error: float = 0.7) -> tuple[float, float, float, float]:
    """(alpha, tests, tokens a cycle, what enumeration says of alpha for siblings of one parent)."""
    weights = BigramWeights(VOCAB, LAYERS, seed=2)
    plan = make_plan(LAYERS, num_stages, num_draft_layers=1, layout="beside")
    head = bigram_head(weights, plan, error)
    decoder = make_pipeline(weights, head, plan, cycles_per_dispatch=64)
    results: list[Any] = []
    for repeat in range(repeats):
        numbers = tuple(range(repeat * ROWS, (repeat + 1) * ROWS))
        options = Options(TOKENS, Sampling(1.0), sequences=numbers, tree=tree)
        results += decoder.generate([[number % VOCAB] for number in numbers], options).results
    accepted, rejected = sum(r.accepted for r in results), sum(r.rejected for r in results)
    rate = acceptance_rate(sum(len(r.ids) - 1 for r in results) + 1, sum(r.cycles for r in results))
    known = tables(weights, head).alpha(tree.width, tree.proposal)
    return accepted / (accepted + rejected), accepted + rejected, rate, known


CASES = [(2, Tree(2, "sample")), (2, Tree(2, "top")), (2, Tree(4, "sample")), (2, Tree(4, "top"))]
CASES += [(2, Tree(1, "top")), (4, Tree(1, "sample")), (4, Tree(1, "top"))]


@pytest.mark.slow
@pytest.mark.parametrize(("num_stages", "tree"), CASES)
def test_drafts_are_accepted_as_often_as_enumeration_says(num_stages: int, tree: Tree):
    """With two stages all siblings that are tested have one parent, and so have a chain's at any number."""
    alpha, tests, rate, known = measured(num_stages, tree, repeats=2)
    assert 0.3 < known < 0.97
    assert alpha == pytest.approx(known, abs=4 * (known * (1 - known) / tests) ** 0.5)
    if tree.width == 1:
        s0 = num_stages * rate
        assert s0 == pytest.approx(projected_accept_length(num_stages, known), rel=0.04)


@pytest.mark.slow
def test_a_head_that_knows_the_target_is_never_rejected():
    """p = q: whatever the first sibling is, it is right; rows that come after it are never needed."""
    alpha, _, rate, known = measured(4, Tree(3, "sample"), repeats=1, error=0.0)
    assert known == pytest.approx(1.0)
    assert alpha > 1 - 1e-3  # rounding
    assert 4 * rate > 3.9
