"""The heads step: local logits of both heads, filtering, verification of one draft and the draw of the next.

Both heads are sharded over the vocabulary on all ranks, so this step costs 1/R of what one rank would need for it.
Knows neither layers nor caches: it starts from the two hidden states of the exchange and ends with tokens.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from spd_jax import struct
from spd_jax.decode.sampling import (
    TARGET,
    SamplingMode,
    SamplingNumbers,
    best,
    best_of_ranks,
    gumbel,
    log_normaliser,
    log_probs,
)
from spd_jax.decode.verify import Verdict, not_numbers, verify_greedy, verify_sampled
from spd_jax.nn.layers import rms_norm
from spd_jax.parallel.mesh import gather_ranks
from spd_jax.parallel.stack import PipelineParams, Program
from spd_jax.parallel.vocab import local_ids, masked_logits, spread_draft


@dataclasses.dataclass(frozen=True)
class Mode:
    """Static facts of a decode program: how tokens are chosen, and what is recorded."""

    sampling: SamplingMode
    log_probs: bool = False


@struct.dataclass
class Request:
    """Traced facts of a generation: sampling numbers, ids that end a sequence `[E]` (padded with -1), and drafts that
    replace the module's own, `[B, P]` by position (-1: not replaced; None: no such thing in the program)."""

    numbers: SamplingNumbers
    eos: Array
    forced: Array | None


def target_logits(program: Program, params: PipelineParams, hidden_BD: Float[Array, "B D"]) -> Float[Array, "B V"]:
    """This rank's share of the target's logits."""
    normed = rms_norm(hidden_BD, params.final_norm, program.target.norm)
    rows = params.embedding if params.head is None else params.head
    return masked_logits(normed, rows, params.allowed, program.target.logit_cap)


def both_logits(
    program: Program, params: PipelineParams, final_BD: Float[Array, "B D"], draft_BD: Float[Array, "B D"]
) -> tuple[Float[Array, "B V"], Float[Array, "B U"], Int[Array, " U"]]:
    """Local target logits, local draft logits and the rows of the target's share that the latter belong to."""
    if program.shared_head:  # the same rows score both: read them once
        both = target_logits(program, params, jnp.concatenate([final_BD, draft_BD]))
        target, draft = jnp.split(both, 2)
        return target, draft, jnp.arange(draft.shape[-1], dtype=jnp.int32)
    assert params.draft_head is not None
    normed = rms_norm(draft_BD, params.final_norm, program.target.norm)
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
) -> tuple[Int[Array, " B"], Float[Array, " B"], Bool[Array, " R"]]:
    """The token after the prompt, its log-probability under the target, and ranks whose scores were not numbers."""
    logits = target_logits(program, params, final_BD)
    ids = local_ids(logits.shape[-1])
    scores = logits
    if not mode.sampling.greedy:
        log_p = log_probs(logits, ids, mode.sampling, request.numbers, gather_ranks)
        scores = log_p + gumbel(keys_B, position_B, TARGET, ids)
    scores, winners = gather_ranks(best(scores, ids))
    _, token = best_of_ranks(scores, winners)
    return token, token_log_prob(mode, logits, ids, token), not_numbers(scores)


def token_log_prob(mode: Mode, logits: Float[Array, "B V"], ids: Array, token_B: Array) -> Float[Array, " B"]:
    """log softmax(logits)[token], before any filter; zeros if the mode does not record it."""
    if not mode.log_probs:
        return jnp.zeros(token_B.shape, jnp.float32)
    here = jnp.max(jnp.where(ids == token_B[:, None], logits, -jnp.inf), axis=-1)
    return jnp.max(gather_ranks(here), axis=0) - log_normaliser(logits, gather_ranks)[..., 0]


@struct.dataclass
class Question:
    """What is to be verified and drafted, per sequence: the tested token (anything where nothing is tested), its
    position, the position to draft for, the window column of each, and the forced draft (None: no such thing)."""

    tested: Array
    is_tested: Array
    target_position: Array
    draft_position: Array
    keys: Array
    forced: Array | None


def answer(
    program: Program,
    params: PipelineParams,
    mode: Mode,
    request: Request,
    final_BD: Float[Array, "B D"],
    draft_BD: Float[Array, "B D"],
    question: Question,
    log_q_BCV: Float[Array, "B C V"] | None,
) -> tuple[Verdict, Float[Array, " B"], Float[Array, "B C V"] | None]:
    """Verify and draft; returns the verdict, the log-probability of the verified token and the stored q's."""
    logits, draft_logits, share = both_logits(program, params, final_BD, draft_BD)
    ids = local_ids(logits.shape[-1])
    if mode.sampling.greedy:
        draft_ids = ids[jnp.maximum(share, 0)]
        verdict = verify_greedy(logits, ids, draft_logits, draft_ids, question.tested, gather_ranks)
        if question.forced is not None:
            verdict = struct.replace(verdict, draft=jnp.where(question.forced >= 0, question.forced, verdict.draft))
    else:
        assert log_q_BCV is not None
        verdict, log_q_BCV = _answer_sampled(
            program, params, mode, request, logits, draft_logits, ids, question, log_q_BCV
        )
    emitted = jnp.where(verdict.accept & question.is_tested, question.tested, verdict.token)
    return verdict, token_log_prob(mode, logits, ids, emitted), log_q_BCV


def _answer_sampled(
    program: Program,
    params: PipelineParams,
    mode: Mode,
    request: Request,
    logits: Array,
    draft_logits: Array,
    ids: Array,
    question: Question,
    log_q_BCV: Array,
) -> tuple[Verdict, Array]:
    full = draft_logits if program.shared_head else spread_draft(draft_logits, params.draft_row)
    # p and q go through the same filters, and share their collectives.
    filtered = log_probs(jnp.stack([logits, full]), ids, mode.sampling, request.numbers, gather_ranks)
    log_p, log_q = filtered[0], filtered[1]
    if question.forced is not None:
        certain = jnp.where(ids == question.forced[:, None], 0.0, -jnp.inf)
        log_q = jnp.where((question.forced >= 0)[:, None], certain, log_q)
    columns = program.plan.num_columns
    tested_column = question.target_position % columns
    log_q_tested = jnp.take_along_axis(log_q_BCV, tested_column[:, None, None], axis=1)[:, 0]
    verdict = verify_sampled(
        log_p,
        log_q_tested,
        log_q,
        ids,
        question.tested,
        question.is_tested,
        question.target_position,
        question.draft_position,
        question.keys,
        gather_ranks,
    )
    here = jnp.arange(columns) == (question.draft_position % columns)[:, None]
    return verdict, jnp.where(here[..., None], log_q[:, None], log_q_BCV)
