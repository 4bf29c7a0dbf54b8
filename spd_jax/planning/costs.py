"""What the pieces of a decode program cost: a layer, a matrix product, a collective.

By arithmetic from a machine's figures here (the longer of memory traffic and arithmetic, and fixed times), or measured
(`spd_jax.planning.measure`). Knows layers and products, no stages and no cycles; no array is made.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence

from spd_jax.config.model import AttentionConfig, ExpertsConfig, LayerConfig
from spd_jax.models.shapes import expert_parameters, num_parameters
from spd_jax.planning.machines import Machine

Number = int | float


@dataclasses.dataclass(frozen=True)
class Setting:
    """How a model is decoded: bytes of a number, positions in the caches, sequences, rows of the draft tree, whether
    tokens are sampled, and the tokens that the head can draft (None: all, scored by the target's own rows)."""

    itemsize: int = 2
    context: int = 1024
    batch: int = 1
    width: int = 1
    sampled: bool = False
    draft_vocab: int | None = None


@dataclasses.dataclass(frozen=True)
class Costs(abc.ABC):
    """Seconds of the pieces of a program in a setting."""

    setting: Setting

    @property
    @abc.abstractmethod
    def shared(self) -> bool:
        """Whether the devices are simulated on one, so that their work adds up."""

    def at_once(self, devices: int) -> int:
        """How many of several devices that do the same take their turns on one: all that are simulated, else one."""
        return devices if self.shared else 1

    def beside(self, seconds: Sequence[float]) -> float:
        """Devices that do different things at the same time: the slowest, or all where they are simulated."""
        return sum(seconds) if self.shared else max(seconds)

    @abc.abstractmethod
    def layer(self, kind: LayerConfig, rows: int, devices: int = 1) -> float:
        """Seconds of one layer on `rows` rows of each sequence, on one of `devices` that share the layer."""

    @abc.abstractmethod
    def product(self, outputs: int, inputs: int, rows: int) -> float:
        """Seconds of a product of `rows` rows, over all sequences, with a matrix `[outputs, inputs]`."""

    @abc.abstractmethod
    def collective(self, devices: int, size: int) -> float:
        """Seconds of one collective of `size` bytes over so many devices."""

    @abc.abstractmethod
    def with_latency(self, seconds: float) -> Costs:
        """The same costs, but a small collective takes so many seconds over any number of devices."""

    @abc.abstractmethod
    def start(self) -> float:
        """Seconds that a pass of one device over its layers takes beside the layers themselves."""

    @abc.abstractmethod
    def keeping(self) -> float:
        """Seconds that a layer in a pipeline takes beside the layer, for its window and its commit."""

    @abc.abstractmethod
    def control(self, devices: int) -> float:
        """Seconds that a cycle over so many devices takes beside its parts."""


@dataclasses.dataclass(frozen=True)
class MachineCosts(Costs):
    """Costs computed from what a machine is said to do: bytes and operations a second, latencies, launches."""

    machine: Machine

    @property
    def shared(self) -> bool:
        """Whether the machine's devices are simulated on one."""
        return self.machine.shared

    def layer(self, kind: LayerConfig, rows: int, devices: int = 1) -> float:
        """The device's share of the layer's bytes and arithmetic, and one launch: every device starts the layer."""
        work = layer_work(kind, rows, self.setting)
        return work.over(devices).seconds(self.machine) + self.machine.launch

    def product(self, outputs: int, inputs: int, rows: int) -> float:
        """The time to read the matrix once, or to multiply if that takes longer."""
        return product_work(outputs, inputs, rows, self.setting.itemsize).seconds(self.machine)

    def collective(self, devices: int, size: int) -> float:
        """The time of a ring: a fixed part, a hop to each further device, and the bytes over a link."""
        if devices == 1:
            return 0.0
        machine = self.machine
        return machine.collective_base + (devices - 1) * machine.collective_hop + size / machine.link_bandwidth

    def with_latency(self, seconds: float) -> Costs:
        """The costs of a machine with this latency."""
        return dataclasses.replace(self, machine=self.machine.with_latency(seconds))

    def start(self) -> float:
        """The machine's `start`."""
        return self.machine.start

    def keeping(self) -> float:
        """Nothing: it is part of the machine's `launch`."""
        return 0.0

    def control(self, devices: int) -> float:
        """The machine's `control`."""
        return self.machine.control


@dataclasses.dataclass(frozen=True)
class Work:
    """Bytes read and floating-point operations."""

    bytes: Number = 0.0
    flops: Number = 0.0

    def seconds(self, machine: Machine) -> float:
        """The longer of memory traffic and arithmetic."""
        return max(
            self.bytes / (machine.memory_bandwidth * machine.memory_share),
            self.flops / (machine.flops * machine.flops_share),
        )

    def over(self, devices: int) -> Work:
        """The share of one of several devices."""
        return Work(self.bytes / devices, self.flops / devices)


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
    return Work(setting.itemsize * weights + setting.batch * past, setting.batch * rows * (2.0 * used + mixing))


def past_bytes(kind: LayerConfig, context: int, itemsize: int) -> int:
    """What a layer reads of the past of one row: keys and values that it sees, or its memory in float32."""
    if isinstance(kind.mixer, AttentionConfig):
        seen = min(context, kind.mixer.window or context)
        return itemsize * 2 * kind.mixer.num_kv_heads * kind.mixer.head_dim * seen
    return 4 * kind.mixer.num_value_heads * kind.mixer.key_dim * kind.mixer.value_dim


def product_work(outputs: Number, inputs: Number, rows: Number, itemsize: int) -> Work:
    """Bytes and operations of a product of `rows` rows with a matrix `[outputs, inputs]`."""
    return Work(itemsize * outputs * inputs, 2.0 * outputs * inputs * rows)
