"""The tiny English-like target of tests/data, with a tokenizer of bytes: id b is byte b, 256 begins, 257 ends.

Its greedy text reads " server and the content of the control ...", so that tests can speak of words and stop strings.
"""

import json
import shutil
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tests.fixtures import DATA

TARGET = DATA / "tiny_llama" / "target"
TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"


def write_byte_tokenizer(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json of the byte tokenizer, with a chat template."""
    spelling = bytes_to_unicode()
    inner = Tokenizer(models.BPE(vocab={spelling[b]: b for b in range(256)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(token, special=True) for token in ("<s>", "</s>", "<pad>", "<unused>")])
    inner.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))


def copy_target(folder: Path, name: str = "tiny_llama") -> Path:
    """A tiny target of tests/data with the byte tokenizer, in a folder of its own."""
    shutil.copytree(DATA / name / "target", folder)
    write_byte_tokenizer(folder)
    return folder
