"""Checks of what parties fix: names that a message can hold, whole numbers of Python's type."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from apfed_protocols.errors import LocalProtocolError

__all__ = ["is_whole", "require_names", "take_numpy_integers"]


_MOST_NAME_BYTES = 255


def require_names(of: str, session: object, parties: Sequence[object]) -> None:
    """Refuse names that are no text of 1 to 255 bytes in UTF-8, and parties of one name.

    Args:
        of: the protocol, as the noun of a sentence.
        session: its name.
        parties: theirs.

    Raises:
        LocalProtocolError: says which name.
    """
    for name in (session, *parties):
        if not 0 < _size(name) <= _MOST_NAME_BYTES:
            raise LocalProtocolError(
                f"a {of} needs a session name and a name for every party, text of 1 to "
                f"{_MOST_NAME_BYTES} bytes in UTF-8 each, got {name!r:.100}"
            )
    if len(set(parties)) != len(parties):
        raise LocalProtocolError(
            f"the parties of a {of} are all different, got {', '.join(map(str, parties))}"
        )


def _size(name: object) -> int:
    try:
        return len(name.encode()) if isinstance(name, str) else 0
    except UnicodeEncodeError:
        return 0


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
