"""Ridge regression on the n labelled rows: on x itself and on random cosines of it.

A. Rahimi, B. Recht, "Random Features for Large-Scale Kernel Machines", NIPS 2007, Algorithm 1:
cosines sqrt(2 / R) cos(w x + b) with normal w stand for a Gaussian kernel. With phi all features of
a row and P those of the n labelled rows, votes are A Y with A = phi P^T (P P^T + lambda I)^-1,
which needs no label; each row of A is divided by its L1 norm, which leaves the largest vote where
it was.

Everything is fitted on the n labelled rows alone, the scale of the features included: another row
is only classified.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from scipy import linalg

from secure_apfed.errors import ConfigError
from secure_apfed.labellers.interface import (
    Features,
    Floats,
    Integers,
    LinearLabeller,
    checked_features,
    checked_positions,
    rows_of_norm_one,
)
from secure_apfed.labellers.scale import scale_of
from secure_apfed.seeds import derive_seed

__all__ = ["Ridge"]


@dataclass(frozen=True, kw_only=True)
class Ridge(LinearLabeller):
    """Least squares on unit vectors of the labels, with lambda |weights|^2.

    Attributes:
        cosines: R, random features beside x and a constant.
        strength: lambda, positive. Rows are about 3 long, squared.
        seed: of the cosines; public.
    """

    name: ClassVar[str] = "ridge"
    title: ClassVar[str] = "ridge regression on the labelled rows"
    inductive: ClassVar[bool] = True
    signed: ClassVar[bool] = True

    cosines: int = 300
    strength: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.cosines >= 1 and np.isfinite(self.strength) and self.strength > 0):
            raise ConfigError(
                "ridge takes 1 random feature or more and a positive strength, got "
                f"{self.cosines} and {self.strength}"
            )

    def matrix(self, features_UF: Features, labelled_n: Integers) -> Floats:
        """Return A_Un; see `LinearLabeller.matrix`."""
        features_UF = checked_features(features_UF)
        labelled_n = checked_positions(labelled_n, len(features_UF))
        mean_F, size = scale_of(features_UF[labelled_n])
        phi_UP = self._expand((features_UF - mean_F) / size)
        known_nP = phi_UP[labelled_n]
        gram_nn = known_nP @ known_nP.T + self.strength * np.eye(len(labelled_n))
        return rows_of_norm_one(phi_UP @ linalg.solve(gram_nn, known_nP, assume_a="pos").T)

    def _expand(self, x_UF: Floats) -> Floats:
        """1, x of norm about 1, and cosines of norm about 1."""
        generator = np.random.default_rng(derive_seed(self.seed, "labellers", self.name))
        w_FR = generator.standard_normal((x_UF.shape[1], self.cosines))
        b_R = generator.uniform(0, 2 * np.pi, self.cosines)
        cosines_UR = np.sqrt(2 / self.cosines) * np.cos(x_UF @ w_FR + b_R)
        return np.hstack([np.ones((len(x_UF), 1)), x_UF, cosines_UR])

    def statement(self) -> str:
        return (
            f"{self.title}, {self.cosines} random features, lambda {self.strength:g}: linear in "
            "the labels; fitted on the labelled rows alone, so that another person's features "
            "move that person's own vote and no other"
        )
