"""Which feature of which position a draft row sees: the staircase of the pipeline, as training simulates it.

A pass of training holds every position once for every fusion type, in blocks from the richest type to type 0. A query
of type a stands for a position that has completed d_a stages (the smallest depth with that type). A key that entered
t - T cycles earlier has then completed j = d_a + t - T of them, and is seen in the block of type f(j); with F positions
in flight, those with j >= F have left the pipeline and are seen in the richest block (arXiv 2605.30852, revised
release; the released code tests t - T >= F, which is the same for type 0 and for F = n).

So a query sees every position once: the last few in the blocks that are in flight, all before in the richest.
`staircase_ranges` says it as ranges of positions (linear in the number of types), `dense_mask` as one large boolean
matrix for tests and comparison. Nothing here knows how attention is computed.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from spd_jax.nn.blockwise import Ranges
from spd_jax.plan import StagePlan


@dataclasses.dataclass(frozen=True)
class Staircase:
    """Blocks of a plan, in the order of the rows: the richest type first, type 0 last.

    `types[i]` is the fusion type of block i, `depths[i]` its representative depth d; `block_of_depth[k]` for k in 0..n
    is the block in which a position of that depth is seen.
    """

    types: tuple[int, ...]
    depths: tuple[int, ...]
    block_of_depth: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        """Stages n of the plan."""
        return len(self.block_of_depth) - 1

    @property
    def num_blocks(self) -> int:
        """Blocks, one for every type that some depth maps to."""
        return len(self.types)

    @property
    def richest(self) -> int:
        """The block of positions that have left the pipeline."""
        return self.block_of_depth[-1]

    @property
    def near(self) -> tuple[int, ...]:
        """The blocks of positions that are in flight: all but the richest."""
        return tuple(block for block in range(self.num_blocks) if block != self.richest)

    def depths_of(self, block: int) -> tuple[int, int]:
        """The first and the last depth that is seen in a block."""
        found = [depth for depth, seen_in in enumerate(self.block_of_depth) if seen_in == block]
        return found[0], found[-1]


def staircase_of(plan: StagePlan) -> Staircase:
    """The staircase of a plan; types that no depth maps to have no block."""
    types = tuple(reversed(plan.types))
    block = {kind: index for index, kind in enumerate(types)}
    return Staircase(
        types, tuple(plan.anchor_type.index(kind) for kind in types), tuple(block[kind] for kind in plan.anchor_type)
    )


def staircase_ranges(staircase: Staircase, low_BS: Int[Array, "B S"], fill_BS: Int[Array, "B S"]) -> Ranges:
    """What every query sees, as a range of positions in every block: the richest as the far bank, the others as near.

    A query at t of a block with depth d sees T in a block of depths e..g if e <= d + t - T <= g, and T <= t.

    Args:
        low_BS: where the document of every position starts.
        fill_BS: positions in flight F, 1..n.
    """
    position = jnp.arange(low_BS.shape[1], dtype=jnp.int32)[:, None]
    ahead = position + jnp.asarray(staircase.depths, jnp.int32)  # d + t, [S, A]
    first, _ = staircase.depths_of(staircase.richest)
    left = jnp.minimum(first, fill_BS)[..., None]  # the depth from which on a position is seen in the richest block
    far_high = jnp.minimum(ahead - left, position)
    near = [staircase.depths_of(block) for block in staircase.near]
    shape = (*far_high.shape, len(near))
    firsts, lasts = (jnp.asarray([pair[i] for pair in near], jnp.int32) for i in range(2))
    oldest = jnp.minimum(lasts, fill_BS[..., None, None] - 1)
    near_low = jnp.maximum(ahead[..., None] - oldest, low_BS[..., None, None])
    near_high = jnp.broadcast_to(jnp.minimum(ahead[..., None] - firsts, position[..., None]), shape)
    return Ranges(low_BS, far_high, near_low, near_high, staircase.num_stages - 1)


def dense_mask(staircase: Staircase, low_BS: Int[Array, "B S"], fill_BS: Int[Array, "B S"]) -> Bool[Array, "B AS AS"]:
    """`[B, A S, A S]`: whether a query (row: block, then position) sees a key; `low` is where its document starts."""
    batch, length = fill_BS.shape
    position = jnp.arange(length, dtype=jnp.int32)
    depth = jnp.asarray(staircase.depths, jnp.int32)[:, None, None] + position[:, None] - position  # [A, S, S]
    in_flight = depth < fill_BS[:, None, :, None]
    blocks = jnp.asarray(staircase.block_of_depth, jnp.int32)[jnp.clip(depth, 0, staircase.num_stages)]
    seen_in = jnp.where(in_flight, blocks, staircase.richest)  # [B, A, S, S]
    allowed = (position <= position[:, None]) & (position >= low_BS[..., None])  # [B, S, S]
    rows = staircase.num_blocks * length
    mask = (seen_in[..., None, :] == jnp.arange(staircase.num_blocks, dtype=jnp.int32)[:, None]) & allowed[
        :, None, :, None, :
    ]
    return mask.reshape(batch, rows, rows)
