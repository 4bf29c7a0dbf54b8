"""Configurations from YAML and the command line: what is read, and that nothing unknown is ignored."""

from pathlib import Path

import pytest

from spd_jax.config.command_line import UsageError, parse_command_line
from spd_jax.config.run import GenerateConfig
from tests.config.help import help_of

TARGET = ["--target", "model"]


def parse(*arguments: str) -> GenerateConfig:
    return parse_command_line(GenerateConfig, [*TARGET, *arguments], "about")


def test_the_command_line_wins_over_the_file(tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text('stages: 4\nstop: ["\\n\\n", "END"]\nprompt: ["a: b"]\ncompare: true\ntemperature: 1\n')
    found = parse("--config", str(path), "--stages", "8")
    assert (found.target, found.stages, found.compare, found.temperature) == ("model", 8, True, 1.0)
    assert (found.stop, found.prompt) == (("\n\n", "END"), ("a: b",))


def test_texts_are_taken_as_they_are():
    texts = ["[1, 2]", "null", "a: b", "{x}", "-"]
    found = parse("--prompt", *texts, "--stop", "[END]")
    assert (found.prompt, found.stop) == (tuple(texts), ("[END]",))


def test_lists_of_numbers_are_written_as_in_yaml():
    found = parse("--plan", "[5,4,4]", "--eos_ids", "[2, 7]")
    assert (found.plan, found.eos_ids) == ((5, 4, 4), (2, 7))


def test_an_unknown_key_is_named(tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text("stages: 4\nstagess: 8\n")
    with pytest.raises(UsageError, match="stagess"):
        parse("--config", str(path))
    with pytest.raises(UsageError, match="--stagess"):
        parse("--stagess", "8")


def test_a_penalty_that_is_not_supported_is_refused_not_ignored():
    """H14: drafts that are later rejected would have to leave a penalty's counts alone; there is no such option yet."""
    with pytest.raises(UsageError, match="--repetition_penalty"):
        parse("--repetition_penalty", "1.5")


def test_processes_need_a_coordinator():
    with pytest.raises(ValueError, match="coordinator"):
        parse("--num_processes", "2")
    assert parse("--coordinator", "host:1", "--num_processes", "2", "--process_id", "1").process_id == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stages", "many"], "stages"),
        (["--dtype", "float16"], "dtype"),
        (["--plan", "3"], "plan"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_a_wrong_value_names_its_option_in_one_line(arguments: list[str], message: str):
    with pytest.raises(UsageError, match=message) as caught:
        parse(*arguments)
    assert "\n" not in str(caught.value)


def test_a_missing_target_is_named():
    with pytest.raises(UsageError, match="target"):
        parse_command_line(GenerateConfig, [], "about")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--limit", "0"], "limit must be at least 1, found 0"),
        (["--batch", "0"], "batch must be at least 1, found 0"),
        (["--devices", "0"], "devices must be at least 1, found 0"),
        (["--max_new_tokens", "-1"], "max_new_tokens must be at least 0, found -1"),
        (["--stop", ""], "empty string"),
    ],
)
def test_values_out_of_range_say_what_would_be_right(arguments: list[str], message: str):
    with pytest.raises(ValueError, match=message):
        parse(*arguments)


def test_help_names_every_field(capsys: pytest.CaptureFixture[str]):
    assert "strings that end a text" in help_of(GenerateConfig, capsys)


@pytest.mark.parametrize("head", ["target", "oracle", "script:1101"])
def test_the_demo_has_its_stages_with_every_head(head: str):
    """Only a trained head's folder says for how many it was made."""
    demo = Path(__file__).parents[2] / "configs" / "smollm2_135m" / "demo.yaml"
    found = parse("--config", str(demo), "--head", head)
    assert (found.head, found.stages, found.devices) == (head, 8, 9)
