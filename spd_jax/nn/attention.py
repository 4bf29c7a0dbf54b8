"""Grouped-query attention over a committed prefix and a few more rows, in one softmax.

The one attention of the project. What the "more rows" are is the caller's business: the new rows themselves (prefill,
autoregressive decoding, the draft's staircase) or a window of in-flight columns (a stage). Scores and softmax are
float32. Cache layout is `[B, K, S, H]`, so that both products have their batch axes in front and nothing is transposed.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

NEGATIVE = -1e30  # finite: a row with every key masked stays finite (its output is never used)


def attend_prefix_and_rows(
    q_BTKGH: Float[Array, "B T K G H"],
    prefix_k_BKSH: Float[Array, "B K S H"] | None,
    prefix_v_BKSH: Float[Array, "B K S H"] | None,
    prefix_length_B: Int[Array, " B"] | None,
    rows_k_BKCH: Float[Array, "B K C H"],
    rows_v_BKCH: Float[Array, "B K C H"],
    rows_mask_BTC: Bool[Array, "B T C"],
) -> Float[Array, "B T K G H"]:
    """softmax(q k / sqrt(H)) v over keys `s < prefix_length` of the prefix and the rows allowed by `rows_mask`."""
    scale = jnp.float32(q_BTKGH.shape[-1] ** -0.5)
    q = jnp.moveaxis(q_BTKGH, 1, 3)  # B K G T H

    def scores(keys: Array) -> Array:
        return jnp.einsum("bkgth,bksh->bkgts", q, keys, preferred_element_type=jnp.float32) * scale

    row_scores = jnp.where(rows_mask_BTC[:, None, None], scores(rows_k_BKCH), NEGATIVE)
    largest = jnp.max(row_scores, axis=-1, keepdims=True)
    if prefix_k_BKSH is None or prefix_v_BKSH is None or prefix_length_B is None:
        weights = jnp.exp(row_scores - largest)
        mixed = jnp.einsum("bkgts,bksh->bkgth", weights.astype(q.dtype), rows_v_BKCH)
        total = jnp.sum(weights, axis=-1, keepdims=True)
    else:
        visible = jnp.arange(prefix_k_BKSH.shape[2]) < prefix_length_B[:, None]
        prefix_scores = jnp.where(visible[:, None, None, None], scores(prefix_k_BKSH), NEGATIVE)
        largest = jnp.maximum(largest, jnp.max(prefix_scores, axis=-1, keepdims=True))
        prefix_weights, row_weights = jnp.exp(prefix_scores - largest), jnp.exp(row_scores - largest)
        total = jnp.sum(prefix_weights, -1, keepdims=True) + jnp.sum(row_weights, -1, keepdims=True)
        mixed = jnp.einsum("bkgts,bksh->bkgth", prefix_weights.astype(q.dtype), prefix_v_BKSH)
        mixed = mixed + jnp.einsum("bkgts,bksh->bkgth", row_weights.astype(q.dtype), rows_v_BKCH)
    return jnp.moveaxis((mixed / total.astype(mixed.dtype)), 3, 1)
