"""A conversation out of one record of a data set, or the reason why it is left out.

    parse_conversation(record, origin) -> Conversation | Skipped

A record holds its turns under `messages` or `conversations`; a turn is `{"role", "content"}` or ShareGPT's `{"from",
"value"}`. What data sets are known to hold (empty conversations, tool calls without text, turns out of order) is
skipped with a reason from `REASONS`, so that reasons can be counted, and is never an exception.

A record may carry `ids`, the tokens of the whole conversation, with `supervised`, the `[start, end)` spans of them that
the assistant wrote, and `tokenizer`, the digest of the tokenizer they belong to. Such ids are used as they are: text
that is decoded and encoded again need not give the same tokens.

What an assistant thought before it answered may stand beside its content, under a key of `REASONING_KEYS`. Knows
nothing of files, tokenizers and templates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from spd_jax.files import no_text
from spd_jax.weights.template import REASONING_KEYS

ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
}
TOOL_ROLES = frozenset({"tool", "function", "ipython", "observation", "function_call", "function_response"})
TURN_KEYS = ("messages", "conversations")

NOT_AN_OBJECT = "not an object"
NO_TURNS = "no turns"
UNKNOWN_ROLE = "unknown role"
TOOLS = "tool calls"
NO_TEXT = "turn without text"
EMPTY_TURN = "empty turn"
REASONING_NO_TEXT = "reasoning that is no text"
SURROGATE = "half of a surrogate pair"
ASSISTANT_FIRST = "assistant speaks first"
NO_ASSISTANT = "no assistant turn"
OUT_OF_ORDER = "turns do not alternate"
REASONS = (
    NOT_AN_OBJECT,
    NO_TURNS,
    UNKNOWN_ROLE,
    TOOLS,
    NO_TEXT,
    EMPTY_TURN,
    REASONING_NO_TEXT,
    SURROGATE,
    ASSISTANT_FIRST,
    NO_ASSISTANT,
    OUT_OF_ORDER,
)


@dataclasses.dataclass(frozen=True)
class Message:
    """One turn; `role` is system, user or assistant, `reasoning` what an assistant thought before it answered."""

    role: str
    content: str
    reasoning: str = ""

    def fields(self) -> dict[str, str]:
        """What records and chat templates call it."""
        thought = {REASONING_KEYS[0]: self.reasoning} if self.reasoning else {}
        return {"role": self.role, "content": self.content, **thought}


@dataclasses.dataclass(frozen=True)
class Conversation:
    """Turns in order: at most one of the system, then user and assistant in turn, with at least one assistant turn.

    `origin` is for messages (`path:line` and the like). With `ids` the tokens are given: `supervised` are the spans
    `[start, end)` of them, `tokenizer` is the digest of a `spd_jax.weights.tokenizer.Tokenizer`, and `messages` may be
    empty. The last turn may be the user's: whoever labels leaves it out, whoever generates may answer it.
    """

    messages: tuple[Message, ...]
    origin: str
    ids: tuple[int, ...] | None = None
    supervised: tuple[tuple[int, int], ...] | None = None
    tokenizer: str | None = None


@dataclasses.dataclass(frozen=True)
class Skipped:
    """A record that is left out: a short reason, the same for all of a kind, where it stands, and what else helps."""

    reason: str
    origin: str
    detail: str = dataclasses.field(default="", compare=False)

    @property
    def where(self) -> str:
        """Where it stands and what was found there."""
        return f"{self.origin}, {self.detail}" if self.detail else self.origin


class ConversationError(ValueError):
    """A record that is broken rather than unsuitable; the message starts with its origin."""


def parse_conversation(record: Any, origin: str) -> Conversation | Skipped:
    """The conversation of a record, or why it is skipped.

    Raises:
        ConversationError: a record with `ids` whose ids, spans or tokenizer digest cannot be.
    """
    if not isinstance(record, Mapping):
        return Skipped(NOT_AN_OBJECT, origin)
    turns = next((_listed(record[key]) for key in TURN_KEYS if record.get(key) is not None), [])
    if record.get("ids") is not None:
        return _with_ids(record, turns, origin)
    messages = _messages(turns, origin)
    if isinstance(messages, Skipped):
        return messages
    reason = _wrong_order(messages)
    return Conversation(tuple(messages), origin) if reason is None else Skipped(reason, origin)


def _listed(turns: Any) -> list[Any]:
    """Turns as a list of dicts; older `datasets` turn a list of dicts into a dict of lists."""
    if isinstance(turns, Mapping):
        columns = [value for value in turns.values() if isinstance(value, Sequence) and not isinstance(value, str)]
        if len(columns) != len(turns):
            return []
        return [dict(zip(turns, values, strict=False)) for values in zip(*columns, strict=False)]
    return list(turns) if isinstance(turns, Sequence) and not isinstance(turns, str) else []


def _messages(turns: Sequence[Any], origin: str) -> list[Message] | Skipped:
    """The messages, or why there are none."""
    messages = []
    for number, turn in enumerate(turns, start=1):
        found = _message(turn)
        if isinstance(found, tuple):
            reason, detail = found
            return Skipped(reason, origin, f"turn {number}{detail and ': '}{detail}")
        messages.append(found)
    return messages


def _message(turn: Any) -> Message | tuple[str, str]:
    """A message, or a reason and what else to say."""
    if not isinstance(turn, Mapping):
        return NOT_AN_OBJECT, ""
    # Columnar files give every turn every key, with null where the record had none.
    role = turn.get("role") if turn.get("role") is not None else turn.get("from")
    content = turn.get("content") if turn.get("content") is not None else turn.get("value")
    if (isinstance(role, str) and role in TOOL_ROLES) or turn.get("tool_calls") or turn.get("function_call"):
        return TOOLS, ""
    if not isinstance(role, str) or role not in ROLES:
        return UNKNOWN_ROLE, f"role {ascii(role)[:60]}"
    role, text = ROLES[role], _text(content)
    if text is None:
        return NO_TEXT, ""
    if not text.strip() and role != "system":
        return EMPTY_TURN, ""
    given = [turn[key] for key in REASONING_KEYS if turn.get(key)] if role == "assistant" else []
    reasoning = _text(given[0]) if given else ""
    if reasoning is None:
        return REASONING_NO_TEXT, f"found a {type(given[0]).__name__}"
    for one in (text, reasoning):
        if no_text(one):
            return SURROGATE, no_text(one)
    return Message(role, text, reasoning if reasoning.strip() else "")


def _text(content: Any) -> str | None:
    """Text of a content: a string, or a list of parts that are all text; None for anything else."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        return None
    parts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
    texts = [part for part in parts if isinstance(part, str)]
    return "".join(texts) if texts and len(texts) == len(parts) else None


def _wrong_order(messages: Sequence[Message]) -> str | None:
    spoken = [message.role for message in messages]
    if not spoken:
        return NO_TURNS
    spoken = spoken[1:] if spoken[0] == "system" else spoken
    if spoken and spoken[0] == "assistant":
        return ASSISTANT_FIRST
    if "assistant" not in spoken:
        return NO_ASSISTANT
    if any(role != ("user", "assistant")[index % 2] for index, role in enumerate(spoken)):
        return OUT_OF_ORDER
    return None


def _with_ids(record: Mapping[str, Any], turns: Sequence[Any], origin: str) -> Conversation | Skipped:
    ids, spans, tokenizer = record["ids"], record.get("supervised"), record.get("tokenizer")
    if not isinstance(ids, Sequence) or any(type(token) is not int or token < 0 for token in ids):
        raise ConversationError(f"{origin}: ids must be a list of token ids (whole numbers, none negative)")
    if not isinstance(tokenizer, str):
        raise ConversationError(
            f"{origin}: ids come without the digest of their tokenizer (tokenizer is {tokenizer!r}), so nothing says "
            "whose ids they are"
        )
    if not isinstance(spans, Sequence) or not all(_is_span(span) for span in spans):
        raise ConversationError(f"{origin}: ids need supervised: a list of [start, end) pairs, found {spans!r}")
    borders = [border for span in spans for border in span]
    pairs = zip([0, *borders], [*borders, len(ids)], strict=True)
    if any(before > after for before, after in pairs) or any(start == end for start, end in spans):
        raise ConversationError(
            f"{origin}: supervised must be spans that are not empty, in order, apart and within the {len(ids)} ids, "
            f"found {[list(span) for span in spans]}"
        )
    if not spans:
        return Skipped(NO_ASSISTANT, origin)
    messages = _messages(turns, origin)
    kept = () if isinstance(messages, Skipped) else tuple(messages)  # the ids count; the text is for the reader
    return Conversation(kept, origin, tuple(ids), tuple((start, end) for start, end in spans), tokenizer)


def _is_span(span: Any) -> bool:
    return isinstance(span, Sequence) and len(span) == 2 and all(type(border) is int for border in span)
