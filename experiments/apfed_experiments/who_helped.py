"""Worth of each passive's help, over seeds (`secure-apfed study who-helped`).

Run by: the experimenter, who plays all parties in one process. Each seed trains once with all
passives and once without each, on the same rows, with the same initial weights; a worth is their
difference on the same test rows, paired by seed (`secure_apfed.runs.worth`).
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from apfed_experiments.columns import (
    P_HOLM,
    Column,
    Formatter,
    Table,
    add_gain_p_values,
    make_formatter,
    make_percent_formatter,
    make_points_formatter,
)
from apfed_experiments.drawing import Picture, open_figure
from apfed_experiments.report.page import Part
from apfed_experiments.runner import Study
from apfed_experiments.study import Point, StudyMetrics, load_seed_tables, run_points
from apfed_experiments.summary import Gain, Row, Summary, measure_difference
from apfed_experiments.worth import (
    CAPTION,
    DEPENDENCE_NOTE,
    ZERO_INTERVAL_NOTE,
    describe_cost,
    describe_worth,
    draw_worth,
    format_byte_difference,
)
from secure_apfed.config import Config
from secure_apfed.data import VerticalData, load_data
from secure_apfed.measures.table import MEASURES, Measure
from secure_apfed.runs.worth import check_leaving_out, leave_out, leave_out_settings
from secure_apfed.settings import TranscriptSettings

READING = (
    f"{DEPENDENCE_NOTE} {ZERO_INTERVAL_NOTE} Means over the seeds with 95 % intervals, paired by "
    "seed, with the "
    "covariance by the people who test several seeds. p: adjusted for the number of passives "
    "(Holm). Sent more: bytes on all links that the run sends more because the passive takes part."
)


def make_points(config: Config, folder: Path, passives: tuple[str, ...]) -> tuple[Point, ...]:
    """Return the points (settings that are run for each seed) that measure each passive's worth.

    The first has all passives, then there is one without each passive. No run is attacked or keeps
    a transcript. Points without a passive share the local models of the point with all.
    """
    unattacked_settings = {
        "attacks": (),
        "tradeoff": {},
        "transcript": TranscriptSettings(keep="none"),
    }
    joint_point = Point(
        config=config.model_copy(update=unattacked_settings), folder=folder, has_metrics_only=True
    )
    points_without = (
        Point(
            config=leave_out_settings(config, passive),
            folder=folder,
            has_metrics_only=True,
            baseline_config=joint_point.config,
            make_tables=partial(_load_tables_without, config, passive),
        )
        for passive in passives
    )
    return (joint_point, *points_without)


def _load_tables_without(config: Config, passive: str, seed: int) -> VerticalData:
    """Return the tables of one seed without this passive's."""
    return leave_out(load_seed_tables(config.data, seed), passive)


def declare_study(
    config: Config, folder: Path, *, seed_count: int, should_measure_baselines: bool = True
) -> Study[StudyMetrics]:
    """Return the study of each passive's worth in a run: what the model loses without the passive.

    Its table has a row for each passive, then, with `should_measure_baselines`, one for all
    passives over the best local model.

    `folder`: folder of the study. `seed_count`: number of seeds, from `config.seed` on.
    `should_measure_baselines`: whether local models are measured.

    Raises ConfigError: no passive can be left out (`check_leaving_out`).
    """
    passives = tuple(table.name for table in load_data(config.data, seed=config.seed).passives)
    check_leaving_out(config, passives)
    points = make_points(config, folder, passives)
    seeds = range(config.seed, config.seed + seed_count)

    def compare(results: StudyMetrics) -> list[Part]:
        """Return the table and picture of every passive's worth."""
        rows = _compare_points(points, passives, results, seed_count=seed_count)
        measure = MEASURES[config.measure]
        picture = _draw_picture(folder / "who-helped.png", rows[: len(passives)], measure)
        joint_summary = Summary.from_rows(results.select_rows(points[0]))
        joint_measure_text = _make_measure_formatter(measure)(joint_summary.accuracy)
        title = f"{config.name}: what each passive's help was worth"
        table = Table(_make_columns(measure), rows, title)
        notes = [f"With all passives: {measure.title} {joint_measure_text}."]
        return [Part(name="who-helped", table=table, pictures=[picture], notes=notes)]

    return Study(
        title=f"Who helped: {config.name}",
        reading_guide=f"{READING} {describe_cost(config, len(passives))}",
        folder=folder,
        measure=partial(
            run_points, points, seeds, should_measure_baselines=should_measure_baselines
        ),
        compare=compare,
    )


def _compare_points(
    points: Sequence[Point], passives: Sequence[str], results: StudyMetrics, *, seed_count: int
) -> list[Row]:
    """Return a row for each passive, then one for all of them if local models were measured.

    `points`: the point (settings) with all passives, then one without each of `passives`, in their
    order. `seed_count`: number of seeds.
    """
    joint_point, *points_without = points
    joint_runs = results.select_rows(joint_point)
    joint_bytes = Summary.from_rows(joint_runs).wire_bytes
    common_columns = {"seeds": seed_count, "measure": joint_point.config.measure}
    rows: list[Row] = []
    for passive, point in zip(passives, points_without, strict=True):
        runs_without = results.select_rows(point)
        summary = Summary.from_rows(runs_without)
        rows.append(
            {
                "passive": passive,
                **common_columns,
                "reached": summary.accuracy,
                "gain": measure_difference(joint_runs, runs_without),
                "wire_bytes": joint_bytes - summary.wire_bytes,
            }
        )
    # p-values are adjusted for the number of passives only, before the row of all is added.
    add_gain_p_values(rows, seed_count)
    gain = Gain.from_rows(joint_runs)
    if gain is not None:
        rows.append(
            {
                "passive": f"all {len(passives)}, over the best local model ({gain.baseline})",
                **common_columns,
                "reached": gain.local_score,
                "gain": gain.gain_over_chosen,
                "wire_bytes": joint_bytes,
            }
        )
    for row in rows:
        row["shown"] = "" if row["gain"] is None else describe_worth(row["gain"])
    return rows


def _make_measure_formatter(measure: Measure) -> Formatter:
    """Return a function that formats a value of this measure, or its interval."""
    return make_percent_formatter() if measure.is_share else make_formatter(".3f")


def _make_columns(measure: Measure) -> tuple[Column, ...]:
    """Return the columns of the table; exported numbers are in the measure's own unit."""
    unit = "points" if measure.is_share else measure.title
    format_difference = make_points_formatter() if measure.is_share else make_formatter("+.3f")
    return (
        Column(name="passive", title="without"),
        Column(name="seeds"),
        Column(name="measure"),
        Column(
            name="reached",
            title=f"{measure.title} %" if measure.is_share else measure.title,
            format_value=_make_measure_formatter(measure),
        ),
        Column(
            name="gain",
            title=f"worth, {unit}",
            format_value=format_difference,
            missing_text="measured on other test rows",
            export_keys=("worth", "low", "high"),
        ),
        P_HOLM,
        Column(name="shown", title="which shows"),
        Column(name="wire_bytes", title="sent more", format_value=format_byte_difference),
    )


def _draw_picture(path: Path, rows: list[Row], measure: Measure) -> Picture:
    """Draw the worth of each passive, write the picture and return it.

    `rows`: the rows of single passives that `_compare_points` returns, without that of all.
    """
    with open_figure(path, (6.0, 3.0)) as figure:
        draw_worth(
            figure,
            [row["passive"] for row in rows],
            [row["gain"] for row in rows],
            [row["wire_bytes"] for row in rows],
            measure=measure,
        )
    return Picture(path=path, title="What each passive's help was worth", caption=CAPTION)
