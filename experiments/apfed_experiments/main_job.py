"""The main job, and the study of all methods: gain, cost and leakage of help.

The main job shows APFed as intended: passives that reconstruct, contrast, or both, with a secure
sum and a guard, and labels that no message depends on. Beside it stand the same network trained
locally, noisy votes, and a teacher that all parties train. Each row of the table (a `Line`) is
compared with the best local model; rows with an ablation are repeated with the passives' data
shuffled, so that these carry no information.

The study of all methods compares the gain with the leakage of the passives' features, on three data
sets.

One YAML file describes the base of a data set. Every run is derived from it by a `Line`, so all
share data, seeds and labelled rows. Everything is stored in one folder; a stopped job resumes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from apfed_attacks.headlines import NOT_ATTACKED
from apfed_experiments.columns import (
    ACCURACY_SHARE,
    EPSILON,
    P_HOLM,
    Column,
    Table,
    add_p_values,
    describe_missing_attack,
    make_form,
    make_points_form,
)
from apfed_experiments.drawing import (
    ATTACK,
    OTHER,
    OURS,
    Picture,
    draw_epsilons,
    name_rows,
    open_figure,
)
from apfed_experiments.front import FrontLine, describe_dominated, describe_front, draw_front
from apfed_experiments.report.page import Part
from apfed_experiments.runner import Study
from apfed_experiments.shown import FROZEN, JOINT_TRAINING, MIXED_OBJECTIVES
from apfed_experiments.study import (
    MASKED,
    STUDENT,
    Line,
    OnDone,
    Point,
    Results,
    base_config,
    list_trials,
    load_seed_tables,
    run_points,
    shuffle_passives_rows,
)
from apfed_experiments.summary import Interval, Row, Summary, measure_difference
from apfed_experiments.verdict import ComparedLine, VerdictLine, describe_comparison
from secure_apfed.config import Config
from secure_apfed.data import VerticalData
from secure_apfed.data.catalogue import view_count
from secure_apfed.measures.table import MEASURES
from secure_apfed.methods import METHODS

_GAINS = (
    "Accuracy: on the active's test rows, mean and 95 % interval over the seeds, with their "
    "covariance by the people who test several. Gain: accuracy minus that of the best local model "
    "(of twelve, chosen by cross-validation over the labelled rows), paired by seed; p is adjusted "
    "for the number of gains in the table (Holm). "
)
_EPSILONS = (
    "Epsilon: of votes, of one person's vote at one passive, labeller held fixed, at delta 1e-5 "
    "(randomised: 0); of a guard, of one row's releases, encoder held fixed, at delta 1e-5. Labels "
    "and the model have no guarantee. "
)
_LEAKS = (
    "Who reads whose labels or features: by the attack that gains most over its best baseline with "
    "the same knowledge, on average over the seeds, in balanced accuracy of one party's guesses "
    "and in R2 of another party's features (30 people known wholly). Where nothing leaks it is as "
    "often below 0 as above. An interval around 0 means that these attacks found nothing, not that "
    "there is nothing. One that begins just above 0 is no finding, since the highest of several "
    "means is shown."
)
READING = (
    "50 of the active's training rows have a label. The settings of APFed were developed on both "
    "data sets, test rows of these seeds included. SingleVL trains APFed's network on the "
    "active's columns alone. Mixed objectives: one passive reconstructs, the others contrast. "
    "Breast cancer has fewer lines: no epsilon 8, no mixed objectives and no ablation of APFed-R. "
    + _GAINS
    + "Over the ablation: accuracy minus that of the same run with each passive's rows shuffled. "
    + _EPSILONS
    + _LEAKS
)
METHODS_READING = (
    "50 of the active's training rows have a label. The settings of APFed and of votes were "
    "developed on these data sets, test rows of these seeds included. "
    '"TVFL, all parties" needs every party to predict, every other row predicts with the '
    "active's features alone. " + _GAINS + _EPSILONS + _LEAKS
)
# Titles of modes of inference that need more than the method's name, in the papers' words.
_TITLES_BY_INFERENCE: Mapping[str, str] = {
    "tvfl": "TVFL, all parties",
    "tvfl_0": "TVFL-0",
    "tvfl_a": "TVFL-A",
    "tvfl_r": "TVFL-R",
    "joint_teacher_sum_together": "Teacher, all parties",
}
_TITLES_BY_WAY: Mapping[str, str] = {"alone": "left alone", "together": "all parties"}
_DIRECTIONS: Mapping[str, tuple[str, str]] = {
    "labels": ("passive reads labels", "balanced accuracy"),
    "features": ("active reads features of passives", "R2"),
    "features_of_active": ("passive reads features of active", "R2"),
}
"""Directions of leaks (who reads whose what) and their metrics, by key for programs."""


_TABLE_DIRECTIONS = frozenset(kind for kind, _ in _DIRECTIONS.values())


def _make_leak_column(key: str) -> Column:
    """Return the column of the best attack's advantage in one leak direction (who reads whose
    what).

    `key`: key of `_DIRECTIONS`. A cell without an attack is "not attacked".
    """
    kind, metric = _DIRECTIONS[key]
    measure = next(measure for measure in MEASURES.values() if measure.title == metric)
    width = measure.most - measure.least  # largest possible difference of two values

    def describe_missing_seeds(row: Row) -> str:
        """Return in how many seeds the attack ran, as "4 of 5 seeds"; empty: in all."""
        leak = row["summary"].leakage.get(kind)
        return "" if leak is None else str(leak.missing)

    return Column(
        name=key,
        title=kind,
        form=make_form(".3f", minimum=-width, maximum=width),
        missing=NOT_ATTACKED,
        note=describe_missing_seeds,
        keys=(key, f"{key}_low", f"{key}_high"),
    )


COLUMNS = (
    Column(name="method", title="method"),
    Column(name="protection", title="protection"),
    ACCURACY_SHARE,
    Column(
        name="gain",
        title="gain, points",
        form=make_points_form(),
        keys=("gain", "gain_low", "gain_high"),
    ),
    P_HOLM,
    Column(
        name="ablation",
        title="over the ablation, points",
        form=make_points_form(),
        keys=("ablation", "ablation_low", "ablation_high"),
    ),
    Column(name="bytes", title="bytes", form=lambda sent: f"{sent / 1e6:.1f} MB" if sent else "0"),
    EPSILON,
    *map(_make_leak_column, _DIRECTIONS),
)
_NO_GUARD = {"guard": {"mechanism": "none"}}
_PLAIN = {**_NO_GUARD, "secure_sum": {"scheme": "plain", "masks": "none"}}
_VOTE_STUDENT = {**_NO_GUARD, **MASKED, **STUDENT}
_PUBLIC_CODE = {
    **_VOTE_STUDENT,
    "model": {"network": "cross_view", "random_features": 1000},
}
_JOINT_TEACHER_TRAINING = {
    "epochs": 20,
    "batch_size": 64,
    "learning_rate": 0.1,
    "evaluate_every": 20,
}
_JOINT_TEACHER_SETTINGS = {
    **_VOTE_STUDENT,
    "train": _JOINT_TEACHER_TRAINING,
    "secure_sum": {**MASKED["secure_sum"], "clip": 8.0},
}
_ECDH = {"alignment": {"protocol": "ecdh"}}
_MASKED_CLIPPED = {**_ECDH, "secure_sum": {**MASKED["secure_sum"], "clip": 1.0}}
_ABLATION_SUFFIX = "-shuffled"


def _make_line(
    key: str,
    label: str,
    method: str,
    protection: str,
    *,
    protected: bool = True,
    ablated: bool = False,
    changes: Mapping[str, Any] = {},
    **options: Any,
) -> Line:
    """Return one row of the table: how its runs differ from the base.

    Args:
        key: short name, used in names of files.
        label: title of the row.
        method: name of the method.
        protection: text of the column "protection".
        protected: whether messages are protected, which fills the row's dots in the picture.
        ablated: whether the ablation (passives' rows shuffled) is also measured.
        changes: sections of settings in place of the base's.
        options: further settings of the method.
    """
    return Line(
        key=key,
        label=label,
        settings={**changes, "method": {"name": method, **options}},
        cells={"protection": protection, "protected": protected, "ablated": ablated},
    )


_VOTE_SETTINGS = {**_VOTE_STUDENT, **_ECDH}
_SINGLE_VIEW = _make_line(
    "alone",
    "SingleVL",
    "single_view",
    "nothing is sent",
    protected=False,
    changes={**_PLAIN, **_ECDH, "train": {**JOINT_TRAINING, "device": "cpu"}},
)
_JOINT_TEACHER = _make_line(
    "joint-teacher",
    "Joint teacher",
    "joint_teacher_sum",
    "secure sum",
    changes={**_JOINT_TEACHER_SETTINGS, **_ECDH},
    labels="spreading",
)
_CONTRASTIVE = _make_line("apfed_c", "APFed-C", "apfed_c", "CKKS + guard, epsilon 1", ablated=True)
_RANDOMISED_VOTES = _make_line(
    "votes-randomised",
    "Votes",
    "votes_randomised",
    "randomised answers",
    ablated=True,
    changes=_VOTE_SETTINGS,
    epsilon=4.0,
)


def _make_reconstructive_line(*, ablated: bool) -> Line:
    """Return the row of APFed-R.

    `ablated`: whether the ablation (passives' rows shuffled) is also measured.
    """
    return _make_line(
        "apfed_r",
        "APFed-R",
        "apfed_r",
        "masks + guard, epsilon 1",
        ablated=ablated,
        changes=_MASKED_CLIPPED,
    )


MAIN_LINES: tuple[Line, ...] = (
    _SINGLE_VIEW,
    _CONTRASTIVE,
    _make_line(
        "apfed_c-8",
        "APFed-C",
        "apfed_c",
        "masks + guard, epsilon 8",
        changes={**_MASKED_CLIPPED, "guard": {**FROZEN, "epsilon": 8.0}},
    ),
    _make_reconstructive_line(ablated=True),
    _make_line(
        "apfed",
        "APFed, mixed objectives",
        "apfed",
        "masks + guard, epsilon 1",
        changes={**_MASKED_CLIPPED, "passives": MIXED_OBJECTIVES},
    ),
    _RANDOMISED_VOTES,
    _JOINT_TEACHER,
)
FEWER_LINES: tuple[Line, ...] = (
    _SINGLE_VIEW,
    _CONTRASTIVE,
    _make_reconstructive_line(ablated=False),
    _RANDOMISED_VOTES,
    _JOINT_TEACHER,
)
"""Lines of the main job's second data set, without those that measure a setting's effect again."""
METHOD_LINES: tuple[Line, ...] = (
    _SINGLE_VIEW,
    _make_line("votes", "Votes", "votes", "secure sum", changes=_VOTE_SETTINGS),
    _make_line(
        "votes-noise", "Votes", "votes", "secure sum + noise", changes=_VOTE_SETTINGS, epsilon=4.0
    ),
    *(
        _make_line(
            f"votes-randomised-{epsilon:g}",
            "Votes",
            "votes_randomised",
            f"randomised answers, epsilon {epsilon:g}",
            changes=_VOTE_SETTINGS,
            epsilon=epsilon,
        )
        for epsilon in (4.0, 2.0)
    ),
    _make_line(
        "votes-encrypted", "Votes", "votes_encrypted", "labels encrypted", changes=_VOTE_SETTINGS
    ),
    _make_line(
        "apfed_code", "APFed by code", "apfed_code", "secure sum", changes={**_PUBLIC_CODE, **_ECDH}
    ),
    _JOINT_TEACHER,
    _make_line(
        "tvfl",
        "TVFL",
        "tvfl",
        "none",
        protected=False,
        changes={
            **_PLAIN,
            **_ECDH,
            "train": {**_JOINT_TEACHER_TRAINING, "epochs": 100, "evaluate_every": 100},
        },
    ),
    *(
        _make_line(
            method,
            METHODS[method].settings.title,
            method,
            "masks + guard, epsilon 1",
            changes=_MASKED_CLIPPED,
        )
        for method in ("apfed_c", "apfed_r")
    ),
)


@dataclass(frozen=True, kw_only=True)
class Job:
    """Rows of tables (`Line`) that are run on several data sets and compared on one page.

    Attributes:
        configs: names of the YAML files that describe the bases.
        lines: rows of each table, unless `fewer` has others.
        fewer: rows of tables that show fewer, by name of the YAML file.
        first: key of the row that is measured before all others, on the first data set, and shown
            when its seeds are done; empty: none.
    """

    title: str
    reading: str
    configs: tuple[str, ...]
    lines: tuple[Line, ...]
    fewer: Mapping[str, tuple[Line, ...]] = field(default_factory=dict)
    first: str = ""

    def list_lines(self, config: str) -> tuple[Line, ...]:
        """Return the rows of one data set's table; `config`: name of its YAML file."""
        return self.fewer.get(config, self.lines)


MAIN = Job(
    title="The main job: APFed under a secure sum and a guard",
    reading=READING,
    configs=("main-handwritten", "main-breast-cancer"),
    lines=MAIN_LINES,
    fewer={"main-breast-cancer": FEWER_LINES},
    first="apfed_c",
)
METHOD_COMPARISON = Job(
    title="All methods: what help is worth where few rows have a label",
    reading=METHODS_READING,
    configs=("main-handwritten", "main-breast-cancer", "methods-digits"),
    lines=METHOD_LINES,
)


def _load_shuffled(config: Config, seed: int) -> VerticalData:
    """Return the tables of a seed with the passives' rows shuffled, so that they carry no
    information.
    """
    return shuffle_passives_rows(load_seed_tables(config.data, seed), seed=seed)


def build_line_config(line: Line, base: Config) -> Config:
    """Return the configuration of a row's runs on one data set: the base's, changed by the row.

    The section `passives` is dropped for methods whose passives send no gradients, since they have
    no such settings.
    """
    base_settings = base.model_dump(mode="json", exclude_defaults=True)
    if not METHODS[line.method].settings.sums_gradients:
        base_settings.pop("passives", None)
    return line.build_config(base_settings, name=f"{base.name}-{line.key}")


def title_line(line: Line, inference: str) -> str:
    """Return the title of a row for one mode of inference: the row's label, followed by who takes
    part where the mode is not the method's own.

    `inference`: key of the mode in `Outcome.accuracy`.
    """
    way = inference.removeprefix(f"{line.method}_")
    if inference in _TITLES_BY_INFERENCE or way == inference:
        return _TITLES_BY_INFERENCE.get(inference, line.label)
    return f"{line.label}, {_TITLES_BY_WAY.get(way, way)}"


def make_points(base: Config, folder: Path, lines: Sequence[Line] = MAIN_LINES) -> list[Point]:
    """Return one point (settings that are run for each seed) for each row of the table.

    Runs are stored in a subfolder named after the base.
    """
    return [
        Point(
            config=build_line_config(line, base),
            folder=folder / base.name,
            line=line,
            solo_config=base,
        )
        for line in lines
    ]


def make_ablation(point: Point) -> Point | None:
    """Return the ablation of a point: the same run with the passives' rows shuffled.

    Only its metrics are stored. Its sum is masked instead of encrypted, which is faster and changes
    the accuracy by rounding only. None: the row of the table has no ablation.
    """
    if not point.line.cells["ablated"]:
        return None
    settings = point.config.model_dump(mode="json", exclude_defaults=True)
    settings["name"] += _ABLATION_SUFFIX
    settings["attacks"] = []
    if point.config.secure_sum.scheme == "ckks":
        settings |= _MASKED_CLIPPED
    return Point(
        config=Config.model_validate(settings),
        folder=point.folder,
        line=point.line,
        solo_config=point.solo_config,
        figures_only=True,
        tables=partial(_load_shuffled, point.config),
    )


def compare_points(points: Sequence[Point], results: Results, *, seeds: int = 1) -> Table:
    """Return the table of these points, with a row for each mode of inference.

    Gains are over the best local model and over the ablation, for the method's own mode of
    inference and only if the active predicts without passives. `seeds`: number of seeds.
    """
    rows: list[Row] = []
    for point in points:
        line = point.line
        summary = Summary.from_rows(results.select_rows(point))
        method = METHODS[line.method]
        ablation = make_ablation(point)
        for position, (inference, accuracy) in enumerate(summary.accuracies.items()):
            # The first mode of inference is the method's own. Only where it needs no passives is a
            # comparison with local models fair.
            is_local = position == 0 and method.settings.predicts_alone
            over_ablation = None
            if is_local and ablation is not None:
                over_ablation = measure_difference(
                    results.select_rows(point), results.select_rows(ablation)
                )
            rows.append(
                {
                    "method": title_line(line, inference),
                    **line.cells,
                    "accuracy": accuracy,
                    "summary": summary,
                    "config": point.config,
                    "gain": summary.gain.over_chosen if is_local and summary.gain else None,
                    "ablation": over_ablation,
                    "bytes": summary.wire_bytes,
                    "epsilon": summary.epsilon_of(method.public_facts),
                    **{
                        key: summary.leakage[kind].advantage if kind in summary.leakage else None
                        for key, (kind, _) in _DIRECTIONS.items()
                    },
                }
            )
    add_p_values(rows, seeds)
    return Table(COLUMNS, rows, _make_title(points, rows, seeds))


def _make_title(points: Sequence[Point], rows: Sequence[Row], seeds: int) -> str:
    """Return the title of a table: data, parties, labels, seeds, and the best local model's
    accuracy.

    `points`: points of the table, all on one data set. `rows`: the table's rows. `seeds`: number of
    seeds.
    """
    data = points[0].solo_config.data if points and points[0].solo_config else None
    if data is None:
        return ""
    title = (
        f"{data.dataset}: {view_count(data)} parties with features, {data.labelled} labelled "
        f"rows, {seeds} seed{'' if seeds == 1 else 's'}"
    )
    gains = [row["summary"].gain for row in rows if row["summary"].gain is not None]
    if gains:
        title += f"; best local model {100 * gains[0].solo:.1f} % ({gains[0].baseline})"
    return title


def list_compared_lines(table: Table) -> list[ComparedLine]:
    """Return the rows of a table of `compare_points` in the form that the verdict reads.

    Each row has, for every leak direction (who reads whose what) of the table, the advantage of the
    best attack or the reason why none ran.
    """
    lines = []
    for row in table.rows:
        leaks = {
            kind: leak.clipped_advantage
            for kind, leak in row["summary"].leakage.items()
            if kind in _TABLE_DIRECTIONS
        }
        lines.append(
            ComparedLine(
                name=f"{row['method']} ({row['protection']})",
                epsilon=row["epsilon"],
                wire_bytes=row["bytes"],
                gain=row["gain"],
                p_holm=row.get("p_holm", math.nan),
                leaks=leaks,
                missing={
                    kind: describe_missing_attack(_get_config(row), kind)
                    for kind, _ in _DIRECTIONS.values()
                    if kind not in leaks
                },
            )
        )
    return lines


def _get_config(row: Row) -> Config:
    """Return the configuration of a row's runs, with its type."""
    config: Config = row["config"]
    return config


def list_front_lines(table: Table) -> list[FrontLine]:
    """Return the rows of a table that have both a gain and an attack on the passives' features, as
    points of the front of both.
    """
    kind, _ = _DIRECTIONS["features"]
    return [
        FrontLine(
            name=line.name,
            gain=line.gain,
            read=line.leaks[kind],
            shows_labels="labels are shown" in _get_config(row).method.facts,
        )
        for row, line in zip(table.rows, list_compared_lines(table), strict=True)
        if line.gain is not None and kind in line.leaks
    ]


def declare_study(job: Job, folder: Path, *, seeds: Sequence[int]) -> Study[Results]:
    """Return the study of a job: a part for each data set, with the ablations of its rows.

    `folder`: folder of the study. `seeds`: seeds with which every point is run.
    """
    bases = {name: base_config(name) for name in job.configs}
    parts = [
        (base, make_points(base, folder, job.list_lines(name))) for name, base in bases.items()
    ]
    points = [point for _, base_points in parts for point in base_points]
    possible_ablations = [make_ablation(point) for point in points]
    ablations = [ablation for ablation in possible_ablations if ablation is not None]

    def compare(results: Results) -> list[Part]:
        """Return a part for each data set; the last one also names the rows that another row beats
        on all of them.
        """
        tables = {
            base.name: compare_points(base_points, results, seeds=len(seeds))
            for base, base_points in parts
        }
        *first_parts, last_part = [_make_part(folder, base, tables[base.name]) for base, _ in parts]
        fronts = {name: list_front_lines(table) for name, table in tables.items()}
        summary = VerdictLine("Dominated on every data set", describe_dominated(fronts))
        return [*first_parts, replace(last_part, lines=[*last_part.lines, summary])]

    first_base, first_base_points = parts[0]
    first_points = [point for point in first_base_points if point.line.key == job.first]

    def measure_first(*, jobs: int, on_done: OnDone) -> list[str]:
        """Measure the row that is shown first, and return a sentence on it."""
        results = run_points(
            first_points, seeds, jobs=jobs, on_done=on_done, solo=True, later=first_base_points
        )
        return [
            _describe_first(first_base, point, results, seeds=len(seeds)) for point in first_points
        ]

    # The last rows take longest: started first, they keep all processes busy until the end.
    all_points = [*points[::-1], *ablations]
    return Study(
        title=job.title,
        reading=job.reading,
        folder=folder,
        measure=partial(run_points, all_points, seeds, solo=True),
        compare=compare,
        measure_first=measure_first if first_points else None,
        reported=list_trials(points, seeds[:1]),
    )


def _describe_first(base: Config, point: Point, results: Results, *, seeds: int) -> str:
    """Return sentences on the accuracy and the gain of a row that is shown before the others.

    `base`: base configuration of the data set. `point`: settings of the row. `seeds`: number of
    seeds.
    """
    summary = Summary.from_rows(results.select_rows(point))
    sentence = (
        f"First line of {base.name}, {seeds} seed{'' if seeds == 1 else 's'}: {point.line.label} "
        f"({point.line.cells['protection']}) predicts {ACCURACY_SHARE.form(summary.accuracy)} % "
        "of the active's test rows"
    )
    if summary.gain is not None:
        gain = make_points_form()(summary.gain.over_chosen)
        sentence += (
            f"; the best local model {100 * summary.gain.solo:.1f} %. Gain {gain} points, not yet "
            "corrected for the number of lines"
        )
    return f"{sentence}. Ablations, other lines and what attacks read follow."


def _make_part(folder: Path, base: Config, table: Table) -> Part:
    """Return the part of one data set: its table, the verdict, and pictures of the table and of the
    front of gain against features read.
    """
    pictures = [draw_table(folder / f"{base.name}.png", table)]
    lines = list(describe_comparison(list_compared_lines(table)))
    front = list_front_lines(table)
    if front:
        pictures.append(draw_front(folder / f"{base.name}-front.png", front, title=base.name))
        lines.append(VerdictLine("Gain against what is read", describe_front(front)))
    return Part(name=base.name, table=table, pictures=pictures, lines=lines)


def draw_table(path: Path, table: Table) -> Picture:
    """Draw a table row by row: gain, epsilon, and the advantage of attacks in each leak direction
    (who reads whose what); write the picture and return it.
    """
    rows = table.rows
    with open_figure(path, (12.0, 0.9 + 0.33 * len(rows))) as figure:
        gain_axes, epsilon_axes, *leak_axes = figure.subplots(1, 2 + len(_DIRECTIONS), sharey=True)
        _draw_dots(gain_axes, rows, [row["gain"] for row in rows], colour=OURS, scale=100)
        gain_axes.set(title="Gain", xlabel="points")
        gain_axes.axvline(0, color=OTHER, linestyle=":", linewidth=1.2)
        filled = [bool(row["protected"]) for row in rows]
        draw_epsilons(epsilon_axes, [row["epsilon"] for row in rows], filled=filled, colour=OURS)
        epsilon_axes.set(title="Epsilon")
        for axes, (key, (kind, metric)) in zip(leak_axes, _DIRECTIONS.items(), strict=True):
            _draw_dots(axes, rows, [row[key] for row in rows], colour=ATTACK)
            axes.set(title=_fold_title(kind), xlabel=metric)
            axes.axvline(0, color=OTHER, linewidth=1)
    return Picture(
        path=path,
        title=table.title,
        caption="Means over the seeds with 95 % intervals; a gain, in points over the best local "
        "model (dotted), is drawn where the active predicts alone. What is read is over the best "
        "baseline of the attack. Protected lines are filled. Beyond the break of the axis of "
        "epsilon stands what is no figure.",
    )


def _fold_title(kind: str) -> str:
    """Return the title of a narrow panel, "READER reads TARGET of OWNER", in three lines."""
    reader, target = kind.split(" reads ")
    folded = target.replace(" of ", "\nof ")
    return f"{reader} reads\n{folded}"


def _draw_dots(
    axes: Axes,
    rows: Sequence[Row],
    intervals: Sequence[Interval | None],
    *,
    colour: str,
    scale: float = 1.0,
) -> None:
    """Draw each row's mean and interval at the heights 0, -1, ..., filled if the row is protected.

    `intervals`: interval of each row; None: no dot. `scale`: factor from the intervals to the axis.
    """
    for height, (row, interval) in enumerate(zip(rows, intervals, strict=True)):
        if interval is not None:
            axes.errorbar(
                interval.mean * scale,
                -height,
                xerr=interval.compute_error_bars(scale),
                fmt="o",
                color=colour,
                markerfacecolor=colour if row["protected"] else "white",
                capsize=2.5,
            )
    name_rows(axes, [f"{row['method']}, {row['protection']}" for row in rows])
