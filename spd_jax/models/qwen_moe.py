"""The Qwen families with experts: Qwen3-MoE (`qwen3_moe`) and Qwen3.5-MoE (`qwen3_5_moe`, `qwen3_5_moe_text`).

Layers of Qwen3 and Qwen3.5 with a mixture of experts for the MLP; Qwen3-MoE may keep some dense, Qwen3.5-MoE has a
shared expert behind a gate. Knows the config's fields and the names of the tensors, not the files they are in.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from spd_jax.config.model import DeltaNetConfig, ExpertsConfig, MlpConfig, ModelConfig
from spd_jax.models import qwen3_5
from spd_jax.models.dense import finish_config, read_basics, read_layer_types, read_window
from spd_jax.models.family import (
    HUGGING_FACE,
    Family,
    Part,
    Recipe,
    dense_recipes,
    only_part,
    piled,
    piled_pairs,
    stacked_rows,
)
from spd_jax.models.reading import FieldReader, read_rope
from spd_jax.models.shapes import Shape

_MLP = "model.layers.{index}.mlp."


def _read_experts(reader: FieldReader, *, count: int, inner: int) -> dict[str, Any]:
    """Fields of an `ExpertsConfig` that both families have."""
    number = reader.whole("num_experts", reader.whole("num_local_experts", count))
    top_k = reader.whole("num_experts_per_tok", 8)
    return {
        "num_experts": number,
        "top_k": top_k,
        "intermediate_size": reader.whole("moe_intermediate_size", inner),
    }


def read_qwen3_moe(fields: Mapping[str, Any], origin: str) -> ModelConfig:
    """A Hugging Face config dict of Qwen3-MoE as a `ModelConfig`; absent fields take transformers' defaults.

    Raises:
        ValueError: fields are missing or hold what is not implemented; all of them are named, with the value found.
    """
    reader = FieldReader({"intermediate_size": 6144} | dict(fields), origin)
    basics = read_basics(reader, max_position=32768)
    bias = reader.flag("attention_bias", False)
    rope = read_rope(reader, max_position=basics.max_position)
    window = read_window(reader, 4096) if reader.flag("use_sliding_window", False) else None
    read_layer_types(reader, basics.num_layers, window=window, is_sliding=lambda index: True)
    experts = _read_experts(reader, count=128, inner=768) | {"normalise": reader.flag("norm_topk_prob", False)}
    step, dense = reader.whole("decoder_sparse_step", 1), reader.layer_indices("mlp_only_layers", basics.num_layers)

    def make() -> ModelConfig:
        attention = basics.attention(rope, qk_norm=True, qkv_bias=bias, output_bias=bias, window=window)
        layer = basics.layer(attention)
        sparse = dataclasses.replace(layer, mlp=ExpertsConfig(activation=basics.mlp.activation, **experts))
        layers = [
            sparse if index not in dense and (index + 1) % step == 0 else layer for index in range(basics.num_layers)
        ]
        return basics.config("qwen3_moe", layers, dense_size=basics.mlp.intermediate_size)

    return finish_config(reader, make)


def read_qwen3_5_moe(fields: Mapping[str, Any], origin: str) -> ModelConfig:
    """A Hugging Face config dict of Qwen3.5-MoE's text model as a `ModelConfig`.

    Raises:
        ValueError: fields are missing or hold what is not implemented; all of them are named, with the value found.
    """
    reader = FieldReader(fields, origin)
    experts = _read_experts(reader, count=256, inner=512)
    experts |= {"shared_intermediate_size": reader.whole("shared_expert_intermediate_size", 512)}
    # There is no dense layer, and no size of one; what a position runs is about as wide.
    width = experts["top_k"] * experts["intermediate_size"] + experts["shared_intermediate_size"]
    dense = qwen3_5.read_config({"intermediate_size": width} | dict(fields), origin)

    def make() -> ModelConfig:
        mlp = dense.layers[0].mlp
        assert isinstance(mlp, MlpConfig)
        sparse = ExpertsConfig(activation=mlp.activation, **experts)
        layers = tuple(dataclasses.replace(layer, mlp=sparse) for layer in dense.layers)
        named = "intermediate_size" in fields
        return dataclasses.replace(
            dense, family="qwen3_5_moe", layers=layers, dense_size=mlp.intermediate_size if named else None
        )

    return finish_config(reader, make)


def recipes(config: ModelConfig) -> dict[str, Recipe]:
    """Recipes for every parameter, keyed by canonical path."""
    mixed = any(isinstance(layer.mixer, DeltaNetConfig) for layer in config.layers)
    found = qwen3_5.recipes(config) if mixed else dense_recipes(config, HUGGING_FACE)
    for index, layer in enumerate(config.layers):
        if isinstance(layer.mlp, ExpertsConfig):
            found |= _experts_recipes(layer.mlp, layer.hidden_size, index)
    return found


def _experts_recipes(experts: ExpertsConfig, size: int, index: int) -> dict[str, Recipe]:
    """Experts lie one by one in most files, and stacked in newer ones."""
    prefix, at = _MLP.format(index=index), f"layers.{index}.mlp."
    count, inner = experts.num_experts, experts.intermediate_size

    def whole(key: str, shape: Shape) -> Recipe:
        return Recipe(shape, (Part(prefix + key, shape),), only_part)

    def each(names: tuple[str, ...], shape: Shape) -> tuple[Part, ...]:
        return tuple(Part(f"{prefix}experts.{e}.{name}.weight", shape) for e in range(count) for name in names)

    gate_up, down = (count, 2 * inner, size), (count, size, inner)
    found = {
        "router.weight": whole("gate.weight", (count, size)),
        "gate_up": Recipe(
            gate_up,
            each(("gate_proj", "up_proj"), (inner, size)),
            piled_pairs,
            otherwise=whole("experts.gate_up_proj", gate_up),
        ),
        "down": Recipe(down, each(("down_proj",), (size, inner)), piled, otherwise=whole("experts.down_proj", down)),
    }
    if shared := experts.shared_intermediate_size:
        names = ("shared_expert.gate_proj.weight", "shared_expert.up_proj.weight")
        parts = tuple(Part(prefix + name, (shared, size)) for name in names)
        found |= {
            "shared.gate_up.weight": Recipe((2 * shared, size), parts, stacked_rows),
            "shared.down.weight": whole("shared_expert.down_proj.weight", (size, shared)),
            "shared_gate.weight": whole("shared_expert_gate.weight", (1, size)),
        }
    return {at + name: recipe for name, recipe in found.items()}


QWEN3_MOE = Family(name="qwen3_moe", read_config=read_qwen3_moe, recipes=recipes, ignored=r".*\.rotary_emb\.inv_freq")

QWEN3_5_MOE = Family(
    name="qwen3_5_moe",
    also=("qwen3_5_moe_text",),
    read_config=read_qwen3_5_moe,
    recipes=recipes,
    ignored=qwen3_5.QWEN3_5.ignored,
)
