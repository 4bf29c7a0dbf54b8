"""Speculative pipeline decoding by its definition: one sequence, a chain (W = 1), everything recomputed every cycle.

The second oracle beside autoregressive decoding: that one knows the right tokens, this one also the cycle in which each
is verified, every draft's logits and the counters. No cache, no window, no ring, no mesh, and nothing shared with the
decode loop, so an error in those cannot hide here. What an in-flight position has not reached yet is NaN, so a feature
that used it would show.

It does not know batches, widths, chunks or speed. Symbols: n stages, l_k layers after k of them; a position's depth k
is the number of stages it has completed, f(k) the richest feature that depth has.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from spd_jax.models.decoder import Decoder, Ropes, head_logits, rows_only, run_layers
from spd_jax.plan import StagePlan
from spd_jax.speculation.module import SpeculationModule

Verdict = Literal["prefill", "accepted", "rejected", "undrafted"]


@dataclasses.dataclass(frozen=True)
class Filters:
    """How probabilities are made from logits: temperature, then top-k, then top-p; ties go to the lower id."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0


@dataclasses.dataclass(frozen=True)
class CycleInput:
    """What the draft may read at the start of a cycle.

    `tokens` are positions 0..newest and `depths` their completed stages; `hidden` `[L+1, S, D]` holds hidden states
    0..L, NaN where the position has not got that far; `target_logits` `[S, V]` is for scripted drafts, no real one has
    it.
    """

    tokens: tuple[int, ...]
    depths: np.ndarray
    num_prompt: int
    hidden: jax.Array
    target_logits: np.ndarray


@runtime_checkable
class Draft(Protocol):
    """Logits `[Vd]` for the position after the newest one; entry i is for token `token_ids[i]` (sorted)."""

    token_ids: np.ndarray

    def __call__(self, cycle: CycleInput) -> np.ndarray: ...


class ModuleDraft:
    """A speculation module as a draft: its layers over G, every position's richest feature, with true positions."""

    def __init__(self, module: SpeculationModule, plan: StagePlan, target: Decoder):
        config = module.config
        self.token_ids = np.arange(config.vocab_size) if config.draft_ids is None else np.asarray(config.draft_ids)
        self._anchor_type = np.asarray(plan.anchor_type)
        self._graphdef, self._state = nnx.split((module, target))

    def __call__(self, cycle: CycleInput) -> np.ndarray:
        types = np.zeros(cycle.hidden.shape[1], np.int32)
        types[: len(cycle.tokens)] = self._anchor_type[cycle.depths]
        newest = jnp.int32(len(cycle.tokens) - 1)
        logits = np.asarray(_draft_logits(self._graphdef, self._state, cycle.hidden, jnp.asarray(types), newest))
        if not np.isfinite(logits).all():
            raise FloatingPointError("the draft read a hidden state that no stage has computed yet")
        return logits


@functools.partial(jax.jit, static_argnums=0)
def _draft_logits(graphdef: Any, state: Any, hidden: jax.Array, types: jax.Array, newest: jax.Array) -> jax.Array:
    """One pass of the draft layers over G, all positions: row T is the feature of type `types[T]` of position T."""
    module, target = nnx.merge(graphdef, state)
    config, length = module.config, hidden.shape[1]
    taps = [hidden[anchor] for anchor in config.anchors]
    features = jnp.stack([module.aggregate(taps[: i + 1]) for i in range(len(taps))])
    x_BTD = features[types, jnp.arange(length)][None]
    causal = rows_only(jnp.tril(jnp.ones((1, length, length), bool)))
    hiddens, _ = run_layers(module.layers, x_BTD, Ropes(jnp.arange(length)[None]), [causal] * config.num_layers)
    if module.lm_head is not None:
        rows = module.lm_head[...]
    else:
        rows = (target.embedding if target.head is None else target.head)[...]
        rows = rows if config.draft_ids is None else rows[jnp.asarray(config.draft_ids)]
    return head_logits(target.final_norm(hiddens[-1][0, newest]), rows, target.config.logit_cap)


class ScriptedDraft:
    """Drafts right or wrong by script: the target's own greedy token where the bit is 1, that + 1 mod V where it is 0.

    The first bit is for the second generated token (the first comes from prefill and is never drafted); the script
    repeats. So "1" is the oracle, always right, and "0" the anti-oracle, always wrong.
    """

    def __init__(self, bits: str, vocab_size: int):
        if not bits or set(bits) - {"0", "1"}:
            raise ValueError(f"a script is a text of 0 and 1, found {bits!r}")
        self.token_ids = np.arange(vocab_size)
        self._bits = bits

    def __call__(self, cycle: CycleInput) -> np.ndarray:
        newest = len(cycle.tokens) - 1
        token = int(cycle.target_logits[newest].argmax())
        if self._bits[(newest - cycle.num_prompt) % len(self._bits)] == "0":
            token = (token + 1) % self.token_ids.size
        return np.where(self.token_ids == token, np.float32(0), np.float32(-1e9))


@dataclasses.dataclass(frozen=True)
class NaiveResult:
    """What one prompt gave.

    Entry t of `verdicts` and of `verified_in` (the cycle, counted from 1; 0 is prefill) belongs to token `ids[t]`.
    """

    ids: tuple[int, ...]
    cycles: int
    verdicts: tuple[Verdict, ...]
    verified_in: tuple[int, ...]
    draft_logits: np.ndarray  # [cycles, Vd]

    @property
    def accepted(self) -> tuple[bool, ...]:
        """A flag per generated token, true for the one from prefill."""
        return tuple(verdict in ("prefill", "accepted") for verdict in self.verdicts)

    @property
    def num_accepted(self) -> int:
        """Drafts that the target confirmed."""
        return self.verdicts.count("accepted")

    @property
    def num_rejected(self) -> int:
        """Drafts that the target replaced."""
        return self.verdicts.count("rejected")

    @property
    def num_undrafted(self) -> int:
        """Tokens that no draft stood for when the target named them."""
        return self.verdicts.count("undrafted")


class NaiveDecoder:
    """Decodes prompts one at a time; all prompts share one compilation, padded to `length` positions.

    Args:
        draft: a speculation module made for `plan`, or any `Draft`.
        length: positions to compute: at least prompt + max_new_tokens + n.
    """

    def __init__(self, target: Decoder, plan: StagePlan, draft: SpeculationModule | Draft, *, length: int):
        if plan.num_layers != target.config.num_layers:
            raise ValueError(f"the plan has {plan.num_layers} layers, the target {target.config.num_layers}")
        self.plan, self.length, self.vocab_size = plan, length, target.config.vocab_size
        self.draft = ModuleDraft(draft, plan, target) if isinstance(draft, SpeculationModule) else draft
        self._graphdef, self._state = nnx.split(target)

    def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        max_new_tokens: int,
        eos_token_ids: Sequence[int] = (),
        filters: Filters | None = None,
        seed: int = 0,
    ) -> NaiveResult:
        """Decode until an end token is verified or `max_new_tokens` are.

        Args:
            filters: None is greedy; else tokens are drawn from the filtered distributions, with numbers from `seed`.
        """
        n, num_prompt = self.plan.num_stages, len(prompt_ids)
        if num_prompt == 0 or max_new_tokens < 0:
            raise ValueError(
                f"found {num_prompt} prompt tokens and max_new_tokens {max_new_tokens}, need >= 1 and >= 0"
            )
        if num_prompt + max_new_tokens + n > self.length:
            raise ValueError(f"{num_prompt} + {max_new_tokens} + {n} in flight exceed {self.length} positions")
        rng = np.random.default_rng(seed)
        emitted: list[tuple[int, Verdict, int]] = []  # token, verdict, cycle
        draft_logits: list[np.ndarray] = []
        if max_new_tokens > 0:
            _, logits = self._run(prompt_ids, [n] * num_prompt)
            emitted.append((_draw(probabilities(logits[num_prompt - 1], filters), rng), "prefill", 0))
        tokens = [*prompt_ids, *(token for token, _, _ in emitted)]  # verified ones, then drafts in flight
        drawn_from: dict[int, np.ndarray] = {}  # q of each drafted position
        oldest = num_prompt  # the position in the highest stage that is busy
        while len(emitted) < max_new_tokens and emitted[-1][0] not in eos_token_ids:
            newest = len(tokens) - 1
            depths = [newest - i if i >= oldest else n for i in range(newest + 1)]
            hidden, logits = self._run(tokens, depths)
            cycle = CycleInput(tuple(tokens), np.asarray(depths), num_prompt, hidden, logits)
            draft_logits.append(self.draft(cycle))
            q = np.zeros(self.vocab_size)
            q[self.draft.token_ids] = probabilities(draft_logits[-1], filters)
            if newest - oldest + 1 == n:  # full: `oldest` leaves stage n, so the target names the position after it
                u = oldest = oldest + 1
                p = probabilities(logits[u - 1], filters)
                if u > newest:
                    tokens.append(_draw(p, rng))
                    emitted.append((tokens[u], "undrafted", len(draft_logits)))
                    continue
                token, accepted = _verify(tokens[u], p, drawn_from[u], rng)
                emitted.append((token, "accepted" if accepted else "rejected", len(draft_logits)))
                if not accepted:
                    tokens = [*tokens[:u], token]
                    continue
            drawn_from[newest + 1] = q
            tokens.append(_draw(q, rng))
        ids, verdicts, verified_in = zip(*emitted, strict=True) if emitted else ((), (), ())
        stacked = np.stack(draft_logits) if draft_logits else np.zeros((0, len(self.draft.token_ids)), np.float32)
        return NaiveResult(ids, len(draft_logits), verdicts, verified_in, stacked)

    def _run(self, tokens: Sequence[int], depths: Sequence[int]) -> tuple[jax.Array, np.ndarray]:
        """Hidden states of every position as far as it has got, and the target's logits (by a forward that goes on)."""
        padded, layers_done = np.zeros(self.length, np.int32), np.zeros(self.length, np.int32)
        padded[: len(tokens)] = tokens
        layers_done[: len(tokens)] = np.asarray(self.plan.boundaries)[np.asarray(depths)]
        hidden, logits = _forward(self._graphdef, self._state, jnp.asarray(padded), jnp.asarray(layers_done))
        return hidden, np.asarray(logits)


@functools.partial(jax.jit, static_argnums=0)
def _forward(graphdef: Any, state: Any, ids_S: jax.Array, layers_done_S: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Hidden states `[L+1, S, D]`, NaN beyond the layers that a position has done, and the logits `[S, V]` of all."""
    target = nnx.merge(graphdef, state)
    hidden = jnp.stack(target.hidden_states(ids_S[None]))[:, 0]
    reached = jnp.arange(hidden.shape[0])[:, None] <= layers_done_S
    return jnp.where(reached[..., None], hidden, jnp.asarray(jnp.nan, hidden.dtype)), target.logits(hidden[-1])


def probabilities(logits: np.ndarray, filters: Filters | None) -> np.ndarray:
    """Filtered probabilities in float64; without filters all on the most likely token, the lowest id among ties."""
    if filters is None:
        return (np.arange(logits.size) == logits.argmax()).astype(np.float64)
    scores = logits.astype(np.float64) / filters.temperature
    order = np.argsort(-scores, kind="stable")
    kept = np.zeros(scores.size, bool)
    kept[order[: filters.top_k]] = True
    scores = np.where(kept, scores, -np.inf)
    weights = np.exp(scores - scores.max())
    weights /= weights.sum()
    before = np.cumsum(weights[order]) - weights[order]  # a token stays while those before it hold less than top_p
    weights[order[before >= filters.top_p]] = 0.0
    return weights / weights.sum()


def _draw(probabilities: np.ndarray, rng: np.random.Generator) -> int:
    return int(rng.choice(probabilities.size, p=probabilities))


def _verify(drafted: int, p: np.ndarray, q: np.ndarray, rng: np.random.Generator) -> tuple[int, bool]:
    """The verified token and whether it is the draft; greedy is the case where p and q are each on one token."""
    if rng.random() < min(1.0, p[drafted] / q[drafted]):
        return drafted, True
    rest = np.maximum(p - q, 0.0)
    return _draw(rest / rest.sum(), rng), False
