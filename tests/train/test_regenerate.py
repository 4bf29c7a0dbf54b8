"""train/regenerate.py on the tiny target: what it wrote is what plain decoding gives, and one line for errors."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from spd_jax.config.command_line import parse_command_line
from spd_jax.config.regenerate import RegenerateConfig
from spd_jax.data.sources import read_conversations
from spd_jax.generation.answers import open_regeneration
from spd_jax.weights.load import load_decoder, open_target
from tests.byte_text import TEMPLATE, copy_target, write_byte_tokenizer
from tests.one_line import assert_one_clear_line
from tests.tiny import decoder_logits
from train import regenerate as script

COUNT, NEW = 6, 12
TOKENS = 260  # of the byte tokenizer


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_target(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    # One batch of greedy and one of sampled conversations, padded to one size: few programs.
    asked = [
        "The server",
        "Here is a list of",
        "A",
        "The control of",
        "In the",
        "Content and",
    ]
    turns = [["human", text, "gpt", "x", "human", " and the", "gpt", "x"] for text in asked]
    rows = [{"conversations": [{"from": a, "value": b} for a, b in zip(t[::2], t[1::2], strict=True)]} for t in turns]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def arguments(target: Path, source: Path, tmp_path: Path) -> list[str]:
    given = {"target": target, "source": source, "out": tmp_path / "out.jsonl", "batch": 4, "max_new_tokens": NEW}
    given |= {"max_length": 96, "prefill_chunk": 16, "top_k": 5, "greedy_share": 0.5}
    return [word for name, value in given.items() for word in (f"--{name}", str(value))]


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_answers_are_the_targets_own(arguments: list[str], target: Path, capsys: pytest.CaptureFixture[str]):
    """B11: the second answer continues the ids of the first, which nobody has spelt again."""
    out = Path(arguments[arguments.index("--out") + 1])
    assert script.main(arguments) == 0
    said = capsys.readouterr()
    assert f"{COUNT} conversations, " in said.out
    assert said.out.endswith(f"{out} is ready\n")
    assert f"{COUNT} conversations" in said.err  # a line a batch where there is no terminal
    rows = rows_of(out)
    assert len(rows) == COUNT
    greedy = [row for row in rows if row["sampling"]["temperature"] == 0.0]
    assert sorted(row["number"] for row in greedy) == [1, 3, 5]
    model = load_decoder(open_target(target), np.float32)
    length = max(len(row["ids"]) for row in greedy)
    ids = np.asarray([row["ids"] + [0] * (length - len(row["ids"])) for row in greedy])
    best = decoder_logits(model, ids)[..., :TOKENS].argmax(-1)
    for row, winners in zip(greedy, best, strict=True):
        assert len(row["supervised"]) == 2
        for start, end in row["supervised"]:
            assert row["ids"][start:end] == winners[start - 1 : end - 1].tolist()
    assert all(len(c.supervised) == 2 for c in read_conversations(out))  # pyright: ignore


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--max_length", "12"], "max_length 12 must be above max_new_tokens 12"),
        (["--max_length", "100000"], "max_length 100000 is above the 512 positions"),
        (["--greedy_share", "1.5"], "greedy_share must lie in [0, 1]"),
        (["--temperature", "0"], "top_k 5 and top_p 1.0 have no effect at temperature 0"),
        (["--source", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
        (["--stop", "END"], "stop 'END' is no special token of"),
        (["--batch", "0"], "batch must be at least 1"),
    ],
)
def test_one_clear_line(arguments: list[str], capsys: pytest.CaptureFixture[str], more: list[str], said: str):
    assert script.main([*arguments, *more]) == 2
    assert_one_clear_line(capsys.readouterr().err, said)
    assert not Path(arguments[arguments.index("--out") + 1]).exists()


def test_numbers_that_overflow_are_an_error_and_no_answers(
    arguments: list[str], target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Weights that are finite and too large: the answers would all be the id that a NaN leaves."""
    broken = tmp_path / "broken"
    shutil.copytree(target, broken)
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"] = np.full_like(tensors["model.norm.weight"], 3e38)
    save_file(tensors, broken / "model.safetensors")
    arguments[arguments.index("--target") + 1] = str(broken)
    assert script.main(arguments) == 2
    said = capsys.readouterr().err
    assert "error: answers to conversations [" in said
    assert "the final norm or the head produced NaN or infinity" in said
    assert not Path(arguments[arguments.index("--out") + 1]).exists()


def test_an_answer_ends_at_the_models_ends_and_at_special_tokens(arguments: list[str]):
    run = open_regeneration(parse_command_line(RegenerateConfig, [*arguments, "--stop", "<unused>"], ""))
    assert run.ends == (257, 259)
    assert run.plan.facts["eos_ids"] == [257, 259]


def test_a_conversation_with_an_id_that_the_model_does_not_have(
    arguments: list[str], target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """An added token of the tokenizer, which the template writes; the source's line is named."""
    other = shutil.copytree(target, tmp_path / "other")
    write_byte_tokenizer(other, more=["<end>"])
    template = TEMPLATE.replace("{% endfor %}", "{% if message['role'] == 'user' %}<end>{% endif %}{% endfor %}")
    file = other / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": template}))
    assert script.main([*arguments, "--target", str(other)]) == 2
    source = arguments[arguments.index("--source") + 1]
    assert_one_clear_line(capsys.readouterr().err, f"{source}:1: id 260 ('<end>', a token of the tokenizer")
    assert not Path(arguments[arguments.index("--out") + 1]).exists()
