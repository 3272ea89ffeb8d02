"""The main job, and the study of all methods: gain, cost and leakage of help.

The main job shows APFed as intended: passives that reconstruct, contrast, or both, with a secure
sum and a guard, and labels that no message depends on. Beside it stand the same network trained
locally, noisy votes, and a teacher that all parties train. Each row of the table (a `StudyRow`) is
compared with the best local model; rows with an ablation are repeated with the passives' data
shuffled, so that these carry no information.

The study of all methods compares the gain with the leakage of the passives' features, on three data
sets.

One YAML file describes the base of a data set. Every run is derived from it by a `StudyRow`, so all
share data, seeds and labelled rows. Everything is stored in one folder; a stopped job resumes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from apfed_attacks.interface import NOT_ATTACKED
from apfed_experiments.columns import (
    ACCURACY_SHARE,
    EPSILON,
    P_HOLM,
    Column,
    Table,
    add_gain_p_values,
    describe_missing_attack,
    make_formatter,
    make_points_formatter,
)
from apfed_experiments.drawing import (
    ATTACK_COLOUR,
    OTHER_COLOUR,
    OUR_COLOUR,
    Picture,
    draw_epsilons,
    name_rows,
    open_figure,
)
from apfed_experiments.front import FrontRow, describe_dominated, describe_front, draw_front
from apfed_experiments.report.page import Part
from apfed_experiments.runner import Study
from apfed_experiments.shown import FROZEN, JOINT_TRAINING, MIXED_OBJECTIVES
from apfed_experiments.study import (
    MASKED_SUM,
    VOTE_STUDENT,
    OnDone,
    Point,
    StudyMetrics,
    StudyRow,
    list_trials,
    load_base_config,
    load_seed_tables,
    run_points,
    shuffle_passives_rows,
)
from apfed_experiments.summary import Interval, Row, Summary, measure_difference
from apfed_experiments.verdict import ComparedRow, VerdictLine, describe_comparison
from secure_apfed.config import Config
from secure_apfed.data import VerticalData
from secure_apfed.data.catalogue import view_count
from secure_apfed.measures.table import MEASURES
from secure_apfed.methods import METHODS

_GAINS_GUIDE = (
    "Accuracy: on the active's test rows, mean and 95 % interval over the seeds, with their "
    "covariance by the people who test several. Gain: accuracy minus that of the best local model "
    "(of twelve, chosen by cross-validation over the labelled rows), paired by seed; p is adjusted "
    "for the number of gains in the table (Holm). "
)
_EPSILONS_GUIDE = (
    "Epsilon: of votes, of one person's vote at one passive, labeller held fixed, at delta 1e-5 "
    "(randomised: 0); of a guard, of one row's releases, encoder held fixed, at delta 1e-5. Labels "
    "and the model have no guarantee. "
)
_LEAKS_GUIDE = (
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
    + _GAINS_GUIDE
    + "Over the ablation: accuracy minus that of the same run with each passive's rows shuffled. "
    + _EPSILONS_GUIDE
    + _LEAKS_GUIDE
)
METHODS_READING = (
    "50 of the active's training rows have a label. The settings of APFed and of votes were "
    "developed on these data sets, test rows of these seeds included. "
    '"TVFL, all parties" needs every party to predict, every other row predicts with the '
    "active's features alone. " + _GAINS_GUIDE + _EPSILONS_GUIDE + _LEAKS_GUIDE
)
# Titles of modes of inference that need more than the method's name, in the papers' words.
_TITLE_BY_INFERENCE: Mapping[str, str] = {
    "tvfl": "TVFL, all parties",
    "tvfl_0": "TVFL-0",
    "tvfl_a": "TVFL-A",
    "tvfl_r": "TVFL-R",
    "joint_teacher_sum_together": "Teacher, all parties",
}
_TITLE_BY_SUFFIX: Mapping[str, str] = {"alone": "left alone", "together": "all parties"}
_DIRECTION_AND_METRIC_BY_KEY: Mapping[str, tuple[str, str]] = {
    "labels": ("passive reads labels", "balanced accuracy"),
    "features": ("active reads features of passives", "R2"),
    "features_of_active": ("passive reads features of active", "R2"),
}
"""Directions of leaks (who reads whose what) and their metrics, by key for programs."""


_TABLE_DIRECTIONS = frozenset(kind for kind, _ in _DIRECTION_AND_METRIC_BY_KEY.values())


def _make_leak_column(key: str) -> Column:
    """Return the column of the best attack's advantage in one leak direction (who reads whose
    what).

    `key`: "labels", "features" or "features_of_active". A cell without an attack is "not attacked".
    """
    direction, metric = _DIRECTION_AND_METRIC_BY_KEY[key]
    measure = next(measure for measure in MEASURES.values() if measure.title == metric)
    # An advantage is a difference of two scores.
    largest_difference = measure.max_value - measure.min_value

    def describe_missing_seeds(row: Row) -> str:
        """Return in how many seeds the attack ran, as "4 of 5 seeds"; empty: in all."""
        leak = row["summary"].leakage_by_direction.get(direction)
        return "" if leak is None else str(leak.seeds_note)

    return Column(
        name=key,
        title=direction,
        format_value=make_formatter(".3f", minimum=-largest_difference, maximum=largest_difference),
        missing_text=NOT_ATTACKED,
        make_note=describe_missing_seeds,
        export_keys=(key, f"{key}_low", f"{key}_high"),
    )


COLUMNS = (
    Column(name="method", title="method"),
    Column(name="protection", title="protection"),
    ACCURACY_SHARE,
    Column(
        name="gain",
        title="gain, points",
        format_value=make_points_formatter(),
        export_keys=("gain", "gain_low", "gain_high"),
    ),
    P_HOLM,
    Column(
        name="ablation",
        title="over the ablation, points",
        format_value=make_points_formatter(),
        export_keys=("ablation", "ablation_low", "ablation_high"),
    ),
    Column(
        name="bytes",
        title="bytes",
        format_value=lambda sent: f"{sent / 1e6:.1f} MB" if sent else "0",
    ),
    EPSILON,
    *map(_make_leak_column, _DIRECTION_AND_METRIC_BY_KEY),
)
_NO_GUARD = {"guard": {"mechanism": "none"}}
_NO_PROTECTION = {**_NO_GUARD, "secure_sum": {"scheme": "plain", "masks": "none"}}
_VOTE_STUDENT = {**_NO_GUARD, **MASKED_SUM, **VOTE_STUDENT}
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
    "secure_sum": {**MASKED_SUM["secure_sum"], "clip": 8.0},
}
_ECDH = {"alignment": {"protocol": "ecdh"}}
_MASKED_CLIPPED = {**_ECDH, "secure_sum": {**MASKED_SUM["secure_sum"], "clip": 1.0}}
_ABLATION_SUFFIX = "-shuffled"


def _make_row(
    key: str,
    label: str,
    method: str,
    protection: str,
    *,
    is_protected: bool = True,
    has_ablation: bool = False,
    sections: Mapping[str, Any] = {},
    **method_settings: Any,
) -> StudyRow:
    """Return one row of the table: how its runs differ from the base.

    Args:
        key: short name, used in names of files.
        label: title of the row.
        method: name of the method.
        protection: text of the column "protection".
        is_protected: whether messages are protected, which fills the row's dots in the picture.
        has_ablation: whether the ablation (passives' rows shuffled) is also measured.
        sections: sections of settings that replace those of the base (the settings of a data set
            that all rows share).
        method_settings: further settings of the method.
    """
    return StudyRow(
        key=key,
        label=label,
        settings={**sections, "method": {"name": method, **method_settings}},
        cells={"protection": protection, "protected": is_protected, "ablated": has_ablation},
    )


_VOTE_SETTINGS = {**_VOTE_STUDENT, **_ECDH}
_SINGLE_VIEW = _make_row(
    "alone",
    "SingleVL",
    "single_view",
    "nothing is sent",
    is_protected=False,
    sections={**_NO_PROTECTION, **_ECDH, "train": {**JOINT_TRAINING, "device": "cpu"}},
)
_JOINT_TEACHER = _make_row(
    "joint-teacher",
    "Joint teacher",
    "joint_teacher_sum",
    "secure sum",
    sections={**_JOINT_TEACHER_SETTINGS, **_ECDH},
    labels="spreading",
)
_CONTRASTIVE = _make_row(
    "apfed_c", "APFed-C", "apfed_c", "CKKS + guard, epsilon 1", has_ablation=True
)
_RANDOMISED_VOTES = _make_row(
    "votes-randomised",
    "Votes",
    "votes_randomised",
    "randomised answers",
    has_ablation=True,
    sections=_VOTE_SETTINGS,
    epsilon=4.0,
)


def _make_reconstructive_row(*, has_ablation: bool) -> StudyRow:
    """Return the row of APFed-R.

    `has_ablation`: whether the ablation (passives' rows shuffled) is also measured.
    """
    return _make_row(
        "apfed_r",
        "APFed-R",
        "apfed_r",
        "masks + guard, epsilon 1",
        has_ablation=has_ablation,
        sections=_MASKED_CLIPPED,
    )


MAIN_ROWS: tuple[StudyRow, ...] = (
    _SINGLE_VIEW,
    _CONTRASTIVE,
    _make_row(
        "apfed_c-8",
        "APFed-C",
        "apfed_c",
        "masks + guard, epsilon 8",
        sections={**_MASKED_CLIPPED, "guard": {**FROZEN, "epsilon": 8.0}},
    ),
    _make_reconstructive_row(has_ablation=True),
    _make_row(
        "apfed",
        "APFed, mixed objectives",
        "apfed",
        "masks + guard, epsilon 1",
        sections={**_MASKED_CLIPPED, "passives": MIXED_OBJECTIVES},
    ),
    _RANDOMISED_VOTES,
    _JOINT_TEACHER,
)
FEWER_ROWS: tuple[StudyRow, ...] = (
    _SINGLE_VIEW,
    _CONTRASTIVE,
    _make_reconstructive_row(has_ablation=False),
    _RANDOMISED_VOTES,
    _JOINT_TEACHER,
)
"""Lines of the main job's second data set, without those that measure a setting's effect again."""
METHOD_ROWS: tuple[StudyRow, ...] = (
    _SINGLE_VIEW,
    _make_row("votes", "Votes", "votes", "secure sum", sections=_VOTE_SETTINGS),
    _make_row(
        "votes-noise", "Votes", "votes", "secure sum + noise", sections=_VOTE_SETTINGS, epsilon=4.0
    ),
    *(
        _make_row(
            f"votes-randomised-{epsilon:g}",
            "Votes",
            "votes_randomised",
            f"randomised answers, epsilon {epsilon:g}",
            sections=_VOTE_SETTINGS,
            epsilon=epsilon,
        )
        for epsilon in (4.0, 2.0)
    ),
    _make_row(
        "votes-encrypted", "Votes", "votes_encrypted", "labels encrypted", sections=_VOTE_SETTINGS
    ),
    _make_row(
        "apfed_code",
        "APFed by code",
        "apfed_code",
        "secure sum",
        sections={**_PUBLIC_CODE, **_ECDH},
    ),
    _JOINT_TEACHER,
    _make_row(
        "tvfl",
        "TVFL",
        "tvfl",
        "none",
        is_protected=False,
        sections={
            **_NO_PROTECTION,
            **_ECDH,
            "train": {**_JOINT_TEACHER_TRAINING, "epochs": 100, "evaluate_every": 100},
        },
    ),
    *(
        _make_row(
            method,
            METHODS[method].settings.title,
            method,
            "masks + guard, epsilon 1",
            sections=_MASKED_CLIPPED,
        )
        for method in ("apfed_c", "apfed_r")
    ),
)


@dataclass(frozen=True, kw_only=True)
class DataSetsStudy:
    """A study on several data sets: the same rows of settings are run and compared on each.

    Attributes:
        title, reading_guide: title of the study's page, and sentences on how to read its tables.
        config_names: names of the YAML files with the base settings, one for each data set.
        rows: rows of each data set's table, unless `fewer_rows_by_config` has others.
        fewer_rows_by_config: rows of tables that show fewer, by name of the YAML file.
        first_row_key: key of the row that is measured before all others, on the first data set, and
            shown when its seeds are done; empty: none.
    """

    title: str
    reading_guide: str
    config_names: tuple[str, ...]
    rows: tuple[StudyRow, ...]
    fewer_rows_by_config: Mapping[str, tuple[StudyRow, ...]] = field(default_factory=dict)
    first_row_key: str = ""

    def list_rows(self, config_name: str) -> tuple[StudyRow, ...]:
        """Return the rows of one data set's table; `config_name`: name of its YAML file."""
        return self.fewer_rows_by_config.get(config_name, self.rows)


MAIN = DataSetsStudy(
    title="The main job: APFed under a secure sum and a guard",
    reading_guide=READING,
    config_names=("main-handwritten", "main-breast-cancer"),
    rows=MAIN_ROWS,
    fewer_rows_by_config={"main-breast-cancer": FEWER_ROWS},
    first_row_key="apfed_c",
)
METHOD_COMPARISON = DataSetsStudy(
    title="All methods: what help is worth where few rows have a label",
    reading_guide=METHODS_READING,
    config_names=("main-handwritten", "main-breast-cancer", "methods-digits"),
    rows=METHOD_ROWS,
)


def _load_shuffled(config: Config, seed: int) -> VerticalData:
    """Return the tables of a seed with the passives' rows shuffled, so that they carry no
    information.
    """
    return shuffle_passives_rows(load_seed_tables(config.data, seed), seed=seed)


def build_row_config(study_row: StudyRow, base: Config) -> Config:
    """Return the configuration of a row's runs on one data set.

    `study_row`: the row, whose sections of settings replace those of `base`. The section `passives`
    is dropped for methods whose passives send no gradients, since they have no such settings.
    """
    base_settings = base.model_dump(mode="json", exclude_defaults=True)
    if not METHODS[study_row.method].settings.has_gradient_sum:
        base_settings.pop("passives", None)
    return study_row.build_config(base_settings, name=f"{base.name}-{study_row.key}")


def title_row(study_row: StudyRow, inference: str) -> str:
    """Return the title of a row for one mode of inference.

    It is the row's label, followed by who takes part where the mode is not the method's own.

    `inference`: key of the mode in `Outcome.accuracy`, such as "tvfl_alone".
    """
    suffix = inference.removeprefix(f"{study_row.method}_")
    if inference in _TITLE_BY_INFERENCE or suffix == inference:
        return _TITLE_BY_INFERENCE.get(inference, study_row.label)
    return f"{study_row.label}, {_TITLE_BY_SUFFIX.get(suffix, suffix)}"


def make_points(
    base: Config, folder: Path, study_rows: Sequence[StudyRow] = MAIN_ROWS
) -> list[Point]:
    """Return one point (settings that are run for each seed) for each row of the table.

    Runs are stored in a subfolder named after the base.
    """
    return [
        Point(
            config=build_row_config(study_row, base),
            folder=folder / base.name,
            study_row=study_row,
            baseline_config=base,  # all rows are compared with the same local models
        )
        for study_row in study_rows
    ]


def make_ablation(point: Point) -> Point | None:
    """Return the ablation of a point: the same run with the passives' rows shuffled.

    Its sum is masked instead of encrypted, which is faster and changes the accuracy by rounding
    only. Returns None if the point's row of the table has no ablation.
    """
    if not point.study_row.cells["ablated"]:
        return None
    settings = point.config.model_dump(mode="json", exclude_defaults=True)
    settings["name"] += _ABLATION_SUFFIX
    settings["attacks"] = []
    if point.config.secure_sum.scheme == "ckks":
        settings |= _MASKED_CLIPPED
    return Point(
        config=Config.model_validate(settings),
        folder=point.folder,
        study_row=point.study_row,
        baseline_config=point.baseline_config,
        has_metrics_only=True,  # it is not attacked, so only its metrics are stored
        make_tables=partial(_load_shuffled, point.config),
    )


def compare_points(points: Sequence[Point], results: StudyMetrics, *, seed_count: int = 1) -> Table:
    """Return the table of these points, with a row for each mode of inference.

    A point is one choice of settings, run for each seed. `seed_count`: number of seeds.
    """
    rows = [row for point in points for row in _make_table_rows(point, results)]
    add_gain_p_values(rows, seed_count)
    return Table(COLUMNS, rows, _make_title(points, rows, seed_count))


def _make_table_rows(point: Point, results: StudyMetrics) -> list[Row]:
    """Return the table's rows of one point (settings), one for each mode of inference.

    Gains over the best local model and over the ablation are in the row of the method's own mode
    of inference, and only if the active predicts without passives.
    """
    study_row = point.study_row
    summary = Summary.from_rows(results.select_rows(point))
    method = METHODS[study_row.method]
    ablation = make_ablation(point)
    advantage_by_key = {
        key: summary.leakage_by_direction[kind].advantage
        if kind in summary.leakage_by_direction
        else None
        for key, (kind, _) in _DIRECTION_AND_METRIC_BY_KEY.items()
    }
    rows: list[Row] = []
    for position, (inference, accuracy) in enumerate(summary.accuracy_by_inference.items()):
        # The first mode of inference is the method's own. Only where it needs no passives is a
        # comparison with local models fair.
        is_local = position == 0 and method.settings.can_predict_locally
        gain_over_ablation = None
        if is_local and ablation is not None:
            gain_over_ablation = measure_difference(
                results.select_rows(point), results.select_rows(ablation)
            )
        rows.append(
            {
                "method": title_row(study_row, inference),
                **study_row.cells,
                "accuracy": accuracy,
                "summary": summary,
                "config": point.config,
                "gain": summary.gain.gain_over_chosen if is_local and summary.gain else None,
                "ablation": gain_over_ablation,
                "bytes": summary.wire_bytes,
                "epsilon": summary.find_epsilon(method.public_facts),
                **advantage_by_key,
            }
        )
    return rows


def _make_title(points: Sequence[Point], rows: Sequence[Row], seed_count: int) -> str:
    """Return the title of a table: data, parties, labels, seeds, and the best local model's
    accuracy.

    `points`: points of the table, all on one data set. `rows`: the table's rows. `seed_count`:
    number of seeds.
    """
    data = points[0].baseline_config.data if points and points[0].baseline_config else None
    if data is None:
        return ""
    title = (
        f"{data.dataset}: {view_count(data)} parties with features, {data.labelled} labelled "
        f"rows, {seed_count} seed{'' if seed_count == 1 else 's'}"
    )
    gains = [row["summary"].gain for row in rows if row["summary"].gain is not None]
    if gains:
        title += f"; best local model {100 * gains[0].local_score:.1f} % ({gains[0].baseline})"
    return title


def list_compared_rows(table: Table) -> list[ComparedRow]:
    """Return the rows of a table of `compare_points` in the form that the verdict reads.

    The verdict is the summary of a study in plain words. Each row has, for every leak direction
    (who reads whose what), the advantage of the best attack or the reason why none ran.
    """
    compared_rows = []
    for row in table.rows:
        leak_by_direction = {
            kind: leak.clipped_advantage
            for kind, leak in row["summary"].leakage_by_direction.items()
            if kind in _TABLE_DIRECTIONS
        }
        compared_rows.append(
            ComparedRow(
                name=f"{row['method']} ({row['protection']})",
                epsilon=row["epsilon"],
                wire_bytes=row["bytes"],
                gain=row["gain"],
                p_holm=row.get("p_holm", math.nan),
                leak_by_direction=leak_by_direction,
                reason_by_direction={
                    kind: describe_missing_attack(_get_config(row), kind)
                    for kind, _ in _DIRECTION_AND_METRIC_BY_KEY.values()
                    if kind not in leak_by_direction
                },
            )
        )
    return compared_rows


def _get_config(row: Row) -> Config:
    """Return the configuration of a row's runs. A row's values have no type, so it is given one
    here.
    """
    config: Config = row["config"]
    return config


def list_front_rows(table: Table) -> list[FrontRow]:
    """Return the rows of a table that take part in the Pareto front of gain and leakage.

    These are the rows with both a gain and an attack on the passives' features.
    """
    kind, _ = _DIRECTION_AND_METRIC_BY_KEY["features"]
    return [
        FrontRow(
            name=compared_row.name,
            gain=compared_row.gain,
            leakage=compared_row.leak_by_direction[kind],
            has_shown_labels="labels are shown" in _get_config(row).method.exchange_facts,
        )
        for row, compared_row in zip(table.rows, list_compared_rows(table), strict=True)
        if compared_row.gain is not None and kind in compared_row.leak_by_direction
    ]


def declare_study(
    study: DataSetsStudy, folder: Path, *, seeds: Sequence[int]
) -> Study[StudyMetrics]:
    """Return the study of a job, with the ablations of its rows.

    Its page has a part (table, verdict and pictures) for each data set.

    `folder`: folder of the study. `seeds`: seeds with which every point is run.
    """
    base_by_name = {name: load_base_config(name) for name in study.config_names}
    points_by_base = [  # pairs of base settings, one for each data set, and their points
        (base, make_points(base, folder, study.list_rows(name)))
        for name, base in base_by_name.items()
    ]
    points = [point for _, base_points in points_by_base for point in base_points]
    possible_ablations = [make_ablation(point) for point in points]
    ablations = [ablation for ablation in possible_ablations if ablation is not None]

    first_base, first_base_points = points_by_base[0]
    first_points = [
        point for point in first_base_points if point.study_row.key == study.first_row_key
    ]
    measure_first = partial(
        _measure_first_row, first_base, first_points, seeds, later_points=first_base_points
    )
    # The last rows take longest: started first, they keep all processes busy until the end.
    all_points = [*points[::-1], *ablations]
    return Study(
        title=study.title,
        reading_guide=study.reading_guide,
        folder=folder,
        measure=partial(run_points, all_points, seeds, should_measure_baselines=True),
        compare=partial(_make_parts, folder, points_by_base, seed_count=len(seeds)),
        measure_first=measure_first if first_points else None,
        reported_trials=list_trials(points, seeds[:1]),
    )


def _make_parts(
    folder: Path,
    points_by_base: Sequence[tuple[Config, Sequence[Point]]],
    results: StudyMetrics,
    *,
    seed_count: int,
) -> list[Part]:
    """Return a part of the page for each data set.

    The last part also names the rows that another row dominates on all data sets.

    `points_by_base`: pairs of a data set's base settings and its points.
    """
    table_by_data = {
        base.name: compare_points(base_points, results, seed_count=seed_count)
        for base, base_points in points_by_base
    }
    *first_parts, last_part = [
        _make_part(folder, base, table_by_data[base.name]) for base, _ in points_by_base
    ]
    front_rows_by_data = {name: list_front_rows(table) for name, table in table_by_data.items()}
    summary = VerdictLine("Dominated on every data set", describe_dominated(front_rows_by_data))
    return [*first_parts, replace(last_part, verdict_lines=[*last_part.verdict_lines, summary])]


def _measure_first_row(
    base: Config,
    first_points: Sequence[Point],
    seeds: Sequence[int],
    *,
    later_points: Sequence[Point],
    jobs: int,
    on_done: OnDone,
) -> list[str]:
    """Measure the row that is shown before the others, and return a sentence on it.

    `base`: base settings of the data set. `first_points`: points of the row. `later_points`: points
    that are run later, and use the local models that are measured here. `jobs`: number of
    processes. `on_done`: function that is called after each trial.
    """
    results = run_points(
        first_points,
        seeds,
        jobs=jobs,
        on_done=on_done,
        should_measure_baselines=True,
        later_points=later_points,
    )
    return [
        _describe_first_row(base, point, results, seed_count=len(seeds)) for point in first_points
    ]


def _describe_first_row(
    base: Config, point: Point, results: StudyMetrics, *, seed_count: int
) -> str:
    """Return sentences on the accuracy and the gain of a row that is shown before the others.

    `base`: base configuration of the data set. `point`: settings of the row. `results`: metrics of
    its runs. `seed_count`: number of seeds.
    """
    study_row = point.study_row
    summary = Summary.from_rows(results.select_rows(point))
    sentence = (
        f"First line of {base.name}, {seed_count} seed{'' if seed_count == 1 else 's'}: "
        f"{study_row.label} "
        f"({study_row.cells['protection']}) predicts "
        f"{ACCURACY_SHARE.format_value(summary.accuracy)} % "
        "of the active's test rows"
    )
    if summary.gain is not None:
        gain = make_points_formatter()(summary.gain.gain_over_chosen)
        sentence += (
            f"; the best local model {100 * summary.gain.local_score:.1f} %. Gain {gain} points, "
            "not yet corrected for the number of lines"
        )
    return f"{sentence}. Ablations, other lines and what attacks read follow."


def _make_part(folder: Path, base: Config, table: Table) -> Part:
    """Return the part of the page on one data set: its table, the verdict, and pictures.

    The pictures show the table, and the Pareto front of gain against features read. They are
    written to the study's folder.
    """
    pictures = [draw_table(folder / f"{base.name}.png", table)]
    verdict_lines = list(describe_comparison(list_compared_rows(table)))
    front_rows = list_front_rows(table)
    if front_rows:
        pictures.append(draw_front(folder / f"{base.name}-front.png", front_rows, title=base.name))
        verdict_lines.append(VerdictLine("Gain against what is read", describe_front(front_rows)))
    return Part(name=base.name, table=table, pictures=pictures, verdict_lines=verdict_lines)


def draw_table(path: Path, table: Table) -> Picture:
    """Draw a table row by row, write the picture and return it.

    Panels from left to right: gain, epsilon, and the advantage of attacks in each leak direction
    (who reads whose what).
    """
    rows = table.rows
    with open_figure(path, (12.0, 0.9 + 0.33 * len(rows))) as figure:
        gain_axes, epsilon_axes, *leak_axes = figure.subplots(
            1, 2 + len(_DIRECTION_AND_METRIC_BY_KEY), sharey=True
        )
        _draw_dots(gain_axes, rows, [row["gain"] for row in rows], colour=OUR_COLOUR, scale=100)
        gain_axes.set(title="Gain", xlabel="points")
        gain_axes.axvline(0, color=OTHER_COLOUR, linestyle=":", linewidth=1.2)
        is_protected_by_row = [bool(row["protected"]) for row in rows]
        draw_epsilons(
            epsilon_axes,
            [row["epsilon"] for row in rows],
            is_filled_by_row=is_protected_by_row,
            colour=OUR_COLOUR,
        )
        epsilon_axes.set(title="Epsilon")
        for axes, (key, (kind, metric)) in zip(
            leak_axes, _DIRECTION_AND_METRIC_BY_KEY.items(), strict=True
        ):
            _draw_dots(axes, rows, [row[key] for row in rows], colour=ATTACK_COLOUR)
            axes.set(title=_fold_title(kind), xlabel=metric)
            axes.axvline(0, color=OTHER_COLOUR, linewidth=1)
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
    """Draw each row's mean and interval as a dot with error bars, at the heights 0, -1, ...

    Dots of rows whose messages are protected are filled.

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
