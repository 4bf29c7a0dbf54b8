"""Real acceptance during training: an evaluator that decodes a few prompts with the head as trained so far.

The pipeline is loaded once; heads are exchanged in place. Knows decoding and nothing of training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from spd_jax.config.distill import DistillConfig
from spd_jax.config.run import EngineConfig
from spd_jax.decode.options import Options
from spd_jax.evaluation.acceptance import acceptance
from spd_jax.generation.engine import open_engine
from spd_jax.generation.prompts import encode_prompt, read_prompts
from spd_jax.plan import StagePlan
from spd_jax.speculation.module import SpeculationModule
from spd_jax.weights.ids import end_ids


def decoding_evaluator(config: DistillConfig, plan: StagePlan) -> Callable[[SpeculationModule], Mapping[str, float]]:
    """Figures `s0` and `alpha`, greedy, pooled over the prompts; none if no answer has two tokens.

    Args:
        config: of the training run; its target, and what it says of decoding.
        plan: of the heads to come; their anchors and draft layers are its own.

    Raises:
        OSError: no prompt file.
        ValueError: prompts that cannot be decoded, or too few devices for the plan.
    """
    engine = open_engine(
        EngineConfig(
            config.target,
            plan=plan.stage_layers,
            layout=plan.layout,
            num_draft_layers=plan.num_draft_layers,
            patience=config.patience,
        )
    )
    prompts = [
        encode_prompt(prompt, engine.tokenizer, chat=True, vocab_size=engine.num_tokens, max_length=engine.max_length)
        for prompt in read_prompts(config.decode_prompts or "", config.decode_limit)
    ]
    ends = end_ids(engine.weights.config, engine.tokenizer, config.target)
    options = Options(max_new_tokens=config.decode_new_tokens, eos_ids=ends)
    decoders: list[Any] = []

    def evaluate(module: SpeculationModule) -> Mapping[str, float]:
        old = decoders[0] if decoders else engine.pipeline()
        decoder = old.with_head(module, plan)
        decoders[:] = [decoder]
        found = acceptance(decoder, prompts, options, batch=len(prompts))
        return {} if found.s0 is None else {"s0": found.s0, "alpha": found.alpha}

    return evaluate
