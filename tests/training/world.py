"""A tiny target that speaks, conversations prepared for it, and options of runs on them: all that is in files.

The template writes `Q: ... A: ...` and marks what the assistant says.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from spd_jax.config.distill import DistillConfig
from spd_jax.config.prepare import PrepareConfig
from spd_jax.data.prepare import prepare
from tests.byte_text import copy_target

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}Q: {{ message['content'] }} A:"
    "{% else %}{% generation %}{{ message['content'] }}</s>{% endgeneration %}{% endif %}{% endfor %}"
)
TEXT = " server and the content of the control of the server is a list of the first part of the content "


def make_target(folder: Path, name: str = "tiny_llama") -> Path:
    """A tiny target of tests/data in a folder of its own."""
    copy_target(folder, name)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": TEMPLATE}))
    return folder


def conversations(count: int) -> list[dict[str, Any]]:
    """Questions by number, answers of some twenty bytes."""
    found = []
    for number in range(count):
        answer = TEXT[3 * number % 60 :][: 15 + number % 10]
        turns = [{"role": "user", "content": f"say {number}"}, {"role": "assistant", "content": answer}]
        found.append({"messages": turns})
    return found


def make_data(folder: Path, target: Path, records: Iterable[Mapping[str, Any]], *, held_out: float = 0.0) -> Path:
    """Records prepared for the target; the JSONL file lies beside the folder."""
    source = folder.with_suffix(".jsonl")
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    prepare(PrepareConfig(str(target), str(folder), sources=(str(source),), held_out=held_out))
    return folder


def distill_config(target: Path, data: Path, out: Path, **changes: Any) -> DistillConfig:
    """A short run on one device. All runs here have one row of 48 tokens, so they compile the same pass."""
    fields: dict[str, Any] = {"stages": 4, "num_draft_layers": 1, "row_length": 48, "rows": 1, "max_steps": 4}
    fields |= {"evaluate_every": 2, "evaluate_batches": 2, "save_every": 2, "learning_rate": 2e-3, "fit_batches": 4}
    fields |= {"training_devices": 1, "products": "float32", "chunk": 64} | changes
    return DistillConfig(str(target), str(out), data=(str(data),), **fields)
