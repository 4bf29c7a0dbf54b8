"""The picture of a timeline: cycles across, stages up, a cell for each token, coloured by what became of it.

Knows matplotlib and `Timeline`, nothing of decoding. Draws on a canvas of its own; no display, no global state.
"""

from __future__ import annotations

import io
from collections.abc import Callable

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.patches import Patch, Rectangle

from spd_jax.generation.timeline import Fate, Timeline

CYCLES_PER_PANEL = 60
MOST_PANELS = 5

STYLE: dict[Fate, tuple[str, str, str]] = {  # fill, ink, what the legend says
    "verified": ("#1f5f9e", "#ffffff", "the target's own token"),
    "accepted": ("#9cc9ea", "#12304d", "draft, accepted"),
    "not taken": ("#d9c9a3", "#6b5a2e", "branch, another one was right"),
    "rejected": ("#d9534f", "#ffffff", "draft, rejected"),
    "flushed": ("#f5cfcb", "#8a3b36", "flushed with it"),
    "in flight": ("#e3e3e3", "#666666", "never judged (the text ended)"),
}
_ACCEPTED_INK, _REPLACED_INK, _FAINT = "#1c6fb0", "#b3261e", "#b9b9b9"
_CELL_WIDTH, _CELL_HEIGHT, _STRIP_HEIGHT = 0.27, 0.24, 0.1  # inches
_LABEL_LENGTH = 12
_FEWEST_ACROSS = 32  # cycles: room for title and legend


def draw_timeline(timeline: Timeline, title: str, label: Callable[[int], str], *, dots_per_inch: int = 110) -> bytes:
    """A PNG of a timeline, in panels of at most 60 cycles one below the other.

    A cell shows the number of its token, counted from 1 (token 1 comes from prefill and starts alone); a column of a
    tree has a strip for each live row, the first on top. Above a cycle stands the token that it verified. Beyond 5
    panels the picture ends, and says so.

    Args:
        title: first line of the picture.
        label: token id -> what to write for it.
    """
    panels = max(1, -(-timeline.num_cycles // CYCLES_PER_PANEL))
    shown = min(panels, MOST_PANELS)
    across = CYCLES_PER_PANEL if panels > shown else max(_FEWEST_ACROSS, -(-timeline.num_cycles // panels))
    cell_height = max(_CELL_HEIGHT, _STRIP_HEIGHT * timeline.width)
    inner = (_CELL_WIDTH * across, cell_height * timeline.num_stages)
    longest = max((len(_short(label(verdict.token))) for verdict in timeline.verdicts), default=1)
    tree = timeline.width > 1
    legend_columns = 6 + tree if across >= 45 else 3
    header = 0.65 if legend_columns >= 6 else 0.85 + 0.2 * tree  # inches, as what follows
    above, below, left, right = 0.2 + 0.06 * longest, 0.42, 0.6, 0.2
    width, height = left + inner[0] + right, header + shown * (above + inner[1] + below)
    figure = Figure(figsize=(width, height), dpi=dots_per_inch, facecolor="white")
    canvas = FigureCanvasAgg(figure)
    if panels > shown:
        title += f" (first {shown * CYCLES_PER_PANEL} of {timeline.num_cycles} cycles)"
    figure.text(left / width, 1 - 0.24 / height, title, fontsize=11, va="center", weight="bold", parse_math=False)
    _draw_legend(figure, left / width, 1 - 0.4 / height, legend_columns, tree=tree)
    for panel in range(shown):
        bottom = height - header - panel * (above + inner[1] + below) - above - inner[1]
        axes = figure.add_axes((left / width, bottom / height, inner[0] / width, inner[1] / height))
        _draw_panel(axes, timeline, 1 + panel * across, across, label)
    buffer = io.BytesIO()
    canvas.print_png(buffer)
    return buffer.getvalue()


def _draw_legend(figure: Figure, left: float, top: float, columns: int, *, tree: bool) -> None:
    styles = [style for fate, style in STYLE.items() if tree or fate != "not taken"]
    handles = [Patch(facecolor=fill, edgecolor="#555555", lw=0.5, label=text) for fill, _, text in styles]
    handles.append(Patch(facecolor="none", edgecolor="none", label="above a cycle: the token that it verified"))
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(left, top),
        borderaxespad=0,
        borderpad=0,
        ncols=columns,
        frameon=False,
        fontsize=8.5,
        handlelength=1.1,
        columnspacing=1.4,
    )


def _draw_panel(axes: Axes, timeline: Timeline, first: int, across: int, label: Callable[[int], str]) -> None:
    last = first + across - 1
    cells = [cell for cell in timeline.cells if first <= cell.cycle <= last]
    strip = 0.88 / timeline.width
    for fate, (fill, _, _) in STYLE.items():
        boxes = [
            Rectangle((cell.cycle - 0.46, cell.stage + 0.44 - strip * (cell.row + 1)), 0.92, strip * 0.94)
            for cell in cells
            if cell.fate == fate
        ]
        axes.add_collection(PatchCollection(boxes, facecolor=fill, edgecolor="none"), autolim=False)
    for cell in {(cell.cycle, cell.stage): cell for cell in reversed(cells)}.values():  # the best row's
        number, ink = str(cell.index + 1), STYLE[cell.fate][1] if timeline.width == 1 else "#111111"
        size = 7 if len(number) < 3 else 5.5
        axes.text(cell.cycle, cell.stage, number, ha="center", va="center_baseline", fontsize=size, color=ink)
    for verdict in timeline.verdicts:
        if first <= verdict.cycle <= last:
            axes.text(
                verdict.cycle,
                timeline.num_stages + 0.75,
                _short(label(verdict.token)),
                rotation=90,
                ha="center",
                va="bottom",
                fontsize=7,
                family="DejaVu Sans",
                color=_ACCEPTED_INK if verdict.accepted else _REPLACED_INK,
                parse_math=False,
            )
    axes.set_xlim(first - 0.6, last + 0.6)
    axes.set_ylim(0.4, timeline.num_stages + 0.6)
    ticks = [cycle for cycle in range(first, last + 1) if cycle % 5 == 0 or cycle == first]
    axes.set_xticks([cycle for cycle in ticks if cycle <= max(timeline.num_cycles, 1)])
    axes.set_yticks(range(1, timeline.num_stages + 1))
    axes.set_ylabel("stage", fontsize=8.5)
    axes.set_xlabel("cycle", fontsize=8.5, labelpad=1)
    axes.tick_params(length=0, labelsize=7.5, pad=2)
    for side in axes.spines.values():
        side.set_color(_FAINT)
        side.set_linewidth(0.6)


def _short(text: str) -> str:
    """A token's text as it can be drawn: line feeds as \\n, blanks alone as ␣, what the font lacks as □."""
    glyphs = get_font(findfont(FontProperties(family="DejaVu Sans"))).get_charmap()
    text = text.replace("\n", "\\n").strip() or "␣"
    visible = "".join(c if ord(c) in glyphs and c.isprintable() else "□" for c in text)
    return visible if len(visible) <= _LABEL_LENGTH else visible[: _LABEL_LENGTH - 1] + "…"
