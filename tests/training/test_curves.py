"""The picture of a run: what it shows, where it shows it, and that it can be read."""

import io
import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from PIL import Image

from spd_jax.training.curves import curves, draw_curves, open_board


def run_log(steps: int = 40, *, decoded: bool = False, earlier: int = 0) -> list[dict[str, Any]]:
    """As the trainer writes it: a look at held-out data before the first step and after every tenth."""
    log: list[dict[str, Any]] = []
    for step in range(steps + 1):
        if step:
            log.append({"step": step, "kind": "step", "loss": 2.0 - step / 40, "supervised": 100 * step})
            log[-1]["earlier_supervised"] = earlier
        if step % 10 == 0:
            shares = {"top1": step / 80, "acceptance": step / 70, "coverage": 0.95}
            log.append({"step": step, "kind": "evaluation", "draft_loss": 1.5, "projected_s0": 1 + step / 40, **shares})
            if decoded:
                log.append({"step": step, "kind": "decoding", "s0": 1 + step / 50, "alpha": 0.5})
    return log


def lines_of(axes: Any) -> dict[str, tuple[list[float], list[float]]]:
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}


@pytest.mark.parametrize("decoded", [False, True])
def test_what_is_drawn(decoded: bool):
    loss, share, length = curves(run_log(decoded=decoded), "a run").axes
    looks = [0, 1000, 2000, 3000, 4000]
    assert lines_of(loss)["held-out loss, newest position"] == (looks, [1.5] * 5)
    x, y = lines_of(loss)["training loss, averaged"]
    assert x == [100 * step for step in range(1, 41)]
    np.testing.assert_allclose(y, [2.0 - step / 40 for step in range(1, 41)], rtol=1e-6)  # a line is its own average
    assert lines_of(share)["greedy: likeliest token is the target's"] == (looks, [0.0, 0.125, 0.25, 0.375, 0.5])
    assert lines_of(share)["likeliest token is in the draft vocabulary"][1] == [0.95] * 5
    assert lines_of(length)["projected from greedy acceptance"][1] == [1.0, 1.25, 1.5, 1.75, 2.0]
    assert ("decoded" in lines_of(length)) == decoded
    if decoded:
        assert lines_of(length)["decoded"] == (looks, [1.0, 1.2, 1.4, 1.6, 1.8])


def test_a_warm_start_begins_where_the_head_was():
    loss, _, _ = curves(run_log(earlier=5000), "a run").axes
    assert lines_of(loss)["held-out loss, newest position"][0] == [5000, 6000, 7000, 8000, 9000]


def test_the_last_value_is_no_average_of_its_own():
    """The noise of the last step looked like a turn of the run."""
    log = [line for line in run_log(400) if line["kind"] == "step"]
    log[-1]["loss"] += 3.0
    _, y = lines_of(curves(log, "a run").axes[0])["training loss, averaged"]
    line = 2.0 - 400 / 40
    assert line < y[-1] < line + 1.1


def test_an_outlier_is_shared_by_its_neighbours_on_both_sides():
    log = [line for line in run_log(101) if line["kind"] == "step"]
    for line in log:
        line["loss"] = 1.0
    log[50]["loss"] = 7.0
    averaged = lines_of(curves(log, "a run").axes[0])["training loss, averaged"][1]
    assert averaged == averaged[::-1]
    assert averaged[50] == pytest.approx(1.0 + 6.0 / 5)
    assert (averaged[47], averaged[48]) == (1.0, averaged[50])


@pytest.mark.parametrize("decoded", [False, True])
def test_it_can_be_read(decoded: bool):
    """No text lies on another, legends lie outside of the axes, and no two curves of a picture look alike."""
    figure = curves(run_log(decoded=decoded), "SmolLM2-135M-Instruct.Q4_1.gguf, n = 16, Ls = 3")
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    texts: list[Any] = [getattr(figure, "_suptitle")]  # noqa: B009
    for axes in figure.axes:
        legend = axes.get_legend()
        assert legend is not None
        assert not legend.get_window_extent(renderer).overlaps(axes.get_window_extent(renderer))
        texts += [axes.xaxis.label, axes.yaxis.label, *legend.get_texts()]
        for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
            texts += [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
        colors = [to_rgb(line.get_color()) for line in axes.lines]
        for a, b in itertools.combinations(colors, 2):
            assert np.abs(np.subtract(a, b)).sum() > 0.3
    boxes = [text.get_window_extent(renderer) for text in texts if text.get_text()]
    width, height = canvas.get_width_height()
    for box in boxes:
        assert min(box.x0, box.y0) >= 0
        assert (box.x1 <= width, box.y1 <= height) == (True, True)
    overlapping = [(a, b) for a, b in itertools.combinations(boxes, 2) if a.shrunk(0.9, 0.9).overlaps(b)]
    assert not overlapping


def test_a_picture_is_made_of_few_lines_too():
    """One step, nothing held out; a name that matplotlib would take for mathematics."""
    picture = Image.open(io.BytesIO(draw_curves(run_log(1)[1:2], "$x_1$")))
    assert (picture.format, picture.size) == ("PNG", (1375, 484))
    assert len(picture.getcolors(1 << 20) or []) > 20


def test_events_for_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Without torch, which the writer would import if it is there."""
    monkeypatch.setitem(sys.modules, "torch", None)
    board = open_board(tmp_path / "board")
    board.add_scalar("step/loss", 1.5, 3)
    board.close()
    (file,) = (tmp_path / "board").iterdir()
    assert b"step/loss" in file.read_bytes()
