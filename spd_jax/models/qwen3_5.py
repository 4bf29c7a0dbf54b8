"""Qwen3.5 (`qwen3_5`, `qwen3_5_text`): gated delta nets with gated attention in every fourth layer.

Attention norms every query and key head, rotates the front of each head and gates what it mixes; all norms multiply by
1 + weight, but for those inside the delta nets. Knows the config's fields and the names of the tensors, not the files
they are in.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from spd_jax.config.model import DeltaNetConfig, LayerConfig, ModelConfig
from spd_jax.models.dense import FULL, Basics, finish_config, named_layer_types, read_basics
from spd_jax.models.family import HUGGING_FACE, Family, Part, Recipe, dense_recipes, only_part, stacked_rows
from spd_jax.models.reading import FieldReader, read_rope

LINEAR = "linear_attention"
FOR_PICTURES = ("mrope_section", "mrope_interleaved")  # rotary parameters; text has one position a token
_LAYER = "model.layers.{index}.linear_attn."


def read_config(fields: Mapping[str, Any], origin: str) -> ModelConfig:
    """A Hugging Face config dict of the text model as a `ModelConfig`; absent fields take transformers' defaults.

    Raises:
        ValueError: fields are missing or hold what is not implemented; all of them are named, with the value found.
    """
    reader = FieldReader(fields, origin)
    basics = read_basics(reader, max_position=32768, head_dim=256, zero_centred=True)
    bias = reader.flag("attention_bias", False)
    rope = read_rope(reader, max_position=basics.max_position, partial=0.25, ignored=FOR_PICTURES)
    delta, kinds = read_delta_net(reader), read_kinds(reader, basics)

    def make() -> ModelConfig:
        attention = basics.attention(rope, qk_norm=True, qkv_bias=bias, output_bias=bias, gated=True)
        layer = basics.layer(attention)
        linear = dataclasses.replace(layer, mixer=DeltaNetConfig(**delta))
        layers: list[LayerConfig] = [layer if kind == FULL else linear for kind in kinds]
        return basics.config("qwen3_5", layers)

    return finish_config(reader, make)


def read_delta_net(reader: FieldReader) -> dict[str, int]:
    """The fields of a `DeltaNetConfig`."""
    return {
        "num_key_heads": reader.whole("linear_num_key_heads", 16),
        "num_value_heads": reader.whole("linear_num_value_heads", 32),
        "key_dim": reader.whole("linear_key_head_dim", 128),
        "value_dim": reader.whole("linear_value_head_dim", 128),
        "conv_kernel": reader.whole("linear_conv_kernel_dim", 4),
    }


def read_kinds(reader: FieldReader, basics: Basics) -> list[str]:
    """The kind of every layer: every fourth attends, or as the config says."""
    interval = reader.whole("full_attention_interval", 4)

    def default(index: int) -> str:
        return LINEAR if (index + 1) % interval else FULL

    return named_layer_types(reader, basics.num_layers, default, (LINEAR, FULL))


def recipes(config: ModelConfig) -> dict[str, Recipe]:
    """Recipes for every parameter, keyed by canonical path."""
    found = dense_recipes(config, HUGGING_FACE)
    for index, layer in enumerate(config.layers):
        if isinstance(layer.mixer, DeltaNetConfig):
            found |= _delta_recipes(layer.mixer, layer.hidden_size, index)
    return found


def _delta_recipes(delta: DeltaNetConfig, size: int, index: int) -> dict[str, Recipe]:
    prefix, at = _LAYER.format(index=index), f"layers.{index}.delta."
    heads, values = delta.num_value_heads, delta.num_value_heads * delta.value_dim
    rows = {"in_proj_qkv": delta.channels, "in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}
    mix = tuple(Part(f"{prefix}{name}.weight", (count, size)) for name, count in rows.items())
    kernel = Part(f"{prefix}conv1d.weight", (delta.channels, 1, delta.conv_kernel), lambda x: x.reshape(x.shape[0], -1))
    whole = {
        "a_log": ("A_log", (heads,)),
        "dt_bias": ("dt_bias", (heads,)),
        "norm.weight": ("norm.weight", (delta.value_dim,)),
        "output.weight": ("out_proj.weight", (size, values)),
    }
    return {
        f"{at}mix.weight": Recipe((sum(rows.values()), size), mix, stacked_rows),
        f"{at}conv": Recipe((delta.channels, delta.conv_kernel), (kernel,), only_part),
        **{at + name: Recipe(shape, (Part(prefix + key, shape),), only_part) for name, (key, shape) in whole.items()},
    }


QWEN3_5 = Family(
    name="qwen3_5",
    also=("qwen3_5_text",),
    read_config=read_config,
    recipes=recipes,
    ignored=r"(mtp\..*|model\.mtp\..*|model\.visual\..*|.*\.rotary_emb\.inv_freq)",
)
