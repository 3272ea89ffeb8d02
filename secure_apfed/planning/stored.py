"""What protection cost and what help was worth, where it was measured: what ships with the package.

Run by: the planner. `stored_sweeps.json` and `stored_gains.json` are what `secure-apfed study sweep
--store` and `secure-apfed study gains --store` wrote, with data sets, settings and seeds. Nothing
is fitted to them or taken from between their points: another data set, network, number of epochs or
of labels may lose or gain more or less.
"""

import json
import math
from collections.abc import Iterable, Sequence
from importlib.resources import files
from typing import Any, Self

from pydantic import TypeAdapter, ValidationError, model_validator

from secure_apfed.config import Config
from secure_apfed.errors import DataError
from secure_apfed.methods import ALONE
from secure_apfed.settings import Settings

__all__ = [
    "Span",
    "StoredGain",
    "StoredPoint",
    "StoredSweep",
    "load_gains",
    "load_sweeps",
    "nearest",
    "nearest_gain",
    "sentence",
]

_FORMAT = 1


class Span(Settings):
    """A mean over seeds and its 95 % interval; of the sweeps that ship, a percentile bootstrap."""

    mean: float
    low: float
    high: float


class StoredPoint(Settings):
    """A method under one protection at one epsilon ("inf": none); the loss is from none to this."""

    label: str
    method: str
    guard: str
    labels: str
    epsilon: float | str
    releases: int
    accuracy: Span
    loss: Span


class StoredSweep(Settings):
    dataset: str
    settings: dict[str, Any]
    delta: float
    clip: float
    seeds: tuple[int, ...]
    points: tuple[StoredPoint, ...]

    @model_validator(mode="after")
    def _knows_the_active_alone(self) -> Self:
        _ = self.alone
        return self

    @property
    def alone(self) -> Span:
        """Accuracy of SingleVL without protection: what the active has without any passive."""
        for point in self.points:
            if (point.guard, point.labels, point.method) == ("none", "none", ALONE.name):
                return point.accuracy
        raise ValueError(f"the sweep of {self.dataset} has no point of the active alone")


def load_sweeps(text: str | None = None) -> tuple[StoredSweep, ...]:
    """Return the sweeps of this text, or those shipped; DataError: of another version."""
    if text is None:
        text = files("secure_apfed.planning").joinpath("stored_sweeps.json").read_text("utf-8")
    try:
        stored = json.loads(text)
        if stored["format"] != _FORMAT:
            raise DataError(f"stored sweeps have format {_FORMAT}, got {stored['format']!r}")
        return TypeAdapter(tuple[StoredSweep, ...]).validate_python(stored["sweeps"])
    except (ValueError, KeyError, TypeError, ValidationError) as error:
        raise DataError(
            "the stored sweeps are not as this version stores them; install the package again, or "
            "make them with secure-apfed study sweep --store"
        ) from error


def nearest(
    sweeps: Iterable[StoredSweep], *, epsilon: float, dataset: str | None = None,
    method: str | None = None, guards: Sequence[str] = (), labels: str = "none",
) -> list[tuple[StoredSweep, StoredPoint]]:  # fmt: skip
    """Return the points whose epsilon is next to this one: the same, or one on each side.

    Epsilon is that of the released rows, or of labels where no guard is asked for. Of data set and
    method None takes all; `guards` are wanted of points with no label mechanism but `labels`.
    """
    found = []
    for sweep in sweeps:
        if dataset not in (None, sweep.dataset):
            continue
        fits = [
            point
            for point in sweep.points
            if point.guard in (guards or ("none",)) and point.labels == labels
            and method in (None, point.method) and isinstance(point.epsilon, float)
        ]  # fmt: skip
        for line in dict.fromkeys((point.method, point.guard) for point in fits):
            mine = [point for point in fits if (point.method, point.guard) == line]
            found += [(sweep, point) for point in _around(mine, epsilon)]
    return found


def _around(points: Sequence[StoredPoint], epsilon: float) -> list[StoredPoint]:
    by_epsilon = {float(point.epsilon): point for point in points}
    if same := [point for value, point in by_epsilon.items() if math.isclose(value, epsilon)]:
        return same
    below = max((value for value in by_epsilon if value < epsilon), default=None)
    above = min((value for value in by_epsilon if value > epsilon), default=None)
    # Outside of what was measured there is nothing to expect on one side, so nothing is said.
    return [] if below is None or above is None else [by_epsilon[below], by_epsilon[above]]


def sentence(sweep: StoredSweep, point: StoredPoint) -> str:
    loss, accuracy = point.loss, point.accuracy
    limit, labelled = (sweep.settings["data"].get(key) for key in ("limit", "labelled"))
    rows = f", {limit:,} training rows" if limit else ""
    rows += f", {labelled:,} of them with a label" if labelled else ""
    strength = (
        f"epsilon_y {point.epsilon:g}"
        if point.guard == "none"
        else f"epsilon_x {point.epsilon:g} (delta {sweep.delta:g}, T {point.releases})"
    )
    epochs = sweep.settings["train"]["epochs"]
    return (
        f"{point.label} on {sweep.dataset} at {strength} lost "
        f"{100 * loss.mean:z.1f} points of accuracy "
        f"[{100 * loss.low:z.1f}, {100 * loss.high:z.1f}] "
        f"and reached {100 * accuracy.mean:.1f} %, where the active alone reached "
        f"{100 * sweep.alone.mean:.1f} % ({len(sweep.seeds)} seeds, {epochs} epochs{rows})"
    )


class StoredGain(Settings):
    """One case, in points of accuracy over the best solo baseline.

    Attributes:
        labelled: rows with a label, None: all.
        epsilon: of a person's vote; None: without noise.
        baseline: the best that the active did alone.
        gain, low, high: mean and 95 % interval over re-splits of one table, paired by seed (the
            corrected resampled t of Nadeau and Bengio 2003).
        shared: the correlation of two splits that it was corrected for.
    """

    method: str
    dataset: str
    active_view: int
    labelled: int | None
    epsilon: float | None = None
    seeds: int
    baseline: str
    gain: float
    low: float
    high: float
    shared: float

    @property
    def sentence(self) -> str:
        rows = "all rows labelled" if self.labelled is None else f"{self.labelled} labelled rows"
        noise = "" if self.epsilon is None else f", epsilon {self.epsilon:g} a vote"
        return (
            f"{self.method} on {self.dataset} (view {self.active_view}), {rows}{noise}: "
            f"{self.gain:+.1f} points [{self.low:+.1f}, {self.high:+.1f}] over {self.baseline}, "
            f"the best that the active does alone, {self.seeds} seeds"
        )


def load_gains() -> tuple[StoredGain, ...]:
    """Return what ships with this package; DataError: the file is damaged."""
    stored = (files("secure_apfed.planning") / "stored_gains.json").read_bytes()
    try:
        return TypeAdapter(tuple[StoredGain, ...]).validate_json(stored)
    except ValidationError as error:
        raise DataError(f"stored_gains.json is damaged: {error.errors()[0]['msg']}") from None


def nearest_gain(
    config: Config, gains: tuple[StoredGain, ...], *, labelled: float
) -> StoredGain | None:
    """The case of the same method with the nearest number of labels, on the same data if any is.

    Numbers of labels, infinite where all rows have one, are compared by their ratio; the same
    epsilon counts before another.
    """
    said = config.method.noise(config)
    epsilon = said.epsilon if said else None

    def distance(case: StoredGain) -> tuple[bool, bool, float, float]:
        labels = math.inf if case.labelled is None else float(case.labelled)
        apart = 0.0 if labels == labelled else abs(math.log(min(labels, 1e9) / min(labelled, 1e9)))
        noise = abs(math.log((case.epsilon or 1e3) / (epsilon or 1e3)))
        other = case.dataset != config.data.dataset
        return (other, case.active_view != config.data.active_view, apart, noise)

    return min(
        (case for case in gains if case.method == config.method.name), key=distance, default=None
    )
