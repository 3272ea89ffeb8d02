"""Regression and anomaly detection with the passives' help, beside what the active does alone.

`secure-apfed study tasks`: R2 on scikit-learn's diabetes with 60 and with all labels, and AUC on
digits, of whose ten classes each is left out of training once. What the active does alone is
measured on the same rows, and help is compared with it by seed.
"""

import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from joblib import Parallel, delayed

from apfed_experiments.columns import P_HOLM, Column, Table, adjust, within, write_tables
from apfed_experiments.solo import SoloRecord, keep_solo
from apfed_experiments.study import MASKED, STUDENT
from apfed_experiments.summary import Interval, Row, shared_share_of
from apfed_protocols.errors import UnsafeChoiceWarning
from secure_apfed.config import Config
from secure_apfed.data import find_dataset, load_data
from secure_apfed.errors import NarrowBatchWarning
from secure_apfed.runs.run import run

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
    """One table.

    Attributes:
        key: for files; title: for people; task: of its runs.
        data: of each of its runs, over which a seed's figure is the mean.
        lines: by label, the settings of a method; without passives first.
    """

    key: str
    title: str
    task: str
    data: tuple[Mapping[str, Any], ...]
    lines: Mapping[str, Mapping[str, Any]]

    def config(self, label: str, data: Mapping[str, Any], seed: int) -> Config:
        return Config.model_validate({
            "name": self.key, "seed": seed, "party_seeds": "shared_for_comparison",
            "task": self.task, "data": data, "guard": {"mechanism": "none"},
            "transcript": {"keep": "none"}, **self.lines[label],
        })  # fmt: skip


def _diabetes(labelled: int | None) -> Case:
    number = "all 331" if labelled is None else labelled
    return Case(
        key=f"diabetes-{labelled or 'all'}", title=f"Diabetes, {number} labels", task="regression",
        data=({"dataset": "diabetes", "labelled": labelled},),
        lines={
            "SingleVL": {"method": "single_view", **_REGRESSION},
            "APFed-R, masked sum": {"method": "apfed_r", **_REGRESSION, **MASKED},
            "Votes, masked sum": {
                "method": {"name": "votes", "prior": "labeller", "labeller": "ridge"}, **STUDENT,
                **MASKED,
            },
        },
    )  # fmt: skip


CASES: tuple[Case, ...] = (
    _diabetes(60),
    _diabetes(None),
    Case(
        key="digits-left-out", title="Digits, each class left out of training once",
        task="anomaly",
        data=tuple(
            {"dataset": "digits", "views": 4, "anomaly": one}
            for one in find_dataset("digits").classes
        ),
        lines={
            "SingleVL": {"method": "single_view", **_ANOMALY},
            "APFed-R, masked sum": {"method": "apfed_r", **_ANOMALY, **MASKED},
            "APFed-C, masked sum": {"method": "apfed_c", **_ANOMALY, **MASKED},
        },
    ),
)  # fmt: skip


def compare_tasks(
    folder: Path, *, seeds: Sequence[int], jobs: int = 1, cases: Sequence[Case] = CASES
) -> list[Table]:
    """Run every line and the solo baselines of each case for each seed; return and write rows."""
    folder.mkdir(parents=True, exist_ok=True)
    tables = [Table(COLUMNS, _rows(case, seeds, jobs), case.title) for case in cases]
    adjust([row for table in tables for row in table.rows], len(seeds))
    write_tables(folder / "tasks", tables, seeds=len(seeds))
    return tables


def _rows(case: Case, seeds: Sequence[int], jobs: int) -> list[Row]:
    """What the active does alone has no gain."""
    asked = [(label, data, seed) for seed in seeds for data in case.data for label in case.lines]
    reached = Parallel(jobs)(delayed(_reached)(case, *one) for one in asked)
    solo = Parallel(jobs)(delayed(_alone)(case, data, seed) for seed in seeds for data in case.data)
    first = next(iter(case.lines))
    settings = case.config(first, case.data[0], seeds[0]).data
    shared = shared_share_of(settings, load_data(settings, seed=seeds[0]))
    measure = solo[0].judged_by
    best = _by_seed([one.best.test for one in solo], seeds)

    def row(model: str, values: Sequence[float], gain: Sequence[float] | None = None) -> Row:
        return {
            "case": case.title, "model": model, "measure": measure.name,
            "value": Interval.of(values, shared=shared),
            "gain": None if gain is None else Interval.of(gain, shared=shared),
        }  # fmt: skip

    rows = []
    for title in dict.fromkeys(found.title for found in solo[0].baselines):
        of_all = [one.test for found in solo for one in found.baselines if one.title == title]
        rows.append(row(f"{title}, alone", _by_seed(of_all, seeds)))
    rows.append(row(f"best alone, {solo[0].chosen}", best))
    for label in case.lines:
        of_line = [value for value, one in zip(reached, asked, strict=True) if one[0] == label]
        found, gain = _by_seed(of_line, seeds), None
        if label != first:
            gain = [measure.gain(one, other) for one, other in zip(found, best, strict=True)]
        rows.append(row(label, found, gain))
    return rows


def _by_seed(values: Sequence[float], seeds: Sequence[int]) -> list[float]:
    """The mean over a seed's data."""
    return [float(one) for one in np.asarray(values).reshape(len(seeds), -1).mean(axis=1)]


def _reached(case: Case, label: str, data: Mapping[str, Any], seed: int) -> float:
    with warnings.catch_warnings():
        # Plain sums are unsafe by name, and the first batches of an autoencoder point in one
        # direction, as its biases do; it trains alone on these.
        for kind in (UnsafeChoiceWarning, NarrowBatchWarning):
            warnings.simplefilter("ignore", kind)
        return next(iter(run(case.config(label, data, seed), None).scores.values()))


def _alone(case: Case, data: Mapping[str, Any], seed: int) -> SoloRecord:
    with tempfile.TemporaryDirectory() as folder:
        return keep_solo(case.config(next(iter(case.lines)), data, seed), Path(folder, "solo.json"))
