"""A pretend machine with two GPUs, for tests of where everything computes.

Tensors on it are this machine's own, of a subclass whose `.device` says cuda:0 or cuda:1. What a
real GPU refuses is refused, with the line of ours that asked for it: operands on two devices,
`.numpy()` of what lies on a GPU, a generator of another device, solvers that only the CPU has, and
a look at a copy that nobody has waited for. What makes the program wait for a GPU is counted.
What it cannot show: speed, memory, and the last bits.
"""

import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_flatten, tree_map

CPU = torch.device("cpu")
META = torch.device("meta")
DEVICES = (torch.device("cuda:0"), torch.device("cuda:1"))
_ROOT = Path(__file__).parents[1]
_OURS = tuple(
    f"{_ROOT}/{name}/" for name in ("protocols", "secure_apfed", "attacks", "experiments")
)
_PLAIN = torch._C.DisableTorchFunctionSubclass
# Properties as what a call of theirs is known by.
_DEVICE, _IS_CUDA, _IS_CPU = (
    getattr(Tensor, name).__get__ for name in ("device", "is_cuda", "is_cpu")
)

_COPIES = {Tensor.copy_}
# Their second operand, of packed sequences, is the CPU's wherever the others lie.
_PACKS = {torch._VF._pack_padded_sequence, torch._pack_padded_sequence}
_LENGTHS = {*_PACKS, torch._VF.gru}
_INDEXES = {Tensor.__getitem__, Tensor.__setitem__, Tensor.index_put_, Tensor.index_put}
_READS = {
    Tensor.tolist,
    Tensor.item,
    Tensor.__bool__,
    Tensor.__int__,
    Tensor.__float__,
    Tensor.__len__,
    Tensor.__index__,
    Tensor.__repr__,
    Tensor.__format__,
}
_LEARNS = {Tensor.backward, torch.autograd.backward, torch.autograd.grad}
# What a result's size or a number on the GPU decides is waited for.
_WAITED_FOR = {
    *(_READS - {Tensor.__len__}),
    Tensor.__contains__,
    Tensor.allclose,
    Tensor.bincount,
    Tensor.equal,
    Tensor.masked_select,
    Tensor.nonzero,
    Tensor.numpy,
    Tensor.unique,
    Tensor.__array__,
    torch.allclose,
    torch.bincount,
    torch.equal,
    torch.isin,
    torch.linalg.lstsq,
    torch.linalg.solve,
    torch.masked_select,
    torch.nonzero,
    torch.repeat_interleave,
    torch.unique,
}
# What makes a tensor of numbers of the program, which a GPU is sent from memory that is not pinned.
_MADE_OF_NUMBERS = {Tensor.new_tensor, torch.as_tensor, torch.asarray, torch.tensor}


class DeviceError(RuntimeError):
    """What a GPU would have refused."""


class OnDevice(Tensor):
    """A tensor that lies on a pretend GPU."""

    at: torch.device

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            with _PLAIN():
                copied = move_tensor(
                    self.detach().clone().requires_grad_(self.requires_grad), self.at
                )
            if getattr(self, "_is_param", False):
                copied._is_param = True
            memo[id(self)] = copied
        placed: Tensor = memo[id(self)]
        return placed

    def __reduce_ex__(self, protocol: Any) -> Any:
        return move_tensor(self, CPU).__reduce_ex__(protocol)


def move_tensor(value: Any, device: torch.device) -> Any:
    """Return a tensor of the same memory on that device; leave what is no tensor alone."""
    if not isinstance(value, Tensor) or _where(value) == device:
        return value  # an alias would be another tensor to autograd
    with _PLAIN():
        if device == CPU:
            return value.as_subclass(Tensor)
        placed = value.as_subclass(OnDevice)
        placed.at = device
        return placed


def _where(tensor: Tensor) -> torch.device:
    if isinstance(tensor, OnDevice):
        return tensor.at
    with _PLAIN():
        device: torch.device = _DEVICE(tensor)
    return device


def _device(said: Any) -> torch.device:
    device = torch.device("cuda", said) if isinstance(said, int) else torch.device(said)
    if device.type == "cuda":
        return DEVICES[device.index or 0]
    return device


class Pretended:
    """How often which function of torch had tensors on a device, and lines of ours that asked for
    gradients of what lies on the CPU, or waited for a GPU.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self.on: dict[torch.device, Counter[str]] = defaultdict(Counter)
        self.learnt_on_cpu: list[str] = []
        self.waits: list[str] = []
        self.unwaited: dict[int, Tensor] = {}

    def wait(self, name: str) -> None:
        """Note that the program waits for a GPU; all copies of before are there then."""
        self.waits.append(f"{name} at {_our_line()}")
        self.unwaited.clear()


_SEEN = Pretended()


def _our_line() -> str:
    for frame in reversed(traceback.extract_stack()):
        if frame.filename.startswith(_OURS) and not frame.filename.endswith("/seeds.py"):
            path = Path(frame.filename).relative_to(_ROOT)
            return f"{path}:{frame.lineno}: {frame.line}"
    return "a test"


def _refuse(subject: str, name: str) -> None:
    raise DeviceError(f"{subject}, in {name} at {_our_line()}")


def _tensors(values: Any) -> list[Tensor]:
    return [one for one in tree_flatten(values)[0] if isinstance(one, Tensor)]


def _call(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Do what torch does, in the place where a machine with GPUs would."""
    known = _PROPERTIES.get(func) or _MOVES.get(func)
    with _PLAIN():
        if known is not None:
            return known(*args, **kwargs)
        name = resolve_name(func) or getattr(func, "__name__", str(func))
        _refuse_unwaited(name, args, kwargs)
        if name.endswith("__set__"):  # of .grad, .data and their like
            return func(*args, **kwargs)
        place = find_place(func, name, args, kwargs)
        _count(func, name, place, args, kwargs)
        if is_waiting(func, place, args, kwargs):
            _SEEN.wait(name)
        if place in DEVICES and kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": CPU}
        found = func(*args, **kwargs)
        if func in _PACKS:
            return move_tensor(found[0], place), found[1]
        return found if place == META else tree_map(lambda value: move_tensor(value, place), found)


def find_place(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> torch.device:
    """Return where the result lies; refuse operands that do not go together."""
    operands = (args[0], *args[2:]) if func in _LENGTHS else args
    given = _tensors((operands, kwargs))
    places = {_where(one) for one in given if one.dim() or _where(one) != CPU}
    said = None if kwargs.get("device") is None else _device(kwargs["device"])
    drawn_at = said or next(iter(places), CPU)
    for one in tree_flatten((args, kwargs))[0]:
        if isinstance(one, torch.Generator) and getattr(one, "at", CPU) != drawn_at:
            _refuse(f"a generator of {getattr(one, 'at', CPU)} for {drawn_at}", name)
    if said is not None:
        return said
    if func in (Tensor.numpy, Tensor.__array__):
        if places - {CPU} and not kwargs.get("force"):
            _refuse("numpy() of a tensor on a GPU", name)
        return CPU
    return CPU if func in _READS else find_default_place(func, name, args, kwargs, places)


def find_default_place(
    func: Any, name: str, args: Any, kwargs: dict[str, Any], places: set[torch.device]
) -> torch.device:
    """Return where a result lies that has no place of its own: beside its operands."""
    if func in _COPIES:
        return _where(args[0])
    if func in _INDEXES:
        return check_indices(func, name, args)
    if len(places) > 1:
        _refuse(f"tensors on {' and '.join(sorted(map(str, places)))}", name)
    place = next(iter(places), CPU)
    if place != CPU and kwargs.get("driver") not in (None, "gels", "gesvd", "gesvdj", "gesvda"):
        _refuse(f"driver {kwargs['driver']} on a GPU", name)
    return place


def check_indices(func: Any, name: str, args: Any) -> torch.device:
    """Require indices on the CPU or beside what they index, and values beside it, or one."""
    place = _where(args[0])
    indices = [one for one in _tensors(args[1:2]) if one.dim()]
    if any(_where(one) not in (CPU, place) for one in indices):
        _refuse(f"a tensor on {place} indexed by one on a GPU elsewhere", name)
    for value in _tensors(args[2:3]):
        if indices and value.dim() and _where(value) != place:
            _refuse(f"a tensor on {_where(value)} written into one on {place}", name)
    return place


def _refuse_unwaited(name: str, args: Any, kwargs: dict[str, Any]) -> None:
    if _SEEN.unwaited and any(id(one) in _SEEN.unwaited for one in _tensors((args, kwargs))):
        _refuse("a copy from a GPU that nobody has waited for", name)


def is_waiting(func: Any, place: torch.device, args: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether the program goes on only when a GPU has done all its work."""
    if func in _COPIES:
        return place != _where(args[1]) and not _is_sent_ahead(args[1], kwargs)
    if func in _INDEXES:
        return _where(args[0]) != CPU and _waits_for_index(args)
    if func in _MADE_OF_NUMBERS:
        return place != CPU
    return func in _WAITED_FOR and any(_where(one) != CPU for one in _tensors((args, kwargs)))


def _waits_for_index(args: Any) -> bool:
    """A mask is counted first; an index or a value from here is copied."""
    indices = [one for one in _tensors(args[1:2]) if one.dim()]
    values = [one for one in _tensors(args[2:3]) if indices]
    masks = any(one.dtype in (torch.bool, torch.uint8) for one in indices)
    return masks or any(_where(one) == CPU for one in (*indices, *values))


def _is_sent_ahead(source: Tensor, how: Mapping[str, Any]) -> bool:
    return bool(how.get("non_blocking")) and getattr(source, "is_in_pinned_memory", False)


def _count(func: Any, name: str, place: torch.device, args: Any, kwargs: dict[str, Any]) -> None:
    _SEEN.on[place][name] += 1
    if func in _LEARNS and {_where(one) for one in _tensors((args, kwargs))} == {CPU}:
        _SEEN.learnt_on_cpu.append(_our_line())


def _to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`Tensor.to` in each of its forms."""
    place = _where(tensor)
    rest = []
    for one in (*args, kwargs.pop("device", None), kwargs.pop("other", None)):
        if isinstance(one, Tensor):
            place = _where(one)
            rest.append(one.dtype)
        elif isinstance(one, str | torch.device):
            place = _device(one)
        elif isinstance(one, torch.dtype):
            rest.append(one)
    if "dtype" in kwargs and kwargs["dtype"] is not None:
        rest.append(kwargs["dtype"])
    moved = move_tensor(tensor, CPU)
    moved = moved.to(*rest, copy=True) if rest or kwargs.get("copy") else moved
    is_copied = place != _where(tensor)
    is_late = place == CPU and bool(kwargs.get("non_blocking"))
    if is_copied and not is_late and not _is_sent_ahead(tensor, kwargs):
        _SEEN.wait("Tensor.to")
    if place == _where(tensor):
        same = moved.dtype == tensor.dtype and not kwargs.get("copy")
        moved = tensor if same else moved
    elif moved.data_ptr() == tensor.data_ptr():
        moved = moved.clone()
    placed: Tensor = move_tensor(moved, place)
    if is_copied and is_late:
        _SEEN.unwaited[id(placed)] = placed
    return placed


def _pin(tensor: Tensor, device: Any = None) -> Tensor:
    if _where(tensor) != CPU:
        _refuse("pin_memory() of what lies on a GPU", "Tensor.pin_memory")
    pinned = tensor.clone()
    vars(pinned)["is_in_pinned_memory"] = True
    return pinned


_PROPERTIES: dict[Any, Callable[..., Any]] = {
    _DEVICE: _where,
    _IS_CUDA: lambda tensor: _where(tensor) != CPU,
    _IS_CPU: lambda tensor: _where(tensor) == CPU,
    Tensor.get_device: lambda tensor: -1 if _where(tensor) == CPU else _where(tensor).index,
    torch._has_compatible_shallow_copy_type: lambda *tensors: False,
}
_MOVES: dict[Any, Callable[..., Any]] = {
    Tensor.to: _to,
    Tensor.pin_memory: _pin,
    Tensor.cpu: lambda tensor, **how: _to(tensor, CPU),
    Tensor.cuda: lambda tensor, device=0, **how: _to(tensor, _device(device)),
}


class _Everything(TorchFunctionMode):
    """Sees what has no tensor of ours among its arguments: factories, and what the CPU does."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(func, args, kwargs or {})


def _load_from_state_dict(module: torch.nn.Module, *args: Any) -> None:
    """Into the parameters that there are, as by default: only where they move they are others."""
    torch.__future__.set_swap_module_params_on_conversion(False)
    try:
        _LOAD(module, *args)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(True)


_LOAD = torch.nn.Module._load_from_state_dict


class _Generator(torch.Generator):
    at: torch.device

    def __new__(cls, device: Any = "cpu") -> "_Generator":
        made: _Generator = super().__new__(cls, CPU)  # type: ignore[call-arg]
        made.at = _device(device)
        return made


class _Stream:
    def synchronize(self) -> None:
        _SEEN.wait("Stream.synchronize")


class _Autocast(torch.autocast):
    def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
        super().__init__("cpu", *args, **kwargs)


@contextmanager
def pretend_gpus() -> Iterator[Pretended]:
    """Run a block on the pretend machine."""
    global _SEEN
    before = _SEEN
    _SEEN = Pretended()
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    cuda: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: len(DEVICES),
        "get_device_name": lambda *device: "a pretend GPU",
        "current_device": lambda: 0,
        "current_stream": lambda device=None: _Stream(),
        "synchronize": lambda device=None: _SEEN.wait("torch.cuda.synchronize"),
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda device="cuda": torch.empty(0),
        "set_rng_state": lambda state, device="cuda": None,
    }
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with (
            patch.multiple(torch.cuda, **cuda),
            patch.multiple(torch, autocast=_Autocast, Generator=_Generator),
            patch.object(torch.nn.Module, "_load_from_state_dict", _load_from_state_dict),
            _Everything(),
        ):
            yield _SEEN
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)
        _SEEN = before
