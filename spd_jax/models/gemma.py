"""The Gemma families: Gemma 2 (`gemma2`) and the text model of Gemma 3 (`gemma3`, `gemma3_text`).

Embeddings times the square root of the hidden size, norms before and after both halves of a layer that multiply by
1 + weight, layers with a sliding window between layers that attend to everything. Gemma 2 caps scores and logits; Gemma
3 norms query and key heads and has a rotary base of its own for its windows. Knows the config's fields and the names of
the tensors, not the files they are in.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from spd_jax.config.model import ModelConfig, RopeConfig
from spd_jax.models.dense import (
    FULL,
    SLIDING,
    Basics,
    by_kind,
    finish_config,
    read_basics,
    read_layer_types,
    read_window,
)
from spd_jax.models.family import HUGGING_FACE, Family, dense_recipes
from spd_jax.models.reading import FieldReader, read_rope

NAMES = dataclasses.replace(
    HUGGING_FACE,
    mixer_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)


# Of transformers' text model; the published configs of Gemma 3 leave out what equals them.
_DEFAULTS = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


def _read_basics(reader: FieldReader, *, max_position: int) -> Basics:
    reader.only("use_bidirectional_attention", False)
    return read_basics(
        reader,
        max_position=max_position,
        head_dim=256,
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        tie_embeddings=True,
        zero_centred=True,
    )


def _read_scores(
    reader: FieldReader, head_dim: int, caps: tuple[float | None, float | None]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What attention and model do with scores and logits; `caps` are the defaults of the two caps."""
    bias = reader.flag("attention_bias", False)
    scalar = reader.positive("query_pre_attn_scalar", 256.0) or 256.0
    attention = {
        "scale": None if scalar == head_dim else scalar**-0.5,
        "score_cap": reader.positive("attn_logit_softcapping", caps[0]),
        "qkv_bias": bias,
        "output_bias": bias,
    }
    return attention, {"logit_cap": reader.positive("final_logit_softcapping", caps[1])}


def read_gemma2(fields: Mapping[str, Any], origin: str) -> ModelConfig:
    """A Hugging Face config dict of Gemma 2 as a `ModelConfig`; absent fields take transformers' defaults.

    Raises:
        ValueError: fields are missing or hold what is not implemented; all of them are named, with the value found.
    """
    reader = FieldReader(fields, origin)
    basics = _read_basics(reader, max_position=8192)
    rope = read_rope(reader, max_position=basics.max_position)
    attention, model = _read_scores(reader, basics.head_dim, (50.0, 30.0))
    window = read_window(reader, 4096)
    kinds = read_layer_types(reader, basics.num_layers, window=window, is_sliding=lambda index: index % 2 == 0)

    def make() -> ModelConfig:
        layer = basics.layer(basics.attention(rope, **attention), post_norms=True)
        layers = by_kind(layer, kinds, window=window)
        return basics.config("gemma2", layers, embedding_scale=basics.hidden_size**0.5, **model)

    return finish_config(reader, make)


def read_gemma3(fields: Mapping[str, Any], origin: str) -> ModelConfig:
    """A Hugging Face config dict of Gemma 3, or of its text model, as a `ModelConfig`.

    Raises:
        ValueError: fields are missing or hold what is not implemented; all of them are named, with the value found.
    """
    reader = FieldReader(_DEFAULTS | dict(fields), origin)
    basics = _read_basics(reader, max_position=131072)
    far, near = _read_ropes(reader, basics.max_position)
    attention, model = _read_scores(reader, basics.head_dim, (None, None))
    window, pattern = read_window(reader, 4096), reader.whole("sliding_window_pattern", 6)
    kinds = read_layer_types(
        reader, basics.num_layers, window=window, is_sliding=lambda index: bool((index + 1) % pattern)
    )

    def make() -> ModelConfig:
        layer = basics.layer(basics.attention(far, qk_norm=True, **attention), post_norms=True)
        layers = by_kind(layer, kinds, rope=near, window=window)
        return basics.config("gemma3", layers, embedding_scale=basics.hidden_size**0.5, **model)

    return finish_config(reader, make)


def _read_ropes(reader: FieldReader, max_position: int) -> tuple[RopeConfig, RopeConfig]:
    """Rotary embeddings of the layers that attend to everything, and of those with a window."""
    both = reader.fields.get("rope_parameters") or {}
    if isinstance(both, Mapping) and both.keys() & {FULL, SLIDING}:
        far = {"rope_theta": 1e6} | dict(both.get(FULL) or {})
        near = {"rope_theta": 1e4} | dict(both.get(SLIDING) or {})
    else:  # the older form: one scaling, for the layers that attend to everything
        scaling = reader.fields.get("rope_parameters") or reader.fields.get("rope_scaling") or {}
        far = {"rope_theta": reader.number("rope_theta", 1e6)} | dict(scaling)
        near = {"rope_theta": reader.number("rope_local_base_freq", 1e4)}

    def read(parameters: dict[str, Any]) -> RopeConfig:
        part = FieldReader({**reader.fields, "rope_parameters": parameters}, reader.origin)
        rope = read_rope(part, max_position=max_position)
        reader.problems += part.problems
        return rope

    return read(far), read(near)


GEMMA2 = Family(
    name="gemma2",
    read_config=read_gemma2,
    recipes=functools.partial(dense_recipes, names=NAMES),
    ignored=r".*\.rotary_emb\.inv_freq",
)

GEMMA3 = Family(
    name="gemma3",
    also=("gemma3_text",),
    wrapper_ties=True,
    read_config=read_gemma3,
    recipes=functools.partial(dense_recipes, names=NAMES),
    ignored=r".*\.rotary_emb\.inv_freq",
)
