"""Whether two greedy decodings of a prompt agree, and if not, whether rounding can explain it.

Programs that compute the same logits with other shapes round differently. Where the target's best two logits are closer
than that, the decodings may part without either being wrong: a near-tie. Any other difference is an error.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from spd_jax.decode.batch import bucket
from spd_jax.defaults import jit
from spd_jax.models.decoder import Decoder

FLOAT32_MARGIN, BFLOAT16_MARGIN, BFLOAT16_STEP = 1e-4, 1e-2, 2.0**-8


def near_tie_margin(dtype: str, largest: float) -> float:
    """How close two logits must be for rounding to decide between them.

    In bfloat16 at least one step of the number format at the size of the largest logit: on a trained toy model with
    logits of 6, bfloat16 moves them by 0.02 to 0.04.
    """
    return FLOAT32_MARGIN if dtype == "float32" else max(BFLOAT16_MARGIN, BFLOAT16_STEP * largest)


Logits = Callable[[Sequence[int]], np.ndarray]
"""Ids of a text -> the target's logits `[V]` for the next token."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """How two decodings compare.

    `index` is the first generated token that differs (None: the ids are equal), `margin` how far the lower of the two
    tokens' logits lies below the target's best one there (None: one text ended where the other went on), `limit` below
    which margin that is a near-tie.
    """

    index: int | None = None
    margin: float | None = None
    near_tie: bool = False
    limit: float = FLOAT32_MARGIN

    @property
    def equal(self) -> bool:
        """Whether the ids are equal."""
        return self.index is None

    def record(self) -> dict[str, Any] | None:
        """Where ids part, for a file: index of the first such token, margin of the logits (None where it is not
        finite), and whether that is a near-tie. None where they are equal."""
        if self.equal:
            return None
        margin = self.margin if self.margin is not None and math.isfinite(self.margin) else None
        return {"index": self.index, "margin": margin, "near_tie": self.near_tie}


def compare_ids(
    prompt: Sequence[int], ids: Sequence[int], reference: Sequence[int], logits: Logits, dtype: str
) -> Comparison:
    """Compare generated ids with those of another greedy decoding of the same prompt.

    Args:
        logits: teacher-forced logits of the target; asked only where the ids differ. -inf for forbidden ids.
        dtype: of the computation; decides what counts as a near-tie.
    """
    if list(ids) == list(reference):
        return Comparison()
    parted = [i for i, (one, other) in enumerate(zip(ids, reference, strict=False)) if one != other]
    if not parted:
        return Comparison(index=min(len(ids), len(reference)))
    index = parted[0]
    row = np.asarray(logits([*prompt, *ids[:index]]), np.float64)
    margin = float(row.max() - min(row[ids[index]], row[reference[index]]))
    limit = near_tie_margin(dtype, float(np.abs(row[np.isfinite(row)]).max(initial=0.0)))
    return Comparison(index, margin, margin < limit, limit)


def teacher_forced_logits(model: Decoder, allowed: np.ndarray) -> Logits:
    """Logits of a model after any ids; ids where `allowed` `[V]` is false get -inf."""
    graphdef, state = nnx.split(model)

    @jit
    def last_row(state: Any, ids: jax.Array, last: jax.Array) -> jax.Array:
        model = nnx.merge(graphdef, state)
        return model.logits(model.hidden_states(ids[None])[-1][0, last])

    def logits(ids: Sequence[int]) -> np.ndarray:
        padded = np.zeros(bucket(len(ids)), np.int32)
        padded[: len(ids)] = ids
        row = np.asarray(last_row(state, jnp.asarray(padded), jnp.int32(len(ids) - 1)), np.float32)
        return np.where(allowed, row, -np.inf)

    return logits
