"""Answers of large batches: the same tokens as plain decoding, whoever the neighbours are and however caches grow."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spd_jax.decode.autoregressive import AutoregressiveDecoder
from spd_jax.decode.batch import make_batch
from spd_jax.decode.options import Options
from spd_jax.decode.sampling import Sampling
from spd_jax.generation.answers import DecodedAnswers
from spd_jax.weights.load import load_decoder
from tests.decode.engine import BATCH, CHUNK, CYCLES, VOCAB, autoregressive, in_batches, random_prompts, target, weights

ROWS, NEW = 12, 30
PROMPTS = random_prompts(ROWS, seed=3)
NUMBERS = list(range(100, 100 + ROWS))


@functools.cache
def answers() -> DecodedAnswers:
    decoder = AutoregressiveDecoder(target(3), steps_per_dispatch=CYCLES, prefill_chunk=CHUNK, capacity_step=16)
    return DecodedAnswers(decoder, Options(NEW, Sampling(1.5, 7), eos_ids=(2, 5, 9), seed=4), ROWS)


def test_greedy_answers_are_plain_decodings():
    found = answers()(PROMPTS, NUMBERS, True)
    options = {"max_new_tokens": NEW, "eos_ids": (2, 5, 9)}
    expected = in_batches(autoregressive(3), PROMPTS, options)
    assert [list(answer.ids) for answer in found] == [result.ids for result in expected]
    assert [answer.stopped for answer in found] == [result.finish_reason == "stop" for result in expected]
    assert {answer.stopped for answer in found} == {True, False}
    assert max(len(answer.ids) for answer in found) == NEW, "an answer this long outgrows two caches of 16 positions"


def test_a_conversations_draws_depend_on_its_number_and_not_on_its_neighbours():
    found = answers()(PROMPTS, NUMBERS, False)
    order = [7, 2, 9, 0, 11, 4, 1, 8, 3]  # three fewer: padded to the same batch
    again = answers()([PROMPTS[i] for i in order], [NUMBERS[i] for i in order], False)
    assert again == [found[i] for i in order]
    others = answers()(PROMPTS, [number + 1 for number in NUMBERS], False)
    assert sum(a != b for a, b in zip(found, others, strict=True)) > ROWS // 2


@pytest.mark.slow
def test_numbers_for_the_top_k_only_are_those_of_the_whole_vocabulary():
    options = {"max_new_tokens": NEW, "seed": 2}
    every, kept = (
        in_batches(autoregressive(3), PROMPTS[:BATCH], options | {"sampling": Sampling(1.0, top_k)})
        for top_k in (0, VOCAB)
    )
    assert [result.ids for result in every] == [result.ids for result in kept]


@pytest.mark.slow
def test_bfloat16_weights_with_float32_activations():
    half = AutoregressiveDecoder(
        load_decoder(weights(3), jnp.bfloat16),
        steps_per_dispatch=CYCLES,
        prefill_chunk=CHUNK,
        activations=jnp.float32,
    )
    options = Options(2, log_probs=True)
    caches, *_ = half.prompt_arrays(make_batch(PROMPTS[:BATCH], options, VOCAB, 64))
    assert {cache.dtype for cache in jax.tree.leaves(caches)} == {jnp.dtype(jnp.float32)}
    found, exact = (d.generate(PROMPTS[:BATCH], options).results for d in (half, autoregressive(3)))
    first = [[result.tokens[0].log_prob for result in results] for results in (found, exact)]
    np.testing.assert_allclose(first[0], first[1], atol=0.05)
    assert first[0] != first[1]
