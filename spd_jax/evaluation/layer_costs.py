"""What one layer of each kind costs for a token: bytes that it reads, or time measured on this machine.

Knows layers and caches of one device; nothing of stages.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from spd_jax.config.model import AttentionConfig, ExpertsConfig, LayerConfig
from spd_jax.evaluation.cost_model import past_bytes
from spd_jax.evaluation.timing import Timed, interleave, median
from spd_jax.models.decoder import Ropes, run_layers
from spd_jax.models.shapes import expert_parameters, num_parameters
from spd_jax.nn.attention import attend_by_position, cache_layout
from spd_jax.nn.decoder_layer import layer_structure
from spd_jax.nn.deltanet import Recurrence, empty_memory

ROUNDS = 20


def describe_kind(kind: LayerConfig) -> str:
    """A layer's kind in a few words."""
    mixer = "gated delta net"
    if isinstance(kind.mixer, AttentionConfig):
        mixer = "attention" if kind.mixer.window is None else f"window of {kind.mixer.window}"
    mlp = kind.mlp
    inner = f"{mlp.top_k} of {mlp.num_experts} experts" if isinstance(mlp, ExpertsConfig) else "MLP"
    return f"{mixer}, {inner}"


def bytes_read(kind: LayerConfig, context: int, itemsize: int) -> int:
    """Bytes that a layer reads for one token: weights (of experts the chosen ones), keys and values or memory."""
    weights = num_parameters(kind)
    if isinstance(kind.mlp, ExpertsConfig):
        weights -= (kind.mlp.num_experts - kind.mlp.top_k) * expert_parameters(kind)
    return itemsize * weights + past_bytes(kind, context, itemsize)


def measure_layers(
    rows_of_kind: Sequence[tuple[LayerConfig, int]], context: int, dtype: Any
) -> dict[tuple[LayerConfig, int], float]:
    """Milliseconds of a layer on so many rows at `context` positions, medians of interleaved rounds."""
    pairs = list(dict.fromkeys(rows_of_kind))
    things = [Timed(str(index), _prepared(*pair, context, dtype)) for index, pair in enumerate(pairs)]
    times = interleave(things, ROUNDS)
    return {pair: median(times[str(index)]) for index, pair in enumerate(pairs)}


def _prepared(kind: LayerConfig, rows: int, context: int, dtype: Any) -> Callable[[], Any]:
    graphdef, shapes = layer_structure(kind)
    rng, mixer = np.random.default_rng(0), kind.mixer
    values = [(path, 0.02 * rng.standard_normal(shape, np.float32)) for path, shape in shapes.items()]
    state = nnx.from_flat_state([(path, nnx.Param(jnp.asarray(value, dtype))) for path, value in values])
    x = jnp.asarray(rng.standard_normal((1, rows, kind.hidden_size)), dtype)
    positions = context + jnp.arange(rows, dtype=jnp.int32)[None]
    if isinstance(mixer, AttentionConfig):
        heads, size = mixer.num_kv_heads, mixer.head_dim
        kept: Any = tuple(jnp.zeros((1, heads, *shape), dtype) for shape in ((size, context), (context, size)))
    else:
        kept = empty_memory(mixer, 1, dtype)

    def attend(k: Array, v: Array, q: Array, new_k: Array, new_v: Array, config: AttentionConfig) -> Any:
        length, new = jnp.full((1,), context, jnp.int32), cache_layout(new_k, new_v)
        return attend_by_position(q, (k, v), length, new, positions, positions, config), new

    @jax.jit
    def run(state: Any, x: Array, kept: Any) -> Any:
        past = functools.partial(attend, *kept) if isinstance(mixer, AttentionConfig) else Recurrence(kept)
        return run_layers([nnx.merge(graphdef, state)], x, Ropes(positions), [past])

    return lambda: run(state, x, kept)
