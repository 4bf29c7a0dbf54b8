"""Configurations from YAML and the command line: what is read, and that nothing unknown is ignored."""

import dataclasses
from pathlib import Path

import pytest

from spd_jax.config.check_model import CheckModelConfig
from spd_jax.config.command_line import RENAMED, UsageError, parse_command_line
from spd_jax.config.distill import DistillConfig
from spd_jax.config.evaluate import EvaluateConfig
from spd_jax.config.import_head import ImportHeadConfig
from spd_jax.config.plan import PlanConfig
from spd_jax.config.prepare import PrepareConfig
from spd_jax.config.regenerate import RegenerateConfig
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
    texts = ["[1, 2]", "null", "a: b", "{x}", "-", "---", "--", "-x", "--> b", "é😀", ""]
    found = parse("--prompt", *texts, "--stop", "[END]", "--json", "---")
    assert (found.prompt, found.stop, found.json) == (tuple(texts), ("[END]",), "---")
    assert parse("--stop=--end", "---").stop == ("--end", "---")


def test_what_is_no_text_is_refused():
    """Half of a surrogate pair, or a byte of a command line that is not UTF-8, which Python makes one of."""
    for words in (["--prompt", "x", "cut \udce9"], ["--stop", "cut \udce9"], ["--json", "cut \udce9"]):
        said = rf"^{words[0][2:]} holds half of a surrogate pair, U\+DCE9, at character 4: .*, found 'cut \\udce9'$"
        with pytest.raises(UsageError, match=said):
            parse(*words)


def test_one_is_a_list_of_one(tmp_path: Path):
    found = parse("--eos_ids", "257", "--stop", "a", "--plan", "2", "3")
    assert (found.eos_ids, found.stop, found.plan) == ((257,), ("a",), (2, 3))
    path = tmp_path / "run.yaml"
    path.write_text('eos_ids: 257\nstop: "[END]"\nplan: [2, 3]\n')
    found = parse("--config", str(path))
    assert (found.eos_ids, found.stop, found.plan) == ((257,), ("[END]",), (2, 3))
    path.write_text("stages: 4\n")
    of_plan = (
        parse_command_line(PlanConfig, [*TARGET, *given], "") for given in (["--stages", "4"], ["--config", str(path)])
    )
    assert [config.stages for config in of_plan] == [(4,), (4,)]


CONFIGS = [GenerateConfig, EvaluateConfig, PlanConfig, ImportHeadConfig, CheckModelConfig]
CONFIGS += [DistillConfig, PrepareConfig, RegenerateConfig]
# One option is a list of numbers to choose from in the planner, one is a list of texts where several can be decoded.
DIFFER = {"stages": {"int", "int | None", "tuple[int, ...]"}, "prompt": {"str", "tuple[str, ...]"}}
DIFFER |= {"prompts": {"str | None", "tuple[str, ...]"}}


def test_an_option_of_one_name_means_the_same_everywhere():
    """Kinds are the same but for null, and no old name is in use."""
    kinds: dict[str, set[str]] = {}
    for config in CONFIGS:
        for field in dataclasses.fields(config):
            kinds.setdefault(field.name, set()).add(str(field.type))
    wanted = {name: {kind.removesuffix(" | None").replace("PipelineLayout", "Layout") for kind in found}
              for name, found in kinds.items() if name not in DIFFER}  # fmt: skip
    assert {name: found for name, found in wanted.items() if len(found) > 1} == {}
    assert {name: kinds[name] for name in DIFFER} == DIFFER
    assert not {old for old, new in RENAMED.items() if new in kinds and old in kinds} - {"turns"}


@pytest.mark.parametrize(("kind", "old", "new"), [
    (PlanConfig, "model", "target"), (CheckModelConfig, "model", "target"), (PlanConfig, "traces", "replay"),
    (RegenerateConfig, "turns", "max_turns"), (DistillConfig, "device_count", "training_devices"),
])  # fmt: skip
def test_an_old_name_is_told_the_new_one(kind: type, old: str, new: str, tmp_path: Path):
    with pytest.raises(UsageError, match=f"^no option --{old}: it is --{new} now$"):
        parse_command_line(kind, [f"--{old}", "1"], "")
    path = tmp_path / "run.yaml"
    path.write_text(f"{old}: 1\n")
    with pytest.raises(UsageError, match=f"^{path}: no option {old}: it is --{new} now$"):
        parse_command_line(kind, ["--config", str(path)], "")


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
        (["--stages", "many"], "^stages must be a whole number or null, found many$"),
        (["--stages", "1e3"], "^stages must be a whole number or null, found 1e3$"),
        (["--stages", ""], "^stages must be a whole number or null, found nothing$"),
        (["--batch", "null"], "^batch must be a whole number, found null$"),
        (["--seed", "9" * 12], "^seed must lie in -2147483647..2147483647, found 9{12}$"),
        (["--temperature", "nan"], "^temperature must be a number, found nan"),
        (["--temperature", "-.inf"], "^temperature must be a number, found -inf"),
        (["--top_p", "-inf"], "^top_p must be a number, found -inf"),
        (["--compare"], "^--compare needs a value: true or false$"),
        (["--compare", "maybe"], "^compare must be true or false, found maybe$"),
        (["--eos_ids", "x", "3"], r"^eos_ids must be whole numbers, as in \[2, 7\] or null, found"),
        (["--dtype", "float16"], "^dtype must be one of float32, bfloat16, found float16$"),
        (["--json", ""], "^json must be a text or null, found nothing$"),
        (["--promt", "x"], "^no option --promt: did you mean --prompt\\?$"),
        (["--prompt", "x", "--max_tokens", "5"], "^no option --max_tokens"),
        (["word"], "^word belongs to no option$"),
        (["--config"], "^--config needs a value"),
        (["--config", "nowhere.yaml"], "nowhere.yaml: file does not exist$"),
    ],
)
def test_a_wrong_value_names_its_option_in_one_line(arguments: list[str], message: str):
    with pytest.raises(UsageError, match=message) as caught:
        parse(*arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("stages: many", "stages must be a whole number or null, found many"),
        ("temperature: .nan", "temperature must be a number, found nan"),
        ("batch: null", "batch must be a whole number, found null"),
        ("stop: [a, 3]", "stop must be a text or a list of texts"),
        ("stop: {a: 1}", "stop must be a text or a list of texts"),
        ("target: 3", "target must be a text, found 3"),
        ("eos_ids: [1, null]", "eos_ids must be whole numbers"),
        ("traceback: true", "traceback belongs on the command line"),
        ("- 1", "a configuration is"),
        ("", "a configuration is"),
        ("a: [", "Problems parsing config"),
        ("1: 2", "Key must be a string"),
        ("a: \udcff", "codec can't decode"),
    ],
)
def test_a_wrong_file_is_named_in_one_line(text: str, said: str, tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(UsageError) as caught:
        parse("--config", str(path))
    assert str(caught.value).startswith(f"{path}: ")
    assert said in str(caught.value)
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
