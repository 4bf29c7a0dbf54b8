"""Say what a pipeline would give for a model on a machine, and which one is best.

    python infer/plan.py --target qwen3.5-4b --machine h100 --devices 8

Reads the model's description, no weights. Exit code: 0; 2 if it could not be done.
"""

from __future__ import annotations

import sys

from spd_jax.config.plan import PlanConfig
from spd_jax.script.run import run_script
from spd_jax.script.terminal import Terminal


def plan(config: PlanConfig, terminal: Terminal) -> int:
    """Work everything out and report; returns the exit code."""
    from spd_jax.planning.job import make_planned, prepare
    from spd_jax.planning.report import plan_report, replay_lines, write_outputs

    traces = prepare(config)
    planned = make_planned(config)
    lines = [*plan_report(planned), *(replay_lines(planned, traces) if traces else [])]
    written = write_outputs(planned)
    terminal.lines(*lines, *(f"wrote {path}" for path in written))
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run; returns the exit code."""
    return run_script(PlanConfig, plan, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
