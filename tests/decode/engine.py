"""Tiny models and decoders for the tests of the decode engine, each made once a process.

Compilations dominate the time of these tests, so programs are shared: one batch size, one chunk, one number of cycles a
dispatch, and forced drafts that are always there as data (-1: the module's own), so that own heads and scripts run the
same program.
"""

import functools
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from spd_jax.config.model import ModelConfig
from spd_jax.decode.autoregressive import AutoregressiveDecoder
from spd_jax.decode.loop import PipelineDecoder
from spd_jax.decode.options import Generation, Options, SequenceResult
from spd_jax.decode.state import ACCEPTED, REJECTED
from spd_jax.metrics import expected_cycles
from spd_jax.models.decoder import Decoder
from spd_jax.parallel.mesh import stage_mesh
from spd_jax.parallel.stack import make_program, stack_params
from spd_jax.plan import Layout, StagePlan, make_plan
from spd_jax.speculation.module import HeadConfig, SpeculationModule, draft_layer_config
from spd_jax.weights.load import load_decoder
from spd_jax.weights.random_model import RandomWeights, dense_layer

BATCH, CHUNK, CYCLES = 4, 4, 8  # of every shared decoder
MAX_LENGTH = 1024
VOCAB = 61  # a prime: no number of ranks divides it
LAYER = dense_layer(16, 24, 4, 2, 4, 1e-5)
# Weights whose greedy text keeps changing, by number of layers (the tests of the text check it).
SEEDS = {3: 0, 8: 0, 30: 4}


def model_config(num_layers: int, **changes: Any) -> ModelConfig:
    """A Llama of `num_layers` tiny layers."""
    fields: dict[str, Any] = {"vocab_size": VOCAB, "layers": (LAYER,) * num_layers, "max_position": MAX_LENGTH}
    fields |= {"tie_embeddings": False, "eos_token_ids": (2,)} | changes
    return ModelConfig("llama", **fields)


@functools.cache
def weights(num_layers: int) -> RandomWeights:
    return RandomWeights(model_config(num_layers), SEEDS[num_layers])


@functools.cache
def target(num_layers: int) -> Decoder:
    return load_decoder(weights(num_layers), jnp.float32)


def random_head(target: ModelConfig, plan: StagePlan, seed: int = 7, **changes: Any) -> SpeculationModule:
    """A random speculation module with logits of the target's size; its layers have half gain: rounding stays small."""
    fields: dict[str, Any] = {"layer": draft_layer_config(target), "anchors": plan.anchors}
    fields |= {"num_layers": plan.num_draft_layers, "vocab_size": target.vocab_size} | changes
    config = HeadConfig(**fields)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: SpeculationModule(config, rngs=nnx.Rngs(0))))
    rng, flat = np.random.default_rng(seed), nnx.to_flat_state(state)
    for path, param in flat:  # from NumPy: JAX would compile one random program a shape
        noise = rng.standard_normal(param.shape, np.float32)
        is_norm = len(param.shape) == 1
        gain = np.float32(0.1 if is_norm else param.shape[-1] ** -0.5 * (0.5 if "layers" in path else 1.0))
        param.set_value(jnp.asarray(np.float32(is_norm) + gain * noise))
    return nnx.merge(graphdef, nnx.from_flat_state(flat))


def make_pipeline(source: Any, head: Any, plan: StagePlan, *, stack: dict[str, Any] | None = None, **options: Any):
    """A pipelined decoder of this target and head on the first devices."""
    program = make_program(source.config, head, plan)
    mesh = stage_mesh(plan.num_ranks)
    params = stack_params(program, source, head, mesh, **(stack or {}))
    options = {"cycles_per_dispatch": CYCLES, "prefill_chunk": CHUNK} | options
    return PipelineDecoder(program, params, mesh, **options)


@functools.cache
def head_of(num_layers: int, num_stages: int, layout: Layout) -> SpeculationModule:
    return random_head(model_config(num_layers), plan_of(num_layers, num_stages, layout))


def plan_of(num_layers: int, num_stages: int, layout: Layout = "separate") -> StagePlan:
    return make_plan(num_layers, num_stages, num_draft_layers=2, layout=layout)


def pipeline(num_layers: int, num_stages: int, layout: Layout = "separate") -> PipelineDecoder:
    """The shared decoder of a plan."""
    return _pipeline(num_layers, num_stages, layout)


@functools.cache
def _pipeline(num_layers: int, num_stages: int, layout: Layout) -> PipelineDecoder:
    plan = plan_of(num_layers, num_stages, layout)
    return make_pipeline(weights(num_layers), head_of(num_layers, num_stages, layout), plan)


@functools.cache
def autoregressive(num_layers: int) -> AutoregressiveDecoder:
    return AutoregressiveDecoder(target(num_layers), steps_per_dispatch=CYCLES, prefill_chunk=CHUNK)


def random_prompts(count: int, seed: int = 0, vocab: int = VOCAB, longest: int = 13) -> list[list[int]]:
    """Prompts of 1, 2, 3, ... tokens, from a vocabulary without the first three ids."""
    rng = np.random.default_rng(seed)
    return [rng.integers(3, vocab, 1 + row % longest).tolist() for row in range(count)]


def in_batches(decoder: Any, prompts: Sequence[list[int]], options: dict[str, Any]) -> list[SequenceResult]:
    """Generate for any number of prompts in batches of `BATCH` (the last one filled up); lists go by prompt."""
    per_prompt = ("forced_drafts", "sequences")
    results = []
    for start in range(0, len(prompts), BATCH):
        rows = [min(row, len(prompts) - 1) for row in range(start, start + BATCH)]
        chosen = {k: [v[row] for row in rows] if k in per_prompt else v for k, v in options.items()}
        if "sequences" in chosen:
            chosen["sequences"] = tuple(chosen["sequences"])
        generation: Generation = decoder.generate([prompts[row] for row in rows], Options(**chosen))
        results += generation.results[: len(prompts) - start]
    return results


def script(bits: str, text: Sequence[int], vocab: int = VOCAB) -> list[int]:
    """Forced drafts for a known text: its own token where the bit is 1, that + 1 where it is 0; the script repeats.

    The first bit is for the second token: the first comes from prefill and is never drafted.
    """
    return [-1, *((token + (bits[i % len(bits)] == "0")) % vocab for i, token in enumerate(text[1:]))]


OWN = [-1]  # forced drafts of a sequence that keeps its head's own


def verdicts(result: SequenceResult) -> list[bool]:
    """For every generated token whether its draft was right (the first, from prefill, counts as right)."""
    return [True, *(token.event == ACCEPTED for token in result.tokens[1:])]


def assert_cycles_exact(result: SequenceResult, num_stages: int) -> None:
    """K = n + A + n R over tokens 2..N-1, and every token in the cycle that this rule gives it."""
    events = [token.event for token in result.tokens[1:-1]]
    count = len(result.tokens)
    expected = expected_cycles(count, num_stages, events.count(ACCEPTED), events.count(REJECTED))
    assert result.cycles == expected
    if num_stages == 1:
        assert result.undrafted == max(count - 1, 0)
        assert result.accepted == result.rejected == 0
    else:
        assert result.accepted + result.rejected == max(count - 1, 0)
        assert result.undrafted == 0
    cycle = 0
    for before, token in zip(result.tokens, result.tokens[1:], strict=False):
        cycle += 1 if before.event == ACCEPTED else num_stages  # the first token and a rejection leave one in flight
        assert token.cycle == cycle
    assert [record.token for record in result.records if record.token >= 0] == result.ids[1:]
    assert len(result.records) == result.cycles


def run_on_many_ranks(module: str, call: str) -> None:
    """Run a check of a test module in a process of its own, with more devices than the other tests have."""
    code = (
        "import jax, tests.conftest; jax.config.update('jax_num_cpu_devices', 31);"
        f"from tests.decode.{module} import check; {call}; print('checked')"
    )
    root = Path(__file__).parents[2]
    result = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=3600)
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("checked\n")
