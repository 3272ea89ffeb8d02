"""The pictures of a run: learning, calibration, attacks and their baselines.

Each is drawn by a function that returns a figure and a caption, or None if there is nothing to
show.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from apfed_attacks.interface import AttackResult
from apfed_experiments.drawing import (
    ATTACK_COLOUR,
    GRID_COLOUR,
    OTHER_COLOUR,
    OUR_COLOUR,
    STYLE,
    Picture,
    estimate_text_inches,
    set_margins,
)
from apfed_experiments.report.run import ReportedRun, load_predictions
from apfed_experiments.words import format_difference, format_key, title_attack
from apfed_experiments.worth import CAPTION, draw_worth, make_worth_interval
from secure_apfed.base.files import own_subfolder
from secure_apfed.measures.intervals import estimate_share
from secure_apfed.measures.table import MEASURES, Measure, calibration_curve
from secure_apfed.runs.outcome import Outcome

_LEARNING_WIDTH = 8.0
# Inches: a panel of curves, the margin on its left, its title above and its axis below.
_CURVE_WIDTH = 3.4
_CURVE_HEIGHT = 2.0
_CURVE_LEFT = 0.7
_TITLE_HEIGHT = 0.32
_AXIS_HEIGHT = 0.5
_MANY_EPOCHS = 25  # curves of more epochs have no markers
_MAX_VARIANT_LENGTH = 36
# Inches of the picture of attacks: a line of a name, the row below it, and margins. Names are
# wrapped at so many characters that a phone shows the whole picture.
_NAME_LINE_HEIGHT = 0.16
_ATTACK_ROW_HEIGHT = 0.45
_ATTACK_SIDE_MARGIN = 0.25
_ATTACK_TOP_MARGIN = 0.5
_MIN_ATTACKS_WIDTH = 4.6
_MAX_LINE_LENGTH = 64
FigureWithCaption = tuple[Figure, str] | None


def write_pictures(run: ReportedRun, folder: Path) -> tuple[Picture, ...]:
    """Write every picture that the run has data for into a folder; return them in reading order.

    Older pictures in the folder are deleted.
    """
    for old_picture in own_subfolder(folder).glob("*.png"):
        old_picture.unlink()
    pictures: list[Picture] = []
    draw_functions: tuple[tuple[str, str, Callable[[], FigureWithCaption]], ...] = (
        ("learning", "Learning", lambda: _draw_learning(run)),
        ("who-helped", "What each passive's help was worth", lambda: _draw_passive_worth(run)),
        ("calibration", "Calibration", lambda: _draw_calibration(run)),
        ("attacks", "Attacks against their baselines", lambda: _draw_attacks(run.attacks or ())),
        ("roc", "Who trained the model", lambda: _draw_roc(run)),
    )
    with mpl.rc_context(STYLE):
        for name, title, draw in draw_functions:
            figure_and_caption = draw()
            if figure_and_caption is None:
                continue
            figure, caption = figure_and_caption
            path = folder / f"{name}.png"
            figure.savefig(path)
            pictures.append(Picture(path=path, title=title, caption=caption))
    return tuple(pictures)


def _draw_learning(run: ReportedRun) -> FigureWithCaption:
    """Draw the training loss and the test measure by epoch, as far as several epochs have them.

    None: neither has two values.
    """
    losses = [(row.epoch, row.loss) for row in run.epochs if row.loss is not None]
    # One point is no curve.
    if len(losses) < 2:
        losses = []
    curves = _collect_curves(run)
    if not losses and not curves:
        return None
    panel_count = 2 if losses and curves else 1
    height = _TITLE_HEIGHT + _CURVE_HEIGHT + _AXIS_HEIGHT
    figure = Figure(figsize=(_LEARNING_WIDTH, panel_count * height))
    # One below the other, so that both are legible on a phone.
    panels = figure.subplots(panel_count, 1, squeeze=False)[:, 0]
    has_many_epochs = len(run.epochs) > _MANY_EPOCHS
    line_options: dict[str, Any] = {"marker": None if has_many_epochs else "o", "markersize": 3.5}
    panel_texts = []  # what the panels show, for the caption
    right_margin = 0.1
    if losses:
        panels[0].plot(*zip(*losses, strict=True), color=OUR_COLOUR, **line_options)
        panels[0].set(title="Training loss", xlabel="epoch", ylabel="mean task loss")
        panels[0].set_ylim(bottom=0)
        panel_texts.append("task loss on the rows that it trains on")
    if curves:
        labels = _draw_measure_curves(panels[-1], run, curves, line_options)
        right_margin += estimate_text_inches(labels)
        measure_title = run.outcome.headline_measure.title
        panel_texts.append(f"{measure_title} on rows that no training step saw")
    for axes in panels:
        axes.xaxis.get_major_locator().set_params(integer=True)
    width = _CURVE_LEFT + _CURVE_WIDTH + right_margin
    figure.set_size_inches(width, panel_count * height)
    figure.subplots_adjust(hspace=(_TITLE_HEIGHT + _AXIS_HEIGHT) / _CURVE_HEIGHT)
    set_margins(
        figure, left=_CURVE_LEFT, right=right_margin, bottom=_AXIS_HEIGHT, top=_TITLE_HEIGHT
    )
    caption = f"The active's {', and its '.join(panel_texts)}."
    if curves and (final_fit_text := _describe_finished_model(run.outcome)):
        caption += f" The last point is of the finished model, {final_fit_text}."
    if omitted_titles := [
        run.title_inference(name) for name in run.outcome.accuracy if name not in curves
    ]:
        caption += f" Measured once, and so no curve: {'; '.join(omitted_titles)}."
    return figure, caption


def _draw_measure_curves(
    axes: Axes,
    run: ReportedRun,
    curves: Mapping[str, Sequence[tuple[int, float]]],
    line_options: Mapping[str, Any],
) -> list[str]:
    """Draw the test measure by epoch, and return the texts beside the curves' ends.

    `curves`: points (epoch, measure) by mode of inference, the method's own first. `line_options`:
    options of matplotlib's `plot`.
    """
    measure = run.outcome.headline_measure
    curve_ends = []
    for position, (inference, points) in enumerate(curves.items()):
        colour = OUR_COLOUR if position == 0 else OTHER_COLOUR
        axes.plot(*zip(*points, strict=True), color=colour, **line_options)
        last_value = points[-1][1]
        curve_ends.append((last_value, run.title_inference(inference), colour))
    # The caption of the axis leaves out who knows the rows.
    axis_text = f"per cent {run.describe_tested_rows(next(iter(curves)))}".partition(", whom")[0]
    axes.set(
        title=f"Test {measure.title}",
        xlabel="epoch",
        ylabel=axis_text if measure.is_share else measure.title,
    )
    last_epoch = max(points[-1][0] for points in curves.values())
    return _label_curves(axes, last_epoch, curve_ends, measure)


def _draw_passive_worth(run: ReportedRun) -> FigureWithCaption:
    """Draw the worth of each passive (what the model loses without it); None: it was not
    measured.
    """
    who_helped = run.who_helped
    if who_helped is None or not who_helped.passives:
        return None
    figure = Figure(layout="constrained")
    draw_worth(
        figure,
        [worth.passive for worth in who_helped.passives],
        [make_worth_interval(worth) for worth in who_helped.passives],
        [worth.wire_bytes for worth in who_helped.passives],
        measure=MEASURES[who_helped.measure],
    )
    return figure, CAPTION


def _describe_finished_model(outcome: Outcome) -> str:
    """Return in words what was fitted to the model after training; empty: nothing."""
    parts = []
    if outcome.calibration is not None:
        parts.append("whose probabilities are calibrated")
    if outcome.threshold is not None:
        parts.append(f"which decides at {outcome.threshold:.3g}")
    return " and ".join(parts)


def _collect_curves(run: ReportedRun) -> dict[str, list[tuple[int, float]]]:
    """Return points (epoch, measure) by mode of inference, for modes that several epochs measured.

    Measures between 0 and 1 are in per cent.
    """
    measure = run.outcome.headline_measure
    scale = 100 if measure.is_share else 1
    scores_by_epoch = [
        (row.epoch, row.get_scores(measure.name)) for row in run.epochs if row.accuracy
    ]
    curves = {}
    for inference in run.outcome.accuracy:
        points = [
            (epoch, scale * values[inference])
            for epoch, values in scores_by_epoch
            if math.isfinite(values.get(inference, math.nan))
        ]
        if len(points) > 1:
            curves[inference] = points
    return curves


def _label_curves(
    axes: Axes, last_epoch: int, curve_ends: Sequence[tuple[float, str, str]], measure: Measure
) -> list[str]:
    """Write each curve's name and last value beside its end, and return the texts.

    Texts of ends that are close are moved up, so that they do not overlap.

    Args:
        axes: axes that hold the curves.
        last_epoch: last epoch, beside which the texts stand.
        curve_ends: last value, name and colour of each curve.
        measure: the drawn measure; one between 0 and 1 is drawn in per cent.
    """
    texts = list[str]()
    scale = 100 if measure.is_share else 1
    low, high = axes.get_ylim()
    line_height = 0.075 * (high - low)  # height of a line of text, as a share of the axis
    text_height = -math.inf
    for value, name, colour in sorted(curve_ends):
        text_height = max(value, text_height + line_height)
        texts.append(f"{name}, {measure.format_value(value / scale)}")
        axes.annotate(
            texts[-1],
            (last_epoch, value),
            xytext=(8, text_height),
            color=colour,
            textcoords=("offset points", "data"),
            va="center",
            annotation_clip=False,
        )
    return texts


def _draw_calibration(run: ReportedRun) -> FigureWithCaption:
    """Draw predicted and observed shares of the positive class.

    None: there are not two classes, or too few predictions.
    """
    predictions = load_predictions(run)
    points = (
        () if predictions is None or predictions.classes != 2 else calibration_curve(predictions)
    )
    if len(points) < 2:
        return None
    figure = Figure(figsize=(4.6, 4.2))
    axes = figure.subplots()
    highest = 0.0
    for point in points:
        # The 95 % interval of the observed share, from the number of positives and of rows.
        low, high = estimate_share(round(point.observed * point.rows), point.rows)
        axes.plot([point.predicted] * 2, [low, high], color=OUR_COLOUR, linewidth=1.2)
        axes.plot(point.predicted, point.observed, "o", color=OUR_COLOUR, markersize=5)
        highest = max(highest, high, point.predicted)
    axes.plot([0, highest], [0, highest], color=OTHER_COLOUR, linestyle=":")
    axes.set(
        title="Calibration",
        xlim=(0, 1.03 * highest),
        ylim=(0, 1.03 * highest),
        xlabel="probability predicted",
        ylabel="share observed",
    )
    set_margins(figure, left=0.75, right=0.15, bottom=0.5, top=0.35)
    return figure, (
        "Test rows in ranges of the probability of the positive class, about as many each, and the "
        "95 % interval of the share that is of it. On the dotted line what was predicted is met."
    )


def _draw_attacks(results: Sequence[AttackResult]) -> FigureWithCaption:
    """Draw each attack joined to its baseline, in a panel for each metric, the highest advantage
    first.

    None: no attack has a score and a baseline.
    """
    rows_by_metric = _collect_attack_rows(results)
    if not rows_by_metric:
        return None
    all_names = [name for rows in rows_by_metric.values() for name, *_ in rows]
    names_height = _NAME_LINE_HEIGHT * max(name.count("\n") + 1 for name in all_names)
    row_height = names_height + _ATTACK_ROW_HEIGHT
    space_below = _AXIS_HEIGHT + 0.1  # of each panel
    heights = [len(rows) * row_height for rows in rows_by_metric.values()]
    # Names stand above their rows and not beside them, so that a phone shows the whole picture.
    width = max(_MIN_ATTACKS_WIDTH, estimate_text_inches(all_names) + 2 * _ATTACK_SIDE_MARGIN)
    height = _ATTACK_TOP_MARGIN + sum(heights) + space_below * len(heights)
    figure = Figure(figsize=(width, height))
    panels = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (metric, rows) in zip(panels, rows_by_metric.items(), strict=True):
        _draw_dumbbells(axes, metric, rows, names_share=names_height / row_height)
    legend_marks = [
        Line2D([], [], ls="", marker="o", color=ATTACK_COLOUR, markersize=9),
        Line2D([], [], ls="", marker="D", color=OTHER_COLOUR, markersize=7),
    ]
    legend_texts = ["attack, best variant", "best baseline with equal knowledge"]
    figure.legend(
        legend_marks, legend_texts, loc="upper left", ncols=1, frameon=False, borderpad=0.1
    )
    figure.subplots_adjust(hspace=space_below * len(heights) / sum(heights))
    set_margins(
        figure,
        left=_ATTACK_SIDE_MARGIN,
        right=_ATTACK_SIDE_MARGIN,
        bottom=_AXIS_HEIGHT,
        top=_ATTACK_TOP_MARGIN,
    )
    return figure, (
        "How well each adversary guesses with what it received, beside the same adversary without "
        "it, or with it exchanged between the rows. The difference is the advantage: by chance as "
        "often below 0 as above where nothing leaks. A small one proves no privacy."
    )


def _collect_attack_rows(
    results: Sequence[AttackResult],
) -> dict[str, list[tuple[str, float, float]]]:
    """Return name, score and baseline's score of the attacks that have both, by metric.

    Names are wrapped into lines. Attacks are sorted by advantage, the highest first.
    """
    rows_by_metric: dict[str, list[tuple[str, float, float]]] = {}
    for result in results:
        metric = str(result.metric)
        score = result.score.get(metric)
        baseline = result.baselines.get(str(result.baseline), {}).get(metric)
        if not result.applicable or score is None or baseline is None:
            continue
        attacker = f"by {result.adversary}, {_shorten_name(str(result.variant))}"
        lines = [
            *wrap(title_attack(result), _MAX_LINE_LENGTH),
            *wrap(attacker, _MAX_LINE_LENGTH),
        ]
        name = "\n".join(lines)
        rows_by_metric.setdefault(format_key(metric), []).append((name, score, baseline))
    return {
        metric: sorted(rows, key=lambda row: row[2] - row[1])
        for metric, rows in rows_by_metric.items()
    }


def _shorten_name(variant: str) -> str:
    """Return the name of an attack's variant, shortened to `_MAX_VARIANT_LENGTH` characters."""
    return (
        variant
        if len(variant) <= _MAX_VARIANT_LENGTH
        else f"{variant[: _MAX_VARIANT_LENGTH - 3]}..."
    )


def _draw_dumbbells(
    axes: Axes, metric: str, rows: Sequence[tuple[str, float, float]], *, names_share: float
) -> None:
    """Draw the attacks of one metric, each score joined to its baseline's by a bar, below the name.

    Args:
        axes: axes of the panel.
        metric: name of the metric, for the axis.
        rows: name, score and baseline's score of each attack.
        names_share: share of a row's height that its name takes.
    """
    for position, (name, attack_score, baseline_score) in enumerate(rows):
        axes.text(
            0.0,
            position,
            name,
            transform=axes.get_yaxis_transform(),
            va="bottom",
            fontsize=9,
            linespacing=1.15,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
        )
        height = position + (1 - names_share) * 0.6  # a little below the middle of the space
        axes.plot(
            [baseline_score, attack_score],
            [height, height],
            color=GRID_COLOUR,
            linewidth=5,
            zorder=1,
        )
        axes.plot(baseline_score, height, "D", color=OTHER_COLOUR, markersize=7)
        axes.plot(attack_score, height, "o", color=ATTACK_COLOUR, markersize=9)
        axes.annotate(
            format_difference(attack_score - baseline_score),
            ((attack_score + baseline_score) / 2, height),
            xytext=(0, 8),
            textcoords="offset points",
            ha="center",
            fontsize=9,
        )
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_ylim(len(rows) - names_share, -names_share)
    axes.set(xlabel=f"{metric} of the guess")
    axes.margins(x=0.12)


def _name_curve(result: AttackResult) -> str:
    """Return the legend of a ROC curve: attack, adversary, variant and AUC."""
    name = (
        f"{format_key(result.attack)} by {result.adversary}, {_shorten_name(str(result.variant))}"
    )
    return f"{name}, AUC {result.score['auc']:.3f}"


def _draw_roc(run: ReportedRun) -> FigureWithCaption:
    """Draw the ROC curves of attacks on membership on logarithmic axes; None: no attack has one."""
    results_with_roc = [result for result in run.attacks or () if result.roc]
    if not results_with_roc:
        return None
    figure = Figure(figsize=(5.6, 4.4), layout="constrained")
    axes = figure.subplots()
    for result in results_with_roc:
        false_rates, true_rates = (np.array(rates) for rates in zip(*result.roc, strict=True))
        axes.step(
            false_rates,
            true_rates,
            where="post",
            color=ATTACK_COLOUR,
            linewidth=1.8,
            label=_name_curve(result),
        )
    # A logarithmic axis has no 0; it begins at one person of all that an attack judged.
    lowest_rate = 1 / max(sum(result.counts.values()) for result in results_with_roc)
    axes.plot(
        [lowest_rate, 1], [lowest_rate, 1], color=OTHER_COLOUR, linestyle=":", label="guessing"
    )
    axes.set(
        xscale="log",
        yscale="log",
        xlim=(lowest_rate, 1),
        ylim=(lowest_rate, 1.1),
        title="Who trained the model",
        xlabel="false positive rate",
        ylabel="true positive rate",
    )
    axes.legend(loc="lower right", frameon=False)
    return figure, (
        "Attacks on membership by an outside querier. What matters is the left end: the share of "
        "the people who trained that are recognised almost without a mistake."
    )
