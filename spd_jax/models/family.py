"""What a family of target models has to say about itself, and how its tensors are made out of a checkpoint's.

A `Recipe` makes one canonical tensor (a parameter of `spd_jax.models.decoder.Decoder`, named by its flattened path)
out of one or more tensors of a file. A family brings a config reader and a table of recipes for each file format.
This module knows no file format: it sees tensors through `TensorSource`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import ml_dtypes
import numpy as np

from spd_jax.config.model import ExpertsConfig, ModelConfig
from spd_jax.models.reading import text_fields
from spd_jax.models.shapes import Shape, parameter_shapes


@runtime_checkable
class TensorSource(Protocol):
    """Named tensors of a checkpoint; shapes and dtypes are known without reading any data.

    `origin` is for messages. `dtypes` holds the file's own names. `read` returns one tensor on the host.
    """

    origin: str

    @property
    def shapes(self) -> Mapping[str, Shape]: ...

    @property
    def dtypes(self) -> Mapping[str, str]: ...

    def read(self, name: str) -> np.ndarray: ...


@runtime_checkable
class DescribedSource(TensorSource, Protocol):
    """A checkpoint that carries its own description (GGUF)."""

    @property
    def metadata(self) -> Mapping[str, Any]: ...


@dataclasses.dataclass(frozen=True)
class Part:
    """One tensor of the file: its key, the shape it must have and what is done to it first."""

    key: str
    shape: Shape
    prepare: Callable[[np.ndarray], np.ndarray] | None = None

    def prepared(self, value: np.ndarray) -> np.ndarray:
        """The file's tensor as `combine` takes it."""
        return value if self.prepare is None else self.prepare(value)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """One canonical tensor: its shape and the parts that `combine` joins.

    `otherwise` is for files that hold the tensor in another way.
    """

    shape: Shape
    parts: tuple[Part, ...]
    combine: Callable[[Sequence[np.ndarray]], np.ndarray]
    otherwise: Recipe | None = None

    def suiting(self, keys: Container[str]) -> Recipe:
        """This recipe, or the other one where only its parts are among a file's keys."""
        other = self.otherwise
        if other is None or any(part.key in keys for part in self.parts):
            return self
        return other if any(part.key in keys for part in other.parts) else self


@dataclasses.dataclass(frozen=True)
class GgufFormat:
    """How GGUF files hold a family; `architecture` is its name there."""

    architecture: str
    read_config: Callable[[DescribedSource], ModelConfig]
    recipes: Callable[[ModelConfig], dict[str, Recipe]]


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of target models.

    `name` is Hugging Face's model_type, `also` are others; `gguf` is None where GGUF files are not read. `ignored` is a
    pattern of keys that a file may hold and that nothing needs.

    `wrapper_ties` is about multimodal checkpoints, whose config holds the text model's as `text_config`. A bool: the
    head is the wrapper's, which alone says whether it is tied; where it says nothing, this does. None: transformers has
    a class of the whole and one of the text model that read the same file, each by its own flag, and the one that ties
    is right unless the file holds a head.
    """

    name: str
    read_config: Callable[[Mapping[str, Any], str], ModelConfig]
    recipes: Callable[[ModelConfig], dict[str, Recipe]]
    gguf: GgufFormat | None = None
    ignored: str = r"(?!)"
    also: tuple[str, ...] = ()
    wrapper_ties: bool | None = None

    def config_of(self, fields: Mapping[str, Any], origin: str) -> ModelConfig:
        """A whole Hugging Face config dict, of a text model or of a wrapper around one, as a `ModelConfig`.

        Raises:
            ValueError: fields are missing or hold what is not implemented; all of them are named.
        """
        return self.read_config(text_fields(fields, origin, wrapper_ties=self.wrapper_ties), origin)


@dataclasses.dataclass(frozen=True)
class KeyNames:
    """How a format spells the tensors of a dense decoder; names of maps come without `.weight` and `.bias`."""

    embedding: str
    head: str
    final_norm: str
    layer: str
    input_norm: str
    q: str
    k: str
    v: str
    output: str
    q_norm: str
    k_norm: str
    mlp_norm: str
    gate: str
    up: str
    down: str
    mixer_post_norm: str = "(none)"
    mlp_post_norm: str = "(none)"


HUGGING_FACE = KeyNames(
    embedding="model.embed_tokens",
    head="lm_head",
    final_norm="model.norm",
    layer="model.layers.{index}.",
    input_norm="input_layernorm",
    q="self_attn.q_proj",
    k="self_attn.k_proj",
    v="self_attn.v_proj",
    output="self_attn.o_proj",
    q_norm="self_attn.q_norm",
    k_norm="self_attn.k_norm",
    mlp_norm="post_attention_layernorm",
    gate="mlp.gate_proj",
    up="mlp.up_proj",
    down="mlp.down_proj",
)

GGUF = KeyNames(
    embedding="token_embd",
    head="output",
    final_norm="output_norm",
    layer="blk.{index}.",
    input_norm="attn_norm",
    q="attn_q",
    k="attn_k",
    v="attn_v",
    output="attn_output",
    q_norm="attn_q_norm",
    k_norm="attn_k_norm",
    mlp_norm="ffn_norm",
    gate="ffn_gate",
    up="ffn_up",
    down="ffn_down",
)


def promoted(parts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Parts in one dtype that holds all of their values exactly (bfloat16 with float16 meets in float32)."""
    dtypes = {part.dtype for part in parts}
    if len(dtypes) == 1:
        return list(parts)
    halves = {np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)}
    common = np.dtype(np.float32) if dtypes <= halves else np.dtype(np.float64)
    return [part.astype(common) for part in parts]


def only_part(parts: Sequence[np.ndarray]) -> np.ndarray:
    """The one part, as it is."""
    (part,) = parts
    return part


def stacked_rows(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Parts one below the other (gate above up)."""
    return np.concatenate(promoted(parts), axis=0)


def piled(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Parts of one shape on a new first axis."""
    return np.stack(promoted(parts))


def piled_pairs(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Gate and up of one expert after the other: `[E, 2 F, D]`."""
    pairs = promoted(parts)
    return np.stack([np.concatenate(pairs[i : i + 2]) for i in range(0, len(pairs), 2)])


def grouped_qkv(num_kv_heads: int) -> Callable[[Sequence[np.ndarray]], np.ndarray]:
    """Rows of query, key and value `[N*H | K*H | K*H, ...]` regrouped by key-value head.

    Head k keeps its N/K query heads, then its key, then its value. Worked example, N = 4, K = 2:
    q0 q1 k0 v0 | q2 q3 k1 v1.
    """

    def combine(parts: Sequence[np.ndarray]) -> np.ndarray:
        heads = [part.reshape(num_kv_heads, -1, *part.shape[1:]) for part in promoted(parts)]
        joined = np.concatenate(heads, axis=1)
        return joined.reshape(-1, *joined.shape[2:])

    return combine


def gates_last(num_kv_heads: int, group: int) -> Callable[[np.ndarray], np.ndarray]:
    """Query rows `[K, G, 2, H, ...]` of gated attention, each head followed by its gate, as `[K, 2, G, H, ...]`: the G
    heads of a key-value head, then their gates."""

    def prepare(part: np.ndarray) -> np.ndarray:
        heads = part.reshape(num_kv_heads, group, 2, -1, *part.shape[1:])
        return heads.swapaxes(1, 2).reshape(part.shape)

    return prepare


def unpermuted(num_heads: int) -> Callable[[np.ndarray], np.ndarray]:
    """Undo llama.cpp's reordering of query and key rows for interleaved rotary embeddings.

    Its converter maps row (half, i) of each head to row (i, half); here the halves are wanted first.
    """

    def prepare(part: np.ndarray) -> np.ndarray:
        pairs = part.reshape(num_heads, part.shape[0] // num_heads // 2, 2, *part.shape[1:])
        return pairs.swapaxes(1, 2).reshape(part.shape)

    return prepare


def dense_recipes(config: ModelConfig, names: KeyNames, *, rope_permuted: bool = False) -> dict[str, Recipe]:
    """Recipes for every parameter of a decoder but those of gated delta nets and experts, keyed by canonical path.

    `rope_permuted` says that the file holds query and key rows in llama.cpp's interleaved order.
    """
    whole = {"embedding": names.embedding, "head": names.head, "final_norm": names.final_norm}
    single = {
        "input_norm": names.input_norm,
        "mixer_post_norm": names.mixer_post_norm,
        "mlp_post_norm": names.mlp_post_norm,
        "attention.q_norm": names.q_norm,
        "attention.k_norm": names.k_norm,
        "attention.output": names.output,
        "mlp_norm": names.mlp_norm,
        "mlp.down": names.down,
    }
    recipes = {}
    for path, shape in parameter_shapes(config).items():
        if path in ("embedding", "head"):
            recipes[path] = Recipe(shape, (Part(f"{whole[path]}.weight", shape),), only_part)
            continue
        if path == "final_norm.weight":
            recipes[path] = Recipe(shape, (Part(f"{names.final_norm}.weight", shape),), only_part)
            continue
        _, index, rest = path.split(".", 2)
        layer = config.layers[int(index)]
        sparse = rest.startswith("mlp.") and isinstance(layer.mlp, ExpertsConfig)
        if rest.startswith("delta.") or sparse:  # the family's own business
            continue
        module, leaf = rest.rsplit(".", 1)
        prefix, tail = names.layer.format(index=index), shape[1:]
        if module == "attention.qkv":
            attention = layer.attention
            query, key = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
            of_query = unpermuted(attention.num_heads) if rope_permuted else None
            of_key = unpermuted(attention.num_kv_heads) if rope_permuted else None
            if attention.gated:
                of_query = gates_last(attention.num_kv_heads, attention.num_heads // attention.num_kv_heads)
            parts = (
                Part(f"{prefix}{names.q}.{leaf}", (query * (1 + attention.gated), *tail), of_query),
                Part(f"{prefix}{names.k}.{leaf}", (key, *tail), of_key),
                Part(f"{prefix}{names.v}.{leaf}", (key, *tail)),
            )
            recipes[path] = Recipe(shape, parts, grouped_qkv(attention.num_kv_heads))
        elif module == "mlp.gate_up":
            half = (shape[0] // 2, *tail)
            parts = (Part(f"{prefix}{names.gate}.{leaf}", half), Part(f"{prefix}{names.up}.{leaf}", half))
            recipes[path] = Recipe(shape, parts, stacked_rows)
        else:
            recipes[path] = Recipe(shape, (Part(f"{prefix}{single[module]}.{leaf}", shape),), only_part)
    return recipes
