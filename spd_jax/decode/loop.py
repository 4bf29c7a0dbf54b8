"""The pipelined decoder: prompts in, verified tokens out, a few cycles a dispatch.

Owns the compiled programs and the growth of the cache; the host reads a log every K cycles (streaming), never a token
at a time. Knows ids, not text.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from spd_jax import struct
from spd_jax.cache.layer import capacity_of
from spd_jax.decode.batch import Batch, bucket, make_batch
from spd_jax.decode.heads import Forced, Mode, Request
from spd_jax.decode.options import Generation, Options, Piece
from spd_jax.decode.programs import grow_state, make_caches, make_dispatch, make_prefill
from spd_jax.decode.state import DecodeState
from spd_jax.parallel.mesh import replicated
from spd_jax.parallel.stack import Head, PipelineParams, Program, make_program
from spd_jax.parallel.swap import swap_head
from spd_jax.plan import StagePlan


class FaultError(ArithmeticError):
    """A rank produced a number that is not finite; names the rank and its stage and layers, its draft or its heads."""


def mode_of(options: Options) -> Mode:
    """What of a request decides about the programs."""
    return Mode(options.sampling.mode, options.log_probs, options.tree)


class PipelineDecoder:
    """Speculative pipeline decoding on a stage mesh.

    Args:
        program, params, mesh: from `spd_jax.parallel`.
        max_length: longest sequence, prompt included (default: the model's).
        cycles_per_dispatch: cycles between two looks of the host.
        prefill_chunk: prompt tokens a stage works on at a time.
    """

    def __init__(
        self,
        program: Program,
        params: PipelineParams,
        mesh: Mesh,
        *,
        max_length: int | None = None,
        cycles_per_dispatch: int = 16,
        prefill_chunk: int = 128,
    ):
        longest = program.target.max_position
        if max_length is not None and not 1 < max_length <= longest:
            raise ValueError(f"max_length must lie in 2..{longest} (the model's positions), found {max_length}")
        self.program, self.params, self.mesh = program, params, mesh
        self.max_length = longest if max_length is None else max_length
        self.cycles_per_dispatch, self.prefill_chunk = cycles_per_dispatch, prefill_chunk
        self._prefills: dict[Mode, Any] = {}
        self._dispatches: dict[Mode, Any] = {}
        self._warm: set[tuple[Any, ...]] = set()

    def with_head(self, head: Head, plan: StagePlan | None = None) -> PipelineDecoder:
        """A decoder with another head on the same target, whose arrays are shared; this one stays as it is.

        A head of the same make (plan, layer kind, draft vocabulary) also shares the compiled programs: exchanging
        parameters while they are trained compiles nothing.

        Args:
            plan: the head's plan (default: this decoder's); the cut and the layout must be this decoder's.

        Raises:
            ValueError: head and plan disagree, or the plan cuts the target in another way.
        """
        program = make_program(self.program.target, head, self.program.plan if plan is None else plan)
        decoder = copy.copy(self)
        decoder.params = swap_head(self.params, self.program, program, head, self.mesh)
        if program != self.program:
            decoder.program, decoder._prefills, decoder._dispatches, decoder._warm = program, {}, {}, set()
        return decoder

    def generate(self, prompts: Sequence[Sequence[int]], options: Options) -> Generation:
        """Decode a batch to its end.

        Raises:
            BatchError: a prompt or option that cannot be decoded; nothing has run then.
            FaultError: a rank produced NaN or infinity.
        """
        generation = Generation([])
        for _ in self.stream(prompts, options, generation):
            pass
        return generation

    def stream(
        self, prompts: Sequence[Sequence[int]], options: Options, generation: Generation | None = None
    ) -> Iterator[Piece]:
        """Yield pieces as they are verified; `generation`, if given, is filled with results and times."""
        batch = make_batch(prompts, options, self.program.target.vocab_size, self.max_length)
        generation = Generation([]) if generation is None else generation
        generation.results = batch.results
        if not batch.active.any():
            return
        start = time.perf_counter()
        request, banned = self.request(batch)
        mode = mode_of(options)
        state, token, log_prob = self.prefill(batch, mode, request, banned)
        token, log_prob, fault = jax.device_get((token, log_prob, state.control.fault))
        self._check(fault, state)
        pieces = batch.first(token, log_prob)
        generation.prefill_seconds = time.perf_counter() - start
        yield from pieces
        start = time.perf_counter()
        cycle = 0
        while batch.active.any():
            state = self._ready(batch, state)
            state, log = self.dispatch(mode)(self.params, request, state, banned)
            log, fault = jax.device_get((log, state.control.fault))
            self._check(fault, state)
            pieces = batch.extend(cycle, log)
            cycle += self.cycles_per_dispatch
            generation.decode_seconds += time.perf_counter() - start
            yield from pieces
            start = time.perf_counter()

    def warm_up(self, prompts: Sequence[Sequence[int]], options: Options) -> None:
        """Compile what decoding these prompts can need, so that nothing is compiled while it is timed.

        The prompts are prefilled once; dispatches are compiled for every size that the cache may grow to, and run no
        cycle. Does nothing where a batch of this shape has been warmed up already.
        """
        batch = make_batch(prompts, options, self.program.target.vocab_size, self.max_length)
        longest = int((batch.lengths + batch.limits).max()) - 1  # used before the last dispatch
        request, banned = self.request(batch)
        mode = mode_of(options)
        first, last = self._capacity(batch), bucket(self._positions_needed(longest))
        shapes = tuple(x.shape for x in jax.tree.leaves((request, banned)))
        key = (mode, batch.size, first, last, shapes)
        if key in self._warm or not batch.active.any():
            return
        state, _, _ = self.prefill(batch, mode, request, banned)
        batch.active[:] = False
        while True:
            state, _ = self.dispatch(mode)(self.params, request, self._ready(batch, state), banned)
            capacity = capacity_of(state.caches)
            if capacity >= last:
                break
            state = grow_state(state, 2 * capacity)
        self._warm.add(key)

    def request(self, batch: Batch) -> tuple[Request, Array]:
        """The traced facts of a batch, and the ids that must not occur."""
        forced = batch.forced(bucket(int((batch.lengths + batch.limits).max())))
        request = Request(
            batch.options.sampling.numbers(),
            jnp.asarray(batch.eos_ids),
            None if forced is None else Forced(*map(jnp.asarray, forced)),
        )
        return jax.device_put((request, jnp.asarray(batch.banned_ids)), replicated(self.mesh))

    def prefill(self, batch: Batch, mode: Mode, request: Request, banned: Array) -> tuple[DecodeState, Array, Array]:
        """The state before the first cycle, the first tokens and their log-probabilities."""
        if mode not in self._prefills:
            self._prefills[mode] = make_prefill(self.program, mode, self.mesh, self.prefill_chunk)
        capacity = self._capacity(batch)
        dtype = self.params.embedding.dtype
        caches = make_caches(self.program, self.mesh, batch.size, capacity, mode.tree.width, dtype)
        arrays = (batch.padded_ids(capacity), batch.lengths, batch.limits, batch.seeds())
        placed = jax.device_put(arrays, replicated(self.mesh))
        return self._prefills[mode](self.params, request, caches, *placed, banned)

    def dispatch(self, mode: Mode) -> Any:
        """The compiled `(params, request, state, banned) -> (state, log)`; it donates the state."""
        if mode not in self._dispatches:
            self._dispatches[mode] = make_dispatch(self.program, mode, self.mesh, self.cycles_per_dispatch)
        return self._dispatches[mode]

    def _capacity(self, batch: Batch) -> int:
        """Positions of the cache that a prefill makes."""
        longest = int(batch.lengths.max())
        padded = -(-longest // self.prefill_chunk) * self.prefill_chunk
        return bucket(max(padded, self._positions_needed(longest + 1)))

    def _positions_needed(self, used: int) -> int:
        """Positions that a dispatch may touch: one a cycle, and spare rows that a clamped write must not hit."""
        return used + self.cycles_per_dispatch + self.program.plan.num_columns

    def _ready(self, batch: Batch, state: DecodeState) -> DecodeState:
        """Grow the cache if the next dispatch may need it; end sequences that the host has ended."""
        capacity = capacity_of(state.caches)
        needed = bucket(self._positions_needed(batch.longest()))
        if needed > capacity:
            state = grow_state(state, needed)
        active = jax.device_put(batch.active, replicated(self.mesh))
        return struct.replace(state, control=struct.replace(state.control, active=active))

    def _check(self, fault: np.ndarray, state: DecodeState) -> None:
        if not fault.any():
            return
        plan = self.program.plan
        stages, drafts, heads = (np.flatnonzero(kind).tolist() for kind in fault.T)
        if stages:  # the first one: what follows it, and the draft, computed with what it made
            rank, stage = stages[0], plan.stage_of_rank(stages[0])
            layers = plan.layers_of_stage(stage or 1)
            where = f"stage {stage} (layers {layers.start}..{layers.stop - 1}) on rank {rank}"
        elif drafts:
            where = f"the speculation module on rank {drafts[0]}"
        else:
            where = f"the final norm or the heads on ranks {heads}"
        committed = np.asarray(state.control.committed).tolist()
        raise FaultError(f"{where} produced NaN or infinity; verified lengths were {committed}")
