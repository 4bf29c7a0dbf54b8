"""Tiny training runs: a random target of three layers, random conversations, programs compiled once for each mesh.

Batches hold eight rows, so that one, four and eight devices can share them.
"""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from spd_jax.data.packing import Batch, BatchStream
from spd_jax.data.prepared import Example
from spd_jax.plan import StagePlan
from spd_jax.speculation.module import SpeculationModule
from spd_jax.training.checkpoints import Log, StateStore
from spd_jax.training.optimizer import OptimizerOptions, learning_rate, make_optimizer
from spd_jax.training.rows import make_fills
from spd_jax.training.sharding import Placement, data_mesh
from spd_jax.training.step import PassOptions, Programs
from spd_jax.training.target import load_frozen_target
from spd_jax.training.trainer import Evaluator, Pace, Trainer
from tests.decode.engine import VOCAB, random_head, weights

PLAN = StagePlan((2, 1), 1, "separate", (0, 2))
ROWS, ROW_LENGTH, STEPS = 8, 16, 10
OPTIONS = OptimizerOptions(learning_rate=3e-3)
TIMES = ("tokens_per_second", "eta_seconds")


class Conversations:
    """Random ones, each half a row: two questions, then an answer. Fills `count` batches exactly."""

    def __init__(self, batches: int, seed: int = 0):
        random, length = np.random.default_rng(seed), ROW_LENGTH // 2
        ids = random.integers(0, VOCAB, (batches * ROWS * 2, length), dtype=np.int32)
        supervised = np.arange(length) >= 2
        self._examples = [Example(row, supervised) for row in ids]
        self.lengths = np.full(len(ids), length, np.int64)

    def __getitem__(self, index: int) -> Example:
        return self._examples[index]


class Recorded(BatchStream):
    """Remembers which examples were read."""

    def __init__(self, data: Conversations, **options: Any):
        super().__init__(data, **options)
        self.seen: list[int] = []

    def batch_at(self, step: int) -> Batch:
        self.seen += [piece[0] for row in self.rows_at(step) for piece in row]
        return super().batch_at(step)


@functools.cache
def module() -> SpeculationModule:
    return random_head(weights(3).config, PLAN)


@functools.cache
def programs(devices: int, placement: Placement = "replicated", options: OptimizerOptions = OPTIONS) -> Programs:
    target = load_frozen_target(weights(3), PLAN.anchors, np.float32)
    passes = PassOptions(products="float32", chunk=64)
    return Programs(data_mesh(devices), module(), PLAN, target, make_optimizer(options, STEPS), passes, placement)


def no_head(name: str, module: SpeculationModule, training: Mapping[str, Any], /) -> None:
    """Saves nothing."""


def make_trainer(
    path: Path,
    *,
    devices: int = 1,
    placement: Placement = "replicated",
    save_head: Callable[..., None] = no_head,
    evaluator: Evaluator | None = None,
    earlier: Mapping[str, int] | None = None,
    fill_acceptance: float | None = None,
    **pace: int,
) -> Trainer:
    """A trainer of a run in `path`, from its newest state; ten steps, or as `pace` says."""
    path.mkdir(parents=True, exist_ok=True)
    whole = {"total_steps": STEPS, "accumulate": 1, "evaluate_every": 0, "evaluate_batches": 2, "decode_every": 0}
    trainer = Trainer(
        programs(devices, placement),
        module(),
        Recorded(Conversations(STEPS), rows=ROWS, row_length=ROW_LENGTH, seed=0),
        BatchStream(Conversations(1, seed=1), rows=ROWS, row_length=ROW_LENGTH),
        Pace(**{**whole, "save_every": 5, **pace}),
        fills=make_fills(PLAN.num_stages, fill_acceptance),
        seed=0,
        store=StateStore(path / "states", keep=2),
        log=Log(path / "log.jsonl"),
        save_head=save_head,
        rate=learning_rate(OPTIONS, STEPS),
        evaluator=evaluator,
        earlier=earlier,
    )
    trainer.resume()
    return trainer


def examples_seen(trainer: Trainer) -> list[int]:
    """Numbers of the examples in the batches that a trainer has read."""
    stream = trainer._stream
    assert isinstance(stream, Recorded)
    return stream.seen


def run_until_saved(trainer: Trainer, step: int) -> None:
    """Train until the state of `step` is on disk, then stop as a killed process would."""
    for event in trainer.run():
        if (event.kind, event.step) == ("save", step):
            return


def lines_of(trainer: Trainer) -> list[dict[str, Any]]:
    """The log without times."""
    return [{name: v for name, v in line.items() if name not in TIMES} for line in trainer.log.read()]


def host(tree: Any) -> Any:
    """Arrays on the host."""
    return jax.tree.map(np.asarray, jax.device_get(tree))
