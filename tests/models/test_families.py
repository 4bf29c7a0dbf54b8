"""Tiny random models of every family: logits equal to transformers' at 1e-4, configs read, or refused with reasons."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spd_jax.config.model import ModelConfig, RopeConfig
from spd_jax.decode.autoregressive import AutoregressiveDecoder
from spd_jax.decode.options import Options
from spd_jax.decode.sampling import Sampling
from spd_jax.models.registry import family_of
from spd_jax.weights.load import load_decoder, open_target
from tests.tiny import LLAMA, decoder_logits, edit_json, logits_of, random_ids, random_model, write_gguf

SIZES = {name: value for name, value in LLAMA.items() if name != "tie_word_embeddings"}
FULL, SLIDING = "full_attention", "sliding_attention"
FOUR = {"num_hidden_layers": 4}
MOE = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 12}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12}

# name -> model_type, changes to `SIZES`
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {"head_dim": None}),
    "qwen2, tied": ("qwen2", {"head_dim": None, "tie_word_embeddings": True}),
    "qwen2, window in upper layers": (
        "qwen2",
        FOUR | {"head_dim": None, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3, wide heads (D06)": ("qwen3", {"head_dim": 16}),
    "qwen3, bias and yarn": (
        "qwen3",
        {
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "qwen3_5": ("qwen3_5_text", FOUR | DELTA | {"head_dim": 16}),
    "qwen3_5, other kinds": (
        "qwen3_5_text",
        DELTA
        | {"head_dim": 16, "layer_types": [FULL, "linear_attention"], "linear_conv_kernel_dim": 3}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.5}},
    ),
    "qwen3_moe": ("qwen3_moe", MOE | {"norm_topk_prob": True}),
    "qwen3_moe, some layers dense": (
        "qwen3_moe",
        FOUR | MOE | {"mlp_only_layers": [3], "decoder_sparse_step": 2, "norm_topk_prob": False},
    ),
    "qwen3_5_moe": (
        "qwen3_5_moe_text",
        FOUR | DELTA | MOE | {"head_dim": 16, "shared_expert_intermediate_size": 20, "intermediate_size": None},
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral, window": ("mistral", {"sliding_window": 9, "head_dim": 16}),
    "gemma2": ("gemma2", FOUR | {"sliding_window": 9, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 2.0}),
    "gemma2, untied, other kinds": (
        "gemma2",
        FOUR
        | {"sliding_window": 9, "tie_word_embeddings": False, "final_logit_softcapping": 3.0}
        | {"layer_types": [FULL, SLIDING, SLIDING, FULL], "attention_bias": True},
    ),
    "gemma3": ("gemma3_text", FOUR | {"sliding_window": 5, "sliding_window_pattern": 3}),
    "gemma3, scaled far rope": (
        "gemma3_text",
        FOUR
        | {"sliding_window": 5, "layer_types": [SLIDING, FULL, SLIDING, FULL]}
        | {
            "rope_parameters": {
                FULL: {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                SLIDING: {"rope_type": "default", "rope_theta": 1e4},
            }
        },
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path):
    """100 tokens, well beyond every window, a delta net's chunk and the length that rope scalings start from."""
    model_type, changes = VARIANTS[name]
    model = random_model(model_type, **(SIZES | changes))
    model.save_pretrained(tmp_path)
    ids = random_ids(100, batch=2)
    wanted = logits_of(model, ids)
    target = open_target(tmp_path)
    logits = decoder_logits(load_decoder(target), ids)
    assert target.config.family == model_type.removesuffix("_text")
    assert wanted.std() > 0.5  # logits that say something
    np.testing.assert_allclose(logits, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "name", ["qwen3_5", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3_5_moe", "gemma3"))]
)
def test_64_steps_of_decoding_equal_those_of_transformers(name: str, tmp_path: Path):
    """Two prompts of different lengths, drawn at temperature 1: every token has the log-probability it has there."""
    model_type, changes = VARIANTS[name]
    model = random_model(model_type, **(SIZES | changes))
    model.save_pretrained(tmp_path)
    decoder = AutoregressiveDecoder(load_decoder(open_target(tmp_path)), steps_per_dispatch=16, prefill_chunk=8)
    prompts = [random_ids(length, seed=length)[0].tolist() for length in (3, 21)]
    sampling = Sampling(temperature=1.0)
    options = Options(max_new_tokens=64, sampling=sampling, ignore_eos=True, eos_ids=(63,), log_probs=True)
    for prompt, result in zip(prompts, decoder.generate(prompts, options).results, strict=True):
        logits = logits_of(model, np.asarray([prompt + result.ids]))[0, len(prompt) - 1 : -1].astype(np.float64)
        logits[:, 63] = -np.inf
        assert len(set(result.ids)) > 15
        log_probs = logits[np.arange(64), result.ids] - np.log(np.exp(logits).sum(axis=-1))
        np.testing.assert_allclose([token.log_prob for token in result.tokens], log_probs, atol=1e-4)


@pytest.mark.parametrize("name", ["qwen2", "qwen2, tied", "qwen3, wide heads (D06)"])
def test_a_gguf_file_is_the_same_model(name: str, tmp_path: Path):
    model_type, changes = VARIANTS[name]
    model = random_model(model_type, **(SIZES | changes))
    write_gguf(tmp_path / "model.gguf", model)
    ids = random_ids(40, batch=2)
    target = open_target(tmp_path / "model.gguf")
    assert target.config.family == model_type
    np.testing.assert_allclose(decoder_logits(load_decoder(target), ids), logits_of(model, ids), atol=1e-4, rtol=1e-4)


def read(model_type: str, **changes: Any) -> ModelConfig:
    fields = {name: value for name, value in (SIZES | {"model_type": model_type} | changes).items() if value is not ...}
    return family_of(model_type, "config.json").config_of(fields, "config.json")


def windows(config: ModelConfig) -> list[int | None]:
    return [layer.attention.window for layer in config.layers]


def test_windows_by_layer():
    """Each family's own default, and the list that a config may give instead."""
    many = {"num_hidden_layers": 7, "sliding_window": 8}
    assert windows(read("mistral", **many)) == [8] * 7
    assert windows(read("mistral", num_hidden_layers=2, sliding_window=...)) == [4096] * 2
    assert windows(read("mistral", num_hidden_layers=2, sliding_window=None)) == [None] * 2
    assert windows(read("qwen2", **many, max_window_layers=5)) == [None] * 7  # use_sliding_window is false
    assert windows(read("qwen3", **many, use_sliding_window=True, max_window_layers=5)) == [None] * 5 + [8] * 2
    assert windows(read("gemma2", **many)) == [8, None] * 3 + [8]
    assert windows(read("gemma3", **many)) == [8] * 5 + [None, 8]
    given = {"num_hidden_layers": 3, "layer_types": [FULL, SLIDING, FULL]}
    assert windows(read("gemma2", **given, sliding_window=8)) == [None, 8, None]


def test_the_published_configs_of_gemma3_leave_out_what_equals_the_defaults():
    """A multimodal config: the text model's fields lie in `text_config`, ends of a text beside it."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    text |= {"model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    fields = {
        "model_type": "gemma3",
        "text_config": text,
        "vision_config": {"hidden_size": 7},
        "eos_token_id": [1, 106],
    }
    config = family_of("gemma3", "").config_of(fields, "config.json")
    far, near = config.layers[5].attention, config.layers[0].attention
    assert (config.num_layers, config.hidden_size, config.vocab_size) == (34, 2560, 262208)
    assert (far.num_heads, far.num_kv_heads, far.head_dim, far.window, near.window) == (8, 4, 256, None, 1024)
    assert far.rope == RopeConfig(theta=1e6, kind="linear", factor=8.0)
    assert near.rope == RopeConfig(theta=1e4)
    assert config.context == 131072  # as published, and not eight times as much
    assert (config.eos_token_ids, config.tie_embeddings, config.embedding_scale) == ((1, 106), True, 2560**0.5)


REFUSALS: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3_5", {"layer_types": [FULL, SLIDING]}, "layer_types names 'sliding_attention', supported: linear_attention"),
    ("qwen3_5", {"linear_num_value_heads": 5}, "linear_num_value_heads 5 is not a multiple of linear_num_key_heads 16"),
    ("qwen3_5", {"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5, expected a share"),
    ("qwen3_moe", {"num_experts": 4}, "num_experts_per_tok is 8, expected 1 to num_experts 4"),
    ("qwen3_moe", {"mlp_only_layers": [2]}, "mlp_only_layers is [2], expected a list of layers from 0 to 1"),
    ("gemma2", {"final_logit_softcapping": -1}, "final_logit_softcapping is -1, expected a number above 0, or null"),
    ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
    ("gemma3", {"layer_types": [FULL]}, "layer_types has 1 entries, expected one for each of 2 layers"),
    ("qwen3", {"layer_types": ["linear_attention", FULL]}, "layer_types names 'linear_attention', supported: full_"),
    ("qwen2", {"hidden_act": "relu2"}, "hidden_act is 'relu2', supported"),
    ("mistral", {"sliding_window": 0}, "sliding_window is 0, expected a positive integer"),
    ("mistral", {"quantization_config": {"bits": 4}}, "quantization_config is present"),
    ("gemma3", {"rope_parameters": {FULL: {"rope_type": "ntk"}}}, "rope_type 'ntk', supported"),
    ("qwen3", {"rope_scaling": {"rope_type": "longrope"}}, "rope_type 'longrope', supported"),
]


@pytest.mark.parametrize(("family", "changes", "said"), REFUSALS)
def test_what_is_not_implemented_is_refused_with_the_value_found(family: str, changes: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=r"config\.json: ") as error:
        read(family, **changes)
    assert said in str(error.value)


def test_a_text_model_inside_a_multimodal_checkpoint_is_read(tmp_path: Path):
    """Keys under `model.language_model.`, another tower's tensors beside them (D07)."""
    import safetensors.numpy

    model = random_model("gemma3_text", **(SIZES | {"sliding_window": 5}))
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    nested = {name.replace("model.", "model.language_model.", 1): value for name, value in tensors.items()}
    safetensors.numpy.save_file(nested | {"model.vision_tower.embed.weight": np.zeros((2, 2), np.float32)}, file)
    text = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    ids = random_ids(12)
    with pytest.warns(UserWarning, match=r"only the text model is read; 1 tensor.*model\.vision_tower\.embed"):
        target = open_target(tmp_path)
    np.testing.assert_allclose(decoder_logits(load_decoder(target), ids), logits_of(model, ids), atol=1e-4)


def test_an_untied_head_that_the_config_ties_is_used_and_told(tmp_path: Path):
    """D02, in a family whose default is tied."""
    model = random_model("gemma2", **(SIZES | {"tie_word_embeddings": False}))
    model.save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", tie_word_embeddings=...)
    with pytest.warns(UserWarning, match="the config ties the head to the embedding, but the file holds another"):
        weights = open_target(tmp_path)
    np.testing.assert_array_equal(weights.tensor("head"), model.lm_head.weight.detach().numpy())
