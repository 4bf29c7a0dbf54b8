"""Shapes of every parameter of a decoder, of whatever kinds its layers are."""

from __future__ import annotations

import math

from spd_jax.config.model import AttentionConfig, DeltaNetConfig, ExpertsConfig, LayerConfig, MlpConfig, ModelConfig

Shape = tuple[int, ...]


def parameter_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Canonical path -> shape of every parameter of a decoder, in the order of the forward pass.

    Equal to the flattened parameters of `Decoder(config)` (a test holds them together), without building it.
    """
    shapes: dict[str, Shape] = {"embedding": (config.vocab_size, config.hidden_size)}
    for index, layer in enumerate(config.layers):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer_shapes(layer).items()}
    shapes["final_norm.weight"] = (config.hidden_size,)
    if not config.tie_embeddings:
        shapes["head"] = (config.vocab_size, config.hidden_size)
    return shapes


def num_parameters(layer: LayerConfig) -> int:
    """Parameters of a layer."""
    return sum(math.prod(shape) for shape in layer_shapes(layer).values())


def expert_parameters(layer: LayerConfig) -> int:
    """Parameters of one of a layer's experts, 0 where it has none."""
    mlp = layer.mlp
    return 3 * mlp.intermediate_size * layer.hidden_size if isinstance(mlp, ExpertsConfig) else 0


def layer_shapes(layer: LayerConfig) -> dict[str, Shape]:
    """Name -> shape of every parameter of a layer, in the order of the forward pass."""
    size, mixer, mlp = layer.hidden_size, layer.mixer, layer.mlp
    shapes: dict[str, Shape] = {"input_norm.weight": (size,)}
    if isinstance(mixer, AttentionConfig):
        shapes |= {f"attention.{name}": shape for name, shape in _attention_shapes(mixer, size).items()}
    else:
        shapes |= {f"delta.{name}": shape for name, shape in _delta_shapes(mixer, size).items()}
    if layer.post_norms:
        shapes["mixer_post_norm.weight"] = (size,)
    shapes["mlp_norm.weight"] = (size,)
    made = _mlp_shapes(mlp, size) if isinstance(mlp, MlpConfig) else _experts_shapes(mlp, size)
    shapes |= {f"mlp.{name}": shape for name, shape in made.items()}
    if layer.post_norms:
        shapes["mlp_post_norm.weight"] = (size,)
    return shapes


def _attention_shapes(attention: AttentionConfig, size: int) -> dict[str, Shape]:
    mixed, keys = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
    qkv = mixed * (1 + attention.gated) + 2 * keys
    shapes: dict[str, Shape] = {"qkv.weight": (qkv, size)}
    if attention.qkv_bias:
        shapes["qkv.bias"] = (qkv,)
    if attention.qk_norm:
        shapes["q_norm.weight"] = shapes["k_norm.weight"] = (attention.head_dim,)
    shapes["output.weight"] = (size, mixed)
    if attention.output_bias:
        shapes["output.bias"] = (size,)
    return shapes


def _mlp_shapes(mlp: MlpConfig, size: int) -> dict[str, Shape]:
    inner = mlp.intermediate_size
    shapes: dict[str, Shape] = {"gate_up.weight": (2 * inner, size), "down.weight": (size, inner)}
    return shapes | ({"gate_up.bias": (2 * inner,), "down.bias": (size,)} if mlp.bias else {})


def _experts_shapes(experts: ExpertsConfig, size: int) -> dict[str, Shape]:
    count, inner = experts.num_experts, experts.intermediate_size
    shapes: dict[str, Shape] = {"router.weight": (count, size)}
    shapes |= {"gate_up": (count, 2 * inner, size), "down": (count, size, inner)}
    if experts.shared_intermediate_size:
        shared = _mlp_shapes(MlpConfig(experts.shared_intermediate_size), size)
        shapes |= {f"shared.{name}": shape for name, shape in shared.items()} | {"shared_gate.weight": (1, size)}
    return shapes


def _delta_shapes(delta: DeltaNetConfig, size: int) -> dict[str, Shape]:
    heads, values = delta.num_value_heads, delta.num_value_heads * delta.value_dim
    return {
        "mix.weight": (delta.channels + values + 2 * heads, size),
        "conv": (delta.channels, delta.conv_kernel),
        "a_log": (heads,),
        "dt_bias": (heads,),
        "norm.weight": (delta.value_dim,),
        "output.weight": (size, values),
    }
