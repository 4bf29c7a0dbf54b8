"""The state after a prefill is the state that a sequence would have reached token by token."""

import numpy as np
import pytest

from spd_jax.plan import Layout
from tests.decode.published import (
    CHUNK,
    assert_close,
    committed,
    fixture,
    next_token,
    options,
    prompts,
    rebuilt,
    stepper,
    texts,
)

# n = 4: shorter than the pipeline, around one chunk, several chunks; rows of a batch differ in their number of chunks.
LENGTHS = [[1, 2, 3, CHUNK - 1, CHUNK, CHUNK + 1], [4, 2 * CHUNK, 2 * CHUNK + 1, 50, 3 * CHUNK - 1, 33]]
LAYOUTS = ["beside", pytest.param("separate", marks=pytest.mark.slow)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=["short", "long"])
def test_caches_and_control_after_a_prefill(layout: Layout, lengths: list[int]):
    runner, plan = stepper(layout), fixture().plan
    whole = [prompt + text for prompt, text in zip(prompts(), texts(), strict=True)]
    rows = [ids[:length] for ids, length in zip(whole, lengths, strict=True)]
    run = runner.start(rows, options(8))
    control = run.state.control
    for name in ("committed", "drafted", "newest"):
        assert getattr(control, name).tolist() == lengths
    assert control.stage_position.tolist() == [[length, -1, -1, -1] for length in lengths]
    assert control.departed.tolist() == [-1] * 6
    for row, ids in enumerate(rows):
        target, draft = rebuilt(ids)
        ours = committed(runner.decoder, run.state, row)
        assert_close(ours[0], target)
        assert_close(ours[1], draft)
        token = next_token(ids)
        assert run.results[row].ids == [token]
        assert int(control.nodes.token[row, lengths[row] % plan.num_columns, 0]) == token
        embedding = np.asarray(fixture().target.embedding[...])[token]
        np.testing.assert_array_equal(np.asarray(run.state.taps.newest)[row, 0], embedding)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_prefill_equals_the_same_tokens_one_by_one(layout: Layout):
    """The first prompt's text decoded from its 4 tokens, against prefills of longer and longer parts of it."""
    runner = stepper(layout)
    run = runner.start([prompts()[0]] * 6, options(80))
    runner.advance(run, 120)
    length = int(run.state.control.committed[0])
    assert length > 3 * CHUNK
    target, draft = committed(runner.decoder, run.state, 0)
    lengths = [5, CHUNK, CHUNK + 1, 2 * CHUNK + 3, 3 * CHUNK, length]
    ids = prompts()[0] + run.results[0].ids
    prefilled = runner.start([ids[:length] for length in lengths], options(8))
    for row, length in enumerate(lengths):
        ours = committed(runner.decoder, prefilled.state, row)
        assert_close(ours[0], [(k[:length], v[:length]) for k, v in target])
        drafted = min(length, len(draft[0][0]))
        assert_close([(k[:drafted], v[:drafted]) for k, v in ours[1]], [(k[:drafted], v[:drafted]) for k, v in draft])
