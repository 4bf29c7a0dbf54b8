"""Opening and loading: the config files around the weights, progress, and what stays in host memory."""

import struct
import weakref
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from spd_jax.models.decoder import Decoder
from spd_jax.weights.load import load_decoder, open_target
from spd_jax.weights.mapping import config_digest
from spd_jax.weights.random_model import RandomWeights
from tests.memory_weights import DecoderWeights
from tests.tiny import edit_json, save_llama, tiny_config

SINGLE = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A saved model in one file."""
    save_llama(tmp_path)
    return tmp_path


def numbers(decoder: Decoder) -> dict[str, np.ndarray]:
    weights = DecoderWeights(decoder)
    return {path: weights.tensor(path) for path in weights.paths()}


def test_end_tokens_of_both_config_files_count(folder: Path):
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    assert open_target(folder).config.eos_token_ids == (2, 7)
    (folder / "generation_config.json").write_text('{"eos_token_id": "seven"}')
    with pytest.raises(ValueError, match=r"generation_config\.json: eos_token_id: .*'seven'"):
        open_target(folder)


def test_a_config_that_is_not_json_names_its_file(folder: Path):
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: not valid JSON"):
        open_target(folder)


def test_an_unknown_model_type_lists_the_supported(folder: Path):
    edit_json(folder / "config.json", model_type="bert")
    with pytest.raises(ValueError, match=r"config\.json: model_type 'bert' is not supported; supported: .*llama"):
        open_target(folder)


def test_progress_counts_every_byte_once(folder: Path):
    seen: list[tuple[int, int, str]] = []
    decoder = load_decoder(open_target(folder), progress=lambda done, total, name: seen.append((done, total, name)))
    size = sum(value.nbytes for value in numbers(decoder).values())
    assert [name for _, _, name in seen] == list(dict.fromkeys(name for _, _, name in seen))
    assert {total for _, total, _ in seen} == {size}
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)
    assert seen[-1][0] == size


def test_tensors_are_read_one_at_a_time(folder: Path):
    """Nothing keeps a tensor of the file alive while the next is read: no second full copy on the host."""
    weights = open_target(folder)
    alive: list[weakref.ref] = []
    most = 0

    class Watched:
        config, origin = weights.config, weights.origin

        def paths(self) -> list[str]:
            return weights.paths()

        def tensor(self, path: str) -> np.ndarray:
            nonlocal most
            most = max(most, sum(ref() is not None for ref in alive))
            value = weights.tensor(path)
            alive.append(weakref.ref(value))
            return value

    load_decoder(Watched(), jnp.bfloat16)
    assert len(alive) == len(weights.paths())
    assert most <= 1


def test_a_loaded_model_does_not_lean_on_its_file(folder: Path):
    decoder = load_decoder(open_target(folder))
    before = numbers(decoder)
    with (folder / SINGLE).open("r+b") as file:
        (header,) = struct.unpack("<Q", file.read(8))
        file.seek(8 + header)
        file.write(bytes((folder / SINGLE).stat().st_size - 8 - header))
    after = numbers(decoder)
    assert all(np.array_equal(before[path], after[path]) for path in before)


def test_digests_tell_configs_apart(folder: Path):
    digest = config_digest(open_target(folder))
    assert digest == config_digest(RandomWeights(tiny_config(), 0))
    assert digest != config_digest(RandomWeights(tiny_config(bos_token_id=None), 0))
