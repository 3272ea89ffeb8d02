"""Training of a party's networks: the networks, device and precision, optimizer and scheduler.

`ActiveNetworks` is the active's model, whatever method trains it; `Compute` the device, precision
and dropout of a step; `OwnOptimization` an optimizer and a scheduler of the party's own; `Trainer`
a party's modules through the steps of a run, with their state for its checkpoint. Letters: B batch,
A of its rows that are sent, K classes, D numbers of a row.
"""

import copy
import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from secure_apfed.base.seeds import draws_nothing, may_draw, seed_draws
from secure_apfed.base.transfers import fetch_tensors, send_tensor
from secure_apfed.errors import ApfedError, ConfigError, ModelError
from secure_apfed.networks.models import Intercept
from secure_apfed.settings import TrainSettings
from secure_apfed.settings.training import DEVICE

ALL_ROWS = slice(None)
"""All rows of a batch."""
OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)
MakeOptimizer: TypeAlias = Callable[..., torch.optim.Optimizer]
"""Type of a function that makes a party's own optimizer from the list of parameters that it trains;
or from its `modules`, by name, if it has an argument of that name: encoder, head and projection, or
objective."""
MakeScheduler: TypeAlias = Callable[[Any], LRScheduler]
"""Type of a function that makes a scheduler of a party's optimizer, as `lambda optimizer:
StepLR(optimizer, 100)`."""
StepsOrEpoch: TypeAlias = int | Literal["epoch"]
EPOCH: Literal["epoch"] = "epoch"
# Names of tensors in a checkpoint.
_MOMENTS_KEY = "moments"
_SEEN_ROWS_KEY = "rows of this epoch"
_EPOCH_LOSSES_KEY = "losses of epochs"
_PARTIAL_LOSS_KEY = "loss of this epoch"
_STEP_COUNT_KEY = "steps done"
_NORM_OFFSET = 1e-6
"""Added to a gradient's norm before a division, as torch does."""
_MAX_NAMED_WEIGHTS = 3
"""Largest number of weights that an error names."""
_MODULES_WITH_GRADIENTS = ("encoder", "objective")
"""Modules that gradients must reach in the first step; a head, for example, may wait for labels."""


@dataclass(frozen=True, kw_only=True)
class OwnOptimization:
    """A party's own optimizer and scheduler; None: the run's settings decide.

    Attributes:
        optimizer: makes its optimizer, which keeps its own learning rates and parameter groups.
        scheduler: makes a scheduler of that optimizer, or of the configured one.
        scheduler_interval: "epoch": the scheduler takes a step after each epoch of the party's own
            rows; or the number of the party's own steps after which it takes one.
    """

    optimizer: MakeOptimizer | None = None
    scheduler: MakeScheduler | None = None
    scheduler_interval: StepsOrEpoch = EPOCH


CONFIGURED_OPTIMIZATION = OwnOptimization()
"""The configured optimizer and scheduler: the party brings no code of its own."""


def find_device(name: str) -> torch.device:
    """Return the torch device that a setting names.

    `name`: "auto" (a GPU if there is one), "cpu", "cuda", or one GPU as "cuda:1". Raises
    ConfigError: another choice, or a GPU that torch does not find.
    """
    if not DEVICE.fullmatch(name):
        raise ConfigError(f"device: expected auto, cpu, cuda or one GPU, as cuda:1; got {name!r}")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda":
        # `device_count` asks the driver and does not start CUDA, so this process can still fork.
        gpu_count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= gpu_count:
            seen_gpus = (
                f"sees {gpu_count} GPU(s), counted from cuda:0" if gpu_count else "sees no GPU"
            )
            raise ConfigError(
                f"device: {name} was asked for, but torch {seen_gpus}; say auto or cpu"
            )
    return device


@dataclass(frozen=True)
class Compute:
    """The device and precision of a party's computation.

    Attributes:
        device: where networks and tables are.
        dtype: data type of weights, and of sent tensors.
        is_autocast_on: whether the networks' forward passes run in bfloat16.
    """

    device: torch.device
    dtype: torch.dtype = torch.float32
    is_autocast_on: bool = False

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
        """Move a tensor for one step, without waiting for the device; see `move_tensor`."""
        return send_tensor(values, self.device, self.dtype if values.is_floating_point() else None)

    def fetch_batch(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Return detached copies of these tensors on the CPU, with one wait for all."""
        return fetch_tensors(*values)

    def take_rows(self, features_N: Any, rows_B: Tensor) -> Tensor:
        """Return these rows of a table, on the device, (B, *shape).

        `features_N`: the table's N rows. A tensor is on the device as a whole; `LazyRows` are read
        now, for these positions only. `rows_B`: the rows to take.
        """
        is_on_device = isinstance(features_N, Tensor)
        taken_B: Tensor = features_N[self.move_batch(rows_B) if is_on_device else rows_B]
        return taken_B

    @contextmanager
    def prepare_forward(self, seed: int | None, *purpose: str | int) -> Iterator[None]:
        """Run the networks in the `with` block with the configured precision and seeded dropout.

        `seed`, `purpose`: together they determine the random numbers. `seed` is None if the
        networks draw no random numbers, which saves time.
        """
        seeding = nullcontext() if seed is None else seed_draws(seed, *purpose)
        with seeding, self._set_precision():
            yield

    def _set_precision(self) -> AbstractContextManager[object]:
        """Return a context in which autocast is on or off, as configured.

        If autocast is off already and shall be, the context does nothing: entering autocast takes
        as long as a small layer.
        """
        device_type = self.device.type
        if not self.is_autocast_on and not torch.is_autocast_enabled(device_type):
            return nullcontext()
        return torch.autocast(device_type, torch.bfloat16, enabled=self.is_autocast_on)


@draws_nothing
class ActiveNetworks(nn.Module):
    """The active's networks: an encoder, a head for class scores, and perhaps a projection.

    The projection maps the encoder's output to the numbers that are sent; without it, the encoder's
    output is sent.
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
        self, features_B: Tensor, sent_rows: Tensor | slice | None = ALL_ROWS
    ) -> tuple[Tensor, Tensor | None]:
        """Return class scores (B, K), and the representations to send (A, *shape).

        `features_B`: the batch of B rows. `sent_rows`: indices in the batch of the A rows whose
        representations are sent; None: None is returned instead of representations.
        """
        h_B = self.encoder(features_B)
        scores_BK = self.head(h_B)
        if sent_rows is None:
            return scores_BK, None
        projected_B = h_B if self.projection is None else self.projection(h_B)
        return scores_BK, projected_B[sent_rows]


def copy_predictor(networks: ActiveNetworks | None) -> nn.Module | None:
    """Return a copy on the CPU of the encoder followed by the head; None if there are no networks.

    It maps features to class scores.
    """
    if networks is None:
        return None
    return copy.deepcopy(nn.Sequential(networks.encoder, networks.head)).cpu().eval()


def make_eager_class(optimizer_class: type[OptimizerT]) -> type[OptimizerT]:
    """Return a variant of an optimiser class that never loads torch's compiler.

    Loading the compiler takes a second. The variant cannot be pickled, nor used with
    `differentiable`. Its steps call no hooks, which take half the time of a small step.
    """
    wrapped_methods = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")
    unwrapped_by_name = {
        name: inspect.unwrap(getattr(optimizer_class, name)) for name in wrapped_methods
    }
    step = torch.no_grad()(inspect.unwrap(optimizer_class.step))
    vars(step)["hooked"] = True  # torch's mark of a step that calls hooks, so that it adds none
    return type(optimizer_class.__name__, (optimizer_class,), {**unwrapped_by_name, "step": step})


_OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(make_eager_class(torch.optim.SGD), foreach=True),
    "adam": partial(make_eager_class(torch.optim.Adam), fused=True),
    "adamw": partial(make_eager_class(torch.optim.AdamW), fused=True),
}


def compute_learning_rate(train: TrainSettings, steps_done: int) -> float:
    """Return the configured learning rate of a party's next step.

    `steps_done`: number of steps that it has taken. The rate rises linearly in the warm-up. Then it
    falls by half a cosine to 0 at `train.schedule_steps`, or stays if these are None.
    """
    warmup_steps = train.warmup_steps
    peak_rate = train.learning_rate
    if steps_done < warmup_steps:
        return peak_rate * (steps_done + 1) / warmup_steps
    if train.schedule_steps is None:
        return peak_rate
    schedule_share = min(1.0, (steps_done - warmup_steps) / (train.schedule_steps - warmup_steps))
    return peak_rate * (1 + math.cos(math.pi * schedule_share)) / 2


class Descent:
    """The optimisation of a party's networks: an optimizer, a schedule and their state.

    Optimizer and schedule are the configured ones, or the party's own. The configured weight decay
    is the L2 terms of APFed's Eqs. (6) and (7). Parameters with `requires_grad=False` are not
    trained.

    Attributes:
        has_own_loss: whether the party computes a loss of its own, which a scheduler may read.

    Raises:
        ModelError: the modules have no parameters to train.
        ConfigError: the party's own optimizer or scheduler does not fit.
    """

    has_own_loss = True

    def __init__(
        self,
        owner: str,
        modules: Mapping[str, nn.Module],
        train: TrainSettings,
        own_optimization: OwnOptimization = CONFIGURED_OPTIMIZATION,
        *,
        may_have_no_weights: bool = False,
    ) -> None:
        """Collect the parameters, each once, and build the optimiser and scheduler.

        Args:
            owner: name of the party, for errors.
            modules: the networks by role: encoder, head, and so on.
            train: the configured optimizer and schedule.
            own_optimization: an optimizer and a scheduler of the party's own.
            may_have_no_weights: whether there may be nothing to train, as in a loss without
                weights.
        """
        self._owner = owner
        self._modules = modules
        # Modules may share parameters; each parameter is trained once.
        trained_by_id = {
            id(parameter): parameter
            for module in modules.values()
            for parameter in module.parameters()
            if parameter.requires_grad
        }
        self._parameters = list(trained_by_id.values())
        if not self._parameters and not may_have_no_weights:
            raise ModelError(
                f"{owner}: its network has no weights that gradients reach; where a method trains "
                "it by steps, choose another model.network, as mlp, or let some of its parameters "
                "have requires_grad=True"
            )
        self._norm_bound = train.max_gradient_norm or math.inf
        self._train_settings = train
        self._step_count = 0  # number of finished steps
        self._own_optimization = own_optimization
        self._optimizer: torch.optim.Optimizer | None = None
        self._scheduler: LRScheduler | None = None  # only the party's own
        self._is_seen_in_epoch = torch.zeros(
            0, dtype=torch.bool
        )  # whether a row came in this epoch
        self._epoch_losses: list[float] = []  # mean losses of finished epochs
        self._epoch_loss_sum = 0.0  # of this epoch's steps
        self._epoch_loss_count = 0
        self._last_recorded_step = -1
        if not self._parameters:
            return
        if own_optimization.optimizer is not None:
            self._optimizer = make_own_optimizer(
                own_optimization.optimizer, modules, self._parameters, owner=owner
            )
        else:
            momentum_option = {"momentum": train.momentum} if train.optimizer == "sgd" else {}
            self._optimizer = _OPTIMIZERS[train.optimizer](
                _group_parameters(modules, self._parameters),
                lr=train.learning_rate,
                weight_decay=train.weight_decay,
                **momentum_option,
            )
        self._start_schedule()

    def _start_schedule(self) -> None:
        """Make the party's own scheduler, if any; in a resumed run repeat its earlier steps.

        The scheduler's state is not stored but recomputed: the optimizer's parameter groups are
        reset to their first options, and the scheduler takes all steps again.

        Raises ConfigError: the party's function returns no scheduler of this optimizer, or the
        settings have a schedule, too.
        """
        optimizer = self._optimizer
        make_scheduler = self._own_optimization.scheduler
        if optimizer is None or make_scheduler is None:
            return
        if self._train_settings.schedule_steps is not None or self._train_settings.warmup_steps:
            raise ConfigError(
                f"{self._owner}: it brings a scheduler beside train.schedule_steps or "
                "train.warmup_steps, and one alone sets its learning rates: leave one out"
            )
        groups = optimizer.param_groups
        if self._scheduler is None:
            self._initial_options = [_copy_options(group) for group in groups]
        for group, initial_options in zip(groups, self._initial_options, strict=True):
            weights = group["params"]
            group.clear()
            group.update(copy.deepcopy(initial_options), params=weights)
        self._scheduler = _make_scheduler(make_scheduler, optimizer, owner=self._owner)
        self._check_loss_scheduler()
        interval = self._own_optimization.scheduler_interval
        past_losses = self._epoch_losses
        if interval != EPOCH:  # a scheduler that counts steps reads no loss
            past_losses = [math.nan] * (self._step_count // interval)
        with warnings.catch_warnings():
            # The optimizer took its steps in the session that is resumed.
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
            for loss in past_losses:
                self._step_scheduler(loss)

    @property
    def _needs_loss(self) -> bool:
        """True if the scheduler's steps depend on the loss."""
        return isinstance(self._scheduler, ReduceLROnPlateau)

    def _check_loss_scheduler(self) -> None:
        """Raise ConfigError if the scheduler needs the loss, and this party cannot provide it."""
        if not self._needs_loss:
            return
        if not self.has_own_loss:
            raise ConfigError(
                f"{self._owner}: ReduceLROnPlateau waits for a loss, and this party has none that "
                "it may read: it learns from gradients, or under dp_sgd or train.labels: after; "
                "take a scheduler without a loss, as torch.optim.lr_scheduler.CosineAnnealingLR"
            )
        interval = self._own_optimization.scheduler_interval
        if interval != EPOCH:
            raise ConfigError(
                f"{self._owner}: ReduceLROnPlateau reads the mean loss of an epoch, and "
                f"scheduler_every is {interval}; say scheduler_every: epoch"
            )

    def _step_scheduler(self, loss: float) -> None:
        """Let the scheduler take a step.

        `loss`: the epoch's mean loss, which only ReduceLROnPlateau reads.
        """
        assert self._scheduler is not None
        if isinstance(self._scheduler, ReduceLROnPlateau):
            self._scheduler.step(loss)
        else:
            self._scheduler.step()

    def record_rows(self, step: int, rows_B: Tensor) -> None:
        """Record the party's rows of a step, and step the scheduler when an epoch is over.

        An epoch has each row at most once, so it is over when a row comes again. So no other party
        needs to say where epochs end. A repeated step counts once. Without a scheduler that counts
        epochs, nothing is done.
        """
        if (
            self._scheduler is None
            or self._own_optimization.scheduler_interval != EPOCH
            or step == self._last_recorded_step
        ):
            return
        self._last_recorded_step = step
        rows_B = rows_B.cpu()
        row_count = int(rows_B.max()) + 1
        if row_count > len(self._is_seen_in_epoch):
            new_rows = torch.zeros(row_count - len(self._is_seen_in_epoch), dtype=torch.bool)
            self._is_seen_in_epoch = torch.cat([self._is_seen_in_epoch, new_rows])
        is_epoch_over = bool(self._is_seen_in_epoch[rows_B].any())
        if is_epoch_over:
            mean_loss = (
                self._epoch_loss_sum / self._epoch_loss_count
                if self._epoch_loss_count
                else math.nan
            )
            self._epoch_losses.append(mean_loss)
            self._is_seen_in_epoch.zero_()
            self._epoch_loss_sum = 0.0
            self._epoch_loss_count = 0
            with explain_failure(self._owner, f"scheduler after epoch {len(self._epoch_losses)}"):
                self._step_scheduler(mean_loss)
        self._is_seen_in_epoch[rows_B] = True

    def record_loss(self, loss: Tensor) -> None:
        """Add the loss of a step to the epoch's mean, if the scheduler needs it."""
        if self._needs_loss:
            self._epoch_loss_sum += float(loss.detach())
            self._epoch_loss_count += 1

    def zero_grad(self) -> None:
        """Forget the gradients of all trained parameters."""
        for parameter in self._parameters:
            parameter.grad = None

    def step(self) -> None:
        """Clip the gradient's norm, if a bound is set, and update parameters and learning rate.

        Raises ModelError: the gradient is NaN or infinite, or reaches no weight in the first step.
        No parameter was changed then.
        """
        if math.isfinite(self._norm_bound):
            norm = self._clip_gradient()
            if not math.isfinite(norm):
                raise ModelError(
                    f"{self._owner}: training diverged, its gradient is not finite; lower "
                    "train.learning_rate or train.max_gradient_norm"
                )
        # Checked before the first step only, since it takes time.
        if not self._step_count:
            self._require_gradients()
        self._step_count += 1
        if self._optimizer is None:
            return
        if self._own_optimization.optimizer is not None:
            with explain_failure(self._owner, f"optimizer in its step {self._step_count}"):
                self._optimizer.step()
        else:
            if self._scheduler is None:
                for group in self._optimizer.param_groups:
                    group["lr"] = compute_learning_rate(self._train_settings, self._step_count - 1)
            self._optimizer.step()
        interval = self._own_optimization.scheduler_interval
        if self._scheduler is not None and interval != EPOCH and self._step_count % interval == 0:
            with explain_failure(self._owner, f"scheduler after step {self._step_count}"):
                self._scheduler.step()

    def _require_gradients(self) -> None:
        """Raise ModelError if an encoder or objective has weights to train, but no gradient.

        Then the party's own code cuts the graph, for example by `.detach()`.
        """
        for role in _MODULES_WITH_GRADIENTS:
            module = self._modules.get(role)
            weights = [] if module is None else [*module.parameters()]
            trained = [weight for weight in weights if weight.requires_grad]
            if trained and all(weight.grad is None for weight in trained):
                raise ModelError(
                    f"{self._owner}: no gradient reaches the weights of its {role}; compute its "
                    "output from them without .detach(), no_grad() or inference_mode(), or freeze "
                    "them by requires_grad_(False)"
                )

    @torch.no_grad()
    def _clip_gradient(self) -> float:
        """Scale the gradient to the norm bound if it is longer; return its norm before scaling.

        It computes the same as torch.nn.utils.clip_grad_norm_, which for a small network spends
        most of its time on sorting tensors by device.
        """
        gradients = [weight.grad for weight in self._parameters if weight.grad is not None]
        if not gradients:
            return 0.0
        norms = [gradient.norm() for gradient in gradients]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        scale = (self._norm_bound / (norm + _NORM_OFFSET)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(scale)
        return float(norm)

    def tensors(self) -> dict[str, Tensor]:
        """Return the state for a checkpoint, by name.

        It has parameters, buffers, the optimiser's moments, and the counts of steps and epochs.
        """
        optimizer_state = self._optimizer.state_dict()["state"] if self._optimizer else {}
        moments = {
            f"{index}.{name}": value
            for index, state in optimizer_state.items()
            for name, value in state.items()
            if value is not None
        }
        tensors: dict[str, Tensor] = {}
        for name, module in self._modules.items():
            tensors |= add_prefix(name, module.state_dict())
        tensors |= add_prefix(_MOMENTS_KEY, moments)
        return {
            **tensors,
            _STEP_COUNT_KEY: torch.tensor(self._step_count),
            **self._list_epoch_state(),
        }

    def _list_epoch_state(self) -> dict[str, Tensor]:
        """Return the scheduler's count of epochs for a checkpoint; empty if it counts none."""
        if self._scheduler is None or self._own_optimization.scheduler_interval != EPOCH:
            return {}
        sum_and_count = [self._epoch_loss_sum, float(self._epoch_loss_count)]
        return {
            _SEEN_ROWS_KEY: self._is_seen_in_epoch.to(torch.uint8),
            _EPOCH_LOSSES_KEY: torch.tensor(self._epoch_losses, dtype=torch.float64),
            _PARTIAL_LOSS_KEY: torch.tensor(sum_and_count, dtype=torch.float64),
        }

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the state that `tensors` returned."""
        for name, module in self._modules.items():
            module.load_state_dict(remove_prefix(name, tensors))
        self._step_count = int(tensors[_STEP_COUNT_KEY])
        moments: dict[int, dict[str, Tensor]] = {}
        for key, value in remove_prefix(_MOMENTS_KEY, tensors).items():
            index, _, name = key.partition(".")
            moments.setdefault(int(index), {})[name] = value.clone()
        if self._optimizer is not None:
            self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": moments})
        if _SEEN_ROWS_KEY in tensors:
            self._is_seen_in_epoch = tensors[_SEEN_ROWS_KEY].to(torch.bool)
            self._epoch_losses = tensors[_EPOCH_LOSSES_KEY].tolist()
            self._epoch_loss_sum, count = tensors[_PARTIAL_LOSS_KEY].tolist()
            self._epoch_loss_count = int(count)
        self._start_schedule()


def _group_parameters(
    modules: Mapping[str, nn.Module], parameters: list[nn.Parameter]
) -> list[nn.Parameter] | list[dict[str, Any]]:
    """Return the parameters for an optimizer, in groups if some have no weight decay.

    Intercepts (of generalised linear models) are a group of their own, without weight decay.
    """
    submodules = [submodule for module in modules.values() for submodule in module.modules()]
    intercept_ids = {id(part.bias) for part in submodules if isinstance(part, Intercept)}
    if not intercept_ids:
        return parameters
    weights = [weight for weight in parameters if id(weight) not in intercept_ids]
    intercepts = [weight for weight in parameters if id(weight) in intercept_ids]
    groups: list[dict[str, Any]] = [{"params": intercepts, "weight_decay": 0.0}]
    return [{"params": weights}, *groups] if weights else groups


_DTYPE_ADVICE = (
    "; a network that computes in double precision needs train.precision: float64, or layers and "
    "rows converted by .float()"
)


@contextmanager
def explain_failure(owner: str, subject: str) -> Iterator[None]:
    """Turn errors of a party's own code in the `with` block into a ModelError that names it.

    `owner`: name of the party. `subject`: the part of its code that runs in the block, in words,
    such as "loss".
    """
    try:
        yield
    except (ApfedError, torch.OutOfMemoryError):
        raise  # these say themselves what to do
    except Exception as error:
        advice = _DTYPE_ADVICE if "dtype" in str(error) and "Double" in str(error) else ""
        raise ModelError(
            f"{owner}: its {subject} failed: {type(error).__name__}: {error}{advice}"
        ) from error


def find_gradient_leaves(loss: Tensor) -> list[Tensor]:
    """Return the leaves of an autograd graph: the tensors that receive gradients from this loss."""
    visited = set()
    pending = [loss.grad_fn]
    leaves = []
    while pending:
        node = pending.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            leaves.append(variable)
        pending.extend(next_node for next_node, _ in node.next_functions)
    return leaves


def name_weights(modules: Mapping[str, nn.Module], weights: Sequence[Tensor]) -> str:
    """Return the names of the first few of these weights, such as "encoder.0.weight", for errors.

    `modules`: the networks by role: encoder, head, and so on.
    """
    name_by_id = {
        id(parameter): f"{role}.{name}"
        for role, module in modules.items()
        for name, parameter in module.named_parameters()
    }
    names = [
        name_by_id.get(id(weight), f"one of shape {tuple(weight.shape)}") for weight in weights
    ]
    ellipsis = ", ..." if len(names) > _MAX_NAMED_WEIGHTS else ""
    return ", ".join(names[:_MAX_NAMED_WEIGHTS]) + ellipsis


def make_own_optimizer(
    make_optimizer: MakeOptimizer,
    modules: Mapping[str, nn.Module],
    parameters: list[nn.Parameter],
    *,
    owner: str,
) -> torch.optim.Optimizer:
    """Call a party's function that makes its optimizer, and check the result.

    Args:
        make_optimizer: the party's function, of the list of parameters or of the modules.
        modules: the networks that the party trains, by role.
        parameters: the trained parameters of the modules, all of which the optimizer must have. It
            may have frozen ones, too.
        owner: name of the party, for errors.

    Raises ConfigError: the result is no optimizer, has other parameters or not all, or needs a
        closure.
    """
    try:
        optimizer = (
            make_optimizer(modules=dict(modules))
            if _takes_modules(make_optimizer)
            else make_optimizer(parameters)
        )
    except Exception as error:
        raise ConfigError(
            f"{owner}: its optimizer cannot be made of the {len(parameters)} parameters that this "
            f"party trains: {type(error).__name__}: {error}; hand in a function that takes their "
            'list, as torch.optim.AdamW, or `modules`, as modules["encoder"]; of the modules of '
            f"{owner} there are {', '.join(modules)}"
        ) from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"{owner}: its optimizer is a function of the parameters that makes a "
            f"torch.optim.Optimizer, as torch.optim.AdamW; got {type(optimizer).__name__}"
        )
    _require_exact_weights(optimizer, modules, parameters, owner=owner)
    _refuse_closure(optimizer, owner=owner)
    return optimizer


def _require_exact_weights(
    optimizer: torch.optim.Optimizer,
    modules: Mapping[str, nn.Module],
    parameters: list[nn.Parameter],
    *,
    owner: str,
) -> None:
    """Raise ConfigError unless the optimizer has all `parameters`, and only weights of `modules`.

    `modules`: the networks of the party `owner` by role; some of their weights may be frozen.
    `parameters`: the trained ones.
    """
    optimized_ids = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    own_ids = {id(weight) for module in modules.values() for weight in module.parameters()}
    if optimized_ids - own_ids:
        raise ConfigError(
            f"{owner}: its optimizer holds other parameters than the {len(parameters)} that this "
            "party trains; make it of the parameters that it is called with, or of `modules`"
        )
    missing_weights = [weight for weight in parameters if id(weight) not in optimized_ids]
    if missing_weights:
        raise ConfigError(
            f"{owner}: its optimizer leaves out {name_weights(modules, missing_weights)} of the "
            f"{len(parameters)} parameters that this party trains; put them into a group, or "
            "freeze them by requires_grad_(False)"
        )


def _refuse_closure(optimizer: torch.optim.Optimizer, *, owner: str) -> None:
    """Raise ConfigError if a step of the optimizer of the party `owner` needs a closure.

    A closure computes the loss several times a step, as in LBFGS.
    """
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"{owner}: {type(optimizer).__name__} computes a step's loss several times (a "
            "closure), and the other parties answer each step once; take an optimizer that steps "
            "from gradients, as torch.optim.AdamW"
        )


def _takes_modules(make_optimizer: MakeOptimizer) -> bool:
    """Return whether a function has a parameter called `modules`."""
    try:
        return "modules" in inspect.signature(make_optimizer).parameters
    except (TypeError, ValueError):  # a builtin function has no signature
        return False


def _make_scheduler(
    make_scheduler: MakeScheduler, optimizer: torch.optim.Optimizer, *, owner: str
) -> LRScheduler:
    """Call a party's function that makes a scheduler of this optimizer, and check the result.

    `make_scheduler`: the party's function. `owner`: name of the party, for errors. Raises
    ConfigError: the result is no scheduler, or belongs to another optimizer.
    """
    try:
        scheduler = make_scheduler(optimizer)
    except Exception as error:
        raise ConfigError(
            f"{owner}: its scheduler cannot be made of its optimizer: {type(error).__name__}: "
            f"{error}; hand in a function of the optimizer, as scheduler=lambda optimizer: "
            "torch.optim.lr_scheduler.StepLR(optimizer, 100)"
        ) from error
    if not isinstance(scheduler, LRScheduler | ReduceLROnPlateau):
        raise ConfigError(
            f"{owner}: its scheduler is a function of the optimizer that makes a "
            f"torch.optim.lr_scheduler.LRScheduler; got {type(scheduler).__name__}"
        )
    if scheduler.optimizer is not optimizer:
        raise ConfigError(
            f"{owner}: its scheduler is of another optimizer than the one that this party steps; "
            "make it of the optimizer that it is called with"
        )
    return scheduler


def _copy_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the options of an optimizer's parameter group, without its weights."""
    return copy.deepcopy({name: value for name, value in group.items() if name != "params"})


class Trainer(Descent):
    """The base of trainers: one party's modules and optimiser, trained step by step.

    Attributes:
        compute: device and precision.
        forward_context: makes a context, from a step's number or another purpose, in which networks
            run with the configured precision and seeded dropout.
    """

    def __init__(
        self,
        owner: str,
        modules: Mapping[str, nn.Module],
        *,
        train: TrainSettings,
        seed: int,
        own_optimization: OwnOptimization = CONFIGURED_OPTIMIZATION,
        may_have_no_weights: bool = False,
    ) -> None:
        """Move the modules to the configured device and precision, and build the optimiser.

        Args:
            owner: name of the party, for errors.
            modules: its networks by role: encoder, head, and so on.
            train: training settings.
            seed: random seed of dropout.
            own_optimization: the party's own optimizer and scheduler.
            may_have_no_weights: whether there may be nothing to train.
        """
        compute = Compute.from_settings(train)
        for module in modules.values():
            module.to(compute.device, compute.dtype)
            module.train()  # its caller may have left it in evaluation mode
        super().__init__(
            owner, modules, train, own_optimization, may_have_no_weights=may_have_no_weights
        )
        self.compute = compute
        self._seed = seed
        # Networks without dropout draw no random numbers, and need no seeding.
        may_draw_numbers = any(map(may_draw, modules.values()))
        self.forward_context = partial(
            compute.prepare_forward, seed if may_draw_numbers else None, owner
        )

    def set_training(self, is_training: bool) -> None:
        """Put all modules into training mode, or into evaluation mode (without dropout)."""
        for module in self._modules.values():
            module.train(is_training)

    def refuse_untrained_weights(self, loss: Tensor, *differentiable_inputs: Tensor) -> None:
        """Raise ModelError if the first step's loss depends on weights that nobody trains.

        They belong to a network that the party's code reads, but does not hand in.

        Args:
            loss: the loss before its backward pass.
            differentiable_inputs: other tensors that may receive gradients from the loss.
        """
        if self._step_count:
            return
        expected_ids = {id(tensor) for tensor in (*self._parameters, *differentiable_inputs)}
        untrained_weights = [
            leaf for leaf in find_gradient_leaves(loss) if id(leaf) not in expected_ids
        ]
        if untrained_weights:
            raise ModelError(
                f"{self._owner}: its code reads {len(untrained_weights)} weights that are no part "
                f"of what it hands in ({name_weights(self._modules, untrained_weights)}), so that "
                "nobody trains them; make the network an attribute of the nn.Module that reads "
                "it, or freeze it by requires_grad_(False)"
            )

    def _explain_network_errors(
        self, features_B: Tensor, *, is_training: bool = True
    ) -> AbstractContextManager[None]:
        """Return a context in which errors of the networks name the rows' shape and the mode.

        `features_B`: the rows on which the networks run. `is_training`: whether they are in
        training mode.
        """
        mode = "training" if is_training else "evaluation"
        shape = tuple(features_B.shape)
        return explain_failure(self._owner, f"network on rows of shape {shape} in {mode} mode")

    @contextmanager
    def evaluation_mode(self) -> Iterator[None]:
        """Run the networks in the `with` block in evaluation mode, without dropout."""
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
    return {
        key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)
    }
