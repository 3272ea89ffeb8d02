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
    make_form,
    make_hidden_columns,
    make_visible_column,
)
from apfed_experiments.drawing import (
    COLOURS,
    OTHER,
    OURS,
    Picture,
    draw_line,
    name_rows,
    open_figure,
)
from apfed_experiments.report.page import Part
from apfed_experiments.runner import Study
from apfed_experiments.study import (
    Failure,
    Found,
    OnDone,
    StoredMetrics,
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
Measurements: TypeAlias = Found[dict[tuple[str, int], MeasuredValues]]
"""The values that a table's jobs have measured so far, by the job's label and the seed."""

_PANELS_ACROSS = 3
# Curves are shifted by this share of the axis, so that their error bars do not overlap.
_CURVE_SHIFT = 0.012
# Of the vertical axis, where no value is negative: this share of its top lies below 0.
_MARGIN_BELOW_ZERO = 0.03


@dataclass(frozen=True, kw_only=True)
class Printed:
    """A value as the paper prints it: mean and, where it prints one, standard deviation."""

    mean: float
    sd: float | None = None


class _Measured(BaseModel):
    """The values that a job measured for one seed, and the seconds that it took."""

    figures: dict[str, float]
    seconds: float


class _StoredMeasurement(StoredMetrics):
    """A file of the values of one job and seed."""

    measured: _Measured


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
        cls, label: str, measure: Callable[..., MeasuredValues], config: Config, **more: Any
    ) -> Self:
        """Return the job that passes a configuration to `measure`, as plain settings in `config`.

        `label`: name that is distinct within the table. `more`: further keyword arguments of
        `measure`.
        """
        config_settings = config.model_dump(mode="json", exclude_defaults=True)
        return cls(label=label, measure=measure, settings={"config": config_settings, **more})

    def load_or_measure(self, seed: int, path: Path) -> MeasuredValues:
        """Return the values of one seed: stored ones, or measured on one thread and then stored.

        `path`: file of the stored values.

        Raises CheckpointError: the file holds values of other settings.
        """
        settings = json.dumps({**self.settings, "seed": seed}, sort_keys=True)
        digest = hashlib.sha256(settings.encode()).hexdigest()
        stored = measure_once(path, _StoredMeasurement, digest, partial(self._measure_seed, seed))
        return stored.measured.figures

    def _measure_seed(self, seed: int) -> dict[str, _Measured]:
        """Return the fields of a stored measurement of one seed.

        Raises ModelError: a value is not finite, since its training diverged.
        """
        began = time.monotonic()
        figures = dict(self.measure(seed=seed, **self.settings))
        not_finite = sorted(name for name, figure in figures.items() if not math.isfinite(figure))
        if not_finite:
            raise ModelError(
                f"{self.label}: {', '.join(not_finite)} is no finite number, so its training "
                "diverged; nothing is kept of it"
            )
        return {"measured": _Measured(figures=figures, seconds=time.monotonic() - began)}


@dataclass(frozen=True, kw_only=True, eq=False)
class TableRow:
    """A row of a table, and how its value for each seed is computed.

    Attributes:
        cells: text by column; all rows have the same columns, and no two rows the same texts.
        job, figure: job that measures the value, and the value's name among the job's results.
        combines: pairs of a weight and a row, for a row without a job: the value is the weighted
            sum for every seed that all of them have, a mean or a difference paired by seed.
        chooses, chosen_by: candidate rows, for a row with neither of these: the value is that of
            the candidate whose job reports the highest `chosen_by` (a value on held-out rows) for
            the seed; ties go to the first.
        paper: what the paper prints; None: nothing, or nothing legible.
        panels: titles of the panels of the picture in which the row is drawn.
        at: position on the panels' horizontal axis; None: the row is drawn as a dot.
        series: name of the row's curve, or of its dot; "": it is not drawn.
    """

    cells: Mapping[str, str]
    job: Job | None = None
    figure: str = ""
    combines: Sequence[tuple[float, "TableRow"]] = ()
    chooses: Sequence["TableRow"] = ()
    chosen_by: str = ""
    paper: Printed | None = None
    panels: tuple[str, ...] = ("",)
    series: str = ""
    at: float | None = None

    def compute_values(
        self, measured: Mapping[tuple[str, int], MeasuredValues]
    ) -> dict[int, float]:
        """Return the row's values by seed.

        `measured`: values that the jobs measured, by label and seed.
        """
        if self.job is not None:
            label = self.job.label
            return {
                seed: figures[self.figure]
                for (job, seed), figures in measured.items()
                if job == label
            }
        if self.chooses:
            return self._choose_values(measured)
        terms = [
            (weight, table_row.compute_values(measured)) for weight, table_row in self.combines
        ]
        common_seeds = set.intersection(*(set(values) for _, values in terms))
        return {
            seed: sum(weight * values[seed] for weight, values in terms)
            for seed in sorted(common_seeds)
        }

    def _choose_values(
        self, measured: Mapping[tuple[str, int], MeasuredValues]
    ) -> dict[int, float]:
        """Return by seed the value of the candidate that is best on held-out rows.

        `measured`: values that the jobs measured, by label and seed.
        """
        # Of each candidate: its values, and its values on held-out rows, by seed.
        values = [table_row.compute_values(measured) for table_row in self.chooses]
        held_out_values = [
            replace(table_row, figure=self.chosen_by).compute_values(measured)
            for table_row in self.chooses
        ]
        candidates = range(len(values))
        value_by_seed = {}
        for seed in sorted(set.intersection(*map(set, values))):
            best = max(candidates, key=lambda candidate: held_out_values[candidate][seed])
            value_by_seed[seed] = values[best][seed]
        return value_by_seed

    @property
    def is_difference(self) -> bool:
        """Return whether the value may be negative, as a difference of two rows."""
        return any(weight < 0 for weight, _ in self.combines)


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
        seeds: number of seeds with which every job is measured.
    """

    rows: Sequence[TableRow]
    seeds: int

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
        reading: how the table is measured here, and how that differs from the paper.
        leaves_out: what the default part lacks of the full table; empty: nothing.
        hours: approximate time of the full table on two cores.
        size: function that returns the rows to measure and the number of seeds; its argument is
            True for the full table, False for the default part.
        axis: title of the axis of `TableRow.at`; empty: the picture has a dot for each row.
        ticks: labels by position on that axis; elsewhere the number is the label.
        form: format specification of a value.
        shared: correlation of two seeds' values
            (`apfed_experiments.summary.estimate_seed_correlation`).
    """

    name: str
    source: str
    title: str
    unit: str
    reading: str
    leaves_out: str
    hours: float
    size: Callable[[bool], TableExtent]
    axis: str = ""
    ticks: Mapping[float, str] = field(default_factory=dict)
    form: str = ".2f"
    shared: float = 0.0


def declare_study(
    table: PaperTable,
    folder: Path,
    *,
    full: bool = False,
    minutes: float | None = None,
    clock: Clock = time.monotonic,
) -> Study[Measurements]:
    """Return the study that measures a table; the rows of a job that fails stay empty.

    Args:
        table: table or figure of a paper.
        folder: folder of the stored values and the report.
        full: whether all of the paper's table is measured, or its default part.
        minutes: minutes after which no further job begins; None: no limit.
        clock: function that returns the time in seconds.

    Raises ConfigError: the catalogue lacks a data set.
    """
    extent = table.size(full)
    name = f"{table.name}-full" if full else table.name
    command = f"secure-apfed study table {table.name}{' --full' if full else ''}"
    unit = f": {table.unit}" if table.unit else ""

    def compare(measured: Measurements) -> list[Part]:
        """Return the one part of the page: table, picture, and notes on what is done and
        left out.
        """
        rows = [_make_row(table_row, measured.values, table) for table_row in extent.rows]
        picture = _draw_table(folder / f"{name}.png", table, rows)
        all_jobs = extent.seeds * len(extent.jobs)
        done = f"{len(measured.values)} of {all_jobs} jobs are done."
        notes = [f"{table.source}. {command}{unit}. {table.reading}", done]
        if table.leaves_out and not full:
            notes.append(f"Left out, and run by --full: {table.leaves_out}.")
        return [Part(name=name, table=make_table(table, rows), pictures=[picture], notes=notes)]

    return Study(
        title=table.title,
        reading="",
        folder=folder,
        measure=partial(_measure_jobs, extent, folder / "jobs", minutes=minutes, clock=clock),
        compare=compare,
        unit="jobs",
    )


def _measure_jobs(
    extent: TableExtent,
    folder: Path,
    *,
    minutes: float | None,
    clock: Clock,
    jobs: int,
    on_done: OnDone,
) -> Measurements:
    """Measure every job of a table for every seed; return all values and failures.

    Args:
        extent: rows whose jobs are measured, and the number of seeds.
        folder: folder with one file for each job and seed; what is stored is only read.
        minutes: minutes after which no further measurement begins; None: no limit.
        clock: function that returns the time in seconds.
        jobs: number of measurements at a time.
        on_done: function that is called after each measurement.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    deadline = math.inf if minutes is None else clock() + 60 * minutes
    all_jobs = {(job.label, seed): job for seed in range(extent.seeds) for job in extent.jobs}
    files = {(label, seed): folder / f"{label}-seed{seed}.json" for label, seed in all_jobs}

    def list_tasks() -> Iterator[tuple[str, Callable[[], MeasuredValues | Failure]]]:
        """Yield a name and a function for each measurement that is stored or begins in time."""
        for (label, seed), path in files.items():
            if path.is_file() or clock() < deadline:
                measure = partial(all_jobs[label, seed].load_or_measure, seed, path)
                yield path.stem, partial(catch_failure, path.stem, measure)

    results = run_tasks(list_tasks(), len(all_jobs), jobs=jobs, on_done=on_done)
    # Measurements that did not begin in time have no result.
    result_by_key = {key: results[path.stem] for key, path in files.items() if path.stem in results}
    return Found(
        {key: result for key, result in result_by_key.items() if not isinstance(result, Failure)},
        [result for result in result_by_key.values() if isinstance(result, Failure)],
    )


def make_table(table: PaperTable, rows: Sequence[Row]) -> Table:
    """Return the table of the measured values beside the paper's.

    `rows`: rows that `_make_row` makes. A value that was not measured is an empty cell; one that
    the paper lacks is "-".
    """
    form = table.form

    def format_mean(mean_and_sd: tuple[float, float | None]) -> str:
        """Return a mean, with its standard deviation if it has one."""
        mean, sd = mean_and_sd
        return f"{mean:{form}}" if sd is None else f"{mean:{form}} ± {sd:{form}}"

    def format_range(ends: tuple[float, float]) -> str:
        """Return the ends of an interval."""
        low, high = ends
        return f"{low:{form}} to {high:{form}}"

    cells = [Column(name=name, title=name) for name in (rows[0]["table_row"].cells if rows else ())]
    # Columns of numbers for programs; people see the formatted ones below.
    exported = make_hidden_columns(
        "seeds", "mean", "sd", "low", "high", "paper", "paper_sd", "difference", "in_sd"
    )
    shown = (
        make_visible_column("here", "here", format_mean),
        make_visible_column("limits", "95 % interval", format_range),
        make_visible_column("seeds", "seeds", lambda count: str(count or "")),
        make_visible_column("printed", "paper", format_mean, missing="-"),
        make_visible_column("difference", "difference", make_form(f"+{form}")),
        make_visible_column("in_sd", "in combined sd", make_form("+.1f")),
    )
    return Table((*cells, *exported, *shown), rows, table.title)


def _make_row(
    table_row: TableRow, measured: Mapping[tuple[str, int], MeasuredValues], table: PaperTable
) -> Row:
    """Return one row with its values by column; None: not measured, or by too few seeds.

    `measured`: values of the jobs by label and seed. In the columns, `sd` is the standard deviation
    over the seeds, and `difference` is ours minus the paper's. `in_sd` is the difference divided by
    the combined standard deviation sqrt(ours^2 + paper's^2). `limits` are `low` and `high` clipped
    to the unit's possible values.
    """
    values_by_seed = table_row.compute_values(measured)
    paper = table_row.paper
    values = list(values_by_seed.values())
    interval = Interval.from_values(values, shared=table.shared) if values else None
    sd = float(np.std(values, ddof=1)) if len(values) > 1 else None
    difference = in_sd = None
    if interval is not None and paper is not None:
        difference = interval.mean - paper.mean
        if sd is not None and paper.sd is not None:
            combined_sd = math.hypot(sd, paper.sd)
            in_sd = difference / combined_sd if combined_sd else None
    # One seed has no interval.
    low = high = limits = None
    if interval is not None and sd is not None:
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
        "sd": sd,
        "low": low,
        "high": high,
        "paper": None if paper is None else paper.mean,
        "paper_sd": None if paper is None else paper.sd,
        "difference": difference,
        "in_sd": in_sd,
        "limits": limits,
        "here": None if interval is None else (interval.mean, sd),
        "printed": None if paper is None else (paper.mean, paper.sd),
    }


def _draw_table(path: Path, table: PaperTable, rows: Sequence[Row]) -> Picture:
    """Draw a table's picture and write it: panels of curves if it has an axis, else a dot for each
    row.

    `path`: file that the picture is written to. `rows`: rows that `_make_row` makes; those without
    a series (name of a curve) are not drawn.
    """
    drawn_rows = [row for row in rows if row["table_row"].series]
    titles = dict.fromkeys(title for row in drawn_rows for title in row["table_row"].panels)
    panels = {
        title: [row for row in drawn_rows if title in row["table_row"].panels] for title in titles
    }
    down = math.ceil(len(panels) / _PANELS_ACROSS)  # number of panels from top to bottom
    across = math.ceil(len(panels) / down)
    most_rows = max(map(len, panels.values()))
    panel_height = 3.4 if table.axis else 1.0 + 0.27 * most_rows  # inches
    # Curves of one unit share their vertical axis, so that panels can be compared.
    share_axis = bool(table.axis and table.unit)
    with open_figure(path, (max(6.5, 4.6 * across), 0.7 + panel_height * down)) as figure:
        grid = figure.subplots(down, across, squeeze=False, sharey=share_axis)
        for axes in grid.flat[len(panels) :]:
            axes.remove()
        for axes, (title, panel_rows) in zip(grid.flat, panels.items(), strict=False):
            axes.set_title(title)
            if table.axis:
                _draw_curves(axes, panel_rows, table)
            else:
                _draw_dots(axes, panel_rows, table)
                axes.set_xlabel(table.unit)
            if share_axis:
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


def _largest_value(table: PaperTable) -> float:
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
    highest = _largest_value(table)
    lowest = -highest if is_difference or math.isinf(highest) else 0.0
    return max(low, lowest), min(high, highest)


def _draw_dots(axes: Axes, rows: Sequence[Row], table: PaperTable) -> None:
    """Draw a dot for each row, the first on top, and the paper's value a little below it.

    `rows`: rows of one panel, made by `_make_row`.
    """
    look_here: dict[str, Any] = {"fmt": "o", "color": OURS, "label": "here, 95 % interval"}
    look_paper: dict[str, Any] = {"fmt": "D", "color": OTHER, "label": "paper, standard deviation"}
    for height, row in enumerate(rows):
        for interval, offset, look in (
            # Offsets are in rows: ours above the middle of the row, the paper's below.
            (row["interval"], 0.12, look_here),
            (_make_paper_interval(row), -0.18, {**look_paper, "markerfacecolor": "white"}),
        ):
            if interval is not None:
                bars = interval.compute_error_bars(maximum=_largest_value(table))
                axes.errorbar(interval.mean, offset - height, xerr=bars, capsize=2.5, **look)
    name_rows(axes, [row["table_row"].series for row in rows])
    axes.set_ylim(-len(rows) + 0.4, 0.6)


def _draw_curves(axes: Axes, rows: Sequence[Row], table: PaperTable) -> None:
    """Draw a curve for each series, and the paper's values hollow and in its colour.

    `rows`: rows of one panel, made by `_make_row`. Ticks stand at the rows' positions. If all
    means are at least 0, the axis ends just below 0, also where an interval reaches further.
    """
    series: dict[str, list[Row]] = {}
    for row in rows:
        series.setdefault(row["table_row"].series, []).append(row)
    ticks = sorted({row["table_row"].at for row in rows})
    # Curves are shifted to both sides of the tick; an axis with one tick has length 1.
    step = _CURVE_SHIFT * (ticks[-1] - ticks[0] or 1.0)
    for index, (name, rows) in enumerate(series.items()):
        colour = COLOURS[index % len(COLOURS)]
        shift = step * (index - (len(series) - 1) / 2)
        look_here: dict[str, Any] = {"fmt": "o-", "label": name}
        look_paper: dict[str, Any] = {"fmt": "D:", "label": f"{name}, paper", "mfc": "white"}
        for intervals, look in (
            ([row["interval"] for row in rows], look_here),
            ([_make_paper_interval(row) for row in rows], look_paper),
        ):
            points = [
                (row["table_row"].at + shift, interval)
                for row, interval in zip(rows, intervals, strict=True)
                if interval is not None
            ]
            if points:
                places, intervals_drawn = zip(*points, strict=True)
                highest = _largest_value(table)
                draw_line(
                    axes,
                    places,
                    intervals_drawn,
                    color=colour,
                    markersize=5,
                    maximum=highest,
                    **look,
                )
    axes.set(xlabel=table.axis, ylabel=table.unit)
    axes.set_xticks(ticks, [table.ticks.get(tick, f"{tick:g}") for tick in ticks])
    means = [row["interval"].mean for row in rows if row["interval"] is not None]
    low, high = axes.get_ylim()
    if low < 0 <= min(means, default=-1.0):
        axes.set_ylim(bottom=-_MARGIN_BELOW_ZERO * high)


def _make_paper_interval(row: Row) -> Interval | None:
    """Return the paper's mean with one standard deviation to each side; None: it prints none."""
    mean = row["paper"]
    sd = row["paper_sd"] or 0.0
    return None if mean is None else Interval(mean, mean - sd, mean + sd)
