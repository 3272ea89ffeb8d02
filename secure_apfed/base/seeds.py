"""Reproducible randomness for all that is not a key, a mask or noise; and torch, left as it was.

Run by: every party. A generator's state is a function of (run seed, purpose), the step
included, so a resumed run needs no saved generator to repeat itself bit for bit, and
parties give the same result in one process as in many. torch's own generator, which all threads of
the process share, is neither read nor moved. A caller may have another default dtype or device,
autocast, no gradients; a run with the same seed gives the same model all the same.
"""

import hashlib
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias, TypeVar

import torch
import torch.nn.functional as F
from threadpoolctl import threadpool_limits
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_Function: TypeAlias = Callable[..., Any]
_Device: TypeAlias = torch.device | str | int | None
# Random functions that take a generator: of a new tensor, or, in `_FILLING_FUNCTIONS`, on the
# device of their first argument.
_CREATING_FUNCTIONS = frozenset({torch.rand, torch.randint, torch.randn, torch.randperm})
_FILLING_FUNCTIONS = frozenset(
    {
        Tensor.bernoulli,
        Tensor.bernoulli_,
        Tensor.cauchy_,
        Tensor.exponential_,
        Tensor.geometric_,
        Tensor.log_normal_,
        Tensor.multinomial,
        Tensor.normal_,
        Tensor.random_,
        Tensor.uniform_,
        torch.bernoulli,
        torch.multinomial,
        torch.normal,
        torch.poisson,
        torch._sample_dirichlet,
        torch._standard_gamma,
        nn.init.kaiming_normal_,
        nn.init.kaiming_uniform_,
        nn.init.normal_,
        nn.init.orthogonal_,
        nn.init.sparse_,
        nn.init.trunc_normal_,
        nn.init.uniform_,
        nn.init.xavier_normal_,
        nn.init.xavier_uniform_,
    }
)
# Functions without a generator, and those that do the same with one.
_REPLACEMENT_BY_FUNCTION: Mapping[_Function, _Function] = {
    torch.rand_like: torch.rand,
    torch.randn_like: torch.randn,
}
# Functions that draw from torch's global generator alone, which is seeded for their call.
_GLOBAL_GENERATOR_FUNCTIONS = frozenset(
    {
        F.alpha_dropout,
        F.dropout1d,
        F.dropout2d,
        F.dropout3d,
        F.feature_alpha_dropout,
        F.fractional_max_pool2d,
        F.fractional_max_pool3d,
        F.gumbel_softmax,
        F.multi_head_attention_forward,
        F.rrelu,
        F.scaled_dot_product_attention,
        torch.alpha_dropout,
        torch.feature_dropout,
        torch.gru,
        torch.lstm,
        torch.randint_like,
        torch.rnn_relu,
        torch.rnn_tanh,
        torch.rrelu,
    }
)
_RANDOM_FUNCTIONS = frozenset(
    {
        F.dropout,
        torch.dropout,
        *_GLOBAL_GENERATOR_FUNCTIONS,
        *_REPLACEMENT_BY_FUNCTION,
        *_CREATING_FUNCTIONS,
        *_FILLING_FUNCTIONS,
    }
)
_GLOBAL_GENERATORS = threading.RLock()  # held while torch's global generators are seeded
# The parameters' names of F.dropout and torch.dropout as `_draw_dropout` has them.
_DROPOUT_PARAMETER_BY_NAME = {"input": "values", "train": "training"}


OfModule = TypeVar("OfModule", bound=nn.Module)


def derive_seed(seed: int, *purpose: str | int) -> int:
    """Return a 63-bit seed for one purpose of the run with this seed; other purposes get others.

    `purpose`: words and numbers that name what is drawn, such as a role and a step.
    """
    # The separator is in no name, so that different purposes never give the same text.
    text = "\x1f".join(map(str, (seed, *purpose)))
    first_word = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    return first_word >> 1  # 63 bits, so that it is a positive signed 64-bit integer


class Draws(TorchFunctionMode):
    """The random numbers of one purpose, independent of torch's global generators.

    They are drawn by a generator of `get_generator`, or by torch's own random functions in a block
    `with draws:`.

    On the CPU they are what torch's own generator would draw at the same seed, dropout included. A
    block costs two microseconds for each call of torch in this thread, so a training loop of small
    networks should pass generators instead.
    """

    def __init__(self, seed: int) -> None:
        """Store the seed; the generator of each device is made from it at its first use."""
        super().__init__()
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def get_generator(self, device: _Device = "cpu") -> torch.Generator:
        """Return the generator of a device, which continues from one call to the next."""
        key = torch.device("cpu" if device is None else device)
        if key not in self._generators:
            self._generators[key] = torch.Generator(key).manual_seed(self._seed)
        return self._generators[key]

    def __torch_function__(
        self, func: _Function, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a torch function within `with draws:`; its random numbers are this object's.

        torch calls this method in place of each function: `func` with its `args` and `kwargs`;
        `types` is not used (see torch's `TorchFunctionMode`).
        """
        kwargs = kwargs or {}
        if func not in _RANDOM_FUNCTIONS:
            return func(*args, **kwargs)
        if func is F.dropout or func is torch.dropout:
            # Neither takes a generator, so dropout is computed here.
            if kwargs:
                kwargs = {
                    _DROPOUT_PARAMETER_BY_NAME.get(name, name): kwargs[name] for name in kwargs
                }
            return self._draw_dropout(*args, **kwargs)
        if func in _GLOBAL_GENERATOR_FUNCTIONS:
            with self._seed_global_generators(*args, *kwargs.values()):
                return func(*args, **kwargs)
        if func in _REPLACEMENT_BY_FUNCTION:
            # Functions such as randn_like take no generator; those that take a shape do.
            template = args[0] if args else kwargs.pop("input")
            kwargs = {"dtype": template.dtype, "device": template.device, **kwargs}
            kwargs.pop("memory_format", None)
            func = _REPLACEMENT_BY_FUNCTION[func]
            args = (template.shape,)
        if kwargs.get("generator") is None:
            # A generator must be on the device of the tensor that is drawn.
            first_argument = args[0] if args else next(iter(kwargs.values()))
            device = kwargs.get("device")
            if isinstance(first_argument, Tensor):
                device = first_argument.device
            kwargs = {**kwargs, "generator": self.get_generator(device)}
        return func(*args, **kwargs)

    def _draw_dropout(
        self, values: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        """Return values after dropout, with the mask drawn from this object's generator.

        The arguments are called as in torch's dropout. `p`: probability that a value becomes 0; the
        others are divided by 1 - p. `training`: if False, all values stay. `inplace`: whether
        `values` itself is changed.
        """
        if not training or not 0 < p < 1 or not values.numel():
            return F.dropout(values, p, training, inplace)
        mask = torch.empty_like(values).bernoulli_(
            1 - p, generator=self.get_generator(values.device)
        )
        mask.div_(1 - p)
        return values.mul_(mask) if inplace else values * mask

    @contextmanager
    def _seed_global_generators(self, *values: object) -> Iterator[None]:
        """Seed torch's global generators in this block, and restore their state afterwards.

        It serves functions that draw from them alone. A lock lets only one thread do so at a time.
        The generators are those of the CPU and of every GPU that holds one of `values`, the
        arguments of a call.
        """
        seed = int(torch.randint(2**62, (), generator=self.get_generator()))
        gpus = {
            value.device.index for value in values if isinstance(value, Tensor) and value.is_cuda
        }
        with _GLOBAL_GENERATORS, torch.random.fork_rng(list(gpus)):
            torch.manual_seed(seed)
            yield


def seed_draws(seed: int, *purpose: str | int) -> Draws:
    """Return the random numbers of one purpose of the run with this seed.

    Each call returns a new object, which draws the same numbers from the first one on.
    """
    return Draws(derive_seed(seed, *purpose))


# Classes of modules whose own forward pass draws no random number.
_MODULES_WITHOUT_DRAWS: set[type[nn.Module]] = {
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.Conv2d,
    nn.ConvTranspose2d,
    nn.Flatten,
    nn.Linear,
    nn.MaxPool2d,
    nn.ReLU,
    nn.Sequential,
    nn.Sigmoid,
    nn.Tanh,
    nn.Unflatten,
}


def draws_nothing(module_class: type[OfModule]) -> type[OfModule]:
    """Register a module class as one whose forward pass draws no random number; a decorator.

    A network of such modules alone runs without `Draws`, which costs time at each call of torch.
    """
    _MODULES_WITHOUT_DRAWS.add(module_class)
    return module_class


def may_draw(network: nn.Module) -> bool:
    """Return whether a network's forward pass may draw random numbers.

    It is True for every module class that is not registered (`draws_nothing`), and for modules with
    hooks, which may run any code.
    """
    for module in network.modules():
        has_hooks = bool(module._forward_hooks or module._forward_pre_hooks)
        is_zero_dropout = type(module) is nn.Dropout and not module.p
        if has_hooks or not (type(module) in _MODULES_WITHOUT_DRAWS or is_zero_dropout):
            return True
    return False


def shuffle_rows(rows: torch.Tensor, seed: int, *purpose: str | int) -> torch.Tensor:
    """Return `rows` (N,) in an order that depends on N, seed and purpose only.

    It is drawn on the CPU, so that it is the same on any device.
    """
    generator = torch.Generator().manual_seed(derive_seed(seed, *purpose))
    return rows[torch.randperm(len(rows), generator=generator, device="cpu").to(rows.device)]


class _DefaultDtype:
    """A switch of torch's default dtype to float32, for blocks that may run in several threads.

    The default belongs to the process and not to a thread. So the first block sets it, and the last
    one to end restores it.
    """

    def __init__(self) -> None:
        """Start without any block that needs float32."""
        self._lock = threading.Lock()
        self._block_count = 0  # that need float32 now
        self._former_dtype = torch.float32  # the default before the first of them

    @contextmanager
    def as_float32(self) -> Iterator[None]:
        """Set the process's default dtype to float32 while at least one block needs it."""
        with self._lock:
            if not self._block_count:
                self._former_dtype = torch.get_default_dtype()
            self._block_count += 1
            if torch.get_default_dtype() != torch.float32:
                torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            with self._lock:
                self._block_count -= 1
                if not self._block_count and torch.get_default_dtype() != self._former_dtype:
                    torch.set_default_dtype(self._former_dtype)


_DEFAULT_DTYPE = _DefaultDtype()


@contextmanager
def isolate_torch_modes() -> Iterator[None]:
    """Run the block as if the caller had changed no mode of torch, and restore the modes after it.

    In the block gradients are enabled, autocast and inference mode are off, and the default is
    float32 on the CPU. The default dtype belongs to the process, so other threads see float32, too.
    """
    with ExitStack() as stack:
        stack.enter_context(_DEFAULT_DTYPE.as_float32())
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(mode=False))
        stack.enter_context(torch.enable_grad())
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        if torch.get_default_device() != torch.device("cpu"):
            stack.enter_context(torch.device("cpu"))
        yield


def usable_cores() -> int:
    """Return how many processor cores this process may use.

    That is OMP_NUM_THREADS at most, if this variable is set.
    """
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    # OMP_NUM_THREADS may be a list, with a number for each level of nesting; the first counts.
    limit = re.match(r"\s*([0-9]{1,9})\s*(,|$)", os.environ.get("OMP_NUM_THREADS", ""))
    if limit:
        cores = min(cores, int(limit[1]))
    return max(1, cores)


@contextmanager
def limit_threads(count: int) -> Iterator[None]:
    """Set torch's number of threads to `count` in the block."""
    former_count = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(former_count)


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch and the libraries of linear algebra to one thread in the block.

    So fitted models do not depend on the number of cores, and small fits do not wait for threads.
    """
    # Imported first, since the limit applies only to libraries that are loaded already (SciPy's is
    # one of them).
    import sklearn  # noqa: F401

    with limit_threads(1), threadpool_limits(1):
        yield
