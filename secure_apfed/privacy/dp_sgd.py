"""Private training: noisy sums of clipped gradients, and their privacy cost together with the
releases.

Run by: the active, on the gradients that one batch gives its encoder, head and projection (DP-SGD,
Abadi et al. 2016, Deep Learning with Differential Privacy, Algorithm 1). Protects from: any reader
of results that depend on the parameters: the representations of all later steps, and the finished
model.

Guarantee: replacing one example moves the clipped sum by at most 2C, so that one update is
(2C / sigma)-GDP for each example in it, label included, at fixed parameters. No amplification
by subsampling is claimed: the passives know the batches. Needs: examples that do not enter
each other's gradients, and a key that nobody else has; noise.py says what floating point
costs. The sum and the noise are float64, then rounded to noise.py's grid.

Two ledgers count: one the releases of each row's representation, one the updates that each row
took part in. Both are charged before anything happens, and both ask here whether the budget of
whole training allows it. With T releases and T updates of one record, noise sigma_h on a row
clipped to C and sigma on a sum of gradients clipped to C_theta,

    mu^2 = T (2C / sigma_h)^2 + T (2 C_theta / sigma)^2      for the whole record,
    mu^2 = T (2 C_theta / sigma)^2                           for its label alone,

by adaptive composition of Gaussian DP (Dong, Roth and Su 2022, Corollary 2), replace-one: see
docs/private-training.md.

Per-example gradients come from Opacus' GradSampleModule, whose hooks see the one backward pass
of the active. So the loss of example i, whose gradient is clipped, is

    task loss_i + (B / A) <G_i, z_i>

with G_i the decoded row of the passives' sum, B rows in the batch and A aligned ones: the row
of the passives is in before the clip. Opacus' own optimiser is not used: its noise comes from
torch's generator, or from a package that does not go with this torch. What follows (momentum,
weight decay, the bound on the whole gradient, the learning rate) reads the noisy sum and the
parameters only, so it is post-processing. Memory: one gradient a parameter and example, B P
numbers, of the networks' type.

Letters: A aligned rows of the batch, B examples, D numbers of a representation, P parameters.
"""

import hashlib
import importlib
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from apfed_protocols.errors import LocalProtocolError
from apfed_protocols.randomness import derive_key
from secure_apfed.errors import ConfigError, ModelError
from secure_apfed.privacy.accountants import Mechanism, gdp_epsilon, gdp_mu
from secure_apfed.privacy.guard import ClippedNoise, NoiseKind, RepresentationGuard
from secure_apfed.privacy.ledger import BudgetExhaustedError, PrivacyLedger, PrivacySpent
from secure_apfed.privacy.noise import clip_gradients

__all__ = [
    "GradientGuard",
    "PrivateGradient",
    "PrivateUpdates",
    "WholeTraining",
    "calibrate_updates",
    "sum_clipped_gradients",
]

_PURPOSE = b"secure-apfed dp-sgd v1"
# Relative rounding allowed between a gradient and the mean of its examples' gradients.
_MEAN_TOLERANCE = 1e-3
# Gradient entries that are clipped at a time, which bounds the memory of float64 copies.
_CHUNK_VALUES = 2**23
_ASSUMPTIONS = (
    "replace-one; IDs, alignment, the split, batches, the encoding of features, row numbers and "
    "settings are taken as public; training losses and checkpoints stay with the active"
)
_SEED_CAVEAT = (
    "; and all of it only against somebody who does not know the run's seed, since the noise is "
    "derived from it, and while no step is played twice with other numbers, in this run or another "
    "of that seed"
)


class GradientGuard(ClippedNoise):
    """A guard that clips each example's gradient to norm `clip` and noises the sum.

    The noise is a function of the key, the step, the rows and the clipped sum, or under
    "reproducible_insecure" of key and step alone; see noise.py.

    Args:
        clip: C, the L2 bound of one example's gradient over all parameters together.
        noise_multiplier: sigma / C as Opacus counts it, with sigma the standard deviation of the
            noise on each number of the sum.
        key: 32 secret bytes, the party's noise key.
        noise: "secret", or "reproducible_insecure", which simulations use.

    Raises:
        ConfigError: clip or noise multiplier out of range.
        LocalProtocolError: a key of the wrong length.
    """

    def __init__(
        self, *, clip: float, noise_multiplier: float, key: bytes, noise: NoiseKind = "secret"
    ) -> None:
        """Check the noise multiplier, and derive a key that serves gradient noise only."""
        if not (math.isfinite(noise_multiplier) and noise_multiplier > 0):
            raise ConfigError(
                f"a noise multiplier is a positive number, got {noise_multiplier}; leave dp_sgd "
                "out for training without noise"
            )
        super().__init__(clip, noise_multiplier * clip, derive_key(key, _PURPOSE), noise)

    def release(self, example_gradients: Sequence[Tensor], *, step: int, rows: Tensor) -> Tensor:
        """Return the noisy sum over B examples of their clipped gradients.

        The sum has the P numbers of all parameters one after another: (P,) float64 on the CPU.

        Args:
            example_gradients: per-example gradients (B, *shape) of each parameter, a tensor of this
                shape.
            step: number of the run's step, from 0; noise is bound to it.
            rows: the examples' distinct positions in the table, int64 of shape (B,).

        Raises:
            LocalProtocolError: arguments of a wrong type or shape.
        """
        if rows.dtype != torch.int64 or rows.ndim != 1 or len(rows.unique()) < len(rows):
            raise LocalProtocolError(
                "rows name the examples by different int64 positions, "
                f"got {rows.dtype} of shape {tuple(rows.shape)}"
            )
        shapes = [tuple(part.shape) for part in example_gradients]
        if not example_gradients or any(
            len(shape) < 2 or shape[0] != len(rows) for shape in shapes
        ):
            raise LocalProtocolError(
                f"every parameter needs one gradient for each of {len(rows)} examples, got {shapes}"
            )
        if step < 0:
            raise LocalProtocolError(f"a step counts from 0, got {step}")
        total_P = sum_clipped_gradients(example_gradients, self.clip).numpy()
        return torch.from_numpy(self._noise.add_noise(total_P, self.sigma, step=step, rows=rows))


def sum_clipped_gradients(example_gradients: Sequence[Tensor], clip: float) -> Tensor:
    """Return the sum over examples of their gradients, each scaled to norm `clip` if longer.

    The norm is that of an example's gradients of all parameters together. Guarantee: one example
    adds a vector with a norm of at most `clip`, for any numbers. An example whose gradient is not
    finite adds nothing: an error would reveal that example.

    `example_gradients`: per-example gradients (B, *shape) of each parameter, for B examples.
    Returns the P numbers of all parameters one after another, (P,) float64 on the CPU.
    """
    size = sum(math.prod(part.shape[1:]) for part in example_gradients)
    total_P = torch.zeros(size, dtype=torch.float64, device=example_gradients[0].device)
    # A few examples at a time, which bounds the memory of float64 copies.
    chunk_rows = max(1, _CHUNK_VALUES // max(1, size))
    for start in range(0, len(example_gradients[0]), chunk_rows):
        chunk = [part[start : start + chunk_rows].flatten(1).double() for part in example_gradients]
        total_P += clip_gradients(torch.cat(chunk, dim=1), clip).sum(dim=0)
    return total_P.cpu()


@dataclass(frozen=True)
class PrivateUpdates:
    """A party's gradient guard (DP-SGD), and the ledger of its private updates."""

    guard: GradientGuard
    ledger: PrivacyLedger


class PrivateGradient:
    """A replacement of a party's gradients by clipped and noisy ones (DP-SGD).

    Opacus' hooks on the modules store each example's gradient in a backward pass. `backward` then
    sets the parameters' gradients to what the guard releases.

    Args:
        owner: the party, for errors.
        modules: the party's networks by role, such as encoder and head.
        private_updates: the guard and the ledger, which counts rows of the party's table.

    Raises:
        ModelError: a layer whose per-example gradients cannot be computed, in Opacus' words.
    """

    def __init__(
        self, owner: str, modules: Mapping[str, nn.Module], private_updates: PrivateUpdates
    ) -> None:
        """Register Opacus' hooks, which compute per-example gradients in each backward pass."""
        self._owner = owner
        self._private_updates = private_updates
        model = nn.ModuleDict(dict(modules))
        _require_no_mixing_layers(owner, model)
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._layers = list(model.modules())
        # Imported late, since Opacus takes seconds to load.
        wrapper = importlib.import_module("opacus.grad_sample").GradSampleModule
        # The wrapper is kept for its hooks on the layers; the party goes on calling the modules.
        self._opacus_wrapper = wrapper(model, loss_reduction="mean")
        self._has_checked_gradients = False  # whether the first backward pass was checked

    def forget_batch(self) -> None:
        """Discard all that Opacus stored for the last batch, also if it had no backward pass.

        Otherwise the next backward pass would add to it.
        """
        self._opacus_wrapper.set_grad_sample_to_none()
        for layer in self._layers:
            for attribute in ("activations", "max_batch_len"):
                if hasattr(layer, attribute):
                    delattr(layer, attribute)
        for parameter in self._parameters:
            parameter._forward_counter = 0  # type: ignore[attr-defined]  # Opacus' own

    def zero_nonfinite_rows(self, h_BD: Tensor) -> Tensor:
        """Return representations (B, D) with zeros in every row that is not finite.

        An error for one row would reveal this record to all parties. An error about parameters
        reveals nothing, since they are private already (post-processing of noisy sums).

        Raises ModelError: a parameter is not finite.
        """
        if not all(bool(p.isfinite().all()) for p in self._parameters):
            raise ModelError(
                f"{self._owner}: training diverged, its parameters are not finite; lower "
                "train.learning_rate, or set train.max_gradient_norm"
            )
        finite_B1 = h_BD.detach().isfinite().all(dim=1, keepdim=True)
        return torch.where(finite_B1, h_BD, 0.0)

    def backward(self, loss: Tensor, *, step: int, rows: Tensor) -> None:
        """Compute a loss's gradients; replace them by the noisy mean of the clipped ones.

        The ledger is charged (it records the privacy cost) before the gradients are set. The noisy
        sum is drawn before the charge, since the ledger identifies it by its digest. A refused
        charge discards it together with all gradients, so that nothing can be applied.

        Args:
            loss: a mean over the batch. Parameters that it does not use get no gradient.
            step: number of the run's step, for noise and ledger.
            rows: the batch's positions in the party's own table, int64 of shape (B,).

        Raises:
            BudgetExhaustedError: the update would exceed the budget; parameters and counts are
                unchanged, and no parameter has a gradient.
        """
        with warnings.catch_warnings():
            # The first layer's input, the features, rightly needs no gradient.
            warnings.filterwarnings("ignore", "Full backward hook is firing", UserWarning)
            loss.backward()
        example_gradients_by_parameter = {
            p: sample for p in self._parameters if (sample := _get_grad_samples(p)) is not None
        }
        if not self._has_checked_gradients:
            self._require_whole_gradients(example_gradients_by_parameter)
            self._has_checked_gradients = True
        # From here on no gradient without noise is left, whether the charge is refused or not.
        for parameter in self._parameters:
            parameter.grad = None
        self.forget_batch()
        example_gradients = list(example_gradients_by_parameter.values())
        noisy_P = self._private_updates.guard.release(example_gradients, step=step, rows=rows)
        digest = hashlib.sha256(noisy_P.numpy().tobytes()).digest()
        self._private_updates.ledger.charge(step=step, rows=rows, digest=digest)
        noisy_mean_P = noisy_P / len(rows)
        gradients = noisy_mean_P.split([p.numel() for p in example_gradients_by_parameter])
        for parameter, flat_gradient in zip(example_gradients_by_parameter, gradients, strict=True):
            parameter.grad = flat_gradient.reshape(parameter.shape).to(
                parameter.device, parameter.dtype
            )

    def _require_whole_gradients(
        self, example_gradients_by_parameter: Mapping[nn.Parameter, Tensor]
    ) -> None:
        """Refuse parameters whose per-example gradients do not add up to their gradient.

        Opacus' hooks miss weights that are used outside their layer's forward, and layers that two
        modules share. The noisy gradient would still be private, but wrong. The error reveals
        nothing of an example: it tells only how many weights are used so.

        `example_gradients_by_parameter`: per-example gradients (B, *shape) by parameter.

        Raises ModelError: a parameter has a gradient, and other or no per-example gradients.
        """
        incomplete = [
            p
            for p, sample_B in example_gradients_by_parameter.items()
            if not _is_mean_of(p.grad, sample_B)
        ]
        missing = [
            p
            for p in self._parameters
            if p.grad is not None and p not in example_gradients_by_parameter
        ]
        if incomplete or missing:
            raise ModelError(
                f"{self._owner}: dp_sgd cannot clip each example's gradient of "
                f"{len(incomplete) + len(missing)} weights: they are read past their layer (as by "
                "x @ layer.weight), or one layer stands in two modules; share a weight between two "
                "layers instead (as second.weight = first.weight), or leave dp_sgd out"
            )


def _is_mean_of(gradient: Tensor | None, sample_B: Tensor) -> bool:
    """Return whether a parameter's gradient equals the mean of its per-example gradients.

    Rounding errors are allowed. False if the gradient is None.

    `sample_B`: the per-example gradients, (B, *shape).
    """
    if gradient is None:
        return False
    mean = sample_B.double().mean(0)
    largest = max(float(sample_B.abs().max()), float(gradient.abs().max()))
    differs = (mean - gradient.double()).abs() > _MEAN_TOLERANCE * largest
    return not bool(differs.any())


def _get_grad_samples(parameter: nn.Parameter) -> Tensor | None:
    """Return the per-example gradients (B, *shape) that Opacus stored; None: it has none."""
    samples: Tensor | None = parameter.grad_sample  # type: ignore[attr-defined]  # Opacus' own
    return samples


def _require_no_mixing_layers(owner: str, model: nn.Module) -> None:
    """Refuse networks in which one example may change another one's gradient.

    Those are networks with a layer that Opacus' validators reject, or with buffers. Opacus itself
    does not validate layers without parameters; a batch normalisation without parameters still
    mixes examples, so here all layers are validated.

    `owner`: the party, for errors.

    Raises ModelError: names each reason.
    """
    validators = importlib.import_module("opacus.validators").ModuleValidator.VALIDATORS
    obstacles: set[str] = set()
    for layer in model.modules():
        for layer_type, validate in validators.items():
            if isinstance(layer, layer_type):
                obstacles.update(str(error) for error in validate(layer))
    buffers = sorted(name for name, _ in model.named_buffers())
    if buffers:
        obstacles.add(
            f"it keeps {', '.join(buffers)}, which may carry one example into another's result"
        )
    if obstacles:
        raise ModelError(
            f"{owner}: dp_sgd cannot clip each example's gradient in these networks: "
            f"{'; '.join(sorted(obstacles))}. Choose another model.network, or leave dp_sgd out"
        )


class WholeTraining:
    """A common privacy budget of the releases and the updates of the same records.

    The record with most releases is taken to be also the one with most updates.

    Args:
        releases: the ledger of released representations.
        updates: the ledger of private updates.
        delta: the delta of epsilon_model (one whole record) and epsilon_y (one label).
        budget: the largest epsilon_model; None never stops.
        is_reproducible: whether noise is derived from the run's seed, as in simulations; the
            described guarantee then says so.
    """

    def __init__(
        self,
        *,
        releases: PrivacyLedger,
        updates: PrivacyLedger,
        delta: float,
        budget: float | None,
        is_reproducible: bool = False,
    ) -> None:
        """Register the check of the common budget with both ledgers, before each charge."""
        self._assumptions = _ASSUMPTIONS + (_SEED_CAVEAT if is_reproducible else "")
        self._release_ledger = releases
        self.updates = updates
        self._delta = delta
        self._budget = budget
        for ledger in (releases, updates):
            ledger.check_before_charging(self._check_budget)

    @property
    def mu(self) -> float:
        """The mu of Gaussian DP of all releases and updates so far, for one record.

        Squares of mu add up under composition.
        """
        return math.hypot(
            self._release_ledger.get_privacy_spent().mu, self.updates.get_privacy_spent().mu
        )

    @property
    def epsilon_model(self) -> float:
        """The epsilon of one record, for all that passives receive and the finished model."""
        return gdp_epsilon(self.mu, self._delta)

    @property
    def epsilon_y(self) -> float:
        """The epsilon of one label, for all that passives receive and the finished model.

        The record's features are unchanged. Only updates count: a released representation is
        computed from features, not from the label.
        """
        return gdp_epsilon(self.updates.get_privacy_spent().mu, self._delta)

    def add_training_cost(self, spent: PrivacySpent) -> PrivacySpent:
        """Return the cost of the releases, `spent`, completed by the cost of the updates.

        Added are epsilon_y (one label), epsilon_model (one record), and lines of the derivation.
        """
        updates = self.updates.get_privacy_spent()
        lines = (
            f"updates: {updates.releases} of one record at most, mu {updates.mu:.4g} together",
            f"labels, by the updates alone: epsilon_y {self.epsilon_y:.4g}",
            f"record, by both: mu {self.mu:.4g}, epsilon_model {self.epsilon_model:.4g}",
        )
        return replace(
            spent,
            epsilon_y=min(spent.epsilon_y, self.epsilon_y),
            epsilon_model=self.epsilon_model,
            trace=(*spent.trace, *lines),
        )

    def describe_guarantee(self, guard: RepresentationGuard | None) -> str:
        """Return the guarantee in words, for the report.

        `guard`: the guard of the released representations; None: the run sends none.
        """
        if guard is None:
            return (
                "private training: the finished model is (epsilon_model, delta)-DP for one record, "
                f"its label included; nothing is sent; {self._assumptions}"
            )
        if guard.unsafe:
            return (
                "private training covers labels alone: what the passives receive and the finished "
                "model together are (epsilon_y, delta)-DP for one label; no guarantee for "
                f"features: representations are sent as they are; {self._assumptions}"
            )
        return (
            "private training: what all passives receive and the finished model together are "
            "(epsilon_model, delta)-DP for one record, and (epsilon_y, delta)-DP for its label; "
            f"epsilon_x is its part by releases alone ({guard.describe_guarantee()}); "
            f"{self._assumptions}"
        )

    def _check_budget(self, ledger: PrivacyLedger, *, mu: float, step: int) -> None:
        """Raise BudgetExhaustedError if a ledger's next charge would exceed the common budget.

        Each of the two ledgers calls it before a charge.

        Args:
            ledger: the ledger that is about to record a release or update.
            mu: Gaussian DP parameter of all of the ledger's charges, the new one included.
            step: number of the run's step, for the message.
        """
        if self._budget is None:
            return
        other_ledger = self.updates if ledger is self._release_ledger else self._release_ledger
        epsilon = gdp_epsilon(math.hypot(mu, other_ledger.get_privacy_spent().mu), self._delta)
        if epsilon > self._budget:
            raise BudgetExhaustedError(
                f"step {step} was not played: with it, training would cost one record epsilon "
                f"{epsilon:.4g}, the budget (dp_sgd.epsilon) is {self._budget:.4g} at delta "
                f"{self._delta:g}; stop here, or begin a run with more noise or fewer epochs"
            )


def calibrate_updates(
    epsilon: float, delta: float, *, release: Mechanism, releases: int, updates: int
) -> float:
    """Return the noise multiplier of the updates with which training is (epsilon, delta)-DP.

    It is sigma / C, the standard deviation of the noise on a summed gradient over its clip. Costs
    of releases and updates of one record count together.

    Args:
        epsilon, delta: the privacy budget of one record.
        release: the mechanism of one release of a row.
        releases, updates: planned number of each for one record.

    Raises:
        ConfigError: the releases alone cost as much or more.
    """
    if releases < 0 or updates < 1:
        raise ConfigError(
            f"calibration needs at least 1 planned update, got {updates}, and {releases} releases"
        )
    # Squares of mu add up over releases and updates.
    allowed_mu_squared = gdp_mu(epsilon, delta) ** 2
    # Without releases nothing is spent, even if a release's mu is infinite.
    spent_mu_squared = releases * release.mu**2 if releases else 0.0
    if spent_mu_squared >= allowed_mu_squared:
        raise ConfigError(
            f"dp_sgd.epsilon: the guard's {releases} releases of a row alone cost epsilon "
            f"{gdp_epsilon(math.sqrt(spent_mu_squared), delta):.4g}, so none of {epsilon:g} is "
            "left for the updates; give the guard more noise (a smaller guard.epsilon), or dp_sgd "
            "more"
        )
    # Each update has mu = 2 C / sigma, so updates (2 C / sigma)^2 = allowed - spent.
    return 2 * math.sqrt(updates / (allowed_mu_squared - spent_mu_squared))
