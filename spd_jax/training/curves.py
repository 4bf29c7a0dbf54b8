"""The curves of a run: a PNG from its log, and TensorBoard events as they come.

Knows matplotlib and the events of `spd_jax.training.trainer`, nothing of training.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

SMOOTHING = 0.05  # share of the run over which the training loss is averaged
_TRAIN, _LIGHT, _HELD, _SAMPLED, _DECODED = "#1f5f9e", "#b9d3ea", "#1f5f9e", "#e08a1e", "#b3261e"

Line = Mapping[str, Any]
"""A line of `log.jsonl`: step, kind, and numbers by name."""


def draw_curves(log: Sequence[Line], title: str, *, dots_per_inch: int = 110) -> bytes:
    """A PNG: training loss, what held-out drafts would be accepted, and S0, all over supervised tokens seen."""
    buffer = io.BytesIO()
    FigureCanvasAgg(curves(log, title, dots_per_inch=dots_per_inch)).print_png(buffer)
    return buffer.getvalue()


def curves(log: Sequence[Line], title: str, *, dots_per_inch: int = 110) -> Figure:
    """The figure of `draw_curves`."""
    figure = Figure(figsize=(12.5, 4.4), dpi=dots_per_inch, facecolor="white", layout="constrained")
    loss, share, length = figure.subplots(1, 3)
    figure.suptitle(title, fontsize=11, weight="bold", parse_math=False)
    tokens = _tokens_by_step(log)
    steps = [line for line in log if line["kind"] == "step"]
    x = [tokens[line["step"]] for line in steps]
    values = [line["loss"] for line in steps]
    loss.plot(x, values, color=_LIGHT, linewidth=0.8)
    loss.plot(x, _smoothed(values), color=_TRAIN, linewidth=1.8, label="training loss, averaged")
    _evaluations(loss, log, tokens, {"draft_loss": (_DECODED, "held-out loss, newest position")}, "o")
    _evaluations(
        share,
        log,
        tokens,
        {
            "top1": (_HELD, "greedy: likeliest token is the target's"),
            "acceptance": (_SAMPLED, "sampled: sum of min(p, q)"),
            "coverage": ("#8a8a8a", "likeliest token is in the draft vocabulary"),
        },
        "o",
    )
    _evaluations(length, log, tokens, {"projected_s0": (_HELD, "projected from greedy acceptance")}, "o")
    decoded = [line for line in log if line["kind"] == "decoding" and "s0" in line]
    if decoded:
        points = [tokens[line["step"]] for line in decoded]
        length.plot(points, [line["s0"] for line in decoded], color=_DECODED, marker="s", markersize=4, label="decoded")
    share.set_ylim(0.0, 1.02)
    for axes, name in ((loss, "loss (nats a position)"), (share, "share of held-out positions"), (length, "S0")):
        axes.set_xlabel("supervised tokens seen")
        axes.set_ylabel(name)
        axes.grid(True, linewidth=0.4, color="#dddddd")
        axes.spines[["top", "right"]].set_visible(False)
        axes.xaxis.set_major_formatter(lambda value, _: _short(value))
        if axes.get_legend_handles_labels()[0]:  # above the axes: a curve may run anywhere inside
            axes.legend(fontsize=8, frameon=False, loc="lower left", bbox_to_anchor=(0.0, 1.0), borderaxespad=0.2)
    return figure


def _tokens_by_step(log: Sequence[Line]) -> dict[int, float]:
    """Supervised tokens seen after every step of the log, those of earlier runs included."""
    steps = [line for line in log if line["kind"] == "step"]
    found = {line["step"]: float(line["supervised"] + line["earlier_supervised"]) for line in steps}
    return {0: float(steps[0]["earlier_supervised"]) if steps else 0.0, **found}


def _evaluations(
    axes: Axes, log: Sequence[Line], tokens: Mapping[int, float], names: Mapping[str, tuple[str, str]], marker: str
) -> None:
    lines = [line for line in log if line["kind"] == "evaluation"]
    for name, (color, label) in names.items():
        found = [(tokens[line["step"]], line[name]) for line in lines if name in line]
        if found:
            x, y = zip(*found, strict=True)
            axes.plot(x, y, color=color, marker=marker, markersize=3, linewidth=1.4, label=label)


def _smoothed(values: Sequence[float]) -> list[float]:
    """Averages around every value, over fewer neighbours towards the ends, so that what falls is not shown late; but
    never over very few, whose noise would look like a turn."""
    reach, last = int(SMOOTHING * len(values) / 2), len(values) - 1
    found = []
    for i in range(len(values)):
        around = max(min(reach, i, last - i), reach // 4)
        near = values[max(i - around, 0) : i + around + 1]
        found.append(sum(near) / len(near))
    return found


def _short(value: float) -> str:
    if abs(value) >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value / 1e3:g}k" if abs(value) >= 1e3 else f"{value:g}"


def open_board(path: Path) -> Any:
    """TensorBoard events in a folder."""
    from tensorboardX import SummaryWriter

    return SummaryWriter(logdir=str(path))
