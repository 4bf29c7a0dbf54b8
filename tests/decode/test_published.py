"""The published head on its tiny target: the same text, verdicts, cycles and draft logits as the published code."""

import dataclasses
import functools

import numpy as np
import pytest

from spd_jax.decode.heads import Mode
from spd_jax.decode.loop import PipelineDecoder
from spd_jax.decode.options import Options
from spd_jax.decode.sampling import Sampling
from spd_jax.evaluation.metrics import acceptance_rate, equivalent_accept_length, published_acceptance_rate
from spd_jax.plan import Layout
from spd_jax.testing.weights import DecoderWeights
from tests.decode.engine import OWN, assert_cycles_exact, make_pipeline, script, verdicts
from tests.decode.stepwise import Stepper
from tests.fixtures import Fixture, load_fixture

TOKENS = 80


@functools.cache
def fixture() -> Fixture:
    return load_fixture("tiny_llama")


@functools.cache
def decoder(layout: Layout) -> PipelineDecoder:
    loaded = fixture()
    plan = dataclasses.replace(loaded.plan, layout=layout)
    return make_pipeline(DecoderWeights(loaded.target), loaded.head, plan, cycles_per_dispatch=32, prefill_chunk=16)


def prompts() -> list[list[int]]:
    return [golden["prompt_ids"] for golden in fixture().prompts]


def options(count: int = TOKENS, forced: list[list[int]] | None = None) -> Options:
    drafts = [OWN] * len(prompts()) if forced is None else forced
    return Options(max_new_tokens=count, eos_ids=fixture().target.config.eos_token_ids, forced_drafts=drafts)


@pytest.mark.parametrize("layout", ["separate", pytest.param("beside", marks=pytest.mark.slow)])
def test_text_verdicts_and_cycles_are_the_published_ones(layout: Layout):
    results = decoder(layout).generate(prompts(), options()).results
    for result, golden in zip(results, fixture().prompts, strict=True):
        assert result.ids == golden["generated_ids"]
        assert verdicts(result) == golden["accepted"]
        assert result.cycles == golden["cycles"]
        assert_cycles_exact(result, 4)


@pytest.mark.parametrize("layout", ["beside", pytest.param("separate", marks=pytest.mark.slow)])
def test_draft_logits_of_every_cycle_are_the_published_ones(layout: Layout):
    most = max(golden["cycles"] for golden in fixture().prompts)
    steps = Stepper(decoder(layout), most, Mode(Sampling().mode)).run(prompts(), options())
    for row, golden in enumerate(fixture().prompts):
        assert steps.results[row].ids == golden["generated_ids"]
        assert verdicts(steps.results[row]) == golden["accepted"]
        assert steps.results[row].cycles == golden["cycles"]
        difference = np.abs(steps.draft_logits[: golden["cycles"], row] - fixture().draft_logits(row))
        # Logits reach 9.4, where float32 steps by 1e-6: nearly all agree to 5e-6, every one to 1e-5.
        assert np.quantile(difference, 0.999) < 5e-6
        assert difference.max() < 1e-5


def test_the_fewest_and_the_most_cycles():
    """G03, G04, J07: N = 16, n = 4 takes 18 cycles with right drafts and 60 with wrong ones."""
    count, vocab = 16, fixture().target.config.vocab_size
    texts = [golden["autoregressive_ids"][:count] for golden in fixture().prompts]
    bits = ["1", "0"] * (len(texts) // 2)
    forced = [script(b, text, vocab) for b, text in zip(bits, texts, strict=True)]
    results = decoder("separate").generate(prompts(), options(count, forced)).results
    for b, result, text in zip(bits, results, texts, strict=True):
        assert result.ids == text
        assert (result.accepted, result.rejected, result.cycles) == ((15, 0, 18) if b == "1" else (0, 15, 60))
    anti = results[1]
    rates = acceptance_rate(count, anti.cycles), published_acceptance_rate(count, anti.cycles)
    assert [round(equivalent_accept_length(4, rate), 3) for rate in rates] == [1.0, 1.067]
