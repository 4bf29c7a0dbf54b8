"""Replace the assistant turns of conversations by the target's own answers, and write them as JSONL.

    python train/regenerate.py --config configs/smollm2_135m/regenerate.yaml

A run that was stopped goes on where it was when it is started again with the same options. Exit code: 0; 2 if it could
not be done.
"""

from __future__ import annotations

import sys
import time

from spd_jax.config.regenerate import RegenerateConfig
from spd_jax.script.run import run_script
from spd_jax.script.terminal import Terminal


def regenerate(config: RegenerateConfig, terminal: Terminal) -> int:
    """Load the target, write what is missing and report; returns the exit code."""
    from spd_jax.data.regenerate import Progress
    from spd_jax.generation.answers import open_regeneration

    start = time.perf_counter()

    def said(progress: Progress) -> str:
        return progress.describe(time.perf_counter() - start, config.limit)

    with terminal.progress() as bars:

        def show(progress: Progress) -> None:
            bars.show("conversations", progress.lines, config.limit, said(progress))
            terminal.note(said(progress))

        progress = open_regeneration(config).run(show)
    terminal.lines(said(progress), *progress.left_out(), f"{config.out} is ready")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run; returns the exit code."""
    return run_script(RegenerateConfig, regenerate, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
