"""infer/evaluate.py from end to end on a tiny target: what it writes, that it goes on, and that answers are exact."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import spd_jax.evaluation.run
from infer import evaluate as script
from spd_jax.decode.autoregressive import AutoregressiveDecoder
from spd_jax.decode.loop import PipelineDecoder
from spd_jax.evaluation.job import EvaluationJob
from spd_jax.evaluation.run import EvaluationDecoders
from spd_jax.generation.run import Decoders
from spd_jax.weights.tokenizer import load_tokenizer
from tests.infer.conftest import COMMON, Answer
from tests.one_line import assert_one_clear_line

N, STAGES, SCRIPT = 12, 4, "script:1110110"
TOKENS = ["--max_new_tokens", str(N), "--batch", "2"]
TALKS = [
    {"question_id": 81, "category": "short", "turns": ["The", " and of"]},
    {"question_id": "x", "category": "long", "turns": ["Here is a list of", "control"]},
    {"turns": ["server"]},
    {"prompt": "content"},
]


class Evaluate:
    """Runs the script on the tiny target, with decoders that are loaded already; `generated` counts batches."""

    def __init__(self, target: Path, decoders: Decoders, monkeypatch: pytest.MonkeyPatch, capsys: Any, folder: Path):
        self.folder, self.generated, self._capsys = folder, 0, capsys
        self._arguments = ["--target", str(target), *COMMON]
        self._decoders = decoders
        monkeypatch.setattr(spd_jax.evaluation.run, "load_evaluation", self._load)
        for decoder in (PipelineDecoder, AutoregressiveDecoder):
            monkeypatch.setattr(decoder, "generate", self._counted(decoder.generate))

    def _load(self, job: EvaluationJob, progress: Any) -> EvaluationDecoders:
        pipelines = dict.fromkeys(job.engines, self._decoders.pipeline)
        return EvaluationDecoders(pipelines, self._decoders.plain, self._decoders.logits)

    def _counted(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*request: Any) -> Any:
            self.generated += 1
            return generate(*request)

        return counting

    def __call__(self, *arguments: str, out: str = "out") -> Answer:
        self.generated = 0
        code = script.main([*self._arguments, "--out", str(self.folder / out), *arguments])
        captured = self._capsys.readouterr()
        summaries = sorted((self.folder / out).glob("summary-*.json"))
        found = json.loads(summaries[-1].read_text()) if summaries else None
        return Answer(code, captured.out, captured.err, found)

    def samples(self, name: str, out: str = "out") -> list[dict[str, Any]]:
        lines = (self.folder / out / f"{name}.jsonl").read_text(encoding="utf-8").split("\n")[1:-1]
        return [json.loads(line) for line in lines]

    def replace(self, **changes: Any) -> None:
        self._decoders = dataclasses.replace(self._decoders, **changes)


@pytest.fixture
def evaluate(
    target: Path, decoders: Decoders, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> Evaluate:
    return Evaluate(target, decoders, monkeypatch, capsys, tmp_path)


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Two data sets: conversations, and prompts as ids; they fill their batches, so that one size is compiled."""
    ids = [{"prompt_ids": [256, 84, 104, 101], "category": "ids"}, {"prompt_ids": [256, 117], "category": "ids"}]
    for name, lines in (("talks", TALKS), ("ids", ids)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return ["--prompts", str(tmp_path / "talks.jsonl"), str(tmp_path / "ids.jsonl")]


def test_several_heads_over_several_data_sets(evaluate: Evaluate, files: list[str], target: Path):
    """B11 too: a second turn follows the first one's context, the ids of its answer as they are, and the new turn."""
    answer = evaluate("--heads", "target", "oracle", SCRIPT, *files, *TOKENS, "--turns", "all")
    assert (answer.code, answer.err) == (0, "")
    plain = evaluate.samples("autoregressive-T0")
    assert [(s["dataset"], s["index"], s["turn"]) for s in plain] == [
        ("talks", 0, 1), ("talks", 1, 1), ("talks", 0, 2), ("talks", 1, 2), ("talks", 2, 1), ("talks", 3, 1),
        ("ids", 0, 1), ("ids", 1, 1),
    ]  # fmt: skip
    assert {s["s0"] for s in plain} == {1.0}
    assert [s["question_id"] for s in plain] == [81, "x", 81, "x", *[None] * 4]
    tokenizer = load_tokenizer(target)
    for name in ("target", "oracle", "script-1110110"):
        samples = evaluate.samples(f"{name}-T0")
        assert [s["ids"] for s in samples] == [s["ids"] for s in plain]
        assert [s["prompt_ids"] for s in samples] == [s["prompt_ids"] for s in plain]
        assert samples[2]["prompt_ids"] == [*samples[0]["prompt_ids"], *samples[0]["ids"], *b" and of"]
        for sample in samples:
            assert sample["equal"] is True
            assert sample["text"] == tokenizer.decode(sample["ids"])
            assert sample["tokens"] == len(sample["verdicts"]) == len(sample["token_cycles"]) == N
            assert sample["prompt_tokens"] == len(sample["prompt_ids"])
            assert sample["accepted"] + sample["rejected"] == N - 1
            assert sample["acceptance_rate"] == (N - 1) / sample["cycles"]
            assert sample["s0"] == STAGES * sample["acceptance_rate"]
            assert sample["finish_reason"] == "length"
            assert sample["decode_seconds"] > 0
    assert {s["verdicts"] for s in evaluate.samples("oracle-T0")} == {"p" + "a" * (N - 1)}
    assert {s["cycles"] for s in evaluate.samples("oracle-T0")} == {N + STAGES - 2}
    assert {s["verdicts"] for s in evaluate.samples("script-1110110-T0")} == {"paaraaraaaaa"}
    _check_summary(answer, evaluate)


def _check_summary(answer: Answer, evaluate: Evaluate) -> None:
    summary = answer.json
    assert (summary["num_stages"], summary["simulated"], summary["missing"]) == (STAGES, True, 0)
    assert list(summary["decoders"]) == ["target", "oracle", "script-1110110"]
    for name, decoder in summary["decoders"].items():
        samples = evaluate.samples(f"{name}-T0")
        overall = decoder["overall"]
        for key in ("tokens", "cycles", "accepted", "rejected", "undrafted"):
            assert overall[key] == sum(sample[key] for sample in samples)
        assert overall["s0"] == pytest.approx(STAGES * 8 * (N - 1) / overall["cycles"])
        assert list(decoder["by_dataset"]) == ["talks", "ids"]
        assert list(decoder["by_category"]["talks"]) == ["short", "long"]
        assert list(decoder["by_context"]) == ["<128"]
        assert decoder["exact"] == {"equal": 8, "compared": 8, "near_ties": 0, "errors": 0}
        assert decoder["times"]["tokens_per_second"] > 0
        assert f"{name}: ids equal to autoregressive decoding: 8 of 8" in answer.out
    assert summary["autoregressive"]["tokens"] == 8 * N
    for said in ("By data set", "mean of sets", "By category", "talks: long", "By context length", "By place in the",
                 "Wall-clock", "share this machine's cores", "5 devices (simulated)"):  # fmt: skip
        assert said in answer.out
    assert max(map(len, answer.out.split("\n\n")[1].splitlines())) <= 132
    assert (evaluate.folder / "out" / "acceptance-T0.png").read_bytes().startswith(b"\x89PNG")


def test_the_same_command_goes_on_where_it_was_killed(evaluate: Evaluate, files: list[str]):
    arguments = ("--heads", "target", *files, *TOKENS, "--turns", "all")
    first = evaluate(*arguments)
    whole, batches = {name: evaluate.samples(name) for name in ("autoregressive-T0", "target-T0")}, evaluate.generated
    assert batches == 8
    path = evaluate.folder / "out" / "target-T0.jsonl"
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join(lines[:3]) + b"\n" + lines[3][:50])  # header, two answers, and a part of the third
    again = evaluate(*arguments)
    assert evaluate.generated == batches - 5  # all of plain decoding, and the first turn of the first batch, are there
    assert "(10 answers are there already)" in again.out
    for name, samples in whole.items():
        found = sorted(evaluate.samples(name), key=_key)
        assert [_untimed(s) for s in found] == [_untimed(s) for s in sorted(samples, key=_key)]
    assert again.json["decoders"]["target"]["by_place"] == first.json["decoders"]["target"]["by_place"]
    evaluate(*arguments)
    assert evaluate.generated == 0


def _key(sample: dict[str, Any]) -> tuple[Any, ...]:
    return sample["dataset"], sample["index"], sample["turn"]


def _untimed(sample: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in sample.items() if not name.endswith("_seconds")}


def test_a_special_token_and_a_string_end_answers(evaluate: Evaluate, files: list[str], marked: Path):
    ends = ["--target", str(marked), "--eos_ids", "257", "258", "--stop", "<mark>", "con"]
    answer = evaluate("--heads", "target", *files, *TOKENS, *ends)
    assert (answer.code, answer.err) == (0, "")
    samples = evaluate.samples("target-T0")
    assert [bytes(sample["ids"]) for sample in samples[:3]] == [b" server and", b" the con", b" and"]
    assert [sample["text"] for sample in samples[:3]] == [" server an", " the ", " an"]
    assert [sample["finish_reason"] for sample in samples[:3]] == ["stop"] * 3
    assert all(sample["equal"] for sample in samples)
    code = evaluate("--heads", "target", *files, *TOKENS, *ends[:-1]).code
    assert code == 2, "answers that end otherwise belong into another folder"


def test_another_configuration_in_the_folder_is_refused(evaluate: Evaluate, files: list[str]):
    evaluate("--heads", "oracle", *files, *TOKENS)
    before = {path.name: path.read_bytes() for path in (evaluate.folder / "out").iterdir()}
    answer = evaluate("--heads", "target", *files, "--max_new_tokens", "9", "--seed", "2", "--batch", "2")
    assert answer.code == 2
    assert "is of another evaluation: max_new_tokens was 12, now 9; seed was 0, now 2. Choose another" in answer.err
    assert {path.name: path.read_bytes() for path in (evaluate.folder / "out").iterdir()} == before
    other = evaluate("--heads", "anti", *files, *TOKENS)  # another head is welcome
    assert other.code == 0
    assert [s["verdicts"] for s in evaluate.samples("anti-T0")] == ["p" + "r" * (N - 1)] * 6
    assert evaluate.generated == 3


@pytest.mark.slow
def test_sampled_answers_depend_on_nothing_else_in_the_run(evaluate: Evaluate, files: list[str]):
    sampled = ["--heads", "target", "--temperature", "1", *TOKENS, "--compare", "false"]
    first = evaluate(*sampled, *files, "--limit", "2")
    assert first.code == 0, first.err
    alone = evaluate(*sampled, "--prompts", files[2], out="alone")
    assert alone.code == 0, alone.err
    samples = [s for s in evaluate.samples("target-T1") if s["dataset"] == "ids"]
    assert [s["ids"] for s in evaluate.samples("target-T1", "alone")] == [s["ids"] for s in samples]
    assert samples[0]["ids"] != samples[1]["ids"]
    assert {s["equal"] for s in samples} == {None}
    assert not (evaluate.folder / "alone" / "autoregressive-T1.jsonl").exists()
    assert alone.json["autoregressive"] is None


def test_a_later_turn_without_room_is_told_apart(evaluate: Evaluate, tmp_path: Path):
    path = tmp_path / "long.jsonl"
    turns = ["The", "x" * 60, "y" * 60, "never"]
    path.write_text(2 * (json.dumps({"turns": turns}) + "\n"))
    answer = evaluate("--heads", "oracle", "--prompts", str(path), *TOKENS, "--turns", "all")
    assert answer.code == 0, answer.err
    samples = evaluate.samples("oracle-T0")
    assert [(s["tokens"], s["finish_reason"]) for s in samples] == [(N, "length")] * 4 + [(0, "context")] * 4
    assert "had no room, without an answer: 4 of oracle" in answer.out
    assert answer.json["decoders"]["oracle"]["exact"]["compared"] == 4


def test_ids_that_differ_without_reason_end_in_an_error(evaluate: Evaluate, files: list[str], decoders: Decoders):
    class Forgetful(type(decoders.plain)):
        def generate(self, prompts: Any, options: Any) -> Any:
            generation = super().generate(prompts, options)
            generation.results[0].tokens.pop()
            return generation

    wrong = object.__new__(Forgetful)
    wrong.__dict__.update(decoders.plain.__dict__)
    evaluate.replace(plain=wrong)
    answer = evaluate("--heads", "target", *files, *TOKENS)
    assert answer.code == 1
    assert (
        "target: ids equal to autoregressive decoding: 3 of 6, 3 differ without reason: this is an error" in answer.out
    )
    parted = [s for s in evaluate.samples("target-T0") if not s["equal"]]
    assert [s["difference"]["index"] for s in parted] == [N - 1] * 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--heads", "target"], "prompts is empty: give --prompts"),
        (["--prompts", "FILE"], "heads is empty: give --heads"),
        (["--heads", "target", "target", "--prompts", "FILE"], "heads holds 'target' twice"),
        (["--heads", "target", "--prompts", "FILE", "other/talks.jsonl"], "prompts holds 'talks' twice"),
        (["--heads", "target", "--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--heads", "target", "nowhere", "--prompts", "FILE"], "head 'nowhere' is no head folder"),
        (["--heads", "oracle", "--prompts", "FILE", "--temperature", "1"], "head oracle drafts what greedy decoding"),
        (["--heads", "target", "--prompts", "FILE", "--top_k", "5"], "no effect at temperature 0"),
        (["--heads", "target", "--prompts", "FILE", "--eos_ids", "[260]"], "eos_ids: id 260 is outside the vocabulary"),
        (["--heads", "target", "--prompts", "FILE", "--turns", "second"], "turns"),
        (["--heads", "target", "--prompts", "FILE", "--head", "x"], "--head"),
        (["--heads", "target", "--prompts", "FILE", "--max_length", "4"], "talks.jsonl:1: the prompt has 4 tokens"),
    ],
)
def test_one_clear_line(evaluate: Evaluate, files: list[str], arguments: list[str], message: str):
    answer = evaluate(*[files[1] if word == "FILE" else word for word in arguments])
    assert answer.code == 2
    assert_one_clear_line(answer.err, message)
    assert not (evaluate.folder / "out").exists()
