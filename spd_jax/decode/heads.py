"""The heads step: local logits of both heads, filtering, verification of one column and candidates for the next.

Both heads are sharded over the vocabulary on all ranks, so this step costs 1/R of what one rank would need for it.
Knows neither layers nor caches: it starts from the two hidden states of the exchange and ends with tokens.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from spd_jax import struct
from spd_jax.decode.sampling import (
    DRAFT,
    TARGET,
    SamplingMode,
    SamplingNumbers,
    best,
    best_few,
    best_of_ranks,
    gumbel,
    gumbel_rows,
    join_normalisers,
    log_normaliser,
    log_probs,
    normaliser_share,
)
from spd_jax.decode.tree import CHAIN, Proposals, Tree, in_column, pick_row
from spd_jax.decode.verify import Siblings, Verdict, not_numbers, verify_by_name, verify_by_trial
from spd_jax.models.decoder import masked_logits
from spd_jax.nn.layers import rms_norm
from spd_jax.parallel.mesh import gather_ranks
from spd_jax.parallel.stack import PipelineParams, Program
from spd_jax.parallel.vocab import local_ids, spread_draft


@dataclasses.dataclass(frozen=True)
class Mode:
    """Static facts of a decode program: how tokens are chosen, what is recorded, and how drafts branch."""

    sampling: SamplingMode
    log_probs: bool = False
    tree: Tree = CHAIN

    @property
    def draws(self) -> bool:
        """Whether drafts are drawn (and q has to be kept until they are verified)."""
        return not self.sampling.greedy and self.tree.proposal == "sample"


@struct.dataclass
class Forced:
    """Columns that replace the module's own: tokens and their parents' rows, `[B, P, W]` by position or `[B, W]` of one
    (token -1: no node; a column without nodes is not replaced)."""

    token: Array
    parent: Array


@struct.dataclass
class Request:
    """Traced facts of a generation: sampling numbers, ids that end a sequence `[E]` (padded with -1), and columns that
    replace the module's own (None: no such thing in the program)."""

    numbers: SamplingNumbers
    eos: Array
    forced: Forced | None


def target_logits(program: Program, params: PipelineParams, hidden_BD: Float[Array, "B D"]) -> Float[Array, "B V"]:
    """This rank's share of the target's logits."""
    normed = rms_norm(hidden_BD, params.final_norm, program.target.norm)
    rows = params.embedding if params.head is None else params.head
    return masked_logits(normed, rows, params.allowed, program.target.logit_cap)


def both_logits(
    program: Program, params: PipelineParams, final_BD: Float[Array, "B D"], draft_BWD: Float[Array, "B W D"]
) -> tuple[Float[Array, "B V"], Float[Array, "B W U"], Int[Array, " U"]]:
    """Local target logits, local draft logits and the rows of the target's share that the latter belong to."""
    if program.shared_head:  # the same rows score both: read them once
        batch, width, size = draft_BWD.shape
        both = target_logits(program, params, jnp.concatenate([final_BD, draft_BWD.reshape(-1, size)]))
        target, draft = both[:batch], both[batch:].reshape(batch, width, -1)
        return target, draft, jnp.arange(draft.shape[-1], dtype=jnp.int32)
    assert params.draft_head is not None
    normed = rms_norm(draft_BWD, params.final_norm, program.target.norm)
    share = params.draft_share
    allowed = (share >= 0) & params.allowed[jnp.maximum(share, 0)]
    draft = masked_logits(normed, params.draft_head, allowed, program.target.logit_cap)
    return target_logits(program, params, final_BD), draft, share


def first_token(
    program: Program,
    params: PipelineParams,
    mode: Mode,
    request: Request,
    final_BD: Float[Array, "B D"],
    position_B: Int[Array, " B"],
    keys_B: Array,
) -> tuple[Int[Array, " B"], Float[Array, " B"], Bool[Array, "R B"]]:
    """The token after the prompt, its log-probability under the target, and ranks whose scores were not numbers."""
    logits = target_logits(program, params, final_BD)
    ids = local_ids(logits.shape[-1])
    scores, largest_RB = logits, None
    if not mode.sampling.greedy:
        log_p, largest_RB = log_probs(logits, ids, mode.sampling, request.numbers, gather_ranks)
        scores = log_p + gumbel(keys_B, position_B, TARGET, ids)
    scores, winners = gather_ranks(best(scores, ids))
    _, token = best_of_ranks(scores, winners)
    fault = not_numbers(scores if largest_RB is None else largest_RB)
    return token, token_log_prob(mode, logits, ids, token), fault


def token_log_prob(mode: Mode, logits: Float[Array, "B V"], ids: Array, token_B: Array) -> Float[Array, " B"]:
    """log softmax(logits)[token], before any filter; zeros if the mode does not record it."""
    if not mode.log_probs:
        return jnp.zeros(token_B.shape, jnp.float32)
    here = jnp.max(jnp.where(ids == token_B[:, None], logits, -jnp.inf), axis=-1)
    return jnp.max(gather_ranks(here), axis=0) - log_normaliser(logits, gather_ranks)[..., 0]


@struct.dataclass
class Question:
    """What is to be verified and drafted, per sequence: the drafts tested for `target_position`, the row of the node
    that leaves (their parent), the position to draft for, a number that no draw for it has had before (`[B, W]`), and
    the forced column (None: no such thing)."""

    tested: Siblings
    target_position: Array
    leaving_row: Array
    draft_position: Array
    draw: Array
    keys: Array
    forced: Forced | None


def answer(
    program: Program,
    params: PipelineParams,
    mode: Mode,
    request: Request,
    final_BD: Float[Array, "B D"],
    draft_BWD: Float[Array, "B W D"],
    question: Question,
    log_q_BCWV: Float[Array, "B C W V"] | None,
) -> tuple[Verdict, Proposals, Float[Array, " B"], Float[Array, "B C W V"] | None]:
    """Verify and propose; returns the verdict, candidates for the next column, the log-probability of the verified
    token and the stored q's."""
    logits, draft_logits, share = both_logits(program, params, final_BD, draft_BWD)
    ids = local_ids(logits.shape[-1])
    if mode.sampling.greedy:
        verdict, found = answer_greedy(logits, draft_logits, ids, ids[jnp.maximum(share, 0)], question.tested)
    else:
        full = draft_logits if program.shared_head else spread_draft(draft_logits, params.draft_row)
        # p and q go through the same filters, and share their collectives.
        rows = jnp.concatenate([logits[:, None], full], axis=1)
        filtered, largest_RBW = log_probs(rows, ids, mode.sampling, request.numbers, gather_ranks)
        log_p, log_q = filtered[:, 0], filtered[:, 1:]
        if log_q_BCWV is None:
            verdict, found = _answer_by_name(log_p, log_q, ids, question)
        else:
            verdict, found, log_q_BCWV = _answer_by_trial(log_p, log_q, ids, question, log_q_BCWV)
        # Probabilities that are not numbers are so on all ranks; the logits tell whose they were.
        verdict = struct.replace(verdict, fault=not_numbers(largest_RBW))
    return verdict, found, token_log_prob(mode, logits, ids, verdict.token), log_q_BCWV


def _of_ranks(x: Array) -> Array:
    """`[R, B, W, K]` -> `[B, W, R * K]`."""
    moved = jnp.moveaxis(x, 0, 2)
    return moved.reshape(*moved.shape[:2], -1)


def answer_greedy(
    logits: Float[Array, "B V"],
    draft_logits: Float[Array, "B W U"],
    ids: Int[Array, " V"],
    draft_ids: Int[Array, " U"],
    tested: Siblings,
) -> tuple[Verdict, Proposals]:
    """The target's likeliest token, and the draft's likeliest for every row."""
    width = draft_logits.shape[1]
    values, where = best_few(draft_logits, width)
    # A chain needs no probabilities: its only child is the best.
    normaliser = normaliser_share(draft_logits) if width > 1 else None
    verdict, others = verify_by_name(logits, ids, tested, gather_ranks, (values, draft_ids[where], normaliser))
    values, winners, normaliser = others
    fault = verdict.fault | not_numbers(values)
    values = _of_ranks(values)
    if normaliser is not None:
        values = values - sum(join_normalisers(*normaliser))
    return struct.replace(verdict, fault=fault), Proposals(_of_ranks(winners), values, None)


def _answer_by_name(log_p: Array, log_q: Array, ids: Array, question: Question) -> tuple[Verdict, Proposals]:
    values, where = best_few(log_q, log_q.shape[1])
    scores = log_p + gumbel(question.keys, question.target_position, TARGET, ids)
    verdict, (values, winners) = verify_by_name(scores, ids, question.tested, gather_ranks, (values, ids[where]))
    return verdict, Proposals(_of_ranks(winners), _of_ranks(values), None)


def _answer_by_trial(
    log_p: Array, log_q: Array, ids: Array, question: Question, log_q_BCWV: Array
) -> tuple[Verdict, Proposals, Array]:
    columns, width = log_q_BCWV.shape[1:3]
    if width == 1:
        if question.forced is not None:
            certain = jnp.where(ids == question.forced.token[..., None], 0.0, -jnp.inf)
            log_q = jnp.where((question.forced.token >= 0)[..., None], certain, log_q)
        noise = gumbel(question.keys, question.draft_position, DRAFT, ids)[:, None]
    else:
        noise = gumbel_rows(question.keys, question.draft_position, DRAFT, question.draw, ids)
    values, where = best_few(log_q + noise, width)
    drawn_from = pick_row(in_column(log_q_BCWV, question.target_position), question.leaving_row)
    verdict, (values, winners, found_log_q) = verify_by_trial(
        log_p,
        drawn_from,
        ids,
        question.tested,
        question.target_position,
        question.keys,
        gather_ranks,
        (values, ids[where], jnp.take_along_axis(log_q, where, axis=-1)),
    )
    found = Proposals(_of_ranks(winners), _of_ranks(values), _of_ranks(found_log_q))
    here = jnp.arange(columns) == (question.draft_position % columns)[:, None]
    return verdict, found, jnp.where(here[..., None, None], log_q[:, None], log_q_BCWV)
