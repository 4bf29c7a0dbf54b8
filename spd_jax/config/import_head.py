"""What a user asks of infer/import_head.py: the fields of its command line, and nothing else.

Values only; whether files and target fit is checked by who opens them.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

FinalAnchor = Literal["before_norm", "after_norm"]


@dataclasses.dataclass(frozen=True)
class ImportHeadConfig:
    """One run of infer/import_head.py: a published head into a head folder, or the other way.

    Args:
        target: the target model that the head belongs to: a folder, a .gguf file, package:name/file.gguf or a hub id.
        checkpoint: the .pt file to import.
        out: the head folder to write; an older head there is replaced.
        export: the .pt file to write; an existing file is never replaced.
        head: the head folder to export.
        final_anchor: only to import a head with an anchor at the target's last hidden state, whose file does not say
            which it was trained on: before_norm for that state as the last layer leaves it, after_norm for the state
            after the final norm (such a head cannot be used).
    """

    target: str
    checkpoint: str | None = None
    out: str | None = None
    export: str | None = None
    head: str | None = None
    final_anchor: FinalAnchor | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("checkpoint", "out", "export", "head") if getattr(self, name) is not None]
        if given not in (["checkpoint", "out"], ["export", "head"]):
            raise ValueError(
                "give --checkpoint FILE.pt and --out FOLDER to import a head, or --export FILE.pt and --head FOLDER to "
                f"export one, found {' and '.join('--' + name for name in given) or 'neither'}"
            )
        if self.export is not None and self.final_anchor is not None:
            raise ValueError("final_anchor is for imports; a head folder is always trained before the norm")
