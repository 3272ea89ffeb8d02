"""Whole numbers of NumPy where Python's are awaited: lengths, steps and counts often are such."""

from dataclasses import fields
from typing import Any

import numpy as np

__all__ = ["is_whole", "take_numpy_integers"]


def is_whole(value: object) -> bool:
    """Whether it is a whole number, of Python's type or of NumPy's; a truth value is none."""
    return type(value) is int or isinstance(value, np.integer)


def take_numpy_integers(holder: Any) -> None:
    """Turn NumPy's integers in the fields of a frozen dataclass, or in tuples there, into Python's.

    For the start of `__post_init__`: digests, bytes on the wire and checks of types are of those.
    """
    for field in fields(holder):
        value = getattr(holder, field.name)
        if isinstance(value, np.integer):
            object.__setattr__(holder, field.name, int(value))
        elif isinstance(value, tuple) and any(isinstance(one, np.integer) for one in value):
            plain = tuple(int(one) if isinstance(one, np.integer) else one for one in value)
            object.__setattr__(holder, field.name, plain)
