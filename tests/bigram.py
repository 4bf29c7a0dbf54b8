"""A target and a head whose distributions are known: p and q depend on the last token alone.

The layers of both add nothing, so the hidden state of a position is its token's embedding at every depth, and logits
are a table of token by token. The acceptance of drafts then follows by enumeration, and so does S0 of a chain; for the
pipeline it is a model like any other.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from spd_jax.config.model import ModelConfig
from spd_jax.plan import StagePlan
from spd_jax.speculation.module import HeadConfig, SpeculationModule, draft_layer_config
from spd_jax.weights.random_model import RandomWeights, dense_layer

_ADDS = ("attention.output.weight", "mlp.down.weight")  # what a layer adds to its input comes through these


class BigramWeights(RandomWeights):
    """`TargetWeights` of a model that looks at the last token only."""

    def __init__(self, vocab_size: int, num_layers: int, seed: int = 0, spread: float = 1.5):
        layer = dense_layer(16, 24, 4, 2, 4)
        super().__init__(ModelConfig("llama", vocab_size, (layer,) * num_layers, 1 << 16, False, (vocab_size,)), seed)
        self._spread = spread

    def tensor(self, path: str) -> np.ndarray:
        """One parameter in float32."""
        value = super().tensor(path)
        if path.endswith(_ADDS):
            return np.zeros_like(value)
        return value * np.float32(self._spread) if path == "head" else value

    def logits(self, rows_VD: np.ndarray) -> np.ndarray:
        """`[V, V]`: for every last token the logits that a head with these rows gives."""
        embedding = self.tensor("embedding").astype(np.float64)
        scale = np.sqrt(np.mean(embedding**2, axis=1, keepdims=True) + self.config.norm.eps)
        return (embedding / scale * self.tensor("final_norm.weight")) @ rows_VD.astype(np.float64).T


def bigram_head(weights: BigramWeights, plan: StagePlan, error: float, seed: int = 1) -> SpeculationModule:
    """A head that drafts from a table of its own: the target's with normal errors of this size in its rows."""
    config = HeadConfig(
        draft_layer_config(weights.config), plan.num_draft_layers, plan.anchors, weights.config.vocab_size
    )
    module = SpeculationModule(config, rngs=nnx.Rngs(0))
    size, rows = config.layer.hidden_size, weights.tensor("head")
    noise = np.random.default_rng(seed).standard_normal(rows.shape, np.float32)

    def value(path: tuple[Any, ...], shape: tuple[int, ...]) -> np.ndarray:
        if path[0] == "projections":
            return np.eye(size, shape[1], dtype=np.float32)  # the embedding, whatever else is known
        if path[0] == "lm_head":
            return rows + np.float32(error * rows.std()) * noise
        name = ".".join(map(str, path))
        return np.zeros(shape, np.float32) if name.endswith(_ADDS) else np.ones(shape, np.float32)

    graphdef, state = nnx.split(module)
    flat = [(path, nnx.Param(jnp.asarray(value(path, leaf.shape)))) for path, leaf in nnx.to_flat_state(state)]
    return nnx.merge(graphdef, nnx.from_flat_state(flat))


@dataclasses.dataclass(frozen=True)
class Tables:
    """`p` and `q` `[V, V]`: the distributions after every last token."""

    p: np.ndarray
    q: np.ndarray

    def stationary(self) -> np.ndarray:
        """How often each token is the last one in a long text of the target."""
        share = np.full(len(self.p), 1.0 / len(self.p))
        for _ in range(1000):
            share = share @ self.p
        return share

    def alpha(self, width: int, proposal: str) -> float:
        """The share of tests in which one of `width` siblings, all proposed for the same verified token, is right."""
        accepts = _by_name if proposal == "top" else _by_trial
        return float(sum(s * accepts(p, q, width) for s, p, q in zip(self.stationary(), self.p, self.q, strict=True)))


def tables(weights: BigramWeights, head: SpeculationModule) -> Tables:
    """What target and head say, from their numbers."""
    assert head.lm_head is not None
    logits = weights.logits(weights.tensor("head")), weights.logits(np.asarray(head.lm_head[...]))
    shifted = [np.exp(x - x.max(axis=1, keepdims=True)) for x in logits]
    return Tables(*(x / x.sum(axis=1, keepdims=True) for x in shifted))


def _by_name(p: np.ndarray, q: np.ndarray, width: int) -> float:
    return p[np.argsort(-q, kind="stable")[:width]].sum()


def _by_trial(p: np.ndarray, q: np.ndarray, width: int) -> float:
    """Sum over what the first sibling can be: accepted, or the rest of the siblings against what is left of p."""
    if width == 0 or q.sum() <= 0.0:
        return 0.0
    q = q / q.sum()
    left = np.maximum(p - q, 0.0)
    chances = np.minimum(1.0, np.divide(p, q, out=np.ones_like(p), where=q > 0))
    total = 0.0
    for token in np.flatnonzero(q):
        chance = chances[token]
        if chance < 1.0 and width > 1 and left.sum() > 1e-12:  # p = q up to rounding leaves nothing
            others = np.where(np.arange(len(q)) == token, 0.0, q)
            chance += (1.0 - chance) * _by_trial(left / left.sum(), others, width - 1)
        total += q[token] * chance
    return total
