"""The tiny published heads under tests/data, and what their own implementation made of them.

A reader for tests: it knows the tensor names of those `.pt` files and nothing of how the library imports them.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from spd_jax.config.model import LayerConfig
from spd_jax.models.decoder import Decoder
from spd_jax.plan import StagePlan
from spd_jax.speculation.module import HeadConfig, SpeculationModule
from spd_jax.weights.load import load_decoder, open_target

DATA = Path(__file__).parent / "data"


@dataclasses.dataclass(frozen=True)
class Fixture:
    """A target, its head, the plan they were made for, and the golden outputs."""

    target: Decoder
    head: SpeculationModule
    plan: StagePlan
    golden: dict[str, Any]
    arrays: dict[str, np.ndarray]

    @property
    def prompts(self) -> list[dict[str, Any]]:
        return self.golden["prompts"]

    def draft_logits(self, prompt: int) -> np.ndarray:
        """`[cycles, Vd]`"""
        return self.arrays[f"draft_logits_{prompt}"]


def load_fixture(name: str) -> Fixture:
    folder = DATA / name
    target = load_decoder(open_target(folder / "target"), jnp.float32)
    golden = json.loads((folder / "golden.json").read_text())
    with np.load(folder / "golden.npz") as file:
        arrays = dict(file)
    num_stages = golden["num_stages"]
    stage_layers = (target.config.num_layers // num_stages,) * num_stages
    plan = StagePlan(stage_layers, golden["num_draft_layers"], "separate", tuple(golden["anchors"]))
    assert list(plan.anchor_type) == golden["anchor_type_of_depth"]
    return Fixture(target, load_published_head(folder / "head_v11.pt", target), plan, golden, arrays)


def load_published_head(path: Path, target: Decoder) -> SpeculationModule:
    """A published head; its draft layers are Qwen3's whatever the target is, so q_norm and k_norm are looked up."""
    import torch

    stored = torch.load(path, map_location="cpu", weights_only=True)
    tensors = {name: value.numpy() for name, value in stored["state_dict"].items()}
    described = stored["config"]
    layer = dataclasses.replace(
        target.config.layer, qk_norm="spec_layers.0.self_attn.q_norm.weight" in tensors, qkv_bias=False
    )
    ids = described["draft_token_ids"]
    config = HeadConfig(
        layer=layer,
        rope=target.config.rope,
        num_layers=described["num_spec_layers"],
        anchors=tuple(described["aggr_feature_bound"]),
        vocab_size=described["vocab_size"],
        draft_ids=None if ids is None else tuple(ids),
    )
    named = {"lm_head": tensors["lm_head.weight"]}
    for i in range(len(config.anchors)):
        named[f"projections.{i}.weight"] = tensors[f"aggr_projs.{i}.weight"]
    for j in range(config.num_layers):
        for suffix, value in _layer(tensors, f"spec_layers.{j}.", layer).items():
            named[f"layers.{j}.{suffix}"] = value
    module = nnx.eval_shape(lambda: SpeculationModule(config, rngs=nnx.Rngs(0)))
    params = {".".join(map(str, path)): param for path, param in nnx.to_flat_state(nnx.state(module))}
    assert params.keys() == named.keys(), params.keys() ^ named.keys()
    for key, param in params.items():
        assert param.shape == named[key].shape, key
        param.set_value(jnp.asarray(named[key]))
    return module


def _layer(tensors: dict[str, np.ndarray], prefix: str, config: LayerConfig) -> dict[str, np.ndarray]:
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    q, k, v = (tensors[f"{attention}{name}_proj.weight"] for name in "qkv")
    by_kv_head = (config.num_kv_heads, -1, config.hidden_size)
    grouped = np.concatenate([q.reshape(by_kv_head), k.reshape(by_kv_head), v.reshape(by_kv_head)], axis=1)
    layer = {
        "input_norm.weight": tensors[prefix + "input_layernorm.weight"],
        "attention.qkv.weight": grouped.reshape(-1, config.hidden_size),
        "attention.output.weight": tensors[attention + "o_proj.weight"],
        "mlp_norm.weight": tensors[prefix + "post_attention_layernorm.weight"],
        "mlp.gate_up.weight": np.concatenate([tensors[f"{mlp}{name}_proj.weight"] for name in ("gate", "up")]),
        "mlp.down.weight": tensors[mlp + "down_proj.weight"],
    }
    if config.qk_norm:
        layer |= {f"attention.{name}.weight": tensors[f"{attention}{name}.weight"] for name in ("q_norm", "k_norm")}
    return layer
