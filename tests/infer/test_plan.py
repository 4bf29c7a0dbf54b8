"""infer/plan.py: cuts of a hybrid model by bytes and by measured times, and what cannot be planned."""

import json
from pathlib import Path

import jax
import pytest

from infer import plan
from spd_jax.config.plan import PlanConfig
from spd_jax.evaluation import plan_report as report
from spd_jax.evaluation.cost_model import memory_of_ranks
from spd_jax.evaluation.layer_costs import bytes_read
from spd_jax.evaluation.plan_report import Costs
from spd_jax.models.shapes import num_parameters
from spd_jax.plan import make_plan
from spd_jax.weights.load import load_decoder, open_target, read_config
from tests.config.help import help_of
from tests.fixtures import DATA
from tests.one_line import assert_one_clear_line

QWEN3_5_4B = Path(__file__).parents[2] / "configs" / "qwen3_5_4b" / "config.json"
HYBRID = DATA / "tiny_qwen3_5" / "target"
EXPERTS = DATA / "tiny_qwen3_moe" / "target"


def test_the_published_hybrid(capsys: pytest.CaptureFixture[str]):
    """Its kinds are almost alike in bytes, so the even cut is balanced; 16 stages need every slot twice."""
    assert plan.main(["--model", str(QWEN3_5_4B), "--stages", "[4, 16]"]) == 0
    out = capsys.readouterr().out
    assert "gated delta net, MLP              24  112,923,840" in out
    assert "attention, MLP                     8  107,484,672" in out
    assert out.count("[8, 8, 8, 8]") == 2
    assert "16 stages, separate: 17 ranks, 3 draft layers" in out
    assert "58 % padding" in out
    assert "less padding: --layout beside" in out


def test_balance_where_kinds_differ(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Attention that costs five times a delta net: the cut moves, and the report says by how much."""
    model = read_config(HYBRID)
    linear, attention = model.layers[0], model.layers[3]
    costs = Costs("ms", {linear: 1.0, attention: 5.0}, 0.5, 0.0)
    monkeypatch.setattr(report, "layer_costs", lambda *arguments: {4: costs})
    assert plan.main(["--model", str(HYBRID), "--stages", "[4]", "--num_draft_layers", "2"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    cuts = {"even     [2, 2, 2, 2]": "6.00 ms (stage 2), 1.000", "balanced [3, 1, 3, 1]": "5.00 ms (stage 2), 0.833"}
    for cut, slowest in cuts.items():
        assert lines[lines.index(cut) + 1] == f"slowest rank {slowest} of the even cut's; the fastest 1.00"


def test_measured(capsys: pytest.CaptureFixture[str]):
    arguments = ["--model", str(HYBRID), "--stages", "[2]", "--context", "64", "--dtype", "float32"]
    assert plan.main([*arguments, "--measure", "true"]) == 0
    assert "ms a token" in capsys.readouterr().out


def test_bytes_of_experts_are_those_of_the_chosen_ones():
    """2 of 8 experts of 3 x 48 x 64 numbers; keys and values of 10 positions."""
    kind = read_config(EXPERTS).layers[0]
    assert num_parameters(kind) - bytes_read(kind, 0, 1) == 6 * 3 * 48 * 64
    assert bytes_read(kind, 10, 4) - bytes_read(kind, 0, 4) == 4 * 2 * 2 * 16 * 10


def test_memory_of_a_rank_is_what_its_layers_hold():
    """Used: every target layer once and the draft layers. Held: on each rank all slots, whoever needs them."""
    model = read_config(HYBRID)
    held, used = memory_of_ranks(make_plan(8, 4, num_draft_layers=2), model, 4)
    linear, attention = (4 * num_parameters(model.layers[index]) for index in (0, 3))
    assert used == [2 * attention, 2 * linear, linear + attention, 2 * linear, linear + attention]
    assert held == 2 * linear + 2 * attention
    state = sum(x.size for x in jax.tree.leaves(load_decoder(open_target(HYBRID)).layers))
    assert 4 * state == 6 * linear + 2 * attention


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "nowhere"], "nowhere"),
        (["--model", str(HYBRID), "--stages", "[9]"], "8 layers cannot fill 9 stages"),
        (["--model", str(HYBRID), "--stages", "[]"], "stages is empty"),
        (["--model", str(HYBRID), "--stages", "[0]"], "stages must be at least 1, found 0"),
        (["--model", str(HYBRID), "--context", "0"], "context must be at least 1"),
    ],
)
def test_what_cannot_be_planned(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    assert plan.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert_one_clear_line(captured.err, said)


def test_a_config_that_is_no_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "config.json"
    file.write_text("{")
    assert plan.main(["--model", str(file)]) == 2
    assert "not JSON" in capsys.readouterr().err
    file.write_text(json.dumps({"model_type": "mamba"}))
    assert plan.main(["--model", str(file)]) == 2
    assert "model_type 'mamba' is not supported" in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]):
    help_of(PlanConfig, capsys)
