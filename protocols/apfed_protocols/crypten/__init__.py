"""CrypTen, an optional extra, as a library of arithmetic on shares: whose party, whose shares.

CrypTen 0.4.1 imports a converter of ONNX models whose parts torch 2.9 dropped, and names a dead
package among its requirements. So an empty converter stands in for its own before the import
(`load_crypten`, the only one), and the pip command leaves the requirements out. Everything but ONNX
conversion works.

CrypTen keeps one party a process, in global variables, and makes multiplication triples in the
clear at its first party unless told otherwise. A `Seat` is a party that lasts for one block of
code, in one thread or in the whole process: inside it CrypTen talks through the seat's
communicator, and takes triples from the seat's provider or from nobody. Outside all seats CrypTen
is as ever. What needs torch to load is in `apfed_protocols.crypten.tensors`.

Additive sharing in Z_2^64: a number is the sum of its shares modulo 2^64, all of
them but one drawn from AES-256-CTR under a fresh key (`apfed_protocols.randomness`): who lacks one
share sees uniform numbers. CrypTen's own sharing draws from `torch.Generator` under seeds that
pairs of neighbours share, and its fixed-point encoder cuts off and overflows silently; neither
is used. Integers only.

Shapes: W parties; arrays of any one shape, signed numbers as int64, shares as uint64.
"""

import hashlib
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

from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.randomness import fresh_key, keystream

__all__ = [
    "INSTALL", "Integers", "Seat", "Shares", "add_shares", "complete", "draw_share", "load_crypten",
    "seated", "sum_at_first", "total",
]  # fmt: skip

INSTALL = "pip install --no-deps crypten==0.4.1"
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
    _turn_lookups(crypten)
    return crypten


def _import_with_stand_in() -> ModuleType:
    before = set(sys.modules)
    sys.modules[_CONVERTER] = _stand_in()
    try:
        with warnings.catch_warnings():
            # its sources have backslashes that today's Python complains about when it compiles them
            warnings.simplefilter("ignore")
            return importlib.import_module(_CRYPTEN)
    except ModuleNotFoundError as error:
        _forget(before)
        missing = error.name or _CRYPTEN
        extra = "" if missing == _CRYPTEN else f", and its requirement {missing} with pip"
        raise LocalProtocolError(
            f"the module {missing} is missing; install CrypTen, the optional extra `mpc`, by "
            f"`{INSTALL}`{extra}"
        ) from error
    except (ImportError, AttributeError) as error:
        _forget(before)
        raise LocalProtocolError(
            f"CrypTen does not load beside this torch ({error}); the release that works is "
            f"installed by `{INSTALL}`"
        ) from error


def _forget(before: set[str]) -> None:
    for name in set(sys.modules) - before:
        if name.partition(".")[0] == _CRYPTEN:
            del sys.modules[name]


def _stand_in() -> ModuleType:
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
    """One party of a CrypTen computation.

    Attributes:
        communicator: satisfies CrypTen's interface, such as `apfed_protocols.crypten.tensors`.
        provider: deals triples; None refuses every multiplication.
    """

    communicator: Any = field(repr=False)
    provider: Any = field(default=None, repr=False)


class _Seats(threading.local):
    process: Seat | None = None
    thread: Seat | None = None

    def now(self) -> Seat | None:
        return self.thread or type(self).process


_SEATS = _Seats()


@contextmanager
def seated(seat: Seat, *, whole_process: bool = False) -> Iterator[None]:
    """Be the party of `seat`, in this thread or, if no other is, in the whole process."""
    if not whole_process:
        before, _SEATS.thread = _SEATS.thread, seat
        try:
            yield
        finally:
            _SEATS.thread = before
        return
    if _Seats.process is not None:
        raise LocalProtocolError("this process is a CrypTen party already; close that world first")
    _Seats.process = seat
    try:
        yield
    finally:
        _Seats.process = None


def _turn_lookups(crypten: Any) -> None:
    communicator, mpc = crypten.communicator, crypten.mpc
    if hasattr(mpc, _TURNED):
        return
    their_get, their_state = communicator.get, communicator.is_initialized
    their_provider = mpc.get_default_provider

    def get() -> Any:
        seat = _SEATS.now()
        return their_get() if seat is None else seat.communicator

    def is_initialized() -> bool:
        return _SEATS.now() is not None or bool(their_state())

    def get_default_provider() -> Any:
        seat = _SEATS.now()
        if seat is None:
            return their_provider()
        if seat.provider is None:
            raise LocalProtocolError(
                "this CrypTen party has no provider of triples, so it adds but does not multiply; "
                "give it the triples of a dealer"
            )
        return seat.provider

    communicator.get, communicator.is_initialized = get, is_initialized
    mpc.get_default_provider = get_default_provider
    setattr(mpc, _TURNED, True)


def draw_share(key: bytes, shape: tuple[int, ...]) -> Shares:
    """Return the uniform share that `key` stands for; a key is used once."""
    size = int(np.prod(shape))
    stream = keystream(key, b"additive share", length=_WORD.itemsize * size)
    return np.frombuffer(stream, _WORD).reshape(shape)


def complete(values: Integers, drawn: Sequence[Shares]) -> Shares:
    last = values.astype(np.int64).view(_WORD).copy()
    for share in drawn:
        last -= share
    return last


def total(shares: Sequence[Shares]) -> Integers:
    summed = shares[0].copy()
    for share in shares[1:]:
        summed += share
    return summed.view(np.int64)


def add_shares(shares: Sequence[Shares]) -> Shares:
    """Add one party's shares of several numbers with CrypTen: its share of their sum."""
    load_crypten()
    first, *others = (_shared(share) for share in shares)
    for other in others:
        first = first + other
    return _words(first.share)


def sum_at_first(communicator: Any, values: Integers) -> Integers | None:
    """Add each party's numbers in a CrypTen world; the party of rank 0 learns the sum alone.

    Every party calls this with an array of the same shape. Shares are gathered, and put
    together at rank 0: CrypTen's `reveal(dst=0)` would leave plaintext at other parties.

    Args:
        communicator: this party's, such as `apfed_protocols.crypten.tensors` describes. Who
            reads what it carries reads all numbers.
        values: this party's, int64; sums must stay below 2^63 in magnitude.

    Returns:
        The sum at rank 0, None elsewhere.
    """
    if values.dtype != np.int64:
        raise LocalProtocolError(
            f"additive sharing takes int64 numbers, got {values.dtype}; quantise them first"
        )
    load_crypten()
    _agree_on_shape(communicator, values.shape)
    rank, parties = communicator.get_rank(), communicator.get_world_size()
    drawn = [draw_share(fresh_key(), values.shape) for _ in range(parties - 1)]
    own = [*drawn[:rank], complete(values, drawn), *drawn[rank:]]
    sent = [_shared(share).share for share in own]
    size = sent[rank].size()
    received = [
        communicator.scatter(sent if source == rank else None, source, size)
        for source in range(parties)
    ]
    summed = _shared_tensor(received[0])
    for share in received[1:]:
        summed = summed + _shared_tensor(share)
    gathered = communicator.gather(summed.share, 0)
    return total([_words(share) for share in gathered]) if rank == 0 else None


def _agree_on_shape(communicator: Any, shape: tuple[int, ...]) -> None:
    """Compare digests first: gloo ends the process at a message longer than expected."""
    import torch

    digest = hashlib.sha256(b"shape" + repr(shape).encode()).digest()
    mark = int.from_bytes(digest[:8], "big", signed=True)
    marks = communicator.all_gather(torch.tensor([mark]))
    others = [rank for rank, theirs in enumerate(marks) if int(theirs) != mark]
    if others:
        raise RemoteProtocolError(
            f"party {communicator.get_rank()} adds numbers of shape {shape}, parties "
            f"{', '.join(map(str, others))} others; give all of them arrays of one shape"
        )


def _shared(share: Shares) -> Any:
    import torch

    # torch takes no memory that it must not write to.
    return _shared_tensor(torch.from_numpy(share.view(np.int64).copy()))


def _shared_tensor(share: Any) -> Any:
    from crypten.mpc.primitives import ArithmeticSharedTensor

    return ArithmeticSharedTensor.from_shares(share, precision=0)


def _words(tensor: Any) -> Shares:
    words: Shares = tensor.numpy().view(_WORD)
    return words
