"""What a sweep found: means over seeds with bootstrap intervals, and what protection costs."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from experiments import tables
from experiments.intervals import Interval
from experiments.sweep.points import LINES, Line, PointResult
from secure_apfed.config import Config
from secure_apfed.errors import ConfigError

__all__ = ["HEADER", "PointSummary", "as_markdown", "stored", "summarise"]

HEADER = ("line", "protects", "epsilon", "accuracy %", "lost against no protection")
_UNPROTECTED = {"apfed_c": "plain", "single_view": "single"}
_PROTECTS = {"gaussian": "x", "frozen_gaussian": "x", "randomised_response": "y", "lp_mst": "y"}


@dataclass(frozen=True, kw_only=True)
class PointSummary:
    """One point over all seeds.

    Attributes:
        epsilon: asked for: epsilon_x under a guard, epsilon_y under a label mechanism;
            infinite where nothing protects.
        accuracy: on the test rows; loss: of the same method without protection minus this, seed
            by seed.
        releases: T of one row.
    """

    line: Line
    epsilon: float
    accuracy: Interval
    loss: Interval
    releases: int

    @property
    def protects(self) -> str:
        """Which epsilon is meant: x, y or neither."""
        return _PROTECTS.get(self.line.guard, _PROTECTS.get(self.line.labels, ""))

    def cells(self) -> tuple[str, ...]:
        """Texts in the order of `HEADER`."""
        covered = {"x": "released rows (epsilon_x)", "y": "training labels (epsilon_y)"}
        return (
            self.line.label,
            covered.get(self.protects, "nothing is sent" if self.releases == 0 else "nothing"),
            "∞" if math.isinf(self.epsilon) else f"{self.epsilon:g}",
            self.accuracy.text(scale=100),
            self.loss.text(scale=100) if self.line.swept else "",
        )


def summarise(results: Sequence[PointResult]) -> list[PointSummary]:
    """Return the points in the order of the lines and of epsilon.

    Raises:
        ConfigError: seeds of a point are missing.
    """
    found = {(one.line, one.epsilon, one.seed): one for one in results}
    seeds = sorted({one.seed for one in results})
    return list(_points(found, seeds))


def _points(
    found: Mapping[tuple[str, float, int], PointResult], seeds: Sequence[int]
) -> Iterator[PointSummary]:
    for line in LINES:
        for epsilon in sorted({key[1] for key in found if key[0] == line.key}):
            try:
                mine = [found[line.key, epsilon, seed] for seed in seeds]
                bare = [found[_UNPROTECTED[line.method], math.inf, seed] for seed in seeds]
            except KeyError as error:
                raise ConfigError(f"the sweep has no run for {error}; let it finish") from None
            lost = [other.accuracy - one.accuracy for one, other in zip(mine, bare, strict=True)]
            yield PointSummary(
                line=line,
                epsilon=epsilon,
                accuracy=Interval.of([one.accuracy for one in mine]),
                loss=Interval.of(lost),
                releases=max(one.releases for one in mine),
            )


def as_markdown(points: Sequence[PointSummary]) -> str:
    """The table in Markdown."""
    return tables.markdown(HEADER, [point.cells() for point in points])


def stored(base: Config, seeds: Sequence[int], points: Sequence[PointSummary]) -> dict[str, Any]:
    """What `secure-apfed plan` reads of one data set: settings, seeds, and every point."""
    settings = base.model_dump(mode="json", include={"data", "model", "train", "secure_sum"})
    return {
        "dataset": base.data.dataset,
        "settings": settings,
        "delta": base.guard.delta,
        "clip": base.guard.clip,
        "seeds": list(seeds),
        "points": [
            {
                "label": point.line.label, "method": point.line.method,
                "guard": point.line.guard, "labels": point.line.labels, "epsilon": point.epsilon,
                "releases": point.releases, "accuracy": asdict(point.accuracy),
                "loss": asdict(point.loss),
            }
            for point in points if not point.line.centralised
        ],
    }  # fmt: skip
