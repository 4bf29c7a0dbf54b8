"""The published measurement of Qwen3.5-4B, a GPU a stage, accounted for by the cost model and three fixed times.

    .venv/bin/python benchmarks/published_profile.py

Fits what a layer, a device's pass and a cycle cost beyond memory traffic and arithmetic (least squares of relative
errors over the published times) and prints what is left over. The figures of `h100-eager` in
spd_jax/planning/machines.yaml are these, rounded. No device is used.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from spd_jax.plan import make_plan
from spd_jax.planning.cost_model import (
    autoregressive_seconds,
    draft_seconds,
    published_cycle_seconds,
    rank_seconds,
)
from spd_jax.planning.costs import MachineCosts, Setting
from spd_jax.planning.machines import Machine, load_machine
from spd_jax.planning.planner import PUBLISHED_S0
from spd_jax.weights.load import read_config

# arXiv 2605.30852, revised release: milliseconds, and wall-clock speedups; n and draft layers.
PROFILE = {
    (4, 4): {"cycle": 9.25, "draft": 4.22, "slowest stage": 7.90, "verification": 4.0, "speedup": 2.27},
    (8, 3): {"cycle": 5.41, "draft": 3.49, "slowest stage": 4.20, "verification": 1.2, "speedup": 2.53},
}
AUTOREGRESSIVE = 28.4
UNKNOWN = ("launch", "start", "control")
SETTING = Setting(draft_vocab=32000)


def predicted(machine: Machine) -> dict[str, float]:
    """Milliseconds of everything that was published and that the model has."""
    model, costs = read_config("qwen3.5-4b"), MachineCosts(SETTING, machine)
    found = {"autoregressive": autoregressive_seconds(model, costs)}
    for n, layers in PROFILE:
        plan = make_plan(model.num_layers, n, num_draft_layers=layers)
        found[f"n = {n}, draft"] = costs.start() + draft_seconds(model, plan, costs)
        found[f"n = {n}, slowest stage"] = max(rank_seconds(model, plan, costs)[1:])
        found[f"n = {n}, cycle"] = published_cycle_seconds(model, plan, costs)
    return {name: 1e3 * seconds for name, seconds in found.items()}


def observed() -> dict[str, float]:
    """The published ones, under the same names."""
    found = {"autoregressive": AUTOREGRESSIVE}
    for (n, _), times in PROFILE.items():
        found |= {f"n = {n}, {name}": times[name] for name in ("draft", "slowest stage", "cycle")}
    return found


def fit(base: Machine) -> Machine:
    """The machine with the three times that explain the published ones best."""
    bare, wanted = predicted(base), observed()
    slopes = [predicted(dataclasses.replace(base, **{name: 1e-3})) for name in UNKNOWN]
    rows = np.asarray([[(slope[name] - bare[name]) / wanted[name] for slope in slopes] for name in wanted])
    missing = np.asarray([(wanted[name] - bare[name]) / wanted[name] for name in wanted])
    (*values,), *_ = np.linalg.lstsq(rows, missing)
    return dataclasses.replace(base, **{name: 1e-3 * float(v) for name, v in zip(UNKNOWN, values, strict=True)})


def main() -> None:
    """Fit and print."""
    base = load_machine("h100")
    fitted, shipped = fit(base), load_machine("h100-eager")
    for name in UNKNOWN:
        print(f"{name:<8} fitted {1e3 * getattr(fitted, name):.3f} ms, h100-eager {1e3 * getattr(shipped, name):.3f}")
    bare, known, wanted = predicted(base), predicted(shipped), observed()
    print(f"{'':<22} published  roofline  h100-eager  error")
    for name, value in wanted.items():
        print(f"{name:<22} {value:9.2f} {bare[name]:9.2f} {known[name]:11.2f} {known[name] / value - 1:+6.1%}")
    for (n, layers), times in PROFILE.items():
        waits = times["slowest stage"] - times["draft"]
        verifies, rest = times["verification"] - waits, times["cycle"] - times["draft"] - times["verification"]
        tokens = PUBLISHED_S0[n, layers] / n
        print(
            f"n = {n}: rank 0 waits {waits:.2f} ms for the slowest stage, so {verifies:.2f} of the "
            f"{times['verification']:.1f} called verification are its own; {rest:.2f} ms of the cycle are neither it "
            f"nor the draft; S0 and profile give {AUTOREGRESSIVE * tokens / times['cycle']:.2f} times autoregressive, "
            f"published {times['speedup']:.2f}"
        )


if __name__ == "__main__":
    main()
