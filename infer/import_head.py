"""Turn a head that the published code made (a .pt file, version 11) into a head folder, or a head folder into one.

    python infer/import_head.py --checkpoint FILE.pt --target MODEL --out FOLDER
    python infer/import_head.py --export FILE.pt --head FOLDER --target MODEL

Exit code: 0; 2 if it could not be done, and then nothing is written. Needs PyTorch: pip install 'spd-jax[import]'.
"""

from __future__ import annotations

import sys

from spd_jax.config.import_head import ImportHeadConfig
from spd_jax.script.run import run_script
from spd_jax.script.terminal import Terminal


def import_head(config: ImportHeadConfig, terminal: Terminal) -> int:
    """Import or export; returns the exit code."""
    from spd_jax.published.exchange import exchange_head

    terminal.lines(exchange_head(config))
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run; returns the exit code."""
    return run_script(ImportHeadConfig, import_head, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
