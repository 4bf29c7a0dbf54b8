"""Prepare conversations for training: read, tokenise with the target's chat template, label, write.

    python train/prepare.py --config configs/smollm2_135m/prepare.yaml

A run that was stopped goes on where it was when it is started again with the same options. Exit code: 0; 2 if it could
not be done.
"""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from spd_jax.config.command_line import parse_command_line
from spd_jax.config.prepare import PrepareConfig
from spd_jax.data.prepare import Prepared, prepare
from spd_jax.data.prepared import Counts


def run(config: PrepareConfig) -> Prepared:
    """Prepare behind a progress line on the terminal."""
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task("reading the sources")

        def show(counts: Counts) -> None:
            text = f"{counts.rows:,} rows read, {counts.kept:,} conversations kept, {counts.tokens:,} tokens"
            bars.update(task, description=text)

        return prepare(config, show)


def main(arguments: list[str] | None = None) -> int:
    """Run; returns the exit code."""
    try:
        prepared = run(parse_command_line(PrepareConfig, arguments, __doc__ or ""))
    except (OSError, RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    table = Table("", "number", "", box=None, pad_edge=False)
    table.columns[0].no_wrap = True
    table.columns[1].justify = "right"
    for line in prepared.summary():
        table.add_row(*line)
    console = Console(soft_wrap=True)  # a path is one line, to be copied
    console.print(table)
    console.print(f"{prepared.path} {'was there already' if prepared.was_there else 'is ready'}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
