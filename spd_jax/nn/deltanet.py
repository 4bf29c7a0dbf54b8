"""Gated delta net (arXiv 2412.06464): linear attention whose past is one matrix a head, behind a short convolution.

A position with query q, key k, value v, decay exp(g) and rate beta does S = exp(g) S, S = S + k (beta (v - k S)), and
gives q S. One row is done as written; many rows in chunks, where what the rows of a chunk do to each other is one
triangular system (arXiv 2406.06484). State and arithmetic of the recurrence are float32.

The layer does not know where its past is kept: it is handed a `Recurrence` and gives back the `Memory` after its rows.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from spd_jax import struct
from spd_jax.config.model import DeltaNetConfig, NormConfig
from spd_jax.nn.layers import Linear, RMSNorm

CHUNK = 64  # rows
_EXACT = jax.lax.Precision.HIGHEST


@struct.dataclass
class Memory:
    """What a layer remembers after a position: `conv` `[B, kernel - 1, channels]`, the convolution's inputs at the last
    positions, newest last, and `state` `[B, heads, key_dim, value_dim]` in float32."""

    conv: Array
    state: Array


@struct.dataclass
class Recurrence:
    """How rows go on: from `memory` (None: nothing was before).

    `valid` `[B, T]` are rows that count, all others come after them and change nothing (None: all count). `first`
    `[B, T]` is the index of the row with which each row's sequence begins, for sequences packed one behind the other;
    negative where it began in the memory (None: everywhere). With `branches` rows do not follow one another: each goes
    on from a memory of its own, `[B, T, ...]`.
    """

    memory: Memory | None = None
    valid: Array | None = None
    first: Array | None = None
    branches: bool = struct.static(default=False)


def empty_memory(config: DeltaNetConfig, batch: int, dtype: Any, leading: tuple[int, ...] = ()) -> Memory:
    """The memory of nothing; `leading` axes come first."""
    state = (*leading, batch, config.num_value_heads, config.key_dim, config.value_dim)
    conv = (*leading, batch, config.conv_kernel - 1, config.channels)
    return Memory(jnp.zeros(conv, dtype), jnp.zeros(state, jnp.float32))


class GatedDeltaNet(nnx.Module):
    """The mixer of a layer; the rows of `mix` are query, key, value, output gate, rate and decay."""

    def __init__(self, config: DeltaNetConfig, size: int, norm: NormConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.config = config
        heads, values = config.num_value_heads, config.num_value_heads * config.value_dim
        self.mix = Linear(size, config.channels + values + 2 * heads, bias=False, dtype=dtype, rngs=rngs)
        self.conv = nnx.Param(jnp.zeros((config.channels, config.conv_kernel), dtype))
        self.a_log = nnx.Param(jnp.zeros((heads,), dtype))
        self.dt_bias = nnx.Param(jnp.ones((heads,), dtype))
        self.norm = RMSNorm(config.value_dim, NormConfig(norm.eps), dtype=dtype)
        self.output = Linear(values, size, bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, x_BTD: Float[Array, "B T D"], recurrence: Recurrence) -> tuple[Float[Array, "B T D"], Memory]:
        """The rows mixed with their past, and the memory after the last row that counts (after each, of branches)."""
        if recurrence.branches:
            return self._branches(x_BTD, recurrence)
        config, (batch, length, _) = self.config, x_BTD.shape
        heads, values = config.num_value_heads, config.num_value_heads * config.value_dim
        before = recurrence.memory or empty_memory(config, batch, x_BTD.dtype)
        parts = (config.channels, config.channels + values, config.channels + values + heads)
        qkv, gate, rate, decay = jnp.split(self.mix(x_BTD), parts, axis=-1)
        mixed, conv = convolve(qkv, self.conv[...], before.conv, recurrence.valid, recurrence.first)
        keys = config.num_key_heads * config.key_dim
        q, k, v = jnp.split(jax.nn.silu(mixed).astype(jnp.float32), (keys, 2 * keys), axis=-1)
        shared = heads // config.num_key_heads
        q, k = (
            jnp.repeat(_unit(x.reshape(batch, length, config.num_key_heads, config.key_dim)), shared, axis=2)
            for x in (q, k)
        )
        beta = jax.nn.sigmoid(rate.astype(jnp.float32))
        dt = jax.nn.softplus(decay.astype(jnp.float32) + self.dt_bias[...].astype(jnp.float32))
        g = -jnp.exp(self.a_log[...].astype(jnp.float32)) * dt
        if recurrence.valid is not None:
            beta, g = (jnp.where(recurrence.valid[..., None], x, 0.0) for x in (beta, g))
        v = v.reshape(batch, length, heads, config.value_dim)
        q, k, v, g, beta = (jnp.moveaxis(x, 2, 1) for x in (q * config.key_dim**-0.5, k, v, g, beta))
        if length == 1 and recurrence.first is None:
            out, state = one_row(q, k, v, g, beta, before.state)
        else:
            out, state = in_chunks(q, k, v, g, beta, before.state, recurrence.first)
        out = self.norm(jnp.moveaxis(out, 1, 2).astype(x_BTD.dtype))
        opened = out * jax.nn.silu(gate.reshape(out.shape).astype(jnp.float32))
        y_BTD = self.output(opened.astype(x_BTD.dtype).reshape(batch, length, values))
        return y_BTD, Memory(conv.astype(before.conv.dtype), state)

    def _branches(self, x_BTD: Array, recurrence: Recurrence) -> tuple[Array, Memory]:
        """Every row as a sequence of one."""
        rows = x_BTD.shape[:2]
        alone = Recurrence(*jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (recurrence.memory,)))
        valid = None if recurrence.valid is None else recurrence.valid.reshape(-1, 1)
        mixed, memory = self(x_BTD.reshape(-1, 1, x_BTD.shape[-1]), struct.replace(alone, valid=valid))
        return mixed.reshape(x_BTD.shape), jax.tree.map(lambda x: x.reshape(*rows, *x.shape[1:]), memory)


def _unit(x: Float[Array, "... H"]) -> Float[Array, "... H"]:
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + 1e-6)


def convolve(
    x_BTC: Float[Array, "B T C"],
    kernel_CK: Float[Array, "C K"],
    before_BJC: Float[Array, "B J C"],
    valid_BT: Bool[Array, "B T"] | None,
    first_BT: Int[Array, "B T"] | None,
) -> tuple[Float[Array, "B T C"], Float[Array, "B J C"]]:
    """A causal convolution, each channel alone, and the last J = K - 1 inputs after the rows that count."""
    length = x_BTC.shape[1]
    past = before_BJC.shape[1]
    inputs = jnp.concatenate([before_BJC.astype(x_BTC.dtype), x_BTC], axis=1)
    rows = jnp.arange(length, dtype=jnp.int32)
    y_BTC = jnp.zeros_like(x_BTC)
    for tap in range(past + 1):
        seen = inputs[:, tap : tap + length]
        if first_BT is not None:
            seen = jnp.where((rows + (tap - past) >= first_BT)[..., None], seen, jnp.zeros((), seen.dtype))
        y_BTC = y_BTC + seen * kernel_CK[:, tap].astype(seen.dtype)
    if valid_BT is None:
        return y_BTC, inputs[:, length:]
    count_B = jnp.sum(valid_BT.astype(jnp.int32), axis=1)
    last = count_B[:, None] + jnp.arange(past, dtype=jnp.int32)
    return y_BTC, jnp.take_along_axis(inputs, last[..., None], axis=1)


def one_row(
    q: Float[Array, "B H 1 K"],
    k: Float[Array, "B H 1 K"],
    v: Float[Array, "B H 1 V"],
    g: Float[Array, "B H 1"],
    beta: Float[Array, "B H 1"],
    state: Float[Array, "B H K V"],
) -> tuple[Float[Array, "B H 1 V"], Float[Array, "B H K V"]]:
    """The recurrence of one row as it is written, without a matrix product."""
    q, k, v = q[:, :, 0], k[:, :, 0], v[:, :, 0]
    state = state * jnp.exp(g)[..., None]
    change = beta * (v - jnp.sum(k[..., None] * state, axis=2))
    state = state + k[..., None] * change[:, :, None]
    return jnp.sum(q[..., None] * state, axis=2)[:, :, None], state


def in_chunks(
    q: Float[Array, "B H T K"],
    k: Float[Array, "B H T K"],
    v: Float[Array, "B H T V"],
    g: Float[Array, "B H T"],
    beta: Float[Array, "B H T"],
    state: Float[Array, "B H K V"],
    first_BT: Int[Array, "B T"] | None,
) -> tuple[Float[Array, "B H T V"], Float[Array, "B H K V"]]:
    """The recurrence of many rows, chunk by chunk; `first_BT` as in `Recurrence`."""
    length = q.shape[2]
    chunk = min(CHUNK, length)
    padding = -length % chunk

    def chunks(x: Array, axis: int) -> Array:
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, padding)
        cut = jnp.pad(x, widths).reshape(*x.shape[:axis], -1, chunk, *x.shape[axis + 1 :])
        return jnp.moveaxis(cut, axis, 0)

    starts = jnp.arange(0, length + padding, chunk, dtype=jnp.int32)
    inputs = (*(chunks(x, 2) for x in (q, k, v, g, beta)), starts)
    if first_BT is not None:
        inputs = (*inputs, chunks(first_BT, 1))

    def body(state: Array, xs: Any) -> tuple[Array, Array]:
        return _chunk(state, *xs)

    state, out = jax.lax.scan(body, state, inputs)
    out = jnp.moveaxis(out, 0, 2)
    return out.reshape(*out.shape[:2], -1, out.shape[-1])[:, :, :length], state


def unit_lower_inverse(matrix: Float[Array, "... C C"]) -> Float[Array, "... C C"]:
    """The inverse of a matrix with ones on its diagonal, of which only what lies below the diagonal is read.

    Diagonal blocks of 1, 2, 4, ... rows are inverted from those of half the size: [[A, 0], [C, D]] has the inverse
    [[A', 0], [-D' C A', D']]. Products of whole matrices, since the blocks of a size lie apart; every number on the way
    is one of the result, so that nothing grows and cancels as it does in a series of powers.

    Not LAPACK's solver: on CPUs jaxlib hands its batch to the threads that run the simulated devices and waits for
    them, and when all others wait in a collective for this device, nobody is left to do the work.
    """
    size = matrix.shape[-1]
    rows = jnp.arange(size)
    inverse = jnp.broadcast_to(jnp.eye(size, dtype=matrix.dtype), matrix.shape)
    block = 1
    while block < size:
        pair = rows // block
        below = (pair[:, None] % 2 == 1) & (pair == pair[:, None] - 1)
        coupling = jnp.where(below, matrix, jnp.zeros((), matrix.dtype))
        left = jnp.matmul(inverse, coupling, precision=_EXACT)
        inverse = inverse - jnp.matmul(left, inverse, precision=_EXACT)
        block *= 2
    return inverse


def _chunk(
    state: Array, q: Array, k: Array, v: Array, g: Array, beta: Array, start: Array, first: Array | None = None
) -> tuple[Array, Array]:
    """One chunk: the state after it and what its rows give."""
    size = q.shape[2]
    rows = jnp.arange(size)
    total = jnp.cumsum(g, axis=-1)
    seen = rows[:, None] >= rows
    carried = jnp.ones((1, 1, size), jnp.float32)  # rows that go on from the state before the chunk
    if first is not None:  # padding rows at the end have first = 0; they have no rate, and nobody asks for them
        seen = seen & (start + rows >= first[:, :, None])[:, None]
        carried = (start > first).astype(jnp.float32)[:, None]
    decays = jnp.where(seen, jnp.exp(jnp.where(seen, total[..., None] - total[..., None, :], 0.0)), 0.0)
    into = jnp.exp(total) * carried
    alike = jnp.einsum("bhtk,bhsk->bhts", k, k, precision=_EXACT) * decays * beta[..., None]
    wanted = jnp.concatenate([v, k * into[..., None]], axis=-1) * beta[..., None]
    solved = jnp.matmul(unit_lower_inverse(alike), wanted, precision=_EXACT)
    values, keys = jnp.split(solved, (v.shape[-1],), axis=-1)
    change = values - jnp.einsum("bhtk,bhkv->bhtv", keys, state, precision=_EXACT)
    asked = jnp.einsum("bhtk,bhsk->bhts", q, k, precision=_EXACT) * decays
    out = jnp.einsum("bhtk,bhkv->bhtv", q * into[..., None], state, precision=_EXACT)
    out = out + jnp.einsum("bhts,bhsv->bhtv", asked, change, precision=_EXACT)
    left = k * decays[..., -1, :, None]  # what of a row's key is left at the end of the chunk
    state = state * into[..., -1, None, None] + jnp.einsum("bhsk,bhsv->bhkv", left, change, precision=_EXACT)
    return state, out
