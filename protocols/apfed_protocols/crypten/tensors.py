"""An AND by CrypTen, and what that asks of a party: who carries its opening, and a dealer's triple.

Triples come from a dealer, in place of those that CrypTen's party 0 makes: they protect from the
other parties, as long as the dealer works with none of them; the shares come from our own
generator (`apfed_protocols.randomness`), expanded before the computation.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed import ReduceOp

from apfed_protocols.crypten import Seat, use_seat
from apfed_protocols.errors import LocalProtocolError

Words = NDArray[np.uint64]
_OPENED = 2  # at once: d and e
_Triple = tuple[Words, Words, Words]
Take = Callable[[tuple[int, ...]], _Triple]


def wrap_bits(words: Words) -> Any:
    """Return shared words as CrypTen's binary tensor."""
    from crypten.mpc.primitives import BinarySharedTensor

    # torch takes no memory that it must not write to.
    writable = words if words.flags.writeable else words.copy()
    return BinarySharedTensor.from_shares(torch.from_numpy(writable.view(np.int64)), precision=0)


def bits_of(tensor: torch.Tensor) -> Words:
    """Return the words of a tensor of int64."""
    words: Words = tensor.numpy().view(np.uint64)
    return words


class DealtTriples:
    """A provider of triples (a, b, a AND b) and of nothing else."""

    def __init__(self, take: Take) -> None:
        self._take = take

    def generate_binary_triple(
        self, size0: Any, size1: Any, device: Any = None
    ) -> tuple[Any, Any, Any]:
        """Return shares of a, b and a AND b; CrypTen calls it so.

        `size0`: shapes of the two operands, which are equal here.
        """
        if tuple(size0) != tuple(size1) or str(device or "cpu") != "cpu":
            raise LocalProtocolError(
                f"a dealer's triples are for equal shapes on the processor, got {tuple(size0)} "
                f"and {tuple(size1)} on {device}"
            )
        a, b, c = self._take(tuple(size0))
        return wrap_bits(a), wrap_bits(b), wrap_bits(c)

    def __getattr__(self, name: str) -> Any:
        """Raise LocalProtocolError if CrypTen asks for another kind of triple."""
        if name.startswith("_"):
            raise AttributeError(name)
        raise LocalProtocolError(
            f"the dealer hands out triples of bits only, and CrypTen asks its provider for {name}"
        )


class CryptenAnd:
    """An AND of shared bits by `beaver.AND`, without a process group of its own.

    Satisfies `apfed_protocols.psi.hashing.And`; for the arguments see there. CrypTen's AND is
    written for a communicator that blocks until all parties have opened d and e. Here the opening
    travels in the protocol's own messages, over links that authenticate, so the AND runs twice over
    the same inputs and the same triple: up to the opening, where the communicator keeps what this
    party would send and breaks off; and, once the answer is there, from the start to the end.
    Nothing waits inside CrypTen, so a peer that falls silent leaves no thread behind.
    """

    def __init__(
        self, x: Words, y: Words, triple: tuple[Words, Words, Words], *, is_leader: bool
    ) -> None:
        """Prepare the AND of two shared words x and y, from this party's shares of them and of
        one triple.
        """
        self._x = wrap_bits(x)
        self._y = wrap_bits(y)
        self._is_leader = is_leader
        self._triple = DealtTriples(lambda _: triple)

    def mask_inputs(self) -> Words:
        """Return this party's shares of d and e: run CrypTen's AND up to its opening, where it
        breaks off.
        """
        opening = _Opening(is_leader=self._is_leader)
        try:
            self._run_gate(opening)
        except _BrokenOffError:
            return bits_of(torch.stack(opening.sent))
        raise LocalProtocolError("CrypTen's AND opened nothing; another release than 0.4.1?")

    def compute_share(self, revealed: Words) -> Words:
        return bits_of(self._run_gate(_Opening(is_leader=self._is_leader, answer=revealed)).share)

    def _run_gate(self, opening: "_Opening") -> Any:
        """Run CrypTen's AND with this opening as the communicator."""
        from crypten.mpc.primitives import beaver

        with use_seat(Seat(opening, self._triple)):
            return beaver.AND(self._x, self._y)


class _BrokenOffError(Exception):
    """The opening has no answer yet."""


class _Opening:
    """The communicator of one AND: keeps what is to be opened, and opens it once it can."""

    def __init__(self, *, is_leader: bool, answer: Words | None = None) -> None:
        self._rank = 0 if is_leader else 1
        self._answer = answer
        self.sent: list[Any] = []

    def get_rank(self) -> int:
        return self._rank

    def all_reduce(self, shares: list[Any], op: Any, batched: bool) -> list[Any]:
        """Store what this party sends for the opening; return the revealed d and e, or break off
        without them.

        `batched`: CrypTen's; whether several tensors come in a list.
        """
        if op != ReduceOp.BXOR or not batched or len(shares) != _OPENED:
            raise LocalProtocolError("CrypTen's AND opens d and e at once in release 0.4.1")
        self.sent = list(shares)
        if self._answer is None:
            raise _BrokenOffError
        return list(wrap_bits(self._answer).share)
