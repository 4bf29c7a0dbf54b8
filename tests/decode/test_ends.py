"""Where sequences end: end tokens in the pipeline, limits, stop checks, the context, the borders of cache buckets."""

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from spd_jax.decode.loop import PipelineDecoder
from spd_jax.decode.options import Generation, Options, SequenceResult
from spd_jax.decode.state import REJECTED
from spd_jax.weights.random_model import RandomWeights
from tests.decode.engine import (
    BATCH,
    CHUNK,
    OWN,
    VOCAB,
    assert_cycles_exact,
    autoregressive,
    make_pipeline,
    model_config,
    pipeline,
    plan_of,
    random_head,
    random_prompts,
    script,
    target,
    verdicts,
)

COUNT = 20
PROMPTS = random_prompts(BATCH, seed=2)
SCRIPTS = ["1", "0", "0110", "own"]  # of the rows of a batch of one prompt


@functools.cache
def texts() -> list[list[int]]:
    """The target's greedy text for every prompt."""
    return [r.ids for r in autoregressive(3).generate(PROMPTS, Options(max_new_tokens=COUNT)).results]


def every_script(row: int, **options: Any) -> tuple[list[SequenceResult], list[int]]:
    """One prompt four times, each with another script, and its own text."""
    text = texts()[row]
    forced = [OWN if bits == "own" else script(bits, text) for bits in SCRIPTS]
    request = Options(**({"max_new_tokens": COUNT, "forced_drafts": forced} | options))
    return pipeline(3, 3).generate([PROMPTS[row]] * BATCH, request).results, text


def first_time(text: Sequence[int], place: int) -> bool:
    return text[place] not in text[:place]


def unused(text: Sequence[int], count: int) -> tuple[int, ...]:
    return tuple(sorted(set(range(VOCAB)) - set(text))[:count])


@pytest.mark.parametrize("place", [0, 1, 2, 3, 7])
def test_an_end_token_in_the_pipeline_ends_the_sequence(place: int):
    """I01 (several end tokens, not the first of the list), I03 (younger tokens in flight are dropped)."""
    row = next(row for row in range(BATCH) if first_time(texts()[row], place))
    before, after = unused(texts()[row], 2)
    results, text = every_script(row, eos_ids=(before, texts()[row][place], after))
    for result in results:
        assert result.ids == text[: place + 1]
        assert result.finish_reason == "stop"
        assert_cycles_exact(result, 3)


def test_a_drafted_end_token_that_is_rejected_ends_nothing():
    """I04."""
    text = texts()[0]
    wrong = [(token + 1) % VOCAB for token in text[1:]]
    eos = tuple(set(wrong) - set(text))
    assert eos
    results, _ = every_script(0, eos_ids=eos)
    for result in results:
        assert result.ids == text
        assert result.finish_reason == "length"
    assert set(eos) & {record.draft for record in results[1].records}


def test_ignored_end_tokens_are_neither_emitted_nor_drafted():
    """I06: masked in the target and in the head."""
    plain = pipeline(3, 3).generate(PROMPTS, Options(max_new_tokens=COUNT, forced_drafts=[OWN] * BATCH))
    drafted = [record.draft for result in plain.results for record in result.records]
    eos = (max(set(drafted), key=drafted.count), texts()[0][1], texts()[1][3])
    options = Options(max_new_tokens=COUNT, eos_ids=eos, ignore_eos=True, forced_drafts=[OWN] * BATCH)
    results = pipeline(3, 3).generate(PROMPTS, options).results
    theirs = autoregressive(3).generate(PROMPTS, options).results
    for result, other in zip(results, theirs, strict=True):
        assert result.ids == other.ids
        assert len(result.ids) == COUNT
        assert not set(eos) & set(result.ids)
        assert not set(eos) & {record.draft for record in result.records}
        assert_cycles_exact(result, 3)
    assert [r.ids for r in results] != texts()


@pytest.mark.parametrize("count", [0, 1, 2])
def test_few_tokens(count: int):
    """I12: nothing, and what the prefill alone gives."""
    for result, text in zip(
        pipeline(3, 3).generate(PROMPTS, Options(max_new_tokens=count, forced_drafts=[OWN] * BATCH)).results,
        texts(),
        strict=True,
    ):
        assert result.ids == text[:count]
        assert result.finish_reason == "length"
        assert result.cycles == (3 if count == 2 else 0)
        assert_cycles_exact(result, 3)


def test_without_a_limit_decoding_goes_to_the_end_of_the_context(monkeypatch: pytest.MonkeyPatch):
    """I12: None; the last position of the context is used, none beyond."""
    monkeypatch.setattr(pipeline(3, 3), "max_length", 16)
    results = pipeline(3, 3).generate(PROMPTS, Options(forced_drafts=[OWN] * BATCH)).results
    for prompt, result, text in zip(PROMPTS, results, texts(), strict=True):
        assert len(prompt) + len(result.ids) == 16
        assert result.ids == text[: 16 - len(prompt)]
        assert result.finish_reason == "length"


def test_a_negative_limit_is_refused():
    with pytest.raises(ValueError, match="max_new_tokens must be >= 0, or none for the whole context, found -1"):
        Options(max_new_tokens=-1)


@pytest.mark.parametrize("bits", ["1", "0", "own"])
def test_the_context_ends_while_tokens_are_in_flight(bits: str, monkeypatch: pytest.MonkeyPatch):
    """I09: context 16, prompt 12, 10 tokens wanted: 4 come."""
    prompt = random_prompts(12)[11]
    text = autoregressive(3).generate([prompt] * BATCH, Options(max_new_tokens=10)).results[0].ids
    monkeypatch.setattr(pipeline(3, 3), "max_length", 16)
    forced = [OWN if bits == "own" else script(bits, text)] * BATCH
    result = pipeline(3, 3).generate([prompt] * BATCH, Options(max_new_tokens=10, forced_drafts=forced)).results[0]
    assert (result.ids, result.finish_reason) == (text[:4], "length")
    assert_cycles_exact(result, 3)


# Stop checks by the caller


@functools.cache
def short_dispatches() -> PipelineDecoder:
    shared = pipeline(3, 3)
    return PipelineDecoder(shared.program, shared.params, shared.mesh, cycles_per_dispatch=3, prefill_chunk=CHUNK)


def test_a_stop_check_cuts_at_its_token_whatever_the_dispatch():
    """In the middle of a dispatch, at a rejection and after an acceptance: later tokens are dropped, K is the cut's."""
    forced = [script(bits, text) for bits, text in zip(["1", "0", "1110", "011"], texts(), strict=True)]
    keep = [7, 5, 5, 1]  # row 2's fifth token is rejected

    def stop(row: int, ids: Sequence[int]) -> int | None:
        return keep[row] if len(ids) >= keep[row] else None

    options = Options(max_new_tokens=COUNT, forced_drafts=forced, stop=stop)
    whole = pipeline(3, 3).generate(PROMPTS, Options(max_new_tokens=COUNT, forced_drafts=forced)).results
    for decoder in (pipeline(3, 3), short_dispatches()):
        for row, result in enumerate(decoder.generate(PROMPTS, options).results):
            assert result.finish_reason == "stop"
            assert result.tokens == whole[row].tokens[: keep[row]]
            assert result.records == whole[row].records[: result.cycles]
            assert_cycles_exact(result, 3)
            assert (result.accepted, result.rejected) == (
                sum(verdicts(result)[1:]),
                keep[row] - 1 - sum(verdicts(result)[1:]),
            )
    assert whole[2].tokens[4].event == REJECTED
    assert [r.ids for r in whole] == texts()


def test_a_stop_check_may_keep_nothing():
    options = Options(max_new_tokens=8, forced_drafts=[OWN] * BATCH, stop=lambda row, ids: 0 if row == 1 else None)
    results = pipeline(3, 3).generate(PROMPTS, options).results
    assert [len(result.ids) for result in results] == [8, 0, 8, 8]
    assert (results[1].cycles, results[1].records, results[1].finish_reason) == (0, [], "stop")


def test_pieces_of_a_stream_make_up_the_results():
    eos = (texts()[1][4],)
    options = Options(max_new_tokens=COUNT, forced_drafts=[OWN] * BATCH, eos_ids=eos)
    generation = Generation([])
    pieces = list(short_dispatches().stream(PROMPTS, options, generation))
    for row, result in enumerate(generation.results):
        mine = [piece for piece in pieces if piece.sequence == row]
        assert [token for piece in mine for token in piece.tokens] == result.tokens
        assert [piece.finish_reason for piece in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1].finish_reason == result.finish_reason is not None


@pytest.mark.slow
def test_the_cache_grows_while_decoding():
    """The longest sequence passes position 256, where the first bucket ends, with tokens in flight."""
    rng = np.random.default_rng(8)
    prompts = [rng.integers(3, VOCAB, length).tolist() for length in (236, 3, 231, 100)]
    options = Options(max_new_tokens=24, forced_drafts=[OWN] * BATCH)
    results = pipeline(3, 3).generate(prompts, options).results
    ours = autoregressive(3).generate(prompts, options).results
    width = 236 + 24
    for prompt, result, other in zip(prompts, results, ours, strict=True):
        assert result.ids == other.ids
        assert_cycles_exact(result, 3)
        ids = jnp.asarray([prompt + result.ids + [0] * (width - len(prompt) - 24)])  # one shape, one compilation
        logits = np.asarray(target(3)(ids)[0, len(prompt) - 1 : len(prompt) + 23])
        assert logits.argmax(-1).tolist() == result.ids


# Padding of the vocabulary


class PaddedWeights(RandomWeights):
    """64 rows of which 60 stand for tokens, in equal pairs; the padding would win every choice."""

    def tensor(self, path: str) -> np.ndarray:
        value = super().tensor(path)
        return tempting(value) if path == "head" else value


def tempting(rows: np.ndarray) -> np.ndarray:
    rows = rows.copy()
    rows[1::2] = rows[::2]
    rows[60:62], rows[62:] = 100.0, -100.0
    return rows


def test_padding_is_neither_emitted_nor_drafted_and_the_lowest_of_equals_is():
    """C08, and ties: without the number of real tokens the padding is chosen, so the rows do tempt."""
    weights = PaddedWeights(model_config(2, vocab_size=64), seed=1)
    plan = plan_of(2, 2, "beside")
    head = random_head(weights.config, plan)
    assert head.lm_head is not None
    head.lm_head[...] = jnp.asarray(tempting(np.asarray(head.lm_head[...])))
    options = Options(max_new_tokens=12, forced_drafts=[OWN] * BATCH)
    decoder = make_pipeline(weights, head, plan, stack={"num_tokens": 60})
    masked = decoder.generate(PROMPTS, options).results
    emitted = {token for result in masked for token in result.ids}
    drafted = {record.draft for result in masked for record in result.records}
    assert max(emitted | drafted) < 60
    assert not any(token % 2 for token in emitted | drafted)
    assert len(emitted) > 8
    assert len(drafted) > 8
    decoder.params = make_pipeline(weights, head, plan).params
    tempted = decoder.generate(PROMPTS, options).results
    assert np.mean([token >= 60 for result in tempted for token in result.ids]) > 0.9
    assert np.mean([record.draft >= 60 for result in tempted for record in result.records]) > 0.9


# Log-probabilities


def test_log_probabilities_are_the_targets():
    """R03: of accepted drafts, of replacements and of the first token; the same as autoregressive decoding's."""
    forced = [OWN if bits == "own" else script(bits, text) for bits, text in zip(SCRIPTS, texts(), strict=True)]
    options = Options(max_new_tokens=COUNT, forced_drafts=forced, log_probs=True)
    ours = pipeline(3, 3).generate(PROMPTS, options).results
    theirs = autoregressive(3).generate(PROMPTS, options).results
    for result, other in zip(ours, theirs, strict=True):
        assert result.ids == other.ids
        found = [token.log_prob for token in result.tokens]
        np.testing.assert_allclose(found, [token.log_prob for token in other.tokens], atol=1e-5)
        assert max(found) < -0.01
