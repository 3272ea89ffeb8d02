"""Guesses that were made before.

What an adversary would guess without the run is the same for every run on the same data and seed,
so that a process which attacks many keeps the last guesses. They are functions of what is hashed,
their seeds among it.
"""

from collections import OrderedDict
from collections.abc import Callable

import joblib

from attacks.columns import FloatArray

__all__ = ["guessed_once"]

_MOST = 128
_KEPT: OrderedDict[str, FloatArray] = OrderedDict()


def guessed_once(guess: Callable[[], FloatArray], *made_of: object) -> FloatArray:
    """Return what `guess` returns, or returned where it was made of the same; nobody changes it."""
    key = joblib.hash(made_of)
    if key not in _KEPT:
        found = guess()
        found.setflags(write=False)
        _KEPT[key] = found
        if len(_KEPT) > _MOST:
            _KEPT.popitem(last=False)
    _KEPT.move_to_end(key)
    return _KEPT[key]
