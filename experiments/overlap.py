"""Whom passives help on: the people that all parties share, or each on its own overlap.

`python -m experiments.overlap [--json] [--seeds N] [--picture FILE.png]`: test accuracy of
APFed-C on digits (three passives) and breast cancer (two) in both modes of `alignment.mode`,
beside the active alone.
Each passive knows a share of the active's training people, drawn for itself: with M
passives all share about overlap^M of them. No noise and a plain sum: neither of them
depends on the mode. Runs that are done are not run again.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
import pandas as pd
import typer
from matplotlib.axes import Axes
from rich.console import Console
from rich.table import Table

from experiments.finished_run import FinishedRun
from experiments.study import Figures, Point, Study
from experiments.study_page import ATTACK, OTHER, OURS, drawing
from secure_apfed.config import Config
from secure_apfed.data import PartyTable, VerticalData
from secure_apfed.errors import NoHelpWarning
from secure_apfed.seeds import derive_seed

__all__ = [
    "OVERLAPS", "OverlapPoint", "compare_overlaps", "draw_overlaps", "main", "points_of",
    "with_overlap",
]  # fmt: skip

Mode: TypeAlias = Literal["all", "pairwise"]

OVERLAPS = (0.05, 0.2, 0.5, 0.8)
_MODES: tuple[Mode, ...] = ("all", "pairwise")
_COLOURS = (OURS, ATTACK)  # of the modes
_DATASETS: Mapping[str, Mapping[str, Any]] = {
    "digits": {
        "data": {"dataset": "digits", "views": 4, "overlap": 1.0},
        "model": {"hidden": [64], "representation": 32, "projection": 64, "dropout": 0.2},
        "train": {"batch_size": 64, "learning_rate": 0.1},
    },
    "breast_cancer": {
        "data": {"dataset": "breast_cancer", "overlap": 1.0},
        "model": {"hidden": [64], "representation": 16, "projection": 64, "dropout": 0.2},
        "train": {"batch_size": 32, "learning_rate": 0.02},
    },
}


@dataclass(frozen=True, kw_only=True)
class OverlapPoint(Point):
    """Runs in which each passive knows this share of the active's training people.

    Attributes:
        mode: None where the active trains alone, with an overlap of 0.
    """

    overlap: float = 0.0
    mode: Mode | None = None

    def data(self, seed: int) -> VerticalData:
        data = super().data(seed)
        return data if self.mode is None else with_overlap(data, self.overlap, seed=seed)


def points_of(
    dataset: str, folder: Path, *, overlaps: Sequence[float] = OVERLAPS, epochs: int = 20
) -> list[OverlapPoint]:
    """The active alone, then both modes at each overlap."""
    settings = {
        **_DATASETS[dataset],
        "train": {
            **_DATASETS[dataset]["train"], "epochs": epochs, "evaluate_every": epochs,
            "device": "cpu", "max_gradient_norm": 1.0,
        },
        "alignment": {"protocol": "circuit"},
        "secure_sum": {"scheme": "plain", "allow_single_passive": True},
        "guard": {"mechanism": "none"},
    }  # fmt: skip
    name = f"overlap-{dataset}-{epochs}-epochs"
    alone = Config.model_validate({**settings, "name": name, "method": "single_view"})
    points = [OverlapPoint(config=alone, folder=folder, figures_only=True)]
    for overlap, mode in product(overlaps, _MODES):
        changes = {
            "name": f"{name}-{overlap:g}-{mode}", "method": "apfed_c",
            "alignment": alone.alignment.model_copy(update={"mode": mode}),
        }  # fmt: skip
        config = alone.model_copy(update=changes)
        points.append(replace(points[0], config=config, overlap=overlap, mode=mode))
    return points


def with_overlap(data: VerticalData, overlap: float, *, seed: int) -> VerticalData:
    """Leave each passive its own share of the active's training people, and all test people."""
    train = [data.active.ids[row] for row in data.train_rows.tolist()]
    passives = []
    for table in data.passives:
        draw = np.random.default_rng(derive_seed(seed, "overlap", table.name))
        dropped = set(draw.permutation(train)[round(overlap * len(train)) :].tolist())
        rows = [row for row, person in enumerate(table.ids) if person not in dropped]
        passives.append(_rows_of(table, rows))
    return VerticalData(data.active, tuple(passives), data.classes, data.train_rows, data.test_rows)


def _rows_of(table: PartyTable, rows: Sequence[int]) -> PartyTable:
    ids = tuple(table.ids[row] for row in rows)
    return PartyTable(table.name, ids, table.features[list(rows)], None, table.encoding)


def compare_overlaps(points: Sequence[OverlapPoint], *, seeds: int = 5) -> pd.DataFrame:
    """Run what is missing.

    Returns:
        A row for each point. overlap: share of the active's training people that each passive
        knows; method: apfed_c in a mode, or the active alone; helped: training people on whom at
        least one passive helps, mean over the seeds; accuracy, deviation: on the test rows, mean
        and standard deviation over the seeds.
    """
    results = Study(points=points, seeds=range(seeds)).run(figures=_figures)
    lines = []
    for point in points:
        rows = results.of(point)
        lines.append({
            "dataset": point.config.data.dataset, "overlap": point.overlap,
            "method": f"apfed_c, {point.mode}" if point.mode else "the active alone",
            "helped": rows["helped"].mean(), "accuracy": rows["accuracy"].mean(),
            "deviation": rows["accuracy"].std() if seeds > 1 else 0.0,
        })  # fmt: skip
    return pd.DataFrame(lines)


def _figures(run: FinishedRun) -> Figures:
    """Where anybody is aligned, all test people are."""
    told = run.outcome
    helped = told.aligned_rows - told.test_rows if told.aligned_rows and told.test_rows else 0
    yield {"accuracy": told.accuracy[told.method], "helped": helped}


def draw_overlaps(rows: pd.DataFrame, path: Path) -> None:
    """Write a PNG: a column each data set, accuracy above, people helped on below.

    The line without overlap is the active alone: a dashed line, with a band of one standard
    deviation.
    """
    datasets = list(rows.groupby("dataset", sort=False))
    with drawing(path, (4.2 * len(datasets), 5.4)) as figure:
        grid = figure.subplots(2, len(datasets), squeeze=False, sharex=True)
        for (accuracy, helped), (dataset, own) in zip(grid.T, datasets, strict=True):
            accuracy.set_title(str(dataset).replace("_", " "))
            _accuracy(accuracy, own)
            _helped(helped, own[own["overlap"] > 0])
        handles, labels = grid[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)


def _accuracy(axes: Axes, rows: pd.DataFrame) -> None:
    (alone,) = rows[rows["overlap"] == 0].to_dict("records")
    mean, spread = 100 * alone["accuracy"], 100 * alone["deviation"]
    axes.axhspan(mean - spread, mean + spread, color=OTHER, alpha=0.15, linewidth=0)
    axes.axhline(mean, color=OTHER, linestyle="--", label=alone["method"])
    lines = rows[rows["overlap"] > 0].groupby("method", sort=False)
    for apart, colour, (method, line) in zip((-0.6, 0.6), _COLOURS, lines, strict=True):
        # a little apart, so that the bars of both can be seen
        axes.errorbar(
            100 * line["overlap"] + apart, 100 * line["accuracy"], 100 * line["deviation"],
            color=colour, marker="o", markersize=4, capsize=3, label=str(method),
        )  # fmt: skip
    axes.set_ylabel("test accuracy, %")


def _helped(axes: Axes, rows: pd.DataFrame) -> None:
    lines = rows.groupby("method", sort=False)
    for apart, colour, (_, line) in zip((-2, 2), _COLOURS, lines, strict=True):
        axes.bar(100 * line["overlap"] + apart, line["helped"], width=3.6, color=colour)
    axes.set_xticks(sorted(set(100 * rows["overlap"])))
    axes.set_xlabel("people of the active known to each passive, %")
    axes.set_ylabel("people helped on")


def main(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON list, nothing else.")] = False,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each line.")] = 5,
    epochs: Annotated[int, typer.Option(min=1, help="Of each run.")] = 20,
    picture: Annotated[Path | None, typer.Option(help="Also draw it into this PNG file.")] = None,
    output: Annotated[Path, typer.Option(help="Folder of finished runs.")] = Path("runs/overlap"),
) -> None:
    """Compare the two overlap modes on digits and breast cancer."""
    warnings.simplefilter("ignore", NoHelpWarning)  # what few common rows come to is the question
    points = [point for name in _DATASETS for point in points_of(name, output, epochs=epochs)]
    rows = compare_overlaps(points, seeds=seeds)
    if picture is not None:
        draw_overlaps(rows, picture)
    if as_json:
        typer.echo(rows.to_json(orient="records", double_precision=15))
        return
    table = Table(*rows.columns)
    for row in rows.to_dict("records"):
        table.add_row(
            row["dataset"], f"{row['overlap']:.0%}", row["method"], f"{row['helped']:.0f}",
            f"{row['accuracy']:.4f}", f"{row['deviation']:.4f}",
        )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
