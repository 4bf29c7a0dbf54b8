"""Say what a pipeline would give for a model on a machine, and which one is best.

    python infer/plan.py --model qwen3.5-4b --machine h100 --devices 8

Reads the model's description, no weights. Exit code: 0; 2 if it could not be done.
"""

from __future__ import annotations

import sys

from spd_jax.config.command_line import parse_command_line
from spd_jax.config.plan import PlanConfig
from spd_jax.planning.job import make_planned, prepare
from spd_jax.planning.report import plan_report, replay_lines, write_outputs


def main(arguments: list[str] | None = None) -> int:
    """Run; returns the exit code."""
    try:
        config = parse_command_line(PlanConfig, arguments, __doc__ or "")
        traces = prepare(config)
        planned = make_planned(config)
        lines = [*plan_report(planned), *(replay_lines(planned, traces) if traces else [])]
        print(*lines, *(f"wrote {path}" for path in write_outputs(planned)), sep="\n")
    except (OSError, RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
