"""What the pieces of a decode program take on the devices that are here, measured.

Whatever a prediction asks for (`spd_jax.planning.costs`) is noted in a first pass and measured in a second: layers on
so many rows, shares of the heads, collectives, and what the whole program takes beyond its pieces, on a model so small
that little else is left. Layers and products run in loops in which each step needs the one before, over several copies
that together exceed a processor's cache, as in a model.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array

from spd_jax.config.model import AttentionConfig, LayerConfig, MlpConfig, ModelConfig, NormConfig, RopeConfig
from spd_jax.decode.loop import PipelineDecoder
from spd_jax.decode.tree import Tree
from spd_jax.defaults import jit
from spd_jax.models.shapes import parameter_shapes
from spd_jax.parallel.mesh import AXIS, stage_mesh, varying
from spd_jax.parallel.stack import make_program, stack_params
from spd_jax.plan import StagePlan, make_plan
from spd_jax.planning.cost_model import spd_cycle
from spd_jax.planning.costs import Costs, MachineCosts, Setting
from spd_jax.planning.cycle_timing import full_cycles
from spd_jax.planning.layer_costs import measure_layers, measure_products
from spd_jax.planning.machines import Machine
from spd_jax.planning.timing import Timed, interleave, median
from spd_jax.speculation.module import HeadConfig, draft_layer_config, head_from_target
from spd_jax.weights.mapping import TensorMap

ROUNDS, CYCLES, COLLECTIVES = 21, 16, 64
MANY_LAYERS = 9
SMALL = 1024  # bytes of a collective that is all latency


@dataclasses.dataclass(frozen=True)
class Asked(Costs):
    """Costs that only note what a prediction asks for, so that just that is measured; everything takes a second."""

    layers: set[tuple[LayerConfig, int]] = dataclasses.field(default_factory=set)
    products: set[tuple[int, int, int]] = dataclasses.field(default_factory=set)
    collectives: dict[int, int] = dataclasses.field(default_factory=dict)
    controls: set[int] = dataclasses.field(default_factory=set)

    @property
    def shared(self) -> bool:
        """No: whether work adds up changes nothing in what is asked for."""
        return False

    def layer(self, kind: LayerConfig, rows: int, devices: int = 1) -> float:
        """A second; the kind and the number of rows are noted."""
        self.layers.add((kind, rows))
        return 1.0

    def product(self, outputs: int, inputs: int, rows: int) -> float:
        """A second; the sizes are noted."""
        self.products.add((outputs, inputs, rows))
        return 1.0

    def collective(self, devices: int, size: int) -> float:
        """A second; the largest size over so many devices is noted."""
        if devices > 1:
            self.collectives[devices] = max(size, self.collectives.get(devices, 2 * SMALL))
        return 1.0

    def with_latency(self, seconds: float) -> Costs:
        """These costs: whatever the latency, the same is asked for."""
        return self

    def start(self) -> float:
        """Nothing: measurements have it in `control`."""
        return 0.0

    def keeping(self) -> float:
        """Nothing is noted: it is measured in any case."""
        return 0.0

    def control(self, devices: int) -> float:
        """A second; the number of devices is noted."""
        self.controls.add(devices)
        return 1.0


@dataclasses.dataclass(frozen=True)
class MeasuredCosts(Costs):
    """Measured seconds. `exchange`: by number of devices the seconds of a small collective and of each byte more;
    `fixed`: what a cycle takes beyond its pieces; `kept`: what a pipeline's layer takes beyond the layer. For more
    devices than are here the first two come from `machine`, which also says whether devices are simulated."""

    machine: Machine
    layers: Mapping[tuple[LayerConfig, int], float]
    products: Mapping[tuple[int, int, int], float]
    exchange: Mapping[int, tuple[float, float]]
    fixed: Mapping[int, float]
    kept: float

    @property
    def shared(self) -> bool:
        """Whether the machine's devices are simulated on one."""
        return self.machine.shared

    def layer(self, kind: LayerConfig, rows: int, devices: int = 1) -> float:
        """What the whole layer took; several devices are taken to share it evenly."""
        return self.layers[kind, rows] / devices

    def product(self, outputs: int, inputs: int, rows: int) -> float:
        """What the product took. Balancing by measured times may ask for a size that was not measured: then the nearest
        one, scaled by the size of its matrix."""
        wanted = (outputs, inputs, rows)
        if wanted in self.products:
            return self.products[wanted]
        nearest = min(self.products, key=lambda known: abs(math.log(math.prod(known) / math.prod(wanted))))
        return self.products[nearest] * outputs * inputs / (nearest[0] * nearest[1])

    def collective(self, devices: int, size: int) -> float:
        """The measured latency, and the measured time of each byte beyond the small ones."""
        if devices not in self.exchange:
            return MachineCosts(self.setting, self.machine).collective(devices, size)
        latency, each = self.exchange[devices]
        return latency + max(size - SMALL, 0) * each

    def with_latency(self, seconds: float) -> Costs:
        """Another latency; bytes take what they were measured to take."""
        exchange = {devices: (seconds, each) for devices, (_, each) in self.exchange.items()}
        return dataclasses.replace(self, machine=self.machine.with_latency(seconds), exchange=exchange)

    def start(self) -> float:
        """Nothing: it is in what `control` was measured to be."""
        return 0.0

    def keeping(self) -> float:
        """What it took, from small models of few and of many layers."""
        return self.kept

    def control(self, devices: int) -> float:
        """What it took in the cycle of a small model; the machine's figure for more devices than there are."""
        return self.fixed.get(devices, self.machine.control)


def measure(setting: Setting, dtype: Any, machine: Machine, ask: Callable[[Costs], Any]) -> MeasuredCosts:
    """Costs of all that `ask` asks for, on this process's devices.

    Args:
        machine: what stands in for collectives over more devices than there are.
    """
    asked, there = Asked(setting), len(jax.devices())
    ask(asked)
    controls = sorted(ranks for ranks in asked.controls if ranks <= there)
    few, many = (_small_pipeline(2, layers) for layers in (1, MANY_LAYERS))
    small = {ranks: _small_pipeline(ranks) for ranks in controls}
    for model, plan in (few, many, *small.values()):
        spd_cycle(model, plan, asked)
    exchange = {ranks: _collective(ranks, size) for ranks, size in asked.collectives.items() if ranks <= there}
    layers = {pair: 1e-3 * ms for pair, ms in measure_layers(asked.layers, setting, dtype).items()}
    products = {sizes: 1e-3 * ms for sizes, ms in measure_products(asked.products, dtype).items()}
    pieces = MeasuredCosts(setting, machine, layers, products, exchange, dict.fromkeys(controls, 0.0), 0.0)
    if there > 1:
        one, nine = _cycle_seconds([few, many], setting, dtype)
        each = (nine - one) / (MANY_LAYERS - 1) - pieces.layer(few[0].layers[0], setting.width)
        pieces = dataclasses.replace(pieces, kept=max(each, 0.0))
    fixed = {}
    for ranks, whole in zip(small, _cycle_seconds(list(small.values()), setting, dtype), strict=True):
        bare, all_latency = (spd_cycle(*small[ranks], pieces.with_latency(latency)).seconds for latency in (0.0, 1.0))
        rest = max(whole - bare, 0.0)
        if ranks in exchange:
            # Among other work ranks wait less for each other than in a loop of exchanges alone.
            latency = min(exchange[ranks][0], rest / (all_latency - bare))
            exchange[ranks] = (latency, exchange[ranks][1])
            rest -= (all_latency - bare) * latency
        fixed[ranks] = rest
    return dataclasses.replace(pieces, exchange=exchange, fixed=fixed)


def _collective(ranks: int, size: int) -> tuple[float, float]:
    """Seconds of a small all-reduce, and of each byte more."""
    mesh = stage_mesh(ranks)

    def of(count: int) -> Timed:
        def run(x: Array) -> Array:
            def body(step: Array, x: Array) -> Array:
                return varying(jax.lax.psum(x, AXIS)) * 0.5

            return jax.lax.fori_loop(0, COLLECTIVES, body, x)

        mapped = jit(jax.shard_map(run, mesh=mesh, in_specs=PartitionSpec(AXIS), out_specs=PartitionSpec(AXIS)))
        start = jax.device_put(jnp.ones((ranks, count), jnp.float32), jax.NamedSharding(mesh, PartitionSpec(AXIS)))
        return Timed(str(count), lambda: mapped(start), COLLECTIVES)

    few, many = SMALL // 4, size // 4
    found = interleave([of(few), of(many)], ROUNDS)
    little, much = (1e-3 * median(found[str(count)]) for count in (few, many))
    return little, max(much - little, 0.0) / (4 * (many - few))


# A model that is all program: stages of one layer of eight numbers.


class _Zeros:
    """`TargetWeights` of zeros: every logit is the same, so id 0 is always right."""

    def __init__(self, config: ModelConfig):
        self.config, self.origin = config, "zeros"
        self._shapes = parameter_shapes(config)

    def paths(self) -> list[str]:
        return list(self._shapes)

    def tensor(self, path: str) -> np.ndarray:
        return np.zeros(self._shapes[path], np.float32)


def _small_pipeline(ranks: int, layers: int | None = None) -> tuple[ModelConfig, StagePlan]:
    """A stage for every rank but the draft's, one layer each; or one stage of so many layers."""
    layer = LayerConfig(8, NormConfig(1e-5), AttentionConfig(1, 1, 8, RopeConfig()), MlpConfig(8))
    stages = max(ranks - 1, 1) if layers is None else 1
    count = layers or stages
    model = ModelConfig("llama", 64, (layer,) * count, 4096, True, (2,))
    return model, make_plan(count, stages, num_draft_layers=1, layout="separate" if ranks > 1 else "beside")


def _cycle_seconds(pipelines: Sequence[tuple[ModelConfig, StagePlan]], setting: Setting, dtype: Any) -> list[float]:
    """Of each, interleaved."""
    things = [_timed(str(number), *pipeline, setting, dtype) for number, pipeline in enumerate(pipelines)]
    found = interleave(things, ROUNDS)
    return [1e-3 * median(found[thing.name]) for thing in things]


def _timed(name: str, model: ModelConfig, plan: StagePlan, setting: Setting, dtype: Any) -> Timed:
    weights = _Zeros(model)
    config = HeadConfig(
        draft_layer_config(model), plan.num_draft_layers, plan.anchors, vocab_size=model.vocab_size, lm_head="target"
    )
    head = head_from_target(config, model, TensorMap(weights))
    program, mesh = make_program(model, head, plan), stage_mesh(plan.num_ranks)
    params = stack_params(program, weights, head, mesh, dtype=dtype)
    decoder = PipelineDecoder(program, params, mesh, max_length=4096, cycles_per_dispatch=CYCLES)
    tree, size = Tree(setting.width), setting.batch
    return full_cycles(name, decoder, [1], [0] * 2048, 512, batch_size=size, tree=tree)
