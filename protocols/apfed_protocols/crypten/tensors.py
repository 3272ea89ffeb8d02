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

from apfed_protocols.crypten import CryptenParty, act_as_party
from apfed_protocols.errors import LocalProtocolError

Words = NDArray[np.uint64]
_REVEALED_TENSORS = 2  # d and e
_Triple = tuple[Words, Words, Words]
TakeTriple = Callable[[tuple[int, ...]], _Triple]
"""Returns shares of a triple (a, b, a AND b) of words of this shape."""


def wrap_bits(words: Words) -> Any:
    """Return XOR shares of words as CrypTen's binary tensor."""
    from crypten.mpc.primitives import BinarySharedTensor

    # torch accepts only writable memory.
    writable = words if words.flags.writeable else words.copy()
    return BinarySharedTensor.from_shares(torch.from_numpy(writable.view(np.int64)), precision=0)


def unwrap_bits(tensor: torch.Tensor) -> Words:
    """Return the words of a torch tensor of int64 as unsigned integers."""
    words: Words = tensor.numpy().view(np.uint64)
    return words


class DealtTriples:
    """A provider, for CrypTen, of the dealer's bit triples (a, b, a AND b) and of nothing else."""

    def __init__(self, take_triple: TakeTriple) -> None:
        """Provide the triples that `take_triple` returns."""
        self._take_triple = take_triple

    def generate_binary_triple(
        self, size0: Any, size1: Any, device: Any = None
    ) -> tuple[Any, Any, Any]:
        """Return this party's XOR shares of a triple (a, b, a AND b) as CrypTen's binary tensors.
        CrypTen calls this, so the name and the parameters are CrypTen's.

        `size0`, `size1`: shapes of the two operands, which must be equal. `device`: None or "cpu".

        Raises LocalProtocolError: the shapes differ, or another device is asked for.
        """
        if tuple(size0) != tuple(size1) or str(device or "cpu") != "cpu":
            raise LocalProtocolError(
                f"a dealer's triples are for equal shapes on the processor, got {tuple(size0)} "
                f"and {tuple(size1)} on {device}"
            )
        a, b, c = self._take_triple(tuple(size0))
        return wrap_bits(a), wrap_bits(b), wrap_bits(c)

    def __getattr__(self, name: str) -> Any:
        """Raise LocalProtocolError if CrypTen asks for another kind of triple."""
        if name.startswith("_"):
            raise AttributeError(name)
        raise LocalProtocolError(
            f"the dealer hands out triples of bits only, and CrypTen asks its provider for {name}"
        )


class CryptenAnd:
    """One party's part in an AND of XOR-shared words by CrypTen's `beaver.AND`, over the protocol's
    own messages.

    Satisfies `apfed_protocols.psi.hashing.And`. CrypTen's AND is written for a communicator that
    blocks until all parties have revealed d and e, the inputs masked by the triple. Here they
    travel in the protocol's authenticated messages, so the AND runs twice over the same inputs and
    triple: first until d and e must be revealed, where the communicator keeps this party's shares
    of them and raises; and, once both are known, from start to end. Nothing waits inside CrypTen,
    so a peer that falls silent leaves no thread behind.
    """

    def __init__(
        self, x: Words, y: Words, triple: tuple[Words, Words, Words], *, is_leader: bool
    ) -> None:
        """Prepare the AND of words x and y, where d = x ^ a and e = y ^ b will be revealed.

        Args:
            x, y: this party's XOR shares of the inputs, arrays of one shape.
            triple: this party's shares of a, b and a AND b, of the same shape.
            is_leader: whether this party adds the public term d AND e; exactly one of the two does.
        """
        self._x = wrap_bits(x)
        self._y = wrap_bits(y)
        self._is_leader = is_leader
        # CrypTen asks for a triple in each of the two runs, and gets the same one.
        self._provider = DealtTriples(lambda _: triple)

    def mask_inputs(self) -> Words:
        """Return this party's shares of d = x XOR a and e = y XOR b, stacked, which the caller
        sends to the other party. For this, run CrypTen's AND until it would reveal them.
        """
        communicator = _RevealOnce(is_leader=self._is_leader)
        try:
            self._run_gate(communicator)
        except _NotRevealedYetError:
            return unwrap_bits(torch.stack(communicator.own_shares))
        raise LocalProtocolError("CrypTen's AND opened nothing; another release than 0.4.1?")

    def compute_share(self, revealed: Words) -> Words:
        """Return this party's share of x AND y, from the revealed d and e, stacked."""
        communicator = _RevealOnce(is_leader=self._is_leader, revealed=revealed)
        result = self._run_gate(communicator)
        return unwrap_bits(result.share)

    def _run_gate(self, communicator: "_RevealOnce") -> Any:
        """Run CrypTen's AND with this communicator; return its result as a binary tensor."""
        # Imported here, after `load_crypten` has loaded CrypTen with its stub.
        from crypten.mpc.primitives import beaver

        with act_as_party(CryptenParty(communicator, self._provider)):
            return beaver.AND(self._x, self._y)


class _NotRevealedYetError(Exception):
    """The shares of d and e were not exchanged yet, so that the AND stops here."""


class _RevealOnce:
    """The communicator, for CrypTen, of one AND. If d and e are known already, it returns them;
    otherwise it stores this party's shares of them and stops the AND.

    Attributes:
        own_shares: this party's shares of d and e, as torch tensors.
    """

    def __init__(self, *, is_leader: bool, revealed: Words | None = None) -> None:
        """Make the communicator; `revealed`: d and e, stacked, None: not known yet."""
        self._rank = 0 if is_leader else 1
        self._revealed = revealed
        self.own_shares: list[Any] = []

    def get_rank(self) -> int:
        """Return 0 for the leader, else 1; CrypTen calls this."""
        return self._rank

    def all_reduce(self, shares: list[Any], op: Any, batched: bool) -> list[Any]:
        """Store this party's shares of d and e, and return the revealed d and e. CrypTen calls
        this, so the name and the parameters are CrypTen's.

        Args:
            shares: this party's shares of d and e, as torch tensors.
            op: how the parties' shares are combined; must be XOR.
            batched: whether `shares` is a list of tensors; must be True.

        Raises:
            _NotRevealedYetError: d and e are not known yet.
            LocalProtocolError: CrypTen asks for something else than the XOR of two tensors.
        """
        if op != ReduceOp.BXOR or not batched or len(shares) != _REVEALED_TENSORS:
            raise LocalProtocolError("CrypTen's AND opens d and e at once in release 0.4.1")
        self.own_shares = list(shares)
        if self._revealed is None:
            raise _NotRevealedYetError
        return list(wrap_bits(self._revealed).share)
