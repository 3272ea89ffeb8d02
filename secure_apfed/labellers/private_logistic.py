"""Logistic regression whose weights are noised: a labelled person's row moves a vote privately.

Run by: a passive, on its own features. Against: whoever reads the votes.

Guarantee: the weights are mu-GDP for the replacement of one labelled person's features (and label)
at this party, who is labelled and the other rows held fixed. Whoever has no label moves no weight.
So all votes but the person's own are post-processing of private weights; what the own vote costs
is added in `secure_apfed.labellers.guarantee`.

Output perturbation (Chaudhuri, Monteleoni and Sarwate 2011, Differentially Private Empirical Risk
Minimization, Algorithm 1 and Corollary 8; there for two classes, and with noise of another law).
With one row x_i replaced by x', the objectives are

    J(T)  = 1/n sum l(T x_j, y_j) + Lambda/2 |T|^2,    l(z, y) = -log softmax(z)[y],
    J'(T) = J(T) + 1/n (l(T x', y') - l(T x_i, y_i)).

1. The gradient of l(T x, y) is (p - e_y) x^T with p = softmax(T x): with |x| <= 1 its Frobenius
   norm is at most |p - e_y|. Call r a bound of that, see 4.
2. J' is Lambda-strongly convex with its minimum at T'. At J's minimum T the gradient of J' is
   1/n ((p' - e_y') x'^T - (p - e_y) x_i^T), at most 2 r / n. Hence |T - T'| <= 2 r / (n Lambda).
3. What is computed has |grad J| <= t, so it lies within t / Lambda of the minimum, in both worlds:

       sensitivity = 2 r / (n Lambda) + 2 t / Lambda.

4. |p - e_y|^2 <= 2 (1 - p_y)^2, so r = sqrt 2 always does. At the minimum
   T = -1/(n Lambda) sum (p_j - e_y_j) x_j^T, so |T| <= r / Lambda, and |T x| for any x, too.
   softmax is 1/2-Lipschitz (its Jacobian diag p - p p^T has no eigenvalue above 1/2), and
   |softmax(0) - e_y| = sqrt(1 - 1/K): so r <= sqrt(1 - 1/K) + r / (2 Lambda), that is
   r <= sqrt(1 - 1/K) / (1 - 1/(2 Lambda)) where Lambda > 1/2.

Letters: U rows, F numbers of a row, n labelled rows, K classes, T weights (F, K).
"""

import copy
import math
from typing import ClassVar

import numpy as np
import torch

from secure_apfed.errors import ConfigError
from secure_apfed.labellers.interface import (
    Features,
    Floats,
    Integers,
    checked_features,
    checked_labels,
    checked_positions,
)
from secure_apfed.labellers.softmax import minimiser, probabilities
from secure_apfed.privacy.accountants import GaussianRelease, gdp_mu
from secure_apfed.privacy.noise import NoiseSource

__all__ = ["PrivateLogistic"]

_TOLERANCE = 1e-9
# Twice the tolerance, for what floating point adds to a gradient; and norms that exceed 1 by 1e-15.
_T = 2 * _TOLERANCE
_ROUNDING = 1 + 1e-9


class PrivateLogistic:
    """Logistic regression with Gaussian noise on its weights; every row has norm 1.

    Each row is shifted by `centre` and divided by its own norm: no other row has a say, and none is
    longer than the bound. There is no constant among the features. Votes are probabilities at
    scores in units of the noise's deviation.

    Args:
        epsilon: share of the budget for the weights; delta: at which.
        key: 32 secret bytes of the party, kept as long as the run may resume.
        strength: Lambda. Beyond 10 the noise over the signal hardly falls any further; below, the
            weights fit better and are noisier.
        centre: public, subtracted from every row: one number, or F. 0 for standardised columns.
            Pixels need one, of public images for instance: shares of black are no direction.
        seeded: noise depends on the key alone, for simulations; protects against nobody who
            knows it.

    Raises:
        ConfigError: a number out of range.
        LocalProtocolError: a key of the wrong length.
    """

    name: ClassVar[str] = "private_logistic"
    title: ClassVar[str] = "logistic regression on the labelled rows, with noise on its weights"
    linear: ClassVar[bool] = False
    inductive: ClassVar[bool] = True
    signed: ClassVar[bool] = False

    def __init__(
        self, *, epsilon: float, delta: float, key: bytes, strength: float = 10.0,
        centre: float | Floats = 0.0, seeded: bool = False,
    ) -> None:  # fmt: skip
        if not (math.isfinite(strength) and strength > 0):
            raise ConfigError(f"the strength of a regularisation is positive, got {strength}")
        if not np.isfinite(centre).all():
            raise ConfigError("the centre of a private labeller is finite")
        self.epsilon, self.delta, self.strength = epsilon, delta, strength
        self.centre, self.seeded = centre, seeded
        self._mu = gdp_mu(epsilon, delta)
        self._noise = NoiseSource(key, secret=not seeded)

    def about(self, content: bytes) -> "PrivateLogistic":
        """The same with noise for this content alone, which names the people and their labels."""
        other = copy.copy(self)
        other._noise = self._noise.about(content)
        return other

    @property
    def model(self) -> GaussianRelease:
        return GaussianRelease(noise_multiplier=1 / self._mu)

    def residual(self, classes: int) -> float:
        """r: bound of |p - e_y| at the minimum."""
        always, at_zero = math.sqrt(2), math.sqrt(1 - 1 / classes)
        if self.strength <= 0.5:
            return always
        return min(always, at_zero / (1 - 1 / (2 * self.strength)))

    def sensitivity(self, *, labelled: int, classes: int) -> float:
        """Replace-one, L2, of all weights together; see above."""
        exact = 2 * self.residual(classes) * _ROUNDING / (labelled * self.strength)
        return exact + 2 * _T / self.strength

    def sigma(self, *, labelled: int, classes: int) -> float:
        """Deviation of the noise on each weight."""
        return self.sensitivity(labelled=labelled, classes=classes) / self._mu

    def label(
        self, features_UF: Features, labelled_n: Integers, labels_n: Integers, classes: int
    ) -> Floats:
        features_UF = checked_features(features_UF)
        labelled_n = checked_positions(labelled_n, len(features_UF))
        labels_n = checked_labels(labels_n, len(labelled_n), classes)
        x_UF = self.directions(features_UF)
        fitted_FK = self.fit(x_UF[labelled_n], labels_n, classes)
        sigma = self.sigma(labelled=len(labelled_n), classes=classes)
        weights_FK = self._noise.add(fitted_FK, sigma, step=0, rows=torch.from_numpy(labelled_n))
        return probabilities(x_UF, weights_FK / sigma)

    def directions(self, features_UF: Floats) -> Floats:
        """Return every row at norm 1; a row at the centre is 0."""
        x_UF = features_UF - self.centre
        largest_U = np.abs(x_UF).max(axis=1, keepdims=True)
        x_UF /= np.where(largest_U > 0, largest_U, 1.0)
        norm_U = np.linalg.norm(x_UF, axis=1, keepdims=True)
        return np.asarray(x_UF / np.where(norm_U > 0, norm_U, 1.0), dtype=np.float64)

    def fit(self, x_nF: Floats, labels_n: Integers, classes: int) -> Floats:
        """The weights without noise; never released."""
        return minimiser(
            x_nF, labels_n, classes, strength=self.strength, tolerance=_TOLERANCE
        )  # fmt: skip

    def statement(self) -> str:
        seed = "; the noise is derived from a seed: once, and against nobody who knows it"
        return (
            f"{self.title}, Lambda {self.strength:g}, weights at epsilon {self.epsilon:g}, delta "
            f"{self.delta:g} for one labelled person's features at this party; another person's "
            f"features move that person's own vote and no other{seed if self.seeded else ''}"
        )
