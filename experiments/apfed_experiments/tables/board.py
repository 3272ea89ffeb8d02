"""Fill a paper's table: run the jobs that are missing, and put what they found beside the paper's.

A table that was stopped goes on where it was; what is not measured yet stays empty, and a forecast
says how long the rest takes.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from joblib import Parallel, delayed

from apfed_experiments.study import OnDone
from apfed_experiments.summary import Interval
from apfed_experiments.tables.table import Job, Line, Measured, PaperTable, Size
from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from secure_apfed.errors import ApfedError

__all__ = ["Board", "Filled", "Forecast", "fill"]

Clock: TypeAlias = Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class Filled:
    """One line with what was measured of it, by seed; shared: as `PaperTable.shared`."""

    line: Line
    values: Mapping[int, float] = field(default_factory=dict)
    shared: float = 0.0

    @property
    def interval(self) -> Interval | None:
        """The mean and its 95 % interval over the seeds; None: nothing was measured."""
        values = list(self.values.values())
        return Interval.of(values, shared=self.shared) if values else None

    @property
    def sd(self) -> float | None:
        """The standard deviation over the seeds; None: fewer than two."""
        values = list(self.values.values())
        return float(np.std(values, ddof=1)) if len(values) > 1 else None

    @property
    def difference(self) -> float | None:
        """Ours minus the paper's; None: one of them is missing."""
        if self.interval is None or self.line.paper is None:
            return None
        return self.interval.mean - self.line.paper.mean

    @property
    def in_sd(self) -> float | None:
        """The difference in units of the combined standard deviation, sqrt(ours^2 + paper's^2)."""
        printed = self.line.paper
        if self.difference is None or self.sd is None or printed is None or printed.sd is None:
            return None
        combined = math.hypot(self.sd, printed.sd)
        return self.difference / combined if combined else None


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """How far a table is, and how long the rest takes.

    Attributes:
        done, jobs: of what was asked for; hours: that the others take in so many processes, at the
            pace of those that are done; None: none is.
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
        """What to tell people."""
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
    """A table as far as it is filled.

    Attributes:
        full: whether all of it was asked for.
        failures: by job, why it ended with an error; the same command tries it again.
    """

    table: PaperTable
    full: bool
    lines: Sequence[Filled]
    forecast: Forecast
    failures: Mapping[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "table": self.table.name, "source": self.table.source, "unit": self.table.unit,
            "full": self.full, "done": self.forecast.done, "jobs": self.forecast.jobs,
            "hours_left": self.forecast.hours, "full_hours_left": self.forecast.full_hours,
            "failures": dict(self.failures),
            "lines": [_as_json(filled) for filled in self.lines],
        }  # fmt: skip


def _as_json(filled: Filled) -> dict[str, Any]:
    interval, printed = filled.interval, filled.line.paper
    return {
        **filled.line.cells,
        "seeds": len(filled.values),
        "mean": interval.mean if interval else None,
        "sd": filled.sd,
        "low": interval.low if interval and filled.sd is not None else None,
        "high": interval.high if interval and filled.sd is not None else None,
        "paper": printed.mean if printed else None,
        "paper_sd": printed.sd if printed else None,
        "difference": filled.difference,
        "in_sd": filled.in_sd,
    }


def fill(
    table: PaperTable, folder: Path, *, full: bool = False, jobs: int = 1,
    minutes: float | None = None, on_done: OnDone = lambda done, total: None,
    clock: Clock = time.monotonic,
) -> Board:  # fmt: skip
    """Run what is missing, and read all of it.

    Args:
        table: which.
        folder: of the table; made where missing.
        full: all of the table, not its default part.
        jobs: processes; each uses one thread.
        minutes: after which no other job begins; None: none.
        on_done: called after each job with those that are done and that there are.
        clock: seconds.

    Raises:
        ConfigError: the table needs a data set that the catalogue lacks.
    """
    size, kept = table.size(full), folder / "jobs"
    kept.mkdir(mode=0o700, parents=True, exist_ok=True)
    until = math.inf if minutes is None else clock() + 60 * minutes
    found: dict[str, Measured] = {}
    failures: dict[str, str] = {}
    # One at a time and in its turn, so that none begins after its time.
    parallel = Parallel(
        n_jobs=jobs, return_as="generator_unordered", pre_dispatch=jobs, batch_size=1
    )
    finished = parallel(
        delayed(_attempt)(job, kept) for job in _in_time(size.jobs, kept, until, clock)
    )
    for name, result in finished:
        if isinstance(result, Measured):
            found[name] = result
        else:
            failures[name] = result
        on_done(len(found), len(size.jobs))
    return Board(
        table=table,
        full=full,
        lines=_filled(size, found, shared=table.shared),
        forecast=_forecast(size, table.size(True), kept, found, jobs, table.hours),
        failures=failures,
    )


def _in_time(jobs: Sequence[Job], kept: Path, until: float, clock: Clock) -> Iterator[Job]:
    for job in jobs:
        if job.is_done(kept) or clock() < until:
            yield job


def _attempt(job: Job, kept: Path) -> tuple[str, Measured | str]:
    try:
        return job.name, job.finish(kept)
    except (ApfedError, LocalProtocolError, RemoteProtocolError) as error:
        return job.name, f"{type(error).__name__}: {error}"


def _filled(size: Size, found: Mapping[str, Measured], *, shared: float) -> list[Filled]:
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
    return [Filled(line=line, values=values[line.name], shared=shared) for line in size.lines]


def _forecast(
    size: Size, full: Size, kept: Path, found: Mapping[str, Measured], processes: int,
    reckoned: float,
) -> Forecast:  # fmt: skip
    """Args: reckoned: hours of the full table on two cores, as `PaperTable` says."""
    wanted = {job.name for job in size.jobs}
    left = [job for job in size.jobs if job.name not in found]
    more = [job for job in full.jobs if job.name not in wanted and not job.is_done(kept)]
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
