"""Text in and text out, from a program: one call opens target, head and plan, another generates.

Every option has the name, meaning and default that it has in infer/generate.py. Knows no files and prints nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

from spd_jax.config.run import DecodingConfig, GenerateConfig, PipelineConfig
from spd_jax.decode.loop import PipelineDecoder
from spd_jax.decode.options import Generation, SequenceResult
from spd_jax.generation.engine import Engine, open_engine
from spd_jax.generation.loading import LoadProgress, named_progress
from spd_jax.generation.prompts import Prompt, PromptError, text_prompts
from spd_jax.generation.report import Outcome
from spd_jax.generation.run import Job, settle
from spd_jax.metrics import acceptance_rate, alpha, equivalent_accept_length

PromptLike = str | list[int]
"""A text, which goes through the chat template, or ids, which are taken as they are."""


def _names(kind: type[Any]) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


OPENING = _names(PipelineConfig)
DECODING = (_names(DecodingConfig) - OPENING - {"limit"}) | {"log_probs"}


@dataclasses.dataclass(frozen=True)
class GeneratedText:
    """A text, and what the pipeline counted while it was written; docs/metrics.md has the formulas.

    `text` is what the target wrote, up to a stop string or an end id; without a tokenizer, the ids with spaces between.
    `num_stages` is n. `result` has all that the decoder recorded, a token at a time. `log_probs` are those of the ids
    under the target, before any filter; None unless the option of that name is set.
    """

    text: str
    num_stages: int
    result: SequenceResult = dataclasses.field(repr=False)
    log_probs: tuple[float, ...] | None = dataclasses.field(default=None, repr=False)

    @property
    def ids(self) -> list[int]:
        """Generated ids."""
        return self.result.ids

    @property
    def tokens(self) -> int:
        """N, with the token from prefill."""
        return len(self.result.tokens)

    @property
    def cycles(self) -> int:
        """K, the pipeline's cycles until the last token was verified."""
        return self.result.cycles

    @property
    def accepted(self) -> int:
        """A, guesses that the target confirmed."""
        return self.result.accepted

    @property
    def rejected(self) -> int:
        """R, guesses that the target replaced by its own token."""
        return self.result.rejected

    @property
    def alpha(self) -> float | None:
        """A / (A + R), the share of guesses that were right; None where none was tested."""
        return alpha(self.accepted, self.rejected) if self.accepted + self.rejected else None

    @property
    def s0(self) -> float | None:
        """n (N - 1) / K, the speedup if draft, heads and exchange were free; None for texts of 0 or 1 tokens."""
        if not self.cycles:
            return None
        return equivalent_accept_length(self.num_stages, acceptance_rate(self.tokens, self.cycles))

    @property
    def finish_reason(self) -> str | None:
        """`stop` (an end id or a stop string) or `length`."""
        return self.result.finish_reason

    @property
    def counts(self) -> str:
        """The line that infer/generate.py prints under a text."""
        return Outcome(self.result, self.text, 0.0, 0.0).line(self.num_stages)


class Pieces(Iterator[str]):
    """The pieces of a text as they become certain; together they are the text. Decoding goes on as they are read."""

    def __init__(self, pieces: Iterator[str], answer: Sequence[GeneratedText]):
        self._pieces, self._answer = pieces, answer

    def __next__(self) -> str:
        return next(self._pieces)

    @property
    def answer(self) -> GeneratedText:
        """The whole text with its counts.

        Raises:
            ValueError: the pieces have not been read to their end.
        """
        if not self._answer:
            raise ValueError("the text is not complete: read all pieces first")
        return self._answer[0]


class TextPipeline:
    """A target and its head, loaded into the stages of a pipeline; made by `open_pipeline`."""

    def __init__(self, config: GenerateConfig, engine: Engine, decoder: PipelineDecoder):
        self.config, self.engine, self.decoder = config, engine, decoder

    @overload
    def generate(self, prompts: str, **options: Any) -> GeneratedText: ...

    @overload
    def generate(self, prompts: list[str] | list[list[int]], **options: Any) -> list[GeneratedText]: ...

    def generate(
        self, prompts: str | list[str] | list[list[int]], **options: Any
    ) -> GeneratedText | list[GeneratedText]:
        """Answer a prompt, or a list of them in their order.

        Args:
            prompts: texts, which go through the chat template unless `chat` is False; or a list of lists of ids, taken
                as they are.
            options: fields of `DecodingConfig` and `log_probs`, for this call only: max_new_tokens, temperature, top_k,
                top_p, seed, stop, eos_ids, ignore_eos, width, proposal, chat; batch, how many prompts are decoded
                together.

        Raises:
            ValueError: an unknown option, an option or a prompt that cannot be decoded; nothing has run then.
            FaultError: NaN or infinity came up.
        """
        job = self._job([prompts] if isinstance(prompts, str) else prompts, options)
        answers: list[GeneratedText] = []
        for start in range(0, len(job.ids), job.config.batch):
            for _ in self._decode(job, range(start, min(start + job.config.batch, len(job.ids))), answers):
                pass
        return answers[0] if isinstance(prompts, str) else answers

    def stream(self, prompt: PromptLike, **options: Any) -> Pieces:
        """Answer one prompt in pieces of text; options and errors as in `generate`, checked before the first piece."""
        job, answers = self._job([prompt], options), []
        return Pieces(self._decode(job, range(1), answers), answers)

    def _job(self, prompts: Sequence[PromptLike], options: Mapping[str, Any]) -> Job:
        for name in options:
            if name in OPENING:
                raise ValueError(f"{name} is settled when a pipeline is opened: give it to open_pipeline")
            if name not in DECODING:
                raise ValueError(f"no option {name}: there are {', '.join(sorted(DECODING))}")
        config = dataclasses.replace(self.config, **_tuples(options))
        return settle(config, self.engine, [_prompt(number, given) for number, given in enumerate(prompts, start=1)])

    def _decode(self, job: Job, numbers: range, answers: list[GeneratedText]) -> Iterator[str]:
        """Decode prompts together; yields text (of interest where there is one prompt) and adds their answers."""
        options = dataclasses.replace(job.options, sequences=tuple(numbers))
        texts, options = job.texts(len(numbers), options)
        generation = Generation([])
        for piece in self.decoder.stream([job.ids[number] for number in numbers], options, generation):
            if fresh := texts.push(piece):
                yield fresh
        for row, result in enumerate(generation.results):
            recorded = tuple(token.log_prob for token in result.tokens) if options.log_probs else None
            answers.append(GeneratedText(texts.text(row), self.engine.plan.num_stages, result, recorded))


def open_pipeline(
    target: str, head: str = "target", *, progress: LoadProgress | None = None, **options: Any
) -> TextPipeline:
    """Open a target with its speculation head, cut into the stages that the head was made for, and load both.

    Simulated devices have to be asked for before anything else in the process uses JAX; so call this first.

    Args:
        target: the target model: a folder with config.json and safetensors, a .gguf file, package:name/file.gguf, or a
            hub id org/name.
        head: a head folder; or target, a head made from the target's own weights, which is not trained and needs
            `stages`.
        progress: called with what is loaded, bytes done and bytes in all.
        options: other fields of `GenerateConfig`. `devices` (so many devices, simulated on the CPU; left out, those
            that JAX finds), stages, plan, layout, dtype, max_length, compilation_cache, ...; options of
            `TextPipeline.generate` are its defaults.

    Raises:
        ValueError: an unknown option, or as `open_engine`.
        FileNotFoundError, TimeoutError, RuntimeError: as `open_engine`.
    """
    known = (OPENING - {"target"}) | DECODING
    unknown = [name for name in options if name not in known]
    if unknown:
        raise ValueError(f"no option {unknown[0]}: there are {', '.join(sorted(known))}")
    config = GenerateConfig(target=target, head=head, **_tuples(options))
    engine = open_engine(config)
    if engine.script is not None:
        raise ValueError(f"head {head} is a demonstration of infer/generate.py: give a head folder, or target")
    return TextPipeline(config, engine, engine.pipeline(named_progress("pipeline", progress)))


def _tuples(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with lists as tuples; one value alone is a list of one, as on a command line."""
    alone = {name: (options[name],) for name in ("stop", "eos_ids", "plan") if isinstance(options.get(name), str | int)}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in {**options, **alone}.items()}


def _prompt(number: int, given: PromptLike) -> Prompt:
    if isinstance(given, str):
        return text_prompts([given], number)[0]
    if isinstance(given, list) and all(type(token) is int for token in given):
        return Prompt(f"prompt {number}", ids=tuple(given))
    raise PromptError(f"prompt {number}: expected a text or a list of ids, found {str(given)[:60]}")
