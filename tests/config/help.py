"""What `--help` shows of a configuration."""

import dataclasses
from typing import Any

import pytest

from spd_jax.config.command_line import parse_command_line


def help_of(kind: type[Any], capsys: pytest.CaptureFixture[str]) -> str:
    """The help text, having seen that it names every field and ends well."""
    with pytest.raises(SystemExit) as caught:
        parse_command_line(kind, ["--help"], "about")
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    for field in dataclasses.fields(kind):
        assert f"--{field.name}" in shown
    return shown
