"""Valid inputs of every script, as small as they can be, in one folder with relative names."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import yaml
from transformers.convert_slow_tokenizer import bytes_to_unicode

from spd_jax.plan import make_plan
from spd_jax.published.exchange import export_head
from spd_jax.speculation.checkpoint import save_head
from spd_jax.speculation.module import HeadConfig, draft_layer_config
from spd_jax.weights.load import open_target
from spd_jax.weights.mapping import config_digest
from spd_jax.weights.tokenizer import load_tokenizer
from tests.byte_text import write_byte_tokenizer
from tests.heads import random_module
from tests.tiny import save_llama, write_gguf
from tests.training.world import TEMPLATE, conversations, make_data

SIZES = {"vocab_size": 260, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64}
SIZES |= {"bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258}
TARGET = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"]
OF_TARGET = [f"target/{name}" for name in TARGET]
PIPELINE = {"target": "target", "stages": 2, "layout": "beside", "num_draft_layers": 1, "devices": 2}
DECODING = {"max_new_tokens": 2, "prefill_chunk": 8, "max_length": 48, "cycles_per_dispatch": 4}


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What a script reads: its options, for a YAML file, and the files that they name. `out` is what it writes and must
    not leave where it fails; None where that is kept, to go on with."""

    options: dict[str, object]
    files: tuple[str, ...]
    out: str | None = None


INPUTS = {
    "infer/generate.py": Inputs(
        PIPELINE | DECODING | {"head": "head", "prompts": "prompts.jsonl", "json": "out.json", "stop": ["zz"]},
        (*OF_TARGET, "head/config.json", "head/head.safetensors", "prompts.jsonl"),
        "out.json",
    ),
    "infer/generate.py of a GGUF file": Inputs(
        PIPELINE | DECODING | {"target": "target.gguf", "head": "target", "prompts": "ids.jsonl", "json": "out.json"},
        ("target.gguf", "ids.jsonl"),
        "out.json",
    ),
    "infer/evaluate.py": Inputs(
        PIPELINE | DECODING | {"heads": ["head"], "prompts": ["prompts.jsonl"], "batch": 2, "out": "out"},
        (*OF_TARGET, "head/config.json", "head/head.safetensors", "prompts.jsonl"),
    ),
    "infer/plan.py": Inputs(
        {"target": "target/config.json", "machine": "machine.yaml", "devices": 2, "replay": ["answers.jsonl"]}
        | {"json": "out.json", "alphas": [0.5], "context": 32},
        ("target/config.json", "machine.yaml", "answers.jsonl"),
        "out.json",
    ),
    "infer/check_model.py": Inputs({"target": "target", "prompt": "one"}, tuple(OF_TARGET)),
    "infer/import_head.py": Inputs(
        {"target": "target", "checkpoint": "head.pt", "out": "out", "final_anchor": "before_norm"},
        ("head.pt", *OF_TARGET),
        "out",
    ),
    "infer/import_head.py that exports": Inputs(
        {"target": "target", "head": "published", "export": "out.pt"},
        ("published/config.json", "published/head.safetensors", *OF_TARGET),
        "out.pt",
    ),
    "train/prepare.py": Inputs(
        {"target": "target", "sources": ["rows.jsonl", "rows.json"], "out": "out", "held_out": 2, "max_length": 40},
        (*OF_TARGET[2:4], "rows.jsonl", "rows.json"),
        "out",
    ),
    "train/regenerate.py": Inputs(
        {"target": "target", "source": "rows.jsonl", "out": "out.jsonl", "limit": 2, "batch": 2, "max_length": 60}
        | {"max_new_tokens": 2, "prefill_chunk": 8},
        (*OF_TARGET, "rows.jsonl"),
        "out.jsonl",
    ),
    "train/distill.py": Inputs(
        {"target": "target", "data": ["data"], "out": "out", "stages": 2, "num_draft_layers": 1, "row_length": 48}
        | {"max_steps": 1, "evaluate_every": 0, "save_every": 0, "projections": "identity", "training_devices": 1}
        | {"products": "float32", "head": "head", "chunk": 16},
        (*OF_TARGET, "data/manifest.json", "data/shard-00000.arrow", "head/config.json", "head/head.safetensors"),
    ),
}


def make_inputs(folder: Path) -> Path:
    """Write everything that `INPUTS` names, and a YAML file for each script."""
    target = folder / "target"
    model = save_llama(target, **SIZES)
    write_byte_tokenizer(target)
    file = target / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": TEMPLATE}))
    write_gguf(folder / "target.gguf", model, fields=gguf_tokenizer())
    weights = open_target(target)
    plan = make_plan(2, 2, num_draft_layers=1, layout="beside")
    head = HeadConfig(draft_layer_config(weights.config), 1, plan.anchors, 260, None, "own")
    digests = {"target_digest": config_digest(weights), "tokenizer_digest": load_tokenizer(target).digest}
    save_head(folder / "head", random_module(head), plan, target_name="target", **digests)
    mixer = dataclasses.replace(weights.config.layers[0].mixer, qk_norm=True)  # as the published code builds them
    published = dataclasses.replace(head, layer=dataclasses.replace(head.layer, mixer=mixer))
    save_head(folder / "published", random_module(published), plan, target_name="target", **digests)
    export_head(folder / "published", str(target), folder / "head.pt")
    rows = conversations(8)
    make_data(folder / "data", target, rows)
    (folder / "data.jsonl").unlink()
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rows.json").write_text(json.dumps(rows[:3]))
    prompts = [{"prompt": "The", "category": "a"}, {"prompt_ids": [256, 84]}, {"turns": ["one", "two"]}]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    (folder / "ids.jsonl").write_text(json.dumps(prompts[1]) + "\n")
    (folder / "answers.jsonl").write_text('{"verdicts": "paaarua"}\n{"verdicts": "p"}\n')
    machine = {"memory_bandwidth": 1e12, "flops": 1e14, "memory": 8e10, "link_bandwidth": 1e11}
    (folder / "machine.yaml").write_text(yaml.safe_dump(machine))
    for name, inputs in INPUTS.items():
        (folder / options_file(name)).write_text(yaml.safe_dump(inputs.options, sort_keys=False))
    return folder


def gguf_tokenizer() -> dict[str, Any]:
    """The byte tokenizer as metadata of a GGUF file."""
    spelling = bytes_to_unicode()
    fields: dict[str, Any] = {"model": "gpt2", "pre": "gpt-2", "bos_token_id": 256, "eos_token_id": 257}
    fields["tokens"] = [*(spelling[b] for b in range(256)), "<s>", "</s>", "<pad>", "<unused>"]
    fields["token_type"] = [1] * 256 + [3] * 4
    fields["merges"] = ["a b"]
    fields["tokens"][3] = "ab"  # a merge needs a token
    named = {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
    return named | {"tokenizer.chat_template": TEMPLATE}


def options_file(name: str) -> str:
    """The YAML file of an entry of `INPUTS`."""
    return f"{Path(name).name.replace(' ', '_')}.yaml"
