"""Guesses that were made before.

What an adversary would guess without the run is the same for every run on the same data and seed,
so that a process which attacks many keeps the last guesses. They are functions of what is hashed,
their seeds among it.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apfed_attacks.columns import FloatArray

__all__ = ["guessed_once"]

_MOST = 128
_KEPT: OrderedDict[bytes, FloatArray] = OrderedDict()


def guessed_once(guess: Callable[[], FloatArray], *made_of: NDArray[Any] | str | int) -> FloatArray:
    """Return what `guess` returns, or returned where it was made of the same; nobody changes it."""
    key = _digest(made_of)
    if key not in _KEPT:
        found = guess()
        found.setflags(write=False)
        _KEPT[key] = found
        if len(_KEPT) > _MOST:
            _KEPT.popitem(last=False)
    _KEPT.move_to_end(key)
    return _KEPT[key]


def _digest(made_of: Iterable[NDArray[Any] | str | int]) -> bytes:
    """Of values and their types: no two lists of them have the same."""
    found = hashlib.sha256()
    for one in made_of:
        if isinstance(one, np.ndarray):
            assert one.dtype.kind in "bif"  # whose bytes are their values
            found.update(repr((one.dtype.str, one.shape)).encode())
            found.update(np.ascontiguousarray(one).data)
        else:
            found.update(repr((type(one).__name__, one)).encode())
    return found.digest()
