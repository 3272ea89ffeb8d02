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
_DIGEST_BYTES = 32


def require_name(protocol_name: str, name: object) -> None:
    """Raise LocalProtocolError unless the name of a session or party is a text of 1 to 255 bytes in
    UTF-8.

    `protocol_name`: the protocol, for the error.
    """
    try:
        size = len(name.encode()) if isinstance(name, str) else 0
    except UnicodeEncodeError:
        size = 0
    if not 0 < size <= _MAX_NAME_BYTES:
        raise LocalProtocolError(
            f"a {protocol_name} needs a session name and a name for every party, text of 1 to "
            f"{_MAX_NAME_BYTES} bytes in UTF-8 each, got {name!r:.100}"
        )


def require_names(protocol_name: str, session: object, party_names: Sequence[object]) -> None:
    """Raise LocalProtocolError unless the names of the session and of all parties are valid, and
    the parties' names are different.

    `protocol_name`: the protocol, for the error.
    """
    for name in (session, *party_names):
        require_name(protocol_name, name)
    if len(set(party_names)) != len(party_names):
        raise LocalProtocolError(
            f"the parties of a {protocol_name} are all different, got "
            f"{', '.join(map(str, party_names))}"
        )


def require_type(instance: object, expected_type: type, *field_names: str) -> None:
    """Raise LocalProtocolError unless these attributes of `instance` are exactly of the type
    `expected_type`: a bool is no int here.
    """
    for field_name in field_names:
        value = getattr(instance, field_name)
        if type(value) is not expected_type:
            raise LocalProtocolError(
                f"{field_name} of {type(instance).__name__} is of type {expected_type.__name__}, "
                f"got {value!r} of type {type(value).__name__}"
            )


def require_ranges(instance: object, range_by_field: Mapping[str, tuple[int, int]]) -> None:
    """Raise LocalProtocolError unless attributes of `instance` are integers in their ranges.

    `range_by_field`: smallest and largest value by attribute.
    """
    for field_name, (smallest, largest) in range_by_field.items():
        value = getattr(instance, field_name)
        if type(value) is not int or not smallest <= value <= largest:
            raise LocalProtocolError(
                f"{field_name} is a number in {smallest}..{largest}, got {value!r}"
            )


def require_people(people_digest: bytes, digested_subject: str) -> bytes:
    """Return `people_digest` unchanged if it is a digest of 32 bytes, not all zero: zeros stand for
    "no digest". Raises LocalProtocolError: it is something else.

    `digested_subject`: what was digested, for the error.
    """
    if (
        type(people_digest) is not bytes
        or len(people_digest) != _DIGEST_BYTES
        or not any(people_digest)
    ):
        raise LocalProtocolError(
            f"people is a digest of {_DIGEST_BYTES} bytes of the {digested_subject}"
        )
    return people_digest


def require_all(
    sentence_start: str, senders: Collection[str], expected_senders: Sequence[str]
) -> None:
    """Raise RemoteProtocolError unless exactly the expected parties sent a message.

    Args:
        sentence_start: the start of the error's sentence, as "a decomposition needs the tables of".
        senders: the senders of the messages that arrived.
        expected_senders: the parties that had to send one.
    """
    if set(senders) != set(expected_senders):
        missing_parties = set(expected_senders) - set(senders)
        unknown_senders = set(senders) - set(expected_senders)
        raise RemoteProtocolError(
            f"{sentence_start} {', '.join(expected_senders)}; missing: "
            f"{', '.join(sorted(missing_parties)) or 'none'}; unknown: "
            f"{', '.join(sorted(map(str, unknown_senders))) or 'none'}"
        )


def is_whole(value: object) -> bool:
    """Return whether a value is an integer of Python's or NumPy's type; a bool is not."""
    return type(value) is int or isinstance(value, np.integer)


def take_numpy_integers(instance: Any) -> None:
    """Replace NumPy integers in the fields of a frozen dataclass, and in tuples in its fields, by
    Python integers, in place.

    Called first in `__post_init__`, since digests, wire formats and checks of types expect Python
    integers.
    """
    for field in fields(instance):
        value = getattr(instance, field.name)
        # A frozen dataclass is changed by `object.__setattr__`.
        if isinstance(value, np.integer):
            object.__setattr__(instance, field.name, int(value))
        elif isinstance(value, tuple) and any(isinstance(item, np.integer) for item in value):
            plain = tuple(int(item) if isinstance(item, np.integer) else item for item in value)
            object.__setattr__(instance, field.name, plain)
