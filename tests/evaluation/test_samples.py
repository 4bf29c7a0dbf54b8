"""Samples on disk: what is written, what a killed run leaves, and which files are refused."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from spd_jax.decode.options import SequenceResult, Token
from spd_jax.decode.state import ACCEPTED, REJECTED, UNDRAFTED
from spd_jax.evaluation.samples import (
    FolderError,
    Sample,
    SampleFile,
    check_folder,
    sample_of_record,
)
from spd_jax.generation.compare import Comparison
from spd_jax.generation.verdicts import verdicts_of

HEADER: dict[str, Any] = {"settings": {"batch": 1, "plan": (4, 4)}, "decoder": {"head": "target", "temperature": 0.0}}


def sample(index: int = 0, **changes: Any) -> Sample:
    fields: dict[str, Any] = {"dataset": "set", "index": index, "question_id": 81, "category": "writing", "turn": 1}
    fields |= {"prompt_ids": (7, 8), "ids": (1, 2, 3, 4), "text": "世\u2028x", "verdicts": "para"}
    fields |= {"token_cycles": (0, 4, 5, 9), "finish_reason": "length", "prefill_seconds": 0.25, "decode_seconds": 2.5}
    return Sample(**fields | changes)


def file(path: Path, **header: Any) -> SampleFile:
    return SampleFile(path, HEADER | header, 4)


def filled(path: Path, count: int = 3) -> SampleFile:
    opened = file(path)
    for index in range(count):
        opened.add(sample(index))
    return opened


def test_a_record_has_the_counts_and_is_read_again():
    record = sample(equal=True).record(4)
    assert list(record)[:8] == [
        "dataset", "index", "question_id", "category", "turn", "prompt_tokens", "tokens", "cycles",
    ]  # fmt: skip
    assert (record["accepted"], record["rejected"], record["undrafted"]) == (2, 1, 0)
    assert (record["prompt_tokens"], record["tokens"], record["cycles"]) == (2, 4, 9)
    assert (record["acceptance_rate"], record["published_acceptance_rate"]) == (3 / 9, 4 / 9)
    assert (record["alpha"], record["s0"], record["equal"]) == (2 / 3, 4 * 3 / 9, True)
    assert "difference" not in record
    assert sample_of_record(json.loads(json.dumps(record))) == sample(equal=True)
    parted = sample(equal=False, difference={"index": 1, "margin": None, "near_tie": False})
    assert sample_of_record(parted.record(4)) == parted


def test_every_token_has_a_verdict():
    tokens = [Token(5 + i, i, event, 0.0) for i, event in enumerate((UNDRAFTED, ACCEPTED, REJECTED, UNDRAFTED))]
    assert verdicts_of(SequenceResult([1], tokens)) == "paru"
    with pytest.raises(ValueError, match="each of its 4 tokens, found 3 and 4"):
        sample(verdicts="par")


def test_a_difference_is_fit_for_json():
    assert Comparison().record() is None
    assert Comparison(3, float("inf")).record() == {"index": 3, "margin": None, "near_tie": False}
    assert Comparison(3, 2e-5, near_tie=True).record() == {"index": 3, "margin": 2e-5, "near_tie": True}


def test_a_file_goes_on_where_it_ended(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    written = filled(path).samples
    again = file(path)
    assert again.samples == written
    again.add(sample(3))
    assert [record.get("index") for record in map(json.loads, path.read_text().split("\n")[:-1])] == [None, 0, 1, 2, 3]


@pytest.mark.parametrize("cut", [1, 30, "record", "garbage"])
def test_a_line_that_was_cut_off_is_dropped_and_done_again(tmp_path: Path, cut: int | str):
    path = tmp_path / "a.jsonl"
    filled(path)
    whole = path.read_bytes()
    last = len(whole.split(b"\n")[-2])
    if cut == "garbage":
        path.write_bytes(whole[: -last // 2] + b"\0\0\n")
    else:
        path.write_bytes(whole[: -(last if cut == "record" else int(cut))])
    opened = file(path)
    assert sorted(opened.samples) == [("set", 0, 1), ("set", 1, 1)]
    opened.add(sample(2))
    assert path.read_bytes() == whole
    assert file(path).samples == {s.key: s for s in map(sample, range(3))}


@pytest.mark.parametrize("left", [0, 1, 40])
def test_a_run_killed_in_its_first_line_starts_afresh(tmp_path: Path, left: int):
    path = tmp_path / "a.jsonl"
    filled(path, 1)
    whole = path.read_bytes()
    path.write_bytes(whole[:left])
    opened = file(path)
    assert opened.samples == {}
    opened.add(sample(0))
    assert path.read_bytes() == whole


def test_a_file_of_another_evaluation_names_what_differs(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    filled(path)
    before = path.read_bytes()
    with pytest.raises(
        FolderError, match=r"a\.jsonl is of another evaluation: temperature was 0\.0, now 1\.0\. Choose"
    ):
        file(path, decoder={"head": "target", "temperature": 1.0})
    with pytest.raises(FolderError, match=r"batch was 1, now null; plan was \[4, 4\], now \[8\]; seed was null, now 3"):
        check_folder(tmp_path, {"plan": (8,), "seed": 3})
    check_folder(tmp_path, HEADER["settings"])
    assert path.read_bytes() == before


@pytest.mark.parametrize("data", [b"hello", b'{"prompt": "x"}\n', b'{"prompt": "x"}\n{"prompt":', b"[1]\n"])
def test_what_is_no_file_of_samples_is_left_alone(tmp_path: Path, data: bytes):
    path = tmp_path / "a.jsonl"
    path.write_bytes(data)
    with pytest.raises(FolderError, match=r"a\.jsonl:1: this is no file of samples"):
        file(path)
    with pytest.raises(FolderError, match=r"a\.jsonl:1: this is no file of samples"):
        check_folder(tmp_path, HEADER["settings"])
    assert path.read_bytes() == data


@pytest.mark.parametrize(
    ("line", "message"),
    [("{", r":3: not valid JSON"), ("[1]", ":3: expected a sample"), ("{}", ":3: a sample without")],
)
def test_a_broken_line_inside_is_named(tmp_path: Path, line: str, message: str):
    path = tmp_path / "a.jsonl"
    filled(path)
    lines = path.read_text().split("\n")
    path.write_text("\n".join([*lines[:2], line, *lines[3:]]))
    with pytest.raises(FolderError, match=message):
        file(path)


def test_another_version_is_named(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    filled(path)
    path.write_text(path.read_text().replace('"format_version": 1', '"format_version": 9'))
    with pytest.raises(FolderError, match="format_version 9, this program writes 1"):
        file(path)


def test_a_process_that_does_not_write_keeps_samples_in_memory(tmp_path: Path):
    opened = SampleFile(tmp_path / "a.jsonl", HEADER, 4, writes=False)
    opened.add(sample())
    assert opened.samples == {("set", 0, 1): sample()}
    assert not opened.path.exists()


def test_an_empty_answer_has_no_rates():
    record = dataclasses.replace(sample(), ids=(), verdicts="", token_cycles=(), finish_reason="context").record(4)
    assert (record["tokens"], record["cycles"], record["s0"], record["alpha"]) == (0, 0, None, 0.0)
    assert (record["acceptance_rate"], record["published_acceptance_rate"]) == (None, None)


def test_an_autoregressive_answer_has_an_s0_of_one():
    plain = dataclasses.replace(sample(), ids=(5, 6, 7), verdicts="puu", token_cycles=(0, 1, 2))
    assert plain.record(1)["s0"] == 1.0
