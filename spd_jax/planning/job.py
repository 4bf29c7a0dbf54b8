"""What infer/plan.py works out: the model, the costs of its pieces, every candidate, and the best of them."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, get_args

import jax.numpy as jnp

from spd_jax.config.model import ModelConfig
from spd_jax.config.plan import PlanConfig
from spd_jax.generation.report import prepare_output
from spd_jax.models.shapes import parameter_shapes
from spd_jax.parallel.platform import find_devices, set_up_platform
from spd_jax.parallel.watch import Watch
from spd_jax.plan import Layout
from spd_jax.planning.costs import Costs, MachineCosts, Setting
from spd_jax.planning.machines import Machine, load_machine
from spd_jax.planning.measure import measure
from spd_jax.planning.planner import Candidate, Rivals, best, break_even_latency, candidates, rivals
from spd_jax.planning.simulator import read_traces
from spd_jax.weights.load import read_config


@dataclasses.dataclass(frozen=True)
class Planned:
    """A model on a machine: what every pipeline would give, and what else would."""

    config: PlanConfig
    model: ModelConfig
    machine: Machine
    costs: Costs
    candidates: tuple[Candidate, ...]
    rivals: Rivals

    @property
    def alpha(self) -> float:
        """The share of right drafts that the best plan is chosen for."""
        return self.config.alphas[-1]

    @functools.cached_property
    def best(self) -> Candidate:
        """The plan with the most tokens a second at `alpha`."""
        return self.best_at(self.alpha)

    def best_at(self, alpha: float) -> Candidate:
        """The plan with the most tokens a second at `alpha`, among those that fit into memory if any do."""
        fitting = [candidate for candidate in self.candidates if self.fits(candidate)]
        return best(fitting or self.candidates, alpha)

    def fits(self, candidate: Candidate) -> bool:
        """Whether a rank's weights and caches fit into a device's memory."""
        return max(candidate.cycle.memory) <= self.machine.memory

    @property
    def weight_bytes(self) -> int:
        """Bytes of the whole target's weights."""
        return self.costs.setting.itemsize * sum(map(math.prod, parameter_shapes(self.model).values()))

    @functools.cached_property
    def break_even(self) -> float | None:
        """Latency of a collective from which on the best plan beats tensor parallelism over the same devices."""
        return break_even_latency(self.model, self.best.plan, self.costs, self.config.devices, self.alpha)

    @property
    def latency(self) -> float:
        """Seconds of a small collective over all devices."""
        return self.costs.collective(self.config.devices, 0)

    def tree(self) -> dict[str, Any]:
        """The best plan as JSON."""
        found, cycle = self.best, self.best.cycle
        return {
            "model": self.config.target,
            "machine": self.machine.name,
            "measured": self.config.measure,
            "devices": self.config.devices,
            "n": found.plan.num_stages,
            "layout": found.plan.layout,
            "num_draft_layers": found.plan.num_draft_layers,
            "stage_layers": list(found.plan.stage_layers),
            "setting": dataclasses.asdict(self.costs.setting),
            "cycle_seconds": cycle.seconds,
            "parts": cycle.parts,
            "rank_seconds": list(cycle.ranks),
            "idle_share": cycle.idle_share,
            "bottleneck": cycle.bottleneck,
            "memory_bytes_per_rank": list(cycle.memory),
            "fits": self.fits(found),
            "tokens_per_second": {f"{alpha:g}": found.tokens_per_second(alpha) for alpha in self.config.alphas},
            "autoregressive": {"token_seconds": self.rivals.autoregressive},
            "published_layout": {"cycle_seconds": found.published_seconds},
            "tensor_parallel": {"token_seconds": self.rivals.tensor_parallel},
            "serial_draft": {
                "tokens_per_second": {f"{alpha:g}": self.rivals.serial_draft(alpha)[0] for alpha in self.config.alphas}
            },
            "break_even_latency_seconds": self.break_even,
        }


def prepare(config: PlanConfig) -> list[str]:
    """Make sure that results have where to go, and read the traces.

    Raises:
        OSError: an output that cannot be written, a trace that cannot be read; TraceError: a file that holds none.
    """
    for path in (config.json, config.plot):
        if path is not None:
            prepare_output(path)
    return [trace for path in config.replay for trace in read_traces(path)]


def make_planned(config: PlanConfig) -> Planned:
    """Work everything out.

    Raises:
        OSError, ValueError: a model or machine that is not there or cannot be read, a plan that cannot be, measuring on
            other devices than the machine's.
        RuntimeError: devices were to be simulated after JAX had started with fewer.
    """
    model, machine = read_config(config.target), load_machine(config.machine)
    setting = Setting(
        jnp.dtype(config.dtype).itemsize,
        config.context,
        config.batch,
        config.width,
        config.temperature > 0.0,
        min(config.draft_vocabulary, model.vocab_size) or None,
    )
    wanted: dict[str, Any] = {"stages": config.stages}
    wanted["layouts"] = get_args(Layout) if config.layout is None else (config.layout,)
    wanted["draft_layers"] = (1, 2, 3, 4) if config.num_draft_layers is None else (config.num_draft_layers,)

    def predict(costs: Costs) -> tuple[tuple[Candidate, ...], Rivals]:
        found = tuple(candidates(model, costs, config.devices, **wanted))
        if not found:
            raise ValueError(
                f"no plan fits on {config.devices} devices: {max(config.stages, default=2)} stages in layout separate "
                f"need one more for the draft (--layout beside does not)"
            )
        return found, rivals(model, costs, config.devices)

    costs: Costs = MachineCosts(setting, machine)
    predict(costs)  # what cannot be planned need not be measured
    if config.measure:
        if machine.shared:
            set_up_platform(devices=config.devices)
        elif find_devices()[0].platform == "cpu":
            raise ValueError(
                f"--measure times the devices that are here, and these are CPUs, not {machine.name}: run it there, "
                "give --machine cpu, or say shared: true in your machine's file"
            )
        with Watch(config.patience).over("the measurements", works_here=True):
            costs = measure(setting, config.dtype, machine, predict)
    return Planned(config, model, machine, costs, *predict(costs))
