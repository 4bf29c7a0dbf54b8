"""What a user asks of regenerating answers: the fields of a YAML file and of the command line, and nothing else.

Values only; whether source and target are there is for who uses them to find out.
"""

from __future__ import annotations

import dataclasses

from spd_jax.config.run import Dtype, at_least


@dataclasses.dataclass(frozen=True)
class RegenerateConfig:
    """One run of train/regenerate.py.

    Args:
        target: the model that answers: a folder with config.json and safetensors, a .gguf file,
            package:name/file.gguf, or a hub id org/name. It needs a tokenizer with a chat template.
        source: where conversations come from: a file (.parquet, .json, .jsonl, the last two also with .gz),
            package:name/file, a folder written with save_to_disk, or a hub name org/name or org/name:config.
        out: the JSONL file to write; FILE.run.json beside it says what it was made from.
        split: of a source that has several; left out, its only one or train.
        skip_invalid: skip and count lines that cannot be parsed; otherwise the first is an error.
        limit: stop after the batch with which so many conversations are reached. A later run may raise it.
        max_turns: regenerate so many assistant turns of a conversation at most (default: all) and leave out what
            follows.
        batch: conversations answered together.
        max_length: longest conversation in tokens; a turn whose prompt leaves no room for max_new_tokens is not asked.
        max_new_tokens: tokens of an answer at most; a longer one is cut there and no end is learnt from it.
        temperature: of the sampled answers; 0 makes all answers greedy.
        top_k: sample among the k most likely tokens; 0 is off, and much slower on a CPU.
        top_p: sample among the most likely tokens that hold this share of probability; 1 is off.
        stop: special tokens of the tokenizer, such as <|im_end|>, that end an answer besides those of the model.
        greedy_share: share of the conversations whose answers are greedy, from 0 to 1; the others are sampled.
        seed: of the random numbers; a conversation's own do not depend on its neighbours.
        dtype: of the weights. bfloat16 is the faster one for large batches where the CPU has matrix units for it.
        prefill_chunk: prompt tokens worked on at a time.
        compilation_cache: folder where compiled programs are kept for the next run.
        patience: seconds after which a program that makes no progress is given up, with a line that says what waited;
            0 waits for ever.
    """

    target: str
    source: str
    out: str
    split: str | None = None
    skip_invalid: bool = False
    limit: int | None = None
    max_turns: int | None = None
    batch: int = 64
    max_length: int = 1024
    max_new_tokens: int = 256
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    greedy_share: float = 0.0
    seed: int = 0
    dtype: Dtype = "float32"
    prefill_chunk: int = 128
    compilation_cache: str | None = None
    patience: float = 60.0

    def __post_init__(self) -> None:
        for name in ("limit", "max_turns", "batch", "max_new_tokens", "prefill_chunk"):
            at_least(1, name, getattr(self, name))
        at_least(0, "seed", self.seed)
        at_least(0, "patience", self.patience)
        if self.max_length <= self.max_new_tokens:
            raise ValueError(
                f"max_length {self.max_length} must be above max_new_tokens {self.max_new_tokens}: it counts the prompt"
            )
        if not 0.0 <= self.greedy_share <= 1.0:
            raise ValueError(f"greedy_share must lie in [0, 1], found {self.greedy_share}")
