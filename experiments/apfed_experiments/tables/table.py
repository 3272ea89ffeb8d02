"""A table or figure of a paper: its lines, what the paper prints of them, and jobs that fill it.

A job measures figures of some lines for one seed and keeps them in one small file, so that a table
that was stopped goes on where it was. `RunJob` is a run of a method as a study keeps it;
`FunctionJob` is any function of plain settings. Adding a table is one entry in the `TABLES` of its
paper's file.
"""

import hashlib
import json
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from pydantic import BaseModel, ConfigDict
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]  # no annotations

from apfed_protocols.errors import UnsafeChoiceWarning
from secure_apfed.config import Config
from secure_apfed.errors import CheckpointError, ModelError
from secure_apfed.files import read_json, write_atomically
from secure_apfed.runs.run import run
from secure_apfed.simulation import simulate, why_not

__all__ = [
    "Figures", "FunctionJob", "Job", "Line", "Measured", "PaperTable", "Printed", "RunJob", "Size",
    "line_of",
]  # fmt: skip

Figures = Mapping[str, float]
"""What a function measured, by name, in the table's unit."""


@dataclass(frozen=True, kw_only=True)
class Printed:
    """What a paper prints: a mean, and the standard deviation where it gives one."""

    mean: float
    sd: float | None = None


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a table.

    Attributes:
        cells: text by column; all lines of a table have the same columns, and no two the same
            texts.
        paper: what the paper prints; None: nothing, or nothing that can be read.
        combines: weights by line; this one is their sum, for every seed that has all of them, and
            no job measures it. A mean, or a difference that is paired by seed.
        panels: of the picture, by title, in which it is shown.
        series: whose curve it lies on, or what its dot is called; "": it is not drawn.
        at: its place on the horizontal axis, where the picture has one.
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
    """The name of the line with these texts."""
    return " / ".join(texts)


class Measured(BaseModel):
    """What one job found, by the name of a line, and how long it took."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    figures: dict[str, float]
    seconds: float


class Job(Protocol):
    """Measures some lines for one seed.

    Attributes:
        name: distinct within the table; it becomes a file's.
        seed: by which lines are paired.
        lines: that it fills, each with what of it the line holds.
        cost: seconds that it takes, against those of the table's other jobs.
    """

    @property
    def name(self) -> str: ...

    @property
    def seed(self) -> int: ...

    @property
    def lines(self) -> Mapping[str, str]: ...

    @property
    def cost(self) -> float: ...

    def is_done(self, folder: Path) -> bool:
        """Whether its figures lie in this folder."""
        ...

    def finish(self, folder: Path) -> Measured:
        """Measure, or read what was measured.

        Raises:
            CheckpointError: a file in its place has other settings.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class RunJob:
    """A run of a method.

    Attributes:
        config: of the run, but for the seed.
        lines: by line, the way of inference whose accuracy it holds, in per cent.
    """

    config: Config
    seed: int
    lines: Mapping[str, str]
    cost: float = 1.0

    @property
    def name(self) -> str:
        return f"{self.config.name}-seed{self.seed}"

    def is_done(self, folder: Path) -> bool:
        return _file_of(self, folder).is_file()

    def finish(self, folder: Path) -> Measured:
        """Where accuracy can be had without messages between the parties, none are sent."""
        own = {"name": self.name, "seed": self.seed, "party_seeds": "shared_for_comparison"}
        config = self.config.model_copy(update=own)
        settings = config.model_dump_json(exclude_defaults=True)
        found = _kept(_file_of(self, folder), settings, lambda: _accuracy(config))
        return _shown(found, self.lines)


def _accuracy(config: Config) -> Figures:
    with warnings.catch_warnings():
        # Plain sums are unsafe by name, and the tables say so.
        warnings.simplefilter("ignore", UnsafeChoiceWarning)
        of_run = run(config, None) if why_not(config) else simulate(config)
    return {way: 100 * accuracy for way, accuracy in of_run.accuracy.items()}


class _Kept(BaseModel):
    """The file of a job's figures."""

    settings: str
    measured: Measured


@dataclass(frozen=True, kw_only=True)
class FunctionJob:
    """A function of plain settings and the seed.

    Attributes:
        label: distinct within the table, but for the seed.
        measure: of a module, so that another process finds it; called as
            `measure(seed=..., **settings)` on one thread.
        settings: plain values; figures that were kept under others are refused.
        lines: by line, which of the figures it holds; others are kept and not shown.
    """

    label: str
    seed: int
    measure: Callable[..., Figures]
    settings: Mapping[str, Any]
    lines: Mapping[str, str]
    cost: float = 1.0

    @property
    def name(self) -> str:
        return f"{self.label}-seed{self.seed}"

    def is_done(self, folder: Path) -> bool:
        return _file_of(self, folder).is_file()

    def finish(self, folder: Path) -> Measured:
        settings = json.dumps({**self.settings, "seed": self.seed}, sort_keys=True)
        found = _kept(
            _file_of(self, folder), settings, lambda: self.measure(seed=self.seed, **self.settings)
        )
        return _shown(found, self.lines)


def _file_of(job: Job, folder: Path) -> Path:
    return folder / f"{job.name}.json"


def _shown(found: Measured, lines: Mapping[str, str]) -> Measured:
    """What the lines hold of it; the rest is kept and not shown."""
    shown = {line: found.figures[name] for line, name in lines.items()}
    return Measured(figures=shown, seconds=found.seconds)


def _kept(path: Path, settings: str, measure: Callable[[], Figures]) -> Measured:
    """Measure on one thread and keep it, or read what was kept."""
    digest = hashlib.sha256(settings.encode()).hexdigest()
    if not path.is_file():
        torch.set_num_threads(1)
        began = time.monotonic()
        with threadpool_limits(1):
            figures = dict(measure())
        if lost := sorted(name for name, one in figures.items() if not math.isfinite(one)):
            raise ModelError(
                f"{path.stem}: {', '.join(lost)} is no finite number, so its training diverged; "
                "nothing is kept of it"
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
    return found.measured


@dataclass(frozen=True, kw_only=True)
class Size:
    """What is measured of a table: its default part, or all of it."""

    lines: Sequence[Line]
    jobs: Sequence[Job]


@dataclass(frozen=True, kw_only=True)
class PaperTable:
    """A table or figure of a paper.

    Attributes:
        name: of the command; begins with the paper's.
        source: paper, and table or figure.
        title: what it shows; unit: of its figures.
        reading: how it is measured here, and in what that differs from the paper.
        leaves_out: of the full table in what runs by default; empty: nothing.
        hours: that the full table takes on two cores, about.
        size: its lines and jobs, given whether all of it is wanted. Raises ConfigError where a
            data set is unknown.
        axis: what `Line.at` is; empty: the picture has one dot a line.
        ticks: what stands at a place of that axis; a place without one says its number.
        form: of a figure.
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
