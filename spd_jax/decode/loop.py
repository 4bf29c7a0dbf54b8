"""The pipelined decoder: prompts in, verified tokens out, a few cycles a dispatch.

Owns the compiled programs on the stage mesh; the host reads a log every K cycles (streaming), never a token at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from spd_jax import struct
from spd_jax.cache.layer import capacity_of
from spd_jax.decode.batch import Batch, bucket
from spd_jax.decode.heads import Forced, Mode, Request
from spd_jax.decode.host import StreamingDecoder, refuse
from spd_jax.decode.options import Options
from spd_jax.decode.programs import grow_state, make_caches, make_dispatch, make_prefill
from spd_jax.decode.state import DecodeState, Log
from spd_jax.parallel.mesh import replicated
from spd_jax.parallel.stack import Head, PipelineParams, Program, make_program
from spd_jax.parallel.swap import swap_head
from spd_jax.parallel.watch import Watch
from spd_jax.plan import StagePlan


def mode_of(options: Options) -> Mode:
    """What of a request decides about the programs."""
    return Mode(options.sampling.mode, options.log_probs, options.tree)


class PipelineDecoder(StreamingDecoder[DecodeState]):
    """Speculative pipeline decoding on a stage mesh.

    Args:
        program, params, mesh: from `spd_jax.parallel`.
        max_length: longest sequence, prompt included (default: the model's).
        cycles_per_dispatch: cycles between two looks of the host.
        prefill_chunk: prompt tokens a stage works on at a time.
        watch: over every call of a program (default: none).
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
        watch: Watch | None = None,
    ):
        longest = program.target.context
        if max_length is not None and not 1 < max_length <= longest:
            raise ValueError(f"max_length must lie in 2..{longest} (the model's positions), found {max_length}")
        super().__init__(
            program.target.vocab_size,
            longest if max_length is None else max_length,
            cycles_per_dispatch,
            prefill_chunk,
            spare=program.plan.num_columns,  # rows that a clamped write must not hit
            watch=watch,
        )
        self.program, self.params, self.mesh = program, params, mesh
        self.cycles_per_dispatch = cycles_per_dispatch
        self._prefills: dict[Mode, Any] = {}
        self._dispatches: dict[Mode, Any] = {}

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
            decoder.program, decoder._prefills, decoder._dispatches = program, {}, {}
            decoder._warm, decoder._called = set(), set()
        return decoder

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
        capacity = self._first_room(batch)
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

    def _programs_for(self, options: Options) -> Mode:
        return mode_of(options)

    def _prefill(self, batch: Batch, request: Any) -> tuple[DecodeState, Any, Any]:
        return self.prefill(batch, mode_of(batch.options), *request)

    def _dispatch(self, options: Options, request: Any, state: DecodeState) -> tuple[DecodeState, Log]:
        facts, banned = request
        return self.dispatch(mode_of(options))(self.params, facts, state, banned)

    def _with_active(self, state: DecodeState, active: np.ndarray) -> DecodeState:
        placed = jax.device_put(active, replicated(self.mesh))
        return struct.replace(state, control=struct.replace(state.control, active=placed))

    def _room_of(self, state: DecodeState) -> int:
        return capacity_of(state.caches)

    def _grown(self, state: DecodeState, room: int) -> DecodeState:
        return grow_state(state, room)

    def _fault(self, state: DecodeState) -> Array:
        return state.control.fault

    def _devices(self) -> Sequence[Any]:
        return list(self.mesh.devices.flat)

    def _name(self) -> str:
        return f"the pipeline of {self.program.plan.num_stages} stages"

    def _refuse(self, fault: np.ndarray, state: DecodeState) -> None:
        if not fault.any():
            return
        plan = self.program.plan
        stages, drafts, heads = (np.flatnonzero(kind.any(axis=1)).tolist() for kind in np.moveaxis(fault, 1, 0))
        if stages:  # the first one: what follows it, and the draft, computed with what it made
            rank, stage = stages[0], plan.stage_of_rank(stages[0])
            layers = plan.layers_of_stage(stage or 1)
            where, faulty = f"stage {stage} (layers {layers.start}..{layers.stop - 1}) on rank {rank}", fault[rank, 0]
        elif drafts:
            where, faulty = f"the speculation module on rank {drafts[0]}", fault[:, 1]
        else:
            where, faulty = f"the final norm or the heads on ranks {heads}", fault[:, 2]
        refuse(where, faulty, np.asarray(state.control.committed))
