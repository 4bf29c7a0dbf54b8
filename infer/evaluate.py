"""Evaluate speculation heads by decoding prompts of several data sets with them, beside plain decoding.

    python infer/evaluate.py --config configs/smollm2_135m/evaluate.yaml --heads target --prompts mt_bench.jsonl

Exit code: 0; 1 if ids differ from the autoregressive ones without a near-tie; 2 if the run could not be done. Answers
are kept as they come: the same command goes on where it was stopped.
"""

from __future__ import annotations

import sys

from spd_jax.config.evaluate import EvaluateConfig
from spd_jax.script.run import run_script
from spd_jax.script.terminal import Terminal


def evaluate(config: EvaluateConfig, terminal: Terminal) -> int:
    """Check, load, decode what is missing and sum up; returns the exit code."""
    from spd_jax.evaluation.job import prepare_evaluation
    from spd_jax.evaluation.report import differs, summarise, tables, write_results
    from spd_jax.evaluation.run import Evaluation, load_evaluation

    job = prepare_evaluation(config)
    if not job.engine.leads:
        terminal.silence()
    terminal.lines(job.describe())
    with terminal.progress() as bars:
        run = Evaluation(job, load_evaluation(job, bars.load))
        done, total = 0, sum(map(job.missing, job.files))
        bars.show("answers", done, total, "answers, compiling first")
        for batch in run.run():
            done += batch.count
            bars.show("answers", done, total, f"answers, now {batch.dataset} by {batch.label}")
    summary = summarise(job, run.warm_up_seconds)
    written = write_results(job, summary)
    terminal.lines("", tables(summary), *(f"wrote {path}" for path in written))
    return 1 if differs(summary) else 0


def main(arguments: list[str] | None = None) -> int:
    """Run; returns the exit code."""
    return run_script(EvaluateConfig, evaluate, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
