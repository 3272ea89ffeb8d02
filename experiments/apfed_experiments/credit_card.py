"""Credit card clients: what help is worth to a bank that knows five things of them.

`secure-apfed study credit-card`: the active has the five columns about the client and the labels
(22 % default), two passives have repayments and amounts. With 200 labels and with all: every solo
baseline, APFed, votes, and joint prediction, which nobody can do alone afterwards, by AUC over
seeds. Runs that are done are not run again.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from apfed_experiments.columns import P_HOLM, Column, Table, adjust, within, write_tables
from apfed_experiments.solo import SoloRecord, keep_solo, solo_file
from apfed_experiments.study import (
    MASKED,
    STUDENT,
    Line,
    OnDone,
    Point,
    Study,
    centralise,
    in_processes,
    solo_figures,
)
from apfed_experiments.summary import Interval, Row, accuracy_of
from secure_apfed.config import Config
from secure_apfed.data import load_data
from secure_apfed.solo import BASELINES

__all__ = ["LINES", "READING", "compare_credit", "config_of"]

LABELLED: tuple[int | None, ...] = (200, None)
READING = (
    "AUC on 7,500 test rows, mean and 95 % interval over the seeds, which draw test rows, labelled "
    "rows and weights (corrected resampled t). Gain: AUC minus that of the solo baseline that the "
    "active's own labels choose (*), paired by seed; p of it, adjusted for the gains of the table "
    '(Holm). Joint prediction needs every party whenever a client is scored; "one table" is what '
    "nobody holds."
)
COLUMNS = (
    Column(name="labelled"),
    Column(name="model", title="model"),
    Column(name="predicts", title="predicts"),
    Column(name="auc", title="AUC", form=within(".3f")),
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
        "name": f"credit-card-{rows}-{line.key}", "measure": "auc",
        "guard": {"mechanism": "none", "noise": "reproducible_insecure"},
        "transcript": {"keep": "none"},
        "data": {"dataset": "credit_card", "labelled": labelled},
    })  # fmt: skip


_VOTES = Line(
    key="votes", label="Votes, masked sum", settings={"method": "votes", **STUDENT, **MASKED}
)
LINES: tuple[Line, ...] = (
    Line(key="single", label="SingleVL", settings={"method": "single_view", **_NETWORK}),
    Line(key="apfed_r", label="APFed-R, masked sum",
         settings={"method": "apfed_r", **_NETWORK, **MASKED}),
    Line(key="apfed_c", label="APFed-C, masked sum",
         settings={"method": "apfed_c", **_NETWORK, **MASKED}),
    _VOTES,
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
        (count, line.key): Point(config=config_of(line, count), folder=folder, figures_only=True,
                                 alone=config_of(_VOTES, count))
        for count, line in product(labelled, lines)
    }  # fmt: skip
    wanted = list(product(labelled, seeds))
    joint = in_processes(
        [(str(asked), partial(_one_table, folder, *asked)) for asked in wanted], len(wanted),
        jobs=jobs, on_done=lambda done, total: None,
    )  # fmt: skip
    results = Study(points=list(points.values()), seeds=seeds).run(
        jobs=jobs, on_done=on_done, solo=True
    )
    tables = []
    for count in labelled:
        frames = [(line, results.of(points[count, line.key])) for line in lines]
        together = [of for seed in seeds for of in solo_figures(joint[str((count, seed))])]
        rows = list(_rows(count, frames, pd.DataFrame(together)))
        tables.append(
            Table(COLUMNS, rows, f"Credit card, {'all' if count is None else count} labels")
        )
    adjust([row for table in tables for row in table.rows], len(seeds))
    write_tables(folder / "credit-card", tables)
    return tables


def _one_table(folder: Path, labelled: int | None, seed: int) -> SoloRecord:
    """Of all columns in one table, by the settings of votes."""
    config = config_of(_VOTES, labelled).model_copy(update={"seed": seed})
    place, data = folder / "one-table", centralise(load_data(config.data, seed=seed))
    return keep_solo(config, solo_file(config, place), data=data)


def _rows(
    labelled: int | None, lines: Sequence[tuple[Line, pd.DataFrame]], one_table: pd.DataFrame
) -> Iterator[Row]:
    """Baselines of the active, lines and baselines of one table; gains are over the baseline that
    the active's own labels choose (*), which has none.
    """
    found = lines[0][1]
    own, shared = found[found["target"] == "solo"], float(found["shared"].max())

    def chosen(solo: pd.DataFrame) -> str:
        """By held-out labels: the best mean over the seeds, the first of equals."""
        held_out = solo.groupby("name", sort=False)["baseline"].mean()
        return str(held_out.fillna(-math.inf).idxmax())

    best = own[own["name"] == chosen(own)]["score"].to_numpy()

    def row(model: str, predicts: str, reached: "pd.Series[float]", sent: float) -> Row:
        gain = np.subtract(reached.to_numpy(), best).tolist()
        return {
            "labelled": labelled, "model": model, "predicts": predicts,
            "auc": Interval.of(reached.tolist(), shared=shared),
            "gain": Interval.of(gain, shared=shared), "wire_bytes": sent,
        }  # fmt: skip

    def baselines(solo: pd.DataFrame, predicts: str) -> Iterator[Row]:
        for name, of_name in solo.groupby("name", sort=False):
            star, title = " *" * (name == chosen(solo)), BASELINES[str(name)].title
            yield row(title + star, predicts, of_name["score"], 0.0)

    alone = "the active alone"
    for line in baselines(own, alone):
        yield line | ({"gain": None} if line["model"].endswith("*") else {})
    for said, of_line in lines:
        sent = float(of_line.drop_duplicates("seed")["wire_bytes"].mean())
        yield row(said.label, said.said.get("predicts", alone), accuracy_of(of_line), sent)
    yield from baselines(one_table, "all, one table")
