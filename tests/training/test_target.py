"""The frozen target of training is the decoder: hidden states at the anchors, logits, and no gradient."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spd_jax.data.packing import make_batch
from spd_jax.data.prepared import Example
from spd_jax.models.decoder import Decoder
from spd_jax.training.rows import Rows
from spd_jax.training.target import FrozenTarget, load_frozen_target, target_pass
from spd_jax.weights.load import load_decoder
from spd_jax.weights.random_model import RandomWeights
from tests.decode.engine import model_config
from tests.decode.test_layer_kinds import IN_GATE, KINDS
from tests.tiny import run
from tests.training.passes import frozen, random_ids, rows_of, whole_rows


def taps_and_logits(target: FrozenTarget, rows: Rows, anchors: tuple[int, ...]) -> tuple[list[np.ndarray], np.ndarray]:
    def both(target: FrozenTarget, rows: Rows) -> Any:
        taps, last = target_pass(target, rows, anchors, jnp.float32)
        return taps, target.logits(last)

    return jax.tree.map(np.asarray, jax.jit(both)(target, rows))


def decoder_states(decoder: Decoder, ids: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    def both(model: Decoder, ids: jax.Array) -> Any:
        hiddens = model.hidden_states(ids)
        return hiddens, model.logits(hiddens[-1])

    return run(decoder, both, ids)


@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_taps_and_logits_are_the_decoders(tied: bool):
    """A08, A09: every anchor, L too, before the final norm; the teacher's logits after it."""
    anchors = (0, 2, 6, 8)
    source = RandomWeights(model_config(8, tie_embeddings=tied), 3)
    target, ids = frozen(source, anchors), random_ids(2, 8)
    taps, logits = taps_and_logits(target, whole_rows(ids, 1), anchors)
    hiddens, expected = decoder_states(load_decoder(source), ids)
    assert np.abs(expected).max() > 1
    # Relative to the largest: sharp attention carries its rounding into the small ones.
    for tap, anchor in zip(taps, anchors, strict=True):
        np.testing.assert_allclose(tap, hiddens[anchor], rtol=0, atol=1e-5 * np.abs(hiddens[anchor]).max())
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    assert np.abs(taps[-1] - np.asarray(target.normed(jnp.asarray(taps[-1])))).max() > 0.1


@pytest.mark.parametrize("kind", ["plain", *IN_GATE])
def test_documents_of_a_row_are_apart(kind: str):
    """N01: hidden states of a document are the same alone and packed behind another, whatever the layers are."""
    documents = [Example(random_ids(length, seed=length), np.ones(length, bool)) for length in (7, 4)]
    packed, alone, joined = (
        make_batch(rows, 16)
        for rows in (
            [documents, []],
            [documents[:1], documents[1:]],
            [[Example(np.concatenate([document.ids for document in documents]), np.ones(11, bool))], []],
        )
    )
    layers = {"layers": KINDS[kind][:4]} if kind in KINDS else {}
    target = frozen(RandomWeights(model_config(3, **layers)), (0, 2))
    compiled = jax.jit(lambda rows: target_pass(target, rows, (0, 2), jnp.float32)[1])
    together, apart, one = (np.asarray(compiled(rows_of(batch, 1))) for batch in (packed, alone, joined))
    largest = np.abs(apart).max()
    np.testing.assert_allclose(together[0, :7], apart[0, :7], rtol=0, atol=1e-5 * largest)
    np.testing.assert_allclose(together[0, 7:11], apart[1, :4], rtol=0, atol=1e-5 * largest)
    assert np.isfinite(together).all()
    # What a document that saw the one before it would differ by: no rounding can be taken for that, nor that for one.
    assert np.abs(one[0, 7:11] - apart[1, :4]).max() > 1e-2 * largest


@pytest.mark.parametrize("kind", IN_GATE)
def test_layers_of_several_kinds_are_the_decoders(kind: str):
    """Windows shorter than the rows, capped scores, scaled embeddings, experts in blocks, delta nets in chunks."""
    changes: dict[str, Any] = {"layers": KINDS[kind]}
    changes |= {"embedding_scale": 2.0, "logit_cap": 8.0} if kind == "windows" else {}
    source, anchors = RandomWeights(model_config(8, **changes), 3), (0, 3, 8)
    target, ids = frozen(source, anchors), random_ids(2, 16)
    taps, logits = taps_and_logits(target, whole_rows(ids, 1), anchors)
    hiddens, expected = decoder_states(load_decoder(source), ids)
    for tap, anchor in zip(taps, anchors, strict=True):
        np.testing.assert_allclose(tap, hiddens[anchor], rtol=0, atol=1e-5 * np.abs(hiddens[anchor]).max())
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_no_gradient_reaches_the_target():
    """O02: the teacher keeps no graph."""
    target, rows = frozen(RandomWeights(model_config(3)), (0, 2)), whole_rows(random_ids(1, 6), 1)

    def total(target: FrozenTarget, rows: Rows) -> jax.Array:
        taps, last = target_pass(target, rows, (0, 2), jnp.float32)
        return sum(jnp.sum(jnp.square(x)) for x in (*taps, last))

    for gradient in jax.tree.leaves(jax.jit(jax.grad(total))(target, rows)):
        assert not np.asarray(gradient).any()


def test_loading_tells_how_far_it_is():
    seen: list[tuple[int, int, str]] = []
    target = load_frozen_target(
        RandomWeights(model_config(3)), (0, 2), jnp.bfloat16, lambda done, total, name: seen.append((done, total, name))
    )
    assert target.bounds == (0, 2, 3)
    assert [segment["mlp.down.weight"].shape[0] for segment in target.segments] == [2, 1]
    assert {leaf.dtype for leaf in jax.tree.leaves(target)} == {jnp.dtype(jnp.bfloat16)}
    dones = [done for done, _, _ in seen]
    assert dones == sorted(dones)
    assert 0 < dones[0] <= dones[-1] <= seen[-1][1]
    assert dones[-1] > 0.9 * seen[-1][1]
