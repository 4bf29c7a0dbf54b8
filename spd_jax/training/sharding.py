"""Placement of parameters and batches on a mesh with axis `data`, and the collectives that go with it.

Two ways: `replicated`, every device holds all parameters; `sharded`, every device holds a slice of each and makes them
whole only while it needs them (as ZeRO stage 3, arXiv 1910.02054). Batches are cut over rows either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

AXIS = "data"
Placement = Literal["replicated", "sharded"]


def data_mesh(num_devices: int | None = None, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of devices along axis `data`; None takes all there are.

    Raises:
        ValueError: fewer devices than asked for.
    """
    found = jax.devices() if devices is None else devices
    count = len(found) if num_devices is None else num_devices
    if not 1 <= count <= len(found):
        raise ValueError(f"asked for {count} devices, found {len(found)}; on CPU simulate them with --devices {count}")
    return Mesh(np.asarray(found[:count]), (AXIS,))


def specs_of(tree: Any, mesh: Mesh, placement: Placement, *, stacked: bool = False) -> Any:
    """Where every array of a tree lies: cut along its largest axis that the devices divide, else on all of them.

    Args:
        stacked: the first axis counts layers and is not cut.
    """

    def spec(x: Any) -> PartitionSpec:
        axes = [axis for axis in range(int(stacked), x.ndim) if x.shape[axis] % mesh.size == 0]
        if placement == "replicated" or mesh.size == 1 or not axes:
            return PartitionSpec()
        largest = max(axes, key=lambda axis: x.shape[axis])
        return PartitionSpec(*[None] * largest, AXIS)

    return jax.tree.map(spec, tree)


def place(tree: Any, mesh: Mesh, specs: Any) -> Any:
    """Put arrays where their specs say; one spec may stand for all."""
    if isinstance(specs, PartitionSpec):
        return jax.device_put(tree, NamedSharding(mesh, specs))
    return jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), tree, specs)


def _cut_axis(spec: PartitionSpec) -> int | None:
    return next((axis for axis, name in enumerate(spec) if name == AXIS), None)


def gather(tree: Any, specs: Any, *, stacked: bool = False) -> Any:
    """Inside a shard_map: whole arrays from slices. `stacked`: the specs are those of a stack, the arrays one of it."""

    def whole(x: Array, spec: PartitionSpec) -> Array:
        axis = _cut_axis(spec)
        return x if axis is None else jax.lax.all_gather(x, AXIS, axis=axis - int(stacked), tiled=True)

    return jax.tree.map(whole, tree, specs)


def sum_and_cut(tree: Any, specs: Any) -> Any:
    """Inside a shard_map: the sum over devices of whole arrays, each device keeping its slice."""

    def reduce(x: Array, spec: PartitionSpec) -> Array:
        axis = _cut_axis(spec)
        if axis is None:
            return jax.lax.psum(x, AXIS)
        return jax.lax.psum_scatter(x, AXIS, scatter_dimension=axis, tiled=True)

    return jax.tree.map(reduce, tree, specs)


def zeros_like(tree: Any, dtype: Any = jnp.float32) -> Any:
    """Zeros of the shapes and places of a tree."""
    return jax.tree.map(lambda x: jnp.zeros_like(x, dtype, device=x.sharding), tree)
