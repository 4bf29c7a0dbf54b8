"""Compare a model as it is run here with transformers, layer by layer, on one text.

    python infer/check_model.py --model MODEL [--prompt TEXT]

Prints the largest difference of every hidden state and of the logits, and the first layer that differs.
Exit code: 0 equal; 1 different; 2 if it could not be done. Needs PyTorch: pip install 'spd-jax[import]'.
"""

from __future__ import annotations

import sys

from spd_jax.config.check_model import CheckModelConfig
from spd_jax.config.command_line import parse_command_line
from spd_jax.evaluation.check_model import check_model


def main(arguments: list[str] | None = None) -> int:
    """Run; returns the exit code."""
    try:
        found = check_model(parse_command_line(CheckModelConfig, arguments, __doc__ or ""))
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(found.lines()))
    return 0 if found.first is None else 1


if __name__ == "__main__":
    sys.exit(main())
