"""Compare a model as it is run here with transformers, layer by layer, on one text.

    python infer/check_model.py --target MODEL [--prompt TEXT]

Prints the largest difference of every hidden state and of the logits, and the first layer that differs.
Exit code: 0 equal; 1 different; 2 if it could not be done. Needs PyTorch: pip install 'spd-jax[import]'.
"""

from __future__ import annotations

import sys

from spd_jax.config.check_model import CheckModelConfig
from spd_jax.script.run import run_script
from spd_jax.script.terminal import Terminal


def check(config: CheckModelConfig, terminal: Terminal) -> int:
    """Run both and compare; returns the exit code."""
    from spd_jax.evaluation.check_model import check_model

    found = check_model(config)
    terminal.lines(*found.lines())
    return 0 if found.first is None else 1


def main(arguments: list[str] | None = None) -> int:
    """Run; returns the exit code."""
    return run_script(CheckModelConfig, check, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
