"""train/distill.py: what it prints and writes, how it goes on and begins anew, and one line for what cannot be done."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import spd_jax.training.allocator
from spd_jax.speculation.checkpoint import load_head
from spd_jax.weights.load import open_target
from spd_jax.weights.mapping import config_digest
from spd_jax.weights.tokenizer import load_tokenizer
from tests.byte_text import write_byte_tokenizer
from tests.one_line import assert_one_clear_line
from tests.training.world import TEMPLATE, conversations, make_data, make_target
from train import distill as script

ROOT = Path(__file__).parent.parent.parent
YAML = """
stages: 4
num_draft_layers: 1
rows: 1
row_length: 48
max_steps: 4
evaluate_every: 2
evaluate_batches: 2
decode_every: 4
decode_new_tokens: 27
save_every: 2
fit_batches: 4
learning_rate: 0.002
products: float32
chunk: 64
training_devices: 1
"""
EVALUATION = r"step {}: held out: top-1 0\.\d{{4}}, sum min\(p, q\) 0\.\d{{4}}, coverage 1\.0000, loss \d\.\d{{4}}, "
EVALUATION += r"projected S0 \d\.\d{{3}}"


@pytest.fixture(autouse=True)
def same_process(monkeypatch: pytest.MonkeyPatch):
    """The script adds to XLA_FLAGS and sets malloc for its process, which here has other things to do."""
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])
    monkeypatch.setattr(spd_jax.training.allocator, "keep_freed_memory", lambda: False)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with target, data, prompts and options."""
    folder = tmp_path_factory.mktemp("world")
    target = make_target(folder / "target")
    make_data(folder / "data", target, conversations(16), held_out=4.0)
    (folder / "prompts.jsonl").write_text('{"prompt_ids": [256, 84, 104, 101]}\n')
    names = f"target: {target}\ndata: [{folder / 'data'}]\ndecode_prompts: {folder / 'prompts.jsonl'}\n"
    (folder / "run.yaml").write_text(names + YAML)
    return folder


Run = Callable[..., tuple[int, list[str], str]]


@pytest.fixture
def distill(world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the script on the world, into `tmp_path / "run"`; exit code, lines of output, errors."""

    def run(*arguments: str) -> tuple[int, list[str], str]:
        out = ["--out", str(tmp_path / "run")]
        code = script.main(["--config", str(world / "run.yaml"), *out, *arguments])
        captured = capsys.readouterr()
        return code, captured.out.splitlines(), captured.err

    return run


def log_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def test_a_run_and_the_next(distill: Run, world: Path, tmp_path: Path):
    run = tmp_path / "run"
    code, lines, _ = distill("--tensorboard", "true")
    assert code == 0
    assert lines[0].startswith("head made from the target: 4 stages [2, 2, 2, 2] on 5 ranks (1 draft layer, separate)")
    assert lines[1] == "draft vocabulary: 260 tokens; rows of its own"
    assert re.fullmatch(r"data: 12 conversations, \d+ tokens; held out 4", lines[2])
    assert lines[3] == "4 steps"
    assert re.fullmatch(EVALUATION.format(0), lines[4])
    decoded = [line for line in lines if "decoded" in line]
    assert [re.sub(r"\d\.\d{3}", "x", line) for line in decoded] == [
        f"step {step}: decoded: s0 x, alpha x" for step in (0, 4)
    ]
    assert any(line.startswith("step 1: loss ") and " left" in line for line in lines)
    written = [run / name for name in ("best", "last", "log.jsonl", "curves.png")]
    assert lines[-4:] == [f"wrote {path}" for path in written]
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert list((run / "tensorboard").iterdir())
    weights = open_target(str(world / "target"))
    for name in ("best", "last"):
        _, manifest = load_head(
            run / name,
            target_config=weights.config,
            target_digest=config_digest(weights),
            tokenizer_digest=load_tokenizer(str(world / "target")).digest,
            dtype=jnp.bfloat16,
        )
        assert manifest.dtype == "bfloat16"
        seen = next(line for line in log_of(run) if line["kind"] == "step" and line["step"] == 4)
        assert manifest.training["tokens"] == seen["tokens"]
        assert manifest.training["supervised"] == seen["supervised"]
        assert "decoded_s0" in manifest.training["held_out"]
    log = log_of(run)

    code, lines, _ = distill()
    assert (code, lines[3]) == (0, "goes on after step 4 of 4")
    assert log_of(run) == log

    code, _, error = distill("--learning_rate", "0.001")
    assert (code, error.count("\n")) == (2, 1)
    assert error.startswith(f"error: {run} holds another run: learning_rate was 0.002, now 0.001. Choose another --out")
    assert log_of(run) == log


@pytest.mark.slow
def test_a_rate_that_no_parameter_survives(distill: Run, tmp_path: Path):
    """A run that begins anew and fails leaves nothing of the one before."""
    run, quick = tmp_path / "run", ("--decode_every", "0")
    assert distill(*quick)[0] == 0
    assert (run / "states" / "4").exists()
    code, _, error = distill("--learning_rate", "1e30", "--overwrite", "true", *quick)
    assert code == 3
    assert re.match(
        r"error: step \d: loss \d.*, norm of the gradient \d.* and of the update inf on batches \d to \d, which hold "
        r"conversations \(by row\) \[\d+",
        error,
    )
    assert not list((run / "states").glob("[1-9]*"))
    assert all(line["step"] == 0 for line in log_of(run))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--stagess", "4"], "--stagess"),
        (["--stages", "0"], "stages must be at least 1, found 0"),
        (["--objective", "guess"], "objective"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
        (["--data"], "no data: give --data FOLDER"),
        (["--data", "nowhere"], "nowhere: holds no prepared conversations (manifest.json is missing)"),
        (["--target", "nowhere"], "nowhere: no such file or folder"),
        (["--head", "nowhere"], "nowhere is no speculation head"),
        (["--decode_prompts", "null"], "decode_every needs decode_prompts"),
        (["--decode_prompts", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--training_devices", "13"], "asked for 13 devices, found 12"),
    ],
)
def test_one_clear_line(distill: Run, arguments: list[str], said: str):
    code, _, error = distill(*arguments)
    assert code == 2
    assert_one_clear_line(error, said)


def test_data_with_ids_that_the_target_does_not_have(distill: Run, world: Path, tmp_path: Path):
    """An added token of the tokenizer, which the template writes: there is nothing to embed."""
    target = shutil.copytree(world / "target", tmp_path / "target")
    write_byte_tokenizer(target, more=["<end>"])
    file = target / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": TEMPLATE.replace("</s>", "<end>")}))
    data = make_data(tmp_path / "data", target, conversations(2))
    code, _, error = distill("--target", str(target), "--data", str(data), "--evaluate_every", "0")
    assert code == 2
    assert_one_clear_line(error, f"{data}: conversation {data}.jsonl:1: id 260 ('<end>', a token of the tokenizer")
    assert f"is outside the vocabulary 0..259 of {target}" in error
    assert not (tmp_path / "run").exists()


def test_data_and_heads_of_others(distill: Run, world: Path, tmp_path: Path):
    other = shutil.copytree(world / "target", tmp_path / "other")
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace("<unused>", "<free>"))
    code, _, error = distill("--target", str(other))
    assert code == 2
    assert error.startswith(f"error: {world / 'data'}: prepared with the tokenizer whose digest is ")
    head = shutil.copytree(ROOT / "tests" / "data" / "tiny_llama" / "target", tmp_path / "no_head")
    code, _, error = distill("--head", str(head))
    assert code == 2
    assert error.startswith(f"error: {head / 'config.json'}: format is None")
    assert not (tmp_path / "run").exists()


def test_help_says_what_options_mean(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        script.main(["--help"])
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "python train/distill.py --config" in text
    assert "--projections" in text
    assert "ridge fits them to what the draft layers expect" in text


@pytest.mark.slow
def test_a_killed_run_goes_on(distill: Run, world: Path, tmp_path: Path):
    """P06: the process is gone at once, wherever it was; all steps are in the log once."""
    run, config = tmp_path / "run", ["--config", str(world / "run.yaml")]
    options = ["--decode_every", "0", "--save_every", "1", "--max_steps", "40", "--epochs", "20"]
    command = [sys.executable, str(ROOT / "train" / "distill.py"), *config, "--out", str(run), *options]
    with subprocess.Popen(command, cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu"}) as process:
        try:
            deadline = time.monotonic() + 300
            while not (run / "states" / "5").exists():
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.01)
            process.send_signal(signal.SIGKILL)
        finally:
            process.kill()
    code, lines, _ = distill(*options)
    assert code == 0
    match = re.fullmatch(r"goes on after step (\d+) of 40", lines[3])
    assert match is not None
    assert 5 <= int(match[1]) < 40
    assert [line["step"] for line in log_of(run) if line["kind"] == "step"] == list(range(1, 41))
