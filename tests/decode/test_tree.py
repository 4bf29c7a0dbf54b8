"""The draft tree in the pipeline: the text stays the target's own, every cycle is what the tree's definition says."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from spd_jax.decode.batch import BatchError
from spd_jax.decode.options import Options
from spd_jax.decode.sampling import Sampling
from spd_jax.decode.state import ACCEPTED, FILL, REJECTED
from spd_jax.decode.tree import (
    Proposals,
    Tree,
    below_parent,
    best_children,
    enter_column,
    lone_child,
    no_nodes,
)
from spd_jax.plan import Layout
from tests.decode import published
from tests.decode.engine import BATCH, OWN, VOCAB, in_batches, pipeline, random_prompts, script
from tests.decode.stepwise import Run, Stepper
from tests.decode.test_lossless import reference
from tests.decode.tree_model import Expected, filled, happened, random_script, simulate
from tests.naive import CycleInput, ModuleDraft, NaiveDecoder

TOKENS = 20
PROMPTS = random_prompts(12)
GATE = [(3, "separate", 4)]
REST = [(n, layout, width) for n in (1, 2, 5, 8) for layout in ("separate", "beside") for width in (2, 4, 8)]
REST += [(3, "separate", 2)]


@pytest.mark.parametrize(
    ("num_stages", "layout", "width"), [*GATE, *(pytest.param(*one, marks=pytest.mark.slow) for one in REST)]
)
def test_scripted_trees_go_as_the_definition_says(num_stages: int, layout: Layout, width: int):
    """Right and wrong rows anywhere, dead parents, columns that go astray: texts, events, branches and counters."""
    decoder, texts = pipeline(8, num_stages, layout), reference(8)
    scripts = [random_script(text, width, VOCAB, seed=i) for i, text in enumerate(texts)]
    forced = [filled(s, width) for s in scripts]
    results = in_batches(decoder, PROMPTS, {"max_new_tokens": TOKENS, "forced_drafts": forced, "tree": Tree(width)})
    seen: list[Expected] = []
    for result, text, one in zip(results, texts, scripts, strict=True):
        assert result.ids == text
        expected = simulate(text, one, num_stages)
        assert happened(result) == expected
        seen += expected
    own = {"max_new_tokens": TOKENS, "forced_drafts": [OWN] * len(PROMPTS), "tree": Tree(width)}
    assert [result.ids for result in in_batches(decoder, PROMPTS, own)] == texts
    if num_stages > 1:
        assert {cycle.branch for cycle in seen} >= {-1, 0, 1}
        assert sum(cycle.event == REJECTED for cycle in seen) > 10
        if num_stages > 2:
            assert sum(cycle.event == ACCEPTED and cycle.dropped > 0 for cycle in seen) > 5, "partial rollbacks"


@pytest.mark.parametrize("row", [1, 3])
def test_a_text_of_second_and_of_fourth_branches_never_stops(row: int):
    """As many cycles as an oracle's chain needs, though the best branch is never right."""
    decoder, texts = pipeline(8, 3, "separate"), reference(8)
    forced = []
    for text in texts[:BATCH]:
        wrong = [[(0 if i == 1 else row, (token + 1 + k) % VOCAB) for k in range(4)] for i, token in enumerate(text)]
        for i, column in enumerate(wrong[1:], start=1):
            column[row] = (column[row][0], text[i])
        forced.append([-1, *wrong[1:]])
    options = {"max_new_tokens": TOKENS, "forced_drafts": forced, "tree": Tree(4)}
    for result, text in zip(in_batches(decoder, PROMPTS[:BATCH], options), texts, strict=False):
        assert result.ids == text
        assert [token.branch for token in result.tokens[1:]] == [row] * (TOKENS - 1)
        assert result.cycles == TOKENS + 3 - 2


@pytest.mark.slow
def test_a_scripted_chain_is_a_chain_at_any_width():
    decoder, texts = pipeline(8, 3, "separate"), reference(8)
    forced = [script("1101", text) for text in texts[:BATCH]]
    chain, wide = (
        in_batches(decoder, PROMPTS[:BATCH], {"max_new_tokens": TOKENS, "forced_drafts": forced, "tree": Tree(width)})
        for width in (1, 4)
    )
    for one, other in zip(chain, wide, strict=True):
        assert [(t.id, t.event, t.cycle, t.branch) for t in one.tokens] == [
            (t.id, t.event, t.cycle, t.branch) for t in other.tokens
        ]


@pytest.mark.slow
def test_a_batch_of_one_and_of_three_are_the_batch_of_four():
    decoder, texts = pipeline(8, 5, "beside"), reference(8)
    for rows in ([6], [2, 5, 9]):
        scripts = [random_script(texts[row], 4, VOCAB, seed=row) for row in rows]
        options = Options(TOKENS, forced_drafts=[filled(s, 4) for s in scripts], tree=Tree(4))
        results = decoder.generate([PROMPTS[row] for row in rows], options).results
        for row, one, result in zip(rows, scripts, results, strict=True):
            assert result.ids == texts[row]
            assert happened(result) == simulate(texts[row], one, 5)


# A trained head's own tree, against the naive decoder's arithmetic.

TREE_TOKENS, MOST = 40, 90


@functools.cache
def own_tree(width: int) -> tuple[Stepper, Run]:
    stepper = Stepper(published.decoder("separate"), MOST, Tree(width))
    return stepper, stepper.run(published.prompts(), published.options(TREE_TOKENS, tree=stepper.tree))


@pytest.mark.parametrize("width", [4, pytest.param(2, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)])
def test_a_trained_heads_tree_writes_the_targets_text_in_fewer_cycles(width: int):
    chain = published.decoder("separate").generate(published.prompts(), published.options(TREE_TOKENS)).results
    _, run = own_tree(width)
    for result, text in zip(run.results, published.texts(), strict=True):
        assert result.ids == text[: len(result.ids)]
        assert result.finish_reason is not None
    assert sum(r.cycles for r in run.results) < sum(r.cycles for r in chain)
    branches = [token.branch for result in run.results for token in result.tokens]
    assert branches.count(0) > branches.count(1) > 0
    records = [record for result in run.results for record in result.records]
    assert any(record.event == ACCEPTED and record.dropped for record in records), "partial rollbacks"


def path_of(position: int, row: int, stages: np.ndarray, nodes: Any, sequence: int) -> list[int]:
    """Tokens in flight of a node's ancestors and itself, the oldest first."""
    count = nodes.token.shape[1]
    oldest = min(p for p in stages[sequence].tolist() if p >= 0)
    lineage = nodes.lineage[sequence, position % count, row]
    return [int(nodes.token[sequence, p % count, lineage[p % count]]) for p in range(oldest, position + 1)]


def test_every_row_of_a_tree_drafts_what_the_naive_decoder_drafts_for_its_path():
    """Ancestor masks of the stages and of the draft, features by depth, with gaps after partial rollbacks."""
    loaded, (_, run) = published.fixture(), own_tree(4)
    naive = NaiveDecoder(loaded.target, loaded.plan, loaded.head, length=max(map(len, published.prompts())) + 60)
    draft = naive.draft
    assert isinstance(draft, ModuleDraft)
    compared, gaps = 0, 0
    for sequence, result in enumerate(run.results):
        for cycle, (stages, nodes) in list(enumerate(run.before))[sequence % 3 : len(result.records) : 3]:
            by_position = {int(p): s for s, p in enumerate(stages[sequence]) if p >= 0}
            newest, oldest = max(by_position), min(by_position)
            gaps += by_position[newest] != 0 or by_position[oldest] - by_position[newest] != newest - oldest
            known = [*result.prompt_ids, *result.ids][:oldest]
            for row in np.flatnonzero(nodes.alive[sequence, newest % nodes.token.shape[1]]):
                tokens = [*known, *path_of(newest, int(row), stages, nodes, sequence)]
                depths = [by_position.get(p, loaded.plan.num_stages) for p in range(newest + 1)]
                hidden, logits = naive._run(tokens, depths)
                given = CycleInput(tuple(tokens), np.asarray(depths), len(result.prompt_ids), hidden, logits)
                np.testing.assert_allclose(run.row_logits[cycle, sequence, row], draft(given), atol=1e-4)
                compared += 1
    assert compared > 150
    assert gaps > 5


def test_the_best_children_of_live_rows_enter():
    """By cumulative log q, of the rows that the verdict of the same cycle left alive."""
    (stepper, run), checked = own_tree(4), 0
    ids = stepper.draft_ids
    for sequence, result in enumerate(run.results):
        for cycle, record in enumerate(result.records[:-1]):
            if record.event not in (FILL, ACCEPTED) or record.dropped:
                continue
            (stages, _), (later, nodes) = run.before[cycle], run.before[cycle + 1]
            newest, count = int(stages[sequence].max()), nodes.token.shape[1]
            assert later[sequence].max() == newest + 1
            old, new = newest % count, (newest + 1) % count
            logits = run.row_logits[cycle, sequence].astype(np.float64)
            scores = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)) + nodes.log_q[sequence, old][:, None]
            scores[~nodes.alive[sequence, old]] = -np.inf
            best = np.argsort(-scores, axis=None, kind="stable")[:4]
            np.testing.assert_allclose(nodes.log_q[sequence, new], scores.ravel()[best], atol=1e-4)
            assert nodes.alive[sequence, new].all()
            assert (nodes.token[sequence, new] == ids[best % len(ids)]).all()
            assert (nodes.lineage[sequence, new, :, old] == best // len(ids)).all()
            assert record.drafts == tuple(nodes.token[sequence, new])
            assert record.parents == tuple(nodes.lineage[sequence, new, :, old])
            checked += 1
    assert checked > 60


# The pieces.


def test_perturbed_children_stay_below_their_parent_in_the_same_order():
    rng = np.random.default_rng(0)
    perturbed = jnp.asarray(rng.gumbel(size=(5, 3, 6)) * 3, jnp.float32).at[:, :, 4:].set(-jnp.inf)
    parent = jnp.asarray(rng.gumbel(size=(5, 3, 1)), jnp.float32)
    lowered = np.asarray(below_parent(perturbed, parent))
    assert not np.isnan(lowered).any()
    np.testing.assert_allclose(lowered.max(axis=2), parent[..., 0], rtol=1e-6)
    orders = [np.argsort(values, axis=2, kind="stable") for values in (lowered, np.asarray(perturbed))]
    np.testing.assert_array_equal(*orders)
    assert np.isneginf(lowered[..., 4:]).all()
    # exp(-parent) - exp(-largest) + exp(-child), the definition, where it does not overflow
    z, g = np.asarray(perturbed, np.float64).max(axis=2, keepdims=True), np.asarray(perturbed, np.float64)[..., :4]
    direct = -np.log(np.exp(-np.asarray(parent, np.float64)) - np.exp(-z) + np.exp(-g))
    np.testing.assert_allclose(lowered[..., :4], direct, rtol=1e-4, atol=1e-4)


def test_beam_search_draws_pairs_without_replacement():
    """Two steps of W = 2 over three tokens: the pairs of leaves are as if drawn from all nine texts one by one."""
    draws, width = 20000, 2
    first, second = np.asarray([0.6, 0.3, 0.1]), np.asarray([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8], [1 / 3] * 3])
    root = enter_column(
        no_nodes(draws, 3, width),
        jnp.zeros(draws, jnp.int32),
        jnp.ones(draws, bool),
        lone_child(jnp.zeros(draws, jnp.int32), jnp.zeros(draws, jnp.int32), width),
    )

    def proposals(log_q: jax.Array, key: int) -> Proposals:
        noise = jax.random.gumbel(jax.random.key(key), log_q.shape)
        return Proposals(jnp.broadcast_to(jnp.arange(3), log_q.shape), log_q + noise, log_q)

    log_first = jnp.broadcast_to(jnp.log(jnp.asarray(first, jnp.float32)), (draws, width, 3))
    column = best_children(root, jnp.zeros(draws, jnp.int32), root.alive[:, 0], proposals(log_first, 0))
    one = enter_column(root, jnp.ones(draws, jnp.int32), jnp.ones(draws, bool), column)
    log_second = jnp.log(jnp.asarray(second, jnp.float32))[column.token]
    leaves = best_children(one, jnp.ones(draws, jnp.int32), column.alive, proposals(log_second, 1))
    parent_token = np.take_along_axis(np.asarray(column.token), np.asarray(leaves.parent), axis=1)
    text = parent_token * 3 + np.asarray(leaves.token)
    p = (first[:, None] * second).ravel()
    counts = np.zeros((9, 9))
    np.add.at(counts, (text[:, 0], text[:, 1]), 1)
    wanted = p[:, None] * p / (1 - p[:, None]) * (1 - np.eye(9)) * draws
    assert counts[wanted == 0].sum() == 0
    assert stats.chisquare(counts[wanted > 0], wanted[wanted > 0]).pvalue > 1e-4
    np.testing.assert_allclose(np.asarray(leaves.log_q), np.log(p)[text], atol=1e-5)


def test_fewer_tokens_than_rows_leave_rows_dead():
    nodes = no_nodes(1, 3, 4)
    found = Proposals(jnp.asarray([[[5, 9]] * 4], jnp.int32), jnp.asarray([[[-1.0, -jnp.inf]] * 4], jnp.float32), None)
    alive = jnp.asarray([[True, False, True, False]])
    children = best_children(nodes, jnp.zeros(1, jnp.int32), alive, found)
    assert children.alive.tolist() == [[True, True, False, False]]
    assert children.token.tolist() == [[5, 5, 0, 0]]
    assert children.parent.tolist() == [[0, 2, 0, 0]]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Tree(0), ValueError, "width of a draft tree must be at least 1, found 0"),
        (
            lambda: Options(forced_drafts=[OWN], tree=Tree(2), sampling=Sampling(1.0)),
            ValueError,
            "forced drafts are not drawn from q",
        ),
    ],
)
def test_trees_that_cannot_be(make: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ([(0, 1)] * 3, "hold a column of 3 rows, the width is 2"),
        ([(2, 1)], r"hold parent 2, rows are 0..1"),
        ([(0, 61)], r"hold id 61, allowed are -1..60"),
    ],
)
def test_forced_columns_that_do_not_fit(column: Any, message: str):
    with pytest.raises(BatchError, match=message):
        pipeline(8, 3, "separate").generate([[5]], Options(forced_drafts=[[-1, column]], tree=Tree(2)))


@pytest.mark.slow
def test_what_is_there_to_compare_with_is_no_better():
    """Only the best branch kept, everything dropped where a part would do: the same text, no fewer cycles."""
    _, run = own_tree(4)
    whole = sum(result.cycles for result in run.results)
    for tree in (Tree(4, survivors="best"), Tree(4, rollback="full")):
        options = dataclasses.replace(published.options(TREE_TOKENS), tree=tree)
        results = published.decoder("separate").generate(published.prompts(), options).results
        assert [r.ids for r in results] == [r.ids for r in run.results]
        assert sum(r.cycles for r in results) >= whole
