"""Vocabulary-sharded tables: the embedding, the target's head and the draft head.

Token id v lives on rank v mod R at row v // R, in the embedding and in both heads alike, so p and q of an id meet on
one rank and frequent (low) ids spread over the ranks. Shares are padded to equal length; padded rows are not `allowed`.
Everything here runs inside a shard_map over axis `stage`, on one rank's share.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from spd_jax.parallel.mesh import AXIS


def share_size(count: int, ranks: int) -> int:
    """Rows a rank holds of a table of `count` rows."""
    return -(-count // ranks)


def share_rows(table: np.ndarray, rank: int, ranks: int) -> np.ndarray:
    """The rows of one rank, zero-padded to the common size."""
    rows = table[rank::ranks]
    padding = share_size(len(table), ranks) - len(rows)
    return np.concatenate([rows, np.zeros((padding, *table.shape[1:]), table.dtype)]) if padding else rows


def draft_shares(draft_ids: np.ndarray, ranks: int) -> np.ndarray:
    """`[R, Vd/R]`: the draft ids of every rank as rows of the target's share (id // R), -1 where a rank has fewer."""
    shares = [draft_ids[draft_ids % ranks == rank] // ranks for rank in range(ranks)]
    size = max(1, *(len(share) for share in shares))
    return np.stack([np.pad(share, (0, size - len(share)), constant_values=-1) for share in shares]).astype(np.int32)


def draft_rows(shares: np.ndarray, size: int) -> np.ndarray:
    """`[R, V/R]`: for every row of the target's share its row in the draft share, -1 where it cannot be drafted."""
    rows = np.full((len(shares), size), -1, np.int32)
    for rank, share in enumerate(shares):
        rows[rank, share[share >= 0]] = np.flatnonzero(share >= 0)
    return rows


def local_ids(size: int) -> Int[Array, " V"]:
    """Global token ids of this rank's rows."""
    here, ranks = jax.lax.axis_index(AXIS), jax.lax.axis_size(AXIS)
    return jnp.arange(size, dtype=jnp.int32) * ranks + here


def local_embedding(rows_VD: Float[Array, "V D"], ids: Int[Array, "..."]) -> Float[Array, "... D"]:
    """Embedding rows of ids that live on this rank, zeros for the others: the sum over ranks is the embedding."""
    here, ranks = jax.lax.axis_index(AXIS), jax.lax.axis_size(AXIS)
    mine = ids % ranks == here
    return jnp.where(mine[..., None], rows_VD[ids // ranks], jnp.zeros((), rows_VD.dtype))


def spread_draft(draft_logits: Float[Array, "... U"], draft_row_V: Int[Array, " V"]) -> Float[Array, "... V"]:
    """Logits over the draft vocabulary as logits over this rank's target ids, -inf where an id cannot be drafted."""
    return jnp.where(draft_row_V >= 0, draft_logits[..., jnp.maximum(draft_row_V, 0)], -jnp.inf)
