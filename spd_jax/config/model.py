"""What a target model is, independent of the file format that describes it.

Readers of Hugging Face or GGUF metadata produce these values (`spd_jax.models`); everything else only reads them.
Nothing here knows of arrays or devices.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

RopeKind = Literal["default", "linear", "llama3", "yarn"]


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: base and the scaling of its inverse frequencies.

    Names follow Hugging Face's `rope_parameters`. Fields that a kind does not use are ignored by it. `llama3` and
    `yarn` need `original_max_position`. `attention_factor` None means the value that yarn derives from `factor`.
    """

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    """Everything that fixes the parameters and the arithmetic of one dense, full-attention decoder layer.

    Two layers with equal `LayerConfig` can live in the same slots of a rank.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    activation: str = "silu"
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads {self.num_heads} is not a multiple of num_key_value_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd; rotary embeddings need an even head_dim")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A target model: its layers, its vocabulary and its special tokens.

    `vocab_size` is the number of embedding rows; `max_position` the number of positions the model was made for;
    `eos_token_ids` every id that ends a generation (may be empty).
    """

    family: str
    vocab_size: int
    num_layers: int
    layer: LayerConfig
    rope: RopeConfig
    max_position: int
    tie_embeddings: bool
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None

    @property
    def hidden_size(self) -> int:
        """Width D of the hidden states."""
        return self.layer.hidden_size

    @property
    def layers(self) -> tuple[LayerConfig, ...]:
        """The layer at every index 0..L-1."""
        return (self.layer,) * self.num_layers
