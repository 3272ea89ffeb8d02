"""The page of a comparison: one picture and one table for each data set, links to the runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.comparison import HEADER, Line, Spread
from experiments.report.page import fill, inside
from experiments.report.picture_style import ATTACK, OTHER, OURS, STYLE
from experiments.report.pictures import Picture

__all__ = ["Part", "write_comparison"]


@dataclass(frozen=True, kw_only=True)
class Part:
    """One data set of a comparison.

    Attributes:
        name: for files; title: for people.
        reports: label and address, relative to the page, of single runs' reports.
    """

    name: str
    title: str
    lines: Sequence[Line]
    reports: Sequence[tuple[str, str]]


def write_comparison(folder: Path, *, title: str, reading: str, parts: Sequence[Part]) -> Path:
    """Write index.html and its pictures into `folder`, where the reports lie; return its path.

    `reading` says how to read what is compared.
    """
    page = folder / "index.html"
    content = fill(
        "comparison.html.jinja",
        title=title,
        reading=reading,
        header=HEADER,
        parts=[
            {
                "title": part.title,
                "picture": inside(_picture(part, folder / f"{part.name}.png")),
                "rows": [line.cells() for line in part.lines],
                "reports": part.reports,
            }
            for part in parts
        ],
    )
    page.write_text(content, encoding="utf-8")
    return page


def _picture(part: Part, path: Path) -> Picture:
    """Accuracy and attack advantage of each line, side by side."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8.0, 0.9 + 0.33 * len(part.lines)), layout="constrained")
        accuracy, advantage = figure.subplots(1, 2, sharey=True)
        _dots(accuracy, part.lines, [line.accuracy for line in part.lines], colour=OURS, scale=100)
        accuracy.set(title="Test accuracy", xlabel="per cent")
        alone = next((line for line in part.lines if line.variant.protected is None), None)
        if alone is not None:
            accuracy.axvline(alone.accuracy.mean * 100, color=OTHER, linestyle=":", linewidth=1.2)
        _dots(advantage, part.lines, [line.advantage for line in part.lines], colour=ATTACK)
        advantage.set(title="Attack advantage", xlabel="balanced accuracy over baseline")
        advantage.axvline(0, color=OTHER, linewidth=1)
        figure.savefig(path)
    return Picture(
        path=path,
        title=part.title,
        caption="Means over the seeds with 95 % intervals. Dotted: SingleVL, the active alone. "
        "Guarded lines are filled, unguarded ones hollow.",
    )


def _dots(
    axes: Axes, lines: Sequence[Line], spreads: Sequence[Spread | None], *, colour: str,
    scale: float = 1.0,
) -> None:  # fmt: skip
    for height, (line, spread) in enumerate(zip(lines, spreads, strict=True)):
        if spread is not None:
            axes.errorbar(
                spread.mean * scale, -height, xerr=spread.half_width * scale, fmt="o", color=colour,
                markerfacecolor=colour if line.variant.protected else "white", capsize=2.5,
            )  # fmt: skip
    axes.set_yticks([-height for height in range(len(lines))])
    axes.set_yticklabels(
        [f"{line.method}, guarded" if line.variant.protected else line.method for line in lines]
    )
    axes.grid(visible=False, axis="y")
