"""What help was worth, where it was measured: what ships with the package.

Run by: the planner. `stored_gains.json` is what `secure-apfed study gains --store` wrote, with data
sets, settings and seeds. Nothing is fitted to its cases or taken from between them: another data
set, network, number of epochs or of labels may gain more or less.
"""

import math
from importlib.resources import files

from pydantic import TypeAdapter, ValidationError

from secure_apfed.config import Config
from secure_apfed.errors import DataError
from secure_apfed.settings import Settings

__all__ = ["StoredGain", "load_gains", "nearest_gain"]


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
