"""Votes out of their noisy moment: signs of the active's features, and the estimate from them.

Run by: the active, on its own features and on what it opened. With Phi the signs of d random
hyperplanes over sqrt(d), the moment is M = Phi^T V + noise of known variance in each number. Votes
are estimated as functions of the active's features, S = Phi (Phi^T Phi + lambda I)^-1 M: what they
say beyond these features stays unread. Letters: U rows, d features of Phi, F of the active, K
classes.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from secure_apfed.learning.votes import Votes
from secure_apfed.seeds import derive_seed

__all__ = ["hyperplane_signs", "smoothed_votes"]

Floats = NDArray[np.float64]

_STRENGTHS = np.geomspace(1e-3, 1e4, 141)


def hyperplane_signs(features_UF: Floats, features: int, *, seed: int) -> NDArray[np.int8]:
    """On which side of each of `features` random hyperplanes a standardised row lies, (U, d)."""
    size_F = features_UF.std(axis=0)
    x_UF = (features_UF - features_UF.mean(axis=0)) / np.where(size_F > 0, size_F, 1.0)
    generator = np.random.default_rng(derive_seed(seed, "hyperplanes of the moment"))
    normal_Fd = generator.standard_normal((x_UF.shape[1], features))
    return np.where(x_UF @ normal_Fd >= 0, 1, -1).astype(np.int8)


@dataclass(frozen=True)
class _Spectrum:
    """Phi^T Phi by eigenvalues g and eigenvectors, and the moment in their basis."""

    g_d: Floats
    basis_dd: Floats
    moment: Floats

    @classmethod
    def of(cls, phi_Ud: Floats, moment_dK: Floats) -> "_Spectrum":
        g_d, basis_dd = np.linalg.eigh(phi_Ud.T @ phi_Ud)
        return cls(g_d.clip(min=0.0), basis_dd, basis_dd.T @ moment_dK)

    def error(self, strength: float, variance: float) -> float:
        """Expected squared error of the estimate, less a constant, without bias.

        With u = V in the basis of Phi's left vectors, the moment is sqrt(g) u + noise and the
        estimate g / (g + lambda) u + sqrt(g) / (g + lambda) noise. Its error is
        (lambda / (g + lambda))^2 u^2 + g variance / (g + lambda)^2, and u^2 is on average
        (moment^2 - variance) / g (Mallows 1973, unbiased risk with known variance).
        """
        held = self.g_d > 1e-9 * self.g_d.max()
        g_d, classes = self.g_d[held], self.moment.shape[1]
        power_d = ((self.moment[held] ** 2).sum(axis=1) - classes * variance) / g_d
        bias_d = ((strength / (g_d + strength)) ** 2 - 1) * power_d
        return float((bias_d + classes * variance * g_d / (g_d + strength) ** 2).sum())


def smoothed_votes(
    signs_Ud: NDArray[np.int8], moment_dK: Floats, *, variance: float, voters: int
) -> Votes:
    """Estimate every row's sum of votes from the noisy moment.

    lambda is the one with the least unbiased estimate of the squared error over all rows; it reads
    no labels.

    Args:
        signs_Ud: of all rows.
        moment_dK: Phi^T V with noise.
        variance: of the noise in each of its numbers.
        voters: passives that voted.
    """
    rows, features = signs_Ud.shape
    classes = moment_dK.shape[1]
    phi_Ud = signs_Ud / np.sqrt(features)
    # Votes of a row add up to about one a voter: the mean vote is known before the moment.
    mean = voters / classes
    found = _Spectrum.of(phi_Ud, moment_dK - mean * phi_Ud.sum(axis=0)[:, None])
    errors = [found.error(strength, variance) for strength in _STRENGTHS]
    strength = _STRENGTHS[int(np.argmin(errors))]
    turned_Ud = (phi_Ud @ found.basis_dd) / (found.g_d + strength)
    return Votes(
        totals=mean + turned_Ud @ found.moment,
        variance=variance * (turned_Ud**2).sum(axis=1) + np.zeros(rows),
        voters=voters,
    )
