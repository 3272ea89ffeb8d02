"""Gradient descent of one party on its modules, and their state for its checkpoint."""

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from secure_apfed.errors import ModelError
from secure_apfed.learning.compute import Compute
from secure_apfed.settings.training import TrainSettings

__all__ = [
    "Descent", "Trainer", "make_optimizer", "prefixed", "rate_after", "take_rate", "without_prefix",
]  # fmt: skip

_MOMENTS, _DONE = "moments", "steps done"


def _sgd(parameters: list[Tensor], train: TrainSettings) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        parameters,
        lr=train.learning_rate,
        momentum=train.momentum,
        weight_decay=train.weight_decay,
    )


def _adam(parameters: list[Tensor], train: TrainSettings) -> torch.optim.Optimizer:
    return torch.optim.Adam(
        parameters, lr=train.learning_rate, weight_decay=train.weight_decay, fused=True
    )


def _adamw(parameters: list[Tensor], train: TrainSettings) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        parameters, lr=train.learning_rate, weight_decay=train.weight_decay, fused=True
    )


_OPTIMIZERS = {"sgd": _sgd, "adam": _adam, "adamw": _adamw}


def make_optimizer(parameters: list[Tensor], train: TrainSettings) -> torch.optim.Optimizer:
    """The optimizer that the settings name, over these leaves."""
    return _OPTIMIZERS[train.optimizer](parameters, train)


def rate_after(train: TrainSettings, done: int) -> float:
    """The learning rate of a party's next step, after so many of its own."""
    warm, rate = train.warmup_steps, train.learning_rate
    if done < warm:
        return rate * (done + 1) / warm
    if train.schedule_steps is None:
        return rate
    passed = min(1.0, (done - warm) / (train.schedule_steps - warm))
    return rate * (1 + math.cos(math.pi * passed)) / 2


def take_rate(optimizer: torch.optim.Optimizer, train: TrainSettings, done: int) -> None:
    """Let the next step of an optimizer, after `done` others, have its learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate_after(train, done)


class Descent:
    """One of the optimizers; the L2 terms of Eqs. (6) and (7) are its weight decay.

    Args:
        owner: the party, named when its training diverges.
        modules: what it trains, by name.

    Raises:
        ModelError: they have no parameters.
    """

    def __init__(self, owner: str, modules: Mapping[str, nn.Module], train: TrainSettings) -> None:
        self._owner, self._modules = owner, modules
        self._parameters: list[Tensor] = [
            p for module in modules.values() for p in module.parameters()
        ]
        if not self._parameters:
            raise ModelError(
                f"{owner}: its network has no weights that gradients reach; where a method trains "
                "it by steps, choose another model.network, as mlp"
            )
        self._norm_bound = train.max_gradient_norm or math.inf
        self._optimizer = make_optimizer(self._parameters, train)
        self._train, self._done = train, 0

    def begin(self) -> None:
        """Forget the gradients of the last step."""
        for one in self._parameters:
            one.grad = None

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
        take_rate(self._optimizer, self._train, self._done)
        self._optimizer.step()
        self._done += 1

    def tensors(self) -> dict[str, Tensor]:
        """Parameters, buffers and the optimizer's moments by name, and how many steps it took."""
        states = {name: module.state_dict() for name, module in self._modules.items()}
        moments = {
            f"{index}.{name}": value
            for index, state in self._optimizer.state_dict()["state"].items()
            for name, value in state.items()
            if value is not None
        }
        return {
            key: value
            for name, state in {**states, _MOMENTS: moments}.items()
            for key, value in prefixed(name, state).items()
        } | {_DONE: torch.tensor(self._done)}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        for name, module in self._modules.items():
            module.load_state_dict(without_prefix(name, tensors))
        self._done = int(tensors[_DONE])
        moments: dict[int, dict[str, Tensor]] = {}
        for key, value in without_prefix(_MOMENTS, tensors).items():
            index, _, name = key.partition(".")
            moments.setdefault(int(index), {})[name] = value.clone()
        self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": moments})


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
