"""Another head for a target that is on the mesh already: the target's arrays stay where they are, none is copied.

What differs between two heads of one cut is the draft rank's layers, the projections and the draft head; another number
of draft layers or other anchors also change which slots there are, so shares are looked up by layer, not by slot.
Knows neither files nor decoding.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array

from spd_jax import struct
from spd_jax.parallel.stack import (
    Head,
    PipelineParams,
    Program,
    draft_layer_values,
    fill_slots,
    layer_owners,
    stack_head,
)


def swap_head(params: PipelineParams, old: Program, program: Program, head: Head, mesh: Mesh) -> PipelineParams:
    """Parameters of `program` with this head, and with the target's arrays of `params`, which are those of `old`.

    The head's parameters take the dtype of the target's. `params` stays valid.

    Raises:
        ValueError: the programs cut the target differently or are of different targets, so its layers would have to
            move.
    """
    cuts = [(p.plan.stage_layers, p.plan.layout) for p in (old, program)]
    if cuts[0] != cuts[1] or old.target != program.target:
        raise ValueError(
            f"a head can be exchanged where the target stays as it is, in stages {list(cuts[0][0])} ({cuts[0][1]}); "
            f"found stages {list(cuts[1][0])} ({cuts[1][1]})" + (" of another target" * (old.target != program.target))
        )
    owner, before, draft = layer_owners(program), layer_owners(old), draft_layer_values(head)
    slot_of = {(rank, layer): slot for (rank, slot), (model, layer) in before.items() if model == "target"}
    devices = list(mesh.devices.flat)
    present = [
        {".".join(map(str, path)): _by_device(leaf[...]) for path, leaf in nnx.to_flat_state(state)}
        for state in params.slots
    ]

    def share(rank: int, slot: int, name: str, shape: tuple[int, ...]) -> np.ndarray | Array:
        model, layer = owner.get((rank, slot), ("none", 0))
        if model == "target":
            return present[slot_of[rank, layer]][name][devices[rank]]
        if model == "draft":
            return draft[layer][name]
        kinds = old.slots.kinds
        if slot < len(kinds) and kinds[slot] == program.slots.kinds[slot] and (rank, slot) not in before:
            return present[slot][name][devices[rank]]  # zeros there already
        return np.zeros(shape, np.float32)

    dtype = params.embedding.dtype
    rows = params.embedding if params.head is None else params.head

    def target_share(rank: int) -> np.ndarray:
        return np.asarray(_by_device(rows)[devices[rank]])[0]

    fields = stack_head(program, head, mesh, dtype, target_share, lambda name, count: None)
    return struct.replace(params, slots=fill_slots(program, mesh, dtype, share), **fields)


def _by_device(array: Array) -> dict[Any, Array]:
    return {shard.device: shard.data for shard in array.addressable_shards}
