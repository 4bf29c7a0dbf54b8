"""Which pipeline to build: every cut of a model over so many devices, what it should give, and what else would.

Pure functions over the cost model. How often drafts are right is the reader's to say, for one pipeline; how that
changes with the number of stages and of draft layers is taken from the published heads.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np

from spd_jax.config.model import ModelConfig
from spd_jax.plan import Layout, StagePlan, balanced_plan
from spd_jax.planning.cost_model import (
    Cycle,
    autoregressive_seconds,
    published_cycle_seconds,
    serial_round_seconds,
    serial_tokens_per_second,
    spd_cycle,
)
from spd_jax.planning.costs import Costs
from spd_jax.speculation.module import draft_layer_config

# S0 of the published heads for Qwen3.5-4B by (n, Ls): arXiv 2605.30852, revised release, means over three sets.
PUBLISHED_S0 = {(8, 4): 3.51, (8, 3): 3.39, (4, 4): 2.64, (16, 2): 3.70}
REFERENCE = (8, 4)
# A serial draft of the same training (EAGLE-3 in the same paper, same model): S 2.72 with m = 7 steps, S0 3.51 with 15.
# Both are what a draft gives whose every step is right with probability 0.72.
PUBLISHED_SERIAL_ALPHA = 0.72
MOST_STEPS = 8  # of a serial draft


def alpha_of(num_stages: int, s0: float) -> float:
    """The share of right drafts that gives this S0 in long texts."""
    return num_stages / (num_stages - 1) * (1 - 1 / s0)


def published_slopes() -> tuple[float, float]:
    """How alpha changes when n doubles, and with one draft layer more: least squares over the published heads."""
    known = {pair: alpha_of(pair[0], s0) for pair, s0 in PUBLISHED_S0.items()}
    rows = [(1.0, math.log2(n / REFERENCE[0]), layers - REFERENCE[1]) for n, layers in known]
    (_, doubling, layer), *_ = np.linalg.lstsq(np.asarray(rows), np.asarray(list(known.values())))
    return float(doubling), float(layer)


def alpha_at(alpha: float, num_stages: int, num_draft_layers: int) -> float:
    """Alpha of a head for another pipeline than n = 8, Ls = 4, where it is `alpha`."""
    doubling, layer = published_slopes()
    shift = doubling * math.log2(num_stages / REFERENCE[0]) + layer * (num_draft_layers - REFERENCE[1])
    return min(max(alpha + shift, 0.0), 1.0) if 0.0 < alpha < 1.0 else alpha


def serial_alpha(alpha: float) -> float:
    """How often a step of a serial draft is right where a head for n = 8, Ls = 4 is with probability `alpha`: less
    often, since it goes on from its own guesses, by the ratio of the published ones."""
    return alpha * PUBLISHED_SERIAL_ALPHA / alpha_of(REFERENCE[0], PUBLISHED_S0[REFERENCE])


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A pipeline and its cycle, and the cycle of the published layout on as many devices."""

    plan: StagePlan
    cycle: Cycle
    published_seconds: float

    def tokens_per_second(self, alpha: float) -> float:
        """With a head that would be right with probability `alpha` at n = 8 and Ls = 4."""
        n = self.plan.num_stages
        return self.cycle.tokens_per_second(n, alpha_at(alpha, n, self.plan.num_draft_layers))


def candidates(
    model: ModelConfig,
    costs: Costs,
    devices: int,
    *,
    stages: Sequence[int] = (),
    layouts: Sequence[Layout] = ("separate", "beside"),
    draft_layers: Sequence[int] = (1, 2, 3, 4),
) -> Iterator[Candidate]:
    """Balanced plans that fit on so many devices, by stages, layout and draft layers.

    Args:
        stages: numbers of stages to consider (empty: from two on all that the devices allow).

    Raises:
        ValueError: more stages than layers, or than devices.
    """
    counts = stages or range(2, min(devices, model.num_layers) + 1)
    for n in counts:
        if n > devices:
            raise ValueError(f"{n} stages need at least {n} devices, {devices} are to be used")
        for layout in layouts:
            if n + (layout == "separate") > devices:
                continue
            for layers in draft_layers:
                plan = plan_for(model, costs, n, layout, layers)
                published = published_cycle_seconds(model, plan, costs)
                yield Candidate(plan, spd_cycle(model, plan, costs), published)


def plan_for(model: ModelConfig, costs: Costs, num_stages: int, layout: Layout, num_draft_layers: int) -> StagePlan:
    """The plan whose slowest rank is fastest."""
    width = costs.setting.width
    return balanced_plan(
        [costs.layer(kind, width) for kind in model.layers],
        num_stages,
        num_draft_layers=num_draft_layers,
        draft_layer_cost=costs.layer(draft_layer_config(model), num_stages * width + 1),
        layout=layout,
    )


@dataclasses.dataclass(frozen=True)
class Rivals:
    """Seconds a token: one device, and tensor-parallel over all; `serial_rounds`: seconds of a round of the latter with
    a serial draft of 1, 2, ... steps."""

    autoregressive: float
    tensor_parallel: float
    serial_rounds: tuple[float, ...]

    def serial_draft(self, alpha: float) -> tuple[float, int]:
        """Tokens a second with the best number of steps, and that number, where a pipeline's head has this alpha."""
        right = serial_alpha(alpha)
        rounds = enumerate(self.serial_rounds, 1)
        return max((serial_tokens_per_second(steps, right, seconds), steps) for steps, seconds in rounds)


def rivals(model: ModelConfig, costs: Costs, devices: int) -> Rivals:
    """What the same devices do without a pipeline."""
    rounds = tuple(serial_round_seconds(model, costs, devices, steps) for steps in range(1, MOST_STEPS + 1))
    return Rivals(autoregressive_seconds(model, costs), autoregressive_seconds(model, costs, devices), rounds)


def best(found: Sequence[Candidate], alpha: float) -> Candidate:
    """The fastest; of equals the one with the fewest draft layers and devices."""
    return max(found, key=lambda c: (c.tokens_per_second(alpha), -c.plan.num_draft_layers, -c.plan.num_ranks))


def break_even_latency(
    model: ModelConfig, plan: StagePlan, costs: Costs, devices: int, alpha: float, longest: float = 1e-2
) -> float | None:
    """Seconds of a small collective from which on the pipeline beats tensor parallelism over the same devices.

    0 if it always does, None if not even at `longest`.
    """

    def wins(latency: float) -> bool:
        with_it = costs.with_latency(latency)
        n = plan.num_stages
        mine = spd_cycle(model, plan, with_it).tokens_per_second(n, alpha_at(alpha, n, plan.num_draft_layers))
        return mine > 1 / autoregressive_seconds(model, with_it, devices)

    if not wins(longest):
        return None
    if wins(0.0):
        return 0.0
    low, high = 0.0, longest
    while high - low > 1e-8:  # it wins above and loses below: tensor parallelism pays the latency twice a layer
        middle = (low + high) / 2
        low, high = (low, middle) if wins(middle) else (middle, high)
    return high
