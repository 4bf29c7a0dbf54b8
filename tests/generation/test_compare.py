"""What counts as equal, as a near-tie and as an error."""

import jax
import numpy as np
import pytest

from spd_jax.generation.compare import Comparison, compare_ids, teacher_forced_logits
from tests.fixtures import load_fixture


def logits_with(row: list[float]):
    asked = []

    def logits(ids):
        asked.append(list(ids))
        return np.asarray(row, np.float32)

    return logits, asked


def test_equal_ids_ask_for_no_logits():
    logits, asked = logits_with([0.0])
    assert compare_ids([1], [2, 3], [2, 3], logits, "float32") == Comparison()
    assert asked == []


@pytest.mark.parametrize(("dtype", "near_tie"), [("float32", False), ("bfloat16", True)])
def test_the_margin_decides(dtype: str, near_tie: bool):
    logits, asked = logits_with([0.0, 2.0, 2.005, -1.0])
    found = compare_ids([9, 9], [3, 1, 0], [3, 2, 0], logits, dtype)
    assert asked == [[9, 9, 3]]
    assert (found.index, found.near_tie, found.equal) == (1, near_tie, False)
    assert found.margin == pytest.approx(0.005, abs=1e-6)


def test_a_token_below_two_that_tie_is_no_near_tie():
    logits, _ = logits_with([5.0, 5.0, 3.0])
    found = compare_ids([9], [0], [2], logits, "float32")
    assert (found.near_tie, found.margin) == (False, 2.0)


def test_a_text_that_ends_early_is_never_a_near_tie():
    logits, asked = logits_with([0.0])
    found = compare_ids([9], [1, 2], [1, 2, 3], logits, "float32")
    assert (found.index, found.margin, found.near_tie) == (2, None, False)
    assert asked == []


def test_teacher_forced_logits_are_the_models_own():
    target = load_fixture("tiny_llama").target
    ids = [256, 84, 104, 101]
    allowed = np.ones(target.config.vocab_size, bool)
    allowed[7] = False
    row = teacher_forced_logits(target, allowed)(ids)
    expected = np.asarray(jax.jit(lambda ids: target(ids))(np.asarray([ids])))[0, -1]
    assert row[7] == -np.inf
    np.testing.assert_allclose(row[allowed], expected[allowed], atol=2e-5)


def test_in_bfloat16_a_near_tie_grows_with_the_logits() -> None:
    """G01: one step of the number format at the size of the largest logit, at least 1e-2."""

    def logits_of(best: float):
        return lambda ids: np.array([best, best - 0.02, -best])

    small = compare_ids([1], [0], [1], logits_of(2.0), "bfloat16")
    large = compare_ids([1], [0], [1], logits_of(6.0), "bfloat16")
    assert (small.near_tie, small.limit) == (False, 1e-2)
    assert large.near_tie
    assert large.limit == pytest.approx(6.0 / 256)
    assert not compare_ids([1], [0], [1], logits_of(6.0), "float32").near_tie
