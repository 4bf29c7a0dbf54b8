"""How full the pipeline is in training: for half of the documents full, else uniform, and the same whenever asked."""

import numpy as np
import pytest

from spd_jax.training.rows import document_starts, draw_fill, fill_shares

SEGMENTS = np.asarray([[1, 1, 1, 2, 2, 0, 0], [1, 2, 3, 3, 3, 3, 3], [0] * 7, [1] * 7])


def test_a_document_starts_where_its_number_does():
    expected = [[0, 0, 0, 3, 3, 5, 5], [0, 1, 2, 2, 2, 2, 2], [0] * 7, [0] * 7]
    starts = document_starts(SEGMENTS)
    assert starts.tolist() == expected
    assert starts.dtype == np.int32


def test_every_document_has_one_fill():
    fill = draw_fill(document_starts(SEGMENTS), fill_shares(8), seed=3, step=4)
    assert fill.dtype == np.int32
    starts = document_starts(SEGMENTS)
    for row, start in zip(fill, starts, strict=True):
        for first in set(start.tolist()):
            assert len(set(row[start == first].tolist())) == 1
    many = draw_fill(np.tile(np.arange(300, dtype=np.int32), (2, 1)), fill_shares(8), seed=0, step=0)
    assert (many[0] != many[1]).any()  # rows draw apart


@pytest.mark.parametrize("n", [2, 4, 8])
def test_half_are_full_and_the_rest_uniform(n: int):
    alone = np.tile(np.arange(1000, dtype=np.int32), (40, 1))  # every position its own document
    counts = np.bincount(draw_fill(alone, fill_shares(n), seed=1, step=2).ravel(), minlength=n + 1)
    assert counts[0] == 0
    assert counts[n] == pytest.approx(20000, abs=500)  # five standard deviations
    assert counts[1:n] == pytest.approx([20000 / (n - 1)] * (n - 1), abs=700)


def test_the_same_seed_and_step_draw_the_same():
    low = np.tile(np.arange(50, dtype=np.int32), (2, 1))
    draws = {key: draw_fill(low, fill_shares(6), seed=key[0], step=key[1]) for key in ((0, 0), (0, 1), (1, 0))}
    assert np.array_equal(draws[0, 0], draw_fill(low, fill_shares(6), seed=0, step=0))
    assert len({draw.tobytes() for draw in draws.values()}) == 3


def test_always_full_and_a_single_stage_leave_nothing_to_chance():
    low = np.tile(np.arange(50, dtype=np.int32), (3, 1))
    assert (draw_fill(low, fill_shares(8, 1.0), seed=0, step=0) == 8).all()
    assert (draw_fill(low, fill_shares(8, 0.0), seed=0, step=0) == 1).all()
    assert (draw_fill(low, fill_shares(1), seed=0, step=0) == 1).all()


@pytest.mark.parametrize(("n", "acceptance"), [(2, 0.3), (4, 0.6), (8, 0.9), (1, 0.5)])
def test_fills_are_those_of_decoding(n: int, acceptance: float):
    """Against a pipeline that is played: one in flight after a rejection, and one more with every right draft."""
    random, fill, met = np.random.default_rng(0), 1, np.zeros(n)
    for right in random.random(200_000) < acceptance:
        met[fill - 1] += 1
        fill = min(fill + 1, n) if right else 1
    shares = fill_shares(n, acceptance)
    assert shares.sum() == pytest.approx(1.0, abs=1e-12)
    assert met / met.sum() == pytest.approx(shares, abs=0.01)


def test_an_impossible_acceptance_is_refused():
    with pytest.raises(ValueError, match=r"fill_acceptance is 1\.5: a share of drafts from 0 to 1"):
        fill_shares(4, 1.5)
