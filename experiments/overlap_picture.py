"""The picture of `experiments.overlap`: whom passives help on, and what it does to accuracy."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.report.picture_style import ATTACK, OTHER, OURS, STYLE

__all__ = ["OverlapLine", "draw_overlaps"]

_COLOURS = (OURS, ATTACK)


class OverlapLine(Protocol):
    """What is drawn of one row; see `experiments.overlap.OverlapRow`."""

    @property
    def dataset(self) -> str: ...
    @property
    def overlap(self) -> float: ...
    @property
    def method(self) -> str: ...
    @property
    def helped(self) -> float: ...
    @property
    def accuracy(self) -> float: ...
    @property
    def deviation(self) -> float: ...


def draw_overlaps(rows: Sequence[OverlapLine], path: Path) -> None:
    """Write a PNG: a column each data set, accuracy above, people helped on below.

    The line without overlap is the active alone: a dashed line, with a band of one standard
    deviation.
    """
    datasets = list(dict.fromkeys(row.dataset for row in rows))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(4.2 * len(datasets), 5.4), layout="constrained")
        grid = figure.subplots(2, len(datasets), squeeze=False, sharex=True)
        for column, dataset in enumerate(datasets):
            own = [row for row in rows if row.dataset == dataset]
            _accuracy(grid[0, column], dataset, own)
            _helped(grid[1, column], own)
        handles, labels = grid[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)


def _accuracy(axes: Axes, dataset: str, rows: Sequence[OverlapLine]) -> None:
    (alone,) = (row for row in rows if not row.overlap)
    mean, spread = 100 * alone.accuracy, 100 * alone.deviation
    axes.axhspan(mean - spread, mean + spread, color=OTHER, alpha=0.15, linewidth=0)
    axes.axhline(mean, color=OTHER, linestyle="--", label=alone.method)
    for number, (method, line) in enumerate(_lines(rows).items()):
        # a little apart, so that the bars of both can be seen
        places = [100 * row.overlap + 1.2 * (number - 0.5) for row in line]
        axes.errorbar(
            places,
            [100 * row.accuracy for row in line],
            [100 * row.deviation for row in line],
            color=_COLOURS[number],
            marker="o",
            markersize=4,
            capsize=3,
            label=method,
        )
    axes.set_title(dataset.replace("_", " "))
    axes.set_ylabel("test accuracy, %")


def _helped(axes: Axes, rows: Sequence[OverlapLine]) -> None:
    lines = _lines(rows)
    for number, line in enumerate(lines.values()):
        places = [100 * row.overlap + 4 * (number - 0.5) for row in line]
        axes.bar(places, [row.helped for row in line], width=3.6, color=_COLOURS[number])
    axes.set_xticks(sorted({100 * row.overlap for row in rows if row.overlap}))
    axes.set_xlabel("people of the active known to each passive, %")
    axes.set_ylabel("people helped on")


def _lines(rows: Sequence[OverlapLine]) -> dict[str, list[OverlapLine]]:
    """The rows of each method that has an overlap."""
    lines: dict[str, list[OverlapLine]] = {}
    for row in rows:
        if row.overlap:
            lines.setdefault(row.method, []).append(row)
    return lines
