"""Scripted drafts: which are right, which wrong, and what cannot be a script."""

import pytest

from spd_jax.generation.scripted import Script, parse_script

IDS = [5, 9, 6, 9]


@pytest.mark.parametrize(
    ("head", "drafts"),
    [
        ("oracle", [5, 9, 6, 9]),
        ("anti", [6, 0, 7, 0]),
        ("script:1", [5, 9, 6, 9]),
        ("script:10", [5, 0, 6, 9]),
        ("script:110100", [5, 9, 7, 9]),
    ],
)
def test_bits_say_which_drafts_are_right(head: str, drafts: list[int]):
    script = parse_script(head)
    assert script is not None
    assert script.drafts(IDS, vocab_size=10) == drafts


@pytest.mark.parametrize("head", ["target", "heads/oracle", "scripts"])
def test_other_heads_are_no_scripts(head: str):
    assert parse_script(head) is None


@pytest.mark.parametrize("head", ["script:", "script:12", "script:1 0"])
def test_a_script_is_digits(head: str):
    with pytest.raises(ValueError, match="digits 0 and 1"):
        parse_script(head)


def test_no_ids_no_drafts():
    assert Script((True,)).drafts([], 10) == []
