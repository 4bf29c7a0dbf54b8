"""The device mesh with axis `stage` and the collectives of one decode cycle.

Small collectives cost latency, not bytes, so values are packed: `psum_packed` sums a whole pytree in one all-reduce a
dtype, `gather_ranks` is an all-gather written as an all-reduce of disjoint slots (its result is known to be the same on
every rank, which replicated control needs; and on CPU it is cheaper than an all-gather).

This module knows ranks, not stages: the plan maps one to the other.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

AXIS = "stage"
T = TypeVar("T")


def stage_mesh(num_ranks: int, devices: Sequence[Any] | None = None, *, fewer: tuple[int, str] | None = None) -> Mesh:
    """A mesh of `num_ranks` devices along axis `stage`.

    Args:
        fewer: a smaller number of ranks that would do, and what to ask for to get by with them; named where they fit.

    Raises:
        ValueError: too few devices (says how many were found and how to get more), or a process that would have none.
    """
    found = jax.devices() if devices is None else devices
    if len(found) < num_ranks:
        platform = found[0].platform if found else "no"
        fits = fewer is not None and fewer[0] <= len(found)
        instead = f"{fewer[1]}, which needs {fewer[0]}, " if fewer is not None and fits else ""
        raise ValueError(
            f"the plan needs {num_ranks} devices, found {len(found)} ({platform}). Use {instead}fewer stages, a "
            f"machine with more devices, or simulate them on CPU: --devices {num_ranks} "
            f"(jax_num_cpu_devices={num_ranks})"
        )
    sizes = collections.Counter(device.process_index for device in jax.devices())
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"the processes have {', '.join(str(sizes[i]) for i in sorted(sizes))} devices: give each equally many, as "
            "JAX needs it"
        )
    members = {device.process_index for device in found[:num_ranks]}
    idle = sorted(set(range(jax.process_count())) - members)
    if idle:
        raise ValueError(
            f"the plan needs {num_ranks} devices and the first processes have them all: nothing is left for process "
            f"{idle[0]}. Use more stages or fewer processes"
        )
    return Mesh(np.asarray(found[:num_ranks]), (AXIS,))


def sharded(mesh: Mesh) -> NamedSharding:
    """Placement of an array with a leading rank axis."""
    return NamedSharding(mesh, PartitionSpec(AXIS))


def replicated(mesh: Mesh) -> NamedSharding:
    """Placement of an array that every rank holds."""
    return NamedSharding(mesh, PartitionSpec())


def varying(tree: T) -> T:
    """Mark values as different on every rank (zeros made inside a shard_map start out as the same on all)."""

    def cast(x: Array) -> Array:
        return x if AXIS in _varying_axes(x) else jax.lax.pcast(x, AXIS, to="varying")

    return jax.tree.map(cast, tree)


def _varying_axes(x: Array) -> frozenset[str]:
    aval: Any = jax.typeof(x)
    # jax 0.10 keeps the set inside `manual_axis_type`; other versions call it `vma`.
    return aval.vma if hasattr(aval, "vma") else aval.manual_axis_type.varying


def psum_packed(tree: Any) -> Any:
    """Sum every leaf over the ranks, one all-reduce a dtype."""
    leaves, treedef = jax.tree.flatten(tree)
    summed: list[Any] = [None] * len(leaves)
    for dtype in dict.fromkeys(leaf.dtype for leaf in leaves):
        members = [i for i, leaf in enumerate(leaves) if leaf.dtype == dtype]
        flat = jnp.concatenate([leaves[i].reshape(-1) for i in members])
        total = jax.lax.psum(varying(flat), AXIS)
        offset = 0
        for i in members:
            size = math.prod(leaves[i].shape)
            summed[i] = total[offset : offset + size].reshape(leaves[i].shape)
            offset += size
    return jax.tree.unflatten(treedef, summed)


def gather_ranks(tree: Any) -> Any:
    """Leaves `[...]` of 32-bit types of every rank as `[R, ...]`, the same on all ranks; exact (bits are moved)."""
    ranks = jax.lax.axis_size(AXIS)
    here = jax.lax.axis_index(AXIS)

    def place(x: Array) -> Array:
        bits = x if x.dtype == jnp.int32 else jax.lax.bitcast_convert_type(x, jnp.int32)
        mine = jnp.arange(ranks, dtype=jnp.int32).reshape(ranks, *[1] * x.ndim) == here
        return jnp.where(mine, bits[None], 0)

    gathered = psum_packed(jax.tree.map(place, tree))
    return jax.tree.map(
        lambda bits, x: bits if x.dtype == jnp.int32 else jax.lax.bitcast_convert_type(bits, x.dtype), gathered, tree
    )


def shift(x: Array) -> Array:
    """Send a value to the next rank of the ring (rank R - 1 sends to rank 0)."""
    ranks = jax.lax.axis_size(AXIS)
    return jax.lax.ppermute(x, AXIS, [(i, (i + 1) % ranks) for i in range(ranks)])
