"""Credit card clients: what help is worth to a bank that knows five things of them.

`secure-apfed study credit-card`: the active has the five columns about the client and the labels
(22 % default), two passives have repayments and amounts. With 200 labels and with all: every solo
baseline, APFed, votes, and joint prediction, which nobody can do alone afterwards, by AUC and KS
over seeds. Runs that are done are not run again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pandas as pd
from joblib import Parallel, delayed

from apfed_experiments.columns import P_HOLM, Column, Table, adjust, within, write_tables
from apfed_experiments.finished import FinishedRun
from apfed_experiments.solo import SoloRecord, keep_solo, solo_file
from apfed_experiments.study import (
    MASKED,
    STUDENT,
    Figures,
    Line,
    OnDone,
    Point,
    Study,
    centralise,
    solo_figures,
)
from apfed_experiments.summary import Gain, Interval, Row, shared_share_of
from secure_apfed.config import Config
from secure_apfed.data import load_data
from secure_apfed.solo import BASELINES

__all__ = ["LABELLED", "LINES", "READING", "compare_credit", "config_of"]

LABELLED: tuple[int | None, ...] = (200, None)
_MEASURES = ("auc", "ks")
READING = (
    "AUC and KS on 7,500 test rows, mean and 95 % interval over the seeds, which draw test rows, "
    "labelled rows and weights (corrected resampled t). Gain: AUC minus that of the solo baseline "
    "that the "
    "active's own labels choose (*), paired by seed; p of it, adjusted for the gains of the table "
    "(Holm). "
    "Joint "
    'prediction needs every party whenever a client is scored; "one table" is what nobody holds.'
)
COLUMNS = (
    Column(name="labelled"),
    Column(name="model", title="model"),
    Column(name="predicts", title="predicts"),
    Column(name="auc", title="AUC", form=within(".3f")),
    Column(name="ks", title="KS", form=within(".3f")),
    Column(name="gain", title="gain in AUC", form=within("+.3f")),
    P_HOLM,
    Column(name="wire_bytes", title="MB", form=lambda sent: f"{sent / 1e6:.1f}" if sent else "0"),
)
_NETWORK: Mapping[str, Any] = {
    "model": {"hidden": [64], "representation": 32, "projection": 64, "dropout": 0.0},
    "train": {"epochs": 10, "batch_size": 128, "learning_rate": 0.02, "evaluate_every": 10},
}


def config_of(line: Line, labelled: int | None) -> Config:
    """Of its runs with so many labelled rows; None: all."""
    rows = "all" if labelled is None else f"n{labelled}"
    return line.of({
        "name": f"credit-card-{rows}-{line.key}", "measure": _MEASURES[0],
        "guard": {"mechanism": "none", "noise": "reproducible_insecure"},
        "transcript": {"keep": "none"},
        "data": {"dataset": "credit_card", "labelled": labelled},
    })  # fmt: skip


LINES: tuple[Line, ...] = (
    Line(key="single", label="SingleVL", settings={"method": "single_view", **_NETWORK}),
    Line(key="apfed_r", label="APFed-R, masked sum",
         settings={"method": "apfed_r", **_NETWORK, **MASKED}),
    Line(key="apfed_c", label="APFed-C, masked sum",
         settings={"method": "apfed_c", **_NETWORK, **MASKED}),
    Line(key="votes", label="Votes, masked sum",
         settings={"method": "votes", **STUDENT, **MASKED}),
    Line(key="votes-eps4", label="Votes, noised to epsilon 4",
         settings={"method": {"name": "votes", "epsilon": 4.0}, **STUDENT, **MASKED}),
    Line(key="tvfl", label="TVFL", settings={"method": "tvfl", **_NETWORK},
         said={"predicts": "all parties"}),
)  # fmt: skip
_ALONE = "votes"  # whose settings the solo baselines are measured with


def compare_credit(
    folder: Path, *, seeds: Sequence[int], jobs: int = 1, lines: Sequence[Line] = LINES,
    labelled: Sequence[int | None] = LABELLED, on_done: OnDone = lambda done, total: None,
) -> list[Table]:  # fmt: skip
    """Run what is missing; return and write the lines, those of few labels first.

    Raises DataError where the data set is not here, and CheckpointError where the folder holds runs
    with other settings.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    points = {
        (count, line.key): Point(config=config_of(line, count), folder=folder, figures_only=True)
        for count in labelled
        for line in lines
    }
    solo = _solo_records(folder, labelled, seeds, jobs)
    results = Study(points=list(points.values()), seeds=seeds).run(
        jobs=jobs, on_done=on_done, figures=_both_measures
    )
    settings = config_of(LINES[0], None).data
    tables = []
    for count in labelled:
        of_count = settings.model_copy(update={"labelled": count})
        # Of every line: all have the rows of one table.
        shared = shared_share_of(of_count, load_data(of_count, seed=0))
        alone, joint = (_Baselines(solo[count, whole], shared) for whole in (False, True))
        rows = alone.rows("the active alone", alone)
        rows += [_row(line, results.of(points[count, line.key]), alone) for line in lines]
        rows += joint.rows("all, one table", alone)
        title = f"Credit card, {'all' if count is None else count} labels"
        tables.append(Table(COLUMNS, [{"labelled": count, **row} for row in rows], title))
    adjust([row for table in tables for row in table.rows], len(seeds))
    write_tables(folder / "credit-card", tables)
    return tables


_Records: TypeAlias = Mapping[str, Sequence[SoloRecord]]
"""By measure, one a seed."""


def _solo_records(
    folder: Path, labelled: Sequence[int | None], seeds: Sequence[int], jobs: int
) -> dict[tuple[int | None, bool], _Records]:
    """Of the active's columns, and of all columns in one table."""
    wanted = [
        (count, joint, name, seed)
        for count in labelled
        for joint in (False, True)
        for name in _MEASURES
        for seed in seeds
    ]
    found = Parallel(n_jobs=jobs)(delayed(_record)(folder, *asked) for asked in wanted)
    kept: dict[tuple[int | None, bool], dict[str, list[SoloRecord]]] = {}
    for (count, joint, name, _), record in zip(wanted, found, strict=True):
        kept.setdefault((count, joint), {}).setdefault(name, []).append(record)
    return dict(kept)


def _record(folder: Path, labelled: int | None, joint: bool, measure: str, seed: int) -> SoloRecord:
    line = next(line for line in LINES if line.key == _ALONE)
    config = config_of(line, labelled).model_copy(update={"measure": measure, "seed": seed})
    data = load_data(config.data, seed=seed)
    place = folder / "one-table" if joint else folder
    return keep_solo(config, solo_file(config, place), data=centralise(data) if joint else data)


def _both_measures(run: FinishedRun) -> Figures:
    """Rows of the method's own inference, one a measure."""
    own = next(iter(run.outcome.scores))
    for name in _MEASURES:
        value = run.outcome.measures[own][name]
        yield {"target": "task", "name": own, "metric": name, "score": value}


@dataclass(frozen=True)
class _Baselines:
    """All solo baselines of one table; shared: see `shared_share`."""

    records: _Records
    shared: float

    def of(self, measure: str, name: str) -> list[float]:
        """Of one baseline on the test rows, by seed."""
        return [
            next(found.test for found in record.baselines if found.name == name)
            for record in self.records[measure]
        ]

    def gain(self, reached: Sequence[float]) -> Gain:
        """In the first measure, over the baseline that held-out labels choose."""
        task = {"target": "task", "name": "", "metric": _MEASURES[0], "shared": self.shared}
        rows = [{"seed": seed, "score": value, **task} for seed, value in enumerate(reached)]
        for seed, record in enumerate(self.records[_MEASURES[0]]):
            rows += [{"seed": seed, **figure} for figure in solo_figures(record)]
        found = Gain.of(pd.DataFrame(rows))
        assert found is not None  # baselines are among the rows
        return found

    def rows(self, predicts: str, alone: "_Baselines") -> list[Row]:
        """Of all baselines; the one that the active would choose alone has no gain."""
        chosen = self.gain(self.of(_MEASURES[0], next(iter(BASELINES)))).baseline
        rows = []
        for name, baseline in BASELINES.items():
            auc, ks = (self.of(measure, name) for measure in _MEASURES)
            row = alone.compared(auc, ks) | {
                "model": baseline.title + (" *" if name == chosen else ""), "predicts": predicts,
                "wire_bytes": 0.0,
            }  # fmt: skip
            rows.append(row | ({"gain": None} if self is alone and name == chosen else {}))
        return rows

    def compared(self, auc: Sequence[float], ks: Sequence[float]) -> Row:
        """Intervals of both, and of the gain in the first over the best of these."""
        return {
            "auc": Interval.of(auc, shared=self.shared), "ks": Interval.of(ks, shared=self.shared),
            "gain": self.gain(auc).over_chosen,
        }  # fmt: skip


def _row(line: Line, found: pd.DataFrame, alone: _Baselines) -> Row:
    auc, ks = (found.loc[found["metric"] == measure, "score"].tolist() for measure in _MEASURES)
    return alone.compared(auc, ks) | {
        "model": line.label, "predicts": "the active alone", **line.said,
        "wire_bytes": float(found.drop_duplicates("seed")["wire_bytes"].mean()),
    }  # fmt: skip
