"""A table or figure of a paper: its lines, what the paper prints of them, and jobs that fill it.

A job measures figures of some lines for a seed and keeps them in one small file, so that a stopped
table resumes; what is not measured yet stays empty. Adding a table is one
entry in the `TABLES` of its paper's file.
"""

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
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
    StoredFigures,
    measure_once,
    or_failure,
    run_tasks,
)
from apfed_experiments.summary import Interval, Row
from secure_apfed.config import Config
from secure_apfed.errors import ModelError
from secure_apfed.runs.run import run
from secure_apfed.runs.simulation import describe_obstacles, simulate_run

Clock: TypeAlias = Callable[[], float]
Figures = Mapping[str, float]
"""Values that a function measured, by name, in the table's unit."""
Measurements: TypeAlias = Found[dict[tuple[str, int], Figures]]
"""The figures of a table's jobs so far, by label and seed."""

_COLUMNS = 3
_APART = 0.012
_BELOW = 0.03


@dataclass(frozen=True, kw_only=True)
class Printed:
    mean: float
    sd: float | None = None


class _Measured(BaseModel):
    figures: dict[str, float]
    seconds: float


class _StoredMeasurement(StoredFigures):
    measured: _Measured


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """Figures of one seed, by which lines are paired.

    Attributes:
        label: distinct within the table.
        measure: of the seed and plain settings; a module's, so that another process finds it.
    """

    label: str
    measure: Callable[..., Figures]
    settings: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def for_config(
        cls, label: str, measure: Callable[..., Figures], config: Config, **more: Any
    ) -> Self:
        """Return the job of this configuration, which `measure` takes as plain settings."""
        config_settings = config.model_dump(mode="json", exclude_defaults=True)
        return cls(label=label, measure=measure, settings={"config": config_settings, **more})

    def load_or_measure(self, seed: int, path: Path) -> Figures:
        """Measure on one thread and store the figures, or read stored ones.

        Raises CheckpointError where a file in its place has other settings.
        """
        settings = json.dumps({**self.settings, "seed": seed}, sort_keys=True)
        digest = hashlib.sha256(settings.encode()).hexdigest()
        stored = measure_once(path, _StoredMeasurement, digest, partial(self._measure_seed, seed))
        return stored.measured.figures

    def _measure_seed(self, seed: int) -> dict[str, _Measured]:
        """Measure one seed. Raises ModelError: a figure is not finite, since its
        training diverged.
        """
        began = time.monotonic()
        figures = dict(self.measure(seed=seed, **self.settings))
        if missing := sorted(name for name, figure in figures.items() if not math.isfinite(figure)):
            raise ModelError(
                f"{self.label}: {', '.join(missing)} is no finite number, so its training "
                "diverged; nothing is kept of it"
            )
        return {"measured": _Measured(figures=figures, seconds=time.monotonic() - began)}


@dataclass(frozen=True, kw_only=True, eq=False)
class Line:
    """A line of a table, and how its values are computed.

    Attributes:
        cells: text by column; the same columns in all lines, and no two lines the same texts.
        job, figure: the job that measures it, and the name of its figure there.
        combines: without a job, weighted lines whose sum it is, for every seed that has all of
            them: a mean, or a difference that is paired by seed.
        chooses, judged_by: without both, candidate lines. For every seed that has all of them it
            holds the candidate whose job reports the highest `judged_by` (a figure of held-out
            rows); ties go to the first.
        paper: what the paper prints; None: nothing, or nothing that can be read.
        panels: of the picture, by title, in which it is shown; at: its place on their axis.
        series: whose curve it lies on, or what its dot is called; "": it is not drawn.
    """

    cells: Mapping[str, str]
    job: Job | None = None
    figure: str = ""
    combines: Sequence[tuple[float, "Line"]] = ()
    chooses: Sequence["Line"] = ()
    judged_by: str = ""
    paper: Printed | None = None
    panels: tuple[str, ...] = ("",)
    series: str = ""
    at: float | None = None

    def compute_values(self, measured: Mapping[tuple[str, int], Figures]) -> dict[int, float]:
        """Return the line's values by seed.

        `measured`: figures by job and seed.
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
        parts = [(weight, line.compute_values(measured)) for weight, line in self.combines]
        seeds = set.intersection(*(set(values) for _, values in parts))
        return {
            seed: sum(weight * values[seed] for weight, values in parts) for seed in sorted(seeds)
        }

    def _choose_values(self, measured: Mapping[tuple[str, int], Figures]) -> dict[int, float]:
        """Return by seed the value of the candidate that is best on held-out rows.

        `measured`: figures by job and seed.
        """
        values = [line.compute_values(measured) for line in self.chooses]
        held_out = [
            replace(line, figure=self.judged_by).compute_values(measured) for line in self.chooses
        ]
        candidates = range(len(values))
        chosen = {}
        for seed in sorted(set.intersection(*map(set, values))):
            best = max(candidates, key=lambda place: held_out[place][seed])
            chosen[seed] = values[best][seed]
        return chosen

    @property
    def is_difference(self) -> bool:
        """Return whether the line may be negative, as a difference."""
        return any(weight < 0 for weight, _ in self.combines)


def measure_accuracies(*, seed: int, config: Mapping[str, Any]) -> Figures:
    """Return a run's accuracies in per cent, by way of inference. The run is simulated without
    messages between the parties where its method allows that.
    """
    run_settings = {"seed": seed, "party_seeds": "shared_for_comparison"}
    run_config = Config.model_validate({**config, **run_settings})
    accuracy_by_way = (
        run(run_config, None).accuracy
        if describe_obstacles(run_config)
        else simulate_run(run_config)
    )
    return {way: 100 * accuracy for way, accuracy in accuracy_by_way.items()}


@dataclass(frozen=True)
class Size:
    """The extent to which a table is measured: its default part, or all of it."""

    lines: Sequence[Line]
    seeds: int

    @property
    def jobs(self) -> list[Job]:
        """Return the jobs of all lines, each once."""
        return list(dict.fromkeys(line.job for line in self.lines if line.job is not None))


@dataclass(frozen=True, kw_only=True)
class PaperTable:
    """A table or figure of a paper.

    Attributes:
        reading: how it is measured here, and in what that differs from the paper.
        leaves_out: of the full table in what runs by default; empty: nothing.
        hours: that the full table takes on two cores, about.
        size: its lines and seeds, given whether all of it is wanted.
        axis: what `Line.at` is; empty: the picture has one dot a line. ticks: what stands at a
            place of that axis, if not its number.
        shared: how alike two seeds' figures are;
            see `apfed_experiments.summary.estimate_seed_correlation`.
    """

    name: str
    source: str
    title: str
    unit: str
    reading: str
    leaves_out: str
    hours: float
    size: Callable[[bool], Size]
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
    """Return the study of all of the table or its default part; a job that fails stays empty.

    After `minutes` no other job begins. Raises ConfigError where the catalogue lacks a data
    set.

    `full`: whether all of the paper's table is measured, or a default part.
    """
    size = table.size(full)
    name = f"{table.name}-full" if full else table.name
    command = f"secure-apfed study table {table.name}{' --full' if full else ''}"
    unit = f": {table.unit}" if table.unit else ""

    def compare(measured: Measurements) -> list[Part]:
        """Return the table, its picture and notes on what is done and left out."""
        rows = [_make_row(line, measured.values, table) for line in size.lines]
        picture = _draw_table(folder / f"{name}.png", table, rows)
        done = f"{len(measured.values)} of {size.seeds * len(size.jobs)} jobs are done."
        notes = [f"{table.source}. {command}{unit}. {table.reading}", done]
        if table.leaves_out and not full:
            notes.append(f"Left out, and run by --full: {table.leaves_out}.")
        lines = make_table(table, rows)
        return [Part(name=name, table=lines, pictures=[picture], notes=notes)]

    return Study(
        title=table.title,
        reading="",
        folder=folder,
        measure=partial(_measure_jobs, size, folder / "jobs", minutes=minutes, clock=clock),
        compare=compare,
        unit="jobs",
    )


def _measure_jobs(
    size: Size, folder: Path, *, minutes: float | None, clock: Clock, jobs: int, on_done: OnDone
) -> Measurements:
    """Measure what is missing until the time is over; return all figures and failures.

    `minutes`: time limit; None: none. `jobs`: how many at a time.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    until = math.inf if minutes is None else clock() + 60 * minutes
    all_jobs = {(job.label, seed): job for seed in range(size.seeds) for job in size.jobs}
    files = {key: folder / f"{key[0]}-seed{key[1]}.json" for key in all_jobs}
    tasks = (
        (
            path.stem,
            partial(or_failure, path.stem, partial(all_jobs[key].load_or_measure, key[1], path)),
        )
        for key, path in files.items()
        if path.is_file() or clock() < until
    )
    ended = run_tasks(tasks, len(all_jobs), jobs=jobs, on_done=on_done)
    figures = {key: ended[path.stem] for key, path in files.items() if path.stem in ended}
    return Found(
        {key: ended for key, ended in figures.items() if not isinstance(ended, Failure)},
        [ended for ended in figures.values() if isinstance(ended, Failure)],
    )


def make_table(table: PaperTable, rows: Sequence[Row]) -> Table:
    """Return the lines beside the paper's. What is missing is empty; an unread figure is "-"."""
    form = table.form

    def format_mean(both: tuple[float, float | None]) -> str:
        mean, sd = both
        return f"{mean:{form}}" if sd is None else f"{mean:{form}} ± {sd:{form}}"

    def from_to(ends: tuple[float, float]) -> str:
        low, high = ends
        return f"{low:{form}} to {high:{form}}"

    cells = [Column(name=name, title=name) for name in (rows[0]["line"].cells if rows else ())]
    plain = make_hidden_columns(
        "seeds", "mean", "sd", "low", "high", "paper", "paper_sd", "difference", "in_sd"
    )
    measured = (
        make_visible_column("here", "here", format_mean),
        make_visible_column("limits", "95 % interval", from_to),
        make_visible_column("seeds", "seeds", lambda count: str(count or "")),
        make_visible_column("printed", "paper", format_mean, missing="-"),
        make_visible_column("difference", "difference", make_form(f"+{form}")),
        make_visible_column("in_sd", "in combined sd", make_form("+.1f")),
    )
    return Table((*cells, *plain, *measured), rows, table.title)


def _make_row(line: Line, measured: Mapping[tuple[str, int], Figures], table: PaperTable) -> Row:
    """Return one line with its measurements; None: nothing was measured, or not enough.

    sd: over the seeds; difference: ours minus the paper's; in_sd: the same in units of the combined
    standard deviation, sqrt(ours^2 + paper's^2); limits: low and high, without what a figure of the
    table's unit cannot be.
    """
    values_by_seed = line.compute_values(measured)
    paper = line.paper
    values = list(values_by_seed.values())
    interval = Interval.from_values(values, shared=table.shared) if values else None
    sd = float(np.std(values, ddof=1)) if len(values) > 1 else None
    difference = in_sd = None
    if interval is not None and paper is not None:
        difference = interval.mean - paper.mean
        if sd is not None and paper.sd is not None and (combined := math.hypot(sd, paper.sd)):
            in_sd = difference / combined
    low = high = limits = None
    if interval is not None and sd is not None:
        low = interval.low
        high = interval.high
        limits = _cut_limits((low, high), table, is_difference=line.is_difference)
    return {
        **line.cells,
        "line": line,
        "values": values_by_seed,
        "interval": interval,
        "seeds": len(values),
        "mean": interval and interval.mean,
        "sd": sd,
        "low": low,
        "high": high,
        "paper": paper and paper.mean,
        "paper_sd": paper and paper.sd,
        "difference": difference,
        "in_sd": in_sd,
        "limits": limits,
        "here": None if interval is None else (interval.mean, sd),
        "printed": None if paper is None else (paper.mean, paper.sd),
    }


def _draw_table(path: Path, table: PaperTable, rows: Sequence[Row]) -> Picture:
    """Draw every panel: curves where lines have a place on an axis, else a dot a line."""
    drawn_rows = [row for row in rows if row["line"].series]
    titles = dict.fromkeys(title for row in drawn_rows for title in row["line"].panels)
    panels = {title: [row for row in drawn_rows if title in row["line"].panels] for title in titles}
    down = -(-len(panels) // _COLUMNS)
    across = -(-len(panels) // down)
    tallest = max(map(len, panels.values()))
    height = 3.4 if table.axis else 1.0 + 0.27 * tallest
    shared = bool(table.axis and table.unit)
    with open_figure(path, (max(6.5, 4.6 * across), 0.7 + height * down)) as figure:
        grid = figure.subplots(down, across, squeeze=False, sharey=shared)
        for axes in grid.flat[len(panels) :]:
            axes.remove()
        for axes, (panel, lines) in zip(grid.flat, panels.items(), strict=False):
            axes.set_title(panel)
            if table.axis:
                _draw_curves(axes, lines, table)
            else:
                _draw_dots(axes, lines, table)
                axes.set_xlabel(table.unit)
            if shared:
                axes.label_outer()
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


def _find_most(table: PaperTable) -> float:
    """Return the largest value that a figure of this unit can have; infinite where none is."""
    return 100.0 if "%" in table.unit or "per cent" in table.unit else math.inf


def _cut_limits(
    ends: tuple[float, float], table: PaperTable, *, is_difference: bool = False
) -> tuple[float, float]:
    """Return the ends of an interval without what a share of rows, or a difference, cannot be."""
    low, high = ends
    highest = _find_most(table)
    lowest = -highest if is_difference or math.isinf(highest) else 0.0
    return max(low, lowest), min(high, highest)


def _draw_dots(axes: Axes, lines: Sequence[Row], table: PaperTable) -> None:
    """Draw a dot a line, the first on top, and the paper's a little below.

    `lines`: rows of the table.
    """
    look_here: dict[str, Any] = {"fmt": "o", "color": OURS, "label": "here, 95 % interval"}
    look_paper: dict[str, Any] = {"fmt": "D", "color": OTHER, "label": "paper, standard deviation"}
    for height, row in enumerate(lines):
        for interval, up, look in (
            (row["interval"], 0.12, look_here),
            (_make_paper_interval(row), -0.18, {**look_paper, "markerfacecolor": "white"}),
        ):
            if interval is not None:
                arms = interval.compute_error_bars(maximum=_find_most(table))
                axes.errorbar(interval.mean, up - height, xerr=arms, capsize=2.5, **look)
    name_rows(axes, [row["line"].series for row in lines])
    axes.set_ylim(-len(lines) + 0.4, 0.6)


def _draw_curves(axes: Axes, lines: Sequence[Row], table: PaperTable) -> None:
    """Draw a curve a series; the paper's figures are hollow and in its colour.

    Ticks where lines are; intervals of what is never below 0 may reach there, and are cut.
    """
    series: dict[str, list[Row]] = {}
    for row in lines:
        series.setdefault(row["line"].series, []).append(row)
    ticks = sorted({row["line"].at for row in lines})
    step = _APART * (ticks[-1] - ticks[0] or 1.0)
    for place, (name, rows) in enumerate(series.items()):
        colour = COLOURS[place % len(COLOURS)]
        shift = step * (place - (len(series) - 1) / 2)
        look_here: dict[str, Any] = {"fmt": "o-", "label": name}
        look_paper: dict[str, Any] = {"fmt": "D:", "label": f"{name}, paper", "mfc": "white"}
        for intervals, look in (
            ([row["interval"] for row in rows], look_here),
            ([_make_paper_interval(row) for row in rows], look_paper),
        ):
            points = [
                (row["line"].at + shift, interval)
                for row, interval in zip(rows, intervals, strict=True)
                if interval is not None
            ]
            if points:
                places, intervals_drawn = zip(*points, strict=True)
                highest = _find_most(table)
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
    means = [row["interval"].mean for row in lines if row["interval"] is not None]
    low, high = axes.get_ylim()
    if low < 0 <= min(means, default=-1.0):
        axes.set_ylim(bottom=-_BELOW * high)


def _make_paper_interval(row: Row) -> Interval | None:
    """Return what the paper prints, one standard deviation to each side; None: it prints
    nothing.
    """
    mean = row["paper"]
    sd = row["paper_sd"] or 0.0
    return None if mean is None else Interval(mean, mean - sd, mean + sd)
