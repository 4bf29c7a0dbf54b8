"""From logits to filtered distributions and draws, on a vocabulary that may be sharded.

One implementation serves sampling, drafting and verification: temperature, then top-k, then top-p, the order in which
Hugging Face applies them. top-k keeps exactly k ids, the lowest id winning ties (Hugging Face keeps all ties); top-p
keeps the id that crosses the threshold. Probabilities are float32 log-probabilities, -inf outside the support, which
is what has a float32 probability above 0.

Any temperature is safe. The largest logit is taken off before the division, so that as T goes to 0 the likeliest id's
log-probability stays 0 (ids that tie exactly share it equally; greedy decoding takes the lowest of them) and as T grows
all ids become equally likely. XLA's CPU backend takes numbers below the smallest normal float for 0, so T may be 0 in a
program, and 1/T may not be finite: what is 0 or -inf away from the largest logit is never divided.

Random numbers are indexed by (seed of the row, position, purpose, global token id): neither a neighbour in the batch,
nor a rejection, nor the number of ranks changes them.

This module does not know where logits come from or what is done with a draw.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from spd_jax import defaults, struct

# What a random number is used for; part of its key.
DRAFT, ACCEPT, RESIDUAL, TARGET = 0, 1, 2, 3

Gather = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 are off.

    Raises:
        ValueError: values outside their ranges; filters together with temperature 0, which would be ignored.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be a finite number >= 0, found {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be >= 0 (0 keeps all ids), found {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must lie in (0, 1], found {self.top_p}")
        if self.temperature == 0.0 and (self.top_k or self.top_p < 1.0):
            raise ValueError(
                f"top_k {self.top_k} and top_p {self.top_p} have no effect at temperature 0 (greedy): "
                "set a temperature or drop them"
            )

    @property
    def mode(self) -> SamplingMode:
        """The part that decides which program is compiled."""
        return SamplingMode(self.temperature == 0.0, self.top_k, self.top_p < 1.0)

    def numbers(self) -> SamplingNumbers:
        """The part that is data; a temperature beyond float32 is its largest number or 0."""
        temperature = min(self.temperature, float(jnp.finfo(jnp.float32).max)) if self.temperature else 1.0
        return SamplingNumbers(jnp.float32(temperature), jnp.float32(self.top_p))


@dataclasses.dataclass(frozen=True)
class SamplingMode:
    """Static part of `Sampling`."""

    greedy: bool
    top_k: int
    use_top_p: bool


@struct.dataclass
class SamplingNumbers:
    """Traced part of `Sampling`, float32 scalars."""

    temperature: Array
    top_p: Array


def one_device(tree: Any) -> Any:
    """The gather of a vocabulary that is not sharded: a rank axis of length 1."""
    return jax.tree.map(lambda x: x[None], tree)


def log_probs(
    logits: Float[Array, "... V"],
    ids: Int[Array, " V"],
    mode: SamplingMode,
    numbers: SamplingNumbers,
    gather: Gather = one_device,
) -> tuple[Float[Array, "... V"], Float[Array, "R ..."]]:
    """Log-probabilities of this rank's ids after temperature, top-k and top-p, and every rank's largest logit.

    A NaN anywhere makes all log-probabilities NaN, whatever is filtered; the largest logits tell whose it was.

    Args:
        logits: this rank's share; -inf for ids that must not occur, else finite or NaN. At least one id somewhere must
            not be -inf.
        ids: the global ids of the share.
        gather: collects a pytree from all ranks as `[R, ...]`.
    """
    logits = logits.astype(jnp.float32)
    if not mode.top_k and not mode.use_top_p:
        largest_R, totals_R = gather(normaliser_share(logits, numbers.temperature))
        top, log_total = join_normalisers(largest_R, totals_R, numbers.temperature)
        return _supported(tempered(logits - top, numbers.temperature) - log_total), largest_R
    values, kept_ids = logits, jnp.broadcast_to(ids, logits.shape)
    if mode.top_k:
        values, where = jax.lax.top_k(logits, min(mode.top_k, logits.shape[-1]))
        kept_ids = ids[where]
    # The largest by itself: a sort may put a NaN behind the ids that are kept.
    (values, kept_ids), largest_R = gather(((values, kept_ids), jnp.max(logits, axis=-1)))
    top = jnp.max(largest_R, axis=0)[..., None]
    negated, order_ids = jax.lax.sort((-_last(values), _last(kept_ids)), num_keys=2)
    candidates = -negated[..., : mode.top_k or None]
    order_ids = order_ids[..., : mode.top_k or None]
    shares = jnp.exp(tempered(candidates - top, numbers.temperature))
    total = jnp.sum(shares, axis=-1, keepdims=True)
    cut = jnp.full(candidates.shape[:-1], candidates.shape[-1] - 1, jnp.int32)
    if mode.use_top_p:
        probabilities = shares / total
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        # The first id is always kept, whatever rounding does to `before`.
        inside = (before < numbers.top_p) | (jnp.arange(candidates.shape[-1], dtype=jnp.int32) == 0)
        inside &= candidates > -jnp.inf
        cut = jnp.sum(inside, axis=-1, dtype=jnp.int32) - 1
        total = jnp.sum(jnp.where(inside, shares, 0.0), axis=-1, keepdims=True)
    last_value = jnp.take_along_axis(candidates, cut[..., None], axis=-1)
    last_id = jnp.take_along_axis(order_ids, cut[..., None], axis=-1)
    # Told apart by their logits: at a high temperature different logits may be equally likely.
    inside_here = (logits > last_value) | ((logits == last_value) & (ids <= last_id)) | jnp.isnan(top)
    found = tempered(logits - top, numbers.temperature) - jnp.log(total)
    return jnp.where(inside_here, _supported(found), -jnp.inf), largest_R


def tempered(below: Float[Array, "..."], temperature: Float[Array, ""]) -> Float[Array, "..."]:
    """Distances from the largest logit (<= 0) at a temperature, which may be 0."""
    return jnp.where((below == 0.0) | (below == -jnp.inf), below, below / temperature)


def _supported(log_p: Array) -> Array:
    """-inf where the probability is 0 in float32, so that what may be drawn has a share in every sum."""
    return jnp.where(log_p < jnp.log(jnp.finfo(jnp.float32).tiny), -jnp.inf, log_p)


def _last(gathered: Array) -> Array:
    """`[R, ..., k]` -> `[..., R * k]`."""
    moved = jnp.moveaxis(gathered, 0, -2)
    return moved.reshape(*moved.shape[:-2], -1)


def log_normaliser(logits: Float[Array, "... V"], gather: Gather = one_device) -> Float[Array, "... 1"]:
    """log sum exp over all ranks' ids, with the last axis kept."""
    top, log_total = join_normalisers(*gather(normaliser_share(logits)))
    return top + log_total


def normaliser_share(
    logits: Float[Array, "... V"], temperature: Float[Array, ""] | None = None
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """This rank's part of the normaliser at a temperature (None: 1): its largest logit (-inf: it has none), and the sum
    of exponentials relative to it."""
    largest = jnp.max(logits, axis=-1)
    below = logits - jnp.where(largest == -jnp.inf, 0.0, largest)[..., None]
    below = below if temperature is None else tempered(below, temperature)
    return largest, jnp.sum(jnp.exp(below), axis=-1)


def join_normalisers(
    largest_R: Float[Array, "R ..."], totals_R: Float[Array, "R ..."], temperature: Float[Array, ""] | None = None
) -> tuple[Float[Array, "... 1"], Float[Array, "... 1"]]:
    """The largest logit of all ranks and the log of the sum of exponentials relative to it, from all ranks' parts."""
    top = jnp.max(largest_R, axis=0)
    below = largest_R - top
    below = below if temperature is None else tempered(below, temperature)
    return top[..., None], jnp.log(jnp.sum(totals_R * jnp.exp(below), axis=0))[..., None]


def best(scores: Float[Array, "... V"], ids: Int[Array, " V"]) -> tuple[Array, Array]:
    """Largest score of this rank and its id; the lowest id wins ties, a NaN wins over numbers."""
    top, where = _best(scores)
    return top, ids[where]


def _best(scores: Array) -> tuple[Array, Array]:
    top = jnp.max(scores, axis=-1)
    # argmax in two passes that XLA's CPU backend vectorises; its own argmax is a scalar loop, 2.5 times slower.
    numbers = jnp.arange(scores.shape[-1], dtype=jnp.int32)
    wins = (scores == top[..., None]) | jnp.isnan(scores)
    return top, jnp.min(jnp.where(wins, numbers, jnp.iinfo(jnp.int32).max), axis=-1)


def best_few(scores: Float[Array, "... V"], count: int) -> tuple[Array, Array]:
    """The `count` largest scores of this rank (all, if it has fewer) and where they are, `[..., count]`, as `best`."""
    if count > 1:
        values, where = jax.lax.top_k(scores, min(count, scores.shape[-1]))
        return values, where
    top, where = _best(scores)
    return top[..., None], where[..., None]


def best_of_ranks(values_R: Float[Array, "R ..."], ids_R: Int[Array, "R ..."]) -> tuple[Array, Array]:
    """The winner among the ranks' best: the largest value, the lowest id among equals."""
    top = jnp.max(values_R, axis=0)
    return top, jnp.min(jnp.where(values_R == top, ids_R, jnp.iinfo(jnp.int32).max), axis=0)


def row_keys(seeds_B: UInt32[Array, " B"]) -> Array:
    """The base key of every sequence."""
    return defaults.key(seeds_B)


def _keys(keys_B: Array, positions_B: Int[Array, " B"], *purpose: int) -> Array:
    def of_row(key: Array, position: Array) -> Array:
        for number in (position, *purpose):
            key = defaults.fold(key, number)
        return key

    return jax.vmap(of_row)(keys_B, positions_B)


def uniform(keys_B: Array, positions_B: Int[Array, " B"], purpose: int, trial: int = 0) -> Float[Array, " B"]:
    """One uniform number in [0, 1) for every sequence (and trial)."""
    numbers = (purpose, trial) if trial else (purpose,)
    return jax.vmap(defaults.uniform)(_keys(keys_B, positions_B, *numbers))


def gumbel(
    keys_B: Array, positions_B: Int[Array, " B"], purpose: int, ids: Int[Array, " V"] | Int[Array, "B V"]
) -> Float[Array, "B V"]:
    """Standard Gumbel numbers for these ids, or for each sequence's own: argmax(log p + gumbel) is a draw from p."""
    return _gumbel(_keys(keys_B, positions_B, purpose), ids)


def gumbel_rows(
    keys_B: Array, positions_B: Int[Array, " B"], purpose: int, draw_BW: Int[Array, "B W"], ids: Int[Array, " V"]
) -> Float[Array, "B W V"]:
    """`gumbel` for W draws of a position, each with a number of its own."""
    keys_BW = jax.vmap(jax.vmap(defaults.fold, (None, 0)))(_keys(keys_B, positions_B, purpose), draw_BW)
    return _gumbel(keys_BW.reshape(-1), ids).reshape(*draw_BW.shape, -1)


def _gumbel(keys_B: Array, ids: Array) -> Array:
    def of_id(key: Array, token: Array) -> Array:
        return defaults.gumbel(defaults.fold(key, token))

    return jax.vmap(jax.vmap(of_id, (None, 0)), (0, None if ids.ndim == 1 else 0))(keys_B, ids)
