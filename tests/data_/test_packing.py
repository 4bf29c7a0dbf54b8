"""Packing: every supervised token in one place an epoch, nothing across a border, the same rows whenever asked for."""

import dataclasses
from collections import Counter

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

from spd_jax.data.packing import Batch, BatchStream, cut, make_batch, pack
from spd_jax.data.prepared import Example


@dataclasses.dataclass
class Made:
    """Examples in memory; token t of example e is 1000 e + t."""

    supervised: list[np.ndarray]

    @property
    def lengths(self) -> np.ndarray:
        return np.asarray([len(one) for one in self.supervised], np.int64)

    def __getitem__(self, index: int) -> Example:
        supervised = self.supervised[index]
        return Example(np.arange(len(supervised), dtype=np.int32) + 1000 * index, supervised)


def example(*ids: int, supervised: list[int] | None = None) -> Example:
    mask = [1] * len(ids) if supervised is None else supervised
    return Example(np.asarray(ids, np.int32), np.asarray(mask, bool))


def random_examples(seed: int, count: int, longest: int = 60, share: float = 0.5) -> Made:
    random = np.random.default_rng(seed)
    return Made([random.random(length) < share for length in random.integers(1, longest, count)])


def predicted(batch: Batch) -> list[int]:
    """The tokens that scored positions predict."""
    rows, places = np.nonzero(batch.scored)
    return batch.ids[rows, places + 1].tolist()


def test_the_last_position_is_not_scored():
    """A03: after the shift the last position has no label."""
    batch = make_batch([[example(1, 2, 3, 4, 5, 6)]], 6)
    assert batch.scored.tolist() == [[True] * 5 + [False]]
    assert make_batch([[example(1, 2, 3, 4, 5, 6)]], 8).scored.sum() == 5


def test_positions_are_scored_by_what_they_predict():
    """A04: mask [0,0,0,1,1,1] scores rows 2, 3, 4, not 3, 4, 5."""
    batch = make_batch([[example(1, 2, 3, 4, 5, 6, supervised=[0, 0, 0, 1, 1, 1])]], 6)
    assert np.flatnonzero(batch.scored[0]).tolist() == [2, 3, 4]
    assert predicted(batch) == [4, 5, 6]


def test_every_supervised_token_weighs_the_same():
    """A05: however long the prompts and however much padding, the sum of weights is the number of learnt tokens."""
    short, long = (example(*range(24), supervised=[0] * (24 - count) + [1] * count) for count in (2, 20))
    for length, rows in (
        (24, [[short], [long]]),
        (64, [[short], [long]]),
        (64, [[short, long]]),
        (64, [[long, short]]),
    ):
        for num_rows in (len(rows), len(rows) + 3):
            assert make_batch(rows, length, num_rows).scored.sum() == 22


def test_documents_of_a_row_are_apart():
    """N01, N02: positions restart, no row predicts across a border (rows 2 and 4)."""
    batch = make_batch([[example(5, 6, 7), example(8, 9)]], 6)
    assert batch.ids.tolist() == [[5, 6, 7, 8, 9, 0]]
    assert batch.segments.tolist() == [[1, 1, 1, 2, 2, 0]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 0]]
    assert batch.scored.tolist() == [[True, True, False, True, False, False]]
    alone = [make_batch([[one]], 6) for one in (example(5, 6, 7), example(8, 9))]
    assert sorted(predicted(batch)) == sorted(predicted(alone[0]) + predicted(alone[1]))


def test_a_document_of_one_token_scores_nothing():
    batch = make_batch([[example(5), example(6, 7)]], 4)
    assert batch.scored.tolist() == [[False, True, False, False]]


def test_empty_rows_fill_a_batch_up():
    batch = make_batch([[example(5, 6)]], 3, 3)
    assert batch.ids.shape == (3, 3)
    assert not batch.segments[1:].any()
    assert not batch.scored[1:].any()


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="row 0: document 2 ends at 5, a row has 4 positions"):
        make_batch([[example(1, 2, 3), example(4, 5)]], 4)
    with pytest.raises(ValueError, match="2 rows do not fit into a batch of 1"):
        make_batch([[], []], 4, 1)
    with pytest.raises(ValueError, match="row_length must be at least 2, found 1"):
        pack([3], 1, seed=0)


def test_a_batch_is_a_pytree():
    batch = make_batch([[example(5, 6)]], 3)
    assert len(jax.tree.leaves(batch)) == 4
    assert jax.tree.map(np.shape, batch).ids == (1, 3)


def test_later_pieces_repeat_one_token():
    assert cut([5, 2], 8) == [(0, 0, 5), (1, 0, 2)]
    assert cut([8], 8) == [(0, 0, 8)]
    assert cut([9], 8) == [(0, 0, 8), (0, 7, 9)]
    assert cut([22], 8) == [(0, 0, 8), (0, 7, 15), (0, 14, 22)]


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(st.lists(st.integers(1, 70), min_size=1, max_size=40), st.integers(2, 33), st.integers(0, 5))
def test_packing_loses_nothing_and_fits(lengths: list[int], row_length: int, seed: int):
    packing = pack(lengths, row_length, seed=seed)
    targets = Counter()
    for row in packing.rows:
        assert row
        assert sum(stop - start for _, start, stop in row) <= row_length
        for number, start, stop in row:
            targets.update((number, token) for token in range(start + 1, stop))
    assert targets == Counter((number, token) for number, length in enumerate(lengths) for token in range(1, length))
    assert packing.dropped == lengths.count(1)
    assert 0 <= packing.fill <= 1
    assert packing == pack(lengths, row_length, seed=seed)
    assert len(pack(lengths, row_length, seed=seed + 1).rows) == len(packing.rows)


def test_rows_are_well_filled_and_seeds_differ():
    lengths = np.random.default_rng(0).integers(20, 600, 500)
    one, other = (pack(lengths, 1024, seed=seed) for seed in (0, 1))
    assert one.fill > 0.98
    assert one.rows != other.rows


def test_every_supervised_token_is_predicted_once_an_epoch():
    data = random_examples(0, 50)
    expected = Counter(
        1000 * number + int(token)
        for number, supervised in enumerate(data.supervised)
        for token in np.flatnonzero(supervised)
        if token
    )
    for row_length in (7, 16, 64):
        stream = BatchStream(data, rows=4, row_length=row_length, seed=3)
        for epoch in range(3):
            steps = range(epoch * stream.steps_per_epoch, (epoch + 1) * stream.steps_per_epoch)
            found = Counter(token for step in steps for token in predicted(stream.batch_at(step)))
            assert found == expected


def test_pieces_without_a_scored_position_are_dropped_and_counted():
    prompt, answer, first_only = np.zeros(20, bool), np.ones(4, bool), np.asarray([True, False, False])
    data = Made([np.concatenate([prompt, answer]), np.zeros(3, bool), first_only])
    stream = BatchStream(data, rows=1, row_length=9, seed=0)
    # Pieces of the first: 0-8, 8-16, 16-23. Only the last has something to learn; the other two examples have nothing.
    assert stream.dropped == 4
    assert stream.rows_at(0) == (((0, 16, 24),),)
    assert stream.steps_per_epoch == 1
    with pytest.raises(ValueError, match="nothing to learn: no piece of 1 examples"):
        BatchStream(Made([np.zeros(5, bool)]), rows=1, row_length=8)


def test_a_resumed_run_reads_what_it_would_have_read():
    """P04: the loader must not restart from zero; every sample once an epoch, wherever the run was cut."""
    data = random_examples(1, 40, share=1.0)
    arguments = {"rows": 3, "row_length": 64, "seed": 5}
    whole = BatchStream(data, **arguments)
    steps = 2 * whole.steps_per_epoch
    expected = list(whole.batches(0, steps))
    for cut_at in (1, whole.steps_per_epoch - 1, whole.steps_per_epoch, steps - 1):
        before, after = BatchStream(data, **arguments), BatchStream(data, **arguments)
        found = [*before.batches(0, cut_at), *after.batches(cut_at, steps)]
        for one, other in zip(expected, found, strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))
    for epoch in range(2):
        first = epoch * whole.steps_per_epoch
        seen = [
            number
            for step in range(first, first + whole.steps_per_epoch)
            for row in whole.rows_at(step)
            for number, _, _ in row
        ]
        assert sorted(seen) == [number for number, length in enumerate(data.lengths) if length > 1]
    assert whole.rows_at(0) != whole.rows_at(whole.steps_per_epoch), "an epoch must not repeat the order of the last"
    # Going back gives the same again.
    assert np.array_equal(whole.batch_at(0).ids, expected[0].ids)


def test_an_uneven_last_batch_is_filled_with_empty_rows():
    """Q09: 7 samples, 2 processes, 2 rows each: both end at the same step, and nothing is lost."""
    data = Made([np.ones(8, bool)] * 7)
    stream = BatchStream(data, rows=4, row_length=8, seed=0)
    assert stream.steps_per_epoch == 2
    batches = list(stream.batches(0, 2))
    shares = [[jax.tree.map(lambda a, p=p: a[2 * p : 2 * p + 2], batch) for batch in batches] for p in range(2)]
    assert [[batch.ids.shape for batch in share] for share in shares] == [[(2, 8)] * 2] * 2
    assert sum(len(predicted(batch)) for share in shares for batch in share) == 7 * 7
    assert not batches[1].segments[3].any()


def test_a_stream_refuses_what_cannot_be():
    data = Made([np.ones(8, bool)])
    with pytest.raises(ValueError, match="at least one row, found rows 0"):
        BatchStream(data, rows=0, row_length=8)
    with pytest.raises(ValueError, match="step must not be negative, found -1"):
        BatchStream(data, rows=1, row_length=8).batch_at(-1)
