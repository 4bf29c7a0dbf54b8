"""Token ids against the vocabulary of a model: which end a text, which stand for a stop string, which do not exist.

A tokenizer may have tokens that the model has no embedding for (added ones), and the other way round. Knows a model's
description and its tokenizer, and nothing of decoding.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable, Sequence

from spd_jax.config.model import ModelConfig
from spd_jax.weights.tokenizer import Tokenizer


def unknown_id(ids: Iterable[int], vocab_size: int, tokenizer: Tokenizer | None = None) -> str | None:
    """What is wrong with the first id that the model has no embedding for, to stand behind the place; None if none is.

    Args:
        tokenizer: spells the id where it has a token for it.
    """
    for token in ids:
        if not 0 <= token < vocab_size:
            spelt = None if tokenizer is None or not 0 <= token < tokenizer.size else tokenizer.spell(token)
            known = "" if spelt is None else f" ({spelt!r}, a token of the tokenizer that the model does not know)"
            return f"id {token}{known} is outside the vocabulary 0..{vocab_size - 1}"
    return None


def end_ids(config: ModelConfig, tokenizer: Tokenizer | None, origin: str) -> tuple[int, ...]:
    """The ids that end a text: those of the model's description, and the end token of its tokenizer.

    The description of a folder is config.json with generation_config.json; of a GGUF file its end of text, of turn and
    of message. An end token of the tokenizer that the model has no embedding for never comes, and is left out.

    Args:
        origin: names the model in the message.

    Raises:
        ValueError: the description names an id outside the vocabulary.
    """
    wrong = unknown_id(config.eos_token_ids, config.vocab_size, tokenizer)
    if wrong:
        raise ValueError(f"{origin}: eos_token_id: {wrong}")
    own = None if tokenizer is None else tokenizer.inner.eos_token_id
    known = (own,) if own is not None and 0 <= own < config.vocab_size else ()
    return tuple(dict.fromkeys((*config.eos_token_ids, *known)))


@dataclasses.dataclass(frozen=True)
class Stops:
    """Stop strings, sorted: `strings` are looked for in the text, `ids` among the ids."""

    strings: tuple[str, ...] = ()
    ids: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.strings or self.ids)


def find_stops(given: Sequence[str], tokenizer: Tokenizer | None, vocab_size: int, origin: str) -> Stops:
    """Stop strings as what they can be noticed by: a special token has no text, so it is one of the ids.

    A string that holds a special token and more is kept as a string, with a warning: the token has no text.

    Args:
        origin: names the model in the message.

    Raises:
        ValueError: there is no tokenizer, or a special token has an id outside the vocabulary.
    """
    if not given:
        return Stops()
    if tokenizer is None:
        raise ValueError(f"{origin} has no tokenizer, so there is no text that stop strings could end")
    special = {text: token for token, text in tokenizer.special_tokens.items()}
    ids = tuple(dict.fromkeys(special[text] for text in given if text in special))
    wrong = unknown_id(ids, vocab_size, tokenizer)
    if wrong:
        raise ValueError(f"stop: {wrong} of {origin}")
    strings = tuple(text for text in given if text not in special)
    for text in strings:
        held = [name for name in special if name in text]
        if held:
            warnings.warn(
                f"stop {text!r} holds {held[0]!r}, a special token, which has no text: only text that spells it out "
                f"ends there; give {held[0]!r} alone to end at the token",
                stacklevel=2,
            )
    return Stops(strings, ids)
