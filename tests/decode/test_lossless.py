"""Greedy pipelined decoding gives the target's own greedy text, whatever is drafted, in exactly the cycles it must."""

import functools

import pytest

from spd_jax.plan import Layout
from tests.decode.engine import (
    OWN,
    assert_cycles_exact,
    autoregressive,
    in_batches,
    pipeline,
    random_prompts,
    run_on_many_ranks,
    script,
    verdicts,
)

TOKENS = 20
PROMPTS = random_prompts(12)
SCRIPTS = {"oracle": "1", "anti": "0", "mixed": "1101", "mostly wrong": "0010011"}


@functools.cache
def reference(num_layers: int) -> list[list[int]]:
    """The target's own greedy text for every prompt."""
    results = in_batches(autoregressive(num_layers), PROMPTS, {"max_new_tokens": TOKENS})
    return [result.ids for result in results]


@pytest.mark.parametrize("num_layers", [8, pytest.param(30, marks=pytest.mark.slow)])
def test_reference_text_says_something(num_layers: int):
    texts = reference(num_layers)
    distinct = [len(set(text)) for text in texts]
    assert min(distinct) >= 6, distinct
    assert len({token for text in texts for token in text}) > 40
    assert len(set(map(tuple, texts))) == len(PROMPTS)


def check(num_layers: int, num_stages: int, layout: Layout) -> None:
    """All prompts under every script and with the head's own drafts; one compilation."""
    decoder, texts = pipeline(num_layers, num_stages, layout), reference(num_layers)
    for bits in SCRIPTS.values():
        forced = [script(bits, text) for text in texts]
        results = in_batches(decoder, PROMPTS, {"max_new_tokens": TOKENS, "forced_drafts": forced})
        for result, text in zip(results, texts, strict=True):
            assert result.ids == text
            assert result.finish_reason == "length"
            assert_cycles_exact(result, num_stages)
            if num_stages > 1:
                assert verdicts(result)[1:] == [bits[i % len(bits)] == "1" for i in range(TOKENS - 1)]
    own = in_batches(decoder, PROMPTS, {"max_new_tokens": TOKENS, "forced_drafts": [OWN] * len(PROMPTS)})
    for result, text in zip(own, texts, strict=True):
        assert result.ids == text
        assert_cycles_exact(result, num_stages)


# Every count of stages and both layouts with 30 layers; the ends of that range with 8, a layer a stage, in the gate.
GATE = [(8, 1, "beside"), (8, 8, "separate")]
ALL = [(30, num_stages, layout) for num_stages in (1, 2, 3, 5, 8) for layout in ("separate", "beside")]


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "layout"), [*GATE, *(pytest.param(*one, marks=pytest.mark.slow) for one in ALL)]
)
def test_text_and_cycles_are_exact(num_layers: int, num_stages: int, layout: Layout):
    check(num_layers, num_stages, layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["separate", "beside"])
@pytest.mark.parametrize("num_stages", [15, 30])
def test_text_and_cycles_are_exact_on_many_ranks(num_stages: int, layout: Layout):
    run_on_many_ranks("test_lossless", f"check(30, {num_stages}, {layout!r})")


@pytest.mark.parametrize(("num_layers", "num_stages"), [(8, 8), pytest.param(30, 3, marks=pytest.mark.slow)])
def test_oracle_and_anti_take_the_fewest_and_most_cycles(num_layers: int, num_stages: int):
    """G03: K = N + n - 2 without rejections. G04: K = n (N - 1) without acceptances."""
    decoder, texts = pipeline(num_layers, num_stages, "separate"), reference(num_layers)
    prompts, count = PROMPTS[:2], 16
    forced = [script("1", texts[0][:count]), script("0", texts[1][:count])] * 2
    options = {"max_new_tokens": count, "forced_drafts": forced}
    oracle, anti = in_batches(decoder, prompts * 2, options)[:2]
    assert (oracle.accepted, oracle.rejected, oracle.cycles) == (count - 1, 0, count + num_stages - 2)
    assert (anti.accepted, anti.rejected, anti.cycles) == (0, count - 1, num_stages * (count - 1))


@pytest.mark.parametrize(("num_layers", "num_stages"), [(8, 1), pytest.param(30, 2, marks=pytest.mark.slow)])
def test_five_tokens_from_one_and_two_stages(num_layers: int, num_stages: int):
    """I13."""
    options = {"max_new_tokens": 5, "forced_drafts": [OWN] * len(PROMPTS)}
    results = in_batches(pipeline(num_layers, num_stages, "beside"), PROMPTS, options)
    for result, text in zip(results, reference(num_layers), strict=True):
        assert result.ids == text[:5]
        assert_cycles_exact(result, num_stages)
