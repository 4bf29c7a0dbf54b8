"""Draws docs/pipeline.svg: twelve cycles of a four-stage pipeline, with one rejection.

    .venv/bin/python docs/draw_pipeline.py [output.svg]

The picture is a simulation of the schedule, not of a model: the texts that the draft and the target "say" are written
down below, and the cells follow from the rules in docs/algorithm.md. It does not import the library.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

STAGES = 4
CYCLES = 12
# What the target says, from the prefill on.
TARGET = ["The", "sky", "is", "blue", "since", "air", "scatters", "light", "of", "short", "waves"]
DRAFT = {4: ["because", "the", "air"]}  # at position 4 the draft goes wrong, and builds two more tokens on it
SHOWN = 6  # the cycle whose reading by the draft is drawn out

VERIFIED, GUESSED, DOOMED, DRAFTED = "#2f6fb0", "#d5e5f5", "#f6d3cd", "#fbe9b7"
RED, GREEN, INK, FAINT = "#b3261e", "#2c7a3f", "#222222", "#9a9a9a"
VERDICT_Y, DRAFT_Y = STAGES + 1.0, 0.0


@dataclass(frozen=True)
class Cycle:
    """What the rules put in one cycle: (position, token, verified) per stage, the token drawn, and the verdict."""

    stages: list[tuple[int, str, bool]]  # index 0 is stage 1
    drafted: str
    verdict: tuple[str, str] | None  # (token judged, the target's own token)


def simulate() -> list[Cycle]:
    """Follow the schedule: shift up by one a cycle, judge when the pipeline is full, flush on a wrong token."""
    cycles: list[Cycle] = []
    in_flight, newest_verified = [(0, TARGET[0])], 0
    wrong = dict(DRAFT)
    while len(cycles) < CYCLES:
        position = in_flight[0][0] + 1
        guesses = {at + i: token for at, tokens in wrong.items() for i, token in enumerate(tokens)}
        drafted = guesses.get(position, TARGET[position])
        stages = [(at, token, at <= newest_verified) for at, token in in_flight]
        verdict = None
        following = [(position, drafted), *in_flight][:STAGES]
        if len(in_flight) == STAGES:
            judged, token = in_flight[-2]
            verdict = (token, TARGET[judged])
            newest_verified = judged
            if token != TARGET[judged]:
                following = [(judged, TARGET[judged])]
                wrong.pop(judged)
        cycles.append(Cycle(stages, drafted, verdict))
        in_flight = following
    return cycles


def cell(ax: Axes, x: float, y: float, text: str, colour: str, ink: str = INK, edge: str = "none") -> None:
    """One rounded box, centred at (x, y)."""
    box = FancyBboxPatch(
        (x - 0.4, y - 0.3), 0.8, 0.6, boxstyle="round,pad=0,rounding_size=0.1", fc=colour, ec=edge, lw=1.2
    )
    ax.add_patch(box)
    ax.text(x, y + (0.07 if colour != DRAFTED else 0.0), text, ha="center", va="center", fontsize=8.7, color=ink)


def depth_pips(ax: Axes, x: float, y: float, depth: int, ink: str) -> None:
    """As many filled dots as the position has completed stages."""
    for k in range(STAGES):
        at = x + (k - (STAGES - 1) / 2) * 0.14
        ax.plot(at, y - 0.18, "o", ms=3.4, mfc=ink if k < depth else "none", mec=ink, mew=0.7)


def arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float], colour: str, width: float = 1.0) -> None:
    """A plain arrow between two points."""
    ax.annotate(
        "",
        xy=end,
        xytext=start,
        arrowprops={"arrowstyle": "-|>", "color": colour, "lw": width, "shrinkA": 0, "shrinkB": 0},
    )


def draw_cycle(ax: Axes, number: int, cycle: Cycle, flushed: bool) -> None:
    """The cells of one cycle; flushed says that this cycle's verdict throws the speculative ones away."""
    for stage, (_, token, verified) in enumerate(cycle.stages, start=1):
        doomed = flushed and not verified
        colour, ink = (VERIFIED, "white") if verified else (DOOMED if doomed else GUESSED, INK)
        cell(ax, number, stage, token, colour, ink)
        depth_pips(ax, number, stage, stage - 1, ink)
        if doomed:
            ax.plot([number - 0.4, number + 0.4], [stage - 0.3, stage + 0.3], color=RED, lw=1.3)
        elif number < CYCLES and stage < STAGES:
            arrow(ax, (number + 0.36, stage + 0.3), (number + 0.62, stage + 0.69), FAINT, 0.8)
    cell(ax, number, DRAFT_Y, cycle.drafted, DRAFTED)
    if flushed:
        ax.plot([number - 0.4, number + 0.4], [DRAFT_Y - 0.3, DRAFT_Y + 0.3], color=RED, lw=1.3)
    elif number < CYCLES:
        arrow(ax, (number + 0.36, DRAFT_Y + 0.3), (number + 0.62, 0.69), FAINT, 0.8)
    if cycle.verdict:
        judged, right = cycle.verdict
        arrow(ax, (number, STAGES + 0.32), (number, VERDICT_Y - 0.1), FAINT, 0.8)
        ax.text(
            number,
            VERDICT_Y + 0.1,
            f"{judged} {'✓' if judged == right else '✗'}",
            ha="center",
            va="center",
            fontsize=9.5,
            color=GREEN if judged == right else RED,
        )


def draw_reading(ax: Axes, number: int) -> None:
    """Outline one cycle's column, which is what the draft reads, and say so."""
    frame = FancyBboxPatch(
        (number - 0.47, 0.6), 0.94, STAGES - 0.2, boxstyle="round,pad=0,rounding_size=0.1", fc="none", ec=INK, lw=1.6
    )
    ax.add_patch(frame)
    arrow(ax, (number, 0.6), (number, 0.32), INK, 1.6)
    note = "the draft reads the column: depths 0, 1, 2, 3, and full depth for every token that has left"
    ax.text(number, DRAFT_Y - 0.55, note, ha="center", va="center", fontsize=9.5, color=INK)


def draw_correction(ax: Axes, number: int) -> None:
    """The target's own token enters stage 1 in the cycle after a rejection, alone."""
    ax.annotate(
        "",
        xy=(number + 1, 1.32),
        xytext=(number + 0.42, VERDICT_Y + 0.1),
        arrowprops={"arrowstyle": "-|>", "color": RED, "lw": 1.3, "connectionstyle": "angle3,angleA=0,angleB=90"},
    )
    ax.text(
        number + 1.1,
        STAGES - 0.1,
        "rejected:\nflush, restart with\nthe target's token,\nrefill",
        color=RED,
        fontsize=9.5,
        va="center",
    )


def draw_frame(ax: Axes) -> None:
    """Row and column names, and the legend."""
    for number in range(1, CYCLES + 1):
        ax.text(number, VERDICT_Y + 0.75, str(number), ha="center", va="center", fontsize=9.5, color=INK)
    labels = {VERDICT_Y + 0.75: "cycle", VERDICT_Y + 0.1: "the target's verdict", DRAFT_Y: "the draft's guess"}
    labels |= {float(stage): f"stage {stage}" for stage in range(1, STAGES + 1)}
    for y, label in labels.items():
        ax.text(0.35, y, label, ha="right", va="center", fontsize=10, color=INK)
    y = -1.15
    legend = [
        (0.75, VERIFIED, "verified"),
        (3.0, GUESSED, "a guess, in flight"),
        (6.0, DOOMED, "thrown away"),
        (8.4, DRAFTED, "drawn now"),
    ]
    for x, colour, label in legend:
        ax.add_patch(
            FancyBboxPatch(
                (x - 0.15, y - 0.13), 0.3, 0.26, boxstyle="round,pad=0,rounding_size=0.06", fc=colour, ec="none"
            )
        )
        ax.text(x + 0.25, y, label, va="center", fontsize=9.5, color=INK)
    depth_pips(ax, 10.7, y + 0.18, 2, INK)
    ax.text(11.05, y, "depth: stages done", va="center", fontsize=9.5, color=INK)


def draw(path: Path) -> None:
    """Write the picture; the file's suffix chooses the format."""
    cycles = simulate()
    fig, ax = plt.subplots(figsize=(13.6, 6.2))
    draw_frame(ax)
    for number, cycle in enumerate(cycles, start=1):
        flushed = cycle.verdict is not None and cycle.verdict[0] != cycle.verdict[1]
        draw_cycle(ax, number, cycle, flushed)
        if flushed:
            draw_correction(ax, number)
    draw_reading(ax, SHOWN)
    ax.set_xlim(-1.3, CYCLES + 0.9)
    ax.set_ylim(-1.45, VERDICT_Y + 1.1)
    ax.set_aspect("equal")
    ax.axis("off")
    fig.savefig(
        path, bbox_inches="tight", facecolor="white", metadata={"Date": None} if path.suffix == ".svg" else None
    )
    plt.close(fig)


if __name__ == "__main__":
    plt.rcParams["svg.hashsalt"] = "pipeline"  # the same file every time it is drawn
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("pipeline.svg"))
