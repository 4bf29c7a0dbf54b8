"""Collectives on the stage mesh: packed sums, exact gathers of bits, the ring."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from spd_jax.parallel.mesh import AXIS, gather_ranks, psum_packed, shift, stage_mesh, varying

SHARDED, REPLICATED = PartitionSpec(AXIS), PartitionSpec()


def run(ranks: int, function: Any, tree: Any, out: Any = REPLICATED) -> Any:
    """`function` of each rank's share; leaves of `tree` are `[R, ...]`. Equal results are given once."""

    def body(tree: Any) -> Any:
        result = function(jax.tree.map(lambda x: x[0], tree))
        return jax.tree.map(lambda x: x[None], result) if out == SHARDED else result

    mapped = jax.jit(jax.shard_map(body, mesh=stage_mesh(ranks), in_specs=SHARDED, out_specs=out))
    return jax.tree.map(np.asarray, mapped(jax.tree.map(jnp.asarray, tree)))


@pytest.mark.parametrize("ranks", [1, 3, 5])
def test_a_packed_sum_is_the_sum_of_every_leaf(ranks: int):
    rng = np.random.default_rng(0)
    tree = {
        "a": rng.standard_normal((ranks, 2, 3)).astype(np.float32),
        "b": (rng.integers(-5, 5, (ranks, 4), np.int32), rng.standard_normal((ranks,)).astype(np.float32)),
        "c": rng.standard_normal((ranks, 1, 1, 2)).astype(np.float32),
        "d": rng.integers(0, 9, (ranks, 0), np.int32),
    }
    summed = run(ranks, psum_packed, tree)
    jax.tree.map(lambda ours, x: np.testing.assert_allclose(ours, x.sum(0), rtol=1e-6, atol=1e-6), summed, tree)
    assert jax.tree.structure(summed) == jax.tree.structure(tree)


def test_a_packed_sum_is_one_collective_a_dtype():
    tree = {"a": np.zeros((3, 2), np.float32), "b": np.zeros((3, 4), np.float32), "c": np.zeros((3, 1), np.int32)}

    def body(tree: Any) -> Any:
        return psum_packed(jax.tree.map(lambda x: x[0], tree))

    mapped = jax.shard_map(body, mesh=stage_mesh(3), in_specs=SHARDED, out_specs=REPLICATED)
    assert str(jax.make_jaxpr(mapped)(tree)).count("psum") == 2


def test_a_packed_sum_takes_values_that_are_the_same_on_all_ranks():
    summed = run(3, lambda x: psum_packed((x, jnp.ones((2,), jnp.float32))), np.arange(3, dtype=np.float32))
    assert summed[0] == 3
    assert summed[1].tolist() == [3, 3]


SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-40, np.finfo(np.float32).max, 1.0 + 2**-23]


@pytest.mark.parametrize("ranks", [1, 3, 5])
def test_a_gather_moves_bits(ranks: int):
    """Infinities, NaN with its payload, denormals and negative zero arrive as they were; so do integers."""
    rng = np.random.default_rng(1)
    floats = np.concatenate([np.asarray(SPECIAL, np.float32), rng.standard_normal(7).astype(np.float32)])
    floats = np.stack([np.roll(floats, rank) for rank in range(ranks)])
    odd_nan = np.full((ranks, 2), 0x7FC12345, np.uint32).view(np.float32)
    ints = rng.integers(-(2**31), 2**31 - 1, (ranks, 2, 3), np.int32)
    unsigned = rng.integers(0, 2**32 - 1, (ranks, 3), np.uint32)
    gathered = run(ranks, gather_ranks, (floats, odd_nan, ints, unsigned))
    for ours, x in zip(gathered, (floats, odd_nan, ints, unsigned), strict=True):
        assert ours.dtype == x.dtype
        np.testing.assert_array_equal(ours.view(np.uint32), x.view(np.uint32))


def test_the_ring_sends_to_the_next_rank():
    x = np.arange(4, dtype=np.float32)
    assert run(4, lambda x: shift(varying(x)), x, SHARDED).tolist() == [3, 0, 1, 2]
    assert run(1, shift, x[:1], SHARDED).tolist() == [0]


def test_values_can_be_marked_as_varying_twice():
    x = np.arange(3, dtype=np.float32)
    assert run(3, lambda x: varying(varying((x, jnp.zeros((2,), jnp.float32))))[0], x, SHARDED).tolist() == [0, 1, 2]
