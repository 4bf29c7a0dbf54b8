"""The speculation module's training pass: all feature types of every position at once.

Rows are laid out as blocks `[A, S]` (`spd_jax.speculation.staircase`), positions restart in every document of a packed
row, and no query sees another document. Attention costs time and memory linear in the number of types (a dense mask
over A S rows is quadratic).

Knows the module and hidden states of the target; not losses, optimisers or meshes, and nothing of decoding: that both
give the same logits is a test.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from spd_jax import struct
from spd_jax.config.model import AttentionConfig
from spd_jax.models.decoder import Ropes, rows_only, run_layers
from spd_jax.nn.blockwise import attend_ranges
from spd_jax.nn.layers import Attend
from spd_jax.speculation.module import SpeculationModule
from spd_jax.speculation.staircase import Staircase, dense_mask, staircase_ranges
from spd_jax.training.rows import Rows


def draft_pass(
    module: SpeculationModule,
    staircase: Staircase,
    taps: Sequence[Float[Array, "B S D"]],
    rows: Rows,
    *,
    newest_only: bool,
    attention: Callable[[Staircase, Rows, Any], Attend] | None = None,
) -> Float[Array, "B A S D"]:
    """The module's hidden states before the final norm, of every block, or with `newest_only` of type 0 alone (A = 1).

    Args:
        attention: the attention of all rows among each other (default: `staircase_attention`).
    """
    batch, length, size = taps[0].shape
    config, blocks = module.config, staircase.num_blocks
    features = [module.aggregate(taps[: kind + 1]) for kind in staircase.types]
    x = jnp.concatenate(features, axis=1)
    ropes = Ropes(jnp.tile(rows.positions, (1, blocks)))
    attend = (attention or staircase_attention)(staircase, rows, module.layers[0].mlp.down.weight[...].dtype)
    with jax.named_scope("draft"):
        hiddens, _ = run_layers(module.layers[:-1], x, ropes, [attend] * (config.num_layers - 1))
        # Above the last layer nobody asks for the other types' rows: there they are keys and values only.
        rope, asking = ropes.of(config.layer.mixer), length if newest_only else None
        x, _ = module.layers[-1](hiddens[-1] if hiddens else x, rope, attend, asking)
    return x.reshape(batch, -1, length, size)


def staircase_attention(staircase: Staircase, rows: Rows, dtype: Any) -> Attend:
    """Attention of the module's rows among each other: keys of all blocks `[A, S]`, queries of all or the last ones."""
    batch, length = rows.ids.shape
    ranges = staircase_ranges(staircase, rows.low, rows.fill)
    banks = jnp.asarray([staircase.richest, *staircase.near], jnp.int32)

    def attend(q_BTKGH: Array, k_BTKH: Array, v_BTKH: Array, config: AttentionConfig) -> tuple[Array, None]:
        _, asking, heads, group, size = q_BTKGH.shape
        blocks = asking // length
        seen = struct.replace(
            ranges,
            far_high=ranges.far_high[:, :, -blocks:],
            near_low=ranges.near_low[:, :, -blocks:],
            near_high=ranges.near_high[:, :, -blocks:],
        )
        q = jnp.moveaxis(q_BTKGH.reshape(batch, blocks, length, heads, group, size), 1, 2)
        k, v = (x.astype(dtype).reshape(batch, -1, length, heads, size)[:, banks] for x in (k_BTKH, v_BTKH))
        mixed = attend_ranges(q, k, v, seen, config.score_cap)
        return jnp.moveaxis(mixed, 2, 1).reshape(q_BTKGH.shape), None

    return attend


def dense_attention(staircase: Staircase, rows: Rows, dtype: Any) -> Attend:
    """The same attention by one mask over all rows of all blocks: what tests and benchmarks compare with."""
    mask = dense_mask(staircase, rows.low, rows.fill)

    def attend(q_BTKGH: Array, k_BTKH: Array, v_BTKH: Array, config: AttentionConfig) -> tuple[Array, None]:
        q, k, v = (x.astype(dtype) for x in (q_BTKGH, k_BTKH, v_BTKH))
        mixed, _ = rows_only(mask[:, -q.shape[1] :])(q, k, v, config)
        return mixed.astype(q_BTKGH.dtype), None

    return attend
