"""The pictures of a run: learning curves, accuracy against SingleVL, attacks against baselines.

Each takes what it shows and returns a figure, or None where there is nothing to show.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from attacks.interface import AttackResult
from experiments.report.folder import RunFolder
from experiments.report.leakage_pictures import draw_rebuilt, draw_roc
from experiments.report.names import attack_title, method_name, plain
from experiments.report.picture_style import ATTACK, FAINT, OTHER, OURS, STYLE
from experiments.report.words import signed
from secure_apfed.runs.folder import own_subfolder

__all__ = ["Picture", "write_pictures"]

_WIDTH = 8.0
_Z95 = 1.959964
_MANY_EPOCHS = 25


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A written picture: its file, and a sentence that says what it shows."""

    path: Path
    title: str
    caption: str


def write_pictures(
    run: RunFolder, reference: RunFolder | None, folder: Path
) -> tuple[Picture, ...]:
    """Write every picture that the run has data for; return them in the order of reading.

    Args:
        run: what the pictures are of.
        reference: a SingleVL run on the same data, or None.
        folder: where to write.

    Raises:
        CheckpointError: the folder is a link.
    """
    for stale in own_subfolder(folder).glob("*.png"):
        stale.unlink()
    made: list[Picture] = []
    drawings: tuple[tuple[str, str, Callable[[], tuple[Figure, str] | None]], ...] = (
        ("learning", "Learning", lambda: _learning(run)),
        ("accuracy", "Accuracy against SingleVL", lambda: _accuracy(run, reference)),
        ("attacks", "Attacks against their baselines", lambda: _attacks(run.attacks or ())),
        ("roc", "Who trained the model", lambda: draw_roc(run)),
        ("rebuilt", "What attacks rebuilt", lambda: draw_rebuilt(run)),
    )
    with mpl.rc_context(STYLE):
        for name, title, draw in drawings:
            drawn = draw()
            if drawn is None:
                continue
            figure, caption = drawn
            path = folder / f"{name}.png"
            path.touch(mode=0o600 if name == "rebuilt" else 0o644)
            figure.savefig(path)
            made.append(Picture(path=path, title=title, caption=caption))
    return tuple(made)


def _learning(run: RunFolder) -> tuple[Figure, str] | None:
    if not run.epochs:
        return None
    epochs = [row.epoch for row in run.epochs]
    figure = Figure(figsize=(_WIDTH, 3.1), layout="constrained")
    left, right = figure.subplots(1, 2)
    marker = "o" if len(epochs) <= _MANY_EPOCHS else None
    left.plot(epochs, [row.loss for row in run.epochs], color=OURS, marker=marker, markersize=3.5)
    left.set(title="Training loss", xlabel="epoch", ylabel="mean task loss")
    left.set_ylim(bottom=0)
    measured = [(row.epoch, row.accuracy) for row in run.epochs if row.accuracy]
    ends: list[tuple[float, str, str]] = []
    for at, variant in enumerate(run.outcome.accuracy):
        points = [(epoch, 100 * values[variant]) for epoch, values in measured if variant in values]
        if points:
            color = OURS if at == 0 else OTHER
            right.plot(*zip(*points, strict=True), color=color, marker=marker, markersize=3.5)
            ends.append((points[-1][1], method_name(variant), color))
    right.set(title="Test accuracy", xlabel="epoch", ylabel="per cent of test rows")
    _label_ends(right, epochs[-1], ends)
    for axes in (left, right):
        axes.xaxis.get_major_locator().set_params(integer=True)
    figure.align_labels()
    return figure, (
        "The active's task loss on the rows that it trains on, and its accuracy on rows that no "
        "training step saw."
    )


def _label_ends(axes: Axes, epoch: int, ends: Sequence[tuple[float, str, str]]) -> None:
    """Write each curve's name at its end, moved apart where the ends are close."""
    if not ends:
        return
    low, high = axes.get_ylim()
    gap = 0.075 * (high - low)
    past = -math.inf
    for value, name, color in sorted(ends):
        past = max(value, past + gap)
        axes.annotate(
            f"{name}, {value:.1f} %", (epoch, value), xytext=(8, past), color=color,
            textcoords=("offset points", "data"), va="center", annotation_clip=False,
        )  # fmt: skip


def _accuracy(run: RunFolder, reference: RunFolder | None) -> tuple[Figure, str] | None:
    if reference is None or run.config.method == "single_view":
        return None
    rows = [
        (method_name(variant), value, run.outcome.test_rows, OURS)
        for variant, value in run.outcome.accuracy.items()
    ]
    rows += [
        ("SingleVL (the active alone)", value, reference.outcome.test_rows, OTHER)
        for value in reference.outcome.accuracy.values()
    ]
    figure = Figure(figsize=(_WIDTH, 0.9 + 0.48 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for place, (_, value, tested, color) in enumerate(rows):
        low, high = _wilson(value, tested) if tested else (value, value)
        axes.plot([100 * low, 100 * high], [place, place], color=color, linewidth=2.5)
        axes.plot(100 * value, place, "o", color=color, markersize=8)
        axes.annotate(
            f"{100 * value:.1f} %", (100 * value, place), xytext=(0, 8),
            textcoords="offset points", ha="center", color=color,
        )  # fmt: skip
    _name_rows(axes, [name for name, *_ in rows])
    axes.set(xlabel="test accuracy, per cent")
    axes.margins(x=0.1)
    return figure, (
        "One run with one seed each. The lines are 95 % intervals (Wilson) for the number of test "
        "rows; they do not contain the spread over seeds."
    )


def _attacks(results: Sequence[AttackResult]) -> tuple[Figure, str] | None:
    by_metric: dict[str, list[_Dumbbell]] = {}
    for row in sorted(_dumbbells(results), key=lambda row: row.baseline - row.attack):
        by_metric.setdefault(row.metric, []).append(row)
    if not by_metric:
        return None
    sizes = [len(rows) + 1.0 for rows in by_metric.values()]
    figure = Figure(figsize=(_WIDTH, 0.5 + 0.55 * sum(sizes)), layout="constrained")
    panels = figure.subplots(len(sizes), 1, squeeze=False, height_ratios=sizes)[:, 0]
    for axes, (metric, rows) in zip(panels, by_metric.items(), strict=True):
        _draw_dumbbells(axes, metric, rows)
    attack = Line2D([], [], ls="", marker="o", color=ATTACK, markersize=9)
    baseline = Line2D([], [], ls="", marker="D", color=OTHER, markersize=7)
    names = ["attack, best variant", "best baseline with equal knowledge"]
    figure.legend([attack, baseline], names, loc="outside upper left", ncols=2, frameon=False)
    return figure, (
        "How well each adversary guesses with what it received, beside the same adversary without "
        "it, or with it exchanged between the rows. The difference is the advantage: by chance as "
        "often below 0 as above where nothing leaks. A small one proves no privacy."
    )


@dataclass(frozen=True)
class _Dumbbell:
    name: str
    metric: str
    attack: float
    baseline: float


def _dumbbells(results: Sequence[AttackResult]) -> Iterator[_Dumbbell]:
    """Yield what was computed."""
    for one in results:
        metric = str(one.metric)
        attack = one.score.get(metric)
        baseline = one.baselines.get(str(one.baseline), {}).get(metric)
        if one.applicable and attack is not None and baseline is not None:
            name = f"{attack_title(one)}\nby {one.adversary}"
            yield _Dumbbell(name, plain(metric), attack, baseline)


def _draw_dumbbells(axes: Axes, metric: str, rows: Sequence[_Dumbbell]) -> None:
    for place, row in enumerate(rows):
        axes.plot([row.baseline, row.attack], [place, place], color=FAINT, linewidth=5, zorder=1)
        axes.plot(row.baseline, place, "D", color=OTHER, markersize=7)
        axes.plot(row.attack, place, "o", color=ATTACK, markersize=9)
        axes.annotate(
            signed(row.attack - row.baseline), ((row.attack + row.baseline) / 2, place),
            xytext=(0, 8), textcoords="offset points", ha="center", fontsize=9,
        )  # fmt: skip
    _name_rows(axes, [row.name for row in rows])
    axes.set(xlabel=f"{metric} of the guess")
    axes.margins(x=0.12)


def _name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Name horizontal rows, the first on top."""
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(names) - 0.5, -0.75)
    axes.grid(visible=False, axis="y")


def _wilson(share: float, rows: int) -> tuple[float, float]:
    """Return the 95 % interval of a share of `rows` (Wilson 1927)."""
    z2 = _Z95**2 / rows
    middle = (share + z2 / 2) / (1 + z2)
    half = _Z95 / (1 + z2) * math.sqrt(share * (1 - share) / rows + z2 / (4 * rows))
    return middle - half, middle + half
