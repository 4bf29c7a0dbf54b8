"""Hugging Face folders: what loads, and what is refused with the file and the tensors named."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from spd_jax.weights.errors import WeightsError
from spd_jax.weights.load import load_decoder, open_target
from spd_jax.weights.mapping import TargetWeights
from tests.tiny import decoder_logits, edit_json, logits_of, random_ids, save_llama

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A saved model in one file."""
    save_llama(tmp_path)
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """The same model in several files with an index."""
    save_llama(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) >= 2
    return tmp_path


def rewrite(folder: Path, change: Any) -> None:
    """Save the tensors of the single file again after `change(tensors)`."""
    tensors = load_file(folder / SINGLE)
    changed = change(tensors)
    save_file(tensors if changed is None else changed, folder / SINGLE)


def numbers(weights: TargetWeights) -> dict[str, np.ndarray]:
    return {path: weights.tensor(path) for path in weights.paths()}


def assert_same_numbers(left: TargetWeights, right: TargetWeights) -> None:
    ours, theirs = numbers(left), numbers(right)
    assert ours.keys() == theirs.keys()
    for path, value in ours.items():
        np.testing.assert_array_equal(value, theirs[path], err_msg=path)


def refusal(folder: Path) -> str:
    with pytest.raises(WeightsError) as error:
        open_target(folder)
    return str(error.value)


def test_shards_with_an_index_equal_a_single_file(folder: Path, tmp_path_factory: pytest.TempPathFactory):
    """D04: loaders that insist on an index cannot read single-file checkpoints."""
    shards = tmp_path_factory.mktemp("shards")
    save_llama(shards, max_shard_size="20KB")
    assert not (folder / INDEX).exists()
    assert not (shards / SINGLE).exists()
    assert_same_numbers(open_target(folder), open_target(shards))


def test_an_index_that_names_a_missing_shard_is_an_error(sharded: Path):
    """D05: the index names a shard that is not there."""
    gone = sorted(sharded.glob("*.safetensors"))[1]
    gone.unlink()
    assert gone.name in refusal(sharded)


def test_stray_shards_are_ignored_because_the_index_wins(sharded: Path):
    """D05: stray extra shards duplicate keys."""
    before = numbers(open_target(sharded))
    stray = {key: np.zeros_like(value) for key, value in load_file(sorted(sharded.glob("*.safetensors"))[0]).items()}
    save_file(stray, sharded / "model-00009-of-00009.safetensors")
    save_file(stray, sharded / SINGLE)
    after = numbers(open_target(sharded))
    assert all(np.array_equal(before[path], after[path]) for path in before)


def test_a_stale_index_is_an_error(sharded: Path):
    """D05: the index names a tensor that its shard does not hold."""
    index = json.loads((sharded / INDEX).read_text())
    shards = sorted(set(index["weight_map"].values()))
    key = next(key for key, shard in index["weight_map"].items() if shard == shards[0])
    index["weight_map"][key] = shards[1]
    (sharded / INDEX).write_text(json.dumps(index))
    text = refusal(sharded)
    assert "stale index" in text
    assert f"{key} in {shards[1]}" in text


def test_a_broken_index_names_its_file(sharded: Path):
    (sharded / INDEX).write_text('{"weights": {}}')
    assert INDEX in refusal(sharded)


@pytest.mark.parametrize("keep", [0, 5, 200, -1])
def test_a_truncated_file_is_named(folder: Path, keep: int):
    data = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(data[:keep])
    text = refusal(folder)
    assert SINGLE in text
    assert "truncated" in text


def test_bfloat16_comes_through_bit_for_bit(folder: Path):
    """D08: bfloat16 not understood, or read as raw bytes."""
    values = np.array([1.0, -2.5, 3.140625], ml_dtypes.bfloat16)

    def change(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        halves = {key: value.astype(ml_dtypes.bfloat16) for key, value in tensors.items()}
        halves["model.norm.weight"][:3] = values
        return halves

    rewrite(folder, change)
    stored = open_target(folder).tensor("final_norm.weight")
    assert stored.dtype == ml_dtypes.bfloat16
    loaded = load_decoder(open_target(folder), jnp.bfloat16).final_norm.weight[...]
    assert loaded.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(loaded)[:3].view(np.uint16), values.view(np.uint16))


def test_a_bfloat16_checkpoint_as_transformers_saves_it(tmp_path: Path):
    """D08, with every tensor of a real save: the same numbers as transformers' in float32."""
    import torch
    from transformers import LlamaForCausalLM

    save_llama(tmp_path).to(torch.bfloat16).save_pretrained(tmp_path)
    model = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = random_ids(20)
    ours = decoder_logits(load_decoder(open_target(tmp_path)), ids)
    np.testing.assert_allclose(ours, logits_of(model, ids), atol=1e-4)


def test_a_tied_checkpoint_has_no_head_of_its_own(tmp_path: Path):
    """D01: tied embeddings, lm_head missing."""
    save_llama(tmp_path, tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(tmp_path / SINGLE)
    weights = open_target(tmp_path)
    assert "head" not in weights.paths()
    decoder = load_decoder(weights)
    assert decoder.head is None
    hidden = jnp.ones((1, 32), jnp.float32)
    wanted = decoder.final_norm(hidden) @ decoder.embedding[...].T
    np.testing.assert_allclose(decoder.logits(hidden), wanted, atol=1e-5)


def test_a_tied_flag_with_another_head_takes_the_head_and_warns(folder: Path):
    """D02: tied flag but an explicit, different lm_head present: the file is right, as in transformers 5."""
    from transformers import LlamaForCausalLM

    edit_json(folder / "config.json", tie_word_embeddings=True)
    with pytest.warns(UserWarning, match=r"the file holds another lm_head\.weight, which is used"):
        weights = open_target(folder)
    theirs = LlamaForCausalLM.from_pretrained(folder).lm_head.weight.detach().numpy()
    assert not np.array_equal(theirs, weights.tensor("embedding"))
    np.testing.assert_array_equal(weights.tensor("head"), theirs)


def test_a_tied_flag_with_the_same_head_is_silent(folder: Path):
    """D02: the head is stored twice, and equal."""
    edit_json(folder / "config.json", tie_word_embeddings=True)
    rewrite(folder, lambda tensors: tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]})
    assert "head" not in open_target(folder).paths()  # a warning would fail the test


def test_an_untied_checkpoint_without_a_head_is_an_error(folder: Path):
    rewrite(folder, lambda tensors: {key: value for key, value in tensors.items() if key != "lm_head.weight"})
    assert "missing lm_head.weight [64, 32] (the config unties the head" in refusal(folder)


def test_heads_may_be_wider_than_the_hidden_size_divides_into(tmp_path: Path):
    """D06: head_dim 16 with 4 heads of a hidden size of 32."""
    save_llama(tmp_path, head_dim=16)
    weights = open_target(tmp_path)
    assert weights.tensor("layers.0.attention.qkv.weight").shape == ((4 + 2 * 2) * 16, 32)
    assert weights.tensor("layers.0.attention.output.weight").shape == (32, 64)


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", "backbone.", ""])
def test_nested_prefixes_load_the_same_numbers(folder: Path, tmp_path_factory: pytest.TempPathFactory, prefix: str):
    """D07: the same weights under another prefix, with the tensors of another tower beside them."""
    nested = tmp_path_factory.mktemp("nested")
    (nested / "config.json").write_text((folder / "config.json").read_text())
    renamed = {}
    for key, value in load_file(folder / SINGLE).items():
        name = prefix + key.removeprefix("model.") if key.startswith("model.") else key
        if prefix == "backbone.":
            name = name.replace("embed_tokens.weight", "embeddings.weight")
        if prefix == "language_model.model." and key == "lm_head.weight":
            name = "language_model.lm_head.weight"
        renamed[name] = value
    if prefix:
        renamed["visual.patch_embed.weight"] = np.zeros((2, 2), np.float32)
    save_file(renamed, nested / SINGLE)
    said = pytest.warns(UserWarning, match="1 tensor.* outside of it are left out .visual") if prefix else nullcontext()
    with said:
        weights = open_target(nested)
    assert_same_numbers(open_target(folder), weights)


def test_an_unknown_prefix_shows_the_first_keys_found(folder: Path):
    """D07: unknown prefix."""
    rewrite(folder, lambda tensors: {f"net.{key}": value for key, value in tensors.items()})
    text = refusal(folder)
    first = sorted(load_file(folder / SINGLE))[:5]
    assert ", ".join(first) in text
    assert sorted(load_file(folder / SINGLE))[5] not in text


def test_every_problem_of_a_checkpoint_is_reported_at_once(folder: Path):
    def change(tensors: dict[str, np.ndarray]) -> None:
        del tensors["model.layers.0.mlp.up_proj.weight"]
        tensors["model.layers.1.self_attn.k_proj.weight"] = np.zeros((8, 32), np.float32)
        tensors["model.layers.0.input_layernorm.weight"] = np.zeros(32, np.int32)
        tensors["model.layers.7.input_layernorm.weight"] = np.zeros(32, np.float32)

    rewrite(folder, change)
    text = refusal(folder)
    assert "4 problem(s)" in text
    assert "missing model.layers.0.mlp.up_proj.weight [48, 32]" in text
    assert "model.layers.1.self_attn.k_proj.weight has shape [8, 32], expected [16, 32]" in text
    assert (
        "model.layers.0.input_layernorm.weight has dtype I32, expected a floating point type of 16 bits or more" in text
    )
    assert "unexpected model.layers.7.input_layernorm.weight [32]" in text


def test_biases_that_the_config_does_not_know_are_unexpected(tmp_path: Path):
    save_llama(tmp_path, attention_bias=True)
    edit_json(tmp_path / "config.json", attention_bias=False)
    assert "unexpected model.layers.0.self_attn.q_proj.bias [32]" in refusal(tmp_path)


def test_old_rotary_buffers_are_ignored(folder: Path):
    buffers = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32) for i in range(2)}
    rewrite(folder, lambda tensors: tensors | buffers)
    open_target(folder)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_nan_and_infinity_are_refused_naming_the_tensor(folder: Path, bad: float, dtype: Any):
    key = "model.layers.1.self_attn.v_proj.weight"

    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors[key][3, 4] = bad
        tensors[key] = tensors[key].astype(dtype)

    rewrite(folder, change)
    weights = open_target(folder)  # shapes are checked without reading data
    with pytest.raises(WeightsError, match=r"v_proj.weight holds 1 NaN or infinite value\(s\), the first at \[3, 4\]"):
        weights.tensor("layers.1.attention.qkv.weight")


def test_query_key_and_value_rows_are_grouped_by_key_value_head(folder: Path):
    tensors = load_file(folder / SINGLE)
    q, k, v = (tensors[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv")
    groups = open_target(folder).tensor("layers.1.attention.qkv.weight").reshape(2, 4, 8, 32)  # K, G + 2, H, D
    for head in range(2):
        np.testing.assert_array_equal(groups[head, :2].reshape(16, 32), q[head * 16 : (head + 1) * 16])
        np.testing.assert_array_equal(groups[head, 2], k[head * 8 : (head + 1) * 8])
        np.testing.assert_array_equal(groups[head, 3], v[head * 8 : (head + 1) * 8])


def test_parts_of_different_dtypes_meet_in_one_that_holds_both(folder: Path):
    def change(tensors: dict[str, np.ndarray]) -> None:
        for name, dtype in (("gate", ml_dtypes.bfloat16), ("up", np.float16)):
            key = f"model.layers.0.mlp.{name}_proj.weight"
            tensors[key] = tensors[key].astype(dtype)

    rewrite(folder, change)
    tensors = load_file(folder / SINGLE)
    joined = open_target(folder).tensor("layers.0.mlp.gate_up.weight")
    assert joined.dtype == np.float32
    for rows, name in ((joined[:48], "gate"), (joined[48:], "up")):
        np.testing.assert_array_equal(rows, tensors[f"model.layers.0.mlp.{name}_proj.weight"].astype(np.float32))


def test_weights_in_another_format_are_named(folder: Path):
    (folder / SINGLE).rename(folder / "pytorch_model.bin")
    text = refusal(folder)
    assert SINGLE in text
    assert "pytorch_model.bin" in text
