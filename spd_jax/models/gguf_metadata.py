"""The config of a dense decoder from a GGUF file's metadata and tensor shapes.

GGUF says less than a Hugging Face config: biases and an untied head are known by their tensors, Llama 3's rotary
scaling by the table `rope_freqs.weight`. Nothing here knows how the file is read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from spd_jax.config.model import AttentionConfig, LayerConfig, MlpConfig, ModelConfig, NormConfig, RopeConfig
from spd_jax.models.family import DescribedSource
from spd_jax.models.reading import FieldReader
from spd_jax.nn.rope import inverse_frequencies

_CONTROL = 3  # token type of control tokens
_TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")  # what llama.cpp ends a generation at, by name
_CHANGES_ARITHMETIC = (
    "attention.scale",
    "logit_scale",
    "embedding_scale",
    "residual_scale",
    "attention.sliding_window",
)


def read_dense_gguf(source: DescribedSource, *, family: str, architecture: str, qk_norm: bool = False) -> ModelConfig:
    """The `ModelConfig` that a GGUF file describes.

    Raises:
        ValueError: metadata is missing or names what is not implemented; all of it is listed.
    """
    prefix = f"{architecture}."
    fields = {
        key.removeprefix(prefix): _uniform(value) for key, value in source.metadata.items() if key.startswith(prefix)
    }
    shapes = source.shapes
    reader = FieldReader(fields, source.origin)
    hidden_size, num_heads = reader.whole("embedding_length"), reader.whole("attention.head_count")
    head_dim = reader.whole("attention.key_length", max(hidden_size // num_heads, 1))
    for name in ("attention.value_length", "rope.dimension_count"):
        reader.only(name, head_dim)
    for name in (*_CHANGES_ARITHMETIC, "expert_count"):
        reader.only(name, 0, 0.0)
    max_position = reader.whole("context_length")
    num_kv_heads = reader.whole("attention.head_count_kv", num_heads)
    norm = NormConfig(reader.number("attention.layer_norm_rms_epsilon", 1e-6))
    mlp = MlpConfig(reader.whole("feed_forward_length"), bias="blk.0.ffn_down.bias" in shapes)
    num_layers = reader.whole("block_count")
    rope = _read_rope(reader, source, head_dim=head_dim, max_position=max_position)
    vocab_size = shapes["token_embd.weight"][0] if "token_embd.weight" in shapes else reader.whole("vocab_size")
    reader.finish()
    token_id = source.metadata.get
    try:
        attention = AttentionConfig(
            num_heads,
            num_kv_heads,
            head_dim,
            rope,
            qk_norm=qk_norm,
            qkv_bias="blk.0.attn_q.bias" in shapes,
            output_bias="blk.0.attn_output.bias" in shapes,
        )
        return ModelConfig(
            family=family,
            vocab_size=vocab_size,
            layers=(LayerConfig(hidden_size, norm, attention, mlp),) * num_layers,
            max_position=max_position,
            tie_embeddings="output.weight" not in shapes,
            eos_token_ids=end_token_ids(source.metadata),
            bos_token_id=token_id("tokenizer.ggml.bos_token_id"),
            pad_token_id=token_id("tokenizer.ggml.padding_token_id"),
        )
    except ValueError as error:
        raise ValueError(f"{source.origin}: {error}") from error


def end_token_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids that end a generation: those the file names, and control tokens that are known to end a turn."""
    named = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    tokens, types = metadata.get("tokenizer.ggml.tokens", []), metadata.get("tokenizer.ggml.token_type", [])
    controls = {tokens[index]: index for index, kind in enumerate(types) if kind == _CONTROL}
    found = [*named, *(controls.get(text) for text in _TURN_ENDS)]
    return tuple(dict.fromkeys(index for index in found if index is not None))


def _uniform(value: Any) -> Any:
    """A per-layer list of equal values as the one value, and a float as the shortest decimal that gives its float32."""
    if isinstance(value, list) and value and all(item == value[0] for item in value):
        value = value[0]
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _read_rope(reader: FieldReader, source: DescribedSource, *, head_dim: int, max_position: int) -> RopeConfig:
    theta = reader.number("rope.freq_base", 10000.0)
    kind = reader.choice("rope.scaling.type", "none", ("none", "linear", "yarn"))
    factor = reader.number("rope.scaling.factor", reader.number("rope.scale_linear", 1.0))
    original = reader.whole("rope.scaling.original_context_length", max_position)
    reader.only("rope.scaling.yarn_log_multiplier", 0.0)
    if "rope_freqs.weight" in source.shapes:
        divisors = source.read("rope_freqs.weight").astype(np.float64)
        rope = llama3_of_divisors(divisors, theta=theta, head_dim=head_dim)
        if rope is None:
            reader.problems.append("rope_freqs.weight is not a llama3 scaling; supported: llama3")
        return rope or RopeConfig()
    if kind == "yarn":
        # llama.cpp multiplies its attention factor by the one that yarn derives from `factor`.
        scale = reader.number("rope.scaling.attn_factor", reader.number("rope.scaling.yarn_attn_factor", 1.0))
        attention_factor = scale * (0.1 * math.log(factor) + 1.0) if factor > 1.0 else scale
        return RopeConfig(
            theta=theta,
            kind="yarn",
            factor=factor,
            original_max_position=original,
            attention_factor=attention_factor,
            beta_fast=reader.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=reader.number("rope.scaling.yarn_beta_slow", 1.0),
        )
    if kind == "linear" or factor != 1.0:
        return RopeConfig(theta=theta, kind="linear", factor=factor)
    return RopeConfig(theta=theta)


def llama3_of_divisors(divisors: np.ndarray, *, theta: float, head_dim: int) -> RopeConfig | None:
    """The llama3 scaling whose inverse frequencies are the unscaled ones divided by `divisors` `[H/2]`.

    The file keeps only the divisors. Low frequencies are divided by `factor`, high ones by 1, and between them
    1/divisor = (1 - s)/factor + s with s linear in the frequency: s = (original / wavelength - low) / (high - low).
    A common scale of (original, low, high) changes nothing, so low = 1 is chosen and the line gives the other two.
    With fewer than two divisors on the line, Llama 3.1's own 1, 4, 8192 are tried. None when no llama3 scaling fits.
    """
    if divisors.shape != (head_dim // 2,):
        return None
    unscaled, _ = inverse_frequencies(RopeConfig(theta=theta), head_dim)
    factor = float(divisors.max())
    candidates = [(8192, 4.0)]
    between = (divisors > 1.0 + 1e-6) & (divisors < factor * (1.0 - 1e-6))
    if between.sum() >= 2:
        smooth = (1.0 / divisors[between] - 1.0 / factor) / (1.0 - 1.0 / factor)
        slope, offset = np.polyfit(unscaled[between] / (2 * np.pi), smooth, 1)
        if offset < 0:
            high = 1.0 - 1.0 / float(offset)
            candidates.insert(0, (round(float(slope) * (high - 1.0)), high))
    for original, high in candidates:
        rope = RopeConfig(
            theta=theta,
            kind="llama3",
            factor=factor,
            low_freq_factor=1.0,
            high_freq_factor=high,
            original_max_position=original,
        )
        if np.allclose(unscaled / inverse_frequencies(rope, head_dim)[0], divisors, rtol=1e-3):
            return rope
    return None
