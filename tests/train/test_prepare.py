"""train/prepare.py: the table at the end, a second run, and one line for what cannot be done."""

import json
from pathlib import Path

import pytest

from spd_jax.data.prepared import open_prepared
from tests.data_.chat import byte_tokenizer
from tests.one_line import assert_one_clear_line
from train import prepare as script


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    byte_tokenizer().inner.save_pretrained(tmp_path / "target")
    rows = [
        {"conversations": [{"from": "human", "value": f"q {n}"}, {"from": "gpt", "value": f"a {n}"}]} for n in range(20)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, {}]))
    (tmp_path / "run.yaml").write_text(f"target: {tmp_path / 'target'}\nout: {tmp_path / 'out'}\nheld_out: 2\n")
    return ["--config", str(tmp_path / "run.yaml"), "--sources", str(tmp_path / "rows.jsonl")]


def test_a_run_and_the_next(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert script.main(arguments) == 0
    out = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "rows read 21" in lines
    assert "skipped: no turns 1 first: 21" in lines
    assert "train: conversations 18" in lines
    assert lines[-1] == f"{tmp_path / 'out'} is ready"
    assert len(open_prepared(tmp_path / "out", split="held_out")) == 2
    assert script.main(arguments) == 0
    assert capsys.readouterr().out.rstrip().endswith(f"{tmp_path / 'out'} was there already")


def test_rows_that_are_left_out_are_counted_and_located(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    rows = tmp_path / "rows.jsonl"
    count = rows.read_text().count("\n")
    for role, more in (
        ("narrator", {}),
        ("assistant", {"reasoning_content": "hm"}),
        ("assistant", {"content": "\ud83d"}),
    ):
        turns = [{"role": "user", "content": "q"}, {"role": role, "content": "a", **more}]
        rows.write_text(rows.read_text() + json.dumps({"messages": turns}) + "\n")
    assert script.main(arguments) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert f"skipped: unknown role 1 first: {count + 1}, turn 2: role 'narrator'" in lines
    assert f"skipped: the chat template has no place for its reasoning 1 first: {count + 2}, 'hm'" in lines
    said = "turn 2: half of a surrogate pair, U+D83D, at character 0: it is no text"
    assert f"skipped: half of a surrogate pair 1 first: {count + 3}, {said}" in lines


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--max_length", "1"], "max_length must be at least 2"),
        (["--sources", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
        (["--sourcess", "x"], "--sourcess"),
        (["--target", "nowhere"], "nowhere: no such file or folder"),
    ],
)
def test_one_clear_line(arguments: list[str], capsys: pytest.CaptureFixture[str], more: list[str], said: str):
    assert script.main([*arguments, *more]) == 2
    assert_one_clear_line(capsys.readouterr().err, said)
