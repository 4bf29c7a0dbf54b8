"""Progress bars on a terminal, and nothing where there is none.

Knows how far something is, not what it is.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

from rich import filesize
from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars


class Progress:
    """Bars that appear with the first call of `show` and go when the context ends.

    Args:
        stream: a text stream where they are drawn, if it is a terminal.
    """

    def __init__(self, stream: Any):
        columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[amount]}")
        console = Console(file=stream, soft_wrap=True, highlight=False, markup=False)
        self._bars = Bars(
            *columns,
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            redirect_stdout=False,  # what belongs into a file goes there
            disable=not console.is_terminal,
            speed_estimate_period=86400.0,  # what is left is estimated from all that is done
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Progress:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def show(self, what: str, done: int = 0, total: int | None = None, said: str | None = None) -> None:
        """How far one thing is: `done` of `total` (None: nobody knows), with what is to be said beside its bar."""
        amount = "" if total is None else f"{done:,.0f}/{total:,.0f}"
        self._show(what, done, total, amount, what if said is None else said)

    def load(self, what: str, done: int, total: int) -> None:
        """How many bytes of a thing have been loaded."""
        amount = f"{filesize.decimal(done)} of {filesize.decimal(total)}"
        self._show(f"loading the {what}", done, total, amount, f"loading the {what}")

    def write(self, text: str) -> None:
        """Write text above the bars, as it is."""
        self._bars.console.out(text, end="", highlight=False)

    def _show(self, what: str, done: int, total: int | None, amount: str, said: str) -> None:
        if what not in self._tasks:
            self._tasks[what] = self._bars.add_task(said, total=total, amount=amount)
        self._bars.update(self._tasks[what], completed=done, total=total, amount=amount, description=said)
