"""The table of shapes names every parameter of the decoder, of whatever kinds its layers are."""

import dataclasses
from typing import Any

import pytest
from flax import nnx

from spd_jax.config.model import DeltaNetConfig, ExpertsConfig, ModelConfig
from spd_jax.models.decoder import Decoder
from spd_jax.models.shapes import parameter_shapes
from spd_jax.weights.load import canonical_path
from tests.tiny import tiny_config

PLAIN = tiny_config().layers[0]
EVERYTHING: dict[str, Any] = {"qkv_bias": True, "output_bias": True, "mlp_bias": True, "qk_norm": True, "gated": True}
CONFIGS = {
    "plain": tiny_config(),
    "tied": tiny_config(tie_embeddings=True),
    "every part": tiny_config(**EVERYTHING),
    "other kinds": tiny_config(
        layers=(
            dataclasses.replace(PLAIN, post_norms=True),
            dataclasses.replace(PLAIN, mixer=DeltaNetConfig(2, 4, 6, 5, 3)),
            dataclasses.replace(PLAIN, mlp=ExpertsConfig(5, 2, 12)),
            dataclasses.replace(PLAIN, mlp=ExpertsConfig(5, 2, 12, shared_intermediate_size=7)),
        )
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_table_names_every_parameter_of_the_decoder(name: str):
    config: ModelConfig = CONFIGS[name]
    state = nnx.state(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))), nnx.Param)
    of_decoder = {canonical_path(path): variable.shape for path, variable in nnx.to_flat_state(state)}
    assert parameter_shapes(config) == of_decoder
