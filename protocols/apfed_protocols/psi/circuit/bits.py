"""Bits shared by exclusive or, and how to AND them with a dealer's triples.

Run by: all parties of `apfed_protocols.psi.circuit.backend`. A shared word is the XOR of one word
of each party; 64 bits are worked on at once. XOR and NOT need no message. For x AND y the dealer
has shared random a, b and c = a AND b; the parties open d = x ^ a and e = y ^ b, which are uniform,
and compute shares of c ^ (d & b) ^ (e & a) ^ (d & e). Source: Beaver, CRYPTO 1991.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from apfed_protocols.psi.circuit.hashing import BITS
from apfed_protocols.randomness import fresh_key, keystream

__all__ = [
    "WORD",
    "And",
    "BeaverAnd",
    "TripleShares",
    "bit_planes",
    "deal_triples",
    "mask",
    "multiply",
    "random_words",
]

Words = NDArray[np.uint64]
Triple = tuple[Words, Words, Words]

WORD = np.dtype("<u8")


def random_words(seed: bytes, purpose: bytes, count: int) -> Words:
    """Expand a seed into words; one (seed, purpose) is used once."""
    return np.frombuffer(keystream(seed, purpose, length=WORD.itemsize * count), WORD)


def bit_planes(tags: Words) -> Words:
    """Turn words (..., B) into planes (64, ..., B / 64): bit q of word w of plane p is bit p
    of word 64 w + q.

    A 64 x 64 bit matrix is transposed by swapping blocks of half the size, six times
    (Warren, Hacker's Delight, section 7-3).
    """
    planes = np.array(tags, np.uint64).reshape(-1, BITS)
    width, low = BITS // 2, (1 << (BITS // 2)) - 1
    while width:
        blocks = planes.reshape(len(planes), BITS // (2 * width), 2, width)
        upper, lower = blocks[:, :, 0], blocks[:, :, 1]
        swap = ((upper >> np.uint64(width)) ^ lower) & np.uint64(low)
        lower ^= swap
        upper ^= swap << np.uint64(width)
        width //= 2
        low ^= (low << width) & (2**BITS - 1)
    shape = (BITS, *tags.shape[:-1], tags.shape[-1] // BITS)
    return np.ascontiguousarray(planes.T).reshape(shape)


@dataclass
class TripleShares:
    """One party's shares of triples a, b, c; each word is handed out once."""

    words: Triple = field(repr=False)
    used: int = 0

    @classmethod
    def expand(cls, seed: bytes, count: int, correction: bytes | None = None) -> "TripleShares":
        """Make the shares of the holder of `seed`; the last party has its c by `correction`."""
        a, b = random_words(seed, b"a", count), random_words(seed, b"b", count)
        c = (
            random_words(seed, b"c", count)
            if correction is None
            else np.frombuffer(correction, WORD)
        )
        return cls((a, b, c))

    def take(self, shape: tuple[int, ...]) -> Triple:
        """Return the next shares of a, b and c in this shape."""
        start, self.used = self.used, self.used + int(np.prod(shape))
        a, b, c = (words[start : self.used].reshape(shape) for words in self.words)
        return a, b, c


def deal_triples(parties: int, count: int) -> tuple[Sequence[bytes], bytes]:
    """Make `count` words of triples: a seed for each party, and the last one's share of c."""
    seeds = [fresh_key() for _ in range(parties)]
    a, b, c = (np.zeros(count, np.uint64) for _ in range(3))
    for seed in seeds:
        a ^= random_words(seed, b"a", count)
        b ^= random_words(seed, b"b", count)
    for seed in seeds[:-1]:
        c ^= random_words(seed, b"c", count)
    return seeds, (c ^ (a & b)).astype(WORD).tobytes()


def mask(x: Words, y: Words, triple: Triple) -> Words:
    """Return this party's shares of d and e, stacked: shape (2, ...)."""
    a, b, _ = triple
    return np.stack([x ^ a, y ^ b])


def multiply(opened: Words, triple: Triple, *, leads: bool) -> Words:
    """Return this party's share of x AND y from the opened (d, e); one party leads."""
    (a, b, c), (d, e) = triple, opened
    share: Words = c ^ (d & b) ^ (e & a)
    return share ^ (d & e) if leads else share


class And(Protocol):
    """One AND of shared words at one party, around the opening of d and e by all parties.

    Whatever computes it sends and returns the same bits, so parties may differ in it.
    """

    def __init__(self, x: Words, y: Words, triple: Triple, *, leads: bool) -> None:
        """Take this party's shares; exactly one party leads."""
        ...

    def masked(self) -> Words:
        """This party's shares of d and e, as `mask`."""
        ...

    def share(self, opened: Words) -> Words:
        """This party's share of the result, as `multiply`; called once."""
        ...


class BeaverAnd:
    """The same on arrays of words; satisfies `And`."""

    def __init__(self, x: Words, y: Words, triple: Triple, *, leads: bool) -> None:
        self._x, self._y, self._triple, self._leads = x, y, triple, leads

    def masked(self) -> Words:
        return mask(self._x, self._y, self._triple)

    def share(self, opened: Words) -> Words:
        return multiply(opened, self._triple, leads=self._leads)
