"""How a model can be cut into stages: the even cut, the balanced one, and the memory of a rank.

The slowest rank sets the length of a cycle: a stage's layers, or the draft layers where they have a rank of their own.
Heads and projections are sharded over all ranks and weigh on each alike.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping

import jax.numpy as jnp

from spd_jax.config.model import LayerConfig, ModelConfig
from spd_jax.config.plan import PlanConfig
from spd_jax.evaluation.cost_model import memory_of_ranks
from spd_jax.evaluation.layer_costs import bytes_read, describe_kind, measure_layers
from spd_jax.models.shapes import num_parameters
from spd_jax.plan import StagePlan, balanced_plan, make_plan
from spd_jax.speculation.module import draft_layer_config

MIB = 2**20
PADDING_WORTH_SAYING = 0.25


@dataclasses.dataclass(frozen=True)
class Costs:
    """Cost of a target layer of each kind, of a draft layer and of both heads on one device, all in `unit`."""

    unit: str
    layer: Mapping[LayerConfig, float]
    draft_layer: float
    heads: float

    def ranks(self, plan: StagePlan, model: ModelConfig) -> list[float]:
        """Of every rank: its layers, its share of the heads."""
        found = [self.heads / plan.num_ranks] * plan.num_ranks
        for rank in range(plan.num_ranks):
            stage = plan.stage_of_rank(rank)
            if stage is not None:
                found[rank] += sum(self.layer[model.layers[index]] for index in plan.layers_of_stage(stage))
        found[plan.draft_rank] += plan.num_draft_layers * self.draft_layer
        return found


def layer_costs(model: ModelConfig, config: PlanConfig) -> dict[int, Costs]:
    """Costs for each number of stages, by bytes or measured; draft layers read their weights once for n + 1 rows."""
    itemsize, draft = jnp.dtype(config.dtype).itemsize, draft_layer_config(model)
    kinds = list(dict.fromkeys(model.layers))
    read = {kind: bytes_read(kind, config.context, itemsize) for kind in [*kinds, draft]}
    heads = 2 * itemsize * model.vocab_size * model.hidden_size
    if not config.measure:
        costs = Costs("MiB", {kind: read[kind] / MIB for kind in kinds}, read[draft] / MIB, heads / MIB)
        return dict.fromkeys(config.stages, costs)
    drafts = [(draft, stages + 1) for stages in config.stages]
    times = measure_layers([*((kind, 1) for kind in kinds), *drafts], config.context, config.dtype)
    # Heads are large products of one row: as fast a byte as the layers on average.
    pace = sum(times[kind, 1] for kind in kinds) / sum(read[kind] for kind in kinds)
    of_kind = {kind: times[kind, 1] for kind in kinds}
    return {stages: Costs("ms", of_kind, times[draft, stages + 1], heads * pace) for stages in config.stages}


def plan_report(model: ModelConfig, config: PlanConfig) -> list[str]:
    """The report as lines of text.

    Raises:
        ValueError: more stages than layers.
    """
    itemsize = jnp.dtype(config.dtype).itemsize
    counts = Counter(model.layers)
    lines = [
        f"model {model.family}: {model.num_layers} layers, hidden size {model.hidden_size}, vocabulary "
        f"{model.vocab_size:,}; weights in {config.dtype}, {config.context:,} positions",
        "",
    ]
    costs = layer_costs(model, config)
    lines += _kind_lines(counts, draft_layer_config(model), costs[config.stages[0]], itemsize)
    for stages in config.stages:
        lines += ["", *_cut_lines(model, config, stages, costs[stages], itemsize)]
    return lines


def _kind_lines(counts: Counter[LayerConfig], draft: LayerConfig, costs: Costs, itemsize: int) -> list[str]:
    rows = [(describe_kind(kind), count, num_parameters(kind), costs.layer[kind]) for kind, count in counts.items()]
    rows += [(f"draft layer ({describe_kind(draft)})", 0, num_parameters(draft), costs.draft_layer)]
    width = max(len(name) for name, *_ in rows)
    lines = [f"{'kind':<{width}}  layers  parameters      MiB  {costs.unit + ' a token':>12}"]
    for name, count, parameters, cost in rows:
        held = itemsize * parameters / MIB
        lines.append(f"{name:<{width}}  {count or '':>6}  {parameters:>10,}  {held:>7.1f}  {cost:>12.2f}")
    return [*lines, f"{'both heads, over all ranks':<{width}}  {'':>6}  {'':>10}  {'':>7}  {costs.heads:>12.2f}"]


def _cut_lines(model: ModelConfig, config: PlanConfig, stages: int, costs: Costs, itemsize: int) -> list[str]:
    even = make_plan(model.num_layers, stages, num_draft_layers=config.num_draft_layers, layout=config.layout)
    balanced = balanced_plan(
        [costs.layer[kind] for kind in model.layers],
        stages,
        num_draft_layers=config.num_draft_layers,
        draft_layer_cost=costs.draft_layer,
        head_cost=costs.heads,
        layout=config.layout,
    )
    lines = [f"{stages} stages, {config.layout}: {even.num_ranks} ranks, {config.num_draft_layers} draft layers"]
    slowest = max(costs.ranks(even, model))
    for name, plan in (("even", even), ("balanced", balanced)):
        ranks = costs.ranks(plan, model)
        rank = ranks.index(max(ranks))
        stage = plan.stage_of_rank(rank)
        where = "the draft rank" if stage is None else f"stage {stage}"
        where += " with the draft layers" if stage is not None and rank == plan.draft_rank else ""
        held, used = memory_of_ranks(plan, model, itemsize)
        padding = 1 - sum(used) / (held * len(used))
        lines += [
            f"  {name:<8} {list(plan.stage_layers)}",
            f"           slowest rank {max(ranks):.2f} {costs.unit} ({where}), {max(ranks) / slowest:.3f} of the even "
            f"cut's; the fastest {min(ranks):.2f}",
            f"           layer weights a rank: {held / MIB:,.0f} MiB held, {min(used) / MIB:,.0f} to "
            f"{max(used) / MIB:,.0f} used, {100 * padding:.0f} % padding" + _advice(padding, config),
        ]
    return lines


def _advice(padding: float, config: PlanConfig) -> str:
    """What lowers the padding, where it is worth saying."""
    if padding <= PADDING_WORTH_SAYING:
        return ""
    less = [] if config.layout == "beside" else ["--layout beside (the draft layers beside a smaller first stage)"]
    less += ["stages that repeat the model's pattern of layers", "fewer draft layers"]
    return "\n           less padding: " + "; ".join(less)
