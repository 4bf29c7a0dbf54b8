"""The training loop: batches in, states, heads and events out.

It yields events and never prints; who runs it shows them. What the loop did is known from the state's step alone: step
s takes micro-batches s * accumulate ... of the stream and its fill from (seed, s), so a resumed run goes on as if it
had not stopped. Real acceptance comes from a function handed in (`Evaluator`): training knows nothing of decoding.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import numpy as np

from spd_jax.data.packing import Batch, BatchStream
from spd_jax.metrics import projected_accept_length
from spd_jax.parallel.watch import Watch
from spd_jax.speculation.module import SpeculationModule
from spd_jax.training.checkpoints import Log, StateStore
from spd_jax.training.loss import Figures
from spd_jax.training.rows import Fills, Rows, document_starts, draw_fill
from spd_jax.training.step import Programs, TrainState

Number = int | float
Evaluator = Callable[[SpeculationModule], Mapping[str, float]]
"""Decodes with a module; its figures have `s0`, or there are none because nothing was decoded."""
EventKind = Literal["step", "evaluation", "decoding", "save"]


@runtime_checkable
class SaveHead(Protocol):
    """Writes a module as a head: `best` or `last`, with what is known of its training."""

    def __call__(self, name: str, module: SpeculationModule, training: Mapping[str, Any], /) -> None: ...


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that happened after `step` updates; `values` are numbers by name."""

    kind: EventKind
    step: int
    values: Mapping[str, Number]


@dataclasses.dataclass(frozen=True)
class Pace:
    """How long to train and how often to look; 0 is never, but all that is chosen is also done at the end."""

    total_steps: int
    accumulate: int
    evaluate_every: int
    evaluate_batches: int
    decode_every: int
    save_every: int


class NotFinite(ArithmeticError):
    """A loss, figure, gradient or update that is not finite; names the batch."""


class Trainer:
    """Trains a module; `fills` says how full the simulated pipeline is, `earlier` counts the tokens that the module has
    seen before this run, `watch` looks at steps that hang."""

    def __init__(
        self,
        programs: Programs,
        module: SpeculationModule,
        stream: BatchStream,
        held_out: BatchStream | None,
        pace: Pace,
        *,
        fills: Fills,
        seed: int,
        store: StateStore,
        log: Log,
        save_head: SaveHead,
        rate: Callable[[int], Any],
        evaluator: Evaluator | None = None,
        earlier: Mapping[str, int] | None = None,
        watch: Watch | None = None,
    ):
        self.programs, self.pace, self.log, self._fills = programs, pace, log, fills
        self._stream, self._held_out, self._seed, self._store = stream, held_out, seed, store
        self._save_head, self._rate, self._evaluator = save_head, rate, evaluator
        self._counts = {"tokens": 0, "supervised": 0, "earlier_tokens": 0, "earlier_supervised": 0, **(earlier or {})}
        self._watch, self._seen = watch or Watch(0.0), set[str]()
        self._best: dict[str, float] = {}
        self._damaged: tuple[int, ...] = ()
        self.state: TrainState = programs.start(module)

    def resume(self) -> int:
        """Go back to the newest saved state that can be read; the step it has done, 0 if there is none.

        Raises:
            RunError: there are saved states, and all are damaged or of another run.
        """
        restored = self._store.restore_newest(self.state)
        if restored is None:
            self.log.cut(-1)
            return 0
        self.state, self._damaged = restored.state, restored.damaged
        self._counts, self._best = restored.progress["counts"], restored.progress["best"]
        self.log.cut(restored.step)
        return restored.step

    def describe(self) -> str:
        """Where the run stands, in a line."""
        step, total = int(self.state.step), self.pace.total_steps
        text = f"goes on after step {step:,} of {total:,}" if step else f"{total:,} steps"
        if self._damaged:
            steps = ", ".join(f"{step:,}" for step in self._damaged)
            text += f" (what was saved after step {steps} is damaged and has been removed)"
        return text

    def run(self) -> Iterator[Event]:
        """Train to the end; every event is in the log before it is yielded.

        Raises:
            NotFinite: a loss, a figure, a gradient or an update is not finite; the newest saved state is from before.
        """
        pace, start = self.pace, int(self.state.step)
        if start == 0:
            yield from self._look(0, first=True)
        clock, tokens, since = time.perf_counter(), self._counts["tokens"], start
        for step in range(start, pace.total_steps):
            with self._watched("step", step + 1):
                values = self._step(step)
            seconds = time.perf_counter() - clock
            speed = (self._counts["tokens"] - tokens) / seconds
            left = seconds / (step + 1 - since) * (pace.total_steps - step - 1)
            yield self._event("step", step + 1, {**values, "tokens_per_second": speed, "eta_seconds": left})
            looking = time.perf_counter()
            yield from self._look(step + 1)
            clock += time.perf_counter() - looking  # tokens/s and ETA are those of training alone,
            if step == start:  # without the first step, which compiles
                clock, tokens, since = time.perf_counter(), self._counts["tokens"], step + 1

    def _watched(self, what: str, step: int) -> AbstractContextManager[None]:
        """A watch over a step; the first one of a kind compiles."""
        compiles = what not in self._seen
        self._seen.add(what)
        devices = jax.tree.leaves(self.state)[0].devices()
        platform = next(iter(devices)).platform
        where = f"the training on {len(devices)} {platform} device(s)"
        return self._watch.over(f"{what} {step} of {where}", works_here=compiles or platform == "cpu")

    def _step(self, step: int) -> dict[str, Number]:
        sums = self.programs.zeros(self.state)
        for index in range(step * self.pace.accumulate, (step + 1) * self.pace.accumulate):
            batch = self._stream.batch_at(index)
            rows = as_rows(batch, self._fills.trained, seed=self._seed, step=index)
            sums = self.programs.gradient_step(sums, self.state, rows)
            self._counts["tokens"] += int(np.count_nonzero(batch.segments))
            self._counts["supervised"] += int(np.count_nonzero(batch.scored))
        figures = jax.device_get(sums.figures)
        self.state, found = self.programs.update(self.state, sums)
        values = {name: float(value) for name, value in jax.device_get(found).items()}
        if not values.pop("finite"):
            first = step * self.pace.accumulate
            raise NotFinite(
                f"step {step + 1}: loss {values['loss']}, norm of the gradient {values['gradient_norm']} and of the "
                f"update {values['update_norm']}, acceptance {rates(figures, 1)['acceptance']} on batches {first} to "
                f"{first + self.pace.accumulate - 1}, which hold {self._name_rows(first)}"
            )
        rate = {"learning_rate": float(self._rate(step))}
        return {**values, **rates(figures, self.programs.plan.num_stages), **rate, **self._counts}

    def _name_rows(self, first: int) -> str:
        names = [
            str(sorted({piece[0] for piece in row}))
            for index in range(first, first + self.pace.accumulate)
            for row in self._stream.rows_at(index)
        ]
        return f"conversations (by row) {', '.join(names[:8])}{' ...' if len(names) > 8 else ''}"

    def _look(self, step: int, first: bool = False) -> Iterator[Event]:
        """Evaluate, decode and save where it is time to."""
        pace, last = self.pace, step == self.pace.total_steps

        def due(every: int) -> bool:
            return every > 0 and (first or last or step % every == 0)

        found: dict[str, float] = {}
        if self._held_out is not None and due(pace.evaluate_every):
            with self._watched("look at held-out data after step", step):
                found = self._evaluate(self._held_out)
            yield self._event("evaluation", step, found)
        if self._evaluator is not None and due(pace.decode_every):
            decoded = {name: float(value) for name, value in self._evaluator(self.programs.module(self.state)).items()}
            found = {**found, **{f"decoded_{name}": value for name, value in decoded.items()}}
            yield self._event("decoding", step, decoded)
        better = self._is_better(found)
        if better and not first:
            self._best = {**found, "step": step}
            self._save_head("best", self.programs.module(self.state), self._training(step, found))
        if last:
            self._save_head("last", self.programs.module(self.state), self._training(step, found))
        if not first and (last or (pace.save_every > 0 and step % pace.save_every == 0)):
            self._store.save(step, self.state, {"counts": self._counts, "best": self._best})
            yield self._event("save", step, {"best": float(better)})

    def _is_better(self, found: Mapping[str, float]) -> bool:
        """By real S0 where decoding is asked for, else by the projected one."""
        name = "projected_s0" if self._evaluator is None or not self.pace.decode_every else "decoded_s0"
        return name in found and found[name] > self._best.get(name, 0.0)

    def _evaluate(self, stream: BatchStream) -> dict[str, float]:
        """Figures of the first batches of a stream, always with the same fill."""
        total: Figures | None = None
        for index in range(min(self.pace.evaluate_batches, stream.steps_per_epoch)):
            rows = as_rows(stream.batch_at(index), self._fills.held_out, seed=0, step=index)
            figures = self.programs.held_out(self.state, rows)
            values = dataclasses.asdict(jax.device_get(figures))
            if bad := [name for name, value in values.items() if not np.isfinite(value).all()]:
                step = int(self.state.step)
                raise NotFinite(f"held-out batch {index} after step {step}: {', '.join(bad)} not finite")
            total = figures if total is None else jax.tree.map(jax.numpy.add, total, figures)
        return {} if total is None else rates(jax.device_get(total), self.programs.plan.num_stages)

    def _training(self, step: int, found: Mapping[str, float]) -> dict[str, Any]:
        return {"step": step, **self._counts, "held_out": {name: round(value, 5) for name, value in found.items()}}

    def _event(self, kind: EventKind, step: int, values: Mapping[str, Number]) -> Event:
        self.log.append({"step": step, "kind": kind, **{k: _short(v) for k, v in values.items()}})
        return Event(kind, step, dict(values))


def _short(value: Number) -> Number:
    return value if isinstance(value, int) else float(f"{value:.6g}")


def as_rows(batch: Batch, fill_shares_n: np.ndarray, *, seed: int, step: int) -> Rows:
    """A packed batch with the number of positions in flight drawn for each document."""
    low = document_starts(batch.segments)
    fill = draw_fill(low, fill_shares_n, seed=seed, step=step)
    return Rows(batch.ids, batch.positions, low, fill, batch.scored)


def rates(figures: Figures, num_stages: int) -> dict[str, float]:
    """Shares of scored positions, for type 0.

    `top1`: drafts that greedy verification would accept; `acceptance`: sum min(p, q), what sampling at temperature 1
    would; `coverage`: positions whose likeliest token is in the draft vocabulary; `projected_s0`: from `top1`, if it is
    that of decoding. `draft_loss` is over covered positions. `block<i>_top1`: of the deeper blocks, richest
    first, where they are scored.
    """
    count, covered = max(float(figures.count), 1.0), max(float(figures.covered), 1.0)
    right = [float(value) / count for value in np.asarray(figures.right_A)]
    found = {
        "draft_loss": float(np.asarray(figures.loss_A)[-1]) / covered,
        "top1": right[-1],
        "acceptance": float(figures.accepted) / count,
        "coverage": float(figures.covered) / count,
        "projected_s0": projected_accept_length(num_stages, right[-1]),
    }
    return found | {f"block{index}_top1": value for index, value in enumerate(right[:-1])}
