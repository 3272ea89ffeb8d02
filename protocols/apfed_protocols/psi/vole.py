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
    IntersectionAgreement,
    IntersectionResult,
    Messages,
    Output,
    RoleCoroutine,
    Round,
    check_parties,
    count_message_bytes,
    parse_revealed_rows,
    require_own_rows,
    reveal_common_rows,
    wait_for,
)
from apfed_protocols.psi.interface import Endpoint as AnyEndpoint
from apfed_protocols.psi.store import (
    DENSE_CELLS,
    ELEMENT_BYTES,
    DependentEquationsError,
    Digests,
    Elements,
    Encoder,
    Equations,
    Multiplier,
    add_random_words,
    count_cells,
    decode_values,
    digest_ids,
    expand_elements,
    extract_id_hashes,
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

_ELEMENTS_PER_CHUNK = 2**12
_IDS_PER_CHUNK = 2**16
_TAGS_PER_GROUP = 2**21
Tags = NDArray[np.uint8]
"""Shape (n, bytes of a tag), 8 to 16."""

HELLO = struct.Struct(f">{KEY_BYTES}sI")
COMMIT = struct.Struct(f">{KEY_BYTES}sI")
ORDER = struct.Struct(">I")
OLE_NAME_BYTES = 16
_VERSION = 141
_FALSE_MATCH_BITS = 40
_MIN_TAG_BYTES = 8
DEALER_ELEMENT_BYTES = 49
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
    has_pairwise_leak: ClassVar[bool] = True
    outputs: ClassVar[frozenset[Output]] = frozenset({Output.ROWS, Output.HUB_ROWS})
    leaks: ClassVar[tuple[str, ...]] = (
        "The hub learns its pairwise intersection with every member, even when it is refused.",
        "A member learns which of its own IDs all parties share, or that these are too few.",
        "The dealer learns how large the hub's set is.",
    )

    @staticmethod
    def max_guesses(maximum_ids: int) -> Guesses:
        """Return how many guessed IDs a party can test against another's set if it announces
        `maximum_ids` IDs and deviates from the protocol: the hub one ID for each cell of its store
        (oblivious key-value store), a member one ID for each tag.

        The hub's store solves as many equations as it has cells. So a hub that announces n IDs can
        test about 1.3 n + 88 IDs at each member, and another store at each. Only a store of n cells
        would allow fewer: a polynomial of degree n - 1, which takes n log^2 n multiplications to
        find.
        """
        return Guesses(hub=count_vector_elements(maximum_ids), member=maximum_ids)

    @classmethod
    def count_announced_bytes(
        cls, announced_size: int, *, own_size: int = 0, member_count: int = 1
    ) -> int:
        """Return the bytes of memory that a role allocates because a peer announces
        `announced_size` IDs: the larger of what the dealer needs, which makes a vector for as many
        IDs as the hub announces, and what the hub needs, which matches as many tags as a member
        announces. The other arguments do not matter.
        """
        del own_size, member_count
        return max(
            DEALER_ELEMENT_BYTES * count_vector_elements(announced_size),
            _MATCHED_TAG_BYTES * announced_size,
        )

    @property
    def max_message_bytes(self) -> int:
        return compute_max_message_bytes(self.agreement)

    def _run_hub(self, me: str, members: Sequence[str], ids: Sequence[bytes]) -> RoleCoroutine:
        """Run the role of the hub `me` (the active): name the hash key, order one vector OLE
        (correlated random vectors) for each member (a passive) from the dealer, send each member
        the masked store that encodes the IDs, and compare tags (steps 1 to 4 of the module's
        docstring). Large arrays are deleted as soon as they are not needed, to save memory.

        `ids`: the hub's encoded IDs.
        """
        endpoint = Endpoint(me, self.agreement, self.progress)
        agreement = endpoint.agreement
        hash_key = fresh_key()
        announced_size = agreement.compute_announced_size(endpoint.me, len(ids))
        hello_bodies = dict.fromkeys(members, HELLO.pack(hash_key, announced_size))
        hello_round = endpoint.make_round(Kind.HELLO, hello_bodies, awaited=members)
        order_round = _OLE_EXCHANGE.make_order(endpoint, announced_size)
        yield Round(outgoing=[*hello_round.outgoing, *order_round.outgoing], awaited=())
        # Meanwhile the dealer works.
        equations, store = _encode_ids(endpoint.me, ids, hash_key, count_cells(announced_size))
        received = yield wait_for([*members, *order_round.awaited])
        commitments = {}
        member_sizes = {}
        for member in members:
            commit_body = endpoint.parse_message(received, member, Kind.COMMIT, COMMIT.size)
            commitments[member], member_sizes[member] = COMMIT.unpack(commit_body)
            agreement.check_announced_sizes(member, [member_sizes[member]], [member])
        shares_by_member = yield from _OLE_EXCHANGE.receive_hub_shares(
            endpoint, announced_size, members, received
        )
        key_parts = {member: fresh_key() for member in members}
        vectors = {
            member: shares_by_member[member].mask_vector(store, prefix=key_parts[member])
            for member in members
        }
        vector_round = endpoint.make_round(Kind.VECTOR, vectors, awaited=members)
        del store, vectors
        yield Round(outgoing=vector_round.outgoing, awaited=())
        del vector_round
        # Meanwhile the members work; C is needed for nothing else afterwards.
        values_by_member = {
            member: decode_in_chunks(shares_by_member.pop(member).c, equations)
            for member in members
        }
        del shares_by_member, equations
        received = yield wait_for(members)
        positions = {}
        for member, member_size in member_sizes.items():
            tag_bytes = count_tag_bytes(announced_size, member_size)
            body_bytes = KEY_BYTES + tag_bytes * member_size
            body = endpoint.parse_message(received, member, Kind.TAGS, body_bytes)
            member_key_part = _parse_key_part(member, body, commitments[member])
            output_key = _derive_output_key(agreement, member, key_parts[member], member_key_part)
            own_tags = hash_values(values_by_member.pop(member), output_key, tag_bytes)
            member_tags = np.frombuffer(body, np.uint8, offset=KEY_BYTES).reshape(-1, tag_bytes)
            positions[member] = match_tags(own_tags, member_tags, sender=member)
            endpoint.report_progress(len(positions), len(members))
            del body, member_tags, own_tags
        del received
        return (yield from reveal_common_rows(endpoint, positions))

    def _run_member(self, me: str, hub: str, ids: Sequence[bytes]) -> RoleCoroutine:
        """Run the role of the member `me` (a passive): commit to its part of the tag hash's key,
        combine the masked store of the hub (the active) with the dealer's share, send the tags of
        its IDs in a random order, and parse what the hub reveals (steps 1 to 4 of the module's
        docstring). Large arrays are deleted as soon as they are not needed, to save memory.

        `ids`: the member's encoded IDs.
        """
        endpoint = Endpoint(me, self.agreement, self.progress)
        agreement = endpoint.agreement
        key_part = fresh_key()
        announced_size = agreement.compute_announced_size(endpoint.me, len(ids))
        commit_body = COMMIT.pack(hashlib.sha256(key_part).digest(), announced_size)
        received = yield endpoint.make_round(Kind.COMMIT, {hub: commit_body}, awaited=[hub])
        hello_body = endpoint.parse_message(received, hub, Kind.HELLO, HELLO.size)
        hash_key, hub_size = HELLO.unpack(hello_body)
        agreement.check_announced_sizes(hub, [hub_size], [hub])
        digests = digest_ids(ids, hash_key)
        received = yield wait_for([hub, agreement.dealer])
        share = _OLE_EXCHANGE.parse_member_share(endpoint, received)
        body = endpoint.parse_message(
            received,
            hub,
            Kind.VECTOR,
            KEY_BYTES + count_vector_bytes(count_vector_elements(hub_size)),
        )
        store = share.unmask_vector(hub, memoryview(body)[KEY_BYTES:])
        output_key = _derive_output_key(agreement, endpoint.me, body[:KEY_BYTES], key_part)
        del received, body
        tag_bytes = count_tag_bytes(hub_size, announced_size)
        tags = _compute_member_tags(
            digests,
            store,
            share.delta,
            output_key,
            tag_bytes,
            report_progress=endpoint.report_progress,
        )
        del digests, store
        sent_rows = random_permutation(announced_size)
        tags = add_random_tags(tags, announced_size).take(sent_rows, axis=0)
        received = yield endpoint.make_round(
            Kind.TAGS, {hub: key_part + tags.tobytes()}, awaited=[hub]
        )
        result = parse_revealed_rows(endpoint, received, hub, sent_rows, hub_size)
        require_own_rows(result, len(ids), me=endpoint.me, hub=hub)
        return result

    def make_dealer(self, hub: str, members: Sequence[str]) -> Aligner:
        """Return the role of the dealer, a party without IDs that provides correlated random
        vectors to hub and members. It receives messages from the hub only. Raises
        LocalProtocolError: names or sizes that do not fit the agreement.
        """
        me = self.agreement.dealer
        check_parties(hub, members, me)
        self._require_memory(me, own_size=0, member_count=len(members))
        coroutine = self._run_dealer(Endpoint(me, self.agreement), hub, members)
        return self._make_aligner(me, [hub], coroutine)

    def _run_dealer(self, endpoint: Endpoint, hub: str, members: Sequence[str]) -> RoleCoroutine:
        """Run the dealer's role: deal correlated random vectors (one vector OLE) to the hub and
        each member (step 1).
        """
        yield from _OLE_EXCHANGE.deal_shares(endpoint, hub, members)
        return IntersectionResult()


@dataclass(frozen=True)
class HubShare:
    """The hub's share of the vector OLE with one member: vectors A and C of m elements, where C = A
    Delta + B and the member has B and Delta.

    Attributes:
        ole_name: a random name of this vector OLE, the same in both shares.
        seed: 32 secret bytes; A is expanded from them when it is needed.
        c: C, elements of GF(2^128) as two words each, (elements, 2).
    """

    ole_name: bytes
    seed: bytes = field(repr=False)
    c: Elements = field(repr=False)

    @classmethod
    def from_message(cls, dealt: bytes | memoryview) -> "HubShare":
        """Decode the dealer's message to the hub for one member."""
        ole_name, seed, c = _split_dealt_message(dealt)
        return cls(ole_name, seed, from_bytes(c))

    def mask_vector(self, store: Elements, *, prefix: bytes = b"") -> bytes:
        """Return the hub's message to the member: `prefix`, the name of the vector OLE, and the
        store P, hidden by the random vector A as the sum A + P.
        """
        vector = store.copy()
        add_random_words(vector, self.seed, b"a")
        return b"".join((prefix, self.ole_name, vector.data.cast("B")))


def _parse_key_part(member: str, body: bytes, commitment: bytes) -> bytes:
    """Return the member's random part of the key of the tag hash, with which the `body` of its
    message with tags begins. Raises RemoteProtocolError: the part's SHA-256 is not the `commitment`
    that the member sent before.
    """
    key_part = body[:KEY_BYTES]
    if not hmac.compare_digest(hashlib.sha256(key_part).digest(), commitment):
        raise RemoteProtocolError(f"{member} showed another key part than it committed to")
    return key_part


def _encode_ids(
    me: str, ids: Sequence[bytes], hash_key: bytes, cell_count: int
) -> tuple[Equations, Elements]:
    """Encode the IDs of the hub `me` as a store P (an oblivious key-value store) with this number
    of sparse cells, in which each ID x decodes to H(x), a hash of x under `hash_key`.

    Returns:
        The equations, which say which cells each ID selects; and the store, (cells, 2) words.
    """
    digests = digest_ids(ids, hash_key)
    equations = Equations.from_digests(digests, cell_count)
    id_hashes = extract_id_hashes(digests)
    del digests
    return equations, encode_values(me, Encoder(equations, cell_count), id_hashes)


def encode_values(
    me: str, encoder: Encoder, values: Elements, *, seed: bytes | None = None
) -> Elements:
    """Encode values as an oblivious key-value store, in which each of n IDs decodes to its value.

    Args:
        me: the party's name, for the error.
        encoder: the encoder for the equations of the n IDs (which cells each ID selects).
        values: the value of each ID, (n, words).
        seed: 32 secret bytes, used once, from which cells that no equation needs are expanded;
            None: a fresh seed.

    Raises LocalProtocolError: the equations are linearly dependent under this hash key, which
    happens once in 2^47 intersections.
    """
    try:
        return encoder.encode(values, seed=seed)
    except DependentEquationsError as error:
        raise LocalProtocolError(
            f"{me}: its IDs have no store under this key, which chance brings about once in 2^47 "
            "intersections; begin another one under a new session"
        ) from error


def add_random_tags(tags: Tags, announced_size: int, *, seed: bytes | None = None) -> Tags:
    """Return a member's tags, padded with random tags to `announced_size`, the announced number of
    its IDs, so that the hub does not learn the true number.

    `seed`: 32 secret bytes, used once, from which the random tags are expanded; None: a fresh seed.
    """
    tag_count, tag_bytes = tags.shape
    padding = keystream(seed or fresh_key(), length=tag_bytes * (announced_size - tag_count))
    return np.concatenate([tags, np.frombuffer(padding, np.uint8).reshape(-1, tag_bytes)])


def _derive_output_key(
    agreement: IntersectionAgreement, member: str, hub_key_part: bytes, member_key_part: bytes
) -> bytes:
    """Return the key of the tag hash for one member, derived from the random parts of hub and
    member, so that neither chose it.
    """
    return derive_key(
        hub_key_part, b"vole output", member_key_part, agreement.digest, member.encode()
    )


@dataclass(frozen=True)
class MemberShare:
    """A member's share of the vector OLE with the hub: the vector B and the factor Delta, where C =
    A Delta + B and the hub has A and C.

    Attributes:
        ole_name: a random name of this vector OLE, the same in both shares.
        seed: 32 secret bytes; B is expanded from them when it is needed.
        delta: multiplies elements of GF(2^128) by Delta.
    """

    ole_name: bytes
    seed: bytes = field(repr=False)
    delta: Multiplier = field(repr=False)

    @classmethod
    def from_message(cls, dealt: bytes, *, dealer: str) -> "MemberShare":
        """Decode the dealer's message to a member. Raises RemoteProtocolError, which names
        `dealer`: Delta is zero, so that the hub could compute the tag of any guessed ID.
        """
        ole_name, seed, delta = _split_dealt_message(dealt)
        if not any(delta):
            raise RemoteProtocolError(
                f"{dealer} dealt a Delta of zero, which hides no ID; it does not follow the "
                "protocol: have another party deal"
            )
        return cls(ole_name, seed, Multiplier(bytes(delta)))

    def unmask_vector(self, hub: str, message: bytes | memoryview) -> Elements:
        """Return K = B + (A + P) Delta = C + P Delta, the member's version of the hub's store P, in
        which the mask A is gone.

        `hub`: name of the hub, for the error. `message`: what the hub sent, the name of the vector
        OLE and the masked store A + P.

        Raises RemoteProtocolError: the name is not the name of this share's vector OLE.
        """
        content = memoryview(message)
        if content[:OLE_NAME_BYTES] != self.ole_name:
            raise RemoteProtocolError(
                f"{hub} uses what was dealt another time, so that no ID would be found; "
                "deal again to all parties, under a new session"
            )
        store = self.delta.multiply_elements(from_bytes(content[OLE_NAME_BYTES:]))
        add_random_words(store, self.seed, b"b")
        return store


def _split_dealt_message(dealt: bytes | memoryview) -> tuple[bytes, bytes, memoryview]:
    """Return the three parts of a dealer's message: the name of the vector OLE, the seed, and the
    rest, which is C at the hub and Delta at a member.
    """
    content = memoryview(dealt)
    end_of_seed = OLE_NAME_BYTES + KEY_BYTES
    ole_name = bytes(content[:OLE_NAME_BYTES])
    seed = bytes(content[OLE_NAME_BYTES:end_of_seed])
    return ole_name, seed, content[end_of_seed:]


def deal_vector_ole(element_count: int) -> tuple[bytes, bytes]:
    """Make one vector OLE with this number of elements of GF(2^128): random vectors A and B and a
    factor Delta that is not zero, with C = A Delta + B.

    Returns:
        The dealer's message to the hub, from which it gets A and C; and the message to the member,
        from which it gets B and Delta. A and B are sent as seeds.
    """
    ole_name = fresh_key()[:OLE_NAME_BYTES]
    seed_a = fresh_key()
    seed_b = fresh_key()
    delta = bytes(ELEMENT_BYTES)
    while not any(delta):
        delta = fresh_key()[:ELEMENT_BYTES]
    c = Multiplier(delta).multiply_elements(expand_elements(seed_a, b"a", element_count))
    add_random_words(c, seed_b, b"b")
    message_to_hub = ole_name + seed_a + to_bytes(c)
    message_to_member = ole_name + seed_b + delta
    return message_to_hub, message_to_member


def _parse_order(agreement: IntersectionAgreement, hub: str, order: bytes) -> int:
    """Decode the hub's order to the dealer: return the number of IDs for which it orders a vector
    OLE. Raises RemoteProtocolError: the number is not the agreed size or, if no sizes are agreed,
    exceeds the agreed limit.
    """
    (ordered_size,) = ORDER.unpack(order)
    has_agreed_sizes = bool(agreement.sizes)
    largest_size = agreement.get_size(hub) if has_agreed_sizes else agreement.maximum_ids
    if ordered_size > largest_size or (has_agreed_sizes and ordered_size != largest_size):
        raise RemoteProtocolError(
            f"{hub} orders a vector for {ordered_size} IDs, the parties agreed on "
            f"{'' if has_agreed_sizes else 'at most '}{largest_size}"
        )
    return int(ordered_size)


def hash_values(values: Elements, key: bytes, tag_bytes: int) -> Tags:
    """Return tags: the first `tag_bytes` bytes of `hash_elements` of each value, (n, length)."""
    return np.ascontiguousarray(hash_elements(values, key).view(np.uint8)[:, :tag_bytes])


def hash_elements(values: Elements, key: bytes) -> Elements:
    """Return a hash of each of n 128-bit elements v, two words each, (n, 2): E(s(v)) + s(v), where
    E is AES-256 under `key`. The linear map s takes the upper word of v as the lower word, and the
    sum (XOR) of both words as the upper word.

    With E an ideal cipher this hash is circular correlation robust (Guo, Katz, Wang and Yu, IEEE
    S&P 2020, section 7.3).
    """
    # ECB, since each block is hashed independently of the others.
    cipher = Cipher(algorithms.AES(key), modes.ECB()).encryptor()  # noqa: S305
    hashed = np.empty(values.shape, "<u8")
    # `update_into` needs a spare block.
    buffer = np.empty(ELEMENT_BYTES * (_ELEMENTS_PER_CHUNK + 1), np.uint8).data
    for start in range(0, len(values), _ELEMENTS_PER_CHUNK):  # in chunks that stay in the cache
        chunk = values[start : start + _ELEMENTS_PER_CHUNK]
        chunk_hashes = hashed[
            start : start + _ELEMENTS_PER_CHUNK
        ]  # a view, filled with s(v), then the hash
        chunk_hashes[:, 0] = chunk[:, 1]
        chunk_hashes[:, 1] = chunk[:, 0] ^ chunk[:, 1]
        size = cipher.update_into(chunk_hashes.tobytes(), buffer)
        chunk_hashes ^= from_bytes(buffer[:size])
    return hashed


def decode_in_chunks(store: Elements, equations: Equations) -> Elements:
    """Decode the value of each of n IDs from a store, two words each, (n, 2), in chunks that save
    memory. `equations`: which cells of the store each ID selects.
    """
    values = np.empty((len(equations), 2), "<u8")
    for start in range(0, len(equations), _IDS_PER_CHUNK):
        chunk = slice(start, start + _IDS_PER_CHUNK)
        values[chunk] = decode_values(store, equations[chunk])
    return values


def _compute_member_tags(
    digests: Digests,
    store: Elements,
    delta_multiplier: Multiplier,
    key: bytes,
    tag_bytes: int,
    *,
    report_progress: Callable[[int, int], None],
) -> Tags:
    """Return the tag of each of a member's n IDs, (n, length), by which the hub compares IDs.

    The tag of an ID y is hash(Decode(K, y) + Delta H(y)), where Decode adds the cells of K that y
    selects, and H(y) is part of its digest.

    Args:
        digests: digest of each ID, (n, 6) words (`digest_ids`).
        store: K = C + P Delta, the member's version of the hub's store P, (cells, 2) words.
        delta_multiplier: multiplies elements of GF(2^128) by Delta.
        key: 32-byte AES key of the tag hash.
        tag_bytes: bytes of a tag.
        report_progress: called with the number of IDs done and of all IDs.
    """
    count = len(digests)
    cell_count = len(store) - DENSE_CELLS
    tags = np.empty((count, tag_bytes), np.uint8)
    for start in range(0, count, _IDS_PER_CHUNK):
        chunk = digests[start : start + _IDS_PER_CHUNK]
        values = decode_values(store, Equations.from_digests(chunk, cell_count))
        values ^= delta_multiplier.multiply_elements(extract_id_hashes(chunk))
        tags[start : start + len(chunk)] = hash_values(values, key, tag_bytes)
        report_progress(start + len(chunk), count)
    return tags


def match_tags(own_tags: Tags, their_tags: Tags, *, sender: str) -> NDArray[np.int64]:
    """Return the position of each of this party's n tags, `own_tags`, among `their_tags`, the tags
    of the party `sender`, (n,); -1 for a tag that is not there.

    Both sides are split into groups by the same rule, so that equal tags are in the same group and
    sorting one group takes little memory.

    Raises RemoteProtocolError: `sender` sent a tag twice.
    """
    positions = np.full(len(own_tags), -1, np.int64)
    group_count = 1 + (len(own_tags) + len(their_tags)) // _TAGS_PER_GROUP
    for group_index in range(group_count):
        own_positions = _select_group(own_tags, group_index, group_count)
        their_positions = _select_group(their_tags, group_index, group_count)
        matches = _match_group(
            own_tags.take(own_positions, axis=0), their_tags.take(their_positions, axis=0), sender
        )
        # A match of -1 (none) selects the last element, which is -1, too.
        positions[own_positions] = np.append(their_positions, -1)[matches]
    return positions


def _select_group(tags: Tags, group_index: int, group_count: int) -> NDArray[np.int64]:
    """Return the positions of the tags that belong to the group with index `group_index` of
    `group_count`. The first two bytes of a tag decide its group, so that equal tags are in the same
    group.
    """
    if group_count == 1:
        return np.arange(len(tags))
    first_bytes = (tags[:, 0].astype(np.uint16) << np.uint16(8)) | tags[:, 1]
    return np.flatnonzero(first_bytes % np.uint16(group_count) == group_index)


def _match_group(own_tags: Tags, their_tags: Tags, sender: str) -> NDArray[np.int64]:
    """Return the position of each own tag among `their_tags`, -1 if it is not there, by sorting all
    tags. Raises RemoteProtocolError: `sender` sent a tag twice.
    """
    words = from_bytes(_widen_tags(own_tags) + _widen_tags(their_tags))
    # Sorting by the first word of a tag alone is faster, and is enough unless three tags share it.
    order = np.argsort(words[:, 0], kind="stable")
    has_same_first_word = words[order[:-1], 0] == words[order[1:], 0]
    has_three_alike = (has_same_first_word[1:] & has_same_first_word[:-1]).any()
    if has_three_alike:  # then equal tags are adjacent only after sorting by both words
        order = np.lexsort((words[:, 1], words[:, 0]))
        has_same_first_word = words[order[:-1], 0] == words[order[1:], 0]
    first_index = order[:-1][has_same_first_word]
    second_index = order[1:][has_same_first_word]
    is_equal = words[first_index, 1] == words[second_index, 1]
    # The indices of two equal tags; own tags have lower indices than the sender's.
    lower = np.minimum(first_index, second_index)[is_equal]
    higher = np.maximum(first_index, second_index)[is_equal]
    if (lower >= len(own_tags)).any():
        raise RemoteProtocolError(
            f"{sender} sent a tag twice; its set has duplicates, or it does not follow the protocol"
        )
    positions = np.full(len(own_tags), -1, np.int64)
    is_match = higher >= len(own_tags)  # otherwise both are own tags
    positions[lower[is_match]] = higher[is_match] - len(own_tags)
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
    return count_cells(hub_size) + DENSE_CELLS


@dataclass(frozen=True)
class VectorOleExchange(Generic[AnyKind]):
    """The exchange of a backend by which the hub orders vector OLEs and the dealer deals them.

    Attributes:
        order_kind: the kind of the hub's message to the dealer.
        dealt_kind: the kind of the dealer's messages.
        count_elements: returns the length of a vector for a number of the hub's IDs.
    """

    order_kind: AnyKind
    dealt_kind: AnyKind
    count_elements: Callable[[int], int]

    def make_order(self, endpoint: AnyEndpoint[AnyKind], hub_size: int) -> Round:
        """Return the step of the hub's role that orders a vector OLE (correlated random vectors)
        for `hub_size` IDs and one member from the dealer, and waits for the dealer's message.
        """
        dealer = endpoint.agreement.dealer
        return endpoint.make_round(
            self.order_kind, {dealer: ORDER.pack(hub_size)}, awaited=[dealer]
        )

    def receive_hub_shares(
        self,
        endpoint: AnyEndpoint[AnyKind],
        hub_size: int,
        members: Sequence[str],
        received: Messages,
    ) -> Generator[Round, Messages, dict[str, HubShare]]:
        """Receive the hub's shares of the vector OLEs, one for each member, and return them by
        member. The vectors are ordered one after another, so that the dealer has one in memory.

        Args:
            endpoint: frames and parses the hub's messages.
            hub_size: the number of IDs that the hub announces.
            members: the members' names.
            received: messages by sender, with the dealer's answer to the first order, which was
                sent already.
        """
        dealer = endpoint.agreement.dealer
        dealt_bytes = count_hub_dealt_bytes(self.count_elements(hub_size))
        shares = dict[str, HubShare]()
        for member in members:
            is_first = not shares
            if not is_first:
                received = yield self.make_order(endpoint, hub_size)
            dealt = endpoint.parse_message(received, dealer, self.dealt_kind, dealt_bytes)
            shares[member] = HubShare.from_message(dealt)
        return shares

    def parse_member_share(self, endpoint: AnyEndpoint[AnyKind], received: Messages) -> MemberShare:
        """Return a member's share from the dealer's message in `received`."""
        dealer = endpoint.agreement.dealer
        dealt = endpoint.parse_message(
            received, dealer, self.dealt_kind, count_member_dealt_bytes()
        )
        return MemberShare.from_message(dealt, dealer=dealer)

    def deal_shares(
        self, endpoint: AnyEndpoint[AnyKind], hub: str, members: Sequence[str]
    ) -> Generator[Round, Messages, int]:
        """Deal the vector OLEs at the dealer: for each member wait for the hub's order, and send
        the hub and the member their shares. Return the number of IDs that all orders are for.

        Raises RemoteProtocolError: the orders are for different numbers, or for a number that does
        not fit the agreement.
        """
        ordered_size = 0
        ordered_sizes = set[int]()
        for member in members:
            received = yield wait_for([hub])
            order = endpoint.parse_message(received, hub, self.order_kind, ORDER.size)
            ordered_size = _parse_order(endpoint.agreement, hub, order)
            ordered_sizes.add(ordered_size)
            if len(ordered_sizes) > 1:
                size_list = ", ".join(map(str, sorted(ordered_sizes)))
                raise RemoteProtocolError(f"{hub} orders for sets of {size_list} IDs, it has one")
            message_to_hub, message_to_member = deal_vector_ole(self.count_elements(ordered_size))
            yield endpoint.make_round(
                self.dealt_kind, {hub: message_to_hub, member: message_to_member}, awaited=()
            )
        return ordered_size


_OLE_EXCHANGE = VectorOleExchange(Kind.DEAL, Kind.DEALT, count_vector_elements)


def count_vector_bytes(element_count: int) -> int:
    """Return the bytes that the hub sends a member: the name of the vector OLE, and a masked vector
    of this number of elements.
    """
    return OLE_NAME_BYTES + ELEMENT_BYTES * element_count


def count_hub_dealt_bytes(element_count: int) -> int:
    """Return the bytes of the dealer's message to the hub for one member: the name of the vector
    OLE, a seed, and C of this number of elements.
    """
    return OLE_NAME_BYTES + KEY_BYTES + ELEMENT_BYTES * element_count


def count_member_dealt_bytes() -> int:
    """Return the bytes of the dealer's message to a member: the name of the vector OLE, a seed, and
    Delta.
    """
    return OLE_NAME_BYTES + KEY_BYTES + ELEMENT_BYTES


def count_tag_bytes(hub_size: int, member_size: int) -> int:
    """Return the bytes of a tag (hash of an ID) for sets of these sizes, the hub's and a member's.

    Except with probability 2^-40, no two different IDs have the same tag: neither one of the member
    and one of the hub (a false match), nor two of the member (which the hub would refuse).
    """
    # A bound on the pairs of a member's ID with an ID of the hub, and with another of its own.
    max_pairs = max(member_size, 1) * max(hub_size, member_size, 1)
    return max(_MIN_TAG_BYTES, math.ceil((_FALSE_MATCH_BITS + math.log2(max_pairs)) / 8))


def compute_max_message_bytes(agreement: IntersectionAgreement) -> int:
    """Return the bytes of the longest message under an agreement: a member's tags, the dealer's
    message to the hub, or the hub's masked vector for a member.
    """
    largest_size = agreement.largest_size
    element_count = count_vector_elements(largest_size)
    # A member's tags and the hub's vector begin with the sender's part of the tag hash's key.
    tags_bytes = KEY_BYTES + largest_size * count_tag_bytes(largest_size, largest_size)
    vector_bytes = KEY_BYTES + count_vector_bytes(element_count)
    dealt_bytes = count_hub_dealt_bytes(element_count)
    return count_message_bytes(max(tags_bytes, dealt_bytes, vector_bytes))
