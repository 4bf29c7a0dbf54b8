"""Heads on disk: a folder with `head.safetensors` and `config.json`.

Tensors are named by their paths in `SpeculationModule`. Loading compares the head with the target it is meant for and
refuses whatever differs; `spd_jax.speculation.manifest` says what `config.json` holds.

This module does not know other people's formats (`.pt` heads), optimiser state or meshes, and never makes up the digest
of a target: who opens the target's files says what they are.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from flax import nnx

from spd_jax.config.model import ModelConfig
from spd_jax.files import cause_of
from spd_jax.plan import StagePlan
from spd_jax.speculation.manifest import (
    CONFIG_FILE,
    FORMAT,
    STORED_DTYPES,
    HeadManifest,
    is_manifest,
    manifest_text,
    read_manifest,
)
from spd_jax.speculation.module import HeadConfig, SpeculationModule

TENSOR_FILE = "head.safetensors"
SAFETENSORS_DTYPE = {"float32": "F32", "bfloat16": "BF16"}


def file_digest(path: str | os.PathLike[str]) -> str:
    """sha256 of a file's bytes in hexadecimal: the digest of a target's or a tokenizer's description."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def named_tensors(module: SpeculationModule) -> dict[str, jax.Array]:
    """A head's parameters by their names in the file: NNX paths joined with dots (`layers.0.attention.qkv.weight`)."""
    return {name: param[...] for name, param in _named_params(module).items()}


def _named_params(module: SpeculationModule) -> dict[str, nnx.Param]:
    return {".".join(map(str, path)): param for path, param in nnx.to_flat_state(nnx.state(module, nnx.Param))}


def save_head(
    path: str | os.PathLike[str],
    module: SpeculationModule,
    plan: StagePlan,
    *,
    target_digest: str,
    tokenizer_digest: str | None,
    target_name: str,
    training: Mapping[str, Any] | None = None,
) -> Path:
    """Write a head folder, all of it or nothing: it is written beside `path` and then renamed.

    An older head at `path` is replaced.

    Args:
        plan: the plan the head was made for; its anchors and number of draft layers are the head's.
        training: anything JSON can hold, for the reader's eyes.

    Raises:
        ValueError: plan and head differ, a parameter is not finite, the parameters are not all float32 or all bfloat16,
            or `path` holds something that is no head.
        TypeError: `training` holds something that JSON cannot.
    """
    path = Path(path).resolve()  # through a link: the folder it points to is replaced, not the link
    head = module.config
    if (plan.anchors, plan.num_draft_layers) != (head.anchors, head.num_layers):
        raise ValueError(
            f"{path}: the head has anchors {list(head.anchors)} and {head.num_layers} draft layers, "
            f"the plan {list(plan.anchors)} and {plan.num_draft_layers}"
        )
    tensors = {name: np.asarray(value) for name, value in named_tensors(module).items()}
    dtypes = sorted({str(value.dtype) for value in tensors.values()})
    if len(dtypes) != 1 or dtypes[0] not in STORED_DTYPES:
        raise ValueError(f"{path}: parameters must be all of one of {list(STORED_DTYPES)}, found {dtypes}")
    for name, value in tensors.items():
        _check_finite(path, name, value)
    manifest = HeadManifest(head, plan, target_name, target_digest, tokenizer_digest, dtypes[0], dict(training or {}))
    text = manifest_text(manifest)
    if path.exists() and not _is_head_or_empty(path):
        raise ValueError(f"{path} exists and is no speculation head; choose another folder or remove it")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.parent / f".{path.name}.partial-{uuid.uuid4().hex[:8]}"
    partial.mkdir()
    try:
        safetensors.numpy.save_file(tensors, partial / TENSOR_FILE, metadata={"format": FORMAT})
        (partial / TENSOR_FILE).chmod(0o644)  # safetensors lets nobody but the owner read what it writes
        (partial / CONFIG_FILE).write_text(text, encoding="utf-8")
        for file in (partial / TENSOR_FILE, partial / CONFIG_FILE, partial):
            _flush_to_disk(file)
        _put_in_place(partial, path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return path


def _is_head_or_empty(path: Path) -> bool:
    if not path.is_dir():
        return False
    names = {entry.name for entry in path.iterdir()}
    return not names or (names <= {TENSOR_FILE, CONFIG_FILE} and is_manifest(path / CONFIG_FILE))


def _flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _put_in_place(partial: Path, path: Path) -> None:
    """Rename over `path`. A folder cannot be renamed over another with files, so an old one steps aside first."""
    if not path.exists():
        partial.rename(path)
        return
    aside = partial.with_name(partial.name.replace(".partial-", ".replaced-"))
    path.rename(aside)
    try:
        partial.rename(path)
    except OSError:
        aside.rename(path)
        raise
    shutil.rmtree(aside)


def load_head(
    path: str | os.PathLike[str],
    *,
    target_config: ModelConfig,
    target_digest: str,
    tokenizer_digest: str | None,
    dtype: Any,
) -> tuple[SpeculationModule, HeadManifest]:
    """Read a head for a target, or say why it is not one for it.

    Args:
        tokenizer_digest: None skips the comparison (a target without its tokenizer at hand).
        dtype: float32 or bfloat16, whatever the stored dtype is.

    Raises:
        ValueError: the path, what was found and what was expected: another target, tokenizer, number of layers, hidden
            or vocabulary size; tensors missing, too many, of another shape or dtype or not finite; a file missing, cut
            short or of another format; and everything that `read_manifest` refuses.
    """
    path, dtype = Path(path), jnp.dtype(dtype)
    if str(dtype) not in STORED_DTYPES:
        raise ValueError(f"{path}: a head can be loaded as {list(STORED_DTYPES)}, found dtype {dtype}")
    manifest = read_manifest(path)
    refuse_other_target(
        path,
        manifest,
        target_config=target_config,
        target_digest=target_digest,
        tokenizer_digest=tokenizer_digest,
    )
    return _read_module(path / TENSOR_FILE, manifest.head, manifest.dtype, dtype), manifest


def refuse_other_target(
    path: str | os.PathLike[str],
    manifest: HeadManifest,
    *,
    target_config: ModelConfig,
    target_digest: str,
    tokenizer_digest: str | None,
) -> None:
    """Raise when a head is not one for this target; `path` is for the message.

    Raises:
        ValueError: everything that differs, what was found and what was expected.
    """
    head, plan = manifest.head, manifest.plan
    pairs = [
        ("digest of the target's config", manifest.target_digest, target_digest),
        ("hidden size", head.layer.hidden_size, target_config.hidden_size),
        ("vocabulary size", head.vocab_size, target_config.vocab_size),
        ("number of target layers", plan.num_layers, target_config.num_layers),
    ]
    if tokenizer_digest is not None:
        pairs.insert(1, ("digest of the tokenizer", manifest.tokenizer_digest, tokenizer_digest))
    differ = [f"{what} {found}, expected {wanted}" for what, found, wanted in pairs if found != wanted]
    if differ:
        raise ValueError(
            f"{path}: this head was made for {manifest.target_name!r}, not for this target: found " + "; ".join(differ)
        )


def _check_finite(path: Path, name: str, value: np.ndarray) -> None:
    bad = int(value.size - np.count_nonzero(np.isfinite(value)))
    if bad:
        raise ValueError(f"{path}: tensor {name} holds {bad} values that are not finite, expected none")


def _read_module(file: Path, config: HeadConfig, stored: str, dtype: Any) -> SpeculationModule:
    """The module from its tensors, each checked by name, shape, dtype and finite values before anything is used."""
    if not file.is_file():
        raise ValueError(f"{file} is missing" + (cause_of(file) if file.exists() else ""))
    try:
        module = nnx.eval_shape(lambda: SpeculationModule(config, dtype=dtype, rngs=nnx.Rngs(0)))
    except (ArithmeticError, TypeError, ValueError) as error:
        raise ValueError(f"{file.parent / CONFIG_FILE}: describes no module: {error}") from error
    params = _named_params(module)
    try:
        with safetensors.safe_open(file, framework="numpy") as tensors:
            found = set(tensors.keys())
            if found != params.keys():
                missing, extra = sorted(params.keys() - found), sorted(found - params.keys())
                raise ValueError(f"{file}: missing tensors {missing}, unexpected tensors {extra}")
            for name, param in params.items():
                view = tensors.get_slice(name)
                if tuple(view.get_shape()) != param.shape:
                    raise ValueError(
                        f"{file}: tensor {name} has shape {tuple(view.get_shape())}, expected {param.shape}"
                    )
                if view.get_dtype() != SAFETENSORS_DTYPE[stored]:
                    raise ValueError(
                        f"{file}: tensor {name} has dtype {view.get_dtype()}, expected {SAFETENSORS_DTYPE[stored]} "
                        f"as {CONFIG_FILE} says {stored}"
                    )
                value = tensors.get_tensor(name)
                _check_finite(file, name, value)
                param.set_value(jnp.asarray(value).astype(dtype))
    except safetensors.SafetensorError as error:
        raise ValueError(f"{file} is cut short or no safetensors file: {error}{cause_of(file)}") from error
    return module
