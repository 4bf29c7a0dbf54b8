"""Where a head starts before any training: draft layers from the target, projections that fit them.

The layers are copies of neighbouring target layers (`head_from_target`). What they expect is the hidden state that
enters the first of them; a projection of type i has only shallower ones. `fit_projections` makes it the best linear
guess: ridge regression of that hidden state on the anchors' of the type, over some batches of text. On
SmolLM2-135M such a head drafts as well, untrained, as one that starts from the identity does after some 50,000 tokens.
"""

from __future__ import annotations

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from spd_jax.defaults import jit
from spd_jax.speculation.module import SpeculationModule
from spd_jax.training.rows import Rows
from spd_jax.training.step import Programs
from spd_jax.training.target import FrozenTarget, target_pass

RIDGE = 1e-3
"""Weight of the penalty, in units of the mean square of a feature."""


def fit_projections(programs: Programs, module: SpeculationModule, layer: int, batches: Iterable[Rows]) -> list[float]:
    """Set the module's projections to the ridge regression of the hidden state at `layer` on their anchors.

    Every position but the first of a document counts by the inverse square of what it should become: the layers norm
    their input, so its direction matters, and the few positions with enormous states would be all that is fitted.

    Args:
        layer: hidden state index; the frozen target of `programs` must have been loaded with a bound there.

    Returns:
        The share of the (weighted) square that each projection leaves unexplained.
    """
    anchors, size = (*module.config.anchors, layer), module.config.layer.hidden_size
    activations = jnp.dtype(programs.options.activations)

    @jit
    def products(target: FrozenTarget, rows: Rows) -> Array:
        taps, _ = target_pass(target, rows, anchors, activations)
        flat = jnp.concatenate(taps, axis=-1).astype(jnp.float32).reshape(-1, len(anchors) * size)
        square = jnp.mean(jnp.square(flat[:, -size:]), axis=-1, keepdims=True)
        weight = jnp.where(jnp.asarray(rows.positions > 0).reshape(-1, 1), jax.lax.rsqrt(square + 1e-6), 0.0)
        flat = flat * weight
        return flat.T @ flat

    gram = np.zeros((len(anchors) * size,) * 2, np.float64)
    for rows in batches:
        gram += np.asarray(products(programs.target, programs.rows(rows)), np.float64)
    whole = float(np.trace(gram[-size:, -size:]))
    unexplained = []
    for kind, projection in enumerate(module.projections):
        width = (kind + 1) * size
        inside, across = gram[:width, :width], gram[:width, -size:]
        penalty = RIDGE * np.trace(inside) / width
        solution = np.linalg.solve(inside + penalty * np.eye(width), across)
        explained = np.sum(solution * (2 * across - inside @ solution))
        unexplained.append(1.0 - float(explained) / whole)
        projection.weight.set_value(jnp.asarray(solution.T, jnp.float32))
    return unexplained
