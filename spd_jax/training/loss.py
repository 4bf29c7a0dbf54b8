"""The loss over the draft vocabulary, in chunks of positions, and the figures that come with it.

Logits `[S, V]` of two models in float32 would dwarf everything else, so a chunk's logits live and die inside one step
of a scan. Its gradient is taken in the same step and kept (a hidden state's size a position): nothing is computed twice
and nothing of size V is saved. The teacher has no gradient.

Knows hidden states and rows of heads; nothing of layers, masks or devices.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from spd_jax import struct
from spd_jax.models.decoder import head_logits
from spd_jax.training.objectives import Objective, expected_acceptance


@struct.dataclass
class Figures:
    """Sums over scored positions, float32 scalars; `[A]` where there is one a feature type (type 0 last).

    `count` scored positions; `covered` of them have the teacher's most likely token in the draft vocabulary, and only
    these have a loss; `loss_A` of the objective; `right_A` drafts whose most likely token is the teacher's; `accepted`
    is the sum of sum_v min(p, q) for type 0, p over the whole vocabulary.
    """

    count: Array
    covered: Array
    loss_A: Array
    right_A: Array
    accepted: Array


@struct.dataclass
class Scores:
    """What scores are made of: the draft head's rows `[Vd, D]` (None where the teacher's serve, frozen), the teacher's
    rows of the same tokens, and the teacher's rows of all other tokens (None where the draft vocabulary is all); `cap`
    is that of the target's logits, and holds for both."""

    draft: Array | None
    teacher: Array
    teacher_rest: Array | None
    cap: float | None = struct.static(default=None)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def scored_loss(
    objective: Objective,
    type_weights: tuple[float, ...],
    chunk: int,
    hidden_RAD: Float[Array, "R A D"],
    teacher_RD: Float[Array, "R D"],
    scored_R: Bool[Array, " R"],
    rows: Scores,
) -> tuple[Float[Array, ""], Figures]:
    """Sum over scored positions and types of weight * objective, and the figures.

    The sum has gradients for `hidden_RAD` and `rows.draft`; the figures have none.

    Args:
        type_weights: of the A types of `hidden_RAD`, in its order.
        chunk: positions whose logits exist at a time.
        hidden_RAD: the draft's hidden states, after the final norm.
        teacher_RD: the target's, after the final norm.
    """
    total, figures, _, _ = _scan(
        objective, type_weights, chunk, hidden_RAD, teacher_RD, scored_R, rows, gradients=False
    )
    return total, figures


def _chunk_loss(
    objective: Objective,
    type_weights: tuple[float, ...],
    hidden: Array,
    draft: Array,
    teacher: Array,
    scored: Array,
    rows: Scores,
) -> tuple[Array, Figures]:
    target_logits = head_logits(teacher, rows.teacher, rows.cap)
    log_p = jax.nn.log_softmax(target_logits)
    best, inside, outside = jnp.argmax(log_p, axis=-1), jnp.ones_like(scored), jnp.float32(0.0)
    if rows.teacher_rest is not None:
        rest = head_logits(teacher, rows.teacher_rest, rows.cap)
        inside = jnp.max(target_logits, axis=-1) >= jnp.max(rest, axis=-1)
        everything = jnp.logaddexp(jax.nn.logsumexp(target_logits, axis=-1), jax.nn.logsumexp(rest, axis=-1))
        outside = jax.nn.logsumexp(target_logits, axis=-1) - everything  # log of the share of p inside
    covered = (scored & inside).astype(jnp.float32)
    losses, right = [], []
    accepted = jnp.float32(0.0)
    for kind in range(hidden.shape[1]):
        log_q = jax.nn.log_softmax(head_logits(hidden[:, kind], draft, rows.cap))
        losses.append(jnp.sum(covered * objective(log_p, log_q)))
        right.append(jnp.sum(covered * (jnp.argmax(log_q, axis=-1) == best).astype(jnp.float32)))
        if kind == hidden.shape[1] - 1:
            share = expected_acceptance(log_p + jnp.broadcast_to(outside, best.shape)[:, None], log_q)
            accepted = jnp.sum(share * scored.astype(jnp.float32))
    loss_A = jnp.stack(losses)
    figures = Figures(jnp.sum(scored.astype(jnp.float32)), jnp.sum(covered), loss_A, jnp.stack(right), accepted)
    return jnp.sum(loss_A * jnp.asarray(type_weights, jnp.float32)), jax.lax.stop_gradient(figures)


def _scan(
    objective: Objective,
    type_weights: tuple[float, ...],
    chunk: int,
    hidden: Array,
    teacher: Array,
    scored: Array,
    rows: Scores,
    *,
    gradients: bool,
) -> tuple[Array, Figures, Array, Array]:
    """Total, figures, and (of size 0 without `gradients`) the total's gradients for hidden states and draft rows."""
    count, kinds, _ = hidden.shape
    chunk = min(chunk, count)
    padding = -count % chunk

    def chunks(x: Array) -> Array:
        return jnp.pad(x, [(0, padding), *[(0, 0)] * (x.ndim - 1)]).reshape(-1, chunk, *x.shape[1:])

    zero = jnp.zeros((kinds,), jnp.float32)
    nothing = jnp.zeros((0,), jnp.float32)
    trained = rows.draft if gradients else None
    start = (
        jnp.float32(0.0),
        Figures(jnp.float32(0.0), jnp.float32(0.0), zero, zero, jnp.float32(0.0)),
        nothing if trained is None else jnp.zeros_like(trained, jnp.float32),
    )

    def step(carry: Any, xs: tuple[Array, Array, Array]) -> tuple[Any, Array]:
        hidden, teacher, scored = xs
        none = jnp.zeros(hidden.shape if gradients else (0,), hidden.dtype)

        def compute(carry: Any) -> tuple[Any, Array]:
            def loss(hidden: Array, draft: Array) -> tuple[Array, Figures]:
                return _chunk_loss(objective, type_weights, hidden, draft, teacher, scored, rows)

            draft = rows.teacher if rows.draft is None else rows.draft
            d_hidden, d_draft = none, nothing
            if trained is not None:
                grad = jax.value_and_grad(loss, (0, 1), has_aux=True)
                (total, figures), (d_hidden, d_draft) = grad(hidden, draft)
            elif gradients:
                (total, figures), d_hidden = jax.value_and_grad(loss, has_aux=True)(hidden, draft)
            else:
                total, figures = loss(hidden, draft)
            return jax.tree.map(jnp.add, carry, (total, figures, d_draft.astype(jnp.float32))), d_hidden

        # Scored positions come first (`scored_first`), so the chunks behind them cost nothing.
        return jax.lax.cond(jnp.any(scored), compute, lambda carry: (carry, none), carry)

    (total, figures, d_draft), d_hidden = jax.lax.scan(step, start, (chunks(hidden), chunks(teacher), chunks(scored)))
    if gradients:
        d_hidden = d_hidden.reshape(-1, *hidden.shape[1:])[:count]
    return total, figures, d_hidden, d_draft


def _forward(
    objective: Objective,
    type_weights: tuple[float, ...],
    chunk: int,
    hidden: Array,
    teacher: Array,
    scored: Array,
    rows: Scores,
) -> tuple[Any, Any]:
    found = _scan(objective, type_weights, chunk, hidden, teacher, scored, rows, gradients=True)
    return found[:2], (*found[2:], teacher, rows)


def _backward(objective: Objective, type_weights: tuple[float, ...], chunk: int, saved: Any, cotangents: Any) -> Any:
    d_hidden, d_draft, teacher, rows = saved
    scale = cotangents[0]
    d_rows = Scores(
        None if rows.draft is None else (d_draft * scale).astype(rows.draft.dtype),
        jnp.zeros_like(rows.teacher),
        None if rows.teacher_rest is None else jnp.zeros_like(rows.teacher_rest),
        rows.cap,
    )
    return (d_hidden * scale.astype(d_hidden.dtype), jnp.zeros_like(teacher), None, d_rows)


scored_loss.defvjp(_forward, _backward)


def scored_first(scored_BS: Bool[Array, "B S"]) -> Array:
    """Flat indices of all positions, scored ones first, each group in order."""
    return jnp.argsort(~scored_BS.reshape(-1), stable=True)
