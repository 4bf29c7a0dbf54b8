"""One evaluation: prompts of several data sets through several heads of one target, and through plain decoding.

Every answer is written as it comes and a second run goes on where the first ended. The target is loaded once; a batch
is decoded by all decoders before the next one, so that their times are taken under the same conditions, and nothing is
timed before its programs have been compiled. What the answers come to is `spd_jax.evaluation.report`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

from spd_jax.decode.autoregressive import AutoregressiveDecoder
from spd_jax.decode.loop import PipelineDecoder
from spd_jax.decode.options import Options
from spd_jax.evaluation.job import AUTOREGRESSIVE, EvaluationJob, Question
from spd_jax.evaluation.samples import NO_ROOM, Sample
from spd_jax.generation.compare import Logits, compare_ids
from spd_jax.generation.loading import LoadProgress, load_plain, named_progress
from spd_jax.generation.prompts import encode_later_turn
from spd_jax.generation.text import TextStream
from spd_jax.generation.verdicts import verdicts_of


@dataclasses.dataclass(frozen=True)
class Done:
    """So many further answers of a decoder are in its file."""

    label: str
    dataset: str
    count: int


@dataclasses.dataclass(frozen=True)
class EvaluationDecoders:
    """Decoders by label; `plain` and `logits` (the target's, teacher-forced) where plain decoding runs too."""

    pipelines: dict[str, PipelineDecoder]
    plain: AutoregressiveDecoder | None = None
    logits: Logits | None = None


def load_evaluation(job: EvaluationJob, progress: LoadProgress | None = None) -> EvaluationDecoders:
    """Load what is needed for the answers that are missing: the target once for all heads, and nothing if none is."""

    pipelines: dict[str, PipelineDecoder] = {}
    for label, engine in job.engines.items():
        if not job.missing(label):
            continue
        first = next(iter(pipelines.values()), None)
        pipelines[label] = (
            engine.pipeline(named_progress("target", progress))
            if first is None
            else first.with_head(engine.head(), engine.plan)
        )
    if not job.compares or not any(job.missing(label) for label in job.files):
        return EvaluationDecoders(pipelines)
    return EvaluationDecoders(pipelines, *load_plain(job.engine, job.options, progress))


class Evaluation:
    """A job on its decoders; `warm_up_seconds` went into compiling so far."""

    def __init__(self, job: EvaluationJob, decoders: EvaluationDecoders):
        self.job = job
        self.warm_up_seconds = 0.0
        self._decoders = decoders

    def run(self) -> Iterator[Done]:
        """Decode everything that is missing; tells of every batch once its answers are written."""
        for batch in self._batches():
            for label, file in self.job.files.items():
                for turn in range(1, max(question.turns for question in batch) + 1):
                    missing = [q for q in batch if turn <= q.turns and q.key(turn) not in file.samples]
                    if missing:
                        for sample in self._answers(label, missing, turn):
                            file.add(sample)
                        yield Done(label, missing[0].dataset, len(missing))

    def _batches(self) -> Iterator[list[Question]]:
        size = self.job.config.batch
        for dataset in dict.fromkeys(question.dataset for question in self.job.questions):
            chosen = [question for question in self.job.questions if question.dataset == dataset]
            yield from (chosen[start : start + size] for start in range(0, len(chosen), size))

    def _answers(self, label: str, questions: Sequence[Question], turn: int) -> Iterator[Sample]:
        """The answers of a batch; those for which the context has no room are empty."""
        contexts = [self._context(label, question, turn) for question in questions]
        fitting: list[tuple[Question, list[int]]] = []
        for question, ids in zip(questions, contexts, strict=True):
            if len(ids) < self.job.engine.max_length:
                fitting.append((question, ids))
            else:
                yield self._sample(question, turn, ids, finish_reason=NO_ROOM)
        if fitting:
            yield from self._decoded(label, [question for question, _ in fitting], turn, [ids for _, ids in fitting])

    def _context(self, label: str, question: Question, turn: int) -> list[int]:
        """The ids that an answer follows: of a later turn with this decoder's own earlier answers."""
        if turn == 1:
            return list(question.ids)
        before, tokenizer = self.job.files[label].samples[question.key(turn - 1)], self.job.engine.tokenizer
        assert tokenizer is not None, "only texts have turns, and they need a tokenizer"
        ids, ends = [*before.prompt_ids, *before.ids], self.job.ends.ids
        return encode_later_turn(question.prompt, turn, ids, ends, tokenizer, chat=self.job.config.chat)

    def _decoded(
        self, label: str, questions: Sequence[Question], turn: int, contexts: list[list[int]]
    ) -> Iterator[Sample]:
        options = dataclasses.replace(self.job.options, sequences=tuple(q.number(turn) for q in questions))
        scripted = None if label == AUTOREGRESSIVE else self.job.engines[label].script
        if scripted is not None:
            texts = [self._reference(q, turn, ids) for q, ids in zip(questions, contexts, strict=True)]
            drafts = [scripted.drafts(text, self.job.engine.vocab_size) for text in texts]
            options = dataclasses.replace(options, forced_drafts=drafts)
        tokenizer, stops = self.job.engine.tokenizer, self.job.ends.stops
        texts = TextStream(tokenizer, len(questions), stops) if tokenizer is not None and stops else None
        options = options if texts is None else dataclasses.replace(options, stop=texts.check)
        decoder = self._plain if label == AUTOREGRESSIVE else self._decoders.pipelines[label]
        start = time.perf_counter()
        decoder.warm_up(contexts, options)
        self.warm_up_seconds += time.perf_counter() - start
        generation = decoder.generate(contexts, options)
        for row, (question, result) in enumerate(zip(questions, generation.results, strict=True)):
            text = None if tokenizer is None else tokenizer.decode(result.ids)
            sample = self._sample(
                question,
                turn,
                result.prompt_ids,
                ids=tuple(result.ids),
                text=text if texts is None else texts.finish(row, result),
                verdicts=verdicts_of(result),
                token_cycles=tuple(token.cycle for token in result.tokens),
                finish_reason=result.finish_reason or "length",
                prefill_seconds=generation.prefill_seconds / len(questions),
                decode_seconds=generation.decode_seconds / len(questions),
            )
            yield sample if label == AUTOREGRESSIVE else self._compared(sample)

    def _sample(self, question: Question, turn: int, prompt_ids: Sequence[int], **made: Any) -> Sample:
        nothing: dict[str, Any] = {"ids": (), "text": None, "verdicts": "", "token_cycles": ()}
        prompt = question.prompt
        return Sample(
            dataset=question.dataset,
            index=question.index,
            question_id=prompt.question_id,
            category=prompt.category,
            turn=turn,
            prompt_ids=tuple(prompt_ids),
            **nothing | made,
        )

    @property
    def _plain(self) -> AutoregressiveDecoder:
        assert self._decoders.plain is not None, "load_evaluation loads it where plain decoding runs"
        return self._decoders.plain

    def _reference(self, question: Question, turn: int, context: Sequence[int]) -> Sequence[int]:
        """The autoregressive ids after a context: those in the file, unless an earlier near-tie made it another one."""
        known = self.job.files[AUTOREGRESSIVE].samples[question.key(turn)]
        if known.prompt_ids == tuple(context):
            return known.ids
        options: Options = dataclasses.replace(self.job.options, sequences=(question.number(turn),))
        return self._plain.generate([context], options).results[0].ids

    def _compared(self, sample: Sample) -> Sample:
        """The same sample, and whether its ids are those of plain decoding, where both answer the same context."""
        if not self.job.compares or self.job.options.sampling.temperature > 0.0:
            return sample
        plain = self.job.files[AUTOREGRESSIVE].samples[sample.key]
        if plain.prompt_ids != sample.prompt_ids:
            return sample
        assert self._decoders.logits is not None, "load_evaluation makes it where plain decoding runs"
        found = compare_ids(sample.prompt_ids, sample.ids, plain.ids, self._decoders.logits, self.job.config.dtype)
        return dataclasses.replace(sample, equal=found.equal, difference=found.record())
