"""A table or figure of a paper: its rows, what the paper prints in them, and jobs that fill it.

A row is a `TableRow`. A job measures the values of some rows for a seed and stores them in one
small file, so that a stopped table resumes; what is not measured yet stays empty. Adding a table is
one entry in the `TABLES` of its paper's file.
"""

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeAlias

import numpy as np
from matplotlib.axes import Axes
from pydantic import BaseModel

from apfed_experiments.columns import (
    Column,
    Table,
    make_formatter,
    make_hidden_columns,
    make_visible_column,
)
from apfed_experiments.drawing import (
    COLOURS,
    OTHER_COLOUR,
    OUR_COLOUR,
    Picture,
    draw_intervals,
    name_rows,
    open_figure,
)
from apfed_experiments.report.page import Part
from apfed_experiments.runner import Study
from apfed_experiments.study import (
    Failure,
    OnDone,
    StoredMetrics,
    StudyValues,
    catch_failure,
    measure_once,
    run_tasks,
)
from apfed_experiments.summary import Interval, Row
from secure_apfed.config import Config
from secure_apfed.errors import ModelError
from secure_apfed.runs.run import run
from secure_apfed.runs.simulation import describe_obstacles, simulate_run

Clock: TypeAlias = Callable[[], float]
MeasuredValues = Mapping[str, float]
"""Values that a function measured, by name, in the table's unit."""
Measurements: TypeAlias = StudyValues[dict[tuple[str, int], MeasuredValues]]
"""The values that a table's jobs have measured so far, by the job's label and the seed."""

_MAX_PANELS_ACROSS = 3
# Curves are shifted by this share of the axis, so that their error bars do not overlap.
_CURVE_SHIFT = 0.012
# Of the vertical axis, where no value is negative: this share of its top lies below 0.
_MARGIN_BELOW_ZERO = 0.03


@dataclass(frozen=True, kw_only=True)
class PaperValue:
    """A value as the paper prints it: mean and, where it prints one, standard deviation."""

    mean: float
    standard_deviation: float | None = None


class _MeasuredFigures(BaseModel):
    """The values that a job measured for one seed, and the seconds that it took."""

    figures: dict[str, float]
    seconds: float


class _StoredMeasurement(StoredMetrics):
    """A file of the values of one job and seed."""

    measured: _MeasuredFigures


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """A measurement that is repeated for each seed and fills one or more rows of a table.

    Attributes:
        label: name that is distinct within the table.
        measure: function of a module, so that another process can import it; it takes `seed` and
            `settings` as keyword arguments, and returns values by name.
        settings: plain values; stored measurements are only reused for the same ones.
    """

    label: str
    measure: Callable[..., MeasuredValues]
    settings: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def for_config(
        cls,
        label: str,
        measure: Callable[..., MeasuredValues],
        config: Config,
        **further_arguments: Any,
    ) -> Self:
        """Return the job that passes a configuration to `measure`, as plain settings in `config`.

        `label`: name that is distinct within the table. `further_arguments`: further keyword
        arguments of `measure`.
        """
        config_settings = config.model_dump(mode="json", exclude_defaults=True)
        return cls(
            label=label, measure=measure, settings={"config": config_settings, **further_arguments}
        )

    def load_or_measure(self, seed: int, path: Path) -> MeasuredValues:
        """Return the values of one seed: stored ones, or measured on one thread and then stored.

        `path`: file of the stored values.

        Raises CheckpointError: the file holds values of other settings.
        """
        settings = json.dumps({**self.settings, "seed": seed}, sort_keys=True)
        digest = hashlib.sha256(settings.encode()).hexdigest()
        stored = measure_once(path, _StoredMeasurement, digest, partial(self._measure_seed, seed))
        return stored.measured.figures

    def _measure_seed(self, seed: int) -> dict[str, _MeasuredFigures]:
        """Return the fields of a stored measurement of one seed.

        Raises ModelError: a value is not finite, since its training diverged.
        """
        began = time.monotonic()
        figures = dict(self.measure(seed=seed, **self.settings))
        infinite_names = sorted(
            name for name, figure in figures.items() if not math.isfinite(figure)
        )
        if infinite_names:
            raise ModelError(
                f"{self.label}: {', '.join(infinite_names)} is no finite number, so its training "
                "diverged; nothing is kept of it"
            )
        return {"measured": _MeasuredFigures(figures=figures, seconds=time.monotonic() - began)}


@dataclass(frozen=True, kw_only=True, eq=False)
class TableRow:
    """A row of a table, and how its value for each seed is computed.

    Attributes:
        cells: text by column; all rows have the same columns, and no two rows the same texts.
        job, value_name: job that measures the value, and the value's name among the job's results.
        weighted_rows: pairs of a weight and a row, for a row without a job: the value is the
            weighted sum for every seed that all of them have, a mean or a difference paired by
            seed.
        candidate_rows, choosing_value_name: candidate rows, for a row with neither of these: the
            value is that of the candidate whose job reports the highest `choosing_value_name` (a
            value on held-out rows) for the seed; ties go to the first.
        paper_value: what the paper prints; None: nothing, or nothing legible.
        panel_titles: titles of the panels of the picture in which the row is drawn.
        axis_position: position on the panels' horizontal axis; None: the row is drawn as a dot.
        curve_name: name of the row's curve, or of its dot; "": it is not drawn.
    """

    cells: Mapping[str, str]
    job: Job | None = None
    value_name: str = ""
    weighted_rows: Sequence[tuple[float, "TableRow"]] = ()
    candidate_rows: Sequence["TableRow"] = ()
    choosing_value_name: str = ""
    paper_value: PaperValue | None = None
    panel_titles: tuple[str, ...] = ("",)
    curve_name: str = ""
    axis_position: float | None = None

    def compute_values(
        self, values_by_job_and_seed: Mapping[tuple[str, int], MeasuredValues]
    ) -> dict[int, float]:
        """Return the row's values by seed.

        `values_by_job_and_seed`: values that the jobs measured, by label and seed.
        """
        if self.job is not None:
            label = self.job.label
            return {
                seed: figures[self.value_name]
                for (job, seed), figures in values_by_job_and_seed.items()
                if job == label
            }
        if self.candidate_rows:
            return self._choose_values(values_by_job_and_seed)
        weighted_values = [
            (weight, table_row.compute_values(values_by_job_and_seed))
            for weight, table_row in self.weighted_rows
        ]
        common_seeds = set.intersection(*(set(values) for _, values in weighted_values))
        return {
            seed: sum(weight * values[seed] for weight, values in weighted_values)
            for seed in sorted(common_seeds)
        }

    def _choose_values(
        self, values_by_job_and_seed: Mapping[tuple[str, int], MeasuredValues]
    ) -> dict[int, float]:
        """Return by seed the value of the candidate that is best on held-out rows.

        `values_by_job_and_seed`: values that the jobs measured, by label and seed.
        """
        # Of each candidate: its values, and its values on held-out rows, by seed.
        candidate_values = [
            table_row.compute_values(values_by_job_and_seed) for table_row in self.candidate_rows
        ]
        held_out_values = [
            replace(table_row, value_name=self.choosing_value_name).compute_values(
                values_by_job_and_seed
            )
            for table_row in self.candidate_rows
        ]
        candidates = range(len(candidate_values))
        value_by_seed = {}
        for seed in sorted(set.intersection(*map(set, candidate_values))):
            best_candidate = max(candidates, key=lambda candidate: held_out_values[candidate][seed])
            value_by_seed[seed] = candidate_values[best_candidate][seed]
        return value_by_seed

    @property
    def is_difference(self) -> bool:
        """Return whether the value may be negative, as a difference of two rows."""
        return any(weight < 0 for weight, _ in self.weighted_rows)


def measure_accuracies(*, seed: int, config: Mapping[str, Any]) -> MeasuredValues:
    """Return a run's accuracies in per cent, by mode of inference.

    The run is simulated without messages between parties where its method allows that. `config`:
    plain settings of the run without its seed.
    """
    run_settings = {"seed": seed, "party_seeds": "shared_for_comparison"}
    run_config = Config.model_validate({**config, **run_settings})
    accuracy_by_inference = (
        run(run_config, None).accuracy
        if describe_obstacles(run_config)
        else simulate_run(run_config)
    )
    return {inference: 100 * accuracy for inference, accuracy in accuracy_by_inference.items()}


@dataclass(frozen=True)
class TableExtent:
    """The rows of a table that are measured, by default or in full, and the number of seeds.

    Attributes:
        rows: rows of the table.
        seed_count: number of seeds with which every job is measured.
    """

    rows: Sequence[TableRow]
    seed_count: int

    @property
    def jobs(self) -> list[Job]:
        """Return the jobs of all rows, each once."""
        jobs = [table_row.job for table_row in self.rows if table_row.job is not None]
        return list(dict.fromkeys(jobs))


@dataclass(frozen=True, kw_only=True)
class PaperTable:
    """A table or figure of a paper.

    Attributes:
        source: the paper and the number of its table or figure.
        unit: unit of the values; intervals of values in per cent end at 100.
        reading_guide: how the table is measured here, and how that differs from the paper.
        omission: what the default part lacks of the full table; empty: nothing.
        hours: approximate time of the full table on two cores.
        make_extent: function that returns the rows to measure and the number of seeds; its argument
            is True for the full table, False for the default part.
        axis_title: title of the axis of `TableRow.axis_position`; empty: the picture has a dot for
            each row.
        label_by_position: labels by position on that axis; elsewhere the number is the label.
        number_format: format specification of a value.
        seed_correlation: correlation of two seeds' values
            (`apfed_experiments.summary.estimate_seed_correlation`).
    """

    name: str
    source: str
    title: str
    unit: str
    reading_guide: str
    omission: str
    hours: float
    make_extent: Callable[[bool], TableExtent]
    axis_title: str = ""
    label_by_position: Mapping[float, str] = field(default_factory=dict)
    number_format: str = ".2f"
    seed_correlation: float = 0.0


def declare_study(
    table: PaperTable,
    folder: Path,
    *,
    is_full: bool = False,
    max_minutes: float | None = None,
    clock: Clock = time.monotonic,
) -> Study[Measurements]:
    """Return the study that measures a table; the rows of a job that fails stay empty.

    Args:
        table: table or figure of a paper.
        folder: folder of the stored values and the report.
        is_full: whether all of the paper's table is measured, or its default part.
        max_minutes: minutes after which no further job begins; None: no limit.
        clock: function that returns the time in seconds.

    Raises ConfigError: the catalogue lacks a data set.
    """
    extent = table.make_extent(is_full)
    name = f"{table.name}-full" if is_full else table.name
    command = f"secure-apfed study table {table.name}{' --full' if is_full else ''}"
    unit = f": {table.unit}" if table.unit else ""

    def compare(measurements: Measurements) -> list[Part]:
        """Return the one part of the page: table, picture, and notes on what is done and
        left out.
        """
        rows = [_make_row(table_row, measurements.values, table) for table_row in extent.rows]
        picture = _draw_table(folder / f"{name}.png", table, rows)
        measurement_count = extent.seed_count * len(extent.jobs)
        progress_note = f"{len(measurements.values)} of {measurement_count} jobs are done."
        notes = [f"{table.source}. {command}{unit}. {table.reading_guide}", progress_note]
        if table.omission and not is_full:
            notes.append(f"Left out, and run by --full: {table.omission}.")
        return [Part(name=name, table=make_table(table, rows), pictures=[picture], notes=notes)]

    return Study(
        title=table.title,
        reading_guide="",
        folder=folder,
        measure=partial(
            _measure_jobs, extent, folder / "jobs", max_minutes=max_minutes, clock=clock
        ),
        compare=compare,
        unit_name="jobs",
    )


def _measure_jobs(
    extent: TableExtent,
    folder: Path,
    *,
    max_minutes: float | None,
    clock: Clock,
    jobs: int,
    on_done: OnDone,
) -> Measurements:
    """Measure every job of a table for every seed; return all values and failures.

    Args:
        extent: rows whose jobs are measured, and the number of seeds.
        folder: folder with one file for each job and seed; what is stored is only read.
        max_minutes: minutes after which no further measurement begins; None: no limit.
        clock: function that returns the time in seconds.
        jobs: number of measurements at a time.
        on_done: function that is called after each measurement.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    deadline = math.inf if max_minutes is None else clock() + 60 * max_minutes
    job_by_key = {
        (job.label, seed): job for seed in range(extent.seed_count) for job in extent.jobs
    }
    path_by_key = {(label, seed): folder / f"{label}-seed{seed}.json" for label, seed in job_by_key}

    def list_tasks() -> Iterator[tuple[str, Callable[[], MeasuredValues | Failure]]]:
        """Yield a name and a function for each measurement that is stored or begins in time."""
        for (label, seed), path in path_by_key.items():
            if path.is_file() or clock() < deadline:
                measure = partial(job_by_key[label, seed].load_or_measure, seed, path)
                yield path.stem, partial(catch_failure, path.stem, measure)

    result_by_name = run_tasks(list_tasks(), len(job_by_key), jobs=jobs, on_done=on_done)
    # Measurements that did not begin in time have no result.
    result_by_key = {
        key: result_by_name[path.stem]
        for key, path in path_by_key.items()
        if path.stem in result_by_name
    }
    return StudyValues(
        {key: result for key, result in result_by_key.items() if not isinstance(result, Failure)},
        [result for result in result_by_key.values() if isinstance(result, Failure)],
    )


def make_table(table: PaperTable, rows: Sequence[Row]) -> Table:
    """Return the table of the measured values beside the paper's.

    `rows`: rows that `_make_row` makes. A value that was not measured is an empty cell; one that
    the paper lacks is "-".
    """
    number_format = table.number_format
    format_mean = partial(_format_mean, number_format=number_format)
    format_range = partial(_format_range, number_format=number_format)
    cell_columns = [
        Column(name=name, title=name) for name in (rows[0]["table_row"].cells if rows else ())
    ]
    # Columns of numbers for programs; people see the formatted ones below.
    hidden_columns = make_hidden_columns(
        "seeds", "mean", "sd", "low", "high", "paper", "paper_sd", "difference", "in_sd"
    )
    visible_columns = (
        make_visible_column("here", "here", format_mean),
        make_visible_column("limits", "95 % interval", format_range),
        make_visible_column("seeds", "seeds", lambda count: str(count or "")),
        make_visible_column("printed", "paper", format_mean, missing_text="-"),
        make_visible_column("difference", "difference", make_formatter(f"+{number_format}")),
        make_visible_column("in_sd", "in combined sd", make_formatter("+.1f")),
    )
    return Table((*cell_columns, *hidden_columns, *visible_columns), rows, table.title)


def _format_mean(mean_and_sd: tuple[float, float | None], *, number_format: str) -> str:
    """Return a mean, with its standard deviation if it has one."""
    mean, standard_deviation = mean_and_sd
    if standard_deviation is None:
        return f"{mean:{number_format}}"
    return f"{mean:{number_format}} ± {standard_deviation:{number_format}}"


def _format_range(ends: tuple[float, float], *, number_format: str) -> str:
    """Return the ends of an interval."""
    low, high = ends
    return f"{low:{number_format}} to {high:{number_format}}"


def _make_row(
    table_row: TableRow,
    values_by_job_and_seed: Mapping[tuple[str, int], MeasuredValues],
    table: PaperTable,
) -> Row:
    """Return one row with its values by column; None: not measured, or by too few seeds.

    `values_by_job_and_seed`: values of the jobs by label and seed. In the columns,
    `standard_deviation` is the standard deviation over the seeds, and `difference` is ours minus
    the paper's. `difference_in_deviations` is the difference divided by the combined standard
    deviation sqrt(ours^2 + paper's^2). `limits` are `low` and `high` clipped to the unit's possible
    values.
    """
    values_by_seed = table_row.compute_values(values_by_job_and_seed)
    paper_value = table_row.paper_value
    values = list(values_by_seed.values())
    interval = (
        Interval.from_values(values, seed_correlation=table.seed_correlation) if values else None
    )
    standard_deviation = float(np.std(values, ddof=1)) if len(values) > 1 else None
    difference = difference_in_deviations = None
    if interval is not None and paper_value is not None:
        difference = interval.mean - paper_value.mean
        if standard_deviation is not None and paper_value.standard_deviation is not None:
            combined_deviation = math.hypot(standard_deviation, paper_value.standard_deviation)
            difference_in_deviations = (
                difference / combined_deviation if combined_deviation else None
            )
    # One seed has no interval.
    low = high = limits = None
    if interval is not None and standard_deviation is not None:
        low = interval.low
        high = interval.high
        limits = _clip_limits((low, high), table, is_difference=table_row.is_difference)
    return {
        **table_row.cells,
        "table_row": table_row,
        "values": values_by_seed,
        "interval": interval,
        "seeds": len(values),
        "mean": None if interval is None else interval.mean,
        "sd": standard_deviation,
        "low": low,
        "high": high,
        "paper": None if paper_value is None else paper_value.mean,
        "paper_sd": None if paper_value is None else paper_value.standard_deviation,
        "difference": difference,
        "in_sd": difference_in_deviations,
        "limits": limits,
        "here": None if interval is None else (interval.mean, standard_deviation),
        "printed": None
        if paper_value is None
        else (paper_value.mean, paper_value.standard_deviation),
    }


def _draw_table(path: Path, table: PaperTable, rows: Sequence[Row]) -> Picture:
    """Draw a table's picture and write it: panels of curves if it has an axis, else a dot for each
    row.

    `path`: file that the picture is written to. `rows`: rows that `_make_row` makes; those without
    a series (name of a curve) are not drawn.
    """
    drawn_rows = [row for row in rows if row["table_row"].curve_name]
    titles = dict.fromkeys(title for row in drawn_rows for title in row["table_row"].panel_titles)
    rows_by_panel = {
        title: [row for row in drawn_rows if title in row["table_row"].panel_titles]
        for title in titles
    }
    panels_down = math.ceil(len(rows_by_panel) / _MAX_PANELS_ACROSS)
    panels_across = math.ceil(len(rows_by_panel) / panels_down)
    most_rows = max(map(len, rows_by_panel.values()))
    # In inches. Dots of a panel stand below each other, a line of text apart.
    panel_height = 3.4 if table.axis_title else 1.0 + 0.27 * most_rows
    figure_width = max(6.5, 4.6 * panels_across)
    figure_height = 0.7 + panel_height * panels_down
    # Curves of one unit share their vertical axis, so that panels can be compared.
    has_shared_axis = bool(table.axis_title and table.unit)
    with open_figure(path, (figure_width, figure_height)) as figure:
        grid = figure.subplots(panels_down, panels_across, squeeze=False, sharey=has_shared_axis)
        for axes in grid.flat[len(rows_by_panel) :]:
            axes.remove()
        for axes, (title, panel_rows) in zip(grid.flat, rows_by_panel.items(), strict=False):
            axes.set_title(title)
            if table.axis_title:
                _draw_curves(axes, panel_rows, table)
            else:
                _draw_dots(axes, panel_rows, table)
                axes.set_xlabel(table.unit)
            if has_shared_axis:
                axes.label_outer()
        # Each label stands in the legend once.
        handles = {
            label: handle
            for axes in figure.axes
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.suptitle(table.title)
        figure.legend(
            handles.values(), handles.keys(), loc="outside lower center", ncols=5, frameon=False
        )
    caption = "Means over the seeds with 95 % intervals; hollow: what the paper prints."
    return Picture(path=path, title=table.title, caption=caption)


def _find_largest_value(table: PaperTable) -> float:
    """Return the largest value that the table's unit allows: 100 for per cent, else infinity."""
    return 100.0 if "%" in table.unit or "per cent" in table.unit else math.inf


def _clip_limits(
    ends: tuple[float, float], table: PaperTable, *, is_difference: bool = False
) -> tuple[float, float]:
    """Return the ends of an interval clipped to the possible values of the table's unit.

    A share of rows lies between 0 and 100 %, a difference of two between -100 and 100 %
    (`is_difference`). Other units have no limits.
    """
    low, high = ends
    highest = _find_largest_value(table)
    lowest = -highest if is_difference or math.isinf(highest) else 0.0
    return max(low, lowest), min(high, highest)


def _draw_dots(axes: Axes, rows: Sequence[Row], table: PaperTable) -> None:
    """Draw a dot for each row, the first on top, and the paper's value a little below it.

    `rows`: rows of one panel, made by `_make_row`.
    """
    own_style: dict[str, Any] = {"fmt": "o", "color": OUR_COLOUR, "label": "here, 95 % interval"}
    paper_style: dict[str, Any] = {
        "fmt": "D",
        "color": OTHER_COLOUR,
        "label": "paper, standard deviation",
    }
    for height, row in enumerate(rows):
        for interval, offset, style in (
            # Offsets are in rows: ours above the middle of the row, the paper's below.
            (row["interval"], 0.12, own_style),
            (_make_paper_interval(row), -0.18, {**paper_style, "markerfacecolor": "white"}),
        ):
            if interval is not None:
                bars = interval.compute_error_bars(maximum=_find_largest_value(table))
                axes.errorbar(interval.mean, offset - height, xerr=bars, capsize=2.5, **style)
    name_rows(axes, [row["table_row"].curve_name for row in rows])
    axes.set_ylim(-len(rows) + 0.4, 0.6)


def _draw_curves(axes: Axes, rows: Sequence[Row], table: PaperTable) -> None:
    """Draw a curve for each series, and the paper's values hollow and in its colour.

    `rows`: rows of one panel, made by `_make_row`. Ticks stand at the rows' positions. If all
    means are at least 0, the axis ends just below 0, also where an interval reaches further.
    """
    rows_by_curve: dict[str, list[Row]] = {}
    for row in rows:
        rows_by_curve.setdefault(row["table_row"].curve_name, []).append(row)
    ticks = sorted({row["table_row"].axis_position for row in rows})
    # Curves are shifted to both sides of the tick; an axis with one tick has length 1.
    axis_length = ticks[-1] - ticks[0] or 1.0
    middle_index = (len(rows_by_curve) - 1) / 2
    for index, (name, curve_rows) in enumerate(rows_by_curve.items()):
        shift = _CURVE_SHIFT * axis_length * (index - middle_index)
        x_positions = [row["table_row"].axis_position + shift for row in curve_rows]
        draw_curve = partial(
            _draw_curve,
            axes,
            x_positions,
            color=COLOURS[index % len(COLOURS)],
            maximum=_find_largest_value(table),
        )
        draw_curve([row["interval"] for row in curve_rows], marker_and_line="o-", label=name)
        draw_curve(
            [_make_paper_interval(row) for row in curve_rows],
            marker_and_line="D:",
            label=f"{name}, paper",
            mfc="white",
        )
    axes.set(xlabel=table.axis_title, ylabel=table.unit)
    axes.set_xticks(ticks, [table.label_by_position.get(tick, f"{tick:g}") for tick in ticks])
    means = [row["interval"].mean for row in rows if row["interval"] is not None]
    low, high = axes.get_ylim()
    if low < 0 <= min(means, default=-1.0):
        axes.set_ylim(bottom=-_MARGIN_BELOW_ZERO * high)


def _draw_curve(
    axes: Axes, x_positions: Sequence[float], intervals: Sequence[Interval | None], **style: Any
) -> None:
    """Draw one curve of means with intervals; positions without an interval are left out.

    `style`: options of `draw_intervals`.
    """
    drawn_points = [
        (x, interval)
        for x, interval in zip(x_positions, intervals, strict=True)
        if interval is not None
    ]
    if drawn_points:
        drawn_positions, drawn_intervals = zip(*drawn_points, strict=True)
        draw_intervals(axes, drawn_positions, drawn_intervals, markersize=5, **style)


def _make_paper_interval(row: Row) -> Interval | None:
    """Return the paper's mean with one standard deviation to each side; None: it prints none."""
    mean = row["paper"]
    sd = row["paper_sd"] or 0.0
    return None if mean is None else Interval(mean, mean - sd, mean + sd)
