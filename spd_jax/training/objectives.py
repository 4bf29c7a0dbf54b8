"""Distillation objectives: one pure function each, of log-probabilities over the draft vocabulary.

Each takes the teacher's log p and the draft's log q, `[..., V]` in float32, both normalised over the draft vocabulary,
and gives a loss `[...]` a row. Acceptance in speculative decoding is 1 - TV(p, q) (arXiv 2211.17192), which the last
three aim at more directly than KL does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Objective = Callable[[Float[Array, "... V"], Float[Array, "... V"]], Float[Array, "..."]]
ObjectiveName = Literal["kl", "cross_entropy", "total_variation", "acceptance", "blend"]

LEAST_ACCEPTANCE = 1e-6  # below it -log(acceptance) would have a gradient without bound
BLEND_DECAY = 3.0


def kl(log_p: Array, log_q: Array) -> Array:
    """KL(p || q) = sum p (log p - log q): the objective of arXiv 2605.30852 (its section on training)."""
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)


def cross_entropy(log_p: Array, log_q: Array) -> Array:
    """-log q of the teacher's most likely token: greedy decoding accepts nothing else (as Medusa, arXiv 2401.10774)."""
    label = jnp.argmax(log_p, axis=-1, keepdims=True)
    return -jnp.take_along_axis(log_q, label, axis=-1)[..., 0]


def total_variation(log_p: Array, log_q: Array) -> Array:
    """1 - sum min(p, q) = TV(p, q), the rate of rejection (DistillSpec, arXiv 2310.08461)."""
    return 1.0 - expected_acceptance(log_p, log_q)


def acceptance(log_p: Array, log_q: Array) -> Array:
    """-log sum min(p, q): the likelihood of acceptance, whose gradient does not vanish where q is far from p."""
    return -jnp.log(jnp.maximum(expected_acceptance(log_p, log_q), LEAST_ACCEPTANCE))


def blend(log_p: Array, log_q: Array) -> Array:
    """w KL + (1 - w) TV with w = exp(-3 a), a the acceptance without gradient: KL at first, acceptance at the end."""
    accepted = expected_acceptance(log_p, log_q)
    share = jnp.exp(-BLEND_DECAY * jax.lax.stop_gradient(accepted))
    return share * kl(log_p, log_q) + (1.0 - share) * (1.0 - accepted)


def expected_acceptance(log_p: Array, log_q: Array) -> Array:
    """sum min(p, q): how often a draft drawn from q survives verification by p (arXiv 2211.17192)."""
    return jnp.sum(jnp.exp(jnp.minimum(log_p, log_q)), axis=-1)


OBJECTIVES: dict[ObjectiveName, Objective] = {
    "kl": kl,
    "cross_entropy": cross_entropy,
    "total_variation": total_variation,
    "acceptance": acceptance,
    "blend": blend,
}
