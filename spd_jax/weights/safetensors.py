"""Tensors of a Hugging Face folder: one safetensors file, or shards with an index; mapped, read one at a time.

Knows file names, prefixes and dtypes, but no model: what the tensors mean is in `spd_jax.models`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from spd_jax.files import cause_of, read_object
from spd_jax.models.shapes import Shape
from spd_jax.weights.errors import WeightsError, listed

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

# Where multimodal and other wrappers keep the text model whose keys are `model.*` elsewhere.
TEXT_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "backbone.", "model.", "")
_EMBEDDINGS = ("embed_tokens.weight", "embeddings.weight")


class SafetensorsFolder:
    """Tensors of a folder as a `TensorSource`, under the usual names (`model.embed_tokens.weight`, ...).

    `left_out` are the keys outside of the text model, of a multimodal checkpoint.

    Raises:
        WeightsError: no weights, a shard that is missing or damaged, an index that does not fit its shards, or keys
            under an unknown prefix.
    """

    def __init__(self, folder: Path):
        self.origin = str(folder)
        self._shapes: dict[str, Shape] = {}
        self._dtypes: dict[str, str] = {}
        self._where: dict[str, tuple[Any, str]] = {}
        found = _files(folder)
        names = usual_names([key for keys in found.values() for key in keys], self.origin)
        self.left_out = sorted(key for keys in found.values() for key in keys if key not in names)
        for path, keys in found.items():
            opened = _open(path)
            for key in keys:
                if key not in names:
                    continue
                view = opened.get_slice(key)
                name = names[key]
                self._shapes[name] = tuple(view.get_shape())
                self._dtypes[name] = view.get_dtype()
                self._where[name] = (opened, key)

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Shape of every tensor."""
        return self._shapes

    @property
    def dtypes(self) -> Mapping[str, str]:
        """Safetensors' name of the dtype of every tensor, such as BF16."""
        return self._dtypes

    def read(self, name: str) -> np.ndarray:
        """One tensor on the host in its stored dtype (bfloat16 as ml_dtypes.bfloat16)."""
        opened, key = self._where[name]
        return opened.get_tensor(key)


def usual_names(keys: Sequence[str], origin: str) -> dict[str, str]:
    """Keys as found -> the usual names, without the nesting of the text model; keys outside of it are left out.

    Raises:
        WeightsError: there is no embedding under a known prefix.
    """
    present = set(keys)
    nested = [prefix for prefix in TEXT_PREFIXES if any(prefix + name in present for name in _EMBEDDINGS)]
    if not nested:
        first = ", ".join(sorted(keys)[:5]) or "none"
        known = ", ".join(repr(prefix + _EMBEDDINGS[0]) for prefix in TEXT_PREFIXES)
        raise WeightsError(f"{origin}: found no token embedding; first keys found: {first}; looked for {known}")
    prefix = nested[0]
    names = {}
    for key in keys:
        if any(key.startswith(f"{before}lm_head.") for before in TEXT_PREFIXES):
            names[key] = "lm_head." + key.rsplit("lm_head.", 1)[1]
        elif key.startswith(prefix):
            names[key] = "model." + _usual_tail(key.removeprefix(prefix))
        elif prefix == "model.":  # not nested: whatever else there is has to be accounted for
            names[key] = key
    return names


def _usual_tail(tail: str) -> str:
    return {"embeddings.weight": "embed_tokens.weight", "norm_f.weight": "norm.weight"}.get(tail, tail)


def _files(folder: Path) -> dict[Path, list[str]]:
    """The files to read and the keys to take from each; an index wins over whatever else lies in the folder."""
    index = folder / INDEX
    if index.exists():
        return _indexed(index)
    single = folder / SINGLE
    if single.exists():
        return {single: list(_open(single).keys())}
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    others = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for path in folder.glob(pattern))
    hint = f"; found {', '.join((shards + others)[:5])}" if shards or others else ""
    if shards:
        hint += f": shards need {INDEX}"
    elif others:
        hint += ": save the model as safetensors, or give the path of the .gguf file itself"
    raise WeightsError(f"{folder}: found neither {SINGLE} nor {INDEX}{hint}")


def _indexed(index: Path) -> dict[Path, list[str]]:
    try:
        weight_map: Any = read_object(index).get("weight_map")
    except ValueError as error:
        raise WeightsError(str(error)) from error
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise WeightsError(f"{index}: not a safetensors index: weight_map should name the file of each tensor")
    wanted: dict[str, list[str]] = {}
    for key, shard in weight_map.items():
        wanted.setdefault(shard, []).append(key)
    missing = [shard for shard in sorted(wanted) if not (index.parent / shard).exists()]
    if missing:
        raise WeightsError(f"{index}: names files that are not there: {listed(missing)}")
    stale = []
    for shard, keys in wanted.items():
        held = set(_open(index.parent / shard).keys())
        stale += [f"{key} in {shard}" for key in keys if key not in held]
    if stale:
        raise WeightsError(f"{index}: stale index, it names tensors that their files do not hold: {listed(stale)}")
    return {index.parent / shard: keys for shard, keys in wanted.items()}


def _open(path: Path) -> Any:
    try:
        return safe_open(str(path), framework="numpy")
    except (SafetensorError, OSError) as error:
        size = path.stat().st_size
        raise WeightsError(f"{path}: damaged or truncated ({size} bytes): {error}{cause_of(path)}") from error
