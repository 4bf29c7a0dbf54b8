"""Which families of target models there are."""

from __future__ import annotations

from spd_jax.models.family import Family
from spd_jax.models.llama import LLAMA

FAMILIES: tuple[Family, ...] = (LLAMA,)


def family_of(model_type: object, origin: str) -> Family:
    """The family of a Hugging Face `model_type`.

    Raises:
        ValueError: it is not one of the supported.
    """
    for family in FAMILIES:
        if family.name == model_type:
            return family
    supported = ", ".join(sorted(family.name for family in FAMILIES))
    raise ValueError(f"{origin}: model_type {model_type!r} is not supported; supported: {supported}")


def family_of_gguf(architecture: object, origin: str) -> Family:
    """The family of a GGUF file's `general.architecture`.

    Raises:
        ValueError: it is not one of the supported.
    """
    for family in FAMILIES:
        if family.gguf_architecture == architecture:
            return family
    supported = ", ".join(sorted({family.gguf_architecture for family in FAMILIES}))
    raise ValueError(f"{origin}: GGUF architecture {architecture!r} is not supported; supported: {supported}")
