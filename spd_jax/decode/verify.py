"""Verification of a column of drafts per sequence, on a vocabulary that may be sharded.

Two forms, both exact (the text has the target's distribution whatever the drafts were):

* by name: y is the target's own choice (argmax p, or a draw from p), and the sibling with that token is accepted. For
  siblings that are not random (the likeliest of q) or temperature 0.
* by trial: siblings drawn from q without replacement are tried in turn. x is accepted with probability
  min(1, p(x) / q(x)); if it is not, p becomes normalise(max(p - q, 0)) and q is left without x. After the last, y is
  drawn from what is left of p (arXiv 2211.17192 for one draft, 2305.09781 for several).

A sequence without a draft to test draws y ~ p. This module does not know the tree, the pipeline or the cache.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from spd_jax import struct
from spd_jax.decode.sampling import ACCEPT, RESIDUAL, TARGET, Gather, best, best_of_ranks, gumbel, uniform


@struct.dataclass
class Verdict:
    """What verification decides for every sequence.

    `accept`: a tested draft is right, the one in `row`; `token`: what is emitted; `fault`: ranks whose scores were not
    numbers, for which sequence.
    """

    accept: Bool[Array, " B"]
    row: Int[Array, " B"]
    token: Int[Array, " B"]
    fault: Bool[Array, "R B"]


@struct.dataclass
class Siblings:
    """The drafts for the position that the target is about to name: `token` `[B, W]`, rows that are `alive` `[B, W]`
    (siblings, the best first; none where nothing is tested)."""

    token: Int[Array, "B W"]
    alive: Bool[Array, "B W"]


def verify_by_name(
    scores_BV: Float[Array, "B V"], ids: Int[Array, " V"], tested: Siblings, gather: Gather, others: Any
) -> tuple[Verdict, Any]:
    """The token with the best score, and the draft that has it.

    Args:
        scores_BV: log p, with Gumbel numbers where y is drawn.
        others: a pytree that is gathered in the same exchange.

    Returns:
        the verdict, and `others` of all ranks.
    """
    (top, winners), gathered = gather((best(scores_BV, ids), others))
    _, token = best_of_ranks(top, winners)
    has_it = tested.alive & (tested.token == token[:, None])
    row = jnp.argmax(has_it, axis=1).astype(jnp.int32)
    return Verdict(jnp.any(has_it, axis=1), row, token, not_numbers(top)), gathered


def verify_by_trial(
    log_p: Float[Array, "B V"],
    log_q: Float[Array, "B V"],
    ids: Int[Array, " V"],
    tested: Siblings,
    position_B: Int[Array, " B"],
    keys_B: Array,
    gather: Gather,
    others: Any,
) -> tuple[Verdict, Any]:
    """Siblings against p, in turn, with the q that they were drawn from.

    Args:
        log_p: p for `position`, the position of the tested drafts.
        others: as in `verify_by_name`; one exchange more for every sibling after the first.
    """
    width = tested.token.shape[1]
    order = jnp.argsort(~tested.alive, axis=1, stable=True).astype(jnp.int32)
    token_BW = jnp.take_along_axis(tested.token, order, axis=1)
    count_B = jnp.sum(tested.alive, axis=1, dtype=jnp.int32)
    noise = gumbel(keys_B, position_B, RESIDUAL, ids)
    is_token_BWV = ids == token_BW[..., None]

    def at_tokens(values_BV: Array) -> Array:
        return jnp.sum(jnp.where(is_token_BWV, values_BV[:, None], 0.0), axis=-1)

    def drawn(residual_BV: Array) -> tuple[Array, Array]:
        return best(jnp.where(residual_BV > 0.0, jnp.log(residual_BV), -jnp.inf) + noise, ids)

    p, q = jnp.exp(log_p), jnp.exp(log_q)
    tried = jnp.cumsum(is_token_BWV, axis=1) > 0  # by sibling: it or one before it
    left = [q, *(jnp.where(tried[:, i], 0.0, q) for i in range(width - 1))]  # of q before each trial, not normalised
    mass = jnp.stack([jnp.sum(x, axis=-1) for x in left], axis=1) if width > 1 else jnp.zeros_like(token_BW, p.dtype)
    residual = jnp.maximum(p - q, 0.0)
    from_p = best(log_p + gumbel(keys_B, position_B, TARGET, ids), ids)
    sums = (at_tokens(p), at_tokens(q), mass)
    results, sums, afterwards, gathered = gather((from_p, sums, _after(residual, drawn, at_tokens), others))
    top_p, winners = results
    _, token = best_of_ranks(top_p, winners)
    p_at, q_at, mass = (jnp.sum(x, axis=0) for x in sums)
    chance_p, accept, row = p_at[:, 0], jnp.zeros(count_B.shape, bool), jnp.zeros(count_B.shape, jnp.int32)
    for i in range(width):
        top, residual_token, total, residual_at = afterwards
        top, residual_token = best_of_ranks(top, residual_token)
        chance_q = q_at[:, i] / (mass[:, i] if i else 1.0)
        passes = uniform(keys_B, position_B, ACCEPT, i) * chance_q < chance_p
        # p = q up to rounding leaves no residual to draw from: the draft is then as good as a draw from p.
        passes |= ~(top > -jnp.inf)
        passes &= (i < count_B) & ~accept
        row = jnp.where(passes, order[:, i], row)
        accept |= passes
        token = jnp.where(passes, token_BW[:, i], jnp.where((i < count_B) & ~accept, residual_token, token))
        if i + 1 < width:
            total = jnp.sum(total, axis=0)
            chance_p = jnp.sum(residual_at, axis=0)[:, i + 1] / total
            residual = jnp.maximum(residual / total[:, None] - left[i + 1] / mass[:, i + 1, None], 0.0)
            afterwards = gather(_after(residual, drawn, at_tokens))
    return Verdict(accept, row, token, not_numbers(top_p)), gathered


def _after(residual_BV: Array, drawn: Any, at_tokens: Any) -> tuple[Array, Array, Array, Array]:
    """What the ranks have to know of what is left of p: a draw, its sum, its values at the siblings."""
    return (*drawn(residual_BV), jnp.sum(residual_BV, axis=-1), at_tokens(residual_BV))


def not_numbers(best_RB: Float[Array, "R B *rows"]) -> Bool[Array, "R B"]:
    """Ranks whose best scores for a sequence have a NaN or infinity (a NaN anywhere in a share is its maximum)."""
    return ~(best_RB.reshape(*best_RB.shape[:2], -1).max(axis=2) < jnp.inf)
