"""Evaluate speculation heads by decoding prompts of several data sets with them, beside plain decoding.

    python infer/evaluate.py --config configs/smollm2_135m/evaluate.yaml --heads target --prompts mt_bench.jsonl

Exit code: 0; 1 if ids differ from the autoregressive ones without a near-tie; 2 if the run could not be done. Answers
are kept as they come: the same command goes on where it was stopped.
"""

from __future__ import annotations

import os
import sys

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from spd_jax.config.command_line import parse_command_line
from spd_jax.config.evaluate import EvaluateConfig
from spd_jax.evaluation.job import EvaluationJob, prepare_evaluation
from spd_jax.evaluation.report import differs, summarise, tables, write_results
from spd_jax.evaluation.run import Evaluation, load_evaluation

COLUMNS = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()


def decode(job: EvaluationJob, bars: Progress) -> Evaluation:
    """Load and decode what is missing; the time that is left is estimated from all answers so far."""
    bar = bars.add_task("loading")
    decoders = load_evaluation(job, lambda what, *of: bars.update(bar, description=what, completed=of[0], total=of[1]))
    run, total = Evaluation(job, decoders), sum(map(job.missing, job.files))
    bars.reset(bar, total=total, description=f"{total} answers, compiling first")
    for batch in run.run():
        bars.update(bar, advance=batch.count, description=f"{total} answers, now {batch.dataset} by {batch.label}")
    return run


def main(arguments: list[str] | None = None) -> int:
    """Run; returns the exit code."""
    try:
        config = parse_command_line(EvaluateConfig, arguments, __doc__ or "")
        job = prepare_evaluation(config)
        out = sys.stdout if job.engine.leads else open(os.devnull, "w")  # noqa: SIM115
        print(job.describe(), file=out, flush=True)
        console = Console(stderr=True, quiet=not sys.stderr.isatty())
        with Progress(*COLUMNS, console=console, transient=True, speed_estimate_period=86400.0) as bars:
            summary = summarise(job, decode(job, bars).warm_up_seconds)
        print("\n" + tables(summary), *(f"wrote {path}" for path in write_results(job, summary)), sep="\n", file=out)
    except (ArithmeticError, OSError, RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 1 if differs(summary) else 0


if __name__ == "__main__":
    sys.exit(main())
