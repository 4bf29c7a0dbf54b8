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

from tests.models.test_families import SIZES, VARIANTS
from tests.tiny import random_model

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


def run(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A script as a user starts it: no setting of the tests' process is passed on."""
    ours = ("XLA_FLAGS", "JAX_", "PYTEST")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return subprocess.run(
        [sys.executable, str(ROOT / script), *arguments],
        cwd=ROOT,
        env=clean | environment,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )


def write_prompts(folder: Path) -> str:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt_ids": ids}) + "\n" for ids in ([5, 9, 2, 60], [7] * 20)))
    return str(path)


def generate(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """The results of a run that ends well, text equal to that of autoregressive decoding."""
    file = folder / "out.json"
    common = ["--prompts", write_prompts(folder), "--max_new_tokens", "12", "--compare", "true", "--json", str(file)]
    ended = run("infer/generate.py", "--target", str(folder / "target"), *common, *arguments)
    assert ended.returncode == 0, ended.stderr
    results = json.loads(file.read_text())["results"]
    assert all(result["equal"] for result in results)
    return results


def make_target(folder: Path, name: str) -> None:
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
    make_target(tmp_path, "qwen3_5")
    generate(tmp_path, *devices_of(4, "separate"))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["separate", "beside"])
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_decodes_on_exactly_its_devices(name: str, stages: int, layout: str, tmp_path: Path) -> None:
    make_target(tmp_path, name)
    generate(tmp_path, *devices_of(stages, layout), "--batch", "2")
