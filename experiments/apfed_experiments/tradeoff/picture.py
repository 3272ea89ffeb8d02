"""The picture of a study for one target: accuracy against the worst attack's advantage.

Points may stand close, so the picture has their numbers only; the legend says which each is.
"""

import math
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

from adjustText import adjust_text
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.text import Text

from apfed_experiments.drawing import ATTACK, COLOURS, OTHER, Picture, drawing
from apfed_experiments.tradeoff import Board, Entry, on_the_front
from apfed_experiments.words import number

__all__ = ["draw", "write_picture"]

_DASHES = ((0, (1, 2)), (0, (6, 2)), (0, (6, 2, 1, 2)))
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_WIDTH_INCHES, _PLOT_INCHES, _LINE_INCHES = 8.0, 4.6, 0.2


def write_picture(board: Board, target: str, folder: Path) -> Picture:
    """Write the picture of one target into the study's folder."""
    path = folder / f"pareto-{target}.png"
    with drawing(path, (_WIDTH_INCHES, _PLOT_INCHES)) as figure:
        draw(figure, board, target)
    return Picture(
        path=path,
        title=f"Accuracy against leakage of {target}",
        caption=f"Leakage of {target}: means with 95 % intervals. The thin line joins "
        "the points that no other beats in both. Grey lines: accuracy of the active alone, of one "
        "table of all features, and of TVFL. Dotted: the best solo model, below which nothing "
        "helped.",
    )


def draw(figure: Figure, board: Board, target: str) -> list[Text]:
    """Draw the picture; return the points' numbers in it, which do not overlap."""
    references = [entry for entry in board.entries if entry.point.reference]
    shown = [
        entry for entry in board.entries if target in entry.leakage and not entry.point.reference
    ]
    # The legend has two columns; one line of it is for the front.
    lines = math.ceil((len(shown) + len(references) + 2) / 2)
    figure.set_size_inches(_WIDTH_INCHES, _PLOT_INCHES + _LINE_INCHES * lines)
    axes = figure.subplots()
    numbers = _draw_points(axes, shown, target)
    _draw_front(axes, on_the_front(shown, target), target)
    _draw_references(axes, references)
    _draw_alone(axes, shown)
    metric = next(iter(shown)).leakage[target].metric.replace("_", " ")
    axes.axvline(0, color=OTHER, linewidth=1)
    axes.set(
        title=f"Accuracy against leakage of {target}",
        xlabel=f"worst attack's advantage, {metric} over its baseline",
        ylabel="test accuracy, per cent",
    )
    figure.legend(
        loc="outside lower center", ncols=2, frameon=False, fontsize=8.5, labelspacing=0.7
    )
    figure.draw_without_rendering()
    adjust_text(
        numbers, ax=axes, expand=(2.4, 1.9), iter_lim=500,
        arrowprops={"arrowstyle": "-", "color": OTHER, "lw": 0.6},
    )  # fmt: skip
    return numbers


def _draw_points(axes: Axes, shown: Sequence[Entry], target: str) -> list[Text]:
    """One colour and marker a defence; returns the points' numbers, which may still overlap."""
    defences = dict.fromkeys(entry.point.defence for entry in shown)
    styles = dict(zip(defences, cycle(zip(COLOURS, _MARKERS, strict=True)), strict=False))
    numbers: list[Text] = []
    for count, entry in enumerate(shown, start=1):
        colour, marker = styles[entry.point.defence]
        leak, accuracy = entry.leakage[target].advantage, entry.accuracy
        spent = entry.summary
        epsilons = f"{number(entry.epsilon)}, {number(spent.epsilon_y)}, {spent.releases}"
        axes.errorbar(
            leak.mean, 100 * accuracy.mean, xerr=leak.arms(), yerr=accuracy.arms(100),
            fmt=marker, color=colour, markersize=7, elinewidth=1, capsize=2,
            label=f"{count}  {entry.point.label} ({epsilons})",
        )  # fmt: skip
        numbers.append(
            axes.text(
                leak.mean, 100 * accuracy.mean, str(count), fontsize=9, weight="bold",
                color=colour, path_effects=[withStroke(linewidth=2.5, foreground="white")],
            )
        )  # fmt: skip
    return numbers


def _draw_front(axes: Axes, front: Sequence[Entry], target: str) -> None:
    if len(front) < 2:
        return
    axes.plot(
        [entry.leakage[target].advantage.mean for entry in front],
        [100 * entry.accuracy.mean for entry in front],
        color=ATTACK, linewidth=1, alpha=0.6, zorder=1, label="Pareto front",
    )  # fmt: skip


def _draw_alone(axes: Axes, shown: Sequence[Entry]) -> None:
    """The best that the active does without anybody: what lies below it was no help."""
    if not shown or not shown[0].alone:
        return
    name, accuracy = shown[0].alone
    axes.axhline(
        100 * accuracy, color=COLOURS[0], linewidth=1.3, linestyle=":",
        label=f"best solo model ({name})",
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
