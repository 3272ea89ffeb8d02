"""Which CrypTen party the running code is: its communicator and its provider of triples.

Run by: whoever calls CrypTen's protocols outside a world of its own. CrypTen keeps one party a
process, in global variables, and makes multiplication triples in the clear at its first
party unless told otherwise. A `Seat` is a party that lasts for one block of code, in one
thread or in the whole process: inside it CrypTen talks through the seat's communicator, and
takes triples from the seat's provider or from nobody. Outside all seats CrypTen is as ever.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from apfed_protocols.errors import LocalProtocolError

__all__ = ["Seat", "seated", "turn_lookups"]


@dataclass(frozen=True)
class Seat:
    """One party of a CrypTen computation.

    Attributes:
        communicator: satisfies CrypTen's interface, such as `apfed_protocols.crypten.communicator`.
        provider: deals triples; None refuses every multiplication.
    """

    communicator: Any = field(repr=False)
    provider: Any = field(default=None, repr=False)


class _Seats(threading.local):
    """The seat of each thread, over the one of the process."""

    process: Seat | None = None
    thread: Seat | None = None

    def now(self) -> Seat | None:
        return self.thread or type(self).process


_SEATS = _Seats()
_TURNED = "__secure_apfed_seats__"


@contextmanager
def seated(seat: Seat, *, whole_process: bool = False) -> Iterator[None]:
    """Be the party of `seat`, in this thread or, if no other is, in the whole process.

    Raises:
        LocalProtocolError: the process has a seat already.
    """
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


def turn_lookups(crypten: Any) -> None:
    """Let CrypTen look for a seat before it looks into its own global variables."""
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
