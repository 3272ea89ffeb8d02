"""The points of a sweep: what each line changes in the shipped configuration, and running one."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from experiments.measured import Measured, Measurement, measure
from secure_apfed.config import Config
from secure_apfed.privacy import GuardSettings, LabelSettings

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
            "name": f"{base.name}-{self.key}-{epsilon:g}-seed{seed}".replace("+", ""),
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
    def measurement(self) -> Measurement:
        """What is run for it."""
        return Measurement(config=self.config, file=self.file, centralised=self.line.centralised)


@dataclass(frozen=True, kw_only=True)
class PointResult(Measured):
    """What a sweep keeps of one run.

    Attributes:
        epsilon: asked for; infinite where nothing was.
    """

    line: str
    epsilon: float
    seed: int


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
        CheckpointError: the file holds no point, or one with other settings.
    """
    return PointResult(
        line=point.line.key,
        epsilon=point.epsilon,
        seed=point.config.seed,
        **asdict(measure(point.measurement)),
    )
