"""A watch over calls into compiled programs: says so when one makes no progress, since a call that hangs cannot.

A program whose devices wait for each other never returns, and no exception can reach the thread that waits for it. So
another thread looks. While a call is compiled, or runs on this machine's own cores, progress is that the process uses
a core: programs that only wait use none. A compiled call on accelerators leaves the host idle when all is well, and may
leave it spinning when not; there the time of the call alone counts.

Knows nothing of decoding or training, and decides nothing: what happens to the process is its caller's.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

BUSY = 0.05  # cores; a progress bar that redraws itself uses less
EXIT_CODE = 2


def end_process(message: str) -> None:
    """Write one line and end the process: threads that hang inside a program can be neither stopped nor joined."""
    sys.stderr.write(f"error: {message}\n")
    sys.stderr.flush()
    os._exit(EXIT_CODE)


class Watch:
    """Watches one call at a time.

    Args:
        patience: seconds without progress after which `stuck` is called, once, from a thread of its own; 0 never.
        stuck: is given one line that says what waited for how long.
    """

    def __init__(self, patience: float, stuck: Callable[[str], None] = end_process):
        self._patience, self._stuck = patience, stuck
        self._calls: list[tuple[str, bool]] = []
        self._lock = threading.Lock()
        self._begun = 0  # calls so far
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def over(self, call: str, *, works_here: bool) -> Iterator[None]:
        """Watch what is done inside.

        Args:
            call: what it is, for the message.
            works_here: whether a process that uses its cores makes progress: it compiles, or its devices are CPUs.
        """
        if self._patience <= 0:
            yield
            return
        with self._lock:
            self._calls.append((call, works_here))
            self._begun += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._look, name="watch over compiled programs", daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            with self._lock:
                self._calls.pop()
                self._begun += 1

    def _look(self) -> None:
        interval = min(1.0, self._patience / 10)
        begun, waited = -1, 0.0
        then, used = time.monotonic(), time.process_time()
        while True:
            time.sleep(interval)
            now, now_used = time.monotonic(), time.process_time()
            passed, worked = now - then, now_used - used
            then, used = now, now_used
            with self._lock:
                if not self._calls or begun != self._begun:
                    begun, waited = self._begun, 0.0
                    continue
                call, works_here = self._calls[-1]
                if works_here and worked > BUSY * passed:
                    waited = 0.0
                    continue
                waited += min(passed, 2 * interval)  # a process that was suspended has not waited
                if waited < self._patience:
                    continue
                self._stuck(
                    f"no progress for {self._patience:g} s in {call}: its devices wait for each other or for another "
                    "process. If the machine or the other process is only slow, give a larger --patience (seconds; 0 "
                    "waits for ever)"
                )
                return
