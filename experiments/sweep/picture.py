"""The picture of a sweep: accuracy over epsilon, and lines that bound what one may hope for."""

import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.report.picture_style import STYLE
from experiments.report.pictures import Picture
from experiments.sweep.summary import PointSummary

__all__ = ["draw"]

# Okabe and Ito's colours, which people with any colour vision can tell apart.
_LOOKS = {
    "fresh": ("#0072b2", "o", "-"),
    "frozen": ("#56b4e9", "s", "-"),
    "response": ("#d55e00", "^", "-"),
    "stages": ("#e69f00", "v", "-"),
    "single-response": ("#cc79a7", "D", "--"),
}
_FLAT = {"single": ("#24292f", ":"), "centralised": ("#009e73", "--"), "plain": ("#8a8f98", "-.")}
_APART = 0.05


def draw(path: Path, *, title: str, points: Sequence[PointSummary]) -> Picture:
    """Write the picture of one data set.

    Args:
        path: of the PNG.
        title: of the picture.
        points: of the data set, all of them.
    """
    epsilons = sorted({one.epsilon for one in points if math.isfinite(one.epsilon)})
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8.0, 5.6), layout="constrained")
        axes = figure.subplots()
        for key, (colour, style) in _FLAT.items():
            _draw_flat(axes, [one for one in points if one.line.key == key], colour, style)
        for at, (key, (colour, marker, style)) in enumerate(_LOOKS.items()):
            mine = [one for one in points if one.line.key == key]
            # Moved apart a little, so that no interval hides another.
            shift = (at - (len(_LOOKS) - 1) / 2) * _APART
            axes.errorbar(
                [epsilons.index(one.epsilon) + shift for one in mine],
                [100 * one.accuracy.mean for one in mine],
                yerr=_errors(mine), color=colour, marker=marker, linestyle=style, capsize=2.5,
                markersize=6, label=mine[0].line.label if mine else key,
            )  # fmt: skip
        axes.set_xticks(range(len(epsilons)), [f"{epsilon:g}" for epsilon in epsilons])
        axes.set_xlim(-0.35, len(epsilons) - 0.65)
        axes.set(
            title=title, ylabel="test accuracy, per cent",
            xlabel="epsilon\nblue: of one row's releases, at delta 1e-5; red, orange, pink: of one "
            "training label",
        )  # fmt: skip
        axes.grid(visible=False, axis="x")
        figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
        figure.savefig(path)
    return Picture(
        path=path, title=title,
        caption="Means over the seeds with 95 % bootstrap intervals. Blue lines protect released "
        "rows with the encoder held fixed and no label; red, orange and pink ones protect training "
        "labels and no features: their epsilons do not compare. The bands are intervals of "
        "SingleVL, of one model on all parties' features, and of APFed-C without protection.",
    )  # fmt: skip


def _draw_flat(axes: Axes, points: Sequence[PointSummary], colour: str, style: str) -> None:
    for one in points:
        axes.axhline(100 * one.accuracy.mean, color=colour, linestyle=style, label=one.line.label)
        if math.isfinite(one.accuracy.low):
            axes.axhspan(
                100 * one.accuracy.low, 100 * one.accuracy.high, color=colour, alpha=0.09, lw=0
            )


def _errors(points: Sequence[PointSummary]) -> list[list[float]]:
    spans = [one.accuracy for one in points]
    return [
        [100 * (one.mean - one.low) if math.isfinite(one.low) else 0.0 for one in spans],
        [100 * (one.high - one.mean) if math.isfinite(one.high) else 0.0 for one in spans],
    ]
