"""How every script starts and ends: exit codes, one line for an error, and results whatever becomes of the terminal."""

import dataclasses
import io
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import jax
import pytest

from spd_jax.script.run import run_script
from spd_jax.script.terminal import Terminal
from tests.one_line import assert_one_clear_line

ROOT = Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Options:
    """Of a script.

    Args:
        number: any.
    """

    number: int = 0


def fail_with(error: BaseException) -> Callable[[Options, Terminal], int]:
    def work(options: Options, terminal: Terminal) -> int:
        raise error

    return work


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("a\n  b"), "a b"),
        (ValueError(""), "ValueError"),
        (MemoryError("Unable to allocate 3 TiB"), "out of memory Unable to allocate 3 TiB"),
        (FileNotFoundError(2, "No such file or directory", "x.json"), "x.json: No such file or directory"),
        (
            jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.\nBuffers:\n 1. ..."),
            "RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.",
        ),
    ],
)
def test_an_error_is_one_line(error: Exception, said: str, capsys: pytest.CaptureFixture[str]):
    assert run_script(Options, fail_with(error), "about", []) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"error: {said}\n")


def test_a_mistake_of_the_program_names_its_place(capsys: pytest.CaptureFixture[str]):
    assert run_script(Options, fail_with(KeyError("x")), "about", []) == 2
    error = capsys.readouterr().err
    assert_one_clear_line(error, f"KeyError at {Path(__file__).relative_to(ROOT)}:")
    assert "--traceback true" in error


@pytest.mark.parametrize("words", [["--traceback", "true"], ["--traceback=true"]])
def test_a_traceback_is_shown_to_who_asks_for_it(words: list[str], capsys: pytest.CaptureFixture[str]):
    assert run_script(Options, fail_with(ValueError("why")), "about", words) == 2
    error = capsys.readouterr().err
    assert error.startswith("Traceback (most recent call last):")
    assert error.endswith("\nerror: why\n")


def test_a_warning_is_one_line(capsys: pytest.CaptureFixture[str]):
    def work(options: Options, terminal: Terminal) -> int:
        warnings.warn("two\nlines", stacklevel=2)
        return 0

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert run_script(Options, work, "about", []) == 0
    assert capsys.readouterr().err == "warning: two lines\n"


def test_an_interrupt_is_silent(capsys: pytest.CaptureFixture[str]):
    assert run_script(Options, fail_with(KeyboardInterrupt()), "about", []) == 130
    assert capsys.readouterr() == ("", "")


class Gone(io.StringIO):
    """A stream whose other end fails as told."""

    def __init__(self, error: OSError):
        super().__init__()
        self._error = error

    def write(self, text: str) -> int:
        raise self._error


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (BrokenPipeError(32, "Broken pipe"), 7, ""),
        (OSError(28, "No space left on device"), 2, "error: standard output: No space left on device\n"),
    ],
)
def test_work_goes_on_without_a_reader(
    error: OSError, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    done = []

    def work(options: Options, terminal: Terminal) -> int:
        for number in range(3):
            terminal.lines(number)
            done.append(number)
        return 7

    monkeypatch.setattr(sys, "stdout", Gone(error))
    assert run_script(Options, work, "about", []) == code
    assert done == [0, 1, 2]
    assert capsys.readouterr().err == said


def test_what_cannot_be_encoded_is_replaced(monkeypatch: pytest.MonkeyPatch):
    held = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(held, encoding="ascii"))

    def work(options: Options, terminal: Terminal) -> int:
        terminal.write("caf\u00e9 \ud83d\n")
        return 0

    assert run_script(Options, work, "about", []) == 0
    assert held.getvalue() == b"caf? ?\n"


def test_no_streams_at_all(monkeypatch: pytest.MonkeyPatch):
    for name in ("stdout", "stderr", "stdin"):
        monkeypatch.setattr(sys, name, None)

    def work(options: Options, terminal: Terminal) -> int:
        assert terminal.piped is None
        with terminal.progress() as bars:
            bars.show("steps", 1, 2)
        terminal.lines("text")
        terminal.note("text")
        raise ValueError("text")

    assert run_script(Options, work, "about", []) == 2


def test_standard_input_that_is_no_text_is_located(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def work(options: Options, terminal: Terminal) -> int:
        assert terminal.piped is not None
        terminal.write(terminal.piped())
        return 0

    for data, code in ((b"caf\xc3\xa9", 0), (b"a\nb\xff", 2)):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="ascii"))
        assert run_script(Options, work, "about", []) == code
    assert capsys.readouterr() == ("café", "error: standard input:2: not UTF-8 (byte 0xff at offset 3)\n")


def test_a_reader_that_leaves_a_process(tmp_path: Path):
    """Nothing of it reaches the user, and what the run writes is there."""
    out = tmp_path / "plan.json"
    arguments = ["--target", "smollm2-135m", "--devices", "4", "--json", str(out)]
    command = [sys.executable, str(ROOT / "infer" / "plan.py"), *arguments]
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONIOENCODING"}
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as pipe:
        env = {**plain, "PYTHONIOENCODING": "ascii"}
        result = subprocess.run(command, cwd=ROOT, stdout=pipe, stderr=subprocess.PIPE, env=env, timeout=120)
    assert (result.returncode, result.stderr) == (0, b"")
    assert out.is_file()
