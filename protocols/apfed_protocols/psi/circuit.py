"""Private set intersection by a circuit: parties compare bins of secret-shared bits.

Run by: the active as the hub, each passive as a member, and a dealer without IDs, such as the
aggregator, over authenticated and encrypted links. Protects from: semi-honest parties, of which the
dealer works with nobody: it sees the sizes of all sets and of the intersection, and together with
the hub or a member it could read the other parties' tags. Only the intersection of all opens; no
pairwise intersection does. A hub that
alters its shares gets another function of the bits in each bin, one bit a bin in all, and may
have the dealer count more than there are (`UNCHECKED_SHARES_LEAK`).

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
from functools import partial
from typing import Any, ClassVar, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from apfed_protocols.crypten import load_crypten
from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.psi import hashing, store, vole
from apfed_protocols.psi.hashing import (
    TOKEN_BYTES,
    WORD_BITS,
    WORD_TYPE,
    AndGate,
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

UNCHECKED_SHARES_LEAK = (
    "That only what all share opens, and only from the agreed minimum on, holds against parties "
    "that follow the protocol: shares are not checked, so that a hub which alters its own may open "
    "which of its IDs some members have and others lack, also below the minimum, and a member may "
    "have other IDs opened."
)

RowIndices: TypeAlias = NDArray[np.int64]
_Fingerprints: TypeAlias = tuple[NDArray[np.uint64], RowIndices, NDArray[np.uint8]]
_FilledTable: TypeAlias = tuple[_Fingerprints, NDArray[np.uint64]]
_MAX_HASH_KEYS = 64
_COMMIT = struct.Struct(">32sIHH")
_JOIN = struct.Struct(">32s32sI")
_KEY_PART = struct.Struct(">32sI")
_PROPOSAL = struct.Struct(">I")

# Bins are compared in chunks of at most so many slots, whose arrays have 16 MB: larger ones are
# returned to the operating system and cleared again at each use.
MAX_CHUNK_SLOTS = 2**21
# The result of the count of common IDs: one of these codes, or the number if it is the output.
COUNT_RESULT = struct.Struct(">q")
ENOUGH = -1
TOO_FEW = -2
VERSION = 131
_SLOT_MEMORY_BYTES = 4_200
_FURTHER_SLOT_MEMORY_BYTES = 3_200
"""Memory of a slot of 64 bins while it is compared, and for each further member; 4,064 and 3,048
were measured."""
_ROSTER_BYTES = 2**22
_DIGEST_BLOCKS = 3  # AES blocks of an ID's digest
_IDS_PER_CHUNK = 2**12  # IDs that are hashed at once


@dataclass(frozen=True, kw_only=True)
class CircuitInputs:
    """One party's inputs to the comparison circuit: its IDs hashed into bins under a key that hub
    and members agreed on (step 1 of the module's docstring).

    Attributes:
        shared_key: 32 bytes that hub and members share, unknown to the dealer.
        mask_seeds: seeds of XOR masks, by which the dealer does not see shares; at the hub one
            shared with each member, in their order; at a member the one shared with the hub.
        member_index: this member's index among the members; 0 at the hub, which does not use it.
        slot_counts: K, how many IDs a bin of a member holds at most, for each member in their
            order.
        announced_sizes: the numbers of IDs that the hub and then each member announced.
        tags: 63-bit hash of the ID in each bin, (bins,), at the hub; of the ID in each slot of each
            bin, (slots, bins), at a member.
        bins_n3: the three bins of each own ID, (n, 3).
        id_tags: 63 bits of the hash of each own ID, (n,).
        tokens: 16 further bytes of the hash of each own ID, (n, 16).
        row_of_bin: row of the hub's table whose ID is in each bin, -1 for none, (bins,); empty at a
            member.
    """

    shared_key: bytes = field(repr=False)
    mask_seeds: Sequence[bytes] = field(repr=False)
    member_index: int
    slot_counts: Sequence[int]
    announced_sizes: Sequence[int]
    tags: NDArray[np.uint64] = field(repr=False)
    bins_n3: NDArray[np.int64] = field(repr=False)
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


_OLE_EXCHANGE = vole.VectorOleExchange(Kind.CORRELATE, Kind.CORRELATED, count_bins)


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
        UNCHECKED_SHARES_LEAK,
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
        bin_count = count_bins(maximum_ids)
        return Guesses(hub=bin_count, member=bin_count * count_bin_slots(maximum_ids, bin_count))

    @classmethod
    def count_announced_bytes(
        cls, announced_size: int, *, own_size: int = 0, member_count: int = 1
    ) -> int:
        """Return the bytes of memory that a role allocates because a peer announces
        `announced_size` IDs: the larger of what a member needs and what the hub needs.

        Args:
            announced_size: the number of IDs that the peer announces.
            own_size: the number of this party's own IDs.
            member_count: the number of members in the intersection.
        """
        # At a member: a table with a bin for each of the hub's bins.
        bin_count = count_bins(announced_size)
        table_bytes = WORD_TYPE.itemsize * cls.count_slots(own_size, bin_count) * bin_count
        # At the hub: one chunk of slots. If the hub has few IDs, it has few bins, and a large set
        # of a member takes many slots of each bin.
        compared_slots = max(
            MAX_CHUNK_SLOTS // WORD_BITS, cls.count_slots(announced_size, count_bins(own_size))
        )
        return max(table_bytes, compared_slots * cls._count_slot_bytes(member_count))

    @classmethod
    def _count_slot_bytes(cls, member_count: int) -> int:
        """Return the bytes of memory that one slot of 64 bins takes while it is compared with this
        number of members.
        """
        return _SLOT_MEMORY_BYTES + _FURTHER_SLOT_MEMORY_BYTES * (member_count - 1)

    def _load_gate_type(self) -> type[AndGate]:
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
        gate_type = self._load_gate_type()
        inputs = yield from _agree_as_hub(endpoint, self, members, ids)
        # Provides triples, the AND over members and the count, with or without a dealer.
        helper = yield from self._make_hub_helper(endpoint, members, inputs)
        tags_MB = yield from self.tag_hub_bins(endpoint, members, inputs)
        shares = []
        bin_count = tags_MB.shape[-1]
        for chunk in split_bins(bin_count, inputs.slot_counts):
            word_count = (chunk.stop - chunk.start) // WORD_BITS
            comparison_triples, combination_triples = yield from helper.take_triples(word_count)
            planes_by_member = {}
            for member, slot_count, tags_B in zip(
                members, inputs.slot_counts, tags_MB, strict=True
            ):
                # The hub gives the complement of its tags, so that a bit is 1 after the XOR with
                # the member's tags where the two agree.
                complement_planes = ~split_bit_planes(tags_B[chunk])
                # The hub's tag of a bin is compared with the tag in each of the member's slots.
                planes_by_member[member] = np.broadcast_to(
                    complement_planes[:, None], (WORD_BITS, slot_count, word_count)
                )
            bits_by_member = yield from _compare_slots(
                endpoint, planes_by_member, comparison_triples, is_leader=True, gate_type=gate_type
            )
            bits_MW = np.stack([bits_by_member[member] for member in members])
            own_share = yield from helper.combine_members(bits_MW, combination_triples, gate_type)
            shares.append(own_share)
            endpoint.report_progress(chunk.stop, bin_count)
        own_share = np.concatenate(shares)
        return (yield from _reveal_at_hub(endpoint, members, inputs, ids, own_share, helper))

    def _run_member(self, me: str, hub: str, ids: Sequence[bytes]) -> RoleCoroutine:
        """Run the role of the member `me` (a passive): hash the IDs into bins, compare each chunk
        of bins with the hub (the active) on secret shares, AND over all members, and reveal the
        output (steps 1 to 4 of the module's docstring). `ids`: the member's encoded IDs.
        """
        endpoint = self._make_endpoint(me)
        gate_type = self._load_gate_type()
        inputs = yield from _agree_as_member(endpoint, self, hub, ids)
        # Provides triples, the AND over members and the count, with or without a dealer.
        helper = yield from self._make_member_helper(endpoint, hub, inputs)
        tags = yield from self.tag_member_bins(endpoint, hub, inputs)
        shares = []
        bin_count = tags.shape[-1]
        for chunk in split_bins(bin_count, inputs.slot_counts):
            chunk_tags = tags[:, chunk]
            word_count = chunk_tags.shape[1] // WORD_BITS
            comparison_triples, combination_triples = yield from helper.take_triples(word_count)
            planes_by_peer = {hub: split_bit_planes(chunk_tags)}
            bits_by_peer = yield from _compare_slots(
                endpoint,
                planes_by_peer,
                {hub: comparison_triples},
                is_leader=False,
                gate_type=gate_type,
            )
            own_share = yield from helper.combine_members(
                bits_by_peer[hub], combination_triples, gate_type
            )
            shares.append(own_share)
            endpoint.report_progress(chunk.stop, bin_count)
        own_share = np.concatenate(shares)
        return (yield from _reveal_at_member(endpoint, hub, inputs, ids, own_share, helper))

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
    def count_slots(cls, member_size: int, bin_count: int) -> int:
        """Return K, the slots that each of `bin_count` bins of a member with this number of
        IDs needs.
        """
        return hashing.count_bin_slots(member_size, bin_count)

    def make_table(
        self, id_tags: Words, bins_n3: RowIndices, bin_count: int, slot_count: int
    ) -> Words | None:
        """Put a member's IDs into their bins; return the tags (63-bit hashes of IDs) in all slots,
        (slots, bins), or None if the IDs do not fit.

        Args:
            id_tags: 63-bit hash of each of the member's IDs, (n,).
            bins_n3: the three bins of each ID, (n, 3).
            bin_count: B, the number of bins.
            slot_count: K, the slots of a bin.
        """
        return hashing.fill_member_table(id_tags, bins_n3, bin_count, slot_count)

    @property
    def max_message_bytes(self) -> int:
        """Return the bytes of the longest message that a role accepts: the masked bits of a chunk,
        64 for each slot, or one token for each common ID. The key parts and sizes of at most 2^16
        members (the roster) are added to either.
        """
        largest_size = self.agreement.largest_size
        max_slots = max(
            MAX_CHUNK_SLOTS, WORD_BITS * self.count_slots(largest_size, hashing.count_bins(0))
        )
        return count_message_bytes(
            max(WORD_TYPE.itemsize * max_slots, TOKEN_BYTES * largest_size) + _ROSTER_BYTES
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
        total_word_count = 0  # of 64 bins each
        largest_size = self.agreement.maximum_ids if hub_size is None else hub_size
        received = yield wait_for([hub])
        while endpoint.get_kind(received, hub) is Kind.DEAL:  # the hub orders another chunk
            word_count, triples_round = self._deal_chunk(endpoint, hub, members, received)
            total_word_count += word_count
            if total_word_count * WORD_BITS > hashing.count_bins(largest_size):
                raise RemoteProtocolError(
                    f"{hub} orders triples for {total_word_count * WORD_BITS} bins, more than the "
                    f"agreed {largest_size} IDs take"
                )
            received = yield triples_round
        # The last message received is the hub's share of the bits to count.
        count_result = yield from _count_common_ids(
            endpoint, hub, members, received, total_word_count
        )
        count_results = dict.fromkeys([hub, *members], count_result)
        yield endpoint.make_round(Kind.VERDICT, count_results, awaited=())
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
        order_body = endpoint.parse_message(received, hub, Kind.DEAL, 4 * (1 + len(members)))
        word_count, *slot_counts = struct.unpack(f">{1 + len(members)}I", order_body)
        self._require_chunk_size(hub, word_count, slot_counts)
        comparison_words, combination_words = count_triple_words(word_count, slot_counts)
        # For the AND over all members: all parties share these triples, the hub as the last one.
        combination_seeds, combination_correction = deal_triples(
            len(members) + 1, combination_words
        )
        *member_combination_seeds, hub_combination_seed = combination_seeds
        bodies = {}
        hub_seeds = b""
        for member, comparison_count, combination_seed in zip(
            members, comparison_words, member_combination_seeds, strict=True
        ):
            # For the comparison of the hub with this member: the two share these triples.
            (hub_seed, seed), correction = deal_triples(2, comparison_count)
            hub_seeds += hub_seed
            bodies[member] = seed + combination_seed + correction
        bodies[hub] = hub_seeds + hub_combination_seed + combination_correction
        return word_count, endpoint.make_round(Kind.TRIPLES, bodies, awaited=[hub])

    def _require_chunk_size(self, hub: str, word_count: int, slot_counts: Sequence[int]) -> None:
        """Raise RemoteProtocolError if the chunk that the hub orders triples for is too large or
        empty.

        `word_count`: words of 64 bins in the chunk. `slot_counts`: the slots of each member's bins.
        """
        # The smallest table has the fewest bins, and so the most slots for a large set.
        max_slots = self.count_slots(self.agreement.maximum_ids, hashing.count_bins(0))
        is_empty = word_count == 0 or min(slot_counts) == 0
        chunk_slots = word_count * WORD_BITS * max(slot_counts)
        # A chunk of one word cannot be split further.
        is_too_large = word_count > 1 and chunk_slots > MAX_CHUNK_SLOTS
        if is_empty or is_too_large or max(slot_counts) > max_slots:
            raise RemoteProtocolError(
                f"{hub} orders triples for {word_count} words of bins with {max(slot_counts)} "
                f"slots; a chunk has 1 to {MAX_CHUNK_SLOTS} slots, or one word of bins, and a bin "
                f"at most {max_slots}"
            )


class CryptenCircuitIntersection(CircuitIntersection):
    """The backend `circuit_crypten`: `circuit`, with ANDs computed by CrypTen."""

    name: ClassVar[str] = "circuit_crypten"

    def __init__(self, agreement: IntersectionAgreement, **choices: Any) -> None:
        """Load CrypTen and set up the intersection; `choices` are the keyword arguments of
        `SetIntersection`. Raises LocalProtocolError: CrypTen is not installed.
        """
        load_crypten()
        super().__init__(agreement, **choices)

    def _load_gate_type(self) -> type[AndGate]:
        """Return the class that computes AND of XOR-shared 64-bit words by CrypTen."""
        # Imported here, since torch takes a second to load and is needed for nothing else.
        from apfed_protocols.crypten.tensors import CryptenAnd

        return CryptenAnd


CountOutcome: TypeAlias = IntersectionResult | IntersectionTooSmallError | None
"""The result after the common IDs were counted; None if rows are still to be revealed."""


class HubHelper(Protocol):
    """The parts of the hub's role that differ with and without a dealer: multiplication triples,
    the AND over all members, and the count of common IDs.

    Attributes:
        share_holders: the members that hold shares of the result, and send them if rows are
            revealed.
    """

    share_holders: Sequence[str]

    def take_triples(
        self, word_count: int
    ) -> Generator[Round, Messages, tuple[Mapping[str, TripleShares], TripleShares]]:
        """Return the hub's shares of multiplication triples for a chunk of 64 * `word_count` bins:
        by member, the triples for the comparison with that member; and the triples for the AND over
        all members.
        """
        ...

    def combine_members(
        self, bits_MW: Words, triples: TripleShares, gate_type: type[AndGate]
    ) -> Generator[Round, Messages, Words]:
        """Return the hub's XOR share, (words,), of the bit of each bin that says whether all
        members have the hub's ID: the AND over the members' bits.

        Args:
            bits_MW: the hub's share of the bit that it shares with each of M members, for each of
                64 W bins, in W words, (members, words).
            triples: this party's shares of the triples that this AND consumes.
            gate_type: class that computes AND of XOR-shared words.
        """
        ...

    def count_common(
        self, share: Words, own_size: int, row_of_bin: RowIndices
    ) -> Generator[Round, Messages, CountOutcome]:
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
        has_result_share: whether this member holds a share of the result, which it sends if rows
            are revealed.
    """

    has_result_share: bool

    def take_triples(
        self, word_count: int
    ) -> Generator[Round, Messages, tuple[TripleShares, TripleShares]]:
        """Return this member's shares of multiplication triples for a chunk of 64 * `word_count`
        bins: the triples for the comparison with the hub, and those for the AND over all members.
        """
        ...

    def combine_members(
        self, bits_W: Words, triples: TripleShares, gate_type: type[AndGate]
    ) -> Generator[Round, Messages, Words]:
        """Return this member's XOR share, (words,), of the bit of each bin that says whether all
        members have the hub's ID: the AND over the members' bits.

        Args:
            bits_W: this member's share of the bit that it shares with the hub, for each of 64 W
                bins, in W words, (words,).
            triples: this party's shares of the triples that this AND consumes.
            gate_type: class that computes AND of XOR-shared words.
        """
        ...

    def count_common(self, share: Words, own_size: int) -> Generator[Round, Messages, CountOutcome]:
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
        self.share_holders = members
        self._endpoint = endpoint
        self._inputs = inputs

    def take_triples(
        self, word_count: int
    ) -> Generator[Round, Messages, tuple[Mapping[str, TripleShares], TripleShares]]:
        """Order the multiplication triples for a chunk of 64 * `word_count` bins from the dealer,
        and expand its seeds. Return the hub's shares: by member, the triples for the comparison
        with that member; and the triples for the AND over all members.
        """
        endpoint = self._endpoint
        dealer = endpoint.agreement.dealer
        slot_counts = self._inputs.slot_counts
        seed_bytes = KEY_BYTES * (len(self.share_holders) + 1)
        comparison_words, combination_words = count_triple_words(word_count, slot_counts)
        order = pack_order(word_count, slot_counts)
        received = yield endpoint.make_round(Kind.DEAL, {dealer: order}, awaited=[dealer])
        dealt_bytes = seed_bytes + WORD_TYPE.itemsize * combination_words
        dealt = endpoint.parse_message(received, dealer, Kind.TRIPLES, dealt_bytes)
        # One seed for each member, one for the AND over all, and the hub's share of c for that AND.
        *seeds, combination_seed = (
            dealt[k : k + KEY_BYTES] for k in range(0, seed_bytes, KEY_BYTES)
        )
        correction = dealt[seed_bytes:]
        triples = {
            member: TripleShares.from_seed(seed, triple_count)
            for member, seed, triple_count in zip(
                self.share_holders, seeds, comparison_words, strict=True
            )
        }
        return triples, TripleShares.from_seed(combination_seed, combination_words, correction)

    def combine_members(
        self, bits_MW: Words, triples: TripleShares, gate_type: type[AndGate]
    ) -> Generator[Round, Messages, Words]:
        """Return the hub's XOR share, (words,), of the AND over all members' bits, computed
        together with all members.

        Args:
            bits_MW: the hub's share of the bit that it shares with each of M members, for each of
                64 W bins, in W words, (members, words).
            triples: this party's shares of the triples that this AND consumes.
            gate_type: class that computes AND of XOR-shared words.
        """
        endpoint = self._endpoint
        return (
            yield from combine_member_bits(
                endpoint,
                bits_MW,
                triples,
                hub=endpoint.me,
                members=self.share_holders,
                gate_type=gate_type,
            )
        )

    def count_common(
        self, share: Words, own_size: int, row_of_bin: RowIndices
    ) -> Generator[Round, Messages, CountOutcome]:
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

    has_result_share = True

    def __init__(self, endpoint: Endpoint, hub: str, inputs: CircuitInputs) -> None:
        """Use the dealer that the agreement names."""
        self._endpoint = endpoint
        self._hub = hub
        self._inputs = inputs

    def take_triples(
        self, word_count: int
    ) -> Generator[Round, Messages, tuple[TripleShares, TripleShares]]:
        """Receive the seeds that the dealer sends for a chunk of 64 * `word_count` bins, and expand
        them to multiplication triples. Return this member's shares: the triples for the comparison
        with the hub, and those for the AND over all members.
        """
        endpoint = self._endpoint
        dealer = endpoint.agreement.dealer
        comparison_words, combination_words = count_triple_words(
            word_count, self._inputs.slot_counts
        )
        own_words = comparison_words[self._inputs.member_index]
        received = yield wait_for([dealer])
        dealt_bytes = 2 * KEY_BYTES + WORD_TYPE.itemsize * own_words
        dealt = endpoint.parse_message(received, dealer, Kind.TRIPLES, dealt_bytes)
        seed = dealt[:KEY_BYTES]
        combination_seed = dealt[KEY_BYTES : 2 * KEY_BYTES]
        correction = dealt[2 * KEY_BYTES :]  # this member's share of c in the comparison
        triples = TripleShares.from_seed(seed, own_words, correction)
        return triples, TripleShares.from_seed(combination_seed, combination_words)

    def combine_members(
        self, bits_W: Words, triples: TripleShares, gate_type: type[AndGate]
    ) -> Generator[Round, Messages, Words]:
        """Return this member's XOR share, (words,), of the AND over all members' bits, computed
        together with the hub. Its shares of the other members' bits are zero, since each of these
        bits is shared by the hub and one member alone.

        Args:
            bits_W: this member's share of the bit that it shares with the hub, for each of 64 W
                bins, in W words, (words,).
            triples: this party's shares of the triples that this AND consumes.
            gate_type: class that computes AND of XOR-shared words.
        """
        inputs = self._inputs
        bits_MW = np.zeros((len(inputs.slot_counts), len(bits_W)), np.uint64)
        bits_MW[inputs.member_index] = bits_W
        return (
            yield from combine_member_bits(
                self._endpoint, bits_MW, triples, hub=self._hub, members=(), gate_type=gate_type
            )
        )

    def count_common(self, share: Words, own_size: int) -> Generator[Round, Messages, CountOutcome]:
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
    own_key_part = fresh_key()
    announced_size = endpoint.agreement.compute_announced_size(endpoint.me, len(ids))
    commitment = hashlib.sha256(own_key_part).digest()
    commit_bodies = {
        member: _COMMIT.pack(commitment, announced_size, len(members), index)
        for index, member in enumerate(members)
    }
    received = yield endpoint.make_round(Kind.COMMIT, commit_bodies, awaited=members)
    key_parts = []
    mask_seeds = []
    member_sizes = []
    for member in members:
        join_body = endpoint.parse_message(received, member, Kind.JOIN, _JOIN.size)
        key_part, mask_seed, member_size = _JOIN.unpack(join_body)
        endpoint.agreement.check_announced_sizes(member, [member_size], [member])
        key_parts.append(key_part)
        mask_seeds.append(mask_seed)
        member_sizes.append(member_size)
    packed_key_parts = b"".join(map(_KEY_PART.pack, key_parts, member_sizes))
    reveal_bodies = dict.fromkeys(members, own_key_part + packed_key_parts)
    yield endpoint.make_round(Kind.REVEAL, reveal_bodies, awaited=())
    bin_count = hashing.count_bins(announced_size)
    candidate_keys = _derive_candidate_keys(endpoint, own_key_part, packed_key_parts)
    shared_key, (id_tags, bins_n3, tokens), row_of_bin = yield from _fill_bins(
        endpoint, members, ids, candidate_keys, bin_count
    )
    return CircuitInputs(
        shared_key=shared_key,
        mask_seeds=mask_seeds,
        member_index=0,
        slot_counts=[backend.count_slots(member_size, bin_count) for member_size in member_sizes],
        announced_sizes=[announced_size, *member_sizes],
        tags=hashing.place_hub_tags(id_tags, row_of_bin),
        bins_n3=bins_n3,
        id_tags=id_tags,
        tokens=tokens,
        row_of_bin=row_of_bin,
    )


def _fill_bins(
    endpoint: Endpoint,
    members: Sequence[str],
    ids: Sequence[bytes],
    candidate_keys: Sequence[bytes],
    bin_count: int,
) -> Generator[Round, Messages, tuple[bytes, _Fingerprints, RowIndices]]:
    """Find the first hash key under which the IDs of all parties fit into their bins, at the hub:
    try each key on the hub's own IDs, propose it to the members, and tell them when all accept.

    Args:
        endpoint: frames and parses the hub's messages.
        members: names of the members, the other parties with IDs.
        ids: the hub's IDs.
        candidate_keys: the candidate hash keys, tried in this order.
        bin_count: B, the number of bins.

    Returns:
        The key; three hashes of each of the hub's IDs under this key, its tag, bins and token
        (`fingerprint_ids`); and the row in each bin, (bins,).

    Raises:
        RemoteProtocolError: members refused all proposed keys.
        LocalProtocolError: the hub's own IDs fit under no key.
    """
    refusing_members: list[str] = []
    for key_index, key in enumerate(candidate_keys):
        tags, bins_n3, tokens = hashing.fingerprint_ids(ids, key, bin_count)
        row_of_bin = hashing.fill_cuckoo_table(bins_n3, bin_count)
        if row_of_bin is None:
            continue
        proposals = dict.fromkeys(members, _PROPOSAL.pack(key_index))
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
            f"{', '.join(refusing_members)} took none of the {len(candidate_keys)} hash keys; IDs "
            "that were chosen to collide, or a peer that does not follow the protocol"
        )
    raise LocalProtocolError(
        f"{endpoint.me}: none of {len(candidate_keys)} hash keys gave every ID a bin; "
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
    commit_body = endpoint.parse_message(received, hub, Kind.COMMIT, _COMMIT.size)
    commitment, hub_size, member_count, member_index = _COMMIT.unpack(commit_body)
    endpoint.agreement.check_announced_sizes(hub, [hub_size], [hub])
    _check_member_index(endpoint, hub, member_index, member_count)
    own_key_part = fresh_key()
    mask_seed = fresh_key()
    own_size = endpoint.agreement.compute_announced_size(endpoint.me, len(ids))
    join_body = _JOIN.pack(own_key_part, mask_seed, own_size)
    received = yield endpoint.make_round(Kind.JOIN, {hub: join_body}, awaited=[hub])
    reveal_bytes = KEY_BYTES + _KEY_PART.size * member_count
    reveal_body = endpoint.parse_message(received, hub, Kind.REVEAL, reveal_bytes)
    hub_key_part = reveal_body[:KEY_BYTES]
    packed_key_parts = reveal_body[KEY_BYTES:]
    if not hmac.compare_digest(hashlib.sha256(hub_key_part).digest(), commitment):
        raise RemoteProtocolError(f"{hub} revealed another key part than it committed to")
    key_parts_and_sizes = list(_KEY_PART.iter_unpack(packed_key_parts))
    if key_parts_and_sizes[member_index] != (own_key_part, own_size):
        raise RemoteProtocolError(f"{hub} repeats the key part or size of {endpoint.me} wrongly")
    member_sizes = [size for _, size in key_parts_and_sizes]
    members = [party for party in endpoint.agreement.sizes if party != hub]
    endpoint.agreement.check_announced_sizes(hub, member_sizes, members)
    bin_count = hashing.count_bins(hub_size)
    slot_counts = [backend.count_slots(size, bin_count) for size in member_sizes]
    candidate_keys = _derive_candidate_keys(endpoint, hub_key_part, packed_key_parts)
    fill_table = partial(
        _fill_table,
        ids=ids,
        backend=backend,
        bin_count=bin_count,
        slot_count=slot_counts[member_index],
    )
    shared_key, filled_table = yield from _fill_slots(endpoint, hub, candidate_keys, fill_table)
    (id_tags, bins_n3, tokens), tags_KB = filled_table
    return CircuitInputs(
        shared_key=shared_key,
        mask_seeds=[mask_seed],
        member_index=member_index,
        slot_counts=slot_counts,
        announced_sizes=[hub_size, *member_sizes],
        tags=tags_KB,
        bins_n3=bins_n3,
        id_tags=id_tags,
        tokens=tokens,
        row_of_bin=np.empty(0, np.int64),  # only the hub puts one row into each bin
    )


def _fill_table(
    key: bytes,
    *,
    ids: Sequence[bytes],
    backend: CircuitIntersection,
    bin_count: int,
    slot_count: int,
) -> _FilledTable | None:
    """Hash a member's IDs under a key, and put them into its bins. Return the tag, bins and token
    of each ID (`fingerprint_ids`), and the tags in all slots, (slots, bins); None if the IDs do not
    fit.

    `slot_count`: the slots of each of the `bin_count` bins.
    """
    id_tags, bins_n3, tokens = hashing.fingerprint_ids(ids, key, bin_count)
    tags_KB = backend.make_table(id_tags, bins_n3, bin_count, slot_count)
    return None if tags_KB is None else ((id_tags, bins_n3, tokens), tags_KB)


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
    candidate_keys: Sequence[bytes],
    fill_table: Callable[[bytes], _FilledTable | None],
) -> Generator[Round, Messages, tuple[bytes, _FilledTable]]:
    """Try the hash keys that the hub proposes, at a member, until the IDs of all parties fit into
    their bins under one key; return this key, and the table that `fill_table` made for it.

    Args:
        endpoint: frames and parses the member's messages.
        hub: name of the hub, which proposes the keys.
        candidate_keys: the candidate hash keys; the hub names them by their index.
        fill_table: puts the IDs into bins under a key; returns None if they do not fit.

    Raises RemoteProtocolError: the hub proposes keys out of order.
    """
    # The first key fits most likely, so try it while the hub does the same.
    table = fill_table(candidate_keys[0])
    table_key_index = 0
    previous_index = -1
    received = yield wait_for([hub])
    while True:
        (key_index,) = _PROPOSAL.unpack(
            endpoint.parse_message(received, hub, Kind.PLACE, _PROPOSAL.size)
        )
        if not previous_index < key_index < len(candidate_keys):
            raise RemoteProtocolError(
                f"{hub} proposes hash key {key_index} after {previous_index}; keys are numbered "
                f"upwards and end at {len(candidate_keys) - 1}"
            )
        previous_index = key_index
        if key_index != table_key_index:
            table = fill_table(candidate_keys[key_index])
            table_key_index = key_index
        acceptance = bytes([table is not None])
        received = yield endpoint.make_round(Kind.PLACED, {hub: acceptance}, awaited=[hub])
        if table is not None and endpoint.get_kind(received, hub) is Kind.AGREED:
            endpoint.parse_message(received, hub, Kind.AGREED, 0)
            return candidate_keys[key_index], table


def _derive_candidate_keys(
    endpoint: Endpoint, hub_key_part: bytes, packed_key_parts: bytes
) -> Sequence[bytes]:
    """Return the hash keys that are tried one after another until the IDs of all parties fit into
    their bins. They are derived from the hub's random part `hub_key_part` and from the members'
    parts and sizes, `packed_key_parts`.
    """
    digest = endpoint.agreement.digest
    return [
        derive_key(hub_key_part, digest, packed_key_parts, key_index.to_bytes(4, "big"))
        for key_index in range(_MAX_HASH_KEYS)
    ]


def _compare_slots(
    endpoint: Endpoint,
    planes_by_peer: Mapping[str, Words],
    triples_by_peer: Mapping[str, TripleShares],
    *,
    is_leader: bool,
    gate_type: type[AndGate],
) -> Generator[Round, Messages, Mapping[str, Words]]:
    """Compare the tags (hashes of IDs) in bins with each peer; return, by peer, this party's XOR
    shares, (words,), of the bits that say in which bins the two have the same tag.

    Two tags are equal if all 64 bits of NOT (hub's tag XOR member's tag) are 1. Six levels of AND
    combine these bits, the upper half with the lower half at each level.

    Args:
        endpoint: frames and parses this party's messages.
        planes_by_peer: this party's shares, by peer, of NOT (hub's tag XOR member's tag) as bit
            planes, (64, slots, words): the complement of its tags at the hub, its tags at a member.
        triples_by_peer: this party's shares of the 63 * slots * words triples that the ANDs consume
            (63 = 32 + 16 + ... + 1), by peer.
        is_leader: whether this is the hub; of the two parties it alone adds the public terms.
        gate_type: class that computes AND of XOR-shared words.
    """
    for half in (32, 16, 8, 4, 2, 1):
        gate_by_peer = {}
        for peer, planes in planes_by_peer.items():
            first_half = planes[:half]
            second_half = planes[half:]
            triple = triples_by_peer[peer].take_triple(first_half.shape)
            gate_by_peer[peer] = gate_type(first_half, second_half, triple, is_leader=is_leader)
        own_masked_by_peer = {peer: gate.mask_inputs() for peer, gate in gate_by_peer.items()}
        bodies = {peer: words.tobytes() for peer, words in own_masked_by_peer.items()}
        received = yield endpoint.make_round(Kind.MASKED, bodies, awaited=bodies.keys())
        planes_by_peer = {}
        for peer, words in own_masked_by_peer.items():
            peer_words = endpoint.parse_words(received, peer, Kind.MASKED, words.shape)
            planes_by_peer[peer] = gate_by_peer[peer].compute_share(words ^ peer_words)
    # At most one slot of a bin holds the hub's ID, so the XOR over the slots is their OR.
    return {
        peer: np.bitwise_xor.reduce(planes[0], axis=0) for peer, planes in planes_by_peer.items()
    }


def combine_member_bits(
    endpoint: Endpoint,
    shares: Words,
    triples: TripleShares,
    *,
    hub: str,
    members: Sequence[str],
    gate_type: type[AndGate],
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
        gate_type: class that computes AND of XOR-shared words.
    """
    is_hub = bool(members)
    # Pairs of members, level by level; the last of an odd number waits for the next level.
    while len(shares) > 1:
        half = len(shares) // 2
        first_members = shares[:half]
        second_members = shares[half : 2 * half]
        unpaired = shares[2 * half :]
        and_gate = gate_type(
            first_members,
            second_members,
            triples.take_triple(first_members.shape),
            is_leader=is_hub,
        )
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
        shares = np.concatenate([and_gate.compute_share(revealed), unpaired])
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
    received = yield wait_for(helper.share_holders)
    for member in helper.share_holders:
        share = share ^ endpoint.parse_words(received, member, Kind.SHARE, share.shape)
    common_rows = row_of_bin[unpack_bits(share)]
    if (common_rows < 0).any():
        raise RemoteProtocolError(
            f"{', '.join(helper.share_holders)} opened bins in which {endpoint.me} has no ID; a "
            "share is wrong"
        )
    shuffled_rows = common_rows[random_permutation(len(common_rows))]
    if endpoint.agreement.output is Output.HUB_ROWS:
        return IntersectionResult(rows=shuffled_rows)
    tokens = inputs.tokens[shuffled_rows].tobytes()
    yield endpoint.make_round(Kind.TOKENS, dict.fromkeys(members, tokens), awaited=())
    return IntersectionResult(rows=shuffled_rows)


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
    shares_for_hub = {hub: share.tobytes()} if helper.has_result_share else {}
    if endpoint.agreement.output is Output.HUB_ROWS:
        yield endpoint.make_round(Kind.SHARE, shares_for_hub, awaited=())
        return IntersectionResult()
    received = yield endpoint.make_round(Kind.SHARE, shares_for_hub, awaited=[hub])
    body = endpoint.parse_message(received, hub, Kind.TOKENS)
    return IntersectionResult(rows=_find_revealed_rows(endpoint, hub, inputs, body))


def _find_revealed_rows(
    endpoint: Endpoint, hub: str, inputs: CircuitInputs, body: bytes
) -> RowIndices:
    """Return this member's rows of the IDs whose tokens the hub revealed, in the hub's order.

    `body`: content of the hub's message: a token (16 bytes of an ID's hash) for each common ID.

    Raises RemoteProtocolError: a token is unknown or repeated, or there are fewer tokens than the
    agreed minimum of common rows.
    """
    token_count = len(body) // TOKEN_BYTES
    tokens = np.frombuffer(body[: token_count * TOKEN_BYTES], np.uint8).reshape(
        token_count, TOKEN_BYTES
    )
    positions = vole.match_tags(inputs.tokens, tokens, sender=hub)
    rows = np.flatnonzero(positions >= 0)
    minimum_rows = endpoint.agreement.minimum_rows
    if len(rows) != token_count or len(body) % TOKEN_BYTES or token_count < minimum_rows:
        raise RemoteProtocolError(
            f"{hub} opened {math.ceil(len(body) / TOKEN_BYTES)} IDs, of which {len(rows)} "
            f"different ones are among those of {endpoint.me}; the parties agreed on at least "
            f"{minimum_rows}"
        )
    return rows[np.argsort(positions[rows])]


def _request_count(
    endpoint: Endpoint,
    inputs: CircuitInputs,
    own_size: int,
    share: Words,
    row_of_bin: RowIndices | None,
) -> Generator[Round, Messages, CountOutcome]:
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
    bit_shares = unpack_bits(share)
    # Random words that all parties derive from their common key; their ranks are the order.
    sort_keys = expand_words(derive_key(inputs.shared_key, b"order"), b"order", len(bit_shares))
    shuffled_shares = bit_shares[np.argsort(sort_keys, kind="stable")]
    masked_words = np.packbits(shuffled_shares, bitorder="little").view(WORD_TYPE)
    for mask_seed in inputs.mask_seeds:
        masked_words = masked_words ^ expand_words(mask_seed, b"count", len(masked_words))
    dealer = endpoint.agreement.dealer
    received = yield endpoint.make_round(
        Kind.COUNT, {dealer: masked_words.tobytes()}, awaited=[dealer]
    )
    (count_result,) = COUNT_RESULT.unpack(
        endpoint.parse_message(received, dealer, Kind.VERDICT, COUNT_RESULT.size)
    )
    return conclude_count(endpoint, dealer, count_result, own_size, bit_shares, row_of_bin)


def conclude_count(
    endpoint: Endpoint,
    sender: str,
    count_result: int,
    own_size: int,
    bit_shares: NDArray[np.bool_],
    row_of_bin: RowIndices | None,
) -> CountOutcome:
    """Return a party's result after the common IDs were counted, or None if the rows are still to
    be revealed.

    Args:
        endpoint: the party's endpoint, with its name and the agreement.
        sender: the party that sent the result of the count, for errors.
        count_result: `TOO_FEW` (-2), `ENOUGH` (-1), or the number of common IDs if the number is
            the output.
        own_size: the number of the party's IDs.
        bit_shares: the party's XOR shares of the bits that say which bins hold a common ID,
            (bins,).
        row_of_bin: row of the hub's table in each bin, -1 for none; None at a member.

    Raises RemoteProtocolError: the result does not fit the agreed output, or is impossible.
    """
    agreement = endpoint.agreement
    if count_result == TOO_FEW and agreement.minimum_rows:
        return IntersectionTooSmallError.for_party(endpoint.me, agreement.minimum_rows)
    is_size_output = agreement.output is Output.SIZE
    is_allowed = (
        count_result >= agreement.minimum_rows if is_size_output else count_result == ENOUGH
    )
    if not is_allowed:
        raise RemoteProtocolError(
            f"{sender} announces {count_result} common IDs, which was not agreed"
        )
    if count_result > own_size:
        raise RemoteProtocolError(
            f"{sender} announces {count_result} common IDs, {endpoint.me} has only {own_size}"
        )
    if is_size_output:
        return IntersectionResult(size=int(count_result))
    if agreement.output is Output.SHARED:
        return IntersectionResult(membership=Membership(shares=bit_shares, row_of_bin=row_of_bin))
    return None


def unpack_bits(words: Words) -> NDArray[np.bool_]:
    """Return the bits of 64-bit words as one array, the lowest bit of a word first."""
    return np.unpackbits(words.astype(WORD_TYPE).view(np.uint8), bitorder="little").astype(np.bool_)


def pack_order(word_count: int, slot_counts: Sequence[int]) -> bytes:
    """Encode the hub's order to the dealer for one chunk: the number of words of 64 bins, then the
    slots of each member's bins.
    """
    return struct.pack(f">{1 + len(slot_counts)}I", word_count, *slot_counts)


def _count_common_ids(
    endpoint: Endpoint, hub: str, members: Sequence[str], received: Messages, word_count: int
) -> Generator[Round, Messages, bytes]:
    """Count the common IDs at the dealer: receive the masked share of every member, add all shares
    by XOR, and count the bits that are set. Return the encoded result: too few, enough, or the
    number if it is the output.

    `received`: messages by sender, with the hub's share. `word_count`: the number of words of 64
    bins.
    """
    bits = endpoint.parse_words(received, hub, Kind.COUNT, (word_count,))
    received = yield wait_for(members)
    for member in members:
        bits = bits ^ endpoint.parse_words(received, member, Kind.COUNT, (word_count,))
    common_count = int(np.bitwise_count(bits).sum())
    if common_count < endpoint.agreement.minimum_rows:
        return COUNT_RESULT.pack(TOO_FEW)
    return COUNT_RESULT.pack(common_count if endpoint.agreement.output is Output.SIZE else ENOUGH)


def split_bins(bin_count: int, slot_counts: Sequence[int]) -> Sequence[slice]:
    """Split the bins into chunks, which are compared one after another to limit memory; return a
    slice of bins for each chunk.

    A chunk has not many more than `MAX_CHUNK_SLOTS` slots for each member. The AND over all members
    must not take more memory than that either, since the hub alone says how many members there are.

    `slot_counts`: the slots of each member's bins.
    """
    # A slot takes a word of 64 bits, the AND over all members one bit for each member.
    words_per_bin = max(*slot_counts, math.ceil(len(slot_counts) / WORD_BITS))
    # A chunk has whole words of 64 bins, at least one.
    chunk_words = max(1, MAX_CHUNK_SLOTS // (words_per_bin * WORD_BITS))
    chunk_bins = WORD_BITS * chunk_words
    return [
        slice(start, min(start + chunk_bins, bin_count))
        for start in range(0, bin_count, chunk_bins)
    ]


def count_triple_words(word_count: int, slot_counts: Sequence[int]) -> tuple[Sequence[int], int]:
    """Return how many words of 64 triples a chunk of 64 * `word_count` bins needs: for the
    comparison with each member, and for the AND over all members.

    A comparison of 64 bits takes 63 ANDs, the AND over M members takes M - 1.

    `slot_counts`: the slots of each member's bins.
    """
    comparison_words = [(WORD_BITS - 1) * word_count * slot_count for slot_count in slot_counts]
    combination_words = word_count * (len(slot_counts) - 1)
    return comparison_words, combination_words


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
        UNCHECKED_SHARES_LEAK,
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
        member_guesses = BINS_PER_ID * vole.count_vector_elements(maximum_ids)
        return Guesses(hub=count_bins(maximum_ids), member=member_guesses)

    @property
    def max_message_bytes(self) -> int:
        """Return the bytes of the longest message that a role accepts: a member's hints (its
        store), the dealer's message to the hub, or a message of the comparison circuit.
        """
        largest_size = self.agreement.largest_size
        hint_bytes = BINS_PER_ID * WORD_TYPE.itemsize * vole.count_vector_elements(largest_size)
        dealt_bytes = vole.count_hub_dealt_bytes(count_bins(largest_size))
        return max(count_message_bytes(max(hint_bytes, dealt_bytes)), super().max_message_bytes)

    @classmethod
    def count_announced_bytes(
        cls, announced_size: int, *, own_size: int = 0, member_count: int = 1
    ) -> int:
        """Return the bytes of memory that a role allocates because a peer announces
        `announced_size` IDs: the larger of what the comparison circuit and what the dealer needs.
        The dealer makes a vector with an element for each bin, for one member at a time.

        Args:
            announced_size: the number of IDs that the peer announces.
            own_size: the number of this party's own IDs.
            member_count: the number of members in the intersection.
        """
        dealt_bytes = vole.DEALER_ELEMENT_BYTES * count_bins(announced_size)
        circuit_bytes = super().count_announced_bytes(
            announced_size, own_size=own_size, member_count=member_count
        )
        return max(dealt_bytes, circuit_bytes)

    @classmethod
    def count_slots(cls, member_size: int, bin_count: int) -> int:
        return 1

    def make_table(
        self, id_tags: Words, bins_n3: RowIndices, bin_count: int, slot_count: int
    ) -> Words | None:
        return np.empty((slot_count, 0), np.uint64)

    def tag_hub_bins(
        self, endpoint: Endpoint, members: Sequence[str], inputs: CircuitInputs
    ) -> Generator[Round, Messages, Words]:
        """Evaluate, at the hub, an oblivious PRF on its ID in each bin, and unmask the tags that
        each member programmed for its own IDs (steps 1 and 3 of the class's docstring). Return the
        hub's tag in each bin for each member, (members, bins): for a common ID it equals the
        member's tag; empty bins get random tags.

        `inputs`: the hub's IDs in bins.
        """
        hub_size = inputs.announced_sizes[0]
        received = yield _OLE_EXCHANGE.make_order(endpoint, hub_size)
        shares_by_member = yield from _OLE_EXCHANGE.receive_hub_shares(
            endpoint, hub_size, members, received
        )
        filled = find_filled_bins(inputs)
        # P, one element for each bin: the hash of the ID in it, random in an empty bin.
        id_hashes_B = store.expand_elements(fresh_key(), b"points", len(inputs.row_of_bin))
        id_hashes_B[filled.bins] = store.extract_id_hashes(filled.digests)
        vectors = {
            member: share.mask_vector(id_hashes_B) for member, share in shares_by_member.items()
        }
        received = yield endpoint.make_round(Kind.VECTOR, vectors, awaited=members)
        prf_outputs_by_member = {
            member: _evaluate_prf(share.c[filled.bins], inputs.shared_key)
            for member, share in shares_by_member.items()
        }
        return decode_hints(endpoint, received, inputs, filled, prf_outputs_by_member)

    def tag_member_bins(
        self, endpoint: Endpoint, hub: str, inputs: CircuitInputs
    ) -> Generator[Round, Messages, Words]:
        """Draw, at a member, a random tag for each of its bins, and send the hub hints: these tags,
        masked by an oblivious PRF, so that the hub gets the same tag for a common ID and a random
        one otherwise (step 2 of the class's docstring). Return the tags, (1, bins).

        `inputs`: the member's IDs in bins.
        """
        hub_size = inputs.announced_sizes[0]
        # Computed before the messages of others arrive.
        programmer = HintProgrammer(inputs)
        received = yield wait_for([hub, endpoint.agreement.dealer])
        share = _OLE_EXCHANGE.parse_member_share(endpoint, received)
        vector = endpoint.parse_message(
            received, hub, Kind.VECTOR, vole.count_vector_bytes(count_bins(hub_size))
        )
        # The PRF of ID y in bin b is hash(C_b + Delta (P_b + H(y))): `bin_terms` is the part
        # without y, `id_terms` the part with it.
        bin_terms = share.unmask_vector(hub, vector)
        id_terms = share.delta.multiply_elements(store.extract_id_hashes(programmer.digests))
        evaluate_prf = partial(_evaluate_prf_in_bins, bin_terms, id_terms, key=inputs.shared_key)
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
        ordered_size = yield from _OLE_EXCHANGE.deal_shares(endpoint, hub, members)
        return (yield from super().run_dealer(endpoint, hub, members, hub_size=ordered_size))


@dataclass(frozen=True)
class FilledBins:
    """The hub's bins that hold an ID.

    Attributes:
        bins: indices of the u bins that hold an ID, ascending, (u,).
        digests: digest (`hash_tokens`) of the ID in each of these bins.
        choices: which of the three bins of its ID each of these bins is, 0 to 2, (u,).
    """

    bins: RowIndices
    digests: store.Digests = field(repr=False)
    choices: RowIndices


def find_filled_bins(inputs: CircuitInputs) -> FilledBins:
    """Return the bins of the hub, in its `inputs`, that hold an ID, with the ID's digest and which
    of its three bins it is in: the inputs of the oblivious PRF.
    """
    bins = np.flatnonzero(inputs.row_of_bin >= 0)
    own_rows = inputs.row_of_bin[bins]
    bins_u3 = inputs.bins_n3.take(own_rows, axis=0)
    choices = (bins_u3 == bins[:, None]).argmax(axis=1)
    return FilledBins(bins, hash_tokens(inputs.tokens[own_rows], inputs.shared_key), choices)


def decode_hints(
    endpoint: Endpoint,
    received: Messages,
    inputs: CircuitInputs,
    filled: FilledBins,
    prf_outputs_by_member: Mapping[str, Words],
) -> Words:
    """Return the hub's tag in each bin for each member, (members, bins). A tag is decoded from the
    member's hints (an oblivious key-value store of masked tags) and unmasked by the oblivious PRF,
    so that it equals the member's tag for a common ID. In empty bins it is random.

    Args:
        endpoint: frames and parses the hub's messages.
        received: messages by sender, with each member's hints.
        inputs: the hub's inputs to the circuit.
        filled: the bins that hold an ID.
        prf_outputs_by_member: output of the oblivious PRF for each of these bins, by member.
    """
    bin_count = len(inputs.row_of_bin)
    _, *member_sizes = inputs.announced_sizes
    tags_MB = (
        expand_words(fresh_key(), b"empty", len(prf_outputs_by_member) * bin_count)
        .reshape(-1, bin_count)
        .copy()
    )
    for (member, prf_outputs), member_size, tags_B in zip(
        prf_outputs_by_member.items(), member_sizes, tags_MB, strict=True
    ):
        cell_count = store.count_cells(member_size)
        hints = endpoint.parse_words(
            received, member, Kind.HINT, (cell_count + store.DENSE_CELLS, BINS_PER_ID)
        )
        equations = store.Equations.from_digests(filled.digests, cell_count)
        # Three words for each ID, one for each of its bins; only the bin that holds it counts.
        decoded_words = store.decode_values(hints, equations)
        masked_tags = np.take_along_axis(decoded_words, filled.choices[:, None], axis=1)[:, 0]
        tags_B[filled.bins] = masked_tags ^ prf_outputs
    return tags_MB


class HintProgrammer:
    """A maker of a member's hints: an oblivious key-value store from which the hub decodes, for a
    common ID, the member's tag of the bin, masked by the oblivious PRF of this ID.
    """

    def __init__(self, inputs: CircuitInputs) -> None:
        """Prepare the store (a linear system with one row for each ID) for the member's IDs."""
        cell_count = store.count_cells(inputs.announced_sizes[1 + inputs.member_index])
        self.digests = hash_tokens(inputs.tokens, inputs.shared_key)
        self._encoder = store.Encoder(
            store.Equations.from_digests(self.digests, cell_count), cell_count
        )
        self._inputs = inputs

    def program(self, me: str, evaluate_prf: Callable[[RowIndices], Words]) -> tuple[Words, bytes]:
        """Draw a random tag for each bin, mask the tags of each ID's three bins by the oblivious
        PRF of the ID there, and encode them as a store, the hints for the hub.

        Args:
            me: the member's name, for errors.
            evaluate_prf: returns the output of the oblivious PRF for each of the member's n IDs in
                one of its three bins, given this bin of each ID, (n,).

        Returns:
            The tags, (bins,), and the encoded hints.
        """
        inputs = self._inputs
        tags_B = expand_words(fresh_key(), b"bins", count_bins(inputs.announced_sizes[0]))
        masked_tags = tags_B[inputs.bins_n3]
        for choice, bin_of_id in enumerate(inputs.bins_n3.T):
            masked_tags[:, choice] ^= evaluate_prf(bin_of_id)
        hints = vole.encode_values(me, self._encoder, masked_tags).astype(WORD_TYPE, copy=False)
        return tags_B, hints.tobytes()


def hash_tokens(tokens: NDArray[np.uint8], key: bytes) -> store.Digests:
    """Return a digest of each of n IDs, six words, (n, 6), which says which cells the ID selects in
    an oblivious key-value store of any size.

    `tokens`: 16 bytes of the hash of each ID, (n, 16). `key`: 32 bytes shared by hub and members.
    """
    row_key = derive_key(key, b"opprf rows")
    token_words = tokens.view(WORD_TYPE)
    digests = np.empty((len(token_words), _DIGEST_BLOCKS, 2), np.uint64)
    for start in range(0, len(token_words), _IDS_PER_CHUNK):  # in chunks that stay in the cache
        # A digest is three AES blocks: the hash of the token with the block's number added.
        blocks = np.repeat(
            token_words[start : start + _IDS_PER_CHUNK, None], _DIGEST_BLOCKS, axis=1
        )
        blocks[:, :, 1] ^= np.arange(_DIGEST_BLOCKS, dtype=np.uint64)
        hashed = vole.hash_elements(blocks.reshape(-1, 2), row_key)
        digests[start : start + _IDS_PER_CHUNK] = hashed.reshape(blocks.shape)
    return digests.reshape(len(token_words), 2 * _DIGEST_BLOCKS)


def _evaluate_prf_in_bins(
    bin_terms: store.Elements, id_terms: store.Elements, bin_of_id: RowIndices, *, key: bytes
) -> Words:
    """Return the PRF of each of the member's n IDs in one of its bins, 64 bits each, (n,).

    Args:
        bin_terms: the part of the PRF's input that depends on the bin, one for each bin.
        id_terms: the part that depends on the ID, one for each ID.
        bin_of_id: one of the bins of each ID, (n,).
        key: the key of the hash.
    """
    return _evaluate_prf(bin_terms[bin_of_id] ^ id_terms, key)


def _evaluate_prf(values: store.Elements, key: bytes) -> Words:
    """Return the output of the oblivious PRF, 64 bits, for each 128-bit element, under the key of
    hub and members.
    """
    return vole.hash_elements(values, derive_key(key, b"opprf function"))[:, 0]
