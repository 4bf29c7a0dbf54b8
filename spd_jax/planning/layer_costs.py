"""What layers of each kind and matrix products take on this machine's first device, measured.

In loops in which each step needs the one before, over copies of the weights that together exceed a processor's cache:
in a model too the next layer's weights are not there yet. Knows layers and caches of one device; nothing of stages.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from spd_jax.config.model import AttentionConfig, LayerConfig
from spd_jax.defaults import jit
from spd_jax.models.decoder import Ropes, head_logits, run_layers
from spd_jax.models.shapes import num_parameters
from spd_jax.nn.attention import attend_by_position, cache_layout
from spd_jax.nn.decoder_layer import layer_structure
from spd_jax.nn.deltanet import Recurrence, empty_memory
from spd_jax.planning.costs import Setting
from spd_jax.planning.timing import Timed, interleave, median

ROUNDS, STEPS = 9, 4
BEYOND_CACHES, FEWEST_COPIES, MOST_COPIES = 128 * 2**20, 4, 16


def measure_layers(
    pairs: Iterable[tuple[LayerConfig, int]], setting: Setting, dtype: Any
) -> dict[tuple[LayerConfig, int], float]:
    """Milliseconds of a layer on so many rows of each sequence, medians of rounds; a kind's numbers of rows in turn."""
    found: dict[tuple[LayerConfig, int], float] = {}
    by_kind: dict[LayerConfig, set[int]] = {}
    for kind, rows in pairs:
        by_kind.setdefault(kind, set()).add(rows)
    for kind, counts in by_kind.items():
        copies = _copies(num_parameters(kind) * jnp.dtype(dtype).itemsize)
        states = [_random_layer(kind, seed, dtype) for seed in range(copies)]
        things = [
            Timed(str(rows), _layer_loop(kind, states, rows, setting, dtype), STEPS * copies) for rows in sorted(counts)
        ]
        found |= {(kind, int(rows)): median(times) for rows, times in interleave(things, ROUNDS).items()}
    return found


def measure_products(sizes: Iterable[tuple[int, int, int]], dtype: Any) -> dict[tuple[int, int, int], float]:
    """Milliseconds of a head of (outputs, inputs) on so many rows, with the largest of every row's results."""
    found = {}
    for outputs, inputs, rows in sorted(sizes):
        rng, copies = np.random.default_rng(0), _copies(outputs * inputs * jnp.dtype(dtype).itemsize)
        tables = [jnp.asarray(rng.standard_normal((outputs, inputs), np.float32), dtype) for _ in range(copies)]
        x = jnp.asarray(rng.standard_normal((rows, inputs), np.float32), dtype)

        @jit
        def run(tables: list[Array], x: Array) -> Array:
            def body(step: Array, x: Array) -> Array:
                for table in tables:
                    x = x + (1e-6 * jnp.max(head_logits(x, table), axis=-1, keepdims=True)).astype(x.dtype)
                return x

            return jax.lax.fori_loop(0, STEPS, body, x)

        timed = Timed("", functools.partial(run, tables, x), STEPS * copies)
        found[outputs, inputs, rows] = median(interleave([timed], ROUNDS)[""])
    return found


def _copies(size: int) -> int:
    """How many copies of so many bytes exceed a cache; a few, where a whole model would not."""
    copies = max(-(-BEYOND_CACHES // size), 1)
    return copies if copies <= MOST_COPIES else FEWEST_COPIES


def _random_layer(kind: LayerConfig, seed: int, dtype: Any) -> Any:
    rng, (_, shapes) = np.random.default_rng(seed), layer_structure(kind)
    values = [(path, 0.02 * rng.standard_normal(shape, np.float32)) for path, shape in shapes.items()]
    return nnx.from_flat_state([(path, nnx.Param(jnp.asarray(value, dtype))) for path, value in values])


def _layer_loop(kind: LayerConfig, states: list[Any], rows: int, setting: Setting, dtype: Any) -> Callable[[], Any]:
    graphdef, mixer, batch, context = layer_structure(kind)[0], kind.mixer, setting.batch, setting.context
    x = jnp.asarray(np.random.default_rng(0).standard_normal((batch, rows, kind.hidden_size)), dtype)
    positions = jnp.broadcast_to(context + jnp.arange(rows, dtype=jnp.int32), (batch, rows))
    if isinstance(mixer, AttentionConfig):
        heads, size = mixer.num_kv_heads, mixer.head_dim
        kept: Any = tuple(jnp.zeros((batch, heads, *shape), dtype) for shape in ((size, context), (context, size)))
    else:
        kept = empty_memory(mixer, batch, dtype)

    def attend(k: Array, v: Array, q: Array, new_k: Array, new_v: Array, config: AttentionConfig) -> Any:
        length, new = jnp.full((batch,), context, jnp.int32), cache_layout(new_k, new_v)
        return attend_by_position(q, (k, v), length, new, positions, positions, config), new

    @jit
    def run(states: list[Any], x: Array, kept: Any) -> Array:
        def body(step: Array, x: Array) -> Array:
            layers = [nnx.merge(graphdef, state) for state in states]
            past = functools.partial(attend, *kept) if isinstance(mixer, AttentionConfig) else Recurrence(kept)
            hiddens, _ = run_layers(layers, x, Ropes(positions), [past] * len(layers))
            return x + 1e-6 * hiddens[-1]

        return jax.lax.fori_loop(0, STEPS, body, x)

    return lambda: run(states, x, kept)
