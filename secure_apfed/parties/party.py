"""What every party has: a name, the contract, an outbox.

A party holds its own secrets and data and has no sockets: it consumes and emits envelopes, and
hands tensors to `secure_apfed.learning`.
"""

from dataclasses import dataclass

from secure_apfed.contract import Contract
from secure_apfed.exchange.outbox import Outbox

__all__ = ["Party", "Seat"]


@dataclass(frozen=True)
class Seat:
    """A party's place in a session: its name, the contract, and what it writes with."""

    name: str
    contract: Contract
    outbox: Outbox


class Party:
    """Base of all parties.

    Args:
        seat: its place in this session.
    """

    def __init__(self, seat: Seat) -> None:
        self.name = seat.name
        self.contract = seat.contract
        self.outbox = seat.outbox
