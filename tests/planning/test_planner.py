"""Candidates, what the published heads say of acceptance, and where one method overtakes another."""

import dataclasses
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from spd_jax.config.model import ModelConfig
from spd_jax.metrics import projected_accept_length, simulated_tau
from spd_jax.planning.cost_model import autoregressive_seconds, serial_tokens_per_second, spd_cycle
from spd_jax.planning.costs import MachineCosts, Setting
from spd_jax.planning.machines import Machine, load_machine
from spd_jax.planning.planner import (
    PUBLISHED_S0,
    alpha_at,
    alpha_of,
    best,
    break_even_latency,
    candidates,
    rivals,
    serial_alpha,
)
from spd_jax.weights.load import read_config
from spd_jax.weights.random_model import dense_layer

MODEL = ModelConfig("llama", 1000, (dense_layer(64, 128, 4, 2, 16),) * 8, 4096, False, (2,))
MACHINE = Machine("by hand", 1e9, 1e12, 1e9, 1e8, 1e-5, 1e-6)
COSTS = MachineCosts(Setting(context=100), MACHINE)


def test_alpha_and_s0_are_two_names_of_one_thing():
    for n in (2, 4, 16):
        assert projected_accept_length(n, alpha_of(n, 1.9)) == pytest.approx(1.9)


def test_published_heads_are_met_within_a_hundredth():
    for (n, layers), s0 in PUBLISHED_S0.items():
        assert alpha_at(alpha_of(8, PUBLISHED_S0[8, 4]), n, layers) == pytest.approx(alpha_of(n, s0), abs=0.01)
    assert alpha_at(0.0, 16, 1) == 0.0
    assert alpha_at(1.0, 16, 1) == 1.0


def test_the_published_serial_draft_is_met():
    """EAGLE-3 for Qwen3.5-4B: S = tau / (1 + m / L) is 2.72 for m = 7, S0 = tau 3.51 for m = 15."""
    right = serial_alpha(alpha_of(8, PUBLISHED_S0[8, 4]))
    assert simulated_tau([right] * 7) / (1 + 7 / 32) == pytest.approx(2.72, rel=0.02)
    assert simulated_tau([right] * 15) == pytest.approx(3.51, rel=0.02)


def test_candidates_are_all_that_fit_and_the_best_is_the_fastest():
    found = list(candidates(MODEL, COSTS, 4))
    assert len({(c.plan.num_stages, c.plan.layout, c.plan.num_draft_layers) for c in found}) == len(found) == 5 * 4
    assert max(c.plan.num_ranks for c in found) == 4
    chosen = best(found, 0.7)
    assert all(chosen.tokens_per_second(0.7) >= other.tokens_per_second(0.7) for other in found)
    n, layers = chosen.plan.num_stages, chosen.plan.num_draft_layers
    assert chosen.tokens_per_second(0.7) == chosen.cycle.tokens_per_second(n, alpha_at(0.7, n, layers))
    with pytest.raises(ValueError, match="9 stages need at least 9 devices, 8 are to be used"):
        list(candidates(MODEL, COSTS, 8, stages=(9,)))


def test_the_best_serial_draft_is_no_worse_than_any():
    found = rivals(MODEL, COSTS, 4)
    speed, steps = found.serial_draft(0.6)
    speeds = [serial_tokens_per_second(m, serial_alpha(0.6), s) for m, s in enumerate(found.serial_rounds, 1)]
    assert speed == max(speeds)
    assert steps == 1 + speeds.index(speed)


def test_from_the_break_even_latency_on_the_pipeline_wins():
    chosen = best(list(candidates(MODEL, COSTS, 4)), 0.8)
    limit = break_even_latency(MODEL, chosen.plan, COSTS, 4, 0.8)
    assert limit is not None
    assert 0.0 < limit < 1e-2
    n, layers = chosen.plan.num_stages, chosen.plan.num_draft_layers
    for factor, wins in ((0.95, False), (1.05, True)):
        costs = COSTS.with_latency(factor * limit)
        mine = spd_cycle(MODEL, chosen.plan, costs).tokens_per_second(n, alpha_at(0.8, n, layers))
        assert (mine > 1 / autoregressive_seconds(MODEL, costs, 4)) is wins
    launches = MachineCosts(COSTS.setting, dataclasses.replace(MACHINE, launch=1.0))
    assert break_even_latency(MODEL, chosen.plan, launches, 4, 0.8) == 0.0
    assert break_even_latency(MODEL, chosen.plan, COSTS, 4, 0.8, longest=limit / 2) is None


def benchmark(name: str) -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_three_fixed_times_account_for_the_published_profile():
    """Each within 5 %, with the rounded figures of the machine that comes along."""
    profile = benchmark("published_profile")
    fitted, shipped = profile.fit(load_machine("h100")), load_machine("h100-eager")
    for name in profile.UNKNOWN:
        assert getattr(shipped, name) == pytest.approx(getattr(fitted, name), rel=0.02)
    found = profile.predicted(shipped)
    for name, value in profile.observed().items():
        assert found[name] == pytest.approx(value, rel=0.05), name


def test_sharing_the_heads_saves_most_where_stages_are_short():
    model, costs = read_config("qwen3.5-4b"), MachineCosts(Setting(draft_vocab=32000), load_machine("h100"))
    saved = []
    for n in (4, 8):
        (one,) = candidates(model, costs, n + 1, stages=(n,), layouts=("separate",), draft_layers=(4,))
        saved.append(1 - one.cycle.seconds / one.published_seconds)
    assert 0.2 < saved[0] < saved[1] < 0.6
