"""How a filled table is written: CSV with plain numbers, Markdown with texts, and a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes

from apfed_experiments.columns import markdown, write_text
from apfed_experiments.drawing import COLOURS, OTHER, OURS, Picture, drawing
from apfed_experiments.tables.table import Board, Filled, PaperTable
from secure_apfed.files import to_csv

__all__ = ["cells_of", "draw", "header_of", "write"]

_MEASURED = ("here", "95 % interval", "seeds", "paper", "difference", "in combined sd")
_COLUMNS = 3
_APART, _BELOW = 0.012, 0.03


def header_of(board: Board) -> tuple[str, ...]:
    """The columns of `cells_of`."""
    return (*(board.lines[0].line.cells if board.lines else ()), *_MEASURED)


def cells_of(board: Board) -> list[tuple[str, ...]]:
    """The texts of every line; what is missing is empty, and a paper's unread figure is "-"."""
    return [_cells(filled, board.table.form) for filled in board.lines]


def _cells(filled: Filled, form: str) -> tuple[str, ...]:
    interval, printed = filled.interval, filled.line.paper
    here = limits = ""
    if interval is not None:
        here = _with_sd(interval.mean, filled.sd, form)
        limits = "" if filled.sd is None else f"{interval.low:{form}} to {interval.high:{form}}"
    return (
        *filled.line.cells.values(),
        here,
        limits,
        str(len(filled.values) or ""),
        "-" if printed is None else _with_sd(printed.mean, printed.sd, form),
        "" if filled.difference is None else f"{filled.difference:+{form}}",
        "" if filled.in_sd is None else f"{filled.in_sd:+.1f}",
    )


def _with_sd(mean: float, sd: float | None, form: str) -> str:
    return f"{mean:{form}}" if sd is None else f"{mean:{form}} ± {sd:{form}}"


def write(board: Board, folder: Path) -> Mapping[str, Path]:
    """Write the table and its picture; return the files by kind."""
    base = folder / (f"{board.table.name}-full" if board.full else board.table.name)
    files = {kind: base.with_suffix(f".{kind}") for kind in ("csv", "md", "png")}
    measured = board.as_json()["lines"]
    write_text(files["csv"], to_csv(pd.DataFrame(measured)))
    write_text(files["md"], _page(board, picture=files["png"].name))
    if board.table.picture is None:
        draw(files["png"], board)
    else:
        board.table.picture(files["png"])
    return files


def _page(board: Board, *, picture: str) -> str:
    """The table with all that a reader needs beside it."""
    table = board.table
    command = f"secure-apfed table {table.name}{' --full' if board.full else ''}"
    unit = f": {table.unit}" if table.unit else ""
    notes = [f"{table.source}. `{command}`{unit}. {table.reading}"]
    if table.leaves_out and not board.full:
        notes.append(f"Left out, and run by `--full`: {table.leaves_out}.")
    notes.append(f"{board.forecast.sentence}.")
    rows = markdown(header_of(board), cells_of(board))
    told = "\n\n".join(notes)
    return f"# {table.title}\n\n{told}\n\n{rows}\n![{table.title}]({picture})\n"


def draw(path: Path, board: Board) -> Picture:
    """Every panel: curves where lines have a place on an axis, else a dot a line."""
    drawn = [filled for filled in board.lines if filled.line.series]
    titles = dict.fromkeys(title for filled in drawn for title in filled.line.panels)
    panels = {
        title: [filled for filled in drawn if title in filled.line.panels] for title in titles
    }
    down = -(-len(panels) // _COLUMNS)
    across = -(-len(panels) // down)
    tallest = max(map(len, panels.values()))
    height = 3.4 if board.table.axis else 1.0 + 0.27 * tallest
    shared = bool(board.table.axis and board.table.unit)
    with drawing(path, (max(6.5, 4.6 * across), 0.7 + height * down)) as figure:
        grid = figure.subplots(down, across, squeeze=False, sharey=shared)
        for axes in grid.flat[len(panels) :]:
            axes.remove()
        for axes, (panel, lines) in zip(grid.flat, panels.items(), strict=False):
            axes.set_title(panel)
            if board.table.axis:
                _curves(axes, lines)
                _label(axes, lines, board.table)
            else:
                _dots(axes, lines)
                axes.set_xlabel(board.table.unit)
            if shared:
                axes.label_outer()
        handles = {
            label: handle
            for axes in figure.axes
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.suptitle(board.table.title)
        figure.legend(
            handles.values(), handles.keys(), loc="outside lower center", ncols=5, frameon=False
        )
    return Picture(
        path=path, title=board.table.title,
        caption="Filled: means here with 95 % intervals over the seeds; hollow: the paper, "
        "with one standard deviation where it prints one.",
    )  # fmt: skip


def _label(axes: Axes, lines: Sequence[Filled], table: PaperTable) -> None:
    """Ticks where lines are; intervals of what is never below 0 may reach there, and are cut."""
    places = sorted({filled.line.at for filled in lines if filled.line.at is not None})
    axes.set(xlabel=table.axis, ylabel=table.unit)
    axes.set_xticks(places, [table.ticks.get(at, f"{at:g}") for at in places])
    means = [filled.interval.mean for filled in lines if filled.interval is not None]
    low, high = axes.get_ylim()
    if low < 0 <= min(means, default=-1.0):
        axes.set_ylim(bottom=-_BELOW * high)


def _dots(axes: Axes, lines: Sequence[Filled]) -> None:
    """A dot a line, the first on top, and the paper's a little below."""
    for height, filled in enumerate(lines):
        interval, printed = filled.interval, filled.line.paper
        if interval is not None:
            axes.errorbar(
                interval.mean, -height + 0.12, xerr=interval.arms(), fmt="o", color=OURS,
                capsize=2.5, label="here, 95 % interval",
            )  # fmt: skip
        if printed is not None:
            axes.errorbar(
                printed.mean, -height - 0.18, xerr=printed.sd or None, fmt="D", color=OTHER,
                markerfacecolor="white", capsize=2.5, label="paper, standard deviation",
            )  # fmt: skip
    axes.set_yticks([-height for height in range(len(lines))])
    axes.set_yticklabels([filled.line.series for filled in lines], fontsize=8)
    axes.set_ylim(-len(lines) + 0.4, 0.6)
    axes.grid(visible=False, axis="y")


def _curves(axes: Axes, lines: Sequence[Filled]) -> None:
    """A curve a series; the paper's figures are hollow and in its colour."""
    series: dict[str, list[Filled]] = {}
    for filled in lines:
        if filled.line.at is not None:
            series.setdefault(filled.line.series, []).append(filled)
    ends = [filled.line.at for filled in lines if filled.line.at is not None]
    step = _APART * (max(ends) - min(ends) or 1.0) if ends else 0.0
    for place, (name, of_series) in enumerate(series.items()):
        colour, shift = COLOURS[place % len(COLOURS)], step * (place - (len(series) - 1) / 2)
        for mine, label in ((True, name), (False, f"{name}, paper")):
            _curve(axes, of_series, mine=mine, shift=shift, colour=colour, label=label)


def _curve(
    axes: Axes, lines: Sequence[Filled], *, mine: bool, shift: float, colour: str, label: str
) -> None:
    points = []
    for filled in lines:
        interval, printed, at = filled.interval, filled.line.paper, filled.line.at or 0.0
        if mine and interval is not None:
            (low,), (high,) = interval.arms()
            points.append((at + shift, interval.mean, low, high))
        if not mine and printed is not None:
            points.append((at + shift, printed.mean, printed.sd or 0.0, printed.sd or 0.0))
    if not points:
        return
    places, means, below, above = zip(*points, strict=True)
    axes.errorbar(
        places, means, yerr=(below, above), fmt="o-" if mine else "D:", color=colour,
        markerfacecolor=colour if mine else "white", capsize=2.5, markersize=5, label=label,
    )  # fmt: skip
