"""Errors that are meant for people, below one root: `ApfedError`.

Run by: every role. A caller can retry after fixing a `LocalProtocolError`; a
`RemoteProtocolError` means that bytes from a peer were wrong, stale, replayed or
forged, and that the session with that peer must end. A `DataError` is raised before any protocol
begins: it is about a party's own table.
"""

from apfed_protocols.lazy_names import make_former_name

__all__ = [
    "ApfedError",
    "ClippingWarning",
    "DataError",
    "LocalProtocolError",
    "PartyLeftError",
    "RemoteProtocolError",
    "RunStoppedError",
    "UnsafeChoiceWarning",
]


class ApfedError(Exception):
    """Base of every error whose message is meant for the user: who, what, what to do.

    Examples:
        >>> from apfed_protocols import ApfedError, align
        >>> try:
        ...     align({"bank": ["ann", "bob"], "shop": ["eve", "kim"]}, hub="bank")
        ... except ApfedError as error:
        ...     print(f"{type(error).__name__}: {error}")
        DataError: bank: the parties share fewer IDs than the agreed minimum of 2 ...
    """


class DataError(ApfedError):
    """A data file or table is missing, unreadable or unfit; says what to run or to fix.

    Examples:
        >>> from apfed_protocols import DataError, align
        >>> try:
        ...     align({"bank": ["ann", "ann"], "shop": ["ann", "bob"]}, hub="bank")
        ... except DataError as error:
        ...     print(error)
        bank has 1 repeated ID(s), in row(s) 1 (as 0); keep one row for each ID ...
    """


class LocalProtocolError(ApfedError, ValueError):
    """An error of the caller: a wrong type, range or order, or a value used twice."""


class RemoteProtocolError(ApfedError, RuntimeError):
    """An error of a peer, which sent something that the protocol does not allow.

    The message names the peer, what was expected, what came (names, sizes and numbers of
    the message's form) and what to do; it never repeats a secret or a person's data.
    """


class PartyLeftError(RemoteProtocolError):
    """A peer's message did not arrive in time, or the peer left.

    Attributes:
        missing_parties: the names of the peers, if they are known.
        has_left: whether they are known to have left; otherwise they may only be slow.
    """

    left = make_former_name("left", "missing_parties")
    gone = make_former_name("gone", "has_left")

    def __init__(
        self, message: str, *, missing_parties: tuple[str, ...] = (), has_left: bool = False
    ) -> None:
        """Make the error. `missing_parties`: names of the peers, if known; `has_left`: whether they
        are known to have left, rather than slow.
        """
        super().__init__(message)
        self.missing_parties = missing_parties
        self.has_left = has_left


class RunStoppedError(PartyLeftError):
    """A peer reported that it stops, perhaps with its reason."""

    def __init__(self, message: str, *, missing_parties: tuple[str, ...] = ()) -> None:
        """Make the error; `missing_parties`: the names of the peers that stop."""
        super().__init__(message, missing_parties=missing_parties, has_left=True)


class UnsafeChoiceWarning(UserWarning):
    """A protection was switched off by a setting; the message says who can read what."""


class ClippingWarning(UserWarning):
    """A contribution was clipped, or rounded to 0, so that the sum is not that of the values."""
