"""Files that are not what they should be: every loader names the file and the likely cause."""

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from spd_jax.data.prepared import check_shard, read_object
from spd_jax.data.sources import read_conversations
from spd_jax.files import read_json
from spd_jax.generation.prompts import read_prompts
from spd_jax.planning.machines import load_machine
from spd_jax.published.torch_file import read_torch_file
from spd_jax.speculation import checkpoint
from spd_jax.speculation.manifest import read_manifest
from spd_jax.weights.load import open_target
from spd_jax.weights.tokenizer import load_tokenizer
from tests.byte_text import copy_target

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 4242\n"
DAMAGES: dict[str, tuple[bytes, str]] = {
    "pointer": (POINTER, "Git LFS pointer"),
    "page": (b"<!DOCTYPE html>\n<html><body>Access denied</body></html>", "a web page"),
    "zeros": (bytes(5000), "zeros only"),
    "UTF-16": ('{"a": "caf\u00e9"}'.encode("utf-16"), "UTF-16"),
}
RECORD = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}

Loader = Callable[[Path], Any]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with every file that a loader looks at."""
    folder = copy_target(tmp_path_factory.mktemp("models") / "tiny")
    for name in ("generation_config.json", "special_tokens_map.json", "added_tokens.json"):
        (folder / name).write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    return folder


OF_TARGET: dict[str, Loader] = {
    "config.json": open_target,
    "generation_config.json": open_target,
    "model.safetensors": open_target,
    "model.safetensors.index.json": open_target,
    "tokenizer.json": load_tokenizer,
    "tokenizer_config.json": load_tokenizer,
    "special_tokens_map.json": load_tokenizer,
    "added_tokens.json": load_tokenizer,
    "chat_template.jinja": load_tokenizer,
}


@pytest.mark.parametrize("name", OF_TARGET)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_of_a_target_is_named_with_the_likely_cause(name: str, damage: str, target: Path, tmp_path: Path):
    data, cause = DAMAGES[damage]
    folder = tmp_path / "target"
    shutil.copytree(target, folder)
    (folder / name).write_bytes(data)
    with pytest.raises(ValueError, match=cause) as error:
        OF_TARGET[name](folder)
    assert str(folder / name) in str(error.value)
    assert "\n" not in str(error.value)


OBJECTS = [name for name in OF_TARGET if name.endswith(".json")]


@pytest.mark.parametrize("name", OBJECTS)
def test_a_list_an_empty_file_or_a_folder_in_place_of_an_object_is_named(name: str, target: Path, tmp_path: Path):
    folder = tmp_path / "target"
    shutil.copytree(target, folder)
    file = folder / name
    for text, said in (("[1]", "expected an object, found a list"), ("", "the file is empty")):
        file.write_text(text)
        with pytest.raises(ValueError, match=said) as wrong:
            OF_TARGET[name](folder)
        assert str(file) in str(wrong.value)
    file.unlink()
    file.mkdir()
    with pytest.raises(OSError, match="directory") as error:
        OF_TARGET[name](folder)
    assert str(file) in str(error.value)


def _machine(path: Path) -> Any:
    return load_machine(str(path))


def _conversations(path: Path) -> Any:
    return list(read_conversations(path, skip_invalid=True))


def _shard(path: Path) -> Any:
    return check_shard(path.parent, {"file": path.name, "bytes": 4})


SINGLE: dict[str, Loader] = {
    "model.gguf": open_target,
    "other.gguf": load_tokenizer,
    "head.pt": read_torch_file,
    "prompts.jsonl": read_prompts,
    "machine.yaml": _machine,
    "table.json": _conversations,
    "table.jsonl": _conversations,
    "table.json.gz": _conversations,
    "table.parquet": _conversations,
    "shard.arrow": _shard,
    "manifest.json": read_object,
    "config.json": lambda path: read_manifest(path.parent),
}


@pytest.mark.parametrize("name", SINGLE)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_of_its_own_is_named_with_the_likely_cause(name: str, damage: str, tmp_path: Path):
    data, cause = DAMAGES[damage]
    file = tmp_path / name
    file.write_bytes(data)
    with pytest.raises(ValueError, match=cause) as error:
        SINGLE[name](file)
    assert str(file) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_tensors_of_a_head_are_named_with_the_likely_cause(damage: str, tmp_path: Path):
    data, cause = DAMAGES[damage]
    shutil.copytree(Path(__file__).parent.parent / "heads" / "smollm2_135m", tmp_path / "head")
    file = tmp_path / "head" / "head.safetensors"
    file.write_bytes(data)
    manifest = read_manifest(file.parent)
    with pytest.raises(ValueError, match=cause) as error:
        checkpoint._read_module(file, manifest.head, manifest.dtype, jnp.float32)
    assert str(file) in str(error.value)


def test_a_file_that_is_compressed_only_by_its_name_is_told_from_one_that_is_cut_off(tmp_path: Path):
    file = tmp_path / "table.jsonl.gz"
    whole = json.dumps(RECORD).encode()
    file.write_bytes(whole)
    with pytest.raises(ValueError, match=r"table\.jsonl\.gz: no gzip file"):
        _conversations(file)
    file.write_bytes(gzip.compress(whole)[:-4])
    assert "cut off" in str(_conversations(file)[-1])


def test_another_encoding_is_told_with_its_place(tmp_path: Path):
    file = tmp_path / "a.json"
    file.write_bytes(b'{"a": "caf\xe9"}')
    with pytest.raises(ValueError, match=r"a\.json: not UTF-8 text \(byte 0xe9 at offset 10\); save it as UTF-8"):
        read_json(file)
