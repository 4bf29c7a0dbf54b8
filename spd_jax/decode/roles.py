"""What one rank computes: its stage's layers, the draft's layers, both or nothing, behind one switch.

Each branch reads the caches and returns new rows; nothing is written inside a branch, because a cache written inside a
conditional is copied on every step. Branches are made of slot structures, not ranks: all ranks with the same structure
share one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from spd_jax.config.model import LayerConfig
from spd_jax.models.decoder import Ropes, run_layers
from spd_jax.nn.decoder_layer import Past, layer_structure
from spd_jax.parallel.mesh import AXIS, varying
from spd_jax.parallel.slots import Role, SlotTable

Stage = Callable[[tuple[int, ...]], tuple[Array, dict[int, Any]]]
Draft = Callable[[tuple[int, ...]], tuple[Array, dict[int, Any]]]


def run_slots(
    slots: Sequence[int],
    kinds: Sequence[LayerConfig],
    params: Sequence[Any],
    x_BTD: Array,
    ropes: Ropes,
    past: Callable[[int], Past],
) -> tuple[list[Array], dict[int, Any]]:
    """Run the layers in `slots` in order; returns the hidden state after each and what each slot is to keep."""
    layers = [nnx.merge(layer_structure(kinds[slot])[0], params[slot]) for slot in slots]
    hiddens, kept = run_layers(layers, x_BTD, ropes, [past(slot) for slot in slots])
    return hiddens, dict(zip(slots, kept, strict=True))


def stack_hiddens(hiddens: list[Array], size: int) -> Array:
    """`[size, ...]`: the hidden state after each slot; stages with fewer layers repeat their last."""
    return jnp.stack(hiddens + [hiddens[-1]] * (size - len(hiddens)))


def switch_roles(
    table: SlotTable,
    stage_active: Array,
    draft_active: Array,
    stage: Stage,
    draft: Draft,
    idle: Callable[[int], Any],
    hidden_shape: jax.ShapeDtypeStruct,
    draft_shape: jax.ShapeDtypeStruct,
) -> tuple[Array, Array, tuple[Any, ...]]:
    """Run this rank's role of the moment.

    Args:
        stage: slots -> hidden state after each (stacked, `hidden_shape`) and what to keep for each slot.
        draft: slots -> draft hidden state (`draft_shape`) and what to keep for each slot.
        idle: slot -> what a slot keeps when it did not run.

    Returns:
        stage hidden states, draft hidden state, what every slot keeps.
    """

    def branch(role: Role) -> Callable[[], Any]:
        def run() -> Any:
            kept: dict[int, Any] = {}
            hiddens: Array = jnp.zeros(hidden_shape.shape, hidden_shape.dtype)
            drafted: Array = jnp.zeros(draft_shape.shape, draft_shape.dtype)
            if role.stage:
                hiddens, new = stage(role.stage)
                kept |= new
            if role.draft:
                drafted, new = draft(role.draft)
                kept |= new
            everything = tuple(kept[slot] if slot in kept else idle(slot) for slot in range(len(table.kinds)))
            return varying((hiddens, drafted, everything))

        return run

    index = jnp.asarray(table.role_index(), jnp.int32)[jax.lax.axis_index(AXIS)]
    chosen = index[stage_active.astype(jnp.int32), draft_active.astype(jnp.int32)]
    return jax.lax.switch(chosen, [branch(role) for role in table.roles])
