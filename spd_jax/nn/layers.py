"""Linear maps, norms, attention and the gated MLP, as Flax NNX modules.

Weights keep the orientation of the checkpoints, `[out, in]`: no transpose at load, and on CPU a matrix-vector product
over rows is as fast as over columns while 5 to 9 rows (the draft's staircase) are 20 % faster. Query, key and value
share one weight grouped by key-value head, gate and up share one weight: fewer and larger products per token.

Attention does not know where keys and values are kept: it hands its new ones to an `Attend` callable.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from spd_jax.config.model import AttentionConfig, MlpConfig, NormConfig
from spd_jax.nn.product import bfloat16_product
from spd_jax.nn.rope import RopeTable, apply_rope

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_pytorch_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}


@runtime_checkable
class Attend(Protocol):
    """Attention over wherever the keys and values live.

    Takes rotated queries `[B, T, K, G, H]` (G query heads share a key-value head), rotated keys and values
    `[B, T, K, H]` of the same rows, and the layer's attention, whose window and cap it must heed; returns the mixed
    values `[B, T, K, G, H]` and what the caller wants to keep.
    """

    def __call__(
        self, q_BTKGH: Array, k_BTKH: Array, v_BTKH: Array, config: AttentionConfig, /
    ) -> tuple[Array, Any]: ...


class Linear(nnx.Module):
    """y = x W^T (+ b) with W `[out, in]`."""

    def __init__(self, in_size: int, out_size: int, *, bias: bool, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.weight = nnx.Param(jax.random.normal(rngs.params(), (out_size, in_size), dtype) * dtype.type(0.02))
        self.bias = nnx.Param(jnp.zeros((out_size,), dtype)) if bias else None

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... F"]:
        y = project(x, self.weight[...])
        return y if self.bias is None else y + self.bias[...].astype(y.dtype)


def project(x: Float[Array, "... D"], weight_FD: Float[Array, "F D"], dtype: Any = None) -> Float[Array, "... F"]:
    """x W^T as one two-dimensional product that contracts the last axis of both (no transpose for XLA to keep).

    The result has `dtype`, else the dtype of x. A bfloat16 weight makes a bfloat16 product with float32 sums, of
    float32 x too.
    """
    rows = x.reshape(-1, x.shape[-1])
    if weight_FD.dtype == jnp.bfloat16:
        y = bfloat16_product(rows, weight_FD).astype(x.dtype if dtype is None else dtype)
    else:
        y = jax.lax.dot_general(rows, weight_FD, (((1,), (1,)), ((), ())), preferred_element_type=dtype)
    return y.reshape(*x.shape[:-1], weight_FD.shape[0])


class RMSNorm(nnx.Module):
    """A root mean square norm with its weight."""

    def __init__(self, size: int, config: NormConfig, *, dtype: jnp.dtype):
        make = jnp.zeros if config.zero_centred else jnp.ones
        self.weight = nnx.Param(make((size,), dtype))
        self.config = config

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        return rms_norm(x, self.weight[...], self.config)


def rms_norm(x: Float[Array, "... D"], weight: Float[Array, " D"], config: NormConfig) -> Float[Array, "... D"]:
    """x / rms(x) * weight (arXiv 1910.07467), computed in float32 and returned in the dtype of `x`.

    A zero-centred norm multiplies by 1 + weight, in float32, as the models with such norms do.
    """
    x32 = x.astype(jnp.float32)
    y = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + config.eps)
    if config.zero_centred:
        return (y * (1.0 + weight.astype(jnp.float32))).astype(x.dtype)
    return weight.astype(x.dtype) * y.astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention with rotary embeddings, in the variants of `AttentionConfig`."""

    def __init__(self, config: AttentionConfig, size: int, norm: NormConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.config = config
        mixed = config.num_heads * config.head_dim
        width = mixed * (1 + config.gated) + 2 * config.num_kv_heads * config.head_dim
        self.qkv = Linear(size, width, bias=config.qkv_bias, dtype=dtype, rngs=rngs)
        self.output = Linear(mixed, size, bias=config.output_bias, dtype=dtype, rngs=rngs)
        self.q_norm = RMSNorm(config.head_dim, norm, dtype=dtype) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, norm, dtype=dtype) if config.qk_norm else None

    def __call__(self, x_BTD: Array, rope: RopeTable, attend: Attend, asking: int | None = None) -> tuple[Array, Any]:
        """Mixed values of all rows, or of the last `asking` of them; all rows are keys and values."""
        config = self.config
        group = config.num_heads // config.num_kv_heads
        asked = group * (1 + config.gated)
        batch, length, _ = x_BTD.shape
        # Grouped by key-value head: [its G query heads, their gates, its key, its value] for each of the K heads.
        if asking is None:
            qkv = self.qkv(x_BTD).reshape(batch, length, config.num_kv_heads, asked + 2, config.head_dim)
            queries, k_BTKH, v_BTKH = qkv[..., :asked, :], qkv[..., asked, :], qkv[..., asked + 1, :]
        else:
            length = asking
            queries = self._part(x_BTD[:, -asking:], slice(asked))
            kv = self._part(x_BTD, slice(asked, None))
            k_BTKH, v_BTKH = kv[..., 0, :], kv[..., 1, :]
        q_BTKGH = queries[..., :group, :]
        if self.q_norm is not None and self.k_norm is not None:
            q_BTKGH, k_BTKH = self.q_norm(q_BTKGH), self.k_norm(k_BTKH)
        q_rope = rope if asking is None else jax.tree.map(lambda x: x[:, -asking:], rope)
        q_BTKGH = apply_rope(q_BTKGH, q_rope.cos[:, :, None, None], q_rope.sin[:, :, None, None])
        k_BTKH = apply_rope(k_BTKH, rope.cos[:, :, None], rope.sin[:, :, None])
        if config.scale is not None:  # what attends multiplies by head_dim^-1/2
            q_BTKGH = q_BTKGH * jnp.asarray(config.scale * config.head_dim**0.5, q_BTKGH.dtype)
        mixed, kept = attend(q_BTKGH, k_BTKH, v_BTKH, config)
        if config.gated:
            mixed = mixed * jax.nn.sigmoid(queries[..., group:, :])
        return self.output(mixed.reshape(batch, length, config.num_heads * config.head_dim)), kept

    def _part(self, x_BTD: Array, part: slice) -> Array:
        """Some of the query heads, gates, key and value of every key-value head, `[B, T, K, heads, H]`."""
        config = self.config

        def of(rows: Array) -> Array:
            grouped = rows.reshape(config.num_kv_heads, -1, config.head_dim, *rows.shape[1:])[:, part]
            return grouped.reshape(-1, *rows.shape[1:])

        y = project(x_BTD, of(self.qkv.weight[...]))
        if self.qkv.bias is not None:
            y = y + of(self.qkv.bias[...]).astype(y.dtype)
        return y.reshape(*x_BTD.shape[:2], config.num_kv_heads, -1, config.head_dim)


def gated(both: Float[Array, "... G"], activation: str) -> Float[Array, "... F"]:
    """act(gate) * up of the two halves of a row, gate first."""
    gate, up = jnp.split(both, 2, axis=-1)
    return ACTIVATIONS[activation](gate) * up


class MLP(nnx.Module):
    """down(act(gate(x)) * up(x)); gate rows come first in the shared weight."""

    def __init__(self, config: MlpConfig, size: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        if config.activation not in ACTIVATIONS:
            raise ValueError(f"hidden_act {config.activation!r} is not supported; supported: {sorted(ACTIVATIONS)}")
        self.activation = config.activation
        inner, bias = config.intermediate_size, config.bias
        self.gate_up = Linear(size, 2 * inner, bias=bias, dtype=dtype, rngs=rngs)
        self.down = Linear(inner, size, bias=bias, dtype=dtype, rngs=rngs)

    def __call__(self, x_BTD: Array) -> Array:
        return self.down(gated(self.gate_up(x_BTD), self.activation))
