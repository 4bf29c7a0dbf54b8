"""`.pt` files of published heads. PyTorch is only touched when one of these functions is called.

Files are read with `weights_only=True`, never otherwise: a pickle can run code. Knows the file's two entries,
`state_dict` and `config`, not what they hold.
"""

from __future__ import annotations

import contextlib
import pickle
import re
import uuid
import warnings
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from spd_jax.files import cause_of
from spd_jax.published.convert import PublishedHead
from spd_jax.weights.errors import listed


def read_torch_file(path: str | Path) -> PublishedHead:
    """The config and the tensors of a `.pt` file, on the host and in their own dtypes.

    Raises:
        ModuleNotFoundError: PyTorch is not installed.
        FileNotFoundError: no such file.
        ValueError: it is no checkpoint of torch.save, damaged, holds objects whose loading could run code, lacks one of
            its two entries, or holds tensors that are no plain arrays.
    """
    torch, path = import_torch(), Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file")
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path}: no file of torch.save, or cut short (expected a zip archive){cause_of(path)}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of other archives; they fail below
            stored = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle fails in any way; torch's advice to load unsafely is left out
        named = re.search(r"GLOBAL (\S+)", str(error)) if isinstance(error, pickle.UnpicklingError) else None
        if named is None:
            reason = f"{type(error).__name__}: {str(error).split('. ')[0]}"
            raise ValueError(f"{path}: damaged, or no file of torch.save with plain values only: {reason}") from error
        raise ValueError(
            f"{path}: refused: it holds an object of {named[1]}, and loading such a pickle can run any code. A head "
            "needs only tensors, numbers, texts and lists. If you trust the file, load it in the program that made it "
            "and save {'state_dict': ..., 'config': ...} again with only such values"
        ) from error
    for key in ("state_dict", "config"):
        if not isinstance(stored, dict) or not isinstance(stored.get(key), dict):
            found = f"entries {listed(sorted(map(str, stored)))}" if isinstance(stored, dict) else type(stored).__name__
            raise ValueError(f"{path}: expected a dict with state_dict and config, each a dict; found {found}")
    tensors, odd = {}, []
    for name, value in stored["state_dict"].items():
        array = _array(torch, value)
        if array is None:
            odd.append(f"{name} ({getattr(value, 'dtype', type(value).__name__)})")
        else:
            tensors[str(name)] = array
    if odd:
        raise ValueError(f"{path}: state_dict must hold plain tensors of numbers, found {listed(odd)}")
    return PublishedHead(dict(stored["config"]), tensors, str(path))


def write_torch_file(path: str | Path, head: PublishedHead) -> Path:
    """Write a `.pt` file, whole or not at all.

    Raises:
        ModuleNotFoundError: PyTorch is not installed.
        FileExistsError: something is there already; nothing is replaced.
    """
    torch, path = import_torch(), Path(path)
    if path.exists():
        raise FileExistsError(f"{path} exists and is not replaced; choose another name or remove it")
    state = OrderedDict((name, _tensor(torch, value)) for name, value in head.tensors.items())
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial-{uuid.uuid4().hex[:8]}")
    try:
        torch.save({"state_dict": state, "config": dict(head.config)}, partial)
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def import_torch(what: str = ".pt files need") -> Any:
    """PyTorch, which is not installed everywhere; `what` begins the reason why it has to be.

    Raises:
        ModuleNotFoundError: it is not; says how to install it.
    """
    try:
        import torch
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"PyTorch is not installed; {what} it: pip install 'spd-jax[import]'") from error
    return torch


def _array(torch: Any, value: Any) -> np.ndarray | None:
    """A tensor as an array, or None for what numpy cannot hold."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.is_meta or value.is_quantized:
        return None
    value = value.detach().contiguous()
    if value.dtype == torch.bfloat16:  # numpy has no such dtype of its own
        return value.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    with contextlib.suppress(TypeError):
        return value.numpy()
    return None


def _tensor(torch: Any, value: np.ndarray) -> Any:
    if value.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(value.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(value.copy())
