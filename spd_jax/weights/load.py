"""Opening a target model and loading it onto one device, tensor by tensor.

Knows files and one device. Placing the tensors of stages on ranks is `spd_jax.parallel`'s business, which takes them
from the same `TargetWeights`.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from spd_jax.config.model import ModelConfig
from spd_jax.files import read_object
from spd_jax.models.decoder import Decoder
from spd_jax.models.family import Family
from spd_jax.models.presets import preset_file
from spd_jax.models.reading import token_ids
from spd_jax.models.registry import family_of, family_of_gguf
from spd_jax.weights.errors import WeightsError
from spd_jax.weights.gguf import GgufFile
from spd_jax.weights.location import resolve
from spd_jax.weights.mapping import CheckpointWeights, TargetWeights, settle_head
from spd_jax.weights.safetensors import SafetensorsFolder

Progress = Callable[[int, int, str], None]
"""Called with (bytes done, bytes in all, name of the tensor just done)."""


def open_target(location: str | Path) -> TargetWeights:
    """The weights of a target model; reads descriptions and shapes, and no tensor but a head that should not be there.

    `location`: a folder with config.json and safetensors, a .gguf file, `package:name/file.gguf` for a data file of an
    installed package, or a hub id `org/name`.

    Raises:
        FileNotFoundError: nothing is there.
        ValueError: a config that is not supported, or (WeightsError) files that do not fit it.
    """
    path = resolve(location)
    if path.is_dir():
        return _open_folder(path)
    if path.suffix == ".gguf":
        source = GgufFile(path)
        family, form = family_of_gguf(source.metadata.get("general.architecture"), source.origin)
        config = form.read_config(source)
        return CheckpointWeights(config, source, form.recipes(config), ignored=family.ignored)
    raise WeightsError(f"{path}: expected a folder with config.json or a .gguf file")


def read_config(location: str | Path) -> ModelConfig:
    """What a target model is, from its description alone: also from a config.json without weights beside it, and of a
    preset by its name.

    Raises:
        FileNotFoundError: nothing is there.
        ValueError: a config that is not supported.
    """
    file = Path(location)
    preset = None if file.exists() else preset_file(str(location))
    path = preset or (file if file.is_file() else resolve(location))
    if path.suffix == ".json":
        return _read_config_file(path)[1]
    return _read_config_file(path / "config.json")[1] if path.is_dir() else open_target(path).config


def _read_config_file(file: Path) -> tuple[Family, ModelConfig]:
    fields = _read_json(file)
    if fields is None:
        files = sorted(path.name for path in file.parent.glob("*.gguf"))
        hint = f"; give the path of {files[0]} itself" if files else ""
        raise FileNotFoundError(f"{file.parent}: holds no {file.name}{hint}")
    family = family_of(fields.get("model_type"), str(file))
    return family, family.config_of(fields, str(file))


def _open_folder(folder: Path) -> TargetWeights:
    family, config = _read_config_file(folder / "config.json")
    generation = _read_json(folder / "generation_config.json") or {}
    try:
        ends = (*config.eos_token_ids, *token_ids(generation.get("eos_token_id")))
    except ValueError as error:
        raise ValueError(f"{folder / 'generation_config.json'}: eos_token_id: {error}") from error
    config = dataclasses.replace(config, eos_token_ids=tuple(dict.fromkeys(ends)))
    source = SafetensorsFolder(folder)
    config = settle_head(config, source)
    if source.left_out:
        warnings.warn(
            f"{folder}: only the text model is read; {len(source.left_out)} tensor(s) outside of it are left out "
            f"({source.left_out[0]}, ...)",
            stacklevel=3,
        )
    return CheckpointWeights(config, source, family.recipes(config), ignored=family.ignored)


def _read_json(path: Path) -> dict[str, Any] | None:
    return read_object(path) if path.exists() else None


def canonical_path(path: Iterable[Any]) -> str:
    """The canonical path of a flattened NNX parameter: ("layers", 0, "mlp", ...) -> "layers.0.mlp...."."""
    return ".".join(map(str, path))


def load_decoder(weights: TargetWeights, dtype: Any = jnp.float32, progress: Progress | None = None) -> Decoder:
    """The whole target on the default device in `dtype`.

    Streams tensor by tensor: beside the device's copy the host never holds more than one tensor.
    """
    dtype = jnp.dtype(dtype)
    abstract = nnx.eval_shape(lambda: Decoder(weights.config, dtype=dtype, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(abstract)
    wanted = {canonical_path(path): (path, variable) for path, variable in nnx.to_flat_state(state)}
    total = sum(variable.size * dtype.itemsize for _, variable in wanted.values())
    filled, done = {}, 0
    for name, (path, variable) in wanted.items():
        value = weights.tensor(name)
        if value.shape != variable.shape:
            raise WeightsError(f"{weights.origin}: {name} has shape {value.shape}, expected {variable.shape}")
        # A copy: the CPU device would otherwise alias the mapped file.
        filled[path] = variable.replace(jax.device_put(value.astype(dtype), may_alias=False))
        done += value.size * dtype.itemsize
        if progress is not None:
            progress(done, total, name)
    return nnx.merge(graphdef, nnx.from_flat_state(filled))
