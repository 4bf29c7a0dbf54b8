"""The watch over calls: what waits is named after its patience, what works or ends is left alone."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

from spd_jax.parallel.watch import Watch

PATIENCE = 0.5


def found_while(work: object, *, works_here: bool, patience: float = PATIENCE) -> list[str]:
    """What a watch said of a call that does `work` for three times the patience."""
    said: list[str] = []
    with Watch(patience, said.append).over("the call", works_here=works_here):
        end = time.monotonic() + 3 * PATIENCE
        while time.monotonic() < end:
            if not work:
                time.sleep(0.01)
    return said


def test_a_call_that_waits_is_named_once() -> None:
    (line,) = found_while(work=None, works_here=True)
    assert line.startswith("no progress for 0.5 s in the call: its devices wait for each other")
    assert "--patience" in line
    assert "\n" not in line


def test_work_on_this_machine_is_progress_where_it_counts() -> None:
    assert found_while(work=True, works_here=True) == []
    assert len(found_while(work=True, works_here=False)) == 1


def test_no_patience_watches_nothing() -> None:
    threads = threading.active_count()
    assert found_while(work=None, works_here=True, patience=0.0) == []
    assert threading.active_count() == threads


def test_many_short_calls_are_no_long_one() -> None:
    said: list[str] = []
    watch = Watch(PATIENCE, said.append)
    for _ in range(15):
        with watch.over("a short call", works_here=False):
            time.sleep(0.1)
    time.sleep(2 * PATIENCE)  # nor is the time after the last one
    assert said == []


def test_a_process_that_hangs_ends_with_one_line() -> None:
    code = (
        "import threading; from spd_jax.parallel.watch import Watch\n"
        "with Watch(0.5).over('the dispatch', works_here=True): threading.Event().wait()"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: no progress for 0.5 s in the dispatch: ")
    assert ended.stderr.count("\n") == 1
