"""Rates of every step, what both optimisers do to a loss, and options that no training could use."""

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spd_jax.training.optimizer import OptimizerOptions, learning_rate, make_optimizer

PARAMS = {"matrix": jnp.eye(4), "vector": jnp.ones(4)}


def rates(steps: int, **options: Any) -> list[float]:
    """Of steps 0 to `steps`, in units of the highest."""
    rate = learning_rate(OptimizerOptions(learning_rate=2e-4, **options), steps)
    return [float(rate(step)) / 2e-4 for step in range(steps + 1)]


# Schedules


@pytest.mark.parametrize(
    ("schedule", "first", "middle", "last"),
    [("linear", 1.0, 0.5, 0.1), ("cosine", 1.0, 0.5, (1 + math.cos(0.9 * math.pi)) / 2), ("constant", 1.0, 1.0, 1.0)],
)
def test_a_schedule_falls_to_nothing_behind_the_last_step(schedule: str, first: float, middle: float, last: float):
    found = rates(10, schedule=schedule)
    np.testing.assert_allclose([found[0], found[5], found[9]], [first, middle, last], rtol=1e-5)
    assert found[10] == pytest.approx(1.0 if schedule == "constant" else 0.0, abs=1e-6)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_it_falls_to_the_final_rate(schedule: str):
    found = rates(10, schedule=schedule, final_rate=0.2)
    assert found[0] == pytest.approx(1.0)
    assert found[5] == pytest.approx(0.6)
    assert found[10] == pytest.approx(0.2)
    assert all(a > b for a, b in itertools.pairwise(found))


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
def test_it_rises_first(schedule: str):
    """The first update does something, the highest rate is reached once, and the end stays where it was."""
    found = rates(13, schedule=schedule, warmup_steps=3)
    np.testing.assert_allclose(found[:4], [0.25, 0.5, 0.75, 1.0], rtol=1e-5)
    np.testing.assert_allclose(found[3:], rates(10, schedule=schedule), rtol=1e-4, atol=1e-6)


def test_a_rise_longer_than_the_run_never_reaches_the_top():
    found = rates(4, warmup_steps=9)
    assert found[:4] == pytest.approx([0.1, 0.2, 0.3, 0.4])


def test_the_optimiser_follows_the_schedule():
    """Adam's first steps under a constant gradient are the rate itself."""
    optimizer = make_optimizer(OptimizerOptions(learning_rate=0.5, clip=None), 4)
    state, sizes = optimizer.init(PARAMS), []
    for _ in range(4):
        updates, state = optimizer.update(PARAMS, state, PARAMS)
        sizes.append(-float(updates["vector"][0]))
    np.testing.assert_allclose(sizes, [0.5, 0.375, 0.25, 0.125], rtol=1e-4)


# Optimisers


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_both_lower_a_loss(name: str):
    wanted = jnp.asarray(np.random.default_rng(0).standard_normal((4, 4)), jnp.float32)
    optimizer = make_optimizer(OptimizerOptions(name=name, learning_rate=0.3), 40)

    def loss(params: Any) -> Any:
        return jnp.mean(jnp.square(params["matrix"] - wanted)) + jnp.mean(jnp.square(params["vector"] - 0.5))

    @jax.jit
    def step(params: Any, state: Any) -> tuple[Any, Any]:
        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    params, state = PARAMS, optimizer.init(PARAMS)
    before = float(loss(params))
    for _ in range(40):
        params, state = step(params, state)
    assert float(loss(params)) < 0.2 * before
    assert not np.array_equal(params["vector"], PARAMS["vector"])


def test_muon_gives_matrices_to_muon_and_the_rest_to_adam():
    """A matrix's update has singular values that are all alike, whatever those of the gradient were."""
    gradients = {"matrix": jnp.diag(jnp.asarray([1.0, 0.5, 0.2, 0.1])), "vector": jnp.asarray([1.0, 2.0, 3.0, 4.0])}
    optimizer = make_optimizer(OptimizerOptions(name="muon", clip=None), 10)
    updates, _ = optimizer.update(gradients, optimizer.init(PARAMS), PARAMS)
    values = np.linalg.svd(np.asarray(updates["matrix"]), compute_uv=False)
    assert values.max() / values.min() < 2.0
    sizes = np.asarray(updates["vector"])  # Adam's are alike for every number
    assert sizes.max() < 0
    np.testing.assert_allclose(sizes, sizes[0], rtol=1e-3)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_clip_bounds_the_gradient_and_leaves_small_ones(name: str):
    def first_moments(scale: float, clip: float | None) -> list[Any]:
        optimizer = make_optimizer(OptimizerOptions(name=name, clip=clip), 10)
        gradients = jax.tree.map(lambda x: scale * x, PARAMS)
        _, state = optimizer.update(gradients, optimizer.init(PARAMS), PARAMS)
        return [np.asarray(leaf) for leaf in jax.tree.leaves(state) if leaf.ndim]

    norm = float(optax.tree.norm(PARAMS))
    for found, wanted in zip(first_moments(1e6 / norm, 1.0), first_moments(1.0 / norm, None), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5)
    for found, wanted in zip(first_moments(0.9 / norm, 1.0), first_moments(0.9 / norm, None), strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_decay_pulls_towards_zero(name: str):
    options = OptimizerOptions(name=name, learning_rate=0.1, weight_decay=0.5)
    optimizer = make_optimizer(options, 10)
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, PARAMS), optimizer.init(PARAMS), PARAMS)
    np.testing.assert_allclose(updates["matrix"], -0.05 * np.eye(4), atol=1e-6)
    np.testing.assert_allclose(updates["vector"], -0.05 * np.ones(4), atol=1e-6)


# Options


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"learning_rate": 0.0}, "learning_rate must be above 0, found 0.0"),
        ({"learning_rate": -1e-4}, "learning_rate must be above 0"),
        ({"learning_rate": math.nan}, "learning_rate must be above 0, found nan"),
        ({"learning_rate": math.inf}, "learning_rate must be above 0, found inf"),
        ({"clip": 0.0}, "clip must be above 0"),
        ({"warmup_steps": -1}, "warmup_steps must be at least 0, found -1"),
        ({"weight_decay": -0.1}, "weight_decay must be at least 0"),
        ({"final_rate": 1.5}, r"final_rate must lie in \[0, 1\], found 1.5"),
        ({"final_rate": -0.5}, r"final_rate must lie in \[0, 1\]"),
        ({"b1": 1.0}, r"b1 must lie in \[0, 1\), found 1.0"),
        ({"b2": -0.1}, r"b2 must lie in \[0, 1\)"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=said):
        OptimizerOptions(**options)


def test_no_clip_is_an_option():
    assert OptimizerOptions(clip=None).clip is None
