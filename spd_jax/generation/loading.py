"""What `generate` and `evaluate` do alike before they decode: ids that end a text, and the decoder to compare with.

Knows an engine and options; neither prompts nor files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from spd_jax.config.run import DecodingConfig
from spd_jax.decode.autoregressive import AutoregressiveDecoder
from spd_jax.decode.options import Options
from spd_jax.generation.compare import Logits, teacher_forced_logits
from spd_jax.generation.engine import Engine
from spd_jax.weights.ids import Stops, end_ids, find_stops, unknown_id

LoadProgress = Callable[[str, int, int], None]
"""Called with (what is loaded, bytes done, bytes in all)."""


@dataclasses.dataclass(frozen=True)
class Ends:
    """What ends a text: `eos_ids` (with `ignore_eos` they are forbidden instead), and `stops`.

    A special token among the stop strings ends a text in either case.
    """

    eos_ids: tuple[int, ...]
    stops: Stops

    @property
    def ids(self) -> tuple[int, ...]:
        """Every id that ends a text as its last one, if it comes."""
        return tuple(dict.fromkeys((*self.eos_ids, *self.stops.ids)))


def find_ends(engine: Engine, config: DecodingConfig) -> Ends:
    """The ids that end a text, those given or else the model's, and the stop strings.

    Raises:
        ValueError: an id outside the vocabulary, or stop strings without a tokenizer.
    """
    stops = find_stops(config.stop, engine.tokenizer, engine.vocab_size, engine.config.target)
    if config.eos_ids is None:
        ids = end_ids(engine.weights.config, engine.tokenizer, engine.config.target)
    else:
        wrong = unknown_id(config.eos_ids, engine.vocab_size, engine.tokenizer)
        if wrong:
            raise ValueError(f"eos_ids: {wrong} of {engine.config.target}")
        ids = tuple(config.eos_ids)
    if config.ignore_eos:
        return Ends(tuple(token for token in ids if token not in stops.ids), stops)
    return Ends(tuple(dict.fromkeys((*ids, *stops.ids))), stops)


def named_progress(what: str, progress: LoadProgress | None) -> Callable[[int, int, str], None]:
    """The progress of one thing among several."""
    return lambda done, total, _: None if progress is None else progress(what, done, total)


def load_plain(engine: Engine, options: Options, progress: LoadProgress | None) -> tuple[AutoregressiveDecoder, Logits]:
    """Autoregressive decoding on one device, and the target's teacher-forced logits under the same restrictions."""
    plain, model = engine.baseline(named_progress("autoregressive decoder", progress))
    allowed = np.arange(engine.vocab_size) < engine.num_tokens
    if options.ignore_eos:
        allowed[list(options.eos_ids)] = False
    return plain, teacher_forced_logits(model, allowed)
