"""Defences beyond differential privacy, on gradients before they leave: a class, one line in the
table, and its settings in `secure_apfed.settings.privacy`.

Run by: the active of TVFL on the gradients that it returns; every passive of APFed on its
contribution. Against: a receiver that reads labels (TVFL) or features (APFed) out of gradients.
They make known attacks weaker and give no guarantee; the report says so. Mechanisms with a
guarantee are in `secure_apfed.privacy` (guards, label response) and in the secure sum. The method's
facts decide who runs a defence, and whether it has any effect; several act in the order of the
configuration.

Letters: B batch, D (d in formulas) numbers of a gradient row.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import scipy
from numpy.typing import NDArray
from torch import Tensor

from apfed_protocols.errors import LocalProtocolError
from secure_apfed.errors import ConfigError
from secure_apfed.privacy.noise import NoiseSource
from secure_apfed.settings import Settings
from secure_apfed.settings.method import MethodSettings, Released, Side
from secure_apfed.settings.plugins import PluginTable, require_class
from secure_apfed.settings.privacy import (
    CompressionSettings,
    DefenceOfOthers,
    DefenceSettings,
    MarvellSettings,
)

Pair = tuple[float, float]
_SMALLEST = 1e-9


@dataclass(frozen=True)
class Leaving:
    """A gradient's step and receiver, with the true labels (B,) of its rows if the party knows
    them.
    """

    step: int
    receiver: str
    labels: Tensor | None = None


class GradientDefence(ABC):
    """A defence that changes a gradient before it leaves its party. `noise`: of the party, for its
    defences.

    Attributes:
        name: its key, and `kind` in the configuration.
        protects: which message it changes; none by default. The party that sends this message runs
            it; a method without this message refuses the defence.
        gives: what it does and does not guarantee, for the report.
        settings: of a class outside of this package, its own settings.
    """

    settings: ClassVar[type[Settings]] = Settings
    name: ClassVar[str]
    protects: ClassVar[tuple[Released, ...]] = ()
    gives: ClassVar[str] = "it does not say what it does"

    @abstractmethod
    def __init__(self, settings: Any, *, noise: NoiseSource, classes: int) -> None:
        """Build the defence from its settings. Raises ConfigError: it does not fit the data."""

    @abstractmethod
    def protect_gradient(self, gradient_BD: Tensor, leaving: Leaving) -> Tensor:
        """Return the gradient that leaves instead of `gradient_BD`, which has the flat rows of one
        batch.
        """


class Compression(GradientDefence):
    """A gradient compression that sets all but the `keep` largest magnitudes of the batch to zero.

    Lin, Han, Mao, Wang and Dally 2018 (Deep Gradient Compression), section 3, without their
    accumulation of omitted gradients: each row is in a batch once an epoch, and omitted values are
    meant to stay hidden. As a defence: Fu et al. 2022 (Label Inference Attacks Against Vertical
    Federated Learning). The largest numbers carry most of what such attacks use. It saves no bytes
    here, since zeros are sent too; so the message size does not reveal which numbers remained.
    """

    name: ClassVar[str] = "compression"
    protects: ClassVar[tuple[Released, ...]] = ("contributions", "returned gradients")
    gives: ClassVar[str] = "compression keeps only the largest numbers of each gradient"

    def __init__(self, settings: CompressionSettings, *, noise: NoiseSource, classes: int) -> None:
        self._keep = settings.keep

    def protect_gradient(self, gradient_BD: Tensor, leaving: Leaving) -> Tensor:
        """Return the batch with only its ceil(keep * B * D) largest numbers; of equal ones, the
        first.

        `gradient_BD`: the batch's gradients. `leaving`: step, receiver and labels, not used here.
        """
        flat = gradient_BD.flatten()
        kept_numbers = math.ceil(self._keep * len(flat))
        if kept_numbers == len(flat):
            return gradient_BD
        order = flat.abs().sort(descending=True, stable=True).indices[:kept_numbers]
        sparse = flat.new_zeros(len(flat))
        sparse[order] = flat[order]
        return sparse.reshape(gradient_BD.shape)


def best_noise(*, positive: float, dimension: int, spread: Pair, power: float) -> tuple[Pair, Pair]:
    """Return the variances of the noise along g1 - g0 and across it, for (negative, positive).

    All are in units of |g1 - g0|^2. Where `positive` is the share of positive rows and `spread` the
    variance of one number within each class, it is the noise of at most this expected squared norm
    (`power`) with the smallest KL(P1 || P0) + KL(P0 || P1) of the perturbed classes. That is
    (Li et al. 2022, section 4.2, Theorem 2), in nats, with a = along + spread, c = across + spread:
    ((d - 1)(c0 / c1 + c1 / c0) + (a0 + 1) / a1 + (a1 + 1) / a0) / 2 - d. The best covariance of
    each class has one variance along the difference of the means and one, no larger, across it.
    The four numbers solve a geometric programme: in their logarithms it is convex, so a local
    solver finds the optimum. The best test's AUC is at most 1/2 + sqrt(sumKL) / 2 - sumKL / 8
    (their Theorem 1).

    `dimension`: D, numbers of one gradient.
    """
    rest = dimension - 1
    spread_4 = np.array([*spread, *spread])
    floor = np.maximum(spread_4, _SMALLEST)
    weights = np.array([1 - positive, positive])
    weights = np.concatenate([weights, rest * weights])
    budget = power + float(weights @ spread_4)

    def compute_objective(logs: NDArray[np.float64]) -> float:
        a0, a1, c0, c1 = np.exp(logs)
        return float(rest * (c0 / c1 + c1 / c0) + (a0 + 1) / a1 + (a1 + 1) / a0)

    def compute_gradient(logs: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the derivative of the divergence by the logarithms of (a0, a1, c0, c1)."""
        a0, a1, c0, c1 = np.exp(logs)
        along = a0 / a1 - (a1 + 1) / a0, a1 / a0 - (a0 + 1) / a1
        across = rest * (c0 / c1 - c1 / c0)
        return np.array([*along, across, -across])

    within_budget = {
        "type": "ineq",
        "fun": lambda logs: budget - weights @ np.exp(logs),
        "jac": lambda logs: -weights * np.exp(logs),
    }
    order = np.array([[1.0, 0, -1, 0], [0, 1, 0, -1]])
    longer = {"type": "ineq", "fun": lambda logs: order @ logs, "jac": lambda logs: order}
    solution = scipy.optimize.minimize(
        compute_objective,
        np.log(floor + power / dimension),
        jac=compute_gradient,
        bounds=[(math.log(low), None) for low in floor],
        constraints=(within_budget, longer),
        method="SLSQP",
        options={"ftol": 1e-12, "maxiter": 200},
    )
    chosen = np.maximum(np.exp(solution.x) - spread_4, 0)
    # Never above the power that was allowed, whatever the solver's tolerance.
    chosen *= min(1.0, power / max(float(weights @ chosen), _SMALLEST * power))
    a0, a1, c0, c1 = map(float, chosen)
    return (a0, a1), (min(a0, c0), min(a1, c1))


class Marvell(GradientDefence):
    """A defence that adds the Gaussian noise that, for its power, reveals least about a binary
    label.

    Li, Sun, Yang, Gao, Zhang, Xie, Smith and Wang 2022 (Label Leakage and Protection in Two-party
    Split Learning). Two deviations: a batch with rows of one class only, whose gradients would
    reveal this class, is sent as zeros; and the power is always s |g1 - g0|^2, without a search.
    The bound is about gradients that are Gaussian within each class, with moments estimated from
    the batch, and about one release; many epochs of the same row add up.
    """

    name: ClassVar[str] = "marvell"
    protects: ClassVar[tuple[Released, ...]] = ("returned gradients",)
    gives: ClassVar[str] = (
        "Marvell blurs the difference between the gradients of the two classes in each batch"
    )

    def __init__(self, settings: MarvellSettings, *, noise: NoiseSource, classes: int) -> None:
        """Check that the labels are binary. Raises ConfigError."""
        if classes != 2:
            raise ConfigError(
                f"defences: marvell is for binary labels, the data have {classes} classes; use "
                "compression"
            )
        self._strength = settings.strength
        self._noise = noise

    def protect_gradient(self, gradient_BD: Tensor, leaving: Leaving) -> Tensor:
        """Add the noise of `best_noise`, estimated from this batch's two classes.

        A batch of one class becomes zeros, since its gradients would reveal the class.
        """
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
        share = float(is_one_B.double().mean())
        spread = (variances[0], variances[1])
        along, across = best_noise(
            positive=share, dimension=gradient_BD.shape[1], spread=spread, power=self._strength
        )
        use = f"{self.name} {leaving.receiver}"
        across_BD = self._noise.draw_normals(gradient_BD, use=f"{use} across", step=leaving.step)
        along_B = self._noise.draw_normals(gradient_BD, use=f"{use} along", step=leaving.step)[:, 0]
        perturbed_BD = gradient_BD.clone()
        for label, mask_B in enumerate((~is_one_B, is_one_B)):
            extra_B = math.sqrt(max(along[label] - across[label], 0.0)) * along_B[mask_B]
            spread_BD = math.sqrt(across[label] * unit) * across_BD[mask_B]
            perturbed_BD[mask_B] += extra_B[:, None] * difference_D + spread_BD
        return perturbed_BD


def _require_defence(candidate: Any, code: str) -> type[GradientDefence]:
    """Check that a class named as `package.module:Name` is a GradientDefence; return it."""
    del code
    kind: type[GradientDefence] = require_class(candidate, GradientDefence)
    return kind


DEFENCES: PluginTable[type[GradientDefence]] = PluginTable(
    {defence.name: defence for defence in (Compression, Marvell)},
    kind="defences",
    prepare=_require_defence,
)


def take_defence(choice: DefenceSettings) -> None:
    """Import a plug-in defence and check its options.

    Raises ConfigError: it does not exist, an option is wrong, or another party than this one named
    it.
    """
    DEFENCES.take_name(choice.kind, key="defences")
    _read_settings(choice)


def _read_settings(choice: DefenceSettings) -> Settings:
    """Return the settings of a defence: a built-in's own, or those that a plug-in's
    class declares.
    """
    if not isinstance(choice, DefenceOfOthers):
        return choice
    # Imported late: modules that read files are on a higher layer than defences.
    from secure_apfed.config.file import read_options

    return read_options(
        DEFENCES[choice.kind].settings, choice.options, key=f"defences.{choice.kind}"
    )


_RUN_BY: Mapping[Side, str] = {"active": "the active", "passives": "every passive"}
_NOT_SENT: Mapping[Released, str] = {
    "contributions": "no passive sends a gradient",
    "returned gradients": "no passive receives a gradient of the task loss",
}


def check_defences(choices: Sequence[DefenceSettings], method: MethodSettings) -> None:
    """Refuse defences without effect under a method, and a defence that is given twice.

    `choices`: defences in the settings.

    Raises ValueError: names it, the reason, and which defences apply.
    """
    kinds = [choice.kind for choice in choices]
    for kind in kinds:
        if not describe_runners(kind, method):
            fits = [name for name in DEFENCES if describe_runners(name, method)]
            protected = DEFENCES[kind].protects
            reason = " and ".join(_NOT_SENT[released] for released in protected)
            reason = (
                reason or f"{DEFENCES[kind].__name__} says in `protects` nothing that it changes"
            )
            raise ValueError(
                f"defences: {kind} does not apply to method {method.name}: {reason}; leave it "
                f"out, or use one of {', '.join(fits) or 'none'}"
            )
        if kinds.count(kind) > 1:
            raise ValueError(f"defences: {kind} is given {kinds.count(kind)} times; keep one")


def describe_runners(kind: str, method: MethodSettings) -> str:
    """Return in words which party runs a defence: the one that sends what it protects; "" if none
    does.
    """
    senders = map(method.sender_of, DEFENCES[kind].protects)
    return " and ".join(dict.fromkeys(_RUN_BY[sender] for sender in senders if sender))


def describe_defences(choices: Sequence[DefenceSettings], method: MethodSettings) -> list[str]:
    """Return the report's sentences on a run's defences; empty if it has none."""
    run_by = ", ".join(
        f"{choice.kind} by {describe_runners(choice.kind, method)}" for choice in choices
    )
    return [f"defences without a guarantee: {run_by}"] if choices else []


def gradient_defences(
    choices: Sequence[DefenceSettings], released: Released, *, noise: NoiseSource, classes: int
) -> tuple[GradientDefence, ...]:
    """Return the configured defences for one kind of gradient, in the order of
    their application.

    `choices`: defences in the settings.
    """
    return tuple(
        DEFENCES[choice.kind](_read_settings(choice), noise=noise, classes=classes)
        for choice in choices
        if released in DEFENCES[choice.kind].protects
    )
