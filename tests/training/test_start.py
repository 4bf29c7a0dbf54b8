"""Projections fitted to what the draft layers expect: exact where that is linear, deaf to what no one predicts from."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from spd_jax.data.packing import make_batch
from spd_jax.data.prepared import Example
from spd_jax.speculation.module import SpeculationModule
from spd_jax.training import start
from spd_jax.training.rows import Rows, fill_shares
from spd_jax.training.start import fit_projections
from spd_jax.training.trainer import as_rows
from tests.decode.engine import VOCAB
from tests.training.runs import PLAN, module, programs

SIZE, LAYER = 16, 3  # what the draft layers expect: the target's last hidden state


def some_rows(seed: int = 0, *, padded: int = 0) -> Rows:
    """Eight rows of two documents and `padded` positions of nothing."""
    random = np.random.default_rng(seed)
    documents = [
        [Example(random.integers(0, VOCAB, n, dtype=np.int32), np.ones(n, bool)) for n in (9, 15)] for _ in range(8)
    ]
    return as_rows(make_batch(documents, 24 + padded), fill_shares(PLAN.num_stages), seed=0, step=0)


def fitted(batches: Sequence[Rows], layer: int = LAYER) -> tuple[SpeculationModule, list[float]]:
    fresh = nnx.clone(module())
    return fresh, fit_projections(programs(1), fresh, layer, batches)


def weights_of(found: SpeculationModule) -> list[np.ndarray]:
    return [np.asarray(projection.weight[...]) for projection in found.projections]


def random_target(monkeypatch: pytest.MonkeyPatch, *, scale: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Hidden states drawn by token id, the deepest one a linear function of the anchors': its matrix `[D, 2 D]`, and
    the states of the two anchors by token, `[V, 2 D]`."""
    random = np.random.default_rng(3)
    anchors = random.standard_normal((VOCAB, 2 * SIZE)).astype(np.float32)
    matrix = random.standard_normal((SIZE, 2 * SIZE)).astype(np.float32)

    def taps(target: Any, rows: Rows, indices: Sequence[int], dtype: Any) -> tuple[list[Any], Any]:
        assert tuple(indices) == (*PLAN.anchors, LAYER)
        both = jnp.asarray(anchors)[rows.ids]
        deep = scale * both @ jnp.asarray(matrix).T
        return [both[..., :SIZE], both[..., SIZE:], deep], deep

    monkeypatch.setattr(start, "target_pass", taps)
    return scale * matrix, anchors


def test_a_linear_function_is_found(monkeypatch: pytest.MonkeyPatch):
    """But for the penalty: a thousandth of a feature's square."""
    matrix, anchors = random_target(monkeypatch)
    found, unexplained = fitted([some_rows(seed) for seed in range(4)])
    assert unexplained[1] < 1e-4
    np.testing.assert_allclose(weights_of(found)[1], matrix, atol=0.02)
    assert 0.2 < unexplained[0] < 0.9  # one of two anchors, which know nothing of each other
    seen = anchors[np.concatenate([some_rows(seed).ids.reshape(-1) for seed in range(4)])]
    wanted = seen @ matrix.T
    error = np.square(seen @ weights_of(found)[1].T - wanted).sum() / np.square(wanted).sum()
    assert error < 1e-4


def test_the_size_of_what_is_expected_does_not_matter(monkeypatch: pytest.MonkeyPatch):
    random_target(monkeypatch)
    one, share = fitted([some_rows()])
    random_target(monkeypatch, scale=1000.0)
    other, same_share = fitted([some_rows()])
    np.testing.assert_allclose(same_share, share, rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(weights_of(other)[0], 1000.0 * weights_of(one)[0], rtol=0.02, atol=20.0)


def test_padding_and_first_positions_do_not_count(monkeypatch: pytest.MonkeyPatch):
    random_target(monkeypatch)
    rows = some_rows(padded=8)
    wanted, share = fitted([rows])
    ids = rows.ids.copy()
    ids[rows.positions == 0] += 1  # padding has position 0 too
    assert (rows.positions == 0).sum() == 8 * (2 + 8)
    found, same_share = fitted([dataclasses.replace(rows, ids=ids)])
    assert share == same_share
    for a, b in zip(weights_of(found), weights_of(wanted), strict=True):
        np.testing.assert_array_equal(a, b)
    ids[0, 1] += 1  # one that does
    assert fitted([dataclasses.replace(rows, ids=ids)])[1] != share


def test_a_deeper_anchor_explains_more():
    """Of a real target: shares of a square, falling with the type; nothing is left where the layer is an anchor."""
    found, unexplained = fitted([some_rows(seed) for seed in range(2)])
    assert 1 > unexplained[0] > unexplained[1] > 0
    before = weights_of(module())
    assert all(not np.array_equal(a, b) for a, b in zip(weights_of(found), before, strict=True))
    found, unexplained = fitted([some_rows(seed) for seed in range(2)], layer=2)
    assert unexplained[1] < 1e-4
    np.testing.assert_allclose(weights_of(found)[1][:, SIZE:], np.eye(SIZE), atol=0.02)
    np.testing.assert_allclose(weights_of(found)[1][:, :SIZE], np.zeros((SIZE, SIZE)), atol=0.05)


def test_only_projections_are_changed():
    found, _ = fitted([some_rows()])
    before, after = (dict(nnx.to_flat_state(nnx.state(one))) for one in (module(), found))
    for path, param in before.items():
        if path[0] != "projections":
            np.testing.assert_array_equal(np.asarray(param[...]), np.asarray(after[path][...]))
