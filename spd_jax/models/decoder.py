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
from jaxtyping import Array, Bool, Float, Int

from spd_jax.config.model import AttentionConfig, Mixer, ModelConfig, RopeConfig
from spd_jax.nn.attention import attend_prefix_and_rows, cache_layout
from spd_jax.nn.decoder_layer import DecoderLayer, Past
from spd_jax.nn.deltanet import Recurrence
from spd_jax.nn.layers import Attend, RMSNorm, project
from spd_jax.nn.rope import RopeTable, rope_table


class Ropes:
    """The rotary tables of some positions, one for each rotary embedding that layers ask for."""

    def __init__(self, positions_BT: Int[Array, "B T"]):
        self.positions = positions_BT
        self._made: dict[tuple[RopeConfig, int], RopeTable] = {}

    def of(self, config: Mixer) -> RopeTable | None:
        """The table of a layer's attention, None for another mixer."""
        if not isinstance(config, AttentionConfig):
            return None
        key = (config.rope, config.rotary_dim)
        if key not in self._made:
            self._made[key] = rope_table(config, self.positions)
        return self._made[key]


def run_layers(
    layers: Iterable[DecoderLayer], x_BTD: Float[Array, "B T D"], ropes: Ropes, pasts: Sequence[Past]
) -> tuple[list[Array], list[Any]]:
    """Run layers in order; returns the hidden state after each and what each is to keep."""
    hiddens, kept = [], []
    for layer, past in zip(layers, pasts, strict=True):
        x_BTD, entry = layer(x_BTD, ropes.of(layer.config.mixer), past)
        hiddens.append(x_BTD)
        kept.append(entry)
    return hiddens, kept


def rows_only(mask_BTT: Array) -> Attend:
    """Attention among the rows themselves, without any cache; the mask is as if there were no window.

    With a window it is for whole sequences, whose rows lie as far apart as their positions.
    """

    def attend(q_BTKGH: Array, k_BTKH: Array, v_BTKH: Array, config: AttentionConfig) -> tuple[Array, None]:
        mask = mask_BTT
        if config.window is not None:
            rows = jnp.arange(mask.shape[1])
            mask = mask & (rows[:, None] - rows < config.window)
        keys = cache_layout(k_BTKH, v_BTKH)
        return attend_prefix_and_rows(q_BTKGH, None, None, None, *keys, mask, cap=config.score_cap), None

    return attend


def embed(rows: Float[Array, "... D"], config: ModelConfig) -> Float[Array, "... D"]:
    """Hidden state 0 of rows of the embedding."""
    return rows if config.embedding_scale == 1.0 else rows * jnp.asarray(config.embedding_scale, rows.dtype)


class Decoder(nnx.Module):
    """Embedding, layers, final norm and head of a target model on one device."""

    def __init__(self, config: ModelConfig, *, dtype: Any = jnp.float32, rngs: nnx.Rngs):
        dtype = jnp.dtype(dtype)
        self.config = config
        shape = (config.vocab_size, config.hidden_size)
        self.embedding = nnx.Param(jax.random.normal(rngs.params(), shape, dtype) * dtype.type(0.02))
        self.layers = nnx.List([DecoderLayer(c, dtype=dtype, rngs=rngs) for c in config.layers])
        self.final_norm = RMSNorm(config.hidden_size, config.norm, dtype=dtype)
        tied = config.tie_embeddings
        self.head = None if tied else nnx.Param(jax.random.normal(rngs.params(), shape, dtype) * dtype.type(0.02))

    def logits(self, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """Float32 logits of hidden states taken before the final norm."""
        head = self.embedding if self.head is None else self.head
        return head_logits(self.final_norm(hidden), head[...], self.config.logit_cap)

    def masked_logits(self, hidden: Float[Array, "... D"], allowed: Bool[Array, " V"]) -> Float[Array, "... V"]:
        """`logits` to decide by, as the function of this name."""
        head = self.embedding if self.head is None else self.head
        return masked_logits(self.final_norm(hidden), head[...], allowed, self.config.logit_cap)

    def hidden_states(self, ids_BT: Int[Array, "B T"]) -> list[Float[Array, "B T D"]]:
        """Hidden states 0..L of whole sequences, without a cache (index L is before the final norm)."""
        batch, length = ids_BT.shape
        positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
        ropes = Ropes(positions)
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (batch, length, length))
        x_BTD = embed(self.embedding[...][ids_BT], self.config)
        attend = rows_only(mask)
        pasts = [attend if isinstance(c.mixer, AttentionConfig) else Recurrence() for c in self.config.layers]
        hiddens, _ = run_layers(self.layers, x_BTD, ropes, pasts)
        return [x_BTD, *hiddens]

    def __call__(self, ids_BT: Int[Array, "B T"]) -> Float[Array, "B T V"]:
        return self.logits(self.hidden_states(ids_BT)[-1])


def head_logits(
    hidden: Float[Array, "... D"], rows: Float[Array, "V D"], cap: float | None = None
) -> Float[Array, "... V"]:
    """Float32 scores of hidden states (already normed) against the rows of a head, capped as the model's are."""
    logits = project(hidden, rows, jnp.float32)
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def masked_logits(
    hidden: Float[Array, "... D"], rows: Float[Array, "V D"], allowed: Bool[Array, " V"], cap: float | None = None
) -> Float[Array, "... V"]:
    """`head_logits` to decide by: -inf for ids that must never be emitted or proposed, and NaN for a score that is not
    finite, also where the cap would hide it or -inf would only make the id disappear."""
    scores = project(hidden, rows, jnp.float32)
    capped = scores if cap is None else cap * jnp.tanh(scores / cap)
    return jnp.where(allowed, jnp.where(jnp.isfinite(scores), capped, jnp.nan), -jnp.inf)
