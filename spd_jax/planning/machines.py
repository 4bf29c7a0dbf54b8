"""What a device of a machine can do: figures with their sources, from the list that comes along or a file of one's own.

Numbers only; what layers and products make of them is `spd_jax.planning.costs`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from spd_jax.files import read_text

# What no vendor gives. Small all-reduces of NCCL over NVLink: 6.6 us and 0.6 us a step of the ring (NVIDIA/nccl on
# GitHub, src/graph/tuning.cc, protocol LL). For TPUs, whose collectives are part of the program, nothing is published:
# assumed.
COLLECTIVE_BASE, COLLECTIVE_HOP = 6.6e-6, 0.6e-6
TPU_COLLECTIVE_BASE, TPU_COLLECTIVE_HOP = 1.0e-6, 1.0e-6


MAY_BE_ZERO = ("collective_base", "collective_hop", "launch", "start", "control")


class MachineError(ValueError):
    """A machine that is not known, or a file that does not describe one; says what is there or what is missing."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """One device and its links; bytes, FLOP and seconds.

    `memory_share` and `flops_share` are the parts of the vendor's bandwidth and rate that are reached (assumed until
    measured). A collective over R devices takes `collective_base`, `collective_hop` for each of its R - 1 steps, and
    its bytes over `link_bandwidth`. What has to be fitted or measured, 0 where nobody has: `launch`, what a layer costs
    beyond its memory traffic and arithmetic; `start`, the same of a device's pass over its layers; `control`, of a
    cycle. `shared`: the devices are simulated on one, so that their work adds up.
    """

    name: str
    memory_bandwidth: float
    flops: float
    memory: float
    link_bandwidth: float
    collective_base: float
    collective_hop: float
    launch: float = 0.0
    start: float = 0.0
    control: float = 0.0
    memory_share: float = 0.8
    flops_share: float = 0.5
    shared: bool = False
    description: str = ""
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def with_latency(self, seconds: float) -> Machine:
        """The same where a small collective takes this long over any number of devices."""
        return dataclasses.replace(self, collective_base=seconds, collective_hop=0.0)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            least = 0.0 if field.name in MAY_BE_ZERO else math.ulp(0.0)
            if isinstance(value, float) and not least <= value < math.inf:
                raise MachineError(f"{field.name} must be a positive number, found {value}")


def known_machines() -> tuple[str, ...]:
    """Names of the machines that come along."""
    return tuple(_list())


def load_machine(name: str) -> Machine:
    """A machine by name, or from a YAML file with the fields of `Machine`.

    Raises:
        MachineError: neither is there, a field is missing or unknown, or a value is no positive number.
        OSError: the file cannot be read.
    """
    known = _list()
    if name in known:
        return _machine(name, known[name], name)
    if not Path(name).suffix:
        raise MachineError(f"no machine {name!r}: known are {', '.join(known)}, or give a YAML file")
    text = read_text(name)
    try:
        tree = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:  # a date that is none is a ValueError
        raise MachineError(f"{name}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise MachineError(f"{name}: expected the fields of a machine (memory_bandwidth: 3.35e12 and so on)")
    return _machine(Path(name).stem, tree, name)


def _list() -> dict[str, dict[str, Any]]:
    text = resources.files("spd_jax.planning").joinpath("machines.yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text)


def _machine(name: str, tree: dict[str, Any], where: str) -> Machine:
    tpu = name.startswith("tpu")
    defaults = {
        "collective_base": TPU_COLLECTIVE_BASE if tpu else COLLECTIVE_BASE,
        "collective_hop": TPU_COLLECTIVE_HOP if tpu else COLLECTIVE_HOP,
    }
    fields = {field.name: field for field in dataclasses.fields(Machine)}
    values: dict[str, Any] = {}
    for key, value in ({"name": name} | defaults | tree).items():
        if key not in fields:
            raise MachineError(f"{where}: unknown field {key!r}; a machine has {', '.join(fields)}")
        kinds = {"name": str, "description": str, "sources": dict, "shared": bool}
        if key in kinds and not isinstance(value, kinds[key]):
            raise MachineError(f"{where}: {key} must be a {kinds[key].__name__}, found {value!r}")
        try:
            # YAML takes 1e12 for a text
            values[key] = value if key in kinds else float("" if isinstance(value, bool) else value)
        except (OverflowError, TypeError, ValueError) as error:
            raise MachineError(f"{where}: {key} must be a number, found {value!r}") from error
    needed = ("memory_bandwidth", "flops", "memory", "link_bandwidth")
    missing = [key for key in needed if key not in values]
    if missing:
        raise MachineError(f"{where}: {', '.join(missing)} missing; a machine needs {', '.join(needed)}")
    try:
        return Machine(**values)
    except MachineError as error:
        raise MachineError(f"{where}: {error}") from error
