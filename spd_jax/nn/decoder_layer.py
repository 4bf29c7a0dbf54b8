"""The decoder layer, of whatever kind its config says, and its parameters' shapes."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from spd_jax.config.model import AttentionConfig, LayerConfig, MlpConfig
from spd_jax.nn.deltanet import GatedDeltaNet, Recurrence
from spd_jax.nn.experts import Experts
from spd_jax.nn.layers import MLP, Attend, Attention, RMSNorm
from spd_jax.nn.rope import RopeTable

Past = Attend | Recurrence
"""How a layer reads what was before its rows: attention is handed a callable, a gated delta net its memory."""


class DecoderLayer(nnx.Module):
    """Pre-norm decoder layer: x + mixer(norm(x)), then x + mlp(norm(x)); each part may be normed again."""

    def __init__(self, config: LayerConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        size, mixer = config.hidden_size, config.mixer

        def norm() -> RMSNorm:
            return RMSNorm(size, config.norm, dtype=dtype)

        self.config = config
        self.input_norm = norm()
        made = {"dtype": dtype, "rngs": rngs}
        attends = isinstance(mixer, AttentionConfig)
        self.attention = Attention(mixer, size, config.norm, **made) if attends else None
        self.delta = None if attends else GatedDeltaNet(mixer, size, config.norm, **made)
        self.mixer_post_norm = norm() if config.post_norms else None
        self.mlp_norm = norm()
        mlp = config.mlp
        self.mlp = MLP(mlp, size, **made) if isinstance(mlp, MlpConfig) else Experts(mlp, size, **made)
        self.mlp_post_norm = norm() if config.post_norms else None

    def __call__(
        self, x_BTD: Array, rope: RopeTable | None, past: Past, asking: int | None = None
    ) -> tuple[Array, Any]:
        """The rows after this layer, and what is to be kept of them.

        Args:
            rope: of the rows' positions, for attention.
            asking: only so many last rows, where nothing above needs the others (attention only).

        Raises:
            TypeError: `past` is not for this kind of layer.
        """
        with jax.named_scope("mixer"):
            mixed, kept = self._mix(self.input_norm(x_BTD), rope, past, asking)
            if self.mixer_post_norm is not None:
                mixed = self.mixer_post_norm(mixed)
            x_BTD = (x_BTD if asking is None else x_BTD[:, -asking:]) + mixed
        with jax.named_scope("mlp"):
            mixed = self.mlp(self.mlp_norm(x_BTD))
            if self.mlp_post_norm is not None:
                mixed = self.mlp_post_norm(mixed)
            return x_BTD + mixed, kept

    def _mix(self, x_BTD: Array, rope: RopeTable | None, past: Past, asking: int | None) -> tuple[Array, Any]:
        if self.delta is not None:
            if not isinstance(past, Recurrence) or asking is not None:
                raise TypeError(f"a gated delta net goes on from a Recurrence, found {past!r}, asking {asking}")
            return self.delta(x_BTD, past)
        if self.attention is None or rope is None or isinstance(past, Recurrence):
            raise TypeError(f"attention needs rotary embeddings and a callable, found {rope!r} and {past!r}")
        return self.attention(x_BTD, rope, past, asking)


@functools.cache
def layer_structure(config: LayerConfig) -> tuple[Any, dict[tuple[str, ...], tuple[int, ...]]]:
    """Graph definition of a layer kind, and the shape at every parameter path; nothing is allocated."""
    abstract = nnx.eval_shape(lambda: DecoderLayer(config, dtype=jnp.dtype(jnp.float32), rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(abstract)
    return graphdef, {tuple(map(str, path)): leaf.get_value().shape for path, leaf in nnx.to_flat_state(state)}
