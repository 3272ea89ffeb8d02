"""Bootstrap intervals of means over seeds, for the tables of sweeps and studies."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import bootstrap

__all__ = ["Interval"]

_CONFIDENCE, _RESAMPLES = 0.95, 5000


@dataclass(frozen=True)
class Interval:
    """A mean over seeds and its 95 % bootstrap interval; one seed has none (NaN)."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Interval":
        """Of at least one value (percentile bootstrap, always the same resamples)."""
        mean = float(np.mean(values))
        if len(values) < 2:
            return cls(mean, math.nan, math.nan)
        if len(set(values)) == 1:
            return cls(mean, mean, mean)
        found = bootstrap(
            (np.asarray(values),), np.mean, confidence_level=_CONFIDENCE,
            n_resamples=_RESAMPLES, method="percentile", rng=np.random.default_rng(0),
        ).confidence_interval  # fmt: skip
        return cls(mean, float(found.low), float(found.high))

    def text(self, *, scale: float = 1.0, form: str = ".1f") -> str:
        """Such as "95.2 [94.8, 95.6]"; `form` is that of one number."""
        mean, low, high = (f"{scale * value:{form}}" for value in (self.mean, self.low, self.high))
        return mean if math.isnan(self.low) else f"{mean} [{low}, {high}]"
