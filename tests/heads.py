"""Speculation modules for tests of what happens to parameters, made without compiling random numbers."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from spd_jax.speculation.module import HeadConfig, SpeculationModule


def random_module(config: HeadConfig, *, dtype: Any = jnp.float32, seed: int = 5) -> SpeculationModule:
    """A module of normal numbers; drawn by numpy, since JAX would compile a program for every shape."""
    random = np.random.default_rng(seed)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: SpeculationModule(config, dtype=dtype, rngs=nnx.Rngs(0))))
    filled = [
        (path, param.replace(jnp.asarray(random.standard_normal(param.shape).astype(dtype))))
        for path, param in nnx.to_flat_state(state)
    ]
    return nnx.merge(graphdef, nnx.from_flat_state(filled))
