"""Where rounding decides: bfloat16, and logits that are exactly equal."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from spd_jax.decode.autoregressive import AutoregressiveDecoder
from spd_jax.decode.options import Options
from spd_jax.generation.compare import compare_ids, teacher_forced_logits
from spd_jax.weights.load import load_decoder, open_target
from spd_jax.weights.random_model import RandomWeights
from tests.decode.engine import (
    BATCH,
    CHUNK,
    CYCLES,
    in_batches,
    make_pipeline,
    model_config,
    plan_of,
    random_head,
    random_prompts,
)

TINY_LLAMA = Path(__file__).parents[1] / "data" / "tiny_llama" / "target"
STARTS = "The,A server,To,In order,When,I,You can,Python,What,How,There are,First,It is,We,This,Some,If,For,Here,As"


@pytest.mark.slow
def test_bfloat16_ids_part_only_at_near_ties() -> None:
    """G01: 20 prompts of 64 tokens; a difference must be explained by its margin.

    On the trained toy: a random model of this depth is chaotic in bfloat16 (logits move by more than 1).
    """
    source = open_target(TINY_LLAMA)
    model = load_decoder(source, jnp.bfloat16)
    plain = AutoregressiveDecoder(model, steps_per_dispatch=CYCLES, prefill_chunk=CHUNK)
    plan = plan_of(8, 3)
    pipelined = make_pipeline(source, random_head(source.config, plan), plan, stack={"dtype": jnp.bfloat16})
    prompts = [[256, *start.encode()] for start in STARTS.split(",")]
    wanted = in_batches(plain, prompts, {"max_new_tokens": 64})
    found = in_batches(pipelined, prompts, {"max_new_tokens": 64})
    logits = teacher_forced_logits(model, np.ones(source.config.vocab_size, bool))
    verdicts = [
        compare_ids(row.prompt_ids, result.ids, row.ids, logits, "bfloat16")
        for row, result in zip(wanted, found, strict=True)
    ]
    assert all(verdict.equal or verdict.near_tie for verdict in verdicts), verdicts
    assert sum(verdict.equal for verdict in verdicts) >= 15
    assert len({tuple(row.ids) for row in wanted}) > 10


class TwinRows:
    """A target whose head scores ids 10 and 11 alike, and higher than the rest more often than not."""

    def __init__(self, seed: int = 5):
        self.config = model_config(4)
        self.origin = "twin rows"
        self._source = RandomWeights(self.config, seed)

    def paths(self) -> list[str]:
        return self._source.paths()

    def tensor(self, path: str) -> np.ndarray:
        value = self._source.tensor(path)
        if path == "head":
            value = value.copy()
            value[10] = value[11] = 3.0 * value[10]
        return value


def test_of_equal_logits_the_lowest_id_wins_in_both_decodings() -> None:
    """G01: ids 10 and 11 always tie; they live on different ranks of the pipeline."""
    source = TwinRows()
    plain = AutoregressiveDecoder(load_decoder(source), steps_per_dispatch=CYCLES, prefill_chunk=CHUNK)
    plan = plan_of(4, 2)
    pipelined = make_pipeline(source, random_head(source.config, plan), plan)
    prompts = random_prompts(BATCH, seed=3)
    wanted = plain.generate(prompts, Options(max_new_tokens=24)).results
    found = pipelined.generate(prompts, Options(max_new_tokens=24)).results
    assert [row.ids for row in found] == [row.ids for row in wanted]
    text = [token for row in wanted for token in row.ids]
    assert 10 in text
    assert 11 not in text
