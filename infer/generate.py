"""Decode prompts with a speculative pipeline, and with --compare true beside plain decoding of the same model.

    python infer/generate.py --config configs/smollm2_135m/generate.yaml --prompt "What is the capital of France?"

Exit code: 0; 1 if ids differ from the autoregressive ones and no near-tie explains it; 2 if the run could not be done.
"""

from __future__ import annotations

import sys

from spd_jax.config.run import GenerateConfig
from spd_jax.script.run import run_script
from spd_jax.script.terminal import Terminal


def generate(config: GenerateConfig, terminal: Terminal) -> int:
    """Check, load, decode and report; returns the exit code."""
    from spd_jax.generation.run import Run, load_decoders, prepare

    job = prepare(config, terminal.piped)
    if not job.engine.leads:
        terminal.silence()
    terminal.lines(job.describe())
    with terminal.progress() as bars:
        run = Run(job, load_decoders(job, bars.load))
    for text in run.stream():
        terminal.write(text)
    written = run.write_files()
    terminal.lines("", run.report.text(), *(f"wrote {path}" for path in written))
    return 1 if run.report.differs else 0


def main(arguments: list[str] | None = None) -> int:
    """Run; returns the exit code."""
    return run_script(GenerateConfig, generate, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
