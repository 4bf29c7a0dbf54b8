"""Decode prompts with a speculative pipeline, and with --compare true beside plain decoding of the same model.

    python infer/generate.py --config configs/smollm2_135m/generate.yaml --prompt "What is the capital of France?"

Exit code: 0; 1 if ids differ from the autoregressive ones and no near-tie explains it; 2 if the run could not be done.
"""

from __future__ import annotations

import os
import sys

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn

from spd_jax.config.command_line import parse_command_line
from spd_jax.config.run import GenerateConfig
from spd_jax.generation.run import Decoders, Job, Run, load_decoders, prepare


def load(job: Job) -> Decoders:
    """The decoders of a job, behind progress bars on the terminal."""
    columns = TextColumn("loading the {task.description}"), BarColumn(), DownloadColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what)
            bars.update(tasks[what], completed=done, total=total)

        return load_decoders(job, show)


def main(arguments: list[str] | None = None) -> int:
    """Run; returns the exit code."""
    try:
        config = parse_command_line(GenerateConfig, arguments, __doc__ or "")
        job = prepare(config, None if sys.stdin.isatty() else sys.stdin.read)
        out = sys.stdout if job.engine.leads else open(os.devnull, "w")  # noqa: SIM115
        print(job.describe(), file=out, flush=True)
        run = Run(job, load(job))
        for text in run.stream():
            print(text, end="", file=out, flush=True)
        print("\n" + run.report.text(), *(f"wrote {path}" for path in run.write_files()), sep="\n", file=out)
    except (ArithmeticError, OSError, RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 1 if run.report.differs else 0


if __name__ == "__main__":
    sys.exit(main())
