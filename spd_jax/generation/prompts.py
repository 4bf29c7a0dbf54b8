"""Prompts: read from JSONL or given as text, and turned into ids.

A line of a JSONL file holds exactly one of `prompt` (text), `turns` (texts of a user's turns, as in MT-Bench files) and
`prompt_ids`, and may say `question_id` and `category`; other keys are left alone. Records end at line feeds only:
U+2028 and its kin are characters like any other. Knows nothing of decoding.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from spd_jax.files import likely_cause, no_text
from spd_jax.weights.ids import unknown_id
from spd_jax.weights.template import TEXT_LOST, TemplateRefusal
from spd_jax.weights.tokenizer import Tokenizer

KEYS = ("prompt", "turns", "prompt_ids")
STDIN = "-"
T = TypeVar("T")


class PromptError(ValueError):
    """A prompt that cannot be used; the message starts with where it comes from (`path:line` for a file)."""


@dataclasses.dataclass(frozen=True)
class Prompt:
    """What one prompt says: text, or ids as they are; `origin` is for messages.

    `later` are the user's turns after the first; `question_id` (whatever the file says) and `category` name it in
    results.
    """

    origin: str
    text: str | None = None
    ids: tuple[int, ...] | None = None
    later: tuple[str, ...] = ()
    question_id: Any = None
    category: str | None = None


def text_prompts(texts: Sequence[str], first: int = 1) -> list[Prompt]:
    """Prompts given as text, numbered from `first`.

    Raises:
        PromptError: an empty one, or one with half of a surrogate pair.
    """
    prompts = [Prompt(f"prompt {number}", text=text) for number, text in enumerate(texts, start=first)]
    for prompt in prompts:
        _refuse_empty(prompt.origin, "prompt", prompt.text)
        _refuse_no_text(prompt.origin, "prompt", prompt.text)
    return prompts


def read_prompts(path: str | Path, limit: int | None = None) -> list[Prompt]:
    """The prompts of a JSONL file; with `limit` nothing behind that many prompts is looked at.

    Raises:
        OSError: the file cannot be read.
        PromptError: as `parse_prompts`.
    """
    return parse_prompts(Path(path).read_bytes(), str(path), limit)


def parse_prompts(data: bytes, origin: str, limit: int | None = None) -> list[Prompt]:
    """The prompts of JSONL data; `origin` stands in messages for its path. Blank lines are skipped.

    Raises:
        PromptError: a line that is not UTF-8, not JSON, no object, without exactly one of the keys, with a value of a
            wrong type, an empty one or one with half of a surrogate pair; or no prompt at all.
    """
    if data and (cause := likely_cause(data)):
        raise PromptError(f"{origin}: no file of prompts{cause}")
    prompts = []
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if limit is not None and len(prompts) >= limit:
            break
        if line.strip():
            prompts.append(_parse_line(line, f"{origin}:{number}"))
    if not prompts:
        raise PromptError(f"{origin}: holds no prompt; expected a JSON object a line, with one of {', '.join(KEYS)}")
    return prompts


def _parse_line(line: bytes, origin: str) -> Prompt:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise PromptError(f"{origin}: not UTF-8: {error}") from error
    except ValueError as error:
        raise PromptError(f"{origin}: not valid JSON: {error}") from error
    if not isinstance(record, dict):
        raise PromptError(f"{origin}: expected a JSON object with one of {', '.join(KEYS)}, found {_shown(record)}")
    given = [key for key in KEYS if key in record]
    if len(given) != 1:
        raise PromptError(f"{origin}: expected exactly one of {', '.join(KEYS)}, found {', '.join(given) or 'none'}")
    key, value = given[0], record[given[0]]
    for name in (key, "question_id", "category"):
        _refuse_no_text(origin, name, record.get(name))
    category = record.get("category")
    named = {"question_id": record.get("question_id"), "category": None if category is None else str(category)}
    if key == "prompt_ids":
        if not isinstance(value, list) or any(type(token) is not int for token in value):
            raise PromptError(f"{origin}: prompt_ids must be a list of whole numbers, found {_shown(value)}")
        _refuse_empty(origin, key, value)
        return Prompt(origin, ids=tuple(value), **named)
    later: tuple[str, ...] = ()
    if key == "turns":
        if not isinstance(value, list) or not all(isinstance(turn, str) for turn in value):
            raise PromptError(f"{origin}: turns must be a list of strings, found {_shown(value)}")
        _refuse_empty(origin, key, value)
        value, later = value[0], tuple(value[1:])
    if not isinstance(value, str):
        raise PromptError(f"{origin}: prompt must be a string, found {_shown(value)}")
    _refuse_empty(origin, key, value)
    return Prompt(origin, text=value, later=later, **named)


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def _refuse_empty(origin: str, key: str, value: Sequence[Any] | None) -> None:
    if not value:
        raise PromptError(f"{origin}: {key} is empty: a prompt needs at least one token")


def _refuse_no_text(origin: str, key: str, value: Any) -> None:
    wrong = no_text(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    if wrong:
        raise PromptError(f"{origin}: {key} holds {wrong}")


def encode_prompt(
    prompt: Prompt, tokenizer: Tokenizer | None, *, chat: bool, vocab_size: int, max_length: int
) -> list[int]:
    """The ids of a prompt; text goes through the chat template, or as it is with `chat` false.

    Raises:
        PromptError: text without a tokenizer or without a template; ids outside the vocabulary; a prompt without
            tokens, or one that leaves no room for a token (the context holds `max_length`).
    """
    if prompt.ids is not None:
        ids = list(prompt.ids)
    elif tokenizer is None:
        raise PromptError(f"{prompt.origin}: the target has no tokenizer, so prompts must be prompt_ids, not text")
    elif chat:
        if tokenizer.inner.chat_template is None:
            raise PromptError(f"{prompt.origin}: the tokenizer has no chat template; use --chat false for plain text")
        ids = _located(prompt, lambda: tokenizer.chat([{"role": "user", "content": prompt.text}]))
    else:
        ids = _located(prompt, lambda: tokenizer.encode(prompt.text or ""))
    if not ids:
        raise PromptError(f"{prompt.origin}: the prompt has no tokens, it needs at least one")
    wrong = unknown_id(ids, vocab_size, tokenizer)
    if wrong:
        raise PromptError(f"{prompt.origin}: {wrong}")
    if len(ids) >= max_length:
        raise PromptError(
            f"{prompt.origin}: the prompt has {len(ids)} tokens, at most {max_length - 1} leave room for one more "
            f"(context {max_length})"
        )
    return ids


def _located(prompt: Prompt, encode: Callable[[], T]) -> T:
    """What the tokenizer makes of a prompt; its errors name the prompt."""
    try:
        return encode()
    except ValueError as error:
        raise PromptError(f"{prompt.origin}: {error}") from error


def encode_later_turn(
    prompt: Prompt, turn: int, ids: Sequence[int], eos_ids: Sequence[int], tokenizer: Tokenizer, *, chat: bool
) -> list[int]:
    """The ids of a conversation up to the answer of a later turn: those of the conversation so far as they are, then
    what stands between the answer and the next one. Nothing that was decoded is ever turned into text and back.

    The id that ended the answer is left out where it is one of `eos_ids`: the template ends a turn in its own way.

    Args:
        turn: counted from 1; at least 2.
        ids: the ids of the turn before and those of its answer.
        chat: as in `encode_prompt`; false appends the text of the turn.

    Raises:
        PromptError: an empty turn, or a chat template that leaves earlier answers out.
    """
    texts = [prompt.text or "", *prompt.later][:turn]
    _refuse_empty(prompt.origin, f"turn {turn}", texts[-1])
    kept = list(ids[:-1] if ids and ids[-1] in eos_ids else ids)
    if not chat:
        return kept + _located(prompt, lambda: tokenizer.encode(texts[-1], add_special=False))
    mark = "(answer)"
    while any(mark in text for text in texts):
        mark += ")"
    messages = [{"role": "user", "content": texts[0]}]
    for text in texts[1:]:
        messages += [{"role": "assistant", "content": mark}, {"role": "user", "content": text}]
    before, after = "", ""
    try:
        before, _, after = tokenizer.chat_text(messages).rpartition(mark)
    except TemplateRefusal as refusal:
        if refusal.reason != TEXT_LOST:
            raise PromptError(f"{prompt.origin}: {refusal}") from refusal
    if not before:
        raise PromptError(
            f"{prompt.origin}: the chat template leaves earlier turns out, so there is no turn {turn}; "
            "use --turns first"
        )
    return kept + tokenizer.encode(after, add_special=False)
