"""The engine and the naive decoder agree on every token, every verdict, every cycle and every draft logit."""

from typing import Any

import numpy as np
import pytest

from spd_jax.decode.loop import PipelineDecoder
from spd_jax.decode.options import Options
from spd_jax.plan import Layout, StagePlan
from spd_jax.speculation.module import SpeculationModule
from tests.decode.engine import (
    BATCH,
    LAYER,
    OWN,
    autoregressive,
    head_of,
    make_pipeline,
    pipeline,
    random_head,
    random_prompts,
    script,
    target,
    verdicts,
    weights,
)
from tests.decode.stepwise import Stepper
from tests.naive import CycleInput, ModuleDraft, NaiveDecoder

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


def check(decoder: PipelineDecoder, head: SpeculationModule) -> None:
    plan, num_layers = decoder.program.plan, decoder.program.plan.num_layers
    num_stages, model = plan.num_stages, target(num_layers)
    naive = NaiveDecoder(model, plan, head, length=4 + TOKENS + num_stages)
    module, stepper = naive.draft, Stepper(decoder, num_stages * (TOKENS - 1))
    assert isinstance(module, ModuleDraft)
    vocab = model.config.vocab_size
    texts = [r.ids for r in autoregressive(num_layers).generate(PROMPTS, options([OWN] * BATCH)).results]
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
    check(pipeline(8, num_stages, layout), head_of(8, num_stages, layout))


SUBSET = (0, 3, 4, 9, 17, 18, 30, 31, 44, 58, 60)
HEADS: dict[str, tuple[StagePlan, dict[str, Any]]] = {
    "the target's rows and one anchor": (StagePlan((2, 1), 1, "beside", (0,)), {"lm_head": "target"}),
    "one anchor and a subset": (StagePlan((2, 1), 1, "separate", (0,)), {"draft_ids": SUBSET}),
    "the target's rows": (StagePlan((1, 1, 1), 2, "beside", (0, 1, 3)), {"lm_head": "target"}),
    "the last layer": (StagePlan((1, 4, 3), 1, "separate", (0, 2, 8)), {"draft_ids": SUBSET, "lm_head": "target"}),
    "inside stages": (StagePlan((5, 3), 3, "beside", (0, 1, 4, 5, 7)), {}),
    "its own layers": (StagePlan((2, 2, 4), 2, "beside", (0, 2, 4, 7)), {"layer": LAYER.with_attention(qk_norm=True)}),
    "types skipped": (StagePlan((4, 4), 1, "separate", (0, 1, 2, 3, 8)), {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HEADS)
def test_every_kind_of_head_is_read_as_the_naive_decoder_reads_it(name: str):
    """Heads without rows, anchors inside stages and after the last layer, types that no depth has, uneven stages."""
    plan, changes = HEADS[name]
    source = weights(plan.num_layers)
    head = random_head(source.config, plan, **changes)
    check(make_pipeline(source, head, plan), head)
