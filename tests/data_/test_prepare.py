"""From sources to a prepared folder: counts, cutting, splits, going on after a kill, and what is refused."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from spd_jax.config.prepare import PrepareConfig
from spd_jax.data.conversations import Conversation, Message
from spd_jax.data.labels import Labeller
from spd_jax.data.prepare import Prepared, opening_key, prepare
from spd_jax.data.prepared import Counts, PreparedError, open_prepared
from spd_jax.weights.tokenizer import Tokenizer, load_tokenizer
from tests.data_.chat import byte_tokenizer


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a byte tokenizer that has a chat template."""
    folder = tmp_path_factory.mktemp("target")
    byte_tokenizer().inner.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(target: Path) -> Tokenizer:
    return load_tokenizer(target)


def record(*texts: str) -> dict[str, Any]:
    turns = [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(texts)]
    return {"messages": turns}


def write_lines(path: Path, records: Sequence[Any]) -> str:
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    return str(path)


@pytest.fixture
def source(tmp_path: Path) -> str:
    """Twelve conversations, every fourth row something that is skipped."""
    rows: list[Any] = []
    for number in range(12):
        rows.append(record(f"question {number}", f"answer {number}"))
        if number % 4 == 3:
            rows.append({"messages": []} if number == 3 else record("only a question"))
    return write_lines(tmp_path / "rows.jsonl", rows)


def run(target: Path, out: Path, *sources: str, block_rows: int = 4, report: Any = None, **options: Any) -> Prepared:
    config = PrepareConfig(target=str(target), out=str(out), sources=sources, **options)
    return prepare(config, report, block_rows=block_rows)


def origins(out: Path, **arguments: Any) -> list[str]:
    data = open_prepared(out, **arguments)
    return [data.origin(index) for index in range(len(data))]


def line_of(origin: str) -> int:
    return int(origin.rpartition(":")[2])


def files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def test_conversations_become_ids_and_labels(target: Path, tokenizer: Tokenizer, source: str, tmp_path: Path):
    seen: list[Counts] = []
    prepared = run(target, tmp_path / "out", source, report=seen.append)
    data = open_prepared(tmp_path / "out", tokenizer_digest=tokenizer.digest)
    assert len(data) == 12
    for number in range(12):
        expected = f"<|im_start|>user\nquestion {number}<|im_end|>\n<|im_start|>assistant\nanswer {number}<|im_end|>\n"
        one = data[number]
        assert tokenizer.decode(one.ids.tolist(), skip_special=False) == expected
        assert tokenizer.decode(one.ids[one.supervised].tolist(), skip_special=False) == f"answer {number}<|im_end|>"
    counts = prepared.manifest["counts"]
    assert counts["skipped"] == {"no turns": 1, "no assistant turn": 2}
    assert counts["first"]["no turns"] == f"{source}:5"
    assert (counts["rows"], counts["kept"], counts["tokens"]) == (15, 12, int(data.lengths.sum()))
    assert seen[-1].rows == 15
    assert ("skipped: no assistant turn", "2", "first: 10") in prepared.summary()
    assert not prepared.was_there


def test_several_sources_and_what_was_left_behind(target: Path, source: str, tmp_path: Path):
    other = tmp_path / "other.json"
    other.write_text(json.dumps([record("a", "b"), record("c", "d")])[:-10])
    prepared = run(target, tmp_path / "out", source, str(other))
    assert origins(tmp_path / "out")[-1] == f"{other}: record 0"
    assert prepared.manifest["counts"]["skipped"]["file is cut off"] == 1
    cut = f"{other}: after 1 whole records, at byte {other.stat().st_size}"
    assert ("skipped: file is cut off", "1", f"first: {cut}") in prepared.summary()


def test_long_conversations_are_cut_and_counted(target: Path, tokenizer: Tokenizer, tmp_path: Path):
    rows = [record("q", "a" * 100), record("q", "a"), record("q" * 100, "a"), record("q" * 29, "abc")]
    source = write_lines(tmp_path / "rows.jsonl", rows)
    prepared = run(target, tmp_path / "out", source, max_length=50)
    data = open_prepared(tmp_path / "out")
    assert data.lengths.max() == 50
    assert tokenizer.decode(data[0].ids[data[0].supervised].tolist()) == "a" * int(data.num_supervised[0])
    counts = prepared.manifest["counts"]
    assert (counts["cut"], counts["kept"], counts["skipped"]) == (2, 3, {"too few supervised tokens": 1})
    run(target, tmp_path / "more", source, max_length=50, min_supervised=3)
    assert origins(tmp_path / "more") == [f"{source}:1"]


def test_limit_ends_the_reading(target: Path, source: str, tmp_path: Path):
    prepared = run(target, tmp_path / "out", source, limit=5)
    assert origins(tmp_path / "out") == [f"{source}:{line}" for line in (1, 2, 3, 4, 6)]
    assert prepared.manifest["counts"]["rows"] == 6


class Killed(Exception):
    """Stands for the end of the process."""


def killer(rows: int) -> Any:
    def report(counts: Counts) -> None:
        if counts.rows >= rows:
            raise Killed

    return report


@pytest.mark.parametrize("options", [{}, {"limit": 9, "held_out": 2.0, "shuffle_seed": 1}])
@pytest.mark.parametrize("rows", [1, 4, 9, 11])
def test_a_killed_run_goes_on(
    target: Path, source: str, tmp_path: Path, rows: int, options: Any, monkeypatch: pytest.MonkeyPatch
):
    run(target, tmp_path / "whole", source, **options)
    with pytest.raises(Killed):
        run(target, tmp_path / "out", source, report=killer(rows), **options)
    with pytest.raises(PreparedError, match="was not finished"):
        open_prepared(tmp_path / "out")
    labelled, label = [], Labeller.label
    monkeypatch.setattr(Labeller, "label", lambda self, one: labelled.append(one.origin) or label(self, one))
    run(target, tmp_path / "out", source, **options)
    assert files(tmp_path / "out") == files(tmp_path / "whole")
    written = 4 * -(-rows // 4)  # the report that kills comes after its block is written
    expected = [origin for origin in origins(tmp_path / "whole", split="train") if line_of(origin) > written]
    if options:
        expected += [origin for origin in origins(tmp_path / "whole", split="held_out") if line_of(origin) > written]
    assert sorted(labelled) == sorted(expected), "finished blocks are not labelled again"


def test_a_finished_folder_is_left_as_it_is(target: Path, source: str, tmp_path: Path):
    run(target, tmp_path / "out", source)
    before = files(tmp_path / "out")
    assert run(target, tmp_path / "out", source).was_there
    assert files(tmp_path / "out") == before


def test_a_changed_corpus_is_noticed(target: Path, source: str, tmp_path: Path):
    """C03: built, the corpus changed, built again in the same folder."""
    run(target, tmp_path / "out", source)
    Path(source).write_text(json.dumps(record("new", "row")) + "\n")
    with pytest.raises(PreparedError, match=r"prepared from something else: sources \['sha256:.*overwrite"):
        run(target, tmp_path / "out", source)
    with pytest.raises(PreparedError, match=r"max_length 2048 there, 99 asked for"):
        run(target, tmp_path / "out", source, max_length=99)
    assert len(open_prepared(tmp_path / "out")) == 12
    run(target, tmp_path / "out", source, overwrite=True)
    assert len(open_prepared(tmp_path / "out")) == 1


def test_another_tokenizer_or_template_is_noticed(target: Path, source: str, tmp_path: Path):
    run(target, tmp_path / "out", source)
    for name, other in (
        ("tokenizer", byte_tokenizer(merges=[("a", "b")])),
        ("chat_template", byte_tokenizer("<s>" + str(byte_tokenizer().inner.chat_template))),
    ):
        other.inner.save_pretrained(tmp_path / name)
        with pytest.raises(PreparedError, match=f"something else: {name} "):
            run(tmp_path / name, tmp_path / "out", source)


def test_overwriting_with_what_cannot_be_read_loses_nothing(target: Path, source: str, tmp_path: Path):
    run(target, tmp_path / "out", source)
    before = files(tmp_path / "out")
    with pytest.raises(FileNotFoundError):
        run(target, tmp_path / "out", str(tmp_path / "nowhere.jsonl"), overwrite=True)
    assert files(tmp_path / "out") == before


def test_no_usable_conversation_is_an_error(target: Path, tmp_path: Path):
    source = write_lines(tmp_path / "rows.jsonl", [record("a"), record("b"), {}])
    with pytest.raises(
        ValueError, match=r"none of 3 rows can .*\(no assistant turn: 2; no turns: 1\), first: .*:1; .*:3$"
    ):
        run(target, tmp_path / "out", source)
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="the sources are empty"):
        run(target, tmp_path / "out", write_lines(tmp_path / "none.jsonl", []))


def test_the_targets_own_ids_are_kept(target: Path, tokenizer: Tokenizer, tmp_path: Path):
    """B11: what the target generated is never tokenised again."""
    ids = [300, 5, 300, 7]
    given = record("q", "a") | {"ids": ids, "supervised": [[2, 4]], "tokenizer": tokenizer.digest}
    given["ids"] = ids = [min(token, tokenizer.size - 1) for token in ids]
    run(target, tmp_path / "out", write_lines(tmp_path / "own.jsonl", [given, record("q", "a")]))
    data = open_prepared(tmp_path / "out")
    assert data[0].ids.tolist() == ids
    assert data[0].supervised.tolist() == [False, False, True, True]
    source = write_lines(tmp_path / "foreign.jsonl", [given | {"tokenizer": "abc"}])
    with pytest.raises(ValueError, match=r"foreign\.jsonl:1: its ids belong to the tokenizer with digest abc"):
        run(target, tmp_path / "other", source)


def test_invalid_lines_are_an_error_or_counted(target: Path, source: str, tmp_path: Path):
    """B08 through to the end."""
    with Path(source).open("a") as file:
        file.write('{"messages": [\n')
    with pytest.raises(ValueError, match=r"rows\.jsonl:16: not valid JSON"):
        run(target, tmp_path / "out", source)
    prepared = run(target, tmp_path / "skipping", source, skip_invalid=True)
    assert prepared.manifest["counts"]["skipped"]["not valid JSON"] == 1


def test_held_out_conversations_do_not_depend_on_their_neighbours(target: Path, tmp_path: Path):
    rows = [record(f"question {number}", "answer") for number in range(200)]
    few = write_lines(tmp_path / "few.jsonl", rows[:100])
    many = write_lines(tmp_path / "many.jsonl", rows[::-1])
    for name, source in (("few", few), ("many", many)):
        run(target, tmp_path / name, source, held_out=0.2, block_rows=64)
    questions = [
        {line_of(origin) - 1 for origin in origins(tmp_path / name, split="held_out")} for name in ("few", "many")
    ]
    assert questions[0] == {199 - line for line in questions[1] if 199 - line < 100}
    assert 8 <= len(questions[0]) <= 35


def test_other_answers_to_a_question_have_its_key():
    asked = (Message("system", "s"), Message("user", "q"))
    keys = [opening_key(Conversation((*asked, Message("assistant", text)), "x")) for text in ("a", "b")]
    assert keys[0] == keys[1]
    assert 0 <= keys[0] < 2**63
    assert keys[0] != opening_key(Conversation((asked[1], Message("assistant", "a")), "x"))
    given = [Conversation((), "x", (1, 2, answer), ((2, 3),), "t") for answer in (3, 4)]
    assert opening_key(given[0]) == opening_key(given[1])
    assert opening_key(given[0]) != opening_key(Conversation((), "x", (1, 3, 3), ((2, 3),), "t"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sources": ()}, "no source: give --sources"),
        ({"max_length": 1}, "max_length must be at least 2, found 1"),
        ({"min_supervised": 0}, "min_supervised must be at least 1"),
        ({"limit": 0}, "limit must be at least 1"),
        ({"held_out": -0.1}, r"a share in \[0, 1\) or a whole number"),
        ({"held_out": 1.5}, "held_out must be .* found 1.5"),
        ({"held_out": float("nan")}, "held_out must be .* found nan"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=said):
        PrepareConfig(**{"target": "t", "out": "o", "sources": ("s",)} | options)
