"""Checks of what parties fix, and of who sent something: names, types, whole numbers, ranges."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError

MAX_ANNOUNCED_BYTES = 2**34
"""Bytes of memory that a party allocates at most because of a number in a peer's message, before
the peer has sent that much."""
_MAX_NAME_BYTES = 255
_PEOPLE_BYTES = 32


def require_name(noun: str, name: object) -> None:
    """Raise LocalProtocolError unless the name of a session or party is a text of 1 to 255 bytes in
    UTF-8.

    `noun`: the protocol, for the error.
    """
    try:
        size = len(name.encode()) if isinstance(name, str) else 0
    except UnicodeEncodeError:
        size = 0
    if not 0 < size <= _MAX_NAME_BYTES:
        raise LocalProtocolError(
            f"a {noun} needs a session name and a name for every party, text of 1 to "
            f"{_MAX_NAME_BYTES} bytes in UTF-8 each, got {name!r:.100}"
        )


def require_names(noun: str, session: object, parties: Sequence[object]) -> None:
    """Raise LocalProtocolError unless the names of the session and of all parties are valid, and
    the parties' names are different.

    `noun`: the protocol, for the error.
    """
    for name in (session, *parties):
        require_name(noun, name)
    if len(set(parties)) != len(parties):
        raise LocalProtocolError(
            f"the parties of a {noun} are all different, got {', '.join(map(str, parties))}"
        )


def require_type(holder: object, kind: type, *fields: str) -> None:
    """Raise LocalProtocolError unless these attributes of `holder` are exactly of the type `kind`:
    a bool is no int here.
    """
    for field in fields:
        value = getattr(holder, field)
        if type(value) is not kind:
            raise LocalProtocolError(
                f"{field} of {type(holder).__name__} is of type {kind.__name__}, got {value!r} of "
                f"type {type(value).__name__}"
            )


def require_ranges(holder: object, ranges: Mapping[str, tuple[int, int]]) -> None:
    """Raise LocalProtocolError unless attributes of `holder` are integers in their ranges.

    `ranges`: smallest and largest value by attribute.
    """
    for name, (low, high) in ranges.items():
        value = getattr(holder, name)
        if type(value) is not int or not low <= value <= high:
            raise LocalProtocolError(f"{name} is a number in {low}..{high}, got {value!r}")


def require_people(people: bytes, noun: str) -> bytes:
    """Return `people` unchanged if it is a digest of 32 bytes, not all zero: zeros stand for "no
    digest". Raises LocalProtocolError: it is something else.

    `noun`: what was digested, for the error.
    """
    if type(people) is not bytes or len(people) != _PEOPLE_BYTES or not any(people):
        raise LocalProtocolError(f"people is a digest of {_PEOPLE_BYTES} bytes of the {noun}")
    return people


def require_all(need: str, received: Collection[str], expected: Sequence[str]) -> None:
    """Raise RemoteProtocolError unless exactly the expected parties sent a message.

    Args:
        need: the start of the error's sentence, as "a decomposition needs the tables of".
        received: the senders of the messages that arrived.
        expected: the parties that had to send one.
    """
    if set(received) != set(expected):
        missing = set(expected) - set(received)
        unknown = set(received) - set(expected)
        raise RemoteProtocolError(
            f"{need} {', '.join(expected)}; missing: {', '.join(sorted(missing)) or 'none'}; "
            f"unknown: {', '.join(sorted(map(str, unknown))) or 'none'}"
        )


def is_whole(value: object) -> bool:
    """Return whether a value is an integer of Python's or NumPy's type; a bool is not."""
    return type(value) is int or isinstance(value, np.integer)


def take_numpy_integers(holder: Any) -> None:
    """Replace NumPy integers in the fields of a frozen dataclass, and in tuples in its fields, by
    Python integers, in place.

    Called first in `__post_init__`, since digests, wire formats and checks of types expect Python
    integers.
    """
    for field in fields(holder):
        value = getattr(holder, field.name)
        # A frozen dataclass is changed by `object.__setattr__`.
        if isinstance(value, np.integer):
            object.__setattr__(holder, field.name, int(value))
        elif isinstance(value, tuple) and any(isinstance(item, np.integer) for item in value):
            plain = tuple(int(item) if isinstance(item, np.integer) else item for item in value)
            object.__setattr__(holder, field.name, plain)
