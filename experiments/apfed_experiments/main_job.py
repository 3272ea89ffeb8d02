"""The main job: where few rows have a label, what help is worth, costs and gives away.

Digits (four strips) and breast cancer (three natural parties), with handwritten numerals where
their files are, over several seeds: the active alone, every method of votes, a joint teacher,
TVFL with its lonely inferences, and APFed-C plain and protected, each beside the best
that the active does alone. One YAML file describes the protected APFed-C of a data set; every other
run is derived from it by a variant, so that all share data, seeds and labelled rows. Everything
lies in one folder; a stopped job goes on where it was.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from joblib import Parallel, delayed
from matplotlib.axes import Axes

from apfed_attacks.headlines import NOT_ATTACKED
from apfed_experiments.columns import (
    EPSILON,
    P_HOLM,
    Column,
    Table,
    adjust,
    difference_of_shares,
    missing_leak,
    share_of_rows,
    within,
    write_text,
)
from apfed_experiments.drawing import (
    ATTACK,
    OTHER,
    OURS,
    Picture,
    draw_epsilons,
    drawing,
    name_rows,
)
from apfed_experiments.report import write_report
from apfed_experiments.report.page import Part, write_comparison
from apfed_experiments.study import (
    MASKED,
    STUDENT,
    Line,
    OnDone,
    Point,
    Results,
    Study,
    Trial,
    absent,
    base_config,
    finish,
)
from apfed_experiments.summary import Interval, Row, Summary
from apfed_experiments.verdict import ComparedLine, describe_comparison
from secure_apfed.config import Config
from secure_apfed.data.catalogue import view_count
from secure_apfed.measures import MEASURES
from secure_apfed.methods import METHODS

READING = (
    "Few of the active's training rows have a label; the figures say how many. Accuracy: on the "
    "active's test rows, mean and 95 % interval over the seeds, with their covariance by the "
    "people who test several; "
    '"TVFL, all parties" needs every party to predict, every other row predicts with the '
    "active's features alone. Gain: accuracy minus that of the best solo baseline (of twelve, "
    "chosen by cross-validation over the labelled rows), paired by seed; p of it, adjusted for the "
    "number of gains in the table (Holm). Epsilon: of votes, of one person's vote at one passive, "
    "labeller held fixed, at delta 1e-5 (randomised: 0); of a guard, of one row's releases, "
    "encoder held fixed, at delta 1e-5. Labels and the model have no guarantee. Who reads "
    "whose labels or features: by the attack that gains most over its best baseline with the same "
    "knowledge, "
    "on average over the seeds, in balanced accuracy of one party's guesses and in R2 of another "
    "party's features (30 people known wholly). Where nothing leaks it is as often below 0 as "
    "above; an interval around 0 means that these attacks found nothing, not that there is "
    "nothing, and one that begins just above 0 is no finding, since the highest of several means "
    "is shown."
)
CONFIGS = ("main-digits", "main-breast-cancer", "main-handwritten")
# Inference variants of TVFL, in the paper's words; the others have one, named by the method.
_INFERENCE: Mapping[str, str] = {
    "tvfl": "TVFL, all parties",
    "tvfl_0": "TVFL-0",
    "tvfl_a": "TVFL-A",
    "tvfl_r": "TVFL-R",
    "joint_teacher_sum_together": "Teacher, all parties",
}
_WAYS: Mapping[str, str] = {"alone": "left alone", "together": "all parties"}
_DIRECTIONS: Mapping[str, tuple[str, str]] = {
    "labels": ("passive reads labels", "balanced accuracy"),
    "features": ("active reads features of passives", "R2"),
    "features_of_active": ("passive reads features of active", "R2"),
}
"""By key for programs, who reads whose what, and in which metric."""


_KINDS = frozenset(kind for kind, _ in _DIRECTIONS.values())


def _read(key: str) -> Column:
    """Advantage of the attack of this direction that gained most; a text where none ran."""
    kind, metric = _DIRECTIONS[key]
    measure = next(measure for measure in MEASURES.values() if measure.title == metric)
    width = measure.most - measure.least

    def note(row: Row) -> str:
        leak = row["summary"].leakage.get(kind)
        return "" if leak is None else str(leak.missing)

    return Column(
        name=key,
        title=kind,
        form=within(".3f", least=-width, most=width),
        missing=NOT_ATTACKED,
        note=note,
        keys=(key, f"{key}_low", f"{key}_high"),
    )


COLUMNS = (
    Column(name="method", title="method"),
    Column(name="protection", title="protection"),
    Column(
        name="accuracy",
        title="accuracy %",
        form=share_of_rows(),
        keys=("accuracy", "accuracy_low", "accuracy_high"),
    ),
    Column(
        name="gain",
        title="gain, points",
        form=difference_of_shares(),
        keys=("gain", "gain_low", "gain_high"),
    ),
    P_HOLM,
    Column(name="bytes", title="bytes", form=lambda sent: f"{sent / 1e6:.1f} MB" if sent else "0"),
    EPSILON,
    *map(_read, _DIRECTIONS),
)
_NO_GUARD = {"guard": {"mechanism": "none"}}
_PLAIN = {**_NO_GUARD, "secure_sum": {"scheme": "plain", "masks": "none"}}
_STUDENT = {**_NO_GUARD, **MASKED, **STUDENT}
_CODED = {
    **_STUDENT,
    "model": {"network": "cross_view", "random_features": 1000},
}
_JOINTLY = {"epochs": 20, "batch_size": 64, "learning_rate": 0.1, "evaluate_every": 20}
_TAUGHT_JOINTLY = {
    **_STUDENT,
    "train": _JOINTLY,
    "secure_sum": {**MASKED["secure_sum"], "clip": 8.0},
}


def _variant(
    key: str,
    label: str,
    method: str,
    protection: str,
    *,
    protected: bool = True,
    changes: Mapping[str, Any] = {},
    **options: Any,
) -> Line:
    """How a run differs from the protected APFed-C; its bases say of passives what sums need."""
    return Line(
        key=key,
        label=label,
        settings={**changes, "method": {"name": method, **options}},
        said={"protection": protection, "protected": protected},
    )


VARIANTS: tuple[Line, ...] = (
    _variant(
        "alone", "SingleVL", "single_view", "nothing is sent", protected=False, changes=_PLAIN
    ),
    _variant("votes", "Votes", "votes", "secure sum", changes=_STUDENT),
    _variant("votes-noise", "Votes", "votes", "secure sum + noise", changes=_STUDENT, epsilon=4.0),
    _variant(
        "votes-randomised",
        "Votes",
        "votes_randomised",
        "randomised answers",
        changes=_STUDENT,
        epsilon=4.0,
    ),
    _variant("votes-encrypted", "Votes", "votes_encrypted", "labels encrypted", changes=_STUDENT),
    _variant("apfed_code", "APFed by code", "apfed_code", "secure sum", changes=_CODED),
    _variant(
        "joint-teacher",
        "Joint teacher",
        "joint_teacher_sum",
        "secure sum",
        changes=_TAUGHT_JOINTLY,
        labels="spreading",
    ),
    _variant(
        "tvfl",
        "TVFL",
        "tvfl",
        "none",
        protected=False,
        changes={**_PLAIN, "train": {**_JOINTLY, "epochs": 100, "evaluate_every": 100}},
    ),
    _variant("apfed_c", "APFed-C", "apfed_c", "none", protected=False, changes=_PLAIN),
    _variant("apfed_c-protected", "APFed-C", "apfed_c", "guard + secure sum"),
)


def config_of(line: Line, base: Config) -> Config:
    usual = base.model_dump(mode="json", exclude_defaults=True)
    if not METHODS[line.method].settings.sums_gradients:
        usual.pop("passives", None)
    return line.of(usual, name=f"{base.name}-{line.key}")


def title_line(line: Line, inference: str) -> str:
    """Return the title of a line for one way to predict: the line's own, or who takes part."""
    way = inference.removeprefix(f"{line.method}_")
    if inference in _INFERENCE or way == inference:
        return _INFERENCE.get(inference, line.label)
    return f"{line.label}, {_WAYS.get(way, way)}"


def points_of(base: Config, folder: Path) -> list[Point]:
    return [
        Point(config=config_of(line, base), folder=folder / base.name, line=line, alone=base)
        for line in VARIANTS
    ]


def compare(points: Sequence[Point], results: Results, *, seeds: int = 1) -> Table:
    """Rows in the order of the variants, one for each way of inference.

    A gain is over the best solo baseline; there is none where others help to predict.
    """
    rows: list[Row] = []
    for point in points:
        line = point.line
        summary = Summary.of(results.of(point))
        method = METHODS[line.method]
        for at, (inference, accuracy) in enumerate(summary.accuracies.items()):
            alone = at == 0 and method.settings.predicts_alone
            rows.append(
                {
                    "method": title_line(line, inference),
                    **line.said,
                    "accuracy": accuracy,
                    "summary": summary,
                    "config": point.config,
                    "gain": summary.gain.over_chosen if alone and summary.gain else None,
                    "bytes": summary.wire_bytes,
                    "epsilon": summary.epsilon_of(method.declared),
                    **{
                        key: summary.leakage[kind].advantage if kind in summary.leakage else None
                        for key, (kind, _) in _DIRECTIONS.items()
                    },
                }
            )
    adjust(rows, seeds)
    data = points[0].alone.data if points and points[0].alone else None
    title = (
        ""
        if data is None
        else (
            f"{data.dataset}: {view_count(data)} parties with features, {data.labelled} labelled "
            f"rows, {seeds} seed{'' if seeds == 1 else 's'}"
        )
    )
    return Table(COLUMNS, rows, title)


def lines_of(table: Table) -> list[ComparedLine]:
    """Return the lines of a comparison as its verdict needs them, one for each method."""
    found = []
    for row in table.rows:
        leaks = {
            kind: leak.cut_advantage
            for kind, leak in row["summary"].leakage.items()
            if kind in _KINDS
        }
        config = row["config"]
        found.append(
            ComparedLine(
                name=f"{row['method']} ({row['protection']})",
                epsilon=row["epsilon"],
                wire_bytes=row["bytes"],
                gain=row["gain"],
                p_holm=row.get("p_holm", math.nan),
                leaks=leaks,
                missing={
                    kind: missing_leak(config, kind)
                    for kind, _ in _DIRECTIONS.values()
                    if kind not in leaks
                },
            )
        )
    return found


def _report(trial: Trial) -> Path:
    """Write the report of a finished trial, beside what the study measured of the active alone."""
    return write_report(trial.path, solo=finish(trial).solo)


def run_main_job(
    folder: Path, *, seeds: Sequence[int], jobs: int, on_done: OnDone = lambda done, total: None
) -> list[Table]:
    """Run every trial that is missing, then write tables, and the reports of the first seed."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # The embedded sets can always be had.
    embedded = ("digits", "breast_cancer")
    bases = [
        base
        for base in map(base_config, CONFIGS)
        if base.data.dataset in embedded or not absent(base)
    ]
    parts = [(base, points_of(base, folder)) for base in bases]
    points = [point for _, of_base in parts for point in of_base]
    # The longest variants are the last; begun first, they leave no process without work at the end.
    study = Study(points=points[::-1], seeds=seeds)
    results = study.run(jobs=jobs, on_done=on_done, solo=True)
    # Written by the workers meanwhile.
    reports = Parallel(n_jobs=jobs, return_as="generator")(
        delayed(_report)(point.trial(seeds[0])) for point in points
    )
    tables = [compare(of_base, results, seeds=len(seeds)) for _, of_base in parts]
    shown = []
    for (base, of_base), table in zip(parts, tables, strict=True):
        path = folder / base.name
        write_text(path.with_suffix(".csv"), table.csv())
        write_text(path.with_suffix(".md"), table.markdown())
        reported = [point.trial(seeds[0]).path for point in of_base]
        links = [(of.name, f"{of.relative_to(folder)}/report.html") for of in reported]
        picture = draw(path.with_suffix(".png"), table)
        lines = describe_comparison(lines_of(table))
        shown.append(Part(table=table, picture=picture, reports=links, lines=lines))
    list(reports)
    title = "The main job: what help is worth where few rows have a label"
    write_comparison(folder, title=title, reading=READING, parts=shown)
    return tables


def draw(path: Path, table: Table) -> Picture:
    rows = table.rows
    with drawing(path, (12.0, 0.9 + 0.33 * len(rows))) as figure:
        gain, epsilon, *reads = figure.subplots(1, 2 + len(_DIRECTIONS), sharey=True)
        _dots(gain, rows, [row["gain"] for row in rows], colour=OURS, scale=100)
        gain.set(title="Gain", xlabel="points over the best solo model")
        gain.axvline(0, color=OTHER, linestyle=":", linewidth=1.2)
        filled = [bool(row["protected"]) for row in rows]
        draw_epsilons(epsilon, [row["epsilon"] for row in rows], filled=filled, colour=OURS)
        epsilon.set(title="Epsilon")
        for axes, (key, (kind, metric)) in zip(reads, _DIRECTIONS.items(), strict=True):
            _dots(axes, rows, [row[key] for row in rows], colour=ATTACK)
            axes.set(title=_fold_title(kind), xlabel=f"{metric} over baseline")
            axes.axvline(0, color=OTHER, linewidth=1)
    return Picture(
        path=path,
        title=table.title,
        caption="Means over the seeds with 95 % intervals; a gain is drawn where the active "
        "predicts alone. Dotted: the best solo baseline. Protected lines are filled. Beyond the "
        "break of the axis of epsilon stands what is no figure.",
    )


def _fold_title(kind: str) -> str:
    """Return the title of a narrow panel in three lines."""
    reader, what = kind.split(" reads ")
    folded = what.replace(" of ", "\nof ")
    return f"{reader} reads\n{folded}"


def _dots(
    axes: Axes,
    rows: Sequence[Row],
    intervals: Sequence[Interval | None],
    *,
    colour: str,
    scale: float = 1.0,
) -> None:
    for height, (row, interval) in enumerate(zip(rows, intervals, strict=True)):
        if interval is not None:
            axes.errorbar(
                interval.mean * scale,
                -height,
                xerr=interval.arms(scale),
                fmt="o",
                color=colour,
                markerfacecolor=colour if row["protected"] else "white",
                capsize=2.5,
            )
    name_rows(axes, [f"{row['method']}, {row['protection']}" for row in rows])
