"""The report: what the summary and the JSON say, and that a file is written whole or not at all."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from spd_jax.decode.options import SequenceResult, Token
from spd_jax.decode.state import ACCEPTED, REJECTED, UNDRAFTED
from spd_jax.generation.compare import Comparison
from spd_jax.generation.report import Facts, Outcome, Report, prepare_output, write_json

FACTS = Facts("model", "head", (2, 2, 2, 2), "separate", 3, 5, True, "float32", True)


def sequence(verdicts: list[int], cycles: list[int]) -> SequenceResult:
    tokens = [Token(0, 0, UNDRAFTED, -0.5)]
    tokens += [Token(i, k, event, -0.5) for i, (event, k) in enumerate(zip(verdicts, cycles, strict=True), start=1)]
    return SequenceResult([7, 8], tokens, [], "length")


def outcome(comparison: Comparison | None = None, *, plain: bool = True) -> Outcome:
    result = sequence([ACCEPTED, REJECTED, ACCEPTED], [4, 5, 9])
    return Outcome(result, "text", 0.5, 2.0, result if plain else None, 1.0, comparison)


def report(*outcomes: Outcome, **changes: object) -> Report:
    times = tuple((0.5, 2.0) for _ in outcomes)
    plain = tuple((0.25, 1.0) for o in outcomes if o.reference is not None)
    return Report(dataclasses.replace(FACTS, **changes), outcomes, times, plain)


def test_one_prompt_in_json():
    tree = report(outcome(Comparison())).tree()
    (record,) = tree["results"]
    assert record == {
        "prompt_ids": [7, 8],
        "ids": [0, 1, 2, 3],
        "text": "text",
        "finish_reason": "length",
        "cycles": 9,
        "accepted": 2,
        "rejected": 1,
        "verdicts": "para",
        "acceptance_rate": 3 / 9,
        "s0": 4 * 3 / 9,
        "prefill_seconds": 0.5,
        "decode_seconds": 2.0,
        "autoregressive": {"ids": [0, 1, 2, 3], "decode_seconds": 1.0},
        "equal": True,
    }
    summary = tree["summary"]
    assert (summary["tokens"], summary["cycles"], summary["accepted"], summary["rejected"]) == (4, 9, 2, 1)
    assert (summary["acceptance_rate"], summary["published_acceptance_rate"], summary["s0"]) == (3 / 9, 4 / 9, 12 / 9)
    assert summary["tokens_per_second"] == 3 / 2.0
    assert summary["autoregressive"] == {
        "tokens": 4,
        "prefill_seconds": 0.25,
        "decode_seconds": 1.0,
        "tokens_per_second": 3.0,
    }
    assert summary["equal"] is True


def test_without_comparison_the_keys_stay():
    tree = report(outcome(plain=False)).tree()
    assert tree["summary"]["autoregressive"] is tree["results"][0]["autoregressive"] is None
    assert tree["summary"]["equal"] is tree["results"][0]["equal"] is None
    assert "equal to autoregressive" not in report(outcome(plain=False)).text()


def test_rates_of_several_prompts_are_pooled_and_mean():
    long = Outcome(sequence([ACCEPTED] * 19, list(range(4, 23))), "", 0.5, 2.0)
    summary = report(outcome(plain=False), long).summary()
    assert summary["acceptance_rate"] == pytest.approx((3 + 19) / (9 + 22))
    assert summary["acceptance_rate_mean"] == pytest.approx((3 / 9 + 19 / 22) / 2)
    text = report(outcome(plain=False), long).text()
    assert "pooled" in text
    assert f"mean of the prompts: {4 * (3 / 9 + 19 / 22) / 2:.2f}" in text


def test_a_near_tie_is_reported_with_its_margin_and_is_no_error():
    found = report(outcome(Comparison()), outcome(Comparison(2, 3.1e-5, near_tie=True)))
    assert (found.equal, found.differs, found.summary()["near_ties"]) == (False, False, 1)
    assert "equal to autoregressive: no" in found.text()
    assert "prompt 2: near-tie: the ids part at token 3, where the lower of the two logits is 3.1e-05" in found.text()
    assert found.tree()["results"][1]["difference"] == {"index": 2, "margin": 3.1e-5, "near_tie": True}


@pytest.mark.parametrize("comparison", [Comparison(1, 0.5), Comparison(1), Comparison(1, float("inf"))])
def test_any_other_difference_is_an_error(comparison: Comparison):
    found = report(outcome(comparison))
    assert found.differs
    assert "this is an error" in found.text()
    json.dumps(found.tree(), allow_nan=False)


def test_what_simulated_devices_cannot_show_is_said_in_one_sentence():
    sentences = [line for line in report(outcome(Comparison())).text().splitlines() if "simulated" in line]
    assert len(sentences) == 1
    assert "share this machine's cores" in sentences[0]
    assert "S0 = 1.33" in sentences[0]
    assert "simulated" not in report(outcome(Comparison()), simulated=False).text()


def test_sampled_texts_are_not_compared():
    assert "not compared" in report(outcome(), greedy=False).text()


def test_a_text_of_one_token_has_no_rate():
    single = Outcome(sequence([], []), "x", 0.1, 0.0)
    nothing = dataclasses.replace(single, result=SequenceResult([1], finish_reason="length"))
    for outcomes in ([single], [nothing], [single, nothing]):
        found = report(*outcomes)
        summary = found.summary()
        assert (summary["cycles"], summary["tokens_per_second"]) == (0, 0)
        for name in ("acceptance_rate", "s0", "published_acceptance_rate"):
            assert (summary[name], summary[f"{name}_mean"]) == (None, None)
        assert {record["s0"] for record in found.tree()["results"]} == {None}
        assert "S0 -, end" in outcomes[0].line(4)
        assert re.search(r"^S0 +-  ", found.text(), re.MULTILINE)
        assert "S0 =" not in found.text()
        assert "share this machine's cores." in found.text() or "decoding here." in found.text()
    counted = report(single, outcome()).summary()
    assert (counted["s0"], counted["s0_mean"]) == (12 / 9, 12 / 9)


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path):
    path = tmp_path / "out.json"
    write_json(path, {"a": "世"})
    assert path.read_text(encoding="utf-8") == '{"a": "世"}\n'
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"a": float("nan")})
    assert json.loads(path.read_text(encoding="utf-8")) == {"a": "世"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.json"]


def test_an_output_needs_a_place(tmp_path: Path):
    prepare_output(tmp_path / "new" / "folder" / "out.json")
    assert (tmp_path / "new" / "folder").is_dir()
    with pytest.raises(IsADirectoryError, match="is a folder"):
        prepare_output(tmp_path)
