"""Regression and anomaly detection with the passives' help, beside what the active does alone.

`secure-apfed study tasks`: R2 on scikit-learn's diabetes with 60 and with all labels, and AUC on
digits, of whose ten classes each is left out of training once. What the active does alone is
measured on the same rows, and help is compared with it by seed. Runs that are done are not run
again.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from apfed_experiments.columns import P_HOLM, Column, Table, adjust, within, write_tables
from apfed_experiments.solo import SoloRecord, read_solo, solo_file
from apfed_experiments.study import MASKED, STUDENT, Line, OnDone, Point, Results, Study
from apfed_experiments.summary import Interval, Row, accuracy_of
from secure_apfed.config import Config
from secure_apfed.data import find_dataset
from secure_apfed.errors import NarrowBatchWarning
from secure_apfed.runs.outcome import Outcome

__all__ = ["CASES", "Case", "compare_tasks"]

COLUMNS = (
    Column(name="case"),
    Column(name="model", title="model"),
    Column(name="measure", title="measure"),
    Column(name="value", title="mean and 95 % interval", form=within(".3f")),
    Column(name="gain", title="help minus best alone", form=within("+.3f")),
    P_HOLM,
)
_REGRESSION: Mapping[str, Any] = {
    "model": {"hidden": [32], "representation": 16, "dropout": 0.0},
    "train": {"epochs": 30, "batch_size": 32, "learning_rate": 0.01, "loss": "huber",
              "evaluate_every": 30, "device": "cpu"},
}  # fmt: skip
_ANOMALY: Mapping[str, Any] = {
    "model": {"hidden": [64], "representation": 8, "dropout": 0.0},
    "train": {"epochs": 40, "batch_size": 128, "learning_rate": 0.003, "optimizer": "adam",
              "momentum": 0.0, "evaluate_every": 40, "device": "cpu"},
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """One table: title, task, the data of each of its runs, over which a seed's figure is the mean,
    and lines, the one without passives first.
    """

    key: str
    title: str
    task: str
    data: tuple[Mapping[str, Any], ...]
    lines: tuple[Line, ...]

    def config(self, line: Line, at: int) -> Config:
        return line.of({
            "name": f"{self.key}-{line.key}" + (f"-{at}" if len(self.data) > 1 else ""),
            "task": self.task, "data": self.data[at], "guard": {"mechanism": "none"},
            "transcript": {"keep": "none"},
        })  # fmt: skip

    def points(self, line: Line, folder: Path) -> list[Point]:
        return [
            _Quiet(config=self.config(line, at), folder=folder, figures_only=True,
                   alone=self.config(self.lines[0], at))
            for at in range(len(self.data))
        ]  # fmt: skip


class _Quiet(Point):
    """The first batches of an autoencoder point in one direction, as its biases do; it trains alone
    on these.
    """

    def played(self, config: Config) -> Outcome:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NarrowBatchWarning)
            return super().played(config)


def _lines(settings: Mapping[str, Any], *helped: str) -> tuple[Line, ...]:
    return (
        Line(key="single", label="SingleVL", settings={"method": "single_view", **settings}),
        *(Line(key=method, label=f"APFed-{method[-1].upper()}, masked sum",
               settings={"method": method, **settings, **MASKED}) for method in helped),
    )  # fmt: skip


_VOTES = Line(
    key="votes", label="Votes, masked sum",
    settings={"method": {"name": "votes", "prior": "labeller", "labeller": "ridge"}, **STUDENT,
              **MASKED},
)  # fmt: skip
CASES: tuple[Case, ...] = (
    *(
        Case(key=f"diabetes-{labelled or 'all'}", title=f"Diabetes, {number} labels",
             task="regression", data=({"dataset": "diabetes", "labelled": labelled},),
             lines=(*_lines(_REGRESSION, "apfed_r"), _VOTES))
        for labelled, number in ((60, "60"), (None, "all 331"))
    ),
    Case(
        key="digits-left-out", title="Digits, each class left out of training once",
        task="anomaly", lines=_lines(_ANOMALY, "apfed_r", "apfed_c"),
        data=tuple({"dataset": "digits", "views": 4, "anomaly": left_out}
                   for left_out in find_dataset("digits").classes),
    ),
)  # fmt: skip


def compare_tasks(
    folder: Path, *, seeds: Sequence[int], jobs: int = 1, cases: Sequence[Case] = CASES,
    on_done: OnDone = lambda done, total: None,
) -> list[Table]:  # fmt: skip
    """Run what is missing of each case; return and write rows.

    Raises CheckpointError where the folder holds runs with other settings.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    points = {
        (case.key, line.key): case.points(line, folder) for case in cases for line in case.lines
    }
    study = Study(points=[point for of_line in points.values() for point in of_line], seeds=seeds)
    results = study.run(jobs=jobs, on_done=on_done, solo=True)
    tables = []
    for case in cases:
        of_case = {line.label: points[case.key, line.key] for line in case.lines}
        tables.append(Table(COLUMNS, _rows(case, of_case, results, seeds), case.title))
    adjust([row for table in tables for row in table.rows], len(seeds))
    write_tables(folder / "tasks", tables, seeds=len(seeds))
    return tables


def _rows(
    case: Case, points: Mapping[str, Sequence[Point]], results: Results, seeds: Sequence[int]
) -> list[Row]:
    first, *helped = points
    solo = [[_record(point, seed) for point in points[first]] for seed in seeds]
    shared = float(results.of(points[first][0])["shared"].max())
    measure = solo[0][0].judged_by
    best = _means([[record.best.test for record in of_seed] for of_seed in solo])

    def row(model: str, values: Sequence[float], gain: Sequence[float] | None = None) -> Row:
        return {
            "case": case.title, "model": model, "measure": measure.name,
            "value": Interval.of(values, shared=shared),
            "gain": None if gain is None else Interval.of(gain, shared=shared),
        }  # fmt: skip

    rows = []
    for title in dict.fromkeys(found.title for found in solo[0][0].baselines):
        tests = [
            [found.test for record in of_seed for found in record.baselines if found.title == title]
            for of_seed in solo
        ]
        rows.append(row(f"{title}, alone", _means(tests)))
    rows.append(row(f"best alone, {solo[0][0].chosen}", best))
    for label, of_line in points.items():
        by_data = [accuracy_of(results.of(point)).tolist() for point in of_line]
        reached, gain = _means(list(zip(*by_data, strict=True))), None
        if label in helped:
            gain = [measure.gain(ours, alone) for ours, alone in zip(reached, best, strict=True)]
        rows.append(row(label, reached, gain))
    return rows


def _record(point: Point, seed: int) -> SoloRecord:
    alone = point.trial(seed).alone
    return read_solo(alone, solo_file(alone, point.folder))


def _means(by_seed: Sequence[Sequence[float]]) -> list[float]:
    return [float(mean) for mean in np.array(by_seed).mean(axis=1)]
