"""Private set intersection by a circuit: parties compare bins of shared bits.

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
    bins_for,
    bit_planes,
    deal_triples,
    random_words,
    slots_for,
)
from apfed_protocols.psi.interface import (
    PLACES,
    Aligner,
    DealtIntersection,
    Guesses,
    Inbox,
    IntersectionAgreement,
    IntersectionResult,
    IntersectionTooSmallError,
    Membership,
    Output,
    Script,
    Turn,
    check_parties,
    message_bytes,
)
from apfed_protocols.psi.interface import Desk as AnyDesk
from apfed_protocols.randomness import KEY_BYTES, derive_key, fresh_key, random_permutation

UNCHECKED = (
    "That only what all share opens, and only from the agreed minimum on, holds against parties "
    "that follow the protocol: shares are not checked, so that a hub which alters its own may open "
    "which of its IDs some members have and others lack, also below the minimum, and a member may "
    "have other IDs opened."
)

Rows: TypeAlias = NDArray[np.int64]
_Prints: TypeAlias = tuple[NDArray[np.uint64], Rows, NDArray[np.uint8]]
_Filled: TypeAlias = tuple[_Prints, NDArray[np.uint64]]
_ATTEMPTS = 64
_COMMIT = struct.Struct(">32sIHH")
_JOIN = struct.Struct(">32s32sI")
_PART = struct.Struct(">32sI")
_PLACE = struct.Struct(">I")

# Arrays of 16 MB: larger ones are given back to the system and cleared anew at each use.
CHUNK_SLOTS = 2**21
VERDICT = struct.Struct(">q")
ENOUGH = -1
TOO_FEW = -2
VERSION = 131
_SLOT_BYTES = 4_200
_FURTHER_SLOT_BYTES = 3_200
"""Memory of a slot of 64 bins while it is compared, and for each further member; 4,064 and 3,048
were measured."""
_ROSTER_BYTES = 2**22
# of hashes in which the cells of an ID are; of IDs at once
_BLOCKS = 3
_CHUNK = 2**12


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """The inputs that a party takes into the circuit.

    Attributes:
        key: 32 bytes that hub and members share, unknown to the dealer.
        masks: the mask seeds that the hub shares with each member (a member: with the hub).
        place: this member's place among the members; of no use at the hub.
        slots: K of each member's bins, in the order of the members.
        sizes: what the hub and then each member announced.
        tags: hub: the tag in each bin (B,); member: in each slot (K, B).
        bins_of: the three bins of each own ID, (n, 3).
        prints: 63 bits of each own ID, (n,); tokens: 16 more bytes of each, (n, 16).
        row_of_bin: hub: the row whose ID is in each bin (B,), -1 for none.
    """

    key: bytes = field(repr=False)
    masks: Sequence[bytes] = field(repr=False)
    place: int
    slots: Sequence[int]
    sizes: Sequence[int]
    tags: NDArray[np.uint64] = field(repr=False)
    bins_of: NDArray[np.int64] = field(repr=False)
    prints: NDArray[np.uint64] = field(repr=False)
    tokens: NDArray[np.uint8] = field(repr=False)
    row_of_bin: NDArray[np.int64] = field(repr=False)


class Kind(IntEnum):
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


_CORRELATING = vole.Dealing(Kind.CORRELATE, Kind.CORRELATED, bins_for)


class Desk(AnyDesk[Kind]):
    kinds = Kind
    version = VERSION
    work = "comparing bins"


class CircuitIntersection(DealtIntersection):
    """The backend `circuit`: many bytes, little computing, a dealer; see `leaks`."""

    name: ClassVar[str] = "circuit"
    without_dealer: ClassVar[str] = "circuit_ot"
    pairwise: ClassVar[bool] = False
    outputs: ClassVar[frozenset[Output]] = frozenset(Output)
    leaks: ClassVar[tuple[str, ...]] = (
        "The dealer learns about how large each set is, and how many IDs are common to all.",
        "All parties learn whether the agreed minimum is reached.",
        UNCHECKED,
    )
    version: ClassVar[int] = VERSION

    @staticmethod
    def max_guesses(maximum_ids: int) -> Guesses:
        """Return the guesses: how many IDs the hub can try out (one a bin), and a member (one a
        slot).

        A member puts an ID into one of its three bins or into all. An ID that it has in one slot
        alone is found with a chance of a third.

        `maximum_ids`: the largest number of IDs that a party may have.
        """
        bins = bins_for(maximum_ids)
        return Guesses(hub=bins, member=bins * slots_for(maximum_ids, bins))

    @classmethod
    def count_announced_bytes(cls, size: int, *, own_size: int = 0, members: int = 1) -> int:
        """Return the bytes of memory that a peer's announced number of IDs makes this party use.

        A member fills as many bins as the hub's IDs take; hub and dealer compare as many slots.
        Where the hub has few IDs, a large set takes many slots of each of its few bins.

        `own_size`: how many IDs this party has.
        """
        bins = bins_for(size)
        table = WORD.itemsize * cls.count_slots(own_size, bins) * bins
        compared = max(CHUNK_SLOTS // BITS, cls.count_slots(size, bins_for(own_size)))
        return max(table, compared * cls._count_slot_bytes(members))

    @classmethod
    def _count_slot_bytes(cls, members: int) -> int:
        """Return the bytes of memory that one slot of 64 bins takes while it is compared."""
        return _SLOT_BYTES + _FURTHER_SLOT_BYTES * (members - 1)

    def _load_gate(self) -> type[And]:
        """Return the implementation of AND on shared words."""
        return BeaverAnd

    def _make_desk(self, me: str) -> Desk:
        return Desk(me, self.agreement, self.progress, version=self.version)

    def make_dealer(self, hub: str, members: Sequence[str]) -> Aligner:
        """Return the dealer's side, which hands out triples, counts common IDs and holds no IDs.

        `hub`: the hub's name. `members`: names of all parties but the hub.
        """
        me = self.agreement.dealer
        check_parties(hub, members, me)
        self._require_memory(me, own_size=0, members=len(members))
        return self._make_aligner(
            me, [hub, *members], self.run_dealer(self._make_desk(me), hub, members)
        )

    def _hub_script(self, me: str, members: Sequence[str], ids: Sequence[bytes]) -> Script:
        """Play the hub: agree on bins, compare each chunk of bins with every member, AND over all
        members, and open (steps 1 to 4 of the module's docstring).
        """
        desk = self._make_desk(me)
        gate = self._load_gate()
        meeting = yield from _meet_as_hub(desk, self, members, ids)
        helper = yield from self._meet_hub_helper(desk, members, meeting)
        tags_MB = yield from self.tag_hub_bins(desk, members, meeting)
        shares = []
        bins = tags_MB.shape[-1]
        for chunk in split_bins(bins, meeting.slots):
            words = (chunk.stop - chunk.start) // BITS
            triples, all_triples = yield from helper.take_triples(words)
            planes = {}
            for member, slots, tags_B in zip(members, meeting.slots, tags_MB, strict=True):
                planes_1W = ~bit_planes(tags_B[chunk])[:, None]
                planes[member] = np.broadcast_to(planes_1W, (BITS, slots, words))
            bits = yield from _compare_slots(desk, planes, triples, is_leader=True, gate=gate)
            bits_MW = np.stack([bits[member] for member in members])
            share = yield from helper.combine_members(bits_MW, all_triples, gate)
            shares.append(share)
            desk.report_progress(chunk.stop, bins)
        share = np.concatenate(shares)
        return (yield from _open_at_hub(desk, members, meeting, ids, share, helper))

    def _member_script(self, me: str, hub: str, ids: Sequence[bytes]) -> Script:
        """Play a member: agree on bins, compare each chunk of bins with the hub, AND over all
        members, and open (steps 1 to 4 of the module's docstring).
        """
        desk = self._make_desk(me)
        gate = self._load_gate()
        meeting = yield from _meet_as_member(desk, self, hub, ids)
        helper = yield from self._meet_member_helper(desk, hub, meeting)
        tags = yield from self.tag_member_bins(desk, hub, meeting)
        shares = []
        bins = tags.shape[-1]
        for chunk in split_bins(bins, meeting.slots):
            tags_KB = tags[:, chunk]
            words = tags_KB.shape[1] // BITS
            triples, all_triples = yield from helper.take_triples(words)
            planes = {hub: bit_planes(tags_KB)}
            bits = yield from _compare_slots(
                desk, planes, {hub: triples}, is_leader=False, gate=gate
            )
            share = yield from helper.combine_members(bits[hub], all_triples, gate)
            shares.append(share)
            desk.report_progress(chunk.stop, bins)
        share = np.concatenate(shares)
        return (yield from _open_at_member(desk, hub, meeting, ids, share, helper))

    def _meet_hub_helper(
        self, desk: Desk, members: Sequence[str], inputs: Meeting
    ) -> Generator[Turn, Inbox, "HubHelper"]:
        """Return the source of the hub's triples and counts, once it is ready."""
        yield from ()
        return DealtHub(desk, members, inputs)

    def _meet_member_helper(
        self, desk: Desk, hub: str, inputs: Meeting
    ) -> Generator[Turn, Inbox, "MemberHelper"]:
        """Return the source of a member's triples and counts, once it is ready."""
        yield from ()
        return DealtMember(desk, hub, inputs)

    @classmethod
    def count_slots(cls, member_size: int, bins: int) -> int:
        """Return K, the slots that one bin of a member with so many IDs needs."""
        return hashing.slots_for(member_size, bins)

    def make_table(self, prints: Words, bins_of: Rows, bins: int, slots: int) -> Words | None:
        """Return the tags in all slots, shape (K, B), or None where they do not fit."""
        return hashing.member_table(prints, bins_of, bins, slots)

    @property
    def longest(self) -> int:
        """Return the bytes of the longest message.

        A chunk takes 64 bits a slot, an intersection one token an ID. The hub adds what it repeats
        of each member; a message counts at most 2^16 of them.
        """
        largest = self.agreement.largest_size
        slots = max(CHUNK_SLOTS, BITS * self.count_slots(largest, hashing.bins_for(0)))
        return message_bytes(max(WORD.itemsize * slots, TOKEN_BYTES * largest) + _ROSTER_BYTES)

    def tag_hub_bins(
        self, desk: Desk, members: Sequence[str], inputs: Meeting
    ) -> Generator[Turn, Inbox, Words]:
        """Return the tag in each bin for each member, shape (M, B)."""
        yield from ()
        return np.broadcast_to(inputs.tags, (len(members), *inputs.tags.shape))

    def tag_member_bins(
        self, desk: Desk, hub: str, inputs: Meeting
    ) -> Generator[Turn, Inbox, Words]:
        """Return the tags in each bin, shape (K, B)."""
        yield from ()
        return inputs.tags

    def run_dealer(
        self, desk: Desk, hub: str, members: Sequence[str], *, hub_size: int | None = None
    ) -> Script:
        """Play the dealer's steps 2 and 3; `hub_size` is what the hub announced to the dealer.

        `members`: names of all parties but the hub.
        """
        total = 0
        largest = self.agreement.maximum_ids if hub_size is None else hub_size
        turn = Turn((), [hub])
        inbox = yield turn
        while desk.kind_of(inbox, hub) is Kind.DEAL:
            words, turn = self._fill_order(desk, hub, members, inbox)
            total += words
            if total * BITS > hashing.bins_for(largest):
                raise RemoteProtocolError(
                    f"{hub} orders triples for {total * BITS} bins, more than the agreed {largest} "
                    "IDs take"
                )
            inbox = yield turn
        verdict = yield from _count_bits(desk, hub, members, inbox, total)
        yield desk.make_turn(Kind.VERDICT, dict.fromkeys([hub, *members], verdict), ())
        return IntersectionResult()

    def _fill_order(
        self, desk: Desk, hub: str, members: Sequence[str], inbox: Inbox
    ) -> tuple[int, Turn]:
        """Answer the hub's order for one chunk: deal triples to hub and members. Returns the words
        of the chunk and the turn that sends them. Raises RemoteProtocolError: the chunk is too
        large or empty.
        """
        order = desk.parse_message(inbox, hub, Kind.DEAL, 4 * (1 + len(members)))
        words, *slots = struct.unpack(f">{1 + len(members)}I", order)
        # the smallest table has fewest bins, where a large set takes many slots
        max_slots = self.count_slots(self.agreement.maximum_ids, hashing.bins_for(0))
        too_many = words > 1 and words * BITS * max(slots) > CHUNK_SLOTS
        if not words or not min(slots) or too_many or max(slots) > max_slots:
            raise RemoteProtocolError(
                f"{hub} orders triples for {words} words of bins with {max(slots)} slots; a chunk "
                f"has 1 to {CHUNK_SLOTS} slots, or one word of bins, and a bin at most {max_slots}"
            )
        pair_words, all_words = count_triple_words(words, slots)
        all_seeds, all_correction = deal_triples(len(members) + 1, all_words)
        bodies = {}
        hub_seeds = b""
        for member, count, all_seed in zip(members, pair_words, all_seeds, strict=False):
            (hub_seed, seed), correction = deal_triples(2, count)
            hub_seeds += hub_seed
            bodies[member] = seed + all_seed + correction
        bodies[hub] = hub_seeds + all_seeds[-1] + all_correction
        return words, desk.make_turn(Kind.TRIPLES, bodies, [hub])


class CryptenCircuitIntersection(CircuitIntersection):
    name: ClassVar[str] = "circuit_crypten"

    def __init__(self, agreement: IntersectionAgreement, **choices: Any) -> None:
        load_crypten()
        super().__init__(agreement, **choices)

    def _load_gate(self) -> type[And]:
        """Return the AND that CrypTen computes."""
        # torch takes a second to load, and only here is it needed
        from apfed_protocols.crypten.tensors import CryptenAnd

        return CryptenAnd


Counted: TypeAlias = IntersectionResult | IntersectionTooSmallError | None
"""Result of counting the common IDs; None where rows are still to open."""


class HubHelper(Protocol):
    """The hub's end of what is not its own computing: triples, one bit of all members, the count.

    Attributes:
        sharers: the members who send their shares where rows open.
    """

    sharers: Sequence[str]

    def take_triples(
        self, words: int
    ) -> Generator[Turn, Inbox, tuple[Mapping[str, TripleShares], TripleShares]]:
        """Return triples with each member, and for all members, for a chunk of 64 `words` bins."""
        ...

    def combine_members(
        self, bits_MW: Words, triples: TripleShares, gate: type[And]
    ) -> Generator[Turn, Inbox, Words]:
        """Return shares (W,) of the AND of all members' bits, of which this party has shares."""
        ...

    def count_common(
        self, share: Words, own_size: int, row_of_bin: Rows
    ) -> Generator[Turn, Inbox, Counted]:
        """Let the common IDs be counted."""
        ...


class MemberHelper(Protocol):
    """The same at a member; `shares` says whether it sends a share where rows open."""

    shares: bool

    def take_triples(
        self, words: int
    ) -> Generator[Turn, Inbox, tuple[TripleShares, TripleShares]]: ...

    def combine_members(
        self, bits_W: Words, triples: TripleShares, gate: type[And]
    ) -> Generator[Turn, Inbox, Words]:
        """Return shares (W,) of the AND of all members' bits, from those of the own ones."""
        ...

    def count_common(self, share: Words, own_size: int) -> Generator[Turn, Inbox, Counted]: ...


class DealtHub:
    """The hub's end with a dealer; satisfies `HubHelper`."""

    def __init__(self, desk: Desk, members: Sequence[str], inputs: Meeting) -> None:
        self.sharers = members
        self._desk = desk
        self._meeting = inputs

    def take_triples(
        self, words: int
    ) -> Generator[Turn, Inbox, tuple[Mapping[str, TripleShares], TripleShares]]:
        """Order the triples of a chunk, and expand what the dealer sends.

        `words`: how many words of 64 triples.
        """
        desk = self._desk
        dealer = desk.agreement.dealer
        slots = self._meeting.slots
        seed_bytes = KEY_BYTES * (len(self.sharers) + 1)
        pair_words, all_words = count_triple_words(words, slots)
        order = deal_request(words, slots)
        inbox = yield desk.make_turn(Kind.DEAL, {dealer: order}, [dealer])
        length = seed_bytes + WORD.itemsize * all_words
        dealing = desk.parse_message(inbox, dealer, Kind.TRIPLES, length)
        *seeds, all_seed = (dealing[k : k + KEY_BYTES] for k in range(0, seed_bytes, KEY_BYTES))
        triples = {
            member: TripleShares.from_seed(seed, count)
            for member, seed, count in zip(self.sharers, seeds, pair_words, strict=True)
        }
        return triples, TripleShares.from_seed(all_seed, all_words, dealing[seed_bytes:])

    def combine_members(
        self, bits_MW: Words, triples: TripleShares, gate: type[And]
    ) -> Generator[Turn, Inbox, Words]:
        """AND the bits of all members, each of which opens its own shares."""
        desk = self._desk
        return (
            yield from combine_member_bits(
                desk, bits_MW, triples, hub=desk.me, members=self.sharers, gate=gate
            )
        )

    def count_common(
        self, share: Words, own_size: int, row_of_bin: Rows
    ) -> Generator[Turn, Inbox, Counted]:
        """Let the dealer count."""
        return (yield from _request_count(self._desk, self._meeting, own_size, share, row_of_bin))


class DealtMember:
    """A member's end with a dealer; satisfies `MemberHelper`."""

    shares = True

    def __init__(self, desk: Desk, hub: str, inputs: Meeting) -> None:
        self._desk = desk
        self._hub = hub
        self._meeting = inputs

    def take_triples(self, words: int) -> Generator[Turn, Inbox, tuple[TripleShares, TripleShares]]:
        """Expand the triples of a chunk that the dealer sends.

        `words`: how many words of 64 triples.
        """
        desk = self._desk
        dealer = desk.agreement.dealer
        pair_words, all_words = count_triple_words(words, self._meeting.slots)
        own_words = pair_words[self._meeting.place]
        inbox = yield Turn((), [dealer])
        length = 2 * KEY_BYTES + WORD.itemsize * own_words
        dealing = desk.parse_message(inbox, dealer, Kind.TRIPLES, length)
        seed = dealing[:KEY_BYTES]
        all_seed = dealing[KEY_BYTES : 2 * KEY_BYTES]
        triples = TripleShares.from_seed(seed, own_words, dealing[2 * KEY_BYTES :])
        return triples, TripleShares.from_seed(all_seed, all_words)

    def combine_members(
        self, bits_W: Words, triples: TripleShares, gate: type[And]
    ) -> Generator[Turn, Inbox, Words]:
        """AND the bits of all members; of the others' this one has shares of zero."""
        meeting = self._meeting
        bits_MW = np.zeros((len(meeting.slots), len(bits_W)), np.uint64)
        bits_MW[meeting.place] = bits_W
        return (
            yield from combine_member_bits(
                self._desk, bits_MW, triples, hub=self._hub, members=(), gate=gate
            )
        )

    def count_common(self, share: Words, own_size: int) -> Generator[Turn, Inbox, Counted]:
        """Let the dealer count."""
        return (yield from _request_count(self._desk, self._meeting, own_size, share, None))


def _meet_as_hub(
    desk: Desk, backend: CircuitIntersection, members: Sequence[str], ids: Sequence[bytes]
) -> Generator[Turn, Inbox, Meeting]:
    """Play step 1 at the hub: commit, collect the members' key parts and sizes, reveal, and fill
    the bins under a key that fits at all parties.
    """
    own_part = fresh_key()
    count = len(members)
    size = desk.agreement.compute_announced_size(desk.me, len(ids))
    commitment = hashlib.sha256(own_part).digest()
    commits = {m: _COMMIT.pack(commitment, size, count, k) for k, m in enumerate(members)}
    inbox = yield desk.make_turn(Kind.COMMIT, commits, members)
    joins = [_JOIN.unpack(desk.parse_message(inbox, m, Kind.JOIN, _JOIN.size)) for m in members]
    for member, (_, _, announced) in zip(members, joins, strict=True):
        desk.agreement.check_announced_sizes(member, [announced], [member])
    parts = b"".join(_PART.pack(part, announced) for part, _, announced in joins)
    yield desk.make_turn(Kind.REVEAL, dict.fromkeys(members, own_part + parts), ())
    bins = hashing.bins_for(size)
    keys = [_derive_attempt_key(desk, own_part, parts, attempt) for attempt in range(_ATTEMPTS)]
    key, (prints, bins_of, tokens), row_of_bin = yield from _fill_bins(
        desk, members, ids, keys, bins
    )
    return Meeting(
        key=key,
        masks=[mask for _, mask, _ in joins],
        place=0,
        slots=[backend.count_slots(announced, bins) for _, _, announced in joins],
        sizes=[size, *(announced for _, _, announced in joins)],
        tags=hashing.hub_tags(prints, row_of_bin),
        bins_of=bins_of,
        prints=prints,
        tokens=tokens,
        row_of_bin=row_of_bin,
    )


def _fill_bins(
    desk: Desk, members: Sequence[str], ids: Sequence[bytes], keys: Sequence[bytes], bins: int
) -> Generator[Turn, Inbox, tuple[bytes, _Prints, Rows]]:
    """Find a key that all take; return it, the IDs' fingerprints and the rows (B,).

    `members`: names of all parties but the hub. `keys`: candidates, of which the first that fits
    all IDs is taken. `bins`: B, their number.
    """
    refused: list[str] = []
    for attempt, key in enumerate(keys):
        tags, bins_n3, tokens = hashing.fingerprints(ids, key, bins)
        row_of_bin = hashing.cuckoo_table(bins_n3, bins)
        if row_of_bin is None:
            continue
        inbox = yield desk.make_turn(
            Kind.PLACE, dict.fromkeys(members, _PLACE.pack(attempt)), members
        )
        refused = [m for m in members if desk.parse_message(inbox, m, Kind.PLACED, 1) != b"\1"]
        if not refused:
            yield desk.make_turn(Kind.AGREED, dict.fromkeys(members, b""), ())
            return key, (tags, bins_n3, tokens), row_of_bin
    if refused:
        raise RemoteProtocolError(
            f"{', '.join(refused)} took none of the {len(keys)} hash keys; IDs that were chosen to "
            "collide, or a peer that does not follow the protocol"
        )
    raise LocalProtocolError(
        f"{desk.me}: none of {len(keys)} hash keys gave every ID a bin; "
        "this does not happen by chance"
    )


def _meet_as_member(
    desk: Desk, backend: CircuitIntersection, hub: str, ids: Sequence[bytes]
) -> Generator[Turn, Inbox, Meeting]:
    """Play step 1 at a member: check the hub's commitment, and fill the slots under a key that fits
    at all parties. Raises RemoteProtocolError: the hub repeats sizes or parts wrongly.
    """
    inbox = yield Turn((), [hub])
    commit = desk.parse_message(inbox, hub, Kind.COMMIT, _COMMIT.size)
    commitment, hub_size, count, place = _COMMIT.unpack(commit)
    desk.agreement.check_announced_sizes(hub, [hub_size], [hub])
    if place >= count:
        raise RemoteProtocolError(f"{hub} gives place {place} among {count} members")
    if desk.agreement.sizes and count != len(desk.agreement.sizes) - 1:
        raise RemoteProtocolError(
            f"{hub} speaks of {count} members, the parties agreed on sizes for "
            f"{len(desk.agreement.sizes) - 1}"
        )
    own_part = fresh_key()
    mask = fresh_key()
    own_size = desk.agreement.compute_announced_size(desk.me, len(ids))
    inbox = yield desk.make_turn(Kind.JOIN, {hub: _JOIN.pack(own_part, mask, own_size)}, [hub])
    reveal = desk.parse_message(inbox, hub, Kind.REVEAL, KEY_BYTES + _PART.size * count)
    hub_part = reveal[:KEY_BYTES]
    parts = reveal[KEY_BYTES:]
    if not hmac.compare_digest(hashlib.sha256(hub_part).digest(), commitment):
        raise RemoteProtocolError(f"{hub} revealed another key part than it committed to")
    if parts[_PART.size * place :][: _PART.size] != _PART.pack(own_part, own_size):
        raise RemoteProtocolError(f"{hub} repeats the key part or size of {desk.me} wrongly")
    sizes = [size for _, size in _PART.iter_unpack(parts)]
    members = [party for party in desk.agreement.sizes if party != hub]
    desk.agreement.check_announced_sizes(hub, sizes, members)
    bins = hashing.bins_for(hub_size)
    slots = [backend.count_slots(size, bins) for size in sizes]
    keys = [_derive_attempt_key(desk, hub_part, parts, attempt) for attempt in range(_ATTEMPTS)]

    def fill_table(key: bytes) -> _Filled | None:
        """Return the fingerprints and the tags (K, B); None if the IDs do not fit under
        this key.
        """
        prints, bins_of, tokens = hashing.fingerprints(ids, key, bins)
        table = backend.make_table(prints, bins_of, bins, slots[place])
        return None if table is None else ((prints, bins_of, tokens), table)

    key, ((prints, bins_of, tokens), tags_KB) = yield from _fill_slots(desk, hub, keys, fill_table)
    return Meeting(
        key=key,
        masks=[mask],
        place=place,
        slots=slots,
        sizes=[hub_size, *sizes],
        tags=tags_KB,
        bins_of=bins_of,
        prints=prints,
        tokens=tokens,
        row_of_bin=np.empty(0, np.int64),
    )


def _fill_slots(
    desk: Desk, hub: str, keys: Sequence[bytes], fill: Callable[[bytes], _Filled | None]
) -> Generator[Turn, Inbox, tuple[bytes, _Filled]]:
    """Try the keys that the hub proposes; return the one that all take, and what it filled."""
    # most likely it will do; the hub tries, too
    previous = -1
    filled = fill(keys[0])
    filled_by = 0
    inbox = yield Turn((), [hub])
    while True:
        (attempt,) = _PLACE.unpack(desk.parse_message(inbox, hub, Kind.PLACE, _PLACE.size))
        if not previous < attempt < len(keys):
            raise RemoteProtocolError(
                f"{hub} proposes hash key {attempt} after {previous}; keys are numbered upwards "
                f"and end at {len(keys) - 1}"
            )
        previous = attempt
        if attempt != filled_by:
            filled = fill(keys[attempt])
            filled_by = attempt
        inbox = yield desk.make_turn(Kind.PLACED, {hub: bytes([filled is not None])}, [hub])
        if filled is not None and desk.kind_of(inbox, hub) is Kind.AGREED:
            desk.parse_message(inbox, hub, Kind.AGREED, 0)
            return keys[attempt], filled


def _derive_attempt_key(desk: Desk, hub_part: bytes, parts: bytes, attempt: int) -> bytes:
    """Return the hash key of one attempt, from the parts of hub and members."""
    return derive_key(hub_part, desk.agreement.digest, parts, attempt.to_bytes(4, "big"))


def _compare_slots(
    desk: Desk,
    planes: Mapping[str, Words],
    triples: Mapping[str, TripleShares],
    *,
    is_leader: bool,
    gate: type[And],
) -> Generator[Turn, Inbox, Mapping[str, Words]]:
    """Compare with each peer; return shares, shape (W,), of whether a bin holds the same tag.

    `planes` are shares of NOT (hub's tag XOR member's tag), (64, K, W): at the hub the
    complement of its tags, at a member its tags. The 64 bits are halved by AND six times, which
    takes 63 K W words of triples. At most one slot of a bin holds the hub's ID, so that XOR is
    OR.

    `is_leader`: whether this is the one party that adds the public terms.
    """
    for half in (32, 16, 8, 4, 2, 1):
        gates = {
            peer: gate(
                x[:half], x[half:], triples[peer].take_triple(x[:half].shape), is_leader=is_leader
            )
            for peer, x in planes.items()
        }
        sent = {peer: pair_gate.mask_inputs() for peer, pair_gate in gates.items()}
        inbox = yield desk.make_turn(
            Kind.MASKED, {peer: words.tobytes() for peer, words in sent.items()}, sent.keys()
        )
        planes = {
            peer: gates[peer].compute_share(
                words ^ desk.parse_words(inbox, peer, Kind.MASKED, words.shape)
            )
            for peer, words in sent.items()
        }
    return {peer: np.bitwise_xor.reduce(x[0], axis=0) for peer, x in planes.items()}


def combine_member_bits(
    desk: Desk,
    shares: Words,
    triples: TripleShares,
    *,
    hub: str,
    members: Sequence[str],
    gate: type[And],
) -> Generator[Turn, Inbox, Words]:
    """AND the bits of all members, shared in shape (M, W); return shares, shape (W,).

    A member has zeros but for its own row, and names no members. The hub collects the masked
    shares and sends back what they open; it takes (M - 1) W words of triples.
    """
    while len(shares) > 1:
        half = len(shares) // 2
        left_bits = shares[:half]
        right = shares[half : 2 * half]
        rest = shares[2 * half :]
        and_gate = gate(
            left_bits, right, triples.take_triple(left_bits.shape), is_leader=bool(members)
        )
        opened = and_gate.mask_inputs()
        if members:
            inbox = yield Turn((), members)
            for member in members:
                opened ^= desk.parse_words(inbox, member, Kind.MASKED, opened.shape)
            yield desk.make_turn(Kind.OPENED, dict.fromkeys(members, opened.tobytes()), ())
        else:
            inbox = yield desk.make_turn(Kind.MASKED, {hub: opened.tobytes()}, [hub])
            opened = desk.parse_words(inbox, hub, Kind.OPENED, opened.shape)
        shares = np.concatenate([and_gate.compute_share(opened), rest])
    bits_W: Words = shares[0]
    return bits_W


def _open_at_hub(
    desk: Desk,
    members: Sequence[str],
    inputs: Meeting,
    ids: Sequence[bytes],
    share: Words,
    helper: HubHelper,
) -> Script:
    """Play steps 3 and 4 at the hub: let the IDs be counted, combine the shares of the bins, and
    return the common rows in a random order.

    `members`: names of all parties but the hub.
    """
    row_of_bin = inputs.row_of_bin
    opened = yield from helper.count_common(share, len(ids), row_of_bin)
    if opened is not None:
        return opened
    inbox = yield Turn((), helper.sharers)
    for member in helper.sharers:
        share = share ^ desk.parse_words(inbox, member, Kind.SHARE, share.shape)
    common_rows = row_of_bin[unpack_bits(share)]
    if (common_rows < 0).any():
        raise RemoteProtocolError(
            f"{', '.join(helper.sharers)} opened bins in which {desk.me} has no ID; a share is "
            "wrong"
        )
    rows = common_rows[random_permutation(len(common_rows))]
    if desk.agreement.output is Output.HUB_ROWS:
        return IntersectionResult(rows=rows)
    tokens = inputs.tokens[rows].tobytes()
    yield desk.make_turn(Kind.TOKENS, dict.fromkeys(members, tokens), ())
    return IntersectionResult(rows=rows)


def _open_at_member(
    desk: Desk,
    hub: str,
    inputs: Meeting,
    ids: Sequence[bytes],
    share: Words,
    helper: MemberHelper,
) -> Script:
    """Play steps 3 and 4 at a member: let the IDs be counted, send the own share, if it has one,
    and find the revealed tokens among the own IDs, unless the hub alone is to know.
    """
    opened = yield from helper.count_common(share, len(ids))
    if opened is not None:
        return opened
    sent = {hub: share.tobytes()} if helper.shares else {}
    if desk.agreement.output is Output.HUB_ROWS:
        yield desk.make_turn(Kind.SHARE, sent, ())
        return IntersectionResult()
    inbox = yield desk.make_turn(Kind.SHARE, sent, [hub])
    body = desk.parse_message(inbox, hub, Kind.TOKENS)
    return IntersectionResult(rows=_find_opened_rows(desk, hub, inputs, body))


def _find_opened_rows(desk: Desk, hub: str, inputs: Meeting, body: bytes) -> Rows:
    """Return this party's rows of the tokens that the hub revealed, in the hub's order. Raises
    RemoteProtocolError: a token is unknown or repeated, or they are fewer than agreed.

    `body`: the hub's message.
    """
    count = len(body) // TOKEN_BYTES
    tokens = np.frombuffer(body[: count * TOKEN_BYTES], np.uint8).reshape(count, TOKEN_BYTES)
    place = vole.match_tags(inputs.tokens, tokens, sender=hub)
    rows = np.flatnonzero(place >= 0)
    minimum = desk.agreement.minimum_rows
    if len(rows) != count or len(body) % TOKEN_BYTES or count < minimum:
        raise RemoteProtocolError(
            f"{hub} opened {math.ceil(len(body) / TOKEN_BYTES)} IDs, of which {len(rows)} "
            f"different ones are among those of {desk.me}; the parties agreed on at least {minimum}"
        )
    return rows[np.argsort(place[rows])]


def _request_count(
    desk: Desk, inputs: Meeting, own_size: int, share: Words, row_of_bin: Rows | None
) -> Generator[Turn, Inbox, Counted]:
    """Let the dealer count the common IDs; return the result if nothing more opens, None if rows
    are to open.

    It says the number only where this is the output, else -1.

    The dealer knows the triples, from which it could work out what a share was made of, so
    every member's share is masked with a seed that it has in common with the hub. It does
    not know the order of the bins either: it learns the number of common IDs only.

    `own_size`: how many IDs this party has.
    """
    bits = unpack_bits(share)
    agreement = desk.agreement
    keys = random_words(derive_key(inputs.key, b"order"), b"order", len(bits))
    body = np.packbits(bits[np.argsort(keys, kind="stable")], bitorder="little").view(WORD)
    for seed in inputs.masks:
        body = body ^ random_words(seed, b"count", len(body))
    dealer = agreement.dealer
    inbox = yield desk.make_turn(Kind.COUNT, {dealer: body.tobytes()}, [dealer])
    (size,) = VERDICT.unpack(desk.parse_message(inbox, dealer, Kind.VERDICT, VERDICT.size))
    return conclude_count(desk, dealer, size, own_size, bits, row_of_bin)


def conclude_count(
    desk: Desk,
    sender: str,
    size: int,
    own_size: int,
    bits: NDArray[np.bool_],
    row_of_bin: Rows | None,
) -> Counted:
    """Return what follows from a verdict of `sender`; `bits` are the own shares of the bins.

    `row_of_bin`: at the hub the row of each bin's ID, -1 for none; None at a member.

    Raises RemoteProtocolError: a verdict that was not agreed on, or cannot be.
    """
    agreement = desk.agreement
    if size == TOO_FEW and agreement.minimum_rows:
        return IntersectionTooSmallError.for_party(desk.me, agreement.minimum_rows)
    counted = agreement.output is Output.SIZE
    if size < agreement.minimum_rows if counted else size != ENOUGH:
        raise RemoteProtocolError(f"{sender} announces {size} common IDs, which was not agreed")
    if size > own_size:
        raise RemoteProtocolError(
            f"{sender} announces {size} common IDs, {desk.me} has only {own_size}"
        )
    if counted:
        return IntersectionResult(size=int(size))
    if agreement.output is Output.SHARED:
        return IntersectionResult(membership=Membership(shares=bits, row_of_place=row_of_bin))
    return None


def unpack_bits(words: Words) -> NDArray[np.bool_]:
    """Return the bits of words, lowest first."""
    return np.unpackbits(words.astype(WORD).view(np.uint8), bitorder="little").astype(np.bool_)


def deal_request(words: int, slots: Sequence[int]) -> bytes:
    """Pack the hub's order to the dealer: words of a chunk, then the slots of each member."""
    return struct.pack(f">{1 + len(slots)}I", words, *slots)


def _count_bits(
    desk: Desk, hub: str, members: Sequence[str], inbox: Inbox, words: int
) -> Generator[Turn, Inbox, bytes]:
    """Combine the masked shares of all bins at the dealer, and return the verdict, packed: too few
    common IDs, enough, or their number where the size is the output.

    `hub`: the hub's name. `members`: names of all parties but the hub. `words`: how many words of
    64 triples.
    """
    bits = desk.parse_words(inbox, hub, Kind.COUNT, (words,))
    inbox = yield Turn((), members)
    for member in members:
        bits = bits ^ desk.parse_words(inbox, member, Kind.COUNT, (words,))
    size = int(np.bitwise_count(bits).sum())
    if size < desk.agreement.minimum_rows:
        return VERDICT.pack(TOO_FEW)
    return VERDICT.pack(size if desk.agreement.output is Output.SIZE else ENOUGH)


def split_bins(bins: int, slots: Sequence[int]) -> Sequence[slice]:
    """Cut the bins so that no pair compares many more than CHUNK_SLOTS slots at once.

    Nor do all members together combine more words than that many slots have: their number is
    only what the hub says.
    """
    widest = max(*slots, math.ceil(len(slots) / BITS))
    step = max(BITS, CHUNK_SLOTS // widest // BITS * BITS)
    return [slice(start, min(start + step, bins)) for start in range(0, bins, step)]


def count_triple_words(words: int, slots: Sequence[int]) -> tuple[Sequence[int], int]:
    """Return the words of triples for each pair, and for all, in a chunk of 64 `words` bins.

    To compare 64 bits takes 63 ANDs, to combine M members M - 1.
    """
    return [(BITS - 1) * words * count for count in slots], words * (len(slots) - 1)


class OpprfIntersection(CircuitIntersection):
    """The backend `opprf`: what `circuit` gives and hides, on a value a bin that members program.

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
    without_dealer: ClassVar[str] = "opprf_ot"
    leaks: ClassVar[tuple[str, ...]] = (
        "The dealer learns how large the hub's set is, and how many IDs are common to all.",
        "All parties learn whether the agreed minimum is reached.",
        UNCHECKED,
    )
    version: ClassVar[int] = VERSION + 2

    @staticmethod
    def max_guesses(maximum_ids: int) -> Guesses:
        """Return the guesses: the hub has one ID a bin, a member three equations a cell.

        A member's store solves them. An ID takes three, or one for a chance of a third.
        """
        member = PLACES * vole.vector_elements(maximum_ids)
        return Guesses(hub=bins_for(maximum_ids), member=member)

    @property
    def longest(self) -> int:
        """Return the bytes of the longest message: of the hints, what is dealt, or the circuit."""
        largest = self.agreement.largest_size
        hints = PLACES * WORD.itemsize * vole.vector_elements(largest)
        dealt_bytes = message_bytes(max(hints, vole.hub_dealt_bytes(bins_for(largest))))
        return max(dealt_bytes, super().longest)

    @classmethod
    def count_announced_bytes(cls, size: int, *, own_size: int = 0, members: int = 1) -> int:
        """Return the circuit's bytes, or more if the dealer's take more.

        The dealer makes an element for each bin, for one member at once.

        `own_size`: how many IDs this party has.
        """
        dealt_bytes = vole.DEALING_ELEMENT_BYTES * bins_for(size)
        return max(
            dealt_bytes, super().count_announced_bytes(size, own_size=own_size, members=members)
        )

    @classmethod
    def count_slots(cls, member_size: int, bins: int) -> int:
        return 1

    def make_table(self, prints: Words, bins_of: Rows, bins: int, slots: int) -> Words | None:
        return np.empty((slots, 0), np.uint64)

    def tag_hub_bins(
        self, desk: Desk, members: Sequence[str], inputs: Meeting
    ) -> Generator[Turn, Inbox, Words]:
        """Play steps 1 and 3 at the hub: send the masked vector P, and decode each member's hints
        to one tag a bin, (M, B); bins without an ID get random tags.
        """
        hub_size = inputs.sizes[0]
        inbox = yield _CORRELATING.make_order(desk, hub_size)
        shares = yield from _CORRELATING.hub_shares(desk, hub_size, members, inbox)
        placed = place_rows(inputs)
        points = store.random_elements(fresh_key(), b"points", len(inputs.row_of_bin))
        points[placed.used] = store.targets_of(placed.digests)
        vectors = {member: share.mask_vector(points) for member, share in shares.items()}
        inbox = yield desk.make_turn(Kind.VECTOR, vectors, members)
        outputs = {
            member: _evaluate_prf(share.c[placed.used], inputs.key)
            for member, share in shares.items()
        }
        return decode_hints(desk, inbox, inputs, placed, outputs)

    def tag_member_bins(
        self, desk: Desk, hub: str, inputs: Meeting
    ) -> Generator[Turn, Inbox, Words]:
        """Play step 2 at a member: draw a tag for each bin and send the store that leads the hub's
        common IDs to them. Returns the tags, (1, B).
        """
        hub_size = inputs.sizes[0]
        # what takes no message of others is done while it comes
        programmer = HintProgrammer(inputs)
        inbox = yield Turn((), [hub, desk.agreement.dealer])
        share = _CORRELATING.member_share(desk, inbox)
        vector = desk.parse_message(inbox, hub, Kind.VECTOR, vole.vector_bytes(bins_for(hub_size)))
        values_B = share.unmask_vector(hub, vector)
        addends = share.delta.multiply_elements(store.targets_of(programmer.digests))
        tags_B, hints = programmer.program(
            desk.me, lambda bins: _evaluate_prf(values_B[bins] ^ addends, inputs.key)
        )
        yield desk.make_turn(Kind.HINT, {hub: hints}, ())
        return tags_B[None]

    def run_dealer(
        self, desk: Desk, hub: str, members: Sequence[str], *, hub_size: int | None = None
    ) -> Script:
        """Deal the vector OLEs, then play the circuit's dealer."""
        hub_size = yield from _CORRELATING.deal_shares(desk, hub, members)
        return (yield from super().run_dealer(desk, hub, members, hub_size=hub_size))


@dataclass(frozen=True)
class PlacedRows:
    """The hub's bins that hold an ID.

    Attributes:
        used: their numbers; digests: of the ID in each; choice: which of its three bins it is.
    """

    used: Rows
    digests: store.Digests = field(repr=False)
    choice: Rows


def place_rows(inputs: Meeting) -> PlacedRows:
    """Return the hub's bins that hold an ID, and what its OPRF takes of each."""
    used = np.flatnonzero(inputs.row_of_bin >= 0)
    own_rows = inputs.row_of_bin[used]
    bins_of = inputs.bins_of.take(own_rows, axis=0)
    choice = np.where(bins_of[:, 0] == used, 0, np.where(bins_of[:, 1] == used, 1, 2))
    return PlacedRows(used, hash_tokens(inputs.tokens[own_rows], inputs.key), choice)


def decode_hints(
    desk: Desk, inbox: Inbox, inputs: Meeting, placed: PlacedRows, outputs: Mapping[str, Words]
) -> Words:
    """Return the hub's tags, (M, B): random ones in empty bins, else what each member's hints say.

    `outputs` are those of the OPRF with each member, for the bins with an ID.
    """
    bins = len(inputs.row_of_bin)
    _, *sizes = inputs.sizes
    tags_MB = random_words(fresh_key(), b"empty", len(outputs) * bins).reshape(-1, bins).copy()
    for (member, output), size, tags_B in zip(outputs.items(), sizes, tags_MB, strict=True):
        shape = store.cells_for(size) + store.DENSE, PLACES
        hints = desk.parse_words(inbox, member, Kind.HINT, shape)
        rows = store.Rows.from_digests(placed.digests, store.cells_for(size))
        hinted = store.decode_rows(hints, rows)
        own_hint = np.take_along_axis(hinted, placed.choice[:, None], axis=1)[:, 0]
        tags_B[placed.used] = own_hint ^ output
    return tags_MB


class HintProgrammer:
    """A maker of a member's hints, the store that leads the hub's common IDs to its tags."""

    def __init__(self, inputs: Meeting) -> None:
        cells = store.cells_for(inputs.sizes[1 + inputs.place])
        self.digests = hash_tokens(inputs.tokens, inputs.key)
        self._encoder = store.Encoder(store.Rows.from_digests(self.digests, cells), cells)
        self._meeting = inputs

    def program(self, me: str, evaluate: Callable[[Rows], Words]) -> tuple[Words, bytes]:
        """Return a random tag for each bin, (B,), and the hints.

        `evaluate` gives the OPRF's output of each own ID in one of its bins, from these bins.
        """
        meeting = self._meeting
        tags_B = random_words(fresh_key(), b"bins", bins_for(meeting.sizes[0]))
        programmed = tags_B[meeting.bins_of]
        for choice, bins in enumerate(meeting.bins_of.T):
            programmed[:, choice] ^= evaluate(bins)
        hints = vole.encode_values(me, self._encoder, programmed).astype(WORD, copy=False)
        return tags_B, hints.tobytes()


def hash_tokens(tokens: NDArray[np.uint8], key: bytes) -> store.Digests:
    """Return the digests from which the rows of IDs follow, in stores of any size.

    `tokens`: 16 bytes of each revealed ID, (n, 16).
    """
    row_key = derive_key(key, b"opprf rows")
    elements = tokens.view(WORD)
    digests = np.empty((len(elements), _BLOCKS, 2), np.uint64)
    for start in range(0, len(elements), _CHUNK):  # what is worked on stays in the cache
        inputs = np.repeat(elements[start : start + _CHUNK, None], _BLOCKS, axis=1)
        inputs[:, :, 1] ^= np.arange(_BLOCKS, dtype=np.uint64)
        hashed = vole.hash_elements(inputs.reshape(-1, 2), row_key)
        digests[start : start + _CHUNK] = hashed.reshape(inputs.shape)
    return digests.reshape(len(elements), 2 * _BLOCKS)


def _evaluate_prf(values: store.Elements, key: bytes) -> Words:
    """Return the OPRF's output of 64 bits for each element."""
    return vole.hash_elements(values, derive_key(key, b"opprf function"))[:, 0]
