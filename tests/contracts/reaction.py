"""An aggregator that alters sums and sees which of them the receiver takes: a reaction attack."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apfed_protocols.conversation import Outgoing
from apfed_protocols.errors import RemoteProtocolError
from apfed_protocols.sums import BfvSum, StepBinding, SumReceiver
from apfed_protocols.sums.frames import Frame
from apfed_protocols.sums.homomorphic import HomomorphicSum
from apfed_protocols.sums.masked import MaskedSum
from apfed_protocols.sums.seal_cipher import SealCipher, scratch_file
from tests.contracts.sum_parties import Parties


class Rearmed:
    """A receiver that goes on after a refusal: for fuzzing, and to show what its end is for."""

    def __init__(self, receiver: SumReceiver) -> None:
        self._receiver = receiver

    @property
    def finished(self) -> bool:
        return self._receiver.finished

    def start(self) -> Iterable[Outgoing]:
        return self._receiver.start()

    def receive(self, sender: str, body: bytes) -> Iterable[Outgoing]:
        return self._receiver.receive(sender, body)

    def decode(self, combined: bytes, shape: tuple[int, int], bound: StepBinding) -> Any:
        held = [self._receiver, vars(self._receiver)["_setup"]]
        before = [dict(vars(holder)) for holder in held]
        try:
            return self._receiver.decode(combined, shape, bound)
        except RemoteProtocolError:
            for holder, kept in zip(held, before, strict=True):
                vars(holder).clear()
                vars(holder).update(kept)
            raise


class Reactions:
    """What the aggregator sees of a receiver: whether it took a sum, and nothing else.

    Every question is put as the sum of the next step, with this frame's other parts.
    """

    def __init__(self, played: Parties, receiver: "SumReceiver | Rearmed", frame: Frame) -> None:
        self._played, self._receiver, self._frame = played, receiver, frame
        self.asked = self.refused = 0

    def takes(self, *blobs: bytes) -> bool:
        bound, frame = self._played.next(), self._frame
        asked = replace(frame, step=bound.step, binding=bound.digest, blobs=blobs).pack()
        self.asked += 1
        try:
            self._receiver.decode(asked, (frame.rows, frame.columns), bound)
        except RemoteProtocolError:
            self.refused += 1
            return False
        return True


def shifted(played: Parties, blobs: tuple[bytes, ...], offset: int) -> tuple[bytes, ...]:
    """The sum in these blobs with a constant added to its first number; needs no key."""
    described = played.sum
    if isinstance(described, MaskedSum):
        numbers = np.frombuffer(blobs[0], described.word).copy()
        numbers[0] += np.array(offset, dtype=np.int64).astype(described.word)
        return (numbers.tobytes(), *blobs[1:])
    assert isinstance(described, HomomorphicSum)
    cipher, first = described.cipher, np.array([[offset]], dtype=np.int64)
    return (_plus(cipher, blobs[0], described.packing.pack(first)[0]), *blobs[1:])


def _plus(cipher: SealCipher, blob: bytes, slots_S: NDArray[np.int64]) -> bytes:
    import tenseal.sealapi as seal

    (ciphertext,), plain = cipher.load([blob], 1, sender="us"), seal.Plaintext()
    with scratch_file() as scratch:
        cipher.encode(slots_S, plain, scratch)
        vars(cipher)["_evaluator"].add_plain_inplace(ciphertext, plain)
        return cipher.residues.pack(cipher.ciphertext_form.numbers(ciphertext, scratch))


def number_from_reactions(limit: int, takes_with: Callable[[int], bool]) -> int:
    """A number, in steps of fixed point, by bisection over what is added to it.

    The receiver refuses what lies beyond `limit`, M times the largest contribution, so the largest
    offset that it takes is that bound less the number.
    """
    taken, refused = 0, 2 * limit + 1
    while refused - taken > 1:
        middle = (taken + refused) // 2
        if takes_with(middle):
            taken = middle
        else:
            refused = middle
    return limit - taken


def key_coefficients(played: Parties, takes: Callable[..., bool], count: int) -> list[int]:
    """The first coefficients of the secret key, of -1, 0 and 1, each from one or two reactions.

    The ciphertext (offset X^(N-1), A X^k) decrypts to offset + A s_j at the last coefficient,
    which is padding and must round to 0, and to noise below half a step elsewhere.
    """
    described = played.sum
    assert isinstance(described, BfvSum)
    residues, degree = described.cipher.residues, described.packing.slots
    step = residues.modulus >> described.headroom.bits
    small, near = step // 4, step // 2 - step // 8

    def beyond(coefficient: int, sign: int) -> bool:
        numbers = np.zeros(2 * degree, dtype=np.uint64)
        numbers[degree - 1] = sign * near % residues.modulus
        numbers[2 * degree - 1 - coefficient] = small
        return not takes(residues.pack(numbers))

    return [next((sign for sign in (1, -1) if beyond(k, sign)), 0) for k in range(count)]
