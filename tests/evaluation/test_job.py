"""What an evaluation checks and names before anything is loaded, and that the target is loaded once or not at all."""

from pathlib import Path
from typing import Any

import pytest

from spd_jax.config.evaluate import EvaluateConfig
from spd_jax.evaluation.job import AUTOREGRESSIVE, EvaluationJob, Question, head_labels, prepare_evaluation
from spd_jax.evaluation.run import load_evaluation
from spd_jax.evaluation.samples import Sample
from spd_jax.generation.engine import Engine, open_engine
from spd_jax.generation.prompts import Prompt, PromptError
from spd_jax.speculation.checkpoint import save_head
from spd_jax.weights.mapping import config_digest
from tests.byte_text import TARGET, copy_target

IDS = '{"prompt_ids": [1, 2], "category": "ids"}\n{"prompt_ids": [3]}\n'


def job(folder: Path, **fields: Any) -> EvaluationJob:
    path = folder / "ids.jsonl"
    path.write_text(IDS)
    given = {"target": str(TARGET), "devices": 5, "prompts": (str(path),), "out": str(folder / "out")}
    return prepare_evaluation(EvaluateConfig(**given | {"heads": ("target",), "stages": 4} | fields))


@pytest.fixture
def head(tmp_path: Path) -> Path:
    """A head folder for the stages [2, 2, 4]."""
    config = EvaluateConfig(str(TARGET), heads=("target",), prompts=("x",), plan=(2, 2, 4), num_draft_layers=2)
    engine = open_engine(config.engine("target"))
    digest = config_digest(engine.weights)
    return save_head(
        tmp_path / "heads" / "final", engine.head(), engine.plan, target_digest=digest, tokenizer_digest=None,
        target_name="tiny",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("heads", "labels"),
    [
        (["target", "oracle", "script:1101"], ["target", "oracle", "script-1101"]),
        (["out/a/final", "out/b"], ["final", "b"]),
        (["out/a/final", "out/b/final/"], ["out-a-final", "out-b-final"]),
        (["../heads/x y", "autoregressive"], ["x-y", "head-autoregressive"]),
        (["a/b", "a-b", "c/b"], ["a-b", "head-a-b", "c-b"]),
    ],
)
def test_heads_have_short_names_that_differ(heads: list[str], labels: list[str]):
    assert head_labels(heads) == labels


def test_long_scripts_have_short_names_that_differ():
    labels = head_labels(["script:" + "1" * 300 + end for end in ("0", "1")])
    assert len(set(labels)) == 2
    assert all(len(label) <= 48 and label.startswith("script-1111") for label in labels)


def test_random_numbers_of_an_answer_are_its_own():
    """Neither the other files of a run nor their order changes them."""
    numbers = {
        Question(dataset, index, Prompt("here", text="x"), (1,), 3).number(turn)
        for dataset in ("mt_bench", "gsm8k")
        for index in range(300)
        for turn in (1, 2, 3)
    }
    assert len(numbers) == 2 * 300 * 3


def test_a_head_folder_brings_the_cut_wherever_it_stands(tmp_path: Path, head: Path):
    found = job(tmp_path, heads=("target", "oracle", str(head)), stages=None)
    assert list(found.engines) == ["target", "oracle", "final"]
    assert {engine.plan.stage_layers for engine in found.engines.values()} == {(2, 2, 4)}
    assert [engine.plan.num_draft_layers for engine in found.engines.values()] == [3, 3, 2]
    assert list(found.files) == [AUTOREGRESSIVE, "target", "oracle", "final"]
    assert {name: found.missing(name) for name in found.files} == dict.fromkeys(found.files, 2)
    described = found.describe()
    assert "final: " in described
    assert "prompts  ids 2 (first turn)" in described
    assert "answers are there already" not in described


def test_the_target_is_loaded_once_for_all_heads(tmp_path: Path, head: Path):
    found = load_evaluation(job(tmp_path, heads=("target", str(head)), stages=None, compare=False))
    one, other = found.pipelines.values()
    assert one.params.embedding is other.params.embedding
    assert [decoder.program.plan.num_draft_layers for decoder in (one, other)] == [3, 2]
    assert (found.plain, found.logits) == (None, None)


def test_nothing_is_loaded_where_nothing_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Engine, "pipeline", lambda *_: pytest.fail("loaded"))
    monkeypatch.setattr(Engine, "baseline", lambda *_: pytest.fail("loaded"))
    found = job(tmp_path)
    for file in found.files.values():
        for dataset, index, turn in found.keys:
            file.add(Sample(dataset, index, None, None, turn, (1,), (), None, "", (), "length"))
    assert load_evaluation(job(tmp_path)).pipelines == {}
    assert "(4 answers are there already)" in job(tmp_path).describe()


def test_a_head_that_was_trained_on_is_another_one(tmp_path: Path, head: Path):
    found = job(tmp_path, heads=(str(head),), stages=None)
    found.files["final"].add(Sample("ids", 0, None, None, 1, (1, 2), (), None, "", (), "length"))
    job(tmp_path, heads=(str(head),), stages=None)
    engine = next(iter(found.engines.values()))
    module = engine.head()
    module.projections[0].weight.set_value(2 * module.projections[0].weight[...])
    digest = config_digest(engine.weights)
    save_head(head, module, engine.plan, target_digest=digest, tokenizer_digest=None, target_name="tiny")
    with pytest.raises(ValueError, match=r"final-T0\.jsonl is of another evaluation: head_digests was "):
        job(tmp_path, heads=(str(head),), stages=None)


def test_only_a_changed_file_of_prompts_is_another_evaluation(tmp_path: Path):
    found = job(tmp_path)
    found.files["target"].add(Sample("ids", 0, None, None, 1, (1, 2), (), None, "", (), "length"))
    job(tmp_path, heads=("oracle",), compilation_cache=None, cycles_per_dispatch=3)
    path = tmp_path / "ids.jsonl"
    config = EvaluateConfig(
        str(TARGET), heads=("target",), stages=4, devices=5, prompts=(str(path),), out=str(tmp_path / "out")
    )
    path.write_text(IDS + '{"prompt_ids": [9]}\n')
    with pytest.raises(ValueError, match=r"another evaluation: prompts was \{\"ids\": "):
        prepare_evaluation(config)


def test_later_turns_are_checked_before_anything_is_loaded(tmp_path: Path):
    target, path = copy_target(tmp_path / "tiny"), tmp_path / "talks.jsonl"
    path.write_text('{"turns": ["a", "b"]}\n{"turns": ["a", ""]}\n')
    given: dict[str, Any] = {"heads": ("target",), "stages": 4, "devices": 5, "prompts": (str(path),)}
    given["out"] = str(tmp_path / "out")
    assert len(prepare_evaluation(EvaluateConfig(str(target), **given)).keys) == 2
    with pytest.raises(PromptError, match=r"talks\.jsonl:2: turn 2 is empty"):
        prepare_evaluation(EvaluateConfig(str(target), turns="all", **given))
    path.write_text('{"turns": ["a", "b"]}\n')
    assert prepare_evaluation(EvaluateConfig(str(target), turns="all", **given)).keys == [
        ("talks", 0, 1), ("talks", 0, 2),
    ]  # fmt: skip
