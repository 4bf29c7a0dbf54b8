"""A test program that runs the library's own cycle step by step and also returns what both heads saw.

The decoder's programs return tokens only; here each cycle is `cycle` itself, and the logits are `both_logits` of the
same state. Everything between prefill and log is the decoder's.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from spd_jax.decode.batch import make_batch
from spd_jax.decode.compute import compute
from spd_jax.decode.cycle import _exchange, cycle
from spd_jax.decode.heads import Mode, both_logits
from spd_jax.decode.loop import PipelineDecoder
from spd_jax.decode.options import Options, SequenceResult
from spd_jax.decode.programs import REPLICATED, global_state, local_params, local_state, params_spec, state_spec
from spd_jax.decode.state import DecodeState, Log
from spd_jax.parallel.mesh import gather_ranks


@dataclasses.dataclass
class Steps:
    """Results as the decoder reports them, logits of every cycle `[K, B, ...]`, and the state after the last one."""

    results: list[SequenceResult]
    log: Log
    target_logits: np.ndarray
    draft_logits: np.ndarray
    state: DecodeState


class Stepper:
    """Runs exactly `cycles` cycles in one compiled program."""

    def __init__(self, decoder: PipelineDecoder, cycles: int, mode: Mode):
        self.decoder, self.cycles, self.mode = decoder, cycles, mode
        program = decoder.program

        def body(params: Any, request: Any, state: Any) -> Any:
            params = local_params(params)

            def step(state: DecodeState, _: None) -> Any:
                hiddens, drafted, _, finite = compute(program, params, state)
                final, drafted, _, _ = _exchange(program, hiddens, drafted, finite)
                target, draft, _ = both_logits(program, params, final[:, 0], drafted[:, 0])
                state, log = cycle(program, mode, params, request, state)
                return state, (log, gather_ranks((target, draft)))

            state, outputs = jax.lax.scan(step, local_state(state), None, length=cycles)
            return global_state(state), outputs

        specs = (params_spec(), REPLICATED, state_spec(mode))
        mapped = jax.shard_map(body, mesh=decoder.mesh, in_specs=specs, out_specs=(state_spec(mode), REPLICATED))
        self._run = jax.jit(mapped)

    def run(self, prompts: Sequence[list[int]], options: Options) -> Steps:
        decoder, program = self.decoder, self.decoder.program
        batch = make_batch(prompts, options, program.target.vocab_size, decoder.max_length)
        request, banned = decoder.request(batch)
        state, token, log_prob = decoder.prefill(batch, self.mode, request, banned)
        batch.first(np.asarray(token), np.asarray(log_prob))
        state, (log, (target, draft)) = self._run(decoder.params, request, state)
        batch.extend(0, *map(np.asarray, (log.event, log.token, log.log_prob, log.draft)))
        every = np.arange(program.target.vocab_size)
        ids = every if program.draft_all else _draft_ids(decoder)
        return Steps(batch.results, log, _unshard(target, every), _unshard(draft, ids), state)


def _draft_ids(decoder: PipelineDecoder) -> np.ndarray:
    """Sorted ids of the draft vocabulary, from the shares on the ranks."""
    shares = np.asarray(decoder.params.draft_share)
    ranks = np.arange(len(shares))[:, None]
    return np.sort((shares * len(shares) + ranks)[shares >= 0])


def _unshard(logits_KRBV: jax.Array, ids: np.ndarray) -> np.ndarray:
    """`[K, R, B, V/R]` -> `[K, B, V]`: id v is entry (number of smaller ids on its rank) of rank v mod R."""
    logits = np.asarray(logits_KRBV)
    ranks = logits.shape[1]
    whole = np.empty((*logits.shape[::2], len(ids)), np.float32)
    for rank in range(ranks):
        mine = np.flatnonzero(ids % ranks == rank)
        whole[..., mine] = logits[:, rank, :, : len(mine)]
    return whole
