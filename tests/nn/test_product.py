"""Products in bfloat16 and their gradients, against float32 products of rounded operands."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spd_jax.nn.layers import project
from spd_jax.nn.product import bfloat16_product, transposed


def rounded(x: Any) -> np.ndarray:
    return np.asarray(jnp.asarray(x).astype(jnp.bfloat16).astype(jnp.float32))


def random(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng([seed, *shape]).standard_normal(shape), jnp.float32)


# Rows, inputs, outputs: odd ones, a single one, inputs more and fewer than outputs (two ways to the weight's gradient).
SHAPES = [(7, 5, 3), (6, 3, 66), (1, 130, 1), (9, 64, 64)]


@pytest.mark.parametrize(("dtype_x", "dtype_w"), [*itertools.product((jnp.float32, jnp.bfloat16), repeat=2)])
@pytest.mark.parametrize("shape", SHAPES[:2])
def test_dtypes_of_gradients_are_those_of_the_operands(shape: tuple[int, int, int], dtype_x: Any, dtype_w: Any):
    rows, inputs, outputs = shape
    x, w = random(rows, inputs).astype(dtype_x), random(outputs, inputs, seed=1).astype(dtype_w)
    dx, dw = jax.eval_shape(jax.grad(lambda x, w: jnp.sum(bfloat16_product(x, w)), (0, 1)), x, w)
    assert (dx.dtype, dw.dtype) == (dtype_x, dtype_w)


@pytest.mark.parametrize("shape", SHAPES)
def test_product_and_gradients_are_those_of_rounded_operands(shape: tuple[int, int, int]):
    rows, inputs, outputs = shape
    x, w, g = random(rows, inputs), random(outputs, inputs, seed=1).astype(jnp.bfloat16), random(rows, outputs, seed=2)
    y, back = jax.vjp(bfloat16_product, x, w)
    dx, dw = back(g)
    assert (y.dtype, dx.dtype, dw.dtype) == (jnp.float32, jnp.float32, jnp.bfloat16)
    x32, w32, g32 = (rounded(value).astype(np.float64) for value in (x, w, g))
    np.testing.assert_allclose(y, x32 @ w32.T, atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(dx, g32 @ w32, atol=1e-5, rtol=1e-5)
    # The weight's gradient is rounded once, to the weight's dtype: half a unit in the last of 8 bits.
    np.testing.assert_allclose(np.asarray(dw.astype(jnp.float32)), g32.T @ x32, atol=1e-5, rtol=2**-8)


def test_projecting_takes_every_leading_axis_and_keeps_the_dtype_of_x():
    x, w = random(2, 3, 4, 5), random(6, 5).astype(jnp.bfloat16)
    y = project(x, w)
    assert (y.shape, y.dtype) == ((2, 3, 4, 6), jnp.float32)
    np.testing.assert_allclose(y, rounded(x) @ rounded(w).T, atol=1e-5)
    assert project(x.astype(jnp.bfloat16), w).dtype == jnp.bfloat16
    assert project(x.astype(jnp.bfloat16), w, jnp.float32).dtype == jnp.float32


@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (3, 64), (4, 192), (2, 3, 6, 40)])
def test_transposed_swaps_the_last_two_axes(shape: tuple[int, ...]):
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    assert np.array_equal(transposed(jnp.asarray(x)), np.swapaxes(x, -1, -2))
