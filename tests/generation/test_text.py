"""Streamed text and stop strings: nothing shown is taken back, and ids and text are cut at one place."""

import dataclasses
from pathlib import Path

import pytest

from spd_jax.decode.options import Piece, SequenceResult, Token
from spd_jax.decode.state import ACCEPTED
from spd_jax.generation.text import IdStream, TextStream
from spd_jax.weights.ids import Stops
from spd_jax.weights.tokenizer import Tokenizer, load_tokenizer
from tests.byte_text import write_byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(folder)
    return load_tokenizer(folder)


def piece(ids: list[int], finish_reason: str | None = None) -> Piece:
    return Piece(0, tuple(Token(index, 1, ACCEPTED, 0.0) for index in ids), finish_reason)


def play(stream: TextStream, ids: list[int], size: int) -> tuple[list[str], list[int], str]:
    """Feed ids as a decoder does, `size` a dispatch; returns the pieces of text, the ids kept and why it ended."""
    shown, kept = [], []
    for start in range(0, len(ids), size):
        dispatch = ids[start : start + size]
        keep = stream.check(0, [*kept, *dispatch])
        ended = keep is not None or start + size >= len(ids)
        dispatch = dispatch if keep is None else dispatch[: keep - len(kept)]
        kept += dispatch
        reason = "stop" if keep is not None else "length" if ended else None
        shown.append(stream.push(piece(dispatch, reason)))
        if keep is not None:
            break
    return shown, kept, stream.text(0)


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize("text", ["plain", "世界 naïve 👩‍🚀", "a\u2028b"])
def test_pieces_join_to_the_decoding_of_all_ids(tokenizer: Tokenizer, text: str, size: int):
    ids = [*text.encode("utf-8"), 257]
    shown, kept, whole = play(TextStream(tokenizer, 1), ids, size)
    assert "".join(shown) == whole == text == tokenizer.decode(ids)
    assert kept == ids


@pytest.mark.parametrize("stop", [(), ("zz",)])
def test_an_incomplete_character_at_the_end_is_shown_as_one(tokenizer: Tokenizer, stop: tuple[str, ...]):
    ids = [65, 0xE4, 0xB8]
    shown, _, whole = play(TextStream(tokenizer, 1, Stops(stop)), ids, 1)
    assert whole == "".join(shown) == "A\ufffd" == tokenizer.decode(ids)


@pytest.mark.parametrize("size", [1, 2, 4, 7])
def test_a_stop_string_cuts_ids_and_text_at_one_place(tokenizer: Tokenizer, size: int):
    ids = list(b"one two three")
    shown, kept, whole = play(TextStream(tokenizer, 1, Stops(("wo t", "zzz"))), ids, size)
    assert bytes(kept) == b"one two t"  # the ids end with the one that completes the string
    assert whole == "".join(shown) == "one t"  # the text ends right before it


def test_the_string_that_ends_first_wins(tokenizer: Tokenizer):
    _, kept, whole = play(TextStream(tokenizer, 1, Stops(("cdef", "de"))), list(b"abcdefg"), 3)
    assert (bytes(kept), whole) == (b"abcde", "abc")


def test_text_that_may_become_a_stop_string_is_held_back(tokenizer: Tokenizer):
    stream = TextStream(tokenizer, 1, Stops(("END",)))
    shown = []
    for byte in b"an ENvoy E":
        shown.append(stream.push(piece([byte])))
    assert "".join(shown) == "an ENvoy "
    assert stream.push(piece([], "length")) == "E"


def test_stop_at_once_leaves_no_text(tokenizer: Tokenizer):
    _, kept, whole = play(TextStream(tokenizer, 1, Stops(("a",))), list(b"abc"), 3)
    assert (bytes(kept), whole) == (b"a", "")


def test_sequences_of_a_batch_do_not_meet(tokenizer: Tokenizer):
    stream = TextStream(tokenizer, 2, Stops(("bc",)))
    assert stream.check(0, list(b"ab")) is None
    assert stream.check(1, list(b"cd")) is None
    assert stream.check(0, list(b"abcd")) == 3


def test_ids_stand_in_where_there_is_no_tokenizer():
    stream = IdStream(1)
    assert stream.push(piece([5, 6])) + stream.push(piece([7], "length")) == stream.text(0) == "5 6 7 "


@pytest.mark.parametrize("size", [1, 2, 7])
def test_a_stop_id_ends_a_text_that_shows_nothing_of_it(tokenizer: Tokenizer, size: int):
    ids = [*b"one E", 0xE4, 259, *b" two"]  # an incomplete character before
    shown, kept, whole = play(TextStream(tokenizer, 1, Stops(("END",), (259,))), ids, size)
    assert kept == ids[:7]
    assert "".join(shown) == whole == "one E\ufffd"


def test_the_text_of_a_whole_result_is_cut_at_its_stop(tokenizer: Tokenizer):
    stream = TextStream(tokenizer, 2, Stops(("wo",)))
    result = SequenceResult([256], [Token(index, 1, ACCEPTED, 0.0) for index in b"one two"], finish_reason="stop")
    assert stream.finish(1, result) == "one t"
    unasked = dataclasses.replace(result, finish_reason="length")
    assert TextStream(tokenizer, 1).finish(0, unasked) == "one two"
