"""Whom passives help on: the people that all parties share, or each on its own overlap.

`python -m experiments.overlap [--json] [--seeds N] [--picture FILE.png]`: test accuracy of
APFed-C on digits (three passives) and breast cancer (two) in both modes of `alignment.mode`,
beside the active alone.
Each passive knows a share of the active's training people, drawn for itself: with M
passives all share about overlap^M of them. No noise and a plain sum: neither of them
depends on the mode.
"""

import json
import statistics
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from matplotlib.axes import Axes
from rich.console import Console
from rich.table import Table

from experiments.study_page import ATTACK, OTHER, OURS, drawing
from protocols.errors import UnsafeChoiceWarning
from secure_apfed.config import Config
from secure_apfed.data import PartyTable, VerticalData, load_data
from secure_apfed.errors import NoHelpWarning
from secure_apfed.runs import run
from secure_apfed.seeds import derive_seed

__all__ = [
    "OVERLAPS",
    "OverlapRow",
    "compare_overlaps",
    "config_of",
    "draw_overlaps",
    "main",
    "with_overlap",
]

OVERLAPS = (0.05, 0.2, 0.5, 0.8)
_MODES = ("all", "pairwise")
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


@dataclass(frozen=True)
class OverlapRow:
    """One line of the comparison.

    Attributes:
        overlap: share of the active's training people that each passive knows.
        method: apfed_c in a mode, or the active alone.
        helped: training people on whom at least one passive helps, mean over the seeds.
        accuracy, deviation: on the test rows, mean and standard deviation over the seeds.
    """

    dataset: str
    overlap: float
    method: str
    helped: float
    accuracy: float
    deviation: float


def config_of(dataset: str, *, mode: str | None, seed: int, epochs: int) -> Config:
    """One run; without a mode the active trains alone."""
    settings = _DATASETS[dataset]
    return Config.model_validate(
        {
            "name": f"overlap-{dataset}",
            "seed": seed,
            "party_seeds": "shared_for_comparison",
            "method": "apfed_c" if mode else "single_view",
            "data": settings["data"],
            "model": settings["model"],
            "train": settings["train"]
            | {
                "epochs": epochs,
                "evaluate_every": epochs,
                "device": "cpu",
                "max_gradient_norm": 1.0,
            },
            "alignment": {"mode": mode or "all", "protocol": "circuit"},
            "secure_sum": {"scheme": "plain", "allow_single_passive": True},
            "guard": {"mechanism": "none"},
        }
    )


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


def compare_overlaps(
    dataset: str, *, overlaps: Sequence[float] = OVERLAPS, seeds: int = 5, epochs: int = 20
) -> Iterator[OverlapRow]:
    """Yield the rows of one data set: the active alone, then both modes at each overlap."""
    yield _row(dataset, 0.0, None, seeds, epochs)
    for overlap in overlaps:
        for mode in _MODES:
            yield _row(dataset, overlap, mode, seeds, epochs)


def _row(dataset: str, overlap: float, mode: str | None, seeds: int, epochs: int) -> OverlapRow:
    accuracies, helped = [], []
    for seed in range(seeds):
        config = config_of(dataset, mode=mode, seed=seed, epochs=epochs)
        data = load_data(config.data, seed=seed)
        result = run(config, None, data=with_overlap(data, overlap, seed=seed) if mode else data)
        accuracies.append(result.accuracy[config.method])
        aligned = result.recording.alignment.get(data.active.name, torch.empty(0))
        helped.append(int(torch.isin(aligned, data.train_rows).sum()))
    return OverlapRow(
        dataset=dataset,
        overlap=overlap,
        method=f"apfed_c, {mode}" if mode else "the active alone",
        helped=statistics.mean(helped),
        accuracy=statistics.mean(accuracies),
        deviation=statistics.stdev(accuracies) if seeds > 1 else 0.0,
    )


def draw_overlaps(rows: Sequence[OverlapRow], path: Path) -> None:
    """Write a PNG: a column each data set, accuracy above, people helped on below.

    The line without overlap is the active alone: a dashed line, with a band of one standard
    deviation.
    """
    datasets = list(dict.fromkeys(row.dataset for row in rows))
    with drawing(path, (4.2 * len(datasets), 5.4)) as figure:
        grid = figure.subplots(2, len(datasets), squeeze=False, sharex=True)
        for column, dataset in enumerate(datasets):
            own = [row for row in rows if row.dataset == dataset]
            _accuracy(grid[0, column], dataset, own)
            _helped(grid[1, column], own)
        handles, labels = grid[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)


def _accuracy(axes: Axes, dataset: str, rows: Sequence[OverlapRow]) -> None:
    (alone,) = (row for row in rows if not row.overlap)
    mean, spread = 100 * alone.accuracy, 100 * alone.deviation
    axes.axhspan(mean - spread, mean + spread, color=OTHER, alpha=0.15, linewidth=0)
    axes.axhline(mean, color=OTHER, linestyle="--", label=alone.method)
    for number, (method, line) in enumerate(_lines(rows).items()):
        # a little apart, so that the bars of both can be seen
        places = [100 * row.overlap + 1.2 * (number - 0.5) for row in line]
        axes.errorbar(
            places,
            [100 * row.accuracy for row in line],
            [100 * row.deviation for row in line],
            color=_COLOURS[number],
            marker="o",
            markersize=4,
            capsize=3,
            label=method,
        )
    axes.set_title(dataset.replace("_", " "))
    axes.set_ylabel("test accuracy, %")


def _helped(axes: Axes, rows: Sequence[OverlapRow]) -> None:
    lines = _lines(rows)
    for number, line in enumerate(lines.values()):
        places = [100 * row.overlap + 4 * (number - 0.5) for row in line]
        axes.bar(places, [row.helped for row in line], width=3.6, color=_COLOURS[number])
    axes.set_xticks(sorted({100 * row.overlap for row in rows if row.overlap}))
    axes.set_xlabel("people of the active known to each passive, %")
    axes.set_ylabel("people helped on")


def _lines(rows: Sequence[OverlapRow]) -> dict[str, list[OverlapRow]]:
    """The rows of each method that has an overlap."""
    lines: dict[str, list[OverlapRow]] = {}
    for row in rows:
        if row.overlap:
            lines.setdefault(row.method, []).append(row)
    return lines


def main(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON list, nothing else.")] = False,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each line.")] = 5,
    epochs: Annotated[int, typer.Option(min=1, help="Of each run.")] = 20,
    picture: Annotated[Path | None, typer.Option(help="Also draw it into this PNG file.")] = None,
) -> None:
    """Compare the two overlap modes on digits and breast cancer."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", UnsafeChoiceWarning)  # see above: a plain sum on purpose
    warnings.simplefilter("ignore", NoHelpWarning)  # what few common rows come to is the question
    rows = [row for name in _DATASETS for row in compare_overlaps(name, seeds=seeds, epochs=epochs)]
    if picture is not None:
        draw_overlaps(rows, picture)
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows]))
        return
    table = Table(*OverlapRow.__dataclass_fields__)
    for row in rows:
        table.add_row(
            row.dataset, f"{row.overlap:.0%}", row.method, f"{row.helped:.0f}",
            f"{row.accuracy:.4f}", f"{row.deviation:.4f}",
        )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
