"""Figures over samples: overall, by data set and category, by context length, and by place in the answer.

docs/metrics.md says what each figure means. Ratios are pooled (sums first, then divided) unless the name says mean
(over samples, each weighing the same). A token's context is the number of tokens before it, prompt included: its
position. Its cycles are those since the token before it. Knows neither decoders nor files.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from spd_jax.evaluation.samples import Sample
from spd_jax.generation.verdicts import NO_DRAFT, RIGHT, WRONG
from spd_jax.metrics import acceptance_rates, alpha, projected_accept_length

CONTEXT_EDGES = (128, 256, 512, 1024, 4096)
CONTEXT_LABELS = ("<128", "128-256", "256-512", "512-1k", "1k-4k", ">=4k")
"""Buckets of positions; a bucket holds its lower edge and not its upper one."""

ANSWER_EDGES = (17, 33, 65, 129, 257)
ANSWER_LABELS = ("2-16", "17-32", "33-64", "65-128", "129-256", ">256")
"""Buckets of places in the answer, counted from 1 and both ends included; token 1 comes from prefill."""


@dataclasses.dataclass(frozen=True)
class Part:
    """Some tokens of one answer, without the one from prefill: how many, their cycles and their verdicts."""

    decoded: int
    cycles: int
    accepted: int
    rejected: int
    undrafted: int


def whole(sample: Sample) -> Part:
    """All of an answer."""
    count = sample.verdicts.count
    return Part(max(len(sample.ids) - 1, 0), sample.cycles, count(RIGHT), count(WRONG), count(NO_DRAFT))


def split(sample: Sample, value: Callable[[int], int], edges: Sequence[int]) -> list[Part]:
    """An answer cut into buckets, one more than edges.

    Args:
        value: of a token (counted from 0, the one from prefill is not asked for) what the edges cut.
    """
    places: list[list[int]] = [[] for _ in range(len(edges) + 1)]
    for place in range(1, len(sample.ids)):
        places[bisect.bisect_right(edges, value(place))].append(place)
    spent = [after - before for before, after in zip((0, *sample.token_cycles), sample.token_cycles, strict=False)]
    parts = []
    for bucket in places:
        letters = [sample.verdicts[place] for place in bucket]
        cycles = sum(spent[place] for place in bucket)
        parts.append(Part(len(bucket), cycles, *(letters.count(letter) for letter in (RIGHT, WRONG, NO_DRAFT))))
    return parts


def figures(parts: Iterable[Part], num_stages: int) -> dict[str, Any]:
    """Counts and ratios over parts of answers; parts without tokens count nowhere.

    Rates and S0 are None where no part has tokens.
    """
    used = [part for part in parts if part.decoded]
    accepted, rejected = sum(part.accepted for part in used), sum(part.rejected for part in used)
    judged = [part for part in used if part.accepted + part.rejected]
    rates = acceptance_rates([(part.decoded + 1, part.cycles) for part in used], num_stages)
    return {
        "samples": len(used),
        "decoded": sum(part.decoded for part in used),
        "cycles": sum(part.cycles for part in used),
        "accepted": accepted,
        "rejected": rejected,
        "undrafted": sum(part.undrafted for part in used),
        "s0": rates.s0.pooled,
        "s0_mean": rates.s0.mean,
        "acceptance_rate": rates.rate.pooled,
        "acceptance_rate_mean": rates.rate.mean,
        "alpha": alpha(accepted, rejected),
        "alpha_mean": sum(alpha(part.accepted, part.rejected) for part in judged) / max(len(judged), 1),
    }


def sample_figures(samples: Sequence[Sample], num_stages: int) -> dict[str, Any]:
    """Figures of whole answers, with those that only they have: N / K as published, and S0 projected from alpha."""
    found = figures(map(whole, samples), num_stages)
    published = acceptance_rates([(len(sample.ids), sample.cycles) for sample in samples], num_stages)
    return found | {
        "samples": len(samples),
        "tokens": sum(len(sample.ids) for sample in samples),
        "published_acceptance_rate": published.published_rate.pooled,
        "published_acceptance_rate_mean": published.published_rate.mean,
        "published_s0": published.published_s0.pooled,
        "published_s0_mean": published.published_s0.mean,
        "s0_projected": None if found["s0"] is None else projected_accept_length(num_stages, found["alpha"]),
    }


def grouped(samples: Sequence[Sample], num_stages: int) -> dict[str, Any]:
    """All figures of one head.

    `overall`; `mean_of_datasets` (each data set weighs the same, as in published tables); `by_dataset`; `by_category`
    (of each data set, since two may use one name); `by_context` and `by_place` by their labels, without empty buckets.
    """
    by_dataset = {
        name: sample_figures([s for s in samples if s.dataset == name], num_stages)
        for name in dict.fromkeys(sample.dataset for sample in samples)
    }
    by_category: dict[str, dict[str, Any]] = {name: {} for name in by_dataset}
    for name, category in dict.fromkeys((s.dataset, s.category) for s in samples if s.category is not None):
        chosen = [s for s in samples if (s.dataset, s.category) == (name, category)]
        by_category[name][category] = sample_figures(chosen, num_stages)
    means = [name for name in next(iter(by_dataset.values()), {}) if name not in _COUNTS]
    return {
        "overall": sample_figures(samples, num_stages),
        "mean_of_datasets": {name: _mean([found[name] for found in by_dataset.values()]) for name in means},
        "by_dataset": by_dataset,
        "by_category": by_category,
        "by_context": _buckets(
            samples, num_stages, CONTEXT_EDGES, CONTEXT_LABELS, lambda s, place: len(s.prompt_ids) + place
        ),
        "by_place": _buckets(samples, num_stages, ANSWER_EDGES, ANSWER_LABELS, lambda s, place: place + 1),
    }


def _mean(values: Sequence[float | None]) -> float | None:
    """Of those that there are; None if there are none."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


_COUNTS = ("samples", "tokens", "decoded", "cycles", "accepted", "rejected", "undrafted")


def _buckets(
    samples: Sequence[Sample],
    num_stages: int,
    edges: Sequence[int],
    labels: Sequence[str],
    value: Callable[[Sample, int], int],
) -> dict[str, Any]:
    cut = [split(sample, lambda place, sample=sample: value(sample, place), edges) for sample in samples]
    found = {label: figures([parts[i] for parts in cut], num_stages) for i, label in enumerate(labels)}
    return {label: of_bucket for label, of_bucket in found.items() if of_bucket["samples"]}
