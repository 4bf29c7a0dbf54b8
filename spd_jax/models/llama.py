"""The Llama family: Llama 1 to 3.3, SmolLM 1 and 2, and everything else with model_type `llama`.

Grouped-query attention, SwiGLU, RMSNorm before each half, rotary embeddings; biases and untied heads as the config
says. Knows the config's fields and the names of the tensors, not the files they are in.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from spd_jax.config.model import ModelConfig
from spd_jax.models.dense import finish_config, read_basics
from spd_jax.models.family import GGUF, HUGGING_FACE, Family, GgufFormat, dense_recipes
from spd_jax.models.gguf_metadata import read_dense_gguf
from spd_jax.models.reading import FieldReader, read_rope


def read_config(fields: Mapping[str, Any], origin: str) -> ModelConfig:
    """A Hugging Face config dict as a `ModelConfig`; absent fields take transformers' defaults.

    Raises:
        ValueError: fields are missing or hold what is not implemented; all of them are named, with the value found.
    """
    reader = FieldReader(fields, origin)
    basics = read_basics(reader, max_position=2048, mlp_bias=reader.flag("mlp_bias", False))
    bias = reader.flag("attention_bias", False)
    rope = read_rope(reader, max_position=basics.max_position)
    reader.only("pretraining_tp", 1)
    reader.only("partial_rotary_factor", 1.0)
    reader.only("sliding_window", None)

    def make() -> ModelConfig:
        layer = basics.layer(basics.attention(rope, qkv_bias=bias, output_bias=bias))
        return basics.config("llama", [layer] * basics.num_layers)

    return finish_config(reader, make)


LLAMA = Family(
    name="llama",
    read_config=read_config,
    recipes=functools.partial(dense_recipes, names=HUGGING_FACE),
    gguf=GgufFormat(
        "llama",
        functools.partial(read_dense_gguf, family="llama", architecture="llama"),
        functools.partial(dense_recipes, names=GGUF, rope_permuted=True),
    ),
    ignored=r"(.*\.rotary_emb\.inv_freq|rope_freqs\.weight)",
)
