"""A recorded acceptance trace replayed over a plan, event by event: what a formula cannot say.

Ranks are clocks. In a cycle every rank runs its layers (if a sequence has a position in its stage; the draft always
runs while a sequence is active), then all meet in the exchange, run their share of the heads, meet again, and meet once
more for what enters. Times vary by `jitter`, each rank's by itself, so a cycle waits for whoever is late. Sequences of
a batch go through the same cycles; one that has ended leaves its stages empty. Knows no arrays of a model.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spd_jax.evaluation.samples import FORMAT
from spd_jax.files import read_text
from spd_jax.generation.verdicts import RIGHT
from spd_jax.plan import StagePlan
from spd_jax.planning.cost_model import Cycle


class TraceError(ValueError):
    """A file that holds no trace; says which line, and what is missing."""


@dataclasses.dataclass(frozen=True)
class Simulated:
    """What a replay took.

    `seconds` of all batches one after the other; `token_seconds` between one verified token of a sequence and the next
    (the first counts from prefill); `busy` the share of the time that every stage, and the draft, computes layers.
    """

    tokens: int
    cycles: int
    seconds: float
    token_seconds: np.ndarray
    busy_stages: tuple[float, ...]
    busy_draft: float

    @property
    def tokens_per_second(self) -> float:
        """Verified tokens, those of prefill left out, of all sequences."""
        return self.tokens / self.seconds

    def percentile(self, share: int | float) -> float:
        """Seconds of an output token that this percentage of tokens does not exceed."""
        return float(np.percentile(self.token_seconds, share))


def read_traces(path: str | Path) -> list[str]:
    """Verdicts of every answer in a file of `infer/evaluate.py` (samples, JSONL) or `infer/generate.py` (`--json`).

    A letter for each token after the one of prefill: `a` a draft was right, anything else none was.

    Raises:
        TraceError: the file holds neither; OSError: it cannot be read.
    """
    text = read_text(path)
    found = [verdicts[1:] for verdicts in _verdicts(text, str(path)) if len(verdicts) > 1]
    if not found:
        raise TraceError(f"{path}: no answer has more than the token of prefill, nothing to replay")
    return found


def _verdicts(text: str, where: str) -> Iterator[str]:
    try:
        records: Any = json.loads(text)
    except (RecursionError, ValueError):
        records = [_line(line, f"{where}:{number}") for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if isinstance(records, dict):
        records = records.get("results", [records])
    if not isinstance(records, list):
        raise TraceError(f"{where}: expected answers, found {type(records).__name__}")
    for number, record in enumerate(records, 1):
        if isinstance(record, dict) and record.get("format") == FORMAT:
            continue  # the first line of a file of samples
        verdicts = record.get("verdicts") if isinstance(record, dict) else None
        if not isinstance(verdicts, str):
            raise TraceError(
                f"{where}: answer {number} has no verdicts (infer/evaluate.py and infer/generate.py --json write them)"
            )
        yield verdicts


def _line(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except (RecursionError, ValueError) as error:
        raise TraceError(f"{where}: not JSON ({error})") from error


def schedule(verdicts: str, num_stages: int) -> np.ndarray:
    """Stages that hold a position, counted from the first, in every cycle of a sequence; a token is verified where all
    do.

    A token is verified in the cycle in which its predecessor is in the last stage: one cycle later if it was drafted, n
    later if the pipeline has to fill again. So stages 1..k hold positions in the k-th cycle of a fill.
    """
    fill = np.arange(1, num_stages + 1)
    parts = [fill[-1:] if before == RIGHT else fill for before in ["", *verdicts[:-1]]]
    return np.concatenate(parts)


def simulate(
    plan: StagePlan,
    cycle: Cycle,
    traces: Sequence[str],
    *,
    batch: int = 1,
    jitter: float = 0.0,
    seed: int = 0,
    shared: bool = False,
) -> Simulated:
    """Replay traces, `batch` sequences at a time in the order given.

    Args:
        cycle: times of every part, of the cost model or measured (with this batch in its setting).
        jitter: standard deviation over mean of every rank's time in every part (a gamma distribution, so never below
            zero).
        shared: devices are simulated on one, whose work adds up.
    """
    rng = np.random.default_rng(seed)
    clock, cycles, gaps = 0.0, 0, []
    busy = np.zeros(plan.num_stages + 1)  # of every stage, and of the draft
    for first in range(0, len(traces), batch):
        together = [schedule(verdicts, plan.num_stages) for verdicts in traces[first : first + batch]]
        # A sequence that has ended leaves its stages empty.
        occupied = np.zeros((max(map(len, together)), plan.num_stages), bool)
        for stages in together:
            occupied[: len(stages)] |= np.arange(plan.num_stages) < stages[:, None]
        seconds, layers = _cycle_seconds(plan, cycle, occupied, jitter, rng, shared)
        times = clock + np.cumsum(seconds)
        for stages in together:
            verified = times[: len(stages)][stages == plan.num_stages]
            gaps.append(np.diff(verified, prepend=clock))
        clock, cycles = float(times[-1]), cycles + len(times)
        busy += layers.sum(axis=0)
    every = np.concatenate(gaps)
    shares = (busy / clock).tolist()
    return Simulated(len(every), cycles, clock, every, tuple(shares[:-1]), shares[-1])


def _cycle_seconds(
    plan: StagePlan, cycle: Cycle, occupied: np.ndarray, jitter: float, rng: np.random.Generator, shared: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds `[K]` of every cycle, and `[K, n + 1]` of its stages' and its draft's layers."""

    def vary(seconds: np.ndarray) -> np.ndarray:
        return seconds * rng.gamma(jitter**-2, jitter**2, seconds.shape) if jitter else seconds

    own = np.asarray([cycle.ranks[plan.rank_of_stage(stage)] for stage in range(1, plan.num_stages + 1)])
    if plan.layout == "beside":
        own[plan.draft_rank] -= cycle.draft
    draft = cycle.draft if plan.layout == "beside" else cycle.ranks[plan.draft_rank]
    count = len(occupied)
    layers = vary(np.concatenate([np.where(occupied, own, 0.0), np.full((count, 1), draft)], axis=1))
    ranks = np.zeros((count, plan.num_ranks))
    for stage in range(1, plan.num_stages + 1):
        ranks[:, plan.rank_of_stage(stage)] += layers[:, stage - 1]
    ranks[:, plan.draft_rank] += layers[:, -1]
    seconds = (ranks.sum(axis=1) if shared else ranks.max(axis=1)) + cycle.parts["exchange"] + cycle.parts["control"]
    for part in ("heads", "enter"):  # as long on every rank, and everybody waits for the last
        each = np.full((count, 1 if shared else plan.num_ranks), cycle.parts[part])
        seconds += vary(each).max(axis=1)
    return seconds, layers
