"""What a target model is, independent of the file format that describes it.

Readers of Hugging Face or GGUF metadata produce these values (`spd_jax.models`); everything else only reads them.
Nothing here knows of arrays or devices.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

RopeKind = Literal["default", "linear", "llama3", "yarn"]


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: base and the scaling of its inverse frequencies.

    Names follow Hugging Face's `rope_parameters`. Fields that a kind does not use are ignored by it. `llama3` and
    `yarn` need `original_max_position`. `attention_factor` None means the value that yarn derives from `factor`.
    `partial_rotary_factor` is the share of a head, from its front, that is rotated at all.
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
    partial_rotary_factor: float = 1.0

    def reach(self, max_position: int) -> int:
        """Positions that the scaling makes usable, of a model whose config says `max_position`.

        `linear` multiplies what the config says; `yarn` its original length, unless the config says more already; so
        does `llama3`, but there a config that says more than the original length means the scaled one, whatever the
        factor (Llama 3.2: original 8,192, factor 32, made for 131,072).
        """
        if self.kind == "linear":
            return int(max_position * self.factor)
        if self.kind in ("yarn", "llama3"):
            original = self.original_max_position or max_position
            scaled = int(original * self.factor)
            return max_position if self.kind == "llama3" and max_position > original else max(max_position, scaled)
        return max_position


@dataclasses.dataclass(frozen=True)
class NormConfig:
    """Root mean square norms of a model; `zero_centred` ones multiply by 1 + weight."""

    eps: float
    zero_centred: bool = False


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Grouped-query attention with rotary embeddings.

    `qk_norm` norms every query and key head, `gated` multiplies the mixed values by the sigmoid of a further
    projection, `window` lets a position see itself and the `window - 1` before it (None: all before it), `score_cap` c
    makes c tanh(s / c) of a score s, `scale` multiplies scores (None: head_dim^-1/2).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig = RopeConfig()
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    gated: bool = False
    window: int | None = None
    score_cap: float | None = None
    scale: float | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads {self.num_heads} is not a multiple of num_key_value_heads {self.num_kv_heads}"
            )
        if self.rotary_dim % 2:
            what = "head_dim" if self.rotary_dim == self.head_dim else "the rotated part of head_dim"
            raise ValueError(f"{what} {self.rotary_dim} is odd; rotary embeddings need an even head_dim")

    @property
    def rotary_dim(self) -> int:
        """Leading dimensions of a head that are rotated."""
        return int(self.head_dim * self.rope.partial_rotary_factor)


@dataclasses.dataclass(frozen=True)
class DeltaNetConfig:
    """Linear attention by the gated delta rule (arXiv 2412.06464), behind a causal convolution over the last
    `conv_kernel` positions.

    A key head serves `num_value_heads / num_key_heads` neighbouring value heads. The state of a value head is a matrix
    `key_dim` x `value_dim`.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int

    def __post_init__(self) -> None:
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"linear_num_value_heads {self.num_value_heads} is not a multiple of linear_num_key_heads "
                f"{self.num_key_heads}"
            )

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values of all heads."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim


Mixer = AttentionConfig | DeltaNetConfig


@dataclasses.dataclass(frozen=True)
class MlpConfig:
    """down(act(gate(x)) * up(x))."""

    intermediate_size: int
    activation: str = "silu"
    bias: bool = False


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts, `top_k` of `num_experts` a position.

    `normalise` makes the weights of the chosen ones sum to 1. `shared_intermediate_size` is that of a further expert
    which every position runs, behind a gate of its own (None: there is none).
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    activation: str = "silu"
    normalise: bool = True
    shared_intermediate_size: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"num_experts_per_tok is {self.top_k}, expected 1 to num_experts {self.num_experts}")


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    """Everything that fixes the parameters and the arithmetic of one decoder layer.

    `mixer` is what lets positions see each other. `post_norms` also norms what mixer and MLP give, before it is added.
    Two layers with equal `LayerConfig` can live in the same slots of a rank.
    """

    hidden_size: int
    norm: NormConfig
    mixer: Mixer
    mlp: MlpConfig | ExpertsConfig
    post_norms: bool = False

    @property
    def attention(self) -> AttentionConfig:
        """The attention of a layer that has one.

        Raises:
            TypeError: it has another mixer.
        """
        if not isinstance(self.mixer, AttentionConfig):
            raise TypeError(f"a layer with {type(self.mixer).__name__} has no attention")
        return self.mixer

    def describe(self) -> str:
        """The kind of layer in a few words."""
        mixer = "gated delta net"
        if isinstance(self.mixer, AttentionConfig):
            mixer = "attention" if self.mixer.window is None else f"window of {self.mixer.window}"
        mlp = self.mlp
        inner = f"{mlp.top_k} of {mlp.num_experts} experts" if isinstance(mlp, ExpertsConfig) else "MLP"
        return f"{mixer}, {inner}"

    def with_attention(self, **changes: Any) -> LayerConfig:
        """This layer with some fields of its attention changed."""
        return dataclasses.replace(self, mixer=dataclasses.replace(self.attention, **changes))


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A target model: its layers, its vocabulary and its special tokens.

    `vocab_size` is the number of embedding rows; `max_position` is what the config says of positions, `context` how
    many can be used; `eos_token_ids` every id that ends a generation (may be empty). Embeddings are multiplied by
    `embedding_scale`; `logit_cap` c makes c tanh(z / c) of a logit z. `dense_size` is the width of the MLP that a dense
    layer would have, where the description of a model without dense layers gives one.
    """

    family: str
    vocab_size: int
    layers: tuple[LayerConfig, ...]
    max_position: int
    tie_embeddings: bool
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    embedding_scale: float = 1.0
    logit_cap: float | None = None
    dense_size: int | None = None

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("a model needs at least one layer")

    @property
    def num_layers(self) -> int:
        """Layers L."""
        return len(self.layers)

    @property
    def context(self) -> int:
        """Positions that can be used: those of the config, or more where rotary embeddings are scaled in every layer.

        Gemma 3 scales those of the layers that attend to everything only, and its config says the scaled length.
        """
        ropes = {layer.mixer.rope for layer in self.layers if isinstance(layer.mixer, AttentionConfig)}
        return min((rope.reach(self.max_position) for rope in ropes), default=self.max_position)

    @property
    def hidden_size(self) -> int:
        """Width D of the hidden states."""
        return self.layers[0].hidden_size

    @property
    def norm(self) -> NormConfig:
        """The final norm; its kind is that of the layers' norms."""
        return self.layers[0].norm


def facts(config: Any) -> dict[str, Any]:
    """A config's fields that differ from their defaults, as plain values.

    What identifies a config: a field that is added later, with a default that means what was so far, changes nothing.
    """
    found = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.default is dataclasses.MISSING or value != field.default:
            found[field.name] = _plain(value)
    return found


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {"class": type(value).__name__, **facts(value)}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
