"""What a user asks of a run: the fields of a YAML file and of the command line, and nothing else.

Values only. Checks that need the model (a plan that does not fit, a prompt that is too long) belong to who uses them.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

Dtype = Literal["float32", "bfloat16"]
PipelineLayout = Literal["separate", "beside"]
Proposal = Literal["top", "sample"]


@dataclasses.dataclass(frozen=True)
class PipelineConfig:
    """A target and the pipeline that it runs in.

    Args:
        target: the target model: a folder with config.json and safetensors, a .gguf file, package:name/file.gguf, or a
            hub id org/name.
        stages: number of pipeline stages n (default: the head's).
        plan: layers of each stage, for example [5,4,4] (default: as even as they go).
        layout: separate puts the draft layers on a device of their own (n + 1 devices), beside puts them beside the
            first stage (n devices). Default: the head's, else separate.
        num_draft_layers: draft layers of a head made from the target (default 3); a head folder has its own.
        devices: how many devices there are, simulated on the CPU; left out, those that JAX finds.
        dtype: of weights and caches.
        max_length: longest sequence, prompt included (default and most: the positions that the model was made for,
            with those that a scaling of its rotary embedding adds).
        cycles_per_dispatch: cycles between two looks of the host; changes how text streams, never what it is.
        prefill_chunk: prompt tokens that a stage works on at a time.
        compilation_cache: folder where compiled programs are kept for the next run.
        patience: seconds after which a program that makes no progress is given up, with a line that says what waited;
            0 waits for ever.
        coordinator: host:port of process 0, to run on the devices of several processes or machines; all are given the
            same. Process 0 prints and writes files.
        num_processes: how many processes there are, with coordinator.
        process_id: the number of this process, 0 to num_processes - 1, with coordinator.
    """

    target: str
    stages: int | None = None
    plan: tuple[int, ...] | None = None
    layout: PipelineLayout | None = None
    num_draft_layers: int | None = None
    devices: int | None = None
    dtype: Dtype = "float32"
    max_length: int | None = None
    cycles_per_dispatch: int = 16
    prefill_chunk: int = 128
    compilation_cache: str | None = None
    patience: float = 60.0
    coordinator: str | None = None
    num_processes: int = 1
    process_id: int = 0

    def __post_init__(self) -> None:
        for name in ("stages", "num_draft_layers", "devices", "cycles_per_dispatch", "prefill_chunk", "num_processes"):
            at_least(1, name, getattr(self, name))
        at_least(0, "patience", self.patience)
        if self.coordinator is None and (self.num_processes != 1 or self.process_id != 0):
            raise ValueError(
                f"num_processes {self.num_processes} and process_id {self.process_id} need a coordinator (host:port)"
            )


@dataclasses.dataclass(frozen=True)
class EngineConfig(PipelineConfig):
    """A target, its speculation head and the pipeline that they run in.

    Args:
        head: the speculation head: a head folder; target (made from the target's own weights, untrained); or, to
            demonstrate exact cycle counts, oracle (every draft right), anti (every draft wrong), script:1101... (one
            digit a generated token, 1 right and 0 wrong; the first token has no draft, beyond the end: right).
    """

    head: str = "target"


@dataclasses.dataclass(frozen=True)
class DecodingConfig(PipelineConfig):
    """How prompts are decoded, whatever is then done with the answers.

    Args:
        limit: use only the first so many prompts of a file.
        chat: put text prompts into the model's chat template; false encodes them as they are.
        batch: prompts decoded together.
        max_new_tokens: tokens to generate at most for an answer; null for as many as the context holds.
        temperature: 0 is greedy.
        top_k: sample among the k most likely tokens; 0 is off.
        top_p: sample among the most likely tokens that hold this share of probability; 1 is off.
        seed: of the random numbers; a prompt's own do not depend on its neighbours.
        eos_ids: token ids that end a text (default: those that the model's config.json and generation_config.json name,
            or its GGUF file, and the end token of its tokenizer).
        stop: strings that end a text; the text ends before, the ids with the token that completed the string. A special
            token of the tokenizer, such as <|im_end|>, ends a text too.
        ignore_eos: forbid the ids that end a text, to the target and the draft alike.
        width: branches of the draft tree that a pipeline column holds; 1 is a chain.
        proposal: how a draft's branches come from its distribution when sampling: sample draws them without
            replacement, top takes the likeliest. The text has the target's distribution with either.
    """

    limit: int | None = None
    chat: bool = True
    batch: int = 1
    max_new_tokens: int | None = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    eos_ids: tuple[int, ...] | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    width: int = 1
    proposal: Proposal = "sample"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("limit", "batch", "width"):
            at_least(1, name, getattr(self, name))
        at_least(0, "max_new_tokens", self.max_new_tokens)
        at_least(0, "seed", self.seed)
        if "" in self.stop:
            raise ValueError("stop holds an empty string, which would end every text at once")


@dataclasses.dataclass(frozen=True)
class GenerateConfig(DecodingConfig, EngineConfig):
    """One run of infer/generate.py.

    Args:
        prompt: prompts as text; `-` reads one from standard input. Takes the place of `prompts`.
        prompts: a JSONL file with prompt, turns (the first is taken) or prompt_ids in a line; `-` for standard input.
        log_probs: record the log-probability of every token under the target.
        compare: decode autoregressively too, on one device, and compare.
        json: file for the results.
        trace: PNG file for the timeline of the pipeline; further prompts go to FILE-2.png, FILE-3.png, ...
    """

    prompt: tuple[str, ...] = ()
    prompts: str | None = None
    log_probs: bool = False
    compare: bool = False
    json: str | None = None
    trace: str | None = None


def at_least(least: int, name: str, value: float | int | None) -> None:
    """Refuse a number below `least`, and what is no number; None passes.

    Raises:
        ValueError: names the option.
    """
    if value is not None and not value >= least:  # NaN neither
        raise ValueError(f"{name} must be at least {least}, found {value}")
