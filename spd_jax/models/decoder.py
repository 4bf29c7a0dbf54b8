"""A decoder-only target model and the one function that runs its layers.

`run_layers` is what every path calls: prefill, autoregressive decoding, a pipeline stage, the draft layers, training.
`Decoder` is the whole model on one device. Hidden state index l means the output of layer l (1-based) BEFORE the final
norm; index 0 is the token embedding. Neither knows of stages or caches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from spd_jax.config.model import ModelConfig
from spd_jax.nn.attention import attend_prefix_and_rows, cache_layout
from spd_jax.nn.layers import Attend, DecoderLayer, RMSNorm, project
from spd_jax.nn.rope import RopeTable, rope_table


def run_layers(
    layers: Iterable[DecoderLayer], x_BTD: Float[Array, "B T D"], rope: RopeTable, attends: Sequence[Attend]
) -> tuple[list[Array], list[Any]]:
    """Run layers in order; returns the hidden state after each and what each `Attend` kept."""
    hiddens, kept = [], []
    for layer, attend in zip(layers, attends, strict=True):
        x_BTD, entry = layer(x_BTD, rope, attend)
        hiddens.append(x_BTD)
        kept.append(entry)
    return hiddens, kept


def rows_only(mask_BTT: Array) -> Attend:
    """Attention among the rows themselves, without any cache."""

    def attend(q_BTKGH: Array, k_BTKH: Array, v_BTKH: Array) -> tuple[Array, None]:
        return attend_prefix_and_rows(q_BTKGH, None, None, None, *cache_layout(k_BTKH, v_BTKH), mask_BTT), None

    return attend


class Decoder(nnx.Module):
    """Embedding, layers, final norm and head of a target model on one device."""

    def __init__(self, config: ModelConfig, *, dtype: Any = jnp.float32, rngs: nnx.Rngs):
        dtype = jnp.dtype(dtype)
        self.config = config
        shape = (config.vocab_size, config.hidden_size)
        self.embedding = nnx.Param(jax.random.normal(rngs.params(), shape, dtype) * dtype.type(0.02))
        self.layers = nnx.List([DecoderLayer(c, dtype=dtype, rngs=rngs) for c in config.layers])
        self.final_norm = RMSNorm(config.hidden_size, config.layer.rms_norm_eps, dtype=dtype)
        tied = config.tie_embeddings
        self.head = None if tied else nnx.Param(jax.random.normal(rngs.params(), shape, dtype) * dtype.type(0.02))

    def logits(self, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """Float32 logits of hidden states taken before the final norm."""
        head = self.embedding if self.head is None else self.head
        return head_logits(self.final_norm(hidden), head[...])

    def hidden_states(self, ids_BT: Int[Array, "B T"]) -> list[Float[Array, "B T D"]]:
        """Hidden states 0..L of whole sequences, without a cache (index L is before the final norm)."""
        batch, length = ids_BT.shape
        positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
        rope = rope_table(self.config.rope, self.config.layer.head_dim, positions)
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (batch, length, length))
        x_BTD = self.embedding[...][ids_BT]
        hiddens, _ = run_layers(self.layers, x_BTD, rope, [rows_only(mask)] * len(self.layers))
        return [x_BTD, *hiddens]

    def __call__(self, ids_BT: Int[Array, "B T"]) -> Float[Array, "B T V"]:
        return self.logits(self.hidden_states(ids_BT)[-1])


def head_logits(hidden: Float[Array, "... D"], rows: Float[Array, "V D"]) -> Float[Array, "... V"]:
    """Float32 scores of hidden states (already normed) against the rows of a head."""
    return project(hidden, rows, jnp.float32)
