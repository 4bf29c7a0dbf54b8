"""Acceptance by real decoding: what is counted, that batches do not matter, and that a head is exchanged for free."""

import dataclasses

import pytest

from spd_jax.decode.options import Options
from spd_jax.evaluation.acceptance import acceptance
from spd_jax.metrics import expected_cycles, projected_accept_length
from tests.decode.engine import (
    autoregressive,
    head_of,
    in_batches,
    model_config,
    pipeline,
    plan_of,
    random_head,
    random_prompts,
    script,
)
from tests.lowerings import lowerings

STAGES, N = 2, 10
PROMPTS = random_prompts(6)
OPTIONS = Options(max_new_tokens=N, ignore_eos=True, eos_ids=(2,), forced_drafts=[[-1]] * len(PROMPTS))


def test_scripted_drafts_are_counted_and_projected():
    """J08: simulated acceptance during training, n / (1 + (1 - alpha)(n - 1)) for a pipeline."""
    texts = [r.ids for r in in_batches(autoregressive(3), PROMPTS, {"max_new_tokens": N, "ignore_eos": True,
                                                                    "eos_ids": (2,)})]  # fmt: skip
    decoder, done = pipeline(3, STAGES), []
    options = dataclasses.replace(OPTIONS, forced_drafts=[script("110", text) for text in texts])
    found = acceptance(decoder, PROMPTS, options, batch=4, progress=done.append)
    assert done == [4, 6]
    assert (found.prompts, found.tokens, found.accepted, found.rejected, found.undrafted) == (6, 60, 36, 18, 0)
    cycles = expected_cycles(N, STAGES, 6, 2)  # the last token's verdict, a wrong draft, ends the text
    assert found.cycles == 6 * cycles
    assert found.alpha == pytest.approx(2 / 3)
    assert found.s0 == pytest.approx(STAGES * (N - 1) / cycles) == STAGES * found.acceptance_rate
    assert found.s0_projected == projected_accept_length(STAGES, found.alpha) == pytest.approx(2 / (1 + 1 / 3))
    assert found.decode_seconds > 0


def test_neither_the_batch_nor_the_other_prompts_matter():
    decoder = pipeline(3, STAGES)
    alone = [acceptance(decoder, PROMPTS[:4], dataclasses.replace(OPTIONS, forced_drafts=[[-1]] * 4), batch=4)]
    rest = dataclasses.replace(OPTIONS, forced_drafts=[[-1]] * 4, sequences=(4, 5, 4, 5))
    alone.append(acceptance(decoder, [*PROMPTS[4:], *PROMPTS[4:]], rest, batch=4))
    together = acceptance(decoder, PROMPTS, OPTIONS, batch=4)
    for name in ("tokens", "cycles", "accepted", "rejected"):
        assert getattr(together, name) == getattr(alone[0], name) + getattr(alone[1], name) / 2


def test_the_head_as_trained_so_far_costs_no_compilation():
    decoder = pipeline(3, STAGES)
    acceptance(decoder, PROMPTS, OPTIONS, batch=4)
    with lowerings() as compiled:
        other = random_head(model_config(3), plan_of(3, STAGES), seed=9)
        changed = acceptance(decoder.with_head(other), PROMPTS, OPTIONS, batch=4)
        again = acceptance(decoder.with_head(head_of(3, STAGES, "separate")), PROMPTS, OPTIONS, batch=4)
        assert compiled == []
    assert changed.tokens == again.tokens
    before = dataclasses.replace(acceptance(decoder, PROMPTS, OPTIONS, batch=4), decode_seconds=0.0)
    assert dataclasses.replace(again, decode_seconds=0.0) == before


@pytest.mark.parametrize(("prompts", "batch"), [([], 1), ([[5]], 0)])
def test_nothing_to_decode_is_refused(prompts: list[list[int]], batch: int):
    with pytest.raises(ValueError, match=rf"found {len(prompts)} prompts and batch {batch}"):
        acceptance(pipeline(3, STAGES), prompts, Options(max_new_tokens=2), batch=batch)
