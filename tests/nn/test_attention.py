"""The one attention of the project against numpy: a prefix and further rows in one softmax, grouped heads."""

import jax.numpy as jnp
import numpy as np
import pytest

from spd_jax.nn.attention import attend_prefix_and_rows

B, T, K, G, H, S, C = 2, 3, 2, 3, 8, 6, 4


def reference(q, keys, values, allowed):
    """Attention of one query head over the allowed keys, by loops: q [H], keys and values [n, H], allowed [n]."""
    scores = np.array([q @ key / np.sqrt(len(q)) if ok else -np.inf for key, ok in zip(keys, allowed, strict=True)])
    weights = np.exp(scores - scores.max())
    return (weights / weights.sum()) @ values


@pytest.fixture
def arrays():
    generator = np.random.default_rng(0)
    shapes = {"q": (B, T, K, G, H), "pk": (B, K, S, H), "pv": (B, K, S, H), "rk": (B, K, C, H), "rv": (B, K, C, H)}
    made = {name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    mask = generator.random((B, T, C)) < 0.6
    mask[..., 0] = True
    return made | {"mask": mask, "length": np.array([0, 5], np.int32)}


def test_prefix_and_rows_share_one_softmax(arrays):
    a = arrays
    mixed = attend_prefix_and_rows(*(jnp.asarray(a[name]) for name in ("q", "pk", "pv", "length", "rk", "rv", "mask")))
    for b, t, k, g in np.ndindex(B, T, K, G):
        keys = np.concatenate([a["pk"][b, k], a["rk"][b, k]])
        values = np.concatenate([a["pv"][b, k], a["rv"][b, k]])
        allowed = np.concatenate([np.arange(S) < a["length"][b], a["mask"][b, t]])
        wanted = reference(a["q"][b, t, k, g], keys, values, allowed)
        np.testing.assert_allclose(mixed[b, t, k, g], wanted, atol=1e-5)


def test_without_a_prefix_only_the_rows_count(arrays):
    q, rows_k, rows_v, mask = (jnp.asarray(arrays[name]) for name in ("q", "rk", "rv", "mask"))
    alone = attend_prefix_and_rows(q, None, None, None, rows_k, rows_v, mask)
    empty = attend_prefix_and_rows(
        q, jnp.asarray(arrays["pk"]), jnp.asarray(arrays["pv"]), jnp.zeros(B, jnp.int32), rows_k, rows_v, mask
    )
    np.testing.assert_allclose(alone, empty, atol=1e-6)


def test_rows_beyond_the_prefix_length_may_hold_anything(arrays):
    """Keys and values past the committed length, however large, change nothing."""
    names = ("q", "pk", "pv", "length", "rk", "rv", "mask")
    before = attend_prefix_and_rows(*(jnp.asarray(arrays[name]) for name in names))
    arrays["pk"][1, :, 5:], arrays["pk"][0] = 1e4, 1e4
    arrays["pv"][1, :, 5:], arrays["pv"][0] = -1e4, 1e4
    after = attend_prefix_and_rows(*(jnp.asarray(arrays[name]) for name in names))
    np.testing.assert_array_equal(before, after)


def test_a_row_without_any_key_stays_finite(arrays):
    mask = np.zeros((B, T, C), bool)
    q, rows_k, rows_v = (jnp.asarray(arrays[name]) for name in ("q", "rk", "rv"))
    assert np.isfinite(attend_prefix_and_rows(q, None, None, None, rows_k, rows_v, jnp.asarray(mask))).all()
