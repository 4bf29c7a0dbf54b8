"""Interleaved timing: every round runs each measured thing once, so that a drifting machine hits all alike."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Timed:
    """One thing to measure: `prepare` (untimed) makes arguments for `run`; a run does `count` units of work."""

    name: str
    run: Callable[..., Any]
    count: int = 1
    prepare: Callable[[], tuple[Any, ...]] = tuple


def interleave(things: list[Timed], rounds: int) -> dict[str, list[float]]:
    """Milliseconds a unit of every thing in every round; a first round, not counted, compiles."""
    found: dict[str, list[float]] = {thing.name: [] for thing in things}
    for index in range(rounds + 1):
        for thing in things:
            arguments = jax.block_until_ready(thing.prepare())
            start = time.perf_counter()
            jax.block_until_ready(thing.run(*arguments))
            if index:
                found[thing.name].append((time.perf_counter() - start) / thing.count * 1e3)
    return found


def median(values: list[float]) -> float:
    """Median of one thing's rounds."""
    return statistics.median(values)


def ratio(above: list[float], *below: list[float]) -> float:
    """Median over the rounds of one thing over the sum of others, round by round."""
    return statistics.median(a / sum(b) for a, b in zip(above, zip(*below, strict=True), strict=True))
