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
4. It compares, and opens what all share; see `reveal_common_rows` and `parse_revealed_rows`.

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
    count_message_bytes,
    parse_revealed_rows,
    require_own_rows,
    reveal_common_rows,
)
from apfed_protocols.psi.interface import Endpoint as AnyEndpoint
from apfed_protocols.psi.store import (
    DENSE,
    ELEMENT_BYTES,
    DependentRowsError,
    Digests,
    Elements,
    Encoder,
    Multiplier,
    Rows,
    add_random_words,
    count_cells,
    decode_rows,
    digest_ids,
    expand_elements,
    extract_targets,
    from_bytes,
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
_IDS_AT_ONCE = 2**16
_TAGS_MATCHED_AT_ONCE = 2**21
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
    """The kinds of messages of this backend."""

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


class Endpoint(AnyEndpoint[Kind]):
    """A party's endpoint of this backend."""

    kinds = Kind
    version = _VERSION
    work = "evaluating its IDs"


class VoleIntersection(DealtIntersection):
    """The backend `vole`: little computing and few bytes, but a dealer; what it reveals is in
    `leaks`.
    """

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
        """Return how many guessed IDs a party that announces `maximum_ids` IDs and deviates can
        test: the hub one ID for each cell of its store, a member one for each announced ID.

        The hub's store solves as many equations as it has cells; a member's tag is of one ID. So an
        announced n lets the hub test about 1.3 n + 88 IDs at each member, with a store for each.
        Only a store of n cells would be tighter: a polynomial of degree n - 1, which takes
        n log^2 n multiplications to find.
        """
        return Guesses(hub=count_vector_elements(maximum_ids), member=maximum_ids)

    @classmethod
    def count_announced_bytes(cls, size: int, *, own_size: int = 0, members: int = 1) -> int:
        """Return the bytes of memory that a role allocates because a peer announces `size` IDs,
        whatever the other arguments are.

        The dealer makes a vector for as many IDs as the hub orders, one member at a time; the hub
        matches as many tags as a member has IDs.
        """
        del own_size, members
        return max(DEALING_ELEMENT_BYTES * count_vector_elements(size), _MATCHED_TAG_BYTES * size)

    @property
    def longest(self) -> int:
        return compute_longest_message(self.agreement)

    def _hub_script(self, me: str, members: Sequence[str], ids: Sequence[bytes]) -> Script:
        """Run the role of the hub `me` (the active): name the hash key, order one vector OLE
        (correlated random vectors) for each member (a passive), send the masked store, and compare
        tags (steps 1 to 4 of the module's docstring). `ids`: the hub's encoded IDs.
        """
        endpoint = Endpoint(me, self.agreement, self.progress)
        agreement = endpoint.agreement
        hash_key = fresh_key()
        size = agreement.compute_announced_size(endpoint.me, len(ids))
        hellos = dict.fromkeys(members, HELLO.pack(hash_key, size))
        hello = endpoint.make_turn(Kind.HELLO, hellos, members)
        order = _DEALING.make_order(endpoint, size)
        yield Turn([*hello.outgoing, *order.outgoing], ())
        # Meanwhile the dealer works.
        rows, store = _encode_ids(endpoint.me, ids, hash_key, count_cells(size))
        inbox = yield Turn((), [*members, *order.awaited])
        commits = {
            member: COMMIT.unpack(endpoint.parse_message(inbox, member, Kind.COMMIT, COMMIT.size))
            for member in members
        }
        for member, (_, announced) in commits.items():
            agreement.check_announced_sizes(member, [announced], [member])
        shares = yield from _DEALING.receive_hub_shares(endpoint, size, members, inbox)
        key_parts = {member: fresh_key() for member in members}
        vectors = {
            member: shares[member].mask_vector(store, head=key_parts[member]) for member in members
        }
        sending = endpoint.make_turn(Kind.VECTOR, vectors, members)
        del store, vectors
        yield Turn(sending.outgoing, ())
        del sending
        # Meanwhile the members work; C is needed for nothing else afterwards.
        values = {member: evaluate_rows(shares.pop(member).c, rows) for member in members}
        del shares, rows
        inbox = yield Turn((), members)
        positions = {}
        for member, (commitment, announced) in commits.items():
            length = count_tag_bytes(size, announced)
            body = endpoint.parse_message(inbox, member, Kind.TAGS, KEY_BYTES + length * announced)
            member_part = _parse_key_part(member, body, commitment)
            output_key = _derive_output_key(agreement, member, key_parts[member], member_part)
            own_tags = hash_values(values.pop(member), output_key, length)
            member_tags = np.frombuffer(body, np.uint8, offset=KEY_BYTES).reshape(-1, length)
            positions[member] = match_tags(own_tags, member_tags, sender=member)
            endpoint.report_progress(len(positions), len(members))
            del body, member_tags, own_tags
        del inbox
        return (yield from reveal_common_rows(endpoint, positions))

    def _member_script(self, me: str, hub: str, ids: Sequence[bytes]) -> Script:
        """Run the role of the member `me` (a passive): commit to its part of the key, compute K
        from the masked store of the hub (the active), send tags in a random order, and parse what
        the hub reveals (steps 1 to 4 of the module's docstring). `ids`: the member's encoded IDs.
        """
        endpoint = Endpoint(me, self.agreement, self.progress)
        agreement = endpoint.agreement
        key_part = fresh_key()
        size = agreement.compute_announced_size(endpoint.me, len(ids))
        commit = COMMIT.pack(hashlib.sha256(key_part).digest(), size)
        inbox = yield endpoint.make_turn(Kind.COMMIT, {hub: commit}, [hub])
        hello = endpoint.parse_message(inbox, hub, Kind.HELLO, HELLO.size)
        hash_key, hub_size = HELLO.unpack(hello)
        agreement.check_announced_sizes(hub, [hub_size], [hub])
        digests = digest_ids(ids, hash_key)
        inbox = yield Turn((), [hub, agreement.dealer])
        share = _DEALING.parse_member_share(endpoint, inbox)
        body = endpoint.parse_message(
            inbox, hub, Kind.VECTOR, KEY_BYTES + count_vector_bytes(count_vector_elements(hub_size))
        )
        store = share.unmask_vector(hub, memoryview(body)[KEY_BYTES:])
        output_key = _derive_output_key(agreement, endpoint.me, body[:KEY_BYTES], key_part)
        del inbox, body
        length = count_tag_bytes(hub_size, size)
        tags = _compute_member_tags(
            digests, store, share.delta, output_key, length, report=endpoint.report_progress
        )
        del digests, store
        order = random_permutation(size)
        tags = add_random_tags(tags, size).take(order, axis=0)
        inbox = yield endpoint.make_turn(Kind.TAGS, {hub: key_part + tags.tobytes()}, [hub])
        result = parse_revealed_rows(endpoint, inbox, hub, order, hub_size)
        require_own_rows(result, len(ids), me=endpoint.me, hub=hub)
        return result

    def make_dealer(self, hub: str, members: Sequence[str]) -> Aligner:
        """Return the role of the dealer, a party without IDs, which receives messages from the hub
        only. Raises LocalProtocolError: names or sizes that do not fit the agreement.
        """
        me = self.agreement.dealer
        check_parties(hub, members, me)
        self._require_memory(me, own_size=0, members=len(members))
        script = self._dealer_script(Endpoint(me, self.agreement), hub, members)
        return self._make_aligner(me, [hub], script)

    def _dealer_script(self, endpoint: Endpoint, hub: str, members: Sequence[str]) -> Script:
        """Run the dealer's role: deal correlated random vectors (one vector OLE) to the hub and
        each member (step 1).
        """
        yield from _DEALING.deal_shares(endpoint, hub, members)
        return IntersectionResult()


@dataclass(frozen=True)
class HubShare:
    """The hub's share of the vector OLE with one member: vectors A and C of m elements, where C = A
    Delta + B and the member has B and Delta.

    Attributes:
        dealing: a random name of this vector OLE, the same in both shares.
        seed: 32 secret bytes; A is expanded from them when it is needed.
        c: C, elements of GF(2^128) as two words each, (elements, 2).
    """

    dealing: bytes
    seed: bytes = field(repr=False)
    c: Elements = field(repr=False)

    @classmethod
    def from_message(cls, dealt: bytes | memoryview) -> "HubShare":
        """Decode the dealer's message to the hub for one member."""
        dealing, seed, c = _split_message(dealt)
        return cls(dealing, seed, from_bytes(c))

    def mask_vector(self, store: Elements, *, head: bytes = b"") -> bytes:
        """Return the message to the member: `head`, the name of the vector OLE, and A + P for the
        store P, which A hides.
        """
        vector = store.copy()
        add_random_words(vector, self.seed, b"a")
        return b"".join((head, self.dealing, vector.data.cast("B")))


def _parse_key_part(member: str, body: bytes, commitment: bytes) -> bytes:
    """Return the member's part of the key, with which the body of its TAGS begins. Raises
    RemoteProtocolError: the part's SHA-256 is not the `commitment` that the member sent before.
    """
    key_part = body[:KEY_BYTES]
    if not hmac.compare_digest(hashlib.sha256(key_part).digest(), commitment):
        raise RemoteProtocolError(f"{member} showed another key part than it committed to")
    return key_part


def _encode_ids(
    me: str, ids: Sequence[bytes], hash_key: bytes, cells: int
) -> tuple[Rows, Elements]:
    """Return the rows of the IDs of the hub `me`, in a store with this number of sparse cells, and
    the store P in which each ID x decodes to H(x), a hash of x under `hash_key`, as the rows are.
    """
    digests = digest_ids(ids, hash_key)
    rows = Rows.from_digests(digests, cells)
    targets = extract_targets(digests)
    del digests
    return rows, encode_values(me, Encoder(rows, cells), targets)


def encode_values(
    me: str, encoder: Encoder, values: Elements, *, seed: bytes | None = None
) -> Elements:
    """Return a store (oblivious key-value store) in which each row of `encoder` has its value of
    `values`, (n, words). Raises LocalProtocolError, which names the party `me`: the rows are
    linearly dependent under this key, which happens once in 2^47 intersections.

    `seed`: 32 secret bytes, used once, for cells that no row needs; None: they are random.
    """
    try:
        return encoder.encode(values, seed=seed)
    except DependentRowsError as error:
        raise LocalProtocolError(
            f"{me}: its IDs have no store under this key, which chance brings about once in 2^47 "
            "intersections; begin another one under a new session"
        ) from error


def add_random_tags(tags: Tags, size: int, *, seed: bytes | None = None) -> Tags:
    """Return a member's tags, filled up with random ones to `size`, the announced number of its
    IDs.

    `seed`: 32 secret bytes, used once, from which they are expanded; None: they are fresh.
    """
    count, length = tags.shape
    filling = keystream(seed or fresh_key(), length=length * (size - count))
    return np.concatenate([tags, np.frombuffer(filling, np.uint8).reshape(-1, length)])


def _derive_output_key(
    agreement: IntersectionAgreement, member: str, hub_part: bytes, member_part: bytes
) -> bytes:
    """Return the key of the tag hash for one member, derived from the random parts of hub and
    member, so that neither chose it.
    """
    return derive_key(hub_part, b"vole output", member_part, agreement.digest, member.encode())


@dataclass(frozen=True)
class MemberShare:
    """A member's share of the vector OLE with the hub: the vector B and the factor Delta, where C =
    A Delta + B and the hub has A and C.

    Attributes:
        dealing: a random name of this vector OLE, the same in both shares.
        seed: 32 secret bytes; B is expanded from them when it is needed.
        delta: multiplies elements of GF(2^128) by Delta.
    """

    dealing: bytes
    seed: bytes = field(repr=False)
    delta: Multiplier = field(repr=False)

    @classmethod
    def from_message(cls, dealt: bytes, *, dealer: str) -> "MemberShare":
        """Decode the dealer's message to a member. Raises RemoteProtocolError, which names
        `dealer`: Delta is zero, so that nothing would be hidden.
        """
        dealing, seed, delta = _split_message(dealt)
        if not any(delta):
            raise RemoteProtocolError(
                f"{dealer} dealt a Delta of zero, which hides no ID; it does not follow the "
                "protocol: have another party deal"
            )
        return cls(dealing, seed, Multiplier(bytes(delta)))

    def unmask_vector(self, hub: str, sent: bytes | memoryview) -> Elements:
        """Return K = B + (A + P) Delta from the hub's message: the name of the vector OLE and the
        masked vector A + P. Raises RemoteProtocolError: the name is another.
        """
        content = memoryview(sent)
        if content[:DEALING_BYTES] != self.dealing:
            raise RemoteProtocolError(
                f"{hub} uses what was dealt another time, so that no ID would be found; "
                "deal again to all parties, under a new session"
            )
        store = self.delta.multiply_elements(from_bytes(content[DEALING_BYTES:]))
        add_random_words(store, self.seed, b"b")
        return store


def _split_message(dealt: bytes | memoryview) -> tuple[bytes, bytes, memoryview]:
    """Return the parts of a dealer's message: the name of the vector OLE, the seed, and the rest,
    which is C at the hub and Delta at a member.
    """
    content = memoryview(dealt)
    end = DEALING_BYTES + KEY_BYTES
    return bytes(content[:DEALING_BYTES]), bytes(content[DEALING_BYTES:end]), content[end:]


def deal_vector_ole(elements: int) -> tuple[bytes, bytes]:
    """Make one vector OLE of this number of elements; return the dealer's messages to the hub and
    to the member.
    """
    dealing = fresh_key()[:DEALING_BYTES]
    seed_a = fresh_key()
    seed_b = fresh_key()
    delta = bytes(ELEMENT_BYTES)
    while not any(delta):
        delta = fresh_key()[:ELEMENT_BYTES]
    c = Multiplier(delta).multiply_elements(expand_elements(seed_a, b"a", elements))
    add_random_words(c, seed_b, b"b")
    return dealing + seed_a + to_bytes(c), dealing + seed_b + delta


def _parse_order(agreement: IntersectionAgreement, hub: str, order: bytes) -> int:
    """Return for how many IDs the hub orders a vector in its message to the dealer. Raises
    RemoteProtocolError: not for the agreed number, or for more than the agreed limit.
    """
    (size,) = DEAL.unpack(order)
    has_agreed_sizes = bool(agreement.sizes)
    largest = agreement.get_size(hub) if has_agreed_sizes else agreement.maximum_ids
    if size > largest or (has_agreed_sizes and size != largest):
        raise RemoteProtocolError(
            f"{hub} orders a vector for {size} IDs, the parties agreed on "
            f"{'' if has_agreed_sizes else 'at most '}{largest}"
        )
    return int(size)


def hash_values(values: Elements, key: bytes, length: int) -> Tags:
    """Return tags: the first `length` bytes of `hash_elements` of each value, (n, length)."""
    return np.ascontiguousarray(hash_elements(values, key).view(np.uint8)[:, :length])


def hash_elements(values: Elements, key: bytes) -> Elements:
    """Return the hash E(s(v)) + s(v) of each element v, (n, 2), where E is AES-256 under `key` and
    s(v) has the upper word of v as its lower word, and the sum of both words as its upper word.

    With E an ideal cipher this hash is circular correlation robust (Guo, Katz, Wang and Yu, IEEE
    S&P 2020, section 7.3).
    """
    # ECB, since each block is hashed independently of the others.
    cipher = Cipher(algorithms.AES(key), modes.ECB()).encryptor()  # noqa: S305
    hashed = np.empty(values.shape, "<u8")
    buffer = np.empty(ELEMENT_BYTES * (_CHUNK + 1), np.uint8).data
    for start in range(0, len(values), _CHUNK):  # in pieces that stay in the cache
        part = values[start : start + _CHUNK]
        shuffled = hashed[start : start + _CHUNK]
        shuffled[:, 0] = part[:, 1]
        shuffled[:, 1] = part[:, 0] ^ part[:, 1]
        size = cipher.update_into(shuffled.tobytes(), buffer)
        shuffled ^= from_bytes(buffer[:size])
    return hashed


def evaluate_rows(store: Elements, rows: Rows) -> Elements:
    """Return the value of each row in a store, (n, 2), computed in pieces."""
    values = np.empty((len(rows), 2), "<u8")
    for start in range(0, len(rows), _IDS_AT_ONCE):
        chunk = slice(start, start + _IDS_AT_ONCE)
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
    """Return the tag of each of a member's IDs y: hash(Decode(K, y) + Delta H(y)), (n, length),
    where Decode adds the cells of K that y selects.

    Args:
        digests: digest of each ID, (n, 6) words (`digest_ids`).
        store: K = C + P Delta, the member's version of the hub's store P, (cells, 2) words.
        delta: multiplies elements of GF(2^128) by Delta.
        key: 32-byte AES key of the tag hash.
        length: bytes of a tag.
        report: called with the number of IDs done and of all IDs.
    """
    count = len(digests)
    cells = len(store) - DENSE
    tags = np.empty((count, length), np.uint8)
    for start in range(0, count, _IDS_AT_ONCE):
        part = digests[start : start + _IDS_AT_ONCE]
        values = decode_rows(store, Rows.from_digests(part, cells))
        values ^= delta.multiply_elements(extract_targets(part))
        tags[start : start + len(part)] = hash_values(values, key, length)
        report(start + len(part), count)
    return tags


def match_tags(own: Tags, theirs: Tags, *, sender: str) -> NDArray[np.int64]:
    """Return the position of each of this party's tags, `own`, among `theirs`, those of the party
    `sender`, (n,); -1 if it is not there. Raises RemoteProtocolError: `sender` sent a tag twice.
    """
    positions = np.full(len(own), -1, np.int64)
    parts = 1 + (len(own) + len(theirs)) // _TAGS_MATCHED_AT_ONCE
    for part in range(parts):  # equal tags are in the same part, whose sorting takes little memory
        own_positions = _select_part(own, part, parts)
        their_positions = _select_part(theirs, part, parts)
        matches = _match_part(
            own.take(own_positions, axis=0), theirs.take(their_positions, axis=0), sender
        )
        # The appended -1 is what a match of -1, none, selects.
        positions[own_positions] = np.append(their_positions, -1)[matches]
    return positions


def _select_part(tags: Tags, part: int, parts: int) -> NDArray[np.int64]:
    """Return the positions of the tags in group `part` of `parts`. The first two bytes of a tag
    decide its group, so that equal tags are in the same one.
    """
    if parts == 1:
        return np.arange(len(tags))
    first_bytes = (tags[:, 0].astype(np.uint16) << np.uint16(8)) | tags[:, 1]
    return np.flatnonzero(first_bytes % np.uint16(parts) == part)


def _match_part(own: Tags, theirs: Tags, sender: str) -> NDArray[np.int64]:
    """Return the position of each own tag among `theirs`, -1 if it is not there, by sorting all
    tags. Raises RemoteProtocolError: `sender` sent a tag twice.
    """
    words = from_bytes(_widen_tags(own) + _widen_tags(theirs))
    order = np.argsort(words[:, 0], kind="stable")
    begins_like_next = words[order[:-1], 0] == words[order[1:], 0]
    three_begin_alike = (begins_like_next[1:] & begins_like_next[:-1]).any()
    if three_begin_alike:  # then equal tags are adjacent only after sorting by both words
        order = np.lexsort((words[:, 1], words[:, 0]))
        begins_like_next = words[order[:-1], 0] == words[order[1:], 0]
    first = order[:-1][begins_like_next]
    second = order[1:][begins_like_next]
    is_equal = words[first, 1] == words[second, 1]
    # Indices of two equal tags: own tags come first.
    lower = np.minimum(first, second)[is_equal]
    higher = np.maximum(first, second)[is_equal]
    if (lower >= len(own)).any():
        raise RemoteProtocolError(
            f"{sender} sent a tag twice; its set has duplicates, or it does not follow the protocol"
        )
    positions = np.full(len(own), -1, np.int64)
    is_match = higher >= len(own)  # else two own tags are equal
    positions[lower[is_match]] = higher[is_match] - len(own)
    return positions


def _widen_tags(tags: Tags) -> bytes:
    """Return the tags, each padded with zeros to 16 bytes, joined."""
    wide = np.zeros((len(tags), ELEMENT_BYTES), np.uint8)
    wide[:, : tags.shape[1]] = tags
    return wide.tobytes()


def count_vector_elements(hub_size: int) -> int:
    """Return the elements of a vector for this number of the hub's IDs: the sparse and dense cells
    of a store.
    """
    return count_cells(hub_size) + DENSE


@dataclass(frozen=True)
class Dealing(Generic[AnyKind]):
    """The exchange of a backend by which the hub orders vector OLEs and the dealer deals them.

    Attributes:
        order: the kind of the hub's message to the dealer.
        dealt: the kind of the dealer's messages.
        elements: returns the length of a vector for a number of the hub's IDs.
    """

    order: AnyKind
    dealt: AnyKind
    elements: Callable[[int], int]

    def make_order(self, endpoint: AnyEndpoint[AnyKind], size: int) -> Turn:
        """Return the hub's turn that orders a vector OLE for `size` IDs with one member, and waits
        for the dealer.
        """
        dealer = endpoint.agreement.dealer
        return endpoint.make_turn(self.order, {dealer: DEAL.pack(size)}, [dealer])

    def receive_hub_shares(
        self, endpoint: AnyEndpoint[AnyKind], size: int, members: Sequence[str], inbox: Inbox
    ) -> Generator[Turn, Inbox, dict[str, HubShare]]:
        """Receive the hub's share for each member, ordering one after another; return them by
        member.

        `size`: the number of IDs that the hub announces. `inbox`: messages by sender, with the
        dealer's answer to the first order, which was sent already.
        """
        dealer = endpoint.agreement.dealer
        length = count_hub_dealt_bytes(self.elements(size))
        shares = dict[str, HubShare]()
        for member in members:
            if shares:
                inbox = yield self.make_order(endpoint, size)
            dealt = endpoint.parse_message(inbox, dealer, self.dealt, length)
            shares[member] = HubShare.from_message(dealt)
        return shares

    def parse_member_share(self, endpoint: AnyEndpoint[AnyKind], inbox: Inbox) -> MemberShare:
        """Return a member's share from the dealer's message in `inbox`."""
        dealer = endpoint.agreement.dealer
        dealt = endpoint.parse_message(inbox, dealer, self.dealt, count_member_dealt_bytes())
        return MemberShare.from_message(dealt, dealer=dealer)

    def deal_shares(
        self, endpoint: AnyEndpoint[AnyKind], hub: str, members: Sequence[str]
    ) -> Generator[Turn, Inbox, int]:
        """Wait, at the dealer, for the hub's order for each member and send both their shares;
        return the number of IDs that all orders are for. Raises RemoteProtocolError: the orders are
        for different or too large numbers.
        """
        size = 0
        sizes = set[int]()
        for member in members:
            inbox = yield Turn((), [hub])
            order = endpoint.parse_message(inbox, hub, self.order, DEAL.size)
            sizes.add(_parse_order(endpoint.agreement, hub, order))
            if len(sizes) > 1:
                several = ", ".join(map(str, sorted(sizes)))
                raise RemoteProtocolError(f"{hub} orders for sets of {several} IDs, it has one")
            (size,) = sizes
            to_hub, to_member = deal_vector_ole(self.elements(size))
            yield endpoint.make_turn(self.dealt, {hub: to_hub, member: to_member}, ())
        return size


_DEALING = Dealing(Kind.DEAL, Kind.DEALT, count_vector_elements)


def count_vector_bytes(elements: int) -> int:
    """Return the bytes that the hub sends a member: the name of the vector OLE, and a masked vector
    of this number of elements.
    """
    return DEALING_BYTES + ELEMENT_BYTES * elements


def count_hub_dealt_bytes(elements: int) -> int:
    """Return the bytes of the dealer's message to the hub for one member: the name of the vector
    OLE, a seed, and C of this number of elements.
    """
    return DEALING_BYTES + KEY_BYTES + ELEMENT_BYTES * elements


def count_member_dealt_bytes() -> int:
    """Return the bytes of the dealer's message to a member: the name of the vector OLE, a seed, and
    Delta.
    """
    return DEALING_BYTES + KEY_BYTES + ELEMENT_BYTES


def count_tag_bytes(hub_size: int, member_size: int) -> int:
    """Return the bytes of a tag for sets of these sizes: enough that, except with probability
    2^-40, no ID of a member has the tag of another ID of the hub (a false match) or of the member
    (which would be refused).
    """
    pairs = max(hub_size, member_size, 1) * max(member_size, 1)
    return max(_MIN_TAG_BYTES, math.ceil((_FALSE_MATCH_BITS + math.log2(pairs)) / 8))


def compute_longest_message(agreement: IntersectionAgreement) -> int:
    """Return the bytes of the longest message under an agreement: that with the tags, the dealer's
    to the hub, or the hub's to a member.
    """
    largest = agreement.largest_size
    elements = count_vector_elements(largest)
    tags = KEY_BYTES + count_tag_bytes(largest, largest) * largest
    vector = KEY_BYTES + count_vector_bytes(elements)
    return count_message_bytes(max(tags, count_hub_dealt_bytes(elements), vector))
