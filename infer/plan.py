"""Show how a model can be cut into pipeline stages, and what each cut costs.

    python infer/plan.py --model MODEL --stages [4,8,16] [--layout beside] [--measure true]

Reads the model's description, no weights. Exit code: 0; 2 if it could not be done.
"""

from __future__ import annotations

import sys

from spd_jax.config.command_line import parse_command_line
from spd_jax.config.plan import PlanConfig
from spd_jax.evaluation.plan_report import plan_report
from spd_jax.weights.load import read_config


def main(arguments: list[str] | None = None) -> int:
    """Run; returns the exit code."""
    try:
        config = parse_command_line(PlanConfig, arguments, __doc__ or "")
        lines = plan_report(read_config(config.model), config)
    except (OSError, RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
