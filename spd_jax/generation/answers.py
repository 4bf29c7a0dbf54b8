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
from spd_jax.weights.load import load_decoder, open_target
from spd_jax.weights.mapping import TargetWeights, config_digest
from spd_jax.weights.tokenizer import Tokenizer, load_tokenizer

NOT_FACTS = ("out", "limit", "compilation_cache", "patience", "skip_invalid")  # options that decide about no line
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
    """A run whose options have been checked; no weights are loaded yet."""

    config: RegenerateConfig
    weights: TargetWeights
    tokenizer: Tokenizer
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
            eos_ids=self.weights.config.eos_token_ids,
            seed=config.seed,
        )

        def begin(number: int, conversation: Conversation) -> Dialogue | Skipped:
            room = config.max_length - config.max_new_tokens
            return open_dialogue(conversation, number, self.tokenizer, room, config.max_turns)

        return regenerate(
            Path(config.out),
            self.plan,
            read_conversations(config.source, split=config.split, skip_invalid=config.skip_invalid),
            begin,
            DecodedAnswers(decoder, options, config.batch),
            limit=config.limit,
            source=config.source,
            on_batch=on_batch,
        )


def open_regeneration(config: RegenerateConfig) -> Regeneration:
    """Check everything that can be checked without weights.

    Raises:
        OSError, ValueError: target or source is not there or not one, the tokenizer has no chat template, the target
            has no id that ends a turn, sampling options that contradict each other.
    """
    set_up_platform(compilation_cache=config.compilation_cache)
    Sampling(config.temperature, config.top_k, config.top_p)
    weights, tokenizer = open_target(config.target), load_tokenizer(config.target)
    if tokenizer.inner.chat_template is None:
        raise ValueError(
            f"{config.target}: the tokenizer has no chat template, so it has no conversations to answer in"
        )
    if not weights.config.eos_token_ids:
        raise ValueError(f"{config.target}: the model names no id that ends a turn, so answers would never end")
    if config.max_length > weights.config.context:
        raise ValueError(
            f"max_length {config.max_length} is above the {weights.config.context} positions of {config.target}"
        )
    facts = {name: value for name, value in dataclasses.asdict(config).items() if name not in NOT_FACTS}
    digests = {
        "target_digest": config_digest(weights),
        "tokenizer": tokenizer.digest,
        "source_digest": source_digest(config.source, split=config.split),
    }
    greedy_share = 1.0 if config.temperature == 0.0 else config.greedy_share
    sampling = {"temperature": config.temperature, "top_k": config.top_k, "top_p": config.top_p, "seed": config.seed}
    return Regeneration(
        config, weights, tokenizer, Plan(config.batch, greedy_share, config.seed, sampling, facts | digests)
    )
