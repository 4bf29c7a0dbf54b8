"""What an evaluation is to do, checked before any weight is loaded, and what of it is done already.

Knows configurations, prompts and the folder of results; decodes nothing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spd_jax.config.evaluate import EvaluateConfig
from spd_jax.decode.options import Options
from spd_jax.decode.sampling import Sampling
from spd_jax.decode.tree import Tree
from spd_jax.evaluation.samples import Key, SampleFile, check_folder
from spd_jax.generation.engine import OWN_HEAD, Engine, open_engine
from spd_jax.generation.loading import Ends, find_ends
from spd_jax.generation.prompts import Prompt, PromptError, encode_later_turn, encode_prompt, read_prompts
from spd_jax.generation.report import counted
from spd_jax.generation.scripted import parse_script
from spd_jax.speculation.checkpoint import TENSOR_FILE, file_digest
from spd_jax.speculation.manifest import CONFIG_FILE
from spd_jax.weights.mapping import config_digest

AUTOREGRESSIVE = "autoregressive"


@dataclasses.dataclass(frozen=True)
class Question:
    """A prompt of a data set: its place there (from 0), the ids of its first turn, and how many turns to answer."""

    dataset: str
    index: int
    prompt: Prompt
    ids: tuple[int, ...]
    turns: int

    def key(self, turn: int) -> Key:
        """What names its answers."""
        return self.dataset, self.index, turn

    def number(self, turn: int) -> int:
        """Fixes the random numbers of an answer, whatever else is evaluated beside it."""
        return zlib.crc32(self.dataset.encode()) << 40 | self.index << 8 | turn


@dataclasses.dataclass(frozen=True)
class EvaluationJob:
    """An evaluation whose every prompt and option has been checked; no weights are loaded yet.

    `engines` are by label, one a head; `files` by label too, plain decoding (where it runs) first.
    """

    config: EvaluateConfig
    engines: dict[str, Engine]
    questions: tuple[Question, ...]
    options: Options
    ends: Ends
    settings: dict[str, Any]
    files: dict[str, SampleFile]

    @property
    def engine(self) -> Engine:
        """Any of the engines: target, cut and devices are the same."""
        return next(iter(self.engines.values()))

    @property
    def compares(self) -> bool:
        """Whether plain decoding runs too; scripted heads need its ids."""
        return self.config.compare or any(engine.script is not None for engine in self.engines.values())

    @property
    def keys(self) -> list[Key]:
        """Every answer that each decoder has to give."""
        return [question.key(turn) for question in self.questions for turn in range(1, question.turns + 1)]

    def missing(self, label: str) -> int:
        """How many answers a decoder still has to give."""
        return sum(key not in self.files[label].samples for key in self.keys)

    def describe(self) -> str:
        """What is about to run, in a few lines."""
        engine, config = self.engine, self.config
        heads = [
            f"{label}: {engine.describe_head()}, {counted(engine.plan.num_draft_layers, 'draft layer')}"
            for label, engine in self.engines.items()
        ]
        names = dict.fromkeys(question.dataset for question in self.questions)
        sets = [f"{name} {sum(q.dataset == name for q in self.questions)}" for name in names]
        done = sum(len(self.keys) - self.missing(label) for label in self.files)
        sampling = self.options.sampling
        chosen = "greedy" if sampling.temperature == 0.0 else f"temperature {sampling.temperature:g}"
        return "\n".join(
            [
                f"target   {config.target} ({config.dtype})",
                *(f"{'heads' if i == 0 else '':8} {line}" for i, line in enumerate(heads)),
                f"plan     {engine.plan.describe()}",
                f"devices  {self.settings['devices']}",
                f"prompts  {', '.join(sets)} ({config.turns} {'turn' if config.turns == 'first' else 'turns'})",
                f"decoding {chosen}, at most {config.max_new_tokens} new tokens, batch {config.batch}",
                f"results  {config.out}" + (f" ({done} answers are there already)" if done else ""),
            ]
        )


def prepare_evaluation(config: EvaluateConfig) -> EvaluationJob:
    """Check everything that can be checked without weights, and read what an earlier run has left.

    Raises:
        OSError, ValueError, RuntimeError: what is wrong, as `open_engine`, `read_prompts` and `encode_prompt`.
        FolderError: the folder holds another evaluation.
    """
    sampling = Sampling(config.temperature, config.top_k, config.top_p)
    scripted = [head for head in config.heads if parse_script(head) is not None]
    if scripted and config.temperature > 0.0:
        raise ValueError(f"head {scripted[0]} drafts what greedy decoding gives: it needs temperature 0")
    prompts = {Path(path).stem: read_prompts(path, config.limit) for path in config.prompts}
    engines = _engines(config)
    engine = next(iter(engines.values()))
    ends = find_ends(engine, config)
    questions = [
        _question(config, engine, dataset, index, prompt, ends.ids)
        for dataset, of_dataset in prompts.items()
        for index, prompt in enumerate(of_dataset)
    ]
    options = Options(
        max_new_tokens=config.max_new_tokens,
        sampling=sampling,
        eos_ids=ends.eos_ids,
        ignore_eos=config.ignore_eos,
        seed=config.seed,
        tree=Tree(config.width, config.proposal),
    )
    settings = _settings(config, engine, ends.eos_ids)
    folder = Path(config.out)
    if folder.is_dir():
        check_folder(folder, settings)
    folder.mkdir(parents=True, exist_ok=True)
    job = EvaluationJob(config, engines, tuple(questions), options, ends, settings, {})
    job.files.update(_files(job, folder))
    return job


def _engines(config: EvaluateConfig) -> dict[str, Engine]:
    """By label, in the order of `config.heads`; the first head folder brings the cut where none is given."""
    labels = dict(zip(config.heads, head_labels(config.heads), strict=True))
    first = next((head for head in config.heads if head != OWN_HEAD and parse_script(head) is None), config.heads[0])
    opened = open_engine(config.engine(first))
    return {label: opened if head == first else opened.with_head(head) for head, label in labels.items()}


def head_labels(heads: Sequence[str]) -> list[str]:
    """A short name for each head, fit for a file: the folder's own where no other has it, else the whole path."""
    names = [Path(head).name for head in heads]
    labels = []
    for head, name in zip(heads, names, strict=True):
        alone = names.count(name) == 1 and name != AUTOREGRESSIVE
        label = re.sub(r"[^\w.-]+", "-", name if alone else head).strip("-.") or "head"
        if len(label) > 48:  # a long script
            label = f"{label[:40]}-{hashlib.sha256(head.encode()).hexdigest()[:7]}"
        labels.append(f"head-{label}" if label in {*labels, AUTOREGRESSIVE} else label)
    return labels


def _question(
    config: EvaluateConfig, engine: Engine, dataset: str, index: int, prompt: Prompt, eos: Sequence[int]
) -> Question:
    ids = encode_prompt(
        prompt, engine.tokenizer, chat=config.chat, vocab_size=engine.vocab_size, max_length=engine.max_length
    )
    turns = 1 + len(prompt.later) if config.turns == "all" else 1
    for turn in range(2, turns + 1):
        assert engine.tokenizer is not None, "encode_prompt refuses texts without one"
        encode_later_turn(prompt, turn, ids, eos, engine.tokenizer, chat=config.chat)
    if index >= 1 << 32 or turns >= 1 << 8:
        raise PromptError(f"{prompt.origin}: {turns} turns in line {index}: at most 255 turns can be told apart")
    return Question(dataset, index, prompt, tuple(ids), turns)


def _settings(config: EvaluateConfig, engine: Engine, eos: Sequence[int]) -> dict[str, Any]:
    """What all answers of a folder have in common."""
    kind = "simulated" if engine.simulated else engine.mesh.devices.flat[0].platform
    return {
        "target": config.target,
        "target_digest": config_digest(engine.weights),
        "tokenizer_digest": None if engine.tokenizer is None else engine.tokenizer.digest,
        "stage_layers": list(engine.plan.stage_layers),
        "layout": engine.plan.layout,
        "devices": f"{counted(engine.plan.num_ranks, 'device')} ({kind})",
        "dtype": config.dtype,
        "max_length": engine.max_length,
        "prompts": {Path(path).stem: file_digest(path) for path in config.prompts},
        "limit": config.limit,
        "turns": config.turns,
        "chat": config.chat,
        "batch": config.batch,
        "max_new_tokens": config.max_new_tokens,
        "eos_ids": list(eos),
        "ignore_eos": config.ignore_eos,
        **({"stop": list(config.stop)} if config.stop else {}),
        "seed": config.seed,
        "compare": config.compare,
    }


def _files(job: EvaluationJob, folder: Path) -> dict[str, SampleFile]:
    config, files = job.config, {}
    decoding = {"temperature": config.temperature, "top_k": config.top_k, "top_p": config.top_p}
    if config.width > 1 or config.proposal != "sample":
        decoding |= {"width": config.width, "proposal": config.proposal}

    def opened(label: str, num_stages: int, **decoder: Any) -> SampleFile:
        header = {"settings": job.settings, "decoder": decoder | decoding}
        path = folder / f"{label}-T{config.temperature:g}.jsonl"
        return SampleFile(path, header, num_stages, writes=job.engine.leads)

    if job.compares:
        files[AUTOREGRESSIVE] = opened(AUTOREGRESSIVE, 1, head=None)
    for label, engine in job.engines.items():
        head, plan = engine.config.head, engine.plan
        digests = (
            None if engine.manifest is None else [file_digest(Path(head) / name) for name in (CONFIG_FILE, TENSOR_FILE)]
        )
        files[label] = opened(
            label,
            plan.num_stages,
            head=head if digests is None else None,
            head_digests=digests,
            num_draft_layers=plan.num_draft_layers,
            anchors=list(plan.anchors),
        )
    return files
