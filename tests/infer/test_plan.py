"""infer/plan.py: the best pipeline for a model on a machine, its prediction as text, JSON and picture, and errors."""

import io
import json
from pathlib import Path

import pytest
from PIL import Image

from infer import plan
from spd_jax.config.plan import PlanConfig
from spd_jax.models.presets import preset_names
from spd_jax.models.shapes import num_parameters
from spd_jax.plan import balanced_plan, make_plan
from spd_jax.planning.cost_model import memory_of_ranks, spd_cycle
from spd_jax.planning.costs import MachineCosts, Setting
from spd_jax.planning.machines import load_machine
from spd_jax.weights.load import read_config
from tests.config.help import help_of
from tests.fixtures import DATA
from tests.one_line import assert_one_clear_line

HYBRID = DATA / "tiny_qwen3_5" / "target"
QWEN = ["--target", "qwen3.5-4b", "--machine", "h100", "--devices", "9"]


def test_the_published_hybrid_in_eight_stages(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Report and JSON say what the cost model says of the plan that was asked for."""
    out = tmp_path / "new" / "plan.json"
    cut = ["--stages", "[8]", "--layout", "separate", "--num_draft_layers", "4", "--alphas", "[0.6, 0.8]"]
    assert plan.main([*QWEN, *cut, "--json", str(out)]) == 0
    model, machine = read_config("qwen3.5-4b"), load_machine("h100")
    costs = MachineCosts(Setting(draft_vocab=32000), machine)
    cycle = spd_cycle(model, make_plan(32, 8, num_draft_layers=4), costs)
    tree = json.loads(out.read_text())
    assert (tree["model"], tree["machine"], tree["devices"]) == ("qwen3.5-4b", "h100", 9)
    assert (tree["n"], tree["layout"], tree["num_draft_layers"]) == (8, "separate", 4)
    assert tree["stage_layers"] == [4] * 8
    assert tree["cycle_seconds"] == pytest.approx(cycle.seconds)
    assert sum(tree["parts"].values()) == pytest.approx(cycle.seconds)
    assert tree["bottleneck"] == cycle.bottleneck
    assert tree["memory_bytes_per_rank"] == list(cycle.memory)
    assert len(tree["memory_bytes_per_rank"]) == 9
    assert tree["tokens_per_second"]["0.8"] == pytest.approx(cycle.tokens_per_second(8, 0.8))
    assert tree["tokens_per_second"].keys() == {"0.6", "0.8"}
    for key, name in (
        ("autoregressive", "token_seconds"),
        ("tensor_parallel", "token_seconds"),
        ("published_layout", "cycle_seconds"),
    ):
        assert tree[key][name] > 0
    said = capsys.readouterr().out
    assert "gated delta net, MLP                        24  112,923,840" in said
    best = f"best pipeline at α 0.8: n = 8, separate, 4 draft layers; {tree['tokens_per_second']['0.8']:,.0f} tokens/s"
    assert best in said
    assert "fastest on these devices: tensor parallelism with a serial draft" in said
    assert "a rank scores 27,592 of 248,320 tokens for the target, 3,556 of 32,000 for the draft" in said
    assert "42 % padding" in said
    assert "less padding: --layout beside" in said
    assert f"wrote {out}" in said


def test_all_pipelines_that_the_devices_allow(capsys: pytest.CaptureFixture[str]):
    assert plan.main(["--target", "qwen3-8b", "--machine", "tpu-v5p", "--devices", "4"]) == 0
    lines = [line.strip("* ") for line in capsys.readouterr().out.splitlines()]
    found = [line[:16] for line in lines if line.startswith("n = ")]
    cuts = [(2, "separate"), (2, "beside"), (3, "separate"), (3, "beside"), (4, "beside")]
    assert [name.split() for name in found] == [["n", "=", str(n), layout] for n, layout in cuts]


def test_what_does_not_fit_is_marked_and_not_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "plan.json"
    arguments = ["--target", "llama-3.1-70b", "--machine", "h100", "--devices", "4", "--dtype", "float32"]
    assert plan.main([*arguments, "--json", str(out)]) == 0
    said = capsys.readouterr().out
    assert "its memory does not hold the weights" in said
    assert "! more than the 80 GB of a device" in said
    tree = json.loads(out.read_text())
    assert tree["fits"]
    assert max(tree["memory_bytes_per_rank"]) < 80e9


@pytest.mark.parametrize("name", preset_names())
def test_presets_have_the_published_sizes(name: str):
    layers = {"qwen3.5-4b": 32, "qwen3.5-9b": 32, "qwen3-8b": 36, "llama-3.1-8b": 32, "llama-3.1-70b": 80}
    assert read_config(name).num_layers == layers.get(name, 30)


def test_balance_where_kinds_differ(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Attention that costs five times a delta net: the cut moves, and the report says by how much."""
    model = read_config(HYBRID)
    attention = model.layers[3]
    monkeypatch.setattr(MachineCosts, "layer", lambda self, kind, rows, devices=1: 5e-3 if kind == attention else 1e-3)
    arguments = ["--target", str(HYBRID), "--stages", "[4]", "--layout", "separate", "--num_draft_layers", "1"]
    assert plan.main(arguments) == 0
    assert balanced_plan(
        [5.0 if kind == attention else 1.0 for kind in model.layers], 4, num_draft_layers=1, draft_layer_cost=5.0
    ).stage_layers == (3, 1, 3, 1)
    assert "[3, 1, 3, 1]; even ones [2, 2, 2, 2] would be 1.20 times as slow" in capsys.readouterr().out


@pytest.mark.slow
def test_measured_replayed_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """On simulated devices of this machine; a trace of infer/generate.py."""
    trace, picture, out = tmp_path / "trace.json", tmp_path / "plan.png", tmp_path / "plan.json"
    trace.write_text(json.dumps({"results": [{"verdicts": "paaarua"}, {"verdicts": "p"}]}))
    arguments = ["--target", str(DATA / "tiny_llama" / "target"), "--machine", "cpu", "--devices", "2"]
    arguments += ["--measure", "true"]
    arguments += ["--stages", "[2]", "--layout", "beside", "--num_draft_layers", "1", "--draft_vocabulary", "0"]
    arguments += ["--dtype", "float32", "--context", "32", "--replay", str(trace), "--plot", str(picture)]
    assert plan.main([*arguments, "--json", str(out)]) == 0
    said = capsys.readouterr().out
    assert "measured here" in said
    # the first token, after r and after u: two cycles each; one for each of the others
    assert "replayed: 1 answers, α 0.800, 6 tokens in 9 cycles" in said
    tree = json.loads(out.read_text())
    assert tree["measured"]
    assert tree["parts"]["compute"] == pytest.approx(sum(tree["rank_seconds"]))
    assert 1e-5 < tree["cycle_seconds"] < 1.0
    drawn = Image.open(io.BytesIO(picture.read_bytes())).convert("RGB")
    assert len(drawn.getcolors(10**6) or []) > 20


def test_memory_of_a_rank_is_what_its_layers_hold():
    """Used: every target layer once and the draft layers. Held: on each rank all slots, whoever needs them."""
    model = read_config(HYBRID)
    held, used = memory_of_ranks(make_plan(8, 4, num_draft_layers=2), model, 4)
    linear, attention = (4 * num_parameters(model.layers[index]) for index in (0, 3))
    assert used == [2 * attention, 2 * linear, linear + attention, 2 * linear, linear + attention]
    assert held == 2 * linear + 2 * attention


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--target", "nowhere"], "nowhere"),
        (["--target", str(HYBRID), "--stages", "[9]", "--devices", "10"], "8 layers cannot fill 9 stages"),
        (["--target", str(HYBRID), "--stages", "[9]"], "9 stages need at least 9 devices, 8 are to be used"),
        (["--target", str(HYBRID), "--stages", "[8]", "--layout", "separate"], "no plan fits on 8 devices"),
        (["--target", str(HYBRID), "--stages", "[1]"], "stages must be at least 2, found 1"),
        (["--target", str(HYBRID), "--context", "0"], "context must be at least 1"),
        (["--target", str(HYBRID), "--alphas", "[1.5]"], "alphas are shares from 0 to 1, found 1.5"),
        (["--target", str(HYBRID), "--alphas", "[]"], "alphas is empty"),
        (["--target", str(HYBRID), "--jitter", "1.0"], "jitter must lie in [0, 1)"),
        (["--target", str(HYBRID), "--measure", "true"], "these are CPUs, not h100: run it there, give --machine cpu"),
        (["--target", str(HYBRID), "--machine", "h900"], "no machine 'h900': known are h100"),
        (["--target", str(HYBRID), "--replay", "nowhere.jsonl"], "nowhere.jsonl"),
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
    assert plan.main(["--target", str(file)]) == 2
    assert "not valid JSON" in capsys.readouterr().err
    file.write_text(json.dumps({"model_type": "mamba"}))
    assert plan.main(["--target", str(file)]) == 2
    assert "model_type 'mamba' is not supported" in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]):
    help_of(PlanConfig, capsys)
