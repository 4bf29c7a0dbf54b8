"""A decoder layer of which only the last rows are asked for gives what the whole layer gives for them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from spd_jax.config.model import AttentionConfig, LayerConfig, MlpConfig, NormConfig, RopeConfig
from spd_jax.models.decoder import rows_only
from spd_jax.nn.decoder_layer import DecoderLayer
from spd_jax.nn.rope import rope_table

LENGTH, ASKING = 7, 3
EVERYTHING = {"qk_norm": True, "qkv_bias": True, "output_bias": True, "gated": True, "score_cap": 2.0, "scale": 0.7}
CONFIG = LayerConfig(
    16,
    NormConfig(1e-5, zero_centred=True),
    AttentionConfig(4, 2, 4, RopeConfig(partial_rotary_factor=0.5), **EVERYTHING),
    MlpConfig(24, bias=True),
    post_norms=True,
)  # everything that a layer can have, but for a window


def random_layer(config: LayerConfig) -> tuple[Any, Any]:
    graphdef, state = nnx.split(
        nnx.eval_shape(lambda: DecoderLayer(config, dtype=jnp.dtype(jnp.float32), rngs=nnx.Rngs(0)))
    )
    rng = np.random.default_rng(0)
    return graphdef, jax.tree.map(lambda x: jnp.asarray(0.5 * rng.standard_normal(x.shape), jnp.float32), state)


def test_the_rows_asked_for_are_those_of_the_whole_layer():
    """Values, and gradients of every parameter and of the input, with biases and with norms of queries and keys."""
    graphdef, state = random_layer(CONFIG)
    rng = np.random.default_rng(1)
    x, weight = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((2, LENGTH, 16), (2, ASKING, 16)))
    positions = jnp.asarray([[0, 1, 2, 3, 4, 5, 6], [4, 5, 0, 1, 2, 0, 1]], jnp.int32)
    rope = rope_table(CONFIG.attention, positions)
    mask = jnp.asarray(np.tril(rng.random((2, LENGTH, LENGTH)) < 0.7) | np.eye(LENGTH, dtype=bool))

    def loss(state: Any, x: Any, asking: int | None) -> tuple[jax.Array, jax.Array]:
        rows = mask if asking is None else mask[:, -asking:]
        y, _ = nnx.merge(graphdef, state)(x, rope, rows_only(rows), asking)
        return jnp.sum(y[:, -ASKING:] * weight), y

    compiled = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True), static_argnums=2)
    (_, whole), expected = compiled(state, x, None)
    (_, asked), found = compiled(state, x, ASKING)
    assert (whole.shape, asked.shape) == ((2, LENGTH, 16), (2, ASKING, 16))
    np.testing.assert_allclose(asked, whole[:, -ASKING:], atol=1e-5)
    assert all(np.abs(g).max() > 1e-3 for g in jax.tree.leaves(expected))
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=1e-4)
