"""Reading Hugging Face configs of the Llama family: what is understood, and what is refused with a reason."""

import json
from typing import Any

import pytest

from spd_jax.config.model import RopeConfig
from spd_jax.models.llama import LLAMA as FAMILY
from spd_jax.models.llama import read_config
from spd_jax.models.registry import FAMILIES, family_of, family_of_gguf
from tests.tiny import LLAMA, tiny_config

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def read(**changes: Any) -> Any:
    fields = {name: value for name, value in (LLAMA | changes).items() if value is not ...}
    return read_config(fields, "config.json")


def rope_of(config: Any) -> RopeConfig:
    return config.layers[0].attention.rope


def refusal(**changes: Any) -> str:
    with pytest.raises(ValueError, match=r"config\.json") as error:
        read(**changes)
    return str(error.value)


def test_every_field_is_read():
    assert read() == tiny_config()


def test_biases_tied_head_and_wide_heads_are_read():
    config = read(attention_bias=True, mlp_bias=True, tie_word_embeddings=True, head_dim=16)
    wanted = tiny_config(qkv_bias=True, output_bias=True, mlp_bias=True, tie_embeddings=True, head_dim=16)
    assert config == wanted


def test_absent_fields_take_the_defaults_of_transformers():
    absent = ("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings")
    config = read(**dict.fromkeys(absent, ...), bos_token_id=..., eos_token_id=None, pad_token_id=...)
    assert (config.layers[0].attention.num_kv_heads, config.layers[0].attention.head_dim, config.max_position) == (
        4,
        8,
        2048,
    )
    assert (config.norm.eps, config.tie_embeddings, config.eos_token_ids) == (1e-6, False, ())
    assert config.bos_token_id is None


@pytest.mark.parametrize(("given", "ids"), [(2, (2,)), ([2, 7, 2], (2, 7)), (None, ())])
def test_eos_may_be_one_id_or_several(given: Any, ids: tuple[int, ...]):
    assert read(eos_token_id=given).eos_token_ids == ids


def test_llama3_scaling_reads_the_same_in_the_old_and_the_new_form():
    """E01: rope scaling was dropped when a config was rebuilt."""
    wanted = RopeConfig(
        theta=5e5, kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=64
    )
    new = read(rope_parameters=LLAMA3 | {"rope_theta": 5e5})
    old = read(rope_scaling=LLAMA3, rope_theta=5e5)
    assert rope_of(new) == rope_of(old) == wanted


@pytest.mark.parametrize(
    ("positions", "rope", "context"),
    [
        (64, None, 64),
        (64, {"type": "linear", "factor": 4}, 256),
        (64, {"rope_type": "yarn", "factor": 4.0}, 256),
        (64, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        (40960, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),  # Qwen3
        (131072, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        (256, {"rope_type": "yarn", "original_max_position_embeddings": 64}, 256),
        (131072, LLAMA3 | {"factor": 8.0, "original_max_position_embeddings": 8192}, 131072),  # Llama 3.1
        (131072, LLAMA3 | {"factor": 32.0, "original_max_position_embeddings": 8192}, 131072),  # Llama 3.2
        (64, LLAMA3 | {"factor": 4.0}, 256),
    ],
)
def test_the_usable_context_has_what_the_scaling_adds_once(positions: int, rope: Any, context: int):
    assert read(max_position_embeddings=positions, rope_scaling=rope).context == context
    parameters = None if rope is None else {"rope_theta": 1e4} | rope
    assert read(max_position_embeddings=positions, rope_parameters=parameters).context == context


def test_linear_scaling_in_its_oldest_form():
    assert rope_of(read(rope_scaling={"type": "linear", "factor": 2})) == RopeConfig(kind="linear", factor=2.0)


def test_yarn_reads_all_its_parameters():
    """E03: yarn was ignored silently."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16, "beta_slow": 2.0, "truncate": False, "mscale": 1.5}
    rope = rope_of(read(rope_scaling=yarn | {"original_max_position_embeddings": 32}))
    assert (rope.kind, rope.factor, rope.original_max_position) == ("yarn", 4.0, 32)
    assert (rope.beta_fast, rope.beta_slow, rope.truncate, rope.mscale) == (16.0, 2.0, False, 1.5)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su", 3])
def test_an_unknown_rope_type_is_never_read_as_the_default(kind: Any):
    """E03: an unimplemented rope_type must not become plain rope."""
    text = refusal(rope_scaling={"rope_type": kind, "factor": 4.0})
    assert repr(kind) in text
    assert "supported: default, linear, llama3, yarn" in text


def test_an_unknown_rope_parameter_is_refused():
    assert "'short_factor'" in refusal(rope_parameters={"rope_type": "yarn", "factor": 2.0, "short_factor": [1.0]})


def test_a_rope_type_without_what_it_needs_is_refused():
    text = refusal(rope_scaling={"rope_type": "llama3", "factor": 8.0})
    assert "low_freq_factor is missing" in text
    assert "high_freq_factor is missing" in text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_act": "relu2"}, "hidden_act is 'relu2', supported: gelu, gelu_pytorch_tanh, silu"),
        ({"sliding_window": 4096}, "sliding_window is 4096"),
        ({"pretraining_tp": 2}, "pretraining_tp is 2, supported: 1 or absent"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_size": "32"}, "hidden_size is '32', expected a positive integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, expected a positive integer"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes', expected true or false"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"head_dim": None, "num_attention_heads": 5, "num_key_value_heads": 5}, "not a multiple"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ],
)
def test_what_is_not_implemented_is_refused_with_the_value_found(changes: dict[str, Any], said: str):
    assert said in refusal(**changes)


def test_all_problems_come_at_once():
    text = refusal(hidden_size=..., vocab_size=..., intermediate_size=..., num_hidden_layers=..., hidden_act="relu2")
    missing = ("hidden_size", "vocab_size", "intermediate_size", "num_hidden_layers")
    assert all(f"{name} is missing" in text for name in missing)
    assert "relu2" in text


def test_an_unknown_family_names_the_supported_ones():
    supported = ", ".join(sorted(name for family in FAMILIES for name in (family.name, *family.also)))
    with pytest.raises(ValueError, match=f"model_type 'mamba' is not supported; supported: {supported}"):
        family_of("mamba", "config.json")
    with pytest.raises(ValueError, match="GGUF architecture 'mamba' is not supported; supported:"):
        family_of_gguf("mamba", "model.gguf")
    with pytest.raises(ValueError, match="model_type None"):
        family_of(None, "config.json")


def test_a_family_is_found_by_either_name():
    assert family_of("llama", "") is family_of_gguf("llama", "")[0] is FAMILY
    assert family_of("gemma3", "") is family_of("gemma3_text", "")


def test_the_config_that_transformers_writes_is_read():
    from transformers import LlamaConfig

    assert read_config(json.loads(LlamaConfig(**LLAMA).to_json_string()), "config.json") == tiny_config()
