"""The training loop: a run that was stopped is the run that was not, the best head is kept, and NaN ends it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spd_jax import struct
from spd_jax.speculation.module import SpeculationModule
from spd_jax.training.loss import Figures
from spd_jax.training.rows import draw_fill
from spd_jax.training.trainer import NotFinite, Trainer, rates
from tests.training.runs import ROWS, STEPS, examples_seen, host, lines_of, make_trainer, run_until_saved


def finish(trainer: Trainer) -> Trainer:
    for _ in trainer.run():
        pass
    return trainer


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """Ten steps on one device, looking at held-out data after every second."""
    return finish(make_trainer(tmp_path_factory.mktemp("straight"), evaluate_every=2))


def assert_states(found: Any, wanted: Any, *, tolerance: float = 0.0) -> None:
    for (path, a), b in zip(jax.tree.leaves_with_path(host(found)), jax.tree.leaves(host(wanted)), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance, err_msg=jax.tree_util.keystr(path))


# Resuming


def test_a_stopped_run_goes_on_as_if_it_had_not_been(tmp_path: Path, straight: Trainer):
    """P03, P04: parameters, optimiser, data, learning rate and log of 5 + 5 steps are those of 10."""
    first = make_trainer(tmp_path, evaluate_every=2)
    run_until_saved(first, 5)
    second = make_trainer(tmp_path, evaluate_every=2)
    assert second.describe() == "goes on after step 5 of 10"
    finish(second)
    assert_states(second.state, straight.state)
    assert int(second.state.step) == STEPS
    assert lines_of(second) == lines_of(straight)
    seen = examples_seen(first) + examples_seen(second)
    assert seen == examples_seen(straight)
    assert sorted(seen) == list(range(STEPS * ROWS * 2))  # two conversations a row, each once


def test_the_straight_run_moved(straight: Trainer):
    """Else the comparisons above and below would say nothing."""
    assert straight.describe() == "goes on after step 10 of 10"
    steps = [line for line in lines_of(straight) if line["kind"] == "step"]
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    np.testing.assert_allclose([line["learning_rate"] for line in steps], 3e-3 * (1 - np.arange(10) / 10), rtol=1e-5)
    assert steps[-1]["tokens"] == STEPS * ROWS * 16
    assert steps[-1]["supervised"] == STEPS * ROWS * 2 * 6
    moved = [float(np.abs(leaf).max()) for leaf in jax.tree.leaves(host(straight.state.optimizer))]
    assert min(moved) > 0


def test_a_run_goes_on_on_another_number_of_devices(tmp_path: Path, straight: Trainer):
    """P01: saved by eight devices that share the parameters, finished by one that has them all."""
    run_until_saved(make_trainer(tmp_path, devices=8, placement="sharded"), 5)
    alone = make_trainer(tmp_path)
    assert all(len(leaf.sharding.device_set) == 1 for leaf in jax.tree.leaves(alone.state))
    finish(alone)
    assert_states(alone.state, straight.state, tolerance=2e-5)


def test_events_after_the_saved_state_are_seen_again(tmp_path: Path):
    trainer = make_trainer(tmp_path)
    for event in trainer.run():
        if event.step == 7:
            break
    assert trainer.log.read()[-1]["step"] == 7
    assert make_trainer(tmp_path).log.read()[-1] == {"step": 5, "kind": "save", "best": 0.0}


def test_a_finished_run_does_nothing(tmp_path: Path):
    finish(make_trainer(tmp_path, total_steps=2))
    again = make_trainer(tmp_path, total_steps=2)
    log = again.log.read()
    assert list(again.run()) == []
    assert again.log.read() == log


def test_the_pace_is_that_of_steps_that_compile_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A step of 100 seconds, then steps of two; looks and saves of 50 seconds count for nothing."""
    now = [0.0]
    trainer = make_trainer(tmp_path, total_steps=4, evaluate_every=2, save_every=2)
    take, look = trainer._step, trainer._evaluate

    def timed(step: int) -> Any:
        now[0] += 100.0 if step == 0 else 2.0
        return take(step)

    def slow(stream: Any) -> Any:
        now[0] += 50.0
        return look(stream)

    monkeypatch.setattr(trainer, "_step", timed)
    monkeypatch.setattr(trainer, "_evaluate", slow)
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    steps = [event.values for event in trainer.run() if event.kind == "step"]
    assert [values["eta_seconds"] for values in steps] == [300.0, 4.0, 2.0, 0.0]
    assert [values["tokens_per_second"] for values in steps] == [ROWS * 16 / 100, *[ROWS * 16 / 2] * 3]


def test_micro_batches_are_read_in_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each with a fill of its own."""
    drawn: list[int] = []

    def draw(low: Any, shares: Any, *, seed: int, step: int) -> Any:
        drawn.append(step)
        return draw_fill(low, shares, seed=seed, step=step)

    monkeypatch.setattr("spd_jax.training.trainer.draw_fill", draw)
    trainer = finish(make_trainer(tmp_path, total_steps=3, accumulate=2))
    wanted = make_trainer(tmp_path / "other")
    for index in range(6):
        wanted._stream.batch_at(index)
    assert examples_seen(trainer) == examples_seen(wanted)
    assert drawn == list(range(6))
    assert lines_of(trainer)[-2]["tokens"] == 6 * ROWS * 16
    assert trainer.programs.accumulate.count() == 1  # the pass is compiled once


@pytest.mark.parametrize(
    ("acceptance", "trained", "looked_at"), [(None, {1, 2}, {2}), (0.0, {1}, {1}), (1.0, {2}, {2})]
)
def test_fills_are_drawn_as_asked(
    acceptance: float | None, trained: set[int], looked_at: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The pipeline of the tests has two stages, so the least and the largest fill are all there are."""
    trainer = make_trainer(tmp_path, total_steps=6, evaluate_every=6, fill_acceptance=acceptance)
    fills: dict[str, set[int]] = {"gradient_step": set(), "held_out": set()}

    def watch(name: str) -> None:
        call = getattr(trainer.programs, name)

        def watched(*arguments: Any) -> Any:
            fills[name] |= set(np.unique(arguments[-1].fill).tolist())
            return call(*arguments)

        monkeypatch.setattr(trainer.programs, name, watched)

    watch("gradient_step")
    watch("held_out")
    finish(trainer)
    assert fills == {"gradient_step": trained, "held_out": looked_at}


# Heads


class Kept:
    """What a trainer saves."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.modules: list[SpeculationModule] = []

    def __call__(self, name: str, module: SpeculationModule, training: Mapping[str, Any], /) -> None:
        self.calls.append((name, dict(training)))
        self.modules.append(module)

    def steps(self, name: str) -> list[int]:
        return [training["step"] for saved, training in self.calls if saved == name]


def test_best_is_by_projected_s0_and_last_is_the_last(tmp_path: Path, straight: Trainer):
    kept = Kept()
    finish(make_trainer(tmp_path, evaluate_every=2, save_head=kept))
    found = {line["step"]: line["projected_s0"] for line in lines_of(straight) if line["kind"] == "evaluation"}
    assert sorted(found) == [0, 2, 4, 6, 8, 10]
    del found[0]  # the head as it started is not kept
    record, wanted = 0.0, []
    for step, value in found.items():
        if value > record:
            record, wanted = value, [*wanted, step]
    assert kept.steps("best") == wanted
    assert kept.steps("last") == [STEPS]
    (name, training) = kept.calls[-1]
    assert (name, training["tokens"], training["supervised"]) == ("last", STEPS * ROWS * 16, STEPS * ROWS * 12)
    assert training["held_out"]["projected_s0"] == pytest.approx(found[10], abs=1e-5)


def test_best_is_by_decoded_s0_where_there_is_decoding(tmp_path: Path):
    """A stopped run remembers the best so far."""
    answers, kept = iter([9.0, 1.5, 1.2, 1.4, 2.0]), Kept()  # before the first step, then after steps 2, 4, 6 and 8

    def evaluator(module: SpeculationModule) -> Mapping[str, float]:
        return {"s0": next(answers), "alpha": 0.5}

    pace = {"evaluate_every": 2, "decode_every": 2, "save_every": 4, "total_steps": 8}
    run_until_saved(make_trainer(tmp_path, evaluator=evaluator, save_head=kept, **pace), 4)
    assert kept.steps("best") == [2]
    trainer = finish(make_trainer(tmp_path, evaluator=evaluator, save_head=kept, **pace))
    assert kept.steps("best") == [2, 8]
    assert kept.calls[0][1]["held_out"]["decoded_s0"] == 1.5
    decoded = [line["s0"] for line in trainer.log.read() if line["kind"] == "decoding"]
    assert decoded == [9.0, 1.5, 1.2, 1.4, 2.0]


def test_a_warm_start_adds_to_what_was_seen(tmp_path: Path):
    kept = Kept()
    earlier = {"earlier_tokens": 1000, "earlier_supervised": 700}
    finish(make_trainer(tmp_path, total_steps=1, save_head=kept, earlier=earlier))
    training = kept.calls[0][1]
    assert {name: training[name] for name in earlier} == earlier
    assert training["tokens"] == ROWS * 16


# What is not finite


def test_not_a_number_ends_the_run_and_names_the_batch(tmp_path: Path):
    trainer = make_trainer(tmp_path)
    run_until_saved(trainer, 5)
    saved = host(trainer.state)
    params = jax.tree.map(lambda x: x.at[(0,) * x.ndim].set(np.nan), trainer.state.params)
    trainer.state = struct.replace(trainer.state, params=params)
    with pytest.raises(NotFinite, match=r"step 6: loss nan.* on batches 5 to 5, which hold conversations") as caught:
        finish(trainer)
    first = examples_seen(trainer)[5 * ROWS * 2 :][:2]
    assert str(sorted(first)) in str(caught.value)
    again = make_trainer(tmp_path)
    assert int(again.state.step) == 5
    assert_states(again.state, saved)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(host(again.state)))


def test_not_a_number_in_held_out_data_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Before anything is logged, a head kept or a state saved."""
    trainer = make_trainer(tmp_path, evaluate_every=2)
    held_out = trainer.programs.held_out

    def spoilt(state: Any, rows: Any) -> Figures:
        figures = held_out(state, rows)
        return struct.replace(figures, loss_A=figures.loss_A * np.float32(np.nan))

    monkeypatch.setattr(trainer.programs, "held_out", spoilt)
    with pytest.raises(NotFinite, match="held-out batch 0 after step 0: loss_A not finite"):
        finish(trainer)
    assert not lines_of(trainer)


# Figures


def figures(count: float, covered: float, loss: list[float], right: list[float], accepted: float) -> Figures:
    return Figures(*map(jnp.float32, (count, covered)), *map(jnp.asarray, (loss, right)), jnp.float32(accepted))


def test_rates():
    """J08: projected S0 is n / (1 + (1 - a)(n - 1))."""
    found = rates(figures(10, 8, [12.0, 4.0], [6.0, 8.0], 5), num_stages=4)
    assert found["top1"] == pytest.approx(0.8)
    assert found["projected_s0"] == pytest.approx(4 / (1 + 0.2 * 3))
    assert found["acceptance"] == pytest.approx(0.5)
    assert found["coverage"] == pytest.approx(0.8)
    assert found["draft_loss"] == pytest.approx(0.5)  # of the newest position, over covered ones
    assert found["block0_top1"] == pytest.approx(0.6)


@pytest.mark.parametrize(("right", "wanted"), [(0.0, 1.0), (10.0, 8.0)])
def test_projected_s0_lies_between_one_and_n(right: float, wanted: float):
    assert rates(figures(10, 10, [1.0], [right], 10), num_stages=8)["projected_s0"] == pytest.approx(wanted)


def test_nothing_scored_is_no_division_by_zero():
    found = rates(figures(0, 0, [0.0], [0.0], 0), num_stages=4)
    assert found["projected_s0"] == 1.0
    assert found["coverage"] == 0.0
