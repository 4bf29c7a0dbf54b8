"""Speed and memory of a training step against plainer ways to write the same step.

    .venv/bin/python benchmarks/train_step.py    # a target of the size of SmolLM2-135M, ten minutes, 12 GB of memory
    .venv/bin/python benchmarks/train_step.py --layers 8 --length 256 --growth [128,256] --rounds 3

Ours: attention by ranges of keys, last-layer queries of type 0 only, logits of a chunk of positions at a time. Against
it, with the same weights, batch and optimiser: `dense`, one mask over the rows of all types and logits of whole rows,
and on request `all rows`, which also sends all types through the last draft layer, as the published code does.

Steps of all variants run interleaved in one process, each a gradient and an update; figures are medians, ratios medians
of the rounds' ratios. Memory is what the compiled gradient says it needs besides its arguments, and what a process of
its own held at its highest. Weights are random.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array
from jsonargparse import auto_cli

from spd_jax.config.model import ModelConfig
from spd_jax.nn.layers import project
from spd_jax.plan import StagePlan, make_plan
from spd_jax.planning.timing import Timed, interleave, median, ratio
from spd_jax.speculation.module import HeadConfig, SpeculationModule
from spd_jax.training.allocator import keep_freed_memory
from spd_jax.training.forward import dense_attention, draft_pass
from spd_jax.training.loss import Figures
from spd_jax.training.objectives import OBJECTIVES
from spd_jax.training.optimizer import OptimizerOptions, make_optimizer
from spd_jax.training.rows import Rows
from spd_jax.training.sharding import data_mesh, place
from spd_jax.training.step import PassOptions, Programs
from spd_jax.training.target import FrozenTarget, load_frozen_target, target_pass
from spd_jax.weights.random_model import RandomWeights, dense_layer


class DensePrograms(Programs):
    """The step as one would write it down: one large mask, whole logits, gradients by JAX."""

    newest_only = True

    def _loss(self, params: Any, target: FrozenTarget, tables: Any, rows: Rows) -> tuple[Array, Figures]:
        products, activations = jnp.dtype(self.options.products), jnp.dtype(self.options.activations)
        module = nnx.merge(self._graphdef, jax.tree.map(lambda x: x.astype(products), params))
        taps, last = target_pass(target, rows, self.head.anchors, activations)
        hidden = draft_pass(module, self.staircase, taps, rows, newest_only=self.newest_only, attention=dense_attention)
        assert module.lm_head is not None
        target_logits = project(target.normed(last), target.head_rows, jnp.float32)
        best = jnp.argmax(target_logits, axis=-1)
        inside = rows.scored
        if tables:
            inside = inside & jnp.isin(best, tables["draft"])
            target_logits = target_logits[..., tables["draft"]]
        log_p = jax.nn.log_softmax(target_logits)
        log_q = jax.nn.log_softmax(project(target.normed(hidden[:, -1]), module.lm_head[...], jnp.float32))
        covered = inside.astype(jnp.float32)
        total = jnp.sum(covered * OBJECTIVES[self.options.objective](log_p, log_q))
        count, zero = jnp.sum(covered), jnp.zeros((1,), jnp.float32)
        return total, Figures(count, count, zero, zero, jnp.float32(0.0))


class AllRowsPrograms(DensePrograms):
    """And all types go through all draft layers."""

    newest_only = False


@dataclasses.dataclass(frozen=True)
class Size:
    """The target and its head."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    layers: int
    vocab: int
    stages: int
    draft_layers: int
    draft_vocabulary: int

    @functools.cached_property
    def model(self) -> ModelConfig:
        """The target."""
        heads = (self.heads, self.kv_heads, self.hidden // self.heads)
        layer = dense_layer(self.hidden, self.intermediate, *heads, 1e-5)
        return ModelConfig("llama", self.vocab, (layer,) * self.layers, 8192, True, (2,))

    @functools.cached_property
    def plan(self) -> StagePlan:
        """Even stages and the default anchors."""
        return make_plan(self.layers, self.stages, num_draft_layers=self.draft_layers)

    def head(self) -> SpeculationModule:
        """A random head; a draft vocabulary is spread over all ids."""
        count = self.draft_vocabulary
        ids = None if count == 0 else tuple(np.linspace(0, self.vocab - 1, count).astype(int).tolist())
        config = HeadConfig(self.model.layers[0], self.draft_layers, self.plan.anchors, self.vocab, ids)
        graphdef, state = nnx.split(nnx.eval_shape(lambda: SpeculationModule(config, rngs=nnx.Rngs(0))))
        rng = np.random.default_rng(1)

        def values(x: Any) -> Array:
            noise = rng.standard_normal(x.shape, np.float32)
            return jnp.asarray(1 + noise * np.float32(0.1) if len(x.shape) == 1 else noise * np.float32(0.02))

        return nnx.merge(graphdef, jax.tree.map(values, state))


class Training:
    """A variant with a state that goes on from step to step."""

    def __init__(self, variant: str, size: Size, target: FrozenTarget, head: SpeculationModule, chunk: int):
        kind = {"ours": Programs, "dense": DensePrograms, "all rows": AllRowsPrograms}[variant]
        optimizer = make_optimizer(OptimizerOptions(), 1000)
        self.programs = kind(data_mesh(1), head, size.plan, target, optimizer, PassOptions(chunk=chunk))
        self.state = self.programs.start(head)
        self.losses: list[float] = []

    def step(self, rows: Rows) -> None:
        """One micro-batch and an update."""
        sums = self.programs.gradient_step(self.programs.zeros(self.state), self.state, rows)
        self.state, found = self.programs.update(self.state, sums)
        self.losses.append(float(found["loss"]))

    def compile(self, rows: Rows) -> dict[str, float]:
        """MiB that the gradient needs besides its arguments, and seconds to compile it."""
        programs, state, start = self.programs, self.state, time.perf_counter()
        arguments = (programs.zeros(state), state.params, programs.target, programs._tables, programs.rows(rows))
        compiled = programs.accumulate.lower(*arguments).compile()
        needed = compiled.memory_analysis().temp_size_in_bytes / 2**20
        return {"temporary_mib": round(needed, 1), "compile_seconds": round(time.perf_counter() - start, 1)}


def batch(size: Size, rows: int, length: int) -> Rows:
    """One document a row, all positions but the last scored, full in one row and partly in the next."""
    rng = np.random.default_rng(length)
    ids = rng.integers(0, size.vocab, (rows, length), dtype=np.int32)
    position = np.broadcast_to(np.arange(length, dtype=np.int32), ids.shape)
    fill = np.full(ids.shape, size.stages, np.int32)
    fill[1::2] = max(size.stages // 2, 1)
    return Rows(ids, position, np.zeros_like(ids), fill, position < length - 1)


def resident(arguments: list[str]) -> float:
    """MiB that a process held at its highest, from its own last line."""
    found = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, check=True)
    return float(found.stdout.splitlines()[-1])


def report(name: str, figures: dict[str, Any]) -> None:
    """One block of figures."""
    print(name, json.dumps(figures, indent=1), flush=True)


def compare(found: dict[str, list[float]], memory: dict[str, dict[str, float]], variants: list[str]) -> dict[str, Any]:
    """Ratio lines of every other variant over ours."""
    lines: dict[str, Any] = {}
    for other in variants:
        if other == "ours" or "ours" not in variants:
            continue
        lines[f"speed, ours / {other}"] = round(ratio(found[other], found["ours"]), 2)
        for what in ("temporary_mib", "resident_mib"):
            if what in memory[other]:
                share = memory["ours"][what] / memory[other][what]
                lines[f"{what.split('_')[0]} memory, ours / {other}"] = round(share, 3)
    return lines


def grown(lengths: list[int], found: dict[str, list[float]], needed: dict[int, dict[str, float]]) -> dict[str, Any]:
    """Our figures by length, and how the longest compares with the shortest: linear is 1 a token."""
    first, last = str(lengths[0]), str(lengths[-1])
    memory = needed[lengths[-1]]["temporary_mib"] / needed[lengths[0]]["temporary_mib"] * lengths[0] / lengths[-1]
    speeds = {str(n): {"tokens_per_second": round(1e3 / median(found[str(n)]), 1), **needed[n]} for n in lengths}
    return speeds | {
        f"time a token, {last} / {first}": round(ratio(found[last], found[first]), 2),
        f"memory a token, {last} / {first}": round(memory, 2),
    }


def main(
    hidden: int = 576,
    intermediate: int = 1536,
    heads: int = 9,
    kv_heads: int = 3,
    layers: int = 30,
    vocab: int = 49152,
    stages: int = 8,
    draft_layers: int = 3,
    draft_vocabulary: int = 0,
    rows: int = 1,
    length: int = 1024,
    growth: list[int] = [256, 512, 1024, 2048],  # noqa: B006 (a command-line default)
    chunk: int = 128,
    rounds: int = 5,
    variants: list[str] = ["ours", "dense"],  # noqa: B006
    processes: bool = True,
    only: str | None = None,
    json_path: str | None = None,
) -> None:
    """Measure; with `only` run two steps of one variant and print the process's peak in MiB."""
    keep_freed_memory()
    size = Size(hidden, intermediate, heads, kv_heads, layers, vocab, stages, draft_layers, draft_vocabulary)
    loaded = load_frozen_target(RandomWeights(size.model), size.plan.anchors, jnp.bfloat16)
    target, head = place(loaded, data_mesh(1), PartitionSpec()), size.head()
    rows_of = functools.partial(batch, size, rows)
    if only is not None:
        one = Training(only, size, target, head, chunk)
        for _ in range(2):
            one.step(rows_of(length))
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
        return
    print(size.plan.describe(), f"{rows} x {length} tokens", flush=True)
    trainings = {name: Training(name, size, target, head, chunk) for name in variants}
    memory = {name: training.compile(rows_of(length)) for name, training in trainings.items()}
    if processes:
        for name in variants:
            memory[name]["resident_mib"] = round(resident([*sys.argv[1:], "--only", name]), 1)
    timed = [Timed(name, functools.partial(t.step, rows_of(length)), rows * length) for name, t in trainings.items()]
    found = interleave(timed, rounds)
    figures: dict[str, Any] = {
        name: {
            "tokens_per_second": round(1e3 / median(found[name]), 1),
            **memory[name],
            "losses": [round(loss, 4) for loss in trainings[name].losses[:3]],
        }
        for name in variants
    }
    figures["ratios"] = compare(found, memory, variants)
    report(f"step of {rows} x {length} tokens", figures)
    ours = trainings.get("ours")
    if ours is not None and growth:
        needed = {n: ours.compile(rows_of(n)) for n in growth}
        found = interleave([Timed(str(n), functools.partial(ours.step, rows_of(n)), rows * n) for n in growth], rounds)
        figures["growth"] = grown(growth, found, needed)
        report("ours, by length", figures["growth"])
    if json_path is not None:
        Path(json_path).write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    auto_cli(main)
