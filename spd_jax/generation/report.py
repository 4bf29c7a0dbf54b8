"""What a generation run has to say: the summary for a reader, and the same for a program as JSON.

Counts and times come in, text and dictionaries go out; docs/metrics.md says what each figure means. Rates over several
prompts are pooled unless the name says mean. Times of a batch belong to all its prompts, so sums are over batches.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spd_jax.decode.options import Generation, SequenceResult
from spd_jax.files import write_whole
from spd_jax.generation.compare import Comparison
from spd_jax.generation.tree_counts import tree_counts
from spd_jax.generation.verdicts import verdicts_of
from spd_jax.metrics import acceptance_rate, acceptance_rates, alpha, equivalent_accept_length


@dataclasses.dataclass(frozen=True)
class Facts:
    """What does not depend on the prompts. `warm_up_seconds` went into compiling, before anything was timed."""

    target: str
    head: str
    stage_layers: tuple[int, ...]
    layout: str
    num_draft_layers: int
    devices: int
    simulated: bool
    dtype: str
    greedy: bool
    width: int = 1
    warm_up_seconds: float = 0.0

    @property
    def num_stages(self) -> int:
        """n"""
        return len(self.stage_layers)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One prompt: its result, its batch's times, and the autoregressive counterpart where there is one."""

    result: SequenceResult
    text: str | None
    prefill_seconds: float
    decode_seconds: float
    reference: SequenceResult | None = None
    reference_decode_seconds: float = 0.0
    comparison: Comparison | None = None

    @property
    def equal(self) -> bool | None:
        """Whether the ids equal the autoregressive ones; None where they were not compared."""
        return None if self.comparison is None else self.comparison.equal

    def rate(self) -> float | None:
        """Acceptance rate (N - 1) / K; None for no token or one."""
        return acceptance_rate(len(self.result.ids), self.result.cycles)

    def record(self, num_stages: int, width: int, *, log_probs: bool) -> dict[str, Any]:
        """The entry of `results` in the JSON file."""
        result = self.result
        record: dict[str, Any] = {
            "prompt_ids": result.prompt_ids,
            "ids": result.ids,
            "text": self.text,
            "finish_reason": result.finish_reason,
            "cycles": result.cycles,
            "accepted": result.accepted,
            "rejected": result.rejected,
            "verdicts": verdicts_of(result),
            "acceptance_rate": self.rate(),
            "s0": equivalent_accept_length(num_stages, self.rate()),
            "prefill_seconds": self.prefill_seconds,
            "decode_seconds": self.decode_seconds,
            "autoregressive": None,
            "equal": self.equal,
        }
        if self.reference is not None:
            record["autoregressive"] = {
                "ids": self.reference.ids,
                "decode_seconds": self.reference_decode_seconds,
            }
        if width > 1:
            record["tree"] = dataclasses.asdict(tree_counts([result], width))
        if log_probs:
            record["log_probs"] = [token.log_prob for token in result.tokens]
        if self.comparison is not None and not self.comparison.equal:
            record["difference"] = self.comparison.record()
        return record

    def line(self, num_stages: int) -> str:
        """One line under the text of a prompt."""
        result, rate = self.result, self.rate()
        counts = f"{counted(len(result.ids), 'token')} in {counted(result.cycles, 'cycle')}"
        verdicts = f"accepted {result.accepted}, rejected {result.rejected}"
        s0 = shown(equivalent_accept_length(num_stages, rate))
        line = f"{counts}, {verdicts}, S0 {s0}, end: {result.finish_reason}"
        return line if self.equal is None else f"{line}, equal to autoregressive: {'yes' if self.equal else 'no'}"


@dataclasses.dataclass(frozen=True)
class Report:
    """A finished run; `batches` and `reference_batches` are (prefill seconds, decode seconds) of each batch."""

    facts: Facts
    outcomes: tuple[Outcome, ...]
    batches: tuple[tuple[float, float], ...]
    reference_batches: tuple[tuple[float, float], ...] = ()
    log_probs: bool = False

    @property
    def equal(self) -> bool | None:
        """Whether all ids equal the autoregressive ones; None where they were not compared."""
        compared = [outcome.equal for outcome in self.outcomes]
        return None if not compared or None in compared else all(compared)

    @property
    def differs(self) -> bool:
        """Whether some ids differ from the autoregressive ones and no near-tie explains it: an error."""
        comparisons = [outcome.comparison for outcome in self.outcomes if outcome.comparison is not None]
        return any(not comparison.equal and not comparison.near_tie for comparison in comparisons)

    def summary(self) -> dict[str, Any]:
        """The `summary` of the JSON file."""
        results = [outcome.result for outcome in self.outcomes]
        n = self.facts.num_stages
        rates = acceptance_rates([(len(r.ids), r.cycles) for r in results], n)
        accepted, rejected = sum(r.accepted for r in results), sum(r.rejected for r in results)
        summary: dict[str, Any] = {
            "prompts": len(results),
            "tokens": sum(len(r.ids) for r in results),
            "cycles": sum(r.cycles for r in results),
            "accepted": accepted,
            "rejected": rejected,
            "undrafted": sum(r.undrafted for r in results),
            "alpha": alpha(accepted, rejected),
            "acceptance_rate": rates.rate.pooled,
            "acceptance_rate_mean": rates.rate.mean,
            "published_acceptance_rate": rates.published_rate.pooled,
            "published_acceptance_rate_mean": rates.published_rate.mean,
            "s0": rates.s0.pooled,
            "s0_mean": rates.s0.mean,
            **_times(self.batches, results),
            "autoregressive": None,
            "equal": self.equal,
            "near_ties": sum(o.comparison is not None and o.comparison.near_tie for o in self.outcomes),
            **dataclasses.asdict(self.facts),
            "num_stages": n,
        }
        if self.facts.width > 1:
            summary["tree"] = dataclasses.asdict(tree_counts(results, self.facts.width))
        references = [outcome.reference for outcome in self.outcomes if outcome.reference is not None]
        if references:
            summary["autoregressive"] = {
                "tokens": sum(len(r.ids) for r in references),
                **_times(self.reference_batches, references),
            }
        return summary

    def tree(self) -> dict[str, Any]:
        """The whole JSON file."""
        n = self.facts.num_stages
        return {
            "summary": self.summary(),
            "results": [o.record(n, self.facts.width, log_probs=self.log_probs) for o in self.outcomes],
        }

    def text(self) -> str:
        """The summary for a reader."""
        s, facts = self.summary(), self.facts
        baseline = s["autoregressive"]
        lines = [f"{'':17}{'speculative':>12}" + (f"{'autoregressive':>17}" if baseline else "")]
        for name, key in (
            ("tokens", "tokens"),
            ("prefill seconds", "prefill_seconds"),
            ("decode seconds", "decode_seconds"),
            ("tokens/s", "tokens_per_second"),
        ):
            kind = "d" if key == "tokens" else ".2f"
            lines.append(f"{name:17}{s[key]:>12{kind}}" + (f"{baseline[key]:>17{kind}}" if baseline else ""))
        several = len(self.outcomes) > 1
        verdicts = f"{s['accepted']} accepted, {s['rejected']} rejected, {s['undrafted']} undrafted"
        lines += [
            f"{'cycles':17}{s['cycles']:>12}   {verdicts} (alpha {s['alpha']:.3f})",
            f"{'acceptance rate':17}{shown(s['acceptance_rate'], 3):>12}   (N - 1) / K{', pooled' if several else ''}; "
            f"as published, N / K{', mean' if several else ''}: "
            f"{shown(s['published_acceptance_rate_mean'], 3)}",
            f"{'S0':17}{shown(s['s0']):>12}   n (N - 1) / K, n = {counted(facts.num_stages, 'stage')}"
            + (f"{', pooled'}; mean of the prompts: {shown(s['s0_mean'])}" if several else ""),
        ]
        if facts.width > 1:
            lines.append(
                f"{'branches':17}{facts.width:>12}   {tree_counts([o.result for o in self.outcomes], facts.width)}"
            )
        return "\n".join([*lines, "", *self._verdict(s)])

    def _verdict(self, summary: dict[str, Any]) -> list[str]:
        """Whether the ids are equal, where they part, and what the times are worth."""
        lines = []
        if self.equal is not None:
            lines.append(f"equal to autoregressive: {'yes' if self.equal else 'no'}")
        elif summary["autoregressive"] and not self.facts.greedy:
            lines.append("equal to autoregressive: not compared, sampled texts have equal distributions but differ")
        for number, outcome in enumerate(self.outcomes, start=1):
            if outcome.comparison is not None and not outcome.comparison.equal:
                lines.append(f"prompt {number}: " + _difference(outcome.comparison, self.facts.dtype))
        if self.facts.simulated:
            line = (
                f"The {self.facts.devices} devices are simulated and share this machine's cores, so wall-clock time "
                "cannot beat autoregressive decoding here"
            )
            if summary["s0"] is not None:
                line += (
                    f"; on real devices S0 = {summary['s0']:.2f} would be the speedup if draft, heads and exchange "
                    "were free and all stages equal"
                )
            lines.append(f"{line}.")
        return lines


def _difference(comparison: Comparison, dtype: str) -> str:
    index, margin, limit = comparison.index, comparison.margin, comparison.limit
    if margin is None:
        return f"one text ends before token {(index or 0) + 1}, where the other goes on: this is an error"
    at = f"the ids part at token {(index or 0) + 1}, where the lower of the two logits is {margin:.1e} below the best"
    if comparison.near_tie:
        return f"near-tie: {at} (under {limit:.2g} in {dtype}: rounding decides, either is right)"
    return f"{at} (not under {limit:.2g} in {dtype}): this is an error"


def _times(batches: Sequence[tuple[float, float]], results: Sequence[SequenceResult]) -> dict[str, float]:
    """Seconds summed over batches; tokens/s counts what decoding made: all tokens but the first of each text."""
    decode = sum(seconds for _, seconds in batches)
    decoded = sum(max(len(result.ids) - 1, 0) for result in results)
    return {
        "prefill_seconds": sum(seconds for seconds, _ in batches),
        "decode_seconds": decode,
        "tokens_per_second": decoded / decode if decode > 0 else 0.0,
    }


def shown(value: float | None, digits: int = 2) -> str:
    """A figure for a reader; a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def counted(number: int, thing: str) -> str:
    """`1 stage`, `2 stages`."""
    return f"{number} {thing}" + ("" if number == 1 else "s")


def times_of(generation: Generation) -> tuple[float, float]:
    """(prefill seconds, decode seconds)."""
    return generation.prefill_seconds, generation.decode_seconds


def write_json(path: str | Path, tree: dict[str, Any]) -> None:
    """Write a JSON file, all of it or nothing."""
    write_whole(path, (json.dumps(tree, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8"))


def prepare_output(path: str | Path) -> None:
    """Make the folder of an output file, so that a run does not end with nowhere to write.

    Raises:
        OSError: the path is a folder, or its folder cannot be made.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder, expected the name of a file to write")
    path.parent.mkdir(parents=True, exist_ok=True)
