"""Grouped-query attention over a committed prefix and a few more rows, in one softmax.

The one attention of the project. What the "more rows" are is the caller's business: the new rows themselves (prefill,
autoregressive decoding, the draft's staircase) or a window of in-flight columns (a stage). Scores and softmax are
float32.

Keys are kept transposed, `[B, K, H, S]`, values as `[B, K, S, H]`: both products then read their cache in the order in
which it lies. With keys as `[B, K, S, H]` XLA transposes the whole key cache at every token (on CPU 3 to 4 times the
time of the attention at 256 and 1,024 positions).
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

NEGATIVE = -1e30  # finite: a row with every key masked stays finite (its output is never used)


def cache_layout(k_BTKH: Array, v_BTKH: Array) -> tuple[Float[Array, "B K H T"], Float[Array, "B K T H"]]:
    """Keys and values of new rows in the layout of the caches."""
    return jnp.transpose(k_BTKH, (0, 2, 3, 1)), jnp.swapaxes(v_BTKH, 1, 2)


def attend_prefix_and_rows(
    q_BTKGH: Float[Array, "B T K G H"],
    prefix_k_BKHS: Float[Array, "B K H S"] | None,
    prefix_v_BKSH: Float[Array, "B K S H"] | None,
    prefix_length_B: Int[Array, " B"] | None,
    rows_k_BKHC: Float[Array, "B K H C"],
    rows_v_BKCH: Float[Array, "B K C H"],
    rows_mask_BTC: Bool[Array, "B T C"],
) -> Float[Array, "B T K G H"]:
    """softmax(q k / sqrt(H)) v over keys `s < prefix_length` of the prefix and the rows allowed by `rows_mask`."""
    batch, length, heads, group, size = q_BTKGH.shape
    scale = jnp.float32(size**-0.5)
    q = jnp.transpose(q_BTKGH, (0, 2, 3, 1, 4)).reshape(batch, heads, group * length, size)

    def scores(keys_BKHS: Array) -> Array:
        found = jnp.einsum("bkmh,bkhs->bkms", q, keys_BKHS, preferred_element_type=jnp.float32) * scale
        return found.reshape(batch, heads, group, length, -1)

    def mix(weights: Array, values_BKSH: Array) -> Array:
        flat = weights.astype(values_BKSH.dtype).reshape(batch, heads, group * length, -1)
        return jnp.einsum("bkms,bksh->bkmh", flat, values_BKSH, preferred_element_type=jnp.float32)

    row_scores = jnp.where(rows_mask_BTC[:, None, None], scores(rows_k_BKHC), NEGATIVE)
    largest = jnp.max(row_scores, axis=-1, keepdims=True)
    if prefix_k_BKHS is None or prefix_v_BKSH is None or prefix_length_B is None:
        weights = jnp.exp(row_scores - largest)
        total, mixed = jnp.sum(weights, axis=-1), mix(weights, rows_v_BKCH)
    else:
        visible = jnp.arange(prefix_k_BKHS.shape[3]) < prefix_length_B[:, None]
        prefix_scores = jnp.where(visible[:, None, None, None], scores(prefix_k_BKHS), NEGATIVE)
        largest = jnp.maximum(largest, jnp.max(prefix_scores, axis=-1, keepdims=True))
        prefix_weights, row_weights = jnp.exp(prefix_scores - largest), jnp.exp(row_scores - largest)
        total = jnp.sum(prefix_weights, -1) + jnp.sum(row_weights, -1)
        mixed = mix(prefix_weights, prefix_v_BKSH) + mix(row_weights, rows_v_BKCH)
    mixed = mixed.reshape(batch, heads, group, length, size) / total[..., None]
    return jnp.transpose(mixed, (0, 3, 1, 2, 4)).astype(q_BTKGH.dtype)
