"""infer/import_head.py from end to end: a published head decodes as published, and goes back to its file."""

import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from infer import generate, import_head
from spd_jax.speculation.checkpoint import save_head
from spd_jax.speculation.manifest import read_manifest
from spd_jax.weights.load import open_target
from spd_jax.weights.mapping import config_digest
from spd_jax.weights.tokenizer import load_tokenizer
from tests.byte_text import TARGET, copy_target
from tests.fixtures import DATA
from tests.heads import random_module
from tests.one_line import assert_one_clear_line

FILE = DATA / "tiny_llama" / "head_v11.pt"
HEADS = ["--target", str(TARGET)]

Outcome = tuple[int, str, str]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Run the script; its exit code, what it printed and its errors."""

    def call(*arguments: object) -> Outcome:
        code = import_head.main([*map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("heads") / "imported"
    assert import_head.main(["--checkpoint", str(FILE), *HEADS, "--out", str(path)]) == 0
    return path


def test_a_line_says_what_was_written(run: Callable[..., Outcome], tmp_path: Path):
    code, out, err = run("--checkpoint", FILE, *HEADS, "--out", tmp_path / "head")
    assert (code, err, out.count("\n")) == (0, "", 1)
    assert out.startswith(f"wrote {tmp_path / 'head'}: a head for {TARGET}, 4 stages [2, 2, 2, 2] on 5 ranks")
    assert "anchors (hidden state index) [0, 2, 4, 6, 7]" in out


def test_the_folder_knows_its_target(folder: Path):
    manifest = read_manifest(folder)
    assert manifest.target_digest == config_digest(open_target(TARGET))
    assert (manifest.target_name, manifest.tokenizer_digest, manifest.dtype) == (str(TARGET), None, "float32")


@pytest.mark.slow
def test_the_imported_head_decodes_as_published(folder: Path, tmp_path: Path):
    golden = json.loads((DATA / "tiny_llama" / "golden.json").read_text())["prompts"][:2]
    prompts, found = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    prompts.write_text("".join(json.dumps({"prompt_ids": one["prompt_ids"]}) + "\n" for one in golden))
    arguments = ["--head", str(folder), "--prompts", str(prompts), "--batch", "2", "--max_new_tokens", "80"]
    arguments += ["--devices", "5", "--prefill_chunk", "16", "--max_length", "128", "--json", str(found)]
    assert generate.main([*HEADS, *arguments]) == 0
    for result, one in zip(json.loads(found.read_text())["results"], golden, strict=True):
        assert result["ids"] == one["generated_ids"]
        assert result["cycles"] == one["cycles"]
        assert result["accepted"] == sum(one["accepted"][1:])  # the first, from prefill, is counted true


def test_an_export_is_the_file_that_was_imported(run: Callable[..., Outcome], folder: Path, tmp_path: Path):
    path = tmp_path / "back.pt"
    code, out, err = run("--export", path, "--head", folder, *HEADS)
    assert (code, err, out) == (0, "", f"wrote {path}: 28 tensors of a head for {TARGET}\n")
    found, wanted = (torch.load(file, weights_only=True) for file in (path, FILE))
    assert list(found["config"].items()) == list(wanted["config"].items())
    assert list(found["state_dict"]) == list(wanted["state_dict"])
    assert all(torch.equal(found["state_dict"][name], tensor) for name, tensor in wanted["state_dict"].items())


def test_a_head_that_borrows_the_targets_rows_is_exported_with_them(
    run: Callable[..., Outcome], folder: Path, tmp_path: Path
):
    manifest = read_manifest(folder)
    config = dataclasses.replace(manifest.head, lm_head="target", draft_ids=(7, 40))
    module = random_module(config)
    digests: dict[str, Any] = {"target_digest": manifest.target_digest, "tokenizer_digest": None}
    save_head(tmp_path / "head", module, manifest.plan, target_name="tiny", **digests)
    assert run("--export", tmp_path / "head.pt", "--head", tmp_path / "head", *HEADS)[0] == 0
    stored = torch.load(tmp_path / "head.pt", weights_only=True)
    rows = open_target(TARGET).tensor("head")[[7, 40]]
    assert torch.equal(stored["state_dict"]["lm_head.weight"], torch.from_numpy(rows))
    assert (stored["config"]["draft_token_ids"], stored["config"]["base_model_path"]) == ([7, 40], "tiny")


def test_the_tokenizer_is_remembered(run: Callable[..., Outcome], tmp_path: Path):
    """C09: a head folder is bound to the tokenizer that its target had."""
    target = copy_target(tmp_path / "target")
    assert run("--checkpoint", FILE, "--target", target, "--out", tmp_path / "head")[0] == 0
    assert read_manifest(tmp_path / "head").tokenizer_digest == load_tokenizer(target).digest
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    config["target"]["tokenizer_sha256"] = "c" * 64
    (tmp_path / "head" / "config.json").write_text(json.dumps(config))
    code, _, err = run("--export", tmp_path / "back.pt", "--head", tmp_path / "head", "--target", target)
    assert code == 2
    assert "digest of the tokenizer cccc" in err


def test_a_head_folder_that_remembers_nonsense_is_not_exported(
    run: Callable[..., Outcome], folder: Path, tmp_path: Path
):
    head = shutil.copytree(folder, tmp_path / "head")
    text = (head / "config.json").read_text()
    for kept, message in (
        ('["x"]', "training.published"),
        ('{"base_model_path": 3}', "base_model_path 3, expected str"),
    ):
        tree = json.loads(text) | {"training": {"published": json.loads(kept)}}
        (head / "config.json").write_text(json.dumps(tree))
        code, _, err = run("--export", tmp_path / "head.pt", "--head", head, *HEADS)
        assert (code, (tmp_path / "head.pt").exists()) == (2, False)
        assert message in err


class Unsafe:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"version": 10}, "version is 10, only 11 can be read"),
        ({"aggr_feature_bound": [0, 2, 4, 6, 8]}, "say --final_anchor before_norm"),  # A09
        ({"vocab_size": 999, "num_stages": 3}, "num_stages is 3, which does not cut the target's 8 layers evenly"),
        ({"base_model_path": Unsafe()}, "refused: it holds an object of posix.system"),
    ],
)
def test_a_refused_head_writes_nothing(
    run: Callable[..., Outcome], tmp_path: Path, config: dict[str, Any], message: str
):
    stored = torch.load(FILE, weights_only=True)
    torch.save(stored | {"config": stored["config"] | config}, tmp_path / "head.pt")
    code, out, err = run("--checkpoint", tmp_path / "head.pt", *HEADS, "--out", tmp_path / "head")
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {tmp_path / 'head.pt'}: ")
    assert message in err
    assert "Traceback" not in err
    assert [entry.name for entry in tmp_path.iterdir()] == ["head.pt"]


def test_what_the_user_says_of_the_last_anchor_counts(run: Callable[..., Outcome], tmp_path: Path):
    stored = torch.load(FILE, weights_only=True)
    torch.save(stored | {"config": stored["config"] | {"aggr_feature_bound": [0, 2, 4, 6, 8]}}, tmp_path / "head.pt")
    given = ["--checkpoint", tmp_path / "head.pt", *HEADS, "--out", tmp_path / "head", "--final_anchor"]
    assert run(*given, "after_norm")[0] == 2
    assert run(*given, "before_norm")[0] == 0
    assert read_manifest(tmp_path / "head").plan.anchors == (0, 2, 4, 6, 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--checkpoint", "nowhere.pt", *HEADS, "--out", "x"], "nowhere.pt: no such file"),
        (["--checkpoint", FILE, "--target", "nowhere", "--out", "x"], "nowhere: no such file or folder"),
        (["--export", "x.pt", *HEADS, "--head", "nowhere"], "nowhere is no speculation head"),
        (["--export", FILE, *HEADS, "--head", "{folder}"], "exists and is not replaced"),
        (["--checkpoint", FILE, *HEADS, "--out", TARGET], "exists and is no speculation head"),
        (["--checkpoint", FILE, *HEADS], "give --checkpoint FILE.pt and --out FOLDER to import a head"),
        (["--checkpoint", FILE, "--out", "x", "--head", "y", *HEADS], "found --checkpoint and --out and --head"),
        (HEADS, "found neither"),
        (["--export", "x.pt", "--head", "y", *HEADS, "--final_anchor", "before_norm"], "final_anchor is for imports"),
        (["--checkpoint", FILE, "--out", "x"], "target"),
        (["--checkpoint", FILE, "--out", "x", *HEADS, "--final_anchor", "both"], "final_anchor"),
    ],
)
def test_one_clear_line(run: Callable[..., Outcome], folder: Path, arguments: list[object], message: str):
    code, out, err = run(*(str(argument).format(folder=folder) for argument in arguments))
    assert (code, out) == (2, "")
    assert_one_clear_line(err, message)


def test_without_torch_the_extra_is_named(run: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    code, _, err = run("--checkpoint", FILE, *HEADS, "--out", tmp_path / "head")
    assert code == 2
    assert err == "error: PyTorch is not installed; .pt files need it: pip install 'spd-jax[import]'\n"
