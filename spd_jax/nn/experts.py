"""A mixture of experts: every row runs the few experts that its router likes best (arXiv 1701.06538).

Rows are sorted by expert and go through in blocks of one expert each, as many blocks as there are, so that only the
weights of chosen experts are read. Few rows go one by one: gathering the weights of their experts into one product took
seven times as long on a CPU.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from spd_jax.config.model import ExpertsConfig, MlpConfig
from spd_jax.nn.layers import MLP, Linear, gated, project

FEW = 8  # rows that go one by one
BLOCK = 32  # rows


class Experts(nnx.Module):
    """The weighted sum of the chosen experts, and of a shared one behind a gate of its own where there is one.

    An expert's weights are those of an `MLP`, stacked: `gate_up` `[E, 2 F, D]`, `down` `[E, D, F]`.
    """

    def __init__(self, config: ExpertsConfig, size: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.config = config
        count, inner = config.num_experts, config.intermediate_size
        self.router = Linear(size, count, bias=False, dtype=dtype, rngs=rngs)
        scale = dtype.type(0.02)
        self.gate_up = nnx.Param(jax.random.normal(rngs.params(), (count, 2 * inner, size), dtype) * scale)
        self.down = nnx.Param(jax.random.normal(rngs.params(), (count, size, inner), dtype) * scale)
        shared = config.shared_intermediate_size
        mlp = MlpConfig(shared, config.activation) if shared else None
        self.shared = None if mlp is None else MLP(mlp, size, dtype=dtype, rngs=rngs)
        self.shared_gate = None if mlp is None else Linear(size, 1, bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        x_RD = x_BTD.reshape(-1, x_BTD.shape[-1])
        weights_RC, chosen_RC = self.route(x_RD)
        block = 1 if x_RD.shape[0] <= FEW else BLOCK
        y_RD = mix(x_RD, weights_RC, chosen_RC, self.gate_up[...], self.down[...], self.config.activation, block)
        if self.shared is not None and self.shared_gate is not None:
            y_RD = y_RD + jax.nn.sigmoid(self.shared_gate(x_RD)) * self.shared(x_RD)
        return y_RD.reshape(x_BTD.shape)

    def route(self, x_RD: Float[Array, "R D"]) -> tuple[Float[Array, "R C"], Int[Array, "R C"]]:
        """Weights of the chosen experts (softmax in float32 over all, the largest kept), and which they are."""
        scores = jax.nn.softmax(self.router(x_RD).astype(jnp.float32), axis=-1)
        weights, chosen = jax.lax.top_k(scores, self.config.top_k)
        if self.config.normalise:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        return weights.astype(x_RD.dtype), chosen


def mix(
    x_RD: Float[Array, "R D"],
    weights_RC: Float[Array, "R C"],
    chosen_RC: Int[Array, "R C"],
    gate_up_EGD: Float[Array, "E G D"],
    down_EDF: Float[Array, "E D F"],
    activation: str,
    block: int,
) -> Float[Array, "R D"]:
    """Pairs of row and expert sorted by expert, in blocks of one expert; a block's spare places hold row 0."""
    (rows, choices), experts = chosen_RC.shape, gate_up_EGD.shape[0]
    pairs = rows * choices
    most = -(-pairs // block) + min(experts, pairs)  # every expert may leave one block half empty
    expert_P = chosen_RC.reshape(-1)
    order = jnp.argsort(expert_P, stable=True).astype(jnp.int32)
    count_E = jnp.bincount(expert_P, length=experts).astype(jnp.int32)
    blocks_E = (count_E + block - 1) // block
    end_E = jnp.cumsum(blocks_E)
    sorted_P = expert_P[order]
    within = jnp.arange(pairs, dtype=jnp.int32) - (jnp.cumsum(count_E) - count_E)[sorted_P]
    place = (end_E - blocks_E)[sorted_P] * block + within  # of every sorted pair
    row_of_place = jnp.zeros((most * block,), jnp.int32).at[place].set(order // choices)
    expert_of_block = jnp.searchsorted(end_E, jnp.arange(most, dtype=jnp.int32), side="right").astype(jnp.int32)

    def body(index: Array, y: Array) -> Array:
        which = jnp.minimum(expert_of_block[index], experts - 1)
        mine = x_RD[jax.lax.dynamic_slice_in_dim(row_of_place, index * block, block)]
        gate_up = jax.lax.dynamic_index_in_dim(gate_up_EGD, which, keepdims=False)
        down = jax.lax.dynamic_index_in_dim(down_EDF, which, keepdims=False)
        out = project(gated(project(mine, gate_up), activation), down)
        return jax.lax.dynamic_update_slice_in_dim(y, out, index * block, axis=0)

    # Inside a shard_map what differs by device must do so from the start of a loop: a zero that is made of both inputs.
    zero = jnp.where((x_RD[0, 0] == 0) & (gate_up_EGD[0, 0, 0] == 0), 0.0, 0.0).astype(x_RD.dtype)
    y = jax.lax.fori_loop(0, end_E[-1], body, jnp.broadcast_to(zero, (most * block, x_RD.shape[1])))
    place_P = jnp.zeros((pairs,), jnp.int32).at[order].set(place)
    return jnp.sum(y[place_P].reshape(rows, choices, -1) * weights_RC[..., None], axis=1)
