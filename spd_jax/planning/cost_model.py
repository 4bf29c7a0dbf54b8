"""What a cycle should take: every part of the program as it is, and of what one would compare it with.

Stages and draft run beside each other, then exchange, heads and the entry of the next column, none of which overlap
(`spd_jax.decode.cycle`). The same pieces give autoregressive decoding on one device and tensor-parallel, the published
layout (one rank runs both heads, whole, after the last stage), and a serial draft of m steps under tensor parallelism.

Pure functions of descriptions and of what pieces cost (`spd_jax.planning.costs`).
"""

from __future__ import annotations

import dataclasses

from spd_jax.config.model import AttentionConfig, LayerConfig, ModelConfig
from spd_jax.metrics import projected_accept_length, simulated_tau
from spd_jax.models.shapes import num_parameters
from spd_jax.parallel.slots import slot_table
from spd_jax.parallel.vocab import share_size
from spd_jax.plan import StagePlan
from spd_jax.planning.costs import Costs, Setting, past_bytes
from spd_jax.speculation.module import draft_layer_config


@dataclasses.dataclass(frozen=True)
class Cycle:
    """Seconds of one cycle by part, of every rank's layers, and bytes that every rank holds.

    `ranks` are stages and draft by rank, `draft` is the draft's part of its rank; `parts` are compute (the slowest
    rank, or all where devices are simulated), exchange, heads, enter and control.
    """

    parts: dict[str, float]
    ranks: tuple[float, ...]
    draft: float
    memory: tuple[int, ...]
    bottleneck: str

    @property
    def seconds(self) -> float:
        """The whole cycle."""
        return sum(self.parts.values())

    @property
    def idle_share(self) -> float:
        """The bubble: the part of the ranks' time in a cycle in which they wait for the slowest rank's layers."""
        slowest = max(self.ranks)
        return sum(slowest - rank for rank in self.ranks) / (len(self.ranks) * self.seconds)

    def tokens_per_second(self, num_stages: int, alpha: float) -> float:
        """Of one sequence whose drafts are right with this probability, in long texts (a chain's formula)."""
        return projected_accept_length(num_stages, alpha) / num_stages / self.seconds


def spd_cycle(model: ModelConfig, plan: StagePlan, costs: Costs) -> Cycle:
    """A cycle with all stages busy, and nothing dropped (heads run once)."""
    setting = costs.setting
    ranks, size, item = plan.num_ranks, model.hidden_size, setting.itemsize
    rows, batch = setting.batch * setting.width, setting.batch
    layers = rank_seconds(model, plan, costs)
    at_once = costs.at_once(ranks)
    exchange = costs.collective(ranks, item * rows * size)
    exchange += costs.collective(ranks, item * size * (batch + rows * len(plan.anchors)))
    heads = at_once * head_seconds(model, costs, ranks)
    # One gather with the verdict; sampling normalises first, and tries siblings one by one.
    gathers = 1 + setting.sampled * setting.width
    heads += gathers * costs.collective(ranks, 8 * ranks * rows * setting.width)
    changes = plan.changes
    share = share_size(size, ranks)
    enter = at_once * sum(costs.product(share, (plan.anchor_type[k] + 1) * size, rows) for k in changes)
    enter += costs.collective(ranks, item * rows * size * (1 + len(changes)))
    parts = {"compute": costs.beside(layers), "exchange": exchange}
    parts |= {"heads": heads, "enter": enter, "control": costs.control(ranks)}
    slowest = layers.index(max(layers))
    stage = plan.stage_of_rank(slowest)
    name = "the draft" if stage is None else f"stage {stage}"
    name += " with the draft" if stage is not None and slowest == plan.draft_rank and plan.num_stages > 1 else ""
    longest = max(parts, key=lambda part: parts[part])
    if longest != "compute":
        name = longest
    return Cycle(parts, tuple(layers), draft_seconds(model, plan, costs), rank_memory(model, plan, setting), name)


def rank_seconds(model: ModelConfig, plan: StagePlan, costs: Costs) -> list[float]:
    """Of every rank: its stage's layers on W rows, the draft layers on all rows in flight and the one that left."""
    seconds = []
    for rank in range(plan.num_ranks):
        stage = plan.stage_of_rank(rank)
        own = () if stage is None else (model.layers[index] for index in plan.layers_of_stage(stage))
        spent = costs.start() + sum(costs.layer(kind, costs.setting.width) + costs.keeping() for kind in own)
        seconds.append(spent + (draft_seconds(model, plan, costs) if rank == plan.draft_rank else 0.0))
    return seconds


def draft_seconds(model: ModelConfig, plan: StagePlan, costs: Costs) -> float:
    """The projection of the newest column and the draft layers; nothing is drafted for one stage."""
    if plan.num_stages == 1:
        return 0.0
    width, size = costs.setting.width, model.hidden_size
    layer = costs.layer(draft_layer_config(model), plan.num_stages * width + 1) + costs.keeping()
    return plan.num_draft_layers * layer + costs.product(size, size, costs.setting.batch * width)


def head_seconds(model: ModelConfig, costs: Costs, devices: int) -> float:
    """The target's head for the row that leaves and the draft's for the newest column, a device's share of both."""
    setting, size = costs.setting, model.hidden_size
    rows, own = setting.batch * setting.width, share_size(model.vocab_size, devices)
    if setting.draft_vocab is None:  # the same rows score both
        return costs.product(own, size, setting.batch + rows)
    drafted = costs.product(share_size(setting.draft_vocab, devices), size, rows)
    return costs.product(own, size, setting.batch) + drafted


def memory_of_ranks(plan: StagePlan, model: ModelConfig, itemsize: int) -> tuple[int, list[int]]:
    """Bytes of layer weights that every rank holds, slots without a layer included, and those that each uses."""
    draft = draft_layer_config(model)
    table = slot_table(plan, model.layers, draft)
    size = {kind: itemsize * num_parameters(kind) for kind in table.kinds}
    used = [
        sum(size[table.kinds[slot]] for slot in (*stage, *drafts))
        for stage, drafts in zip(table.stage, table.draft, strict=True)
    ]
    return sum(size[kind] for kind in table.kinds), used


def rank_memory(model: ModelConfig, plan: StagePlan, setting: Setting) -> tuple[int, ...]:
    """Bytes of weights, slots without a layer included, shares of the vocabulary, and caches, on every rank alike."""
    table = slot_table(plan, model.layers, draft_layer_config(model))
    weights, _ = memory_of_ranks(plan, model, setting.itemsize)
    share = share_size(model.vocab_size, plan.num_ranks) * (1 if model.tie_embeddings else 2)
    share += 0 if setting.draft_vocab is None else share_size(setting.draft_vocab, plan.num_ranks)
    caches = sum(_cache_bytes(kind, plan, setting) for kind in table.kinds)
    whole = weights + setting.itemsize * share * model.hidden_size + setting.batch * caches
    return (whole,) * plan.num_ranks


def _cache_bytes(kind: LayerConfig, plan: StagePlan, setting: Setting) -> int:
    if isinstance(kind.mixer, AttentionConfig):
        positions = setting.context + plan.num_columns * setting.width
        return setting.itemsize * 2 * kind.mixer.num_kv_heads * kind.mixer.head_dim * positions
    memory = past_bytes(kind, setting.context, setting.itemsize)
    memory += setting.itemsize * (kind.mixer.conv_kernel - 1) * kind.mixer.channels
    return memory * plan.num_stages * setting.width


def autoregressive_seconds(model: ModelConfig, costs: Costs, devices: int = 1) -> float:
    """One token, on one device or tensor-parallel over several: two all-reduces a layer and one for the head."""
    return forward_seconds(model, costs, 1, devices)


def forward_seconds(model: ModelConfig, costs: Costs, rows: int, devices: int) -> float:
    """One pass of the target over `rows` rows of each sequence, split over devices."""
    setting = costs.setting
    count = setting.batch * rows
    spent = costs.start() + sum(costs.layer(kind, rows, devices) for kind in model.layers)
    spent += costs.product(share_size(model.vocab_size, devices), model.hidden_size, count)
    exchange = 2 * model.num_layers * costs.collective(devices, setting.itemsize * count * model.hidden_size)
    exchange += costs.collective(devices, 8 * devices)
    return costs.at_once(devices) * spent + exchange


def published_cycle_seconds(model: ModelConfig, plan: StagePlan, costs: Costs) -> float:
    """A cycle of the published layout: stages and draft beside each other, then both heads whole on one rank."""
    setting = costs.setting
    layers = costs.beside(rank_seconds(model, plan, costs))
    message = setting.itemsize * setting.batch * setting.width * model.hidden_size
    return layers + head_seconds(model, costs, 1) + 2 * costs.collective(2, message) + costs.control(plan.num_ranks)


def serial_round_seconds(model: ModelConfig, costs: Costs, devices: int, steps: int) -> float:
    """A draft of one layer runs `steps` times, then the target verifies in one pass (the shape of EAGLE-3); both
    tensor-parallel."""
    setting, size = costs.setting, model.hidden_size
    drafted = share_size(setting.draft_vocab or model.vocab_size, devices)
    step = costs.layer(draft_layer_config(model), 1, devices) + costs.product(drafted, size, setting.batch)
    step *= costs.at_once(devices)
    step += 3 * costs.collective(devices, setting.itemsize * setting.batch * size)
    return steps * step + forward_seconds(model, costs, steps + 1, devices)


def serial_tokens_per_second(steps: int, alpha: float, round_seconds: float) -> float:
    """Each step right with probability alpha if all before it were."""
    return simulated_tau([alpha] * steps) / round_seconds
