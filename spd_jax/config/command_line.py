"""A configuration from YAML files and the command line: every field of a dataclass is an option and a key.

Knows jsonargparse and dataclasses, not what the fields mean.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import typing
from collections.abc import Sequence
from typing import Any, TypeVar

import docstring_parser
from jsonargparse import ArgumentParser

T = TypeVar("T")

TRACEBACK = "traceback"


class UsageError(ValueError):
    """A command line or a YAML file that does not say what can be run; names the option or key."""


def parse_command_line(cls: type[T], arguments: Sequence[str] | None, description: str) -> T:
    """An instance of a dataclass from `--config FILE.yaml` and `--field value`, the later ones winning.

    A field of type `tuple[str, ...]` takes several words: `--stop A B`. The help comes from the docstring's Args.

    Args:
        arguments: None takes those of the process.

    Raises:
        UsageError: an unknown option or key, a value of a wrong type, a missing field, a file that is not there.
        ValueError: what `cls` itself refuses.
        SystemExit: after `--help` or `--print_config`.
    """
    parser = ArgumentParser(
        description=description,
        exit_on_error=False,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", action="config", help="YAML file with any of the options below")
    parser.add_argument(f"--{TRACEBACK}", type=bool, default=False, help="show where an error comes from")
    several = [name for name, kind in typing.get_type_hints(cls).items() if kind == tuple[str, ...]]
    parser.add_class_arguments(cls, None, skip=set(several))
    for name in several:
        parser.add_argument(f"--{name}", nargs="*", type=str, default=[], metavar="TEXT", help=_help(cls, name))
    try:
        parsed = parser.parse_args(arguments)
    except argparse.ArgumentError as error:
        raise UsageError(" ".join(str(error).split())) from error
    given: dict[str, Any] = {field.name: parsed[field.name] for field in dataclasses.fields(typing.cast(Any, cls))}
    return cls(**given | {name: tuple(given[name]) for name in several})


def wants_traceback(arguments: Sequence[str]) -> bool:
    """Whether the words of a command line, which may be wrong otherwise, ask for the traceback of an error."""
    words = " ".join(arguments).replace("=", " ").split()
    return any(pair == (f"--{TRACEBACK}", "true") for pair in itertools.pairwise(words))


def _help(cls: type, name: str) -> str:
    described = docstring_parser.parse(cls.__doc__ or "").params
    return next((" ".join((param.description or "").split()) for param in described if param.arg_name == name), "")
