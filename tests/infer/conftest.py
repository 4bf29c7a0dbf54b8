"""What the tests of infer/generate.py share: a target whose text can be read, and its decoders, loaded once.

Compilations take most of the time, so the script's runs here use the same decoders, whatever else they ask for.
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import spd_jax.generation.run
from infer import generate as script
from spd_jax.config.command_line import parse_command_line
from spd_jax.config.run import GenerateConfig
from spd_jax.generation.run import Decoders, load_decoders, prepare
from tests.byte_text import copy_target, write_byte_tokenizer

PROMPTS = ["The", "Here is a list of"]
COMMON = ["--stages", "4", "--devices", "5", "--prefill_chunk", "16", "--max_length", "128"]
COMMON += [
    "--num_draft_layers",
    "1",
    "--eos_ids",
    "[257,258,259]",
]  # as many as other runs give: their number is part of the program


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a run of the script left behind; `json` is None where it wrote none."""

    code: int
    out: str
    err: str
    json: Any

    @property
    def results(self) -> list[dict[str, Any]]:
        return self.json["results"]


Generate = Callable[..., Answer]


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_target(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same target with a tokenizer in which the letter d, which its texts are full of, is a special token."""
    folder = copy_target(tmp_path_factory.mktemp("models") / "marked")
    write_byte_tokenizer(folder, special={ord("d"): "<mark>"})
    return folder


@pytest.fixture(scope="session")
def decoders(target: Path) -> Decoders:
    words = ["--target", str(target), *COMMON, "--compare", "true", "--prompt", "x"]
    return load_decoders(prepare(parse_command_line(GenerateConfig, words, "")))


@pytest.fixture
def generate(
    target: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Generate:
    """Run the script on the tiny target; `with_decoders` stands in for loading."""

    def run(*arguments: str, with_decoders: Decoders | None = None) -> Answer:
        if with_decoders is not None:
            monkeypatch.setattr(spd_jax.generation.run, "load_decoders", lambda job, progress: with_decoders)
        file = tmp_path / "out.json"
        file.unlink(missing_ok=True)
        code = script.main(["--target", str(target), *COMMON, "--json", str(file), *arguments])
        captured = capsys.readouterr()
        found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
        return Answer(code, captured.out, captured.err, found)

    return run


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """A file with the two prompts, one in each of two spellings."""
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt": PROMPTS[0]}, {"turns": [PROMPTS[1], "never asked"], "question_id": 5}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
