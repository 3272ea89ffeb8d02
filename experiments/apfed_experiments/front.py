"""The Pareto front of gain against features read: rows of a comparison that no other row beats.

A row of the table is dominated where another one gains as much or more while attacks read less of
the passives' features, by means over the seeds. A row that shows labels to the passives does not
dominate one that shows them none: it asks for more trust. Only rows with both values take part: a
row that nobody attacked is neither on the front nor dominated.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from apfed_experiments.drawing import COLOURS, OTHER_COLOUR, OUR_COLOUR, Picture, open_figure
from apfed_experiments.summary import Interval

PointT = TypeVar("PointT")


@dataclass(frozen=True, kw_only=True)
class FrontRow:
    """A row of a comparison, as a point of gain and leakage.

    Attributes:
        name: title of the row.
        gain: gain in accuracy over the best local model, a share of test rows.
        leakage: advantage (R2 over the baseline) of the best attack on the passives' features.
        has_shown_labels: whether the passives receive labels of the active.
    """

    name: str
    gain: Interval
    leakage: Interval
    has_shown_labels: bool = False


def find_front(
    points: Iterable[PointT],
    *,
    get_leakage: Callable[[PointT], float],
    get_gain: Callable[[PointT], float],
) -> list[PointT]:
    """Return the Pareto front of two values, ascending by `get_leakage`; of several equal points
    one is returned.

    Args:
        points: the compared points, of any type.
        get_leakage: function that returns how much attacks read at a point; less is better.
        get_gain: function that returns the gain or accuracy of a point; more is better.
    """
    front: list[PointT] = []
    # In this order a point is on the front if it is worth more than all points before it.
    for point in sorted(points, key=lambda point: (get_leakage(point), -get_gain(point))):
        if not front or get_gain(point) > get_gain(front[-1]):
            front.append(point)
    return front


def find_dominating(row: FrontRow, rows: Sequence[FrontRow]) -> FrontRow | None:
    """Return the row that dominates `row`: the one with the highest gain if several do. None: none
    does.

    A row dominates another where it gains as much or more, attacks read less, and no more labels
    are shown.
    """
    dominating_rows = [other for other in rows if _dominates(other, row)]
    return max(dominating_rows, key=lambda other: other.gain.mean, default=None)


def _dominates(other: FrontRow, row: FrontRow) -> bool:
    """Return whether `other` dominates `row`.

    It is at least as good in gain, features read and labels shown, and not equal in all.
    """
    if other.has_shown_labels and not row.has_shown_labels:
        return False
    is_as_good = other.gain.mean >= row.gain.mean and other.leakage.mean <= row.leakage.mean
    is_equal = (other.gain.mean, other.leakage.mean, other.has_shown_labels) == (
        row.gain.mean,
        row.leakage.mean,
        row.has_shown_labels,
    )
    return is_as_good and not is_equal


def describe_front(rows: Sequence[FrontRow]) -> str:
    """Return a sentence on the rows of the Pareto front, and one for each dominated row."""
    if not rows:
        return "No line has both a gain and an attack on the passives' features."
    rows_with_dominating = [(row, find_dominating(row, rows)) for row in rows]
    front_rows = sorted(
        (row for row, other in rows_with_dominating if other is None),
        key=lambda row: row.leakage.mean,
    )
    sentences = [f"On the front of gain against features read: {_describe_rows(front_rows)}."]
    sentences += [
        f"{row.name} is dominated by {other.name}: {100 * other.gain.mean:+.1f} for "
        f"{100 * row.gain.mean:+.1f} points, R2 {other.leakage.mean:.2f} for "
        f"{row.leakage.mean:.2f}."
        for row, other in rows_with_dominating
        if other is not None
    ]
    return " ".join(sentences)


def describe_dominated(rows_by_data_set: Mapping[str, Sequence[FrontRow]]) -> str:
    """Return a sentence that names the rows that are dominated on all of several data sets.

    `rows_by_data_set`: compared rows by data set. A row counts if at least two data sets have it.
    """
    names = dict.fromkeys(row.name for rows in rows_by_data_set.values() for row in rows)
    dominated_names = []
    for name in names:
        dominating_rows = [
            find_dominating(row, rows)
            for rows in rows_by_data_set.values()
            for row in rows
            if row.name == name
        ]
        if len(dominating_rows) > 1 and all(other is not None for other in dominating_rows):
            dominated_names.append(f"{name} ({len(dominating_rows)} data sets)")
    return f"{', '.join(dominated_names)}." if dominated_names else "No line."


def _describe_rows(rows: Sequence[FrontRow]) -> str:
    """Return the names of these rows with gain in points and R2 of the features that are read."""
    return "; ".join(
        f"{row.name} ({100 * row.gain.mean:+.1f} points, R2 {row.leakage.mean:.2f})" for row in rows
    )


def draw_front(path: Path, rows: Sequence[FrontRow], *, title: str) -> Picture:
    """Draw gain against features read, write the picture and return it.

    A solid line joins the front of those rows that show no labels to passives. A dashed line joins
    the front of all rows.
    """
    with open_figure(path, (7.5, 4.4)) as figure:
        axes = figure.subplots()
        # Rows that show labels ask for more trust, so there is a front without them, too.
        rows_without_labels = [row for row in rows if not row.has_shown_labels]
        for compared_rows, line_style in ((rows_without_labels, "-"), (rows, "--")):
            front = find_front(
                compared_rows,
                get_leakage=lambda row: row.leakage.mean,
                get_gain=lambda row: row.gain.mean,
            )
            axes.plot(
                [row.leakage.mean for row in front],
                [100 * row.gain.mean for row in front],
                color=OUR_COLOUR,
                linestyle=line_style,
                linewidth=1.5,
                zorder=1,
            )
        for index, row in enumerate(rows):
            is_dominated = find_dominating(row, rows) is not None
            colour = COLOURS[index % len(COLOURS)]
            axes.errorbar(
                row.leakage.mean,
                100 * row.gain.mean,
                xerr=row.leakage.compute_error_bars(),
                yerr=row.gain.compute_error_bars(100),
                fmt="s" if row.has_shown_labels else "o",
                color=colour,
                markerfacecolor="white" if is_dominated else colour,
                capsize=2.5,
                label=row.name,
            )
        axes.axhline(0, color=OTHER_COLOUR, linestyle=":", linewidth=1.2)
        axes.set(
            xlabel="features of passives that the active reads, R2 over its baseline",
            ylabel="points over the best local model",
        )
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
    return Picture(
        path=path,
        title=f"{title}: gain against features read",
        caption="Means over the seeds with 95 % intervals. Squares show labels to the passives, "
        "circles do not. The solid line is the front of circles, the dashed one that of all. "
        "Hollow: dominated, since another line that shows no more gains as much or more while less "
        "is read.",
    )
