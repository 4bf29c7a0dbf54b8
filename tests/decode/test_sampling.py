"""Filters: temperature, then top-k, then top-p, the same numbers on one device and on a sharded vocabulary."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from spd_jax.decode.sampling import (
    ACCEPT,
    DRAFT,
    TARGET,
    Sampling,
    SamplingMode,
    SamplingNumbers,
    best,
    best_of_ranks,
    gumbel,
    log_normaliser,
    log_probs,
    row_keys,
    uniform,
)
from spd_jax.parallel.mesh import AXIS, gather_ranks, stage_mesh
from spd_jax.parallel.vocab import share_size


def filtered(logits: Any, sampling: Sampling) -> np.ndarray:
    """Probabilities on one device."""
    return np.exp(np.asarray(_filtered(jnp.asarray(logits, jnp.float32), sampling.mode, sampling.numbers())))


@functools.partial(jax.jit, static_argnums=1)
def _filtered(logits: jax.Array, mode: SamplingMode, numbers: SamplingNumbers) -> jax.Array:
    return log_probs(logits, jnp.arange(logits.shape[-1], dtype=jnp.int32), mode, numbers)[0]


def test_top_k_keeps_the_shape_of_the_distribution():
    """H05: a filtered distribution is drawn from, not maximised."""
    np.testing.assert_allclose(filtered(np.log([0.5, 0.3, 0.2]), Sampling(1.0, 2)), [0.625, 0.375, 0.0], atol=1e-6)


def test_temperature_comes_before_top_p():
    """H16: with top-p first the second id would survive."""
    np.testing.assert_allclose(filtered([2.0, 1.0, 0.0], Sampling(0.5, 0, 0.8)), [1.0, 0.0, 0.0], atol=1e-6)
    assert np.count_nonzero(filtered([2.0, 1.0, 0.0], Sampling(1.0, 0, 0.8))) == 2


def test_top_k_comes_before_top_p():
    """0.8 of the two kept ids' mass needs both; of all ids' mass it would need three."""
    logits = np.log([0.4, 0.3, 0.2, 0.1])
    np.testing.assert_allclose(filtered(logits, Sampling(1.0, 2, 0.8)), [4 / 7, 3 / 7, 0, 0], atol=1e-6)
    assert np.count_nonzero(filtered(logits, Sampling(1.0, 0, 0.8))) == 3


def test_the_lowest_id_wins_ties():
    np.testing.assert_allclose(filtered(np.zeros(5), Sampling(1.0, 2)), [0.5, 0.5, 0, 0, 0])
    np.testing.assert_allclose(filtered(np.zeros(4), Sampling(1.0, 0, 0.5)), [0.5, 0.5, 0, 0])
    np.testing.assert_allclose(filtered([0.0, 1.0, 1.0, 1.0], Sampling(1.0, 2)), [0, 0.5, 0.5, 0])


def test_top_k_beyond_the_vocabulary_keeps_all():
    logits = np.random.default_rng(0).standard_normal(7)
    np.testing.assert_allclose(filtered(logits, Sampling(1.0, 50)), filtered(logits, Sampling(1.0)), atol=1e-7)


@pytest.mark.parametrize("top_p", [1e-9, 1e-30])
def test_a_tiny_top_p_keeps_one_id(top_p: float):
    np.testing.assert_allclose(filtered([0.1, 3.0, 3.0, -1.0], Sampling(1.0, 0, top_p)), [0, 1, 0, 0])


def test_ids_that_must_not_occur_have_no_share():
    logits = np.asarray([1.0, -np.inf, 2.0, -np.inf])
    for sampling in (Sampling(1.0), Sampling(1.0, 3), Sampling(1.0, 0, 0.99), Sampling(0.7, 4, 0.99)):
        shares = filtered(logits, sampling)
        assert shares[[1, 3]].tolist() == [0, 0]
        assert shares.sum() == pytest.approx(1, abs=1e-6)


# Temperatures: the smallest number of a double and of a float, below and at the smallest normal float, and large ones.
TEMPERATURES = [5e-324, 1.4e-45, 1e-40, 1.2e-38, 1e-30, 1e-8, 1e-3, 0.3, 30.0, 1e30, 3.4e38, 1e300]


@pytest.mark.parametrize("filters", [(0, 1.0), (5, 1.0), (0, 0.9), (5, 0.9)])
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_any_temperature_gives_probabilities(temperature: float, filters: tuple[int, float]):
    """Near 39, where logits divided by a small T are infinite; scaled, far below 0, tied, and in bfloat16."""
    rng = np.random.default_rng(4)
    base = rng.standard_normal((6, 61)).astype(np.float32)
    scales = np.asarray([1, 2.6, 3.6, 8, 64, 1e-3], np.float32)[:, None]
    logits = np.concatenate([base * scales, base + 39, 1e4 * base - 1e7, np.round(base), base.astype(jnp.bfloat16)])
    logits[:, 7] = -np.inf
    got = filtered(logits.astype(np.float32), Sampling(temperature, *filters)).astype(np.float64)
    np.testing.assert_allclose(got.sum(-1), 1, atol=1e-5)
    assert (got[:, 7] == 0).all()
    below = logits.astype(np.float64) - logits.astype(np.float64).max(-1, keepdims=True)
    if filters == (0, 1.0):
        with np.errstate(over="ignore"):
            expected = np.exp(below / temperature)
        np.testing.assert_allclose(got, expected / expected.sum(-1, keepdims=True), rtol=1e-4, atol=1e-6)
    first = np.arange(len(got)), logits.argmax(-1)
    assert (got[first] == got.max(-1)).all()
    if filters[0]:
        assert (np.count_nonzero(got, axis=-1) <= filters[0]).all()


@pytest.mark.parametrize("sampling", [Sampling(1e-40), Sampling(1e-8, 3), Sampling(1e-8, 0, 0.9)])
def test_a_tiny_temperature_on_a_sharded_vocabulary_is_the_argmax(sampling: Sampling):
    """A rank without any finite logit has no part in the largest one, though all others are far below 0."""
    logits = (np.random.default_rng(5).standard_normal((20, 61)) - 300).astype(np.float32)
    logits[:, 1::3] = -np.inf

    def function(ids: Any, logits: Any) -> Any:
        return log_probs(logits, ids, sampling.mode, sampling.numbers(), gather_ranks)

    log_p, largest = on_ranks(3, function, share(logits, 3, -np.inf))
    expected = np.where(np.arange(61) == logits.argmax(-1)[:, None], 0, -np.inf)
    np.testing.assert_array_equal(unshare(log_p, 61), expected)
    np.testing.assert_array_equal(largest[0], [logits[:, rank::3].max(-1) for rank in range(3)])


@pytest.mark.parametrize("sampling", [Sampling(0.7), Sampling(0.7, 5), Sampling(0.7, 0, 0.8), Sampling(0.6, 12, 0.9)])
@pytest.mark.parametrize("sign", [1, -1])
def test_no_filter_hides_what_is_not_a_number(sampling: Sampling, sign: int):
    """A NaN of either sign makes its row NaN, and no other."""
    logits = np.random.default_rng(6).standard_normal((3, 61)).astype(np.float32)
    logits[1, 40] = np.copysign(np.nan, sign)
    got = filtered(logits, sampling)
    assert np.isnan(got[1]).all()
    np.testing.assert_allclose(got[[0, 2]].sum(-1), 1, atol=1e-5)


@pytest.mark.parametrize("sampling", [Sampling(0.7), Sampling(1.3, 5), Sampling(1.0, 0, 0.8), Sampling(0.6, 12, 0.9)])
def test_equals_the_processors_of_hugging_face(sampling: Sampling):
    import torch
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = (3 * np.random.default_rng(1).standard_normal((200, 61))).astype(np.float32)
    scores = TemperatureLogitsWarper(sampling.temperature)(None, torch.from_numpy(logits))
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    expected = torch.softmax(scores, -1).numpy()
    ours = filtered(logits, sampling)
    np.testing.assert_array_equal(ours > 0, expected > 0)
    np.testing.assert_allclose(ours, expected, atol=2e-6)


# A sharded vocabulary


def share(values_BV: np.ndarray, ranks: int, padding: float) -> np.ndarray:
    """`[R, B, V/R]`: id v on rank v mod R, padded."""
    shares = np.full((ranks, len(values_BV), share_size(values_BV.shape[1], ranks)), padding, values_BV.dtype)
    for rank in range(ranks):
        mine = values_BV[:, rank::ranks]
        shares[rank, :, : mine.shape[1]] = mine
    return shares


def on_ranks(ranks: int, function: Any, *arguments: np.ndarray) -> Any:
    """`function(ids of the rank, shares...)` in a shard_map; arguments and results are `[R, ...]`."""

    def body(*shares: Any) -> Any:
        here = jax.lax.axis_index(AXIS)
        ids = jnp.arange(shares[0].shape[-1], dtype=jnp.int32) * ranks + here
        return jax.tree.map(lambda x: x[None], function(ids, *(x[0] for x in shares)))

    sharded = PartitionSpec(AXIS)
    mapped = jax.shard_map(body, mesh=stage_mesh(ranks), in_specs=sharded, out_specs=sharded)
    return jax.tree.map(np.asarray, jax.jit(mapped)(*map(jnp.asarray, arguments)))


def unshare(shares_RBV: np.ndarray, count: int) -> np.ndarray:
    return np.moveaxis(shares_RBV, 0, -1).reshape(shares_RBV.shape[1], -1)[:, :count]


@pytest.mark.parametrize("ranks", [3, pytest.param(9, marks=pytest.mark.slow)])
@pytest.mark.parametrize("sampling", [Sampling(0.7), Sampling(1.3, 5), Sampling(1.0, 0, 0.8), Sampling(0.6, 12, 0.9)])
def test_a_sharded_vocabulary_gives_the_same_numbers(ranks: int, sampling: Sampling):
    """Ties across ranks included; the number of ranks does not divide the vocabulary."""
    rng = np.random.default_rng(2)
    logits = (3 * rng.standard_normal((40, 61))).astype(np.float32)
    logits[20:] = np.round(logits[20:])  # many ties
    logits[::3, rng.integers(0, 61, 30)] = -np.inf

    def function(ids: Any, logits: Any) -> Any:
        return log_probs(logits, ids, sampling.mode, sampling.numbers(), gather_ranks)[0]

    together = unshare(on_ranks(ranks, function, share(logits, ranks, -np.inf)), 61)
    alone = filtered(logits, sampling)
    np.testing.assert_array_equal(together > -np.inf, alone > 0)
    np.testing.assert_allclose(np.exp(together), alone, atol=1e-6)


def test_the_best_of_ranks_is_the_best_with_the_lowest_id():
    values = np.round(2 * np.random.default_rng(3).standard_normal((200, 11))).astype(np.float32)

    def function(ids: Any, values: Any) -> Any:
        value, winner = best_of_ranks(*gather_ranks(best(values, ids)))
        return value, winner, log_normaliser(values, gather_ranks)[:, 0]

    value, winner, normaliser = on_ranks(4, function, share(values, 4, -np.inf))
    for rank in range(4):  # every rank knows
        np.testing.assert_array_equal(winner[rank], values.argmax(-1))
        np.testing.assert_array_equal(value[rank], values.max(-1))
        np.testing.assert_allclose(normaliser[rank], np.log(np.exp(values).sum(-1)), atol=1e-5)


def test_not_a_number_wins_so_that_it_is_seen():
    value, winner = best(jnp.asarray([[1.0, jnp.nan, 3.0], [3.0, 1.0, 3.0]]), jnp.asarray([5, 6, 7]))
    np.testing.assert_array_equal(winner, [6, 5])
    np.testing.assert_array_equal(value, [np.nan, 3.0])


# Random numbers


@functools.cache
def keys(count: int = 20000) -> jax.Array:
    return row_keys(jnp.arange(count, dtype=jnp.uint32))


def test_random_numbers_belong_to_seed_position_purpose_and_id():
    ids, position = jnp.arange(6, dtype=jnp.int32), jnp.full((4,), 5, jnp.int32)
    numbers = np.asarray(gumbel(keys(4), position, DRAFT, ids))
    assert len(np.unique(numbers)) == numbers.size
    some = gumbel(keys(4)[2:3], position[:1], DRAFT, ids[1:4])
    np.testing.assert_array_equal(some, numbers[2:3, 1:4])  # neither neighbours nor the share matter
    of_rows = jnp.stack([ids[row : row + 2] for row in range(4)])
    np.testing.assert_array_equal(
        gumbel(keys(4), position, DRAFT, of_rows), np.take_along_axis(numbers, np.asarray(of_rows), axis=-1)
    )
    for other in (gumbel(keys(4), position + 1, DRAFT, ids), gumbel(keys(4), position, TARGET, ids)):
        assert not np.isin(np.asarray(other), numbers).any()


def test_uniform_numbers_are_uniform_and_apart_from_the_gumbel_ones():
    position = jnp.full((20000,), 3, jnp.int32)
    accept = np.asarray(uniform(keys(), position, ACCEPT))
    counts, _ = np.histogram(accept, 20, (0, 1))
    assert ((counts - 1000) ** 2 / 1000).sum() < 50  # 19 degrees of freedom: p = 1e-4
    draft = np.asarray(gumbel(keys(), position, DRAFT, jnp.arange(2, dtype=jnp.int32)))
    for column in draft.T:
        assert abs(np.corrcoef(accept, column)[0, 1]) < 0.03
    assert abs(np.corrcoef(*draft.T)[0, 1]) < 0.03


# Requests that make no sense


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-0.1,), "temperature must be a finite number >= 0, found -0.1"),
        ((float("nan"),), "temperature must be a finite number"),
        ((float("inf"),), "temperature must be a finite number"),
        ((1.0, -1), "top_k must be >= 0"),
        ((1.0, 0, 0.0), r"top_p must lie in \(0, 1\], found 0.0"),
        ((1.0, 0, 1.5), r"top_p must lie in \(0, 1\], found 1.5"),
        ((0.0, 5), "no effect at temperature 0"),
        ((0.0, 0, 0.9), "no effect at temperature 0"),
    ],
)
def test_sampling_that_makes_no_sense_is_refused(arguments: tuple, message: str):
    """H17: filters beside greedy decoding are an error, not ignored."""
    with pytest.raises(ValueError, match=message):
        Sampling(*arguments)
