"""Matrix products for training in bfloat16 whose three forms, y = x W^T, dx = g W and dW = g^T x, are all fast.

With bfloat16 operands and a float32 result XLA reaches the matrix units of CPUs that have them, but only where the
contraction is over the last axis of the left operand: with a bfloat16 result it does not, and a contraction over the
rows (dW) falls back to a loop ten times slower. XLA folds a plain transpose into such a product, so `transposed` moves
the data in a way that it cannot fold. On accelerators all of this is what the compiler would have done anyway.

Numerics: operands are rounded to bfloat16, sums are float32, the gradient of the weight is rounded to the weight's
dtype once. This module knows nothing of layers.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def transposed(x: Array) -> Array:
    """The last two axes swapped, in memory, whatever product uses it."""
    rows, columns = x.shape[-2:]
    width = next(width for width in (64, 32, 16, 8, 4, 2, 1) if columns % width == 0)
    # Through three axes: as one transpose of two it would become part of the product, barrier or not.
    split = x.reshape(*x.shape[:-1], columns // width, width)
    moved = jax.lax.optimization_barrier(jnp.moveaxis(split, -3, -1))
    return moved.reshape(*x.shape[:-2], columns, rows)


@jax.custom_vjp
def bfloat16_product(x_MD: Float[Array, "M D"], weight_FD: Float[Array, "F D"]) -> Float[Array, "M F"]:
    """x W^T in float32 from operands rounded to bfloat16; gradients come in the dtypes of x and W."""
    return _dot(_half(x_MD), _half(weight_FD), (1, 1))


def _forward(x_MD: Array, weight_FD: Array) -> tuple[Array, tuple[Array, ...]]:
    x_half, weight_half = _half(x_MD), _half(weight_FD)
    like = tuple(jnp.zeros((0,), operand.dtype) for operand in (x_MD, weight_FD))  # only their dtypes
    return _dot(x_half, weight_half, (1, 1)), (x_half, weight_half, *like)


def _backward(saved: tuple[Array, ...], g_MF: Array) -> tuple[Array, Array]:
    x_MD, weight_FD, like_x, like_weight = saved
    g_MF = _half(g_MF)
    dx_MD = _dot(g_MF, weight_FD, (1, 0)).astype(like_x.dtype)
    if x_MD.shape[1] <= g_MF.shape[1]:  # move the smaller operand
        dw_FD = transposed(_dot(transposed(x_MD), g_MF, (1, 0)))
    else:
        dw_FD = _dot(transposed(g_MF), x_MD, (1, 0))
    return dx_MD, dw_FD.astype(like_weight.dtype)


bfloat16_product.defvjp(_forward, _backward)


def _half(x: Array) -> Array:
    return x.astype(jnp.bfloat16)


def _dot(a: Array, b: Array, axes: tuple[int, int]) -> Array:
    contract = (((axes[0],), (axes[1],)), ((), ()))
    return jax.lax.dot_general(a, b, contract, preferred_element_type=jnp.float32)
