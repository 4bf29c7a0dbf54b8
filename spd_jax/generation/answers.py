"""Answers to prompts, many at a time: an `Answerer` for `spd_jax.data.regenerate` out of autoregressive decoding.

`open_regeneration` checks everything that can be checked without weights, `Regeneration.run` loads them and writes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

from spd_jax.config.regenerate import RegenerateConfig
from spd_jax.data.conversations import Conversation, Skipped
from spd_jax.data.dialogue import Answer, Dialogue, open_dialogue
from spd_jax.data.regenerate import Plan, Progress, regenerate
from spd_jax.data.sources import read_conversations, source_digest
from spd_jax.decode.autoregressive import AutoregressiveDecoder
from spd_jax.decode.host import FaultError
from spd_jax.decode.options import Options
from spd_jax.decode.sampling import Sampling
from spd_jax.parallel.platform import set_up_platform
from spd_jax.parallel.watch import Watch
from spd_jax.weights.ids import end_ids, find_stops, unknown_id
from spd_jax.weights.load import load_decoder, open_target
from spd_jax.weights.mapping import TargetWeights, config_digest
from spd_jax.weights.tokenizer import Tokenizer, load_tokenizer

# Options that decide about no line, or (stop) stand among the facts by what they come to.
NOT_FACTS = ("out", "limit", "compilation_cache", "patience", "skip_invalid", "stop")
CAPACITY_STEP = 128  # positions; measured: most of a step's time is reading the caches


@dataclasses.dataclass(frozen=True)
class DecodedAnswers:
    """Answers prompts greedily or as `options` say.

    Args:
        options: how to sample, how many tokens to write, which ids end a turn and the seed.
        batch: prompts at most; fewer are padded to a power of two, so that few programs are compiled.
    """

    decoder: AutoregressiveDecoder
    options: Options
    batch: int

    def __call__(self, prompts: Sequence[Sequence[int]], numbers: Sequence[int], greedy: bool) -> list[Answer]:
        """One answer a prompt; errors as `AutoregressiveDecoder.generate`."""
        real = len(prompts)
        spare = min(1 << (real - 1).bit_length(), self.batch) - real
        options = dataclasses.replace(
            self.options,
            sampling=Sampling() if greedy else self.options.sampling,
            sequences=(*numbers, *[0] * spare),
            stop=lambda sequence, ids: None if sequence < real else len(ids),
        )
        try:
            generation = self.decoder.generate([*prompts, *[[0]] * spare], options)
        except FaultError as error:
            raise FaultError(f"answers to conversations {list(numbers)}: {error}") from error
        return [Answer(tuple(result.ids), result.finish_reason == "stop") for result in generation.results[:real]]


@dataclasses.dataclass(frozen=True)
class Regeneration:
    """A run whose options have been checked; no weights are loaded yet. `ends` are the ids that end an answer."""

    config: RegenerateConfig
    weights: TargetWeights
    tokenizer: Tokenizer
    ends: tuple[int, ...]
    plan: Plan

    def run(self, on_batch: Callable[[Progress], None]) -> Progress:
        """Load the target and write what is missing; errors as `regenerate` and `read_conversations`."""
        config = self.config
        model = load_decoder(self.weights, jnp.dtype(config.dtype))
        decoder = AutoregressiveDecoder(
            model,
            max_length=config.max_length,
            prefill_chunk=config.prefill_chunk,
            num_tokens=min(self.tokenizer.size, self.weights.config.vocab_size),
            activations=jnp.float32 if jax.default_backend() == "cpu" else None,
            capacity_step=CAPACITY_STEP,
            watch=Watch(config.patience),
        )
        options = Options(
            max_new_tokens=config.max_new_tokens,
            sampling=Sampling(config.temperature, config.top_k, config.top_p),
            eos_ids=self.ends,
            seed=config.seed,
        )
        decoded = DecodedAnswers(decoder, options, config.batch)

        def begin(number: int, conversation: Conversation) -> Dialogue | Skipped:
            room = config.max_length - config.max_new_tokens
            opened = open_dialogue(conversation, number, self.tokenizer, room, config.max_turns)
            if isinstance(opened, Dialogue):
                self._check(opened.ids, opened.origin)
            return opened

        def answer(prompts: Sequence[Sequence[int]], numbers: Sequence[int], greedy: bool) -> list[Answer]:
            for ids, number in zip(prompts, numbers, strict=True):  # later turns too
                self._check(ids, f"conversation {number} of {config.source}")
            return decoded(prompts, numbers, greedy)

        return regenerate(
            Path(config.out),
            self.plan,
            read_conversations(config.source, split=config.split, skip_invalid=config.skip_invalid),
            begin,
            answer,
            limit=config.limit,
            source=config.source,
            on_batch=on_batch,
        )

    def _check(self, ids: Sequence[int], origin: str) -> None:
        """Refuse a prompt with ids that the model does not have."""
        wrong = unknown_id(ids, self.weights.config.vocab_size, self.tokenizer)
        if wrong:
            raise ValueError(f"{origin}: {wrong} of {self.config.target}")


def open_regeneration(config: RegenerateConfig) -> Regeneration:
    """Check everything that can be checked without weights.

    Raises:
        OSError, ValueError: target or source is not there or not one, the tokenizer has no chat template, the target
            has no id that ends a turn, a stop that is no special token, sampling options that contradict each other.
    """
    set_up_platform(compilation_cache=config.compilation_cache)
    Sampling(config.temperature, config.top_k, config.top_p)
    weights, tokenizer = open_target(config.target), load_tokenizer(config.target)
    if tokenizer.inner.chat_template is None:
        raise ValueError(
            f"{config.target}: the tokenizer has no chat template, so it has no conversations to answer in"
        )
    ends = _end_ids(config, weights, tokenizer)
    if not ends:
        raise ValueError(
            f"{config.target}: neither model nor tokenizer names an id that ends a turn, so answers would never end"
        )
    if config.max_length > weights.config.context:
        raise ValueError(
            f"max_length {config.max_length} is above the {weights.config.context} positions of {config.target}"
        )
    facts = {name: value for name, value in dataclasses.asdict(config).items() if name not in NOT_FACTS}
    facts["eos_ids"] = list(ends)
    digests = {
        "target_digest": config_digest(weights),
        "tokenizer": tokenizer.digest,
        "source_digest": source_digest(config.source, split=config.split),
    }
    greedy_share = 1.0 if config.temperature == 0.0 else config.greedy_share
    sampling = {"temperature": config.temperature, "top_k": config.top_k, "top_p": config.top_p, "seed": config.seed}
    return Regeneration(
        config, weights, tokenizer, ends, Plan(config.batch, greedy_share, config.seed, sampling, facts | digests)
    )


def _end_ids(config: RegenerateConfig, weights: TargetWeights, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The ids that end an answer: the model's, and the special tokens that stop it."""
    stops = find_stops(config.stop, tokenizer, weights.config.vocab_size, config.target)
    if stops.strings:
        special = ", ".join(sorted(map(repr, tokenizer.special_tokens.values()))[:8]) or "none"
        raise ValueError(
            f"stop {stops.strings[0]!r} is no special token of {config.target}, and an answer's ids cannot be cut "
            f"inside of a text; special tokens are {special}"
        )
    return tuple(dict.fromkeys((*end_ids(weights.config, tokenizer, config.target), *stops.ids)))
