"""The configuration of a training run: what is refused, what the help names, and that shipped files are readable."""

from pathlib import Path
from typing import Any

import pytest

from spd_jax.config.command_line import UsageError, parse_command_line
from spd_jax.config.distill import DistillConfig
from spd_jax.config.prepare import PrepareConfig
from spd_jax.config.regenerate import RegenerateConfig
from tests.config.help import help_of

ROOT = Path(__file__).parents[2]
GIVEN = ["--target", "model", "--out", "run", "--data", "a"]


def parse(*arguments: str) -> DistillConfig:
    return parse_command_line(DistillConfig, arguments, "about")


def test_data_are_several_words_and_numbers_keep_their_kind(tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text("target: model\nout: run\ndata: [a, b]\nlearning_rate: 5.0e-4\nclip: null\nanchors: [0, 4]\n")
    found = parse("--config", str(path), "--plan", "[5,4]")
    assert (found.data, found.learning_rate, found.clip) == (("a", "b"), 5e-4, None)
    assert (found.anchors, found.plan) == ((0, 4), (5, 4))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data"], "no data: give --data FOLDER"),
        (["--stages", "0"], "stages must be at least 1, found 0"),
        (["--row_length", "1"], "row_length must be at least 2, found 1"),
        (["--rows", "0"], "rows must be at least 1, found 0"),
        (["--epochs", "-1"], "epochs must be at least 1, found -1"),
        (["--max_steps", "0"], "max_steps must be at least 1, found 0"),
        (["--keep", "0"], "keep must be at least 1, found 0"),
        (["--evaluate_every", "-1"], "evaluate_every must be at least 0, found -1"),
        (["--draft_vocabulary", "-5"], "draft_vocabulary must be at least 0, found -5"),
        (["--first_layer", "-1"], "first_layer must be at least 0, found -1"),
        (["--decode_every", "10"], "decode_every needs decode_prompts"),
    ],
)
def test_values_out_of_range_say_what_would_be_right(arguments: list[str], message: str):
    with pytest.raises(ValueError, match=message):
        parse(*GIVEN, *arguments)


@pytest.mark.parametrize(
    ("name", "value"), [("objective", "mse"), ("optimizer", "sgd"), ("rows", "many"), ("head_", "x")]
)
def test_what_is_no_option_is_named(name: str, value: str):
    with pytest.raises(UsageError, match=name):
        parse(*GIVEN, f"--{name}", value)


def test_help_names_every_field(capsys: pytest.CaptureFixture[str]):
    assert "goes on where" in " ".join(help_of(DistillConfig, capsys).split())


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        ("smollm2_135m/distill.yaml", DistillConfig),
        ("first_head/distill.yaml", DistillConfig),
        ("first_head/prepare.yaml", PrepareConfig),
        ("first_head/regenerate.yaml", RegenerateConfig),
    ],
)
def test_the_shipped_files_are_readable(file: str, kind: type[Any]):
    path = ROOT / "configs" / file
    assert path.read_text().startswith("# ")
    parse_command_line(kind, ["--config", str(path)], "about")


def test_the_steps_of_the_first_head_hand_on_what_they_write():
    def step(name: str, kind: type[Any]) -> Any:
        return parse_command_line(kind, ["--config", str(ROOT / "configs" / "first_head" / f"{name}.yaml")], "about")

    answers, data, head = (
        step("regenerate", RegenerateConfig),
        step("prepare", PrepareConfig),
        step("distill", DistillConfig),
    )
    assert (ROOT / answers.source).is_file()
    assert (answers.out,) == data.sources
    assert (data.out,) == head.data
    assert answers.target == data.target == head.target
    assert f"{head.out}/best" in (ROOT / "docs" / "usage.md").read_text()
