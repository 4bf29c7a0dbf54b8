"""The frozen target as training reads it: layers stacked between anchors, hidden states at the anchors.

Layers between two anchors are one scan over stacked weights: one compilation a segment instead of one a layer, and
where parameters are spread over devices, one layer is whole at a time. Nothing here has a gradient.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from spd_jax import struct
from spd_jax.config.model import ModelConfig
from spd_jax.models.decoder import head_logits, run_layers
from spd_jax.nn.blockwise import attend_ranges, causal_ranges
from spd_jax.nn.layers import layer_structure, rms_norm
from spd_jax.nn.rope import rope_table
from spd_jax.training.rows import Rows
from spd_jax.weights.load import Progress
from spd_jax.weights.mapping import TargetWeights

Gather = Callable[[Any], Any]
"""Makes parameters whole where they are spread over devices."""


def whole(parameters: Any) -> Any:
    """The `Gather` of parameters that are whole already."""
    return parameters


@struct.dataclass
class FrozenTarget:
    """Weights of a target: `embedding` and `head` `[V, D]` (None where tied), `final_norm` `[D]`, and for every
    segment between neighbouring bounds 0 < ... <= L its layers' parameters by name, stacked `[layers, ...]`.

    Arrays of the host until they are placed."""

    embedding: Any
    head: Any | None
    final_norm: Any
    segments: tuple[dict[str, Any], ...]
    config: ModelConfig = struct.static()
    bounds: tuple[int, ...] = struct.static()

    @property
    def head_rows(self) -> Array:
        """The rows that score tokens, `[V, D]`."""
        return self.embedding if self.head is None else self.head

    def normed(self, hidden: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Hidden states after the final norm."""
        return rms_norm(hidden, self.final_norm, self.config.layer.rms_norm_eps)

    def logits(self, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """Float32 logits of hidden states taken before the final norm."""
        return head_logits(self.normed(hidden), self.head_rows)


def load_frozen_target(
    weights: TargetWeights, anchors: Sequence[int], dtype: Any, progress: Progress | None = None
) -> FrozenTarget:
    """Read a target for training with taps at `anchors`; on the host, to be placed by who knows the devices."""
    config = weights.config
    bounds = tuple(sorted({0, *anchors, config.num_layers}))
    _, shapes = layer_structure(config.layer)
    sizes = {".".join(path): int(np.prod(shape)) for path, shape in shapes.items()}
    width = jnp.dtype(dtype).itemsize
    total = width * (sum(sizes.values()) * config.num_layers + config.vocab_size * config.hidden_size)
    done = 0

    def read(name: str) -> np.ndarray:
        nonlocal done
        value = weights.tensor(name).astype(dtype)
        done += value.nbytes
        if progress is not None:
            progress(min(done, total), total, name)
        return value

    segments = tuple(
        {name: np.stack([read(f"layers.{layer}.{name}") for layer in range(start, end)]) for name in sizes}
        for start, end in itertools.pairwise(bounds)
    )
    head = None if config.tie_embeddings else read("head")
    return FrozenTarget(read("embedding"), head, read("final_norm.weight"), segments, config, bounds)


def target_pass(
    target: FrozenTarget, rows: Rows, anchors: Sequence[int], dtype: Any, gather: Gather = whole
) -> tuple[list[Float[Array, "B S D"]], Float[Array, "B S D"]]:
    """Hidden states at the anchors and after the last layer, all before the final norm, without gradient.

    Args:
        dtype: of the activations.
    """
    config = target.config
    graphdef, shapes = layer_structure(config.layer)
    rope = rope_table(config.rope, config.layer.head_dim, rows.positions)
    ranges = causal_ranges(rows.low)

    def attend(q_BTKGH: Array, k_BTKH: Array, v_BTKH: Array) -> tuple[Array, None]:
        k, v = (x.astype(target.embedding.dtype)[:, None] for x in (k_BTKH, v_BTKH))
        return attend_ranges(q_BTKGH[:, :, None], k, v, ranges)[:, :, 0], None

    def layer(x: Array, parameters: dict[str, Array]) -> tuple[Array, None]:
        parameters = gather(parameters)
        state = nnx.from_flat_state([(path, nnx.Param(parameters[".".join(path)])) for path in shapes])
        (x,), _ = run_layers([nnx.merge(graphdef, state)], x, rope, [attend])
        return x, None

    with jax.named_scope("target"):
        x = target.embedding[rows.ids].astype(dtype)
        hidden = {0: x}
        for (_, end), segment in zip(itertools.pairwise(target.bounds), target.segments, strict=True):
            x, _ = jax.lax.scan(layer, x, segment)
            hidden[end] = x
    hidden = jax.lax.stop_gradient(hidden)
    return [hidden[anchor] for anchor in anchors], hidden[config.num_layers]
