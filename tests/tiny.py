"""Tiny random Llama models, saved by transformers or written as GGUF: what the importers are compared with.

Weights are larger than a fresh initialisation's and norms and biases are random too, so that logits spread over several
units: a forgotten bias or a wrong rotation is far above the tolerance.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from spd_jax.config.model import AttentionConfig, LayerConfig, MlpConfig, ModelConfig, NormConfig
from spd_jax.models.decoder import Decoder

LLAMA: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def tiny_config(**changes: Any) -> ModelConfig:
    """The `ModelConfig` of `LLAMA`; changes to fields of the attention go there, sizes and biases of the MLP to it."""
    names = AttentionConfig.__dataclass_fields__
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    attention = AttentionConfig(**heads | {name: value for name, value in changes.items() if name in names})
    mlp = MlpConfig(changes.pop("intermediate_size", 48), bias=changes.pop("mlp_bias", False))
    layer = LayerConfig(32, NormConfig(1e-5), attention, mlp)
    model: dict[str, Any] = {
        "family": "llama",
        "vocab_size": 64,
        "layers": (layer,) * changes.pop("num_layers", 2),
        "max_position": 256,
        "tie_embeddings": False,
        "eos_token_ids": (2,),
        "bos_token_id": 1,
        "pad_token_id": 0,
    }
    model |= {name: value for name, value in changes.items() if name not in names}
    return ModelConfig(**model)


def random_llama(seed: int = 0, **changes: Any) -> Any:
    """A transformers model with `LLAMA`'s config and these changes."""
    return random_model("llama", seed, **(LLAMA | changes))


def random_model(model_type: str, seed: int = 0, **fields: Any) -> Any:
    """A transformers model of any family with this config (fields that are None are left out)."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    given = {name: value for name, value in fields.items() if value is not None or name == "sliding_window"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **given), attn_implementation="eager")
    model = model.eval()
    zero_centred = model_type.startswith(("gemma", "qwen3_5"))
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "norm" in name:
                middle = 0.0 if zero_centred and "linear_attn" not in name else 1.0
                value.copy_(middle + 0.2 * torch.randn_like(value))
            elif name.endswith("bias"):
                value.copy_(0.3 * torch.randn_like(value))
            else:
                value.copy_(torch.randn_like(value) * value.shape[-1] ** -0.5)
    return model


def save_llama(folder: Path, seed: int = 0, *, max_shard_size: str = "1GB", **changes: Any) -> Any:
    """Save a random model as transformers does; returns the model."""
    model = random_llama(seed, **changes)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def edit_json(path: Path, **changes: Any) -> None:
    """Set fields of a JSON file, or remove those given as `...`."""
    fields = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in fields.items() if value is not ...}))


def run(decoder: Decoder, method: Callable[[Decoder, jax.Array], Any], ids: np.ndarray) -> Any:
    """`method(decoder, ids)`, compiled; the weights are arguments, since as constants they make XLA slow."""
    graphdef, state = nnx.split(decoder)
    compiled = jax.jit(lambda state, ids: method(nnx.merge(graphdef, state), ids))
    return jax.tree.map(np.asarray, compiled(state, jnp.asarray(ids, jnp.int32)))


def decoder_logits(decoder: Decoder, ids: np.ndarray) -> np.ndarray:
    """Our logits, compiled."""
    return run(decoder, lambda model, ids: model(ids), ids)


def logits_of(model: Any, ids: np.ndarray) -> np.ndarray:
    """A transformers model's logits in float32."""
    import torch

    with torch.no_grad():
        return model(torch.from_numpy(ids)).logits.float().numpy()


def transformers_of_gguf(path: Path) -> Any:
    """A Llama model that transformers' own code made of a GGUF file, in float32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    model = LlamaForCausalLM(LlamaConfig(**load_gguf_checkpoint(str(path))["config"]))
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    left_out = model.load_state_dict({name: value.to(torch.float32) for name, value in tensors.items()}, strict=False)
    tied = ["lm_head.weight"] if model.config.tie_word_embeddings else []
    assert left_out.missing_keys in ([], tied)
    assert not left_out.unexpected_keys
    return model.eval()


def random_ids(length: int, batch: int = 1, seed: int = 0, vocab_size: int = 64) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab_size, (batch, length))


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """llama.cpp's name of a transformers tensor."""
    module, leaf = name.rsplit(".", 1)
    if not module.startswith("model.layers."):
        return f"{GGUF_NAMES[module]}.{leaf}"
    _, _, index, rest = module.split(".", 3)
    return f"blk.{index}.{GGUF_NAMES[rest]}.{leaf}"


def permuted_for_ggml(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of query or key as llama.cpp's converter orders them: its `permute` for the Llama architecture."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    model: Any,
    kind: str = "F32",
    *,
    fields: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
) -> None:
    """A transformers model as llama.cpp's converter writes it: matrices in `kind`, vectors in F32.

    `fields` are further metadata (strings, whole numbers, floats, lists), `extra` further F32 tensors.
    """
    config = model.config
    architecture = config.model_type
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    for name, value in (fields or {}).items():
        kinds = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
        kinds[type(value)](name, value)
    number = gguf.GGMLQuantizationType[kind]
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        value = tensor.numpy()
        for module, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if module in name and architecture == "llama":
                value = permuted_for_ggml(value, heads)
        if value.ndim == 1:
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(value, np.float32))
        else:
            writer.add_tensor(gguf_name(name), gguf.quantize(value, number), raw_dtype=number)
    for name, value in (extra or {}).items():
        writer.add_tensor(name, np.ascontiguousarray(value, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
