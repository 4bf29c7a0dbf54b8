"""The command line in processes of its own, with exactly the devices that a plan needs and nothing set beforehand.

The tests' own process simulates more devices than any mesh uses, and JAX's pool has a thread for each: work that waits
for a thread of that pool hangs only where all of them are devices of the mesh.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.byte_text import copy_target
from tests.models.test_families import SIZES, VARIANTS
from tests.parallel.test_processes import free_port
from tests.tiny import random_model
from tests.training.world import conversations, make_data, make_target

ROOT = Path(__file__).parents[2]
LIMIT = 240  # seconds for one process, most of them compilation
FAMILIES = {
    "llama": "llama",
    "qwen2": "qwen2, window in upper layers",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3_moe",
    "qwen3_5": "qwen3_5",
    "qwen3_5_moe": "qwen3_5_moe",
    "mistral": "mistral, window",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
}


def start(script: str, *arguments: str) -> subprocess.Popen[str]:
    """A script as a user starts it: no setting of the tests' process is passed on."""
    ours = ("XLA_FLAGS", "JAX_", "PYTEST")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    command = [sys.executable, str(ROOT / script), *arguments]
    return subprocess.Popen(
        command, cwd=ROOT, env=clean, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
    )


def end_well(*processes: subprocess.Popen[str]) -> None:
    """Wait for processes that run together; none may hang or fail."""
    try:
        for process in processes:
            _, errors = process.communicate(timeout=LIMIT)
            assert process.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def write_prompts(folder: Path) -> str:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt_ids": ids}) + "\n" for ids in ([5, 9, 2, 60], [7] * 20)))
    return str(path)


def generate(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """The results of a run that ends well, text equal to that of autoregressive decoding."""
    file = folder / "out.json"
    common = ["--prompts", write_prompts(folder), "--max_new_tokens", "12", "--compare", "true", "--json", str(file)]
    end_well(start("infer/generate.py", "--target", str(folder / "target"), *common, *arguments))
    results = json.loads(file.read_text())["results"]
    assert all(result["equal"] for result in results)
    return results


def make_family(folder: Path, name: str) -> None:
    if name == "llama":
        model_type, changes = "llama", {}
    else:
        model_type, changes = VARIANTS[FAMILIES[name]]
    random_model(model_type, **(SIZES | changes | {"num_hidden_layers": 4, "layer_types": None})).save_pretrained(
        folder / "target"
    )


def devices_of(stages: int, layout: str) -> Sequence[str]:
    devices = stages + (layout == "separate")
    return ["--stages", str(stages), "--layout", layout, "--devices", str(devices), "--num_draft_layers", "1"]


def test_delta_nets_decode_on_exactly_their_devices(tmp_path: Path) -> None:
    """The plan that hung in its first prefill: every rank's chunks wait for nothing but the other ranks."""
    make_family(tmp_path, "qwen3_5")
    generate(tmp_path, *devices_of(4, "separate"))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["separate", "beside"])
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_decodes_on_exactly_its_devices(name: str, stages: int, layout: str, tmp_path: Path) -> None:
    make_family(tmp_path, name)
    generate(tmp_path, *devices_of(stages, layout), "--batch", "2")


@pytest.mark.slow
def test_training_and_its_decoding_run_on_exactly_their_devices(tmp_path: Path) -> None:
    """A target with delta nets, trained on as many devices as its pipeline of four stages has ranks."""
    target = make_target(tmp_path / "target", "tiny_qwen3_5")
    data = make_data(tmp_path / "data", target, conversations(24), held_out=4.0)
    size = ["--devices", "5", "--training_devices", "5", "--rows", "5", "--row_length", "48", "--max_steps", "2"]
    looks = ["--evaluate_every", "1", "--evaluate_batches", "1", "--decode_every", "2", "--decode_new_tokens", "8"]
    names = ["--target", str(target), "--data", str(data), "--out", str(tmp_path / "run")]
    names += ["--decode_prompts", write_prompts(tmp_path), "--stages", "4", "--num_draft_layers", "1"]
    end_well(start("train/distill.py", *names, *size, *looks, "--products", "float32"))


@pytest.mark.slow
def test_two_processes_decode_on_exactly_their_devices(tmp_path: Path) -> None:
    """Two stages of a pipeline with delta nets in each process, the draft layers beside the first."""
    target = copy_target(tmp_path / "target", "tiny_qwen3_5")
    file = tmp_path / "out.json"
    common = ["--target", str(target), "--stages", "4", "--layout", "beside", "--num_draft_layers", "1"]
    common += ["--max_new_tokens", "12", "--devices", "2"]
    common += ["--prompts", write_prompts(tmp_path), "--coordinator", f"127.0.0.1:{free_port()}"]
    common += ["--num_processes", "2", "--json", str(file)]
    end_well(*(start("infer/generate.py", *common, "--process_id", number) for number in "01"))
    together = [result["ids"] for result in json.loads(file.read_text())["results"]]
    assert together == [result["ids"] for result in generate(tmp_path, *devices_of(4, "beside"))]
