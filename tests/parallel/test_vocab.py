"""Vocabulary shares: every id on one rank, sums and spreads give back the whole."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from spd_jax.models.decoder import masked_logits
from spd_jax.parallel.mesh import AXIS, stage_mesh
from spd_jax.parallel.vocab import (
    draft_rows,
    draft_shares,
    local_embedding,
    local_ids,
    share_rows,
    share_size,
    spread_draft,
)

SHARDED = PartitionSpec(AXIS)


def on_ranks(ranks: int, function: Any, *arguments: Any, replicated: Any = ()) -> Any:
    """`function` of each rank's shares and of what all share; the result is `[R, ...]`."""

    def body(shares: Any, common: Any) -> Any:
        return jax.tree.map(lambda x: x[None], function(*(x[0] for x in shares), *common))

    specs = (SHARDED, PartitionSpec())
    mapped = jax.shard_map(body, mesh=stage_mesh(ranks), in_specs=specs, out_specs=SHARDED)
    return jax.tree.map(np.asarray, jax.jit(mapped)(tuple(map(jnp.asarray, arguments)), tuple(replicated)))


@given(st.integers(1, 70), st.integers(1, 9))
@settings(deadline=None)
def test_every_row_is_on_one_rank(count: int, ranks: int):
    table = np.arange(1, count + 1, dtype=np.float32)[:, None]
    shares = [share_rows(table, rank, ranks) for rank in range(ranks)]
    assert {share.shape for share in shares} == {(share_size(count, ranks), 1)}
    for token in range(count):
        assert shares[token % ranks][token // ranks] == token + 1
    assert sum(share.sum() for share in shares) == table.sum()  # padding is zero


@given(st.sets(st.integers(0, 60), min_size=1), st.integers(1, 9))
@settings(deadline=None)
def test_draft_ids_and_target_rows_point_at_each_other(chosen: set[int], ranks: int):
    ids = np.asarray(sorted(chosen))
    shares = draft_shares(ids, ranks)
    rows = draft_rows(shares, share_size(61, ranks))
    found = [int(row) * ranks + rank for rank in range(ranks) for row in shares[rank] if row >= 0]
    assert sorted(found) == ids.tolist()
    for rank in range(ranks):
        for row in range(share_size(61, ranks)):
            token, at = row * ranks + rank, rows[rank, row]
            assert (at >= 0) == (token in chosen)
            assert at < 0 or shares[rank, at] == row


@pytest.mark.parametrize("ranks", [1, 3, 4, 9])
def test_the_sum_of_local_embeddings_is_the_embedding(ranks: int):
    table = np.random.default_rng(0).standard_normal((61, 5)).astype(np.float32)
    ids = np.asarray([[0, 60, 7], [59, 1, 7]], np.int32)
    shares = np.stack([share_rows(table, rank, ranks) for rank in range(ranks)])
    parts = on_ranks(ranks, local_embedding, shares, replicated=[jnp.asarray(ids)])
    np.testing.assert_array_equal(parts.sum(0), table[ids])
    assert ((parts != 0).any(-1).sum(0) == 1).all()  # one rank each, zeros elsewhere


def test_local_ids_name_the_rows_of_a_share():
    shares = np.zeros((4, 3), np.float32)
    ids = on_ranks(4, lambda share: local_ids(share.shape[0]), shares)
    assert ids.tolist() == [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]


@pytest.mark.parametrize("ranks", [3, 4])
def test_logits_of_the_shares_are_the_logits(ranks: int):
    """Masked ids and padding are -inf; the draft's are spread over the target's rows."""
    rng = np.random.default_rng(1)
    table, hidden = rng.standard_normal((61, 5)).astype(np.float32), rng.standard_normal((2, 5)).astype(np.float32)
    allowed = np.zeros((ranks, share_size(61, ranks)), bool)
    real = np.setdiff1d(np.arange(61), [0, 17, 60])
    allowed[real % ranks, real // ranks] = True
    draft_ids = np.asarray([2, 3, 17, 30, 31, 59])
    shares = draft_shares(draft_ids, ranks)
    rows = draft_rows(shares, allowed.shape[1])
    target = np.stack([share_rows(table, rank, ranks) for rank in range(ranks)])
    own = np.zeros((ranks, shares.shape[1], 5), np.float32)
    for rank in range(ranks):
        mine = draft_ids[draft_ids % ranks == rank]
        own[rank, : len(mine)] = table[mine]

    def function(target: Any, own: Any, allowed: Any, share: Any, rows: Any, hidden: Any) -> Any:
        usable = (share >= 0) & allowed[jnp.maximum(share, 0)]
        return masked_logits(hidden, target, allowed), spread_draft(masked_logits(hidden, own, usable), rows)

    whole, drafted = (
        np.moveaxis(x, 0, -1).reshape(2, -1)[:, :61]
        for x in on_ranks(ranks, function, target, own, allowed, shares, rows, replicated=[jnp.asarray(hidden)])
    )
    expected = hidden @ table.T
    expected[:, [0, 17, 60]] = -np.inf
    np.testing.assert_allclose(whole, expected, atol=1e-5)
    expected[:, np.setdiff1d(np.arange(61), draft_ids)] = -np.inf
    np.testing.assert_allclose(drafted, expected, atol=1e-5)
