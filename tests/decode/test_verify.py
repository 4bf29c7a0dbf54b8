"""Verification keeps the target's distribution, on hand-made cases and on random ones, for one draft and for several
siblings, sharded or not."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from spd_jax.decode.sampling import DRAFT, TARGET, Sampling, best_few, gumbel, log_probs, one_device, row_keys
from spd_jax.decode.verify import Siblings, Verdict, verify_by_name, verify_by_trial
from spd_jax.parallel.mesh import gather_ranks
from tests.decode.test_sampling import on_ranks, share

DRAWS, VOCAB = 20000, 16  # smaller distributions are filled up with zeros: one compilation a width


@functools.cache
def keys() -> jax.Array:
    return row_keys(jnp.arange(DRAWS, dtype=jnp.uint32))


def rows(p: Any) -> jax.Array:
    """log p for every draw."""
    with np.errstate(divide="ignore"):
        log_p = np.log(np.pad(np.asarray(p, np.float64), (0, VOCAB - len(p)))).astype(np.float32)
    return jnp.asarray(np.tile(log_p, (DRAWS, 1)))


@jax.jit
def _step(log_p: jax.Array, log_q: jax.Array, tested: Siblings, position: jax.Array, keys: jax.Array) -> Verdict:
    ids = jnp.arange(log_p.shape[1], dtype=jnp.int32)
    return verify_by_trial(log_p, log_q, ids, tested, position, keys, one_device, None)[0]


@functools.partial(jax.jit, static_argnums=3)
def _draw(log_q: jax.Array, at: jax.Array, keys: jax.Array, width: int) -> Siblings:
    """Siblings as the engine draws them: the largest of log q + Gumbel numbers."""
    values, tokens = best_few(log_q + gumbel(keys, at, DRAFT, jnp.arange(log_q.shape[1], dtype=jnp.int32)), width)
    return Siblings(tokens, values > -jnp.inf)


def run(
    p: Any, q: Any, position: int = 4, tested: np.ndarray | None = None, width: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Draw from q as the engine does, verify against p: (emitted, accepted) of every draw."""
    at = jnp.full((DRAWS,), position, jnp.int32)
    log_p, log_q = rows(p), rows(q)
    if tested is None:
        siblings = _draw(log_q, at, keys(), width)
    else:
        siblings = Siblings(jnp.asarray(tested)[:, None], jnp.ones((DRAWS, 1), bool))
    verdict = jax.tree.map(np.asarray, _step(log_p, log_q, siblings, at, keys()))
    chosen = np.take_along_axis(np.asarray(siblings.token), verdict.row[:, None], axis=1)[:, 0]
    assert (verdict.token == chosen)[verdict.accept].all()
    return verdict.token, verdict.accept


def assert_drawn_from(emitted: np.ndarray, p: Any) -> None:
    p = np.asarray(p, np.float64)
    counts = np.bincount(emitted, minlength=len(p))
    assert counts[p == 0].sum() == 0
    assert stats.chisquare(counts[p > 0], len(emitted) * p[p > 0] / p.sum()).pvalue > 1e-4


def test_an_argmax_draft_is_verified_against_a_one_hot_q():
    """H01: accepted with probability p(x), and the frequencies are p."""
    emitted, accept = run([0.6, 0.4], [1.0, 0.0])
    assert accept.mean() == pytest.approx(0.6, abs=0.015)
    assert np.mean(emitted == 0) == pytest.approx(0.6, abs=0.015)


def test_equal_distributions_always_agree():
    """H04: min(p, q) sums to 1; comparing two independent samples would accept 1 in 8."""
    _, accept = run(np.full(8, 0.125), np.full(8, 0.125))
    assert accept.all()


def test_a_draft_that_the_target_never_says_is_rejected():
    """H12: probabilities are float32 and not rounded up."""
    p = [1e-9, 0.5, 0.5 - 1e-9]
    emitted, accept = run(p, [0.5, 0.5, 0.0], tested=np.zeros(DRAWS, np.int32))
    assert not accept.any()
    assert set(emitted) == {2}  # the residual max(p - q, 0) has nothing else
    _, accept = run([0.0, 0.5, 0.5], [0.5, 0.5, 0.0], tested=np.zeros(DRAWS, np.int32))
    assert not accept.any()


def test_consecutive_tokens_are_independent():
    """H15: one number for the draft and its test, or one for two positions, would show."""
    half = [0.5, 0.5]
    pairs = [run(half, half, position) for position in (4, 5)]
    assert all(accept.all() for _, accept in pairs)
    table = np.histogram2d(pairs[0][0], pairs[1][0], 2)[0]
    assert stats.chi2_contingency(table).pvalue > 1e-3
    biased = [run([0.3, 0.7], [0.6, 0.4], position) for position in (4, 5)]
    table = np.histogram2d(biased[0][0], biased[1][0], 2)[0]
    assert stats.chi2_contingency(table).pvalue > 1e-3


@pytest.mark.parametrize("seed", range(4))
def test_emitted_tokens_have_exactly_the_targets_distribution(seed: int):
    rng = np.random.default_rng(seed)
    p, q = rng.dirichlet(np.ones(16), 2)
    p[rng.integers(0, 16, 3)] = 0  # filtered by the target only
    q[rng.integers(0, 16, 5)] = 0  # outside the draft vocabulary
    p, q = p / p.sum(), q / q.sum()
    emitted, accept = run(p, q)
    assert_drawn_from(emitted, p)
    assert accept.mean() == pytest.approx(np.minimum(p, q).sum(), abs=0.015)


def test_without_a_draft_the_target_is_sampled():
    p = np.random.default_rng(9).dirichlet(np.ones(16))
    at = jnp.full((DRAWS,), 4, jnp.int32)
    nothing = Siblings(jnp.zeros((DRAWS, 1), jnp.int32), jnp.zeros((DRAWS, 1), bool))
    verdict = _step(rows(p), rows(np.full(16, 1 / 16)), nothing, at, keys())
    assert not np.asarray(verdict.accept).any()
    assert_drawn_from(np.asarray(verdict.token), p)


def test_rounding_that_leaves_no_residual_accepts():
    """p = q but for rounding: nothing is left to draw from, and nothing must be invented."""
    p = np.asarray([0.25, 0.25, 0.5])
    q = p * (1 + 1e-7)
    emitted, accept = run(p, q)
    assert accept.all()
    assert_drawn_from(emitted, p)


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("case", ["equal", "far", "zeros", "few"])
def test_siblings_drawn_without_replacement_keep_the_targets_distribution(case: str, width: int):
    """q near p, far from it, without some of p's tokens, and with fewer tokens than there are rows."""
    rng = np.random.default_rng(width)
    p, q = rng.dirichlet(np.ones(8), 2)
    if case == "equal":
        q = p
    elif case == "far":
        q = 0.02 * p + 0.98 * (np.arange(8) == p.argmin())
    elif case == "zeros":
        p[2], q[[0, 5]] = 0, 0
    else:
        q = np.asarray([0.0, 0.7, 0.0, 0.3, 0, 0, 0, 0]) if width == 2 else np.eye(8)[3] * 0.6 + np.eye(8)[6] * 0.4
    p, q = p / p.sum(), q / q.sum()
    emitted, accept = run(p, q, width=width)
    assert_drawn_from(emitted, p)
    assert accept.mean() > run(p, q)[1].mean() - 0.01  # more siblings accept no less
    if case == "equal":
        assert accept.all()


def test_a_q_that_is_nearly_certain_keeps_its_second_sibling_exact():
    """What is left of q after the first sibling is summed, not subtracted: 1 - 0.99999994 would be all rounding."""
    q = np.asarray([1 - 2e-8, 1.5e-8, 0.5e-8])
    tested = Siblings(jnp.tile(jnp.asarray([[0, 1]], jnp.int32), (DRAWS, 1)), jnp.ones((DRAWS, 2), bool))
    p = [0.0, 0.5, 0.5]
    verdict = _step(rows(p), rows(q), tested, jnp.full((DRAWS,), 4, jnp.int32), keys())
    accept = np.asarray(verdict.accept)
    assert accept.mean() == pytest.approx(0.5 / 0.75, abs=0.015)  # p (1) = 1/2 against q (1) = 3/4 of what is left
    assert set(np.asarray(verdict.token)[~accept]) == {2}


@pytest.mark.parametrize("temperature", [1e-300, 1e-8, 0.01])
@pytest.mark.parametrize("width", [1, 4])
def test_at_a_tiny_temperature_only_the_argmax_is_emitted(temperature: float, width: int):
    """Siblings whose q is 0 in float32 would be accepted: neither q nor what is left of it could tell."""
    rng = np.random.default_rng(11)
    logits = (3.6 * rng.standard_normal((2, VOCAB)) + 39).astype(np.float32)
    sampling, ids = Sampling(temperature), jnp.arange(VOCAB, dtype=jnp.int32)
    both, _ = log_probs(jnp.asarray(logits), ids, sampling.mode, sampling.numbers())
    log_p, log_q = (jnp.tile(row, (DRAWS, 1)) for row in both)
    at = jnp.full((DRAWS,), 4, jnp.int32)
    for q, right in ((log_q, False), (log_p, True)):
        siblings = _draw(q, at, keys(), width)
        verdict = _step(log_p, q, siblings, at, keys())
        assert (np.asarray(verdict.token) == logits[0].argmax()).all()
        assert (np.asarray(verdict.accept) == right).all()


def test_likeliest_siblings_are_not_tested_as_if_drawn():
    """H10: p = (.5, .3, .2), siblings 0 and 1 for certain: frequencies are p, and 0.8 are accepted."""
    p = [0.5, 0.3, 0.2]
    at, ids = jnp.full((DRAWS,), 4, jnp.int32), jnp.arange(VOCAB, dtype=jnp.int32)
    siblings = Siblings(jnp.tile(jnp.asarray([[0, 1]], jnp.int32), (DRAWS, 1)), jnp.ones((DRAWS, 2), bool))
    scores = rows(p) + gumbel(keys(), at, TARGET, ids)
    verdict, _ = verify_by_name(scores, ids, siblings, one_device, None)
    assert_drawn_from(np.asarray(verdict.token), p)
    assert np.asarray(verdict.accept).mean() == pytest.approx(0.8, abs=0.015)
    assert (np.asarray(verdict.row)[np.asarray(verdict.accept)] == np.asarray(verdict.token)[verdict.accept]).all()


def test_by_name_the_best_score_wins_and_the_lowest_id_among_equals():
    target = jnp.asarray([[0.0, 2.0, 2.0, 1.0], [0.0, 2.0, 2.0, 1.0], [5.0, 2.0, 2.0, 1.0]], jnp.float32)
    tested = Siblings(jnp.asarray([[3, 1], [2, 1], [1, 2]], jnp.int32), jnp.asarray([[1, 1], [1, 0], [1, 1]], bool))
    verdict, others = verify_by_name(target, jnp.arange(4, dtype=jnp.int32), tested, one_device, jnp.float32(7.0))
    assert verdict.accept.tolist() == [True, False, False]
    assert verdict.row.tolist()[0] == 1
    assert verdict.token.tolist() == [1, 1, 0]
    assert others.tolist() == [7.0]


@pytest.mark.parametrize("width", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_sharded_vocabulary_gives_the_same_verdicts(width: int):
    rng, count, vocab, ranks = np.random.default_rng(5), 500, 13, 3
    log_p, log_q = (np.log(rng.dirichlet(np.ones(vocab), count)).astype(np.float32) for _ in range(2))
    log_q[rng.random(log_q.shape) < 0.3] = -np.inf
    log_q[:, :3] = np.maximum(log_q[:, :3], -3)
    tested = Siblings(
        jnp.asarray(np.argsort(-log_q, axis=1)[:, :width], jnp.int32),
        jnp.asarray((rng.random((count, 1)) < 0.8) & (rng.random((count, width)) < 0.9)),
    )
    at, base = jnp.full((count,), 7, jnp.int32), row_keys(jnp.arange(count, dtype=jnp.uint32))

    def verify(ids: Any, p: Any, q: Any, gather: Any) -> Any:
        trial, _ = verify_by_trial(p, q, ids, tested, at, base, gather, None)
        name, _ = verify_by_name(p, ids, tested, gather, None)
        return trial.accept, trial.row, trial.token, name.accept, name.row, name.token

    one = jax.jit(verify, static_argnums=3)
    alone = jax.tree.map(
        np.asarray, one(jnp.arange(vocab, dtype=jnp.int32), jnp.asarray(log_p), jnp.asarray(log_q), one_device)
    )
    together = on_ranks(
        ranks, lambda ids, p, q: verify(ids, p, q, gather_ranks), *(share(x, ranks, -np.inf) for x in (log_p, log_q))
    )
    assert 0.2 < alone[0].mean() < 0.95
    for expected, all_ranks in zip(alone, together, strict=True):
        for rank in range(ranks):
            np.testing.assert_array_equal(all_ranks[rank], expected)
