"""Weights without files: random ones are reproducible and lively, those of a model in memory are its own."""

import jax
import jax.numpy as jnp
import numpy as np

from spd_jax.models.decoder import Decoder
from spd_jax.weights.load import load_decoder
from spd_jax.weights.random_model import RandomWeights
from tests.memory_weights import DecoderWeights
from tests.tiny import run, tiny_config


def test_random_weights_are_the_same_for_the_same_seed():
    config = tiny_config(qkv_bias=True)
    one, again, other = RandomWeights(config, 3), RandomWeights(config, 3), RandomWeights(config, 4)
    in_memory = DecoderWeights(load_decoder(one))
    assert set(one.paths()) == set(in_memory.paths())
    for path in one.paths():
        np.testing.assert_array_equal(one.tensor(path), again.tensor(path))
        np.testing.assert_array_equal(one.tensor(path), in_memory.tensor(path))
        assert not np.array_equal(one.tensor(path), other.tensor(path))


def test_random_weights_give_text_with_many_tokens():
    """Greedy text of a random model must not settle on one token, or tests on it prove little."""

    def greedy(model: Decoder, ids: jax.Array) -> jax.Array:
        def step(place: jax.Array, ids: jax.Array) -> jax.Array:
            return ids.at[0, place].set(jnp.argmax(model(ids)[0, place - 1]).astype(jnp.int32))

        return jax.lax.fori_loop(5, 69, step, ids)

    start = np.concatenate([np.arange(5, 10), np.zeros(64, np.int64)])[None]
    text = run(load_decoder(RandomWeights(tiny_config(num_layers=8), 0)), greedy, start)[0, 5:]
    assert len(set(text.tolist())) >= 20
    assert (text[1:] == text[:-1]).sum() <= 10
