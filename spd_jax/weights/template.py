"""What a model's chat template reads of a message, and whether it wrote what it was given.

A template is a program, so nothing in its source tells reliably what it reads: it is asked, by rendering messages that
are known. Templates of models that see images want content as a list of parts and drop a string without a word; those
of models that think read what came before the answer under one of several names, or not at all. Knows no tokens.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

REFUSED = "the chat template refuses it"
TEXT_LOST = "the chat template leaves text out"
REASONING_LOST = "the chat template has no place for its reasoning"
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")

_MARKS = {"system": "Zebra", "user": "Quagga", "assistant": "Okapi"}
_REASONING = "Gnu"
_SHAPES = (
    ("system", "user", "assistant", "user"),
    ("user", "assistant", "user"),
    ("system", "user"),
    ("user",),
)

Message = Mapping[str, Any]
Render = Callable[[list[dict[str, Any]], bool], str]
"""Messages and whether an answer is to follow, as text; may end in any error."""


class TemplateRefusal(ValueError):
    """A conversation that a chat template does not take, or takes only in part; `reason` is the same for all of a
    kind, `detail` says more of this one."""

    def __init__(self, reason: str, detail: str):
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


@dataclasses.dataclass(frozen=True)
class Reads:
    """What a template reads.

    `parts` are the roles whose content it wants as a list of parts, `ignored` those whose text it leaves out in either
    form, `reasoning` is the key under which it reads what an assistant thought, None where it reads none.
    """

    parts: frozenset[str]
    ignored: frozenset[str]
    reasoning: str | None

    def message(self, message: Message) -> dict[str, Any]:
        """A message as the template reads it; of the keys that may hold reasoning only the template's own is left.

        Raises:
            TemplateRefusal: there is reasoning, and the template has no place for it.
        """
        given = {key: value for key, value in message.items() if key not in REASONING_KEYS}
        if isinstance(given.get("content"), str) and given.get("role") in self.parts:
            given["content"] = [{"type": "text", "text": given["content"]}]
        if thought := reasoning_of(message):
            if self.reasoning is None:
                raise TemplateRefusal(REASONING_LOST, _shown(thought))
            given[self.reasoning] = thought
        return given

    def check(self, messages: Sequence[Message], text: str) -> None:
        """See that a rendered text holds what the users said and what the last answer was preceded by.

        Text may have been trimmed, and words like `/no_think` may be missing: templates take them for switches. What a
        system message says may have been changed in any way, but must be read. Earlier reasoning may be missing.

        Raises:
            TemplateRefusal: it does not.
        """
        for message in messages:
            role, content = message.get("role"), message.get("content")
            if not isinstance(content, str) or not content.strip():
                continue
            if role in self.ignored or (role == "user" and not _appears(content, text)):
                raise TemplateRefusal(TEXT_LOST, f"{_shown(content)}, said by the {role}, is not in it")
        thought = reasoning_of(messages[-1]) if messages else ""
        if thought and not _appears(thought, text):
            raise TemplateRefusal(REASONING_LOST, f"{_shown(thought)} is not in it")


def reasoning_of(message: Message) -> str:
    """What an assistant thought before it answered, under whichever key it stands; empty where there is nothing."""
    if message.get("role") != "assistant":
        return ""
    found = (message.get(key) for key in REASONING_KEYS)
    return next((thought for thought in found if isinstance(thought, str) and thought.strip()), "")


def find_out(render: Render) -> Reads:
    """What the template behind `render` reads. Of a role that no rendering shows, nothing is known: text is given.

    A role is ignored only where a conversation with it was taken and its text is in none of the renderings.
    """
    forms: dict[str, bool] = {}
    ignored: set[str] = set()
    for roles in _SHAPES:
        best = max(_trials(render, roles), key=lambda trial: len(trial[1]), default=None)
        if best is None:
            continue
        parts, shown = best
        forms |= {role: role in parts for role in shown if role not in forms}
        ignored |= {*roles} - {*shown}
    wanted = frozenset(role for role, parts in forms.items() if parts)
    return Reads(wanted, frozenset(ignored - {*forms, "assistant"}), _reasoning_key(render, wanted))


def _trials(render: Render, roles: Sequence[str]) -> Iterator[tuple[frozenset[str], list[str]]]:
    """Which roles were given parts, and whose text was written then; without the trials that ended in an error."""
    names = [role for role in _MARKS if role in roles]
    for wants in itertools.product((False, True), repeat=len(names)):
        parts = frozenset(role for role, want in zip(names, wants, strict=True) if want)
        reads = Reads(parts, frozenset(), None)
        try:
            text = render([reads.message({"role": role, "content": _MARKS[role]}) for role in roles], True)
        except Exception:  # a template is a program: it can fail in every way
            continue
        yield parts, [role for role in names if _MARKS[role] in text]


def _reasoning_key(render: Render, parts: frozenset[str]) -> str | None:
    user, assistant = ({"role": role, "content": _MARKS[role]} for role in ("user", "assistant"))
    for key in REASONING_KEYS:
        reads = Reads(parts, frozenset(), key)
        answer = assistant | {key: _REASONING}
        for opening in ([user], [{"role": "system", "content": _MARKS["system"]}, user]):
            try:
                text = render([reads.message(message) for message in (*opening, answer)], False)
            except Exception:  # as above
                continue
            if _REASONING in text:
                return key
    return None


def _appears(said: str, text: str) -> bool:
    said = said.strip()
    return said in text or all(word in text for word in said.split() if not word.startswith("/"))


def _shown(text: str) -> str:
    text = " ".join(text.split())
    return repr(text if len(text) <= 60 else text[:59] + "…")
