"""A model's hidden states and logits beside those of transformers, in float32 on the CPU: which layer differs first.

PyTorch is only touched when one of these functions is called. Hidden state index l is the
output of layer l, index 0 the embedding; the last one is compared after the final norm, as transformers gives it.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from spd_jax.config.check_model import CheckModelConfig
from spd_jax.config.model import ModelConfig
from spd_jax.defaults import jit
from spd_jax.parallel.platform import find_devices
from spd_jax.published.torch_file import import_torch
from spd_jax.weights.load import load_decoder, open_target
from spd_jax.weights.location import resolve
from spd_jax.weights.tokenizer import load_tokenizer


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far two arrays are apart: the largest difference, and the spread of theirs."""

    what: str
    largest: float
    spread: float

    @property
    def share(self) -> float:
        """The largest difference as a share of the spread; infinite where one of them is not finite."""
        return self.largest / max(self.spread, 1e-30) if np.isfinite(self.largest) else float("inf")


@dataclasses.dataclass(frozen=True)
class ModelCheck:
    """All hidden states and the logits, in order."""

    differences: tuple[Difference, ...]
    tolerance: float

    @property
    def first(self) -> Difference | None:
        """The first that is more than rounding."""
        return next((found for found in self.differences if not found.share <= self.tolerance), None)

    def lines(self) -> list[str]:
        """A table, and what it says."""
        width = max(len(found.what) for found in self.differences)
        rows = [f"{'compared':<{width}}  largest difference  of the spread"]
        for found in self.differences:
            mark = "" if found.share <= self.tolerance else "  differs"
            rows.append(f"{found.what:<{width}}  {found.largest:>18.2e}  {found.share:>13.1e}{mark}")
        first = self.first
        if first is None:
            return [*rows, f"equal to transformers: no difference above {self.tolerance:g} of the spread"]
        return [*rows, f"differs from transformers, first in: {first.what}"]


def check_model(config: CheckModelConfig) -> ModelCheck:
    """Run a model here and in transformers and compare.

    Raises:
        ModuleNotFoundError: PyTorch is not installed.
        FileNotFoundError: there is no such model, or a text was given and there is no tokenizer.
        ValueError: a model that is not supported or damaged, or ids outside of its vocabulary.
        RuntimeError: as `find_devices`.
    """
    torch = import_torch("models of transformers need")
    weights = open_target(config.target)
    ids = config.prompt_ids or load_tokenizer(config.target).encode(config.prompt)
    outside = [token for token in ids if not 0 <= token < weights.config.vocab_size]
    if outside:
        raise ValueError(f"prompt_ids must lie in 0..{weights.config.vocab_size - 1}, found {outside}")
    find_devices()
    hiddens, logits = _ours(load_decoder(weights, jnp.float32), np.asarray([ids], np.int32))
    with torch.no_grad():
        model = _transformers_model(resolve(config.target))
        theirs = model(torch.tensor([ids]), output_hidden_states=True)
    names = [_layer_name(weights.config, index) for index in range(len(hiddens))]
    pairs = zip([*names, "logits"], [*hiddens, logits], [*theirs.hidden_states, theirs.logits], strict=True)
    found = tuple(_difference(what, ours, other.float().numpy()) for what, ours, other in pairs)
    return ModelCheck(found, config.tolerance)


def _ours(decoder: nnx.Module, ids: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    graphdef, state = nnx.split(decoder)

    def run(state: Any, ids: jax.Array) -> Any:
        model: Any = nnx.merge(graphdef, state)
        hiddens = model.hidden_states(ids)
        return [*hiddens[:-1], model.final_norm(hiddens[-1])], model.logits(hiddens[-1])

    hiddens, logits = jax.device_get(jit(run)(state, jnp.asarray(ids)))
    return hiddens, logits


def _transformers_model(path: Path) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    options: dict[str, Any] = {"dtype": "float32", "attn_implementation": "eager"}
    if path.is_file():
        options["gguf_file"] = path.name
    try:
        return AutoModelForCausalLM.from_pretrained(path.parent if path.is_file() else path, **options).eval()
    except Exception as error:  # of any kind, where a config holds what transformers does not expect
        raise ValueError(f"{path}: transformers cannot open it ({type(error).__name__}: {error})") from error


def _difference(what: str, ours: np.ndarray, theirs: np.ndarray) -> Difference:
    if ours.shape != theirs.shape:
        raise ValueError(f"{what}: ours has shape {ours.shape}, that of transformers {theirs.shape}")
    return Difference(what, float(np.abs(ours - theirs).max()), float(theirs.std()))


def _layer_name(config: ModelConfig, index: int) -> str:
    if index == 0:
        return "embedding"
    name = f"layer {index - 1} ({config.layers[index - 1].describe()})"
    return name if index < config.num_layers else f"{name} and final norm"
