"""Published heads into head folders and back: opens the target, its tokenizer and both formats.

Knows where things are and what belongs to whom; what the formats mean is `spd_jax.published.convert`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from spd_jax.config.import_head import FinalAnchor, ImportHeadConfig
from spd_jax.parallel.platform import find_devices
from spd_jax.published.convert import from_published, to_published
from spd_jax.published.torch_file import read_torch_file, write_torch_file
from spd_jax.speculation.checkpoint import load_head, save_head
from spd_jax.speculation.manifest import read_manifest
from spd_jax.speculation.module import HeadConfig
from spd_jax.weights.load import open_target
from spd_jax.weights.mapping import TargetWeights, config_digest
from spd_jax.weights.tokenizer import load_tokenizer

# The manifest's entry under `training` where an export finds what the published config said besides.
PUBLISHED = "published"


def exchange_head(config: ImportHeadConfig) -> str:
    """Import or export a head as the config says; returns what was written, in a line.

    Raises:
        ModuleNotFoundError: PyTorch is not installed.
        OSError: a file is not there, or one that would be written is.
        ValueError: a file that is damaged or refused, or a head that does not fit the target or the format.
        RuntimeError: as `find_devices`.
    """
    find_devices()
    if config.checkpoint is not None and config.out is not None:
        return import_head(config.checkpoint, config.target, config.out, final_anchor=config.final_anchor)
    assert config.head is not None
    assert config.export is not None
    return export_head(config.head, config.target, config.export)


def import_head(
    checkpoint: str | Path, target: str, out: str | Path, *, final_anchor: FinalAnchor | None = None
) -> str:
    """Write a published head (`.pt`) as a head folder of a target; raises as `exchange_head` and `save_head` do."""
    published = read_torch_file(checkpoint)
    weights = open_target(target)
    head = from_published(published, weights.config, final_anchor=final_anchor)
    path = save_head(
        out,
        head.module,
        head.plan,
        target_digest=config_digest(weights),
        tokenizer_digest=_tokenizer_digest(target),
        target_name=target,
        training={PUBLISHED: dict(head.remembered)},
    )
    return f"wrote {path}: a head for {target}, {head.plan.describe()}"


def export_head(head: str | Path, target: str, file: str | Path) -> str:
    """Write a head folder as a published head (`.pt`); raises as `exchange_head` and `load_head` do."""
    weights, stored = open_target(target), read_manifest(head)
    module, manifest = load_head(
        head,
        target_config=weights.config,
        target_digest=config_digest(weights),
        tokenizer_digest=_tokenizer_digest(target),
        dtype=stored.dtype,
    )
    remembered = manifest.training.get(PUBLISHED)
    if remembered is not None and not isinstance(remembered, dict):
        raise ValueError(f"{head}: training.{PUBLISHED} in its config.json is {remembered!r}, expected an object")
    published = to_published(
        module,
        manifest.plan,
        weights.config,
        target_name=manifest.target_name,
        origin=str(head),
        remembered=remembered,
        target_rows=_target_rows(weights, manifest.head) if manifest.head.lm_head == "target" else None,
    )
    path = write_torch_file(file, published)
    return f"wrote {path}: {len(published.tensors)} tensors of a head for {target}"


def _tokenizer_digest(target: str) -> str | None:
    try:
        return load_tokenizer(target).digest
    except FileNotFoundError:  # the target itself is there, so it comes without a tokenizer
        return None


def _target_rows(weights: TargetWeights, head: HeadConfig) -> np.ndarray:
    rows = weights.tensor("embedding" if weights.config.tie_embeddings else "head")
    return rows if head.draft_ids is None else rows[np.asarray(head.draft_ids)]
