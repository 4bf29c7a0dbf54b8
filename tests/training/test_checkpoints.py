"""States on disk: read back on any devices, the newest whole one; and folders that belong to one run."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spd_jax.training.checkpoints import Log, RunError, StateStore, named_leaves, open_run

SPEC = {"target_digest": "a", "data_digests": ["b"], "rows": 2, "plan": (1, 2)}


def tree_on(devices: int, spec: PartitionSpec, scale: float = 1.0) -> dict[str, Any]:
    """A matrix cut by `spec`, its moments, and a count."""
    mesh = Mesh(np.asarray(jax.devices()[:devices]), ("data",))
    matrix = (np.arange(64, dtype=np.float32) * np.float32(scale)).reshape(8, 8)
    where = NamedSharding(mesh, spec)
    count = jax.device_put(np.int32(7), NamedSharding(mesh, PartitionSpec()))
    moments = (jax.device_put(-matrix, where), count)
    return {"params": jax.device_put(matrix, where), "optimizer": moments}


ROWS, COLUMNS, WHOLE = PartitionSpec("data"), PartitionSpec(None, "data"), PartitionSpec()


def stored(path: Path, steps: int = 2) -> Path:
    """States of steps 1, 2, ...: multiples of the same numbers."""
    store = StateStore(path, keep=2)
    for step in range(1, steps + 1):
        store.save(step, tree_on(1, WHOLE, float(step)), {"counts": {"tokens": step}})
    store.close()
    return path


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stored(tmp_path_factory.mktemp("states"))


@pytest.fixture
def states(two: Path, tmp_path: Path) -> Path:
    """Two states, to break."""
    return shutil.copytree(two, tmp_path / "states")


# Devices


@pytest.mark.parametrize(("devices", "spec"), [(1, WHOLE), (4, ROWS), (4, COLUMNS), (8, WHOLE)])
def test_a_state_comes_back_on_other_devices(tmp_path: Path, devices: int, spec: PartitionSpec):
    """P01: saved in slices on eight devices; equal values, placed as asked."""
    saved = tree_on(8, ROWS)
    store = StateStore(tmp_path / "states", keep=1)
    store.save(3, saved, {"best": {}})
    like = jax.tree.map(jnp.zeros_like, tree_on(devices, spec))
    restored = StateStore(tmp_path / "states", keep=1).restore_newest(like)
    assert restored is not None
    assert restored.step == 3
    for name, leaf in named_leaves(restored.state).items():
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(named_leaves(saved)[name]), err_msg=name)
        assert leaf.sharding == named_leaves(like)[name].sharding
    assert jax.tree.structure(restored.state) == jax.tree.structure(saved)


def test_the_newest_few_are_kept(tmp_path: Path):
    path = stored(tmp_path / "states", steps=4)
    assert sorted(entry.name for entry in path.iterdir()) == ["3", "4"]
    assert StateStore(path, keep=2).latest() == 4


@pytest.mark.parametrize("step", [1, 2])
def test_no_state_is_saved_behind_another(states: Path, step: int):
    store = StateStore(states, keep=2)
    with pytest.raises(RunError, match=f"step {step} cannot be saved behind step 2"):
        store.save(step, tree_on(1, WHOLE), {})


def test_no_state_at_all(tmp_path: Path):
    store = StateStore(tmp_path / "states", keep=2)
    assert store.latest() is None
    assert store.restore_newest(tree_on(1, WHOLE)) is None


# Interrupted and damaged (P06)


def empty_files(folder: Path) -> None:
    """As a disk leaves them that lost its power before it had written what it had promised."""
    for file in folder.rglob("*"):
        if file.is_file():
            file.write_bytes(b"")


DAMAGE: dict[str, Callable[[Path], object]] = {
    "arrays are missing": lambda folder: shutil.rmtree(folder / "state"),
    "progress is missing": lambda folder: shutil.rmtree(folder / "progress"),
    "files are empty": empty_files,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_state_is_passed_over(states: Path, damage: str):
    DAMAGE[damage](states / "2")
    store = StateStore(states, keep=2)
    restored = store.restore_newest(tree_on(1, WHOLE))
    assert restored is not None
    assert (restored.step, restored.progress, restored.damaged) == (1, {"counts": {"tokens": 1}}, (2,))
    assert store.latest() == 1
    store.save(2, tree_on(1, WHOLE, 2.0), {})  # there is room for the step again
    restored = StateStore(states, keep=2).restore_newest(tree_on(1, WHOLE))
    assert restored is not None
    assert (restored.step, restored.damaged) == (2, ())


@pytest.mark.parametrize("name", ["2.orbax-checkpoint-tmp", "2.orbax-checkpoint-tmp-1760000000"])
def test_a_state_that_was_being_written_is_none(states: Path, name: str):
    (states / "2").rename(states / name)
    store = StateStore(states, keep=2)
    assert store.latest() == 1
    store.save(2, tree_on(1, WHOLE, 2.0), {})
    restored = store.restore_newest(tree_on(1, WHOLE))
    assert restored is not None
    assert restored.step == 2
    np.testing.assert_array_equal(np.asarray(restored.state["params"]).reshape(-1), 2.0 * np.arange(64))


def test_if_none_can_be_read_none_is_removed(states: Path):
    for step in ("1", "2"):
        shutil.rmtree(states / step / "state")
    with pytest.raises(RunError, match="step 2 does not hold the state of this run"):
        StateStore(states, keep=2).restore_newest(tree_on(1, WHOLE))
    assert sorted(entry.name for entry in states.iterdir()) == ["1", "2"]


def test_other_arrays_are_refused(states: Path):
    like = tree_on(1, WHOLE)
    like["params"] = like["params"][:4]
    said = r"step 2 does not hold .*: params is \(\(8, 8\), 'float32'\), expected \(\(4, 8\), 'float32'\)"
    with pytest.raises(RunError, match=said):
        StateStore(states, keep=2).restore_newest(like)
    assert sorted(entry.name for entry in states.iterdir()) == ["1", "2"]


WRITER = """
import sys
from pathlib import Path
import numpy as np
from spd_jax.training.checkpoints import StateStore
store = StateStore(Path(sys.argv[1]), keep=2)
for step in range(1, 10_000):
    store.save(step, {"a": np.full((1 << 20,), step, np.float32)}, {"step": step})
"""


def test_a_process_that_is_killed_while_it_saves_leaves_a_whole_state(tmp_path: Path):
    """P06: it does nothing but save, so it is hardly ever killed between two states."""
    path = tmp_path / "states"
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], env={**os.environ, "JAX_PLATFORMS": "cpu"})
    try:
        deadline = time.monotonic() + 120
        while not (path / "3").exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    restored = StateStore(path, keep=2).restore_newest({"a": jnp.zeros((1 << 20,), jnp.float32)})
    assert restored is not None
    assert restored.step >= 3
    assert restored.progress == {"step": restored.step}
    assert not restored.damaged
    np.testing.assert_array_equal(np.asarray(restored.state["a"]), np.float32(restored.step))


# The folder of a run


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def fill(run: Path) -> None:
    for file in ("states/2/arrays", "best/head.safetensors", "last/head.safetensors", "tensorboard/events"):
        (run / file).parent.mkdir(parents=True, exist_ok=True)
        (run / file).write_text("old")
    for file in ("log.jsonl", "curves.png"):
        (run / file).write_text("old")


def test_the_same_run_goes_on(tmp_path: Path):
    assert not open_run(tmp_path / "run", SPEC)
    fill(tmp_path / "run")
    before = contents(tmp_path / "run")
    assert open_run(tmp_path / "run", SPEC)
    assert contents(tmp_path / "run") == before


def test_another_run_is_refused_by_what_differs(tmp_path: Path):
    open_run(tmp_path / "run", SPEC)
    fill(tmp_path / "run")
    before = contents(tmp_path / "run")
    with pytest.raises(RunError, match=r"rows was 2, now 4; seed was None, now 1\. Choose another --out"):
        open_run(tmp_path / "run", {**SPEC, "rows": 4, "seed": 1})
    assert contents(tmp_path / "run") == before


def test_overwrite_begins_anew(tmp_path: Path):
    run = tmp_path / "run"
    open_run(run, SPEC)
    fill(run)
    (run / "notes.txt").write_text("mine")
    assert not open_run(run, {**SPEC, "rows": 4}, overwrite=True)
    assert json.loads((run / "run.json").read_text())["rows"] == 4
    assert sorted(contents(run)) == ["notes.txt", "run.json"]


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("text", [None, "{}", "[1]", '{"rows": 2}', "no json", "\x00"])
def test_a_folder_of_something_else_is_left_alone(tmp_path: Path, text: str | None, overwrite: bool):
    fill(tmp_path)
    if text is not None:
        (tmp_path / "run.json").write_text(text)
    before = contents(tmp_path)
    with pytest.raises(RunError, match="holds something that is no training run"):
        open_run(tmp_path, SPEC, overwrite=overwrite)
    assert contents(tmp_path) == before


def test_an_empty_folder_is_taken(tmp_path: Path):
    assert not open_run(tmp_path, SPEC)


def test_a_file_is_no_folder(tmp_path: Path):
    (tmp_path / "run").write_text("mine")
    with pytest.raises(RunError, match="run is a file"):
        open_run(tmp_path / "run", SPEC, overwrite=True)
    assert (tmp_path / "run").read_text() == "mine"


# The log


def test_a_line_that_was_cut_off_is_none(tmp_path: Path):
    log = Log(tmp_path / "log.jsonl")
    assert log.read() == []
    for step in range(4):
        log.append({"step": step, "kind": "a\u2028b"})
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"step": 4, "te')
    assert [line["step"] for line in log.read()] == [0, 1, 2, 3]
    log.cut(2)
    log.append({"step": 3, "kind": "step"})
    assert [line["step"] for line in log.read()] == [0, 1, 2, 3]
    assert not list(tmp_path.glob("*.partial"))
