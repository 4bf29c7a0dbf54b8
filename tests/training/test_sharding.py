"""Where arrays lie on the data mesh, and that gathering and summing give what one device would have."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from spd_jax.training.sharding import data_mesh, gather, place, specs_of, sum_and_cut, zeros_like

TREE = {"matrix": np.arange(48.0).reshape(6, 8), "vector": np.arange(4.0), "odd": np.arange(9.0).reshape(3, 3)}
TREE = jax.tree.map(lambda x: x.astype(np.float32), TREE)


def test_arrays_are_cut_along_their_largest_axis_that_divides():
    mesh = data_mesh(4)
    specs = specs_of(TREE, mesh, "sharded")
    assert specs == {"matrix": PartitionSpec(None, "data"), "vector": PartitionSpec("data"), "odd": PartitionSpec()}
    assert set(specs_of(TREE, mesh, "replicated").values()) == {PartitionSpec()}
    assert set(specs_of(TREE, data_mesh(1), "sharded").values()) == {PartitionSpec()}
    # The first axis of a stack counts layers: 8 of them are not cut, their 4 rows are.
    stack = {"layers": np.zeros((8, 4, 3), np.float32)}
    assert specs_of(stack, mesh, "sharded", stacked=True) == {"layers": PartitionSpec(None, "data")}


def test_gathered_slices_are_the_whole_and_sums_are_cut_like_it():
    mesh = data_mesh(4)
    specs = specs_of(TREE, mesh, "sharded")
    placed = place(TREE, mesh, specs)
    assert placed["matrix"].addressable_shards[0].data.shape == (6, 2)
    assert all(not np.asarray(zero).any() for zero in jax.tree.leaves(zeros_like(placed)))
    assert zeros_like(placed)["matrix"].sharding == placed["matrix"].sharding

    def body(slices: dict[str, jax.Array]) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        whole = gather(slices, specs)
        share = jax.lax.axis_index("data").astype(jnp.float32)
        return whole, sum_and_cut(jax.tree.map(lambda x: x * share, whole), specs)

    everywhere = jax.tree.map(lambda _: PartitionSpec(), TREE)
    mapped = jax.shard_map(body, mesh=mesh, in_specs=(specs,), out_specs=(everywhere, specs), check_vma=False)
    whole, summed = jax.jit(mapped)(placed)
    for name, value in TREE.items():
        assert np.array_equal(whole[name], value)
        np.testing.assert_allclose(summed[name], value * (0 + 1 + 2 + 3))
    assert summed["matrix"].addressable_shards[0].data.shape == (6, 2)


def test_more_devices_than_there_are_are_refused():
    with pytest.raises(ValueError, match="asked for 99 devices, found 12; on CPU simulate them with --devices 99"):
        data_mesh(99)
    with pytest.raises(ValueError, match="asked for 0 devices"):
        data_mesh(0)
