"""Rotary embeddings against transformers' inverse frequencies and a half-split rotation written out by hand."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from spd_jax.config.model import AttentionConfig, RopeConfig
from spd_jax.models.llama import read_config
from spd_jax.nn.rope import apply_rope, inverse_frequencies, rope_table
from tests.tiny import LLAMA

KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 3.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head_dim", [8, 64])
def test_inverse_frequencies_equal_those_of_transformers(kind: str, head_dim: int):
    """E01, E03, E04: the scaling in use is the one that the config names."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    fields = LLAMA | {
        "head_dim": head_dim,
        "rope_parameters": {"rope_theta": 5e4, "rope_type": kind, **KINDS[kind]},
    }
    theirs = LlamaRotaryEmbedding(LlamaConfig(**fields))
    inv_freq, factor = inverse_frequencies(read_config(fields, "config.json").layers[0].attention.rope, head_dim)
    np.testing.assert_allclose(inv_freq, theirs.inv_freq.numpy(), rtol=1e-5)
    assert factor == pytest.approx(theirs.attention_scaling)


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
def test_angles_beyond_the_configs_positions_equal_those_of_transformers(kind: str, spelling: str):
    """64 positions by the config, 256 by a factor of 4: cosines and sines at all of them."""
    import torch
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    changes = {"factor": 4.0} | ({"original_max_position_embeddings": 64} if kind == "yarn" else {})
    rope = {**KINDS[kind], "rope_type": kind, **changes}
    fields = LLAMA | {"max_position_embeddings": 64, spelling: rope, "rope_theta": 1e4}
    config = read_config(fields, "config.json")
    assert config.context == 256
    table = rope_table(config.layers[0].attention, jnp.arange(256, dtype=jnp.int32)[None])
    theirs = LlamaRotaryEmbedding(LlamaConfig(**fields))(torch.zeros(1), torch.arange(256)[None])
    for ours, wanted in zip((table.cos, table.sin), theirs, strict=True):
        np.testing.assert_allclose(ours[0], wanted[0, :, :4].numpy(), atol=2e-5)


def test_rotation_pairs_the_halves_not_the_neighbours():
    """E05: interleaved instead of half-split layout gives an acceptance length of one."""
    x, position, theta = np.arange(1.0, 9.0), 3, 10000.0
    wanted = np.empty(8)
    for i in range(4):
        angle = position * theta ** (-2 * i / 8)
        wanted[i] = x[i] * np.cos(angle) - x[i + 4] * np.sin(angle)
        wanted[i + 4] = x[i + 4] * np.cos(angle) + x[i] * np.sin(angle)
    table = rope_table(AttentionConfig(1, 1, 8, RopeConfig(theta=theta)), jnp.full((1, 1), position, jnp.int32))
    rotated = apply_rope(jnp.asarray(x, jnp.float32)[None, None], table.cos, table.sin)
    np.testing.assert_allclose(rotated[0, 0], wanted, atol=1e-5)


def test_two_tables_with_different_settings_are_independent():
    """E06: a target and its draft shared a cosine cache though their theta differed."""
    positions = jnp.arange(5, dtype=jnp.int32)[None]
    target = rope_table(AttentionConfig(1, 1, 8, RopeConfig(theta=1e6)), positions)
    head = rope_table(AttentionConfig(1, 1, 8, RopeConfig(theta=1e4)), positions)
    again = rope_table(AttentionConfig(1, 1, 8, RopeConfig(theta=1e6)), positions)
    assert not np.allclose(target.cos, head.cos)
    np.testing.assert_array_equal(target.cos, again.cos)


def test_a_negative_position_reads_as_zero():
    table = rope_table(AttentionConfig(1, 1, 8, RopeConfig()), jnp.asarray([[-1, 0]], jnp.int32))
    np.testing.assert_array_equal(table.cos[0, 0], table.cos[0, 1])
    np.testing.assert_array_equal(table.sin[0, 0], table.sin[0, 1])


def test_bfloat16_rows_are_rotated_in_float32():
    table = rope_table(AttentionConfig(1, 1, 8, RopeConfig()), jnp.full((1, 1), 200, jnp.int32))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 1, 8)), jnp.bfloat16)
    rotated = apply_rope(x, table.cos, table.sin)
    exact = apply_rope(x.astype(jnp.float32), table.cos, table.sin)
    assert rotated.dtype == jnp.bfloat16
    np.testing.assert_array_equal(rotated, exact.astype(jnp.bfloat16))


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_a_scaling_without_its_original_length_is_an_error(kind: Any):
    with pytest.raises(ValueError, match="needs original_max_position_embeddings"):
        inverse_frequencies(RopeConfig(kind=kind, factor=2.0), 8)
