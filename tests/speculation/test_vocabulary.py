"""The draft vocabulary: the most frequent ids and those that must be in, absolute, sorted and within the tokenizer."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from spd_jax.speculation.vocabulary import (
    byte_tokens,
    check_draft_ids,
    choose_draft_vocabulary,
    count_tokens,
    draft_index,
    draft_offsets,
)
from tests.data_.chat import byte_tokenizer


def test_the_most_frequent_ids_are_chosen_and_sorted():
    counts = count_tokens([np.asarray([5, 5, 5, 2]), np.asarray([], np.int32), np.asarray([9, 9, 7], np.int32)], 10)
    assert counts.tolist() == [0, 0, 1, 0, 0, 3, 0, 1, 0, 2]
    chosen = choose_draft_vocabulary(counts, 2)
    assert chosen.ids == (5, 9)
    assert chosen.coverage == pytest.approx(5 / 7)


def test_ties_go_to_the_lower_id():
    counts = np.asarray([1, 0, 1, 1, 0, 2], np.int64)
    assert choose_draft_vocabulary(counts, 3).ids == (0, 2, 5)
    assert choose_draft_vocabulary(counts, 5).ids == (0, 1, 2, 3, 5)


def test_what_must_be_in_is_in():
    """An id that ends a text may be rare or never occur; a head without it could not end one."""
    counts = np.asarray([0, 5, 4, 3, 2, 1], np.int64)
    chosen = choose_draft_vocabulary(counts, 3, must_have=[5, 0])
    assert chosen.ids == (0, 1, 5)
    assert chosen.coverage == pytest.approx(6 / 15)
    assert choose_draft_vocabulary(counts, 6, must_have=[0]).coverage == 1.0
    assert choose_draft_vocabulary(np.zeros(4, np.int64), 2).coverage == 0.0


@hypothesis.settings(deadline=None)
@hypothesis.given(st.lists(st.integers(0, 4), min_size=1, max_size=30), st.data())
def test_no_other_choice_covers_more(numbers: list[int], data: st.DataObject):
    counts = np.asarray(numbers, np.int64)
    must_have = data.draw(st.lists(st.integers(0, len(counts) - 1), unique=True))
    size = data.draw(st.integers(max(1, len(must_have)), len(counts)))
    ids = choose_draft_vocabulary(counts, size, must_have=must_have).ids
    assert len(ids) == size
    assert list(ids) == sorted(set(ids))
    assert set(must_have) <= set(ids)
    free = sorted((counts[token] for token in range(len(counts)) if token not in must_have), reverse=True)
    best = sum(free[: size - len(must_have)])
    assert sum(counts[token] for token in ids if token not in must_have) == best


def test_labels_are_rows_of_the_head():
    """C04: target id 40 is row 2 of a head that keeps [3, 9, 40]."""
    index = draft_index([3, 9, 40], 64)
    assert index[[3, 9, 40]].tolist() == [0, 1, 2]
    assert (np.delete(index, [3, 9, 40]) == -1).all()
    draft_logits = np.asarray([0.0, 1.0, 5.0])
    assert index[40] == draft_logits.argmax()


def test_ids_are_absolute_and_offsets_are_named():
    """C06: kept ids [0, 1, 2, 7] are d2t [0, 0, 0, 4] in EAGLE's files, which look empty and are not."""
    counts = np.asarray([9, 9, 9, 0, 0, 0, 0, 9], np.int64)
    ids = choose_draft_vocabulary(counts, 4).ids
    assert ids == (0, 1, 2, 7)
    assert draft_offsets(ids) == [0, 0, 0, 4]
    assert [row + offset for row, offset in enumerate(draft_offsets(ids))] == list(ids)


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([3, 3, 99], r"draft ids must lie in 0\.\.63, found \[99\]"),
        ([3, 3], r"must not hold duplicates, found \[3\]"),
        ([-1, 3], r"found \[-1\]"),
    ],
)
def test_ids_that_cannot_be_are_refused(ids: list[int], said: str):
    """C07: duplicates and ids out of range would count double or clamp."""
    with pytest.raises(ValueError, match=said):
        check_draft_ids(ids, 64)
    with pytest.raises(ValueError, match=said):
        draft_index(ids, 64)
    with pytest.raises(ValueError, match=said.replace("draft ids", "must_have ids")):
        choose_draft_vocabulary(np.ones(64, np.int64), 10, must_have=ids)


def test_an_order_of_ones_own_is_refused():
    with pytest.raises(ValueError, match="draft ids must be sorted"):
        draft_index([9, 3], 64)


def test_padded_ids_are_never_in():
    """C08: 64 rows of embeddings, 60 tokens: ids 60..63 stand for nothing."""
    with pytest.raises(ValueError, match=r"found ids 3\.\.60, the tokenizer has ids 0\.\.59"):
        count_tokens([np.asarray([3, 60])], 60)
    counts = count_tokens([np.arange(60)], 60)
    assert max(choose_draft_vocabulary(counts, 60).ids) == 59
    with pytest.raises(ValueError, match=r"61 ids is not possible: .* at most 60"):
        choose_draft_vocabulary(counts, 61)
    with pytest.raises(ValueError, match=r"must_have ids must lie in 0\.\.59, found \[63\]"):
        choose_draft_vocabulary(counts, 10, must_have=[63])
    with pytest.raises(ValueError, match=r"1 ids is not possible: at least 2 \(must_have\)"):
        choose_draft_vocabulary(counts, 1, must_have=[4, 5])


def test_byte_tokens_of_both_spellings():
    tokenizer = byte_tokenizer(merges=[("a", "b")])
    assert byte_tokens(tokenizer.inner.get_vocab()) == tuple(range(256))
    pieces = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 3 for byte in range(256)} | {"▁a": 300}
    assert byte_tokens(pieces) == tuple(range(3, 259))
    assert byte_tokens({"a": 0, "<0x00>": 1}) == ()
