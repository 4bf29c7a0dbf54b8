"""Which families of target models there are."""

from __future__ import annotations

from spd_jax.models.family import Family, GgufFormat
from spd_jax.models.gemma import GEMMA2, GEMMA3
from spd_jax.models.llama import LLAMA
from spd_jax.models.mistral import MISTRAL
from spd_jax.models.qwen import QWEN2, QWEN3
from spd_jax.models.qwen3_5 import QWEN3_5
from spd_jax.models.qwen_moe import QWEN3_5_MOE, QWEN3_MOE

FAMILIES: tuple[Family, ...] = (LLAMA, QWEN2, QWEN3, QWEN3_MOE, QWEN3_5, QWEN3_5_MOE, MISTRAL, GEMMA2, GEMMA3)


def family_of(model_type: object, origin: str) -> Family:
    """The family of a Hugging Face `model_type`.

    Raises:
        ValueError: it is not one of the supported.
    """
    for family in FAMILIES:
        if model_type in (family.name, *family.also):
            return family
    supported = ", ".join(sorted(name for family in FAMILIES for name in (family.name, *family.also)))
    raise ValueError(f"{origin}: model_type {model_type!r} is not supported; supported: {supported}")


def family_of_gguf(architecture: object, origin: str) -> tuple[Family, GgufFormat]:
    """The family of a GGUF file's `general.architecture`, and how the file holds it.

    Raises:
        ValueError: it is not one of the supported.
    """
    formats = {family.gguf.architecture: (family, family.gguf) for family in FAMILIES if family.gguf is not None}
    if isinstance(architecture, str) and architecture in formats:
        return formats[architecture]
    supported = ", ".join(sorted(formats))
    raise ValueError(f"{origin}: GGUF architecture {architecture!r} is not supported; supported: {supported}")
