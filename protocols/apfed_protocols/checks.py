"""Checks of what parties fix, and of who sent something: names, types, whole numbers, ranges."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError

MAX_ANNOUNCED_BYTES = 2**34
"""Memory that a number which a peer names may make a party take, before as much has come of it."""
_MAX_NAME_BYTES = 255
_PEOPLE_BYTES = 32


def require_name(noun: str, name: object) -> None:
    """Refuse a name of a session or party that is no text of 1 to 255 bytes in UTF-8.

    `noun` is the protocol, for the error sentence.
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
    """Raise LocalProtocolError unless the session and all parties have valid names, the parties
    different ones.

    `noun`: what each party is called in errors.
    """
    for name in (session, *parties):
        require_name(noun, name)
    if len(set(parties)) != len(parties):
        raise LocalProtocolError(
            f"the parties of a {noun} are all different, got {', '.join(map(str, parties))}"
        )


def require_type(holder: object, kind: type, *fields: str) -> None:
    """Raise LocalProtocolError unless these attributes of `holder` are exactly of this type: a bool
    is no int here.
    """
    for field in fields:
        value = getattr(holder, field)
        if type(value) is not kind:
            raise LocalProtocolError(
                f"{field} of {type(holder).__name__} is of type {kind.__name__}, got {value!r} of "
                f"type {type(value).__name__}"
            )


def require_ranges(holder: object, ranges: Mapping[str, tuple[int, int]]) -> None:
    """Raise LocalProtocolError unless these attributes of `holder` are integers within
    (low, high).

    `ranges`: smallest and largest value by attribute.
    """
    for name, (low, high) in ranges.items():
        value = getattr(holder, name)
        if type(value) is not int or not low <= value <= high:
            raise LocalProtocolError(f"{name} is a number in {low}..{high}, got {value!r}")


def require_people(people: bytes, noun: str) -> bytes:
    """Return `people` if it is a digest of 32 bytes. Raises LocalProtocolError: it is none; `noun`
    names the protocol.
    """
    if type(people) is not bytes or len(people) != _PEOPLE_BYTES or not any(people):
        raise LocalProtocolError(f"people is a digest of {_PEOPLE_BYTES} bytes of the {noun}")
    return people


def require_all(need: str, received: Collection[str], expected: Sequence[str]) -> None:
    """Raise RemoteProtocolError unless exactly the expected senders are there; `need` starts its
    sentence.

    `received`: the senders whose message has come.
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
    """Turn NumPy's integers in the fields of a frozen dataclass, or in tuples there, into Python's.

    For the start of `__post_init__`: digests, bytes on the wire and checks of types are of those.

    `holder`: the dataclass, which is changed in place.
    """
    for field in fields(holder):
        value = getattr(holder, field.name)
        if isinstance(value, np.integer):
            object.__setattr__(holder, field.name, int(value))
        elif isinstance(value, tuple) and any(isinstance(item, np.integer) for item in value):
            plain = tuple(int(item) if isinstance(item, np.integer) else item for item in value)
            object.__setattr__(holder, field.name, plain)
