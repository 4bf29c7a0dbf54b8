"""What a user asks of infer/plan.py: the fields of its command line, and nothing else."""

from __future__ import annotations

import dataclasses

from spd_jax.config.run import Dtype, at_least
from spd_jax.plan import Layout


@dataclasses.dataclass(frozen=True)
class PlanConfig:
    """One run of infer/plan.py: how to cut a model into stages, and what that costs.

    Args:
        model: the model: a folder with config.json, that file itself, a .gguf file, package:name/file.gguf or a hub id.
            No weights are read.
        stages: numbers of pipeline stages n to plan for.
        layout: separate puts the draft layers on a device of their own (n + 1 devices), beside puts them beside the
            first stage (n devices).
        num_draft_layers: layers of the speculation module.
        dtype: of weights.
        measure: time one layer of each kind on this machine's first device; without it the cost of a layer is the bytes
            of weights that it reads for a token.
        context: positions in the caches while layers are measured.
    """

    model: str
    stages: tuple[int, ...] = (4, 8)
    layout: Layout = "separate"
    num_draft_layers: int = 3
    dtype: Dtype = "bfloat16"
    measure: bool = False
    context: int = 1024

    def __post_init__(self) -> None:
        if not self.stages:
            raise ValueError("stages is empty: give at least one number of stages")
        for number in self.stages:
            at_least(1, "stages", number)
        at_least(1, "num_draft_layers", self.num_draft_layers)
        at_least(1, "context", self.context)
