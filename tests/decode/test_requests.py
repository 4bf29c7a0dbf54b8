"""Requests that cannot be served are refused before anything runs, with what was found and what would be right."""

from typing import Any

import jax
import pytest

from spd_jax.decode.batch import BatchError, bucket
from spd_jax.decode.options import Options
from spd_jax.parallel.mesh import stage_mesh
from spd_jax.parallel.stack import make_program
from spd_jax.plan import make_plan
from tests.decode.engine import autoregressive, model_config, pipeline, plan_of, random_head


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "no prompt was given"),
        ([[5, 6], []], "prompt 1 of 2 is empty"),
        ([[5], [6, 61]], r"prompt 1 holds id 61, the vocabulary is 0..60"),
        ([[-1]], r"prompt 0 holds id -1, the vocabulary is 0..60"),
        ([[5], [5] * 1024], r"prompt 1 has 1024 tokens, at most 1023 leave room for one more \(context 1024\)"),
    ],
)
def test_prompts_that_cannot_be_decoded(prompts: list[list[int]], message: str):
    for decoder in (pipeline(3, 3), autoregressive(3)):
        with pytest.raises(BatchError, match=message):
            decoder.generate(prompts, Options())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sequences": (1, 2, 3)}, "sequences has 3 entries for 1 prompts"),
        ({"forced_drafts": [[1], [2]]}, "forced_drafts has 2 entries for 1 prompts"),
        ({"forced_drafts": [[-1, 61]]}, r"forced_drafts of prompt 0 hold id 61, allowed are -1..60"),
        ({"forced_drafts": [[-2]]}, r"forced_drafts of prompt 0 hold id -2, allowed are -1..60"),
    ],
)
def test_lists_that_do_not_fit(options: dict[str, Any], message: str):
    with pytest.raises(BatchError, match=message):
        pipeline(3, 3).generate([[5]], Options(**options))


def test_too_few_devices():
    """M05: says how many there are, and how to get more."""
    with pytest.raises(ValueError, match=r"needs 13 devices, found 12 \(cpu\).*--devices 13"):
        stage_mesh(13)
    with pytest.raises(ValueError, match="needs 3 devices, found 2"):
        stage_mesh(3, jax.devices()[:2])
    beside = (12, "--layout beside")
    with pytest.raises(ValueError, match=r"found 12 .*Use --layout beside, which needs 12, fewer stages"):
        stage_mesh(13, fewer=beside)
    with pytest.raises(ValueError, match=r"found 2 .*Use fewer stages"):
        stage_mesh(13, jax.devices()[:2], fewer=beside)


def test_a_plan_for_another_model_or_head():
    config = model_config(8)
    plan = plan_of(8, 3)
    head = random_head(config, plan)
    with pytest.raises(ValueError, match="the plan has 9 layers, the model 8"):
        make_program(config, head, make_plan(9, 3, num_draft_layers=2))
    with pytest.raises(ValueError, match=r"the plan has 1 draft layers .* the head 2"):
        make_program(config, head, make_plan(8, 3, num_draft_layers=1))
    with pytest.raises(ValueError, match=r"anchors \[0, 4, 8\], the head 2 and \[0, 3, 8\]"):
        make_program(config, head, make_plan(8, 3, num_draft_layers=2, anchors=[0, 4, 8]))
    with pytest.raises(ValueError, match="vocabulary 61, the target has 16 and 50"):
        make_program(model_config(8, vocab_size=50), head, plan)


@pytest.mark.parametrize("length", [0, 1, 1025])
def test_a_context_that_the_model_does_not_have(length: int):
    shared = pipeline(3, 3)
    with pytest.raises(ValueError, match=rf"max_length must lie in 2..1024 .*, found {length}"):
        type(shared)(shared.program, shared.params, shared.mesh, max_length=length)


def test_buckets_are_powers_of_two():
    assert [bucket(n) for n in (1, 256, 257, 512, 513)] == [256, 256, 512, 512, 1024]
