"""The Mistral family (`mistral`): Llama's layer, with a sliding window in every layer where the config gives one.

Knows the config's fields and the names of the tensors, not the files they are in. In GGUF files its architecture is
`llama`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from spd_jax.config.model import ModelConfig
from spd_jax.models.dense import by_kind, finish_config, read_basics, read_layer_types, read_window
from spd_jax.models.family import HUGGING_FACE, Family, dense_recipes
from spd_jax.models.reading import FieldReader, read_rope


def read_config(fields: Mapping[str, Any], origin: str) -> ModelConfig:
    """A Hugging Face config dict as a `ModelConfig`; absent fields take transformers' defaults.

    Raises:
        ValueError: fields are missing or hold what is not implemented; all of them are named, with the value found.
    """
    reader = FieldReader(fields, origin)
    basics = read_basics(reader, max_position=131072)
    rope = read_rope(reader, max_position=basics.max_position)
    window = read_window(reader, 4096)
    kinds = read_layer_types(reader, basics.num_layers, window=window, is_sliding=lambda index: True)

    def make() -> ModelConfig:
        layer = basics.layer(basics.attention(rope))
        layers = by_kind(layer, kinds, window=window)
        return basics.config("mistral", layers)

    return finish_config(reader, make)


MISTRAL = Family(
    name="mistral",
    read_config=read_config,
    recipes=functools.partial(dense_recipes, names=HUGGING_FACE),
    ignored=r".*\.rotary_emb\.inv_freq",
)
