"""Verification of one drafted token per sequence, on a vocabulary that may be sharded.

Greedy: y = argmax p, accept iff the draft equals y. Sampling (arXiv 2211.17192, one draft a test): accept x with
probability min(1, p(x) / q(x)), else y ~ normalise(max(p - q, 0)). A sequence without a draft to test draws y ~ p.
The draft for the newest position is drawn from q in the same exchange.

This module does not know positions' history, the pipeline or the cache.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from spd_jax import struct
from spd_jax.decode.sampling import (
    ACCEPT,
    DRAFT,
    RESIDUAL,
    TARGET,
    Gather,
    best,
    best_of_ranks,
    gumbel,
    uniform,
)


@struct.dataclass
class Verdict:
    """What verification decides for every sequence.

    `accept`: the tested draft equals what is emitted; `token`: what is emitted if it was not accepted (or not tested);
    `draft`: the token proposed for the position after the newest; `fault`: ranks whose scores were not numbers.
    """

    accept: Bool[Array, " B"]
    token: Int[Array, " B"]
    draft: Int[Array, " B"]
    fault: Bool[Array, " R"]


def verify_greedy(
    target_logits: Float[Array, "B V"],
    target_ids: Int[Array, " V"],
    draft_logits: Float[Array, "B U"],
    draft_ids: Int[Array, " U"],
    tested_B: Int[Array, " B"],
    gather: Gather,
) -> Verdict:
    """Greedy verification of `tested` and the greedy draft."""
    local = (best(target_logits, target_ids), best(draft_logits, draft_ids))
    target, draft = gather(local)
    _, token = best_of_ranks(*target)
    _, proposal = best_of_ranks(*draft)
    return Verdict(tested_B == token, token, proposal, not_numbers(target[0], draft[0]))


def verify_sampled(
    log_p: Float[Array, "B V"],
    log_q_tested: Float[Array, "B V"],
    log_q_newest: Float[Array, "B V"],
    ids: Int[Array, " V"],
    tested_B: Int[Array, " B"],
    is_tested_B: Bool[Array, " B"],
    target_position_B: Int[Array, " B"],
    draft_position_B: Int[Array, " B"],
    keys_B: Array,
    gather: Gather,
) -> Verdict:
    """Rejection sampling of `tested` against p with the q it was drawn from, and a draw from the newest q.

    Args:
        log_p: p for `target_position`, the position of the tested token.
        log_q_tested: the distribution that `tested` was drawn from.
        log_q_newest: q for `draft_position`.
        is_tested_B: False where nothing was drafted for `target_position`: then y ~ p.
    """
    residual = jnp.maximum(jnp.exp(log_p) - jnp.exp(log_q_tested), 0.0)
    log_residual = jnp.where(residual > 0.0, jnp.log(residual), -jnp.inf)
    from_p = best(log_p + gumbel(keys_B, target_position_B, TARGET, ids), ids)
    from_residual = best(log_residual + gumbel(keys_B, target_position_B, RESIDUAL, ids), ids)
    from_q = best(log_q_newest + gumbel(keys_B, draft_position_B, DRAFT, ids), ids)

    def at_tested(values: Array) -> Array:
        return jnp.max(jnp.where(ids == tested_B[:, None], values, -jnp.inf), axis=-1)

    gathered = gather((from_p, from_residual, from_q, at_tested(log_p), at_tested(log_q_tested)))
    _, y_p = best_of_ranks(*gathered[0])
    top_residual, y_residual = best_of_ranks(*gathered[1])
    _, draft = best_of_ranks(*gathered[2])
    log_p_x, log_q_x = jnp.max(gathered[3], axis=0), jnp.max(gathered[4], axis=0)
    accept = uniform(keys_B, target_position_B, ACCEPT) * jnp.exp(log_q_x) < jnp.exp(log_p_x)
    fault = not_numbers(gathered[0][0], gathered[2][0])
    # p = q up to rounding leaves no residual to draw from: the draft is then as good as a draw from p.
    accept |= ~jnp.isfinite(top_residual)
    return Verdict(accept & is_tested_B, jnp.where(is_tested_B, y_residual, y_p), draft, fault)


def not_numbers(*best_RB: Array) -> Bool[Array, " R"]:
    """Ranks one of whose best scores is NaN or infinity (a NaN anywhere in a share is its maximum)."""
    return jnp.any(~(jnp.stack(best_RB) < jnp.inf), axis=(0, 2))
