"""The compiled programs of training: gradients of a micro-batch, the update, the figures of a held-out batch.

A step adds up gradients of several micro-batches and divides by the number of positions that had a loss, over all of
them and all devices: neither how a batch is cut nor padding changes what is learned. Parameters are float32; a pass
runs on a copy in `products` dtype.

Knows arrays and a mesh; where batches come from, when to save and what to print is the trainer's business.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from spd_jax import struct
from spd_jax.defaults import jit
from spd_jax.plan import StagePlan
from spd_jax.speculation.module import SpeculationModule
from spd_jax.speculation.staircase import staircase_of
from spd_jax.training.forward import draft_pass
from spd_jax.training.loss import Figures, Scores, scored_first, scored_loss
from spd_jax.training.objectives import OBJECTIVES, ObjectiveName
from spd_jax.training.rows import Rows
from spd_jax.training.sharding import AXIS, Placement, gather, place, specs_of, sum_and_cut, zeros_like
from spd_jax.training.target import FrozenTarget, target_pass

ScoreTypes = Literal["newest", "all"]


@dataclasses.dataclass(frozen=True)
class PassOptions:
    """What a training pass computes.

    `deeper_weight`: of the loss of every other type where `score_types` is all; type 0 has weight 1. `chunk` positions
    have logits at a time. `products` is the dtype of weights, `activations` that of what flows between them.
    """

    objective: ObjectiveName = "kl"
    score_types: ScoreTypes = "newest"
    deeper_weight: float = 1.0
    chunk: int = 128
    products: str = "bfloat16"
    activations: str = "float32"


@struct.dataclass
class TrainState:
    """Parameters (float32), optimiser state, and the number of updates done."""

    params: Any
    optimizer: Any
    step: Any


@struct.dataclass
class Sums:
    """Gradients and figures, added up over micro-batches; their specs take the same form."""

    gradients: Any
    total: Any
    figures: Any


class Programs:
    """Compiled once for a module, a target and a mesh; every method takes and gives placed arrays."""

    def __init__(
        self,
        mesh: Mesh,
        module: SpeculationModule,
        plan: StagePlan,
        target: FrozenTarget,
        optimizer: optax.GradientTransformation,
        options: PassOptions,
        placement: Placement = "replicated",
    ):
        self.mesh, self.options, self.plan = mesh, options, plan
        self.head = module.config
        self.staircase = staircase_of(plan)
        newest = options.score_types == "newest"
        deeper = () if newest else (options.deeper_weight,) * (self.staircase.num_blocks - 1)
        self.type_weights = (*deeper, 1.0)
        self._optimizer = optimizer
        self._placement: Placement = placement
        self._graphdef, params = nnx.split(module)
        self._params_specs = specs_of(params, mesh, placement)
        self._target_specs = struct.replace(
            specs_of(target, mesh, placement), segments=specs_of(target.segments, mesh, placement, stacked=True)
        )
        self.target = place(target, mesh, self._target_specs)
        self._tables = place(self._vocabulary_tables(), mesh, PartitionSpec())
        self.accumulate = jit(self._accumulate, donate_argnums=0)
        self.update = jit(self._update, donate_argnums=0)
        self.figures = jit(self._figures)

    def start(self, module: SpeculationModule) -> TrainState:
        """The state before the first update, from a module of the kind that the programs were made for."""
        # Copies: the first update takes the memory of its state, and the module is its owner's.
        params = jax.tree.map(lambda x: jnp.array(x, jnp.float32), nnx.split(module)[1])
        params = place(params, self.mesh, self._params_specs)
        specs = specs_of(jax.eval_shape(self._optimizer.init, params), self.mesh, self._placement)
        shardings = jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs)
        # Its zeros depend on nothing, so by default they would all lie on the first device, and a state that is read
        # back is put where this one lies.
        optimizer = jit(self._optimizer.init, out_shardings=shardings)(params)
        return TrainState(params, optimizer, place(jnp.zeros((), jnp.int32), self.mesh, PartitionSpec()))

    def zeros(self, state: TrainState) -> Sums:
        """Sums of nothing."""
        kinds = jnp.zeros((len(self.type_weights),), jnp.float32)
        none = [jnp.zeros((), jnp.float32) for _ in range(4)]
        scalars = none[0], Figures(none[1], none[2], kinds, jnp.copy(kinds), none[3])
        # Placed as the sums that come out, else the second micro-batch would compile the pass again.
        total, figures = place(scalars, self.mesh, PartitionSpec())
        return Sums(zeros_like(state.params), total, figures)

    def rows(self, rows: Rows) -> Rows:
        """A batch on the devices.

        Raises:
            ValueError: its number of rows is not a multiple of the number of devices.
        """
        if rows.ids.shape[0] % self.mesh.size:
            raise ValueError(f"a batch of {rows.ids.shape[0]} rows cannot be cut over {self.mesh.size} devices")
        return place(rows, self.mesh, jax.tree.map(lambda x: PartitionSpec(AXIS), rows))

    def module(self, state: TrainState) -> SpeculationModule:
        """The module with the parameters of a state, on the host."""
        return nnx.merge(self._graphdef, jax.tree.map(lambda x: jnp.asarray(jax.device_get(x)), state.params))

    # The passes

    def _vocabulary_tables(self) -> dict[str, Array]:
        ids = self.head.draft_ids
        if ids is None:
            return {}
        rest = np.setdiff1d(np.arange(self.head.vocab_size), np.asarray(ids))
        return {"draft": jnp.asarray(ids, jnp.int32), "rest": jnp.asarray(rest, jnp.int32)}

    def _loss(self, params: Any, target: FrozenTarget, tables: dict[str, Array], rows: Rows) -> tuple[Array, Figures]:
        """Of whole parameters and one device's rows."""
        products, activations = jnp.dtype(self.options.products), jnp.dtype(self.options.activations)
        module = nnx.merge(self._graphdef, jax.tree.map(lambda x: x.astype(products), params))
        layer_specs = self._target_specs.segments

        def whole(segment: int, layer: Any) -> Any:
            return gather(layer, layer_specs[segment], stacked=True)

        ends = {"embedding": target.embedding, "head": target.head, "final_norm": target.final_norm}
        ends = gather(ends, {name: getattr(self._target_specs, name) for name in ends})
        target = struct.replace(target, **ends)
        taps, last = target_pass(target, rows, self.head.anchors, activations, whole)
        newest_only = self.options.score_types == "newest"
        hidden = target.normed(draft_pass(module, self.staircase, taps, rows, newest_only=newest_only))
        hidden = jnp.moveaxis(hidden, 1, 2).reshape(-1, hidden.shape[1], hidden.shape[-1])
        teacher, order = target.normed(last).reshape(-1, last.shape[-1]), scored_first(rows.scored)
        head = target.head_rows
        inside, outside = (head[tables[name]] if tables else None for name in ("draft", "rest"))
        scores = Scores(
            None if module.lm_head is None else module.lm_head[...],
            head if inside is None else inside,
            outside,
            target.config.logit_cap,
        )
        return scored_loss(
            OBJECTIVES[self.options.objective],
            self.type_weights,
            self.options.chunk,
            hidden[order],
            teacher[order],
            rows.scored.reshape(-1)[order],
            scores,
        )

    def _mapped(self, body: Callable[..., Any], out_specs: Any) -> Callable[..., Any]:
        return jax.shard_map(
            body,
            mesh=self.mesh,
            in_specs=(self._params_specs, self._target_specs, PartitionSpec(), PartitionSpec(AXIS)),
            out_specs=out_specs,
            check_vma=False,  # loops carry zeros that only become different on every device
        )

    def _accumulate(self, sums: Sums, params: Any, target: FrozenTarget, tables: Any, rows: Rows) -> Sums:
        def body(params: Any, target: FrozenTarget, tables: Any, rows: Rows) -> Sums:
            full = gather(params, self._params_specs)
            loss = functools.partial(self._loss, target=target, tables=tables, rows=rows)
            (total, figures), gradients = jax.value_and_grad(loss, has_aux=True)(full)
            total, figures = jax.lax.psum((total, figures), AXIS)
            return Sums(sum_and_cut(gradients, self._params_specs), total, figures)

        everywhere: Any = PartitionSpec()
        specs = Sums(self._params_specs, everywhere, everywhere)
        found = self._mapped(body, specs)(params, target, tables, rows)
        return jax.tree.map(jnp.add, sums, found)

    def _figures(self, params: Any, target: FrozenTarget, tables: Any, rows: Rows) -> Figures:
        def body(params: Any, target: FrozenTarget, tables: Any, rows: Rows) -> Figures:
            _, figures = self._loss(gather(params, self._params_specs), target, tables, rows)
            return jax.lax.psum(figures, AXIS)

        return self._mapped(body, PartitionSpec())(params, target, tables, rows)

    def _update(self, state: TrainState, sums: Sums) -> tuple[TrainState, dict[str, Array]]:
        """The next state, and norms; if loss, figures, gradient or update are not finite, the state stays as it was.

        A NaN of the target may leave the loss alone: such a position can look like one that the head does not cover.
        """
        count = jnp.maximum(sums.figures.covered, 1.0) * jnp.float32(sum(self.type_weights))
        gradients = jax.tree.map(lambda g: g / count, sums.gradients)
        norm = optax.tree.norm(gradients)
        updates, optimizer = self._optimizer.update(gradients, state.optimizer, state.params)
        new = TrainState(optax.apply_updates(state.params, updates), optimizer, state.step + 1)
        found = {"loss": sums.total / count, "gradient_norm": norm, "update_norm": optax.tree.norm(updates)}
        numbers = jax.tree.leaves((found, sums.figures))
        finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(number)) for number in numbers]))
        state = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, state)
        return state, {**found, "finite": finite}

    def gradient_step(self, sums: Sums, state: TrainState, rows: Rows) -> Sums:
        """Add the gradients of one micro-batch (on the host or placed) to `sums`, which is consumed."""
        return self.accumulate(sums, state.params, self.target, self._tables, self.rows(rows))

    def held_out(self, state: TrainState, rows: Rows) -> Figures:
        """Figures of a batch, without gradients."""
        return self.figures(state.params, self.target, self._tables, self.rows(rows))
