"""Where a script writes to and reads from, whatever stands at the other end.

A reader who goes away (`| head -1`) or a terminal that cannot show a character never costs a result. Knows streams, not
what is written.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from spd_jax.script.progress import Progress


class Terminal:
    """Standard output, error and input of a process: text streams, or None where it was started without one."""

    def __init__(self, out: Any, err: Any, given: Any):
        if isinstance(out, io.TextIOWrapper):
            out.reconfigure(errors="replace")
        self._out, self._err, self._given = out, err, given
        self._bars: Progress | None = None
        self._failure: OSError | None = None

    def write(self, text: str) -> None:
        """Write to standard output at once. When nobody reads it any more, nothing is written and the work goes on."""
        if self._out is None:
            return
        if self._bars is not None and self._out.isatty():
            self._bars.write(text)
            return
        try:
            self._out.write(text)
            self._out.flush()
        except OSError as error:
            self._lose(error)

    def lines(self, *lines: object) -> None:
        """Write each as a line of its own."""
        self.write("".join(f"{line}\n" for line in lines))

    def table(self, rows: Sequence[tuple[str, str, str]]) -> None:
        """Write rows of a name, a number and a remark, in columns; a remark is never broken, so it can be copied."""
        name, number = (max((len(row[column]) for row in rows), default=0) for column in (0, 1))
        self.lines(*(f"{row[0]:<{name}}  {row[1]:>{number}}  {row[2]}".rstrip() for row in rows))

    def note(self, line: str) -> None:
        """A line of standard error where that is no terminal, in place of a progress bar."""
        if self._err is not None and not self._err.isatty():
            self.complain(line)

    def complain(self, line: str) -> None:
        """Write a line to standard error."""
        if self._err is not None:
            with contextlib.suppress(OSError):
                self._err.write(f"{line}\n")
                self._err.flush()

    def silence(self) -> None:
        """Write nothing to standard output from here on (of several processes one writes)."""
        self._out = None

    @contextlib.contextmanager
    def progress(self) -> Iterator[Progress]:
        """Progress bars on standard error, as long as the context lasts."""
        with Progress(io.StringIO() if self._err is None else self._err) as bars:
            self._bars = bars
            try:
                yield bars
            finally:
                self._bars = None

    @property
    def piped(self) -> Callable[[], str] | None:
        """Reads all of standard input; None where that is a terminal or there is none.

        Raises (when called):
            ValueError: it is not UTF-8.
        """
        given = self._given
        if given is None or given.isatty():
            return None

        def read() -> str:
            if not isinstance(given, io.TextIOWrapper):
                return given.read()
            data = given.buffer.read()
            try:
                return data.decode("utf-8")
            except UnicodeDecodeError as error:
                line = data.count(b"\n", 0, error.start) + 1
                raise ValueError(
                    f"standard input:{line}: not UTF-8 (byte 0x{data[error.start]:02x} at offset {error.start})"
                ) from error

        return read

    def finish(self) -> None:
        """Write what is still held back.

        Raises:
            OSError: standard output took less than all of it, and not because nobody reads any more.
        """
        if self._out is not None:
            try:
                self._out.flush()
            except OSError as error:
                self._lose(error)
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise OSError(f"standard output: {failure.strerror or failure}") from failure

    def _lose(self, error: OSError) -> None:
        """Give standard output up; what it still holds goes nowhere, else the interpreter would complain at its end."""
        if not isinstance(error, BrokenPipeError):
            self._failure = error
        out, self._out = self._out, None
        if out is not None:
            with contextlib.suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, out.fileno())
                os.close(nowhere)
