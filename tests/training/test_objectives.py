"""Objectives against their formulas in float64, and where distributions are extreme."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spd_jax.training.objectives import BLEND_DECAY, LEAST_ACCEPTANCE, OBJECTIVES, expected_acceptance

NAMES = sorted(OBJECTIVES)


def probabilities(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def by_formula(name: str, p: np.ndarray, q: np.ndarray) -> np.ndarray:
    accepted = np.minimum(p, q).sum(axis=-1)
    kl = (p * (np.log(p) - np.log(q))).sum(axis=-1)
    share = np.exp(-BLEND_DECAY * accepted)
    return {
        "kl": kl,
        "cross_entropy": -np.log(np.take_along_axis(q, p.argmax(axis=-1)[..., None], axis=-1))[..., 0],
        "total_variation": 0.5 * np.abs(p - q).sum(axis=-1),
        "acceptance": -np.log(accepted),
        "blend": share * kl + (1 - share) * 0.5 * np.abs(p - q).sum(axis=-1),
    }[name]


@functools.cache
def compiled(name: str) -> Any:
    def total(q_logits: jax.Array, p_logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        losses = OBJECTIVES[name](jax.nn.log_softmax(p_logits), jax.nn.log_softmax(q_logits))
        return jnp.sum(losses), losses

    return jax.jit(jax.grad(total, has_aux=True))


def both(name: str, p_logits: np.ndarray, q_logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Losses, and the gradient of their sum for the draft's logits."""
    gradient, losses = compiled(name)(jnp.asarray(q_logits, jnp.float32), jnp.asarray(p_logits, jnp.float32))
    return np.asarray(losses), np.asarray(gradient)


def random_logits(seed: int) -> np.ndarray:
    return 2 * np.random.default_rng(seed).standard_normal((6, 9))


@pytest.mark.parametrize("name", NAMES)
def test_losses_are_their_formulas(name: str):
    p, q = random_logits(0), random_logits(1)
    losses, gradient = both(name, p, q)
    np.testing.assert_allclose(losses, by_formula(name, probabilities(p), probabilities(q)), rtol=2e-5, atol=1e-6)
    assert np.abs(gradient).max(axis=-1).min() > 1e-4
    np.testing.assert_allclose(gradient.sum(axis=-1), 0, atol=1e-5)  # a softmax does not see a shift


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_finite_differences(name: str):
    p, q = random_logits(2), random_logits(3)
    losses, gradient = both(name, p, q)
    step, direction = 1e-6, np.random.default_rng(4).standard_normal(q.shape)
    ahead, behind = (probabilities(q + sign * step * direction) for sign in (1, -1))
    if name == "blend":  # the share has no gradient: hold it
        share = np.exp(-BLEND_DECAY * np.minimum(probabilities(p), probabilities(q)).sum(axis=-1))
        parts = [[by_formula(part, probabilities(p), x) for part in ("kl", "total_variation")] for x in (ahead, behind)]
        up, down = (share * kl + (1 - share) * tv for kl, tv in parts)
    else:
        up, down = (by_formula(name, probabilities(p), x) for x in (ahead, behind))
    np.testing.assert_allclose((gradient * direction).sum(axis=-1), (up - down) / (2 * step), rtol=1e-3, atol=1e-4)
    assert losses.shape == (6,)


EXTREMES = {
    "equal": (random_logits(5), random_logits(5)),
    "both certain, of the same": (np.eye(9)[:6] * 300.0, np.eye(9)[:6] * 300.0),
    "both certain, of different tokens": (np.eye(9)[:6] * 300.0, np.eye(9)[3:] * 300.0),
    "q next to nothing on the teacher's token": (np.eye(9)[:6] * 5.0, np.eye(9)[:6] * -1e9),
    "q on one token": (random_logits(6), np.where(np.arange(9) == 4, 0.0, -1e30) + np.zeros((6, 1))),
}


@pytest.mark.parametrize("name", NAMES)
def test_extremes_stay_finite(name: str):
    for case, (p, q) in EXTREMES.items():
        losses, gradient = both(name, p, q)
        assert np.isfinite(losses).all(), case
        assert np.isfinite(gradient).all(), case
        assert (losses > -1e-5).all(), case
        if case == "both certain, of the same" or (case == "equal" and name != "cross_entropy"):
            np.testing.assert_allclose(losses, 0, atol=1e-5)
    disjoint, _ = both(name, *EXTREMES["both certain, of different tokens"])
    expected = {"total_variation": 1.0, "acceptance": -np.log(LEAST_ACCEPTANCE)}.get(name, 300.0)
    if name != "blend":
        np.testing.assert_allclose(disjoint, expected, rtol=1e-4)


def test_expected_acceptance_is_the_share_that_survives():
    p, q = random_logits(0), random_logits(1)
    found = expected_acceptance(jax.nn.log_softmax(jnp.asarray(p)), jax.nn.log_softmax(jnp.asarray(q)))
    np.testing.assert_allclose(found, np.minimum(probabilities(p), probabilities(q)).sum(axis=-1), rtol=1e-5)
