"""A configuration from YAML files and the command line: every field of a dataclass is an option and a key.

Knows jsonargparse and dataclasses, not what the fields mean.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import itertools
import math
import re
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import docstring_parser
from jsonargparse import ArgumentParser

from spd_jax.files import no_text

T = TypeVar("T")

CONFIG, TRACEBACK = "config", "traceback"
RENAMED = {
    "device_count": "training_devices",
    "draft_vocab": "draft_vocabulary",
    "model": "target",
    "traces": "replay",
    "turns": "max_turns",
}
OPTION = re.compile(r"--(?P<name>[A-Za-z]\w*)(=(?P<value>.*))?", re.DOTALL)
LARGEST = 2**31 - 1  # whole numbers end up in arrays of 32 bits


class UsageError(ValueError):
    """A command line or a YAML file that does not say what can be run; names the option or key."""


def parse_command_line(cls: type[T], arguments: Sequence[str] | None, description: str) -> T:
    """An instance of a dataclass from `--config FILE.yaml` and `--field value`, the later ones winning.

    A field of type `tuple[...]` takes several words, `--stop A B`, and a list of one needs no brackets anywhere. A word
    is an option only if it looks like one: `--stop ---` is a text, and `--stop=--end` is one too. The help comes from
    the docstring's Args.

    Args:
        arguments: None takes those of the process.

    Raises:
        UsageError: an unknown option or key, a value of a wrong type, a number that is not finite, a missing field, a
            file that is not there; names the file where it is to blame.
        ValueError: what `cls` itself refuses.
        SystemExit: after `--help` or `--print_config`.
    """
    kinds = typing.get_type_hints(cls)
    words, texts = _one_word_each(sys.argv[1:] if arguments is None else arguments, kinds)
    parser = _parser(cls, kinds, description)
    try:
        parsed = parser.parse_args(words)
    except (argparse.ArgumentError, ValueError, RuntimeError) as error:
        raise UsageError(_plain(str(error), words, kinds)) from error
    values: dict[str, Any] = {}
    for name, kind in {**kinds, TRACEBACK: bool}.items():
        try:
            values[name] = _value(name, kind, parsed[name], texts)
        except UsageError as error:
            found = None if _element(kind) in (int, float) else str(parsed[name])
            raise UsageError(_blame(words, name, found) + str(error)) from error
    if values.pop(TRACEBACK) and not wants_traceback(words):
        raise UsageError(f"{_blame(words, TRACEBACK)}{TRACEBACK} belongs on the command line")
    return cls(**values)


def wants_traceback(arguments: Sequence[str]) -> bool:
    """Whether the words of a command line, which may be wrong otherwise, ask for the traceback of an error."""
    words = " ".join(arguments).replace("=", " ").split()
    return any(pair == (f"--{TRACEBACK}", "true") for pair in itertools.pairwise(words))


def _parser(cls: type, kinds: Mapping[str, Any], description: str) -> ArgumentParser:
    parser = ArgumentParser(
        description=description,
        exit_on_error=False,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(f"--{CONFIG}", action="config", help="YAML file with any of the options below")
    parser.add_argument(f"--{TRACEBACK}", type=bool, default=False, help="show where an error comes from")
    helps = _helps(cls)
    for field in dataclasses.fields(typing.cast(Any, cls)):
        kind = kinds[field.name]
        element, required = _element(kind), field.default is dataclasses.MISSING
        wanted: Any = kind if element is None else element | kind
        if str in (element, *_choices(kind)):  # jsonargparse would read a text as YAML once more; `_value` looks at it
            wanted = _as_it_is
        given: dict[str, Any] = {"required": True} if required else {"default": field.default}
        if element is not None:
            given["metavar"] = "TEXT ..." if element is str else "NUMBER ..."
        parser.add_argument(f"--{field.name}", type=wanted, help=helps.get(field.name, ""), **given)
    return parser


def _as_it_is(value: Any) -> Any:
    return value


def _helps(cls: type) -> dict[str, str]:
    """What the docstrings of a class and of its bases say of each field."""
    params = [param for base in reversed(cls.__mro__) for param in docstring_parser.parse(base.__doc__ or "").params]
    return {param.arg_name: " ".join((param.description or "").split()) for param in params}


def _element(kind: Any) -> Any:
    """`int` of `tuple[int, ...] | None`, None of what is no list."""
    found = [one for one in _choices(kind) if typing.get_origin(one) is tuple]
    return typing.get_args(found[0])[0] if found else None


def _choices(kind: Any) -> tuple[Any, ...]:
    return typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)


def _one_word_each(arguments: Sequence[str], kinds: Mapping[str, Any]) -> tuple[list[str], list[tuple[str, ...]]]:
    """Every option with its value as one word `--name=value`, so that a value may look like anything.

    Lists of texts are numbered, and their numbers stand for them.
    """
    left, words, texts = list(arguments), [], []
    single = {CONFIG, TRACEBACK, *kinds}
    while left:
        word = left.pop(0)
        match = OPTION.fullmatch(word)
        if match is None or match["name"] not in single:
            words.append(word)
            continue
        name, values = match["name"], [] if match["value"] is None else [match["value"]]
        element = _element(kinds.get(name))
        while left and (element or not values) and not _is_option(left[0]):
            values.append(left.pop(0))
        if element is str:
            texts.append(tuple(values))
            values = [f"\0{len(texts) - 1}"]  # no word of a command line can hold a NUL
        elif element and len(values) > 1:
            values = [" ".join(values) if values[0].startswith("[") else f"[{', '.join(values)}]"]
        words += [f"--{name}={value}" for value in values] or [word]
    return words, texts


def _is_option(word: str) -> bool:
    return OPTION.fullmatch(word) is not None or word == "-h"


def _value(name: str, kind: Any, value: Any, texts: Sequence[tuple[str, ...]]) -> Any:
    """What a field gets: lists as tuples, numbers finite, null only where the field takes it."""
    element, wrong = _element(kind), UsageError(f"{name} must be {_expected(kind)}, found {_shown(value)}")
    if value is None or (value == "null" and str in _choices(kind)):
        if type(None) in _choices(kind):
            return None
        raise wrong
    if element is str and isinstance(value, str):
        value = texts[int(value[1:])] if value.startswith("\0") else (value,)
    if str in _choices(kind) and (not isinstance(value, str) or not value or "\0" in value):
        raise wrong
    for one in value if isinstance(value, list | tuple) else (value,):
        if isinstance(one, str) and (broken := no_text(one)):
            raise UsageError(f"{name} holds {broken}, found {one!a:.80}")
    if element:
        value = tuple(value) if isinstance(value, list | tuple) else (value,)
        if element is str and not all(isinstance(one, str) for one in value):
            raise wrong
    for number in value if element else (value,):
        if isinstance(number, float) and not math.isfinite(number):
            raise UsageError(f"{name} must be {_expected(kind)}, found {number}, which is not finite")
        if isinstance(number, int) and abs(number) > LARGEST:
            raise UsageError(f"{name} must lie in -{LARGEST}..{LARGEST}, found {number}")
    return value


def _expected(kind: Any) -> str:
    names: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    names |= {type(None): "null"}
    lists = {int: "whole numbers, as in [2, 7]", float: "numbers, as in [0.5, 0.7]", str: "a text or a list of texts"}
    found = []
    for choice in _choices(kind):
        if typing.get_origin(choice) is typing.Literal:
            found.append("one of " + ", ".join(map(str, typing.get_args(choice))))
        else:
            found.append(lists[_element(choice)] if _element(choice) else names.get(choice, str(choice)))
    return " or ".join(found)


def _shown(value: Any) -> str:
    shown = {None: "null", True: "true", False: "false", "": "nothing"}
    text = shown.get(value) if isinstance(value, str | bool | None) else None
    text = " ".join(str(value).split()) if text is None else text
    return text if len(text) <= 80 else text[:79] + "…"


def _blame(words: Sequence[str], name: str, found: str | None = None) -> str:
    """`FILE: ` where an option was not on the command line, or not with the value that was found."""
    matches = [match for word in words if (match := OPTION.fullmatch(word))]
    files = [match["value"] for match in matches if match["name"] == CONFIG and match["value"]]
    given = [match["value"] for match in matches if match["name"] == name]
    return f"{', '.join(files)}: " if files and (not given or found not in (None, *given)) else ""


def _plain(text: str, words: Sequence[str], kinds: Mapping[str, Any]) -> str:
    """One line for a user out of what jsonargparse says."""
    if match := re.match(r'Parser key "config": (?P<what>[^:]*): \'(?P<file>.*)\'$', text, re.DOTALL):
        return f"{match['file']}: {match['what'][0].lower()}{match['what'][1:]}"
    if match := re.match(r'Parser key "(?P<name>\w+)"', text):
        name = match["name"]
        found = re.split(r"(?:Given|Got) value: ?", text)
        yaml = {"None": "null", "True": "true", "False": "false"}
        said = f", found {_shown(yaml.get(found[-1], found[-1]))}" if len(found) > 1 else ""
        blame = _blame(words, name, found[-1] if _element(kinds.get(name)) is None else None)
        return f"{blame}{name} must be {_expected(kinds.get(name))}{said}"
    if match := re.match(r"argument (?P<name>\S+): expected one argument", text):
        name = match["name"].removeprefix("--")
        return f"{match['name']} needs a value" + (f": {_expected(kinds[name])}" if name in kinds else ": a file")
    if match := re.match(r"the following arguments are required: (?P<names>.*)", text):
        return "missing: " + ", ".join(f"--{name}" for name in match["names"].split(", "))
    if match := re.match(r"Option '(?P<name>.*)' is not accepted", text, re.DOTALL):
        return f"{_blame(words, match['name'])}no option {_shown(match['name'])}{_hint(match['name'], kinds)}"
    if text.startswith("Unexpected config: "):
        found = _shown(text.removeprefix("Unexpected config: "))
        return f"{_blame(words, '')}a configuration is `option: value` in every line, found {found}"
    if text.startswith("unrecognized arguments: "):
        known = {CONFIG, TRACEBACK, *kinds}
        matches = [match for word in words if (match := OPTION.fullmatch(word))]
        unknown = next((match for match in matches if match["name"] not in known), None)
        if unknown is not None:
            return f"no option --{unknown['name']}{_hint(unknown['name'], kinds)}"
        return f"{_shown(text.removeprefix('unrecognized arguments: '))} belongs to no option"
    return f"{_blame(words, '')}{' '.join(text.split())}"


def _hint(name: str, kinds: Mapping[str, Any]) -> str:
    """The option that was meant."""
    if RENAMED.get(name) in kinds:
        return f": it is --{RENAMED[name]} now"
    close = difflib.get_close_matches(name, kinds, 1)
    return f": did you mean --{close[0]}?" if close else ""
