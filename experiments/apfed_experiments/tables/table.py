"""A table or figure of a paper: its lines, what the paper prints of them, and jobs that fill it.

A job measures figures of some lines for one seed and keeps them in one small file, so that a table
that was stopped goes on where it was; what is not measured yet stays empty, and a forecast says how
long the rest takes. `RunJob` is a run of a method; `FunctionJob` is any function of plain settings.
Adding a table is one entry in the `TABLES` of its paper's file.
"""

import hashlib
import json
import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from joblib import Parallel, delayed
from matplotlib.axes import Axes
from pydantic import BaseModel, ConfigDict
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]  # no annotations

from apfed_experiments.columns import Column, Table, stored, within, write_text
from apfed_experiments.drawing import COLOURS, OTHER, OURS, drawing
from apfed_experiments.study import OnDone
from apfed_experiments.summary import Interval, Row
from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError, UnsafeChoiceWarning
from secure_apfed.config import Config
from secure_apfed.errors import ApfedError, CheckpointError, ModelError
from secure_apfed.files import read_json, write_atomically
from secure_apfed.runs.run import run
from secure_apfed.simulation import simulate, why_not

__all__ = [
    "Board", "Figures", "Forecast", "FunctionJob", "Job", "Line", "Measured", "PaperTable",
    "Printed", "RunJob", "Size", "fill", "line_of", "one_job_a_seed", "write",
]  # fmt: skip

Clock: TypeAlias = Callable[[], float]
Figures = Mapping[str, float]
"""What a function measured, by name, in the table's unit."""

_COLUMNS = 3
_APART, _BELOW = 0.012, 0.03


@dataclass(frozen=True, kw_only=True)
class Printed:
    """What a paper prints: a mean, and the standard deviation where it gives one."""

    mean: float
    sd: float | None = None


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a table.

    Attributes:
        cells: text by column; the same columns in all lines, and no two lines the same texts.
        paper: what the paper prints; None: nothing, or nothing that can be read.
        combines: weights by line; this one is their sum, for every seed that has all of them, and
            no job measures it. A mean, or a difference that is paired by seed.
        panels: of the picture, by title, in which it is shown; at: its place on their axis.
        series: whose curve it lies on, or what its dot is called; "": it is not drawn.
    """

    cells: Mapping[str, str]
    paper: Printed | None = None
    combines: Mapping[str, float] = field(default_factory=dict)
    panels: tuple[str, ...] = ("",)
    series: str = ""
    at: float | None = None

    @property
    def name(self) -> str:
        """Its texts, which jobs name it by."""
        return line_of(*self.cells.values())


def line_of(*texts: str) -> str:
    return " / ".join(texts)


class Measured(BaseModel):
    """What one job found, by the name of a line, and how long it took."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    figures: dict[str, float]
    seconds: float


class _Kept(BaseModel):
    """The file of a job's figures."""

    settings: str
    measured: Measured


@dataclass(frozen=True, kw_only=True)
class Job:
    """Measures some lines for one seed, by which lines are paired.

    Attributes:
        lines: that it fills, each with what of its figures the line holds; others are only kept.
        cost: seconds that it takes, against those of the table's other jobs.
    """

    seed: int
    lines: Mapping[str, str]
    cost: float = 1.0

    @property
    def title(self) -> str:
        """Distinct within the table, but for the seed."""
        raise NotImplementedError

    @property
    def kept_as(self) -> str:
        """All that figures depend on; those that were kept under another are refused."""
        raise NotImplementedError

    def figures(self) -> Figures:
        raise NotImplementedError

    @property
    def name(self) -> str:
        return f"{self.title}-seed{self.seed}"

    def file(self, folder: Path) -> Path:
        """Of its figures."""
        return folder / f"{self.name}.json"

    def finish(self, folder: Path) -> Measured:
        """Measure on one thread and keep it, or read what was kept.

        Raises CheckpointError where a file in its place has other settings.
        """
        path, digest = self.file(folder), hashlib.sha256(self.kept_as.encode()).hexdigest()
        if not path.is_file():
            torch.set_num_threads(1)
            began = time.monotonic()
            with threadpool_limits(1):
                figures = dict(self.figures())
            if lost := sorted(name for name, of in figures.items() if not math.isfinite(of)):
                raise ModelError(
                    f"{path.stem}: {', '.join(lost)} is no finite number, so its training "
                    "diverged; nothing is kept of it"
                )
            measured = Measured(figures=figures, seconds=time.monotonic() - began)
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            kept = _Kept(settings=digest, measured=measured)
            write_atomically(path, kept.model_dump_json().encode())
        found = read_json(path, _Kept)
        if found.settings != digest:
            raise CheckpointError(
                f"{path} was measured with other settings; remove it, or choose another folder"
            )
        shown = {line: found.measured.figures[name] for line, name in self.lines.items()}
        return Measured(figures=shown, seconds=found.measured.seconds)


@dataclass(frozen=True, kw_only=True)
class RunJob(Job):
    """A run of a method; lines hold the accuracy of a way of inference, in per cent."""

    config: Config

    @property
    def title(self) -> str:
        return self.config.name

    @property
    def of_seed(self) -> Config:
        own = {"name": self.name, "seed": self.seed, "party_seeds": "shared_for_comparison"}
        return self.config.model_copy(update=own)

    @property
    def kept_as(self) -> str:
        return self.of_seed.model_dump_json(exclude_defaults=True)

    def figures(self) -> Figures:
        """Where accuracy can be had without messages between the parties, none are sent."""
        config = self.of_seed
        with warnings.catch_warnings():
            # Plain sums are unsafe by name, and the tables say so.
            warnings.simplefilter("ignore", UnsafeChoiceWarning)
            of_run = run(config, None) if why_not(config) else simulate(config)
        return {way: 100 * accuracy for way, accuracy in of_run.accuracy.items()}


@dataclass(frozen=True, kw_only=True)
class FunctionJob(Job):
    """A function of plain settings and the seed; `label` is distinct within the table, but for the
    seed, and `measure` of a module, so that another process finds it.
    """

    label: str
    measure: Callable[..., Figures]
    settings: Mapping[str, Any]

    @property
    def title(self) -> str:
        return self.label

    @property
    def kept_as(self) -> str:
        return json.dumps({**self.settings, "seed": self.seed}, sort_keys=True)

    def figures(self) -> Figures:
        return self.measure(seed=self.seed, **self.settings)


@dataclass(frozen=True, kw_only=True)
class Size:
    """What is measured of a table: its default part, or all of it."""

    lines: Sequence[Line]
    jobs: Sequence[Job]


def one_job_a_seed(
    lines: Iterable[tuple[str, Line]], label: str, measure: Callable[..., Figures], *, seeds: int,
    **settings: Any,
) -> Size:  # fmt: skip
    """Lines beside what the measure calls their figures, all of which every seed's job fills."""
    named = list(lines)
    figure_of = {line.name: figure for figure, line in named}
    jobs = [
        FunctionJob(label=label, seed=seed, measure=measure, settings=settings, lines=figure_of)
        for seed in range(seeds)
    ]
    return Size(lines=[line for _, line in named], jobs=jobs)


@dataclass(frozen=True, kw_only=True)
class PaperTable:
    """A table or figure of a paper.

    Attributes:
        name: of the command; begins with the paper's. source: paper, and table or figure.
        title: what it shows; unit, form: of its figures.
        reading: how it is measured here, and in what that differs from the paper.
        leaves_out: of the full table in what runs by default; empty: nothing.
        hours: that the full table takes on two cores, about.
        size: its lines and jobs, given whether all of it is wanted.
        axis: what `Line.at` is; empty: the picture has one dot a line. ticks: what stands at a
            place of that axis, if not its number.
        shared: how alike two seeds' figures are; see `apfed_experiments.summary.shared_share`.
        picture: draws it in place of the lines, to this path; None: the lines are drawn.
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
    picture: Callable[[Path], None] | None = None


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """How far a table is, and how long the rest takes in so many processes.

    Attributes:
        hours: of the jobs that are not done, at the pace of those that are; None: none is.
        full_jobs, full_hours: the same of all of the table.
        pace: the median job's seconds, of those that `PaperTable.hours` gives it.
    """

    done: int
    jobs: int
    hours: float | None
    full_jobs: int
    full_hours: float | None
    pace: float | None

    @property
    def sentence(self) -> str:
        told = f"{self.done} of {self.jobs} jobs are done"
        if self.hours:
            told += f"; the others take about {_hours(self.hours)}"
        if self.full_jobs and self.full_hours:
            told += f"; the full table has {self.full_jobs} more, about {_hours(self.full_hours)}"
        if self.pace and (self.hours or self.full_hours) and not 2 / 3 < self.pace < 3 / 2:
            told += f", since these took {self.pace:.1f} times what --list reckons with"
        return told


def _hours(hours: float) -> str:
    return f"{60 * hours:.0f} minutes" if hours < 1 else f"{hours:.1f} hours"


@dataclass(frozen=True, kw_only=True)
class Board:
    """A table as far as it is filled, all of it or its default part; `rows` of each line, see
    `_row`; by job, why it ended with an error: the same command tries it again.
    """

    table: PaperTable
    full: bool
    rows: Sequence[Row]
    forecast: Forecast
    failures: Mapping[str, str] = field(default_factory=dict)

    @property
    def lines(self) -> Table:
        """What is missing is empty, and a paper's unread figure is "-"."""
        form = self.table.form

        def shown(name: str, title: str, text: Callable[[Any], str], missing: str = "") -> Column:
            return Column(name=name, title=title, form=text, missing=missing, keys=())

        def with_sd(both: tuple[float, float | None]) -> str:
            mean, sd = both
            return f"{mean:{form}}" if sd is None else f"{mean:{form}} ± {sd:{form}}"

        cells = [
            Column(name=name, title=name)
            for name in (self.rows[0]["line"].cells if self.rows else ())
        ]
        plain = stored(
            "seeds", "mean", "sd", "low", "high", "paper", "paper_sd", "difference", "in_sd"
        )
        measured = (
            shown("here", "here", with_sd),
            shown(
                "limits", "95 % interval", lambda ends: " to ".join(f"{end:{form}}" for end in ends)
            ),
            shown("seeds", "seeds", lambda many: str(many or "")),
            shown("printed", "paper", with_sd, "-"),
            shown("difference", "difference", within(f"+{form}")),
            shown("in_sd", "in combined sd", within("+.1f")),
        )
        return Table((*cells, *plain, *measured), self.rows)

    def as_json(self) -> dict[str, Any]:
        return {
            "table": self.table.name, "source": self.table.source, "unit": self.table.unit,
            "full": self.full, "done": self.forecast.done, "jobs": self.forecast.jobs,
            "hours_left": self.forecast.hours, "full_hours_left": self.forecast.full_hours,
            "failures": dict(self.failures), "lines": self.lines.plain(),
        }  # fmt: skip


def _row(line: Line, by_seed: Mapping[int, float], shared: float) -> Row:
    """One line with what was measured of it; None: nothing was, or not enough.

    sd: over the seeds; difference: ours minus the paper's; in_sd: the same in units of the combined
    standard deviation, sqrt(ours^2 + paper's^2).
    """
    values, paper = list(by_seed.values()), line.paper
    interval = Interval.of(values, shared=shared) if values else None
    sd = float(np.std(values, ddof=1)) if len(values) > 1 else None
    difference = in_sd = None
    if interval is not None and paper is not None:
        difference = interval.mean - paper.mean
        if sd is not None and paper.sd is not None and (combined := math.hypot(sd, paper.sd)):
            in_sd = difference / combined
    limits = None if interval is None or sd is None else (interval.low, interval.high)
    low, high = limits or (None, None)
    return {
        **line.cells, "line": line, "values": dict(by_seed), "interval": interval,
        "seeds": len(values), "mean": interval and interval.mean, "sd": sd, "low": low,
        "high": high, "paper": paper and paper.mean, "paper_sd": paper and paper.sd,
        "difference": difference, "in_sd": in_sd, "limits": limits,
        "here": None if interval is None else (interval.mean, sd),
        "printed": None if paper is None else (paper.mean, paper.sd),
    }  # fmt: skip


def fill(
    table: PaperTable, folder: Path, *, full: bool = False, jobs: int = 1,
    minutes: float | None = None, on_done: OnDone = lambda done, total: None,
    clock: Clock = time.monotonic,
) -> Board:  # fmt: skip
    """Run what is missing of all of the table or its default part, and read all of it.

    After so many `minutes` no other job begins. Raises ConfigError where the catalogue lacks a data
    set.
    """
    size, kept = table.size(full), folder / "jobs"
    kept.mkdir(mode=0o700, parents=True, exist_ok=True)
    until = math.inf if minutes is None else clock() + 60 * minutes
    # One at a time and in its turn, so that none begins after its time.
    parallel = Parallel(
        n_jobs=jobs, return_as="generator_unordered", pre_dispatch=jobs, batch_size=1
    )
    finished = parallel(
        delayed(_attempt)(job, kept)
        for job in size.jobs
        if job.file(kept).is_file() or clock() < until
    )
    found, failures = dict[str, Measured](), dict[str, str]()
    for name, result in finished:
        if isinstance(result, Measured):
            found[name] = result
        else:
            failures[name] = result
        on_done(len(found), len(size.jobs))
    forecast = _forecast(size, table.size(True), kept, found, jobs, table.hours)
    rows = _rows(size, found, shared=table.shared)
    return Board(table=table, full=full, rows=rows, forecast=forecast, failures=failures)


def _attempt(job: Job, kept: Path) -> tuple[str, Measured | str]:
    try:
        return job.name, job.finish(kept)
    except (ApfedError, LocalProtocolError, RemoteProtocolError) as error:
        return job.name, f"{type(error).__name__}: {error}"


def _rows(size: Size, found: Mapping[str, Measured], *, shared: float) -> list[Row]:
    """Every line with its values; those that combine others read what jobs measured."""
    values: dict[str, dict[int, float]] = {line.name: {} for line in size.lines}
    for job in size.jobs:
        for name, value in found[job.name].figures.items() if job.name in found else ():
            values[name][job.seed] = value
    for line in size.lines:
        if line.combines:
            seeds = set.intersection(*(set(values[name]) for name in line.combines))
            values[line.name] = {
                seed: sum(weight * values[name][seed] for name, weight in line.combines.items())
                for seed in sorted(seeds)
            }
    return [_row(line, values[line.name], shared) for line in size.lines]


def _forecast(
    size: Size, full: Size, kept: Path, found: Mapping[str, Measured], processes: int,
    reckoned: float,
) -> Forecast:  # fmt: skip
    """Args: reckoned: hours of the full table on two cores, as `PaperTable` says."""
    wanted = {job.name for job in size.jobs}
    left = [job for job in size.jobs if job.name not in found]
    more = [job for job in full.jobs if job.name not in wanted and not job.file(kept).is_file()]
    unit = 2 * reckoned / sum(job.cost for job in full.jobs)
    paces = [
        found[job.name].seconds / 3600 / (unit * job.cost) for job in size.jobs if job.name in found
    ]
    # Not the mean: a few jobs that waited for others on a busy machine say nothing of the rest.
    pace = float(np.median(paces)) if paces else None

    def hours(jobs: Sequence[Job]) -> float | None:
        return pace and pace * unit * sum(job.cost for job in jobs) / processes

    return Forecast(
        done=len(found), jobs=len(size.jobs), hours=hours(left), full_jobs=len(more),
        full_hours=hours(more), pace=pace,
    )  # fmt: skip


def write(board: Board, folder: Path) -> Mapping[str, Path]:
    """Write the table and its picture; return the files by kind."""
    base = folder / (f"{board.table.name}-full" if board.full else board.table.name)
    files = {kind: base.with_suffix(f".{kind}") for kind in ("csv", "md", "png")}
    write_text(files["csv"], board.lines.csv())
    write_text(files["md"], _page(board, picture=files["png"].name))
    if board.table.picture is None:
        _draw(files["png"], board)
    else:
        board.table.picture(files["png"])
    return files


def _page(board: Board, *, picture: str) -> str:
    """The table with all that a reader needs beside it."""
    table = board.table
    command = f"secure-apfed table {table.name}{' --full' if board.full else ''}"
    unit = f": {table.unit}" if table.unit else ""
    notes = [f"# {table.title}", f"{table.source}. `{command}`{unit}. {table.reading}"]
    if table.leaves_out and not board.full:
        notes.append(f"Left out, and run by `--full`: {table.leaves_out}.")
    notes += [f"{board.forecast.sentence}.", board.lines.markdown()]
    return "\n\n".join(notes) + f"\n![{table.title}]({picture})\n"


def _draw(path: Path, board: Board) -> None:
    """Every panel: curves where lines have a place on an axis, else a dot a line."""
    drawn = [row for row in board.rows if row["line"].series]
    titles = dict.fromkeys(title for row in drawn for title in row["line"].panels)
    panels = {title: [row for row in drawn if title in row["line"].panels] for title in titles}
    down = -(-len(panels) // _COLUMNS)
    across = -(-len(panels) // down)
    tallest = max(map(len, panels.values()))
    height = 3.4 if board.table.axis else 1.0 + 0.27 * tallest
    shared = bool(board.table.axis and board.table.unit)
    with drawing(path, (max(6.5, 4.6 * across), 0.7 + height * down)) as figure:
        grid = figure.subplots(down, across, squeeze=False, sharey=shared)
        for axes in grid.flat[len(panels) :]:
            axes.remove()
        for axes, (panel, lines) in zip(grid.flat, panels.items(), strict=False):
            axes.set_title(panel)
            if board.table.axis:
                _curves(axes, lines)
                _label(axes, lines, board.table)
            else:
                _dots(axes, lines)
                axes.set_xlabel(board.table.unit)
            if shared:
                axes.label_outer()
        handles = {
            label: handle
            for axes in figure.axes
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.suptitle(board.table.title)
        figure.legend(
            handles.values(), handles.keys(), loc="outside lower center", ncols=5, frameon=False
        )


def _label(axes: Axes, lines: Sequence[Row], table: PaperTable) -> None:
    """Ticks where lines are; intervals of what is never below 0 may reach there, and are cut."""
    places = sorted({row["line"].at for row in lines if row["line"].at is not None})
    axes.set(xlabel=table.axis, ylabel=table.unit)
    axes.set_xticks(places, [table.ticks.get(at, f"{at:g}") for at in places])
    means = [row["interval"].mean for row in lines if row["interval"] is not None]
    low, high = axes.get_ylim()
    if low < 0 <= min(means, default=-1.0):
        axes.set_ylim(bottom=-_BELOW * high)


def _dots(axes: Axes, lines: Sequence[Row]) -> None:
    """A dot a line, the first on top, and the paper's a little below."""
    for height, row in enumerate(lines):
        interval, printed = row["interval"], row["line"].paper
        if interval is not None:
            axes.errorbar(
                interval.mean, -height + 0.12, xerr=interval.arms(), fmt="o", color=OURS,
                capsize=2.5, label="here, 95 % interval",
            )  # fmt: skip
        if printed is not None:
            axes.errorbar(
                printed.mean, -height - 0.18, xerr=printed.sd or None, fmt="D", color=OTHER,
                markerfacecolor="white", capsize=2.5, label="paper, standard deviation",
            )  # fmt: skip
    axes.set_yticks([-height for height in range(len(lines))])
    axes.set_yticklabels([row["line"].series for row in lines], fontsize=8)
    axes.set_ylim(-len(lines) + 0.4, 0.6)
    axes.grid(visible=False, axis="y")


def _curves(axes: Axes, lines: Sequence[Row]) -> None:
    """A curve a series; the paper's figures are hollow and in its colour."""
    series: dict[str, list[Row]] = {}
    for row in lines:
        if row["line"].at is not None:
            series.setdefault(row["line"].series, []).append(row)
    ends = [row["line"].at for row in lines if row["line"].at is not None]
    step = _APART * (max(ends) - min(ends) or 1.0) if ends else 0.0
    for place, (name, of_series) in enumerate(series.items()):
        colour, shift = COLOURS[place % len(COLOURS)], step * (place - (len(series) - 1) / 2)
        for mine, label in ((True, name), (False, f"{name}, paper")):
            _curve(axes, of_series, mine=mine, shift=shift, colour=colour, label=label)


def _curve(
    axes: Axes, lines: Sequence[Row], *, mine: bool, shift: float, colour: str, label: str
) -> None:
    points = []
    for row in lines:
        interval, printed, at = row["interval"], row["line"].paper, row["line"].at or 0.0
        if mine and interval is not None:
            (low,), (high,) = interval.arms()
            points.append((at + shift, interval.mean, low, high))
        if not mine and printed is not None:
            points.append((at + shift, printed.mean, printed.sd or 0.0, printed.sd or 0.0))
    if not points:
        return
    places, means, below, above = zip(*points, strict=True)
    axes.errorbar(
        places, means, yerr=(below, above), fmt="o-" if mine else "D:", color=colour,
        markerfacecolor=colour if mine else "white", capsize=2.5, markersize=5, label=label,
    )  # fmt: skip
