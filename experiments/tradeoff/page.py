"""The pictures and the page of a study: accuracy against the worst advantage, one a target."""

import math
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

import matplotlib as mpl
from adjustText import adjust_text
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

from experiments.report.page import fill, inside
from experiments.report.picture_style import ATTACK, OTHER, STYLE
from experiments.report.pictures import Picture
from experiments.report.words import number
from experiments.tradeoff.board import Board, Entry, on_the_front
from experiments.tradeoff.study import Study

__all__ = ["READING", "write_page"]

READING = (
    "Each point is one defence at one strength: mean and 95 % bootstrap interval over the seeds. "
    "Up is accurate, left is private. Advantage: the worst attack that applied, by its worst "
    "adversary, minus its best baseline with the same knowledge; it is chosen by the mean over "
    "seeds, so it is a little optimistic for the attack. An advantage near 0 means that these "
    "attacks found nothing, not that there is nothing. Labels say (ε_x, ε_y, T): of one row's T "
    "releases with the encoder held fixed, and of labels. Lines: the active alone is the "
    "floor; one table of all features, which nobody holds, is what the same network reaches with "
    "them; TVFL needs all parties to predict. DCS is defined in docs/trade-off.md."
)
# Colour-blind safe (Okabe and Ito, 2008), without the colours of the reference lines.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
_DASHES = ((0, (1, 2)), (0, (6, 2)), (0, (6, 2, 1, 2)))
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def write_page(study: Study, board: Board, folder: Path) -> Path:
    """Write index.html and its pictures; return the page's path."""
    pictures = [_picture(board, target, folder) for target in board.targets]
    page = folder / "index.html"
    content = fill(
        "tradeoff.html.jinja",
        title=f"Trade-off {study.name}",
        reading=f"{READING} {_deltas(board)}",
        pictures=[inside(picture) for picture in pictures],
        header=board.header,
        rows=board.cells(),
        reports=[
            (entry.point.label, f"{entry.point.configs[0].name}/report.html")
            for entry in board.entries
            if not entry.point.centralised
        ],
        failures=board.failures,
    )
    page.write_text(content, encoding="utf-8")
    return page


def _picture(board: Board, target: str, folder: Path) -> Picture:
    shown = [e for e in board.entries if target in e.leakage and not e.point.reference]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8.0, 5.2), layout="constrained")
        axes = figure.subplots()
        labels = _draw_points(axes, shown, target)
        _draw_front(axes, on_the_front(shown, target), target)
        _draw_references(axes, [e for e in board.entries if e.point.reference])
        metric = next(iter(shown)).leakage[target].metric.replace("_", " ")
        axes.axvline(0, color=OTHER, linewidth=1)
        axes.set(
            title=f"Accuracy against leakage of {target}",
            xlabel=f"worst attack's advantage, {metric} over its baseline",
            ylabel="test accuracy, per cent",
        )
        figure.legend(loc="outside lower center", ncols=3, frameon=False)
        figure.draw_without_rendering()
        adjust_text(labels, ax=axes, arrowprops={"arrowstyle": "-", "color": OTHER, "lw": 0.6})
        path = folder / f"pareto-{target}.png"
        figure.savefig(path)
    return Picture(
        path=path,
        title=f"Accuracy against leakage of {target}",
        caption=f"Leakage of {target}: means with 95 % bootstrap intervals. The thin line joins "
        "the points that no other beats in both. Grey lines: accuracy of the active alone, of one "
        "table of all features, and of TVFL.",
    )


def _draw_points(axes: Axes, shown: Sequence[Entry], target: str) -> list[Text]:
    """One colour and marker a defence; returns the points' labels, which may still overlap."""
    styles = dict(
        zip(
            dict.fromkeys(e.point.defence for e in shown),
            cycle(zip(_COLOURS, _MARKERS, strict=True)),
            strict=False,
        )
    )
    named: set[str] = set()
    labels: list[Text] = []
    for entry in shown:
        colour, marker = styles[entry.point.defence]
        leak, accuracy = entry.leakage[target].advantage, entry.accuracy
        axes.errorbar(
            leak.mean, 100 * accuracy.mean,
            xerr=_arms(leak.mean, leak.low, leak.high, 1),
            yerr=_arms(accuracy.mean, accuracy.low, accuracy.high, 100),
            fmt=marker, color=colour, markersize=7, elinewidth=1, capsize=2,
            label=entry.point.defence if entry.point.defence not in named else None,
        )  # fmt: skip
        named.add(entry.point.defence)
        labels.append(
            axes.text(leak.mean, 100 * accuracy.mean, _told(entry), fontsize=7.5, color=colour)
        )
    return labels


def _arms(mean: float, low: float, high: float, scale: float) -> list[list[float]] | None:
    if math.isnan(low):
        return None
    return [[scale * max(0.0, mean - low)], [scale * max(0.0, high - mean)]]


def _deltas(board: Board) -> str:
    """At which delta the epsilons of rows hold."""
    deltas = {one.guard.delta for entry in board.entries for one in entry.point.configs}
    return f"ε_x holds at delta {', '.join(f'{delta:g}' for delta in sorted(deltas))}."


def _told(entry: Entry) -> str:
    strength = f"{entry.point.strength} " if entry.point.strength else ""
    epsilons = f"{number(entry.epsilon_x)}, {number(entry.epsilon_y)}, {entry.releases}"
    return f"{strength}({epsilons})"


def _draw_front(axes: Axes, front: Sequence[Entry], target: str) -> None:
    if len(front) < 2:
        return
    axes.plot(
        [entry.leakage[target].advantage.mean for entry in front],
        [100 * entry.accuracy.mean for entry in front],
        color=ATTACK, linewidth=1, alpha=0.6, zorder=1, label="Pareto front",
    )  # fmt: skip


def _draw_references(axes: Axes, references: Sequence[Entry]) -> None:
    """Lines within the points' range; one far above or below would flatten the picture."""
    axes.margins(0.14)
    low, high = axes.get_ylim()
    room = (high - low) / 2
    for entry, style in zip(references, _DASHES, strict=False):
        percent = 100 * entry.accuracy.mean
        if not low - room <= percent <= high + room:
            place = "above" if percent > high else "below"
            axes.plot([], [], " ", label=f"{place}: {entry.point.defence}, {percent:.1f} %")
            continue
        axes.axhline(
            percent, color=OTHER, linewidth=1.3, linestyle=style,
            label=entry.point.defence,
        )  # fmt: skip
