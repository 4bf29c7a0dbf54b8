"""One way for every script to start and to end: options in, exit code out, one line for whatever goes wrong.

Knows nothing of what the scripts do.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from spd_jax.config.command_line import parse_command_line, wants_traceback
from spd_jax.script.errors import describe
from spd_jax.script.terminal import Terminal

Config = TypeVar("Config")

FAILED, INTERRUPTED = 2, 130


@contextlib.contextmanager
def _warnings_on(terminal: Terminal) -> Iterator[None]:
    """Warnings as one line each, without the place in a program that means nothing to a user."""

    def show(message: Warning | str, *_: object, **__: object) -> None:
        terminal.complain(f"warning: {' '.join(str(message).split())}")

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def run_script(
    kind: type[Config],
    work: Callable[[Config, Terminal], int],
    description: str | None,
    arguments: Sequence[str] | None = None,
) -> int:
    """Read the command line, do the work, and return the exit code.

    Args:
        kind: the dataclass whose fields are the options.
        work: is given the options and the terminal; returns the exit code. What it needs that is slow to import it
            imports itself, so that help and mistakes in the options come at once and an interrupt is never a traceback.
        description: stands above the options in the help.
        arguments: None takes those of the process.

    Returns:
        What `work` returns; 2 after an error, which is one line on standard error (and the traceback before it with
        `--traceback true`); 130 after an interrupt. Warnings are a line each too.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    terminal = Terminal(sys.stdout, sys.stderr, sys.stdin)
    try:
        with _warnings_on(terminal):
            try:
                code = work(parse_command_line(kind, given, description or ""), terminal)
            finally:
                terminal.finish()
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:  # the one place where everything ends
        if wants_traceback(given):
            terminal.complain(traceback.format_exc().rstrip())
        terminal.complain(f"error: {describe(error)}")
        return FAILED
