"""Turn a head that the published code made (a .pt file, version 11) into a head folder, or a head folder into one.

    python infer/import_head.py --checkpoint FILE.pt --target MODEL --out FOLDER
    python infer/import_head.py --export FILE.pt --head FOLDER --target MODEL

Exit code: 0; 2 if it could not be done, and then nothing is written. Needs PyTorch: pip install 'spd-jax[import]'.
"""

from __future__ import annotations

import sys

from spd_jax.config.command_line import parse_command_line
from spd_jax.config.import_head import ImportHeadConfig
from spd_jax.published.exchange import exchange_head


def main(arguments: list[str] | None = None) -> int:
    """Run; returns the exit code."""
    try:
        print(exchange_head(parse_command_line(ImportHeadConfig, arguments, __doc__ or "")))
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
