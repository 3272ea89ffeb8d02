"""Private set intersection by vector OLE: each member evaluates a function that the hub's IDs know.

Run by: the active as the hub, each passive as a member, and a dealer without IDs, over
authenticated and encrypted links. Protects from: semi-honest hub and members, and a member that
sends what it likes, which is then like another set of its (but for pairs of IDs that it searched
for until their tags were equal, 2^40 hashes a pair where tags have 10 bytes); of these parties the
dealer, who is semi-honest, works with none: it learns the size that the hub announces, and could
try out guesses of a member's IDs with the hub, and with a member guesses of the hub's. With each
member apart, over GF(2^128):

1. The dealer hands A and C to the hub, B and Delta to the member: C = A Delta + B. A and B are
   expanded from seeds.
2. The hub names a key, under which H(x) has 128 bits, and encodes its set as a store P with
   Decode(P, x) = H(x) (`apfed_protocols.psi.store`). It sends A + P, which A hides.
3. The member adds: K = B + (A + P) Delta = C + P Delta, and tags each of its IDs by
   F(y) = hash(Decode(K, y) + Delta H(y)). The hub tags its own by hash(Decode(C, x)), which is
   F(x); F of another ID is a random number to it, since Delta is unknown.
4. It compares, and opens what all share; see `open_rows` and `parse_opened_rows`.

The hash is keyed by both: the member commits to its part before it sees the hub's, and shows it
with the tags, so that nobody chose it. Lists are in a random order of the member's. Where the
parties agreed on sizes, a smaller set fills its tags up with random ones, and the store is as large
as for the agreed size.

HELLO: the key of the hash, the hub's size. COMMIT: SHA-256 of the member's part of the output's
key, the member's size. DEAL: for how many IDs the hub orders, once for each member. DEALT: what the
dealer made. VECTOR: the hub's part of the output's key, the name of the dealing, its masked store.
TAGS: the member's part, one tag for each of its IDs. ROWS: where in that list the common IDs are, 4
bytes each. DONE, REFUSAL: empty.
Source: Rindal and Schoppmann, EUROCRYPT 2021, sections 4 and 5; Raghuraman and Rindal, CCS 2022.
Their silent OT is replaced by the dealer, and consistency of vectors with it.
"""

import hashlib
import hmac
import math
import struct
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import ClassVar, Generic, TypeVar

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.psi.interface import (
    Aligner,
    DealtIntersection,
    Guesses,
    Inbox,
    IntersectionAgreement,
    IntersectionResult,
    Output,
    Script,
    Turn,
    check_parties,
    message_bytes,
    open_rows,
    parse_opened_rows,
)
from apfed_protocols.psi.interface import Desk as AnyDesk
from apfed_protocols.psi.store import (
    DENSE,
    ELEMENT_BYTES,
    DependentRowsError,
    Digests,
    Elements,
    Encoder,
    Multiplier,
    Rows,
    add_random,
    cells_for,
    decode_rows,
    digest_ids,
    from_bytes,
    random_elements,
    targets_of,
    to_bytes,
)
from apfed_protocols.randomness import (
    KEY_BYTES,
    derive_key,
    fresh_key,
    keystream,
    random_permutation,
)

_CHUNK = 2**12
_EVALUATED = 2**16
_MATCHED = 2**21
Tags = NDArray[np.uint8]
"""Shape (n, bytes of a tag), 8 to 16."""

HELLO = struct.Struct(f">{KEY_BYTES}sI")
COMMIT = struct.Struct(f">{KEY_BYTES}sI")
DEAL = struct.Struct(">I")
DEALING_BYTES = 16
_VERSION = 141
_FALSE_MATCH_BITS = 40
_MIN_TAG_BYTES = 8
DEALING_ELEMENT_BYTES = 49
"""Memory of one element while a dealer makes and packs it; 48 were measured."""
_MATCHED_TAG_BYTES = 80  # of one tag, beside the message, while it is matched; 69 were measured


class Kind(IntEnum):
    HELLO = 1
    COMMIT = 2
    DEAL = 3
    DEALT = 4
    VECTOR = 5
    TAGS = 6
    ROWS = 7
    DONE = 8
    REFUSAL = 9


AnyKind = TypeVar("AnyKind", bound=IntEnum)


class Desk(AnyDesk[Kind]):
    kinds = Kind
    version = _VERSION
    work = "evaluating its IDs"


class VoleIntersection(DealtIntersection):
    """The backend `vole`: little computing, few bytes, a dealer; see `leaks`."""

    name: ClassVar[str] = "vole"
    pairwise: ClassVar[bool] = True
    outputs: ClassVar[frozenset[Output]] = frozenset({Output.ROWS, Output.HUB_ROWS})
    leaks: ClassVar[tuple[str, ...]] = (
        "The hub learns its pairwise intersection with every member, even when it is refused.",
        "A member learns which of its own IDs all parties share, or that these are too few.",
        "The dealer learns how large the hub's set is.",
    )

    @staticmethod
    def max_guesses(maximum_ids: int) -> Guesses:
        """Return the guesses: how many IDs the hub can try out (one for each cell of its store),
        and a member (one for each announced ID).

        The hub's store solves as many equations as it has cells; a member's tag is of one ID. So an
        announced n lets the hub try out about 1.3 n + 88 IDs at each member, with a store for each.
        A store of n cells alone would be a polynomial of degree n - 1, which takes n log^2 n
        multiplications to find.

        `maximum_ids`: the largest number of IDs that a party may have.
        """
        return Guesses(hub=vector_elements(maximum_ids), member=maximum_ids)

    @classmethod
    def count_announced_bytes(cls, size: int, *, own_size: int = 0, members: int = 1) -> int:
        """Return the bytes of memory that a peer's announced number of IDs makes this party use.

        The dealer makes a vector for as many IDs as the hub orders, for one member at once; the hub
        matches as many tags as a member has IDs.

        `own_size`: how many IDs this party has.
        """
        del own_size, members
        return max(DEALING_ELEMENT_BYTES * vector_elements(size), _MATCHED_TAG_BYTES * size)

    @property
    def longest(self) -> int:
        return longest_message(self.agreement)

    def _hub_script(self, me: str, members: Sequence[str], ids: Sequence[bytes]) -> Script:
        """Play the hub: name the key, order one vector OLE for each member, send the masked store,
        and compare tags (steps 1 to 4 of the module's docstring).
        """
        desk = Desk(me, self.agreement, self.progress)
        agreement = desk.agreement
        key = fresh_key()
        size = agreement.compute_announced_size(desk.me, len(ids))
        hello = desk.make_turn(Kind.HELLO, dict.fromkeys(members, HELLO.pack(key, size)), members)
        order = _DEALING.make_order(desk, size)
        yield Turn([*hello.outgoing, *order.outgoing], ())
        rows, store = _encode_ids(desk.me, ids, key, cells_for(size))  # while the dealer works
        inbox = yield Turn((), [*members, *order.awaited])
        commits = {
            m: COMMIT.unpack(desk.parse_message(inbox, m, Kind.COMMIT, COMMIT.size))
            for m in members
        }
        for member, (_, announced) in commits.items():
            agreement.check_announced_sizes(member, [announced], [member])
        shares = yield from _DEALING.hub_shares(desk, size, members, inbox)
        parts = {member: fresh_key() for member in members}
        sending = desk.make_turn(
            Kind.VECTOR, {m: shares[m].mask_vector(store, head=parts[m]) for m in members}, members
        )
        del store
        yield Turn(sending.outgoing, ())
        del sending
        # while the members work; from here on C serves for nothing else
        known = {member: evaluate_rows(shares.pop(member).c, rows) for member in members}
        del shares, rows
        inbox = yield Turn((), members)
        places = {}
        for member, (commitment, announced) in commits.items():
            length = tag_bytes(size, announced)
            body = desk.parse_message(inbox, member, Kind.TAGS, KEY_BYTES + length * announced)
            part = _parse_key_part(member, body, commitment)
            output = _derive_output_key(agreement, member, parts[member], part)
            own_tags = hash_values(known.pop(member), output, length)
            member_tags = np.frombuffer(body, np.uint8, offset=KEY_BYTES).reshape(-1, length)
            places[member] = match_tags(own_tags, member_tags, sender=member)
            desk.report_progress(len(places), len(members))
            del body, member_tags, own_tags
        del inbox
        return (yield from open_rows(desk, places))

    def _member_script(self, me: str, hub: str, ids: Sequence[bytes]) -> Script:
        """Play a member: commit to a key part, unmask the hub's store, send the own tags in a
        random order, and read what the hub opens (steps 1 to 4 of the module's docstring).
        """
        desk = Desk(me, self.agreement, self.progress)
        agreement = desk.agreement
        part = fresh_key()
        size = agreement.compute_announced_size(desk.me, len(ids))
        commit = COMMIT.pack(hashlib.sha256(part).digest(), size)
        inbox = yield desk.make_turn(Kind.COMMIT, {hub: commit}, [hub])
        key, hub_size = HELLO.unpack(desk.parse_message(inbox, hub, Kind.HELLO, HELLO.size))
        agreement.check_announced_sizes(hub, [hub_size], [hub])
        digests = digest_ids(ids, key)
        inbox = yield Turn((), [hub, agreement.dealer])
        share = _DEALING.member_share(desk, inbox)
        body = desk.parse_message(
            inbox, hub, Kind.VECTOR, KEY_BYTES + vector_bytes(vector_elements(hub_size))
        )
        store = share.unmask_vector(hub, memoryview(body)[KEY_BYTES:])
        output = _derive_output_key(agreement, desk.me, body[:KEY_BYTES], part)
        del inbox, body
        length = tag_bytes(hub_size, size)
        tags = _compute_member_tags(
            digests, store, share.delta, output, length, report=desk.report_progress
        )
        del digests, store
        order = random_permutation(size)
        tags = add_random_tags(tags, size).take(order, axis=0)
        inbox = yield desk.make_turn(Kind.TAGS, {hub: part + tags.tobytes()}, [hub])
        opened = parse_opened_rows(desk, inbox, hub, order, hub_size)
        if (
            isinstance(opened, IntersectionResult)
            and opened.rows is not None
            and (opened.rows >= len(ids)).any()
        ):
            raise RemoteProtocolError(f"{hub} opened a place at which {desk.me} has no ID")
        return opened

    def make_dealer(self, hub: str, members: Sequence[str]) -> Aligner:
        """Return the dealer's side, which receives from the hub alone.

        `members`: names of all parties but the hub.
        """
        me = self.agreement.dealer
        check_parties(hub, members, me)
        self._require_memory(me, own_size=0, members=len(members))
        return self._make_aligner(
            me, [hub], self._dealer_script(Desk(me, self.agreement), hub, members)
        )

    def _dealer_script(self, desk: Desk, hub: str, members: Sequence[str]) -> Script:
        """Deal one vector OLE for each member."""
        yield from _DEALING.deal_shares(desk, hub, members)
        return IntersectionResult()


@dataclass(frozen=True)
class HubShare:
    """A and C of one member, shape (m, 2).

    Attributes:
        dealing: names what was dealt at once, and tells nothing.
        seed: which A is expanded from each time that it is asked for; it is long, and used once.
    """

    dealing: bytes
    seed: bytes = field(repr=False)
    c: Elements = field(repr=False)

    @classmethod
    def from_message(cls, dealt: bytes | memoryview) -> "HubShare":
        """Read what the dealer sent the hub for one member."""
        dealing, seed, c = _split_message(dealt)
        return cls(dealing, seed, from_bytes(c))

    def mask_vector(self, store: Elements, *, head: bytes = b"") -> bytes:
        """Return the message with `head`, the dealing's name and A + P, which A hides."""
        vector = store.copy()
        add_random(vector, self.seed, b"a")
        return b"".join((head, self.dealing, vector.data.cast("B")))


def _parse_key_part(member: str, body: bytes, commitment: bytes) -> bytes:
    """Return the key part that precedes a member's tags. Raises RemoteProtocolError: it is not the
    one that the member committed to.

    `body`: the dealer's or hub's message.
    """
    part = body[:KEY_BYTES]
    if not hmac.compare_digest(hashlib.sha256(part).digest(), commitment):
        raise RemoteProtocolError(f"{member} showed another key part than it committed to")
    return part


def _encode_ids(me: str, ids: Sequence[bytes], key: bytes, cells: int) -> tuple[Rows, Elements]:
    """Return the rows of the hub's IDs and the store P in which each decodes to H(x)."""
    digests = digest_ids(ids, key)
    rows = Rows.from_digests(digests, cells)
    targets = targets_of(digests)
    del digests
    return rows, encode_values(me, Encoder(rows, cells), targets)


def encode_values(
    me: str, encoder: Encoder, values: Elements, *, seed: bytes | None = None
) -> Elements:
    """Return a store in which each row has its value. Raises LocalProtocolError: the rows are
    linearly dependent under this key, which happens once in 2^47 intersections.
    """
    try:
        return encoder.encode(values, seed=seed)
    except DependentRowsError as error:
        raise LocalProtocolError(
            f"{me}: its IDs have no store under this key, which chance brings about once in 2^47 "
            "intersections; begin another one under a new session"
        ) from error


def add_random_tags(tags: Tags, size: int, *, seed: bytes | None = None) -> Tags:
    """Fill tags up to `size` with random ones, fresh or by a seed of 32 bytes that is used once."""
    count, length = tags.shape
    missing = keystream(seed or fresh_key(), length=length * (size - count))
    return np.concatenate([tags, np.frombuffer(missing, np.uint8).reshape(-1, length)])


def _derive_output_key(
    agreement: IntersectionAgreement, member: str, hub_part: bytes, member_part: bytes
) -> bytes:
    """Return the key of the hash F for one member, from the key parts of both ends."""
    return derive_key(hub_part, b"vole output", member_part, agreement.digest, member.encode())


@dataclass(frozen=True)
class MemberShare:
    """A member's share: the seed that B is expanded from, and the multiplier by Delta."""

    dealing: bytes
    seed: bytes = field(repr=False)
    delta: Multiplier = field(repr=False)

    @classmethod
    def from_message(cls, dealt: bytes, *, dealer: str) -> "MemberShare":
        """Read what the dealer sent a member. Raises RemoteProtocolError: Delta is zero, so that
        nothing would be hidden.

        `dealt`: the dealer's message.
        """
        dealing, seed, delta = _split_message(dealt)
        if not any(delta):
            raise RemoteProtocolError(
                f"{dealer} dealt a Delta of zero, which hides no ID; it does not follow the "
                "protocol: have another party deal"
            )
        return cls(dealing, seed, Multiplier(bytes(delta)))

    def unmask_vector(self, hub: str, sent: bytes | memoryview) -> Elements:
        """Return K = B + (A + P) Delta from the masked vector A + P that the hub sent."""
        content = memoryview(sent)
        if content[:DEALING_BYTES] != self.dealing:
            raise RemoteProtocolError(
                f"{hub} uses what was dealt another time, so that no ID would be found; "
                "deal again to all parties, under a new session"
            )
        store = self.delta.multiply_elements(from_bytes(content[DEALING_BYTES:]))
        add_random(store, self.seed, b"b")
        return store


def _split_message(dealt: bytes | memoryview) -> tuple[bytes, bytes, memoryview]:
    """Return the dealing's name, the seed, and the rest (C at the hub, Delta at a member)."""
    content = memoryview(dealt)
    end = DEALING_BYTES + KEY_BYTES
    return bytes(content[:DEALING_BYTES]), bytes(content[DEALING_BYTES:end]), content[end:]


def deal_vector_ole(elements: int) -> tuple[bytes, bytes]:
    """Make one vector OLE so long; return what the hub gets, and what the member gets.

    `elements`: its length.
    """
    dealing = fresh_key()[:DEALING_BYTES]
    seed_a = fresh_key()
    seed_b = fresh_key()
    delta = bytes(ELEMENT_BYTES)
    while not any(delta):
        delta = fresh_key()[:ELEMENT_BYTES]
    c = Multiplier(delta).multiply_elements(random_elements(seed_a, b"a", elements))
    add_random(c, seed_b, b"b")
    return dealing + seed_a + to_bytes(c), dealing + seed_b + delta


def _parse_order(agreement: IntersectionAgreement, hub: str, order: bytes) -> int:
    """Return for how many IDs the hub orders a vector. Raises RemoteProtocolError: not the agreed
    number.
    """
    (size,) = DEAL.unpack(order)
    sizes = agreement.sizes
    largest = agreement.size_of(hub) if sizes else agreement.maximum_ids
    if size > largest or (sizes and size != largest):
        raise RemoteProtocolError(
            f"{hub} orders a vector for {size} IDs, the parties agreed on "
            f"{'' if sizes else 'at most '}{largest}"
        )
    return int(size)


def hash_values(values: Elements, key: bytes, length: int) -> Tags:
    """Return the first `length` bytes of the hash of each value."""
    return np.ascontiguousarray(hash_elements(values, key).view(np.uint8)[:, :length])


def hash_elements(values: Elements, key: bytes) -> Elements:
    """Return E(s(v)) + s(v), where E is AES-256 under `key`; shape (n, 2).

    s adds the upper half of v to the lower one and swaps them. With E an ideal cipher this hash is
    circular correlation robust (Guo, Katz, Wang and Yu, IEEE S&P 2020, section 7.3).
    """
    # blocks are independent of each other on purpose: each is hashed for itself
    cipher = Cipher(algorithms.AES(key), modes.ECB()).encryptor()  # noqa: S305
    hashed = np.empty(values.shape, "<u8")
    buffer = np.empty(ELEMENT_BYTES * (_CHUNK + 1), np.uint8).data
    for start in range(0, len(values), _CHUNK):  # what is worked on stays in the cache
        part = values[start : start + _CHUNK]
        shuffled = hashed[start : start + _CHUNK]
        shuffled[:, 0] = part[:, 1]
        shuffled[:, 1] = part[:, 0] ^ part[:, 1]
        size = cipher.update_into(shuffled.tobytes(), buffer)
        shuffled ^= from_bytes(buffer[:size])
    return hashed


def evaluate_rows(store: Elements, rows: Rows) -> Elements:
    """Return what the store holds for each of these rows, shape (n, 2)."""
    values = np.empty((len(rows), 2), "<u8")
    for start in range(0, len(rows), _EVALUATED):
        chunk = slice(start, start + _EVALUATED)
        values[chunk] = decode_rows(store, rows[chunk])
    return values


def _compute_member_tags(
    digests: Digests,
    store: Elements,
    delta: Multiplier,
    key: bytes,
    length: int,
    *,
    report: Callable[[int, int], None],
) -> Tags:
    """Return the tag of each of a member's IDs: hash(Decode(K, y) + Delta H(y)).

    `length`: number of the member's IDs. `report`: called with (IDs done, all).
    """
    count = len(digests)
    cells = len(store) - DENSE
    tags = np.empty((count, length), np.uint8)
    for start in range(0, count, _EVALUATED):
        part = digests[start : start + _EVALUATED]
        values = decode_rows(store, Rows.from_digests(part, cells)) ^ delta.multiply_elements(
            targets_of(part)
        )
        tags[start : start + len(part)] = hash_values(values, key, length)
        report(start + len(part), count)
    return tags


def match_tags(own: Tags, theirs: Tags, *, sender: str) -> NDArray[np.int64]:
    """Return where each own tag is among those of `sender`, -1 for nowhere; shape (n,)."""
    place = np.full(len(own), -1, np.int64)
    parts = 1 + (len(own) + len(theirs)) // _MATCHED
    for part in range(parts):  # equal tags are in the same part, whose sorting takes little memory
        own_positions = _select_part(own, part, parts)
        their_positions = _select_part(theirs, part, parts)
        matches = _match_part(
            own.take(own_positions, axis=0), theirs.take(their_positions, axis=0), sender
        )
        place[own_positions] = np.append(their_positions, -1)[matches]
    return place


def _select_part(tags: Tags, part: int, parts: int) -> NDArray[np.int64]:
    """Return the positions of the tags that belong to one of `parts` groups; a tag's first two
    bytes decide, so that equal tags share a group.
    """
    if parts == 1:
        return np.arange(len(tags))
    first = tags[:, 0].astype(np.uint16) << np.uint16(8) | tags[:, 1]
    return np.flatnonzero(first % np.uint16(parts) == part)


def _match_part(own: Tags, theirs: Tags, sender: str) -> NDArray[np.int64]:
    """Return where each own tag is among theirs, -1 for nowhere. Raises RemoteProtocolError:
    `sender` sent a tag twice.
    """
    words = from_bytes(_widen_tags(own) + _widen_tags(theirs))
    order = np.argsort(words[:, 0], kind="stable")
    first_word_equal = words[order[1:], 0] == words[order[:-1], 0]
    if (
        first_word_equal[1:] & first_word_equal[:-1]
    ).any():  # three that begin alike: look at the rest of them, too
        order = np.lexsort((words[:, 1], words[:, 0]))
        first_word_equal = words[order[1:], 0] == words[order[:-1], 0]
    first = order[:-1][first_word_equal]
    second = order[1:][first_word_equal]
    equal = words[first, 1] == words[second, 1]
    low = np.minimum(first, second)[equal]
    high = np.maximum(first, second)[equal]
    if (low >= len(own)).any():
        raise RemoteProtocolError(
            f"{sender} sent a tag twice; its set has duplicates, or it does not follow the protocol"
        )
    place = np.full(len(own), -1, np.int64)
    across = high >= len(own)  # two own IDs may have one tag, too
    place[low[across]] = high[across] - len(own)
    return place


def _widen_tags(tags: Tags) -> bytes:
    """Pad each tag with zeros to 16 bytes."""
    wide = np.zeros((len(tags), ELEMENT_BYTES), np.uint8)
    wide[:, : tags.shape[1]] = tags
    return wide.tobytes()


def vector_elements(hub_size: int) -> int:
    """Return the length of the vector for so many IDs: sparse and dense cells of a store."""
    return cells_for(hub_size) + DENSE


@dataclass(frozen=True)
class Dealing(Generic[AnyKind]):
    """The way a backend's vectors are ordered and dealt, and their length for so many IDs."""

    order: AnyKind
    dealt: AnyKind
    elements: Callable[[int], int]

    def make_order(self, desk: AnyDesk[AnyKind], size: int) -> Turn:
        """Return the turn with the hub's order for one member."""
        dealer = desk.agreement.dealer
        return desk.make_turn(self.order, {dealer: DEAL.pack(size)}, [dealer])

    def hub_shares(
        self, desk: AnyDesk[AnyKind], size: int, members: Sequence[str], inbox: Inbox
    ) -> Generator[Turn, Inbox, dict[str, HubShare]]:
        """Order and receive the hub's share for each member, one after another.

        `inbox` answers the first order.
        """
        dealer = desk.agreement.dealer
        length = hub_dealt_bytes(self.elements(size))
        shares = dict[str, HubShare]()
        for member in members:
            if shares:
                inbox = yield self.make_order(desk, size)
            shares[member] = HubShare.from_message(
                desk.parse_message(inbox, dealer, self.dealt, length)
            )
        return shares

    def member_share(self, desk: AnyDesk[AnyKind], inbox: Inbox) -> MemberShare:
        """Read a member's share from the dealer's message."""
        dealer = desk.agreement.dealer
        dealing = desk.parse_message(inbox, dealer, self.dealt, member_dealt_bytes())
        return MemberShare.from_message(dealing, dealer=dealer)

    def deal_shares(
        self, desk: AnyDesk[AnyKind], hub: str, members: Sequence[str]
    ) -> Generator[Turn, Inbox, int]:
        """Answer the hub's order for each member; return for how many IDs they are."""
        size = 0
        sizes = set[int]()
        for member in members:
            inbox = yield Turn((), [hub])
            order = desk.parse_message(inbox, hub, self.order, DEAL.size)
            sizes.add(_parse_order(desk.agreement, hub, order))
            if len(sizes) > 1:
                several = ", ".join(map(str, sorted(sizes)))
                raise RemoteProtocolError(f"{hub} orders for sets of {several} IDs, it has one")
            (size,) = sizes
            hubs, members_own = deal_vector_ole(self.elements(size))
            yield desk.make_turn(self.dealt, {hub: hubs, member: members_own}, ())
        return size


_DEALING = Dealing(Kind.DEAL, Kind.DEALT, vector_elements)


def vector_bytes(elements: int) -> int:
    """Return the bytes that the hub sends a member: the name of the dealing, a masked vector."""
    return DEALING_BYTES + ELEMENT_BYTES * elements


def hub_dealt_bytes(elements: int) -> int:
    """Return the bytes that the hub is dealt for one member: name of the dealing, a seed, and C."""
    return DEALING_BYTES + KEY_BYTES + ELEMENT_BYTES * elements


def member_dealt_bytes() -> int:
    """Return the bytes that a member is dealt: the name of the dealing, a seed, and Delta."""
    return DEALING_BYTES + KEY_BYTES + ELEMENT_BYTES


def tag_bytes(hub_size: int, member_size: int) -> int:
    """Return the bytes of a tag.

    They are so many that, except with probability 2^-40, no ID of a member has the tag of another
    ID of the hub, nor of another ID of the member, which would be refused.
    """
    pairs = max(hub_size, member_size, 1) * max(member_size, 1)
    return max(_MIN_TAG_BYTES, math.ceil((_FALSE_MATCH_BITS + math.log2(pairs)) / 8))


def longest_message(agreement: IntersectionAgreement) -> int:
    """Return the bytes of the longest message: of the tags, what is dealt to the hub, or the
    vector.
    """
    largest = agreement.largest_size
    tags = KEY_BYTES + tag_bytes(largest, largest) * largest
    elements = vector_elements(largest)
    return message_bytes(max(tags, hub_dealt_bytes(elements), KEY_BYTES + vector_bytes(elements)))
