"""Bad input of any kind, for any script: one line that names what is at fault, exit code 2, nothing half written.

Valid inputs are made once and broken by hypothesis; the scripts run in this process, as a user calls them. What is
broken and still valid is worked through to its end. The gate takes a few of each kind, always the same; the slow tests
take other ones every time.
"""

import contextlib
import importlib
import io
import json
import os
import shutil
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import spd_jax.training.allocator
from tests.script.inputs import INPUTS, make_inputs, options_file
from tests.script.mutations import Broken, changed, ruined

DEAR = (
    "infer/generate.py",
    "infer/evaluate.py",
    "train/regenerate.py",
    "train/distill.py",
)  # what is valid is compiled
LONGEST = 120  # seconds for one run
DIFFERS = {"infer/check_model.py": {1}, "train/distill.py": {3}}
QUIET: dict[str, Any] = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(autouse=True)
def same_process(monkeypatch: pytest.MonkeyPatch):
    """Scripts add to XLA_FLAGS and set malloc for their process, which here has other things to do."""
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])
    monkeypatch.setattr(spd_jax.training.allocator, "keep_freed_memory", lambda: False)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the scripts run; all names are relative to it."""
    place = tmp_path / "here"
    place.mkdir()
    monkeypatch.chdir(place)
    return place


def run(name: str, arguments: list[str] | None = None) -> tuple[int, str, str]:
    """Exit code, standard output and error of an entry of `INPUTS` in this folder."""
    main = importlib.import_module(name.split()[0].removesuffix(".py").replace("/", ".")).main
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings(), limit():
        warnings.simplefilter("default")
        code = main(["--config", options_file(name), *(arguments or [])])
    return code, out.getvalue(), err.getvalue()


@contextlib.contextmanager
def limit() -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise SystemExit(f"still at it after {LONGEST} s")  # nothing in a script catches it

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LONGEST)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def check(name: str, world: Path, place: Path, broken: Broken, more: tuple[str, ...] = ()) -> None:
    """Run a script on a broken copy of its inputs; `more` are further ones, of an earlier run."""
    os.chdir(world)
    shutil.rmtree(place)
    shutil.copytree(world, place)
    os.chdir(place)
    broken.apply(place)
    before = set(place.rglob("*"))
    code, out, err = run(name)
    left = sorted(str(path.relative_to(place)) for path in set(place.rglob("*")) - before)
    # lines beside the error: warnings, and progress where there is no terminal
    said = [line for line in err.splitlines() if not line.startswith("warning: ") and " new tokens in " not in line]
    assert "mistake in this program" not in err, err
    assert "Traceback" not in out + err
    assert not [path for path in left if "partial" in path]
    assert code or not said, said
    if code in {0} | DIFFERS.get(name.split()[0], set()):
        _check_results(place)
        return
    assert (code, len(said)) == (2, 1), (out, err)
    assert said[0].startswith("error: ")
    if broken.file != options_file(name):
        read = (*INPUTS[name].files, *more)
        named = {*read, *(f"{Path(file).parts[0]}{end}" for file in read for end in (": ", " "))}
        overflows = "produced NaN or infinity" in err  # of what the numbers in a file come to, the place is said
        assert overflows or any(file in err for file in named), f"no file is named: {err}"
    kept = INPUTS[name].out
    assert kept is None or not [path for path in left if path.startswith(kept)], f"left behind: {left}"


def _check_results(place: Path) -> None:
    """What a run writes is JSON to the end, without NaN."""

    def refuse(name: str) -> Any:
        raise AssertionError(f"{name} in a result")

    for path in [place / "out.json", *place.glob("out/*.json")]:
        if path.is_file():
            json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


def files(name: str) -> tuple[str, ...]:
    return (*INPUTS[name].files, options_file(name))


@pytest.mark.parametrize("name", INPUTS)
def test_files_that_are_none(name: str, world: Path, place: Path):
    @settings(max_examples=12, derandomize=True, **QUIET)
    @given(ruined(world, INPUTS[name].files))
    def every(broken: Broken) -> None:
        check(name, world, place, broken)

    every()


@pytest.mark.parametrize("name", [name for name in INPUTS if not name.startswith(DEAR)])
def test_files_in_which_something_is_different(name: str, world: Path, place: Path):
    @settings(max_examples=25, derandomize=True, **QUIET)
    @given(changed(world, files(name)))
    def every(broken: Broken) -> None:
        check(name, world, place, broken)

    every()


@pytest.mark.slow
@pytest.mark.parametrize("name", INPUTS)
def test_many_files_that_are_broken(name: str, world: Path, place: Path):
    @settings(max_examples=60, print_blob=True, **QUIET)
    @given(st.one_of(ruined(world, files(name)), changed(world, files(name)), changed(world, files(name))))
    def every(broken: Broken) -> None:
        check(name, world, place, broken)

    every()


@pytest.mark.slow
@pytest.mark.parametrize("name", INPUTS)
def test_what_is_broken_was_valid(name: str, world: Path, place: Path):
    shutil.copytree(world, place, dirs_exist_ok=True)
    code, _, err = run(name)
    assert code == 0, err


EARLIER = {
    "infer/evaluate.py": ("out/head-T0.jsonl", "out/autoregressive-T0.jsonl"),
    "train/prepare.py": ("out/manifest.json", "out/shard-00000.arrow"),
    "train/regenerate.py": ("out.jsonl", "out.jsonl.run.json"),
    "train/distill.py": ("out/run.json", "out/log.jsonl", "out/best/config.json", "out/last/head.safetensors"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EARLIER)
def test_what_an_earlier_run_left_is_broken(name: str, world: Path, place: Path, tmp_path: Path):
    """The same command goes on, or says what it cannot go on with; what was there is not lost."""
    shutil.copytree(world, place, dirs_exist_ok=True)
    assert run(name)[0] == 0
    done = Path(shutil.copytree(place, tmp_path / "done"))
    there = tuple(file for file in EARLIER[name] if (done / file).is_file())
    assert there

    @settings(max_examples=40, print_blob=True, **QUIET)
    @given(st.one_of(ruined(done, there), changed(done, there)))
    def every(broken: Broken) -> None:
        check(name, done, place, broken, there)
        assert not broken.data or (place / broken.file).is_file()

    every()


WORDS = [
    "",
    "x",
    "-1",
    "0",
    "1e3",
    "nan",
    "inf",
    "-inf",
    "1.5",
    "null",
    "true",
    "[1]",
    "[]",
    "{a: 1}",
    "\udc80",
    "9" * 30,
]
WORDS += ["---", "é😀", "/", "a\nb", "2147483648", "0x10", "1_0"]


@pytest.mark.parametrize("name", INPUTS)
def test_odd_words_for_every_option(name: str, world: Path, place: Path):
    """Those that make an option wrong; whether a valid one can be carried out is tested elsewhere."""
    options = yaml.safe_load((world / options_file(name)).read_text())
    shutil.copytree(world, place, dirs_exist_ok=True)
    for file in INPUTS[name].files:  # so that no run begins
        (place / file).unlink()

    @settings(max_examples=20, derandomize=True, **QUIET)
    @given(st.sampled_from(sorted(options)), st.sampled_from(WORDS))
    def every(option: str, word: str) -> None:
        code, _, err = run(name, [f"--{option}", word])
        assert code == 2
        assert err.startswith("error: "), err
        assert err.count("\n") == 1, err
        assert "mistake in this program" not in err

    every()
