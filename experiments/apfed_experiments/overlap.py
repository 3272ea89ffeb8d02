"""Whom passives help on where few rows have a label: people that all know, or each on its own.

`secure-apfed study overlap`: test accuracy of APFed-C and votes on digits (three passives) and
breast cancer (two) in both modes of `alignment.mode`, beside the best that the active does alone.
Each passive knows a share of the active's training people, drawn for itself: with M passives all
share about overlap^M of them. No noise and a plain sum: neither of them depends on the mode. Runs
that are done are not run again.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from apfed_experiments.columns import P_HOLM, Column, Table, adjust
from apfed_experiments.drawing import ATTACK, COLOURS, OTHER, OURS, add_gain_axis, drawing
from apfed_experiments.finished import FinishedRun
from apfed_experiments.study import Figures, Point, Study, figures_of, rows_of
from apfed_experiments.summary import Gain, Interval, Row, accuracy_of
from secure_apfed.config import Config
from secure_apfed.data import VerticalData
from secure_apfed.seeds import derive_seed

__all__ = [
    "DATASETS", "OVERLAPS", "OverlapPoint", "compare_overlaps", "draw_overlaps", "points_of",
    "with_overlap",
]  # fmt: skip

Mode: TypeAlias = Literal["all", "pairwise"]
OVERLAPS = (0.05, 0.2, 0.5, 0.8)
NOTHING = Interval(0.0, 0.0, 0.0)
"""What the active gains without passives."""
COLUMNS = (
    Column(name="dataset", title="dataset"),
    Column(name="overlap", title="overlap", form="{:.0%}".format),
    Column(name="method", title="method"),
    Column(name="mode", title="mode"),
    Column(name="helped", title="helped on", form="{:.0f}".format),
    Column(name="reached", title="accuracy %", keys=("accuracy", "deviation"),
           form=lambda both: f"{100 * both[0]:.1f} ± {100 * both[1]:.1f}"),
    Column(name="gain", title="gain, points", keys=("gain", "low", "high"),
           form=lambda gain: "" if gain is NOTHING else gain.text(scale=100, form="+.1f")),
    P_HOLM,
)  # fmt: skip
_LOOKS = {
    "apfed_c, all": (OURS, "o"),
    "apfed_c, pairwise": (ATTACK, "o"),
    "votes, pairwise": (COLOURS[2], "s"),
}
DATASETS: Mapping[str, Mapping[str, Any]] = {
    "digits": {
        "data": {"dataset": "digits", "views": 4, "overlap": 1.0, "labelled": 50, "limit": 800},
        "model": {"hidden": [64], "representation": 32, "projection": 64, "dropout": 0.0},
        "train": {"batch_size": 64, "learning_rate": 0.05},
    },
    "breast_cancer": {
        "data": {"dataset": "breast_cancer", "active_view": 2, "overlap": 1.0, "labelled": 20},
        "model": {"hidden": [64], "representation": 16, "projection": 64, "dropout": 0.0},
        "train": {"batch_size": 32, "learning_rate": 0.02},
    },
}
_LEAST_VOTED = 0.2
_VOTES = {"model": {"network": "random_features"}, "train": {"epochs": 1, "device": "cpu"}}


@dataclass(frozen=True, kw_only=True)
class OverlapPoint(Point):
    overlap: float
    mode: Mode

    def data(self, seed: int) -> VerticalData:
        return with_overlap(super().data(seed), self.overlap, seed=seed)


def points_of(
    dataset: str, folder: Path, *, overlaps: Sequence[float] = OVERLAPS, epochs: int = 10
) -> list[OverlapPoint]:
    """APFed-C in both modes at each overlap, and votes where each passive has its own people.

    Votes teach a student the rows that somebody votes on, and no other: where all must know a row
    or each knows few, those may hold labels of one class or none, so these points are left out.
    """
    apfed_c = {
        **DATASETS[dataset],
        "method": "apfed_c",
        "passives": {"default": {"weight": 10.0}},
        "train": {
            **DATASETS[dataset]["train"], "epochs": epochs, "evaluate_every": epochs,
            "device": "cpu", "max_gradient_norm": 1.0, "spread_labels": True,
        },
        "secure_sum": {"scheme": "plain", "allow_single_passive": True},
        "guard": {"mechanism": "none"},
    }  # fmt: skip
    votes = {**apfed_c, **_VOTES, "method": "votes"}
    del votes["passives"]
    name = f"overlap-{dataset}-{epochs}-epochs"
    points = []
    for (settings, mode), overlap in product(
        ((apfed_c, "all"), (apfed_c, "pairwise"), (votes, "pairwise")), overlaps
    ):
        if settings is votes and overlap < _LEAST_VOTED:
            continue
        own = {
            "name": f"{name}-{settings['method']}-{overlap:g}-{mode}",
            "alignment": {"protocol": "circuit", "mode": mode},
        }
        config = Config.model_validate({**settings, **own})
        alone = Config.model_validate({**apfed_c, **own})
        kept: dict[str, Any] = {"folder": folder, "figures_only": True, "alone": alone}
        points.append(OverlapPoint(config=config, **kept, overlap=overlap, mode=mode))
    return points


def with_overlap(data: VerticalData, overlap: float, *, seed: int) -> VerticalData:
    """Leave each passive its own share of the active's training people, and all test people."""
    train = [data.active.ids[row] for row in data.train_rows.tolist()]
    passives = []
    for table in data.passives:
        draw = np.random.default_rng(derive_seed(seed, "overlap", table.name))
        dropped = set(draw.permutation(train)[round(overlap * len(train)) :].tolist())
        rows = [row for row, person in enumerate(table.ids) if person not in dropped]
        passives.append(rows_of(table, rows))
    return replace(data, passives=tuple(passives))


def compare_overlaps(points: Sequence[OverlapPoint], *, seeds: int = 5, jobs: int = 1) -> Table:
    """Run what is missing; a row for each data set's best solo model, then for each of its points.

    overlap: share of the active's training people that each passive knows; helped: training people
    on whom at least one passive helps, mean over the seeds; accuracy, deviation: on the test rows;
    gain, low, high: over the best solo model, paired by seed, with its 95 % interval.
    """
    results = Study(points=points, seeds=range(seeds)).run(jobs=jobs, figures=_figures, solo=True)
    lines: list[Row] = []
    for point in points:
        rows, dataset = results.of(point), point.config.data.dataset
        gain = Gain.of(rows)
        assert gain is not None
        if dataset not in {line["dataset"] for line in lines}:
            alone = rows[(rows["target"] == "solo") & (rows["name"] == gain.baseline)]["score"]
            lines.append({
                "dataset": dataset, "overlap": 0.0, "method": f"best solo model ({gain.baseline})",
                "mode": "", "helped": 0.0, "reached": _spread(alone), "gain": NOTHING,
                "p_holm": math.nan,
            })  # fmt: skip
        lines.append({
            "dataset": dataset, "overlap": point.overlap, "method": point.config.method.name,
            "mode": point.mode, "helped": rows[rows["target"] == "helped"]["score"].mean(),
            "reached": _spread(accuracy_of(rows)), "gain": gain.over_chosen,
        })  # fmt: skip
    adjust([line for line in lines if line["mode"]], seeds)
    return Table(COLUMNS, lines, "People that all know, or each on its own")


def _spread(accuracies: "pd.Series[float]") -> tuple[float, float]:
    deviation = float(accuracies.std()) if len(accuracies) > 1 else 0.0
    return float(accuracies.mean()), deviation


def _figures(run: FinishedRun) -> Figures:
    yield from figures_of(run)
    told = run.outcome
    helped = told.aligned_rows - told.test_rows if told.aligned_rows and told.test_rows else 0
    yield {"target": "helped", "name": "people", "score": float(helped)}


def draw_overlaps(table: Table, path: Path) -> None:
    """Write a PNG: a column each data set, accuracy and gain above, people helped on below.

    The line without overlap is the best solo model: a dotted line, with a band of one standard
    deviation.
    """
    datasets = list(pd.DataFrame(table.plain()).groupby("dataset", sort=False))
    with drawing(path, (4.6 * len(datasets), 5.8)) as figure:
        grid = figure.subplots(2, len(datasets), squeeze=False, sharex=True)
        for (accuracy, helped), (dataset, own) in zip(grid.T, datasets, strict=True):
            accuracy.set_title(str(dataset).replace("_", " "))
            _accuracy(accuracy, own)
            _helped(helped, own[own["overlap"] > 0].drop_duplicates(["overlap", "mode"]))
        handles, labels = grid[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)


def _accuracy(axes: Axes, rows: pd.DataFrame) -> None:
    (alone,) = rows[rows["overlap"] == 0].to_dict("records")
    mean, spread = 100 * alone["accuracy"], 100 * alone["deviation"]
    axes.axhspan(mean - spread, mean + spread, color=OTHER, alpha=0.15, linewidth=0)
    axes.axhline(mean, color=OTHER, linestyle=":", label="best solo model")
    lines = rows[rows["overlap"] > 0].groupby(["method", "mode"], sort=False)
    for at, ((method, mode), line) in enumerate(lines):
        colour, marker = _LOOKS[f"{method}, {mode}"]
        # a little apart, so that the bars of all can be seen
        axes.errorbar(
            100 * line["overlap"] + at - 1, 100 * line["accuracy"],
            100 * line["deviation"], color=colour, marker=marker, markersize=4, capsize=3,
            label=f"{method}, {mode}",
        )  # fmt: skip
    axes.set_ylabel("test accuracy, %")
    add_gain_axis(axes, mean)


def _helped(axes: Axes, rows: pd.DataFrame) -> None:
    for apart, (mode, line) in zip((-2, 2), rows.groupby("mode", sort=False), strict=True):
        colour, _ = _LOOKS[f"apfed_c, {mode}"]
        axes.bar(100 * line["overlap"] + apart, line["helped"], width=3.6, color=colour)
    axes.set_xticks(sorted(set(100 * rows["overlap"])))
    axes.set_xlabel("people of the active known to each passive, %")
    axes.set_ylabel("people helped on")
