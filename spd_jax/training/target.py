"""The frozen target as training reads it: layers stacked between anchors, hidden states at the anchors.

Layers of one kind between two anchors are one scan over stacked weights: one compilation a segment instead of one a
layer, and where parameters are spread over devices, one layer is whole at a time. Nothing here has a gradient.
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
from spd_jax.config.model import AttentionConfig, Mixer, ModelConfig
from spd_jax.models.decoder import Ropes, embed, head_logits, run_layers
from spd_jax.models.shapes import layer_shapes, num_parameters
from spd_jax.nn.blockwise import attend_ranges, window_ranges
from spd_jax.nn.decoder_layer import Past, layer_structure
from spd_jax.nn.deltanet import Recurrence
from spd_jax.nn.layers import rms_norm
from spd_jax.training.rows import Rows
from spd_jax.weights.load import Progress
from spd_jax.weights.mapping import TargetWeights

Gather = Callable[[int, Any], Any]
"""Makes the parameters of a layer whole where they are spread over devices; first the number of its segment."""


def whole(segment: int, parameters: Any) -> Any:
    """The `Gather` of parameters that are whole already."""
    return parameters


@struct.dataclass
class FrozenTarget:
    """Weights of a target: `embedding` and `head` `[V, D]` (None where tied), `final_norm` `[D]`, and for every
    segment between neighbouring bounds 0 < ... <= L its layers' parameters by name, stacked `[layers, ...]`. The
    layers of a segment are of one kind.

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
        return rms_norm(hidden, self.final_norm, self.config.norm)

    def logits(self, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """Float32 logits of hidden states taken before the final norm."""
        return head_logits(self.normed(hidden), self.head_rows, self.config.logit_cap)


def load_frozen_target(
    weights: TargetWeights, anchors: Sequence[int], dtype: Any, progress: Progress | None = None
) -> FrozenTarget:
    """Read a target for training with taps at `anchors`; on the host, to be placed by who knows the devices."""
    config = weights.config
    kinds = config.layers
    changes = {index for index in range(1, config.num_layers) if kinds[index] != kinds[index - 1]}
    bounds = tuple(sorted({0, *anchors, *changes, config.num_layers}))
    width = jnp.dtype(dtype).itemsize
    total = width * (sum(map(num_parameters, kinds)) + config.vocab_size * config.hidden_size)
    done = 0

    def read(name: str) -> np.ndarray:
        nonlocal done
        value = weights.tensor(name).astype(dtype)
        done += value.nbytes
        if progress is not None:
            progress(min(done, total), total, name)
        return value

    segments = tuple(
        {
            name: np.stack([read(f"layers.{layer}.{name}") for layer in range(start, end)])
            for name in layer_shapes(kinds[start])
        }
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
    ropes = Ropes(rows.positions)

    def past_of(mixer: Mixer) -> Past:
        if not isinstance(mixer, AttentionConfig):
            return Recurrence(first=rows.low)
        ranges = window_ranges(rows.low, mixer.window)

        def attend(q_BTKGH: Array, k_BTKH: Array, v_BTKH: Array, config: AttentionConfig) -> tuple[Array, None]:
            k, v = (x.astype(target.embedding.dtype)[:, None] for x in (k_BTKH, v_BTKH))
            return attend_ranges(q_BTKGH[:, :, None], k, v, ranges, config.score_cap)[:, :, 0], None

        return attend

    def run_segment(index: int, x: Array) -> Array:
        kind = config.layers[target.bounds[index]]
        graphdef, shapes = layer_structure(kind)
        ropes.of(kind.mixer)  # made here, outside of the scan, as is what attention sees
        past = past_of(kind.mixer)

        def layer(x: Array, parameters: dict[str, Array]) -> tuple[Array, None]:
            parameters = gather(index, parameters)
            state = nnx.from_flat_state([(path, nnx.Param(parameters[".".join(path)])) for path in shapes])
            (x,), _ = run_layers([nnx.merge(graphdef, state)], x, ropes, [past])
            return x, None

        return jax.lax.scan(layer, x, target.segments[index])[0]

    with jax.named_scope("target"):
        x = embed(target.embedding[rows.ids], config).astype(dtype)
        hidden = {0: x}
        for index, end in enumerate(target.bounds[1:]):
            x = run_segment(index, x)
            hidden[end] = x
    hidden = jax.lax.stop_gradient(hidden)
    return [hidden[anchor] for anchor in anchors], hidden[config.num_layers]
