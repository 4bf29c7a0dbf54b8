"""A `tokenizers` tokenizer out of a GGUF file's metadata.

GGUF keeps the vocabulary, the merges (or scores) and a name for the pre-tokenizer; the rules behind that name are
llama.cpp's and are written down here. Knows metadata only, not files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

# Token types of the format.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

_SUFFIXES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = _SUFFIXES + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _SUFFIXES + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclasses.dataclass(frozen=True)
class _Rules:
    """What a pre-tokenizer name stands for."""

    split: Callable[[], pre_tokenizers.PreTokenizer]
    normalizer: Callable[[], normalizers.Normalizer] | None = None
    ignore_merges: bool = False
    add_bos: bool = False


def _gpt2_split() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits_split() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2_split()])


def _pattern_split(pattern: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    def split() -> pre_tokenizers.PreTokenizer:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    return split


_GPT2_RULES = _Rules(_gpt2_split)
_DIGIT_RULES = _Rules(_single_digits_split)
_LLAMA3_RULES = _Rules(_pattern_split(_LLAMA3), ignore_merges=True, add_bos=True)
_QWEN2_RULES = _Rules(_pattern_split(_QWEN2), normalizer=normalizers.NFC)

BYTE_LEVEL: dict[str, _Rules] = {
    "default": _GPT2_RULES,
    "gpt-2": _GPT2_RULES,
    "smollm": _DIGIT_RULES,
    "starcoder": _DIGIT_RULES,
    "refact": _DIGIT_RULES,
    "codeshell": _DIGIT_RULES,
    "llama-bpe": _LLAMA3_RULES,
    "llama-v3": _LLAMA3_RULES,
    "llama3": _LLAMA3_RULES,
    "qwen2": _QWEN2_RULES,
    "deepseek-r1-qwen": _QWEN2_RULES,
}


def build_tokenizer(metadata: Mapping[str, Any], origin: str) -> Tokenizer:
    """The tokenizer a GGUF file describes, its special tokens and begin/end rules included.

    Raises:
        ValueError: a tokenizer model or a pre-tokenizer without rules here, or no vocabulary.
    """
    fields = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    if "tokens" not in fields:
        raise ValueError(f"{origin}: holds no tokenizer (tokenizer.ggml.tokens is missing)")
    model = fields.get("model")
    if model == "gpt2":
        tokenizer, add_bos = _byte_level(fields, origin)
    elif model == "llama":
        tokenizer, add_bos = _sentencepiece(fields), True
    else:
        raise ValueError(f"{origin}: tokenizer model {model!r} is not supported; supported: gpt2, llama")
    _add_special_tokens(tokenizer, fields)
    _add_begin_and_end(tokenizer, fields, add_bos)
    return tokenizer


def real_tokens(fields: Mapping[str, Any]) -> list[str]:
    """The vocabulary without the unused entries that pad its end."""
    tokens, types = list(fields["tokens"]), fields.get("token_type") or []
    while len(tokens) <= len(types) and tokens and types[len(tokens) - 1] == UNUSED:
        tokens.pop()
    return tokens


def _byte_level(fields: Mapping[str, Any], origin: str) -> tuple[Tokenizer, bool]:
    name = fields.get("pre", "default")
    rules = BYTE_LEVEL.get(name)
    if rules is None:
        raise ValueError(f"{origin}: pre-tokenizer {name!r} is not supported; supported: {', '.join(BYTE_LEVEL)}")
    vocabulary = {token: index for index, token in enumerate(real_tokens(fields))}
    merges = [tuple(merge.split(" ")) for merge in fields.get("merges", [])]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=rules.ignore_merges))
    if rules.normalizer is not None:
        tokenizer.normalizer = rules.normalizer()
    tokenizer.pre_tokenizer = rules.split()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, rules.add_bos


def _sentencepiece(fields: Mapping[str, Any]) -> Tokenizer:
    tokens = real_tokens(fields)
    types = fields.get("token_type") or [NORMAL] * len(tokens)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    unknown = fields.get("unknown_token_id", 0)
    merges = merges_of_scores(tokens, fields["scores"], types)
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token=tokens[unknown], byte_fallback=True, fuse_unk=True)
    )
    add_prefix = fields.get("add_space_prefix", True)
    prefix = [normalizers.Prepend("▁")] if add_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(content=" ", left=1)] if add_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def merges_of_scores(tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """Merges that a SentencePiece BPE vocabulary implies: every cut of a normal token into two.

    Best score first; with equal scores longer left parts first, as transformers orders them. Control and byte
    tokens are never merged into.
    """
    index = {token: place for place, token in enumerate(tokens)}
    found = []
    for token, score, kind in zip(tokens, scores, types, strict=False):
        if kind != NORMAL:
            continue
        cuts = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        cuts = [(left, right) for left, right in cuts if left in index and right in index]
        cuts.sort(key=lambda pair: (index[pair[0]], index[pair[1]]))
        found += [(left, right, score) for left, right in cuts]
    found.sort(key=lambda entry: (entry[2], len(entry[0]), len(entry[1])), reverse=True)
    return [(left, right) for left, right, _ in found]


def _add_special_tokens(tokenizer: Tokenizer, fields: Mapping[str, Any]) -> None:
    """Control tokens as special ones, user-defined tokens as plain added ones; both are never cut into pieces."""
    typed = list(zip(real_tokens(fields), fields.get("token_type") or [], strict=False))
    tokenizer.add_special_tokens(
        [AddedToken(t, normalized=False, special=True) for t, kind in typed if kind == CONTROL]
    )
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t, kind in typed if kind == USER_DEFINED])


def _add_begin_and_end(tokenizer: Tokenizer, fields: Mapping[str, Any], default_bos: bool) -> None:
    tokens = fields["tokens"]
    begin, end = fields.get("bos_token_id"), fields.get("eos_token_id")
    with_begin = fields.get("add_bos_token", default_bos) and begin is not None
    with_end = fields.get("add_eos_token", False) and end is not None
    used = [index for index, wanted in ((begin, with_begin), (end, with_end)) if wanted]
    if not used:
        return
    single = [f"{tokens[begin]}:0"] if with_begin else []
    single += ["$A:0"]
    single += [f"{tokens[end]}:0"] if with_end else []
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single,
        pair=[*single, *(piece.replace(":0", ":1").replace("$A", "$B") for piece in single)],
        special_tokens=[(tokens[index], index) for index in dict.fromkeys(used)],
    )
