"""One conversation whose assistant turns are written anew, token by token as the target saw and wrote them.

    dialogue = open_dialogue(conversation, number, tokenizer, longest_prompt, turns)   # Dialogue | Skipped
    while dialogue.asks: dialogue.take(answer to dialogue.ids)
    dialogue.record()

The ids of a turn's prompt and answer are the beginning of the next turn's prompt: answers are never tokenised again,
since decoded and encoded text need not give the same tokens. That holds only for templates that append; whether one
does is checked at every turn on the rendered texts, and a conversation ends before a turn for which it does not.

Knows tokenizers and templates, not models and files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from spd_jax.data.conversations import Conversation, Message, Skipped
from spd_jax.weights.template import TemplateRefusal
from spd_jax.weights.tokenizer import Tokenizer

NO_MESSAGES = "ids without messages"
TOO_LONG = "prompt too long"
NO_PROMPT = "prompt without tokens"
NEXT_TOO_LONG = "next prompt too long"
REWRITES = "the template rewrites earlier turns"
OTHER_END = "the answer ends with a token that the template does not write there"


@dataclasses.dataclass(frozen=True)
class Answer:
    """What the target wrote for one prompt; `stopped` if the last id is one that ends a turn, else it was cut."""

    ids: tuple[int, ...]
    stopped: bool


@dataclasses.dataclass
class Dialogue:
    """A conversation on its way: while `asks`, `ids` is the prompt of the next answer.

    `number` is the record's place in its source; `spans` are the answers so far, `[start, end)` of `ids`; `finish` says
    "stop" or "length" for each; `ended` is the reason why turns that were asked for are missing.
    """

    number: int
    origin: str
    tokenizer: Tokenizer
    longest_prompt: int
    pending: list[Message]
    messages: list[Message]
    text: str
    ids: list[int]
    turns: int | None = None
    spans: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    finish: list[str] = dataclasses.field(default_factory=list)
    ended: str | None = None
    asks: bool = True

    def take(self, answer: Answer) -> None:
        """Append an answer to `ids`, and the next user turn if there is one that can be asked."""
        start = len(self.ids)
        self.ids.extend(answer.ids)
        self.spans.append((start, len(self.ids)))
        self.finish.append("stop" if answer.stopped else "length")
        spoken = answer.ids[:-1] if answer.stopped else answer.ids
        said = self.tokenizer.decode(spoken, skip_special=False)
        self.messages.append(Message("assistant", said))
        end = self.tokenizer.decode(answer.ids[-1:], skip_special=False) if answer.stopped else ""
        self.asks = False
        if self.pending and (self.turns is None or len(self.spans) < self.turns):
            self.ended = self._ask(self.text + said, end)
            self.asks = self.ended is None

    def _ask(self, written: str, end: str) -> str | None:
        """Append the next user turn; the reason if that cannot be done."""
        message = self.pending[0]
        try:
            text = rendered(self.tokenizer, [*self.messages, message])
        except TemplateRefusal as refusal:
            return refusal.reason
        if not text.startswith(written):
            return REWRITES
        if not text.startswith(written + end):
            return OTHER_END
        # The template writes the end of a turn that was cut; it is part of the prompt then, and not learnt.
        more = self.tokenizer.encode(text[len(written + end) :], add_special=False)
        if len(self.ids) + len(more) > self.longest_prompt:
            return NEXT_TOO_LONG
        self.ids.extend(more)
        self.messages.append(self.pending.pop(0))
        self.text = text
        return None

    def record(self) -> dict[str, Any]:
        """What is known of the conversation, with the keys that `spd_jax.data.conversations` reads."""
        return {
            "messages": [message.fields() for message in self.messages],
            "ids": self.ids,
            "supervised": [list(span) for span in self.spans],
            "tokenizer": self.tokenizer.digest,
            "origin": self.origin,
            "finish": self.finish,
        }


def open_dialogue(
    conversation: Conversation, number: int, tokenizer: Tokenizer, longest_prompt: int, turns: int | None
) -> Dialogue | Skipped:
    """A conversation before its first answer, or why it is left out.

    Args:
        number: the record's place in its source; it names the conversation's random numbers.
        longest_prompt: tokens of a prompt at most.
        turns: answers at most; None for one to every user turn.
    """
    asked = [message for message in conversation.messages if message.role != "assistant"]
    first = next((index for index, message in enumerate(asked) if message.role == "user"), None)
    if first is None:
        return Skipped(NO_MESSAGES, conversation.origin)
    opening, pending = asked[: first + 1], asked[first + 1 :]
    try:
        text = rendered(tokenizer, opening)
    except TemplateRefusal as refusal:
        return Skipped(refusal.reason, conversation.origin, refusal.detail)
    ids = tokenizer.encode(text, add_special=False)
    if not ids or len(ids) > longest_prompt:
        return Skipped(TOO_LONG if ids else NO_PROMPT, conversation.origin)
    return Dialogue(number, conversation.origin, tokenizer, longest_prompt, pending, opening, text, ids, turns)


def rendered(tokenizer: Tokenizer, messages: Sequence[Message]) -> str:
    """The prompt of the turn after `messages` as text; errors as `Tokenizer.chat_text`."""
    return tokenizer.chat_text([message.fields() for message in messages])
