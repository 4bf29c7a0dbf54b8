"""The draft tree: which tokens are in flight for each sequence, and which of them descend from which.

A window column holds W rows, each a node: a token for the column's position, behind the token in its parent's row of
the column before. A chain is the tree with W = 1. Every cycle the newest column's nodes propose children; the best W of
all enter as one column. When the target names the token of a position, the node with that token and all its descendants
live on and the others die; what comes after the last column with a live node is dropped.

Scores order nodes and decide who survives: the cumulative log q where children are the likeliest tokens ("top"), the
perturbed log-probability of stochastic beam search where they are drawn without replacement ("sample", arXiv
1903.06059). Rows of a column are sorted by score, so the first live row is the best.

This module knows positions and rows, neither models nor distributions nor stages.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from spd_jax import struct

Proposal = Literal["top", "sample"]
Survivors = Literal["all", "best"]
Rollback = Literal["partial", "full"]


@dataclasses.dataclass(frozen=True)
class Tree:
    """How drafts branch.

    `width` W is the number of rows of a column. `proposal`: children are drawn from q without replacement ("sample") or
    are its W likeliest tokens ("top"); either is exact at every temperature, and at temperature 0 they are the same.
    `survivors` "best" keeps only the branch of the best leaf at every verdict, `rollback` "full" drops everything in
    flight as soon as the newest column has died: both only to show what they cost.

    Raises:
        ValueError: values outside their ranges.
    """

    width: int = 1
    proposal: Proposal = "sample"
    survivors: Survivors = "all"
    rollback: Rollback = "partial"

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ValueError(f"the width of a draft tree must be at least 1, found {self.width}")
        for name, allowed in (("proposal", Proposal), ("survivors", Survivors), ("rollback", Rollback)):
            if getattr(self, name) not in allowed.__args__:
                raise ValueError(f"{name} must be one of {list(allowed.__args__)}, found {getattr(self, name)!r}")


CHAIN = Tree()


@struct.dataclass
class Nodes:
    """Nodes by window column (position p in column p mod C) and row, `[B, C, W]` each: `token`, `alive`, `log_q` and
    `score` (both since the last flush). `lineage` `[B, C, W, C]`: the row of each column that a node descends from,
    its own in its own column; of columns older than the tree it says nothing."""

    token: Int[Array, "B C W"]
    alive: Bool[Array, "B C W"]
    lineage: Int[Array, "B C W C"]
    log_q: Float[Array, "B C W"]
    score: Float[Array, "B C W"]


@struct.dataclass
class Children:
    """A column that may enter, `[B, W]` each; rows that are not alive hold no token."""

    token: Int[Array, "B W"]
    parent: Int[Array, "B W"]
    alive: Bool[Array, "B W"]
    log_q: Float[Array, "B W"]
    score: Float[Array, "B W"]


@struct.dataclass
class Proposals:
    """N candidates of each row of the newest column, `[B, W, N]`: token ids, values (log q, perturbed where they are
    drawn; -inf for none) and log q (None: the values are)."""

    id: Int[Array, "B W N"]
    value: Float[Array, "B W N"]
    log_q: Float[Array, "B W N"] | None


def no_nodes(batch: int, columns: int, width: int) -> Nodes:
    """A tree without nodes."""
    shape = (batch, columns, width)
    zeros = jnp.zeros(shape, jnp.float32)
    lineage = jnp.zeros((*shape, columns), jnp.int32)
    return Nodes(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, bool), lineage, zeros, zeros)


def in_column(values: Array, position_B: Int[Array, " B"]) -> Array:
    """Values `[B, C, ...]` of the column that a position lives in, `[B, ...]`."""
    column = (position_B % values.shape[1]).reshape(-1, *[1] * (values.ndim - 1))
    return jnp.take_along_axis(values, column, axis=1)[:, 0]


def column_positions(newest_B: Int[Array, " B"], columns: int) -> Int[Array, "B C"]:
    """The latest position <= newest that lives in each window column (it may have left the window's use)."""
    newest = newest_B[:, None]
    return newest - (newest - jnp.arange(columns, dtype=jnp.int32)) % columns


def first_row(alive_BW: Bool[Array, "B W"]) -> Int[Array, " B"]:
    """The best live row of a column."""
    if alive_BW.shape[1] == 1:
        return jnp.zeros(alive_BW.shape[:1], jnp.int32)
    return jnp.argmax(alive_BW, axis=1).astype(jnp.int32)


def pick_row(values: Array, row_B: Int[Array, " B"]) -> Array:
    """Values `[B, W, ...]` of one row of each sequence, `[B, ...]`."""
    if values.shape[1] == 1:
        return values[:, 0]
    return jnp.take_along_axis(values, row_B.reshape(-1, *[1] * (values.ndim - 1)), axis=1)[:, 0]


def lone_child(token_B: Int[Array, " B"], parent_B: Int[Array, " B"], width: int) -> Children:
    """A column with one node: the root of a new tree."""
    rows = jnp.arange(width, dtype=jnp.int32)
    zeros = jnp.zeros((token_B.shape[0], width), jnp.float32)
    alive = jnp.broadcast_to(rows == 0, zeros.shape)
    token = jnp.where(alive, token_B[:, None], 0)
    return Children(token, jnp.where(alive, parent_B[:, None], 0), alive, zeros, zeros)


def choose(where_B: Bool[Array, " B"], yes: Children, no: Children) -> Children:
    """One column or the other for each sequence."""
    return jax.tree.map(lambda a, b: jnp.where(where_B[:, None], a, b), yes, no)


def enter_column(nodes: Nodes, position_B: Int[Array, " B"], where_B: Bool[Array, " B"], new: Children) -> Nodes:
    """The tree with a new column, for the sequences that have one."""
    columns, width = nodes.token.shape[1:]
    numbers = jnp.arange(columns, dtype=jnp.int32)
    here = (numbers == (position_B % columns)[:, None]) & where_B[:, None]

    def put(old: Array, value: Array) -> Array:
        return jnp.where(here[:, :, None], value[:, None], old)

    nodes = struct.replace(nodes, token=put(nodes.token, new.token), alive=put(nodes.alive, new.alive))
    if width == 1:  # a chain's rows are all row 0, and compete with none
        return nodes
    before, own = ((position_B + step) % columns for step in (-1, 0))
    of_parents = jnp.take_along_axis(in_column(nodes.lineage, position_B - 1), new.parent[:, :, None], axis=1)
    of_parents = jnp.where((numbers == before[:, None])[:, None], new.parent[:, :, None], of_parents)
    rows = jnp.arange(width, dtype=jnp.int32)[:, None]
    of_rows = jnp.where((numbers == own[:, None])[:, None], rows, of_parents)
    lineage = jnp.where(here[:, :, None, None], of_rows[:, None], nodes.lineage)
    log_q, score = put(nodes.log_q, new.log_q), put(nodes.score, new.score)
    return struct.replace(nodes, lineage=lineage, log_q=log_q, score=score)


def survive(
    nodes: Nodes,
    newest_B: Int[Array, " B"],
    position_B: Int[Array, " B"],
    row_B: Int[Array, " B"],
    verified_B: Bool[Array, " B"],
    accepted_B: Bool[Array, " B"],
    survivors: Survivors,
) -> tuple[Nodes, Int[Array, " B"]]:
    """What lives on when the token of `position` is known, and the newest position that has a live node.

    Args:
        newest_B: the newest position in flight.
        row_B: the row of that position's column that has the token, where `accepted`; if nothing was accepted nothing
            from `position` on lives. Sequences that are not `verified` stay as they are.
    """
    columns, width = nodes.token.shape[1:]
    positions = column_positions(newest_B, columns)
    earlier = (positions < position_B[:, None])[..., None]
    lives = accepted_B[:, None, None]
    if width > 1:
        column = (position_B % columns)[:, None, None, None]
        lives = lives & (jnp.take_along_axis(nodes.lineage, column, axis=3)[..., 0] == row_B[:, None, None])
    alive = nodes.alive & (earlier | lives | ~verified_B[:, None, None])
    newest = jnp.max(jnp.where(jnp.any(alive, axis=2), positions, -1), axis=1)
    if width == 1:
        return struct.replace(nodes, alive=alive), newest
    if survivors == "best":
        leaf = first_row(in_column(alive, newest))
        path = pick_row(in_column(nodes.lineage, newest), leaf)
        on_path = jnp.arange(width, dtype=jnp.int32) == path[:, :, None]
        alive = alive & (earlier | on_path | ~verified_B[:, None, None])
    # Scores count from the verified node, so that they do not grow with the text.
    base = pick_row(in_column(nodes.log_q, position_B), row_B)
    base = jnp.where(accepted_B, base, 0.0)[:, None, None]
    kept = struct.replace(nodes, alive=alive, log_q=nodes.log_q - base, score=nodes.score - base)
    return kept, newest


def best_children(nodes: Nodes, newest_B: Int[Array, " B"], alive_BW: Bool[Array, "B W"], found: Proposals) -> Children:
    """The best W candidates of the newest column's live nodes; the lowest parent, then the lowest id wins ties."""
    width = nodes.token.shape[2]
    possible = alive_BW[..., None] & (found.value > -jnp.inf)
    if width == 1:
        return _only_child(jnp.where(possible, found.value, -jnp.inf)[:, 0], found.id[:, 0])
    log_q, score = (in_column(x, newest_B)[..., None] for x in (nodes.log_q, nodes.score))
    if found.log_q is None:
        candidate_log_q = found_score = log_q + found.value
    else:
        candidate_log_q = log_q + found.log_q
        found_score = below_parent(log_q + found.value, score)
    found_score = jnp.where(possible, found_score, -jnp.inf)
    parents = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32)[:, None], found.id.shape)
    keys = (-found_score, parents, found.id, candidate_log_q)
    flat = tuple(x.reshape(x.shape[0], -1) for x in keys)
    negated, parent, token, candidate_log_q = (x[:, :width] for x in jax.lax.sort(flat, num_keys=3))
    alive = negated < jnp.inf
    zero = jnp.float32(0.0)
    return Children(
        jnp.where(alive, token, 0),
        jnp.where(alive, parent, 0),
        alive,
        jnp.where(alive, candidate_log_q, zero),
        jnp.where(alive, -negated, zero),
    )


def _only_child(value_BN: Array, id_BN: Array) -> Children:
    top = jnp.max(value_BN, axis=1, keepdims=True)
    token = jnp.min(jnp.where(value_BN == top, id_BN, jnp.iinfo(jnp.int32).max), axis=1, keepdims=True)
    alive, zeros = top > -jnp.inf, jnp.zeros_like(top)
    return Children(jnp.where(alive, token, 0), jnp.zeros_like(token), alive, zeros, zeros)


def below_parent(perturbed: Float[Array, "B W N"], parent: Float[Array, "B W 1"]) -> Float[Array, "B W N"]:
    """Perturbed log-probabilities of children, given that the largest of a row is its parent's (arXiv 1903.06059,
    appendix B; the order stays)."""
    largest = jnp.max(perturbed, axis=-1, keepdims=True)
    below = jnp.where(perturbed > -jnp.inf, perturbed - largest, -jnp.inf)
    # log(1 - exp(below)), which is -inf for the largest itself
    gap = jnp.where(below < -0.6931472, jnp.log1p(-jnp.exp(below)), jnp.log(-jnp.expm1(below)))
    v = parent - perturbed + gap
    return parent - jnp.maximum(v, 0.0) - jnp.log1p(jnp.exp(-jnp.abs(v)))


def forced_children(
    nodes: Nodes, newest_B: Int[Array, " B"], alive_BW: Bool[Array, "B W"], token: Array, parent: Array
) -> Children:
    """A column as a script gives it (token -1: no node), in this order; children of dead nodes are not alive."""
    if token.shape[1] == 1:
        zeros = jnp.zeros(token.shape, jnp.float32)
        return Children(token, jnp.zeros_like(token), (token >= 0) & alive_BW, zeros, zeros)
    alive = (token >= 0) & jnp.take_along_axis(alive_BW, parent, axis=1)
    below = jnp.arange(token.shape[1], dtype=jnp.float32)
    log_q, score = (
        jnp.take_along_axis(in_column(x, newest_B), parent, axis=1) - below for x in (nodes.log_q, nodes.score)
    )
    return Children(jnp.where(alive, token, 0), parent, alive, log_q, score)
