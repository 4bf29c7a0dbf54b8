"""The picture of an evaluation: S0 of every head by data set, and alpha by context length.

Knows matplotlib and the tree of `evaluation_report.summarise`. Draws on a canvas of its own: no display, no global
state.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from spd_jax.evaluation.figures import CONTEXT_LABELS
from spd_jax.generation.report import shown

COLOURS = ("#1f5f9e", "#e08a1e", "#4a9a5b", "#b3395b", "#7a5bb0", "#6b6b6b", "#2aa3a3", "#a0722a")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
FEW = 30  # verdicts below which a share says little: drawn hollow


def draw_acceptance(summary: dict[str, Any], *, dots_per_inch: int = 120) -> bytes:
    """A PNG: bars of pooled S0 by data set and head on the left, pooled alpha by context length on the right."""
    heads: dict[str, Any] = summary["decoders"]
    datasets = list(next(iter(heads.values()))["by_dataset"])
    groups = [*datasets, "all"] if len(datasets) > 1 else datasets
    room = 0.34 if len(heads) <= 4 else 0.22  # inches, as what follows
    bars = max(3.6, 0.9 + sum(max(room * len(heads), 0.075 * min(len(name), 24) + 0.2) + 0.3 for name in groups))
    rows = -(-len(heads) // 4)
    width, height, top = 0.75 + bars + 0.85 + 4.6 + 0.2, 3.9 + 0.22 * rows, 0.62 + 0.22 * rows
    figure = Figure(figsize=(width, height), dpi=dots_per_inch, facecolor="white")
    canvas = FigureCanvasAgg(figure)
    below = 0.72
    left = figure.add_axes((0.75 / width, below / height, bars / width, (height - below - top) / height))
    right_start = (0.75 + bars + 0.85) / width
    right = figure.add_axes((right_start, below / height, 4.6 / width, (height - below - top) / height))
    _draw_bars(left, heads, groups, summary["num_stages"])
    _draw_contexts(right, heads)
    figure.text(
        0.12 / width, 1 - 0.2 / height, _title(summary), fontsize=11, weight="bold", va="center", parse_math=False
    )
    figure.legend(
        handles=left.containers,
        labels=[_short(label, 30) for label in heads],
        loc="upper left",
        bbox_to_anchor=(0.12 / width, 1 - 0.34 / height),
        ncols=min(len(heads), 4),
        frameon=False,
        fontsize=9,
        borderaxespad=0,
        handlelength=1.2,
        columnspacing=1.6,
    )
    buffer = io.BytesIO()
    canvas.print_png(buffer)
    return buffer.getvalue()


def _title(summary: dict[str, Any]) -> str:
    settings = summary["settings"]
    sampling = "greedy" if settings["temperature"] == 0.0 else f"temperature {settings['temperature']:g}"
    target = settings["target"].rstrip("/").split("/")[-1]
    return f"{_short(target, 44)}, n = {summary['num_stages']} stages, {sampling}"


def _draw_bars(axes: Axes, heads: dict[str, Any], groups: Sequence[str], num_stages: int) -> None:
    step = min(0.8 / len(heads), 0.3)
    highest = 1.0
    for number, decoder in enumerate(heads.values()):
        found = [decoder["overall"] if name == "all" else decoder["by_dataset"].get(name) for name in groups]
        known = [None if figures is None else figures["s0"] for figures in found]
        values = [value or 0.0 for value in known]
        places = [place + step * (number + 0.5 - len(heads) / 2) for place in range(len(groups))]
        drawn = axes.bar(places, values, width=0.92 * step, color=COLOURS[number % len(COLOURS)], zorder=2)
        size = 8.0 if len(heads) <= 4 else 6.5
        labels = [shown(value) for value in known]
        axes.bar_label(drawn, labels, padding=2, fontsize=size, rotation=0 if len(heads) <= 4 else 90)
        highest = max(highest, *values)
    axes.axhline(1.0, color="#888888", lw=1, ls=(0, (4, 3)), zorder=1)
    axes.set_xticks(range(len(groups)), [_short(name, 24) for name in groups])
    axes.set_xlim(-0.55, len(groups) - 0.45)
    axes.set_ylim(0, highest * (1.12 if len(heads) <= 4 else 1.22))
    axes.set_ylabel("S0 = n (N - 1) / K, pooled")
    axes.set_title("S0 by data set (dashed: no draft is right)", fontsize=10, loc="left")
    _tidy(axes)


def _draw_contexts(axes: Axes, heads: dict[str, Any]) -> None:
    there = [i for i, name in enumerate(CONTEXT_LABELS) if any(name in head["by_context"] for head in heads.values())]
    labels = CONTEXT_LABELS[min(there, default=0) : max(there, default=0) + 1]
    for number, decoder in enumerate(heads.values()):
        known = [
            (place, decoder["by_context"][name])
            for place, name in enumerate(labels)
            if name in decoder["by_context"]
            and decoder["by_context"][name]["accepted"] + decoder["by_context"][name]["rejected"]
        ]
        colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
        axes.plot([place for place, _ in known], [found["alpha"] for _, found in known], color=colour, lw=1.6, zorder=2)
        for place, found in known:
            few = found["accepted"] + found["rejected"] < FEW
            face = "white" if few else colour
            axes.plot(
                place, found["alpha"], marker=marker, ms=6, mec=colour, mfc=face, ls="none", zorder=3, clip_on=False
            )
    axes.set_xticks(range(len(labels)), labels)
    axes.set_xlim(-0.4, max(len(labels), 1) - 0.6)
    axes.set_ylim(0, 1)
    axes.set_xlabel("tokens before the drafted one")
    axes.set_ylabel("alpha = A / (A + R), pooled")
    axes.set_title(f"alpha by context length (hollow: under {FEW} verdicts)", fontsize=10, loc="left")
    _tidy(axes)


def _tidy(axes: Axes) -> None:
    axes.grid(axis="y", color="#e4e4e4", lw=0.8, zorder=0)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=9, length=3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _short(text: str, most: int) -> str:
    text = text.replace("$", r"\$")
    return text if len(text) <= most else text[: most - 1] + "…"
