"""GGUF files: every number format, the rotary order undone, and what is refused.

Files are written here as llama.cpp's converter writes them; the demo's own file is in tests/models/test_smollm2.py.
"""

import math
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest

from spd_jax.config.model import RopeConfig
from spd_jax.models.gguf_metadata import llama3_of_divisors
from spd_jax.weights.errors import WeightsError
from spd_jax.weights.gguf import GgufFile
from spd_jax.weights.load import load_decoder, open_target
from tests.tiny import (
    decoder_logits,
    logits_of,
    permuted_for_ggml,
    random_ids,
    random_llama,
    save_llama,
    tiny_config,
    transformers_of_gguf,
    write_gguf,
)

KINDS = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]
BLOCK = {"intermediate_size": 64}  # quantised rows hold whole blocks of 32


def through(value: np.ndarray, kind: str) -> np.ndarray:
    """A matrix as it comes back from a number format."""
    number = gguf.GGMLQuantizationType[kind]
    return gguf.dequantize(gguf.quantize(value, number), number)


def refusal(path: Path) -> str:
    with pytest.raises(ValueError, match=path.name) as error:
        open_target(path)
    return str(error.value)


def logits(path: Path, ids: np.ndarray) -> np.ndarray:
    return decoder_logits(load_decoder(open_target(path)), ids)


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_comes_back_as_its_format_stores_it(kind: str, tmp_path: Path):
    import torch

    model = random_llama(**BLOCK)
    path = tmp_path / "model.gguf"
    write_gguf(path, model, kind)
    with torch.no_grad():
        for value in model.parameters():
            if value.ndim == 2:
                value.copy_(torch.from_numpy(through(value.numpy(), kind)))
    model.save_pretrained(tmp_path / "folder")
    wanted, found = open_target(tmp_path / "folder"), open_target(path)
    assert set(found.paths()) == set(wanted.paths())
    for name in wanted.paths():
        np.testing.assert_array_equal(found.tensor(name).astype(np.float32), wanted.tensor(name), err_msg=name)
    stored = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
    assert found.tensor("embedding").dtype == stored.get(kind, np.float32)
    assert found.config == tiny_config(intermediate_size=64, eos_token_ids=(), bos_token_id=None, pad_token_id=None)


@pytest.mark.parametrize("changes", [{}, {"attention_bias": True}, {"tie_word_embeddings": True}, {"head_dim": 16}])
def test_the_rotary_order_of_the_file_is_undone(changes: dict[str, Any], tmp_path: Path):
    """E05: rows of query and key come interleaved; weights and biases both."""
    model = random_llama(**changes)
    write_gguf(tmp_path / "model.gguf", model)
    ids = random_ids(24)
    np.testing.assert_allclose(logits(tmp_path / "model.gguf", ids), logits_of(model, ids), atol=1e-4)


def test_transformers_reads_the_same_file_the_same_way(tmp_path: Path):
    """Both undo the same permutation: the writer of these tests is not the only judge."""
    path, ids = tmp_path / "model.gguf", random_ids(24)
    write_gguf(path, random_llama(), "F16", fields={"llama.vocab_size": 64})
    np.testing.assert_allclose(logits(path, ids), logits_of(transformers_of_gguf(path), ids), atol=1e-4)


def test_the_permutation_is_llama_cpps():
    """Worked example: one head of 4 rows; halves (0 1 | 2 3) are stored as pairs 0 2 1 3."""
    rows = np.arange(4, dtype=np.float32)[:, None]
    np.testing.assert_array_equal(permuted_for_ggml(rows, 1)[:, 0], [0, 2, 1, 3])


def test_a_file_without_output_weights_is_tied(tmp_path: Path):
    """D01: the head is the embedding when the file has none."""
    write_gguf(tmp_path / "tied.gguf", random_llama(tie_word_embeddings=True))
    write_gguf(tmp_path / "untied.gguf", random_llama())
    assert open_target(tmp_path / "tied.gguf").config.tie_embeddings
    assert not open_target(tmp_path / "untied.gguf").config.tie_embeddings


def test_llama3_scaling_is_read_from_the_table_of_divisors(tmp_path: Path):
    """E04: GGUF keeps llama3's scaling only as divisors of the frequencies."""
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    model = random_llama(head_dim=32, rope_parameters={"rope_type": "llama3", "rope_theta": 10000.0, **scaling})
    unscaled = 10000.0 ** -(np.arange(0, 32, 2) / 32)
    divisors = unscaled / model.model.rotary_emb.inv_freq.numpy()
    write_gguf(tmp_path / "model.gguf", model, extra={"rope_freqs.weight": divisors})
    rope = open_target(tmp_path / "model.gguf").config.layers[0].attention.rope
    assert (rope.kind, rope.low_freq_factor) == ("llama3", 1.0)
    assert rope.factor == pytest.approx(8.0, rel=1e-5)
    assert rope.original_max_position == pytest.approx(64, abs=1)
    assert rope.high_freq_factor == pytest.approx(4.0, rel=1e-2)
    ids = random_ids(100)
    np.testing.assert_allclose(logits(tmp_path / "model.gguf", ids), logits_of(model, ids), atol=1e-4)


@pytest.mark.parametrize(("head_dim", "theta"), [(64, 500000.0), (128, 500000.0)])
def test_the_scaling_of_released_llama_3_models_is_recovered(head_dim: int, theta: float):
    from spd_jax.nn.rope import inverse_frequencies

    rope = RopeConfig(theta=theta, kind="llama3", factor=32.0, high_freq_factor=4.0, original_max_position=8192)
    unscaled, _ = inverse_frequencies(RopeConfig(theta=theta), head_dim)
    divisors = (unscaled / inverse_frequencies(rope, head_dim)[0]).astype(np.float32).astype(np.float64)
    found = llama3_of_divisors(divisors, theta=theta, head_dim=head_dim)
    assert found is not None
    assert found.original_max_position == pytest.approx(8192, rel=1e-3)
    np.testing.assert_allclose(
        inverse_frequencies(found, head_dim)[0], inverse_frequencies(rope, head_dim)[0], rtol=1e-4
    )


def test_divisors_of_another_scaling_are_refused(tmp_path: Path):
    write_gguf(tmp_path / "model.gguf", random_llama(), extra={"rope_freqs.weight": np.array([1.0, 3.0, 2.0, 5.0])})
    assert "rope_freqs.weight is not a llama3 scaling" in refusal(tmp_path / "model.gguf")


def test_linear_and_yarn_scalings_are_read_from_the_metadata(tmp_path: Path):
    """E03: yarn with its attention factor."""
    prefix = "llama.rope.scaling."
    write_gguf(tmp_path / "a.gguf", random_llama(), fields={prefix + "type": "linear", prefix + "factor": 4.0})
    linear = open_target(tmp_path / "a.gguf").config
    assert linear.layers[0].attention.rope == RopeConfig(kind="linear", factor=4.0)
    assert linear.context == 4 * linear.max_position
    yarn = {prefix + "type": "yarn", prefix + "factor": 4.0, prefix + "original_context_length": 32}
    model = random_llama(
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    )
    write_gguf(tmp_path / "b.gguf", model, fields=yarn)
    rope = open_target(tmp_path / "b.gguf").config.layers[0].attention.rope
    assert rope.attention_factor == pytest.approx(0.1 * math.log(4.0) + 1.0)
    ids = random_ids(60)
    np.testing.assert_allclose(logits(tmp_path / "b.gguf", ids), logits_of(model, ids), atol=1e-4)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"llama.rope.scaling.type": "longrope"}, "rope.scaling.type is 'longrope', supported: linear, none, yarn"),
        ({"llama.expert_count": 8}, "expert_count is 8"),
        ({"llama.attention.sliding_window": 128}, "attention.sliding_window is 128"),
    ],
)
def test_metadata_that_changes_the_arithmetic_is_refused(fields: dict[str, Any], said: str, tmp_path: Path):
    write_gguf(tmp_path / "model.gguf", random_llama(), fields=fields)
    assert said in refusal(tmp_path / "model.gguf")


def write_raw(
    path: Path, architecture: str = "llama", tensors: dict[str, tuple[np.ndarray, str]] | None = None
) -> None:
    """A file with only an architecture and raw tensors (bytes of whole blocks)."""
    writer = gguf.GGUFWriter(path, architecture)
    for name, (data, kind) in (tensors or {}).items():
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_missing_metadata_is_named_all_at_once(tmp_path: Path):
    write_raw(tmp_path / "model.gguf")
    text = refusal(tmp_path / "model.gguf")
    for name in ("embedding_length", "attention.head_count", "feed_forward_length", "block_count", "context_length"):
        assert f"{name} is missing" in text


def test_an_unknown_architecture_lists_the_supported(tmp_path: Path):
    write_raw(tmp_path / "model.gguf", "rwkv7")
    assert "GGUF architecture 'rwkv7' is not supported; supported: " in refusal(tmp_path / "model.gguf")


def test_a_k_quant_block_by_hand(tmp_path: Path):
    """Q6_K: 256 values d * scale[i // 16] * (q - 32), q of 4 low bits (ql) and 2 high bits (qh)."""
    scales = np.arange(-8, 8, dtype=np.int8)
    low, high = np.zeros(128, np.uint8), np.zeros(64, np.uint8)
    low[0] = 0x5  # value 0: low bits 5
    low[33] = 0x70  # high nibble of byte 33: value 97, low bits 7
    high[1] = 0b11 << 2  # second pair of byte 1: value 33, high bits 3
    raw = np.concatenate([low, high, scales.view(np.uint8), np.array([0.5], np.float16).view(np.uint8)])
    quants = np.zeros(256)
    quants[[0, 97, 33]] = [5, 7, 3 << 4]
    wanted = 0.5 * np.repeat(scales.astype(np.float64), 16) * (quants - 32)
    write_raw(tmp_path / "block.gguf", tensors={"x": (raw[None], "Q6_K")})
    file = GgufFile(tmp_path / "block.gguf")
    assert (file.shapes["x"], file.dtypes["x"]) == ((1, 256), "Q6_K")
    np.testing.assert_array_equal(file.read("x")[0], wanted)


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"])
def test_k_quants_are_read_at_their_shapes(kind: str, tmp_path: Path):
    number = gguf.GGMLQuantizationType[kind]
    raw = np.random.default_rng(0).integers(0, 56, (3, 2 * gguf.GGML_QUANT_SIZES[number][1]), np.uint8)
    write_raw(tmp_path / "block.gguf", tensors={"x": (raw, kind)})
    value = GgufFile(tmp_path / "block.gguf").read("x")
    assert value.shape == (3, 512)
    np.testing.assert_array_equal(value, gguf.dequantize(raw, number))


def test_a_type_without_a_dequantiser_names_tensor_and_type(tmp_path: Path):
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType.Q8_K][1]
    write_raw(tmp_path / "model.gguf", tensors={"blk.0.attn_q.weight": (np.zeros((1, size), np.uint8), "Q8_K")})
    text = refusal(tmp_path / "model.gguf")
    assert "blk.0.attn_q.weight is Q8_K" in text
    assert "supported: F32" in text


def test_a_type_from_the_future_is_named_by_its_number(tmp_path: Path):
    path = tmp_path / "model.gguf"
    write_raw(path, tensors={"odd": (np.zeros((1, 32), np.float32), "F32")})
    data = bytearray(path.read_bytes())
    place = data.index(b"odd") + 3 + 4 + 2 * 8  # after the name: number of axes, two axes
    data[place : place + 4] = (987).to_bytes(4, "little")
    path.write_bytes(data)
    assert "odd is of unknown type 987" in refusal(path)


@pytest.mark.parametrize("keep", [0, 3, 10, 60, 700, -40])
def test_a_truncated_file_is_named(keep: int, tmp_path: Path):
    path = tmp_path / "model.gguf"
    write_gguf(path, random_llama())
    path.write_bytes(path.read_bytes()[:keep])
    assert "bytes" in refusal(path)


def test_a_file_of_another_kind_is_refused(tmp_path: Path):
    (tmp_path / "model.gguf").write_bytes(b"PK\x03\x04 something else entirely")
    assert "does not start with GGUF" in refusal(tmp_path / "model.gguf")
    (tmp_path / "model.onnx").write_bytes(b"onnx")
    assert "expected a folder with config.json or a .gguf file" in refusal(tmp_path / "model.onnx")


def test_nan_in_a_gguf_is_refused_naming_the_tensor(tmp_path: Path):
    model = random_llama()
    model.model.norm.weight.data[5] = float("nan")
    write_gguf(tmp_path / "model.gguf", model)
    with pytest.raises(
        WeightsError, match=r"output_norm.weight holds 1 NaN or infinite value\(s\), the first at \[5\]"
    ):
        open_target(tmp_path / "model.gguf").tensor("final_norm.weight")


def test_missing_and_unexpected_tensors_are_named(tmp_path: Path):
    write_gguf(tmp_path / "model.gguf", random_llama(), fields={"llama.junk": 1}, extra={"blk.0.extra": np.zeros(3)})
    assert "unexpected blk.0.extra [3]" in refusal(tmp_path / "model.gguf")


def test_the_header_reads_as_the_gguf_package_reads_it(tmp_path: Path):
    path = tmp_path / "model.gguf"
    fields = {"a.text": "世界", "a.whole": 7, "a.float": 0.5}
    write_gguf(path, random_llama(), "F16", fields=fields)
    ours, theirs = GgufFile(path), gguf.GGUFReader(path)
    known = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert dict(ours.metadata) == known
    assert {tensor.name for tensor in theirs.tensors} == set(ours.shapes)
    for tensor in theirs.tensors:
        np.testing.assert_array_equal(ours.read(tensor.name), tensor.data.reshape(ours.shapes[tensor.name]))


def test_the_same_model_in_both_formats_has_the_same_numbers(tmp_path: Path):
    model = save_llama(tmp_path / "folder", attention_bias=True, mlp_bias=True)
    write_gguf(tmp_path / "model.gguf", model)
    folder, file = open_target(tmp_path / "folder"), open_target(tmp_path / "model.gguf")
    assert file.config.layers == folder.config.layers
    for name in folder.paths():
        np.testing.assert_array_equal(file.tensor(name), folder.tensor(name), err_msg=name)
