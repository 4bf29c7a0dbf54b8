"""Several prepared folders as one: every example of every part once, whatever the parts' sizes."""

from pathlib import Path

import numpy as np
import pytest

from spd_jax.data.mixture import Mixture
from spd_jax.data.packing import BatchStream
from spd_jax.data.prepared import Counts, Example, PreparedData, Row, open_prepared
from spd_jax.data.prepared_writer import PreparedWriter

SPEC = {"sources": ["a"], "tokenizer": "t", "held_out": 0.0, "shuffle_seed": None}
LENGTHS = {"a": [3, 5], "b": [4], "c": [2, 2, 6]}


def prepared(path: Path, name: str) -> PreparedData:
    """Examples that repeat a number of their own, all but the first token supervised."""
    rows = []
    for index, length in enumerate(LENGTHS[name]):
        ids = np.full(length, 10 * ord(name) + index, np.int32)
        rows.append(Row(Example(ids, np.arange(length) > 0), f"{name}:{index}", index + 1))
    writer = PreparedWriter(path / name, SPEC)
    writer.write(rows, Counts(rows=len(rows), kept=len(rows)))
    writer.finish({})
    return open_prepared(path / name)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Mixture:
    return Mixture([prepared(tmp_path_factory.mktemp("parts"), name) for name in LENGTHS])


def test_examples_come_part_by_part(mixture: Mixture):
    wanted = [(name, index) for name, lengths in LENGTHS.items() for index in range(len(lengths))]
    assert len(mixture) == len(wanted) == 6
    assert mixture.lengths.tolist() == [length for lengths in LENGTHS.values() for length in lengths]
    for number, (name, index) in enumerate(wanted):
        assert mixture[number].ids.tolist() == [10 * ord(name) + index] * LENGTHS[name][index]
        assert mixture.origin(number) == f"{name}:{index}"


@pytest.mark.parametrize("index", [-1, 6])
def test_there_is_nothing_beyond(mixture: Mixture, index: int):
    with pytest.raises(IndexError, match=f"example {index} of 6"):
        mixture[index]
    with pytest.raises(IndexError, match=f"example {index} of 6"):
        mixture.origin(index)


def test_an_epoch_has_every_conversation_of_every_part_once(mixture: Mixture):
    """P04: packing mixes the parts; nothing is seen twice, nothing is left out."""
    stream = BatchStream(mixture, rows=1, row_length=8, seed=0)
    for epoch in range(2):
        steps = range(epoch * stream.steps_per_epoch, (epoch + 1) * stream.steps_per_epoch)
        seen = sorted(piece[0] for step in steps for row in stream.rows_at(step) for piece in row)
        assert seen == list(range(6))
        ids = np.concatenate([batch.ids[batch.segments > 0] for batch in map(stream.batch_at, steps)])
        assert sorted(ids.tolist()) == sorted(np.concatenate([mixture[i].ids for i in range(6)]).tolist())
