"""Rows of a batch know nothing of each other: lengths, scripts, ends and random numbers are their own."""

import functools

import pytest

from spd_jax.decode.options import Options, SequenceResult
from spd_jax.decode.sampling import Sampling
from tests.decode.engine import BATCH, OWN, assert_cycles_exact, pipeline, random_prompts, script
from tests.decode.test_sampled_text import ROWS, SMALL
from tests.decode.test_sampled_text import decoder as sampler

COUNT = 20
PROMPTS = [random_prompts(8, seed=4)[i] for i in (2, 6, 0, 4)]  # of 3, 7, 1 and 5 tokens
BITS = ["110", "0", "1", "own"]


@functools.cache
def reference() -> list[list[int]]:
    options = Options(max_new_tokens=COUNT, forced_drafts=[OWN] * BATCH)
    return [result.ids for result in pipeline(3, 3).generate(PROMPTS, options).results]


def forced() -> list[list[int]]:
    return [OWN if bits == "own" else script(bits, text) for bits, text in zip(BITS, reference(), strict=True)]


def facts(result: SequenceResult) -> tuple:
    """Everything that was decided, without the log-probabilities."""
    return [(t.id, t.cycle, t.event) for t in result.tokens], result.records, result.finish_reason, result.cycles


def test_every_row_equals_its_solo_run():
    """L01: prompts of different lengths, scripts of their own; K is per row."""
    together = pipeline(3, 3).generate(PROMPTS, Options(max_new_tokens=COUNT, forced_drafts=forced())).results
    for row, result in enumerate(together):
        options = Options(max_new_tokens=COUNT, forced_drafts=[forced()[row]])
        alone = pipeline(3, 3).generate([PROMPTS[row]], options).results[0]
        assert facts(result) == facts(alone)
        assert_cycles_exact(result, 3)
    assert len({result.cycles for result in together}) > 2


def test_rows_that_have_ended_change_nothing():
    """L02: one row ends at its second token, the others go on to their twentieth."""
    row = next(row for row, text in enumerate(reference()) if all(text[1] not in other for other in others(row)))
    eos = (reference()[row][1],)
    assert reference()[row][0] != eos[0]
    whole = pipeline(3, 3).generate(PROMPTS, Options(max_new_tokens=COUNT, forced_drafts=forced())).results
    options = Options(max_new_tokens=COUNT, forced_drafts=forced(), eos_ids=eos)
    results = pipeline(3, 3).generate(PROMPTS, options).results
    assert results[row].ids == reference()[row][:2]
    assert results[row].cycles == 3
    for other in set(range(BATCH)) - {row}:
        assert facts(results[other]) == facts(whole[other])


def others(row: int) -> list[list[int]]:
    return [text for other, text in enumerate(reference()) if other != row]


def test_the_same_request_gives_the_same_cycles_every_time():
    """L06: fifty times."""
    options = Options(max_new_tokens=COUNT, forced_drafts=[script("1101", text) for text in reference()])
    first = list(map(facts, pipeline(3, 3).generate(PROMPTS, options).results))
    for _ in range(49):
        assert list(map(facts, pipeline(3, 3).generate(PROMPTS, options).results)) == first


def sampled(prompts: list[list[int]], sequences: tuple[int, ...], seed: int = 7) -> list[tuple]:
    options = Options(max_new_tokens=12, sampling=Sampling(1.0), seed=seed, sequences=sequences)
    return list(map(facts, sampler(3, "separate", SMALL).generate(prompts, options).results))


VARIED = [[1 + row % 5] * (1 + row % 3) for row in range(ROWS)]


def test_a_seed_and_a_sequence_number_fix_the_draws():
    """H13: twice the same; in another place of the batch, with other neighbours, the same."""
    numbers = tuple(range(ROWS))
    first = sampled(VARIED, numbers)
    assert sampled(VARIED, numbers) == first
    backwards = sampled(VARIED[::-1], numbers[::-1])
    assert backwards[::-1] == first
    neighbours = sampled([VARIED[0]] + [[6, 6, 6, 6]] * (ROWS - 1), (0, *range(100, 99 + ROWS)))
    assert neighbours[0] == first[0]
    assert sampled(VARIED, numbers, seed=8) != first
    assert len({str(tokens) for tokens, *_ in sampled([VARIED[0]] * ROWS, numbers)}) > ROWS // 2


@pytest.mark.slow
def test_a_neighbour_does_not_change_the_draws_of_a_sequence_alone():
    """H13, with a batch of one."""
    together = sampled(VARIED, tuple(range(ROWS)))
    for row in range(4):
        assert sampled([VARIED[row]], (row,))[0] == together[row]
