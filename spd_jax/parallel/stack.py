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
from spd_jax.config.model import LayerConfig, ModelConfig
from spd_jax.models.shapes import num_parameters
from spd_jax.nn.decoder_layer import layer_structure
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
    draft_all: bool = struct.static()
    shared_head: bool = struct.static()


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


def place_shares(mesh: Mesh, share: Callable[[int], np.ndarray | Array], dtype: Any) -> Array:
    """A `[R, ...]` array from one array a rank, each sent to its own device alone.

    A share that is a JAX array is taken as it is: `[1, ...]` on its rank's device, a part of another such array.
    """
    parts = []
    for rank, device in enumerate(mesh.devices.flat):
        if device.process_index == jax.process_index():
            value = share(rank)
            on_device = isinstance(value, jax.Array)
            parts.append(value if on_device else jax.device_put(np.asarray(value, dtype)[None], device))
    shape = (mesh.devices.size, *parts[0].shape[1:])
    return jax.make_array_from_single_device_arrays(shape, sharded(mesh), parts)


def layer_owners(program: Program) -> dict[tuple[int, int], tuple[str, int]]:
    """`(rank, slot)` -> `("target" or "draft", layer)`; slots without a layer on a rank are left out."""
    table, plan = program.slots, program.plan
    owner: dict[tuple[int, int], tuple[str, int]] = {}
    for rank in range(table.num_ranks):
        stage = plan.stage_of_rank(rank)
        if stage is not None:
            for layer, slot in zip(plan.layers_of_stage(stage), table.stage[rank], strict=True):
                owner[rank, slot] = ("target", layer)
        for layer, slot in enumerate(table.draft[rank]):
            owner[rank, slot] = ("draft", layer)
    return owner


def fill_slots(
    program: Program, mesh: Mesh, dtype: Any, share: Callable[[int, int, str, tuple[int, ...]], np.ndarray | Array]
) -> tuple[Any, ...]:
    """The slots' states, each parameter's share from `share(rank, slot, name, shape)` as `place_shares` takes it."""
    stacked = []
    for slot, kind in enumerate(program.slots.kinds):
        filled = []
        for path, shape in layer_structure(kind)[1].items():
            facts = (slot, ".".join(path), shape)
            filled.append((path, nnx.Param(place_shares(mesh, lambda rank, facts=facts: share(rank, *facts), dtype))))
        stacked.append(nnx.from_flat_state(filled))
    return tuple(stacked)


def draft_layer_values(head: Head) -> list[dict[str, np.ndarray]]:
    """Parameters of each draft layer by name, on the host."""
    return [
        {".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(nnx.split(layer)[1])}
        for layer in head.layers
    ]


def _stack_slots(
    program: Program, weights: Weights, head: Head, mesh: Mesh, dtype: Any, report: Callable[[str, int], None]
) -> tuple[Any, ...]:
    owner, draft = layer_owners(program), draft_layer_values(head)

    def share(rank: int, slot: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
        model, layer = owner.get((rank, slot), ("none", 0))
        if model == "none":
            return np.zeros(shape, dtype)
        value = weights.tensor(f"layers.{layer}.{name}") if model == "target" else draft[layer][name]
        report(f"{model} layer {layer} {name}", value.nbytes)
        return value

    return fill_slots(program, mesh, dtype, share)


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
    return Program(plan, slots, target, config.layer, draft_all, shared)


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
    target, ranks, vocab = program.target, program.plan.num_ranks, program.target.vocab_size
    total = _total_bytes(program, head, np.dtype(dtype).itemsize)
    done = 0

    def report(name: str, count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(min(done, total), total, name)

    slots = _stack_slots(program, weights, head, mesh, dtype, report)
    table = weights.tensor("embedding")
    embedding = place_shares(mesh, lambda r: share_rows(table, r, ranks), dtype)
    report("embedding", table.nbytes)
    rows, target_head = table, None
    if not target.tie_embeddings:
        rows = weights.tensor("head")
        target_head = place_shares(mesh, lambda r: share_rows(rows, r, ranks), dtype)
        report("head", rows.nbytes)
    allowed = np.zeros((ranks, share_size(vocab, ranks)), bool)
    real = np.setdiff1d(np.arange(vocab if num_tokens is None else min(num_tokens, vocab)), np.asarray(suppress, int))
    allowed[real % ranks, real // ranks] = True
    return PipelineParams(
        slots=slots,
        embedding=embedding,
        head=target_head,
        **stack_head(program, head, mesh, dtype, lambda r: share_rows(rows, r, ranks), report),
        allowed=place_shares(mesh, lambda r: allowed[r], bool),
        final_norm=jax.device_put(np.asarray(weights.tensor("final_norm.weight"), dtype), replicated(mesh)),
    )


def stack_head(
    program: Program,
    head: Head,
    mesh: Mesh,
    dtype: Any,
    target_share: Callable[[int], np.ndarray],
    report: Callable[[str, int], None],
) -> dict[str, Any]:
    """The fields of `PipelineParams` that belong to the head, but for its layers.

    Args:
        target_share: a rank's rows of the target's head `[V/R, D]`; asked where the draft scores with a part of them.
        report: called with (what has been placed, its bytes).
    """
    plan, ranks = program.plan, program.plan.num_ranks
    size, vocab = program.target.hidden_size, program.target.vocab_size
    ids = np.arange(vocab) if program.draft_all else np.asarray(head.config.draft_ids)
    shares = draft_shares(ids, ranks)
    draft_head = None
    if not program.shared_head:
        own = None if head.lm_head is None else np.asarray(head.lm_head[...])

        def own_rows(rank: int) -> np.ndarray:
            mine = ids % ranks == rank
            rows = target_share(rank)[ids[mine] // ranks] if own is None else own[mine]
            return np.concatenate([rows, np.zeros((shares.shape[1] - len(rows), size), rows.dtype)])

        draft_head = place_shares(mesh, own_rows, dtype)
        report("draft head", draft_head.nbytes if own is None else own.nbytes)
    rows_of = draft_rows(shares, share_size(vocab, ranks))
    aggregate = {}
    for kind in dict.fromkeys(plan.anchor_type[depth] for depth in plan.changes):
        projection = np.asarray(head.projections[kind].weight[...])
        padded = np.concatenate([projection, np.zeros((-size % ranks, projection.shape[1]), projection.dtype)])
        aggregate[kind] = place_shares(mesh, lambda r, a=padded: np.split(a, ranks)[r], dtype)
        report(f"projection {kind}", projection.nbytes)
    newest = np.asarray(head.projections[0].weight[...])
    return {
        "draft_head": draft_head,
        "draft_share": place_shares(mesh, lambda r: shares[r], np.int32),
        "draft_row": place_shares(mesh, lambda r: rows_of[r], np.int32),
        "aggregate": aggregate,
        "newest": place_shares(mesh, lambda r: newest if r == plan.draft_rank else np.zeros_like(newest), dtype),
    }


def _total_bytes(program: Program, head: Head, itemsize: int) -> int:
    """Bytes that will have been reported at the end, for a progress bar (checkpoints of another dtype: an estimate)."""
    target = program.target
    layers = [*target.layers, *[program.draft_layer] * program.plan.num_draft_layers]
    tables = (2 - target.tie_embeddings) * target.vocab_size * target.hidden_size
    if not program.shared_head:
        tables += head.config.draft_vocab_size * target.hidden_size
    return itemsize * (sum(map(num_parameters, layers)) + tables)
