"""Files that are whole or not there. Knows nothing of what is in them."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_whole(path: str | Path, data: bytes) -> None:
    """Write a file beside its place and rename it, so that nobody ever sees half of it.

    A killed process may leave `.NAME.*.partial` beside it.
    """
    path = Path(path)
    descriptor, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".partial")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        Path(partial).chmod(0o644)
        Path(partial).replace(path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
