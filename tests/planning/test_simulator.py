"""The replay of acceptance traces: counts by hand, the formula, and what only a replay can say."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from spd_jax.metrics import expected_cycles
from spd_jax.plan import make_plan
from spd_jax.planning.cost_model import Cycle
from spd_jax.planning.simulator import TraceError, read_traces, schedule, simulate

PLAN = make_plan(8, 4, num_draft_layers=1)
PARTS = {"compute": 3.0, "exchange": 0.5, "heads": 0.25, "enter": 0.25, "control": 0.0}
EVEN = Cycle(PARTS, (1.0, 3.0, 3.0, 3.0, 3.0), 1.0, (0,) * 5, "stage 1")


def random_trace(alpha: float, length: int, seed: int = 0) -> str:
    right = np.random.default_rng(seed).random(length) < alpha
    return "".join("a" if one else "r" for one in right)


def test_stages_fill_after_a_wrong_draft():
    assert schedule("ar", 3).tolist() == [1, 2, 3, 3]
    assert schedule("ra", 2).tolist() == [1, 2, 1, 2]


@pytest.mark.parametrize("trace", ["", "a", "raar", "aaaaar"])
def test_cycles_are_those_of_the_metric(trace: str):
    """The verdict of the last token counts nowhere: its successor is not waited for."""
    trace += "a"
    accepted, rejected = trace[:-1].count("a"), trace[:-1].count("r")
    assert simulate(PLAN, EVEN, [trace]).cycles == expected_cycles(len(trace) + 1, 4, accepted, rejected)


@pytest.mark.parametrize("alpha", [0.3, 0.6, 0.9])
def test_a_long_text_without_jitter_goes_as_the_formula_says(alpha: float):
    trace = random_trace(alpha, 20_000)
    share = trace.count("a") / len(trace)
    found = simulate(PLAN, EVEN, [trace])
    assert found.tokens == 20_000
    assert found.tokens_per_second == pytest.approx(EVEN.tokens_per_second(4, share), rel=0.02)
    assert found.percentile(99) == pytest.approx(16.0)
    assert found.percentile(1) == pytest.approx(4.0)
    # A stage works in every cycle of the steady state; of n that fill, the last only in one.
    fills = 1 + trace[:-1].count("r")
    assert found.busy_stages[0] == pytest.approx(3.0 / 4.0)
    assert found.busy_stages[3] == pytest.approx(3.0 * (found.cycles - 3 * fills) / (4.0 * found.cycles))
    assert found.busy_draft == pytest.approx(0.25)


def test_a_slow_last_stage_is_not_waited_for_while_the_pipeline_fills():
    """The formula counts every cycle as a full one."""
    uneven = dataclasses.replace(EVEN, ranks=(1.0, 1.0, 1.0, 1.0, 3.0))
    found = simulate(PLAN, uneven, ["r" * 100])
    assert found.seconds == pytest.approx(100 * (3 * 2.0 + 4.0))
    assert found.seconds < 400 * EVEN.seconds


def test_jitter_costs_time_since_everybody_waits_for_the_last():
    trace = random_trace(0.8, 2000)
    calm, shaky = (simulate(PLAN, EVEN, [trace], jitter=jitter) for jitter in (0.0, 0.2))
    again = simulate(PLAN, EVEN, [trace], jitter=0.2)
    assert shaky.seconds == again.seconds
    assert 1.05 * calm.seconds < shaky.seconds < 1.5 * calm.seconds
    # One stage waits for nobody.
    parts = dict.fromkeys(PARTS, 0.0)
    one = Cycle(parts, (3.0,), 0.0, (0,), "stage 1")
    alone = simulate(make_plan(8, 1, num_draft_layers=1, layout="beside"), one, [trace], jitter=0.2)
    assert alone.seconds == pytest.approx(3.0 * len(trace), rel=0.02)


def test_simulated_devices_take_turns():
    found = simulate(PLAN, EVEN, ["aaaa"], shared=True)
    # one, two, three, four stages and the draft, then all four times more
    assert found.seconds == pytest.approx(7 * (1.0 + 1.0) + (3 + 6 + 9 + 4 * 12))


def test_sequences_of_a_batch_share_cycles_and_end_apart():
    long, short = "a" * 50, "a" * 10
    together, alone = simulate(PLAN, EVEN, [long, short], batch=2), simulate(PLAN, EVEN, [long])
    assert together.seconds == alone.seconds
    assert together.tokens == 60
    in_turn = simulate(PLAN, EVEN, [long, short])
    assert in_turn.seconds > together.seconds


def test_the_draft_beside_the_first_stage_is_told_from_it():
    beside = make_plan(8, 4, num_draft_layers=1, layout="beside")
    cycle = Cycle(PARTS, (3.0, 3.0, 3.0, 3.0), 1.0, (0,) * 4, "stage 1 with the draft")
    found = simulate(beside, cycle, ["a" * 1000])
    assert found.busy_draft == pytest.approx(1.0 / 4.0, rel=0.01)
    assert found.busy_stages[0] == pytest.approx(2.0 / 4.0, rel=0.01)


def test_traces_of_evaluations_and_of_generations(tmp_path: Path):
    samples, generated = tmp_path / "samples.jsonl", tmp_path / "run.json"
    lines = [{"format": "spd_jax evaluation samples"}, {"verdicts": "paru"}, {"verdicts": "p"}, {"verdicts": "paa"}]
    samples.write_text("\n".join(map(json.dumps, lines)) + "\n")
    generated.write_text(json.dumps({"results": [{"verdicts": "pra"}]}))
    assert read_traces(samples) == ["aru", "aa"]
    assert read_traces(generated) == ["ra"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"results": [{"ids": [1]}]}', "answer 1 has no verdicts"),
        ('{"verdicts": "pa"}\n{"verdicts": ', "trace:2: not JSON"),
        ('{"verdicts": "p"}\n', "no answer has more than the token of prefill"),
        ("3", "expected answers, found int"),
    ],
)
def test_files_that_hold_no_trace(text: str, message: str, tmp_path: Path):
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(TraceError, match=message):
        read_traces(path)
