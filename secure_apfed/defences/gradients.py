"""Defences of gradients, before they leave.

Run by: the active of TVFL on the gradients that it returns; every passive of APFed on its
contribution. Against: a receiver that reads labels (TVFL) or features (APFed) out of gradients.
They give no guarantee: each says what is left.

Letters: B batch, D (d in formulas) numbers of a gradient row.
"""

import math
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor

from apfed_protocols.errors import LocalProtocolError
from secure_apfed.defences.interface import GradientDefence, Leaving, Surroundings
from secure_apfed.errors import ConfigError
from secure_apfed.privacy.noise import clip_rows
from secure_apfed.settings.method import Released
from secure_apfed.settings.privacy import (
    ClipAndNoiseSettings,
    CompressionSettings,
    DiscreteSgdSettings,
    MarvellSettings,
    MaxNormSettings,
)

__all__ = ["ClipAndNoise", "Compression", "DiscreteSgd", "Marvell", "MaxNorm", "Pair", "best_noise"]

Pair = tuple[float, float]
_SMALLEST = 1e-9


class Compression(GradientDefence):
    """Gradient compression: sets all but the `keep` largest magnitudes of the batch to zero.

    Lin, Han, Mao, Wang and Dally 2018 (Deep Gradient Compression), section 3, without their
    accumulation of what was left out: each row is in a batch once an epoch, and what is kept
    back is meant to stay back. As a defence: Fu et al. 2022 (Label Inference Attacks Against
    Vertical Federated Learning). The largest numbers carry most of what such attacks use. It saves
    no bytes here, since zeros are sent too: which numbers were kept is then not told apart.
    """

    name: ClassVar[str] = "compression"
    gives: ClassVar[str] = "compression keeps only the largest numbers of each gradient"

    def __init__(self, settings: CompressionSettings, around: Surroundings) -> None:
        self._keep = settings.keep

    def protect(self, gradient_BD: Tensor, leaving: Leaving) -> Tensor:
        """Return the batch with ceil(keep * B * D) numbers left; of equal ones, the first."""
        flat = gradient_BD.flatten()
        kept = math.ceil(self._keep * len(flat))
        if kept == len(flat):
            return gradient_BD
        order = flat.abs().sort(descending=True, stable=True).indices[:kept]
        sparse = flat.new_zeros(len(flat))
        sparse[order] = flat[order]
        return sparse.reshape(gradient_BD.shape)


class DiscreteSgd(GradientDefence):
    """Rounds each number to the nearest of bins + 1 levels on [m - 2s, m + 2s].

    Fu et al. 2022 (Label Inference Attacks Against Vertical Federated Learning), the defence of
    that name. Here m and s are the mean and deviation of the batch's numbers, so that no state
    is kept, and numbers beyond the interval go to its end. Rounded gradients still point where
    exact ones do.
    """

    name: ClassVar[str] = "discrete_sgd"
    gives: ClassVar[str] = "discrete SGD rounds gradients to a few levels"

    def __init__(self, settings: DiscreteSgdSettings, around: Surroundings) -> None:
        self._bins = settings.bins

    def protect(self, gradient_BD: Tensor, leaving: Leaving) -> Tensor:
        """Return the rounded batch; one whose numbers are all equal stays as it is."""
        mean, deviation = gradient_BD.mean(), gradient_BD.std(correction=0)
        if not bool(deviation > 0):
            return gradient_BD
        low, step = mean - 2 * deviation, 4 * deviation / self._bins
        level_BD = ((gradient_BD - low) / step).round().clamp(0, self._bins)
        return low + step * level_BD


class ClipAndNoise(GradientDefence):
    """A passive clips each row to norm C_g and adds sigma_g times a standard normal to each number.

    Gives no epsilon: it is continuous noise in floating point on one party's part, counted by no
    ledger, and in APFed-C one person moves every row of the batch. With `secure_sum.noise` a
    passive's loss of privacy is bounded and charged.
    """

    name: ClassVar[str] = "clip_and_noise"
    protects: ClassVar[tuple[Released, ...]] = ("contributions",)
    row_wise: ClassVar[bool] = True
    gives: ClassVar[str] = (
        "clip and noise shorten a passive's gradients and blur them, without an account"
    )

    def __init__(self, settings: ClipAndNoiseSettings, around: Surroundings) -> None:
        self._settings, self._noise = settings, around.noise

    def protect(self, gradient_BD: Tensor, leaving: Leaving) -> Tensor:
        clipped_BD = clip_rows(gradient_BD, self._settings.clip).to(gradient_BD.dtype)
        if self._settings.sigma == 0:
            return clipped_BD
        use = f"{self.name} {leaving.receiver}"
        noise_BD = self._noise.normals(clipped_BD, use=use, step=leaving.step)
        return clipped_BD + self._settings.sigma * noise_BD


class MaxNorm(GradientDefence):
    """Returns g_j (1 + s_j e_j), e_j standard normal, s_j = sqrt(|g_max|^2 / |g_j|^2 - 1).

    Li, Sun, Yang, Gao, Zhang, Xie, Smith and Wang 2022 (Label Leakage and Protection in Two-party
    Split Learning), section 4.1: the expected squared norm of every row is then |g_max|^2, so that
    lengths do not tell classes. Directions stay (up to sign), and a row's length varies around the
    common mean in its own way.
    """

    name: ClassVar[str] = "max_norm"
    protects: ClassVar[tuple[Released, ...]] = ("returned gradients",)
    gives: ClassVar[str] = "max-norm makes the gradients of a batch equally long on average"

    def __init__(self, settings: MaxNormSettings, around: Surroundings) -> None:
        self._noise = around.noise

    def protect(self, gradient_BD: Tensor, leaving: Leaving) -> Tensor:
        """Return the perturbed batch; rows of zeros have no direction and stay."""
        norm_B = gradient_BD.norm(dim=1)
        ratio_B = torch.where(norm_B > 0, norm_B.max() / norm_B, 1.0)
        deviation_B = (ratio_B.square() - 1).clamp(min=0).sqrt()
        use = f"{self.name} {leaving.receiver}"
        noise_BD = self._noise.normals(gradient_BD, use=use, step=leaving.step)
        return gradient_BD * (1 + deviation_B * noise_BD[:, 0])[:, None]


def best_noise(*, positive: float, dimension: int, spread: Pair, power: float) -> tuple[Pair, Pair]:
    """Variances of the noise along the difference g1 - g0 and across it, for (negative, positive).

    All are in units of |g1 - g0|^2. Where `positive` is the share of positive rows and `spread` the
    variance of one number within each class, it is the noise of at most this expected squared norm
    (`power`) with the smallest KL(P1 || P0) + KL(P0 || P1) of the perturbed classes. That is
    (Li et al. 2022, section 4.2, Theorem 2), in nats, with a = along + spread, c = across + spread:
    ((d - 1)(c0 / c1 + c1 / c0) + (a0 + 1) / a1 + (a1 + 1) / a0) / 2 - d. The best covariance of
    each class has one variance along the difference of the means and one, no larger, across it.
    The four numbers solve a geometric programme: in their logarithms it is convex, so a local
    solver finds the optimum. The best test's AUC is at most 1/2 + sqrt(sumKL) / 2 - sumKL / 8
    (their Theorem 1).
    """
    rest, spread_4 = dimension - 1, np.array([*spread, *spread])
    floor = np.maximum(spread_4, _SMALLEST)
    weights = np.array([1 - positive, positive])
    weights = np.concatenate([weights, rest * weights])
    budget = power + float(weights @ spread_4)

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
        np.log(floor + power / dimension),
        jac=gradient,
        bounds=[(math.log(low), None) for low in floor],
        constraints=(left, longer),
        method="SLSQP",
        options={"ftol": 1e-12, "maxiter": 200},
    )
    chosen = np.maximum(np.exp(found.x) - spread_4, 0)
    # Never above the power that was allowed, whatever the solver's tolerance.
    chosen *= min(1.0, power / max(float(weights @ chosen), _SMALLEST * power))
    a0, a1, c0, c1 = map(float, chosen)
    return (a0, a1), (min(a0, c0), min(a1, c1))


class Marvell(GradientDefence):
    """Adds the Gaussian noise that, for its power, tells least about a binary label.

    Li, Sun, Yang, Gao, Zhang, Xie, Smith and Wang 2022 (Label Leakage and Protection in Two-party
    Split Learning). Two deviations: a batch with rows of one class only, whose gradients would
    tell that, leaves as zeros; and the power is s |g1 - g0|^2 throughout, never searched for. The
    bound is about gradients that are Gaussian within each class, with moments estimated from the
    batch, and about one release; many epochs of the same row add up.
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
        share, spread = float(is_one_B.double().mean()), (variances[0], variances[1])
        along, across = best_noise(
            positive=share, dimension=gradient_BD.shape[1], spread=spread, power=self._strength
        )
        use = f"{self.name} {leaving.receiver}"
        across_BD = self._noise.normals(gradient_BD, use=f"{use} across", step=leaving.step)
        along_B = self._noise.normals(gradient_BD, use=f"{use} along", step=leaving.step)[:, 0]
        perturbed_BD = gradient_BD.clone()
        for label, mask_B in enumerate((~is_one_B, is_one_B)):
            extra_B = math.sqrt(max(along[label] - across[label], 0.0)) * along_B[mask_B]
            spread_BD = math.sqrt(across[label] * unit) * across_BD[mask_B]
            perturbed_BD[mask_B] += extra_B[:, None] * difference_D + spread_BD
        return perturbed_BD
