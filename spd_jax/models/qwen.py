"""The dense Qwen families: Qwen2 and 2.5 (`qwen2`), Qwen3 (`qwen3`).

Llama's layer; Qwen2 adds biases to query, key and value, Qwen3 norms every query and key head. Upper layers may have a
sliding window. Knows the config's fields and the names of the tensors, not the files they are in.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from spd_jax.config.model import ModelConfig
from spd_jax.models.dense import by_kind, finish_config, read_basics, read_layer_types, read_window
from spd_jax.models.family import GGUF, HUGGING_FACE, Family, GgufFormat, dense_recipes
from spd_jax.models.gguf_metadata import read_dense_gguf
from spd_jax.models.reading import FieldReader, read_rope


def read_config(fields: Mapping[str, Any], origin: str, *, family: str) -> ModelConfig:
    """A Hugging Face config dict of a dense Qwen as a `ModelConfig`; absent fields take transformers' defaults.

    Raises:
        ValueError: fields are missing or hold what is not implemented; all of them are named, with the value found.
    """
    reader, is_qwen3 = FieldReader(fields, origin), family == "qwen3"
    basics = read_basics(reader, max_position=32768, head_dim=128 if is_qwen3 else None)
    bias = reader.flag("attention_bias", False) if is_qwen3 else False
    rope = read_rope(reader, max_position=basics.max_position)
    window = read_window(reader, 4096) if reader.flag("use_sliding_window", False) else None
    first = reader.whole("max_window_layers", 28)
    kinds = read_layer_types(reader, basics.num_layers, window=window, is_sliding=lambda index: index >= first)

    def make() -> ModelConfig:
        attention = basics.attention(rope, qk_norm=is_qwen3, qkv_bias=bias or not is_qwen3, output_bias=bias)
        layer = basics.layer(attention)
        layers = by_kind(layer, kinds, window=window)
        return basics.config(family, layers)

    return finish_config(reader, make)


QWEN2 = Family(
    name="qwen2",
    read_config=functools.partial(read_config, family="qwen2"),
    recipes=functools.partial(dense_recipes, names=HUGGING_FACE),
    gguf=GgufFormat(
        "qwen2",
        functools.partial(read_dense_gguf, family="qwen2", architecture="qwen2"),
        functools.partial(dense_recipes, names=GGUF),
    ),
    ignored=r".*\.rotary_emb\.inv_freq",
)

QWEN3 = Family(
    name="qwen3",
    read_config=functools.partial(read_config, family="qwen3"),
    recipes=functools.partial(dense_recipes, names=HUGGING_FACE),
    gguf=GgufFormat(
        "qwen3",
        functools.partial(read_dense_gguf, family="qwen3", architecture="qwen3", qk_norm=True),
        functools.partial(dense_recipes, names=GGUF),
    ),
    ignored=r".*\.rotary_emb\.inv_freq",
)
