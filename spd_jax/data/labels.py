"""Which tokens of a conversation the assistant wrote: a turn's text and its end-of-turn token, not its role header.

    Labeller(tokenizer).label(conversation) -> Labelled | Skipped

The conversation is rendered by the model's chat template and tokenised once, as a whole. A turn is supervised only if
the tokens before it are those that generation would be given there, `tokenizer.chat(messages before it)`; a turn for
which they are not is left out and counted (`Labelled.turns_left_out`). That happens where a template rewrites earlier
turns once there are later ones (drops their thinking, say), or where a turn's first characters merge with the header.

The turns are those marked `{% generation %}` in the template; without marks they are the difference between the
rendered texts before and after a turn. A template for which neither works is an error: nothing is ever trained on a
mask of all or of none.

Knows tokenizers and templates, not files; lengths are the business of `spd_jax.data.prepare`.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int32
from transformers.utils.chat_template_utils import render_jinja_template

from spd_jax.data.conversations import Conversation, Message, Skipped
from spd_jax.weights.template import TemplateRefusal
from spd_jax.weights.tokenizer import Tokenizer

NOT_AS_GENERATED = "no turn is as generation would see it"
SPECIAL_TEXT = "special token in the assistant's text"

_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PROBE = (Message("user", "hi"), Message("assistant", "yo"), Message("user", "and"), Message("assistant", "so"))


@dataclasses.dataclass(frozen=True)
class Labelled:
    """Tokens of a conversation and, for each, whether the assistant wrote it and it is to be learnt."""

    ids: Int32[np.ndarray, " T"]
    supervised: Bool[np.ndarray, " T"]
    origin: str
    turns_left_out: int = 0


@dataclasses.dataclass(frozen=True)
class _Turn:
    """Characters of one assistant turn in the rendered text: where generation would begin, and what is marked."""

    prompt_end: int
    start: int
    end: int


class TemplateError(ValueError):
    """A chat template from which the assistant's tokens cannot be told; names the tokenizer."""


class Labeller:
    """Labels conversations for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        added = tokenizer.inner.added_tokens_decoder.items()
        special = {number: str(token) for number, token in added if token.special}
        self._special_ids = frozenset(special)
        texts = sorted(map(re.escape, special.values()), key=len, reverse=True)
        self._special_text = re.compile("|".join(texts)) if texts else None
        # The few tokens between two turns are mostly the same: `<|im_start|>assistant\n`.
        self._encode = functools.lru_cache(maxsize=256)(functools.partial(tokenizer.encode, add_special=False))
        self._probed = False

    def label(self, conversation: Conversation) -> Labelled | Skipped:
        """Tokens and labels of a conversation, up to its last assistant turn; given ids are used as they are.

        Raises:
            TemplateError: the tokenizer's template cannot be used at all.
            ValueError: no chat template; ids that belong to another tokenizer or are none of its tokens.
        """
        if conversation.ids is not None:
            return self._label_ids(conversation)
        if not self._probed:
            self._check_template()
            self._probed = True
        return self._label_text(conversation)

    def _label_ids(self, conversation: Conversation) -> Labelled:
        origin, known = conversation.origin, self.tokenizer
        if conversation.tokenizer != known.digest:
            raise ValueError(
                f"{origin}: its ids belong to the tokenizer with digest {conversation.tokenizer}, not to "
                f"{known.origin} with digest {known.digest}; ids of another tokenizer mean other text"
            )
        ids = np.asarray(conversation.ids, np.int32)
        if ids.size and int(ids.max()) >= known.size:
            raise ValueError(
                f"{origin}: id {ids.max()} is no token of {known.origin}, which has ids 0..{known.size - 1}"
            )
        supervised = np.zeros(ids.shape, bool)
        for start, end in conversation.supervised or ():
            supervised[start:end] = True
        return Labelled(ids, supervised, origin)

    def _label_text(self, conversation: Conversation) -> Labelled | Skipped:
        spoken = [message.role for message in conversation.messages]
        messages = conversation.messages[: len(spoken) - spoken[::-1].index("assistant")]
        own = (f"{message.reasoning}\n{message.content}" for message in messages if message.role == "assistant")
        if self._special_text is not None and any(self._special_text.search(text) for text in own):
            return Skipped(SPECIAL_TEXT, conversation.origin)
        try:
            text, turns = self._turns(messages)
        except TemplateRefusal as refusal:
            return Skipped(refusal.reason, conversation.origin, refusal.detail)
        ids, offsets = self.tokenizer.encode_with_offsets(text)
        starts = [start for start, _ in offsets]
        supervised = np.zeros(len(ids), bool)
        left_out = 0
        for turn in turns:
            if turn is None or not self._is_prompt(text[: turn.prompt_end], ids, starts):
                left_out += 1
                continue
            first, behind = bisect.bisect_left(starts, turn.start), bisect.bisect_left(starts, turn.end)
            supervised[first : self._end_of_turn(text[: turn.end], ids, offsets, first, behind)] = True
        if not supervised.any():
            return Skipped(NOT_AS_GENERATED, conversation.origin)
        return Labelled(np.asarray(ids, np.int32), supervised, conversation.origin, left_out)

    def _turns(self, messages: Sequence[Message]) -> tuple[str, list[_Turn | None]]:
        """The rendered text and its assistant turns, None for one that generation would see otherwise."""
        text = self._render(messages, prompt=False)
        marks = self._marked(messages, text)
        turns: list[_Turn | None] = []
        for index in (index for index, message in enumerate(messages) if message.role == "assistant"):
            before = self._render(messages[:index], prompt=True)
            after = text if index == len(messages) - 1 else self._render(messages[: index + 1], prompt=False)
            start, end = (0, len(text)) if marks is None else marks[len(turns)]
            start, end = max(start, len(before)), min(end, len(after))  # marks may take in the role header
            faithful = text.startswith(before) and text.startswith(after) and start < end
            turns.append(_Turn(len(before), start, end) if faithful else None)
        return text, turns

    def _render(self, messages: Sequence[Message], *, prompt: bool) -> str:
        return self.tokenizer.chat_text([one.fields() for one in messages], add_generation_prompt=prompt)

    def _marked(self, messages: Sequence[Message], text: str) -> list[tuple[int, int]] | None:
        """The spans that the template marks as generated, None if it has no marks."""
        inner = self.tokenizer.inner
        template = inner.get_chat_template()
        if not _MARKS.search(template):
            return None
        chat = self.tokenizer.chat_messages([message.fields() for message in messages])
        settings = {"return_assistant_tokens_mask": True, **inner.special_tokens_map}
        # Annotated as a string there, but a pair of lists: texts and spans.
        render: Callable[..., Any] = render_jinja_template
        (rendered,), (spans,) = render([chat], chat_template=template, **settings)
        expected = sum(message.role == "assistant" for message in messages)
        if rendered != text or len(spans) != expected:
            raise TemplateError(
                f"{self.tokenizer.origin}: the chat template marks {len(spans)} spans with {{% generation %}} for "
                f"{expected} assistant turns; expected one mark around each"
            )
        return spans

    def _is_prompt(self, prompt: str, ids: Sequence[int], starts: Sequence[int]) -> bool:
        """Whether the tokens before a turn are those of its prompt alone.

        Text around a special token is tokenised apart, so what is before the last special token need not be looked at.
        """
        behind = bisect.bisect_left(starts, len(prompt))
        first = next((index for index in range(behind - 1, 0, -1) if ids[index] in self._special_ids), 0)
        window = prompt[starts[first] if first else 0 :]
        return self._encode(window) == list(ids[first:behind])

    def _end_of_turn(
        self, text: str, ids: Sequence[int], offsets: Sequence[tuple[int, int]], first: int, behind: int
    ) -> int:
        """Where a turn's tokens end: white space behind the end-of-turn token is the template's own."""
        ends = (index for index in range(behind - 1, first - 1, -1) if ids[index] in self._special_ids)
        last = next(ends, None)
        return behind if last is None or text[offsets[last][1] :].strip() else last + 1

    def _check_template(self) -> None:
        """Label a conversation whose answer is known; with a system message where it is refused without one."""
        found = self._label_text(Conversation(_PROBE, self.tokenizer.origin))
        if isinstance(found, Skipped):
            again = self._label_text(Conversation((Message("system", "be"), *_PROBE), self.tokenizer.origin))
            found = found if isinstance(again, Skipped) else again
        if isinstance(found, Skipped):
            why = f"{found.reason}: {found.detail}" if found.detail else found.reason
        else:
            learnt = self.tokenizer.decode(found.ids[found.supervised].tolist(), skip_special=False)
            if not found.supervised.all() and _PROBE[-1].content in learnt and _PROBE[-2].content not in learnt:
                return
            why = f"{int(found.supervised.sum())} of {found.ids.size} tokens would be the assistant's: {learnt!r}"
        raise TemplateError(
            f"{self.tokenizer.origin}: the assistant's tokens cannot be told from its chat template ({why}, for a "
            "conversation of two turns each). Expected a template with {% generation %} marks around them, or one "
            "whose text with an answer begins with the text of the prompt for it. The template begins: "
            f"{self.tokenizer.inner.get_chat_template()[:80]!r}"
        )
