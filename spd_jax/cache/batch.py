"""Updates that are made sequence by sequence, in a program whose size does not depend on how many there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax

T = TypeVar("T")


def each_sequence(count: int, update: Callable[[Any, T], T], state: T) -> T:
    """`update(row, state)` for row 0 to count - 1, one after the other.

    For updates at a place of each sequence's own: a batched one would be a scatter, which copies the cache; a write a
    row unrolled would take minutes to compile for many sequences in many layers. One sequence needs no loop.
    """
    if count == 1:
        return update(0, state)
    return jax.lax.fori_loop(0, count, update, state)
