"""The picture of a trade-off of a user's own training loop, like the one of `study tradeoff`.

Run by: users who vary a defence in their own loop and have, for each strength, an accuracy, an
epsilon and the results of attacks (`apfed_attacks.evaluate`).
"""

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, TypeAlias

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from apfed_attacks.foreign import Evaluation, Finding
from apfed_attacks.interface import Target
from apfed_experiments.drawing import STYLE
from apfed_experiments.summary import Interval, Leakage, Row
from apfed_experiments.tradeoff import Leaderboard, draw_board
from apfed_experiments.words import format_number
from secure_apfed.errors import DataError

__all__ = ["tradeoff_figure"]

Point: TypeAlias = Mapping[str, Any]
_REQUIRED_KEYS = ("label", "accuracy", "attack")
_ALL_KEYS = (*_REQUIRED_KEYS, "epsilon")
_EXAMPLE_POINT = '{"label": "noise 1.0", "accuracy": 0.91, "epsilon": 8, "attack": 0.12}'


def tradeoff_figure(
    points: Sequence[Point], *, target: Target | None = None, title: str | None = None
) -> Figure:
    """Draw accuracy against what attacks read, one numbered mark for each point.

    Each point is a mapping with the keys

    - `label`: what was done there, for the legend;
    - `accuracy`: a share, 0 to 1, or several of as many seeds, drawn with their 95 % interval;
    - `attack`: an advantage (score of an attack minus that of its baseline) of your own, or what
      `evaluate` returned; of several seeds a list;
    - `epsilon`: the guarantee, 0 or more; left out, None or infinite: "no guarantee".

    Of several attacks the one is drawn whose advantage is the highest, by its mean over the seeds.
    The figure belongs to no window and changes no setting of matplotlib: `figure.savefig("a.png")`.

    Args:
        target: which target's attacks are drawn; None: the one that every evaluation attacked.
        title: above the picture; None: one that names the target.

    Raises:
        DataError: a point lacks a key, or a number is none or out of range; names the point.
    """
    untyped_points: object = points  # users may pass anything, whatever the annotation says
    is_list = isinstance(untyped_points, Sequence) and not isinstance(untyped_points, str)
    if not is_list or not points:
        raise DataError(
            f"points: expected a list of mappings such as {_EXAMPLE_POINT}, got {points!r}"
        )
    for position, point in enumerate(points, start=1):
        _check_keys(point, position)
    labels = [str(point["label"]) for point in points]
    drawn_target = target or _find_common_target(points, labels)
    rows = [
        _make_row(point, name, drawn_target) for point, name in zip(points, labels, strict=True)
    ]
    with mpl.rc_context(STYLE):
        figure = Figure(layout="constrained")
        draw_board(figure, Leaderboard(rows), drawn_target, describe_guarantee=_describe_point)
        (axes,) = figure.axes
        axes.set_title(title or f"Accuracy against leakage: {drawn_target}")
    return figure


def _check_keys(point: Any, position: int) -> None:
    """Raise DataError unless a point is a mapping with the required keys and no others.

    `position`: position of the point in the caller's list, from 1, for messages.
    """
    if not isinstance(point, Mapping):
        raise DataError(
            f"point {position}: expected a mapping such as {_EXAMPLE_POINT}, got {point!r}"
        )
    if missing_keys := [key for key in _REQUIRED_KEYS if key not in point]:
        raise DataError(
            f"point {position}: lacks {', '.join(missing_keys)}; give a mapping as {_EXAMPLE_POINT}"
        )
    if unknown_keys := [str(key) for key in point if key not in _ALL_KEYS]:
        raise DataError(
            f"point {position}: keys are {', '.join(_ALL_KEYS)}, got {', '.join(unknown_keys)}"
        )


def _describe_point(row: Row) -> str:
    """Return a point's epsilon in words, for the legend."""
    epsilon = row["epsilon"]
    return "no guarantee" if math.isinf(epsilon) else f"epsilon {format_number(epsilon)}"


def _make_row(point: Point, label: str, target: str) -> Row:
    """Return a point as a row that `draw_board` draws.

    `label`: label of the point. `target`: "labels" or "features".

    Raises DataError: a number is missing or out of range.
    """
    accuracies = _parse_numbers(point["accuracy"], f"point {label!r}: accuracy", low=0, high=1)
    epsilon = point.get("epsilon")
    value_name = f"point {label!r}: epsilon"
    epsilon_value = (
        math.inf if epsilon is None else _parse_number(epsilon, value_name, low=0, high=math.inf)
    )
    return {
        # A user's point is no reference and has no local models to gain over.
        "reference": False,
        "gain": None,
        "defence": label,
        "label": label,
        "accuracy": Interval.from_values(accuracies),
        "epsilon": epsilon_value,
        "leakage": {target: _find_leakage(point["attack"], label, target)},
    }


def _list_evaluations(attack: Any) -> list[Evaluation]:
    """Return the evaluations in a point's `attack`; empty if it holds numbers instead."""
    candidates = list(attack) if isinstance(attack, list | tuple) else [attack]
    are_evaluations = all(isinstance(candidate, Evaluation) for candidate in candidates)
    return candidates if are_evaluations else []


def _find_common_target(points: Sequence[Point], labels: Sequence[str]) -> str:
    """Return the one target that the evaluations of all points attacked.

    `labels`: labels of the points. Returns "attack" if all points have numbers instead.

    Raises DataError: no target was attacked at all points, or several were.
    """
    evaluations_by_point = [_list_evaluations(point["attack"]) for point in points]
    targets_by_point = [
        {finding.result.target for evaluation in evaluations for finding in evaluation.findings}
        for evaluations in evaluations_by_point
        if evaluations
    ]
    if not targets_by_point:
        return "attack"
    common_targets = sorted(set.intersection(*targets_by_point))
    if len(common_targets) != 1:
        targets = ", ".join(common_targets) or "none"
        raise DataError(
            f"the evaluations of {', '.join(labels)} all attacked {targets}; say which one is "
            'drawn, such as target="labels"'
        )
    return common_targets[0]


def _find_leakage(attack: Any, label: str, target: str) -> Leakage:
    """Return the leakage of a point: that of the attack with the highest mean advantage.

    Args:
        attack: advantages, or evaluations, one for each seed.
        label: label of the point.
        target: "labels" or "features".

    Raises DataError: the evaluations hold no attack on the target, or a number is not finite.
    """
    evaluations = _list_evaluations(attack)
    if not evaluations:
        advantages = _parse_numbers(
            attack, f"point {label!r}: attack", low=-math.inf, high=math.inf
        )
        return _make_leakage(target, "attack", "score", advantages)
    # Each setting of an attack has one finding for each seed; settings are compared by their means.
    findings_by_setting: dict[str, list[Finding]] = {}
    for evaluation in evaluations:
        for finding in evaluation.findings:
            if finding.result.target == target:
                findings_by_setting.setdefault(finding.result.setting, []).append(finding)
    if not findings_by_setting:
        reasons = evaluations[0].explain_omission().splitlines()
        reason = f" ({reasons[0]})" if reasons else ""
        raise DataError(f"point {label!r}: no attack on {target} was mounted{reason}")
    advantages_by_setting = {
        setting: [finding.advantage for finding in findings]
        for setting, findings in findings_by_setting.items()
    }
    best_setting = max(
        advantages_by_setting, key=lambda setting: float(np.mean(advantages_by_setting[setting]))
    )
    metric = str(findings_by_setting[best_setting][0].result.metric)
    return _make_leakage(target, best_setting, metric, advantages_by_setting[best_setting])


def _make_leakage(target: str, attack: str, metric: str, advantages: Sequence[float]) -> Leakage:
    """Return the leakage of one attack from its advantages over the seeds.

    `target`: "labels" or "features". `metric`: name of the metric of the advantages.
    """
    return Leakage(
        target=target,
        attack=attack,
        metric=metric,
        advantage=Interval.from_values(advantages),
        # The picture shows advantages only.
        score=math.nan,
        baseline=math.nan,
        seeds_note="",
    )


def _parse_numbers(values: Any, value_name: str, *, low: float, high: float) -> list[float]:
    """Return one number or a sequence of numbers as a list, each checked by `_parse_number`."""
    is_sequence = not isinstance(values, str) and np.ndim(values) == 1 and len(values) > 0
    numbers = list(values) if is_sequence else [values]
    return [_parse_number(number, value_name, low=low, high=high) for number in numbers]


def _parse_number(value: Any, value_name: str, *, low: float, high: float) -> float:
    """Return a number after checking that it lies between `low` and `high`.

    Infinity is allowed only if `low` is finite, as for an epsilon. `value_name`: name of the value,
    with which the error message begins.

    Raises DataError: the value is no number, or out of range.
    """
    # Scalars of NumPy and torch become Python numbers; True and False are no numbers here.
    value = value.item() if np.ndim(value) == 0 and hasattr(value, "item") else value
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    allows_infinity = math.isfinite(low)
    if not is_number or not low <= value <= high or (math.isinf(value) and not allows_infinity):
        expected = f"a number from {low:g} to {high:g}" if allows_infinity else "a number"
        raise DataError(f"{value_name}: expected {expected}, got {value!r}")
    return float(value)
