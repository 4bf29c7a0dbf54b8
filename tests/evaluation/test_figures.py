"""Figures over samples, against counts made by hand."""

import dataclasses

import pytest

from spd_jax.evaluation.figures import (
    ANSWER_EDGES,
    ANSWER_LABELS,
    CONTEXT_EDGES,
    CONTEXT_LABELS,
    figures,
    grouped,
    sample_figures,
    split,
    whole,
)
from spd_jax.evaluation.samples import Sample
from spd_jax.metrics import projected_accept_length

STAGES = 4


def answer(verdicts: str, prompt: int = 5, dataset: str = "set", category: str | None = "c", index: int = 0) -> Sample:
    """An answer of a chain: an accepted draft's successor costs one cycle, any other token's n."""
    cycles = [0]
    for before in verdicts[:-1]:
        cycles.append(cycles[-1] + (1 if before == "a" else STAGES))
    ids = tuple(range(len(verdicts)))
    return Sample(
        dataset, index, None, category, 1, (0,) * prompt, ids, None, verdicts, tuple(cycles)[: len(ids)], "length"
    )


SHORT, LONG = answer("paar"), answer("p" + "ar" * 60 + "u", prompt=100, dataset="other", category="d")


def test_one_answer_by_hand():
    found = sample_figures([SHORT], STAGES)
    assert (found["tokens"], found["decoded"], found["cycles"]) == (4, 3, 6)
    assert (found["accepted"], found["rejected"], found["undrafted"]) == (2, 1, 0)
    assert found["s0"] == found["s0_mean"] == pytest.approx(4 * 3 / 6)
    assert found["published_acceptance_rate"] == pytest.approx(4 / 6)
    assert found["published_s0_mean"] == pytest.approx(4 * 4 / 6)
    assert found["alpha"] == pytest.approx(2 / 3)
    assert found["s0_projected"] == projected_accept_length(STAGES, found["alpha"])


def test_pooled_and_mean_are_told_apart():
    """J06"""
    found = sample_figures([SHORT, LONG], STAGES)
    cycles = LONG.cycles
    assert found["s0"] == pytest.approx(4 * (3 + 121) / (6 + cycles))
    assert found["s0_mean"] == pytest.approx((2 + 4 * 121 / cycles) / 2)
    assert found["alpha"] == pytest.approx(62 / 123)
    assert found["alpha_mean"] == pytest.approx((2 / 3 + 1 / 2) / 2)
    assert (found["undrafted"], found["samples"]) == (1, 2)


def test_acceptance_by_context_length():
    """L04: acceptance decays with context; a token counts where its own context lies, prompt included."""
    decaying = answer("p" + "a" * 27 + "r" * 100 + "u", prompt=100)
    found = grouped([decaying], STAGES)["by_context"]
    assert list(found) == ["<128", "128-256"]
    assert (found["<128"]["accepted"], found["<128"]["rejected"], found["<128"]["decoded"]) == (27, 0, 27)
    assert (found["128-256"]["accepted"], found["128-256"]["rejected"], found["128-256"]["undrafted"]) == (0, 100, 1)
    assert (found["<128"]["alpha"], found["128-256"]["alpha"]) == (1.0, 0.0)
    assert found["<128"]["s0"] == pytest.approx(4 * 27 / (4 + 26))
    assert found["128-256"]["s0"] == pytest.approx(4 * 101 / (1 + 4 * 100))


def test_an_edge_belongs_to_the_bucket_above_it():
    parts = split(answer("paaa", prompt=126), lambda place: 126 + place, CONTEXT_EDGES)
    assert [part.decoded for part in parts[:2]] == [1, 2]  # contexts 127 | 128, 129
    assert len(CONTEXT_LABELS) == len(CONTEXT_EDGES) + 1 == len(parts)
    places = grouped([answer("p" + "a" * 256)], STAGES)["by_place"]
    assert {name: found["decoded"] for name, found in places.items()} == {
        "2-16": 15, "17-32": 16, "33-64": 32, "65-128": 64, "129-256": 128, ">256": 1,
    }  # fmt: skip
    assert len(ANSWER_LABELS) == len(ANSWER_EDGES) + 1


def test_buckets_add_up_to_the_whole():
    samples = [SHORT, LONG, answer("p"), answer("", prompt=600)]
    found = grouped(samples, STAGES)
    for cut in ("by_context", "by_place"):
        for name in ("decoded", "cycles", "accepted", "rejected", "undrafted"):
            assert sum(of_bucket[name] for of_bucket in found[cut].values()) == found["overall"][name]
    assert found["overall"]["samples"] == 4
    assert found["overall"]["tokens"] == 4 + 122 + 1


def test_answers_of_a_token_or_none_claim_no_s0():
    found = grouped([answer("p"), answer("")], STAGES)
    for part in (found["overall"], found["mean_of_datasets"], *found["by_dataset"].values()):
        assert {part[name] for name in part if "s0" in name or "rate" in name} == {None}
    with_others = grouped([SHORT, answer("p"), dataclasses.replace(answer("p"), dataset="empty")], STAGES)
    assert with_others["overall"]["s0"] == with_others["mean_of_datasets"]["s0"] == pytest.approx(4 * 3 / 6)
    assert with_others["by_dataset"]["empty"]["s0"] is None


def test_data_sets_weigh_the_same_in_their_mean():
    found = grouped([SHORT, SHORT, LONG], STAGES)
    assert list(found["by_dataset"]) == ["set", "other"]
    for name in ("s0", "s0_mean", "alpha", "published_acceptance_rate_mean"):
        mean = (found["by_dataset"]["set"][name] + found["by_dataset"]["other"][name]) / 2
        assert found["mean_of_datasets"][name] == pytest.approx(mean)
    assert "tokens" not in found["mean_of_datasets"]
    assert {name: list(of_set) for name, of_set in found["by_category"].items()} == {"set": ["c"], "other": ["d"]}


def test_one_name_of_two_categories_stays_two():
    found = grouped([answer("pa", dataset="one", category="math"), answer("pr", dataset="two", category="math")], 4)
    assert [found["by_category"][name]["math"]["alpha"] for name in ("one", "two")] == [1.0, 0.0]
    assert grouped([answer("pa", category=None)], 4)["by_category"] == {"set": {}}


def test_nothing_counted_gives_zeros_and_no_rates():
    found = figures([whole(answer("p")), whole(answer(""))], STAGES)
    rates = {"acceptance_rate", "acceptance_rate_mean", "s0", "s0_mean"}
    assert {name for name, value in found.items() if value is None} == rates
    assert {value for name, value in found.items() if name not in rates} == {0}
    nothing = grouped([], STAGES)
    assert (nothing["by_dataset"], nothing["by_context"], nothing["mean_of_datasets"]) == ({}, {}, {})
