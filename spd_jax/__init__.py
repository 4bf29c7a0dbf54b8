"""Speculative Pipeline Decoding (SPD, arXiv 2605.30852) in JAX.

The target model is cut into pipeline stages, and a small draft reads what the stages hold to predict the next token, so
that one sequence keeps every stage busy. `open_pipeline` is the way in for programs:

    pipeline = spd_jax.open_pipeline(target, head)
    print(pipeline.generate("What is the capital of France?").text)

Everything else is imported from the subpackages. Importing this file imports none of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spd_jax.generation.pipeline import GeneratedText, Pieces, TextPipeline, open_pipeline

__version__ = "0.1.0"
__all__ = ["GeneratedText", "Pieces", "TextPipeline", "__version__", "open_pipeline"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("spd_jax.generation.pipeline"), name)
