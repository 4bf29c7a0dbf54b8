"""Optimiser and learning rate schedule, from optax.

Knows no model: which parameters there are is the caller's business.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import optax

OptimizerName = Literal["adamw", "muon"]
ScheduleName = Literal["linear", "cosine", "constant"]


@dataclasses.dataclass(frozen=True)
class OptimizerOptions:
    """What `make_optimizer` makes.

    `final_rate` is the share of `learning_rate` behind the last step. `clip`: largest norm of all gradients together,
    none if null. With muon, matrices are Muon's and all else is Adam's, at the same rate.
    """

    name: OptimizerName = "adamw"
    learning_rate: float = 1e-4
    schedule: ScheduleName = "linear"
    warmup_steps: int = 0
    final_rate: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = 1.0
    b1: float = 0.9
    b2: float = 0.999

    def __post_init__(self) -> None:
        positive, share = (lambda x: 0 < x < math.inf), (lambda x: 0 <= x < 1)
        rules: tuple[tuple[str, str, Callable[[float], bool]], ...] = (
            ("learning_rate clip", "be above 0", positive),
            ("warmup_steps weight_decay", "be at least 0", lambda x: 0 <= x < math.inf),
            ("final_rate", "lie in [0, 1]", lambda x: 0 <= x <= 1),
            ("b1 b2", "lie in [0, 1)", share),
        )
        for names, rule, holds in rules:
            for name in names.split():
                value = getattr(self, name)
                if value is not None and not holds(value):
                    raise ValueError(f"{name} must {rule}, found {value}")


def learning_rate(options: OptimizerOptions, total_steps: int) -> optax.Schedule:
    """The rate of every step, from 0: a linear rise over `warmup_steps`, then the schedule, which reaches its end after
    the last step."""
    peak, low = options.learning_rate, options.learning_rate * options.final_rate
    rest = max(total_steps - options.warmup_steps, 1)
    if options.schedule == "linear":
        after = optax.linear_schedule(peak, low, rest)
    elif options.schedule == "cosine":
        after = optax.cosine_decay_schedule(peak, rest, options.final_rate)
    else:
        after = optax.constant_schedule(peak)
    if not options.warmup_steps:
        return after
    # From step 1 on: a first update with rate 0 would be a step for nothing.
    rise = optax.linear_schedule(peak / (options.warmup_steps + 1), peak, options.warmup_steps)
    return optax.join_schedules([rise, after], [options.warmup_steps])


def make_optimizer(options: OptimizerOptions, total_steps: int) -> optax.GradientTransformation:
    """AdamW (arXiv 1711.05101) or Muon (optax.contrib) behind a clip of the gradient's norm."""
    rate = learning_rate(options, total_steps)
    if options.name == "adamw":
        steps = optax.adamw(rate, b1=options.b1, b2=options.b2, weight_decay=options.weight_decay)
    else:
        steps = optax.contrib.muon(
            rate,
            adam_b1=options.b1,
            adam_b2=options.b2,
            weight_decay=options.weight_decay,
            adam_weight_decay=options.weight_decay,
            consistent_rms=0.2,  # updates of Adam's size, whatever the shape
        )
    whole = steps if options.clip is None else optax.chain(optax.clip_by_global_norm(options.clip), steps)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer powers
            return whole.update(updates, state, params)

    return optax.GradientTransformation(whole.init, update)
