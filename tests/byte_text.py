"""The tiny English-like target of tests/data, with a tokenizer of bytes: id b is byte b, 256 begins, 257 ends.

Its greedy text reads " server and the content of the control ...", so that tests can speak of words and stop strings.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tests.fixtures import DATA

TARGET = DATA / "tiny_llama" / "target"
TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"


def write_byte_tokenizer(folder: Path, *, special: Mapping[int, str] | None = None, more: Sequence[str] = ()) -> None:
    """Write tokenizer.json and tokenizer_config.json of the byte tokenizer, with a chat template.

    Args:
        special: bytes that are special tokens with these names, and so have no text.
        more: special tokens behind the vocabulary of the targets, from id 260 on.
    """
    special = special or {}
    spelling = bytes_to_unicode() | special
    inner = Tokenizer(models.BPE(vocab={spelling[b]: b for b in range(256)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    named = (*special.values(), "<s>", "</s>", "<pad>", "<unused>")
    inner.add_special_tokens([AddedToken(token, special=True) for token in (*named, *more)])
    inner.save(str(folder / "tokenizer.json"))
    about = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


def copy_target(folder: Path, name: str = "tiny_llama") -> Path:
    """A tiny target of tests/data with the byte tokenizer, in a folder of its own."""
    shutil.copytree(DATA / name / "target", folder)
    write_byte_tokenizer(folder)
    return folder
