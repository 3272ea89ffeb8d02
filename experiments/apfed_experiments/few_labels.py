"""What decides how much APFed helps where few rows have a label: each thing by itself.

`python -m apfed_experiments.few_labels [--json] [--seeds N]`: handwritten digits, the Zernike
moments at the active, 50 labels, all training people aligned. Around one setting (passives apart,
lambda 10, 1,000 steps) it changes whether the passives are one party or five, lambda, the number of
steps, and whether labels are spread over h at the end. No noise and a plain sum: neither depends on
these. Runs that are done are not run again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import typer
from rich.console import Console
from rich.table import Table

from apfed_experiments.finished_run import FinishedRun
from apfed_experiments.study import Figures, Point, Study
from secure_apfed.config import Config
from secure_apfed.data import PartyTable, VerticalData
from secure_apfed.data.column_encoding import ColumnEncoding

__all__ = ["Change", "FewLabelsPoint", "changes_of", "compare", "main", "merged", "points_of"]

_METHODS = ("apfed_c", "apfed_r")
_BATCHES = 12  # of an epoch: 1,500 rows by 128
_WEIGHT, _STEPS = 10.0, 1000


@dataclass(frozen=True, kw_only=True)
class Change:
    """One line of the table.

    Attributes:
        method: a key of METHODS.
        weight: lambda_p, of every passive; steps: of the active; together: whether all passives'
            features are one party's; spread: `train.spread_labels`.
    """

    method: str
    weight: float = _WEIGHT
    steps: int = _STEPS
    together: bool = False
    spread: bool = False

    @property
    def name(self) -> str:
        apart = "one" if self.together else "apart"
        spread = "-spread" if self.spread else ""
        return f"few-{self.method}-{apart}-{self.weight:g}-{self.steps}{spread}"


@dataclass(frozen=True, kw_only=True)
class FewLabelsPoint(Point):
    """Runs of one line."""

    change: Change

    def data(self, seed: int) -> VerticalData:
        data = super().data(seed)
        return merged(data) if self.change.together else data


def changes_of(methods: Sequence[str] = _METHODS) -> list[Change]:
    """The active alone, then around the middle one thing at a time, for each method.

    Five passives of weight lambda pull as one of 5 lambda does, so one party takes both.
    """
    lines = [Change(method="single_view", weight=0.0, spread=spread) for spread in (False, True)]
    for method in methods:
        middle = Change(method=method)
        lines += [middle, replace(middle, spread=True)]
        lines += [replace(middle, weight=weight) for weight in (0.0, 1.0, 3.0, 30.0)]
        lines += [replace(middle, steps=steps) for steps in (300, 3000)]
        lines += [replace(middle, together=True, weight=weight) for weight in (10.0, 50.0)]
    return lines


def points_of(folder: Path, changes: Sequence[Change], *, labelled: int = 50) -> list[Point]:
    """A point for each line."""
    return [
        FewLabelsPoint(
            config=_config(change, labelled), folder=folder, figures_only=True, change=change
        )
        for change in changes
    ]


def _config(change: Change, labelled: int) -> Config:
    epochs = round(change.steps / _BATCHES)
    settings: Mapping[str, Any] = {
        "name": change.name,
        "method": change.method,
        "data": {"dataset": "handwritten", "active_view": 5, "labelled": labelled},
        "model": {
            "network": "mlp", "hidden": [128], "representation": 64, "projection": 64,
            "dropout": 0.0,
        },
        "passives": {"default": {"weight": change.weight}},
        "train": {
            "epochs": epochs, "batch_size": 128, "learning_rate": 0.02, "momentum": 0.9,
            "evaluate_every": epochs, "spread_labels": change.spread, "device": "cpu",
        },
        "secure_sum": {"scheme": "plain", "clip": None, "allow_single_passive": True},
        "guard": {"mechanism": "none"},
        "transcript": {"keep": "none"},
    }  # fmt: skip
    return Config.model_validate(settings)


def merged(data: VerticalData) -> VerticalData:
    """All passives' columns at one passive, of the people that all of them know."""
    first = data.passives[0]
    known = set(first.ids).intersection(*(table.ids for table in data.passives))
    ids = tuple(person for person in first.ids if person in known)
    parts = []
    for table in data.passives:
        place = {person: row for row, person in enumerate(table.ids)}
        parts.append(table.features[[place[person] for person in ids]].flatten(1))
    features = torch.cat(parts, dim=1)
    encoding = ColumnEncoding.plain(tuple(f"column {at}" for at in range(features.shape[1])))
    one = PartyTable(first.name, ids, features, None, encoding)
    return replace(data, passives=(one,))


def compare(
    folder: Path, changes: Sequence[Change], *, labelled: int = 50, seeds: int = 5, jobs: int = 1
) -> pd.DataFrame:
    """Run what is missing.

    Returns:
        A row for each line: accuracy, its standard deviation over the seeds, and the mean gain
        over the same method at lambda 0, seed by seed, NaN where that is no line.
    """
    points = points_of(folder, changes, labelled=labelled)
    results = Study(points=points, seeds=range(seeds)).run(jobs=jobs, figures=_figures)
    found = {
        change: results.of(point).sort_values("seed")["accuracy"].to_numpy()
        for change, point in zip(changes, points, strict=True)
    }
    lines = []
    for change, accuracy in found.items():
        alone = found.get(Change(method=change.method, weight=0.0))
        lines.append({
            "method": change.method, "passives": "one" if change.together else "apart",
            "lambda": change.weight, "steps": change.steps, "spread": change.spread,
            "accuracy": accuracy.mean(), "deviation": accuracy.std(ddof=1) if seeds > 1 else 0.0,
            "gain": float("nan") if alone is None else (accuracy - alone).mean(),
        })  # fmt: skip
    return pd.DataFrame(lines)


def _figures(run: FinishedRun) -> Figures:
    yield {"accuracy": run.outcome.accuracy[run.outcome.method]}


def main(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON list, nothing else.")] = False,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each line.")] = 5,
    jobs: Annotated[int, typer.Option(min=1, help="Processes, one thread each.")] = 2,
    labelled: Annotated[int, typer.Option(min=10, help="Rows with a label.")] = 50,
    output: Annotated[Path, typer.Option(help="Folder of figures.")] = Path("runs/few-labels"),
) -> None:
    """Isolate separation, lambda, steps and spreading of labels on handwritten digits."""
    rows = compare(
        output / str(labelled), changes_of(), labelled=labelled, seeds=seeds, jobs=jobs
    )  # fmt: skip
    if as_json:
        typer.echo(rows.to_json(orient="records", double_precision=15))
        return
    table = Table(*rows.columns, title=f"accuracy, {labelled} labels, mean of {seeds} seeds, %")
    for row in rows.to_dict("records"):
        shares = ("accuracy", "deviation", "gain")
        table.add_row(
            *(f"{100 * row[key]:.1f}" if key in shares else str(row[key]) for key in rows.columns)
        )
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
