"""Train a speculation module: distil a frozen target into it, with simulated fill of the pipeline.

    python train/distill.py --config configs/smollm2_135m/distill.yaml

A run that was stopped goes on from its last saved state when it is started again with the same options. Exit code: 0; 2
if it could not be done, 3 if a loss was not finite.
"""

from __future__ import annotations

import sys

from spd_jax.config.distill import DistillConfig
from spd_jax.script.errors import describe
from spd_jax.script.run import run_script
from spd_jax.script.terminal import Terminal


def distill(config: DistillConfig, terminal: Terminal) -> int:
    """Open, train and report; returns the exit code."""
    from spd_jax.evaluation.watching import decoding_evaluator
    from spd_jax.training.allocator import keep_freed_memory
    from spd_jax.training.distill import open_distillation
    from spd_jax.training.report import Reporter
    from spd_jax.training.trainer import NotFinite

    keep_freed_memory()
    run = open_distillation(config)
    terminal.lines(run.describe())
    evaluator = decoding_evaluator(config, run.plan) if config.decode_every else None
    with terminal.progress() as bars:
        trainer = run.trainer(evaluator, lambda done, total, _: bars.load("target", done, total))
    terminal.lines(trainer.describe())
    try:
        with Reporter(run) as out, terminal.progress() as bars:
            bars.show("steps", int(trainer.state.step), trainer.pace.total_steps)
            for event in trainer.run():
                line = out.line(event)
                bars.show("steps", event.step, trainer.pace.total_steps, out.status(event) or None)
                if line:
                    terminal.lines(line)
    except NotFinite as error:
        terminal.complain(f"error: {describe(error)}")
        return 3
    terminal.lines(*(f"wrote {path}" for path in out.files()))
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run; returns the exit code."""
    return run_script(DistillConfig, distill, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
