"""Ids that end a text, stop strings that are tokens, and ids that a model does not have."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Inner

from spd_jax.weights.ids import Stops, end_ids, find_stops, unknown_id
from spd_jax.weights.load import open_target
from spd_jax.weights.tokenizer import Tokenizer, load_tokenizer
from tests.byte_text import TARGET, copy_target

V = 260


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The byte tokenizer with one token more than the model has embeddings."""
    folder = copy_target(tmp_path_factory.mktemp("models") / "tiny")
    inner = Inner.from_file(str(folder / "tokenizer.json"))
    inner.add_special_tokens([AddedToken("<end>", special=True)])
    inner.add_tokens([AddedToken("<think>", special=False)])
    inner.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def tokenizer(target: Path) -> Tokenizer:
    return load_tokenizer(target)


@pytest.fixture
def ends(target: Path, tmp_path: Path) -> Callable[..., tuple[int, ...]]:
    """End ids of a target whose three files name these."""

    def of(config: Any = None, generation: Any = None, eos_token: str | None = None) -> tuple[int, ...]:
        folder = tmp_path / "target"
        folder.mkdir(exist_ok=True)
        for name in ("model.safetensors", "tokenizer.json"):
            if not (folder / name).exists():
                (folder / name).symlink_to(target / name)
        for name, key, value in (
            ("config.json", "eos_token_id", config),
            ("generation_config.json", "eos_token_id", generation),
            ("tokenizer_config.json", "eos_token", eos_token),
        ):
            fields = json.loads((target / name).read_text())
            (folder / name).write_text(json.dumps({**fields, key: value}))
        return end_ids(open_target(folder).config, load_tokenizer(folder), "it")

    return of


@pytest.mark.parametrize(
    ("config", "generation", "eos_token", "ids"),
    [
        (257, 258, "<unused>", (257, 258, 259)),
        (None, 258, "<unused>", (258, 259)),
        (257, None, "<unused>", (257, 259)),
        ([258, 257], 258, None, (258, 257)),
        (None, [257, 258], None, (257, 258)),
        (None, None, "</s>", (257,)),
        (None, None, None, ()),
        (257, 257, "</s>", (257,)),
        (257, None, "<end>", (257,)),  # the model never gives what it has no embedding for
    ],
)
def test_the_ends_are_the_union_of_what_three_files_name(
    ends: Callable[..., tuple[int, ...]], config: Any, generation: Any, eos_token: str | None, ids: tuple[int, ...]
):
    assert ends(config, generation, eos_token) == ids


def test_an_end_outside_the_vocabulary_is_refused(ends: Callable[..., tuple[int, ...]]):
    with pytest.raises(ValueError, match=r"it: eos_token_id: id 300 is outside the vocabulary 0\.\.259"):
        ends(257, 300)


def test_without_a_tokenizer_the_description_names_the_ends():
    config = open_target(TARGET).config
    assert end_ids(config, None, "it") == (257,)
    assert end_ids(dataclasses.replace(config, eos_token_ids=(3, 257)), None, "it") == (3, 257)


def test_a_stop_string_that_is_a_special_token_is_an_id(tokenizer: Tokenizer):
    found = find_stops(["</s>", "<think>", "END", "<unused>"], tokenizer, V, "it")
    assert found == Stops(("<think>", "END"), (257, 259))
    assert not find_stops([], None, V, "it")


def test_stops_that_cannot_come(tokenizer: Tokenizer):
    with pytest.raises(ValueError, match=r"stop: id 260 \('<end>', .*\) is outside the vocabulary 0\.\.259 of it"):
        find_stops(["<end>"], tokenizer, V, "it")
    with pytest.raises(ValueError, match="it has no tokenizer"):
        find_stops(["END"], None, V, "it")
    with pytest.warns(UserWarning, match="holds '</s>', a special token"):
        assert find_stops(["</s>\n"], tokenizer, V, "it") == Stops(("</s>\n",))


def test_an_unknown_id_is_named_with_its_token(tokenizer: Tokenizer):
    assert unknown_id([0, 259], V, tokenizer) is None
    assert unknown_id([0, -1, 300], V, tokenizer) == "id -1 is outside the vocabulary 0..259"
    assert unknown_id([300], V, tokenizer) == "id 300 is outside the vocabulary 0..259"
    said = unknown_id([4, 260], V, tokenizer)
    assert said is not None
    assert said.startswith("id 260 ('<end>', a token of the tokenizer")
