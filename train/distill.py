"""Train a speculation module: distil a frozen target into it, with simulated fill of the pipeline.

    python train/distill.py --config configs/smollm2_135m/distill.yaml

A run that was stopped goes on from its last saved state when it is started again with the same options. Exit code: 0; 2
if it could not be done, 3 if a loss was not finite.
"""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from spd_jax.config.command_line import parse_command_line
from spd_jax.config.distill import DistillConfig
from spd_jax.evaluation.watching import decoding_evaluator
from spd_jax.training.allocator import keep_freed_memory
from spd_jax.training.distill import open_distillation
from spd_jax.training.report import Reporter
from spd_jax.training.trainer import NotFinite

COLUMNS = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[status]}")


def main(arguments: list[str] | None = None) -> int:
    """Run; returns the exit code."""
    try:
        config = parse_command_line(DistillConfig, arguments, __doc__ or "")
        keep_freed_memory()
        run = open_distillation(config)
        print(run.describe(), flush=True)
        trainer = run.trainer(decoding_evaluator(config, run.plan) if config.decode_every else None)
        print(trainer.describe(), flush=True)
        console = Console(stderr=True, quiet=not sys.stderr.isatty())
        with Progress(*COLUMNS, console=console, transient=True) as bars, Reporter(run) as out:
            task = bars.add_task("steps", total=trainer.pace.total_steps, completed=int(trainer.state.step), status="")
            for event in trainer.run():
                line = out.line(event)
                bars.update(task, completed=event.step, status=out.status(event))
                if line:
                    print(line, flush=True)
        print(*(f"wrote {path}" for path in out.files()), sep="\n")
    except (ArithmeticError, OSError, RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 3 if isinstance(error, NotFinite) else 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
