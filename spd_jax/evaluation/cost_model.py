"""What a cycle should take: bytes, arithmetic and exchanges of every part, on a machine with given figures.

Roofline arithmetic, part by part, of the program as it is (`spd_jax.decode.cycle`): stages and draft beside each other,
then exchange, heads and the entry of the next column, none of which overlap. A part takes the longer of its memory
traffic and its arithmetic, and a fixed time for each layer. The same pieces give autoregressive decoding on one device
and tensor-parallel, the published layout (one rank runs both heads, whole, after the last stage), and a serial draft of
m steps under tensor parallelism.

Pure functions of descriptions; nothing is measured here and no array is made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from spd_jax.config.model import AttentionConfig, ExpertsConfig, LayerConfig, ModelConfig
from spd_jax.evaluation.machines import Machine
from spd_jax.evaluation.metrics import projected_accept_length
from spd_jax.models.shapes import expert_parameters, num_parameters
from spd_jax.parallel.slots import slot_table
from spd_jax.parallel.vocab import share_size
from spd_jax.plan import StagePlan
from spd_jax.speculation.module import draft_layer_config

Number = int | float


@dataclasses.dataclass(frozen=True)
class Setting:
    """How a model is decoded: bytes of a number, positions in the caches, sequences, rows of the draft tree, whether
    tokens are sampled, and the tokens that the head can draft (None: all, with rows of its own)."""

    itemsize: int = 2
    context: int = 1024
    batch: int = 1
    width: int = 1
    sampled: bool = False
    draft_vocab: int | None = None


@dataclasses.dataclass(frozen=True)
class Work:
    """Bytes read, floating-point operations and layers started."""

    bytes: Number = 0.0
    flops: Number = 0.0
    layers: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.flops + other.flops, self.layers + other.layers)

    def seconds(self, machine: Machine) -> float:
        """On one device."""
        return self.roofline(machine) + self.layers * machine.launch

    def roofline(self, machine: Machine) -> float:
        """The longer of memory traffic and arithmetic."""
        return max(
            self.bytes / (machine.memory_bandwidth * machine.memory_share),
            self.flops / (machine.flops * machine.flops_share),
        )

    def over(self, devices: int) -> Work:
        """Its share of one of several devices; each starts all layers."""
        return Work(self.bytes / devices, self.flops / devices, self.layers)


def total(works: Iterable[Work]) -> Work:
    """The sum."""
    return sum(works, Work())


def layer_work(kind: LayerConfig, rows: int, setting: Setting) -> Work:
    """One layer on `rows` rows of each sequence: weights once, of experts those that some row has chosen (as expected
    if rows choose apart), keys and values or memories of each sequence."""
    weights, used = float(num_parameters(kind)), float(num_parameters(kind))
    if isinstance(kind.mlp, ExpertsConfig):
        mlp, each = kind.mlp, expert_parameters(kind)
        chosen = mlp.num_experts * (1.0 - (1.0 - mlp.top_k / mlp.num_experts) ** (rows * setting.batch))
        weights -= (mlp.num_experts - chosen) * each
        used -= (mlp.num_experts - mlp.top_k) * each
    past = past_bytes(kind, setting.context, setting.itemsize)
    if isinstance(kind.mixer, AttentionConfig):
        seen = min(setting.context, kind.mixer.window or setting.context)
        mixing = 4 * kind.mixer.num_heads * kind.mixer.head_dim * seen
    else:
        past, mixing = 2 * rows * past, 2 * past  # a memory for each row, read and written
    return Work(
        setting.itemsize * weights + setting.batch * past, setting.batch * rows * (2.0 * used + mixing), layers=1
    )


def past_bytes(kind: LayerConfig, context: int, itemsize: int) -> int:
    """What a layer reads of the past of one row: keys and values that it sees, or its memory in float32."""
    if isinstance(kind.mixer, AttentionConfig):
        seen = min(context, kind.mixer.window or context)
        return itemsize * 2 * kind.mixer.num_kv_heads * kind.mixer.head_dim * seen
    return 4 * kind.mixer.num_value_heads * kind.mixer.key_dim * kind.mixer.value_dim


def product_work(outputs: Number, inputs: Number, rows: Number, itemsize: int) -> Work:
    """A matrix product of `rows` rows."""
    return Work(itemsize * outputs * inputs, 2.0 * outputs * inputs * rows)


def collective_seconds(machine: Machine, devices: int, size: Number) -> float:
    """One collective of `size` bytes over a ring."""
    if devices == 1:
        return 0.0
    return machine.collective_base + (devices - 1) * machine.collective_hop + size / machine.link_bandwidth


@dataclasses.dataclass(frozen=True)
class Cycle:
    """Seconds of one cycle by part, of every rank's layers, and bytes that every rank holds.

    `ranks` are stages and draft by rank; `parts` are compute (the slowest rank, or all where devices are simulated),
    exchange, heads and enter.
    """

    parts: dict[str, float]
    ranks: tuple[float, ...]
    memory: tuple[float, ...]
    bottleneck: str

    @property
    def seconds(self) -> float:
        """The whole cycle."""
        return sum(self.parts.values())

    @property
    def idle_share(self) -> float:
        """The part of the ranks' time in a cycle that they neither run layers nor heads nor exchange."""
        slowest = max(self.ranks)
        return sum(slowest - rank for rank in self.ranks) / (len(self.ranks) * self.seconds)

    def tokens_per_second(self, num_stages: int, alpha: float) -> float:
        """Of one sequence whose drafts are right with this probability, in long texts (a chain's formula)."""
        return projected_accept_length(num_stages, alpha) / num_stages / self.seconds


def spd_cycle(model: ModelConfig, plan: StagePlan, machine: Machine, setting: Setting) -> Cycle:
    """A cycle with all stages busy."""
    ranks, size, item = plan.num_ranks, model.hidden_size, setting.itemsize
    rows, batch = setting.batch * setting.width, setting.batch
    layers = rank_seconds(model, plan, machine, setting)
    anchors, changes = len(plan.anchors), plan.changes
    at_once = ranks if machine.shared else 1  # devices whose work adds up
    exchange = collective_seconds(machine, ranks, item * rows * size)
    exchange += collective_seconds(machine, ranks, item * size * (batch + rows * anchors))
    heads = total(_heads(model, setting, ranks)).seconds(machine)
    exchanges = 1 + setting.sampled * setting.width
    heads = at_once * heads + exchanges * collective_seconds(machine, ranks, 8 * ranks * rows * setting.width)
    fused = [product_work(size / ranks, (plan.anchor_type[k] + 1) * size, rows, item) for k in changes]
    enter = at_once * total(fused).seconds(machine)
    enter += collective_seconds(machine, ranks, item * rows * size * (1 + len(changes)))
    parts = {"compute": sum(layers) if machine.shared else max(layers), "exchange": exchange}
    parts |= {"heads": heads, "enter": enter}
    slowest = layers.index(max(layers))
    stage = plan.stage_of_rank(slowest)
    name = "the draft" if stage is None else f"stage {stage}"
    name += " with the draft" if stage is not None and slowest == plan.draft_rank else ""
    longest = max(parts, key=lambda part: parts[part])
    return Cycle(parts, tuple(layers), rank_memory(model, plan, setting), name if longest == "compute" else longest)


def rank_seconds(model: ModelConfig, plan: StagePlan, machine: Machine, setting: Setting) -> list[float]:
    """Of every rank: its stage's layers on W rows, the draft layers on all rows in flight and the one that left."""
    draft_rows = plan.num_stages * setting.width + 1
    draft = draft_layer_config(model)
    works = []
    for rank in range(plan.num_ranks):
        stage = plan.stage_of_rank(rank)
        own = [] if stage is None else [model.layers[index] for index in plan.layers_of_stage(stage)]
        work = total(layer_work(kind, setting.width, setting) for kind in own)
        if rank == plan.draft_rank and plan.num_stages > 1:
            work += total(layer_work(draft, draft_rows, setting) for _ in range(plan.num_draft_layers))
            work += product_work(model.hidden_size, model.hidden_size, setting.batch * setting.width, setting.itemsize)
        works.append(work)
    return [work.seconds(machine) for work in works]


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


def rank_memory(model: ModelConfig, plan: StagePlan, setting: Setting) -> tuple[float, ...]:
    """Bytes of weights, slots without a layer included, shares of the vocabulary, and caches, on every rank alike."""
    table = slot_table(plan, model.layers, draft_layer_config(model))
    weights, _ = memory_of_ranks(plan, model, setting.itemsize)
    share = share_size(model.vocab_size, plan.num_ranks) * (1 if model.tie_embeddings else 2)
    share += share_size(setting.draft_vocab or model.vocab_size, plan.num_ranks)
    caches = sum(_cache_bytes(kind, plan, setting) for kind in table.kinds)
    whole = weights + setting.itemsize * share * model.hidden_size + setting.batch * caches
    return (float(whole),) * plan.num_ranks


def _cache_bytes(kind: LayerConfig, plan: StagePlan, setting: Setting) -> int:
    if isinstance(kind.mixer, AttentionConfig):
        positions = setting.context + plan.num_columns * setting.width
        return setting.itemsize * 2 * kind.mixer.num_kv_heads * kind.mixer.head_dim * positions
    memory = 4 * kind.mixer.num_value_heads * kind.mixer.key_dim * kind.mixer.value_dim
    memory += setting.itemsize * (kind.mixer.conv_kernel - 1) * kind.mixer.channels
    return memory * plan.num_stages * setting.width


def _heads(model: ModelConfig, setting: Setting, devices: int) -> list[Work]:
    """The target's head for the row that leaves and the draft's for the newest column, a device's share of each."""
    target = product_work(model.vocab_size / devices, model.hidden_size, setting.batch, setting.itemsize)
    drafted = setting.draft_vocab or model.vocab_size
    draft = product_work(drafted / devices, model.hidden_size, setting.batch * setting.width, setting.itemsize)
    return [target, draft]


def autoregressive_seconds(model: ModelConfig, machine: Machine, setting: Setting, devices: int = 1) -> float:
    """One token, on one device or tensor-parallel over several: two all-reduces a layer and one for the head."""
    return forward_seconds(model, machine, setting, 1, devices)


def forward_seconds(model: ModelConfig, machine: Machine, setting: Setting, rows: int, devices: int) -> float:
    """One pass of the target over `rows` rows of each sequence, split over devices."""
    layers = total(layer_work(kind, rows, setting) for kind in model.layers)
    count = setting.batch * rows
    head = product_work(model.vocab_size, model.hidden_size, count, setting.itemsize)
    message = setting.itemsize * count * model.hidden_size
    exchange = 2 * model.num_layers * collective_seconds(machine, devices, message)
    return (layers + head).over(devices).seconds(machine) + exchange + collective_seconds(machine, devices, 8 * devices)


def published_cycle_seconds(model: ModelConfig, plan: StagePlan, machine: Machine, setting: Setting) -> float:
    """A cycle of the published layout: stages and draft beside each other, then both heads whole on one rank."""
    layers = max(rank_seconds(model, plan, machine, setting))
    heads = total(_heads(model, setting, 1)).seconds(machine)
    message = setting.itemsize * setting.batch * setting.width * model.hidden_size
    return layers + heads + 2 * collective_seconds(machine, 2, message)


def serial_draft_tokens_per_second(
    model: ModelConfig, machine: Machine, setting: Setting, devices: int, steps: int, alpha: float
) -> float:
    """A draft of one layer that runs `steps` times before the target verifies them in one pass (the shape of EAGLE-3),
    both tensor-parallel, each step right with probability alpha if all before it were."""
    draft = layer_work(draft_layer_config(model), 1, setting)
    head = product_work(setting.draft_vocab or model.vocab_size, model.hidden_size, setting.batch, setting.itemsize)
    message = setting.itemsize * setting.batch * model.hidden_size
    step = (draft + head).over(devices).seconds(machine) + 3 * collective_seconds(machine, devices, message)
    round_seconds = steps * step + forward_seconds(model, machine, setting, steps + 1, devices)
    accepted = sum(alpha**i for i in range(1, steps + 1))
    return (1.0 + accepted) / round_seconds
