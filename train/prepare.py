"""Prepare conversations for training: read, tokenise with the target's chat template, label, write.

    python train/prepare.py --config configs/smollm2_135m/prepare.yaml

A run that was stopped goes on where it was when it is started again with the same options. Exit code: 0; 2 if it could
not be done.
"""

from __future__ import annotations

import sys

from spd_jax.config.prepare import PrepareConfig
from spd_jax.script.run import run_script
from spd_jax.script.terminal import Terminal


def prepare(config: PrepareConfig, terminal: Terminal) -> int:
    """Prepare and report; returns the exit code."""
    from spd_jax.data.prepare import prepare as prepare_conversations
    from spd_jax.data.prepared import Counts

    with terminal.progress() as bars:

        def show(counts: Counts) -> None:
            text = f"{counts.rows:,} rows read, {counts.kept:,} conversations kept, {counts.tokens:,} tokens"
            bars.show("reading the sources", said=text)

        prepared = prepare_conversations(config, show)
    terminal.table(prepared.summary())
    terminal.lines(f"{prepared.path} {'was there already' if prepared.was_there else 'is ready'}")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run; returns the exit code."""
    return run_script(PrepareConfig, prepare, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
