"""Metrics: the numbers of known cases, each labelled with what it counts."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest

from spd_jax import metrics
from spd_jax.metrics import acceptance_rates, expected_cycles

DOCUMENT = Path(__file__).parents[1] / "docs" / "metrics.md"


def test_prefill_token_counts_only_in_the_published_rate():
    cycles = expected_cycles(16, 4, 0, 14)  # J07: no draft is ever right
    assert cycles == 60
    s0 = [
        metrics.equivalent_accept_length(4, rate(16, cycles))
        for rate in (metrics.acceptance_rate, metrics.published_acceptance_rate)
    ]
    assert s0 == [pytest.approx(1.0), pytest.approx(1.0667, abs=1e-4)]


def test_pooled_and_mean_differ_and_are_labelled():
    rates = acceptance_rates([(10, 10), (100, 400)], num_stages=4)  # J06
    assert rates.published_s0.pooled == pytest.approx(4 * 110 / 410)
    assert rates.published_s0.mean == pytest.approx(2.5)
    assert rates.published_rate.pooled == pytest.approx(110 / 410)
    assert rates.rate.pooled == pytest.approx(108 / 410)
    assert rates.rate.mean == pytest.approx((9 / 10 + 99 / 400) / 2)
    assert rates.s0.pooled == pytest.approx(4 * 108 / 410)
    assert rates.s0.mean == pytest.approx(4 * rates.rate.mean)


def test_one_sample_has_one_rate():
    rates = acceptance_rates([(16, 60)], num_stages=4)
    assert (rates.s0.pooled, rates.s0.mean) == (pytest.approx(1.0), pytest.approx(1.0))


def test_samples_without_cycles_count_nowhere():
    assert acceptance_rates([(1, 0), (16, 60)], 4) == acceptance_rates([(16, 60)], 4)
    nothing = metrics.Rates(None, None)
    assert acceptance_rates([], 4) == metrics.AcceptanceRates(nothing, nothing, nothing, nothing)
    found = (metrics.acceptance_rate(1, 0), metrics.acceptance_rate(0, 0), metrics.published_acceptance_rate(1, 0))
    assert found == (None, None, None)
    assert metrics.equivalent_accept_length(4, None) is None


def test_alpha_counts_tested_drafts_only():
    assert metrics.alpha(3, 1) == 0.75
    assert metrics.alpha(0, 0) == 0.0


@pytest.mark.parametrize(
    ("tokens", "stages", "accepted", "rejected", "cycles"),
    [
        (0, 4, 0, 0, 0),
        (1, 4, 0, 0, 0),
        (2, 4, 0, 0, 4),
        (16, 4, 14, 0, 18),  # G03: N + n - 2
        (16, 4, 0, 14, 60),  # G04: n (N - 1)
        (16, 1, 0, 0, 15),  # nothing is drafted
        (80, 4, 48, 30, 4 + 48 + 120),
    ],
)
def test_expected_cycles(tokens: int, stages: int, accepted: int, rejected: int, cycles: int):
    assert expected_cycles(tokens, stages, accepted, rejected) == cycles


def test_expected_cycles_refuses_counts_that_cannot_be():
    with pytest.raises(ValueError, match=r"16 tokens have 14 verdicts among tokens 2..15, found 15 accepted and 0"):
        expected_cycles(16, 4, 15, 0)


def test_projection_is_the_limit_of_the_cycle_count():
    for stages, share in itertools.product((2, 4, 8), (0.0, 0.3, 0.9, 1.0)):
        tokens = 1_000_002
        accepted = round(share * (tokens - 2))
        cycles = expected_cycles(tokens, stages, accepted, tokens - 2 - accepted)
        s0 = metrics.equivalent_accept_length(stages, metrics.acceptance_rate(tokens, cycles))
        assert s0 == pytest.approx(metrics.projected_accept_length(stages, share), rel=1e-4)
    assert metrics.projected_accept_length(1, 0.3) == 1.0


def test_eagle_tau_includes_the_targets_own_token():
    assert metrics.eagle_tau([3, 0, 1]) == pytest.approx(7 / 3)  # J01
    assert metrics.alpha(4, 5) == pytest.approx(4 / 9)  # beside it: accepted among the 9 drafted
    assert metrics.eagle_tau([]) == 0.0


def test_simulated_tau_is_the_expected_length_of_a_serial_draft():
    assert metrics.simulated_tau([0.8, 0.5, 0.5]) == pytest.approx(2.4)  # J08
    right = np.random.default_rng(0).random((200_000, 3)) < [0.8, 0.5, 0.5]
    assert metrics.eagle_tau(np.cumprod(right, axis=1).sum(axis=1).tolist()) == pytest.approx(2.4, abs=0.01)


def test_every_metric_is_in_the_table():
    rows = re.findall(r"^\| (.+) \| (.+) \| (.+) \| `(\w+)` \|$", DOCUMENT.read_text(), flags=re.MULTILINE)  # J05
    public = {name for name, value in vars(metrics).items() if callable(value) and not name.startswith("_")}
    imported = {"Sequence"}
    assert {function for *_, function in rows} >= public - imported - {"Rates", "AcceptanceRates"}
    assert all(symbol.strip() and formula.strip() and unit.strip() for symbol, formula, unit, _ in rows)
