"""The tokenizer of a target: text to ids and back, chats through the model's own template.

Wraps transformers' fast tokenizer, read from a Hugging Face folder or built from a GGUF file. Knows nothing of models;
streaming output is `spd_jax.weights.detokenize`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from spd_jax.files import no_text, read_object, read_text
from spd_jax.weights.gguf import GgufFile
from spd_jax.weights.gguf_tokenizer import build_tokenizer
from spd_jax.weights.location import resolve
from spd_jax.weights.template import REFUSED, Reads, TemplateRefusal, find_out

MOST_IDS = 2**24  # the largest vocabularies have 2**18; tokenizers keeps a place for every id
_SMALL = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """Text to ids and back.

    `digest` is a sha256 over vocabulary and merges: equal for equal tokenizers, whatever file they come from. `size` is
    the number of ids that stand for a token; a model may have more embedding rows, and ids from `size` on are never to
    be emitted.
    """

    inner: Any
    digest: str
    size: int
    origin: str

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Ids of a text; special tokens written in it are recognised.

        With `add_special` the begin and end tokens are added that the tokenizer is set up to add, but never a second
        begin token in front of one that the text already starts with.

        Raises:
            ValueError: the text holds half of a surrogate pair, which no encoding of text can.
        """
        begin = self.inner.bos_token
        _refuse_surrogates(text)
        ids = list(self.inner.encode(text, add_special_tokens=add_special))
        if begin and text.startswith(begin) and ids[:2] == [self.inner.bos_token_id] * 2:
            return ids[1:]
        return ids

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids as of `encode(text, add_special=False)`, and which characters `[start, end)` each stands for.

        Tokens that share a character (the bytes of one) have the same pair.
        """
        _refuse_surrogates(text)
        encoding = self.inner.backend_tokenizer.encode(text, add_special_tokens=False)
        begin = self.inner.bos_token
        twice = begin and text.startswith(begin) and encoding.ids[:2] == [self.inner.bos_token_id] * 2
        return encoding.ids[bool(twice) :], encoding.offsets[bool(twice) :]

    @functools.cached_property
    def special_tokens(self) -> dict[int, str]:
        """Spelling by id of the tokens that have no text."""
        added = self.inner.added_tokens_decoder.items()
        return {index: token.content for index, token in added if token.special}

    def spell(self, index: int) -> str | None:
        """How the vocabulary spells an id; None where it has none."""
        return self.inner.backend_tokenizer.id_to_token(index)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of ids; incomplete UTF-8 becomes U+FFFD."""
        return self.inner.decode(list(ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)

    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **template_arguments: Any
    ) -> list[int]:
        """Ids of a conversation in the model's chat template.

        The template writes the begin token where the model wants one, so the tokenizer adds none. Messages are those of
        `chat_text`; further arguments go to the template.

        Raises:
            ValueError: as `chat_text` and `encode`.
        """
        return self.encode(
            self.chat_text(messages, add_generation_prompt=add_generation_prompt, **template_arguments),
            add_special=False,
        )

    def chat_text(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **template_arguments: Any
    ) -> str:
        """A conversation in the model's chat template, as text.

        Messages are `{"role": ..., "content": ...}` with content as text, and of an assistant also `reasoning_content`;
        the template is given them in the form that it reads.

        Raises:
            ValueError: the tokenizer has no chat template; a message holds half of a surrogate pair.
            TemplateRefusal: the template ends in an error, or leaves out what a user said or what an assistant thought.
        """
        for message in messages:
            _refuse_surrogates(" ".join(value for value in message.values() if isinstance(value, str)))
        given = self.chat_messages(messages)
        text = self._render(given, add_generation_prompt=add_generation_prompt, **template_arguments)
        self.reads.check(messages, text)
        return text

    def chat_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Messages in the form that the chat template reads; errors as `chat_text`."""
        return [self.reads.message(message) for message in messages]

    @functools.cached_property
    def reads(self) -> Reads:
        """What the chat template reads.

        Raises:
            ValueError: the tokenizer has no chat template.
        """
        if self.inner.chat_template is None:
            raise ValueError(f"{self.origin}: the tokenizer has no chat template; encode plain text instead")
        return find_out(lambda messages, prompt: self._render(messages, add_generation_prompt=prompt))

    def _render(self, messages: Sequence[Mapping[str, Any]], **arguments: Any) -> str:
        """What the template makes of messages as they are."""
        try:
            text = self.inner.apply_chat_template(list(messages), tokenize=False, **arguments)
        except Exception as error:  # a template is a program: it can fail in every way
            said = " ".join(str(error).split()) or type(error).__name__
            raise TemplateRefusal(REFUSED, f"{said:.300} (chat template of {self.origin})") from error
        if wrong := no_text(text):
            raise TemplateRefusal(REFUSED, f"it writes {wrong} (chat template of {self.origin})")
        return text


def load_tokenizer(location: str | Path) -> Tokenizer:
    """The tokenizer of a model; `location` as for `open_target`, and also a folder with only a tokenizer.

    Raises:
        FileNotFoundError: nothing is there, or no tokenizer in it.
        ValueError: a GGUF tokenizer without rules here.
    """
    path = resolve(location)
    try:
        inner = _of_folder(path) if path.is_dir() else _of_gguf(path)
    except (OSError, ValueError) as error:
        if str(path) in str(error):
            raise
        raise _unreadable(path, error) from error
    except Exception as error:  # tokenizers raises nothing else
        raise _unreadable(path, error) from error
    return wrap_tokenizer(inner, str(path))


def _check_files(folder: Path, names: Iterable[str]) -> None:
    """Read files of a tokenizer as what they should be, since transformers takes some damage for no file at all."""
    for file in (folder / name for name in names):
        if file.exists():
            _ = read_object(file) if file.suffix == ".json" else read_text(file)


def _unreadable(path: Path, error: Exception) -> Exception:
    """What is wrong with a tokenizer: its largest file where that is no JSON object, else what the library says."""
    try:
        _check_files(path, _FILES[:1])
    except (OSError, ValueError) as wrong:
        return wrong
    return ValueError(f"{path}: its tokenizer cannot be read: {' '.join(str(error).split()):.300}")


def wrap_tokenizer(inner: Any, origin: str) -> Tokenizer:
    """A transformers fast tokenizer as a `Tokenizer`."""
    vocabulary = inner.get_vocab()
    last = max(vocabulary, key=vocabulary.__getitem__)
    if vocabulary[last] >= MOST_IDS:
        raise ValueError(f"{origin}: the tokenizer gives {last!r} the id {vocabulary[last]}: its files are damaged")
    model = json.loads(inner.backend_tokenizer.to_str())["model"]
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in model.get("merges", [])]
    text = json.dumps([sorted(vocabulary.items()), merges], ensure_ascii=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return Tokenizer(inner, digest, vocabulary[last] + 1, origin)


def _refuse_surrogates(text: str) -> None:
    if wrong := no_text(text):
        raise ValueError(wrong)


def _of_folder(folder: Path) -> Any:
    if not any((folder / name).exists() for name in _FILES):
        raise FileNotFoundError(f"{folder}: holds no tokenizer (looked for {', '.join(_FILES)})")
    _check_files(folder, _SMALL)
    if (folder / "tokenizer.json").exists():
        # Exactly what the file says; AutoTokenizer's classes rebuild parts of it from their own rules.
        return PreTrainedTokenizerFast.from_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def _of_gguf(path: Path) -> Any:
    source = GgufFile(path)
    tokens = source.metadata.get("tokenizer.ggml.tokens", [])
    named = {
        f"{name}_token": tokens[source.metadata[f"tokenizer.ggml.{key}_token_id"]]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if f"tokenizer.ggml.{key}_token_id" in source.metadata
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=build_tokenizer(source.metadata, source.origin),
        chat_template=source.metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **named,
    )
