"""A test program that runs the library's own cycle step by step and also returns what both heads saw.

The decoder's programs return tokens only; here each cycle is `cycle` itself, and the logits are `both_logits` of the
same state. Everything between prefill and log is the decoder's. States are not donated, so that they can be compared.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spd_jax.cache.layer import capacity_of
from spd_jax.decode.batch import Batch, make_batch
from spd_jax.decode.compute import compute
from spd_jax.decode.cycle import cycle, exchange
from spd_jax.decode.decide import ask
from spd_jax.decode.heads import Request, both_logits
from spd_jax.decode.loop import PipelineDecoder, mode_of
from spd_jax.decode.options import Options, SequenceResult
from spd_jax.decode.programs import REPLICATED, global_state, local_params, local_state, params_spec, state_spec
from spd_jax.decode.state import DecodeState, empty_log
from spd_jax.decode.tree import CHAIN, Nodes, Tree
from spd_jax.parallel.mesh import gather_ranks


@dataclasses.dataclass
class Run:
    """A generation in the middle: its results so far, its state, and of all cycles the logits of the draft's rows
    `[K, B, W, Vd]` and the control before it (position in each stage, nodes)."""

    batch: Batch
    request: Request
    state: DecodeState
    row_logits: np.ndarray
    before: list[tuple[np.ndarray, Nodes]]
    cycles: int = 0

    @property
    def draft_logits(self) -> np.ndarray:
        """`[K, B, Vd]` of the first row: all there is of a chain."""
        return self.row_logits[:, :, 0]

    @property
    def results(self) -> list[SequenceResult]:
        return self.batch.results


class Stepper:
    """Runs a given number of greedy cycles, at most `most` at a time, in one compiled program."""

    def __init__(self, decoder: PipelineDecoder, most: int, tree: Tree = CHAIN):
        self.decoder, self.most, self.tree, self.mode = decoder, most, tree, mode_of(Options(tree=tree))
        program, mode = decoder.program, self.mode

        def body(params: Any, request: Any, state: Any, count: Any) -> Any:
            params, state = local_params(params), local_state(state)
            rows, ranks = state.control.active.shape[0], program.plan.num_ranks
            share = (params.embedding if program.shared_head else params.draft_head).shape[0]
            logits = jnp.zeros((most, ranks, rows, tree.width, share), jnp.float32)
            before = (state.control.stage_position, state.control.nodes)
            before = jax.tree.map(lambda x: jnp.stack([x] * most), before)
            outputs = empty_log(most, rows, tree.width), logits, before

            def step(index: Any, carry: Any) -> Any:
                state, outputs = carry
                hiddens, drafted, _, finite = compute(program, params, state)
                leaving_row = ask(request, state.control).leaving_row
                final, drafted, _, _ = exchange(program, leaving_row, hiddens, drafted, finite)
                _, draft, _ = both_logits(program, params, final, drafted)
                before = (state.control.stage_position, state.control.nodes)
                state, log = cycle(program, mode, params, request, state)
                new = (log, gather_ranks(draft), before)
                return state, jax.tree.map(lambda all, one: all.at[index].set(one), outputs, new)

            state, outputs = jax.lax.fori_loop(0, count, step, (state, outputs))
            return global_state(state), outputs

        specs = (params_spec(), REPLICATED, state_spec(mode), REPLICATED)
        mapped = jax.shard_map(body, mesh=decoder.mesh, in_specs=specs, out_specs=(state_spec(mode), REPLICATED))
        self._run = jax.jit(mapped)

    def start(self, prompts: Sequence[list[int]], options: Options) -> Run:
        """Prefill."""
        assert options.tree == self.tree
        decoder = self.decoder
        batch = make_batch(prompts, options, decoder.program.target.vocab_size, decoder.max_length)
        request, banned = decoder.request(batch)
        state, token, log_prob = decoder.prefill(batch, self.mode, request, banned)
        batch.first(np.asarray(token), np.asarray(log_prob))
        rows = np.zeros((0, batch.size, self.tree.width, len(self.draft_ids)), np.float32)
        return Run(batch, request, state, rows, [])

    def advance(self, run: Run, cycles: int) -> None:
        """Run this many cycles more."""
        assert cycles <= self.most
        state, outputs = self._run(self.decoder.params, run.request, run.state, jnp.int32(cycles))
        log, draft, before = jax.tree.map(lambda x: np.asarray(x)[:cycles], outputs)
        run.batch.extend(run.cycles, log)
        run.row_logits = np.concatenate([run.row_logits, _unshard(draft, self.draft_ids)])
        run.before += [jax.tree.map(lambda x, step=step: x[step], before) for step in range(cycles)]
        run.state, run.cycles = state, run.cycles + cycles
        room = capacity_of(state.caches) - self.decoder.program.plan.num_columns
        assert int(state.control.committed.max()) < room, "the stepper does not grow caches"

    def run(self, prompts: Sequence[list[int]], options: Options) -> Run:
        """Prefill and as many cycles as there can be."""
        run = self.start(prompts, options)
        self.advance(run, self.most)
        return run

    @property
    def draft_ids(self) -> np.ndarray:
        """Sorted ids of the draft vocabulary, from the shares on the ranks."""
        if self.decoder.program.draft_all:
            return np.arange(self.decoder.program.target.vocab_size)
        shares = np.asarray(self.decoder.params.draft_share)
        ranks = np.arange(len(shares))[:, None]
        return np.sort((shares * len(shares) + ranks)[shares >= 0])


def _unshard(logits_KRBWV: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """`[K, R, B, W, V/R]` -> `[K, B, W, V]`: id v is entry (number of smaller ids on its rank) of rank v mod R."""
    cycles, ranks, *rows, _ = logits_KRBWV.shape
    whole = np.empty((cycles, *rows, len(ids)), np.float32)
    for rank in range(ranks):
        mine = np.flatnonzero(ids % ranks == rank)
        whole[..., mine] = logits_KRBWV[:, rank, ..., : len(mine)]
    return whole
