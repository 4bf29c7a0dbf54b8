"""Every family from disk through the pipeline: greedy text equals what transformers says, token by token."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spd_jax.decode.loop import PipelineDecoder
from spd_jax.decode.options import Options
from spd_jax.decode.tree import CHAIN, Tree
from spd_jax.plan import make_plan
from spd_jax.speculation.module import HeadConfig, draft_layer_config, head_from_target
from spd_jax.weights.load import open_target
from spd_jax.weights.mapping import TargetWeights, TensorMap
from tests.decode.engine import make_pipeline, script
from tests.models.test_families import SIZES, VARIANTS
from tests.tiny import logits_of, random_ids, random_model

TOKENS = 12
NAMES = ["qwen2, window in upper layers", "qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe", "mistral, window", "gemma2"]
NAMES += ["gemma3"]


def greedy(model: Any, prompt: list[int]) -> list[int]:
    """The likeliest token of transformers after everything so far, again and again."""
    ids = list(prompt)
    for _ in range(TOKENS):
        ids.append(int(logits_of(model, np.asarray([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


def pipeline(weights: TargetWeights, stage_layers: tuple[int, ...], layout: Any) -> PipelineDecoder:
    config = weights.config
    plan = make_plan(config.num_layers, num_draft_layers=1, layout=layout, stage_layers=stage_layers)
    head = HeadConfig(draft_layer_config(config), 1, plan.anchors, config.vocab_size, lm_head="target")
    return make_pipeline(weights, head_from_target(head, config, TensorMap(weights), noise=0.1), plan)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_text_is_transformers_own(name: str, tmp_path: Path):
    """Two stages, four and three unequal ones; three prompts under right and wrong drafts, one alone, with a tree."""
    model_type, changes = VARIANTS[name]
    model = random_model(model_type, **(SIZES | changes | {"num_hidden_layers": 4, "layer_types": None}))
    model.save_pretrained(tmp_path)
    weights = open_target(tmp_path)
    prompts = [random_ids(length, seed=length)[0].tolist() for length in (2, 9, 14)]
    texts = [greedy(model, prompt) for prompt in prompts]
    for stage_layers, layout in (((2, 2), "separate"), ((1, 1, 1, 1), "beside"), ((1, 2, 1), "separate")):
        decoder = pipeline(weights, stage_layers, layout)
        forced = [script(bits, text, 64) for bits, text in zip(("1101", "0", "1"), texts, strict=True)]
        options = Options(max_new_tokens=TOKENS, forced_drafts=forced)
        assert [result.ids for result in decoder.generate(prompts, options).results] == texts
        for tree in (CHAIN, Tree(4)):
            alone = decoder.generate(prompts[1:2], Options(max_new_tokens=TOKENS, forced_drafts=[[-1]], tree=tree))
            assert alone.results[0].ids == texts[1]
