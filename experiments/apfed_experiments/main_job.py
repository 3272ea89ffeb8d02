"""The main job, and the study of all methods: what help is worth, costs and gives away.

The main job shows APFed as it is meant: passives that reconstruct, contrast, or both, under a
secure sum and a guard, and labels that no message depends on. Beside it stand the same network
trained alone, noisy votes, and a teacher that all parties train. Each line is compared with the
best local model; lines with an ablation are repeated with the passives' rows shuffled, so that
nothing is left of their help.

The study of all methods compares gain with what is read of the passives' features, on three data
sets.

One YAML file describes a base of a data set. Every run is derived from it by a line, so that all
share data, seeds and labelled rows. Everything lies in one folder; a stopped job resumes.
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
"""Directions of leaks (who reads whose what) and their metrics, by key for programs."""


_KINDS = frozenset(kind for kind, _ in _DIRECTIONS.values())


def _make_leak_column(key: str) -> Column:
    """Return the column of the largest advantage in this direction; a text where no attack ran."""
    kind, metric = _DIRECTIONS[key]
    measure = next(measure for measure in MEASURES.values() if measure.title == metric)
    width = measure.most - measure.least

    def note_missing(row: Row) -> str:
        leak = row["summary"].leakage.get(kind)
        return "" if leak is None else str(leak.missing)

    return Column(
        name=key,
        title=kind,
        form=make_form(".3f", minimum=-width, maximum=width),
        missing=NOT_ATTACKED,
        note=note_missing,
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
_BY_CURVE = {"alignment": {"protocol": "ecdh"}}
_MASKED_CLIPPED = {**_BY_CURVE, "secure_sum": {**MASKED["secure_sum"], "clip": 1.0}}
_SHUFFLED = "-shuffled"


def _make_variant(
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
    """Return one line: how a run differs from its base, with the passives' settings that its sum
    needs.

    `label`: name of the line in the table; `protection`: in its column. `protected`: whether a
    guarantee holds. `ablated`: whether it is an ablation. `changes`: settings that differ from the
    base.
    """
    return Line(
        key=key,
        label=label,
        settings={**changes, "method": {"name": method, **options}},
        cells={"protection": protection, "protected": protected, "ablated": ablated},
    )


_VOTED = {**_STUDENT, **_BY_CURVE}
_SINGLE_VIEW = _make_variant(
    "alone",
    "SingleVL",
    "single_view",
    "nothing is sent",
    protected=False,
    changes={**_PLAIN, **_BY_CURVE, "train": {**JOINT_TRAINING, "device": "cpu"}},
)
_JOINT_TEACHER = _make_variant(
    "joint-teacher",
    "Joint teacher",
    "joint_teacher_sum",
    "secure sum",
    changes={**_TAUGHT_JOINTLY, **_BY_CURVE},
    labels="spreading",
)
_CONTRASTIVE = _make_variant(
    "apfed_c", "APFed-C", "apfed_c", "CKKS + guard, epsilon 1", ablated=True
)
_RANDOMISED_VOTES = _make_variant(
    "votes-randomised",
    "Votes",
    "votes_randomised",
    "randomised answers",
    ablated=True,
    changes=_VOTED,
    epsilon=4.0,
)


def _make_reconstructive_line(*, ablated: bool) -> Line:
    """Return the line of APFed-R, with or without its ablation."""
    return _make_variant(
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
    _make_variant(
        "apfed_c-8",
        "APFed-C",
        "apfed_c",
        "masks + guard, epsilon 8",
        changes={**_MASKED_CLIPPED, "guard": {**FROZEN, "epsilon": 8.0}},
    ),
    _make_reconstructive_line(ablated=True),
    _make_variant(
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
    _make_variant("votes", "Votes", "votes", "secure sum", changes=_VOTED),
    _make_variant(
        "votes-noise", "Votes", "votes", "secure sum + noise", changes=_VOTED, epsilon=4.0
    ),
    *(
        _make_variant(
            f"votes-randomised-{epsilon:g}",
            "Votes",
            "votes_randomised",
            f"randomised answers, epsilon {epsilon:g}",
            changes=_VOTED,
            epsilon=epsilon,
        )
        for epsilon in (4.0, 2.0)
    ),
    _make_variant(
        "votes-encrypted", "Votes", "votes_encrypted", "labels encrypted", changes=_VOTED
    ),
    _make_variant(
        "apfed_code", "APFed by code", "apfed_code", "secure sum", changes={**_CODED, **_BY_CURVE}
    ),
    _JOINT_TEACHER,
    _make_variant(
        "tvfl",
        "TVFL",
        "tvfl",
        "none",
        protected=False,
        changes={
            **_PLAIN,
            **_BY_CURVE,
            "train": {**_JOINTLY, "epochs": 100, "evaluate_every": 100},
        },
    ),
    *(
        _make_variant(
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
    """Lines that are run on several data sets and compared on one page.

    Attributes:
        configs: names of the YAML files that describe the bases.
        lines: of each table; fewer: of the tables that show fewer, by name of the file.
        first: key of the line that is measured on the first data set before all others, and shown
            as soon as its seeds are done; empty: none.
    """

    title: str
    reading: str
    configs: tuple[str, ...]
    lines: tuple[Line, ...]
    fewer: Mapping[str, tuple[Line, ...]] = field(default_factory=dict)
    first: str = ""

    def list_lines(self, config: str) -> tuple[Line, ...]:
        """Return the lines of one data set's table.

        `config`: name of its YAML file.
        """
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
    """Return tables whose passives' rows are of other people: nothing is left of their help."""
    return shuffle_passives_rows(load_seed_tables(config.data, seed), seed=seed)


def build_line_config(line: Line, base: Config) -> Config:
    """Return the settings of one line of the table: those of its data set, changed by the line.

    The settings of passives are dropped where no gradients are summed: such methods have none.
    """
    base_settings = base.model_dump(mode="json", exclude_defaults=True)
    if not METHODS[line.method].settings.sums_gradients:
        base_settings.pop("passives", None)
    return line.build_config(base_settings, name=f"{base.name}-{line.key}")


def title_line(line: Line, inference: str) -> str:
    """Return the title of a line for one way to predict: the line's own, or who takes part."""
    way = inference.removeprefix(f"{line.method}_")
    if inference in _INFERENCE or way == inference:
        return _INFERENCE.get(inference, line.label)
    return f"{line.label}, {_WAYS.get(way, way)}"


def points_of(base: Config, folder: Path, lines: Sequence[Line] = MAIN_LINES) -> list[Point]:
    """Return one point for each line; runs are stored in a folder named after the base.

    `lines`: of the table.
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


def ablation_of(point: Point) -> Point | None:
    """Return the same point with the passives' rows shuffled; None where none is wanted.

    Sums are masked, whatever the line's scheme is: accuracy is the same up to rounding.
    """
    if not point.line.cells["ablated"]:
        return None
    settings = point.config.model_dump(mode="json", exclude_defaults=True)
    settings["name"] += _SHUFFLED
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
    """Return rows in the order of the points, one for each way of inference.

    A gain is over the best local model; there is none where others help to predict.

    `seeds`: how many.
    """
    rows: list[Row] = []
    for point in points:
        line = point.line
        summary = Summary.from_rows(results.select_rows(point))
        method = METHODS[line.method]
        ablation = ablation_of(point)
        for position, (inference, accuracy) in enumerate(summary.accuracies.items()):
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
    """Return data, parties, labels, seeds, and what the best local model reaches.

    `points`: one for each line of the table.
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


def lines_of(table: Table) -> list[ComparedLine]:
    """Return the lines of a comparison as its verdict needs them, one for each method."""
    lines = []
    for row in table.rows:
        leaks = {
            kind: leak.clipped_advantage
            for kind, leak in row["summary"].leakage.items()
            if kind in _KINDS
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
    """Return the settings of a row's runs."""
    config: Config = row["config"]
    return config


def front_of(table: Table) -> list[FrontLine]:
    """Return the lines that have both a gain and an attack on the passives' features."""
    kind, _ = _DIRECTIONS["features"]
    return [
        FrontLine(
            name=line.name,
            gain=line.gain,
            read=line.leaks[kind],
            shows_labels="labels are shown" in _get_config(row).method.facts,
        )
        for row, line in zip(table.rows, lines_of(table), strict=True)
        if line.gain is not None and kind in line.leaks
    ]


def declare_study(job: Job, folder: Path, *, seeds: Sequence[int]) -> Study[Results]:
    """Return the study of a job: a part for each data set, and ablations beside its lines.

    `seeds`: of the runs.
    """
    bases = {name: base_config(name) for name in job.configs}
    parts = [(base, points_of(base, folder, job.list_lines(name))) for name, base in bases.items()]
    points = [point for _, base_points in parts for point in base_points]
    ablations = [ablation for point in points if (ablation := ablation_of(point)) is not None]

    def compare(results: Results) -> list[Part]:
        """Return a part for each data set; the last one names what is dominated on all of them."""
        tables = {
            base.name: compare_points(base_points, results, seeds=len(seeds))
            for base, base_points in parts
        }
        pages = [_make_part(folder, base, tables[base.name]) for base, _ in parts]
        fronts = {name: front_of(table) for name, table in tables.items()}
        summary = VerdictLine("Dominated on every data set", describe_dominated(fronts))
        return [*pages[:-1], replace(pages[-1], lines=[*pages[-1].lines, summary])]

    base, of_first_base = parts[0]
    first = [point for point in of_first_base if point.line.key == job.first]

    def measure_first(*, jobs: int, on_done: OnDone) -> list[str]:
        results = run_points(
            first, seeds, jobs=jobs, on_done=on_done, solo=True, later=of_first_base
        )
        return [_describe_first(base, point, results, seeds=len(seeds)) for point in first]

    # The longest lines are the last; begun first, they leave no process without work at the end.
    all_points = [*points[::-1], *ablations]
    return Study(
        title=job.title,
        reading=job.reading,
        folder=folder,
        measure=partial(run_points, all_points, seeds, solo=True),
        compare=compare,
        measure_first=measure_first if first else None,
        reported=list_trials(points, seeds[:1]),
    )


def _describe_first(base: Config, point: Point, results: Results, *, seeds: int) -> str:
    """Return the gain of one line in a sentence, before the other lines are measured.

    `seeds`: how many.
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
    """Draw the table and its front of gain against features read, and add the verdict."""
    pictures = [draw_table(folder / f"{base.name}.png", table)]
    lines = list(describe_comparison(lines_of(table)))
    front = front_of(table)
    if front:
        pictures.append(draw_front(folder / f"{base.name}-front.png", front, title=base.name))
        lines.append(VerdictLine("Gain against what is read", describe_front(front)))
    return Part(name=base.name, table=table, pictures=pictures, lines=lines)


def draw_table(path: Path, table: Table) -> Picture:
    """Draw gain, epsilon and the advantage of attacks in each direction, a row for each line."""
    rows = table.rows
    with open_figure(path, (12.0, 0.9 + 0.33 * len(rows))) as figure:
        gain, epsilon, *reads = figure.subplots(1, 2 + len(_DIRECTIONS), sharey=True)
        _draw_dots(gain, rows, [row["gain"] for row in rows], colour=OURS, scale=100)
        gain.set(title="Gain", xlabel="points")
        gain.axvline(0, color=OTHER, linestyle=":", linewidth=1.2)
        filled = [bool(row["protected"]) for row in rows]
        draw_epsilons(epsilon, [row["epsilon"] for row in rows], filled=filled, colour=OURS)
        epsilon.set(title="Epsilon")
        for axes, (key, (kind, metric)) in zip(reads, _DIRECTIONS.items(), strict=True):
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
    """Return the title of a narrow panel in three lines."""
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
    """Draw each row's mean and interval at its height, filled where the line is protected.

    `colour`: of the dots. `scale`: 100 for per cent.
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
