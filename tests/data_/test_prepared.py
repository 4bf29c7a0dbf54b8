"""Prepared data on disk: what is written is read, an unfinished folder looks unfinished, a mixed-up one cannot be."""

import json
import os
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from spd_jax.data.prepared import KEY_BITS, Counts, Example, PreparedError, Row, open_prepared
from spd_jax.data.prepared_writer import PreparedWriter

SPEC = {"sources": ["a"], "tokenizer": "t", "held_out": 0.0, "shuffle_seed": None}


def made_rows(first: int, count: int) -> list[Row]:
    rows = []
    for number in range(first, first + count):
        ids = np.arange(number + 2, dtype=np.int32) + 100 * number
        rows.append(Row(Example(ids, np.arange(number + 2) % 2 == 1), f"row {number}", number << (KEY_BITS - 4)))
    return rows


def counted(count: int) -> Counts:
    return Counts(rows=count + 1, kept=count, skipped={"odd": 1}, first={"odd": "row x"})


def write(path: Path, spec: dict[str, Any] = SPEC, **arguments: Any) -> None:
    """Ten rows in two shards, with an empty one between."""
    writer = PreparedWriter(path, spec, **arguments)
    if writer.complete:
        return
    for first, count in [(0, 4), (4, 0), (4, 6)][len(writer.done) :]:
        writer.write(made_rows(first, count), counted(count))
    writer.finish({"sources": ["here"]})


def files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def test_what_is_written_is_read(tmp_path: Path):
    write(tmp_path / "out")
    data = open_prepared(tmp_path / "out", tokenizer_digest="t")
    assert len(data) == 10
    assert data.lengths.tolist() == list(range(2, 12))
    assert data.num_supervised.tolist() == [(number + 2) // 2 for number in range(10)]
    for number, row in enumerate(made_rows(0, 10)):
        found = data[number]
        assert (found.ids.dtype, found.supervised.dtype) == (np.int32, np.bool_)
        assert found.ids.tolist() == row.example.ids.tolist()
        assert found.supervised.tolist() == row.example.supervised.tolist()
        assert data.origin(number) == row.origin
    with pytest.raises(IndexError):
        data[10]
    assert data.manifest["counts"]["rows"] == 13
    assert data.manifest["counts"]["skipped"] == {"odd": 3}
    assert data.manifest["splits"]["train"] == {"rows": 10, "tokens": 65, "supervised": 30}
    assert sorted(files(tmp_path / "out")) == ["manifest.json", "shard-00000.arrow", "shard-00002.arrow"]


def test_the_datasets_library_reads_a_shard(tmp_path: Path):
    write(tmp_path / "out")
    shard = datasets.Dataset.from_file(str(tmp_path / "out" / "shard-00000.arrow"))
    assert shard[1]["ids"] == [100, 101, 102]
    assert shard[1]["supervised"] == [False, True, False]
    assert str(shard.features["ids"]) == "List(Value('int32'))"


def test_the_same_rows_give_the_same_bytes(tmp_path: Path):
    write(tmp_path / "a")
    write(tmp_path / "b")
    assert files(tmp_path / "a") == files(tmp_path / "b")


def test_held_out_conversations_are_those_with_the_smallest_keys(tmp_path: Path):
    for held_out, count in ((0.25, 4), (3.0, 3), (1.0, 1)):
        path = tmp_path / str(held_out)
        write(path, SPEC | {"held_out": held_out})
        train, held = open_prepared(path), open_prepared(path, split="held_out")
        assert [held.origin(index) for index in range(len(held))] == [f"row {number}" for number in range(count)]
        assert [train.origin(index) for index in range(len(train))] == [f"row {n}" for n in range(count, 10)]
        assert held.digest == train.digest
        assert train.manifest["splits"]["held_out"]["rows"] == count
    write(tmp_path / "none")
    with pytest.raises(PreparedError, match="nothing was held out"):
        open_prepared(tmp_path / "none", split="held_out")
    with pytest.raises(PreparedError, match=r"held_out 10.0 takes all 10 conversations"):
        write(tmp_path / "all", SPEC | {"held_out": 10.0})


def test_equal_keys_are_held_out_together(tmp_path: Path):
    writer = PreparedWriter(tmp_path / "out", SPEC | {"held_out": 1.0})
    example = made_rows(0, 1)[0].example
    writer.write([Row(example, f"row {key}", key) for key in (5, 3, 3, 9)], counted(4))
    writer.finish({})
    held = open_prepared(tmp_path / "out", split="held_out")
    assert [held.origin(index) for index in range(len(held))] == ["row 3", "row 3"]


def test_a_shuffle_is_an_order_of_the_same_rows(tmp_path: Path):
    for seed in (0, 1):
        write(tmp_path / str(seed), SPEC | {"shuffle_seed": seed})
    one, other = (open_prepared(tmp_path / str(seed)) for seed in (0, 1))
    orders = [[data.origin(index) for index in range(10)] for data in (one, other)]
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1]) == [f"row {number}" for number in range(10)]
    assert one.lengths.tolist() == [len(one[index].ids) for index in range(10)]
    assert one.digest != other.digest


def test_another_specification_is_refused(tmp_path: Path):
    """C03: stale data reused after the corpus changed."""
    path = tmp_path / "out"
    write(path)
    before = files(path)
    changed = SPEC | {"sources": ["b"], "limit": 3}
    with pytest.raises(
        PreparedError,
        match=r"out: .*sources \['a'\] there, \['b'\] asked for; limit None there, 3 asked for.*overwrite",
    ):
        PreparedWriter(path, changed)
    assert files(path) == before
    write(path, changed, overwrite=True)
    assert open_prepared(path).manifest["spec"] == changed
    assert open_prepared(path).digest != json.loads(before["manifest.json"])["digest"]


def test_an_unfinished_folder_says_so_and_goes_on(tmp_path: Path):
    write(tmp_path / "whole")
    path = tmp_path / "out"
    writer = PreparedWriter(path, SPEC)
    writer.write(made_rows(0, 4), counted(4))
    with pytest.raises(PreparedError, match="was not finished; run it again with the same options"):
        open_prepared(path)
    with pytest.raises(PreparedError, match="holds conversations prepared from something else"):
        PreparedWriter(path, SPEC | {"sources": ["b"]})
    again = PreparedWriter(path, SPEC)
    assert again.done == [counted(4)]
    assert not again.complete
    write(path)
    assert files(path) == files(tmp_path / "whole")
    assert PreparedWriter(path, SPEC).complete


def test_a_shard_cut_short_is_made_again(tmp_path: Path):
    path = tmp_path / "out"
    writer = PreparedWriter(path, SPEC)
    writer.write(made_rows(0, 4), counted(4))
    writer.write([], counted(0))
    os.truncate(path / "shard-00000.arrow", 100)
    assert PreparedWriter(path, SPEC).done == []
    write(path)
    assert len(open_prepared(path)) == 10


@pytest.mark.parametrize("name", ["shard-00000.arrow", "shard-00002.arrow"])
def test_a_damaged_folder_is_refused(tmp_path: Path, name: str):
    write(tmp_path)
    os.truncate(tmp_path / name, 100)
    with pytest.raises(PreparedError, match=rf"{name}: 100 bytes, expected \d+ bytes"):
        open_prepared(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(PreparedError, match=rf"{name}: missing"):
        open_prepared(tmp_path)


def test_data_of_another_tokenizer_is_refused(tmp_path: Path):
    write(tmp_path)
    with pytest.raises(PreparedError, match="prepared with the tokenizer whose digest is t, expected other"):
        open_prepared(tmp_path, tokenizer_digest="other")


def test_what_is_no_prepared_data_says_so(tmp_path: Path):
    with pytest.raises(PreparedError, match=r"holds no prepared conversations \(manifest\.json is missing\)"):
        open_prepared(tmp_path)
    (tmp_path / "manifest.json").write_text('{"format": "x", "format_version": 7}')
    with pytest.raises(PreparedError, match=r"format 'x' version 7, expected '.*' version 2"):
        open_prepared(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(PreparedError, match=r"manifest\.json: not valid JSON"):
        open_prepared(tmp_path)


def test_a_folder_with_something_else_is_left_alone(tmp_path: Path):
    (tmp_path / "letter.txt").write_text("dear")
    (tmp_path / "shard-00000.arrow").write_text("somebody's")
    for overwrite in (False, True):
        with pytest.raises(PreparedError, match="exists and holds no prepared conversations; choose another folder"):
            PreparedWriter(tmp_path, SPEC, overwrite=overwrite)
    assert sorted(files(tmp_path)) == ["letter.txt", "shard-00000.arrow"]


def test_counts_add_up():
    one = Counts(rows=2, kept=1, tokens=5, skipped={"a": 1}, first={"a": "x"})
    other = Counts(rows=3, cut=1, supervised=2, turns_left_out=1, skipped={"a": 2, "b": 1}, first={"a": "y", "b": "z"})
    assert one + other == Counts(5, 1, 1, 5, 2, 1, {"a": 3, "b": 1}, {"a": "x", "b": "z"})


@pytest.mark.parametrize(("size", "row", "token"), [(911, 9, 911), (911 - 1, 9, 910), (3, 1, 100), (1, 0, 1)])
def test_an_id_that_a_model_does_not_have_is_named_with_its_row(tmp_path: Path, size: int, row: int, token: int):
    """Of ten rows whose largest id is 910 in the last; of the first row they are 0 and 1."""
    write(tmp_path / "out")
    data = open_prepared(tmp_path / "out")
    if size > 910:
        data.refuse_unknown_ids(size, str)
        return
    with pytest.raises(PreparedError, match=rf"out: conversation row {row}: {token}$"):
        data.refuse_unknown_ids(size, str)
