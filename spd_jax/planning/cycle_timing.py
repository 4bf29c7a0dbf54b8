"""Cycles of a filled pipeline, whatever the head would guess, and autoregressive steps, as things to time.

Knows the decoders' programs; what is done with the times is the caller's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from spd_jax.decode.autoregressive import AutoregressiveDecoder, grow_steps
from spd_jax.decode.batch import make_batch
from spd_jax.decode.loop import PipelineDecoder, mode_of
from spd_jax.decode.options import Options
from spd_jax.decode.programs import grow_state
from spd_jax.decode.tree import CHAIN, Tree
from spd_jax.planning.timing import Timed


def endless(tokens: int, drafts: list[list[int]] | None = None, tree: Tree = CHAIN) -> Options:
    """A greedy request that nothing ends early."""
    return Options(max_new_tokens=tokens, eos_ids=(2,), ignore_eos=True, forced_drafts=drafts, tree=tree)


def full_cycles(
    name: str,
    decoder: PipelineDecoder,
    prompt: Sequence[int],
    ids: Sequence[int],
    capacity: int,
    *,
    batch_size: int = 1,
    tree: Tree = CHAIN,
) -> Timed:
    """Dispatches of cycles with all stages busy, in a cache of at least `capacity` positions.

    Args:
        ids: the greedy text after the prompt; they take the place of the drafts, so that every one is right. Enough for
            what a dispatch does after the pipeline is full.
    """
    batch = make_batch(
        [list(prompt)] * batch_size,
        endless(2048, [list(ids)] * batch_size, tree),
        decoder.program.target.vocab_size,
        decoder.max_length,
    )
    request, banned = decoder.request(batch)
    mode = mode_of(batch.options)
    state, _, _ = decoder.prefill(batch, mode, request, banned)
    if state.caches[0].v.shape[-2] < capacity:
        state = grow_state(state, capacity)
    dispatch = decoder.dispatch(mode)
    for _ in range(-(-decoder.program.plan.num_stages // decoder.cycles_per_dispatch)):
        state, _ = dispatch(decoder.params, request, state, banned)  # fills the pipeline

    def prepare() -> tuple[Any, ...]:
        return (jax.tree.map(jnp.copy, state),)

    def run(state: Any) -> Any:
        return dispatch(decoder.params, request, state, banned)

    return Timed(name, run, decoder.cycles_per_dispatch, prepare)


def full_steps(name: str, decoder: AutoregressiveDecoder, prompt: Sequence[int], capacity: int) -> Timed:
    """Dispatches of autoregressive steps in a cache of at least `capacity` positions."""
    batch = make_batch([list(prompt)], endless(2048), decoder.config.vocab_size, decoder.max_length)
    prefill, dispatch = decoder.compiled(batch.options.sampling.mode, False)
    request = decoder.request(batch)
    state, _, _ = prefill(decoder.weights, request, *decoder.prompt_arrays(batch))
    if state.caches.capacity < capacity:
        state = grow_steps(state, capacity)

    def prepare() -> tuple[Any, ...]:
        return (jax.tree.map(jnp.copy, state),)

    return Timed(name, lambda s: dispatch(decoder.weights, request, s), decoder.steps_per_dispatch, prepare)
