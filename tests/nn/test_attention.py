"""The one attention of the project against numpy: a prefix and further rows in one softmax, grouped heads."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from spd_jax.nn.attention import attend_prefix_and_rows, cache_layout

B, T, K, G, H, S, C = 2, 3, 2, 3, 8, 6, 4


def reference(q: np.ndarray, keys: np.ndarray, values: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    """Attention of one query over the allowed keys, by its definition: q [H], keys and values [n, H], allowed [n]."""
    scores = np.array([q @ key / np.sqrt(len(q)) if ok else -np.inf for key, ok in zip(keys, allowed, strict=True)])
    weights = np.exp(scores - scores.max())
    return (weights / weights.sum()) @ values


@pytest.fixture
def arrays() -> dict[str, np.ndarray]:
    """Keys and values of a prefix (pk, pv) and of rows (rk, rv), positions before heads, as layers make them."""
    generator = np.random.default_rng(0)
    shapes = {"q": (B, T, K, G, H), "pk": (B, S, K, H), "pv": (B, S, K, H), "rk": (B, C, K, H), "rv": (B, C, K, H)}
    made = {name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    mask = generator.random((B, T, C)) < 0.6
    mask[..., 0] = True
    return made | {"mask": mask, "length": np.array([0, 5], np.int32)}


def attend(arrays: dict[str, np.ndarray], *, prefix: bool = True) -> np.ndarray:
    a: dict[str, Any] = {name: jnp.asarray(value) for name, value in arrays.items()}
    before = (*cache_layout(a["pk"], a["pv"]), a["length"]) if prefix else (None, None, None)
    return np.asarray(attend_prefix_and_rows(a["q"], *before, *cache_layout(a["rk"], a["rv"]), a["mask"]))


def test_prefix_and_rows_share_one_softmax(arrays: dict[str, np.ndarray]):
    a, mixed = arrays, attend(arrays)
    for b, t, k, g in np.ndindex(B, T, K, G):
        keys = np.concatenate([a["pk"][b, :, k], a["rk"][b, :, k]])
        values = np.concatenate([a["pv"][b, :, k], a["rv"][b, :, k]])
        allowed = np.concatenate([np.arange(S) < a["length"][b], a["mask"][b, t]])
        wanted = reference(a["q"][b, t, k, g], keys, values, allowed)
        np.testing.assert_allclose(mixed[b, t, k, g], wanted, atol=1e-5)


def test_without_a_prefix_only_the_rows_count(arrays: dict[str, np.ndarray]):
    empty = attend(arrays | {"length": np.zeros(B, np.int32)})
    np.testing.assert_allclose(attend(arrays, prefix=False), empty, atol=1e-6)


def test_rows_beyond_the_prefix_length_may_hold_anything(arrays: dict[str, np.ndarray]):
    """Keys and values past the committed length, however large, change nothing."""
    before = attend(arrays)
    arrays["pk"][1, 5:], arrays["pk"][0] = 1e4, 1e4
    arrays["pv"][1, 5:], arrays["pv"][0] = -1e4, 1e4
    np.testing.assert_array_equal(before, attend(arrays))


def test_a_row_without_any_key_stays_finite(arrays: dict[str, np.ndarray]):
    assert np.isfinite(attend(arrays | {"mask": np.zeros((B, T, C), bool)}, prefix=False)).all()
