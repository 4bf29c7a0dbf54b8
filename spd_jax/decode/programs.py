"""The two compiled programs of pipelined decoding: prefill, and a dispatch of up to K cycles.

Each is one jitted shard_map over the stage mesh. The dispatch loop is a `lax.while_loop`: no host round trip per token.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array

from spd_jax import struct
from spd_jax.cache.layer import LayerCache, empty_layer_cache, grow_layer_cache
from spd_jax.decode.cycle import cycle
from spd_jax.decode.heads import Mode
from spd_jax.decode.prefill import prefill
from spd_jax.decode.sampling import row_keys
from spd_jax.decode.state import DecodeState, Log, empty_log
from spd_jax.defaults import jit
from spd_jax.parallel.mesh import AXIS, sharded
from spd_jax.parallel.stack import PipelineParams, Program
from spd_jax.parallel.vocab import local_ids

T = TypeVar("T")
SHARDED, REPLICATED = PartitionSpec(AXIS), PartitionSpec()


def _prefix(kind: type[T], **parts: Any) -> T:
    """A tree prefix of `kind`, made as unflattening makes it: its leaves are no arrays and would not pass checks."""
    value = object.__new__(kind)
    for name, part in parts.items():
        object.__setattr__(value, name, part)
    return value


def params_spec() -> PipelineParams:
    """Partitioning of the parameters, as a tree prefix."""
    parts = {field.name: SHARDED for field in dataclasses.fields(PipelineParams)}
    return _prefix(PipelineParams, **(parts | {"final_norm": REPLICATED}))


def state_spec(mode: Mode) -> DecodeState:
    """Partitioning of the decode state, as a tree prefix."""
    log_q = SHARDED if mode.draws else None
    return _prefix(DecodeState, control=REPLICATED, taps=REPLICATED, hidden=SHARDED, caches=SHARDED, log_q=log_q)


def _local(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[0], tree)


def _global(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[None], tree)


def local_params(params: PipelineParams) -> PipelineParams:
    """One rank's share of the parameters, inside a shard_map."""
    norm = params.final_norm
    return struct.replace(_local(struct.replace(params, final_norm=norm[None])), final_norm=norm)


def local_state(state: DecodeState) -> DecodeState:
    """One rank's share of the state, inside a shard_map."""
    return struct.replace(state, hidden=state.hidden[0], caches=_local(state.caches), log_q=_local(state.log_q))


def global_state(state: DecodeState) -> DecodeState:
    """What a shard_map returns for one rank's share of the state."""
    return struct.replace(state, hidden=state.hidden[None], caches=_global(state.caches), log_q=_global(state.log_q))


def _ban(params: PipelineParams, banned: Array) -> PipelineParams:
    ids = local_ids(params.allowed.shape[0])
    return struct.replace(params, allowed=params.allowed & ~jnp.any(ids[:, None] == banned, axis=1))


def make_prefill(program: Program, mode: Mode, mesh: Mesh, chunk: int) -> Callable[..., Any]:
    """`(params, request, caches, ids, lengths, limit, seeds, banned) -> (state, token, log_prob)`.

    Caches are donated.
    """

    def body(params, request, caches, ids, lengths, limit, seeds, banned):
        local = _ban(local_params(params), banned)
        state, token, log_prob = prefill(
            program, mode, local, request, _local(caches), ids, lengths, limit, row_keys(seeds), chunk
        )
        return global_state(state), token, log_prob

    mapped = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(params_spec(), REPLICATED, SHARDED, *[REPLICATED] * 5),
        out_specs=(state_spec(mode), REPLICATED, REPLICATED),
    )
    return jit(mapped, donate_argnums=2)


def make_dispatch(program: Program, mode: Mode, mesh: Mesh, cycles: int) -> Callable[..., tuple[DecodeState, Log]]:
    """`(params, request, state, banned) -> (state, log)`: up to `cycles` cycles.

    Fewer when all sequences have ended or a rank reports a fault; the state is donated.
    """

    def body(params, request, state, banned):
        local = _ban(local_params(params), banned)
        state = local_state(state)
        log = empty_log(cycles, state.control.active.shape[0], mode.tree.width)

        def more(carry: tuple[Array, DecodeState, Log]) -> Array:
            index, state, _ = carry
            return (index < cycles) & jnp.any(state.control.active) & ~jnp.any(state.control.fault)

        def step(carry: tuple[Array, DecodeState, Log]) -> tuple[Array, DecodeState, Log]:
            index, state, log = carry
            state, entry = cycle(program, mode, local, request, state)
            log = jax.tree.map(lambda whole, row: jax.lax.dynamic_update_index_in_dim(whole, row, index, 0), log, entry)
            return index + 1, state, log

        _, state, log = jax.lax.while_loop(more, step, (jnp.int32(0), state, log))
        return global_state(state), log

    mapped = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(params_spec(), REPLICATED, state_spec(mode), REPLICATED),
        out_specs=(state_spec(mode), REPLICATED),
    )
    return jit(mapped, donate_argnums=2)


@functools.partial(jit, static_argnums=(0, 1, 2, 3, 4, 5))
def make_caches(
    program: Program, mesh: Mesh, batch: int, capacity: int, width: int, dtype: Any
) -> tuple[LayerCache, ...]:
    """Empty caches of all ranks, made where they live; compiled once for every shape."""
    plan = program.plan
    caches = tuple(
        empty_layer_cache(kind, batch, capacity, plan.num_stages, width, dtype, (plan.num_ranks,))
        for kind in program.slots.kinds
    )
    return jax.lax.with_sharding_constraint(caches, sharded(mesh))


@functools.partial(jit, static_argnums=1)
def grow_state(state: DecodeState, capacity: int) -> DecodeState:
    """The same state with caches of another capacity (the placement is kept)."""
    return struct.replace(state, caches=tuple(grow_layer_cache(cache, capacity) for cache in state.caches))
