"""What a loss is made of: the mean over supervised tokens, computed by hand from logits."""

import functools

import jax
import numpy as np
import pytest

from spd_jax.data.packing import Batch, BatchStream
from spd_jax.data.prepared import Example
from spd_jax.training.step import Sums
from tests.decode.engine import target
from tests.tiny import decoder_logits
from tests.training.passes import (
    IDS,
    LENGTH,
    ROWS,
    TRAINED,
    logits_of,
    packed,
    programs,
    random_ids,
    rows_of,
    sums_of,
    trained_target,
    trainee,
)


def example(length: int, supervised: list[int] | None = None, seed: int = 0) -> Example:
    mask = [1] * length if supervised is None else supervised
    return Example(random_ids(length, seed=seed), np.asarray(mask, bool))


def found(batch: Batch, fill: int = 3) -> Sums:
    made = programs()
    return sums_of(made, made.start(trainee()), rows_of(batch, fill))


@functools.cache
def by_hand(ids: tuple[int, ...], fill: int) -> np.ndarray:
    """KL(teacher || draft) over the draft vocabulary at every position of a document, NaN where the teacher's token is
    outside of it."""
    alone = packed([Example(np.asarray(ids, np.int32), np.ones(len(ids), bool))])
    q = logits_of(trainee(), TRAINED, trained_target(), rows_of(alone, fill))[0].astype(np.float64)
    p = decoder_logits(target(3), alone.ids)[0].astype(np.float64)
    inside = np.isin(p.argmax(axis=-1), IDS)
    log_p, log_q = (x - np.logaddexp.reduce(x, axis=-1, keepdims=True) for x in (p[:, IDS], q))
    losses = (np.exp(log_p) * (log_p - log_q)).sum(axis=-1)
    return np.where(inside, losses, np.nan)[: len(ids)]


def check(sums: Sums, document: Example, rows: list[int], fill: int = 3) -> None:
    """The sums are those of these rows of one document."""
    losses = by_hand(tuple(document.ids.tolist()), fill)[rows]
    assert float(sums.figures.count) == len(rows)
    assert float(sums.figures.covered) == np.isfinite(losses).sum() > 0
    assert float(sums.total) == pytest.approx(np.nansum(losses), rel=1e-4)


def test_the_last_position_has_no_loss():
    """A03: six tokens, all supervised: the mean over five rows."""
    document = example(6)
    for fill in (1, 3):
        check(found(packed([document]), fill), document, [0, 1, 2, 3, 4], fill)


def test_the_mask_is_shifted_with_the_tokens():
    """A04: mask [0,0,0,1,1,1]: rows 2, 3 and 4 predict tokens 3, 4 and 5."""
    document = example(6, [0, 0, 0, 1, 1, 1], seed=5)
    check(found(packed([document])), document, [2, 3, 4])


def test_every_supervised_token_weighs_the_same():
    """A05: answers of 2 and 20 tokens: the mean over 22 tokens, wherever they stand and whatever pads them."""
    ids = random_ids(24, seed=3)
    short, long = (Example(ids, np.arange(24) >= 24 - count) for count in (2, 20))
    one, other, both = (found(packed(*rows)) for rows in ([[short]], [[long]], [[short], [long]]))
    check(one, short, [21, 22])
    check(other, long, list(range(3, 23)))
    assert float(both.total) == pytest.approx(float(one.total) + float(other.total), rel=1e-5)
    assert float(both.figures.count) == 22
    spread = found(packed([], [long], [], [], [], [], [short], []))
    assert float(spread.total) == pytest.approx(float(both.total), rel=1e-5)


def test_packed_documents_have_the_loss_of_separate_ones():
    """N01, N02: [5, 6, 7] and [8, 9] packed or apart: the same loss and gradients, none on rows 2 and 4."""
    first, second = (Example(np.asarray(ids, np.int32), np.ones(len(ids), bool)) for ids in ((5, 6, 7), (8, 9)))
    third = example(9, seed=8)
    together, apart = found(packed([first, second, third])), found(packed([first], [second], [third]))
    losses = [by_hand(tuple(one.ids.tolist()), 3)[:-1] for one in (first, second, third)]
    assert float(together.figures.count) == 2 + 1 + 8
    assert float(together.total) == pytest.approx(sum(np.nansum(one) for one in losses), rel=1e-4)
    assert float(together.total) == pytest.approx(float(apart.total), rel=1e-5)
    for ours, theirs in zip(jax.tree.leaves(together.gradients), jax.tree.leaves(apart.gradients), strict=True):
        assert np.abs(theirs).max() > 1e-4
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_a_stream_and_its_rows_one_by_one_have_the_same_loss():
    """A whole epoch, packed into rows of 32, against every document alone."""

    class Made:
        lengths = np.asarray([9, 14, 4, 11, 30, 2, 21])

        def __getitem__(self, index: int) -> Example:
            rng = np.random.default_rng(index)
            length = int(self.lengths[index])
            return Example(random_ids(length, seed=index), rng.random(length) < 0.6)

    data = Made()
    stream = BatchStream(data, rows=ROWS, row_length=LENGTH, seed=1)
    assert stream.steps_per_epoch == 1
    sums = found(stream.batch_at(0))
    apart = found(packed(*([data[index]] for index in range(7))))
    assert float(sums.figures.count) == float(apart.figures.count) > 20
    assert float(sums.total) == pytest.approx(float(apart.total), rel=1e-5)
