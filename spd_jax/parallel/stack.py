"""Parameters of the pipeline program: every array has a leading rank axis, placed on the stage mesh.

One array per (slot, name), `[R, ...]`: rank r's share is the layer that the plan puts into that slot there, or zeros.
Weights stream from the checkpoint to the rank that owns them, one tensor at a time.

The projections of the speculation module are sharded too, over their output features: all ranks compute a slice of the
fused features from the same taps in the step that also runs the vocabulary-sharded heads. The only projection that the
draft rank needs by itself is that of type 0, whose input (the embedding of the newest token) is known last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array

from spd_jax import struct
from spd_jax.config.model import LayerConfig, ModelConfig, RopeConfig
from spd_jax.nn.layers import layer_structure
from spd_jax.parallel.mesh import replicated, sharded
from spd_jax.parallel.slots import SlotTable, slot_table
from spd_jax.parallel.vocab import draft_rows, draft_shares, share_rows, share_size
from spd_jax.plan import StagePlan

Progress = Callable[[int, int, str], None]


@runtime_checkable
class Weights(Protocol):
    """Where target tensors come from: canonical path -> one tensor on the host."""

    @property
    def config(self) -> ModelConfig: ...

    def tensor(self, path: str) -> np.ndarray: ...


@runtime_checkable
class Head(Protocol):
    """What stacking needs of a speculation module."""

    config: Any
    projections: Any
    layers: Any
    lm_head: Any


@struct.dataclass
class Program:
    """Static facts that the compiled programs are made of."""

    plan: StagePlan = struct.static()
    slots: SlotTable = struct.static()
    target: ModelConfig = struct.static()
    draft_layer: LayerConfig = struct.static()
    draft_rope: RopeConfig = struct.static()
    draft_all: bool = struct.static()
    shared_head: bool = struct.static()

    @property
    def changes(self) -> tuple[int, ...]:
        """Depths k >= 1 whose fusion type differs from that of depth k - 1 (depth 1 always counts)."""
        types = self.plan.anchor_type
        return tuple(k for k in range(1, len(types)) if k == 1 or types[k] != types[k - 1])


@struct.dataclass
class PipelineParams:
    """Arrays of one pipeline, each `[R, ...]` over axis `stage` but for the final norm.

    `slots[i]` is the NNX state of a decoder layer; `head` is None when the embedding is tied; `draft_head` is None when
    the draft uses the target's rows for all ids; `draft_share` maps the rows of the draft head to rows of the rank's
    target share and `draft_row` back (-1: none); `aggregate[t]` holds `[R, ceil(D/R), (t+1) D]`; `newest` is W_0 on
    the draft rank.
    """

    slots: tuple[Any, ...]
    embedding: Array
    head: Array | None
    draft_head: Array | None
    draft_share: Array
    draft_row: Array
    aggregate: dict[int, Array]
    newest: Array
    allowed: Array
    final_norm: Array


def _place(mesh: Mesh, shards: Callable[[int], np.ndarray], dtype: Any) -> Array:
    """A `[R, ...]` array from one host array per rank, each sent to its own device alone."""
    devices = list(mesh.devices.flat)
    parts = [
        jax.device_put(np.asarray(shards(rank), dtype)[None], device)
        for rank, device in enumerate(devices)
        if device.process_index == jax.process_index()
    ]
    shape = (len(devices), *parts[0].shape[1:])
    return jax.make_array_from_single_device_arrays(shape, sharded(mesh), parts)


def _stack_slots(
    program: Program, weights: Weights, head: Head, mesh: Mesh, dtype: Any, report: Callable[[str, int], None]
) -> tuple[Any, ...]:
    table, plan = program.slots, program.plan
    owner: dict[tuple[int, int], tuple[str, int]] = {}
    for rank in range(table.num_ranks):
        stage = plan.stage_of_rank(rank)
        if stage is not None:
            for layer, slot in zip(plan.layers_of_stage(stage), table.stage[rank], strict=True):
                owner[rank, slot] = ("target", layer)
        for layer, slot in enumerate(table.draft[rank]):
            owner[rank, slot] = ("draft", layer)
    draft_states = [
        {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(nnx.split(layer)[1])}
        for layer in head.layers
    ]

    def shard(rank: int, slot: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
        model, layer = owner.get((rank, slot), ("none", 0))
        if model == "none":
            return np.zeros(shape, dtype)
        value = weights.tensor(f"layers.{layer}.{name}") if model == "target" else draft_states[layer][name]
        report(f"{model} layer {layer} {name}", value.nbytes)
        return np.asarray(value)

    stacked = []
    for slot, kind in enumerate(table.kinds):
        filled = []
        for path, shape in layer_structure(kind)[1].items():
            name = ".".join(path)
            filled.append((path, nnx.Param(_place(mesh, lambda r, a=(slot, name, shape): shard(r, *a), dtype))))
        stacked.append(nnx.from_flat_state(filled))
    return tuple(stacked)


def make_program(target: ModelConfig, head: Head, plan: StagePlan) -> Program:
    """The static part of a pipeline.

    Raises:
        ValueError: plan and models disagree about layers or anchors.
    """
    config = head.config
    if plan.num_layers != target.num_layers:
        raise ValueError(f"the plan has {plan.num_layers} layers, the model {target.num_layers}")
    if plan.num_draft_layers != config.num_layers or plan.anchors != config.anchors:
        raise ValueError(
            f"the plan has {plan.num_draft_layers} draft layers and anchors {list(plan.anchors)}, the head "
            f"{config.num_layers} and {list(config.anchors)}"
        )
    if config.layer.hidden_size != target.hidden_size or config.vocab_size != target.vocab_size:
        raise ValueError(
            f"the head is for hidden size {config.layer.hidden_size} and vocabulary {config.vocab_size}, the target "
            f"has {target.hidden_size} and {target.vocab_size}"
        )
    draft_all = config.draft_ids is None
    slots = slot_table(plan, target.layers, config.layer)
    shared = draft_all and config.lm_head == "target"
    return Program(plan, slots, target, config.layer, config.rope, draft_all, shared)


def stack_params(
    program: Program,
    weights: Weights,
    head: Head,
    mesh: Mesh,
    *,
    dtype: Any = jnp.float32,
    num_tokens: int | None = None,
    suppress: tuple[int, ...] = (),
    progress: Progress | None = None,
) -> PipelineParams:
    """Load a target and a head onto the mesh.

    Args:
        num_tokens: ids from here on are padding of the vocabulary: never emitted, never proposed (None: all are real).
        suppress: further ids that must never be emitted or proposed.
    """
    plan, target, ranks = program.plan, program.target, program.plan.num_ranks
    size, vocab = target.hidden_size, target.vocab_size
    total = _total_bytes(program, head, np.dtype(dtype).itemsize)
    done = 0

    def report(name: str, count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(min(done, total), total, name)

    slots = _stack_slots(program, weights, head, mesh, dtype, report)
    table = weights.tensor("embedding")
    embedding = _place(mesh, lambda r: share_rows(table, r, ranks), dtype)
    report("embedding", table.nbytes)
    rows, target_head = table, None
    if not target.tie_embeddings:
        rows = weights.tensor("head")
        target_head = _place(mesh, lambda r: share_rows(rows, r, ranks), dtype)
        report("head", rows.nbytes)
    ids = np.arange(vocab) if program.draft_all else np.asarray(head.config.draft_ids)
    shares = draft_shares(ids, ranks)
    draft_head = None
    if not program.shared_head:
        own = rows[ids] if head.lm_head is None else np.asarray(head.lm_head[...])

        def own_rows(rank: int) -> np.ndarray:
            mine = own[ids % ranks == rank]
            return np.concatenate([mine, np.zeros((shares.shape[1] - len(mine), size), mine.dtype)])

        draft_head = _place(mesh, own_rows, dtype)
        report("draft head", own.nbytes)
    rows_of = draft_rows(shares, share_size(vocab, ranks))
    allowed = np.zeros((ranks, share_size(vocab, ranks)), bool)
    real = np.setdiff1d(np.arange(vocab if num_tokens is None else min(num_tokens, vocab)), np.asarray(suppress, int))
    allowed[real % ranks, real // ranks] = True
    aggregate = {}
    for kind in dict.fromkeys(plan.anchor_type[depth] for depth in program.changes):
        projection = np.asarray(head.projections[kind].weight[...])
        padded = np.concatenate([projection, np.zeros((-size % ranks, projection.shape[1]), projection.dtype)])
        aggregate[kind] = _place(mesh, lambda r, a=padded: np.split(a, ranks)[r], dtype)
        report(f"projection {kind}", projection.nbytes)
    newest = np.asarray(head.projections[0].weight[...])
    return PipelineParams(
        slots=slots,
        embedding=embedding,
        head=target_head,
        draft_head=draft_head,
        draft_share=_place(mesh, lambda r: shares[r], np.int32),
        draft_row=_place(mesh, lambda r: rows_of[r], np.int32),
        aggregate=aggregate,
        newest=_place(mesh, lambda r: newest if r == plan.draft_rank else np.zeros_like(newest), dtype),
        allowed=_place(mesh, lambda r: allowed[r], bool),
        final_norm=jax.device_put(np.asarray(weights.tensor("final_norm.weight"), dtype), replicated(mesh)),
    )


def _total_bytes(program: Program, head: Head, itemsize: int) -> int:
    """Bytes that will have been reported at the end, for a progress bar (checkpoints of another dtype: an estimate)."""
    target = program.target

    def layer_bytes(kind: LayerConfig) -> int:
        return itemsize * sum(int(np.prod(shape)) for shape in layer_structure(kind)[1].values())

    layers = sum(map(layer_bytes, target.layers)) + program.plan.num_draft_layers * layer_bytes(program.draft_layer)
    tables = (2 - target.tie_embeddings) * target.vocab_size * target.hidden_size
    if not program.shared_head:
        tables += head.config.draft_vocab_size * target.hidden_size
    return layers + itemsize * tables
