"""The tables and the picture of an evaluation, from trees made by hand."""

import io
from typing import Any

import pytest
from PIL import Image

from spd_jax.evaluation.figures import grouped
from spd_jax.evaluation.picture import draw_acceptance
from spd_jax.evaluation.report import differs, tables
from spd_jax.evaluation.samples import Sample

SETTINGS = {"target": "models/tiny", "devices": "5 devices (simulated)", "batch": 2, "max_new_tokens": 64}
SETTINGS |= {"temperature": 0.0}
TIMES = {"prefill_seconds": 1.0, "decode_seconds": 10.0, "tokens_per_second": 5.0}
EXACT = {"equal": 2, "compared": 2, "near_ties": 0, "errors": 0}


def answer(dataset: str, verdicts: str, prompt: int, index: int, category: str = "all") -> Sample:
    cycles = [0]
    for before in verdicts[:-1]:
        cycles.append(cycles[-1] + (1 if before == "a" else 4))
    ids = tuple(range(len(verdicts)))
    return Sample(dataset, index, None, category, 1, (0,) * prompt, ids, None, verdicts, tuple(cycles), "length")


def tree(heads: int = 2, datasets: tuple[str, ...] = ("gsm8k", "mt_bench"), **changes: Any) -> dict[str, Any]:
    decoders = {}
    for number in range(heads):
        samples = [
            answer(name, "p" + ("a" * (number + 1) + "r") * 15, 90 + 200 * place, place, f"kind {place}")
            for name in datasets
            for place in range(2)
        ]
        decoders[f"head-{number}"] = {
            **grouped(samples, 4), "finish_reasons": {"length": 4}, "exact": dict(EXACT), "times": dict(TIMES),
        }  # fmt: skip
    plain = {"tokens": 100, **TIMES, "tokens_per_second": 20.0}
    whole = {"settings": dict(SETTINGS), "num_stages": 4, "simulated": True, "missing": 0, "decoders": decoders}
    return whole | {"autoregressive": plain} | changes


def row(text: str, *words: str) -> list[str]:
    """The cells of the first line that holds these words."""
    return next(line for line in text.splitlines() if all(word in line for word in words)).split()


def test_the_tables_say_what_is_pooled_and_what_is_a_mean():
    found, text = tree(), tables(tree())
    overall = found["decoders"]["head-0"]["overall"]
    cells = row(text, "all, pooled")
    assert cells == [
        "all,", "pooled", "4", str(overall["tokens"]), str(overall["cycles"]), f"{overall['s0']:.2f}",
        f"{overall['s0_mean']:.2f}", f"{overall['acceptance_rate']:.3f}",
        f"{overall['published_acceptance_rate_mean']:.3f}", "0.500", "0.500", "0",
    ]  # fmt: skip
    assert row(text, "mean of sets")[:3] == ["mean", "of", "sets"]
    assert "S0 and alpha are pooled (sums first, then divided) unless they say mean" in text
    assert max(map(len, text.split("head-0: ids")[0].splitlines())) <= 116


def test_context_lengths_and_places_are_rows():
    """L04: acceptance by context length."""
    text = tables(tree())
    assert row(text, "<128", "head-0")[:4] == ["head-0", "<128", "2", "60"]
    assert row(text, "256-512")[:3] == ["256-512", "2", "60"]
    assert row(text, "2-16", "head-0")[:4] == ["head-0", "2-16", "4", "60"]
    assert "gsm8k: kind 1" in text
    assert "By category" not in tables(tree(datasets=()))


def test_times_are_labelled_as_simulated_beside_one_device():
    text = tables(tree())
    assert row(text, "head-0", "simulated", "5.0")[-2:] == ["5.0", "0.25"]
    assert row(text, "autoregressive", "1 device")[-2:] == ["20.0", "1.00"]
    assert "they share this machine's cores, so wall-clock time cannot beat" in text
    real = tables(tree(simulated=False, autoregressive=None))
    assert "share this machine" not in real
    assert "autoregressive  " not in real


def test_differences_and_near_ties_are_counted():
    found = tree()
    found["decoders"]["head-1"]["exact"] = {"equal": 5, "compared": 8, "near_ties": 2, "errors": 1}
    text = tables(found)
    assert "head-0: ids equal to autoregressive decoding: 2 of 2\n" in text
    assert "head-1: ids equal to autoregressive decoding: 5 of 8, 2 near-ties (rounding decides there" in text
    assert "1 differ without reason: this is an error" in text
    assert differs(found)
    assert not differs(tree())


def test_what_is_not_there_is_said():
    found = tree(missing=3)
    found["decoders"]["head-0"]["finish_reasons"] = {"length": 2, "context": 2}
    found["settings"]["temperature"] = 1.0
    text = tables(found)
    assert "3 answers are missing: run the same command again" in text
    assert "had no room, without an answer: 2 of head-0." in text
    assert "Sampled answers are not compared" in text
    assert "temperature 1" in text


def test_long_names_do_not_break_the_tables():
    found = tree()
    found["decoders"] = {name * 8: decoder for name, decoder in found["decoders"].items()}
    text = tables(found)
    assert max(map(len, text.split("Wall-clock")[0].splitlines())) <= 132
    assert row(text, "all, pooled")[:2] == ["all,", "pooled"]


@pytest.mark.parametrize(
    ("heads", "datasets"), [(1, ("one",)), (2, ("gsm8k", "mt_bench")), (7, ("a", "b" * 40, "c", "d", "e"))]
)
def test_the_picture_grows_with_heads_and_data_sets(heads: int, datasets: tuple[str, ...]):
    found = tree(heads, datasets)
    found["decoders"] = {f"{name} $x_1$": decoder for name, decoder in found["decoders"].items()}
    picture = Image.open(io.BytesIO(draw_acceptance(found))).convert("RGB")
    assert 1000 <= picture.width <= 4000
    assert 400 <= picture.height <= 700
    assert len(picture.getcolors(10**6) or []) > 20


def test_a_picture_of_nothing_decoded_is_still_a_picture():
    found = tree()
    for decoder in found["decoders"].values():
        decoder.update(grouped([answer("set", "p", 5, 0)], 4))
    assert draw_acceptance(found).startswith(b"\x89PNG")
