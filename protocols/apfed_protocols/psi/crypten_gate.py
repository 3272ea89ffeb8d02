"""An AND of shared bits by CrypTen's `beaver.AND`, without a process group of its own.

Run by: hub and members of `apfed_protocols.psi.circuit`. CrypTen's AND is written
for a communicator that blocks until all parties have opened d and e. Here the opening travels
in the protocol's own messages, over links that authenticate, so the AND runs twice over the
same inputs and the same triple: up to the opening, where the communicator keeps what this party
would send and breaks off; and, once the answer is there, from the start to the end. Nothing
waits inside CrypTen, so a peer that falls silent leaves no thread behind.
"""

from typing import Any

import torch

from apfed_protocols.crypten import Seat, seated
from apfed_protocols.crypten.tensors import bits_of, open_shares, shared_bits
from apfed_protocols.errors import LocalProtocolError
from apfed_protocols.psi.hashing import Triple, Words

__all__ = ["CryptenAnd"]

_OPENED = 2


class CryptenAnd:
    """Satisfies `apfed_protocols.psi.hashing.And`; for the arguments see there."""

    def __init__(self, x: Words, y: Words, triple: Triple, *, leads: bool) -> None:
        self._x, self._y, self._leads = shared_bits(x), shared_bits(y), leads
        self._triple = _OneTriple(triple)

    def masked(self) -> Words:
        opening = _Opening(leads=self._leads)
        try:
            self._run(opening)
        except _BrokenOffError:
            return bits_of(torch.stack(opening.sent))
        raise LocalProtocolError("CrypTen's AND opened nothing; another release than 0.4.1?")

    def share(self, opened: Words) -> Words:
        return bits_of(self._run(_Opening(leads=self._leads, answer=opened)).share)

    def _run(self, opening: "_Opening") -> Any:
        from crypten.mpc.primitives import beaver

        with seated(Seat(opening, self._triple)):
            return beaver.AND(self._x, self._y)


class _BrokenOffError(Exception):
    """The opening has no answer yet."""


class _Opening:
    """The communicator of one AND: keeps what is to be opened, and opens it once it can."""

    def __init__(self, *, leads: bool, answer: Words | None = None) -> None:
        self._rank, self._answer = (0 if leads else 1), answer
        self.sent: list[Any] = []

    def get_rank(self) -> int:
        """CrypTen adds public terms at rank 0."""
        return self._rank

    def all_reduce(self, shares: list[Any], op: Any, batched: bool) -> list[Any]:
        open_shares(shares[:1], op)  # refuses what is no opening
        if not batched or len(shares) != _OPENED:
            raise LocalProtocolError("CrypTen's AND opens d and e at once in release 0.4.1")
        self.sent = list(shares)
        if self._answer is None:
            raise _BrokenOffError
        return list(shared_bits(self._answer).share)


class _OneTriple:
    """A provider with one triple, the same in both runs of its AND."""

    def __init__(self, triple: Triple) -> None:
        self._shared = tuple(map(shared_bits, triple))

    def generate_binary_triple(self, *_sizes: Any, device: Any) -> tuple[Any, ...]:
        del device
        return self._shared
