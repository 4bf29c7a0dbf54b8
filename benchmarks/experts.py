"""What a layer with a mixture of experts reads for a token: the experts it chose, not all of them.

Side by side in one run: the layer with all its experts; one that has only as many experts as are chosen; and the same
mixture computed by running every expert. Sizes are those of a layer of Qwen3-30B-A3B.

    .venv/bin/python benchmarks/experts.py
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array
from jsonargparse import auto_cli

from spd_jax.config.model import ExpertsConfig
from spd_jax.nn.experts import Experts, mix
from spd_jax.nn.layers import ACTIVATIONS
from spd_jax.planning.timing import Timed, interleave, median, ratio


def run_all(
    x_RD: Array, weights_RC: Array, chosen_RC: Array, gate_up: Array, down: Array, activation: str, block: int
) -> Array:
    """The same sum with every expert run, and the chosen ones kept."""
    gate, up = jnp.split(jnp.einsum("rd,egd->reg", x_RD, gate_up), 2, axis=-1)
    y_RED = jnp.einsum("ref,edf->red", ACTIVATIONS[activation](gate) * up, down)
    share_RE = jnp.sum(jax.nn.one_hot(chosen_RC, gate_up.shape[0]) * weights_RC[..., None], axis=1)
    return jnp.einsum("red,re->rd", y_RED, share_RE)


def main(hidden: int = 2048, intermediate: int = 768, experts: int = 128, chosen: int = 8, rounds: int = 9) -> None:
    """Print times of one token, float32."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((1, 1, hidden)), jnp.float32)
    things: list[Timed] = []
    outputs: dict[str, Array] = {}
    variants = {"all there": (experts, mix), "chosen there": (chosen, mix), "all run": (experts, run_all)}
    for name, (count, sum_of) in variants.items():
        config = ExpertsConfig(count, chosen, intermediate)
        options: dict[str, Any] = {"dtype": jnp.dtype(jnp.float32), "rngs": nnx.Rngs(0)}
        graphdef, state = nnx.split(Experts(config, hidden, **options))

        def layer(state: Any, x: Array, graphdef: Any = graphdef, sum_of: Any = sum_of) -> Array:
            module = nnx.merge(graphdef, state)
            rows = x.reshape(-1, x.shape[-1])
            weights, which = module.route(rows)
            return sum_of(rows, weights, which, module.gate_up[...], module.down[...], "silu", 1)

        compiled = jax.jit(layer).lower(state, x).compile()
        outputs[name] = compiled(state, x)
        things.append(Timed(name, lambda state=state, compiled=compiled: compiled(state, x)))
    np.testing.assert_allclose(outputs["all there"], outputs["all run"], atol=1e-4, rtol=1e-3)
    times = interleave(things, rounds)
    for name, values in times.items():
        print(f"{name:<14} {median(values):8.2f} ms")
    print(f"all there / chosen there  {ratio(times['all there'], times['chosen there']):.2f}")
    print(f"all there / all run       {ratio(times['all there'], times['all run']):.3f}")


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
