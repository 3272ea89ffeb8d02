"""What a release does, described apart from any accountant.

Read by: every accountant, the ledger, the report. A mechanism states its noise relative
to its own sensitivity under replace-one adjacency, so that no accountant has to know
about clip bounds.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from secure_apfed.errors import ConfigError

__all__ = ["GaussianRelease", "Mechanism", "NoPrivacy"]


@dataclass(frozen=True, kw_only=True)
class GaussianRelease:
    """One row with Gaussian noise added, its neighbour being any other row.

    Attributes:
        noise_multiplier: standard deviation over the replace-one L2 sensitivity:
            sigma / (2C) for a row clipped to norm C. Positive.
    """

    noise_multiplier: float

    def __post_init__(self) -> None:
        if not (np.isfinite(self.noise_multiplier) and self.noise_multiplier > 0):
            raise ConfigError(f"a noise multiplier is positive, got {self.noise_multiplier}")

    @property
    def mu(self) -> float:
        """Parameter of Gaussian DP of one release (Dong, Roth and Su 2022, Theorem 1)."""
        return 1 / self.noise_multiplier

    def __str__(self) -> str:
        return f"gaussian noise of {self.noise_multiplier:.4g} sensitivities (replace-one)"


@dataclass(frozen=True, kw_only=True)
class NoPrivacy:
    """Rows sent as they are: epsilon is infinite from the first release on.

    Attributes:
        mu: of Gaussian DP, as that of a release with noise.
    """

    mu: ClassVar[float] = math.inf

    def __str__(self) -> str:
        return "no noise"


Mechanism = GaussianRelease | NoPrivacy
