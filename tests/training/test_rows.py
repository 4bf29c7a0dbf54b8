"""How full the pipeline is in training: for half of the documents full, else uniform, and the same whenever asked."""

import numpy as np
import pytest

from spd_jax.training.rows import document_starts, draw_fill

SEGMENTS = np.asarray([[1, 1, 1, 2, 2, 0, 0], [1, 2, 3, 3, 3, 3, 3], [0] * 7, [1] * 7])


def test_a_document_starts_where_its_number_does():
    expected = [[0, 0, 0, 3, 3, 5, 5], [0, 1, 2, 2, 2, 2, 2], [0] * 7, [0] * 7]
    starts = document_starts(SEGMENTS)
    assert starts.tolist() == expected
    assert starts.dtype == np.int32


def test_every_document_has_one_fill():
    fill = draw_fill(document_starts(SEGMENTS), 8, seed=3, step=4)
    assert fill.dtype == np.int32
    starts = document_starts(SEGMENTS)
    for row, start in zip(fill, starts, strict=True):
        for first in set(start.tolist()):
            assert len(set(row[start == first].tolist())) == 1
    many = draw_fill(np.tile(np.arange(300, dtype=np.int32), (2, 1)), 8, seed=0, step=0)
    assert (many[0] != many[1]).any()  # rows draw apart


@pytest.mark.parametrize("n", [2, 4, 8])
def test_half_are_full_and_the_rest_uniform(n: int):
    alone = np.tile(np.arange(1000, dtype=np.int32), (40, 1))  # every position its own document
    counts = np.bincount(draw_fill(alone, n, seed=1, step=2).ravel(), minlength=n + 1)
    assert counts[0] == 0
    assert counts[n] == pytest.approx(20000, abs=500)  # five standard deviations
    assert counts[1:n] == pytest.approx([20000 / (n - 1)] * (n - 1), abs=700)


def test_the_same_seed_and_step_draw_the_same():
    low = np.tile(np.arange(50, dtype=np.int32), (2, 1))
    draws = {key: draw_fill(low, 6, seed=key[0], step=key[1]) for key in ((0, 0), (0, 1), (1, 0))}
    assert np.array_equal(draws[0, 0], draw_fill(low, 6, seed=0, step=0))
    assert len({draw.tobytes() for draw in draws.values()}) == 3


def test_full_and_a_single_stage_draw_nothing():
    low = np.zeros((3, 5), np.int32)
    assert (draw_fill(low, 8, seed=0, step=0, full=True) == 8).all()
    assert (draw_fill(low, 1, seed=0, step=0) == 1).all()
