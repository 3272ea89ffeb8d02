"""CrypTen, an optional extra, as a library of arithmetic on shares: whose party, whose shares.

CrypTen 0.4.1 imports a converter of ONNX models whose parts torch 2.9 dropped, and names a dead
package among its requirements. So an empty converter stands in for its own before the import
(`load_crypten`, the only one), and the pip command leaves the requirements out. Everything but ONNX
conversion works.

CrypTen keeps one party a process, in global variables, and makes multiplication triples in the
clear at its first party unless told otherwise. A `Seat` is a party that lasts for one block of
code in one thread: inside it CrypTen talks through the seat's communicator, and takes triples from
the seat's provider. Outside all seats CrypTen is as ever. What needs torch to load is in
`apfed_protocols.crypten.tensors`.

Additive sharing in Z_2^64: a number is the sum of its shares modulo 2^64, all of
them but one drawn from AES-256-CTR under a fresh key (`apfed_protocols.randomness`): who lacks one
share sees uniform numbers. CrypTen's own sharing draws from `torch.Generator` under seeds that
pairs of neighbours share, and its fixed-point encoder cuts off and overflows silently; neither
is used. Integers only.

Shapes: arrays of any one shape, signed numbers as int64, shares as uint64.
"""

import importlib
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from apfed_protocols.errors import LocalProtocolError
from apfed_protocols.installing import INSTALL_CRYPTEN
from apfed_protocols.randomness import keystream

__all__ = [
    "INSTALL",
    "Integers",
    "Seat",
    "Shares",
    "add_shares",
    "compute_last_share",
    "draw_share",
    "load_crypten",
    "reconstruct_sum",
    "use_seat",
]

INSTALL = INSTALL_CRYPTEN
_CRYPTEN = "crypten"
_CONVERTER = "crypten.nn.onnx_converter"

_TURNED = "__secure_apfed_seats__"

Integers = NDArray[np.int64]
Shares = NDArray[np.uint64]
_WORD = np.dtype("<u8")


def load_crypten() -> Any:
    """Import CrypTen, once, and return its module."""
    known = sys.modules.get(_CRYPTEN)
    crypten = _import_with_stand_in() if known is None else known
    _patch_lookups(crypten)
    return crypten


def _import_with_stand_in() -> ModuleType:
    """Import CrypTen with an empty ONNX converter in place of its own. Raises LocalProtocolError,
    with the command to run: CrypTen or a requirement is missing, or it does not load with this
    torch.
    """
    before = set(sys.modules)
    sys.modules[_CONVERTER] = _make_converter_stub()
    try:
        with warnings.catch_warnings():
            # its sources have backslashes that today's Python complains about when it compiles them
            warnings.simplefilter("ignore")
            return importlib.import_module(_CRYPTEN)
    except ModuleNotFoundError as error:
        _unload_modules(before)
        missing = error.name or _CRYPTEN
        extra = "" if missing == _CRYPTEN else f", and its requirement {missing} with pip"
        raise LocalProtocolError(
            f"the module {missing} is missing; install CrypTen, the optional extra `mpc`, by "
            f"`{INSTALL}`{extra}"
        ) from error
    except (ImportError, AttributeError) as error:
        _unload_modules(before)
        raise LocalProtocolError(
            f"CrypTen does not load beside this torch ({error}); the release that works is "
            f"installed by `{INSTALL}`"
        ) from error


def _unload_modules(before: set[str]) -> None:
    """Remove modules of a failed import of CrypTen, so that the next attempt starts afresh."""
    for name in set(sys.modules) - before:
        if name.partition(".")[0] == _CRYPTEN:
            del sys.modules[name]


def _make_converter_stub() -> ModuleType:
    """Return a module in place of CrypTen's ONNX converter; its functions refuse."""
    converter = ModuleType(_CONVERTER, "Stands in for CrypTen's converter of ONNX models.")
    for name in ("from_onnx", "from_pytorch", "from_tensorflow"):
        setattr(converter, name, _refuse_conversion)
    vars(converter)["TF_AND_TF2ONNX"] = False
    return converter


def _refuse_conversion(*_args: object, **_options: object) -> NoReturn:
    raise LocalProtocolError(
        "CrypTen 0.4.1 cannot convert models with this torch; build the model from crypten.nn"
    )


@dataclass(frozen=True)
class Seat:
    """A party of a CrypTen computation.

    Attributes:
        communicator: satisfies of CrypTen's interface what is asked of it inside.
        provider: deals triples.
    """

    communicator: Any = field(repr=False)
    provider: Any = field(repr=False)


class _Seats(threading.local):
    now: Seat | None = None


_SEATS = _Seats()


@contextmanager
def use_seat(active: Seat) -> Iterator[None]:
    """Be the party of `active` in this thread."""
    before = _SEATS.now
    _SEATS.now = active
    try:
        yield
    finally:
        _SEATS.now = before


def _patch_lookups(crypten: Any) -> None:
    """Make CrypTen look up communicator and triple provider in this thread's `Seat`, if it has one;
    done once.
    """
    communicator = crypten.communicator
    mpc = crypten.mpc
    if hasattr(mpc, _TURNED):
        return
    their_get = communicator.get
    their_state = communicator.is_initialized
    their_provider = mpc.get_default_provider

    def get() -> Any:
        return their_get() if _SEATS.now is None else _SEATS.now.communicator

    def is_initialized() -> bool:
        return _SEATS.now is not None or bool(their_state())

    def get_default_provider() -> Any:
        return their_provider() if _SEATS.now is None else _SEATS.now.provider

    communicator.get = get
    communicator.is_initialized = is_initialized
    mpc.get_default_provider = get_default_provider
    setattr(mpc, _TURNED, True)


def draw_share(key: bytes, shape: tuple[int, ...]) -> Shares:
    """Return the uniform share that follows from `key`; a key is used once."""
    size = int(np.prod(shape))
    stream = keystream(key, b"additive share", length=_WORD.itemsize * size)
    return np.frombuffer(stream, _WORD).reshape(shape)


def compute_last_share(values: Integers, other_shares: Sequence[Shares]) -> Shares:
    """Return the share that, added to the others modulo 2^64, gives the values."""
    last = values.astype(np.int64).view(_WORD).copy()
    for share in other_shares:
        last -= share
    return last


def reconstruct_sum(shares: Sequence[Shares]) -> Integers:
    """Add all shares modulo 2^64 and return signed integers."""
    summed = shares[0].copy()
    for share in shares[1:]:
        summed += share
    return summed.view(np.int64)


def add_shares(shares: Sequence[Shares]) -> Shares:
    """Add one party's shares of several numbers with CrypTen: its share of their sum."""
    load_crypten()
    first, *others = map(_wrap_share, shares)
    for other in others:
        first = first + other
    return _unwrap_words(first.share)


def _wrap_share(share: Shares) -> Any:
    """Return a share as CrypTen's arithmetic tensor, without its fixed-point encoder."""
    import torch
    from crypten.mpc.primitives import ArithmeticSharedTensor

    # torch takes no memory that it must not write to.
    words = torch.from_numpy(share.view(np.int64).copy())
    return ArithmeticSharedTensor.from_shares(words, precision=0)


def _unwrap_words(tensor: Any) -> Shares:
    """Return the words of a tensor of int64."""
    words: Shares = tensor.numpy().view(_WORD)
    return words
