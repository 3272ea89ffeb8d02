"""The points of a sweep: what each line changes in the shipped configuration, and running one."""

import hashlib
import json
import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from experiments.sweep.centralised import centralise
from protocols.errors import UnsafeChoiceWarning
from secure_apfed.config import Config
from secure_apfed.data import load_data
from secure_apfed.errors import CheckpointError
from secure_apfed.plain_json import to_json
from secure_apfed.privacy import GuardSettings, LabelSettings
from secure_apfed.runs import run

__all__ = ["CONFIGS", "EPSILONS", "LINES", "Line", "Point", "PointResult", "points_of", "run_point"]

CONFIGS = ("sweep-digits", "sweep-breast-cancer", "sweep-fashion-mnist")
EPSILONS = (1.0, 4.0, 8.0)


@dataclass(frozen=True, kw_only=True)
class Line:
    """One way of protecting, at several strengths or at none.

    Attributes:
        key: for files; label: for people.
        method: a key of METHODS.
        guard, labels: the mechanism that takes the sweep's epsilons; "none" where it has none.
        centralised: all features in one table.
    """

    key: str
    label: str
    method: str
    guard: str = "none"
    labels: str = "none"
    centralised: bool = False

    @property
    def swept(self) -> bool:
        """Whether the line has a point for each epsilon, or one for all."""
        return self.guard != "none" or self.labels != "none"

    def of(self, base: Config, epsilon: float, seed: int) -> Config:
        """The run of one point."""
        changes: dict[str, Any] = {
            "name": f"{base.name}-{self.key}-{epsilon:g}-seed{seed}",
            "seed": seed,
            "method": self.method,
            "guard": GuardSettings.model_validate(
                # Noise that the seed repeats: the sweep must be repeatable, nobody is protected.
                {"mechanism": self.guard, "clip": base.guard.clip, "delta": base.guard.delta,
                 "noise": "reproducible_insecure"}
                | ({"epsilon": epsilon} if self.guard != "none" else {})
            ),
            "labels": LabelSettings.model_validate(
                {"mechanism": self.labels}
                | ({"epsilon": epsilon} if self.labels != "none" else {})
            ),
        }  # fmt: skip
        return base.model_copy(update=changes)


LINES: tuple[Line, ...] = (
    Line(key="single", label="SingleVL", method="single_view"),
    Line(
        key="centralised", label="centralised, all features", method="single_view", centralised=True
    ),
    Line(key="plain", label="APFed-C, no protection", method="apfed_c"),
    Line(key="fresh", label="APFed-C, fresh noise", method="apfed_c", guard="gaussian"),
    Line(key="frozen", label="APFed-C, frozen noise", method="apfed_c", guard="frozen_gaussian"),
    Line(
        key="response", label="APFed-C, label DP (randomised response)", method="apfed_c",
        labels="randomised_response",
    ),
    Line(key="stages", label="APFed-C, label DP (LP-MST)", method="apfed_c", labels="lp_mst"),
    Line(
        key="single-response", label="SingleVL, label DP (randomised response)",
        method="single_view", labels="randomised_response",
    ),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Point:
    """One run of a sweep and the file of its result."""

    line: Line
    epsilon: float
    config: Config
    file: Path

    @property
    def digest(self) -> str:
        """SHA-256 of the settings that differ from the defaults; the code is not in it."""
        told = self.config.model_dump_json(exclude_defaults=True) + str(self.line.centralised)
        return hashlib.sha256(told.encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class PointResult:
    """What a sweep keeps of one run.

    Attributes:
        epsilon: asked for; infinite where nothing was.
        epsilon_x, epsilon_y, releases: as the run's account says.
    """

    line: str
    epsilon: float
    seed: int
    accuracy: float
    epsilon_x: float
    epsilon_y: float
    releases: int
    settings: str


def points_of(
    base: Config, folder: Path, *, seeds: Sequence[int], epsilons: Sequence[float] = EPSILONS
) -> Iterator[Point]:
    """All points of one data set."""
    for seed in seeds:
        for line in LINES:
            for epsilon in epsilons if line.swept else (math.inf,):
                config = line.of(base, epsilon, seed)
                yield Point(
                    line=line, epsilon=epsilon, config=config, file=folder / f"{config.name}.json"
                )


def run_point(point: Point) -> PointResult:
    """Run one point on one thread, or read what an earlier sweep found.

    Raises:
        CheckpointError: the file is damaged or of a run with other settings.
    """
    if point.file.exists():
        return _read(point)
    torch.set_num_threads(1)
    data = load_data(point.config.data, seed=point.config.seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnsafeChoiceWarning)  # a plain sum gives the same sums
        result = run(point.config, None, data=centralise(data) if point.line.centralised else data)
    found = PointResult(
        line=point.line.key,
        epsilon=point.epsilon,
        seed=point.config.seed,
        accuracy=result.accuracy[point.config.method],
        epsilon_x=result.privacy.epsilon_x,
        epsilon_y=result.privacy.epsilon_y,
        releases=result.privacy.releases,
        settings=point.digest,
    )
    point.file.parent.mkdir(parents=True, exist_ok=True)
    half = point.file.with_suffix(f".{os.getpid()}.part")
    half.write_text(to_json(asdict(found)), encoding="utf-8")
    half.replace(point.file)
    return found


def _read(point: Point) -> PointResult:
    try:
        told: Mapping[str, Any] = json.loads(point.file.read_bytes())
        numbers = {name: float(told[name]) for name in ("epsilon", "epsilon_x", "epsilon_y")}
        found = PointResult(**{**told, **numbers})
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{point.file} is damaged; remove it and sweep again") from error
    if found.settings != point.digest:
        raise CheckpointError(
            f"{point.file} is of a run with other settings; remove it, or choose another folder"
        )
    return found
