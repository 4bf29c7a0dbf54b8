"""An error as one line for a user, whoever raised it.

Knows exceptions, not what scripts do.
"""

from __future__ import annotations

import traceback
from pathlib import Path

EXPECTED = (ArithmeticError, ImportError, MemoryError, OSError, RuntimeError, ValueError)
"""What input, files and machines can be to blame for; anything else is a mistake in this program."""

LONGEST = 1000  # characters; libraries may append pages
ROOT = Path(__file__).parents[2]


def describe(error: Exception) -> str:
    """One line that says what is wrong, to be written behind `error: `.

    Of an error that input cannot explain it names the class and the place in this program, and how to see all of it.
    """
    text = _text(error)
    if isinstance(error, EXPECTED):
        return text
    return (
        f"{type(error).__name__} at {_place(error)}: {text} (a mistake in this program, not in what it was given; add "
        "--traceback true to see the way there)"
    )


def _text(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None and error.strerror is not None:
        names = [_name(name) for name in (error.filename, error.filename2) if name is not None]
        return f"{' -> '.join(names)}: {error.strerror}"
    if isinstance(error, MemoryError):
        return f"out of memory {error}".strip()
    text = str(error)
    if type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError"):  # the first line says it, tables follow
        text = next((line for line in text.splitlines() if line.strip()), "")
    text = " ".join(text.split())
    return (text if len(text) <= LONGEST else text[: LONGEST - 1] + "…") or type(error).__name__


def _name(name: object) -> str:
    return " ".join(str(name).split()) if isinstance(name, str | Path) else repr(name)


def _place(error: Exception) -> str:
    """The innermost line of this project on the way to an error."""
    frames = traceback.extract_tb(error.__traceback__)
    paths = [(Path(frame.filename), frame.lineno) for frame in frames]
    ours = [(path.relative_to(ROOT), line) for path, line in paths if path.is_relative_to(ROOT)]
    ours = [place for place in ours if not place[0].parts[0].startswith(".")] or paths  # not what .venv holds
    return "{}:{}".format(*ours[-1]) if ours else "an unknown place"
