"""IDs in bins, and bits shared by exclusive or: the arithmetic of the circuit intersection.

Run by: all parties of `apfed_protocols.psi.circuit`, hub and members on their own IDs. Bins: cuckoo
hashing at the hub, simple hashing at the members. Both use one
key, so an ID that both hold has the same tag and the same three different bins at both; the hub
keeps it in one of the three, a member in all of them: they meet exactly once. Tags have 63 bits:
two different IDs pass for equal with probability at most B K 2^-63, which is 2^-38 for two sets of
a million, and 2^-34 for ten million. Where rows open to all, the members notice; else there is one
common ID too many.

A key under which IDs do not fit is followed by another one, which tells all who hold the key
something of that set; so this is rare (`bins_for`, `slots_for`).

Bits: a shared word is the XOR of one word of each party; 64 bits are worked on at once. XOR and NOT
need no message. For x AND y the dealer has shared random a, b and c = a AND b; the parties open
d = x ^ a and e = y ^ b, which are uniform, and compute shares of c ^ (d & b) ^ (e & a) ^ (d & e).

B bins (a multiple of 64), K slots of a member's bin, n IDs.
Source: Pinkas, Schneider and Zohner, ACM TOPS 2018, sections 3.1 and 5 (bins and slots); Beaver,
CRYPTO 1991 (triples).
"""

import bisect
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from apfed_protocols.psi.interface import PLACES, digest_each, three_different
from apfed_protocols.randomness import fresh_key, keystream

Words = NDArray[np.uint64]
Rows = NDArray[np.int64]
BITS = 64
TOKEN_BYTES = 16
WORD_BYTES = 8
_FAILURE_BITS = 40
_ROUNDS = 1000
_TRANSPOSED = 2**12
# Tags of IDs have a top bit of 0; these never equal one of them, nor each other.
_HUB_DUMMY = np.uint64(1 << 63)
_MEMBER_DUMMY = np.uint64((1 << 63) + 1)
_TAG_MASK = np.uint64((1 << 63) - 1)

Triple = tuple[Words, Words, Words]
WORD = np.dtype("<u8")


def bins_for(hub_size: int) -> int:
    """Return B >= 1.27 n + 128: cuckoo hashing with three different choices and no stash.

    It fails where s IDs have all their bins among s - 1, each of which two of them have at least.
    The expected number of such sets is below 2^-41 up to 2,000 IDs; four IDs with the same three
    bins make up most of it, and fewer of them are expected in larger tables. There the load, at
    most .79, is far below the threshold of .917.
    Source: Dietzfelbinger, Goerdt, Mitzenmacher, Montanari, Pagh and Rink, ICALP 2010 (threshold).

    `hub_size`: n, how many IDs the hub has.
    """
    return BITS * math.ceil((1.27 * hub_size + 128) / BITS)


def slots_for(member_size: int, bins: int) -> int:
    """Return K such that no bin gets more than K IDs, except with probability 2^-40.

    Union bound over B bins of a Binomial(n, 3 / B) tail, which is at most its first term
    times (k + 1) / (k + 1 - 3n / B) for k above the mean (Feller, vol. 1, VI.3).

    `member_size`: how many IDs the member has.
    """
    share = PLACES / bins
    mean = member_size * share

    def is_large_enough(slots: int) -> bool:
        """Return whether the union bound for more than `slots` IDs in a bin is below 2^-40."""
        k = slots + 1
        ways = math.lgamma(member_size + 1) - math.lgamma(k + 1) - math.lgamma(member_size - k + 1)
        term = ways + k * math.log(share) + (member_size - k) * math.log1p(-share)
        tail = term + math.log((k + 1) / (k + 1 - mean))
        return tail + math.log(bins) <= -_FAILURE_BITS * math.log(2)

    # above the mean the tail falls with k, so that halving finds the first that fits
    candidates = range(math.floor(mean) + 1, member_size)
    place = bisect.bisect_left(candidates, True, key=is_large_enough)
    return candidates[place] if place < len(candidates) else max(member_size, 1)


def fingerprints(
    ids: Sequence[bytes], key: bytes, bins: int
) -> tuple[Words, Rows, NDArray[np.uint8]]:
    """Return of each ID what BLAKE2b under `key` makes of it.

    Returns:
        Tags below 2^63, shape (n,); three different bins in 0..B-1, shape (n, 3); and a token of 16
        bytes by which a member finds a revealed ID among its own, shape (n, 16).
    """
    length = WORD_BYTES * (1 + PLACES) + TOKEN_BYTES
    keyed = hashlib.blake2b(key=key, digest_size=length, person=b"apfed psi tag")
    words = digest_each(ids, keyed).view("<u8")
    bins_n3 = three_different(words[:, 1 : 1 + PLACES], bins)
    tokens = np.ascontiguousarray(words[:, 1 + PLACES :]).view(np.uint8)
    return words[:, 0] & _TAG_MASK, bins_n3, tokens


def cuckoo_table(bins_n3: Rows, bins: int) -> Rows | None:
    """Return the row in each bin (-1: none), shape (B,), or None if some row finds no bin.

    All rows without a bin move at once: the last one to enter a bin stays, who was there
    before moves to another of its bins. The walk is random, it is not a secret.
    """
    table = np.full(bins, -1, np.int64)
    choice = np.zeros(len(bins_n3), np.int64)
    homeless = np.arange(len(bins_n3))
    for _ in range(_ROUNDS):
        if not len(homeless):
            return table
        target = bins_n3[homeless, choice[homeless]]
        before = table[target]
        table[target] = homeless
        entered = table[target] == homeless
        evicted = before[entered]
        homeless = np.concatenate([homeless[~entered], evicted[evicted >= 0]])
        walk = np.frombuffer(keystream(fresh_key(), length=len(homeless)), np.uint8)
        choice[homeless] += 1 + walk % (PLACES - 1)
        choice[homeless] %= PLACES
    return None


def hub_tags(tags_n: Words, row_of_bin: Rows) -> Words:
    """Return the tag in each bin, (B,); empty bins get a tag that no member has."""
    tags_B = np.full(len(row_of_bin), _HUB_DUMMY)
    used = row_of_bin >= 0
    tags_B[used] = tags_n[row_of_bin[used]]
    return tags_B


def member_table(tags_n: Words, bins_n3: Rows, bins: int, slots: int) -> Words | None:
    """Return the tags in all slots, shape (K, B), or None where they do not fit.

    That is where a bin overflows, or holds one tag twice, which would cancel it later.

    `bins`: B, their number.
    """
    if _has_repeated_tag(tags_n, bins_n3):
        return None
    bin_of = bins_n3.ravel()
    tags = np.repeat(tags_n, PLACES)
    order = np.argsort(bin_of, kind="stable")
    bin_of = bin_of[order]
    tags = tags[order]
    slots_of_tags = np.arange(len(bin_of)) - np.searchsorted(bin_of, bin_of)
    if len(slots_of_tags) and int(slots_of_tags.max()) >= slots:
        return None
    tags_KB = np.full((slots, bins), _MEMBER_DUMMY)
    tags_KB[slots_of_tags, bin_of] = tags
    return tags_KB


def _has_repeated_tag(tags_n: Words, bins_n3: Rows) -> bool:
    """Return whether two IDs with one tag share a bin, where they would cancel by XOR."""
    order = np.argsort(tags_n)
    is_equal = tags_n[order[1:]] == tags_n[order[:-1]]
    first = bins_n3[order[:-1][is_equal]]
    second = bins_n3[order[1:][is_equal]]
    return bool((first[:, :, None] == second[:, None, :]).any())


def random_words(seed: bytes, purpose: bytes, count: int) -> Words:
    """Expand a seed into words; one (seed, purpose) is used once."""
    return np.frombuffer(keystream(seed, purpose, length=WORD.itemsize * count), WORD)


def bit_planes(tags: Words) -> Words:
    """Turn words (..., B) into planes (64, ..., B / 64): bit q of word w of plane p is bit p
    of word 64 w + q.
    """
    planes = np.array(np.asarray(tags, np.uint64).reshape(-1, BITS).T, order="C")
    transpose_bits(planes)
    return planes.reshape(BITS, *tags.shape[:-1], tags.shape[-1] // BITS)


def transpose_bits(words_64n: Words) -> None:
    """Transpose n matrices of 64 x 64 bits in place: bit q of word (p, k) goes to bit p of (q, k).

    Blocks of half the size are swapped, six times (Warren, Hacker's Delight, section 7-3).
    """
    for start in range(0, words_64n.shape[1], _TRANSPOSED):  # what is worked on stays in the cache
        part = words_64n[:, start : start + _TRANSPOSED]
        width = BITS // 2
        low = (1 << (BITS // 2)) - 1
        while width:
            blocks = part.reshape(BITS // (2 * width), 2, width, part.shape[1])
            upper = blocks[:, 0]
            lower = blocks[:, 1]
            swap = ((upper >> np.uint64(width)) ^ lower) & np.uint64(low)
            lower ^= swap
            upper ^= swap << np.uint64(width)
            width //= 2
            low ^= (low << width) & (2**BITS - 1)


@dataclass
class TripleShares:
    """A party's shares of triples a, b, c; each word is handed out once."""

    words: Triple = field(repr=False)
    used: int = 0

    @classmethod
    def from_seed(cls, seed: bytes, count: int, correction: bytes | None = None) -> "TripleShares":
        """Expand one party's shares of `count` words; `correction` is the last party's
        share of c.
        """
        a = random_words(seed, b"a", count)
        b = random_words(seed, b"b", count)
        c = (
            random_words(seed, b"c", count)
            if correction is None
            else np.frombuffer(correction, WORD)
        )
        return cls((a, b, c))

    def take_triple(self, shape: tuple[int, ...]) -> Triple:
        """Return the next unused words of a, b and c, in this shape."""
        start = self.used
        self.used = self.used + int(np.prod(shape))
        a, b, c = (words[start : self.used].reshape(shape) for words in self.words)
        return a, b, c

    def split_off(self, count: int) -> "TripleShares":
        """Return the last `count` words as shares of their own; the others stay."""
        a, b, c = self.words
        end = len(a) - count
        self.words = a[:end], b[:end], c[:end]
        return TripleShares((a[end:], b[end:], c[end:]))


def deal_triples(parties: int, count: int) -> tuple[Sequence[bytes], bytes]:
    """Make `count` words of triples: a seed for each party, and the last one's share of c.

    `parties`: how many share each triple.
    """
    seeds = [fresh_key() for _ in range(parties)]
    a, b, c = (np.zeros(count, np.uint64) for _ in range(3))
    for seed in seeds:
        a ^= random_words(seed, b"a", count)
        b ^= random_words(seed, b"b", count)
    for seed in seeds[:-1]:
        c ^= random_words(seed, b"c", count)
    return seeds, (c ^ (a & b)).astype(WORD).tobytes()


class And(Protocol):
    """A party's side of one AND of shared words, before and after all parties open d and e.

    Whatever computes it sends and returns the same bits, so parties may differ in it.
    """

    def __init__(self, x: Words, y: Words, triple: Triple, *, is_leader: bool) -> None:
        """Take this party's shares; exactly one party leads."""
        ...

    def mask_inputs(self) -> Words:
        """Return this party's shares of d and e, stacked: shape (2, ...)."""
        ...

    def compute_share(self, revealed: Words) -> Words:
        """Return this party's share of x AND y from the opened (d, e); call it once."""
        ...


class BeaverAnd:
    """The same on arrays of words; satisfies `And`."""

    def __init__(self, x: Words, y: Words, triple: Triple, *, is_leader: bool) -> None:
        """Take this party's shares of x, y and one triple."""
        self._x = x
        self._y = y
        self._triple = triple
        self._is_leader = is_leader

    def mask_inputs(self) -> Words:
        a, b, _ = self._triple
        return np.stack([self._x ^ a, self._y ^ b])

    def compute_share(self, revealed: Words) -> Words:
        """Return c ^ (d & b) ^ (e & a), and d & e at the party that leads (Beaver 1991)."""
        a, b, c = self._triple
        d, e = revealed
        share: Words = c ^ (d & b) ^ (e & a)
        return share ^ (d & e) if self._is_leader else share
