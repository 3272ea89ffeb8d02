"""What one party trains: its networks, where and how precisely it computes, and how it descends.

`ActiveNetworks` is the active's model, whatever method trains it; `Compute` the device, precision
and dropout of a step; `Trainer` a party's modules through the steps of a run, with their state for
its checkpoint. Letters: B batch, A of its rows that are sent, K classes, D numbers of a row.
"""

import copy
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from secure_apfed.base.seeds import draws_nothing, may_draw, seed_draws
from secure_apfed.base.transfers import fetch_tensors, send_tensor
from secure_apfed.errors import ConfigError, ModelError
from secure_apfed.settings.training import DEVICE, TrainSettings

EVERY = slice(None)
"""All rows of a batch."""
OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)
MakeOptimizer: TypeAlias = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
"""Makes a party's own optimizer of the parameters that it trains."""
_MOMENTS = "moments"
_DONE = "steps done"
_LEAST_NORM = 1e-6


def find_device(choice: str) -> torch.device:
    """Return the device of "auto" (a GPU if there is one), "cpu", "cuda", or one GPU as "cuda:1".

    Raises ConfigError: another choice, or a GPU that torch does not find.
    """
    if not DEVICE.fullmatch(choice):
        raise ConfigError(f"device: expected auto, cpu, cuda or one GPU, as cuda:1; got {choice!r}")
    if choice == "auto":
        choice = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(choice)
    if device.type == "cuda":
        # Query the driver, not CUDA: this process may still be forked.
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= gpus:
            seen = f"sees {gpus} GPU(s), counted from cuda:0" if gpus else "sees no GPU"
            raise ConfigError(f"device: {choice} was asked for, but torch {seen}; say auto or cpu")
    return device


@dataclass(frozen=True)
class Compute:
    """The device and precision of a party's computation.

    `dtype` is also that of sent tensors. `autocast` runs the networks' forward passes in bfloat16.
    """

    device: torch.device
    dtype: torch.dtype = torch.float32
    autocast: bool = False

    @classmethod
    def from_settings(cls, train: TrainSettings) -> "Compute":
        """Return the configured device and precision; "auto" takes a GPU if there is one.

        Raises ConfigError: a GPU is configured and there is none.
        """
        dtype = torch.float64 if train.precision == "float64" else torch.float32
        return cls(find_device(train.device), dtype, train.precision == "bfloat16")

    def move_tensor(self, values: Tensor) -> Tensor:
        """Move a table to the device; floating-point values also get the dtype."""
        return values.to(self.device, self.dtype if values.is_floating_point() else None)

    def move_batch(self, values: Tensor) -> Tensor:
        """Move what one step needs, without waiting for the device; see `move_tensor`."""
        return send_tensor(values, self.device, self.dtype if values.is_floating_point() else None)

    def fetch_batch(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Return these tensors in this machine's memory, for one wait; outside of autograd."""
        return fetch_tensors(*values)

    def take_rows(self, features_N: Any, rows_B: Tensor) -> Tensor:
        """Return these rows of a table on the device, (B, *shape).

        A table is on the device as a whole; `LazyRows` are read for these positions now.
        """
        lies_there = isinstance(features_N, Tensor)
        picked_B: Tensor = features_N[self.move_batch(rows_B) if lies_there else rows_B]
        return picked_B

    @contextmanager
    def prepare_forward(self, seed: int | None, *purpose: str | int) -> Iterator[None]:
        """Run the block's networks with the configured precision and reproducible dropout.

        `seed`: with `purpose`, of the random numbers; None: the networks draw none.
        """
        with nullcontext() if seed is None else seed_draws(seed, *purpose), self._set_precision():
            yield

    def _set_precision(self) -> AbstractContextManager[object]:
        """Return a context that switches autocast on or off.

        It does nothing where autocast is off already, since entering it takes as long as a small
        layer.
        """
        kind = self.device.type
        if not self.autocast and not torch.is_autocast_enabled(kind):
            return nullcontext()
        return torch.autocast(kind, torch.bfloat16, enabled=self.autocast)


@draws_nothing
class ActiveNetworks(nn.Module):
    """The networks f (encoder), g (head), and the projection that is sent (None: the encoder's
    output).
    """

    def __init__(
        self, encoder: nn.Module, head: nn.Module, projection: nn.Module | None = None
    ) -> None:
        """Register encoder, head and projection as submodules."""
        super().__init__()
        self.encoder = encoder
        self.head = head
        self.projection = projection

    def forward(
        self, features_B: Tensor, sent: Tensor | slice | None = EVERY
    ) -> tuple[Tensor, Tensor | None]:
        """Return class scores (B, K), and the representations of the rows `sent`; None for none.

        A representation may be a large map, so rows are selected after the projection.
        """
        h_B = self.encoder(features_B)
        scores_BK = self.head(h_B)
        if sent is None:
            return scores_BK, None
        projected_B = h_B if self.projection is None else self.projection(h_B)
        return scores_BK, projected_B[sent]


def predictor_of(networks: ActiveNetworks | None) -> nn.Module | None:
    """Return a CPU copy of the network that predicts, features -> class scores; None for None."""
    if networks is None:
        return None
    return copy.deepcopy(nn.Sequential(networks.encoder, networks.head)).cpu().eval()


def make_eager_class(kind: type[OptimizerT]) -> type[OptimizerT]:
    """Return the optimiser class without torch's compiler, which takes a second to load.

    It cannot be pickled, nor used with `differentiable`. Its steps call no hooks, which take half
    the time of a small step.
    """
    minded = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")
    plain = {name: inspect.unwrap(getattr(kind, name)) for name in minded}
    step = torch.no_grad()(inspect.unwrap(kind.step))
    vars(step)["hooked"] = True  # as torch marks a step that it has wrapped
    return type(kind.__name__, (kind,), {**plain, "step": step})


_OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(make_eager_class(torch.optim.SGD), foreach=True),
    "adam": partial(make_eager_class(torch.optim.Adam), fused=True),
    "adamw": partial(make_eager_class(torch.optim.AdamW), fused=True),
}


def rate_after(train: TrainSettings, done: int) -> float:
    """Return the learning rate of a party's next step, after `done` steps."""
    warm = train.warmup_steps
    rate = train.learning_rate
    if done < warm:
        return rate * (done + 1) / warm
    if train.schedule_steps is None:
        return rate
    passed = min(1.0, (done - warm) / (train.schedule_steps - warm))
    return rate * (1 + math.cos(math.pi * passed)) / 2


class Descent:
    """One of the optimizers; the L2 terms of Eqs. (6) and (7) are its weight decay. Or the party's
    own optimizer, which keeps its own rates. `may_be_fixed`: there may be nothing to train, as in a
    loss without weights.

    Raises:
        ModelError: the modules have no parameters.
    """

    def __init__(
        self,
        owner: str,
        modules: Mapping[str, nn.Module],
        train: TrainSettings,
        optimizer: MakeOptimizer | None = None,
        *,
        may_be_fixed: bool = False,
    ) -> None:
        """Collect the parameters, each once, and build the configured or the
        party's own optimiser.
        """
        self._owner = owner
        self._modules = modules
        # A module may hold another's parameters: each is trained once.
        trained = {
            id(parameter): parameter
            for module in modules.values()
            for parameter in module.parameters()
        }
        self._parameters = list(trained.values())
        if not self._parameters and not may_be_fixed:
            raise ModelError(
                f"{owner}: its network has no weights that gradients reach; where a method trains "
                "it by steps, choose another model.network, as mlp"
            )
        self._norm_bound = train.max_gradient_norm or math.inf
        self._train = train
        self._done = 0
        self._rates_are_own = optimizer is not None
        self._optimizer: torch.optim.Optimizer | None = None
        if not self._parameters:
            return
        if optimizer is not None:
            self._optimizer = _make_own_optimizer(optimizer, self._parameters, owner=owner)
            return
        momentum = {"momentum": train.momentum} if train.optimizer == "sgd" else {}
        self._optimizer = _OPTIMIZERS[train.optimizer](
            self._parameters, lr=train.learning_rate, weight_decay=train.weight_decay, **momentum
        )

    def zero_grad(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def step(self) -> None:
        """Clip the gradient's norm, if a bound is set, and update the parameters.

        Raises ModelError: the gradient is NaN or infinite; no parameter was changed.
        """
        if math.isfinite(self._norm_bound):
            norm = self._clip_gradient()
            if not math.isfinite(norm):
                raise ModelError(
                    f"{self._owner}: training diverged, its gradient is not finite; lower "
                    "train.learning_rate or train.max_gradient_norm"
                )
        self._done += 1
        if self._optimizer is None:
            return
        if not self._rates_are_own:
            for group in self._optimizer.param_groups:
                group["lr"] = rate_after(self._train, self._done - 1)
        self._optimizer.step()

    @torch.no_grad()
    def _clip_gradient(self) -> float:
        """Scale the gradient to the norm bound if it is longer; return its norm before.

        The operations equal torch.nn.utils.clip_grad_norm_, which for a small network spends most
        of its time on sorting tensors by device.
        """
        gradients = [weight.grad for weight in self._parameters if weight.grad is not None]
        if not gradients:
            return 0.0
        norms = [gradient.norm() for gradient in gradients]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        share = (self._norm_bound / (norm + _LEAST_NORM)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(share)
        return float(norm)

    def tensors(self) -> dict[str, Tensor]:
        """Return parameters, buffers and the optimiser's moments by name, and the number of steps
        taken.
        """
        states = {name: module.state_dict() for name, module in self._modules.items()}
        stepped = self._optimizer.state_dict()["state"] if self._optimizer else {}
        moments = {
            f"{index}.{name}": value
            for index, state in stepped.items()
            for name, value in state.items()
            if value is not None
        }
        return {
            key: value
            for name, state in {**states, _MOMENTS: moments}.items()
            for key, value in add_prefix(name, state).items()
        } | {_DONE: torch.tensor(self._done)}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the state that `tensors` returned."""
        for name, module in self._modules.items():
            module.load_state_dict(remove_prefix(name, tensors))
        self._done = int(tensors[_DONE])
        moments: dict[int, dict[str, Tensor]] = {}
        for key, value in remove_prefix(_MOMENTS, tensors).items():
            index, _, name = key.partition(".")
            moments.setdefault(int(index), {})[name] = value.clone()
        if self._optimizer is not None:
            self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": moments})


def _make_own_optimizer(
    make: MakeOptimizer, parameters: list[nn.Parameter], *, owner: str
) -> torch.optim.Optimizer:
    """Return the party's own optimiser, which must be of exactly these parameters.

    Raises ConfigError: the function returns something else, or it optimises other parameters.
    """
    optimizer = make(parameters)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"{owner}: its optimizer is a function of the parameters that makes a "
            f"torch.optim.Optimizer, as torch.optim.AdamW; got {type(optimizer).__name__}"
        )
    given_to_optimizer = {
        id(parameter) for group in optimizer.param_groups for parameter in group["params"]
    }
    if given_to_optimizer != {id(parameter) for parameter in parameters}:
        raise ConfigError(
            f"{owner}: its optimizer holds other parameters than the {len(parameters)} that this "
            "party trains; make it of the parameters that it is called with"
        )
    return optimizer


class Trainer(Descent):
    """The base of trainers: one party's modules and optimiser, trained step by step.

    Attributes:
        forward_pass: runs networks within, with the precision and the dropout of the given step.
    """

    def __init__(
        self,
        owner: str,
        modules: Mapping[str, nn.Module],
        *,
        train: TrainSettings,
        seed: int,
        optimizer: MakeOptimizer | None = None,
        may_be_fixed: bool = False,
    ) -> None:
        """Move the modules to the configured device and precision, and build the optimiser."""
        compute = Compute.from_settings(train)
        for module in modules.values():
            module.to(compute.device, compute.dtype)
        super().__init__(owner, modules, train, optimizer, may_be_fixed=may_be_fixed)
        self.compute = compute
        self._seed = seed
        draws = any(map(may_draw, modules.values()))
        self.forward_pass = partial(compute.prepare_forward, seed if draws else None, owner)

    def set_training(self, training: bool) -> None:
        for module in self._modules.values():
            module.train(training)

    @contextmanager
    def evaluation_mode(self) -> Iterator[None]:
        """Run the block's networks without dropout."""
        self.set_training(False)
        try:
            yield
        finally:
            self.set_training(True)


def add_prefix(name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with `name.` before each of their names; unchanged under an empty name."""
    return {f"{name}.{key}" if name else key: value for key, value in tensors.items()}


def remove_prefix(name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that `add_prefix` put under `name`, by their original names."""
    prefix = f"{name}." if name else ""
    return {key.removeprefix(prefix): v for key, v in tensors.items() if key.startswith(prefix)}
