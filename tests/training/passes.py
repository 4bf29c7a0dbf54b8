"""Compiled training passes of tiny models, and rows for them.

Compilations dominate the time of these tests: passes are shared by what is static about them, and the number of
positions in flight, documents and scored positions are data.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from spd_jax.data.packing import Batch, make_batch
from spd_jax.data.prepared import Example
from spd_jax.models.decoder import head_logits
from spd_jax.plan import StagePlan
from spd_jax.speculation.module import SpeculationModule
from spd_jax.speculation.staircase import staircase_of
from spd_jax.training.forward import draft_pass
from spd_jax.training.optimizer import OptimizerOptions, make_optimizer
from spd_jax.training.rows import Rows, document_starts
from spd_jax.training.sharding import Placement, data_mesh
from spd_jax.training.step import PassOptions, Programs, Sums, TrainState
from spd_jax.training.target import FrozenTarget, load_frozen_target, target_pass
from spd_jax.weights.mapping import TargetWeights
from tests.decode.engine import random_head, weights

PLAN = StagePlan((1, 1, 1), 2, "separate", (0, 1, 2, 3))  # a type for every depth
VOCAB = 61


def frozen(source: TargetWeights, anchors: tuple[int, ...], dtype: Any = np.float32) -> FrozenTarget:
    """A target on the default device."""
    return jax.tree.map(jnp.asarray, load_frozen_target(source, anchors, jnp.dtype(dtype)))


@functools.cache
def tiny_target() -> FrozenTarget:
    return frozen(weights(3), PLAN.anchors)


@functools.cache
def tiny_head() -> SpeculationModule:
    return random_head(weights(3).config, PLAN)


def rows_of(batch: Batch, fill: Any) -> Rows:
    """Packed documents with `fill` positions in flight: one number for all, or one a position."""
    fills = np.broadcast_to(np.asarray(fill, np.int32), batch.ids.shape)
    return Rows(batch.ids, batch.positions, document_starts(batch.segments), fills, batch.scored)


def whole_rows(ids: np.ndarray, fill: Any) -> Rows:
    """One document a row, all positions scored; `fill` as one number, or `[B, 1]`."""
    ids = np.asarray(ids, np.int32)
    position = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)
    fills = np.broadcast_to(np.asarray(fill, np.int32), ids.shape)
    return Rows(ids, position, np.zeros_like(ids), fills, np.ones(ids.shape, bool))


def random_ids(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, shape, dtype=np.int32)


def logits_of(module: SpeculationModule, plan: StagePlan, target: FrozenTarget, rows: Rows) -> np.ndarray:
    """Type-0 logits `[B, S, Vd]` of the training pass."""
    graphdef, params = nnx.split(module)
    hidden = np.asarray(hidden_of(module, plan, target, rows, newest_only=True))
    return np.asarray(_logits(graphdef, params, target, hidden[:, 0]))


def hidden_of(
    module: SpeculationModule, plan: StagePlan, target: FrozenTarget, rows: Rows, **options: Any
) -> np.ndarray:
    """The module's hidden states `[B, A, S, D]` before the final norm."""
    graphdef, params = nnx.split(module)
    return np.asarray(_hidden(graphdef, plan, tuple(options.items()), params, target, rows))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _hidden(graphdef: Any, plan: StagePlan, options: Any, params: Any, target: FrozenTarget, rows: Rows) -> Any:
    taps, _ = target_pass(target, rows, plan.anchors, jnp.float32)
    return draft_pass(nnx.merge(graphdef, params), staircase_of(plan), taps, rows, **dict(options))


@functools.partial(jax.jit, static_argnums=0)
def _logits(graphdef: Any, params: Any, target: FrozenTarget, hidden: Any) -> Any:
    module = nnx.merge(graphdef, params)
    head = target.head_rows if module.lm_head is None else module.lm_head[...]
    if module.lm_head is None and module.config.draft_ids is not None:
        head = head[jnp.asarray(module.config.draft_ids)]
    return head_logits(target.normed(hidden), head)


IDS = tuple(range(0, VOCAB, 2))  # the draft vocabulary of the module below
ROWS, LENGTH, UPDATES = 8, 32, 5  # of every batch and run of the programs below


TRAINED = StagePlan((1, 1, 1), 1, "separate", (0, 1, 3))  # compiles faster than `PLAN`


@functools.cache
def trained_target(dtype: str = "float32") -> FrozenTarget:
    return frozen(weights(3), TRAINED.anchors, dtype)


@functools.cache
def trainee() -> SpeculationModule:
    """A random module with a draft vocabulary."""
    return random_head(weights(3).config, TRAINED, draft_ids=IDS)


@functools.cache
def programs(devices: int = 1, placement: Placement = "replicated", **options: Any) -> Programs:
    """Training of `trainee`, by default in float32."""
    passes = PassOptions(**({"chunk": 32, "products": "float32"} | options))
    optimizer = make_optimizer(OptimizerOptions(learning_rate=1e-2, schedule="constant"), UPDATES)
    return Programs(
        data_mesh(devices), trainee(), TRAINED, trained_target(passes.products), optimizer, passes, placement
    )


def packed(*rows: list[Example]) -> Batch:
    return make_batch(rows, LENGTH, ROWS)


def sums_of(made: Programs, state: TrainState, *batches: Rows) -> Sums:
    """Gradients and figures of micro-batches, added up."""
    sums = made.zeros(state)
    for rows in batches:
        sums = made.gradient_step(sums, state, rows)
    return sums
