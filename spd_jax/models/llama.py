"""The Llama family: Llama 1 to 3.3, SmolLM 1 and 2, and everything else with model_type `llama`.

Grouped-query attention, SwiGLU, RMSNorm before each half, rotary embeddings; biases and untied heads as the config
says. Knows the config's fields and the names of the tensors, not the files they are in.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from spd_jax.config.model import LayerConfig, ModelConfig
from spd_jax.models.family import GGUF, HUGGING_FACE, Family, dense_recipes
from spd_jax.models.gguf_metadata import read_dense_gguf
from spd_jax.models.reading import FieldReader, read_rope
from spd_jax.nn.layers import ACTIVATIONS


def read_config(fields: Mapping[str, Any], origin: str) -> ModelConfig:
    """A Hugging Face config dict as a `ModelConfig`; absent fields take transformers' defaults.

    Raises:
        ValueError: fields are missing or hold what is not implemented; all of them are named, with the value found.
    """
    reader = FieldReader(fields, origin)
    hidden_size, num_heads = reader.whole("hidden_size"), reader.whole("num_attention_heads")
    head_dim = reader.whole("head_dim", max(hidden_size // num_heads, 1))
    if fields.get("head_dim") is None and hidden_size % num_heads and not reader.problems:
        reader.problems.append(f"hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}")
    attention_bias = reader.flag("attention_bias", False)
    layer = {
        "hidden_size": hidden_size,
        "intermediate_size": reader.whole("intermediate_size"),
        "num_heads": num_heads,
        "num_kv_heads": reader.whole("num_key_value_heads", num_heads),
        "head_dim": head_dim,
        "rms_norm_eps": reader.number("rms_norm_eps", 1e-6),
        "activation": reader.choice("hidden_act", "silu", ACTIVATIONS),
        "qkv_bias": attention_bias,
        "output_bias": attention_bias,
        "mlp_bias": reader.flag("mlp_bias", False),
    }
    max_position = reader.whole("max_position_embeddings", 2048)
    model = {
        "vocab_size": reader.whole("vocab_size"),
        "num_layers": reader.whole("num_hidden_layers"),
        "rope": read_rope(reader, max_position=max_position),
        "max_position": max_position,
        "tie_embeddings": reader.flag("tie_word_embeddings", False),
        "eos_token_ids": reader.token_ids("eos_token_id"),
        "bos_token_id": reader.token_id("bos_token_id"),
        "pad_token_id": reader.token_id("pad_token_id"),
    }
    reader.only("pretraining_tp", 1)
    reader.only("partial_rotary_factor", 1.0)
    reader.only("sliding_window", None)
    if fields.get("quantization_config") is not None:
        reader.problems.append(
            "quantization_config is present; supported: float32, bfloat16 and float16 weights, or GGUF"
        )
    reader.finish()
    try:
        return ModelConfig(family="llama", layer=LayerConfig(**layer), **model)
    except ValueError as error:
        raise ValueError(f"{origin}: {error}") from error


LLAMA = Family(
    name="llama",
    read_config=read_config,
    recipes=functools.partial(dense_recipes, names=HUGGING_FACE),
    gguf_architecture="llama",
    read_gguf_config=functools.partial(read_dense_gguf, family="llama", architecture="llama"),
    gguf_recipes=functools.partial(dense_recipes, names=GGUF, rope_permuted=True),
    ignored=r"(.*\.rotary_emb\.inv_freq|rope_freqs\.weight)",
)
