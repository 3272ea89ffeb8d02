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
from secure_apfed.settings import MethodSettings, Settings
from secure_apfed.settings.method import GradientKind, Side
from secure_apfed.settings.plugins import PluginTable, require_class
from secure_apfed.settings.privacy import (
    CompressionSettings,
    DefenceSettings,
    MarvellSettings,
    PluginDefence,
)

Pair = tuple[float, float]
# Keeps variances positive, whose logarithms the solver uses.
_MIN_VARIANCE = 1e-9


@dataclass(frozen=True)
class Leaving:
    """The facts of a gradient that is about to be sent.

    Attributes:
        step: number of the training step.
        receiver: name of the party that gets the gradient.
        labels: the true labels of its rows, (B,); None: its sender does not know them.
    """

    step: int
    receiver: str
    labels: Tensor | None = None


class GradientDefence(ABC):
    """A defence that changes a gradient before it leaves its party.

    Attributes:
        name: the defence's key in `DEFENCES`, and its `kind` in the configuration.
        protects: kinds of gradients that it changes; none by default. The party that sends such a
            gradient runs the defence. A method that sends none refuses the defence.
        gives: a sentence on the effect, for the report.
        settings: the class of the defence's own settings, if the defence is defined outside of this
            package.
    """

    settings: ClassVar[type[Settings]] = Settings
    name: ClassVar[str]
    protects: ClassVar[tuple[GradientKind, ...]] = ()
    gives: ClassVar[str] = "it does not say what it does"

    @abstractmethod
    def __init__(self, settings: Any, *, noise: NoiseSource, classes: int) -> None:
        """Build the defence from its settings.

        `noise`: the party's source of noise for defences. `classes`: K, number of classes. Raises
        ConfigError: the defence does not fit the data.
        """

    @abstractmethod
    def protect_gradient(self, gradient_BD: Tensor, leaving: Leaving) -> Tensor:
        """Return the gradient (B, D) to send instead of `gradient_BD`.

        `gradient_BD`: one flat row of D numbers for each of the batch's B rows. `leaving`: its step
        and receiver, and the labels of its rows if the party knows them.
        """


class Compression(GradientDefence):
    """A gradient compression, which keeps a share of a batch's numbers and sets the others to zero.

    The share `keep` (a setting) with the largest magnitudes is kept. Source: Lin, Han, Mao, Wang
    and Dally 2018 (Deep Gradient Compression), section 3. Their accumulation of omitted gradients
    is left out: each row is in a batch once an epoch, and omitted values are meant to stay hidden.
    Fu et al. 2022 (Label Inference Attacks Against Vertical Federated Learning) use it as a
    defence. It saves no bytes here, since zeros are sent too; so the message size does not reveal
    how many numbers are zero.
    """

    name: ClassVar[str] = "compression"
    protects: ClassVar[tuple[GradientKind, ...]] = ("contributions", "returned gradients")
    gives: ClassVar[str] = "compression keeps only the largest numbers of each gradient"

    def __init__(self, settings: CompressionSettings, *, noise: NoiseSource, classes: int) -> None:
        self._keep = settings.keep

    def protect_gradient(self, gradient_BD: Tensor, leaving: Leaving) -> Tensor:
        """Return the batch (B, D) with zeros except at the ceil(keep * B * D) largest magnitudes.

        Of equal magnitudes the first ones are kept. `leaving` is not used.
        """
        values = gradient_BD.flatten()
        kept_count = math.ceil(self._keep * len(values))
        if kept_count == len(values):
            return gradient_BD
        largest_indices = values.abs().sort(descending=True, stable=True).indices[:kept_count]
        compressed = values.new_zeros(len(values))
        compressed[largest_indices] = values[largest_indices]
        return compressed.reshape(gradient_BD.shape)


def best_noise(*, positive: float, dimension: int, spread: Pair, power: float) -> tuple[Pair, Pair]:
    """Return the variances of the Gaussian noise that hides binary labels best at this power.

    A gradient g has mean g0 for negative rows and g1 for positive ones. Returns two pairs, each for
    the (negative, positive) class: the noise's variance along the direction g1 - g0, and its
    variance in every direction across it. Their unit is |g1 - g0|^2. The across variance is no
    larger than the along variance.

    The noise minimises sumKL = KL(P1 || P0) + KL(P0 || P1), where P0 and P1 are the distributions
    of the noisy gradients of both classes. With a = along + spread, c = across + spread and d
    numbers in a gradient, in nats (Li et al. 2022, section 4.2, Theorem 2),
    sumKL = ((d - 1)(c0 / c1 + c1 / c0) + (a0 + 1) / a1 + (a1 + 1) / a0) / 2 - d.
    An attacker's best test then has an AUC of at most 1/2 + sqrt(sumKL) / 2 - sumKL / 8 (their
    Theorem 1). In the logarithms of a0, a1, c0 and c1 the problem is convex (a geometric
    programme), so a local solver finds the optimum.

    Args:
        positive: share of positive rows.
        dimension: d, numbers of one gradient.
        spread: variance of one number within the (negative, positive) class, in the same unit.
        power: bound on the expected squared norm of the noise, in the same unit.
    """
    across_count = dimension - 1  # directions across
    # Vectors of four numbers are in the order a0, a1, c0, c1.
    gradient_variances = np.array([*spread, *spread])
    min_variances = np.maximum(gradient_variances, _MIN_VARIANCE)
    # The weighted sum of the noise variances is the expected squared norm of the noise.
    class_shares = np.array([1 - positive, positive])
    weights = np.concatenate([class_shares, across_count * class_shares])
    max_weighted_sum = power + float(weights @ gradient_variances)

    def compute_objective(logs: NDArray[np.float64]) -> float:
        """Return 2 (sumKL + d) at the logarithms of (a0, a1, c0, c1); it has the same minimum."""
        a0, a1, c0, c1 = np.exp(logs)
        return float(across_count * (c0 / c1 + c1 / c0) + (a0 + 1) / a1 + (a1 + 1) / a0)

    def compute_gradient(logs: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the derivative of `compute_objective` by each of its four arguments."""
        a0, a1, c0, c1 = np.exp(logs)
        by_log_a0 = a0 / a1 - (a1 + 1) / a0
        by_log_a1 = a1 / a0 - (a0 + 1) / a1
        by_log_c0 = across_count * (c0 / c1 - c1 / c0)
        return np.array([by_log_a0, by_log_a1, by_log_c0, -by_log_c0])

    power_constraint = {
        "type": "ineq",
        "fun": lambda logs: max_weighted_sum - weights @ np.exp(logs),
        "jac": lambda logs: -weights * np.exp(logs),
    }
    along_minus_across = np.array([[1.0, 0, -1, 0], [0, 1, 0, -1]])
    order_constraint = {
        "type": "ineq",
        "fun": lambda logs: along_minus_across @ logs,
        "jac": lambda logs: along_minus_across,
    }
    solution = scipy.optimize.minimize(
        compute_objective,
        np.log(min_variances + power / dimension),
        jac=compute_gradient,
        bounds=[(math.log(low), None) for low in min_variances],
        constraints=(power_constraint, order_constraint),
        method="SLSQP",
        options={"ftol": 1e-12, "maxiter": 200},
    )
    noise_variances = np.maximum(np.exp(solution.x) - gradient_variances, 0)
    # The solver may exceed the power by its tolerance; the noise is scaled down to it.
    solved_power = float(weights @ noise_variances)
    noise_variances *= min(1.0, power / max(solved_power, _MIN_VARIANCE * power))
    a0, a1, c0, c1 = map(float, noise_variances)
    return (a0, a1), (min(a0, c0), min(a1, c1))


class Marvell(GradientDefence):
    """A defence that adds Gaussian noise to gradients, shaped to hide a binary label best.

    Source: Li, Sun, Yang, Gao, Zhang, Xie, Smith and Wang 2022 (Label Leakage and Protection in
    Two-party Split Learning). There are two deviations. A batch with rows of one class only, whose
    gradients would reveal this class, is sent as zeros. The power is always s |g1 - g0|^2, with the
    configured strength s and the classes' mean gradients g0 and g1, without the paper's search.

    The paper's bound assumes gradients that are Gaussian within each class, with the moments that
    are estimated from the batch. It is for one release; many epochs of the same row add up.
    """

    name: ClassVar[str] = "marvell"
    protects: ClassVar[tuple[GradientKind, ...]] = ("returned gradients",)
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

        A batch of one class becomes zeros, since its gradients would reveal the class. A batch
        whose classes have equal mean gradients stays as it is.

        `leaving`: step and receiver, for which noise is drawn once, and the labels (B,).

        Raises LocalProtocolError: the labels are not known.
        """
        if leaving.labels is None:
            raise LocalProtocolError("marvell runs where the labels of a gradient's rows are known")
        is_positive_B = leaving.labels.bool()
        if bool(is_positive_B.all()) or not bool(is_positive_B.any()):
            return gradient_BD * 0
        class_masks = (~is_positive_B, is_positive_B)
        negative_BD, positive_BD = (gradient_BD[mask_B] for mask_B in class_masks)
        difference_D = positive_BD.mean(0) - negative_BD.mean(0)
        squared_distance = float(difference_D.square().sum())  # the unit of `best_noise`
        # Equal class means reveal no label, and define no direction.
        if squared_distance == 0:
            return gradient_BD
        negative_variance, positive_variance = (
            float(rows.var(0, correction=0).mean()) / squared_distance
            for rows in (negative_BD, positive_BD)
        )
        along_variances, across_variances = best_noise(
            positive=float(is_positive_B.double().mean()),
            dimension=gradient_BD.shape[1],
            spread=(negative_variance, positive_variance),
            power=self._strength,
        )
        # Noise differs by receiver, since two receivers could compare what they got.
        purpose = f"{self.name} {leaving.receiver}"
        across_normals_BD = self._noise.draw_normals(
            gradient_BD, use=f"{purpose} across", step=leaving.step
        )
        along_normals_BD = self._noise.draw_normals(
            gradient_BD, use=f"{purpose} along", step=leaving.step
        )
        perturbed_BD = gradient_BD.clone()
        for label, mask_B in enumerate(class_masks):
            # Noise in all directions has the across variance; what `along` is above it is added
            # in the direction of the difference.
            along_scale_B = (
                math.sqrt(max(along_variances[label] - across_variances[label], 0.0))
                * along_normals_BD[mask_B, 0]
            )
            across_noise_BD = (
                math.sqrt(across_variances[label] * squared_distance) * across_normals_BD[mask_B]
            )
            perturbed_BD[mask_B] += along_scale_B[:, None] * difference_D + across_noise_BD
        return perturbed_BD


def _require_defence(candidate: Any, code: str) -> type[GradientDefence]:
    """Check that a class named as `package.module:Name` is a GradientDefence; return it."""
    del code  # the name, which other kinds of plug-ins use
    defence_class: type[GradientDefence] = require_class(candidate, GradientDefence)
    return defence_class


DEFENCES: PluginTable[type[GradientDefence]] = PluginTable(
    {defence.name: defence for defence in (Compression, Marvell)},
    plugin_kind="defences",
    make_entry=_require_defence,
)


def take_defence(choice: DefenceSettings) -> None:
    """Import a configured defence, and check that it exists and that its options are right.

    Raises ConfigError: the defence does not exist, an option is wrong, or a plug-in was named by
    another party and this one does not trust it.
    """
    DEFENCES.import_entry(choice.kind, setting="defences")
    _read_settings(choice)


def _read_settings(choice: DefenceSettings) -> Settings:
    """Return a defence's settings, parsed by the class that a plug-in declares for its options.

    A built-in defence's settings are parsed already, and returned as they are.
    """
    if not isinstance(choice, PluginDefence):
        return choice
    # Imported late: modules that read files are on a higher layer than defences.
    from secure_apfed.config.file import read_options

    return read_options(
        DEFENCES[choice.kind].settings, choice.options, key=f"defences.{choice.kind}"
    )


_RUN_BY: Mapping[Side, str] = {"active": "the active", "passives": "every passive"}
_WHY_NOT_SENT: Mapping[GradientKind, str] = {
    "contributions": "no passive sends a gradient",
    "returned gradients": "no passive receives a gradient of the task loss",
}


def check_defences(choices: Sequence[DefenceSettings], method: MethodSettings) -> None:
    """Refuse defences without effect under a method, and a defence that is given twice.

    `choices`: the settings of the run's defences.

    Raises ValueError: names the defence, the reason, and which defences apply.
    """
    kinds = [choice.kind for choice in choices]
    for kind in kinds:
        if not describe_runners(kind, method):
            applicable = [name for name in DEFENCES if describe_runners(name, method)]
            obstacle = " and ".join(_WHY_NOT_SENT[released] for released in DEFENCES[kind].protects)
            if not obstacle:
                obstacle = f"{DEFENCES[kind].__name__} says in `protects` nothing that it changes"
            raise ValueError(
                f"defences: {kind} does not apply to method {method.name}: {obstacle}; leave it "
                f"out, or use one of {', '.join(applicable) or 'none'}"
            )
        if kinds.count(kind) > 1:
            raise ValueError(f"defences: {kind} is given {kinds.count(kind)} times; keep one")


def describe_runners(kind: str, method: MethodSettings) -> str:
    """Return in words which parties run a defence: those that send the gradients it protects.

    Returns "" if the method sends no such gradient. `kind`: the defence's key in `DEFENCES`.
    """
    senders = map(method.find_gradient_sender, DEFENCES[kind].protects)
    return " and ".join(dict.fromkeys(_RUN_BY[sender] for sender in senders if sender))


def describe_defences(choices: Sequence[DefenceSettings], method: MethodSettings) -> list[str]:
    """Return the report's sentences on a run's defences; empty if it has none."""
    if not choices:
        return []
    run_by = ", ".join(
        f"{choice.kind} by {describe_runners(choice.kind, method)}" for choice in choices
    )
    return [f"defences without a guarantee: {run_by}"]


@dataclass(frozen=True)
class DefenceChain:
    """The defences of one kind of gradient at one party, in the order in which they change it."""

    defences: tuple[GradientDefence, ...] = ()

    def __bool__(self) -> bool:
        """Return whether there is any defence."""
        return bool(self.defences)

    def protect_gradient(
        self, gradient_B: Tensor, *, step: int, receiver: str, labels_B: Tensor | None = None
    ) -> Tensor:
        """Return the gradient of B rows, (B, *shape), after all defences.

        `step`, `receiver`: the training step and the party that gets it. `labels_B`: the true
        labels of its rows, if the party knows them.
        """
        leaving = Leaving(step, receiver, labels_B)
        defended_BD = gradient_B.flatten(1)
        for defence in self.defences:
            defended_BD = defence.protect_gradient(defended_BD, leaving)
        return defended_BD.reshape(gradient_B.shape)


def gradient_defences(
    choices: Sequence[DefenceSettings], released: GradientKind, *, noise: NoiseSource, classes: int
) -> tuple[GradientDefence, ...]:
    """Build the configured defences that change one kind of gradient, in their configured order.

    Args:
        choices: the settings of the run's defences.
        released: the kind of gradient.
        noise: the party's source of noise for defences.
        classes: K, number of classes.
    """
    return tuple(
        DEFENCES[choice.kind](_read_settings(choice), noise=noise, classes=classes)
        for choice in choices
        if released in DEFENCES[choice.kind].protects
    )
