"""Marvell: the Gaussian noise that, for its power, tells least about a binary label.

Run by: the active of TVFL on the gradients that it returns. Against: a passive that tells
positive from negative rows by any test on one row's gradient. Gives no guarantee: the bound
is about gradients that are Gaussian within each class, with moments estimated from the
batch, and about one release; many epochs of the same row add up.

Letters: B batch, D (d in formulas) numbers of a gradient row.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor

from apfed_protocols.errors import LocalProtocolError
from secure_apfed.defences.interface import GradientDefence, Leaving, Surroundings
from secure_apfed.errors import ConfigError
from secure_apfed.settings.defence import MarvellSettings
from secure_apfed.settings.method import Released

__all__ = ["Marvell", "Noise", "Split", "best_noise", "sum_kl"]

_SMALLEST = 1e-9


@dataclass(frozen=True, kw_only=True)
class Split:
    """What the noise depends on, in units of |g1 - g0|^2.

    Attributes:
        positive: p, share of positive rows.
        dimension: d.
        spread: (u, v), the variance of one number within the negative and the positive class.
    """

    positive: float
    dimension: int
    spread: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Variances, in units of |g1 - g0|^2: along the difference and across it, by class (0, 1)."""

    along: tuple[float, float]
    across: tuple[float, float]

    def power(self, split: Split) -> float:
        """Expected squared norm of the noise of a row."""
        shares, rest = (1 - split.positive, split.positive), split.dimension - 1
        return sum(
            share * (along + rest * across)
            for share, along, across in zip(shares, self.along, self.across, strict=True)
        )


def sum_kl(noise: Noise, split: Split) -> float:
    """KL(P1 || P0) + KL(P0 || P1) of the perturbed classes, nats.

    Li et al. 2022, section 4.2, Theorem 2: with a = along + spread and c = across + spread,
    2 sumKL = (d - 1)(c0 / c1 + c1 / c0) + (a0 + 1) / a1 + (a1 + 1) / a0 - 2 d.
    The best test's AUC is at most 1/2 + sqrt(sumKL) / 2 - sumKL / 8 (their Theorem 1).
    """
    (u, v), d = split.spread, split.dimension
    a0, a1 = noise.along[0] + u, noise.along[1] + v
    c0, c1 = noise.across[0] + u, noise.across[1] + v
    rest = (d - 1) * (c0 / c1 + c1 / c0) if d > 1 else 0.0
    return (rest + (a0 + 1) / a1 + (a1 + 1) / a0) / 2 - d


def best_noise(split: Split, power: float) -> Noise:
    """The noise of at most `power` (in units of |g1 - g0|^2) with the smallest sumKL.

    Li et al. 2022, Theorem 2: the best covariance of each class has one variance along the
    difference of the means and one, no larger, across it. The four numbers solve a geometric
    programme: in their logarithms it is convex, so a local solver finds the optimum.
    """
    (u, v), rest = split.spread, split.dimension - 1
    spread = np.array([u, v, u, v])
    floor = np.maximum(spread, _SMALLEST)
    weights = np.array([1 - split.positive, split.positive])
    weights = np.concatenate([weights, rest * weights])
    budget = power + float(weights @ spread)

    def objective(logs: NDArray[np.float64]) -> float:
        a0, a1, c0, c1 = np.exp(logs)
        return float(rest * (c0 / c1 + c1 / c0) + (a0 + 1) / a1 + (a1 + 1) / a0)

    def gradient(logs: NDArray[np.float64]) -> NDArray[np.float64]:
        a0, a1, c0, c1 = np.exp(logs)
        along = a0 / a1 - (a1 + 1) / a0, a1 / a0 - (a0 + 1) / a1
        across = rest * (c0 / c1 - c1 / c0)
        return np.array([*along, across, -across])

    left = {
        "type": "ineq",
        "fun": lambda logs: budget - weights @ np.exp(logs),
        "jac": lambda logs: -weights * np.exp(logs),
    }
    order = np.array([[1.0, 0, -1, 0], [0, 1, 0, -1]])
    longer = {"type": "ineq", "fun": lambda logs: order @ logs, "jac": lambda logs: order}
    found = minimize(
        objective,
        np.log(floor + power / split.dimension),
        jac=gradient,
        bounds=[(math.log(low), None) for low in floor],
        constraints=(left, longer),
        method="SLSQP",
        options={"ftol": 1e-12, "maxiter": 200},
    )
    chosen = np.maximum(np.exp(found.x) - spread, 0)
    # Never above the power that was allowed, whatever the solver's tolerance.
    chosen *= min(1.0, power / max(float(weights @ chosen), _SMALLEST * power))
    a0, a1, c0, c1 = map(float, chosen)
    return Noise(along=(a0, a1), across=(min(a0, c0), min(a1, c1)))


class Marvell(GradientDefence):
    """Adds the best noise to the rows of each class.

    Li, Sun, Yang, Gao, Zhang, Xie, Smith and Wang 2022 (Label Leakage and Protection in Two-party
    Split Learning). Two deviations: a batch with rows of one class only, whose gradients would
    tell that, leaves as zeros; and the power is s |g1 - g0|^2 throughout, never searched for.
    """

    name: ClassVar[str] = "marvell"
    protects: ClassVar[tuple[Released, ...]] = ("returned gradients",)
    gives: ClassVar[str] = (
        "Marvell blurs the difference between the gradients of the two classes in each batch"
    )

    def __init__(self, settings: MarvellSettings, around: Surroundings) -> None:
        if around.classes != 2:
            raise ConfigError(
                f"defences: marvell is for binary labels, the data have {around.classes} classes; "
                "use max_norm or compression"
            )
        self._strength, self._noise = settings.strength, around.noise

    def protect(self, gradient_BD: Tensor, leaving: Leaving) -> Tensor:
        """Return the perturbed batch."""
        if leaving.labels is None:
            raise LocalProtocolError("marvell runs where the labels of a gradient's rows are known")
        is_one_B = leaving.labels.bool()
        if bool(is_one_B.all()) or not bool(is_one_B.any()):
            return gradient_BD * 0
        of_class = gradient_BD[~is_one_B], gradient_BD[is_one_B]
        difference_D = of_class[1].mean(0) - of_class[0].mean(0)
        unit = float(difference_D.square().sum())
        if unit == 0:
            return gradient_BD
        variances = [float(rows.var(0, correction=0).mean()) / unit for rows in of_class]
        split = Split(
            positive=float(is_one_B.double().mean()),
            dimension=gradient_BD.shape[1],
            spread=(variances[0], variances[1]),
        )
        noise = best_noise(split, self._strength)
        use = f"{self.name} {leaving.receiver}"
        across_BD = self._noise.normals(gradient_BD, use=f"{use} across", step=leaving.step)
        along_B = self._noise.normals(gradient_BD, use=f"{use} along", step=leaving.step)[:, 0]
        perturbed_BD = gradient_BD.clone()
        for label, mask_B in enumerate((~is_one_B, is_one_B)):
            across, along = noise.across[label], noise.along[label]
            extra_B = math.sqrt(max(along - across, 0.0)) * along_B[mask_B]
            spread_BD = math.sqrt(across * unit) * across_BD[mask_B]
            perturbed_BD[mask_B] += extra_B[:, None] * difference_D + spread_BD
        return perturbed_BD
