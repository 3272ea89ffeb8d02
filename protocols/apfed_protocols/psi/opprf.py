"""The backend `opprf`: the circuit on one value a bin, which the members program.

Run by: all parties of `apfed_protocols.psi.circuit`. B bins, M members.

1. The hub has one ID x in a bin b at most, a member each of its IDs y in all three of its bins. The
   hub sends a vector P of one element a bin, masked by the vector OLE of
   `apfed_protocols.psi.vole`: P_b = H(x), 128 bits, random in an empty bin. So it gets F(b, x) =
   hash(C_b), the member F(b, y) = hash(C_b + Delta (P_b + H(y))) for each of its own.
2. The member draws a random value t for each bin, and sends a store in which y has three words,
   t + F(b, y), one for each of its three bins b.
3. The hub adds F(b, x) to that of the three words which the store has for x in bin b: t where the
   member has x, else a random number.

The circuit compares 64 bits a bin then, however many IDs a member has there. A bin in which IDs
differ passes for equal with probability 2^-64.

Whatever the hub sends, it learns nothing before the circuit: P_b is one element, so that in each
bin it knows F(b, y) for the y with H(y) = P_b alone, and two IDs with one H take a search of 2^64
hashes under a key that nobody chose. Every other F(b, y) differs by a multiple of Delta, which the
hub does not know (the hash is correlation robust). So all words of the store look random, but for
at most one a bin, which its own t masks; t masks nothing else that the hub could take off. In the
circuit it has one value a bin, right or wrong, as in `apfed_protocols.psi.circuit`, whose
caveats hold. A member that sends what it likes has a store of as many equations as cells.
Source: Pinkas, Schneider, Tkachenko and Yanai, EUROCRYPT 2019 (OPPRF, circuit; one oblivious PRF a
bin); Rindal and Schoppmann, EUROCRYPT 2021, section 6 (by vector OLE and a store). That the three
values of an ID lie in one cell is ours: a third of the rows to solve, for as many bytes.
"""

from collections.abc import Generator, Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from apfed_protocols.errors import RemoteProtocolError
from apfed_protocols.psi.circuit import (
    UNCHECKED,
    VERSION,
    CircuitIntersection,
    Desk,
    Kind,
    Meeting,
    Rows,
    Slots,
)
from apfed_protocols.psi.hashing import WORD, Words, bins_for, random_words
from apfed_protocols.psi.interface import (
    PLACES,
    Framing,
    Guesses,
    Inbox,
    IntersectionAgreement,
    Script,
    Supply,
    Turn,
    agreed_size,
    largest_size,
)
from apfed_protocols.psi.store import (
    DENSE,
    Digests,
    Elements,
    Encoder,
    cells_for,
    decode,
    random_elements,
    targets_of,
)
from apfed_protocols.psi.store import Rows as StoreRows
from apfed_protocols.psi.vole import (
    DEAL,
    HubShare,
    MemberShare,
    deal,
    encoded,
    hash_elements,
    hub_dealt_bytes,
    member_dealt_bytes,
    ordered_size,
    vector_bytes,
    vector_elements,
)
from apfed_protocols.randomness import derive_key, fresh_key

__all__ = ["OpprfIntersection", "Programmed"]


_CHOICES = 3
_BLOCKS = 3
_CHUNK = 2**12


class Programmed(Slots):
    """One slot a bin, of a programmed value."""

    version: ClassVar[int] = VERSION + 2

    def longest(self, agreement: IntersectionAgreement) -> int:
        most = largest_size(agreement)
        hints = _CHOICES * WORD.itemsize * vector_elements(most)
        dealt = Framing.size(1, max(hints, hub_dealt_bytes(bins_for(most))))
        return max(dealt, super().longest(agreement))

    def slots(self, member_size: int, bins: int) -> int:
        return 1

    def table(self, prints: Words, bins_of: Rows, bins: int, slots: int) -> Words | None:
        return np.empty((slots, 0), np.uint64)

    def at_hub(
        self, desk: Desk, members: Sequence[str], meeting: Meeting, supply: Supply | None
    ) -> Generator[Turn, Inbox, Words]:
        hub_size, *sizes = meeting.sizes
        dealt = yield from _dealt_to_hub(desk, hub_size, len(members), supply)
        used, own, choice = _placed(meeting)
        digests = _digests(meeting.tokens[own], meeting.key)
        points = random_elements(fresh_key(), b"points", len(meeting.row_of_bin))
        points[used] = targets_of(digests)
        shares = [HubShare.of(body) for body in dealt]
        vectors = {m: share.masked(points) for m, share in zip(members, shares, strict=True)}
        inbox = yield desk.turn(Kind.VECTOR, vectors, members)
        tags_MB = random_words(fresh_key(), b"empty", len(members) * len(meeting.row_of_bin))
        tags_MB = tags_MB.reshape(len(members), -1).copy()
        for member, size, share, tags_B in zip(members, sizes, shares, tags_MB, strict=True):
            shape = cells_for(size) + DENSE, _CHOICES
            hints = desk.read_words(inbox, member, Kind.HINT, shape)
            hinted = decode(hints, StoreRows.of(digests, cells_for(size)))
            own_hint = np.take_along_axis(hinted, choice[:, None], axis=1)[:, 0]
            tags_B[used] = own_hint ^ _function(share.c[used], meeting.key)
        return tags_MB

    def at_member(
        self, desk: Desk, hub: str, meeting: Meeting, supply: Supply | None
    ) -> Generator[Turn, Inbox, Words]:
        hub_size, size = meeting.sizes[0], meeting.sizes[1 + meeting.place]
        dealer = desk.agreement.dealer
        # what takes no message of others is done while it comes
        digests = _digests(meeting.tokens, meeting.key)
        hints = Encoder(StoreRows.of(digests, cells_for(size)), cells_for(size))
        inbox = yield Turn((), [hub] if supply else [hub, dealer])
        dealt = (
            supply.take(member_dealt_bytes())
            if supply
            else desk.read(inbox, dealer, Kind.CORRELATED, member_dealt_bytes())
        )
        share = MemberShare.of(dealt, dealer=dealer)
        vector = desk.read(inbox, hub, Kind.VECTOR, vector_bytes(bins_for(hub_size)))
        values_B = share.unmasked(hub, vector)
        addends = share.delta.times(targets_of(digests))
        tags_B = random_words(fresh_key(), b"bins", bins_for(hub_size))
        programmed = tags_B[meeting.bins_of]
        for choice, bins in enumerate(meeting.bins_of.T):
            programmed[:, choice] ^= _function(values_B[bins] ^ addends, meeting.key)
        store = encoded(desk.me, hints, programmed)
        yield desk.turn(Kind.HINT, {hub: store.astype(WORD, copy=False).tobytes()}, ())
        return tags_B[None]

    def deal(
        self, desk: Desk, hub: str, members: Sequence[str], *, hub_size: int | None = None
    ) -> Script:
        if not desk.agreement.ahead:
            hub_size = yield from _deal(desk, hub, members)
        return (yield from super().deal(desk, hub, members, hub_size=hub_size))


class OpprfIntersection(CircuitIntersection):
    """The backend `opprf`: what `circuit` gives and hides, with a tenth of its bytes."""

    name: ClassVar[str] = "opprf"
    leaks: ClassVar[tuple[str, ...]] = (
        "The dealer learns how large the hub's set is, and how many IDs are common to all.",
        "All parties learn whether the agreed minimum is reached.",
        UNCHECKED,
    )
    comparing: ClassVar[type[Slots]] = Programmed

    @staticmethod
    def most_guesses(maximum_ids: int) -> Guesses:
        """The hub has one ID a bin; a member's store solves three equations a cell.

        An ID takes three, or one for a chance of a third.
        """
        member = PLACES * vector_elements(maximum_ids)
        return Guesses(hub=bins_for(maximum_ids), member=member)

    def _stock_hub_script(self, me: str, members: Sequence[str], supply: Supply) -> Script:
        desk, size = self._desk(me), agreed_size(self.agreement, me)
        for dealt in (yield from _dealt_to_hub(desk, size, len(members), None)):
            supply.add(dealt)
        return (yield from super()._stock_hub_script(me, members, supply))

    def _stock_member_script(self, me: str, hub: str, supply: Supply) -> Script:
        dealer = self.agreement.dealer
        inbox = yield Turn((), [dealer])
        desk = self._desk(me)
        supply.add(desk.read(inbox, dealer, Kind.CORRELATED, member_dealt_bytes()))
        return (yield from super()._stock_member_script(me, hub, supply))

    def _stock_dealer_script(self, me: str, hub: str, members: Sequence[str]) -> Script:
        yield from _deal(self._desk(me), hub, members)
        return (yield from super()._stock_dealer_script(me, hub, members))


def _dealt_to_hub(
    desk: Desk, hub_size: int, members: int, supply: Supply | None
) -> Generator[Turn, Inbox, list[bytes]]:
    """The hub's part of the vector OLE with each member: from its supply, or ordered now."""
    dealer, length, dealt = desk.agreement.dealer, hub_dealt_bytes(bins_for(hub_size)), []
    if supply is not None:
        return [supply.take(length) for _ in range(members)]
    for _ in range(members):
        inbox = yield desk.turn(Kind.CORRELATE, {dealer: DEAL.pack(hub_size)}, [dealer])
        dealt.append(desk.read(inbox, dealer, Kind.CORRELATED, length))
    return dealt


def _deal(desk: Desk, hub: str, members: Sequence[str]) -> Generator[Turn, Inbox, int]:
    """Answer the hub's order for each member; return for how many IDs they are. Raises
    RemoteProtocolError: another size than was agreed, or than of the order before.
    """
    size, sizes = 0, set[int]()
    for member in members:
        inbox = yield Turn((), [hub])
        order = desk.read(inbox, hub, Kind.CORRELATE, DEAL.size)
        sizes.add(ordered_size(desk.agreement, hub, order))
        if len(sizes) > 1:
            several = ", ".join(map(str, sorted(sizes)))
            raise RemoteProtocolError(f"{hub} orders for sets of {several} IDs, it has one")
        (size,) = sizes
        hubs, members_own = deal(bins_for(size))
        yield desk.turn(Kind.CORRELATED, {hub: hubs, member: members_own}, ())
    return size


def _placed(meeting: Meeting) -> tuple[Rows, Rows, Rows]:
    """The hub's bins with an ID, and of each the row of this ID and which of its three it is."""
    used = np.flatnonzero(meeting.row_of_bin >= 0)
    own = meeting.row_of_bin[used]
    bins_of = meeting.bins_of.take(own, axis=0)
    choice = np.where(bins_of[:, 0] == used, 0, np.where(bins_of[:, 1] == used, 1, 2))
    return used, own, choice


def _digests(tokens: NDArray[np.uint8], key: bytes) -> Digests:
    """What the rows of IDs follow from, in stores of any size."""
    of_rows = derive_key(key, b"opprf rows")
    elements = tokens.view(WORD)
    found = np.empty((len(elements), _BLOCKS, 2), np.uint64)
    for start in range(0, len(elements), _CHUNK):  # what is worked on stays in the cache
        inputs = np.repeat(elements[start : start + _CHUNK, None], _BLOCKS, axis=1)
        inputs[:, :, 1] ^= np.arange(_BLOCKS, dtype=np.uint64)
        hashed = hash_elements(inputs.reshape(-1, 2), of_rows)
        found[start : start + _CHUNK] = hashed.reshape(inputs.shape)
    return found.reshape(len(elements), 2 * _BLOCKS)


def _function(values: Elements, key: bytes) -> Words:
    """F of each, 64 bits."""
    return hash_elements(values, derive_key(key, b"opprf function"))[:, 0]
