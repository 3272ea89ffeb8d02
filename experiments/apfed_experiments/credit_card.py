"""Credit card clients: what help is worth to a bank that knows five things of them.

`secure-apfed study credit-card`: the active has the five columns about the client and the labels
(22 % default), two passives have repayments and amounts. With 200 labels and with all: every solo
baseline, APFed, votes, and joint prediction, which nobody can do alone afterwards, by AUC and KS
over seeds. Runs that are done are not run again.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from apfed_experiments.columns import P_HOLM, Column, Table, adjust, within, write_tables
from apfed_experiments.finished import FinishedRun
from apfed_experiments.solo import BaselineResult, SoloRecord, keep_solo, solo_file
from apfed_experiments.study import (
    MASKED,
    STUDENT,
    Figures,
    Line,
    OnDone,
    Point,
    Study,
    centralise,
    in_processes,
)
from apfed_experiments.summary import Interval, Row, shared_share_of
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
    wanted = list(product(labelled, (False, True), _MEASURES, seeds))
    records = in_processes(
        [(str(asked), partial(_record, folder, *asked)) for asked in wanted], len(wanted),
        jobs=jobs, on_done=lambda done, total: None,
    )  # fmt: skip
    results = Study(points=list(points.values()), seeds=seeds).run(
        jobs=jobs, on_done=on_done, figures=_both_measures
    )
    tables = []
    for count in labelled:
        found = {
            (joint, measure, of.name): [
                records[str((count, joint, measure, seed))].of(of.name) for seed in seeds
            ]
            for joint, measure, of in product((False, True), _MEASURES, BASELINES.values())
        }
        frames = [(line, results.of(points[count, line.key])) for line in lines]
        title = f"Credit card, {'all' if count is None else count} labels"
        tables.append(Table(COLUMNS, list(_rows(count, found, frames)), title))
    adjust([row for table in tables for row in table.rows], len(seeds))
    write_tables(folder / "credit-card", tables)
    return tables


def _record(folder: Path, labelled: int | None, joint: bool, measure: str, seed: int) -> SoloRecord:
    """Of the active's columns, or of all columns in one table; by the settings of votes."""
    config = config_of(LINES[3], labelled).model_copy(update={"measure": measure, "seed": seed})
    data = load_data(config.data, seed=seed)
    place = folder / "one-table" if joint else folder
    return keep_solo(config, solo_file(config, place), data=centralise(data) if joint else data)


def _rows(
    labelled: int | None, solo: Mapping[tuple[bool, str, str], Sequence[BaselineResult]],
    lines: Iterable[tuple[Line, pd.DataFrame]],
) -> Iterator[Row]:  # fmt: skip
    """Baselines of the active, lines and baselines of one table; gains in the first measure are
    over the baseline that the active's own labels choose (*), which has none.
    """
    settings = config_of(LINES[0], labelled).data
    shared = shared_share_of(settings, load_data(settings, seed=0))  # the rows of all lines

    def chosen(joint: bool) -> str:
        """By held-out labels: the best mean over the seeds, the first of equals."""
        held_out = {
            name: np.mean([of.validation or -math.inf for of in solo[joint, _MEASURES[0], name]])
            for name in BASELINES
        }
        return max(held_out, key=held_out.__getitem__)

    best = [of.test for of in solo[False, _MEASURES[0], chosen(False)]]

    def row(model: str, predicts: str, by_measure: Sequence[Sequence[float]], sent: float) -> Row:
        auc, ks = (Interval.of(values, shared=shared) for values in by_measure)
        gain = Interval.of(np.subtract(by_measure[0], best).tolist(), shared=shared)
        return {
            "labelled": labelled, "model": model, "predicts": predicts, "auc": auc, "ks": ks,
            "gain": gain, "wire_bytes": sent,
        }  # fmt: skip

    def alone(joint: bool, predicts: str) -> Iterator[Row]:
        own = chosen(joint)
        for name, baseline in BASELINES.items():
            tests = [[of.test for of in solo[joint, measure, name]] for measure in _MEASURES]
            found = row(baseline.title + " *" * (name == own), predicts, tests, 0.0)
            yield found | ({} if joint or name != own else {"gain": None})

    yield from alone(False, "the active alone")
    for line, found in lines:
        reached = [found.loc[found["metric"] == of, "score"].tolist() for of in _MEASURES]
        sent = float(found.drop_duplicates("seed")["wire_bytes"].mean())
        yield row(line.label, line.said.get("predicts", "the active alone"), reached, sent)
    yield from alone(True, "all, one table")


def _both_measures(run: FinishedRun) -> Figures:
    """Rows of the method's own inference, one a measure."""
    own = next(iter(run.outcome.scores))
    for name in _MEASURES:
        value = run.outcome.measures[own][name]
        yield {"target": "task", "name": own, "metric": name, "score": value}
