"""DP-SGD at the active: the gradient of a batch, replaced by its private sum.

Run by: the active, in its one backward pass. Against: whoever reads anything
that its parameters move, see privacy/dp_sgd.py. Everything after it (momentum, weight
decay, the bound on the whole gradient, the learning rate) reads the noisy sum and the
parameters only, so it is post-processing.

Per-example gradients come from Opacus' GradSampleModule, whose hooks see the one backward pass
of the active. So the loss of example i, whose gradient is clipped, is

    task loss_i + (B / A) <G_i, z_i>

with G_i the decoded row of the passives' sum, B rows in the batch and A aligned ones: the row
of the passives is in before the clip. Opacus' own optimiser is not used: its noise comes from
torch's generator, or from a package that does not go with this torch. Ours is that of
privacy/noise.py.

Memory: one gradient a parameter and example, B P numbers, of the networks' type.

Letters: A aligned rows of the batch, B rows, P parameters.
"""

import hashlib
import importlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from secure_apfed.errors import ModelError
from secure_apfed.privacy.dp_sgd import GradientGuard
from secure_apfed.privacy.ledger import PrivacyLedger

__all__ = ["PrivateGradient", "PrivateUpdates"]


@dataclass(frozen=True)
class PrivateUpdates:
    """What makes a party's updates private, and the account of them."""

    guard: GradientGuard
    ledger: PrivacyLedger


class PrivateGradient:
    """Watches the modules' forward and backward passes and replaces their gradient. `private`: the
    guard and the ledger; the ledger counts rows of the party's table. Raises ModelError: a module
    whose examples cannot be told apart, in the words of Opacus.
    """

    def __init__(
        self, owner: str, modules: Mapping[str, nn.Module], private: PrivateUpdates
    ) -> None:
        self._owner, self._private = owner, private
        every = nn.ModuleDict(dict(modules))
        _refuse_what_mixes_examples(owner, every)
        self._parameters = [p for p in every.parameters() if p.requires_grad]
        self._layers = list(every.modules())
        # Late, as in privacy/accountants.py: Opacus takes seconds to load.
        wrapper = importlib.import_module("opacus.grad_sample").GradSampleModule
        # Its hooks hang on the layers, which the party goes on calling as before.
        self._hooks = wrapper(every, loss_reduction="mean")

    def forget(self) -> None:
        """Forget the last batch, also one whose backward pass never came."""
        self._hooks.set_grad_sample_to_none()
        for layer in self._layers:
            for left in ("activations", "max_batch_len"):
                if hasattr(layer, left):
                    delattr(layer, left)
        for parameter in self._parameters:
            parameter._forward_counter = 0  # type: ignore[attr-defined]  # Opacus' own

    def finite_rows(self, h_BD: Tensor) -> Tensor:
        """Return flat representations with zeros for every row that is not finite.

        An error would tell everybody of that one record. Parameters are private already, so that an
        error may tell of them. Raises ModelError: parameters that are not finite.
        """
        if not all(bool(p.isfinite().all()) for p in self._parameters):
            raise ModelError(
                f"{self._owner}: training diverged, its parameters are not finite; lower "
                "train.learning_rate, or set train.max_gradient_norm"
            )
        finite_B1 = h_BD.detach().isfinite().all(dim=1, keepdim=True)
        return torch.where(finite_B1, h_BD, 0.0)

    def backward(self, loss: Tensor, *, step: int, rows: Tensor) -> None:
        """Give the parameters the noisy mean gradient of a batch; charge the ledger before.

        Parameters that took no part in the batch get no gradient.

        Args:
            loss: of the batch, a mean over its examples.
            rows: of the batch, positions in the party's own table, (B,).

        Raises:
            BudgetExhaustedError: the update would exceed the budget; nothing was changed.
        """
        with warnings.catch_warnings():
            # The first layer's input, the features, rightly needs no gradient.
            warnings.filterwarnings("ignore", "Full backward hook is firing", UserWarning)
            loss.backward()
        samples = {p: sample for p in self._parameters if (sample := _samples(p)) is not None}
        noisy_P = self._private.guard.release([*samples.values()], step=step, rows=rows)
        digest = hashlib.sha256(noisy_P.numpy().tobytes()).digest()
        self._private.ledger.charge(step=step, rows=rows, digest=digest)
        parts = (noisy_P / len(rows)).split([p.numel() for p in samples])
        for parameter, part in zip(samples, parts, strict=True):
            parameter.grad = part.reshape(parameter.shape).to(parameter.device, parameter.dtype)
        self.forget()


def _samples(parameter: nn.Parameter) -> Tensor | None:
    samples: Tensor | None = parameter.grad_sample  # type: ignore[attr-defined]  # Opacus' own
    return samples


def _refuse_what_mixes_examples(owner: str, every: nn.Module) -> None:
    """Ask Opacus' validators about every layer: its own walk leaves out those without parameters.

    A batch normalisation without parameters still mixes examples.
    """
    validators = importlib.import_module("opacus.validators").ModuleValidator.VALIDATORS
    found = {
        str(error)
        for layer in every.modules()
        for kind, validate in validators.items()
        if isinstance(layer, kind)
        for error in validate(layer)
    }
    held = sorted(name for name, _ in every.named_buffers())
    if held:
        found.add(f"it keeps {', '.join(held)}, which may carry one example into another's result")
    if found:
        raise ModelError(
            f"{owner}: dp_sgd cannot clip each example's gradient in these networks: "
            f"{'; '.join(sorted(found))}. Choose another model.network, or leave dp_sgd out"
        )
