"""CrypTen, an optional extra, as a library of arithmetic on shares.

CrypTen 0.4.1 imports a converter of ONNX models whose parts torch 2.9 dropped, and names a dead
package among its requirements. So an empty converter stands in for its own before the import
(`load_crypten`, the only one), and the pip command leaves the requirements out. Everything but ONNX
conversion works.

CrypTen keeps one party for each process, in global variables, and makes multiplication triples in
the clear at its first party by default. Inside `act_as_party` a thread acts as another party for
one block of code: CrypTen talks through that party's communicator, and takes triples from its
provider. Outside such blocks CrypTen is unchanged. What needs torch to load is in
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
    "CryptenParty",
    "Integers",
    "Shares",
    "act_as_party",
    "add_shares",
    "compute_last_share",
    "draw_share",
    "load_crypten",
    "reconstruct_sum",
]

INSTALL = INSTALL_CRYPTEN
_CRYPTEN_MODULE = "crypten"
_CONVERTER_MODULE = "crypten.nn.onnx_converter"

# The attribute by which CrypTen's module `mpc` shows that it was patched.
_PATCH_MARK = "__secure_apfed_seats__"

Integers = NDArray[np.int64]
Shares = NDArray[np.uint64]
_WORD = np.dtype("<u8")


def load_crypten() -> Any:
    """Import CrypTen, if it was not imported before, patch it so that `act_as_party` works, and
    return its module. Raises LocalProtocolError: CrypTen cannot be imported.
    """
    crypten = sys.modules.get(_CRYPTEN_MODULE)
    if crypten is None:
        crypten = _import_with_stub()
    _patch_lookups(crypten)
    return crypten


def _import_with_stub() -> ModuleType:
    """Import CrypTen with a stub in place of its ONNX converter, which needs parts that torch
    dropped. Raises LocalProtocolError, with the command to run: CrypTen or a requirement is
    missing, or CrypTen does not load with this torch.
    """
    modules_before = set(sys.modules)
    sys.modules[_CONVERTER_MODULE] = _make_converter_stub()
    try:
        with warnings.catch_warnings():
            # Python warns of invalid escape sequences when it compiles CrypTen's sources.
            warnings.simplefilter("ignore")
            return importlib.import_module(_CRYPTEN_MODULE)
    except ModuleNotFoundError as error:
        _unload_modules(modules_before)
        missing_module = error.name or _CRYPTEN_MODULE
        requirement_hint = (
            ""
            if missing_module == _CRYPTEN_MODULE
            else f", and its requirement {missing_module} with pip"
        )
        raise LocalProtocolError(
            f"the module {missing_module} is missing; install CrypTen, the optional extra `mpc`, "
            f"by `{INSTALL}`{requirement_hint}"
        ) from error
    except (ImportError, AttributeError) as error:
        _unload_modules(modules_before)
        raise LocalProtocolError(
            f"CrypTen does not load beside this torch ({error}); the release that works is "
            f"installed by `{INSTALL}`"
        ) from error


def _unload_modules(modules_before: set[str]) -> None:
    """Remove the modules of CrypTen that a failed import left in `sys.modules`, so that the next
    attempt starts afresh.

    `modules_before`: names of the modules that were imported before that import.
    """
    for name in set(sys.modules) - modules_before:
        if name.partition(".")[0] == _CRYPTEN_MODULE:
            del sys.modules[name]


def _make_converter_stub() -> ModuleType:
    """Return a stub for CrypTen's ONNX converter, whose functions raise LocalProtocolError."""
    converter = ModuleType(_CONVERTER_MODULE, "Stands in for CrypTen's converter of ONNX models.")
    for name in ("from_onnx", "from_pytorch", "from_tensorflow"):
        setattr(converter, name, _refuse_conversion)
    vars(converter)["TF_AND_TF2ONNX"] = False
    return converter


def _refuse_conversion(*_args: object, **_options: object) -> NoReturn:
    """Raise LocalProtocolError in place of a conversion."""
    raise LocalProtocolError(
        "CrypTen 0.4.1 cannot convert models with this torch; build the model from crypten.nn"
    )


@dataclass(frozen=True)
class CryptenParty:
    """A party of a CrypTen computation.

    Attributes:
        communicator: has the methods of CrypTen's communicator that the computation calls.
        provider: has the methods of CrypTen's provider of multiplication triples.
    """

    communicator: Any = field(repr=False)
    provider: Any = field(repr=False)


class _CurrentParty(threading.local):
    """The party that this thread acts as; None: CrypTen's own."""

    party: CryptenParty | None = None


_THREAD_PARTY = _CurrentParty()


@contextmanager
def act_as_party(party: CryptenParty) -> Iterator[None]:
    """Let CrypTen compute as `party` in this thread, inside the `with` block: it uses the party's
    communicator and its provider of triples. Blocks may be nested.
    """
    outer_party = _THREAD_PARTY.party
    _THREAD_PARTY.party = party
    try:
        yield
    finally:
        _THREAD_PARTY.party = outer_party


def _patch_lookups(crypten: Any) -> None:
    """Replace the functions by which CrypTen finds its communicator and its provider of triples.
    Inside `act_as_party` they return those of the party that this thread acts as, elsewhere
    CrypTen's own. Further calls change nothing.

    `crypten`: the imported module.
    """
    communicator = crypten.communicator
    mpc = crypten.mpc
    if hasattr(mpc, _PATCH_MARK):
        return
    original_get = communicator.get
    original_is_initialized = communicator.is_initialized
    original_get_provider = mpc.get_default_provider

    def get() -> Any:
        return original_get() if _THREAD_PARTY.party is None else _THREAD_PARTY.party.communicator

    def is_initialized() -> bool:
        return _THREAD_PARTY.party is not None or bool(original_is_initialized())

    def get_default_provider() -> Any:
        return (
            original_get_provider() if _THREAD_PARTY.party is None else _THREAD_PARTY.party.provider
        )

    communicator.get = get
    communicator.is_initialized = is_initialized
    mpc.get_default_provider = get_default_provider
    setattr(mpc, _PATCH_MARK, True)


def draw_share(key: bytes, shape: tuple[int, ...]) -> Shares:
    """Return a uniform share modulo 2^64 of this shape, expanded from `key`, 32 secret bytes that
    are used for nothing else.
    """
    size = int(np.prod(shape))
    stream = keystream(key, b"additive share", length=_WORD.itemsize * size)
    return np.frombuffer(stream, _WORD).reshape(shape)


def compute_last_share(values: Integers, other_shares: Sequence[Shares]) -> Shares:
    """Return the share that, added to the other shares modulo 2^64, gives the values."""
    last_share = values.astype(np.int64).view(_WORD).copy()
    for share in other_shares:
        last_share -= share
    return last_share


def reconstruct_sum(shares: Sequence[Shares]) -> Integers:
    """Add all shares modulo 2^64 and return signed integers."""
    share_sum = shares[0].copy()
    for share in shares[1:]:
        share_sum += share
    return share_sum.view(np.int64)


def add_shares(shares: Sequence[Shares]) -> Shares:
    """Return one party's share of the sum of several numbers, from its shares of each,
    by CrypTen.
    """
    load_crypten()
    first_tensor, *other_tensors = map(_wrap_share, shares)
    for other_tensor in other_tensors:
        first_tensor = first_tensor + other_tensor
    return _unwrap_words(first_tensor.share)


def _wrap_share(share: Shares) -> Any:
    """Return a share as CrypTen's arithmetic tensor, without its fixed-point encoder."""
    import torch
    from crypten.mpc.primitives import ArithmeticSharedTensor

    # A copy, since torch accepts only writable memory.
    words = torch.from_numpy(share.view(np.int64).copy())
    return ArithmeticSharedTensor.from_shares(words, precision=0)


def _unwrap_words(tensor: Any) -> Shares:
    """Return the words of a torch tensor of int64 as unsigned integers."""
    words: Shares = tensor.numpy().view(_WORD)
    return words
