"""The draft vocabulary: which token ids a head may propose, chosen by how often they were written.

    counts = count_tokens(arrays_of_ids, tokenizer.size)
    chosen = choose_draft_vocabulary(counts, 32768, must_have=config.eos_token_ids)
    HeadConfig(..., draft_ids=chosen.ids)

Ids are absolute target ids, sorted: row i of the head's LM head scores token `ids[i]`. EAGLE-3 checkpoints store
offsets instead (`d2t[i] = ids[i] - i`, so that a vocabulary of the first ids is all zeros); `draft_offsets` gives them.

Only ids below the tokenizer's size are ever chosen: a model can have more embedding rows than its tokenizer has tokens,
and those rows stand for nothing. Knows counts and ids, not where the texts come from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from jaxtyping import Int, Int32, Int64
from transformers.convert_slow_tokenizer import bytes_to_unicode


@dataclasses.dataclass(frozen=True)
class DraftVocabulary:
    """Sorted target ids, and the share of all counted tokens that they are."""

    ids: tuple[int, ...]
    coverage: float


def count_tokens(arrays: Iterable[Int[np.ndarray, " _"]], tokenizer_size: int) -> Int64[np.ndarray, " V"]:
    """How often each id 0..tokenizer_size - 1 occurs, for example among the supervised tokens of a training set.

    Raises:
        ValueError: an id outside that range.
    """
    counts = np.zeros(tokenizer_size, np.int64)
    for ids in arrays:
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < tokenizer_size:
            raise ValueError(
                f"found ids {ids.min()}..{ids.max()}, the tokenizer has ids 0..{tokenizer_size - 1}: these texts "
                "belong to another tokenizer"
            )
        counts += np.bincount(ids, minlength=tokenizer_size)
    return counts


def choose_draft_vocabulary(
    counts: Int64[np.ndarray, " V"], size: int, *, must_have: Sequence[int] = ()
) -> DraftVocabulary:
    """The `must_have` ids and the most frequent others, `size` in all; of equally frequent ones the lower id.

    Args:
        counts: of every id of the tokenizer, as from `count_tokens`.
        must_have: ids that are in whatever their counts, such as those that end a text.

    Raises:
        ValueError: a size that cannot be had, or a `must_have` id that is no token or stands there twice.
    """
    check_draft_ids(must_have, len(counts), what="must_have ids")
    if not max(len(must_have), 1) <= size <= len(counts):
        raise ValueError(
            f"a draft vocabulary of {size} ids is not possible: at least {max(len(must_have), 1)} (must_have), at most "
            f"{len(counts)} (the tokenizer's)"
        )
    preferred = counts.copy()
    preferred[list(must_have)] = np.iinfo(np.int64).max
    ids = np.sort(np.argsort(-preferred, kind="stable")[:size])
    total = int(counts.sum())
    return DraftVocabulary(tuple(ids.tolist()), int(counts[ids].sum()) / total if total else 0.0)


def check_draft_ids(ids: Sequence[int], vocab_size: int, *, what: str = "draft ids") -> None:
    """Refuse ids that cannot name rows of a head.

    Raises:
        ValueError: duplicates, or ids outside 0..vocab_size - 1.
    """
    outside = [token for token in ids if not 0 <= token < vocab_size]
    if outside:
        raise ValueError(f"{what} must lie in 0..{vocab_size - 1}, found {outside[:5]}")
    values, counts = np.unique(np.asarray(ids, np.int64), return_counts=True)
    if (counts > 1).any():
        raise ValueError(f"{what} must not hold duplicates, found {values[counts > 1][:5].tolist()} more than once")


def draft_index(ids: Sequence[int], vocab_size: int) -> Int32[np.ndarray, " V"]:
    """For each target id its row in the head, -1 where it has none: what a teacher's token is compared by.

    Raises:
        ValueError: as `check_draft_ids`, or ids that are not sorted.
    """
    check_draft_ids(ids, vocab_size)
    if list(ids) != sorted(ids):
        raise ValueError("draft ids must be sorted: row i of the head scores the i-th smallest id")
    index = np.full(vocab_size, -1, np.int32)
    index[list(ids)] = np.arange(len(ids))
    return index


def draft_offsets(ids: Sequence[int]) -> list[int]:
    """EAGLE-3's `d2t`: what is to be added to a row number to get its target id."""
    return [token - row for row, token in enumerate(ids)]


def byte_tokens(vocabulary: Mapping[str, int]) -> tuple[int, ...]:
    """Ids of the tokens that stand for one byte, from which any text can be spelt; sorted, empty if there are none.

    Args:
        vocabulary: token to id, spelt as byte-level BPE or as SentencePiece (`<0x0A>`) does.
    """
    spellings = [*bytes_to_unicode().values()], [f"<0x{byte:02X}>" for byte in range(256)]
    whole = [names for names in spellings if all(name in vocabulary for name in names)]
    return tuple(sorted(vocabulary[name] for name in whole[0])) if whole else ()
