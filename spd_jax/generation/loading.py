"""What `generate` and `evaluate` do alike before they decode: ids that end a text, and the decoder to compare with.

Knows an engine and options; neither prompts nor files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from spd_jax.decode.autoregressive import AutoregressiveDecoder
from spd_jax.decode.options import Options
from spd_jax.generation.compare import Logits, teacher_forced_logits
from spd_jax.generation.engine import Engine

LoadProgress = Callable[[str, int, int], None]
"""Called with (what is loaded, bytes done, bytes in all)."""


def end_ids(engine: Engine, given: Sequence[int] | None) -> tuple[int, ...]:
    """The ids that end a text: those given, else the model's.

    Raises:
        ValueError: an id outside the vocabulary.
    """
    ids = engine.weights.config.eos_token_ids if given is None else tuple(given)
    if any(not 0 <= token < engine.vocab_size for token in ids):
        whose = f"{engine.config.target}: eos_token_id" if given is None else "eos_ids"
        raise ValueError(f"{whose} must lie in the vocabulary 0..{engine.vocab_size - 1}, found {list(ids)}")
    return ids


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
