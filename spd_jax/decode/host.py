"""The host's side of decoding: prompts in, tokens out as they come, a few steps a dispatch.

One loop for the pipelined and the autoregressive decoder, so that both treat requests, ends of sequences, growing
caches, faults and calls that hang alike. Each decoder says how its programs are called. Knows ids, not text.
"""

from __future__ import annotations

import abc
import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any, Generic, NoReturn, TypeVar

import jax
import numpy as np

from spd_jax.decode.batch import Batch, bucket, make_batch
from spd_jax.decode.options import Generation, Options, Piece
from spd_jax.decode.state import Log
from spd_jax.parallel.watch import Watch

S = TypeVar("S")
"""The state of a decoder between two dispatches."""


class FaultError(ArithmeticError):
    """A number that is not finite came up; names the place, as far as it is known."""


def refuse(where: str, faulty_B: np.ndarray, lengths_B: np.ndarray) -> NoReturn:
    """Say what produced numbers that are not finite, for which prompts, and how long the sequences were.

    Args:
        faulty_B: with the sequences as its last axis, whatever comes before.

    Raises:
        FaultError: always.
    """
    rows = np.flatnonzero(faulty_B.reshape(-1, faulty_B.shape[-1]).any(axis=0)).tolist()
    of = "" if len(lengths_B) == 1 else f" for prompt(s) {rows} of {len(lengths_B)}"
    raise FaultError(f"{where} produced NaN or infinity{of}; verified lengths were {lengths_B.tolist()}")


class StreamingDecoder(abc.ABC, Generic[S]):
    """A decoder of batches.

    Args:
        vocab_size: ids of prompts lie below.
        max_length: longest sequence, prompt included.
        steps_per_dispatch: steps (cycles) between two looks of the host.
        prefill_chunk: prompt tokens worked on at a time.
        spare: positions behind the longest sequence that a dispatch may touch besides one a step.
        watch: over every call of a program; None watches nothing.
    """

    def __init__(
        self,
        vocab_size: int,
        max_length: int,
        steps_per_dispatch: int,
        prefill_chunk: int,
        *,
        spare: int,
        watch: Watch | None,
    ):
        self.max_length, self.prefill_chunk = max_length, prefill_chunk
        self._vocab_size, self._steps, self._watch = vocab_size, steps_per_dispatch, watch
        self._reach = steps_per_dispatch + spare
        self._warm: set[tuple[Any, ...]] = set()
        self._called: set[tuple[Any, ...]] = set()

    def generate(self, prompts: Sequence[Sequence[int]], options: Options) -> Generation:
        """Decode a batch to its end.

        Raises:
            BatchError: a prompt or option that cannot be decoded; nothing has run then.
            FaultError: NaN or infinity came up.
        """
        generation = Generation([])
        for _ in self.stream(prompts, options, generation):
            pass
        return generation

    def stream(
        self, prompts: Sequence[Sequence[int]], options: Options, generation: Generation | None = None
    ) -> Iterator[Piece]:
        """Yield pieces as they are decoded; `generation`, if given, is filled with results and times."""
        batch = self._batch(prompts, options)
        generation = Generation([]) if generation is None else generation
        generation.results = batch.results
        if not batch.active.any():
            return
        start = time.perf_counter()
        request = self.request(batch)
        state, token, log_prob = self._prefilled(batch, request)
        pieces = batch.first(token, log_prob)
        generation.prefill_seconds = time.perf_counter() - start
        yield from pieces
        start, step = time.perf_counter(), 0
        while batch.active.any():
            state, log = self._advanced(batch, request, state, step)
            pieces = batch.extend(step, log)
            step += self._steps
            generation.decode_seconds += time.perf_counter() - start
            yield from pieces
            start = time.perf_counter()

    def warm_up(self, prompts: Sequence[Sequence[int]], options: Options) -> None:
        """Compile what decoding these prompts can need, so that nothing is compiled while it is timed.

        The prompts are prefilled once; dispatches are compiled for every size that the cache may grow to, and run no
        step. Does nothing where a batch of this shape has been warmed up already.
        """
        batch = self._batch(prompts, options)
        longest = int((batch.lengths + batch.limits).max()) - 1  # used before the last dispatch
        request, last = self.request(batch), self._room(longest + self._reach)
        shapes = tuple(x.shape for x in jax.tree.leaves(request))
        key = (self._programs_for(options), batch.size, self._first_room(batch), last, shapes)
        if key in self._warm or not batch.active.any():
            return
        state, _, _ = self._prefilled(batch, request)
        batch.active[:] = False
        while True:
            state, _ = self._advanced(batch, request, state, 0)
            if self._room_of(state) >= last:
                break
            state = self._grown(state, self._room(self._room_of(state) + 1))
        self._warm.add(key)

    def _batch(self, prompts: Sequence[Sequence[int]], options: Options) -> Batch:
        return make_batch(prompts, options, self._vocab_size, self.max_length)

    def _prefilled(self, batch: Batch, request: Any) -> tuple[S, np.ndarray, np.ndarray]:
        with self._watched(batch, f"the prefill of {batch.size} prompt(s)", self._first_room(batch), "prefill"):
            state, token, log_prob = self._prefill(batch, request)
            token, log_prob, fault = jax.device_get((token, log_prob, self._fault(state)))
        self._refuse(fault, state)
        return state, token, log_prob

    def _advanced(self, batch: Batch, request: Any, state: S, step: int) -> tuple[S, Log]:
        """A dispatch, with the cache grown if it may need that and sequences ended that the host has ended."""
        needed = self._room(batch.longest() + self._reach)
        if needed > self._room_of(state):
            state = self._grown(state, needed)
        state = self._with_active(state, batch.active)
        what = f"steps {step + 1} to {step + self._steps}"
        with self._watched(batch, what, self._room_of(state), "dispatch"):
            state, log = self._dispatch(batch.options, request, state)
            log, fault = jax.device_get((log, self._fault(state)))
        self._refuse(fault, state)
        return state, log

    def _watched(self, batch: Batch, what: str, *program: Any) -> contextlib.AbstractContextManager[None]:
        """A watch over the call of a program that these facts tell from others."""
        if self._watch is None:
            return contextlib.nullcontext()
        key = (*program, batch.size, self._programs_for(batch.options))
        compiles = key not in self._called
        self._called.add(key)
        devices = self._devices()
        process = f", process {jax.process_index()} of {jax.process_count()}" if jax.process_count() > 1 else ""
        where = f"{len(devices)} {devices[0].platform} device(s){process}"
        return self._watch.over(
            f"{what} of {self._name()} on {where}", works_here=compiles or devices[0].platform == "cpu"
        )

    def _room(self, positions: int) -> int:
        """Positions of a cache that holds so many."""
        return bucket(positions)

    def _first_room(self, batch: Batch) -> int:
        """Positions of the cache that a prefill makes."""
        longest = int(batch.lengths.max())
        padded = -(-longest // self.prefill_chunk) * self.prefill_chunk
        return self._room(max(padded, longest + 1 + self._reach))

    @abc.abstractmethod
    def request(self, batch: Batch) -> Any:
        """The traced facts of a batch."""

    @abc.abstractmethod
    def _programs_for(self, options: Options) -> Any:
        """What of the options decides about the programs; hashable."""

    @abc.abstractmethod
    def _prefill(self, batch: Batch, request: Any) -> tuple[S, Any, Any]:
        """The state before the first step, the first tokens and their log-probabilities, on devices."""

    @abc.abstractmethod
    def _dispatch(self, options: Options, request: Any, state: S) -> tuple[S, Any]:
        """Up to `steps_per_dispatch` steps and their log, on devices; the state is given away."""

    @abc.abstractmethod
    def _with_active(self, state: S, active: np.ndarray) -> S:
        """The state with only these sequences going on."""

    @abc.abstractmethod
    def _room_of(self, state: S) -> int:
        """Positions that the state's caches hold."""

    @abc.abstractmethod
    def _grown(self, state: S, room: int) -> S:
        """The state with caches of so many positions."""

    @abc.abstractmethod
    def _fault(self, state: S) -> Any:
        """The state's record of numbers that are not finite, on devices."""

    @abc.abstractmethod
    def _refuse(self, fault: Any, state: S) -> None:
        """Raise `FaultError` if the record names any."""

    @abc.abstractmethod
    def _devices(self) -> Sequence[Any]:
        """The devices that the programs run on."""

    @abc.abstractmethod
    def _name(self) -> str:
        """The decoder in a few words, for a message."""
