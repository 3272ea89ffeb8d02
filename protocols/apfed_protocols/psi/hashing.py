"""IDs in bins, and XOR-shared bits: the arithmetic of the circuit intersection.

Run by: all parties of `apfed_protocols.psi.circuit`, hub and members on their own IDs. Bins: cuckoo
hashing at the hub, simple hashing at the members. Both use one
key, so an ID that both hold has the same tag and the same three different bins at both; the hub
keeps it in one of the three, a member in all of them: they meet exactly once. Tags have 63 bits:
two different IDs pass for equal with probability at most B K 2^-63, which is 2^-38 for two sets of
a million, and 2^-34 for ten million. Where rows open to all, the members notice; else there is one
common ID too many.

If IDs do not fit under a key, another one is tried, which reveals something about that set to all
who know the key; so this is rare (`count_bins`, `count_bin_slots`).

Bits: a shared word is the XOR of one word of each party; 64 bits are worked on at once. XOR and NOT
need no message. For x AND y the parties have shares of a triple: random a, b and c = a AND b. They
reveal d = x ^ a and e = y ^ b, which are uniform, and compute shares of
c ^ (d & b) ^ (e & a) ^ (d & e).

B bins (a multiple of 64), K slots of a member's bin, n IDs.
Source: Pinkas, Schneider and Zohner, ACM TOPS 2018, sections 3.1 and 5 (bins and slots); Beaver,
CRYPTO 1991 (triples).
"""

import bisect
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from apfed_protocols.psi.interface import BINS_PER_ID, digest_each, draw_different_positions
from apfed_protocols.randomness import fresh_key, keystream

Words = NDArray[np.uint64]
RowIndices = NDArray[np.int64]
WORD_BITS = 64
TOKEN_BYTES = 16
WORD_BYTES = 8
_FAILURE_BITS = 40
_MAX_CUCKOO_ROUNDS = 1000
_COLUMNS_PER_CHUNK = 2**12
# Tags of IDs have a top bit of 0; these never equal one of them, nor each other.
_EMPTY_BIN_TAG = np.uint64(1 << 63)
_EMPTY_SLOT_TAG = np.uint64((1 << 63) + 1)
_TAG_MASK = np.uint64((1 << 63) - 1)

Triple = tuple[Words, Words, Words]
WORD_TYPE = np.dtype("<u8")


def count_bins(hub_size: int) -> int:
    """Return B, the number of bins of the hub's hash table for its n = `hub_size` IDs: the least
    multiple of 64 that is 1.27 n + 128 or more.

    The table is filled by cuckoo hashing with three different bins for each ID and no stash. Cuckoo
    hashing fails if s IDs have all their bins among s - 1 bins. Up to 2,000 IDs the expected number
    of such sets is below 2^-41. Most of this number is due to four IDs with the same three bins,
    which are rarer in larger tables; there the load, at most .79, is far below the threshold of
    .917.
    Source: Dietzfelbinger, Goerdt, Mitzenmacher, Montanari, Pagh and Rink, ICALP 2010 (threshold).
    """
    return WORD_BITS * math.ceil((1.27 * hub_size + 128) / WORD_BITS)


def count_bin_slots(member_size: int, bin_count: int) -> int:
    """Return K, the number of slots of a member's bin: no bin gets more than K IDs, except with
    probability 2^-40. A member puts each ID into all three of its bins.

    Args:
        member_size: n, the number of the member's IDs.
        bin_count: B, the number of bins of the hub's hash table.
    """
    mean_load = member_size * BINS_PER_ID / bin_count
    candidates = range(math.floor(mean_load) + 1, member_size)
    # Above the mean the bound falls with K, so that bisection finds the least K that is enough.
    is_enough = partial(_is_slot_count_enough, member_size=member_size, bin_count=bin_count)
    index = bisect.bisect_left(candidates, x=True, key=is_enough)
    return candidates[index] if index < len(candidates) else max(member_size, 1)


def _is_slot_count_enough(slot_count: int, *, member_size: int, bin_count: int) -> bool:
    """Return whether no bin gets more IDs than it has slots, except with probability 2^-40."""
    max_log_probability = -_FAILURE_BITS * math.log(2)
    return _bound_log_overflow(slot_count, member_size, bin_count) <= max_log_probability


def _bound_log_overflow(slot_count: int, member_size: int, bin_count: int) -> float:
    """Return the logarithm of a bound on the probability that some bin gets more IDs than it has
    slots: a union bound over B bins.

    The number of IDs in one bin is Binomial(n, 3 / B); its tail from k on, for k above the mean, is
    at most the tail's first term times (k + 1) / (k + 1 - 3n / B) (Feller, vol. 1, VI.3).

    Args:
        slot_count: k - 1, the number of slots of a bin.
        member_size: n, the number of the member's IDs.
        bin_count: B, the number of bins.
    """
    k = slot_count + 1
    bin_probability = BINS_PER_ID / bin_count  # that an ID falls into the bin
    log_binomial = (
        math.lgamma(member_size + 1) - math.lgamma(k + 1) - math.lgamma(member_size - k + 1)
    )
    log_probability_of_k = k * math.log(bin_probability)
    log_probability_of_rest = (member_size - k) * math.log1p(-bin_probability)
    log_first_term = log_binomial + log_probability_of_k + log_probability_of_rest
    mean_load = member_size * bin_probability
    log_tail = log_first_term + math.log((k + 1) / (k + 1 - mean_load))
    return log_tail + math.log(bin_count)


def fingerprint_ids(
    ids: Sequence[bytes], key: bytes, bin_count: int
) -> tuple[Words, RowIndices, NDArray[np.uint8]]:
    """Hash each of n IDs by BLAKE2b under `key`, for the hash tables of hub and members.

    `bin_count`: B, the number of bins of a table.

    Returns:
        The tag of each ID, a number below 2^63 that is compared in place of the ID, (n,); its three
        different bins in 0..B-1, (n, 3); and its token of 16 bytes, by which a member finds a
        revealed ID among its own IDs, (n, 16).
    """
    digest_bytes = WORD_BYTES * (1 + BINS_PER_ID) + TOKEN_BYTES
    keyed_hasher = hashlib.blake2b(key=key, digest_size=digest_bytes, person=b"apfed psi tag")
    # Of the words of a digest the first is the tag, the next three give bins, the rest the token.
    words = digest_each(ids, keyed_hasher).view("<u8")
    bins_n3 = draw_different_positions(words[:, 1 : 1 + BINS_PER_ID], bin_count)
    tokens = np.ascontiguousarray(words[:, 1 + BINS_PER_ID :]).view(np.uint8)
    return words[:, 0] & _TAG_MASK, bins_n3, tokens


def fill_cuckoo_table(bins_n3: RowIndices, bin_count: int) -> RowIndices | None:
    """Put each row of the hub's IDs into one of its three bins, at most one row a bin, by cuckoo
    hashing. Return the row in each bin (-1: none), (bins,); None if some rows find no bin.

    All rows without a bin move at once, in rounds. If several rows enter a bin, one of them stays;
    a row that was there before is evicted, and moves to another of its bins. The random choices are
    not secret.

    Args:
        bins_n3: the three bins into which each of the n rows may be put, (n, 3).
        bin_count: B, the number of bins.
    """
    row_of_bin = np.full(bin_count, -1, np.int64)
    choice_n = np.zeros(len(bins_n3), np.int64)  # which of its three bins each row tries
    unplaced_rows = np.arange(len(bins_n3))
    for _ in range(_MAX_CUCKOO_ROUNDS):
        if not len(unplaced_rows):
            return row_of_bin
        target_bins = bins_n3[unplaced_rows, choice_n[unplaced_rows]]
        previous_rows = row_of_bin[target_bins]
        # Of several rows with one target the last is stored, so only that row has entered.
        row_of_bin[target_bins] = unplaced_rows
        has_entered = row_of_bin[target_bins] == unplaced_rows
        evicted_rows = previous_rows[has_entered]
        unplaced_rows = np.concatenate(
            [unplaced_rows[~has_entered], evicted_rows[evicted_rows >= 0]]
        )
        # A row without a bin tries one of its other two bins next, at random.
        random_bytes = np.frombuffer(keystream(fresh_key(), length=len(unplaced_rows)), np.uint8)
        choice_n[unplaced_rows] += 1 + random_bytes % (BINS_PER_ID - 1)
        choice_n[unplaced_rows] %= BINS_PER_ID
    return None


def place_hub_tags(tags_n: Words, row_of_bin: RowIndices) -> Words:
    """Return the tag (hash of an ID) in each of the hub's B bins, (B,); empty bins get a dummy tag
    that no member has.

    Args:
        tags_n: 63-bit hash of each of the hub's n IDs, (n,).
        row_of_bin: the row in each bin, -1 for none, (B,).
    """
    tags_B = np.full(len(row_of_bin), _EMPTY_BIN_TAG)
    is_filled = row_of_bin >= 0
    tags_B[is_filled] = tags_n[row_of_bin[is_filled]]
    return tags_B


def fill_member_table(
    tags_n: Words, bins_n3: RowIndices, bin_count: int, slot_count: int
) -> Words | None:
    """Put the tag (hash) of each of a member's IDs into all three bins of the ID; return the tags
    in all slots, (K, B): a bin has K slots, each for one tag. Empty slots get a dummy tag that the
    hub does not have.

    Return None if the IDs do not fit: a bin has more than K tags, or one tag twice.

    Args:
        tags_n: 63-bit hash of each of the member's n IDs, (n,).
        bins_n3: the three bins of each ID, (n, 3).
        bin_count: B, the number of bins.
        slot_count: K, the slots of a bin.
    """
    if _has_repeated_tag(tags_n, bins_n3):
        return None
    bin_of_tag = bins_n3.ravel()
    tags = np.repeat(tags_n, BINS_PER_ID)
    order = np.argsort(bin_of_tag, kind="stable")
    bin_of_tag = bin_of_tag[order]
    tags = tags[order]
    # In sorted order, a tag's slot is its distance from the first tag of its bin.
    slot_of_tag = np.arange(len(bin_of_tag)) - np.searchsorted(bin_of_tag, bin_of_tag)
    if len(slot_of_tag) and int(slot_of_tag.max()) >= slot_count:
        return None
    tags_KB = np.full((slot_count, bin_count), _EMPTY_SLOT_TAG)
    tags_KB[slot_of_tag, bin_of_tag] = tags
    return tags_KB


def _has_repeated_tag(tags_n: Words, bins_n3: RowIndices) -> bool:
    """Return whether two IDs with the same tag have a bin in common: both slots would match the
    hub's tag, and the XOR of a bin's matches, which the parties compute, would be 0.

    `tags_n`, `bins_n3`: the tag (hash), (n,), and the three bins, (n, 3), of each of n IDs.
    """
    # Equal tags become neighbours; three equal ones, of 63 bits, do not occur by chance.
    order = np.argsort(tags_n)
    equals_next = tags_n[order[:-1]] == tags_n[order[1:]]
    bins_of_first = bins_n3[order[:-1][equals_next]]
    bins_of_second = bins_n3[order[1:][equals_next]]
    return bool((bins_of_first[:, :, None] == bins_of_second[:, None, :]).any())


def expand_words(seed: bytes, purpose: bytes, count: int) -> Words:
    """Return `count` pseudorandom words expanded from a secret seed; the same seed and purpose give
    the same words, so each pair is used once.
    """
    return np.frombuffer(keystream(seed, purpose, length=WORD_TYPE.itemsize * count), WORD_TYPE)


def split_bit_planes(tags: Words) -> Words:
    """Return the bits of 64-bit tags, (..., B), as bit planes, (64, ..., B / 64): plane p has bit p
    of all B tags, so that one operation on a word computes on 64 tags at once.

    Bit q of word w of plane p is bit p of tag 64 w + q.
    """
    # Each column has 64 tags; the transposition of its bits gives it a word of each bit plane.
    tags_by_column = np.asarray(tags, np.uint64).reshape(-1, WORD_BITS).T
    planes = np.array(tags_by_column, order="C")  # a copy, which is transposed in place
    transpose_bits(planes)
    return planes.reshape(WORD_BITS, *tags.shape[:-1], tags.shape[-1] // WORD_BITS)


def transpose_bits(words_64n: Words) -> None:
    """Transpose n matrices of 64 x 64 bits, 64 words each, (64, n), in place: bit q of word (p, k)
    goes to bit p of word (q, k).

    Blocks of half the size are swapped, six times (Warren, Hacker's Delight, section 7-3).
    """
    for start in range(0, words_64n.shape[1], _COLUMNS_PER_CHUNK):  # to stay in the cache
        chunk = words_64n[:, start : start + _COLUMNS_PER_CHUNK]
        width = WORD_BITS // 2  # of the blocks that are swapped: 32, 16, ..., 1
        low_mask = (1 << (WORD_BITS // 2)) - 1  # selects the lower half of each 2 * width bits
        while width:
            blocks = chunk.reshape(WORD_BITS // (2 * width), 2, width, chunk.shape[1])
            upper = blocks[:, 0]
            lower = blocks[:, 1]
            swap = ((upper >> np.uint64(width)) ^ lower) & np.uint64(low_mask)
            lower ^= swap
            upper ^= swap << np.uint64(width)
            width //= 2
            low_mask ^= (low_mask << width) & (2**WORD_BITS - 1)


@dataclass
class TripleShares:
    """A party's shares of triples a, b and c = a AND b; each word is used for one AND only.

    Attributes:
        words: the shares of a, of b and of c, arrays of one length.
        used_count: how many words of them were used.
    """

    words: Triple = field(repr=False)
    used_count: int = 0

    @classmethod
    def from_seed(
        cls, seed: bytes, word_count: int, correction: bytes | None = None
    ) -> "TripleShares":
        """Expand one party's shares of `word_count` words of triples (a, b, c = a AND b) from its
        seed.

        `correction`: the last party's share of c, which the dealer sends, since it makes c equal to
        a AND b; None at all other parties, which expand c, too.
        """
        a = expand_words(seed, b"a", word_count)
        b = expand_words(seed, b"b", word_count)
        if correction is None:
            c = expand_words(seed, b"c", word_count)
        else:
            c = np.frombuffer(correction, WORD_TYPE)
        return cls((a, b, c))

    def take_triple(self, shape: tuple[int, ...]) -> Triple:
        """Return shares of a, b and c from the next unused words, each in this shape."""
        start = self.used_count
        self.used_count += int(np.prod(shape))
        a, b, c = (words[start : self.used_count].reshape(shape) for words in self.words)
        return a, b, c

    def split_off(self, word_count: int) -> "TripleShares":
        """Remove the last `word_count` words and return them as separate shares."""
        a, b, c = self.words
        kept_count = len(a) - word_count
        self.words = a[:kept_count], b[:kept_count], c[:kept_count]
        return TripleShares((a[kept_count:], b[kept_count:], c[kept_count:]))


def deal_triples(party_count: int, word_count: int) -> tuple[Sequence[bytes], bytes]:
    """Make `word_count` words of XOR-shared triples (a, b, c = a AND b) at a dealer, for this
    number of parties.

    Returns:
        A seed for each party, from which it expands its shares; and the correction, the last
        party's share of c, encoded: it makes the sum of all shares of c equal to a AND b.
    """
    seeds = [fresh_key() for _ in range(party_count)]
    a, b, c = (np.zeros(word_count, np.uint64) for _ in range(3))
    for seed in seeds:
        a ^= expand_words(seed, b"a", word_count)
        b ^= expand_words(seed, b"b", word_count)
    for seed in seeds[:-1]:
        c ^= expand_words(seed, b"c", word_count)
    return seeds, (c ^ (a & b)).astype(WORD_TYPE).tobytes()


class AndGate(Protocol):
    """One party's part in an AND of XOR-shared words by a Beaver triple, before and after the
    parties reveal d = x ^ a and e = y ^ b.

    All implementations send and return the same bits, so parties may use different ones.
    """

    def __init__(self, x: Words, y: Words, triple: Triple, *, is_leader: bool) -> None:
        """Prepare the AND of words x and y.

        Args:
            x, y: this party's shares of them, arrays of one shape.
            triple: this party's shares of a, b and c = a AND b, of the same shape.
            is_leader: whether this party adds the public term d AND e; exactly one does.
        """
        ...

    def mask_inputs(self) -> Words:
        """Return this party's shares of d = x ^ a and e = y ^ b, stacked: shape (2, ...)."""
        ...

    def compute_share(self, revealed: Words) -> Words:
        """Return this party's share of x AND y; called once.

        `revealed`: d and e, the XOR of all parties' `mask_inputs`.
        """
        ...


class BeaverAnd:
    """An AND by NumPy; satisfies `AndGate`."""

    def __init__(self, x: Words, y: Words, triple: Triple, *, is_leader: bool) -> None:
        """Store this party's XOR shares of the inputs x and y, and of one Beaver triple (a, b,
        a AND b), all arrays of one shape.

        `is_leader`: whether this party adds the public term d AND e, where d = x ^ a and e = y ^ b
        are revealed; exactly one party does.
        """
        self._x = x
        self._y = y
        self._triple = triple
        self._is_leader = is_leader

    def mask_inputs(self) -> Words:
        a, b, _ = self._triple
        return np.stack([self._x ^ a, self._y ^ b])

    def compute_share(self, revealed: Words) -> Words:
        """Return this party's share of x AND y: c ^ (d & b) ^ (e & a), at the leader also ^ (d & e)
        (Beaver 1991). `revealed`: d = x ^ a and e = y ^ b, stacked.
        """
        a, b, c = self._triple
        d, e = revealed
        share: Words = c ^ (d & b) ^ (e & a)
        return share ^ (d & e) if self._is_leader else share
