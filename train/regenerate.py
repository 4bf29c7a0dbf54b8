"""Replace the assistant turns of conversations by the target's own answers, and write them as JSONL.

    python train/regenerate.py --config configs/smollm2_135m/regenerate.yaml

A run that was stopped goes on where it was when it is started again with the same options. Exit code: 0; 2 if it could
not be done.
"""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from spd_jax.config.command_line import parse_command_line
from spd_jax.config.regenerate import RegenerateConfig
from spd_jax.data.regenerate import Progress
from spd_jax.generation.answers import open_regeneration


def run(config: RegenerateConfig) -> str:
    """Regenerate behind a progress bar on the terminal, or a line a batch where there is none; returns a summary."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    start = time.perf_counter()
    with Bars(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as bars:
        task = bars.add_task("starting", total=config.limit)

        def show(progress: Progress) -> None:
            text = progress.describe(time.perf_counter() - start, config.limit)
            bars.update(task, description=text, completed=progress.lines)
            if not console.is_terminal:
                console.print(text)

        progress = open_regeneration(config).run(show)
    return "\n".join([progress.describe(time.perf_counter() - start, config.limit), *progress.left_out()])


def main(arguments: list[str] | None = None) -> int:
    """Run; returns the exit code."""
    try:
        config = parse_command_line(RegenerateConfig, arguments, __doc__ or "")
        print(run(config), f"{config.out} is ready", sep="\n")
    except (ArithmeticError, OSError, RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
