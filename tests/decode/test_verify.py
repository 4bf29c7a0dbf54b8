"""Verification keeps the target's distribution, on hand-made cases and on random ones, sharded or not."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from spd_jax.decode.sampling import DRAFT, best, gumbel, one_device, row_keys
from spd_jax.decode.verify import Verdict, verify_greedy, verify_sampled
from spd_jax.parallel.mesh import gather_ranks
from tests.decode.test_sampling import on_ranks, share

DRAWS, VOCAB = 20000, 16  # smaller distributions are filled up with zeros: one compilation


@functools.cache
def keys() -> jax.Array:
    return row_keys(jnp.arange(DRAWS, dtype=jnp.uint32))


def rows(p: Any) -> jax.Array:
    """log p for every draw."""
    with np.errstate(divide="ignore"):
        log_p = np.log(np.pad(np.asarray(p, np.float64), (0, VOCAB - len(p)))).astype(np.float32)
    return jnp.asarray(np.tile(log_p, (DRAWS, 1)))


@jax.jit
def _step(
    log_p: jax.Array, log_q: jax.Array, tested: jax.Array, is_tested: jax.Array, position: jax.Array, keys: jax.Array
) -> Verdict:
    ids = jnp.arange(log_p.shape[1], dtype=jnp.int32)
    return verify_sampled(log_p, log_q, log_q, ids, tested, is_tested, position, position + 1, keys, one_device)


@jax.jit
def _draw(log_q: jax.Array, at: jax.Array, keys: jax.Array) -> jax.Array:
    ids = jnp.arange(log_q.shape[1], dtype=jnp.int32)
    return best(log_q + gumbel(keys, at, DRAFT, ids), ids)[1]


def run(p: Any, q: Any, position: int = 4, tested: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Draw from q as the engine does, verify against p: (emitted, accepted) of every draw."""
    at = jnp.full((DRAWS,), position, jnp.int32)
    log_p, log_q = rows(p), rows(q)
    if tested is None:
        tested = np.asarray(_draw(log_q, at, keys()))
    verdict = _step(log_p, log_q, jnp.asarray(tested), jnp.ones((DRAWS,), bool), at, keys())
    accept = np.asarray(verdict.accept)
    return np.where(accept, tested, np.asarray(verdict.token)), accept


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
    nothing = jnp.zeros((DRAWS,), jnp.int32)
    verdict = _step(rows(p), rows(np.full(16, 1 / 16)), nothing, jnp.zeros((DRAWS,), bool), at, keys())
    assert not np.asarray(verdict.accept).any()
    assert_drawn_from(np.asarray(verdict.token), p)


def test_rounding_that_leaves_no_residual_accepts():
    """p = q but for rounding: nothing is left to draw from, and nothing must be invented."""
    p = np.asarray([0.25, 0.25, 0.5])
    q = p * (1 + 1e-7)
    emitted, accept = run(p, q)
    assert accept.all()
    assert_drawn_from(emitted, p)


def test_greedy_accepts_the_argmax_only_and_the_lowest_id_wins():
    target = jnp.asarray([[0.0, 2.0, 2.0, 1.0], [0.0, 2.0, 2.0, 1.0], [5.0, 2.0, 2.0, 1.0]], jnp.float32)
    draft = jnp.asarray([[1.0, 1.0], [0.0, 1.0], [-1.0, -2.0]], jnp.float32)
    ids, draft_ids = jnp.arange(4, dtype=jnp.int32), jnp.asarray([1, 3], jnp.int32)
    tested = jnp.asarray([1, 2, 1], jnp.int32)
    verdict = verify_greedy(target, ids, draft, draft_ids, tested, one_device)
    assert verdict.accept.tolist() == [True, False, False]
    assert verdict.token.tolist() == [1, 1, 0]
    assert verdict.draft.tolist() == [1, 3, 1]


def test_a_sharded_vocabulary_gives_the_same_verdicts():
    rng, count, vocab, ranks = np.random.default_rng(5), 500, 13, 4
    log_p, log_q = (np.log(rng.dirichlet(np.ones(vocab), count)).astype(np.float32) for _ in range(2))
    log_q[rng.random(log_q.shape) < 0.3] = -np.inf
    log_q[:, 0] = np.maximum(log_q[:, 0], -3)
    tested = log_q.argmax(-1).astype(np.int32)
    is_tested, at = rng.random(count) < 0.8, np.full(count, 7, np.int32)
    base = row_keys(jnp.arange(count, dtype=jnp.uint32))

    def verify(ids: Any, p: Any, q: Any, gather: Any) -> Any:
        arguments = map(jnp.asarray, (tested, is_tested, at, at + 2))
        verdict = verify_sampled(p, q, q, ids, *arguments, base, gather)
        greedy = verify_greedy(p, ids, q, ids, jnp.asarray(tested), gather)
        return verdict.accept, verdict.token, verdict.draft, greedy.accept, greedy.token, greedy.draft

    alone = jax.tree.map(
        np.asarray, verify(jnp.arange(vocab, dtype=jnp.int32), jnp.asarray(log_p), jnp.asarray(log_q), one_device)
    )
    together = on_ranks(
        ranks, lambda ids, p, q: verify(ids, p, q, gather_ranks), *(share(x, ranks, -np.inf) for x in (log_p, log_q))
    )
    assert 0.2 < alone[0].mean() < 0.8
    for one, all_ranks in zip(alone, together, strict=True):
        for rank in range(ranks):
            np.testing.assert_array_equal(all_ranks[rank], one)
