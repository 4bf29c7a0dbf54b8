"""Attention of many queries over a contiguous range of keys each, tile by tile, with a backward pass of its own.

For training: no score outlives its tile, neither forward nor backward (as FlashAttention, arXiv 2205.14135), so memory
grows with the number of keys, not with its square, and on CPU a tile stays in the cache.

There may be several banks of keys over the same positions: one that is seen from afar, and any number of near ones of
which a query sees at most the last few positions (a draft sees what is in the pipeline in other features than what has
left it). All share one softmax. Several queries may sit at one position (`A`). This module knows nothing of features,
rotary embeddings or layers. Scores and softmax are float32; products run in the dtype of the keys.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spd_jax import struct
from spd_jax.nn.attention import NEGATIVE
from spd_jax.nn.product import transposed

EXTENTS = 4
"""Into how many runs of positions a pass is cut; queries of a run are compared with keys up to its end only."""
TILE = 1 << 20
"""Scores that a tile holds at most, unless one position has more."""


@struct.dataclass
class Ranges:
    """Which keys a query at position t, number a sees: `low <= T <= high` of each bank, never T > t.

    `far_low` `[B, S]`, `far_high` `[B, S, A]`; `near_low`, `near_high` `[B, S, A, W]` for W near banks, where no range
    may begin before t - `back`. Empty where low > high.
    """

    far_low: Array
    far_high: Array
    near_low: Array
    near_high: Array
    back: int = struct.static()


def causal_ranges(low_BS: Int[Array, "B S"]) -> Ranges:
    """One bank, one query a position: keys `low <= T <= t`."""
    batch, length = low_BS.shape
    high = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[:, None], (batch, length, 1))
    none = jnp.zeros((batch, length, 1, 0), jnp.int32)
    return Ranges(low_BS, high, none, none, 0)


def window_ranges(low_BS: Int[Array, "B S"], window: int | None) -> Ranges:
    """As `causal_ranges`, but a query sees itself and the `window - 1` keys before it at most (None: all)."""
    if window is None:
        return causal_ranges(low_BS)
    first = jnp.arange(low_BS.shape[1], dtype=jnp.int32) - (window - 1)
    return causal_ranges(jnp.maximum(low_BS, first))


def attend_ranges(
    q_BSAKGH: Float[Array, "B S A K G H"],
    k_BXSKH: Float[Array, "B X S K H"],
    v_BXSKH: Float[Array, "B X S K H"],
    ranges: Ranges,
    cap: float | None = None,
) -> Float[Array, "B S A K G H"]:
    """softmax(q k / sqrt(H)) v over the keys in range, in the dtype of q; 0 for a query that sees none.

    Args:
        k_BXSKH: the X = 1 + W banks, the far one first.
        cap: c makes c tanh(s / c) of a score s.
    """
    return _attend(q_BSAKGH, k_BXSKH, v_BXSKH, ranges, cap)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(q_BSAKGH: Array, k_BXSKH: Array, v_BXSKH: Array, ranges: Ranges, cap: float | None) -> Any:
    return _forward(q_BSAKGH, k_BXSKH, v_BXSKH, ranges, cap)[0]


def _capped(scores: Array, cap: float | None) -> Array:
    return scores if cap is None else cap * jnp.tanh(scores / cap)


def _tiles(q_BSAKGH: Array) -> list[tuple[int, int, int]]:
    """Runs of positions: first, end, positions a tile (a power of two that divides the first)."""
    batch, length, kinds, heads, group, _ = q_BSAKGH.shape
    rows = max(1, TILE // (batch * kinds * heads * group * length))
    rows = 1 << (min(rows, length).bit_length() - 1)
    run = -(-length // (EXTENTS * rows)) * rows
    return [(start, min(start + run, length), rows) for start in range(0, length, run)]


def _by_tile(x: Array, start: int, end: int, rows: int) -> Array:
    """Positions `start..end` of axis 1 as `[tiles, B, rows, ...]`; the last tile is filled up with zeros."""
    x = x[:, start:end]
    count = -(-(end - start) // rows)
    x = jnp.pad(x, [(0, 0), (0, count * rows - (end - start)), *[(0, 0)] * (x.ndim - 2)])
    return jnp.moveaxis(x.reshape(x.shape[0], count, rows, *x.shape[2:]), 1, 0)


def _from_tiles(x: Array, length: int) -> Array:
    """The inverse of `_by_tile` for one run of `length` positions."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]


def _queries(x: Array, start: int, end: int, rows: int) -> Array:
    """`[B, S, A, K, G, ...]` as `[tiles, B, K, rows A G, ...]`."""
    tiles = jnp.moveaxis(_by_tile(x, start, end, rows), 4, 2)
    return tiles.reshape(*tiles.shape[:3], -1, *tiles.shape[6:])


def _banks(x_BXSKH: Array, back: int, rows: int) -> tuple[Array, Array]:
    """The far bank `[B, K, S, H]` and the near ones `[B, K, W, back + S + rows, H]`, filled up with zeros."""
    x = jnp.moveaxis(x_BXSKH, 3, 1)
    return x[:, :, 0], jnp.pad(x[:, :, 1:], [(0, 0), (0, 0), (0, 0), (back, rows), (0, 0)])


def _tile_keys(far: Array, near: Array, first: Array, end: int, width: int) -> Array:
    """Keys of a tile that begins at position `first`: the far ones up to `end`, then `width` of every near bank."""
    near = jax.lax.dynamic_slice_in_dim(near, first, width, axis=3)
    return jnp.concatenate([far[:, :, :end], near.reshape(*near.shape[:2], -1, near.shape[-1])], axis=2)


def _visible(ranges: tuple[Array, ...], first: Array, back: int, end: int, width: int) -> Array:
    """`[B, rows, A, keys of the tile]`"""
    far_low, far_high, near_low, near_high = ranges
    far = jnp.arange(end, dtype=jnp.int32)
    near = first - back + jnp.arange(width, dtype=jnp.int32)
    seen_far = (far >= far_low[:, :, None, None]) & (far <= far_high[..., None])
    seen_near = (near >= near_low[..., None]) & (near <= near_high[..., None])
    return jnp.concatenate([seen_far, seen_near.reshape(*seen_near.shape[:3], -1)], axis=-1)


def _tile_inputs(ranges: Ranges, start: int, end: int, rows: int) -> tuple[Array, tuple[Array, ...]]:
    """First position and ranges of every tile of a run."""
    firsts = jnp.arange(start, end, rows, dtype=jnp.int32)
    fields = (ranges.far_low, ranges.far_high, ranges.near_low, ranges.near_high)
    return firsts, tuple(_by_tile(x, start, end, rows) for x in fields)


def _forward(q_BSAKGH: Array, k_BXSKH: Array, v_BXSKH: Array, ranges: Ranges, cap: float | None) -> tuple[Any, Any]:
    dtype, scale = k_BXSKH.dtype, jnp.float32(q_BSAKGH.shape[-1] ** -0.5)
    q = (q_BSAKGH.astype(jnp.float32) * scale).astype(dtype)
    _, _, kinds, _, group, _ = q.shape
    runs = _tiles(q)
    keys, values = (_banks(x, ranges.back, runs[0][2]) for x in (k_BXSKH, v_BXSKH))
    mixed, totals = [], []
    for start, end, rows in runs:
        width = rows + ranges.back

        def tile(_: None, xs: Any, end: int = end, width: int = width) -> tuple[None, Any]:
            q_BKMH, first, limits = xs
            s = jnp.einsum(
                "bkmh,bkth->bkmt", q_BKMH, _tile_keys(*keys, first, end, width), preferred_element_type=jnp.float32
            )
            visible = jnp.repeat(_visible(limits, first, ranges.back, end, width), group, axis=2)
            s = jnp.where(visible.reshape(s.shape[0], 1, *s.shape[2:]), _capped(s, cap), NEGATIVE)
            largest = jnp.max(s, axis=-1)
            p = jnp.exp(s - largest[..., None])
            total = jnp.sum(p, axis=-1)
            o = jnp.einsum(
                "bkmt,bkth->bkmh",
                p.astype(dtype),
                _tile_keys(*values, first, end, width),
                preferred_element_type=jnp.float32,
            )
            seen = largest > 0.5 * NEGATIVE
            return None, (
                jnp.where(seen[..., None], o / total[..., None], 0.0),
                jnp.where(seen, largest + jnp.log(total), 0.0),
            )

        _, (o, lse) = jax.lax.scan(tile, None, (_queries(q, start, end, rows), *_tile_inputs(ranges, start, end, rows)))
        o = o.reshape(*o.shape[:3], rows, kinds, group, o.shape[-1])
        mixed.append(_from_tiles(jnp.moveaxis(o, 2, 4), end - start))
        totals.append(lse)
    out = jnp.concatenate(mixed, axis=1).astype(q_BSAKGH.dtype)
    return out, (q, k_BXSKH, v_BXSKH, ranges, out, totals)


def _backward(cap: float | None, saved: Any, d_out: Array) -> tuple[Any, ...]:
    q, k_BXSKH, v_BXSKH, ranges, out, totals = saved
    dtype, back, scale = k_BXSKH.dtype, ranges.back, jnp.float32(q.shape[-1] ** -0.5)
    _, length, kinds, _, group, size = q.shape
    shift = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)  # d score = p (d_out v - shift)
    runs = _tiles(q)
    keys, values = (_banks(x, back, runs[0][2]) for x in (k_BXSKH, v_BXSKH))
    dk, dv = (jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), keys) for _ in range(2))
    dq = []
    for (start, end, rows), lse in zip(runs, totals, strict=True):
        width = rows + back

        def scatter(sums: tuple[Array, Array], d: Array, first: Array, end: int = end, width: int = width) -> Any:
            far, near = sums
            d_near = d[:, :, end:].reshape(*near.shape[:3], width, size)
            old = jax.lax.dynamic_slice_in_dim(near, first, width, axis=3)
            near = jax.lax.dynamic_update_slice_in_dim(near, old + d_near, first, axis=3)
            return far.at[:, :, :end].add(d[:, :, :end]), near

        # Keys lead in every product: all of them then contract over the last axis of the left operand.
        def tile(carry: Any, xs: Any, end: int = end, width: int = width, scatter: Any = scatter) -> tuple[Any, Array]:
            (dk, dv), (q_BKMH, do_BKMH, shift_BKM, lse_BKM, first, limits) = carry, xs
            k_BKTH, v_BKTH = _tile_keys(*keys, first, end, width), _tile_keys(*values, first, end, width)
            visible = jnp.repeat(_visible(limits, first, back, end, width), group, axis=2)
            visible = jnp.swapaxes(visible.reshape(visible.shape[0], 1, -1, visible.shape[-1]), 2, 3)
            s = jnp.einsum("bkth,bkmh->bktm", k_BKTH, q_BKMH, preferred_element_type=jnp.float32)
            s = _capped(s, cap)
            p = jnp.where(visible, jnp.exp(jnp.minimum(s - lse_BKM[:, :, None], 0.0)), 0.0)
            dp = jnp.einsum("bkth,bkmh->bktm", v_BKTH, do_BKMH, preferred_element_type=jnp.float32)
            ds = p * (dp - shift_BKM[:, :, None])
            ds = (ds if cap is None else ds * (1.0 - jnp.square(s / cap))).astype(dtype)
            dv = scatter(
                dv, jnp.einsum("bktm,bkmh->bkth", p.astype(dtype), do_BKMH, preferred_element_type=jnp.float32), first
            )
            dk = scatter(dk, jnp.einsum("bktm,bkmh->bkth", ds, q_BKMH, preferred_element_type=jnp.float32), first)
            dqT = jnp.einsum("bkht,bktm->bkhm", transposed(k_BKTH), ds, preferred_element_type=jnp.float32)
            return (dk, dv), dqT

        xs = tuple(_queries(x, start, end, rows) for x in (q, d_out.astype(dtype), shift))
        (dk, dv), dqT = jax.lax.scan(tile, (dk, dv), (*xs, lse, *_tile_inputs(ranges, start, end, rows)))
        dqT = dqT.reshape(*dqT.shape[:4], rows, kinds, group)
        dq.append(_from_tiles(jnp.transpose(dqT, (0, 1, 4, 5, 2, 6, 3)), end - start))

    def unbank(sums: tuple[Array, Array]) -> Array:
        far, near = sums
        both = jnp.concatenate([far[:, :, None], near[:, :, :, back : back + length]], axis=2)
        return jnp.moveaxis(both, 1, 3).astype(dtype)

    d_ranges = jax.tree.map(lambda x: None, ranges)
    return (jnp.concatenate(dq, axis=1) * scale).astype(out.dtype), unbank(dk), unbank(dv), d_ranges


_attend.defvjp(_forward, _backward)
