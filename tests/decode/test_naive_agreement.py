"""The engine and the naive decoder agree on every token, every verdict, every cycle and every draft logit."""

from typing import Any

import numpy as np
import pytest

from spd_jax.decode.options import Options
from spd_jax.plan import Layout
from spd_jax.testing.naive import CycleInput, ModuleDraft, NaiveDecoder
from tests.decode.engine import BATCH, OWN, head_of, pipeline, plan_of, random_prompts, script, target, verdicts
from tests.decode.stepwise import Stepper

LAYERS, TOKENS = 8, 14
PROMPTS = random_prompts(BATCH, seed=3)  # of 1, 2, 3 and 4 tokens


class Forced:
    """A module's draft whose logits are kept but whose token is given: forced drafts for the naive decoder."""

    def __init__(self, module: ModuleDraft, drafts: list[int], num_prompt: int, vocab_size: int):
        self.token_ids = np.arange(vocab_size)
        self.seen: list[np.ndarray] = []
        self._module, self._drafts, self._num_prompt = module, drafts, num_prompt

    def __call__(self, cycle: CycleInput) -> np.ndarray:
        logits = self._module(cycle)
        self.seen.append(logits)
        place = len(cycle.tokens) - self._num_prompt  # of the drafted token among the generated ones
        token = self._drafts[place] if place < len(self._drafts) else -1
        if token < 0:
            token = int(self._module.token_ids[logits.argmax()])
        return np.where(self.token_ids == token, np.float32(0), np.float32(-1e9))


def check(num_stages: int, layout: Layout) -> None:
    decoder, plan, model = pipeline(LAYERS, num_stages, layout), plan_of(LAYERS, num_stages, layout), target(LAYERS)
    naive = NaiveDecoder(model, plan, head_of(LAYERS, num_stages, layout), length=4 + TOKENS + num_stages)
    module, stepper = naive.draft, Stepper(decoder, num_stages * (TOKENS - 1))
    assert isinstance(module, ModuleDraft)
    vocab = model.config.vocab_size
    texts = [r.ids for r in decoder.generate(PROMPTS, options([OWN] * BATCH)).results]
    for bits in ("own", "1101101", "1"):
        forced = [OWN if bits == "own" else script(bits, text) for text in texts]
        run = stepper.run(PROMPTS, options(forced))
        for row, prompt in enumerate(PROMPTS):
            draft = naive.draft = Forced(module, forced[row], len(prompt), vocab)
            expected = naive.generate(prompt, max_new_tokens=TOKENS)
            result = run.results[row]
            assert result.ids == list(expected.ids)
            assert verdicts(result) == list(expected.accepted)
            assert [token.cycle for token in result.tokens] == list(expected.verified_in)
            seen = np.stack(draft.seen)
            assert np.abs(seen).max() > 1  # logits that say something
            difference = np.abs(run.draft_logits[: expected.cycles, row] - seen)
            # Float32: padded to another length, the naive decoder differs from itself by as much in a few cycles.
            assert np.quantile(difference, 0.98) < 1e-5
            assert difference.max() < 5e-5


def options(forced: list[list[int]]) -> Options:
    return Options(max_new_tokens=TOKENS, forced_drafts=forced)


PLANS: list[Any] = [(3, "separate"), pytest.param(2, "beside", marks=pytest.mark.slow)]
PLANS += [pytest.param(5, layout, marks=pytest.mark.slow) for layout in ("separate", "beside")]
PLANS += [pytest.param(8, layout, marks=pytest.mark.slow) for layout in ("separate", "beside")]


@pytest.mark.parametrize(("num_stages", "layout"), PLANS)
def test_every_draft_logit_is_the_naive_decoders(num_stages: int, layout: Layout):
    check(num_stages, layout)
