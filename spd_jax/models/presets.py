"""Descriptions of published models that come along: their public config.json, sizes to plan with, no weights.

The counts of a layer's heads of Qwen3.5 and all sizes are those that public checkpoints and training scripts give
(huggingface.co/Qwen, huggingface.co/meta-llama, huggingface.co/HuggingFaceTB); keys that change no size are left out.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path


def preset_names() -> tuple[str, ...]:
    """Names of the models, as their files are called."""
    return tuple(sorted(file.stem for file in _folder().glob("*.json")))


def preset_file(name: str) -> Path | None:
    """The config.json of a preset; None if there is none of this name."""
    file = _folder() / f"{name}.json"
    return file if name in preset_names() else None


def _folder() -> Path:
    return Path(str(resources.files("spd_jax.models") / "configs"))
