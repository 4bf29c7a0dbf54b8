"""The published heads on their tiny targets: the same text, verdicts, cycles and draft logits as the published code."""

from typing import Any

import numpy as np
import pytest

from spd_jax.metrics import acceptance_rate, equivalent_accept_length, published_acceptance_rate
from spd_jax.plan import Layout
from tests.decode.engine import assert_cycles_exact, script, verdicts
from tests.decode.published import decoder, fixture, options, prompts, stepper, texts

TOKENS = 80
NAMES = ["tiny_llama", "tiny_qwen3_5", "tiny_qwen3_moe"]
CASES: list[tuple[Layout, str]] = [(layout, name) for name in NAMES for layout in ("separate", "beside")]
# Draft logits come with texts, verdicts and cycles, so one text in the library's own loop is enough for the gate.
TEXTS = [("separate", "tiny_llama")]
LOGITS = [("separate", "tiny_qwen3_5")]


def all_but(gate: list[tuple[str, str]]) -> list[Any]:
    """Every case; those that are not for the gate are slow."""
    return [pytest.param(*case, marks=() if case in gate else pytest.mark.slow) for case in CASES]


@pytest.mark.parametrize(("layout", "name"), all_but(TEXTS))
def test_text_verdicts_and_cycles_are_the_published_ones(layout: Layout, name: str):
    results = decoder(layout, name).generate(prompts(name), options(TOKENS, name=name)).results
    for result, golden in zip(results, fixture(name).prompts, strict=True):
        assert result.ids == golden["generated_ids"]
        assert verdicts(result) == golden["accepted"]
        assert result.cycles == golden["cycles"]
        assert_cycles_exact(result, fixture(name).plan.num_stages)


@pytest.mark.parametrize(("layout", "name"), all_but(LOGITS))
def test_draft_logits_of_every_cycle_are_the_published_ones(layout: Layout, name: str):
    run = stepper(layout, name).run(prompts(name), options(TOKENS, name=name))
    for row, golden in enumerate(fixture(name).prompts):
        assert run.results[row].ids == golden["generated_ids"]
        assert verdicts(run.results[row]) == golden["accepted"]
        assert run.results[row].cycles == golden["cycles"]
        difference = np.abs(run.draft_logits[: golden["cycles"], row] - fixture(name).draft_logits(row))
        # Logits reach 9.4, where float32 steps by 1e-6.
        assert np.quantile(difference, 0.999) < 4e-6
        assert difference.max() < 6e-6


def test_the_fewest_and_the_most_cycles():
    """G03, G04, J07: N = 16, n = 4 takes 18 cycles with right drafts and 60 with wrong ones."""
    count, vocab = 16, fixture().target.config.vocab_size
    wanted = [text[:count] for text in texts()]
    bits = ["1", "0"] * (len(wanted) // 2)
    forced = [script(b, text, vocab) for b, text in zip(bits, wanted, strict=True)]
    results = decoder("separate").generate(prompts(), options(count, forced)).results
    for b, result, text in zip(bits, results, wanted, strict=True):
        assert result.ids == text
        assert (result.accepted, result.rejected, result.cycles) == ((15, 0, 18) if b == "1" else (0, 15, 60))
    anti = results[1]
    rates = acceptance_rate(count, anti.cycles), published_acceptance_rate(count, anti.cycles)
    assert [round(equivalent_accept_length(4, rate), 3) for rate in rates] == [1.0, 1.067]
