"""One generation run: prompts through the pipeline, and where asked through plain decoding, and what came of it.

`Run.stream` yields the text that a script writes as it comes, nothing is printed here. Prompts are checked before
weights are loaded, and nothing is timed before its programs have been compiled.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from spd_jax.config.run import GenerateConfig
from spd_jax.decode.autoregressive import AutoregressiveDecoder
from spd_jax.decode.loop import PipelineDecoder
from spd_jax.decode.options import Generation, Options
from spd_jax.decode.sampling import Sampling
from spd_jax.decode.tree import Tree
from spd_jax.files import write_whole
from spd_jax.generation.compare import Comparison, Logits, compare_ids
from spd_jax.generation.engine import Engine, open_engine
from spd_jax.generation.loading import Ends, LoadProgress, find_ends, load_plain, named_progress
from spd_jax.generation.prompts import (
    STDIN,
    Prompt,
    PromptError,
    encode_prompt,
    parse_prompts,
    read_prompts,
    text_prompts,
)
from spd_jax.generation.report import Facts, Outcome, Report, counted, prepare_output, shown, times_of, write_json
from spd_jax.generation.scripted import parse_script
from spd_jax.generation.text import IdStream, TextStream
from spd_jax.generation.timeline import reconstruct
from spd_jax.metrics import equivalent_accept_length

Decoder = PipelineDecoder | AutoregressiveDecoder


def gather_prompts(config: GenerateConfig, stdin: Callable[[], str] | None) -> list[Prompt]:
    """The prompts of a run: texts of the command line, a JSONL file, or standard input.

    Args:
        stdin: reads standard input to its end; None where there is none (a terminal).

    Raises:
        OSError, PromptError: they cannot be read, or there are none.
    """

    def piped() -> str:
        if stdin is None:
            raise PromptError("no prompt: give --prompt TEXT, --prompts FILE.jsonl or a text on standard input")
        return stdin()

    if config.prompts is not None and not config.prompt:
        if config.prompts == STDIN:
            return parse_prompts(piped().encode("utf-8"), "standard input", config.limit)
        return read_prompts(config.prompts, config.limit)
    texts = config.prompt[: config.limit] or (STDIN,)
    return text_prompts([piped().removesuffix("\n") if text == STDIN else text for text in texts])


@dataclasses.dataclass(frozen=True)
class Job:
    """A run whose every prompt and option has been checked; no weights are loaded yet."""

    config: GenerateConfig
    engine: Engine
    prompts: tuple[Prompt, ...]
    ids: tuple[tuple[int, ...], ...]
    options: Options
    ends: Ends

    @property
    def compares(self) -> bool:
        """Whether plain decoding runs too; scripted heads need its ids."""
        return self.config.compare or self.engine.script is not None

    def texts(self, size: int, options: Options) -> tuple[TextStream | IdStream, Options]:
        """The texts of a batch, and options that end its sequences at stop strings."""
        tokenizer = self.engine.tokenizer
        if tokenizer is None:
            return IdStream(size), options
        stops = self.ends.stops
        texts = TextStream(tokenizer, size, stops)
        return texts, dataclasses.replace(options, stop=texts.check if stops else None)

    def describe(self) -> str:
        """What is about to run, in a few lines."""
        engine = self.engine
        devices = counted(engine.plan.num_ranks, "device")
        kind = "simulated" if engine.simulated else engine.mesh.devices.flat[0].platform
        return "\n".join(
            [
                f"target   {self.config.target} ({self.config.dtype})",
                f"head     {engine.describe_head()}",
                f"plan     {engine.plan.describe()}",
                f"devices  {devices} ({kind})",
            ]
        )

    def facts(self, warm_up_seconds: float) -> Facts:
        """What the report says about the set-up."""
        plan = self.engine.plan
        return Facts(
            target=self.config.target,
            head=self.config.head,
            stage_layers=plan.stage_layers,
            layout=plan.layout,
            num_draft_layers=plan.num_draft_layers,
            devices=plan.num_ranks,
            simulated=self.engine.simulated,
            dtype=self.config.dtype,
            greedy=self.config.temperature == 0.0,
            width=self.config.width,
            warm_up_seconds=warm_up_seconds,
        )


def prepare(config: GenerateConfig, stdin: Callable[[], str] | None = None) -> Job:
    """Check everything that can be checked without weights.

    Raises:
        OSError, ValueError, RuntimeError: what is wrong, as `open_engine`, `gather_prompts` and `encode_prompt`.
    """
    Sampling(config.temperature, config.top_k, config.top_p)
    if parse_script(config.head) is not None and config.temperature > 0.0:
        raise ValueError(f"head {config.head} drafts what greedy decoding gives: it needs temperature 0")
    prompts = gather_prompts(config, stdin)
    for path in (config.json, config.trace):
        if path is not None:
            prepare_output(path)
    return settle(config, open_engine(config), prompts)


def settle(config: GenerateConfig, engine: Engine, prompts: Sequence[Prompt]) -> Job:
    """The job of decoding prompts on an engine that is open already.

    Raises:
        ValueError: as `find_ends`, `encode_prompt`, `Sampling`, `Tree` and `Options`.
    """
    ends = find_ends(engine, config)
    ids = [
        encode_prompt(p, engine.tokenizer, chat=config.chat, vocab_size=engine.vocab_size, max_length=engine.max_length)
        for p in prompts
    ]
    options = Options(
        max_new_tokens=config.max_new_tokens,
        sampling=Sampling(config.temperature, config.top_k, config.top_p),
        eos_ids=ends.eos_ids,
        ignore_eos=config.ignore_eos,
        seed=config.seed,
        log_probs=config.log_probs,
        tree=Tree(config.width, config.proposal),
    )
    return Job(config, engine, tuple(prompts), tuple(map(tuple, ids)), options, ends)


@dataclasses.dataclass(frozen=True)
class Decoders:
    """Decoders with their weights; `plain` and `logits` (the target's, teacher-forced) only where runs compare."""

    pipeline: PipelineDecoder
    plain: AutoregressiveDecoder | None
    logits: Logits | None


def load_decoders(job: Job, progress: LoadProgress | None = None) -> Decoders:
    """Load what a job needs; jobs with equal engines can share it."""

    pipeline = job.engine.pipeline(named_progress("pipeline", progress))
    if not job.compares:
        return Decoders(pipeline, None, None)
    return Decoders(pipeline, *load_plain(job.engine, job.options, progress))


class Run:
    """A job on its decoders. `report` is complete once `stream` has been read to its end."""

    def __init__(self, job: Job, decoders: Decoders):
        self.job = job
        self._decoders = decoders
        self._warm_up_seconds = 0.0
        self._outcomes: list[Outcome] = []
        self._batches: list[tuple[float, float]] = []
        self._reference_batches: list[tuple[float, float]] = []

    @property
    def report(self) -> Report:
        """What has come of the batches so far."""
        return Report(
            self.job.facts(self._warm_up_seconds),
            tuple(self._outcomes),
            tuple(self._batches),
            tuple(self._reference_batches),
            self.job.config.log_probs,
        )

    def stream(self) -> Iterator[str]:
        """Decode everything; yields what a reader sees, in pieces to be written one after the other."""
        size = self.job.config.batch
        for start in range(0, len(self.job.ids), size):
            yield from self._batch(range(start, min(start + size, len(self.job.ids))))

    def write_files(self) -> list[Path]:
        """Write the files that the job asks for, each whole or not at all; returns their paths.

        One process of several writes them.
        """
        config, written = self.job.config, []
        if not self.job.engine.leads:
            return written
        if config.json is not None:
            write_json(config.json, self.report.tree())
            written.append(Path(config.json))
        if config.trace is not None:
            for number, outcome in enumerate(self._outcomes, start=1):
                path = Path(config.trace)
                path = path if number == 1 else path.with_name(f"{path.stem}-{number}{path.suffix}")
                write_whole(path, self._picture(outcome))
                written.append(path)
        return written

    def _batch(self, numbers: range) -> Iterator[str]:
        prompts = [self.job.ids[number] for number in numbers]
        options = dataclasses.replace(self.job.options, sequences=tuple(numbers))
        reference: Generation | None = None
        scripted = self.job.engine.script
        if scripted is not None:
            reference = self._reference(prompts, options)
            drafts = [scripted.drafts(result.ids, self.job.engine.vocab_size) for result in reference.results]
            options = dataclasses.replace(options, forced_drafts=drafts)
        self._warm_up(self._decoders.pipeline, prompts, options)
        texts, options = self.job.texts(len(prompts), options)
        generation, several = Generation([]), len(prompts) > 1
        if not several:
            yield self._heading(numbers[0])
        for piece in self._decoders.pipeline.stream(prompts, options, generation):
            fresh = texts.push(piece)
            if not several:
                yield fresh
            elif piece.finish_reason is not None:  # texts that grow side by side cannot be read: whole ones only
                yield self._heading(numbers[piece.sequence]) + texts.text(piece.sequence) + "\n"
        if reference is None and self.job.compares:
            reference = self._reference(prompts, options)
        self._batches.append(times_of(generation))
        lines = []
        for row, number in enumerate(numbers):
            text = texts.text(row) if isinstance(texts, TextStream) else None
            outcome = self._outcome(generation, row, text, reference)
            self._outcomes.append(outcome)
            line = outcome.line(self.job.engine.plan.num_stages)
            lines.append(f"prompt {number + 1}: {line}" if several else line)
        yield "\n[" + "]\n[".join(lines) + "]\n"

    def _reference(self, prompts: Sequence[Sequence[int]], options: Options) -> Generation:
        plain = self._decoders.plain
        assert plain is not None, "load_decoders loads it for jobs that compare"
        self._warm_up(plain, prompts, options)
        _, options = self.job.texts(len(prompts), options)
        generation = plain.generate(prompts, options)
        self._reference_batches.append(times_of(generation))
        return generation

    def _warm_up(self, decoder: Decoder, prompts: Sequence[Sequence[int]], options: Options) -> None:
        start = time.perf_counter()
        decoder.warm_up(prompts, options)
        self._warm_up_seconds += time.perf_counter() - start

    def _outcome(self, generation: Generation, row: int, text: str | None, reference: Generation | None) -> Outcome:
        result, (prefill, decode) = generation.results[row], times_of(generation)
        if reference is None:
            return Outcome(result, text, prefill, decode)
        other, comparison = reference.results[row], None
        if self.job.options.sampling.temperature == 0.0:
            comparison = self._compare(result.prompt_ids, result.ids, other.ids)
        return Outcome(result, text, prefill, decode, other, reference.decode_seconds, comparison)

    def _compare(self, prompt: Sequence[int], ids: Sequence[int], reference: Sequence[int]) -> Comparison:
        assert self._decoders.logits is not None, "load_decoders makes it for jobs that compare"
        return compare_ids(prompt, ids, reference, self._decoders.logits, self.job.config.dtype)

    def _heading(self, number: int) -> str:
        prompt, total = self.job.prompts[number], len(self.job.prompts)
        said = f"{len(self.job.ids[number])} ids" if prompt.text is None else " ".join(prompt.text.split())
        said = said if len(said) <= 90 else said[:89] + "…"
        return f"\n── prompt {number + 1} of {total}: {said}\n"

    def _picture(self, outcome: Outcome) -> bytes:
        from spd_jax.generation.timeline_picture import draw_timeline  # matplotlib is slow to import

        engine, n = self.job.engine, self.job.engine.plan.num_stages
        tokenizer = engine.tokenizer
        name = Path(self.job.config.target).name
        s0 = shown(equivalent_accept_length(n, outcome.rate()))
        counts = f"{counted(len(outcome.result.ids), 'token')} in {counted(outcome.result.cycles, 'cycle')}"
        title = f"{name}, n = {counted(n, 'stage')}, {counts}, S0 = {s0}" + (
            ", drafts by script" if engine.script else ""
        )

        def label(token: int) -> str:
            return str(token) if tokenizer is None else tokenizer.decode([token], skip_special=False)

        return draw_timeline(reconstruct(outcome.result, n), title, label)
