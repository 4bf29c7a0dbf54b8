"""The configuration of an evaluation: what is refused, what the help names, and that the shipped files are readable."""

from pathlib import Path

import pytest

from spd_jax.config.command_line import UsageError, parse_command_line
from spd_jax.config.evaluate import EvaluateConfig
from tests.config.help import help_of

CONFIGS = Path(__file__).parents[2] / "configs"
GIVEN = ["--target", "model", "--heads", "target", "--prompts", "a.jsonl"]


def parse(*arguments: str) -> EvaluateConfig:
    return parse_command_line(EvaluateConfig, arguments, "about")


def test_heads_and_files_are_several_words(tmp_path: Path):
    found = parse("--target", "model", "--heads", "a/b", "oracle", "script:10", "--prompts", "x.jsonl", "y.jsonl")
    assert (found.heads, found.prompts) == (("a/b", "oracle", "script:10"), ("x.jsonl", "y.jsonl"))
    path = tmp_path / "run.yaml"
    path.write_text("target: model\nheads: [a, oracle]\nprompts: [x.jsonl]\nstages: 4\n")
    found = parse("--config", str(path), "--heads", "b")
    assert (found.heads, found.prompts, found.stages) == (("b",), ("x.jsonl",), 4)


def test_the_engine_of_a_head_has_all_fields_of_the_pipeline():
    engine = parse(*GIVEN, "--stages", "4", "--dtype", "bfloat16", "--max_length", "99").engine("oracle")
    assert (engine.target, engine.head, engine.stages, engine.dtype) == ("model", "oracle", 4, "bfloat16")
    assert engine.max_length == 99


def test_an_option_must_be_written_out():
    """An abbreviation would take --head, which other scripts have, for --heads."""
    with pytest.raises(UsageError, match="--head"):
        parse(*GIVEN, "--head", "oracle")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--limit", "0"], "limit must be at least 1, found 0"),
        (["--batch", "0"], "batch must be at least 1, found 0"),
        (["--seed", "-1"], "seed must be at least 0, found -1"),
        (["--turns", "second"], "turns"),
        (["--prompts", "a/x.jsonl", "b/x.jsonl"], "prompts holds 'x' twice"),
        (["--heads", "oracle", "oracle"], "heads holds 'oracle' twice"),
    ],
)
def test_values_out_of_range_say_what_would_be_right(arguments: list[str], message: str):
    with pytest.raises(ValueError, match=message):
        parse(*GIVEN, *arguments)


def test_help_names_every_field(capsys: pytest.CaptureFixture[str]):
    assert "goes on where the" in help_of(EvaluateConfig, capsys)


@pytest.mark.parametrize("file", ["smollm2_135m/evaluate.yaml", "released_evaluation.yaml"])
def test_the_shipped_files_are_readable(file: str):
    assert CONFIGS.joinpath(file).read_text().startswith("# ")
    found = parse("--config", str(CONFIGS / file), *([] if file.startswith("smollm2") else GIVEN))
    assert found.compare
    assert all(Path(CONFIGS.parent, path).is_file() for path in found.prompts if path != "a.jsonl")
