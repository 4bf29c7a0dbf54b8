"""Grouped-query attention over a committed prefix and a few more rows, in one softmax.

The one attention of the project. What the "more rows" are is the caller's business: the new rows themselves (prefill,
autoregressive decoding, the draft's staircase) or a window of in-flight columns (a stage). Scores and softmax are
float32.

Keys are kept transposed, `[B, K, H, S]`, values as `[B, K, S, H]`: both products then read their cache in the order in
which it lies. With keys as `[B, K, S, H]` XLA transposes the whole key cache at every token (on CPU 3 to 4 times the
time of the attention at 256 and 1,024 positions).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from spd_jax.config.model import AttentionConfig

NEGATIVE = -1e30  # finite: a row with every key masked stays finite (its output is never used)
PREFILL_BLOCK = 256  # keys; divides every cache capacity


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
    *,
    first_BT: Int[Array, "B T"] | None = None,
    cap: float | None = None,
    block: int | None = None,
) -> Float[Array, "B T K G H"]:
    """softmax(q k / sqrt(H)) v over keys `s < prefix_length` of the prefix and the rows allowed by `rows_mask`.

    Args:
        first_BT: the first key of the prefix that each query sees (None: all see it from its start).
        cap: c makes c tanh(s / c) of a score s.
        block: read the prefix in blocks of this many keys (it must divide S), and only as many as the longest prefix
            needs. That is for many queries: for few, the blocks' copies cost more than the keys that are not read.
    """
    batch, length, heads, group, size = q_BTKGH.shape
    q_BKMH = jnp.transpose(q_BTKGH, (0, 2, 3, 1, 4)).reshape(batch, heads, group * length, size)
    row_mask = jnp.broadcast_to(rows_mask_BTC[:, None], (batch, group, *rows_mask_BTC.shape[1:]))
    row_mask = row_mask.reshape(batch, 1, group * length, -1)
    found = [(_scores(q_BKMH, rows_k_BKHC, row_mask, cap), rows_v_BKCH)]
    first_BM = None if first_BT is None else jnp.tile(first_BT, (1, group))
    if prefix_k_BKHS is None or prefix_v_BKSH is None or prefix_length_B is None:
        part = _fold(None, found)
    elif block is None or block >= prefix_k_BKHS.shape[3]:
        visible = _visible(jnp.arange(prefix_k_BKHS.shape[3]), prefix_length_B, first_BM)
        # One maximum for both: how keys are divided into prefix and rows then changes no weight, not even in bfloat16.
        part = _fold(None, [*found, (_scores(q_BKMH, prefix_k_BKHS, visible, cap), prefix_v_BKSH)])
    else:
        part = _fold_blocks(
            q_BKMH, _fold(None, found), prefix_k_BKHS, prefix_v_BKSH, prefix_length_B, first_BM, cap, block
        )
    _, total, mixed = part
    mixed = (mixed / total).reshape(batch, heads, group, length, size)
    return jnp.transpose(mixed, (0, 3, 1, 2, 4)).astype(q_BTKGH.dtype)


_Part = tuple[Array, Array, Array]
"""Softmax so far: largest score `[B, K, M, 1]`, sum of exponentials `[B, K, M, 1]`, weighted values `[B, K, M, H]`."""


def attend_by_position(
    q_BTKGH: Float[Array, "B T K G H"],
    prefix: tuple[Float[Array, "B K H S"], Float[Array, "B K S H"]],
    prefix_length_B: Int[Array, " B"],
    rows: tuple[Float[Array, "B K H C"], Float[Array, "B K C H"]],
    query_BT: Int[Array, "B T"],
    row_BC: Int[Array, "B C"],
    config: AttentionConfig,
    *,
    live_BTC: Bool[Array, "B T C"] | Bool[Array, "B 1 C"] | None = None,
    block: int | None = None,
) -> Float[Array, "B T K G H"]:
    """`attend_prefix_and_rows` as a layer's attention says: what a query sees follows from positions and the window.

    Args:
        prefix, rows: keys and values.
        query_BT, row_BC: positions of queries and rows; a negative row is seen by none.
        live_BTC: rows that count, for all queries or for each (None: all).
    """
    mask_BTC = sees(query_BT, row_BC, config.window)
    if live_BTC is not None:
        mask_BTC = mask_BTC & live_BTC
    first_BT = window_starts(query_BT, config.window)
    return attend_prefix_and_rows(
        q_BTKGH, *prefix, prefix_length_B, *rows, mask_BTC, first_BT=first_BT, cap=config.score_cap, block=block
    )


def window_starts(position_BT: Int[Array, "B T"], window: int | None) -> Int[Array, "B T"] | None:
    """The first position that a query at each position sees, None where it sees all before it."""
    return None if window is None else position_BT - (window - 1)


def sees(query_BT: Int[Array, "B T"], key_BC: Int[Array, "B C"], window: int | None = None) -> Bool[Array, "B T C"]:
    """Which keys queries see by their positions: those not after them, in the window; none at negative positions."""
    first = window_starts(query_BT, window)
    seen = (key_BC[:, None, :] >= 0) & (key_BC[:, None, :] <= query_BT[:, :, None])
    return seen if first is None else seen & (key_BC[:, None, :] >= first[:, :, None])


def _visible(index_S: Array, length_B: Array, first_BM: Array | None) -> Array:
    """`[B, 1, 1 or M, S]`: keys of a prefix that count."""
    inside = (index_S < length_B[:, None])[:, None, None]
    return inside if first_BM is None else inside & (index_S >= first_BM[:, None, :, None])


def _scores(q_BKMH: Array, k_BKHS: Array, mask: Array, cap: float | None) -> Array:
    """Scaled (and capped) scores in float32, `NEGATIVE` where masked."""
    scale = jnp.float32(q_BKMH.shape[-1] ** -0.5)
    scores = jnp.einsum("bkmh,bkhs->bkms", q_BKMH, k_BKHS, preferred_element_type=jnp.float32) * scale
    if cap is not None:
        scores = cap * jnp.tanh(scores / cap)
    return jnp.where(mask, scores, NEGATIVE)


def _fold(part: _Part | None, found: list[tuple[Array, Array]]) -> _Part:
    """Take more keys, given as scores and values, into a softmax."""
    largest = functools.reduce(jnp.maximum, [jnp.max(scores, axis=-1, keepdims=True) for scores, _ in found])
    if part is not None:
        largest = jnp.maximum(largest, part[0])
    total = mixed = jnp.float32(0.0)
    for scores, v_BKSH in found:
        weights = jnp.exp(scores - largest)
        total = total + jnp.sum(weights, axis=-1, keepdims=True)
        mixed = mixed + jnp.einsum(
            "bkms,bksh->bkmh", weights.astype(v_BKSH.dtype), v_BKSH, preferred_element_type=jnp.float32
        )
    if part is None:
        return largest, total, mixed
    shrink = jnp.exp(part[0] - largest)
    return largest, total + part[1] * shrink, mixed + part[2] * shrink


def _fold_blocks(
    q_BKMH: Array,
    part: _Part,
    k_BKHS: Array,
    v_BKSH: Array,
    length_B: Array,
    first_BM: Array | None,
    cap: float | None,
    block: int,
) -> _Part:
    """Take in the first `max(length)` keys of a prefix, block by block."""
    if k_BKHS.shape[3] % block:
        raise ValueError(f"blocks of {block} do not divide a prefix of {k_BKHS.shape[3]} keys")

    def body(index: Array, part: _Part) -> _Part:
        start = index * block
        keys = jax.lax.dynamic_slice_in_dim(k_BKHS, start, block, axis=3)
        values = jax.lax.dynamic_slice_in_dim(v_BKSH, start, block, axis=2)
        visible = _visible(start + jnp.arange(block, dtype=jnp.int32), length_B, first_BM)
        return _fold(part, [(_scores(q_BKMH, keys, visible, cap), values)])

    return jax.lax.fori_loop(0, (jnp.max(length_B) + block - 1) // block, body, part)
