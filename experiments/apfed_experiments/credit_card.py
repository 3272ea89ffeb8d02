"""Credit card clients: what help is worth to a bank that knows five things of them.

`secure-apfed study credit-card`: the active has the five columns about the client and the labels
(22 % default), two passives have repayments and amounts. With 200 labels and with all: every solo
baseline, APFed, votes, and joint prediction, which nobody can do alone afterwards, by AUC and KS
over seeds. Runs that are done are not run again.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import pandas as pd
from joblib import Parallel, delayed

from apfed_experiments.centralised import centralise
from apfed_experiments.columns import markdown, p_text, write_text
from apfed_experiments.finished import FinishedRun
from apfed_experiments.solo import SoloRecord, keep_solo, solo_file
from apfed_experiments.study import Figures, OnDone, Point, Results, Study
from apfed_experiments.summary import Gain, Interval, holm, shared_share
from secure_apfed.config import Config
from secure_apfed.data import load_data
from secure_apfed.files import to_json
from secure_apfed.solo import BASELINES

__all__ = [
    "HEADER", "LABELLED", "LINES", "READING", "CreditRow", "Line", "compare_credit", "tables_of",
]  # fmt: skip

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
HEADER = ("model", "predicts", "AUC", "KS", "gain in AUC", "p, Holm", "MB")

_NETWORK: Mapping[str, Any] = {
    "model": {"hidden": [64], "representation": 32, "projection": 64, "dropout": 0.0},
    "train": {"epochs": 10, "batch_size": 128, "learning_rate": 0.02, "evaluate_every": 10},
}
_STUDENT: Mapping[str, Any] = {"model": {"network": "random_features"}, "train": {"epochs": 1}}
_MASKED: Mapping[str, Any] = {"secure_sum": {"scheme": "plain", "masks": "pairwise"}}


@dataclass(frozen=True, kw_only=True)
class Line:
    """One method of the table.

    Attributes:
        key: for file names; label: for people; together: whether all parties predict.
        settings: of its runs, beside data, name and measure.
    """

    key: str
    label: str
    settings: Mapping[str, Any]
    together: bool = False

    def config(self, labelled: int | None) -> Config:
        """Of its runs with so many labelled rows; None: all."""
        rows = "all" if labelled is None else f"n{labelled}"
        return Config.model_validate(
            {
                "name": f"credit-card-{rows}-{self.key}",
                "measure": _MEASURES[0],
                "guard": {"mechanism": "none", "noise": "reproducible_insecure"},
                "transcript": {"keep": "none"},
                "data": {"dataset": "credit_card", "labelled": labelled},
                **self.settings,
            }
        )


LINES: tuple[Line, ...] = (
    Line(key="single", label="SingleVL", settings={"method": "single_view", **_NETWORK}),
    Line(key="apfed_r", label="APFed-R, masked sum",
         settings={"method": "apfed_r", **_NETWORK, **_MASKED}),
    Line(key="apfed_c", label="APFed-C, masked sum",
         settings={"method": "apfed_c", **_NETWORK, **_MASKED}),
    Line(key="votes", label="Votes, masked sum",
         settings={"method": "votes", **_STUDENT, **_MASKED}),
    Line(key="votes-eps4", label="Votes, noised to epsilon 4",
         settings={"method": {"name": "votes", "epsilon": 4.0}, **_STUDENT, **_MASKED}),
    Line(key="tvfl", label="TVFL", settings={"method": "tvfl", **_NETWORK}, together=True),
)  # fmt: skip
_ALONE = "votes"  # whose settings the solo baselines are measured with


@dataclass(frozen=True, kw_only=True)
class CreditRow:
    """One line of the table; `gain` is None of the baseline that others are compared with."""

    labelled: int | None
    model: str
    predicts: str
    auc: Interval
    ks: Interval
    gain: Interval | None
    wire_bytes: float = 0.0
    p_holm: float = math.nan

    def cells(self) -> tuple[str, ...]:
        """Texts in the order of `HEADER`."""
        gain = "" if self.gain is None else self.gain.text(form="+.3f")
        size = f"{self.wire_bytes / 1e6:.1f}" if self.wire_bytes else "0"
        both = (one.text(form=".3f") for one in (self.auc, self.ks))
        return (self.model, self.predicts, *both, gain, p_text(self.p_holm), size)


def compare_credit(
    folder: Path, *, seeds: Sequence[int], jobs: int = 1, lines: Sequence[Line] = LINES,
    labelled: Sequence[int | None] = LABELLED, on_done: OnDone = lambda done, total: None,
) -> list[CreditRow]:  # fmt: skip
    """Run what is missing; return and write the lines, those of few labels first.

    Raises:
        DataError: the data set is not here; it says where to put it.
        CheckpointError: the folder holds runs with other settings.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    points = {
        (count, line.key): Point(config=line.config(count), folder=folder, figures_only=True)
        for count in labelled
        for line in lines
    }
    solo = _solo_records(folder, labelled, seeds, jobs)
    results = Study(points=list(points.values()), seeds=seeds).run(
        jobs=jobs, on_done=on_done, figures=_both_measures
    )
    rows = []
    for count in labelled:
        shared = _shared(labelled=count)
        alone = _Baselines(solo[count, False], shared)
        rows += alone.rows(count, "the active alone", alone)
        rows += [_row(count, line, results, points[count, line.key], alone) for line in lines]
        joint = _Baselines(solo[count, True], shared)
        rows += joint.rows(count, "all, one table", alone)
    adjusted = holm([row.gain for row in rows], len(seeds))
    rows = [replace(row, p_holm=p) for row, p in zip(rows, adjusted, strict=True)]
    plain = {"rows": [asdict(row) for row in rows]}
    write_text(folder / "credit-card.json", to_json(plain, indent=1))
    page = [f"{title}\n\n{markdown(HEADER, cells)}" for title, cells in tables_of(rows)]
    write_text(folder / "credit-card.md", "\n".join(page))
    return rows


def tables_of(rows: Sequence[CreditRow]) -> list[tuple[str, list[tuple[str, ...]]]]:
    """A title and the cells of its lines, for each number of labels."""
    return [
        (
            f"Credit card, {'all' if count is None else count} labels",
            [row.cells() for row in rows if row.labelled == count],
        )
        for count in dict.fromkeys(row.labelled for row in rows)
    ]


def _shared(*, labelled: int | None) -> float:
    """Of every line: all have the rows of one table."""
    settings = LINES[0].config(labelled).data
    data = load_data(settings, seed=0)
    rows = {"train": len(data.train_rows), "labelled": len(data.labelled_rows)}
    return shared_share(settings, **rows, test=len(data.test_rows))


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
    found = Parallel(n_jobs=jobs)(delayed(_record)(folder, *one) for one in wanted)
    kept: dict[tuple[int | None, bool], dict[str, list[SoloRecord]]] = {}
    for (count, joint, name, _), record in zip(wanted, found, strict=True):
        kept.setdefault((count, joint), {}).setdefault(name, []).append(record)
    return dict(kept)


def _record(folder: Path, labelled: int | None, joint: bool, measure: str, seed: int) -> SoloRecord:
    line = next(one for one in LINES if one.key == _ALONE)
    config = line.config(labelled).model_copy(update={"measure": measure, "seed": seed})
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
        return [_named(record, name).test for record in self.records[measure]]

    def solo_rows(self, measure: str) -> Iterator[dict[str, Any]]:
        for seed, record in enumerate(self.records[measure]):
            for one in record.baselines:
                yield {
                    "seed": seed, "target": "solo", "name": one.name, "metric": measure,
                    "score": one.test, "baseline": one.validation,
                }  # fmt: skip

    def gain(self, reached: Sequence[float]) -> Gain:
        """In the first measure, over the baseline that held-out labels choose."""
        task = [
            {
                "seed": seed,
                "target": "task",
                "name": "",
                "metric": _MEASURES[0],
                "score": value,
                "shared": self.shared,
            }
            for seed, value in enumerate(reached)
        ]
        found = Gain.of(pd.DataFrame([*task, *self.solo_rows(_MEASURES[0])]))
        assert found is not None  # baselines are among the rows
        return found

    @property
    def chosen(self) -> str:
        """By held-out labels, on average over the seeds."""
        return self.gain(self.of(_MEASURES[0], next(iter(BASELINES)))).baseline

    def rows(self, labelled: int | None, predicts: str, alone: "_Baselines") -> list[CreditRow]:
        """Of all baselines, beside the one that the active would choose alone."""
        chosen, rows = self.chosen, []
        for name, baseline in BASELINES.items():
            auc, ks = (self.of(measure, name) for measure in _MEASURES)
            is_reference = self is alone and name == chosen
            rows.append(
                CreditRow(
                    labelled=labelled,
                    model=baseline.title + (" *" if name == chosen else ""),
                    predicts=predicts,
                    auc=Interval.of(auc, shared=alone.shared),
                    ks=Interval.of(ks, shared=alone.shared),
                    gain=None if is_reference else alone.gain(auc).over_chosen,
                )
            )
        return rows


def _named(record: SoloRecord, name: str) -> Any:
    return next(one for one in record.baselines if one.name == name)


def _row(
    labelled: int | None, line: Line, results: Results, point: Point, alone: _Baselines
) -> CreditRow:
    found = results.of(point)
    auc, ks = (found.loc[found["metric"] == measure, "score"].tolist() for measure in _MEASURES)
    return CreditRow(
        labelled=labelled,
        model=line.label,
        predicts="all parties" if line.together else "the active alone",
        auc=Interval.of(auc, shared=alone.shared),
        ks=Interval.of(ks, shared=alone.shared),
        gain=alone.gain(auc).over_chosen,
        wire_bytes=float(found.drop_duplicates("seed")["wire_bytes"].mean()),
    )
