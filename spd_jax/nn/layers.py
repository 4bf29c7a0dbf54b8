"""Linear maps, norms, the gated MLP and the decoder layer, as Flax NNX modules.

Weights keep the orientation of the checkpoints, `[out, in]`: no transpose at load, and on CPU a matrix-vector product
over rows is as fast as over columns while 5 to 9 rows (the draft's staircase) are 20 % faster. Query, key and value
share one weight grouped by key-value head, gate and up share one weight: fewer and larger products per token.

The layer does not know where keys and values are kept: it hands its new ones to an `Attend` callable.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from spd_jax.config.model import LayerConfig
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
    `[B, T, K, H]` of the same rows; returns the mixed values `[B, T, K, G, H]` and what the caller wants to keep.
    """

    def __call__(self, q_BTKGH: Array, k_BTKH: Array, v_BTKH: Array, /) -> tuple[Array, Any]: ...


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
    """x / rms(x) * weight; the mean square is taken in float32."""

    def __init__(self, size: int, eps: float, *, dtype: jnp.dtype):
        self.weight = nnx.Param(jnp.ones((size,), dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        return rms_norm(x, self.weight[...], self.eps)


def rms_norm(x: Float[Array, "... D"], weight: Float[Array, " D"], eps: float) -> Float[Array, "... D"]:
    """Root mean square norm (arXiv 1910.07467), computed in float32 and returned in the dtype of `x`."""
    x32 = x.astype(jnp.float32)
    y = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return weight.astype(x.dtype) * y.astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention with rotary embeddings; optionally a norm of every query and key head."""

    def __init__(self, config: LayerConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.config = config
        width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        self.qkv = Linear(config.hidden_size, width, bias=config.qkv_bias, dtype=dtype, rngs=rngs)
        self.output = Linear(
            config.num_heads * config.head_dim, config.hidden_size, bias=config.output_bias, dtype=dtype, rngs=rngs
        )
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype=dtype) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype=dtype) if config.qk_norm else None

    def __call__(self, x_BTD: Array, rope: RopeTable, attend: Attend, asking: int | None = None) -> tuple[Array, Any]:
        """Mixed values of all rows, or of the last `asking` of them; all rows are keys and values."""
        config = self.config
        group = config.num_heads // config.num_kv_heads
        batch, length, _ = x_BTD.shape
        # Grouped by key-value head: [its G query heads, its key, its value] for each of the K heads in turn.
        if asking is None:
            qkv = self.qkv(x_BTD).reshape(batch, length, config.num_kv_heads, group + 2, config.head_dim)
            q_BTKGH, k_BTKH, v_BTKH = qkv[..., :group, :], qkv[..., group, :], qkv[..., group + 1, :]
        else:
            length = asking
            q_BTKGH = self._part(x_BTD[:, -asking:], slice(group))
            kv = self._part(x_BTD, slice(group, None))
            k_BTKH, v_BTKH = kv[..., 0, :], kv[..., 1, :]
        if self.q_norm is not None and self.k_norm is not None:
            q_BTKGH, k_BTKH = self.q_norm(q_BTKGH), self.k_norm(k_BTKH)
        q_rope = rope if asking is None else jax.tree.map(lambda x: x[:, -asking:], rope)
        q_BTKGH = apply_rope(q_BTKGH, q_rope.cos[:, :, None, None], q_rope.sin[:, :, None, None])
        k_BTKH = apply_rope(k_BTKH, rope.cos[:, :, None], rope.sin[:, :, None])
        mixed, kept = attend(q_BTKGH, k_BTKH, v_BTKH)
        return self.output(mixed.reshape(batch, length, config.num_heads * config.head_dim)), kept

    def _part(self, x_BTD: Array, part: slice) -> Array:
        """Some of the `group + 2` heads of every key-value head, `[B, T, K, heads, H]`."""
        config = self.config

        def of(rows: Array) -> Array:
            grouped = rows.reshape(config.num_kv_heads, -1, config.head_dim, *rows.shape[1:])[:, part]
            return grouped.reshape(-1, *rows.shape[1:])

        y = project(x_BTD, of(self.qkv.weight[...]))
        if self.qkv.bias is not None:
            y = y + of(self.qkv.bias[...]).astype(y.dtype)
        return y.reshape(*x_BTD.shape[:2], config.num_kv_heads, -1, config.head_dim)


class MLP(nnx.Module):
    """down(act(gate(x)) * up(x)); gate rows come first in the shared weight."""

    def __init__(self, config: LayerConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        if config.activation not in ACTIVATIONS:
            raise ValueError(f"hidden_act {config.activation!r} is not supported; supported: {sorted(ACTIVATIONS)}")
        self.activation = config.activation
        size, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up = Linear(size, 2 * inner, bias=bias, dtype=dtype, rngs=rngs)
        self.down = Linear(inner, size, bias=bias, dtype=dtype, rngs=rngs)

    def __call__(self, x_BTD: Array) -> Array:
        gate, up = jnp.split(self.gate_up(x_BTD), 2, axis=-1)
        return self.down(ACTIVATIONS[self.activation](gate) * up)


class DecoderLayer(nnx.Module):
    """Pre-norm decoder layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: LayerConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.attention = Attention(config, dtype=dtype, rngs=rngs)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.mlp = MLP(config, dtype=dtype, rngs=rngs)

    def __call__(self, x_BTD: Array, rope: RopeTable, attend: Attend, asking: int | None = None) -> tuple[Array, Any]:
        """The rows after this layer, or only the last `asking` of them where nothing above needs the others."""
        with jax.named_scope("attention"):
            mixed, kept = self.attention(self.input_norm(x_BTD), rope, attend, asking)
            x_BTD = (x_BTD if asking is None else x_BTD[:, -asking:]) + mixed
        with jax.named_scope("mlp"):
            return x_BTD + self.mlp(self.mlp_norm(x_BTD)), kept


@functools.cache
def layer_structure(config: LayerConfig) -> tuple[Any, dict[tuple[str, ...], tuple[int, ...]]]:
    """Graph definition of a layer kind, and the shape at every parameter path; nothing is allocated."""
    abstract = nnx.eval_shape(lambda: DecoderLayer(config, dtype=jnp.dtype(jnp.float32), rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(abstract)
    return graphdef, {tuple(map(str, path)): leaf.get_value().shape for path, leaf in nnx.to_flat_state(state)}
