"""The report's figures: an experiment says what is to be seen, this file draws it as SVG.

    Staircase     how a reply grows: one step an event, one line a way of delivery
    Histograms    how long the gaps are: one row a path, on one logarithmic axis of time
    Curves        panels one above the other that share their x axis, each with a limit or none
    Trade         what is paid against what is won: one labelled dot a setting

    Finding(figures=[Staircase("ways", "...", {"/stream": [(0.04, 3), (0.07, 8)]})])
        --> results/ways.svg, and a line in results/report.md that shows it

The descriptions are data and need nothing installed; only `draw` needs matplotlib. The same data
give the same bytes: no date, no random ids, and text that stays text, in the reader's own font.
Every figure carries below it on what it stands: n, machine, versions, command.

Not here: what is measured. Read next: `report.py`.
"""

import bisect
import importlib.util
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Points = Sequence[tuple[float, float]]

# Okabe and Ito's colours, which people who see fewer colours tell apart; on white.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
GREY = "#666666"
STYLE: Any = {
    "svg.hashsalt": "figures",  # ids by content
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "savefig.facecolor": "white",
}
LINE: Any = {"linewidth": 1.2, "markersize": 4}
# Inches: the figure, and what lies around the axes (title, labels, the lines of the footer).
WIDTH, LEFT, RIGHT, TOP, BELOW = 7.2, 0.62, 0.2, 0.3, 0.98
LABELS = 3.4  # in the place of LEFT, for the names of rows
BINS_PER_DECADE = 12


@dataclass(frozen=True)
class Staircase:
    """Lines of (seconds since the request, what has come by then): each point is an arrival."""

    name: str
    title: str
    lines: Mapping[str, Points]
    y: str = "characters that have come"


@dataclass(frozen=True)
class Histograms:
    """Gaps in seconds, a row for each path."""

    name: str
    title: str
    values: Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Panel:
    """One y axis. `limit`: a name and a height, drawn as a dashed line."""

    y: str
    lines: Mapping[str, Points]
    limit: tuple[str, float] | None = None


@dataclass(frozen=True)
class Curves:
    """Panels over one x axis, which doubles from tick to tick."""

    name: str
    title: str
    x: str
    panels: Sequence[Panel]


@dataclass(frozen=True)
class Trade:
    """Labelled dots; `lines` joins those of a kind by their labels."""

    name: str
    title: str
    x: str
    y: str
    points: Mapping[str, tuple[float, float]]
    lines: Sequence[Sequence[str]] = field(default=())


Figure = Staircase | Histograms | Curves | Trade


def available() -> bool:
    """Whether there is matplotlib to draw with."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(figure: Figure, footer: Iterable[str]) -> str:
    """Return a figure as SVG, with the lines of `footer` below it; needs matplotlib."""
    import matplotlib as mpl
    from matplotlib.figure import Figure as Canvas

    rows, inside = _size(figure)
    left = LABELS if isinstance(figure, Histograms) else LEFT
    height = TOP + inside + BELOW
    with mpl.rc_context(STYLE):
        canvas = Canvas(figsize=(WIDTH, height))
        # By hand: the layout that matplotlib finds for itself differs in the last bits.
        canvas.subplots_adjust(
            left / WIDTH, BELOW / height, 1 - RIGHT / WIDTH, 1 - TOP / height, hspace=0.12
        )
        axes = list(canvas.subplots(rows, 1, sharex=True, squeeze=False)[:, 0])
        axes[0].set_title(figure.title, loc="left", fontsize=10)
        _draw_on(axes, figure)
        canvas.text(0.01, 0.02, "\n".join(footer), fontsize=6.5, color=GREY, va="bottom")
        out = io.StringIO()
        canvas.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return out.getvalue()


def _size(figure: Figure) -> tuple[int, float]:
    """Return the number of panels, and the height of all in inches."""
    match figure:
        case Histograms(values=values):
            return len(values), 0.5 * len(values)
        case Curves(panels=panels):
            return len(panels), 1.4 * len(panels)
        case _:
            return 1, 2.6


def _draw_on(axes: Sequence[Any], figure: Figure) -> None:
    match figure:
        case Staircase():
            _staircase(axes[0], figure)
        case Histograms():
            _histograms(axes, figure)
        case Curves():
            _curves(axes, figure)
        case Trade():
            _trade(axes[0], figure)


def _staircase(axis: Any, figure: Staircase) -> None:
    for index, (label, points) in enumerate(figure.lines.items()):
        dates, heights = zip((0.0, 0.0), *points, strict=True)
        # Ways that arrive alike lie on each other: the first ones are wider, and are seen below.
        width = 1.2 + 0.9 * (len(figure.lines) - 1 - index)
        axis.step(dates, heights, where="post", label=label, color=_colour(index), linewidth=width)
    axis.set(xlabel="seconds since the request", ylabel=figure.y, xlim=(0, None), ylim=(0, None))
    axis.legend()


def _histograms(axes: Sequence[Any], figure: Histograms) -> None:
    edges = bins(value * 1000 for values in figure.values.values() for value in values)
    for index, (axis, (label, values)) in enumerate(zip(axes, figure.values.items(), strict=True)):
        counts, ends = outline([value * 1000 for value in values], edges)
        axis.stairs(counts, ends, fill=True, color=_colour(index))
        axis.set_xscale("log")
        axis.set_yticks([])
        axis.spines["left"].set_visible(False)
        axis.tick_params(which="both", bottom=axis is axes[-1])
        words = f"{label} (n = {len(values)})"
        axis.text(-0.01, 0.5, words, transform=axis.transAxes, ha="right", va="center", size=8)
    axes[-1].set_xlabel("gap between two pieces, ms; each row has its own height")
    axes[-1].xaxis.set_major_formatter("{x:g}")


def bins(values: Iterable[float]) -> list[float]:
    """Return the edges of bins that are equally wide on a logarithmic axis and hold all values.

    What came with the piece before it, a gap of zero, is no place on such an axis: left out.
    """
    above = [value for value in values if value > 0] or [1.0]
    first = math.floor(math.log10(min(above)) * BINS_PER_DECADE)
    last = math.ceil(math.log10(max(above)) * BINS_PER_DECADE)
    return [10 ** (step / BINS_PER_DECADE) for step in range(first, max(last, first + 1) + 1)]


def outline(values: Iterable[float], edges: Sequence[float]) -> tuple[list[int], list[float]]:
    """Return a histogram's heights and the edges between them; neighbours of one height are one."""
    counts = [0] * (len(edges) - 1)
    for value in values:
        if value > 0:
            counts[min(max(bisect.bisect_right(edges, value) - 1, 0), len(counts) - 1)] += 1
    starts = [i for i, count in enumerate(counts) if i == 0 or count != counts[i - 1]]
    return [counts[i] for i in starts], [*(edges[i] for i in starts), edges[-1]]


def _curves(axes: Sequence[Any], figure: Curves) -> None:
    for axis, panel in zip(axes, figure.panels, strict=True):
        for index, (label, points) in enumerate(panel.lines.items()):
            axis.plot(*zip(*points, strict=True), "-o", label=label, color=_colour(index), **LINE)
        if panel.limit is not None:
            name, height = panel.limit
            axis.axhline(height, linestyle="--", color=GREY, linewidth=1, label=name)
        axis.set(ylabel=panel.y, ylim=(0, None))
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:g}")
        if len(panel.lines) > 1 or panel.limit is not None:
            axis.legend()
    axes[-1].set_xlabel(figure.x)


def _trade(axis: Any, figure: Trade) -> None:
    for index, labels in enumerate(figure.lines or [list(figure.points)]):
        points = [figure.points[label] for label in labels]
        style = "-o" if figure.lines else "o"
        axis.plot(*zip(*points, strict=True), style, color=_colour(index), **LINE)
    for label, point in figure.points.items():
        axis.annotate(label, point, xytext=(5, 4), textcoords="offset points", fontsize=8)
    axis.margins(0.12)
    axis.set(xlabel=figure.x, ylabel=figure.y, xlim=(0, None), ylim=(0, None))


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]
