"""One layer's cache by itself: what is written where, and what stays as it was."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from spd_jax.cache.entries import (
    AttentionCache,
    Window,
    commit_column,
    empty_cache,
    grow_cache,
    window_rows,
    write_chunk,
    write_column,
)
from spd_jax.config.model import AttentionConfig

B, K, H, S, C, W = 3, 2, 4, 10, 5, 2
KIND = AttentionConfig(4, K, H)


def random(*shape: int, seed: int = 0) -> Any:
    return jnp.asarray(np.random.default_rng([seed, *shape]).standard_normal(shape, np.float32))


def filled() -> AttentionCache:
    """Keys are `[.., H, positions]`, values `[.., positions, H]`."""
    return AttentionCache(random(B, K, H, S), random(B, K, S, H), Window(random(B, K, H, C, W), random(B, K, C, W, H)))


def test_an_empty_cache_has_the_shapes_of_a_full_one():
    cache, other = empty_cache(KIND, B, S, C, W, jnp.float32), filled()
    assert cache.k.shape == other.k.shape
    assert cache.v.shape == other.v.shape
    assert (cache.window.k.shape, cache.window.v.shape) == (other.window.k.shape, other.window.v.shape)
    assert empty_cache(KIND, B, S, C, W, jnp.float32, (7,)).k.shape == (7, *other.k.shape)


def test_a_column_is_written_where_it_is_valid():
    window, k, v = filled().window, random(B, K, H, W, seed=1), random(B, K, W, H, seed=1)
    new = write_column(window, jnp.asarray([4, 0, 2]), jnp.asarray([True, False, True]), k, v)
    for row, column in ((0, 4), (2, 2)):
        np.testing.assert_array_equal(new.k[row, :, :, column], k[row])
        np.testing.assert_array_equal(new.v[row, :, column], v[row])
    kept = np.ones((B, C), bool)
    kept[0, 4] = kept[2, 2] = False
    np.testing.assert_array_equal(
        np.moveaxis(np.asarray(new.k), 3, 1)[kept], np.moveaxis(np.asarray(window.k), 3, 1)[kept]
    )
    np.testing.assert_array_equal(
        np.moveaxis(np.asarray(new.v), 2, 1)[kept], np.moveaxis(np.asarray(window.v), 2, 1)[kept]
    )


def test_rows_of_a_window_are_its_columns_one_after_the_other():
    window = filled().window
    k, v = window_rows(window)
    for column in range(C):
        for branch in range(W):
            np.testing.assert_array_equal(k[..., column * W + branch], window.k[..., column, branch])
            np.testing.assert_array_equal(v[:, :, column * W + branch], window.v[:, :, column, branch])


def test_a_commit_copies_one_branch_of_each_sequence_to_its_own_position():
    cache = filled()
    column, branch, position = [1, 4, 0], [0, 1, 1], [0, 9, 5]
    new = commit_column(cache, jnp.asarray(column), jnp.asarray(branch), jnp.asarray(position))
    for row in range(B):
        np.testing.assert_array_equal(
            new.k[row, :, :, position[row]], cache.window.k[row, :, :, column[row], branch[row]]
        )
        np.testing.assert_array_equal(new.v[row, :, position[row]], cache.window.v[row, :, column[row], branch[row]])
        others = np.delete(np.arange(S), position[row])
        np.testing.assert_array_equal(new.k[row][..., others], cache.k[row][..., others])
        np.testing.assert_array_equal(new.v[row][:, others], cache.v[row][:, others])
    np.testing.assert_array_equal(new.window.k, cache.window.k)


@pytest.mark.parametrize("valid", [True, False])
@pytest.mark.parametrize("start", [0, 3, S - 4])
def test_a_chunk_is_written_at_its_start_or_not_at_all(valid: bool, start: int):
    cache, k, v = filled(), random(B, K, H, 4, seed=2), random(B, K, 4, H, seed=2)
    new = write_chunk(cache, jnp.int32(start), jnp.bool_(valid), k, v)
    expected_k, expected_v = np.array(cache.k), np.array(cache.v)
    if valid:
        expected_k[..., start : start + 4], expected_v[:, :, start : start + 4] = k, v
    np.testing.assert_array_equal(new.k, expected_k)
    np.testing.assert_array_equal(new.v, expected_v)


def test_a_grown_cache_keeps_what_it_held():
    cache = filled()
    new = grow_cache(cache, 16)
    assert (new.k.shape, new.v.shape) == ((B, K, H, 16), (B, K, 16, H))
    np.testing.assert_array_equal(new.k[..., :S], cache.k)
    np.testing.assert_array_equal(new.v[:, :, :S], cache.v)
    np.testing.assert_array_equal(new.window.k, cache.window.k)
    assert not new.k[..., S:].any()
