"""The speculation module ("head"): m projections, Ls draft layers, an LM head over the draft vocabulary.

arXiv 2605.30852, section on the speculation module; revised release (every depth's features are query, key and value).
A row of fusion type i is W_i concat(h^(b_0), ..., h^(b_i)). The final norm is the target's own and is not stored here.

This module knows the arithmetic of one pass; which rows exist in a cycle, and where keys are kept, is the decode
loop's business, and the training mask is training's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from spd_jax.config.model import AttentionConfig, ExpertsConfig, LayerConfig, MlpConfig, ModelConfig
from spd_jax.models.shapes import layer_shapes
from spd_jax.nn.decoder_layer import DecoderLayer
from spd_jax.nn.layers import Linear

LmHead = Literal["own", "target"]


@dataclasses.dataclass(frozen=True)
class HeadConfig:
    """What fixes a head's parameters.

    `anchors` are hidden state indices (output of that many layers, before the final norm; 0 is the embedding).
    `draft_ids` are the sorted target token ids the head can propose, None for all. `lm_head` "own" stores rows of its
    own, "target" uses the target's rows, frozen and unstored.
    """

    layer: LayerConfig
    num_layers: int
    anchors: tuple[int, ...]
    vocab_size: int
    draft_ids: tuple[int, ...] | None = None
    lm_head: LmHead = "own"

    def __post_init__(self) -> None:
        if not isinstance(self.layer.mixer, AttentionConfig) or self.layer.mixer.window is not None:
            raise ValueError(f"draft layers attend to everything, found {self.layer.mixer}")
        if self.num_layers < 1:
            raise ValueError(f"a head needs at least one draft layer, found {self.num_layers}")
        steps = zip(self.anchors, self.anchors[1:], strict=False)
        if not self.anchors or self.anchors[0] != 0 or any(a >= b for a, b in steps):
            raise ValueError(f"anchors must start at 0 and increase strictly, found {list(self.anchors)}")
        if self.draft_ids is not None:
            ids = np.asarray(self.draft_ids)
            if ids.size == 0 or ids.min() < 0 or ids.max() >= self.vocab_size:
                raise ValueError(
                    f"draft ids must lie in 0..{self.vocab_size - 1}, found "
                    f"{'none' if ids.size == 0 else f'{ids.min()}..{ids.max()}'}"
                )
            if (np.diff(ids) <= 0).any():
                where = int(np.argmax(np.diff(ids) <= 0))
                raise ValueError(
                    "draft ids must be sorted without duplicates, found "
                    f"{self.draft_ids[where]} before {self.draft_ids[where + 1]}"
                )

    @property
    def draft_vocab_size(self) -> int:
        """Number of tokens the head can propose."""
        return self.vocab_size if self.draft_ids is None else len(self.draft_ids)


def draft_layer_config(target: ModelConfig) -> LayerConfig:
    """The draft layer of a target: its last layer that attends to everything, or its last attention without its window.

    The MLP is dense: that of a dense layer, or one as wide as what a position runs of the experts.

    Raises:
        ValueError: the target has no attention.
    """
    attends = [layer for layer in target.layers if isinstance(layer.mixer, AttentionConfig)]
    if not attends:
        raise ValueError("draft layers attend, and no layer of this target does")
    layer = next((layer for layer in reversed(attends) if layer.attention.window is None), attends[-1])
    dense = [other.mlp for other in target.layers if isinstance(other.mlp, MlpConfig)]
    mlp = layer.mlp
    if not isinstance(mlp, MlpConfig):
        width = target.dense_size or mlp.top_k * mlp.intermediate_size + (mlp.shared_intermediate_size or 0)
        mlp = dense[-1] if dense else MlpConfig(width, mlp.activation)
    return dataclasses.replace(layer, mlp=mlp).with_attention(window=None)


class SpeculationModule(nnx.Module):
    """Parameters of a head; `aggregate`, `layers` and `lm_head` are used by training and stacked for decoding."""

    def __init__(self, config: HeadConfig, *, dtype: Any = jnp.float32, rngs: nnx.Rngs):
        dtype = jnp.dtype(dtype)
        size = config.layer.hidden_size
        self.config = config
        self.projections = nnx.List(
            [Linear((i + 1) * size, size, bias=False, dtype=dtype, rngs=rngs) for i in range(len(config.anchors))]
        )
        self.layers = nnx.List([DecoderLayer(config.layer, dtype=dtype, rngs=rngs) for _ in range(config.num_layers)])
        shape = (config.draft_vocab_size, size)
        own = config.lm_head == "own"
        self.lm_head = nnx.Param(jax.random.normal(rngs.params(), shape, dtype) * dtype.type(0.02)) if own else None

    def aggregate(self, taps: Sequence[Float[Array, "... D"]]) -> Float[Array, "... D"]:
        """The fused feature of type len(taps) - 1 from the hidden states of that many anchors, shallowest first.

        Raises:
            ValueError: no taps, or more than anchors.
        """
        if not 1 <= len(taps) <= len(self.config.anchors):
            raise ValueError(f"found {len(taps)} taps for anchors {list(self.config.anchors)}")
        return self.projections[len(taps) - 1](jnp.concatenate(list(taps), axis=-1))


def copied_layers(config: HeadConfig, target: ModelConfig, first_layer: int | None = None) -> tuple[int, ...]:
    """The 0-based target layers that a head's draft layers are copies of: of those with the same parameters the last
    Ls, or the first Ls from `first_layer` on. Experts count as any MLP: it cannot be copied from them, only begun.

    Raises:
        ValueError: the head's layers, vocabulary, depth or anchors cannot be those of this target (both values named).
    """

    def shapes(layer: LayerConfig, whole: bool) -> dict[str, tuple[int, ...]]:
        found = layer_shapes(layer)
        return {name: shape for name, shape in found.items() if whole or not name.startswith("mlp.")}

    alike = [
        index
        for index, layer in enumerate(target.layers)
        for whole in [isinstance(layer.mlp, MlpConfig)]
        if shapes(layer, whole) == shapes(config.layer, whole)
    ]
    if not alike:
        raise ValueError(f"draft layers {config.layer} cannot be copied from target layers {target.layers[-1]}")
    if config.num_layers > len(alike):
        raise ValueError(f"{config.num_layers} draft layers cannot be copied from {len(alike)} target layers")
    if config.vocab_size != target.vocab_size:
        raise ValueError(f"the head's vocabulary has {config.vocab_size} tokens, the target's {target.vocab_size}")
    if config.anchors[-1] > target.num_layers:
        raise ValueError(f"anchor {config.anchors[-1]} is beyond the last hidden state index {target.num_layers}")
    last = alike[-config.num_layers]
    first = last if first_layer is None else first_layer
    if not 0 <= first <= last:
        raise ValueError(f"{config.num_layers} layers can be copied from layer 0 to {last} on, found {first}")
    return tuple(index for index in alike if index >= first)[: config.num_layers]


def head_from_target(
    config: HeadConfig,
    target: ModelConfig,
    tensors: Mapping[str, Any],
    *,
    seed: int = 0,
    noise: float = 0.0,
    first_layer: int | None = None,
) -> SpeculationModule:
    """A head made from the target's own weights, without training.

    Draft layers are copies of Ls layers of the target (of layers with experts all but the MLP, which has rows of the
    experts inside and adds nothing yet); every projection is the identity on the deepest anchor of its type plus
    `noise` times a normal; the LM head holds the target head's rows of the draft vocabulary.

    Args:
        tensors: arrays by canonical paths of the target (`layers.{i}....` of the layers copied, and `head` or
            `embedding`), which may be read from a file when they are asked for.
        first_layer: as in `copied_layers`.

    Raises:
        ValueError: as `copied_layers`.
    """
    size, copied = config.layer.hidden_size, copied_layers(config, target, first_layer)

    def value(path: tuple[Any, ...]) -> np.ndarray:
        if path[0] == "projections":
            kind = int(path[1])
            deepest = np.eye(size, (kind + 1) * size, k=kind * size, dtype=np.float32)
            random = np.random.default_rng([seed, kind]).standard_normal(deepest.shape, dtype=np.float32)
            return deepest + np.float32(noise) * random
        if path[0] == "layers":
            at, name = f"layers.{copied[int(path[1])]}.", ".".join(map(str, path[2:]))
            if name.startswith("mlp.") and isinstance(target.layers[copied[int(path[1])]].mlp, ExpertsConfig):
                return _begun(config.layer.mlp, name, tensors, at)
            return tensors[at + name]
        rows = tensors["embedding" if target.tie_embeddings else "head"]
        return rows if config.draft_ids is None else rows[np.asarray(config.draft_ids)]

    # Only shapes are made of the module before its values: random ones would take seconds and be thrown away.
    graphdef, state = nnx.split(nnx.eval_shape(lambda: SpeculationModule(config, rngs=nnx.Rngs(0))))
    filled = [
        (path, nnx.Param(jnp.asarray(np.asarray(value(path), np.float32)))) for path, _ in nnx.to_flat_state(state)
    ]
    return nnx.merge(graphdef, nnx.from_flat_state(filled))


def _begun(mlp: MlpConfig | ExpertsConfig, name: str, tensors: Mapping[str, np.ndarray], at: str) -> np.ndarray:
    """A parameter of an MLP whose inner features are those of the first experts, and whose output is 0."""
    assert isinstance(mlp, MlpConfig)
    experts = np.asarray(tensors[at + "mlp.gate_up"], np.float32)
    count, both, size = experts.shape
    if name != "mlp.gate_up.weight":
        return np.zeros((size, mlp.intermediate_size) if name == "mlp.down.weight" else (2 * mlp.intermediate_size,))
    halves = experts.reshape(count, 2, both // 2, size).swapaxes(0, 1).reshape(2, -1, size)
    rows = np.arange(mlp.intermediate_size) % halves.shape[1]
    return halves[:, rows].reshape(-1, size)
