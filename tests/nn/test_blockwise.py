"""Attention over ranges, tile by tile, against one masked softmax: values, every gradient, queries that see nothing."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spd_jax.nn import blockwise
from spd_jax.nn.blockwise import Ranges, attend_ranges, causal_ranges, window_ranges

B, K, G, H = 2, 2, 2, 4


def random_ranges(length: int, kinds: int, banks: int, back: int, seed: int = 0) -> Ranges:
    """Ranges of all sizes, many of them empty; every fifth position sees nothing at all."""
    rng, t = np.random.default_rng(seed), np.arange(length)
    far_low = np.minimum(rng.integers(0, length, (B, length)), t)
    far_high = rng.integers(-1, t[:, None] + 1, (B, length, kinds))
    shape = (B, length, kinds, banks)
    near_low = np.maximum(t[:, None, None] - rng.integers(0, back + 1, shape), 0)
    near_high = np.minimum(near_low + rng.integers(-1, back + 1, shape), t[:, None, None])
    far_high[:, ::5], near_high[:, ::5] = -1, -1
    return Ranges(*(jnp.asarray(x, jnp.int32) for x in (far_low, far_high, near_low, near_high)), back)


def mask_of(ranges: Ranges) -> np.ndarray:
    """`[B, S, A, X, S]`: a range of every bank, written out."""
    far_low, far_high, near_low, near_high = (np.asarray(x) for x in jax.tree.leaves(ranges))
    low = np.concatenate([np.broadcast_to(far_low[..., None], far_high.shape)[..., None], near_low], axis=-1)
    high = np.concatenate([far_high[..., None], near_high], axis=-1)
    key = np.arange(far_low.shape[1])
    return (key >= low[..., None]) & (key <= high[..., None])


def plain(q: Any, k: Any, v: Any, weight: Any, mask: np.ndarray, cap: float | None = None) -> list[np.ndarray]:
    """softmax(q k / sqrt(H)) v over all banks at once, 0 where nothing is seen, and the gradients of its weighted sum.

    In float64, by the formulas.
    """
    q, k, v, weight = (np.asarray(x, np.float64) for x in (q, k, v, weight))
    seen = mask[:, :, :, None, None]
    s, slope = np.einsum("bsakgh,bxtkh->bsakgxt", q, k) / np.sqrt(H), 1.0
    if cap is not None:
        s = cap * np.tanh(s / cap)
        slope = 1 - np.square(s / cap)
    s = np.where(seen, s, -1e30)
    p = np.where(seen, np.exp(s - s.max(axis=(-2, -1), keepdims=True)), 0.0)
    p = p / np.maximum(p.sum(axis=(-2, -1), keepdims=True), 1e-300)
    mixed = np.einsum("bsakgxt,bxtkh->bsakgh", p, v)
    dp = np.einsum("bsakgh,bxtkh->bsakgxt", weight, v)
    ds = slope * p * (dp - (p * dp).sum(axis=(-2, -1), keepdims=True)) / np.sqrt(H)
    dq, dk = np.einsum("bsakgxt,bxtkh->bsakgh", ds, k), np.einsum("bsakgxt,bsakgh->bxtkh", ds, q)
    return [mixed, dq, dk, np.einsum("bsakgxt,bsakgh->bxtkh", p, weight)]


def arrays(length: int, kinds: int, banks: int) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(length)
    shapes = [(B, length, kinds, K, G, H), *[(B, banks + 1, length, K, H)] * 2, (B, length, kinds, K, G, H)]
    return tuple(jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)


def tiled(q: Any, k: Any, v: Any, weight: Any, ranges: Ranges, cap: float | None = None) -> list[np.ndarray]:
    """The same from `attend_ranges`."""

    def loss(q: Any, k: Any, v: Any) -> tuple[jax.Array, jax.Array]:
        mixed = attend_ranges(q, k, v, ranges, cap)
        return jnp.sum(mixed * weight), mixed

    (_, mixed), gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(q, k, v)
    return [np.asarray(x.astype(jnp.float32)) for x in (mixed, *gradients)]


# Positions, queries a position, near banks, positions a near range reaches back, positions a tile, runs.
CASES = {
    "tiles of two in three runs": (21, 3, 2, 3, 2, 3),
    "one position a tile": (7, 2, 4, 5, 1, 2),
    "one tile a run": (13, 1, 1, 1, 8, 4),
    "no near bank": (19, 2, 0, 0, 4, 1),
}


GATE = ("tiles of two in three runs",)


@pytest.mark.parametrize("case", [pytest.param(c, marks=() if c in GATE else pytest.mark.slow) for c in CASES])
def test_values_and_gradients_are_those_of_one_masked_softmax(case: str, monkeypatch: pytest.MonkeyPatch):
    length, kinds, banks, back, rows, runs = CASES[case]
    monkeypatch.setattr(blockwise, "TILE", B * kinds * K * G * length * rows)
    monkeypatch.setattr(blockwise, "EXTENTS", runs)
    q, k, v, weight = arrays(length, kinds, banks)
    assert {tile[2] for tile in blockwise._tiles(q)} == {rows}
    ranges = random_ranges(length, kinds, banks, back)
    mask = mask_of(ranges)
    blind = ~mask.any(axis=(-2, -1))
    assert 0.05 < blind.mean() < 0.9
    found = tiled(q, k, v, weight, ranges)
    for ours, theirs in zip(found, plain(q, k, v, weight, mask), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=1e-5)
    mixed, dq, *_ = found
    assert not mixed[blind].any()
    assert not dq[blind].any()


def test_capped_scores_and_their_gradients():
    """Scores of up to 3 under a cap of 1.5: far from where a cap does nothing."""
    inputs, ranges = arrays(13, 2, 1), random_ranges(13, 2, 1, 3)
    expected = plain(*inputs, mask_of(ranges), 1.5)
    uncapped = plain(*inputs, mask_of(ranges))
    for found, wanted, other in zip(tiled(*inputs, ranges, 1.5), expected, uncapped, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5)
        assert np.abs(wanted - other).max() > 0.05


def test_windows_end_where_documents_begin():
    low = jnp.asarray([[0, 0, 0, 0, 0, 5, 5, 5, 5, 5]], jnp.int32)
    ranges = window_ranges(low, 3)
    assert ranges.far_low.tolist() == [[0, 0, 0, 1, 2, 5, 5, 5, 6, 7]]
    assert ranges.far_high[0, :, 0].tolist() == list(range(10))
    assert window_ranges(low, None).far_low.tolist() == low.tolist()


def test_what_nobody_sees_has_no_gradient():
    length = 12
    q, k, v, weight = arrays(length, 1, 0)
    ranges = causal_ranges(jnp.asarray([[0] * 12, [0] * 5 + [5] * 7], jnp.int32))
    mask = mask_of(ranges)[:, :, 0, 0]
    assert np.array_equal(mask[0], np.tril(np.ones((length, length), bool)))
    assert not mask[1, 5:, :5].any()
    dk = jax.jit(jax.grad(lambda k: jnp.sum((attend_ranges(q, k, v, ranges) * weight)[1, 5:])))(k)
    assert np.abs(dk[1, 0, 5:]).max(axis=(1, 2)).min() > 0
    assert not np.asarray(dk[0]).any()
    assert not np.asarray(dk[1, 0, :5]).any()


@pytest.mark.slow
def test_large_scores_stay_finite():
    """A softmax that holds one key only, and scores that would overflow an exponential."""
    q, k, v, weight = arrays(11, 1, 1)
    found = tiled(100 * q, 100 * k, v, weight, random_ranges(11, 1, 1, 2))
    assert all(np.isfinite(x).all() for x in found)
    assert max(np.abs(x).max() for x in found) > 0.1


def test_bfloat16_keys_stay_close_to_float32():
    length, kinds, banks = 17, 2, 1
    q, k, v, weight = arrays(length, kinds, banks)
    half = [x.astype(jnp.bfloat16) for x in (k, v)]
    ranges = random_ranges(length, kinds, banks, 3)
    found = tiled(q, *half, weight, ranges)
    expected = plain(q, *(x.astype(jnp.float32) for x in half), weight, mask_of(ranges))
    for ours, theirs in zip(found, expected, strict=True):
        assert np.abs(ours - theirs).max() < 0.03 * np.abs(theirs).max()
        assert np.abs(ours - theirs).mean() < 0.005 * np.abs(theirs).max()
