"""Private set intersection by a circuit: parties compare bins of secret-shared bits.

Run by: the active as the hub, each passive as a member, and a dealer without IDs, such as the
aggregator, over authenticated and encrypted links. Protects from: semi-honest parties, of which the
dealer works with nobody: it sees the sizes of all sets and of the intersection, and together with
the hub or a member it could read the other parties' tags. Only the intersection of all opens; no
pairwise intersection does. A hub that
alters its shares gets another function of the bits in each bin, one bit a bin in all, and may
have the dealer count more than there are (`UNCHECKED`).

1. Hub and members agree on a hash key (commit, reveal) and put their IDs into bins
   (`apfed_protocols.psi.hashing`). The hub commits to its part of the key before it sees the
   members' parts, and reveals it when it has them all, so that no party alone chooses where IDs
   fall. Where IDs do not fit at any party, all go on to the next key derived from the same parts.
2. For each chunk of bins, the dealer hands out triples; the hub and each member compare the tag in
   each bin with the member's slots (or one programmed value, `OpprfIntersection`), 64 bits by six
   levels of AND, and XOR the slots: one bit a bin, shared by the two. Levels of AND over all
   members make it one bit of all.
3. All mask and permute their shares and send them to the dealer, who counts the common IDs
   and says whether they reach the agreed minimum, or their number if only that is to open.
4. If so, and if rows are to open, the members send their shares to the hub, and the hub
   names what opened to them, unless it alone is to know.

COMMIT: SHA-256 of the hub's part, its size, M, the member's place. JOIN: the member's part,
a mask seed for the hub alone, its size. REVEAL: the hub's part, all members' parts and
sizes. PLACE: the number of the key. PLACED: 1 where it fits. AGREED: empty. Every message has, but
for sizes that its receiver reads from an earlier one, a fixed length; anything else is refused.

B bins, W = B / 64 words, K slots, M members. The hub leads: it adds what is public.
Source: Pinkas, Schneider, Tkachenko and Yanai, EUROCRYPT 2019 (bins, circuit).
"""

import hashlib
import hmac
import math
import struct
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, ClassVar, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from apfed_protocols.crypten import load_crypten
from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.psi import hashing, store, vole
from apfed_protocols.psi.hashing import (
    BITS,
    TOKEN_BYTES,
    WORD,
    And,
    BeaverAnd,
    TripleShares,
    Words,
    count_bin_slots,
    count_bins,
    deal_triples,
    expand_words,
    split_bit_planes,
)
from apfed_protocols.psi.interface import (
    BINS_PER_ID,
    Aligner,
    DealtIntersection,
    Guesses,
    IntersectionAgreement,
    IntersectionResult,
    IntersectionTooSmallError,
    Membership,
    Messages,
    Output,
    RoleCoroutine,
    Round,
    check_parties,
    count_message_bytes,
    wait_for,
)
from apfed_protocols.psi.interface import Endpoint as AnyEndpoint
from apfed_protocols.randomness import KEY_BYTES, derive_key, fresh_key, random_permutation

UNCHECKED = (
    "That only what all share opens, and only from the agreed minimum on, holds against parties "
    "that follow the protocol: shares are not checked, so that a hub which alters its own may open "
    "which of its IDs some members have and others lack, also below the minimum, and a member may "
    "have other IDs opened."
)

Rows: TypeAlias = NDArray[np.int64]
_Fingerprints: TypeAlias = tuple[NDArray[np.uint64], Rows, NDArray[np.uint8]]
_FilledTable: TypeAlias = tuple[_Fingerprints, NDArray[np.uint64]]
_ATTEMPTS = 64
_COMMIT = struct.Struct(">32sIHH")
_JOIN = struct.Struct(">32s32sI")
_PART = struct.Struct(">32sI")
_PLACE = struct.Struct(">I")

# Bins are compared in chunks of at most so many slots, whose arrays have 16 MB: larger ones are
# returned to the operating system and cleared again at each use.
CHUNK_SLOTS = 2**21
# The verdict on the number of common IDs: one of these codes, or the number if it is the output.
VERDICT = struct.Struct(">q")
ENOUGH = -1
TOO_FEW = -2
VERSION = 131
_SLOT_BYTES = 4_200
_FURTHER_SLOT_BYTES = 3_200
"""Memory of a slot of 64 bins while it is compared, and for each further member; 4,064 and 3,048
were measured."""
_ROSTER_BYTES = 2**22
_DIGEST_BLOCKS = 3  # AES blocks of an ID's digest
_CHUNK = 2**12  # IDs that are hashed at once


@dataclass(frozen=True, kw_only=True)
class CircuitInputs:
    """One party's inputs to the comparison circuit: its IDs hashed into bins under a key that hub
    and members agreed on (step 1 of the module's docstring).

    Attributes:
        key: 32 bytes that hub and members share, unknown to the dealer.
        masks: seeds of XOR masks, by which the dealer does not see shares; at the hub one shared
            with each member, in their order; at a member the one shared with the hub.
        member_index: this member's index among the members; 0 at the hub, which does not use it.
        slots: K, how many IDs a bin of a member holds at most, for each member in their order.
        sizes: the numbers of IDs that the hub and then each member announced.
        tags: 63-bit hash of the ID in each bin, (bins,), at the hub; of the ID in each slot of each
            bin, (slots, bins), at a member.
        bins_of: the three bins of each own ID, (n, 3).
        id_tags: 63 bits of the hash of each own ID, (n,).
        tokens: 16 further bytes of the hash of each own ID, (n, 16).
        row_of_bin: row of the hub's table whose ID is in each bin, -1 for none, (bins,); empty at a
            member.
    """

    key: bytes = field(repr=False)
    masks: Sequence[bytes] = field(repr=False)
    member_index: int
    slots: Sequence[int]
    sizes: Sequence[int]
    tags: NDArray[np.uint64] = field(repr=False)
    bins_of: NDArray[np.int64] = field(repr=False)
    id_tags: NDArray[np.uint64] = field(repr=False)
    tokens: NDArray[np.uint8] = field(repr=False)
    row_of_bin: NDArray[np.int64] = field(repr=False)


class Kind(IntEnum):
    """The kinds of messages of the circuit backends."""

    COMMIT = 1
    JOIN = 2
    REVEAL = 3
    PLACE = 4
    PLACED = 5
    AGREED = 6
    DEAL = 7
    TRIPLES = 8
    MASKED = 9
    OPENED = 10
    COUNT = 11
    VERDICT = 12
    SHARE = 13
    TOKENS = 14
    CORRELATE = 15
    CORRELATED = 16
    VECTOR = 17
    HINT = 18
    # Without a dealer, see `apfed_protocols.psi.circuit_ot`.
    BASE = 19
    CHOICES = 20
    EXTENSION = 21
    CHALLENGE = 22
    PROOF = 23
    PRODUCTS = 24
    SUM = 25
    KEY = 26
    SEALED = 27
    RELAYED = 28


_CORRELATING = vole.Dealing(Kind.CORRELATE, Kind.CORRELATED, count_bins)


class Endpoint(AnyEndpoint[Kind]):
    """A party's endpoint of the circuit backends."""

    kinds = Kind
    version = VERSION
    work = "comparing bins"


class CircuitIntersection(DealtIntersection):
    """The backend `circuit`: many bytes, little computing, and a dealer; what it reveals is in
    `leaks`.
    """

    name: ClassVar[str] = "circuit"
    dealerless_alternative: ClassVar[str] = "circuit_ot"
    has_pairwise_leak: ClassVar[bool] = False
    outputs: ClassVar[frozenset[Output]] = frozenset(Output)
    leaks: ClassVar[tuple[str, ...]] = (
        "The dealer learns about how large each set is, and how many IDs are common to all.",
        "All parties learn whether the agreed minimum is reached.",
        UNCHECKED,
    )
    version: ClassVar[int] = VERSION

    @staticmethod
    def max_guesses(maximum_ids: int) -> Guesses:
        """Return how many guessed IDs a party can test against another's set if it announces
        `maximum_ids` IDs and deviates from the protocol: the hub one ID for each bin of its hash
        table, a member one ID for each slot of its bins.

        The hub puts each ID into one of the ID's three bins, a member into all three. A member that
        deviates may use only one of them; a common ID is then found with probability 1/3.
        """
        bins = count_bins(maximum_ids)
        return Guesses(hub=bins, member=bins * count_bin_slots(maximum_ids, bins))

    @classmethod
    def count_announced_bytes(cls, size: int, *, own_size: int = 0, member_count: int = 1) -> int:
        """Return the bytes of memory that a role allocates because a peer announces `size` IDs:
        the larger of what a member needs and what the hub needs.

        Args:
            size: the number of IDs that the peer announces.
            own_size: the number of this party's own IDs.
            members: the number of members in the intersection.
        """
        # At a member: a table with a bin for each of the hub's bins.
        bins = count_bins(size)
        table_bytes = WORD.itemsize * cls.count_slots(own_size, bins) * bins
        # At the hub: one chunk of slots. If the hub has few IDs, it has few bins, and a large set
        # of a member takes many slots of each bin.
        compared_slots = max(CHUNK_SLOTS // BITS, cls.count_slots(size, count_bins(own_size)))
        return max(table_bytes, compared_slots * cls._count_slot_bytes(member_count))

    @classmethod
    def _count_slot_bytes(cls, member_count: int) -> int:
        """Return the bytes of memory that one slot of 64 bins takes while it is compared with this
        number of members.
        """
        return _SLOT_BYTES + _FURTHER_SLOT_BYTES * (member_count - 1)

    def _load_gate(self) -> type[And]:
        """Return the class that computes AND of XOR-shared 64-bit words."""
        return BeaverAnd

    def _make_endpoint(self, me: str) -> Endpoint:
        """Return the object that frames and parses the messages of the party `me`."""
        return Endpoint(me, self.agreement, self.progress, version=self.version)

    def make_dealer(self, hub: str, members: Sequence[str]) -> Aligner:
        """Return the role of the dealer, a party without IDs that provides multiplication triples
        and counts the common IDs. Raises LocalProtocolError: names or sizes that do not fit the
        agreement.
        """
        me = self.agreement.dealer
        check_parties(hub, members, me)
        self._require_memory(me, own_size=0, member_count=len(members))
        coroutine = self.run_dealer(self._make_endpoint(me), hub, members)
        return self._make_aligner(me, [hub, *members], coroutine)

    def _run_hub(self, me: str, members: Sequence[str], ids: Sequence[bytes]) -> RoleCoroutine:
        """Run the role of the hub `me` (the active): hash the IDs into bins, compare each chunk of
        bins with every member (a passive) on secret shares, AND over all members, and reveal the
        output (steps 1 to 4 of the module's docstring).

        Letters: M members, B bins, W words of 64 bins. `ids`: the hub's encoded IDs.
        """
        endpoint = self._make_endpoint(me)
        gate = self._load_gate()
        inputs = yield from _agree_as_hub(endpoint, self, members, ids)
        # Provides triples, the AND over members and the count, with or without a dealer.
        helper = yield from self._make_hub_helper(endpoint, members, inputs)
        tags_MB = yield from self.tag_hub_bins(endpoint, members, inputs)
        shares = []
        bins = tags_MB.shape[-1]
        for chunk in split_bins(bins, inputs.slots):
            words = (chunk.stop - chunk.start) // BITS
            triples, all_triples = yield from helper.take_triples(words)
            planes = {}
            for member, slots, tags_B in zip(members, inputs.slots, tags_MB, strict=True):
                # The hub's tag of a bin is compared with the tag in each of the member's slots.
                planes_1W = ~split_bit_planes(tags_B[chunk])[:, None]
                planes[member] = np.broadcast_to(planes_1W, (BITS, slots, words))
            bits = yield from _compare_slots(endpoint, planes, triples, is_leader=True, gate=gate)
            bits_MW = np.stack([bits[member] for member in members])
            share = yield from helper.combine_members(bits_MW, all_triples, gate)
            shares.append(share)
            endpoint.report_progress(chunk.stop, bins)
        share = np.concatenate(shares)
        return (yield from _reveal_at_hub(endpoint, members, inputs, ids, share, helper))

    def _run_member(self, me: str, hub: str, ids: Sequence[bytes]) -> RoleCoroutine:
        """Run the role of the member `me` (a passive): hash the IDs into bins, compare each chunk
        of bins with the hub (the active) on secret shares, AND over all members, and reveal the
        output (steps 1 to 4 of the module's docstring). `ids`: the member's encoded IDs.
        """
        endpoint = self._make_endpoint(me)
        gate = self._load_gate()
        inputs = yield from _agree_as_member(endpoint, self, hub, ids)
        # Provides triples, the AND over members and the count, with or without a dealer.
        helper = yield from self._make_member_helper(endpoint, hub, inputs)
        tags = yield from self.tag_member_bins(endpoint, hub, inputs)
        shares = []
        bins = tags.shape[-1]
        for chunk in split_bins(bins, inputs.slots):
            chunk_tags = tags[:, chunk]
            words = chunk_tags.shape[1] // BITS
            triples, all_triples = yield from helper.take_triples(words)
            planes = {hub: split_bit_planes(chunk_tags)}
            bits = yield from _compare_slots(
                endpoint, planes, {hub: triples}, is_leader=False, gate=gate
            )
            share = yield from helper.combine_members(bits[hub], all_triples, gate)
            shares.append(share)
            endpoint.report_progress(chunk.stop, bins)
        share = np.concatenate(shares)
        return (yield from _reveal_at_member(endpoint, hub, inputs, ids, share, helper))

    def _make_hub_helper(
        self, endpoint: Endpoint, members: Sequence[str], inputs: CircuitInputs
    ) -> Generator[Round, Messages, "HubHelper"]:
        """Return the object by which the hub gets multiplication triples and the count of common
        IDs: here from the dealer. A subclass may first exchange messages for it.
        """
        yield from ()  # makes this a generator without a round
        return DealtHub(endpoint, members, inputs)

    def _make_member_helper(
        self, endpoint: Endpoint, hub: str, inputs: CircuitInputs
    ) -> Generator[Round, Messages, "MemberHelper"]:
        """Return the object by which a member gets multiplication triples and the count of common
        IDs: here from the dealer. A subclass may first exchange messages for it.
        """
        yield from ()  # makes this a generator without a round
        return DealtMember(endpoint, hub, inputs)

    @classmethod
    def count_slots(cls, member_size: int, bins: int) -> int:
        """Return K, the slots that each of `bins` bins of a member with this number of
        IDs needs.
        """
        return hashing.count_bin_slots(member_size, bins)

    def make_table(self, id_tags: Words, bins_of: Rows, bins: int, slots: int) -> Words | None:
        """Put a member's IDs into their bins; return the tags (63-bit hashes of IDs) in all slots,
        (slots, bins), or None if the IDs do not fit.

        Args:
            id_tags: 63-bit hash of each of the member's IDs, (n,).
            bins_of: the three bins of each ID, (n, 3).
            bins: B, the number of bins.
            slots: K, the slots of a bin.
        """
        return hashing.fill_member_table(id_tags, bins_of, bins, slots)

    @property
    def max_message_bytes(self) -> int:
        """Return the bytes of the longest message that a role accepts: the masked bits of a chunk,
        64 for each slot, or one token for each common ID. The key parts and sizes of at most 2^16
        members (the roster) are added to either.
        """
        largest = self.agreement.largest_size
        slots = max(CHUNK_SLOTS, BITS * self.count_slots(largest, hashing.count_bins(0)))
        return count_message_bytes(
            max(WORD.itemsize * slots, TOKEN_BYTES * largest) + _ROSTER_BYTES
        )

    def tag_hub_bins(
        self, endpoint: Endpoint, members: Sequence[str], inputs: CircuitInputs
    ) -> Generator[Round, Messages, Words]:
        """Return the tags (hashes of IDs) in the hub's bins that are compared with each member,
        (members, bins): here the same tags for all members. A subclass exchanges messages through
        `endpoint` for other tags. `inputs`: the hub's IDs in bins.
        """
        yield from ()  # makes this a generator without a round
        return np.broadcast_to(inputs.tags, (len(members), *inputs.tags.shape))

    def tag_member_bins(
        self, endpoint: Endpoint, hub: str, inputs: CircuitInputs
    ) -> Generator[Round, Messages, Words]:
        """Return the tags (hashes of IDs) in this member's bins that are compared with the hub,
        (slots, bins): here those of its IDs. A subclass exchanges messages through `endpoint` for
        other tags. `inputs`: the member's IDs in bins.
        """
        yield from ()  # makes this a generator without a round
        return inputs.tags

    def run_dealer(
        self, endpoint: Endpoint, hub: str, members: Sequence[str], *, hub_size: int | None = None
    ) -> RoleCoroutine:
        """Run the role of the dealer, which has no IDs: deal multiplication triples for each chunk
        of bins, then count the common IDs (steps 2 and 3 of the module's docstring).

        `hub_size`: the number of IDs that the hub announced to the dealer; None: it announced none.

        Raises RemoteProtocolError: the hub orders more triples than agreed, or a message is
        malformed.
        """
        total_words = 0  # of 64 bins each
        largest = self.agreement.maximum_ids if hub_size is None else hub_size
        next_round = wait_for([hub])
        received = yield next_round
        while endpoint.get_kind(received, hub) is Kind.DEAL:
            words, next_round = self._deal_chunk(endpoint, hub, members, received)
            total_words += words
            if total_words * BITS > hashing.count_bins(largest):
                raise RemoteProtocolError(
                    f"{hub} orders triples for {total_words * BITS} bins, more than the agreed "
                    f"{largest} IDs take"
                )
            received = yield next_round
        verdict = yield from _count_bits(endpoint, hub, members, received, total_words)
        verdicts = dict.fromkeys([hub, *members], verdict)
        yield endpoint.make_round(Kind.VERDICT, verdicts, awaited=())
        return IntersectionResult()  # the dealer itself gets no output

    def _deal_chunk(
        self, endpoint: Endpoint, hub: str, members: Sequence[str], received: Messages
    ) -> tuple[int, Round]:
        """Deal the multiplication triples for one chunk of bins, which the hub orders by its
        message in `received` (messages by sender).

        Returns:
            The number of words of 64 bins in the chunk; and the step of the dealer's role that
            sends the triples to hub and members.

        Raises RemoteProtocolError: the chunk is too large or empty.
        """
        # Four bytes each: the words of the chunk, then the slots of each member's bins.
        order = endpoint.parse_message(received, hub, Kind.DEAL, 4 * (1 + len(members)))
        words, *slots = struct.unpack(f">{1 + len(members)}I", order)
        # The smallest table has the fewest bins, and so the most slots for a large set.
        max_slots = self.count_slots(self.agreement.maximum_ids, hashing.count_bins(0))
        is_empty = words == 0 or min(slots) == 0
        # A chunk of one word cannot be split further.
        is_too_large = words > 1 and words * BITS * max(slots) > CHUNK_SLOTS
        if is_empty or is_too_large or max(slots) > max_slots:
            raise RemoteProtocolError(
                f"{hub} orders triples for {words} words of bins with {max(slots)} slots; a chunk "
                f"has 1 to {CHUNK_SLOTS} slots, or one word of bins, and a bin at most {max_slots}"
            )
        pair_words, all_words = count_triple_words(words, slots)
        # For the AND over all members: all parties share these triples, the hub as the last one.
        all_seeds, all_correction = deal_triples(len(members) + 1, all_words)
        *member_all_seeds, hub_all_seed = all_seeds
        bodies = {}
        hub_seeds = b""
        for member, count, all_seed in zip(members, pair_words, member_all_seeds, strict=True):
            # For the comparison of the hub with this member: the two share these triples.
            (hub_seed, seed), correction = deal_triples(2, count)
            hub_seeds += hub_seed
            bodies[member] = seed + all_seed + correction
        bodies[hub] = hub_seeds + hub_all_seed + all_correction
        return words, endpoint.make_round(Kind.TRIPLES, bodies, awaited=[hub])


class CryptenCircuitIntersection(CircuitIntersection):
    """The backend `circuit_crypten`: `circuit`, with ANDs computed by CrypTen."""

    name: ClassVar[str] = "circuit_crypten"

    def __init__(self, agreement: IntersectionAgreement, **choices: Any) -> None:
        """Load CrypTen and set up the intersection; `choices` are the keyword arguments of
        `SetIntersection`. Raises LocalProtocolError: CrypTen is not installed.
        """
        load_crypten()
        super().__init__(agreement, **choices)

    def _load_gate(self) -> type[And]:
        """Return the class that computes AND of XOR-shared 64-bit words by CrypTen."""
        # Imported here, since torch takes a second to load and is needed for nothing else.
        from apfed_protocols.crypten.tensors import CryptenAnd

        return CryptenAnd


Counted: TypeAlias = IntersectionResult | IntersectionTooSmallError | None
"""The result after the common IDs were counted; None if rows are still to be revealed."""


class HubHelper(Protocol):
    """The parts of the hub's role that differ with and without a dealer: multiplication triples,
    the AND over all members, and the count of common IDs.

    Attributes:
        sharers: the members that hold shares of the result, and send them if rows are revealed.
    """

    sharers: Sequence[str]

    def take_triples(
        self, words: int
    ) -> Generator[Round, Messages, tuple[Mapping[str, TripleShares], TripleShares]]:
        """Return the hub's shares of multiplication triples for a chunk of 64 * `words` bins: by
        member, the triples for the comparison with that member; and the triples for the AND over
        all members.
        """
        ...

    def combine_members(
        self, bits_MW: Words, triples: TripleShares, gate: type[And]
    ) -> Generator[Round, Messages, Words]:
        """Return the hub's XOR share, (words,), of the bit of each bin that says whether all
        members have the hub's ID: the AND over the members' bits.

        Args:
            bits_MW: the hub's share of the bit that it shares with each of M members, for each of
                64 W bins, in W words, (members, words).
            triples: this party's shares of the triples that this AND consumes.
            gate: class that computes AND of XOR-shared words.
        """
        ...

    def count_common(
        self, share: Words, own_size: int, row_of_bin: Rows
    ) -> Generator[Round, Messages, Counted]:
        """Have the common IDs counted; return the hub's result, None if rows are to be revealed.

        Args:
            share: the hub's XOR share of the bits that say which bins hold a common ID, (words,).
            own_size: the number of the hub's IDs.
            row_of_bin: row of the hub's table in each bin, -1 for none, (bins,).
        """
        ...


class MemberHelper(Protocol):
    """The parts of a member's role that differ with and without a dealer: multiplication triples,
    the AND over all members, and the count of common IDs.

    Attributes:
        holds_share: whether this member holds a share of the result, which it sends if rows are
            revealed.
    """

    holds_share: bool

    def take_triples(
        self, words: int
    ) -> Generator[Round, Messages, tuple[TripleShares, TripleShares]]:
        """Return this member's shares of multiplication triples for a chunk of 64 * `words` bins:
        the triples for the comparison with the hub, and those for the AND over all members.
        """
        ...

    def combine_members(
        self, bits_W: Words, triples: TripleShares, gate: type[And]
    ) -> Generator[Round, Messages, Words]:
        """Return this member's XOR share, (words,), of the bit of each bin that says whether all
        members have the hub's ID: the AND over the members' bits.

        Args:
            bits_W: this member's share of the bit that it shares with the hub, for each of 64 W
                bins, in W words, (words,).
            triples: this party's shares of the triples that this AND consumes.
            gate: class that computes AND of XOR-shared words.
        """
        ...

    def count_common(self, share: Words, own_size: int) -> Generator[Round, Messages, Counted]:
        """Have the common IDs counted; return this member's result, None if rows are to be
        revealed.

        `share`: this member's XOR share of the bits that say which bins hold a common ID, (words,).
        `own_size`: the number of its IDs.
        """
        ...


class DealtHub:
    """The hub's triples and counts by a dealer; satisfies `HubHelper`."""

    def __init__(self, endpoint: Endpoint, members: Sequence[str], inputs: CircuitInputs) -> None:
        """Use the dealer that the agreement names."""
        self.sharers = members
        self._endpoint = endpoint
        self._inputs = inputs

    def take_triples(
        self, words: int
    ) -> Generator[Round, Messages, tuple[Mapping[str, TripleShares], TripleShares]]:
        """Order the multiplication triples for a chunk of 64 * `words` bins from the dealer, and
        expand its seeds. Return the hub's shares: by member, the triples for the comparison with
        that member; and the triples for the AND over all members.
        """
        endpoint = self._endpoint
        dealer = endpoint.agreement.dealer
        slots = self._inputs.slots
        seed_bytes = KEY_BYTES * (len(self.sharers) + 1)
        pair_words, all_words = count_triple_words(words, slots)
        order = pack_order(words, slots)
        received = yield endpoint.make_round(Kind.DEAL, {dealer: order}, awaited=[dealer])
        length = seed_bytes + WORD.itemsize * all_words
        dealt = endpoint.parse_message(received, dealer, Kind.TRIPLES, length)
        # One seed for each member, one for the AND over all, and the hub's share of c for that AND.
        *seeds, all_seed = (dealt[k : k + KEY_BYTES] for k in range(0, seed_bytes, KEY_BYTES))
        correction = dealt[seed_bytes:]
        triples = {
            member: TripleShares.from_seed(seed, count)
            for member, seed, count in zip(self.sharers, seeds, pair_words, strict=True)
        }
        return triples, TripleShares.from_seed(all_seed, all_words, correction)

    def combine_members(
        self, bits_MW: Words, triples: TripleShares, gate: type[And]
    ) -> Generator[Round, Messages, Words]:
        """Return the hub's XOR share, (words,), of the AND over all members' bits, computed
        together with all members.

        Args:
            bits_MW: the hub's share of the bit that it shares with each of M members, for each of
                64 W bins, in W words, (members, words).
            triples: this party's shares of the triples that this AND consumes.
            gate: class that computes AND of XOR-shared words.
        """
        endpoint = self._endpoint
        return (
            yield from combine_member_bits(
                endpoint, bits_MW, triples, hub=endpoint.me, members=self.sharers, gate=gate
            )
        )

    def count_common(
        self, share: Words, own_size: int, row_of_bin: Rows
    ) -> Generator[Round, Messages, Counted]:
        """Have the dealer count the common IDs; return the hub's result, None if rows are still to
        be revealed.

        Args:
            share: the hub's XOR share of the bits that say which bins hold a common ID, (words,).
            own_size: the number of the hub's IDs.
            row_of_bin: row of the hub's table in each bin, -1 for none, (bins,).
        """
        return (
            yield from _request_count(self._endpoint, self._inputs, own_size, share, row_of_bin)
        )


class DealtMember:
    """A member's triples and counts by a dealer; satisfies `MemberHelper`."""

    holds_share = True

    def __init__(self, endpoint: Endpoint, hub: str, inputs: CircuitInputs) -> None:
        """Use the dealer that the agreement names."""
        self._endpoint = endpoint
        self._hub = hub
        self._inputs = inputs

    def take_triples(
        self, words: int
    ) -> Generator[Round, Messages, tuple[TripleShares, TripleShares]]:
        """Receive the seeds that the dealer sends for a chunk of 64 * `words` bins, and expand
        them to multiplication triples. Return this member's shares: the triples for the comparison
        with the hub, and those for the AND over all members.
        """
        endpoint = self._endpoint
        dealer = endpoint.agreement.dealer
        pair_words, all_words = count_triple_words(words, self._inputs.slots)
        own_words = pair_words[self._inputs.member_index]
        received = yield wait_for([dealer])
        length = 2 * KEY_BYTES + WORD.itemsize * own_words
        dealt = endpoint.parse_message(received, dealer, Kind.TRIPLES, length)
        seed = dealt[:KEY_BYTES]
        all_seed = dealt[KEY_BYTES : 2 * KEY_BYTES]
        correction = dealt[2 * KEY_BYTES :]  # this member's share of c in the comparison
        triples = TripleShares.from_seed(seed, own_words, correction)
        return triples, TripleShares.from_seed(all_seed, all_words)

    def combine_members(
        self, bits_W: Words, triples: TripleShares, gate: type[And]
    ) -> Generator[Round, Messages, Words]:
        """Return this member's XOR share, (words,), of the AND over all members' bits, computed
        together with the hub. Its shares of the other members' bits are zero, since each of these
        bits is shared by the hub and one member alone.

        Args:
            bits_W: this member's share of the bit that it shares with the hub, for each of 64 W
                bins, in W words, (words,).
            triples: this party's shares of the triples that this AND consumes.
            gate: class that computes AND of XOR-shared words.
        """
        inputs = self._inputs
        bits_MW = np.zeros((len(inputs.slots), len(bits_W)), np.uint64)
        bits_MW[inputs.member_index] = bits_W
        return (
            yield from combine_member_bits(
                self._endpoint, bits_MW, triples, hub=self._hub, members=(), gate=gate
            )
        )

    def count_common(self, share: Words, own_size: int) -> Generator[Round, Messages, Counted]:
        """Have the dealer count the common IDs; return this member's result, None if rows are still
        to be revealed.

        `share`: this member's XOR share of the bits that say which bins hold a common ID, (words,).
        `own_size`: the number of its IDs.
        """
        return (
            yield from _request_count(
                self._endpoint, self._inputs, own_size, share, row_of_bin=None
            )
        )


def _agree_as_hub(
    endpoint: Endpoint, backend: CircuitIntersection, members: Sequence[str], ids: Sequence[bytes]
) -> Generator[Round, Messages, CircuitInputs]:
    """Run step 1 (agreement on a hash key and on bins) at the hub: commit to its part of the hash
    key, collect the members' parts and sizes, reveal all parts, and put the IDs into bins under a
    key for which the IDs of all parties fit. Return the hub's inputs to the circuit.

    Args:
        endpoint: frames and parses the hub's messages.
        backend: decides how many slots a bin of a member has.
        members: the members' names.
        ids: the hub's encoded IDs.
    """
    own_part = fresh_key()
    size = endpoint.agreement.compute_announced_size(endpoint.me, len(ids))
    commitment = hashlib.sha256(own_part).digest()
    commits = {
        member: _COMMIT.pack(commitment, size, len(members), index)
        for index, member in enumerate(members)
    }
    received = yield endpoint.make_round(Kind.COMMIT, commits, awaited=members)
    key_parts = []
    mask_seeds = []
    member_sizes = []
    for member in members:
        join = endpoint.parse_message(received, member, Kind.JOIN, _JOIN.size)
        key_part, mask_seed, member_size = _JOIN.unpack(join)
        endpoint.agreement.check_announced_sizes(member, [member_size], [member])
        key_parts.append(key_part)
        mask_seeds.append(mask_seed)
        member_sizes.append(member_size)
    packed_parts = b"".join(map(_PART.pack, key_parts, member_sizes))
    reveals = dict.fromkeys(members, own_part + packed_parts)
    yield endpoint.make_round(Kind.REVEAL, reveals, awaited=())
    bins = hashing.count_bins(size)
    keys = _derive_candidate_keys(endpoint, own_part, packed_parts)
    key, (id_tags, bins_of, tokens), row_of_bin = yield from _fill_bins(
        endpoint, members, ids, keys, bins
    )
    return CircuitInputs(
        key=key,
        masks=mask_seeds,
        member_index=0,
        slots=[backend.count_slots(member_size, bins) for member_size in member_sizes],
        sizes=[size, *member_sizes],
        tags=hashing.place_hub_tags(id_tags, row_of_bin),
        bins_of=bins_of,
        id_tags=id_tags,
        tokens=tokens,
        row_of_bin=row_of_bin,
    )


def _fill_bins(
    endpoint: Endpoint,
    members: Sequence[str],
    ids: Sequence[bytes],
    keys: Sequence[bytes],
    bins: int,
) -> Generator[Round, Messages, tuple[bytes, _Fingerprints, Rows]]:
    """Find the first hash key under which the IDs of all parties fit into their bins, at the hub:
    try each key on the hub's own IDs, propose it to the members, and tell them when all accept.

    Args:
        endpoint: frames and parses the hub's messages.
        members: names of the members, the other parties with IDs.
        ids: the hub's IDs.
        keys: the candidate hash keys, tried in this order.
        bins: B, the number of bins.

    Returns:
        The key; three hashes of each of the hub's IDs under this key, its tag, bins and token
        (`fingerprint_ids`); and the row in each bin, (bins,).

    Raises:
        RemoteProtocolError: members refused all proposed keys.
        LocalProtocolError: the hub's own IDs fit under no key.
    """
    refusing_members: list[str] = []
    for attempt, key in enumerate(keys):
        tags, bins_n3, tokens = hashing.fingerprint_ids(ids, key, bins)
        row_of_bin = hashing.fill_cuckoo_table(bins_n3, bins)
        if row_of_bin is None:
            continue
        proposals = dict.fromkeys(members, _PLACE.pack(attempt))
        received = yield endpoint.make_round(Kind.PLACE, proposals, awaited=members)
        refusing_members = [
            member
            for member in members
            if endpoint.parse_message(received, member, Kind.PLACED, 1) != b"\1"
        ]
        if not refusing_members:
            yield endpoint.make_round(Kind.AGREED, dict.fromkeys(members, b""), awaited=())
            return key, (tags, bins_n3, tokens), row_of_bin
    if refusing_members:
        raise RemoteProtocolError(
            f"{', '.join(refusing_members)} took none of the {len(keys)} hash keys; IDs that were "
            "chosen to collide, or a peer that does not follow the protocol"
        )
    raise LocalProtocolError(
        f"{endpoint.me}: none of {len(keys)} hash keys gave every ID a bin; "
        "this does not happen by chance"
    )


def _agree_as_member(
    endpoint: Endpoint, backend: CircuitIntersection, hub: str, ids: Sequence[bytes]
) -> Generator[Round, Messages, CircuitInputs]:
    """Run step 1 (agreement on a hash key and on bins) at a member: send its part of the hash key,
    check what the hub reveals, and put the IDs into bins under a key for which the IDs of all
    parties fit. Return the member's inputs to the circuit.

    Args:
        endpoint: frames and parses the member's messages.
        backend: decides how many slots a bin of a member has, and fills the bins.
        hub: the hub's name.
        ids: the member's encoded IDs.

    Raises RemoteProtocolError: the hub's commitment, key parts or sizes are wrong.
    """
    received = yield wait_for([hub])
    commit = endpoint.parse_message(received, hub, Kind.COMMIT, _COMMIT.size)
    commitment, hub_size, member_count, member_index = _COMMIT.unpack(commit)
    endpoint.agreement.check_announced_sizes(hub, [hub_size], [hub])
    _check_member_index(endpoint, hub, member_index, member_count)
    own_part = fresh_key()
    mask_seed = fresh_key()
    own_size = endpoint.agreement.compute_announced_size(endpoint.me, len(ids))
    join = _JOIN.pack(own_part, mask_seed, own_size)
    received = yield endpoint.make_round(Kind.JOIN, {hub: join}, awaited=[hub])
    length = KEY_BYTES + _PART.size * member_count
    reveal = endpoint.parse_message(received, hub, Kind.REVEAL, length)
    hub_part = reveal[:KEY_BYTES]
    packed_parts = reveal[KEY_BYTES:]
    if not hmac.compare_digest(hashlib.sha256(hub_part).digest(), commitment):
        raise RemoteProtocolError(f"{hub} revealed another key part than it committed to")
    start = _PART.size * member_index
    if packed_parts[start : start + _PART.size] != _PART.pack(own_part, own_size):
        raise RemoteProtocolError(f"{hub} repeats the key part or size of {endpoint.me} wrongly")
    sizes = [size for _, size in _PART.iter_unpack(packed_parts)]
    members = [party for party in endpoint.agreement.sizes if party != hub]
    endpoint.agreement.check_announced_sizes(hub, sizes, members)
    bins = hashing.count_bins(hub_size)
    slots = [backend.count_slots(size, bins) for size in sizes]
    keys = _derive_candidate_keys(endpoint, hub_part, packed_parts)

    def fill_table(key: bytes) -> _FilledTable | None:
        """Return the tag, bins and token of each ID under this key (`fingerprint_ids`), and the
        tags in all slots, (slots, bins); None if the IDs do not fit.
        """
        id_tags, bins_of, tokens = hashing.fingerprint_ids(ids, key, bins)
        table = backend.make_table(id_tags, bins_of, bins, slots[member_index])
        return None if table is None else ((id_tags, bins_of, tokens), table)

    key, filled_table = yield from _fill_slots(endpoint, hub, keys, fill_table)
    (id_tags, bins_of, tokens), tags_KB = filled_table
    return CircuitInputs(
        key=key,
        masks=[mask_seed],
        member_index=member_index,
        slots=slots,
        sizes=[hub_size, *sizes],
        tags=tags_KB,
        bins_of=bins_of,
        id_tags=id_tags,
        tokens=tokens,
        row_of_bin=np.empty(0, np.int64),  # only the hub puts one row into each bin
    )


def _check_member_index(endpoint: Endpoint, hub: str, member_index: int, member_count: int) -> None:
    """Raise RemoteProtocolError, which names `hub`, unless the index that the hub gives this member
    lies below the number of members, and this number fits the agreed sizes, if there are any.
    """
    if member_index >= member_count:
        raise RemoteProtocolError(f"{hub} gives place {member_index} among {member_count} members")
    agreed_sizes = endpoint.agreement.sizes
    agreed_count = len(agreed_sizes) - 1  # all but the hub
    if agreed_sizes and member_count != agreed_count:
        raise RemoteProtocolError(
            f"{hub} speaks of {member_count} members, the parties agreed on sizes for "
            f"{agreed_count}"
        )


def _fill_slots(
    endpoint: Endpoint,
    hub: str,
    keys: Sequence[bytes],
    fill_table: Callable[[bytes], _FilledTable | None],
) -> Generator[Round, Messages, tuple[bytes, _FilledTable]]:
    """Try the hash keys that the hub proposes, at a member, until the IDs of all parties fit into
    their bins under one key; return this key, and the table that `fill_table` made for it.

    Args:
        endpoint: frames and parses the member's messages.
        hub: name of the hub, which proposes the keys.
        keys: the candidate hash keys; the hub names them by their index.
        fill_table: puts the IDs into bins under a key; returns None if they do not fit.

    Raises RemoteProtocolError: the hub proposes keys out of order.
    """
    # The first key fits most likely, so try it while the hub does the same.
    table = fill_table(keys[0])
    index_of_table = 0
    previous = -1
    received = yield wait_for([hub])
    while True:
        (index,) = _PLACE.unpack(endpoint.parse_message(received, hub, Kind.PLACE, _PLACE.size))
        if not previous < index < len(keys):
            raise RemoteProtocolError(
                f"{hub} proposes hash key {index} after {previous}; keys are numbered upwards "
                f"and end at {len(keys) - 1}"
            )
        previous = index
        if index != index_of_table:
            table = fill_table(keys[index])
            index_of_table = index
        accepts = bytes([table is not None])
        received = yield endpoint.make_round(Kind.PLACED, {hub: accepts}, awaited=[hub])
        if table is not None and endpoint.get_kind(received, hub) is Kind.AGREED:
            endpoint.parse_message(received, hub, Kind.AGREED, 0)
            return keys[index], table


def _derive_candidate_keys(
    endpoint: Endpoint, hub_part: bytes, packed_parts: bytes
) -> Sequence[bytes]:
    """Return the hash keys that are tried one after another, derived from the hub's random part
    `hub_part` and from the members' parts and sizes, `packed_parts`.
    """
    digest = endpoint.agreement.digest
    return [
        derive_key(hub_part, digest, packed_parts, attempt.to_bytes(4, "big"))
        for attempt in range(_ATTEMPTS)
    ]


def _compare_slots(
    endpoint: Endpoint,
    planes: Mapping[str, Words],
    triples: Mapping[str, TripleShares],
    *,
    is_leader: bool,
    gate: type[And],
) -> Generator[Round, Messages, Mapping[str, Words]]:
    """Compare the tags (hashes of IDs) in bins with each peer; return, by peer, this party's XOR
    shares, (words,), of the bits that say in which bins the two have the same tag.

    Two tags are equal if all 64 bits of NOT (hub's tag XOR member's tag) are 1. Six levels of AND
    combine these bits, the upper half with the lower half at each level.

    Args:
        endpoint: frames and parses this party's messages.
        planes: this party's shares, by peer, of NOT (hub's tag XOR member's tag) as bit planes,
            (64, slots, words): the complement of its tags at the hub, its tags at a member.
        triples: this party's shares of the 63 * slots * words triples that the ANDs consume (63 =
            32 + 16 + ... + 1), by peer.
        is_leader: whether this is the hub; of the two parties it alone adds the public terms.
        gate: class that computes AND of XOR-shared words.
    """
    for half in (32, 16, 8, 4, 2, 1):
        gates = {}
        for peer, bits in planes.items():
            first = bits[:half]
            second = bits[half:]
            triple = triples[peer].take_triple(first.shape)
            gates[peer] = gate(first, second, triple, is_leader=is_leader)
        own_masked = {peer: pair_gate.mask_inputs() for peer, pair_gate in gates.items()}
        bodies = {peer: words.tobytes() for peer, words in own_masked.items()}
        received = yield endpoint.make_round(Kind.MASKED, bodies, awaited=bodies.keys())
        planes = {}
        for peer, words in own_masked.items():
            peer_words = endpoint.parse_words(received, peer, Kind.MASKED, words.shape)
            planes[peer] = gates[peer].compute_share(words ^ peer_words)
    # At most one slot of a bin holds the hub's ID, so the XOR over the slots is their OR.
    return {peer: np.bitwise_xor.reduce(bits[0], axis=0) for peer, bits in planes.items()}


def combine_member_bits(
    endpoint: Endpoint,
    shares: Words,
    triples: TripleShares,
    *,
    hub: str,
    members: Sequence[str],
    gate: type[And],
) -> Generator[Round, Messages, Words]:
    """Return this party's XOR share, (words,), of the AND over all members of one bit for each bin
    of the hub's hash table, computed by Beaver multiplications.

    The hub collects the masked inputs of all parties, and sends back their XOR, the public values d
    and e of a Beaver multiplication.

    Args:
        endpoint: frames and parses this party's messages.
        shares: this party's shares of each member's bits, (members, words); zeros at a member for
            the other members.
        triples: this party's shares of (members - 1) * words triples.
        hub: name of the hub.
        members: at the hub, names of the members that take part; at a member, empty.
        gate: class that computes AND of XOR-shared words.
    """
    is_hub = bool(members)
    # Pairs of members, level by level; the last of an odd number waits for the next level.
    while len(shares) > 1:
        half = len(shares) // 2
        left = shares[:half]
        right = shares[half : 2 * half]
        rest = shares[2 * half :]
        and_gate = gate(left, right, triples.take_triple(left.shape), is_leader=is_hub)
        masked = and_gate.mask_inputs()
        if is_hub:
            received = yield wait_for(members)
            for member in members:
                masked ^= endpoint.parse_words(received, member, Kind.MASKED, masked.shape)
            revealed = masked
            bodies = dict.fromkeys(members, revealed.tobytes())
            yield endpoint.make_round(Kind.OPENED, bodies, awaited=())
        else:
            received = yield endpoint.make_round(
                Kind.MASKED, {hub: masked.tobytes()}, awaited=[hub]
            )
            revealed = endpoint.parse_words(received, hub, Kind.OPENED, masked.shape)
        shares = np.concatenate([and_gate.compute_share(revealed), rest])
    bits_W: Words = shares[0]
    return bits_W


def _reveal_at_hub(
    endpoint: Endpoint,
    members: Sequence[str],
    inputs: CircuitInputs,
    ids: Sequence[bytes],
    share: Words,
    helper: HubHelper,
) -> RoleCoroutine:
    """Run steps 3 and 4 (count, reveal) at the hub: have the common IDs counted, add up the shares
    of the bits that say which bins hold a common ID, reveal the rows to the members if that is
    agreed, and return the hub's result.

    Args:
        endpoint: frames and parses the hub's messages.
        members: the members' names.
        inputs: the hub's inputs to the circuit.
        ids: the hub's encoded IDs.
        share: the hub's XOR share of the bits that say which bins hold a common ID, (words,).
        helper: counts the common IDs, with the dealer or without one.
    """
    row_of_bin = inputs.row_of_bin
    result = yield from helper.count_common(share, len(ids), row_of_bin)
    if result is not None:  # too few common IDs, or rows are not the agreed output
        return result
    received = yield wait_for(helper.sharers)
    for member in helper.sharers:
        share = share ^ endpoint.parse_words(received, member, Kind.SHARE, share.shape)
    common_rows = row_of_bin[unpack_bits(share)]
    if (common_rows < 0).any():
        raise RemoteProtocolError(
            f"{', '.join(helper.sharers)} opened bins in which {endpoint.me} has no ID; a share is "
            "wrong"
        )
    rows = common_rows[random_permutation(len(common_rows))]
    if endpoint.agreement.output is Output.HUB_ROWS:
        return IntersectionResult(rows=rows)
    tokens = inputs.tokens[rows].tobytes()
    yield endpoint.make_round(Kind.TOKENS, dict.fromkeys(members, tokens), awaited=())
    return IntersectionResult(rows=rows)


def _reveal_at_member(
    endpoint: Endpoint,
    hub: str,
    inputs: CircuitInputs,
    ids: Sequence[bytes],
    share: Words,
    helper: MemberHelper,
) -> RoleCoroutine:
    """Run steps 3 and 4 (count, reveal) at a member: have the common IDs counted, send the hub this
    member's share if it has one, and, unless the hub alone learns the rows, find the tokens that
    the hub reveals among the member's own IDs. Return the member's result.

    Args:
        endpoint: frames and parses the member's messages.
        hub: the hub's name.
        inputs: the member's inputs to the circuit.
        ids: the member's encoded IDs.
        share: the member's XOR share of the bits that say which bins hold a common ID, (words,).
        helper: counts the common IDs, with the dealer or without one.
    """
    result = yield from helper.count_common(share, len(ids))
    if result is not None:  # too few common IDs, or rows are not the agreed output
        return result
    shares_for_hub = {hub: share.tobytes()} if helper.holds_share else {}
    if endpoint.agreement.output is Output.HUB_ROWS:
        yield endpoint.make_round(Kind.SHARE, shares_for_hub, awaited=())
        return IntersectionResult()
    received = yield endpoint.make_round(Kind.SHARE, shares_for_hub, awaited=[hub])
    body = endpoint.parse_message(received, hub, Kind.TOKENS)
    return IntersectionResult(rows=_find_revealed_rows(endpoint, hub, inputs, body))


def _find_revealed_rows(endpoint: Endpoint, hub: str, inputs: CircuitInputs, body: bytes) -> Rows:
    """Return this member's rows of the IDs whose tokens the hub revealed, in the hub's order.

    `body`: content of the hub's message: a token (16 bytes of an ID's hash) for each common ID.

    Raises RemoteProtocolError: a token is unknown or repeated, or there are fewer tokens than the
    agreed minimum of common rows.
    """
    count = len(body) // TOKEN_BYTES
    tokens = np.frombuffer(body[: count * TOKEN_BYTES], np.uint8).reshape(count, TOKEN_BYTES)
    positions = vole.match_tags(inputs.tokens, tokens, sender=hub)
    rows = np.flatnonzero(positions >= 0)
    minimum = endpoint.agreement.minimum_rows
    if len(rows) != count or len(body) % TOKEN_BYTES or count < minimum:
        raise RemoteProtocolError(
            f"{hub} opened {math.ceil(len(body) / TOKEN_BYTES)} IDs, of which {len(rows)} "
            f"different ones are among those of {endpoint.me}; the parties agreed on at least "
            f"{minimum}"
        )
    return rows[np.argsort(positions[rows])]


def _request_count(
    endpoint: Endpoint, inputs: CircuitInputs, own_size: int, share: Words, row_of_bin: Rows | None
) -> Generator[Round, Messages, Counted]:
    """Send this party's masked share to the dealer, which counts the common IDs; return the result,
    None if rows are still to be revealed.

    The dealer announces the number only if that is the output. It made the triples, so it could
    compute from an unmasked share the bits behind it. Therefore each member masks its share with a
    seed that it shares with the hub; the masks cancel in the XOR of all shares. All parties also
    shuffle the bins in the same secret order. So the dealer learns only the number of common IDs.

    Args:
        endpoint: frames and parses this party's messages.
        inputs: this party's inputs to the circuit.
        own_size: the number of this party's IDs.
        share: this party's XOR share of the bits that say which bins hold a common ID, (words,).
        row_of_bin: row of the hub's table in each bin, -1 for none; None at a member.
    """
    bits = unpack_bits(share)
    # Random words that all parties derive from their common key; their ranks are the order.
    sort_keys = expand_words(derive_key(inputs.key, b"order"), b"order", len(bits))
    shuffled_bits = bits[np.argsort(sort_keys, kind="stable")]
    masked_words = np.packbits(shuffled_bits, bitorder="little").view(WORD)
    for seed in inputs.masks:
        masked_words = masked_words ^ expand_words(seed, b"count", len(masked_words))
    dealer = endpoint.agreement.dealer
    received = yield endpoint.make_round(
        Kind.COUNT, {dealer: masked_words.tobytes()}, awaited=[dealer]
    )
    (verdict,) = VERDICT.unpack(
        endpoint.parse_message(received, dealer, Kind.VERDICT, VERDICT.size)
    )
    return conclude_count(endpoint, dealer, verdict, own_size, bits, row_of_bin)


def conclude_count(
    endpoint: Endpoint,
    sender: str,
    verdict: int,
    own_size: int,
    bits: NDArray[np.bool_],
    row_of_bin: Rows | None,
) -> Counted:
    """Return a party's result after the common IDs were counted, or None if the rows are still to
    be revealed.

    Args:
        endpoint: the party's endpoint, with its name and the agreement.
        sender: the party that sent the verdict, for errors.
        verdict: `TOO_FEW` (-2), `ENOUGH` (-1), or the number of common IDs if the number is the
            output.
        own_size: the number of the party's IDs.
        bits: the party's XOR shares of the bits that say which bins hold a common ID, (bins,).
        row_of_bin: row of the hub's table in each bin, -1 for none; None at a member.

    Raises RemoteProtocolError: the verdict does not fit the agreed output, or is impossible.
    """
    agreement = endpoint.agreement
    if verdict == TOO_FEW and agreement.minimum_rows:
        return IntersectionTooSmallError.for_party(endpoint.me, agreement.minimum_rows)
    is_size_output = agreement.output is Output.SIZE
    is_allowed = verdict >= agreement.minimum_rows if is_size_output else verdict == ENOUGH
    if not is_allowed:
        raise RemoteProtocolError(f"{sender} announces {verdict} common IDs, which was not agreed")
    if verdict > own_size:
        raise RemoteProtocolError(
            f"{sender} announces {verdict} common IDs, {endpoint.me} has only {own_size}"
        )
    if is_size_output:
        return IntersectionResult(size=int(verdict))
    if agreement.output is Output.SHARED:
        return IntersectionResult(membership=Membership(shares=bits, row_of_bin=row_of_bin))
    return None


def unpack_bits(words: Words) -> NDArray[np.bool_]:
    """Return the bits of 64-bit words as one array, the lowest bit of a word first."""
    return np.unpackbits(words.astype(WORD).view(np.uint8), bitorder="little").astype(np.bool_)


def pack_order(words: int, slots: Sequence[int]) -> bytes:
    """Encode the hub's order to the dealer for one chunk: the number of words of 64 bins, then the
    slots of each member's bins.
    """
    return struct.pack(f">{1 + len(slots)}I", words, *slots)


def _count_bits(
    endpoint: Endpoint, hub: str, members: Sequence[str], received: Messages, words: int
) -> Generator[Round, Messages, bytes]:
    """Count the common IDs at the dealer: receive the masked share of every member, add all shares
    by XOR, and count the bits that are set. Return the encoded verdict: too few, enough, or the
    number if it is the output.

    `received`: messages by sender, with the hub's share. `words`: the number of words of 64 bins.
    """
    bits = endpoint.parse_words(received, hub, Kind.COUNT, (words,))
    received = yield wait_for(members)
    for member in members:
        bits = bits ^ endpoint.parse_words(received, member, Kind.COUNT, (words,))
    size = int(np.bitwise_count(bits).sum())
    if size < endpoint.agreement.minimum_rows:
        return VERDICT.pack(TOO_FEW)
    return VERDICT.pack(size if endpoint.agreement.output is Output.SIZE else ENOUGH)


def split_bins(bins: int, slots: Sequence[int]) -> Sequence[slice]:
    """Split the bins into chunks, which are compared one after another to limit memory; return a
    slice of bins for each chunk.

    A chunk has not many more than `CHUNK_SLOTS` slots for each member. The AND over all members
    must not take more memory than that either, since the hub alone says how many members there are.

    `slots`: the slots of each member's bins.
    """
    # A slot takes 64 bits, the AND over all members one bit for each member.
    widest = max(*slots, math.ceil(len(slots) / BITS))
    chunk_bins = max(BITS, CHUNK_SLOTS // widest // BITS * BITS)
    return [slice(start, min(start + chunk_bins, bins)) for start in range(0, bins, chunk_bins)]


def count_triple_words(words: int, slots: Sequence[int]) -> tuple[Sequence[int], int]:
    """Return how many words of 64 triples a chunk of 64 * `words` bins needs: for the comparison
    with each member, and for the AND over all members.

    A comparison of 64 bits takes 63 ANDs, the AND over M members takes M - 1.

    `slots`: the slots of each member's bins.
    """
    pair_words = [(BITS - 1) * words * member_slots for member_slots in slots]
    all_words = words * (len(slots) - 1)
    return pair_words, all_words


class OpprfIntersection(CircuitIntersection):
    """The backend `opprf`: reveals and hides the same as `circuit`, but compares one value for each
    bin, which the members program by an oblivious PRF (OPPRF).

    1. The hub has one ID x in a bin b at most, a member each of its IDs y in all three of its bins.
       The hub sends a vector P of one element a bin, masked by the vector OLE of
       `apfed_protocols.psi.vole`: P_b = H(x), 128 bits, random in an empty bin. So it gets F(b, x)
       = hash(C_b), the member F(b, y) = hash(C_b + Delta (P_b + H(y))) for each of its own.
    2. The member draws a random value t for each bin, and sends a store in which y has three words,
       t + F(b, y), one for each of its three bins b.
    3. The hub adds F(b, x) to that of the three words which the store has for x in bin b: t where
       the member has x, else a random number.

    The circuit compares 64 bits a bin then, however many IDs a member has there. A bin in which IDs
    differ passes for equal with probability 2^-64.

    Whatever the hub sends, it learns nothing before the circuit: P_b is one element, so that in
    each bin it knows F(b, y) for the y with H(y) = P_b alone, and two IDs with one H take a search
    of 2^64 hashes under a key that nobody chose. Every other F(b, y) differs by a multiple of
    Delta, which the hub does not know (the hash is correlation robust). So all words of the store
    look random, but for at most one a bin, which its own t masks; t masks nothing else that the hub
    could take off. In the circuit it has one value a bin, right or wrong, as in
    `apfed_protocols.psi.circuit`, whose caveats hold. A member that sends what it likes has a store
    of as many equations as cells.
    Source: Pinkas, Schneider, Tkachenko and Yanai, EUROCRYPT 2019 (OPPRF, circuit; one oblivious
    PRF a bin); Rindal and Schoppmann, EUROCRYPT 2021, section 6 (by vector OLE and a store). That
    the three values of an ID lie in one cell is ours: a third of the rows to solve, for as many
    bytes.
    """

    name: ClassVar[str] = "opprf"
    dealerless_alternative: ClassVar[str] = "opprf_ot"
    leaks: ClassVar[tuple[str, ...]] = (
        "The dealer learns how large the hub's set is, and how many IDs are common to all.",
        "All parties learn whether the agreed minimum is reached.",
        UNCHECKED,
    )
    version: ClassVar[int] = VERSION + 2

    @staticmethod
    def max_guesses(maximum_ids: int) -> Guesses:
        """Return how many guessed IDs a party can test against another's set if it announces
        `maximum_ids` IDs and deviates from the protocol: the hub one ID for each bin of its hash
        table, a member three IDs for each cell of its store (oblivious key-value store).

        A member's store solves three equations for each cell. An honest member spends three
        equations on an ID, one for each of the ID's bins. A member that deviates may spend only
        one; a common ID is then found with probability 1/3.
        """
        member = BINS_PER_ID * vole.count_vector_elements(maximum_ids)
        return Guesses(hub=count_bins(maximum_ids), member=member)

    @property
    def max_message_bytes(self) -> int:
        """Return the bytes of the longest message that a role accepts: a member's hints (its
        store), the dealer's message to the hub, or a message of the comparison circuit.
        """
        largest = self.agreement.largest_size
        hint_bytes = BINS_PER_ID * WORD.itemsize * vole.count_vector_elements(largest)
        dealt_bytes = vole.count_hub_dealt_bytes(count_bins(largest))
        return max(count_message_bytes(max(hint_bytes, dealt_bytes)), super().max_message_bytes)

    @classmethod
    def count_announced_bytes(cls, size: int, *, own_size: int = 0, member_count: int = 1) -> int:
        """Return the bytes of memory that a role allocates because a peer announces `size` IDs: the
        larger of what the comparison circuit and what the dealer needs. The dealer makes a vector
        with an element for each bin, for one member at a time.

        Args:
            size: the number of IDs that the peer announces.
            own_size: the number of this party's own IDs.
            members: the number of members in the intersection.
        """
        dealt_bytes = vole.DEALING_ELEMENT_BYTES * count_bins(size)
        circuit_bytes = super().count_announced_bytes(
            size, own_size=own_size, member_count=member_count
        )
        return max(dealt_bytes, circuit_bytes)

    @classmethod
    def count_slots(cls, member_size: int, bins: int) -> int:
        return 1

    def make_table(self, id_tags: Words, bins_of: Rows, bins: int, slots: int) -> Words | None:
        return np.empty((slots, 0), np.uint64)

    def tag_hub_bins(
        self, endpoint: Endpoint, members: Sequence[str], inputs: CircuitInputs
    ) -> Generator[Round, Messages, Words]:
        """Evaluate, at the hub, an oblivious PRF on its ID in each bin, and unmask the tags that
        each member programmed for its own IDs (steps 1 and 3 of the class's docstring). Return the
        hub's tag in each bin for each member, (members, bins): for a common ID it equals the
        member's tag; empty bins get random tags.

        `inputs`: the hub's IDs in bins.
        """
        hub_size = inputs.sizes[0]
        received = yield _CORRELATING.make_order(endpoint, hub_size)
        shares = yield from _CORRELATING.receive_hub_shares(endpoint, hub_size, members, received)
        placed = place_rows(inputs)
        # P, one element for each bin: the hash of the ID in it, random in an empty bin.
        points = store.expand_elements(fresh_key(), b"points", len(inputs.row_of_bin))
        points[placed.used] = store.extract_targets(placed.digests)
        vectors = {member: share.mask_vector(points) for member, share in shares.items()}
        received = yield endpoint.make_round(Kind.VECTOR, vectors, awaited=members)
        outputs = {
            member: _evaluate_prf(share.c[placed.used], inputs.key)
            for member, share in shares.items()
        }
        return decode_hints(endpoint, received, inputs, placed, outputs)

    def tag_member_bins(
        self, endpoint: Endpoint, hub: str, inputs: CircuitInputs
    ) -> Generator[Round, Messages, Words]:
        """Draw, at a member, a random tag for each of its bins, and send the hub hints: these tags,
        masked by an oblivious PRF, so that the hub gets the same tag for a common ID and a random
        one otherwise (step 2 of the class's docstring). Return the tags, (1, bins).

        `inputs`: the member's IDs in bins.
        """
        hub_size = inputs.sizes[0]
        # Computed before the messages of others arrive.
        programmer = HintProgrammer(inputs)
        received = yield wait_for([hub, endpoint.agreement.dealer])
        share = _CORRELATING.parse_member_share(endpoint, received)
        vector = endpoint.parse_message(
            received, hub, Kind.VECTOR, vole.count_vector_bytes(count_bins(hub_size))
        )
        # The PRF of ID y in bin b is hash(C_b + Delta (P_b + H(y))): `values_B` is the part without
        # y, `addends` the part with it.
        values_B = share.unmask_vector(hub, vector)
        addends = share.delta.multiply_elements(store.extract_targets(programmer.digests))

        def evaluate_prf(bin_of_id: Rows) -> Words:
            """Return the PRF of each of the member's IDs in one of its bins, (n,)."""
            return _evaluate_prf(values_B[bin_of_id] ^ addends, inputs.key)

        tags_B, hints = programmer.program(endpoint.me, evaluate_prf)
        yield endpoint.make_round(Kind.HINT, {hub: hints}, awaited=())
        return tags_B[None]  # one slot in each bin

    def run_dealer(
        self, endpoint: Endpoint, hub: str, members: Sequence[str], *, hub_size: int | None = None
    ) -> RoleCoroutine:
        """Run the dealer's role: deal one vector OLE (correlated random vectors) for each member,
        then deal triples and count the common IDs as for `circuit`. The argument `hub_size` is not
        used, since the hub announces its size in its order for the vectors.
        """
        ordered_size = yield from _CORRELATING.deal_shares(endpoint, hub, members)
        return (yield from super().run_dealer(endpoint, hub, members, hub_size=ordered_size))


@dataclass(frozen=True)
class PlacedRows:
    """The hub's bins that hold an ID.

    Attributes:
        used: indices of the u bins that hold an ID, ascending, (u,).
        digests: digest (`hash_tokens`) of the ID in each of these bins.
        choice: which of the three bins of its ID each of these bins is, 0 to 2, (u,).
    """

    used: Rows
    digests: store.Digests = field(repr=False)
    choice: Rows


def place_rows(inputs: CircuitInputs) -> PlacedRows:
    """Return the bins of the hub, in its `inputs`, that hold an ID, with the ID's digest and which
    of its three bins it is in: the inputs of the oblivious PRF.
    """
    used = np.flatnonzero(inputs.row_of_bin >= 0)
    own_rows = inputs.row_of_bin[used]
    bins_of = inputs.bins_of.take(own_rows, axis=0)
    choice = (bins_of == used[:, None]).argmax(axis=1)
    return PlacedRows(used, hash_tokens(inputs.tokens[own_rows], inputs.key), choice)


def decode_hints(
    endpoint: Endpoint,
    received: Messages,
    inputs: CircuitInputs,
    placed: PlacedRows,
    outputs: Mapping[str, Words],
) -> Words:
    """Return the hub's tag in each bin for each member, (members, bins). A tag is decoded from the
    member's hints (an oblivious key-value store of masked tags) and unmasked by the oblivious PRF,
    so that it equals the member's tag for a common ID. In empty bins it is random.

    Args:
        endpoint: frames and parses the hub's messages.
        received: messages by sender, with each member's hints.
        inputs: the hub's inputs to the circuit.
        placed: the bins that hold an ID.
        outputs: output of the oblivious PRF for each of these bins, by member.
    """
    bins = len(inputs.row_of_bin)
    _, *member_sizes = inputs.sizes
    tags_MB = expand_words(fresh_key(), b"empty", len(outputs) * bins).reshape(-1, bins).copy()
    for (member, prf), size, tags_B in zip(outputs.items(), member_sizes, tags_MB, strict=True):
        cells = store.count_cells(size)
        hints = endpoint.parse_words(
            received, member, Kind.HINT, (cells + store.DENSE, BINS_PER_ID)
        )
        rows = store.Rows.from_digests(placed.digests, cells)
        # Three words for each ID, one for each of its bins; only the bin that holds it counts.
        decoded_words = store.decode_rows(hints, rows)
        masked_tags = np.take_along_axis(decoded_words, placed.choice[:, None], axis=1)[:, 0]
        tags_B[placed.used] = masked_tags ^ prf
    return tags_MB


class HintProgrammer:
    """A maker of a member's hints: an oblivious key-value store from which the hub decodes, for a
    common ID, the member's tag of the bin, masked by the oblivious PRF of this ID.
    """

    def __init__(self, inputs: CircuitInputs) -> None:
        """Prepare the store (a linear system with one row for each ID) for the member's IDs."""
        cells = store.count_cells(inputs.sizes[1 + inputs.member_index])
        self.digests = hash_tokens(inputs.tokens, inputs.key)
        self._encoder = store.Encoder(store.Rows.from_digests(self.digests, cells), cells)
        self._inputs = inputs

    def program(self, me: str, evaluate: Callable[[Rows], Words]) -> tuple[Words, bytes]:
        """Draw a random tag for each bin, mask the tags of each ID's three bins by the oblivious
        PRF of the ID there, and encode them as a store, the hints for the hub.

        Args:
            me: the member's name, for errors.
            evaluate: returns the output of the oblivious PRF for each of the member's n IDs in one
                of its three bins, given this bin of each ID, (n,).

        Returns:
            The tags, (bins,), and the encoded hints.
        """
        inputs = self._inputs
        tags_B = expand_words(fresh_key(), b"bins", count_bins(inputs.sizes[0]))
        masked_tags = tags_B[inputs.bins_of]
        for choice, bin_of_id in enumerate(inputs.bins_of.T):
            masked_tags[:, choice] ^= evaluate(bin_of_id)
        hints = vole.encode_values(me, self._encoder, masked_tags).astype(WORD, copy=False)
        return tags_B, hints.tobytes()


def hash_tokens(tokens: NDArray[np.uint8], key: bytes) -> store.Digests:
    """Return a digest of each of n IDs, six words, (n, 6), which says which cells the ID selects in
    an oblivious key-value store of any size.

    `tokens`: 16 bytes of the hash of each ID, (n, 16). `key`: 32 bytes shared by hub and members.
    """
    row_key = derive_key(key, b"opprf rows")
    elements = tokens.view(WORD)
    digests = np.empty((len(elements), _DIGEST_BLOCKS, 2), np.uint64)
    for start in range(0, len(elements), _CHUNK):  # in chunks that stay in the cache
        # A digest is three AES blocks: the hash of the token with the block's number added.
        blocks = np.repeat(elements[start : start + _CHUNK, None], _DIGEST_BLOCKS, axis=1)
        blocks[:, :, 1] ^= np.arange(_DIGEST_BLOCKS, dtype=np.uint64)
        hashed = vole.hash_elements(blocks.reshape(-1, 2), row_key)
        digests[start : start + _CHUNK] = hashed.reshape(blocks.shape)
    return digests.reshape(len(elements), 2 * _DIGEST_BLOCKS)


def _evaluate_prf(values: store.Elements, key: bytes) -> Words:
    """Return the output of the oblivious PRF, 64 bits, for each 128-bit element, under the key of
    hub and members.
    """
    return vole.hash_elements(values, derive_key(key, b"opprf function"))[:, 0]
