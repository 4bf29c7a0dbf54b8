"""Autoregressive decoding on one device: the oracle of the tests and the baseline of every speed claim.

The same layers, attention, sampling and bookkeeping as the pipelined decoder, one token a step.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from spd_jax import struct
from spd_jax.cache.rows import LayerCaches, empty_caches, grow_caches, write_rows
from spd_jax.config.model import AttentionConfig
from spd_jax.decode.batch import Batch
from spd_jax.decode.host import StreamingDecoder, refuse
from spd_jax.decode.options import Options
from spd_jax.decode.sampling import (
    TARGET,
    SamplingMode,
    SamplingNumbers,
    best,
    gumbel,
    log_normaliser,
    log_probs,
    row_keys,
)
from spd_jax.decode.state import IDLE, UNDRAFTED, Log, empty_log, undrafted_entry
from spd_jax.defaults import jit
from spd_jax.models.decoder import Decoder, Ropes, embed, run_layers
from spd_jax.nn.attention import PREFILL_BLOCK, attend_by_position, cache_layout
from spd_jax.nn.deltanet import Memory, Recurrence
from spd_jax.nn.layers import Attend
from spd_jax.parallel.watch import Watch


@struct.dataclass
class StepState:
    """`token` `[B]`, at `position` `[B]`, is not yet in the caches. `fault` `[2, B]`: a number that is not finite came
    from the layers, from the final norm or the head."""

    caches: LayerCaches
    token: Array
    position: Array
    active: Array
    emitted: Array
    limit: Array
    keys: Array
    fault: Bool[Array, "2 B"]


@struct.dataclass
class StepRequest:
    """Sampling numbers, ids that end a sequence, ids (a mask `[V]`) that may occur."""

    numbers: SamplingNumbers
    eos: Array
    allowed: Array


class AutoregressiveDecoder(StreamingDecoder[StepState]):
    """One token a step on one device.

    Args:
        decoder: the model; it is split once, its arrays are passed to every program.
        num_tokens: ids from here on are padding and never emitted.
        capacity_step: caches have room for a multiple of so many positions (default: a power of two from 256). Smaller
            steps read less, which pays for large batches, and compile more often.
        activations: number format of hidden states and caches (default: the weights'). On CPUs with matrix units
            bfloat16 weights with float32 activations are the fastest for large batches: products are bfloat16 ones,
            and everything else stays in the format that XLA's CPU backend knows.
        watch: over every call of a program (default: none).
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        max_length: int | None = None,
        steps_per_dispatch: int = 16,
        prefill_chunk: int = 128,
        num_tokens: int | None = None,
        activations: Any = None,
        capacity_step: int | None = None,
        watch: Watch | None = None,
    ):
        self.config = decoder.config
        longest = decoder.config.context if max_length is None else max_length
        super().__init__(self.config.vocab_size, longest, steps_per_dispatch, prefill_chunk, spare=0, watch=watch)
        self.steps_per_dispatch = steps_per_dispatch
        self._capacity_step = capacity_step
        self._num_tokens = self.config.vocab_size if num_tokens is None else num_tokens
        self._dtype = jnp.dtype(decoder.embedding[...].dtype if activations is None else activations)
        self._graphdef, self.weights = nnx.split(decoder)
        self._programs: dict[Any, Any] = {}

    def request(self, batch: Batch) -> StepRequest:
        """The traced facts of a batch."""
        allowed = np.arange(self.config.vocab_size) < self._num_tokens
        allowed[batch.banned_ids[batch.banned_ids >= 0]] = False
        return StepRequest(batch.options.sampling.numbers(), jnp.asarray(batch.eos_ids), jnp.asarray(allowed))

    def prompt_arrays(self, batch: Batch) -> tuple[Any, ...]:
        """What a prefill takes after weights and request: empty caches, padded ids, lengths, limits, seeds."""
        capacity = self._first_room(batch)
        caches = empty_caches(self.config.layers, batch.size, capacity, self._dtype)
        arrays = (batch.padded_ids(capacity), batch.lengths, batch.limits, batch.seeds())
        return caches, *map(jnp.asarray, arrays)

    def compiled(self, mode: SamplingMode, with_log_probs: bool) -> tuple[Any, Any]:
        """The compiled prefill and dispatch."""
        key = (mode, with_log_probs)
        if key not in self._programs:
            body = _Programs(
                self._graphdef, mode, with_log_probs, self.steps_per_dispatch, self.prefill_chunk, self._dtype
            )
            self._programs[key] = (
                jit(body.prefill, donate_argnums=2),
                jit(body.dispatch, donate_argnums=2),
            )
        return self._programs[key]

    def _batch(self, prompts: Sequence[Sequence[int]], options: Options) -> Batch:
        return super()._batch(prompts, dataclasses.replace(options, forced_drafts=None))

    def _room(self, positions: int) -> int:
        step = self._capacity_step
        return super()._room(positions) if step is None else -(-positions // step) * step

    def _programs_for(self, options: Options) -> tuple[SamplingMode, bool]:
        return options.sampling.mode, options.log_probs

    def _prefill(self, batch: Batch, request: StepRequest) -> tuple[StepState, Any, Any]:
        prefill, _ = self.compiled(*self._programs_for(batch.options))
        return prefill(self.weights, request, *self.prompt_arrays(batch))

    def _dispatch(self, options: Options, request: StepRequest, state: StepState) -> tuple[StepState, Log]:
        _, dispatch = self.compiled(*self._programs_for(options))
        return dispatch(self.weights, request, state)

    def _with_active(self, state: StepState, active: np.ndarray) -> StepState:
        return struct.replace(state, active=jnp.asarray(active))

    def _room_of(self, state: StepState) -> int:
        return state.caches.capacity

    def _grown(self, state: StepState, room: int) -> StepState:
        return grow_steps(state, room)

    def _fault(self, state: StepState) -> Array:
        return state.fault

    def _refuse(self, fault: np.ndarray, state: StepState) -> None:
        if fault.any():
            where = "the layers" if fault[0].any() else "the final norm or the head"
            refuse(where, fault, np.asarray(state.position))

    def _devices(self) -> Sequence[Any]:
        return sorted(jax.tree.leaves(self.weights)[0].devices(), key=lambda device: device.id)

    def _name(self) -> str:
        return "the autoregressive decoder"


@dataclasses.dataclass(frozen=True)
class _Programs:
    """The traced functions; static facts are fields."""

    graphdef: Any
    mode: SamplingMode
    with_log_probs: bool
    steps: int
    chunk: int
    dtype: Any

    def choose(
        self, model: Decoder, hidden_BD: Float[Array, "B D"], request: StepRequest, position: Array, keys: Array
    ) -> tuple[Int[Array, " B"], Float[Array, " B"], Bool[Array, " B"]]:
        """The next token of every sequence, its log-probability (zeros if not asked for), and sequences whose scores
        were not numbers."""
        logits = model.masked_logits(hidden_BD, request.allowed)
        ids = jnp.arange(logits.shape[-1], dtype=jnp.int32)
        scores, largest = logits, jnp.max(logits, axis=-1)
        if not self.mode.greedy:
            scores, _ = log_probs(logits, ids, self.mode, request.numbers)
            if self.mode.top_k:  # numbers only for ids that can win: those of a whole vocabulary cost more than a step
                _, ids = jax.lax.top_k(logits, min(self.mode.top_k, logits.shape[-1]))
                scores = jnp.take_along_axis(scores, ids, axis=-1)
            scores = scores + gumbel(keys, position, TARGET, ids)
        if ids.ndim == 1:
            _, token = best(scores, ids)
        else:
            token = jnp.take_along_axis(ids, jnp.argmax(scores, axis=-1)[:, None], axis=-1)[:, 0]
        if not self.with_log_probs:
            return token, jnp.zeros(token.shape, jnp.float32), jnp.isnan(largest)
        at = jnp.take_along_axis(logits, token[:, None], axis=-1)
        return token, (at - log_normaliser(logits))[:, 0], jnp.isnan(largest)

    def rows(
        self, model: Decoder, ids_BT: Array, start: Array, caches: LayerCaches, running: Array, valid_BT: Array | None
    ) -> tuple[Array, LayerCaches]:
        """Hidden states of new rows at positions start.., and the caches with what is kept of them.

        `valid_BT`: rows that count (None: all); rows behind a prompt's end are overwritten where attention keeps them.
        `running` is true whenever this is called. That XLA cannot know it puts all reading of the caches into a branch
        and the writing behind it; side by side in one computation, every cache would be copied twice a token.
        """
        length = ids_BT.shape[1]
        positions = start[:, None] + jnp.arange(length, dtype=jnp.int32)
        block = math.gcd(PREFILL_BLOCK, caches.capacity) if length > 1 else None

        def attend(k: Array, v: Array) -> Attend:
            def over(
                q: Array, new_k: Array, new_v: Array, config: AttentionConfig
            ) -> tuple[Array, tuple[Array, Array]]:
                new = cache_layout(new_k, new_v)
                return attend_by_position(q, (k, v), start, new, positions, positions, config, block=block), new

            return over

        def compute() -> tuple[Array, tuple[Any, ...]]:
            x_BTD = embed(model.embedding[...][ids_BT], model.config).astype(self.dtype)
            regions, memories = zip(caches.k, caches.v, strict=True), iter(caches.memories)
            pasts = [
                attend(*next(regions)) if isinstance(c.mixer, AttentionConfig) else Recurrence(next(memories), valid_BT)
                for c in model.config.layers
            ]
            hiddens, kept = run_layers(model.layers, x_BTD, Ropes(positions), pasts)
            return hiddens[-1], tuple(kept)

        def nothing() -> tuple[Array, tuple[Any, ...]]:
            return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(compute))

        hidden, kept = jax.lax.cond(running, compute, nothing)
        rows = [entry for entry in kept if not isinstance(entry, Memory)]
        k, v = write_rows(caches.k, caches.v, tuple(k for k, _ in rows), tuple(v for _, v in rows), start)
        return hidden, LayerCaches(k, v, tuple(entry for entry in kept if isinstance(entry, Memory)))

    def prefill(
        self,
        weights: Any,
        request: StepRequest,
        caches: LayerCaches,
        ids: Array,
        lengths: Array,
        limit: Array,
        seeds: Array,
    ) -> tuple[StepState, Array, Array]:
        """Fill the cache chunk by chunk and choose the first token."""
        model = nnx.merge(self.graphdef, weights)
        batch, size = ids.shape[0], model.config.hidden_size
        rows = jnp.arange(self.chunk, dtype=jnp.int32)

        def body(index: Array, carry: tuple[LayerCaches, Array, Array]) -> tuple[LayerCaches, Array, Array]:
            caches, final, fault = carry
            start = index * self.chunk
            piece = jax.lax.dynamic_slice_in_dim(ids, start, self.chunk, axis=1)
            first, valid = jnp.full((batch,), 1, jnp.int32) * start, start + rows < lengths[:, None]
            hidden, caches = self.rows(model, piece, first, caches, index < count, valid)
            inside = lengths - 1 - start
            picked = jnp.take_along_axis(hidden, jnp.clip(inside, 0, self.chunk - 1)[:, None, None], axis=1)[:, 0]
            fault = fault | ~jnp.all(jnp.isfinite(hidden) | ~valid[..., None], axis=(1, 2))
            return caches, jnp.where(((inside >= 0) & (inside < self.chunk))[:, None], picked, final), fault

        count = (jnp.max(lengths) + self.chunk - 1) // self.chunk
        final = jnp.zeros((batch, size), self.dtype)
        caches, final, in_layers = jax.lax.fori_loop(0, count, body, (caches, final, jnp.zeros((batch,), bool)))
        keys = row_keys(seeds)
        token, log_prob, in_head = self.choose(model, final, request, lengths, keys)
        ended = jnp.any(token[:, None] == request.eos, axis=1) | (limit <= 1)
        emitted = jnp.ones((batch,), jnp.int32)
        fault = jnp.stack([in_layers, in_head])
        state = StepState(caches, token, lengths, ~ended, emitted, limit, keys, fault)
        return state, token, log_prob

    def step(self, model: Decoder, request: StepRequest, state: StepState) -> tuple[StepState, Log]:
        """One token for every active sequence."""
        running = jnp.any(state.active)
        hidden, caches = self.rows(model, state.token[:, None], state.position, state.caches, running, None)
        token, log_prob, in_head = self.choose(model, hidden[:, 0], request, state.position + 1, state.keys)
        in_layers = ~jnp.all(jnp.isfinite(hidden), axis=(1, 2))
        emitted = state.emitted + state.active.astype(jnp.int32)
        ended = jnp.any(token[:, None] == request.eos, axis=1) | (emitted >= state.limit)
        event = jnp.where(state.active, UNDRAFTED, IDLE).astype(jnp.int32)
        log = undrafted_entry(event, jnp.where(state.active, token, -1), log_prob)
        new = StepState(
            caches=caches,
            token=jnp.where(state.active, token, state.token),
            position=state.position + state.active.astype(jnp.int32),
            active=state.active & ~ended,
            emitted=emitted,
            limit=state.limit,
            keys=state.keys,
            fault=state.fault | (jnp.stack([in_layers, in_head]) & state.active),
        )
        return new, log

    def dispatch(self, weights: Any, request: StepRequest, state: StepState) -> tuple[StepState, Log]:
        """Up to `steps` steps, fewer when all sequences have ended or one has a fault; the log is `[steps, B]`."""
        model = nnx.merge(self.graphdef, weights)
        log = empty_log(self.steps, state.token.shape[0], 1)

        def body(carry: Any) -> Any:
            index, state, log = carry
            state, entry = self.step(model, request, state)
            log = jax.tree.map(lambda whole, row: jax.lax.dynamic_update_index_in_dim(whole, row, index, 0), log, entry)
            return index + 1, state, log

        def more(carry: Any) -> Array:
            index, state, _ = carry
            return (index < self.steps) & jnp.any(state.active) & ~jnp.any(state.fault)

        _, state, log = jax.lax.while_loop(more, body, (jnp.int32(0), state, log))
        return state, log


@functools.partial(jit, static_argnums=1)
def grow_steps(state: StepState, capacity: int) -> StepState:
    """The same state with caches of another capacity."""
    return struct.replace(state, caches=grow_caches(state.caches, capacity))
