"""A mixture of experts: rows one by one, in blocks and by the definition are the same sum."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spd_jax.nn.experts import BLOCK, FEW, mix

EXPERTS, CHOICES, INNER, SIZE = 7, 3, 5, 16
compiled = jax.jit(mix, static_argnums=(5, 6))


def parameters(dtype: Any = jnp.float32) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    shapes = ((EXPERTS, 2 * INNER, SIZE), (EXPERTS, SIZE, INNER))
    return tuple(jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)  # pyright: ignore[reportReturnType]


def routed(rows: int, chosen: np.ndarray | None = None) -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(rows)
    if chosen is None:
        chosen = np.stack([rng.permutation(EXPERTS)[:CHOICES] for _ in range(rows)])
    x, weights = rng.standard_normal((rows, SIZE)), rng.random((rows, CHOICES))
    return jnp.asarray(x, jnp.float32), jnp.asarray(weights, jnp.float32), jnp.asarray(chosen, jnp.int32)


def row_by_row(x: Any, weights: Any, chosen: Any, gate_up: Any, down: Any) -> np.ndarray:
    x, weights, chosen, gate_up, down = (np.asarray(value, np.float64) for value in (x, weights, chosen, gate_up, down))
    found = np.zeros_like(x)
    for row in range(len(x)):
        for weight, expert in zip(weights[row], chosen[row].astype(int), strict=True):
            gate, up = np.split(gate_up[expert] @ x[row], 2)
            found[row] += weight * (down[expert] @ (gate / (1 + np.exp(-gate)) * up))
    return found


@pytest.mark.parametrize("rows", [1, 2, FEW, FEW + 1, BLOCK, 3 * BLOCK + 5])
def test_blocks_of_any_size_are_the_sum_over_the_chosen_experts(rows: int):
    inputs = (*routed(rows), *parameters())
    expected = row_by_row(*inputs)
    for block in (1, BLOCK):
        np.testing.assert_allclose(compiled(*inputs, "silu", block), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("expert", [0, EXPERTS - 1])
def test_one_expert_may_get_everything(expert: int):
    """Blocks beyond those of the one expert are not run, and nothing is left out."""
    rows = 2 * BLOCK + 1
    chosen = np.full((rows, CHOICES), expert)
    inputs = (*routed(rows, chosen), *parameters())
    found = compiled(*inputs, "silu", BLOCK)
    np.testing.assert_allclose(found, row_by_row(*inputs), atol=2e-4, rtol=1e-4)


def test_experts_that_nobody_chose_are_not_read():
    """NaN in their weights would show."""
    gate_up, down = parameters()
    unused = EXPERTS - 2
    gate_up, down = gate_up.at[unused].set(jnp.nan), down.at[unused].set(jnp.nan)
    for rows in (2, 3 * BLOCK):
        x, weights, chosen = routed(rows)
        chosen = jnp.where(chosen == unused, 0, chosen)
        for block in (1, BLOCK):
            assert np.isfinite(compiled(x, weights, chosen, gate_up, down, "silu", block)).all()


def test_bfloat16_weights_and_float32_rows():
    inputs = (*routed(40), *parameters(jnp.bfloat16))
    few, many = (compiled(*inputs, "silu", block) for block in (1, BLOCK))
    assert few.dtype == many.dtype == jnp.float32
    expected = row_by_row(*inputs)
    for found in (few, many):
        np.testing.assert_allclose(found, expected, atol=0.02 * np.abs(expected).max())
