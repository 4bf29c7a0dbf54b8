"""Parts of the decode cycle on their own: the draft module on one device, collectives, sharded heads.

Each is a jitted loop of `count` repetitions in which every repetition depends on the one before, so that nothing is
hoisted out of the loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array

from spd_jax.config.model import AttentionConfig
from spd_jax.decode.heads import answer_greedy, both_logits
from spd_jax.decode.programs import SHARDED, local_params, params_spec
from spd_jax.decode.sampling import best
from spd_jax.decode.verify import Siblings
from spd_jax.defaults import GENERATOR
from spd_jax.models.decoder import Ropes, head_logits, run_layers
from spd_jax.nn.attention import attend_prefix_and_rows, cache_layout
from spd_jax.nn.layers import Attend, rms_norm
from spd_jax.parallel.mesh import gather_ranks, psum_packed, shift, varying
from spd_jax.parallel.stack import PipelineParams, Program
from spd_jax.parallel.vocab import local_ids
from spd_jax.speculation.module import SpeculationModule

REPLICATED = PartitionSpec()


def draft_alone(
    module: SpeculationModule, head_rows: Array, norm: Array, plan: Any, context: int, capacity: int, count: int
) -> Callable[[], Array]:
    """The speculation module on one device as a cycle runs it.

    The projections whose type changes at a depth, n + 1 rows through the draft layers over a cache of `context`
    positions, the head for the newest row, the embedding of the best token.
    """
    config = module.config
    graphdef, state = nnx.split(module)
    kind, rows, size = config.layer, plan.num_stages + 1, config.layer.hidden_size
    types = plan.anchor_type
    changes = [k for k in range(1, rows) if k == 1 or types[k] != types[k - 1]]
    positions = context + jnp.arange(rows, dtype=jnp.int32)[None]
    mask = jnp.tril(jnp.ones((1, rows, rows), bool))
    key = jax.random.key(0, impl=GENERATOR)
    taps = jax.random.normal(key, (1, rows, len(config.anchors), size), head_rows.dtype)
    attention = kind.attention
    front = (1, attention.num_kv_heads)
    keys = [jnp.zeros((*front, attention.head_dim, capacity), taps.dtype) for _ in range(config.num_layers)]
    values = [jnp.zeros((*front, capacity, attention.head_dim), taps.dtype) for _ in range(config.num_layers)]

    def attend(k_cache: Array, v_cache: Array) -> Attend:
        length = jnp.full((1,), context, jnp.int32)

        def over(q: Array, k: Array, v: Array, config: AttentionConfig) -> tuple[Array, None]:
            return attend_prefix_and_rows(q, k_cache, v_cache, length, *cache_layout(k, v), mask), None

        return over

    def run(state: Any, rows_VD: Array, norm: Array, taps: Array, keys: Any, values: Any) -> Array:
        module: SpeculationModule = nnx.merge(graphdef, state)
        ropes = Ropes(positions)

        def body(step: Array, taps: Array) -> Array:
            features: list[Array] = []
            for depth in range(rows):
                fresh = depth == 0 or depth in changes
                features.append(
                    module.aggregate([taps[:, depth, i] for i in range(types[depth] + 1)])
                    if fresh
                    else taps[:, depth, -1]
                )
            x_BTD = jnp.stack(features, axis=1)
            hiddens, _ = run_layers(
                module.layers, x_BTD, ropes, [attend(k, v) for k, v in zip(keys, values, strict=True)]
            )
            logits = head_logits(rms_norm(hiddens[-1][:, -1], norm, kind.norm), rows_VD)
            _, token = best(logits, jnp.arange(logits.shape[-1], dtype=jnp.int32))
            return taps.at[:, 0, 0].set(rows_VD[token]).at[:, 1:, 0].add(hiddens[-1][:, 1:] * 1e-6)

        return jax.lax.fori_loop(0, count, body, taps)

    compiled = jax.jit(run)
    return lambda: compiled(state, head_rows, norm, taps, keys, values)


def collectives_alone(program: Program, mesh: Mesh, count: int, batch: int = 1) -> Callable[[], Array]:
    """The four collectives of a greedy cycle with their shapes, and nothing else."""
    plan, size = program.plan, program.target.hidden_size
    changes = len(plan.changes)

    def run(x: Array) -> Array:
        here = x[0]

        def body(step: Array, x: Array) -> Array:
            moved = shift(x)
            packet = psum_packed((x, x, jnp.broadcast_to(x[:, :, None], (batch, 1, len(plan.anchors) - 1, size))))
            picked = gather_ranks(((packet[0][:, 0, 0], jnp.zeros((batch,), jnp.int32)),) * 2)
            entered = psum_packed((x, jnp.broadcast_to(x, (changes, batch, size))))
            total = packet[2][:, :, 0] + entered[0] + picked[0][0].sum()
            return moved * 0.5 + total * 1e-9

        return jax.lax.fori_loop(0, count, body, varying(here))[None]

    mapped = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=SHARDED, out_specs=SHARDED))
    start = jax.device_put(jnp.ones((plan.num_ranks, batch, 1, size), jnp.float32), jax.NamedSharding(mesh, SHARDED))
    return lambda: mapped(start)


def heads_alone(program: Program, params: PipelineParams, mesh: Mesh, count: int) -> Callable[[], Array]:
    """Both sharded heads with the exchange that verifies and drafts greedily."""
    size = program.target.hidden_size

    def run(params: PipelineParams, x: Array) -> Array:
        local = local_params(params)
        ids = local_ids(local.allowed.shape[0])
        nothing = Siblings(jnp.zeros((1, 1), jnp.int32), jnp.zeros((1, 1), bool))

        def body(step: Array, x: Array) -> Array:
            target, draft, share = both_logits(program, local, x, x[:, None] * 0.5)
            verdict, found = answer_greedy(target, draft, ids, ids[jnp.maximum(share, 0)], nothing)
            return x + (verdict.token + found.id[:, 0, 0]).astype(x.dtype)[:, None] * 1e-6

        return jax.lax.fori_loop(0, count, body, x)

    mapped = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=(params_spec(), REPLICATED), out_specs=REPLICATED))
    start = jax.device_put(jnp.ones((1, size), params.embedding.dtype), jax.NamedSharding(mesh, REPLICATED))
    return lambda: mapped(params, start)
