"""The gated delta net: rows in chunks, row by row, in pieces, padded and packed are all the same recurrence."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from spd_jax.config.model import DeltaNetConfig, NormConfig
from spd_jax.nn.deltanet import CHUNK, GatedDeltaNet, Memory, Recurrence, unit_lower_inverse

CONFIG = DeltaNetConfig(num_key_heads=2, num_value_heads=4, key_dim=6, value_dim=5, conv_kernel=4)
SIZE, LENGTH = 16, 2 * CHUNK + 9


def make() -> tuple[Any, Any]:
    graphdef, state = nnx.split(
        nnx.eval_shape(
            lambda: GatedDeltaNet(CONFIG, SIZE, NormConfig(1e-6), dtype=jnp.dtype(jnp.float32), rngs=nnx.Rngs(0))
        )
    )
    rng = np.random.default_rng(0)
    return graphdef, jax.tree.map(lambda x: jnp.asarray(0.5 * rng.standard_normal(x.shape), jnp.float32), state)


GRAPHDEF, STATE = make()


@jax.jit
def mix(x_BTD: Any, recurrence: Recurrence) -> tuple[Any, Memory]:
    return nnx.merge(GRAPHDEF, STATE)(x_BTD, recurrence)


def rows(batch: int = 2, length: int = LENGTH, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((batch, length, SIZE)).astype(np.float32)


def one_by_one(x_BTD: np.ndarray, memory: Memory | None = None) -> tuple[np.ndarray, Memory]:
    """The recurrence as it is written, row by row."""
    found = []
    for t in range(x_BTD.shape[1]):
        y, memory = mix(x_BTD[:, t : t + 1], Recurrence(memory))
        found.append(np.asarray(y))
    assert memory is not None
    return np.concatenate(found, axis=1), memory


def assert_same(found: tuple[Any, Memory], expected: tuple[Any, Memory], atol: float = 2e-5) -> None:
    assert np.abs(expected[0]).std() > 0.1
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=atol, rtol=1e-4)


@pytest.mark.parametrize("length", [2, CHUNK - 1, CHUNK, CHUNK + 1, LENGTH])
def test_chunks_are_the_recurrence(length: int):
    x = rows(length=length)
    assert_same(mix(x, Recurrence()), one_by_one(x))


def test_rows_go_on_from_a_memory():
    """Prefill in pieces, then single rows: what is kept between them is all there is to keep."""
    x = rows()
    whole = mix(x, Recurrence())
    first, memory = mix(x[:, :40], Recurrence())
    second, memory = mix(x[:, 40:-3], Recurrence(memory))
    third, memory = one_by_one(x[:, -3:], memory)
    assert_same((np.concatenate([first, second, third], axis=1), memory), whole)


@pytest.mark.parametrize("counts", [(LENGTH, 3), (1, CHUNK), (0, 70)])
def test_padding_never_advances_the_memory(counts: tuple[int, int]):
    """Right padding of any content, none or all of a row: the memory is that of the rows that count."""
    x = rows()
    _, before = mix(rows(length=5, seed=2), Recurrence())
    valid = np.arange(LENGTH) < np.asarray(counts)[:, None]
    y, after = mix(x, Recurrence(before, valid=jnp.asarray(valid)))
    for row, count in enumerate(counts):
        alone = jax.tree.map(lambda leaf, row=row: leaf[row : row + 1], before)
        expected = (np.zeros((1, 0, SIZE), np.float32), alone)
        if count:
            expected = mix(x[row : row + 1, :count], Recurrence(alone))
        mine = jax.tree.map(lambda leaf, row=row: leaf[row : row + 1], after)
        for ours, theirs in zip(jax.tree.leaves(mine), jax.tree.leaves(expected[1]), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=2e-5)
        np.testing.assert_allclose(y[row : row + 1, :count], expected[0], atol=2e-5, rtol=1e-4)


def test_packed_sequences_do_not_see_each_other():
    """Beginnings at, before and behind the borders of chunks, and sequences shorter than the convolution."""
    x = rows(batch=1)
    starts = [0, 2, 5, CHUNK - 1, CHUNK, 2 * CHUNK + 1, LENGTH]
    first = np.concatenate([np.full(b - a, a) for a, b in itertools.pairwise(starts)]).astype(np.int32)
    y, _ = mix(x, Recurrence(first=jnp.asarray(first[None])))
    alone = [np.asarray(mix(x[:, a:b], Recurrence())[0]) for a, b in itertools.pairwise(starts)]
    np.testing.assert_allclose(y, np.concatenate(alone, axis=1), atol=2e-5, rtol=1e-4)


def test_a_sequence_that_began_in_the_memory_goes_on():
    x = rows(batch=1)
    _, memory = mix(rows(batch=1, length=9, seed=2), Recurrence())
    first = np.full((1, LENGTH), -9, np.int32)
    first[:, 30:] = 30
    y, _ = mix(x, Recurrence(memory, first=jnp.asarray(first)))
    np.testing.assert_allclose(y[:, :30], mix(x[:, :30], Recurrence(memory))[0], atol=2e-5, rtol=1e-4)
    np.testing.assert_allclose(y[:, 30:], mix(x[:, 30:], Recurrence())[0], atol=2e-5, rtol=1e-4)


def test_a_long_strong_decay_stays_finite():
    """Everything is forgotten at every row; no exponential of a sum may overflow."""
    graphdef, state = GRAPHDEF, nnx.clone(STATE)
    layer = nnx.merge(graphdef, state)
    layer.a_log.set_value(jnp.full((4,), 5.0))
    y, memory = layer(jnp.asarray(rows()), Recurrence())
    assert np.isfinite(y).all()
    assert np.isfinite(memory.state).all()


@pytest.mark.parametrize("alike", [0.0, 1.0], ids=["keys of all directions", "one key again and again"])
@pytest.mark.parametrize("size", [1, 5, CHUNK])
def test_inverse_is_exact_also_where_a_series_of_powers_would_cancel(size: int, alike: float):
    rng = np.random.default_rng(size)
    keys = rng.standard_normal((2, 3, size, 8)) * (1 - alike) + alike
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    matrix = keys @ np.swapaxes(keys, -1, -2)
    expected = np.linalg.inv(np.tril(matrix, -1) + np.eye(size))
    np.testing.assert_allclose(unit_lower_inverse(jnp.asarray(matrix, jnp.float32)), expected, atol=3e-6)
