"""The picture of a plan: tokens a second over n, which method wins where, one cycle by part.

Knows matplotlib and what was planned. Draws on a canvas of its own: no display, no global state.
"""

from __future__ import annotations

import io

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from spd_jax.evaluation.picture import COLOURS, MARKERS
from spd_jax.planning.cost_model import spd_cycle
from spd_jax.planning.job import Planned
from spd_jax.planning.planner import alpha_at, rivals

METHODS = ("one device", "tensor-parallel", "serial draft, tensor-parallel", "speculative pipeline")
METHOD_COLOURS = ("#d9d9d9", "#9cc9ea", "#f3c98b", "#4a9a5b")
PART_COLOURS = {
    "compute": "#1f5f9e",
    "exchange": "#e08a1e",
    "heads": "#4a9a5b",
    "enter": "#7a5bb0",
    "control": "#9a9a9a",
}
LATENCIES, ALPHAS = np.geomspace(1e-6, 1e-3, 31), np.linspace(0.3, 1.0, 29)


def draw_plan(planned: Planned, *, dots_per_inch: int = 110) -> bytes:
    """Tokens a second of every n, which method wins where, and one cycle of the best plan, as a PNG."""
    figure = Figure(figsize=(16.5, 5.0), dpi=dots_per_inch, facecolor="white")
    canvas = FigureCanvasAgg(figure)
    left, middle, right = figure.subplots(1, 3, gridspec_kw={"width_ratios": (1.0, 1.0, 0.95)})
    figure.subplots_adjust(left=0.05, right=0.985, top=0.83, bottom=0.125, wspace=0.24)
    _draw_speeds(left, planned)
    _draw_map(middle, planned)
    _draw_cycle(right, planned)
    config = planned.config
    how = "measured" if config.measure else "predicted"
    where = f"{config.devices} x {planned.machine.name}"
    title = f"{config.target} on {where}, {how}; B = {config.batch}, W = {config.width}"
    figure.text(0.012, 0.95, title, fontsize=13, weight="bold", va="center", parse_math=False)
    buffer = io.BytesIO()
    canvas.print_png(buffer)
    return buffer.getvalue()


def _draw_speeds(axes: Axes, planned: Planned) -> None:
    """Tokens a second of the best plan of every n, and of what needs no pipeline."""
    counts = sorted({candidate.plan.num_stages for candidate in planned.candidates})
    for number, alpha in enumerate(planned.config.alphas):
        speeds = [max(c.tokens_per_second(alpha) for c in planned.candidates if c.plan.num_stages == n) for n in counts]
        colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
        axes.plot(counts, speeds, color=colour, marker=marker, ms=5, lw=1.6, label=f"α = {alpha:g}")
    lines = {"one device": planned.rivals.autoregressive, "tensor-parallel": planned.rivals.tensor_parallel}
    for style, (name, seconds) in zip((":", "--"), lines.items(), strict=True):
        axes.axhline(1 / seconds, color="#666666", lw=1.2, ls=style, label=name)
    axes.set_xticks(counts)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("stages n (best layout and draft layers of each)")
    axes.set_ylabel("tokens/s")
    axes.legend(frameon=False, fontsize=8.5)
    axes.set_title("Tokens a second of one sequence", fontsize=10.5, loc="left")
    _tidy(axes)


def _draw_map(axes: Axes, planned: Planned) -> None:
    """Which method gives most tokens a second, by latency of an exchange and acceptance."""
    wins = np.zeros((len(ALPHAS), len(LATENCIES)), int)
    plans = list({planned.best_at(alpha).plan for alpha in ALPHAS.tolist()})
    for column, latency in enumerate(LATENCIES):
        costs = planned.costs.with_latency(float(latency))
        cycles = [(plan, spd_cycle(planned.model, plan, costs)) for plan in plans]
        found = rivals(planned.model, costs, planned.config.devices)
        for row, alpha in enumerate(ALPHAS.tolist()):
            mine = max(
                cycle.tokens_per_second(plan.num_stages, alpha_at(alpha, plan.num_stages, plan.num_draft_layers))
                for plan, cycle in cycles
            )
            serial, _ = found.serial_draft(alpha)
            wins[row, column] = np.argmax([1 / found.autoregressive, 1 / found.tensor_parallel, serial, mine])
    colours = ListedColormap(METHOD_COLOURS)
    axes.pcolormesh(1e6 * LATENCIES, ALPHAS, wins, cmap=colours, vmin=-0.5, vmax=3.5, shading="nearest")
    axes.axvline(1e6 * planned.latency, color="black", lw=1.2, ls="--")
    axes.text(1e6 * planned.latency * 1.06, ALPHAS[0] + 0.01, planned.machine.name, fontsize=8.5, va="bottom")
    axes.set_xscale("log")
    axes.set_xlabel("an exchange over all devices takes, µs")
    axes.set_ylabel("α of a head for n = 8, Ls = 4")
    there = [Patch(color=METHOD_COLOURS[i], label=METHODS[i]) for i in sorted(set(wins.ravel().tolist()))]
    axes.legend(handles=there, fontsize=8.5, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, frameon=False)
    axes.text(0, 1.085, "Which method wins", fontsize=10.5, transform=axes.transAxes)


def _draw_cycle(axes: Axes, planned: Planned) -> None:
    """One cycle of the best plan and of the published layout, by part."""
    cycle, published = planned.best.cycle, planned.best.published_seconds
    rows = {"this layout": cycle.parts}
    compute, control = cycle.parts["compute"], cycle.parts["control"]
    rows["published layout"] = {"compute": compute, "heads": published - compute - control, "control": control}
    for place, parts in enumerate(rows.values()):
        start = 0.0
        for part, seconds in parts.items():
            axes.barh(place, 1e6 * seconds, left=start, color=PART_COLOURS[part], height=0.5)
            start += 1e6 * seconds
        axes.text(start, place, f" {start:,.0f} µs", va="center", fontsize=9)
    axes.set_yticks(range(len(rows)), [name.replace(" ", "\n") for name in rows])
    axes.set_xlim(0, 1.18e6 * max(cycle.seconds, published))
    axes.set_ylim(1.6, -0.6)
    axes.set_xlabel("µs")
    patches = [Patch(color=colour, label=part) for part, colour in PART_COLOURS.items()]
    axes.legend(
        handles=patches,
        fontsize=8.5,
        loc="lower center",
        bbox_to_anchor=(0.48, 1.0),
        ncols=5,
        frameon=False,
        handlelength=1.0,
        columnspacing=1.0,
    )
    axes.text(0, 1.085, f"One cycle, bound by {cycle.bottleneck}", fontsize=10.5, transform=axes.transAxes)
    _tidy(axes)


def _tidy(axes: Axes) -> None:
    axes.grid(color="#e4e4e4", lw=0.8, zorder=0)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
