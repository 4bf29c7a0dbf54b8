"""infer/check_model.py: models that are equal, one that is not, and what cannot be compared."""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from infer import check_model
from spd_jax.config.check_model import CheckModelConfig
from spd_jax.weights.load import load_decoder
from tests.config.help import help_of
from tests.fixtures import DATA
from tests.one_line import assert_one_clear_line

IDS = "[5, 100, 17, 64, 32, 101, 120, 7]"


def test_an_equal_model(capsys: pytest.CaptureFixture[str]):
    """Every hidden state has a line that says what kind of layer made it."""
    assert check_model.main(["--target", str(DATA / "tiny_qwen3_5" / "target"), "--prompt_ids", IDS]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 9 + 1 + 1
    assert lines[1].startswith("embedding")
    assert lines[2].startswith("layer 0 (gated delta net, MLP)")
    assert lines[9].startswith("layer 7 (attention, MLP) and final norm")
    assert lines[-1] == "equal to transformers: no difference above 0.001 of the spread"
    assert not any("differs" in line for line in lines)


def test_the_first_layer_that_differs_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def damaged(*arguments: Any) -> Any:
        decoder = load_decoder(*arguments)
        weight = decoder.layers[2].mlp.down.weight
        weight.set_value(weight[...] * 1.05)
        return decoder

    monkeypatch.setattr("spd_jax.evaluation.check_model.load_decoder", damaged)
    assert check_model.main(["--target", str(DATA / "tiny_llama" / "target"), "--prompt_ids", IDS]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "differs from transformers, first in: layer 2 (attention, MLP)"
    assert [line.endswith("differs") for line in lines[1:6]] == [False, False, False, True, True]


def test_the_tolerance_is_the_users():
    arguments = ["--target", str(DATA / "tiny_llama" / "target"), "--prompt_ids", IDS]
    assert check_model.main([*arguments, "--tolerance", "1e-12"]) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--target", "nowhere"], "nowhere"),
        (["--target", str(DATA / "tiny_llama" / "target")], "tokenizer"),
        (["--target", str(DATA / "tiny_llama" / "target"), "--prompt_ids", "[1, 260]"], "in 0..259, found [260]"),
        (["--target", str(DATA / "tiny_llama" / "target"), "--prompt_ids", "[]"], "prompt_ids is empty"),
        (["--target", "x", "--tolerance", "0"], "tolerance must be above 0"),
        ([], "missing: --target"),
    ],
)
def test_what_cannot_be_compared(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    assert check_model.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert_one_clear_line(captured.err, said)


def test_without_torch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert check_model.main(["--target", str(DATA / "tiny_llama" / "target"), "--prompt_ids", IDS]) == 2
    assert "pip install 'spd-jax[import]'" in capsys.readouterr().err


def test_an_unsupported_model_says_what_is_supported(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = shutil.copytree(DATA / "tiny_llama" / "target", tmp_path / "model")
    config = folder / "config.json"
    config.chmod(0o644)
    config.write_text(config.read_text().replace('"llama"', '"mamba"'))
    assert check_model.main(["--target", str(folder), "--prompt_ids", IDS]) == 2
    assert "model_type 'mamba' is not supported; supported: gemma2, gemma3," in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]):
    help_of(CheckModelConfig, capsys)
