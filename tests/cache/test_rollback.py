"""Rejected drafts leave no trace: what has been undone never ran, on every stage and in the draft's cache."""

import numpy as np
import pytest

from spd_jax.decode.state import REJECTED
from spd_jax.plan import Layout
from tests.decode.engine import OWN, script
from tests.decode.published import LLAMA, assert_close, committed, fixture, options, prompts, rebuilt, stepper, texts

LAYOUTS = ["beside", pytest.param("separate", marks=pytest.mark.slow)]
CASES = [
    ("separate", "tiny_qwen3_5"),
    pytest.param("beside", "tiny_llama", marks=pytest.mark.slow),
    pytest.param("separate", "tiny_llama", marks=pytest.mark.slow),
    pytest.param("beside", "tiny_qwen3_5", marks=pytest.mark.slow),
]
BITS = ["own", "0", "10", "110", "1", "1011110"]
LENGTHS = {"tiny_llama": 110, "tiny_qwen3_5": 80}  # tokens; scripts are made of the fixtures' texts


def scripts(bits: list[str], name: str = LLAMA) -> list[list[int]]:
    vocab = fixture(name).target.config.vocab_size
    return [OWN if b == "own" else script(b, text, vocab) for b, text in zip(bits, texts(name), strict=True)]


@pytest.mark.parametrize(("layout", "name"), CASES)
def test_caches_hold_what_the_verified_tokens_alone_would_have_left(layout: Layout, name: str):
    """K06, and K03, K04 for gated delta nets: after rejections, n in a row or now and then, every stage's caches are
    those of a sequence that never had them, whatever its neighbours in the batch do."""
    runner = stepper(layout, name)
    run = runner.start(prompts(name), options(LENGTHS[name], scripts(BITS, name), name=name))
    for cycles in (7, 1, 13, 40, 15):
        runner.advance(run, cycles)
        control = run.state.control
        for row, result in enumerate(run.results):
            length, drafted = int(control.committed[row]), int(control.drafted[row])
            assert length == len(result.prompt_ids) + len(result.ids) - 1  # the newest verified token is in flight
            assert drafted == length - (int(control.departed[row]) >= 0)
            target, draft = rebuilt((result.prompt_ids + result.ids)[:length], name)
            ours = committed(runner.decoder, run.state, row)
            assert_close(ours[0], target)
            assert_close(ours[1], [(k[:drafted], v[:drafted]) for k, v in draft])
    rejected = [result.rejected for result in run.results]
    assert rejected[4] == 0
    assert min(rejected[:4]) > 5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rejection_leaves_committed_keys_alone(layout: Layout):
    """The region of verified positions is the same bits before and after; one position is added."""
    runner = stepper(layout)
    run = runner.start(prompts(), options(80, scripts(["110"] * 6)))
    runner.advance(run, 5)  # n = 4: verdicts on tokens 2 and 3; the next one rejects token 4
    before = run.state
    runner.advance(run, 1)
    assert {result.tokens[-1].event for result in run.results} == {REJECTED}
    for row, result in enumerate(run.results):
        length = int(before.control.committed[row])
        assert int(run.state.control.committed[row]) == length + 1
        assert run.state.control.stage_position[row].tolist() == [
            len(result.prompt_ids) + len(result.ids) - 1,
            -1,
            -1,
            -1,
        ]
        old, new = (committed(runner.decoder, state, row) for state in (before, run.state))
        for old_cache, new_cache in zip(old, new, strict=True):
            for old_layer, new_layer in zip(old_cache, new_cache, strict=True):
                for old_rows, new_rows in zip(old_layer, new_layer, strict=True):
                    assert len(new_rows) == len(old_rows) + 1
                    np.testing.assert_array_equal(old_rows, new_rows[:-1])


@pytest.mark.parametrize(("layout", "name"), CASES)
@pytest.mark.parametrize("bits", ["0", "100", "1110", "1111110"])
def test_after_a_rejection_decoding_goes_on_as_from_a_fresh_prefill(layout: Layout, name: str, bits: str):
    """Run, reject, rerun = never ran (K01): the same drafts to the logit, the same verdicts and cycles from then on."""
    runner, further = stepper(layout, name), 30
    verified = bits.index("0") + 1  # tokens before the rejected one
    vocab = fixture(name).target.config.vocab_size
    drafts = [script(bits, text, vocab)[: verified + 1] for text in texts(name)]
    run = runner.start(prompts(name), options(70, drafts, name=name))  # the script ends with the rejection
    runner.advance(run, 4 + verified - 1)
    for result, text in zip(run.results, texts(name), strict=True):
        assert result.tokens[-1].event == REJECTED
        assert result.ids == text[: verified + 1]
    fresh = runner.start(
        [result.prompt_ids + result.ids[:-1] for result in run.results], options(70 - verified, [OWN] * 6, name=name)
    )
    past = run.cycles
    runner.advance(run, further)
    runner.advance(fresh, further)
    np.testing.assert_allclose(run.draft_logits[past:], fresh.draft_logits, atol=1e-5, rtol=0)
    for ours, theirs in zip(run.results, fresh.results, strict=True):
        assert ours.ids[verified:] == theirs.ids
        assert ours.records[past:] == theirs.records
    for row in range(6):
        for ours, theirs in zip(
            committed(runner.decoder, run.state, row), committed(runner.decoder, fresh.state, row), strict=True
        ):
            assert_close(ours, theirs)
