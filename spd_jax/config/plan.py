"""What a user asks of infer/plan.py: the fields of its command line, and nothing else."""

from __future__ import annotations

import dataclasses

from spd_jax.config.run import Dtype, at_least
from spd_jax.plan import Layout


@dataclasses.dataclass(frozen=True)
class PlanConfig:
    """One run of infer/plan.py: what a pipeline would give for a model on a machine, and which one is best.

    Args:
        target: the model: qwen3.5-4b, qwen3.5-9b, qwen3-8b, llama-3.1-8b, llama-3.1-70b, smollm2-135m, a folder with
            config.json, that file itself, a .gguf file, package:name/file.gguf or a hub id. No weights are read.
        machine: the devices: h100, h200, a100, tpu-v5e, tpu-v5p, tpu-v6e, h100-eager, cpu (simulated devices on this
            machine), or a YAML file of your own with the fields of an entry of spd_jax/planning/machines.yaml.
        devices: how many there are.
        stages: numbers of pipeline stages n to consider, one or several (default: all from two on that the
            devices allow).
        layout: separate puts the draft layers on a device of their own (n + 1 devices), beside puts them beside the
            first stage (n devices); default: both.
        num_draft_layers: layers of the speculation module (default: 1 to 4).
        draft_vocabulary: tokens that the head can draft; 0 for all of them, scored by the target's own rows.
        width: rows of the draft tree.
        batch: sequences at a time.
        context: positions in the caches.
        temperature: above 0 tokens are sampled, which exchanges more.
        dtype: of weights and caches.
        alphas: shares of right drafts to predict for, those of a head for n = 8 and four draft layers; the best plan is
            for the last of them.
        measure: time the model's layers, the heads, the exchanges and the program itself on the devices that are here
            and use that; exchanges over more devices than there are stay the machine's.
        patience: seconds after which a measurement that makes no progress is given up, with a line that says what
            waited; 0 waits for ever.
        replay: results to replay over the best plan: of infer/evaluate.py (samples.*.jsonl) or infer/generate.py
            (--json).
        jitter: with replay, how much the time of every piece varies: standard deviation over mean.
        json: write the best plan and its prediction to this file.
        plot: draw tokens a second, which method wins where, and one cycle, to this PNG.
    """

    target: str
    machine: str = "h100"
    devices: int = 8
    stages: tuple[int, ...] = ()
    layout: Layout | None = None
    num_draft_layers: int | None = None
    draft_vocabulary: int = 32000
    width: int = 1
    batch: int = 1
    context: int = 1024
    temperature: float = 0.0
    dtype: Dtype = "bfloat16"
    alphas: tuple[float, ...] = (0.5, 0.6, 0.7, 0.8)
    measure: bool = False
    patience: float = 60.0
    replay: tuple[str, ...] = ()
    jitter: float = 0.0
    json: str | None = None
    plot: str | None = None

    def __post_init__(self) -> None:
        for number in self.stages:
            at_least(2, "stages", number)
        at_least(2, "devices", self.devices)
        at_least(0, "patience", self.patience)
        for name in ("num_draft_layers", "width", "batch", "context"):
            at_least(1, name, getattr(self, name))
        at_least(0, "draft_vocabulary", self.draft_vocabulary)
        if not self.alphas:
            raise ValueError("alphas is empty: give at least one share of right drafts")
        for alpha in self.alphas:
            if not 0.0 <= alpha <= 1.0:
                raise ValueError(f"alphas are shares from 0 to 1, found {alpha}")
        if not 0.0 <= self.jitter < 1.0:
            raise ValueError(f"jitter must lie in [0, 1), found {self.jitter}")
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be a finite number >= 0, found {self.temperature}")
