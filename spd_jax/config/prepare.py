"""What a user asks of preparing conversations: the fields of a YAML file and of the command line, and nothing else.

Values only; whether sources and target are there is for who uses them to find out.
"""

from __future__ import annotations

import dataclasses
import math

from spd_jax.config.run import at_least


@dataclasses.dataclass(frozen=True)
class PrepareConfig:
    """One run of train/prepare.py.

    Args:
        target: the model whose tokenizer and chat template are used: a folder, a .gguf file, package:name/file.gguf, or
            a hub id org/name.
        out: folder for the prepared data.
        sources: where conversations come from, one after the other: files (.parquet, .json, .jsonl, the last two also
            with .gz), package:name/file, folders written with save_to_disk, or hub names org/name or org/name:config.
        split: of sources that have several; left out, their only one or train.
        max_length: tokens of a conversation at most; what is longer is cut there.
        min_supervised: conversations with fewer tokens to learn (after cutting) are skipped.
        limit: stop after so many conversations.
        skip_invalid: skip and count lines that cannot be parsed; otherwise the first is an error.
        shuffle_seed: put the conversations in a random order; left out, they stay in the order of the sources.
        held_out: keep some apart for evaluation: below 1 a share of them, from 1 on a number. They are chosen by a hash
            of what was said before the first answer, so the same openings stay together, whatever else is prepared.
        overwrite: replace what is in the folder, even if it was prepared from something else.
    """

    target: str
    out: str
    sources: tuple[str, ...] = ()
    split: str | None = None
    max_length: int = 2048
    min_supervised: int = 1
    limit: int | None = None
    skip_invalid: bool = False
    shuffle_seed: int | None = None
    held_out: float = 0.0
    overwrite: bool = False

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError("no source: give --sources FILE or NAME (one or more)")
        for name, least in (("max_length", 2), ("min_supervised", 1), ("limit", 1), ("shuffle_seed", 0)):
            at_least(least, name, getattr(self, name))
        whole = self.held_out >= 1 and float(self.held_out).is_integer()
        if not (math.isfinite(self.held_out) and (0 <= self.held_out < 1 or whole)):
            raise ValueError(f"held_out must be a share in [0, 1) or a whole number from 1 on, found {self.held_out}")
