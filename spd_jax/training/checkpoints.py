"""Training states on disk: complete or not there, readable on any number of devices.

Orbax writes a step beside its place and renames it, so a run that is killed while saving finds the step before.
The folder of a run holds `states/` (the last few steps), `best/` and `last/` (heads, as
`spd_jax.speculation.checkpoint` writes them), `run.json` (what the run is), `log.jsonl` (what it saw), and pictures of
that. Knows arrays by name, nothing of what they are.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from spd_jax.files import likely_cause, write_whole

RUN_FILE, LOG_FILE, CURVES = "run.json", "log.jsonl", "curves.png"
STATES, BEST, LAST, BOARD = "states", "best", "last", "tensorboard"
_MARKS = {"target_digest", "data_digests"}  # every run.json says these


class RunError(ValueError):
    """A run folder that cannot be used as asked; the message names it."""


@dataclasses.dataclass(frozen=True)
class Restored:
    """A state that was read back, with what the trainer knew about it; `damaged` are newer steps that were not readable
    and have been removed."""

    step: int
    state: Any
    progress: dict[str, Any]
    damaged: tuple[int, ...] = ()


class StateStore:
    """States of one run by step; keeps the newest `keep`."""

    def __init__(self, path: Path, keep: int):
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True, enable_async_checkpointing=False)
        handlers = {"state": ocp.StandardCheckpointHandler(), "progress": ocp.JsonCheckpointHandler()}
        self._manager = ocp.CheckpointManager(path.resolve(), options=options, item_handlers=handlers)
        self._path = path

    def latest(self) -> int | None:
        """The newest step that was saved whole; None if there is none."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any, progress: Mapping[str, Any]) -> None:
        """Write a state and what the trainer knows about it.

        Raises:
            RunError: there is a state of this or a later step.
        """
        arguments = ocp.args.Composite(
            state=ocp.args.StandardSave(named_leaves(state)),  # pyright: ignore[reportCallIssue]
            progress=ocp.args.JsonSave(dict(progress)),  # pyright: ignore[reportCallIssue]
        )
        latest = self._manager.latest_step()
        if latest is not None and latest >= step:  # Orbax would do nothing, and not say so
            raise RunError(f"{self._path}: step {step} cannot be saved behind step {latest}")
        self._manager.save(step, args=arguments)
        self._manager.wait_until_finished()

    def restore_newest(self, like: Any) -> Restored | None:
        """The newest state that can be read, placed as `like` is, whatever devices it was saved from.

        Files can be damaged after they were written whole. Newer steps than the one that is read are removed, but not
        before: if none can be read, it is not the files that are at fault.

        Raises:
            RunError: there are states, and none of them holds the arrays of `like`.
        """
        steps = sorted(self._manager.all_steps(), reverse=True)
        errors = []
        for index, step in enumerate(steps):
            try:
                state, progress = self._restore(step, like)
            except RunError as error:
                errors.append(error)
                continue
            for damaged in steps[:index]:
                self._manager.delete(damaged)
            return Restored(step, state, progress, tuple(steps[:index]))
        if errors:
            raise errors[0]
        return None

    def _restore(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        wanted = {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
            for name, leaf in named_leaves(like).items()
        }
        arguments = ocp.args.Composite(
            state=ocp.args.StandardRestore(wanted),  # pyright: ignore[reportCallIssue]
            progress=ocp.args.JsonRestore(),  # pyright: ignore[reportCallIssue]
        )
        try:
            _refuse_other_arrays(dict(self._manager.item_metadata(step).state.items()), wanted)
            found: Any = self._manager.restore(step, args=arguments)
        except Exception as error:  # of damaged files Orbax raises whatever it runs into, plain Exception too
            reason = str(error).partition("\n")[0]
            raise RunError(f"{self._path}: step {step} does not hold the state of this run: {reason}") from error
        structure = jax.tree.structure(like)
        return jax.tree.unflatten(structure, [found.state[name] for name in wanted]), dict(found.progress)

    def close(self) -> None:
        """Wait for what is being written and let go of the folder."""
        self._manager.close()


def _refuse_other_arrays(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Compare shapes and dtypes by name; Orbax would find out in the middle of reading."""
    there, asked = ({name: (tuple(x.shape), str(x.dtype)) for name, x in tree.items()} for tree in (found, wanted))
    names = [name for name in sorted(there.keys() | asked.keys()) if there.get(name) != asked.get(name)]
    if names:
        differ = [f"{name} is {there.get(name)}, expected {asked.get(name)}" for name in names[:3]]
        raise ValueError("; ".join([*differ, *["..."] * (len(names) > 3)]))


def named_leaves(tree: Any) -> dict[str, Any]:
    """Every array of a tree by its path, in the tree's order."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in jax.tree.leaves_with_path(tree)
    }


def open_run(path: Path, spec: Mapping[str, Any], *, overwrite: bool = False) -> bool:
    """Make the folder of a run, or see that the one there is the same run; says whether it goes on.

    Args:
        spec: everything that makes a run what it is, as JSON; with `target_digest` and `data_digests`, by which a
            `run.json` is known.

    Raises:
        RunError: the folder holds another run (names what differs), or something that is none.
    """
    file = path / RUN_FILE
    spec = json.loads(json.dumps(spec))
    if path.is_file():
        raise RunError(f"{path} is a file, expected a folder for the run")
    if path.exists() and any(path.iterdir()):
        found = _read_spec(file)
        if found is None:
            raise RunError(f"{path} holds something that is no training run; choose another folder or remove it")
        differ = [
            f"{name} was {found.get(name)!r}, now {spec.get(name)!r}"
            for name in sorted(found.keys() | spec.keys())
            if found.get(name) != spec.get(name)
        ]
        if not overwrite and differ:
            raise RunError(
                f"{path} holds another run: {'; '.join(differ)}. Choose another --out, or --overwrite true to begin "
                "anew"
            )
        if not overwrite:
            return True
        _empty(path)
    path.mkdir(parents=True, exist_ok=True)
    write_whole(file, (json.dumps(spec, indent=2) + "\n").encode())
    return False


def _read_spec(file: Path) -> dict[str, Any] | None:
    """What a `run.json` says; None where there is none, or one of something else."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.keys() >= _MARKS else None


def _empty(path: Path) -> None:
    """Remove what a run wrote, `run.json` last: until then the folder is known as one."""
    for name in (STATES, BEST, LAST, BOARD):
        shutil.rmtree(path / name, ignore_errors=True)
    for name in (LOG_FILE, CURVES, RUN_FILE):
        (path / name).unlink(missing_ok=True)


class Log:
    """`log.jsonl`: a line an event, each with its step."""

    def __init__(self, path: Path):
        self._path = path

    def read(self) -> list[dict[str, Any]]:
        """All events of the log; a line that was cut off is left out.

        Raises:
            RunError: a line is no event; names it.
        """
        if not self._path.is_file():
            return []
        lines = self._path.read_bytes().split(b"\n")[:-1]  # what follows the last line feed is cut off
        return [self._event(number, line) for number, line in enumerate(lines, 1) if line]

    def _event(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            event = json.loads(line)
        except (RecursionError, ValueError) as error:
            raise RunError(f"{self._path}:{number}: not valid JSON: {error}{likely_cause(line)}") from error
        if not isinstance(event, dict) or not isinstance(event.get("step"), int) or "kind" not in event:
            raise RunError(f"{self._path}:{number}: expected an event with its step and kind, found {event!r:.80}")
        wrong = [name for name, value in event.items() if name != "kind" and not isinstance(value, int | float | None)]
        if wrong:
            raise RunError(f"{self._path}:{number}: {wrong[0]} must be a number, found {event[wrong[0]]!r:.80}")
        return event

    def append(self, event: Mapping[str, Any]) -> None:
        """Write an event behind those that are there."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(dict(event)) + "\n")

    def cut(self, step: int) -> None:
        """Forget everything after a step: a resumed run will see it again."""
        kept = [event for event in self.read() if event["step"] <= step]
        write_whole(self._path, "".join(json.dumps(event) + "\n" for event in kept).encode())
