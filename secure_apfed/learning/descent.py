"""Gradient descent of one party: SGD on its modules, and their state for its checkpoint."""

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from secure_apfed.errors import ModelError
from secure_apfed.learning.compute import Compute
from secure_apfed.settings.training import TrainSettings

__all__ = ["Descent", "Trainer", "prefixed", "without_prefix"]


class Descent:
    """SGD with momentum; the L2 terms of Eqs. (6) and (7) are its weight decay.

    Args:
        owner: the party, named when its training diverges.
        modules: what it trains, by name.

    Raises:
        ModelError: they have no parameters.
    """

    def __init__(self, owner: str, modules: Mapping[str, nn.Module], train: TrainSettings) -> None:
        self._owner, self._modules = owner, modules
        self._parameters = [p for module in modules.values() for p in module.parameters()]
        if not self._parameters:
            raise ModelError(
                f"{owner}: its network has no weights that gradients reach; where a method trains "
                "it by steps, choose another model.network, as mlp"
            )
        self._norm_bound = train.max_gradient_norm or math.inf
        self._sgd = torch.optim.SGD(
            self._parameters,
            lr=train.learning_rate,
            momentum=train.momentum,
            weight_decay=train.weight_decay,
        )

    def begin(self) -> None:
        """Forget the gradients of the last step."""
        self._sgd.zero_grad()

    def step(self) -> None:
        """Scale the gradient onto the norm bound, if there is one and it is longer; descend.

        Raises:
            ModelError: the gradient is NaN or infinite; no parameter was changed.
        """
        if math.isfinite(self._norm_bound):
            norm = nn.utils.clip_grad_norm_(self._parameters, self._norm_bound)
            if not bool(norm.isfinite()):
                raise ModelError(
                    f"{self._owner}: training diverged, its gradient is not finite; lower "
                    "train.learning_rate or train.max_gradient_norm"
                )
        self._sgd.step()

    def tensors(self) -> dict[str, Tensor]:
        """Parameters, buffers and momenta by name."""
        states = {name: module.state_dict() for name, module in self._modules.items()}
        momenta = {
            str(index): state["momentum_buffer"]
            for index, state in self._sgd.state_dict()["state"].items()
            if state.get("momentum_buffer") is not None
        }
        return {
            key: value
            for name, state in {**states, "momentum": momenta}.items()
            for key, value in prefixed(name, state).items()
        }

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        for name, module in self._modules.items():
            module.load_state_dict(without_prefix(name, tensors))
        momenta = {
            int(index): {"momentum_buffer": value.clone()}
            for index, value in without_prefix("momentum", tensors).items()
        }
        self._sgd.load_state_dict({**self._sgd.state_dict(), "state": momenta})


class Trainer(Descent):
    """One party's modules through the steps of a run: what the arithmetic of every role builds on.

    Args:
        owner: the party, in errors and in its randomness.
        modules: what it trains, by name; they are moved to where it computes.
        train, compute, seed: how it optimises, where, and with which dropout.
    """

    def __init__(
        self, owner: str, modules: Mapping[str, nn.Module], *,
        train: TrainSettings, compute: Compute, seed: int,
    ) -> None:  # fmt: skip
        for module in modules.values():
            module.to(compute.device, compute.dtype)
        super().__init__(owner, modules, train)
        self.compute, self._seed = compute, seed

    def forward_pass(self, step: int | str) -> AbstractContextManager[None]:
        """Run networks within, with the precision and the dropout of this step."""
        return self.compute.forward(self._seed, self._owner, step)

    def set_training(self, training: bool) -> None:
        """Switch dropout on or off."""
        for module in self._modules.values():
            module.train(training)


def prefixed(name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with `name.` before each of their names."""
    return {f"{name}.{key}": value for key, value in tensors.items()}


def without_prefix(name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of the tensors that `prefixed` put under `name`, by their own names again."""
    prefix = f"{name}."
    return {key.removeprefix(prefix): v for key, v in tensors.items() if key.startswith(prefix)}
