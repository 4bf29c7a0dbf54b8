"""What infer/generate.py says when a run cannot be done: one line, no traceback, no file."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.byte_text import TARGET
from tests.infer.conftest import Generate
from tests.one_line import assert_one_clear_line

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", ""], "prompt 1: prompt is empty"),
        (["--prompt", "x", ""], "prompt 2: prompt is empty"),
        (["--prompt", "x" * 200], "prompt 1: the prompt has 201 tokens, at most 127 leave room"),
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--prompt", "x", "--temperature", "-1"], "temperature must be a finite number >= 0, found -1.0"),
        (["--prompt", "x", "--temperature", "1", "--top_p", "0"], "top_p must lie in (0, 1], found 0.0"),
        (["--prompt", "x", "--top_k", "5"], "no effect at temperature 0"),
        (["--prompt", "x", "--head", "oracle", "--temperature", "1"], "head oracle drafts what greedy decoding gives"),
        (["--prompt", "x", "--head", "script:12"], "digits 0 and 1"),
        (["--prompt", "x", "--head", "nowhere"], "head 'nowhere' is no head folder"),
        (["--prompt", "x", "--target", "nowhere"], "nowhere: no such file or folder"),
        (["--prompt", "x", "--target", "package:nothing_here/model.gguf"], "package 'nothing_here' is not installed"),
        (["--prompt", "x", "--stages", "9"], "8 layers cannot fill 9 stages"),
        (["--prompt", "x", "--plan", "[3,3,1,2]"], "sums to 9, the model has 8 layers"),
        (["--prompt", "x", "--plan", "[4,4]"], "has 2 entries, num_stages is 4"),
        (["--prompt", "x", "--max_length", "513"], "max_length must lie in 2..512"),
        (["--prompt", "x", "--eos_ids", "[260]"], "eos_ids: id 260 is outside the vocabulary 0..259 of"),
        (["--prompt", "x", "--stages", "8", "--devices", "200"], "200 simulated devices were asked for"),
        (["--prompt", "x", "--max_tokens", "5"], "--max_tokens"),
        (["--prompt", "x", "--json", "."], "is a folder"),
        (["--target", str(TARGET), "--prompt", "x"], "the target has no tokenizer"),
        (["--target", str(TARGET), "--prompt", "x", "--stop", "y"], "no text that stop strings could end"),
    ],
)
def test_one_clear_line(generate: Generate, arguments: list[str], message: str):
    answer = generate(*arguments)
    assert answer.code == 2
    assert_one_clear_line(answer.err, message)
    assert answer.json is None
    assert "Traceback" not in answer.out + answer.err


def test_an_unknown_key_of_the_file_is_named(generate: Generate, tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text("stagess: 4\n")
    answer = generate("--config", str(path), "--prompt", "x")
    assert (answer.code, answer.json) == (2, None)
    assert "stagess" in answer.err


def test_a_malformed_line_is_named(generate: Generate, prompts: Path):
    prompts.write_text(prompts.read_text() + '{"prompt": [')
    answer = generate("--prompts", str(prompts))
    assert answer.code == 2
    assert f"error: {prompts}:3: not valid JSON" in answer.err


def test_no_prompt_at_all(generate: Generate, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    answer = generate()
    assert answer.code == 2
    assert "no prompt: give --prompt TEXT, --prompts FILE.jsonl or a text on standard input" in answer.err


def test_too_few_devices_says_how_many_there_are_and_how_to_get_more(tmp_path: Path):
    """A process of its own, since this one has twelve simulated devices."""
    path = tmp_path / "ids.jsonl"
    path.write_text(json.dumps({"prompt_ids": [1]}))
    command = [sys.executable, "infer/generate.py", "--target", str(TARGET), "--stages", "4", "--prompts", str(path)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 2
    assert result.stderr == (
        "error: the plan needs 5 devices, found 4 (cpu). Use --layout beside, which needs 4, fewer stages, a machine "
        "with more devices, or simulate them on CPU: --devices 5 (jax_num_cpu_devices=5)\n"
    )


SCRIPTS = {
    "infer/generate.py": ["--target", str(TARGET), "--stages", "4", "--prompts", "-"],
    "infer/evaluate.py": ["--target", str(TARGET), "--stages", "4", "--heads", "target", "--prompts", "ids.jsonl"],
    "infer/check_model.py": ["--target", str(TARGET), "--prompt_ids", "5"],
    "infer/import_head.py": ["--target", str(TARGET), "--checkpoint", str(TARGET.parent / "head_v11.pt")],
    "infer/plan.py": ["--target", str(TARGET), "--devices", "2", "--measure", "true"],
    "train/regenerate.py": ["--target", str(TARGET), "--source", "ids.jsonl"],
    "train/distill.py": ["--target", str(TARGET), "--data", "data"],
}


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in SCRIPTS if name != "infer/generate.py"]


@pytest.mark.parametrize("script", ["infer/generate.py", *SLOW])
def test_a_platform_that_is_not_there_is_named(script: str, tmp_path: Path):
    """JAX itself ends with a bare AssertionError here."""
    (tmp_path / "ids.jsonl").write_text(json.dumps({"prompt_ids": [1]}))
    writes = script not in ("infer/generate.py", "infer/plan.py", "infer/check_model.py")
    out = ["--out", str(tmp_path / "out")] if writes else []
    command = [sys.executable, str(ROOT / script), *SCRIPTS[script], *out]
    environment = {**os.environ, "JAX_PLATFORMS": "cuda", "XLA_FLAGS": ""}
    given = {"cwd": tmp_path, "env": environment, "input": '{"prompt_ids": [1]}', "timeout": 300}
    result = subprocess.run(command, capture_output=True, text=True, **given)
    assert result.returncode == 2
    assert result.stderr == (
        "error: JAX was told to run on cuda (JAX_PLATFORMS) and cannot: JAX finds no such device. Give "
        "JAX_PLATFORMS=cpu for the CPU, or --devices N for N simulated devices on it\n"
    )
    assert not (tmp_path / "out").exists()
