"""The part of a Hugging Face config that all families of decoders share, and sliding windows by layer.

What a family adds, defaults differently or refuses is said in the family's own file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from spd_jax.config.model import AttentionConfig, LayerConfig, MlpConfig, ModelConfig, NormConfig, RopeConfig
from spd_jax.models.reading import FieldReader
from spd_jax.nn.layers import ACTIVATIONS

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclasses.dataclass(frozen=True)
class Basics:
    """Sizes, norms and special tokens of a config as found; whether they fit together shows when layers are made."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm: NormConfig
    mlp: MlpConfig
    max_position: int
    model: dict[str, Any]

    def attention(self, rope: RopeConfig, **changes: Any) -> AttentionConfig:
        """The attention of a layer; `changes` are further fields of it.

        Raises:
            ValueError: numbers of heads or sizes of heads that cannot be.
        """
        return AttentionConfig(self.num_heads, self.num_kv_heads, self.head_dim, rope, **changes)

    def layer(self, attention: AttentionConfig, **changes: Any) -> LayerConfig:
        """A layer with this attention; `changes` are further fields of it."""
        return LayerConfig(self.hidden_size, self.norm, attention, self.mlp, **changes)

    def config(self, family: str, layers: Sequence[LayerConfig], **changes: Any) -> ModelConfig:
        """The model with these layers; `changes` are further fields of it."""
        return ModelConfig(family=family, layers=tuple(layers), max_position=self.max_position, **self.model, **changes)


def read_basics(
    reader: FieldReader,
    *,
    max_position: int,
    head_dim: int | None = None,
    activation: tuple[str, str] = ("hidden_act", "silu"),
    tie_embeddings: bool = False,
    zero_centred: bool = False,
    mlp_bias: bool = False,
) -> Basics:
    """What every decoder's config says; fields that are absent take these defaults of transformers'.

    Args:
        head_dim: default of a family whose heads do not share the hidden size among them.
        activation: name of the field, and its default.
    """
    fields = reader.fields
    hidden_size, num_heads = reader.whole("hidden_size"), reader.whole("num_attention_heads")
    size = reader.whole("head_dim", head_dim or max(hidden_size // num_heads, 1))
    if fields.get("head_dim") is None and head_dim is None and hidden_size % num_heads and not reader.problems:
        reader.problems.append(f"hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}")
    if fields.get("quantization_config") is not None:
        reader.problems.append(
            "quantization_config is present; supported: float32, bfloat16 and float16 weights, or GGUF"
        )
    return Basics(
        hidden_size=hidden_size,
        num_layers=reader.whole("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=reader.whole("num_key_value_heads", num_heads),
        head_dim=size,
        norm=NormConfig(reader.number("rms_norm_eps", 1e-6), zero_centred),
        mlp=MlpConfig(reader.whole("intermediate_size"), reader.choice(*activation, ACTIVATIONS), mlp_bias),
        max_position=reader.whole("max_position_embeddings", max_position),
        model={
            "vocab_size": reader.whole("vocab_size"),
            "tie_embeddings": reader.flag("tie_word_embeddings", tie_embeddings),
            "eos_token_ids": reader.token_ids("eos_token_id"),
            "bos_token_id": reader.token_id("bos_token_id"),
            "pad_token_id": reader.token_id("pad_token_id"),
        },
    )


def read_window(reader: FieldReader, default: int) -> int | None:
    """The sliding window of the layers that have one; null is none, absent the default."""
    if "sliding_window" in reader.fields and reader.fields["sliding_window"] is None:
        return None
    return reader.whole("sliding_window", default)


def read_layer_types(
    reader: FieldReader, num_layers: int, *, window: int | None, is_sliding: Callable[[int], bool]
) -> list[str]:
    """The kind of every layer: the config's `layer_types`, else sliding where `is_sliding` of its index says so.

    Without a window all attend to everything.
    """

    def default(index: int) -> str:
        return SLIDING if window is not None and is_sliding(index) else FULL

    kinds = named_layer_types(reader, num_layers, default, (FULL, SLIDING))
    return kinds if window is not None else [FULL] * num_layers


def by_kind(layer: LayerConfig, kinds: Sequence[str], **sliding: Any) -> list[LayerConfig]:
    """The layer for each kind, with `sliding` changes of its attention where the kind is a sliding window."""
    local = layer.with_attention(**sliding)
    return [local if kind == SLIDING else layer for kind in kinds]


def named_layer_types(
    reader: FieldReader, num_layers: int, default: Callable[[int], str], supported: Sequence[str]
) -> list[str]:
    """The kind of every layer: the config's `layer_types`, else `default` of its index."""
    given = reader.fields.get("layer_types")
    if given is None:
        return [default(index) for index in range(num_layers)]
    if not isinstance(given, list) or len(given) != num_layers:
        count = f"{len(given)} entries" if isinstance(given, list) else repr(given)
        reader.problems.append(f"layer_types has {count}, expected one for each of {num_layers} layers")
        return [FULL] * num_layers
    for kind in dict.fromkeys(map(str, given)):
        if kind not in supported:
            reader.problems.append(f"layer_types names {kind!r}, supported: {', '.join(supported)}")
    return [str(kind) for kind in given]


def finish_config(reader: FieldReader, make: Callable[[], ModelConfig]) -> ModelConfig:
    """The config, if nothing was wrong.

    Raises:
        ValueError: what the reader has found, or what cannot be made of it.
    """
    reader.finish()
    try:
        return make()
    except ValueError as error:
        raise ValueError(f"{reader.origin}: {error}") from error
