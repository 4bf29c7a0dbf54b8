"""What a user sees of a run: lines of text for events, a PNG of the curves, TensorBoard events.

Makes text and files; printing is the script's business.
"""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from types import TracebackType
from typing import Any

from spd_jax.files import write_whole
from spd_jax.training.checkpoints import BEST, BOARD, CURVES, LAST, LOG_FILE, Log
from spd_jax.training.curves import draw_curves, open_board
from spd_jax.training.distill import Distillation
from spd_jax.training.trainer import Event

SECONDS_BETWEEN_LINES = 30.0


class Reporter:
    """Follows one run; as a context manager, since the curves are drawn even if training is stopped."""

    def __init__(self, run: Distillation):
        self._path, self._plan, self._config = run.path, run.plan, run.config
        self._board: Any = open_board(run.path / BOARD) if run.config.tensorboard else None
        self._last_line = -SECONDS_BETWEEN_LINES

    def __enter__(self) -> Reporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._board is not None:
            self._board.close()
        log = Log(self._path / LOG_FILE).read()
        if any(line["kind"] == "step" for line in log):
            title = f"{Path(self._config.target).name}, n = {self._plan.num_stages}, Ls = {self._plan.num_draft_layers}"
            try:
                write_whole(self._path / CURVES, draw_curves(log, title))
            except (ArithmeticError, LookupError, TypeError, ValueError) as error:  # a log that others have edited
                text = f"the curves of {self._path / LOG_FILE} cannot be drawn ({type(error).__name__}: {error})"
                warnings.warn(text, stacklevel=2)

    def line(self, event: Event) -> str | None:
        """A line worth printing: every look at held-out data, a step from time to time."""
        if self._board is not None:
            for name, value in event.values.items():
                self._board.add_scalar(f"{event.kind}/{name}", value, event.step)
        values = event.values
        if event.kind == "evaluation":
            return (
                f"step {event.step}: held out: top-1 {values['top1']:.4f}, sum min(p, q) {values['acceptance']:.4f}, "
                f"coverage {values['coverage']:.4f}, loss {values['draft_loss']:.4f}, "
                f"projected S0 {values['projected_s0']:.3f}"
            )
        if event.kind == "decoding":
            figures = ", ".join(f"{name} {value:.3f}" for name, value in values.items())
            return f"step {event.step}: decoded: {figures or 's0 -, no answer has two tokens'}"
        if event.kind == "step" and time.monotonic() - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            return f"step {event.step}: {self.status(event)}"
        return None

    def status(self, event: Event) -> str:
        """Loss, pace and time left; empty for other events."""
        if event.kind != "step":
            return ""
        values, (minutes, seconds) = event.values, divmod(int(event.values["eta_seconds"]), 60)
        return (
            f"loss {values['loss']:.4f}, gradient {values['gradient_norm']:.2f}, {values['tokens_per_second']:.0f} "
            f"tokens/s, {values['supervised'] + values['earlier_supervised']:,.0f} supervised tokens seen, "
            f"{minutes // 60}:{minutes % 60:02}:{seconds:02} left"
        )

    def files(self) -> list[str]:
        """What the run has written."""
        names = (BEST, LAST, LOG_FILE, CURVES)
        return [str(self._path / name) for name in names if (self._path / name).exists()]
