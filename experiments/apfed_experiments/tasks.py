"""Regression and anomaly detection with the passives' help, beside what the active does alone.

`secure-apfed study tasks`: R2 on scikit-learn's diabetes with 60 and with all labels, and AUC on
digits, of whose ten classes each is left out of training once. What the active does alone is
measured on the same rows, and help is compared with it by seed.
"""

import math
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from joblib import Parallel, delayed

from apfed_experiments.columns import markdown, p_text, write_text
from apfed_experiments.solo import SoloRecord, keep_solo
from apfed_experiments.summary import Interval, holm, shared_share
from apfed_protocols.errors import UnsafeChoiceWarning
from secure_apfed.config import Config
from secure_apfed.data import find_dataset, load_data
from secure_apfed.errors import NarrowBatchWarning
from secure_apfed.files import to_json
from secure_apfed.runs.run import run

__all__ = ["CASES", "HEADER", "Case", "TaskRow", "compare_tasks", "tables_of"]

HEADER = ("model", "measure", "mean and 95 % interval", "help minus best alone", "p, Holm")

_MASKED: Mapping[str, Any] = {"secure_sum": {"scheme": "plain", "masks": "pairwise"}}
_REGRESSION: Mapping[str, Any] = {
    "model": {"hidden": [32], "representation": 16, "dropout": 0.0},
    "train": {"epochs": 30, "batch_size": 32, "learning_rate": 0.01, "loss": "huber",
              "evaluate_every": 30, "device": "cpu"},
}  # fmt: skip
_VOTES: Mapping[str, Any] = {"model": {"network": "random_features"}, "train": {"epochs": 1}}
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
        """Of one run."""
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
            "APFed-R, masked sum": {"method": "apfed_r", **_REGRESSION, **_MASKED},
            "Votes, masked sum": {
                "method": {"name": "votes", "prior": "labeller", "labeller": "ridge"}, **_VOTES,
                **_MASKED,
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
            "APFed-R, masked sum": {"method": "apfed_r", **_ANOMALY, **_MASKED},
            "APFed-C, masked sum": {"method": "apfed_c", **_ANOMALY, **_MASKED},
        },
    ),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TaskRow:
    """One line; `gain` is None of what the active does alone."""

    case: str
    model: str
    measure: str
    value: Interval
    gain: Interval | None
    p_holm: float = math.nan

    def cells(self) -> tuple[str, ...]:
        """Texts in the order of `HEADER`."""
        gain = "" if self.gain is None else self.gain.text(form="+.3f")
        return self.model, self.measure, self.value.text(form=".3f"), gain, p_text(self.p_holm)


def compare_tasks(
    folder: Path, *, seeds: Sequence[int], jobs: int = 1, cases: Sequence[Case] = CASES
) -> list[TaskRow]:
    """Run every line and the solo baselines of each case for each seed; return and write rows."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [row for case in cases for row in _rows(case, seeds, jobs)]
    adjusted = holm([row.gain for row in rows], len(seeds))
    rows = [replace(row, p_holm=p) for row, p in zip(rows, adjusted, strict=True)]
    plain = {"seeds": len(seeds), "rows": [asdict(row) for row in rows]}
    write_text(folder / "tasks.json", to_json(plain, indent=1))
    page = [f"{title}\n\n{markdown(HEADER, cells)}" for title, cells in tables_of(rows)]
    write_text(folder / "tasks.md", "\n".join(page))
    return rows


def tables_of(rows: Sequence[TaskRow]) -> list[tuple[str, list[tuple[str, ...]]]]:
    """The title of each case and the cells of its lines."""
    return [
        (title, [row.cells() for row in rows if row.case == title])
        for title in dict.fromkeys(row.case for row in rows)
    ]


def _rows(case: Case, seeds: Sequence[int], jobs: int) -> list[TaskRow]:
    asked = [(label, data, seed) for seed in seeds for data in case.data for label in case.lines]
    reached = Parallel(jobs)(delayed(_reached)(case, *one) for one in asked)
    solo = Parallel(jobs)(delayed(_alone)(case, data, seed) for seed in seeds for data in case.data)
    values = {
        label: _by_seed([value for value, one in zip(reached, asked, strict=True)
                         if one[0] == label], seeds)
        for label in case.lines
    }  # fmt: skip
    settings = case.config(next(iter(case.lines)), case.data[0], seeds[0]).data
    first_of = load_data(settings, seed=seeds[0])
    shared = shared_share(
        settings, train=len(first_of.train_rows), labelled=len(first_of.labelled_rows),
        test=len(first_of.test_rows),
    )  # fmt: skip
    measure = solo[0].judged_by
    best = _by_seed([one.best.test for one in solo], seeds)
    rows = [
        _row(case, f"{title}, alone", measure.name, _by_seed(
            [found.test for one in solo for found in one.baselines if found.title == title], seeds
        ), shared)
        for title in dict.fromkeys(found.title for found in solo[0].baselines)
    ]  # fmt: skip
    rows.append(_row(case, f"best alone, {solo[0].chosen}", measure.name, best, shared))
    first = next(iter(case.lines))
    for label, found in values.items():
        gain = None if label == first else [
            measure.gain(one, other) for one, other in zip(found, best, strict=True)
        ]  # fmt: skip
        rows.append(_row(case, label, measure.name, found, shared, gain))
    return rows


def _row(
    case: Case, model: str, measure: str, values: Sequence[float], shared: float,
    gain: Sequence[float] | None = None,
) -> TaskRow:  # fmt: skip
    return TaskRow(
        case=case.title, model=model, measure=measure, value=Interval.of(values, shared=shared),
        gain=None if gain is None else Interval.of(gain, shared=shared),
    )  # fmt: skip


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
