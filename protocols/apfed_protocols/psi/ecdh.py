"""Private set intersection by Diffie-Hellman: equal IDs, blinded by both, stay equal.

Run by: the active as the hub, each passive as a member, over authenticated and encrypted
links. Protects from: semi-honest parties that follow the protocol and look at what they
got. A party that lies about its set learns what a set with these IDs would learn.

With a_i the hub's fresh scalar for member i, b_i the member's, and P(x) an ID on the curve
(`map_to_curve`), each list in a fresh random order of its sender:

1. hub -> i: a_i P(x) for its IDs; i -> hub: b_i P(y) for its IDs (at the same time).
2. i -> hub: b_i a_i P(x) in the order received, as 16-byte tags. The hub computes
   a_i b_i P(y); equal tags are the IDs shared with i.
3. When all members answered, hub -> i: where in the list of i the IDs are that all share,
   in one random order for all; or the refusal, if these are too few. Where the hub alone is
   to know, it sends an empty message instead.

Where only the size is to open, there is one member, which returns the tags in an order of
its own: the hub counts equal tags, cannot tell whose they are, and tells the member.

Two members cannot compare what the hub sent them, because a_i differs. Tags of two
different IDs agree with probability below 2^-81 for sets of 10 million.
Source: C. Meadows, IEEE S&P 1986; Huberman, Franklin and Hogg, EC 1999.

Points are 32-byte u-coordinates on Curve25519, held one after the other in one `bytes`. X25519
(RFC 7748, section 5) computes the u-coordinate of a scalar multiple from a
u-coordinate, so it commutes: X25519(a, X25519(b, u)) = X25519(b, X25519(a, u)). A clamped
scalar is 8 times a number below the order of the large subgroup: blinding is one-to-one
on that subgroup and wipes the low-order part of a hashed point. That blinded points look
random is the decisional Diffie-Hellman assumption, with the hash as a random oracle.

X25519 also accepts any 32 bytes, half of which lie on the curve's twist, and it keeps a
point on its side. Hashing IDs straight to 32 bytes would therefore publish one bit of
each ID's hash, and the count of these bits differs from set to set. So a digest, as a number
r, goes through Elligator 2 (RFC 9380, section 6.7.1): of -A / (1 + 2 r^2) and -A minus that,
exactly one lies on the curve y^2 = u^3 + A u^2 + u with A = 486662, and it is the point.

Half of the curve's u are reached, those with a square -2 u (u + A), each from four numbers: r, -r,
1 / 2r and -1 / 2r. So hashed points are not uniform, but the assumption for uniform points
covers them. For whoever could tell blinded hashes from random points could do so for
uniform points: add to each a random point of low order, which the scalar wipes; throw away
the half that is not reached, which anyone can tell; say that the hash gave one of the four r of
each of the others. Two of n IDs meet in one point with probability below n^2 2^-251.

A multiplication is libsodium's, through PyNaCl: it takes the same time for all points, and
leaves Python's lock to other threads, which `cryptography`, as fast in one thread, keeps. The
arithmetic of Elligator 2 is GMP's, whose time can depend on the numbers; among the
multiplications a peer sees the sum for a whole set at most. Hashing to the curve, a twelfth of the
work, keeps the lock.
"""

import hashlib
import math
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from typing import ClassVar, cast

import numpy as np
from gmpy2 import invert, jacobi, mpz  # type: ignore[import-untyped]
from nacl.bindings import crypto_scalarmult
from numpy.typing import NDArray

from apfed_protocols.conversation import Conversation
from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.psi.interface import (
    POSITION_BYTES,
    Aligner,
    Guesses,
    Messages,
    Output,
    Progress,
    ResumableIntersection,
    RoleCoroutine,
    Round,
    check_parties,
    count_message_bytes,
    digest_each,
    parse_revealed_rows,
    reveal_common_rows,
    wait_for,
)
from apfed_protocols.psi.interface import Endpoint as AnyEndpoint
from apfed_protocols.randomness import derive_key, fresh_key, random_permutation

RowIndices = NDArray[np.int64]

_VERSION = 3
TAG_BYTES = 16

_MODULUS = 2**255 - 19
# Every u of a point of order 1, 2, 4 or 8, on the curve or on its twist. The two of order 8
# are inverse numbers: the roots of u^4 - 4 u^3 - (2 + 4 * 486662) u^2 - 4 u + 1.
_ORDER_EIGHT = 325606250916557431795983626356110631294008115727848805560023387167927233504

POINT_BYTES = 32

_LOW_ORDER = frozenset(
    u.to_bytes(POINT_BYTES, "little")
    for u in (0, 1, _MODULUS - 1, _ORDER_EIGHT, pow(_ORDER_EIGHT, -1, _MODULUS))
)

_PRIME = mpz(2**255 - 19)
_CURVE_A = mpz(486662)
_LOW_255_BITS = mpz(2**255 - 1)

# A chunk takes some 30 ms, after which a thread whose work was cancelled ends.
_POINTS_PER_CHUNK = 1_000


class Kind(IntEnum):
    """The kinds of messages of this backend."""

    BLINDED = 1
    TAGS = 2
    ROWS = 3
    REFUSAL = 4
    DONE = 5
    SIZE = 6


_ITEM_BYTES: Mapping[int, int] = {
    Kind.BLINDED: POINT_BYTES,
    Kind.TAGS: TAG_BYTES,
    Kind.ROWS: POSITION_BYTES,
    Kind.REFUSAL: 0,
    Kind.DONE: 0,
    Kind.SIZE: POSITION_BYTES,
}


class Endpoint(AnyEndpoint[Kind]):
    """A party's endpoint of this backend."""

    kinds = Kind
    version = _VERSION
    item_bytes = _ITEM_BYTES


@dataclass(frozen=True)
class _Blinding:
    """The secrets with which one party blinds its IDs for a peer.

    Attributes:
        scalar: secret factor of the points that stand for IDs, 32 bytes.
        sent_rows: this party's own row at each position of the list that it sends.
    """

    scalar: bytes = field(repr=False)
    sent_rows: RowIndices


class _EcdhRole(Aligner, ABC):
    """Base of the roles of the hub (the active) and of the members (the passives)."""

    def __init__(
        self, me: str, peers: Sequence[str], ids: Sequence[bytes], backend: "EcdhIntersection"
    ) -> None:
        """Make the role of `me`: hash its IDs, and draw a scalar and an order for each peer, with
        which the IDs are blinded.

        Args:
            me: this party's name.
            peers: the parties that it compares IDs with.
            ids: this party's encoded IDs, distinct.
            backend: the intersection: agreement, threads, progress and secret of this party.
        """
        agreement = backend.agreement
        self._backend = backend
        self._endpoint = Endpoint(me, agreement)
        self._id_count = len(ids)
        self._digests = np.frombuffer(digest_ids(ids, session=agreement.digest), np.uint8)
        self._blindings = {peer: self._make_blinding(peer) for peer in peers}
        # No limit here: the endpoint limits the number of items, and so the length, of messages.
        super().__init__(
            me, peers, agreement.output, self._run_role(), max_message_bytes=sys.maxsize
        )

    @abstractmethod
    def _run_role(self) -> RoleCoroutine:
        """Run the role from the first message to the last."""

    def _make_blinding(self, peer: str) -> _Blinding:
        """Return the secret scalar by which this party multiplies its hashed IDs for `peer`, and
        the order in which it sends them: both fresh, or derived from the backend's secret so that a
        resumed attempt repeats the same messages.
        """
        secret = self._backend.secret
        if secret is None:
            return _Blinding(scalar=fresh_key(), sent_rows=random_permutation(self._id_count))
        key = derive_key(secret, b"ecdh", self._endpoint.agreement.digest, peer.encode())
        sent_rows = random_permutation(self._id_count, key=derive_key(key, b"order"))
        return _Blinding(scalar=derive_key(key, b"scalar"), sent_rows=sent_rows)

    def _blind_ids(self, awaited: Collection[str] = ()) -> Round:
        """Blind this party's IDs for each peer: map each ID to a curve point and multiply it by the
        peer's scalar. Return the step that sends each peer its list, the ID of row `order[k]` at
        position k, and then waits for the parties in `awaited`.
        """
        digests = self._digests.reshape(-1, POINT_BYTES)
        bodies = {}
        for peer, blinding in self._blindings.items():
            shuffled_digests = digests[blinding.sent_rows].tobytes()
            blind = partial(blind_digests, blinding.scalar)
            bodies[peer] = self._map_blocks("blinding its own IDs", blind, shuffled_digests)
        return self._endpoint.make_round(Kind.BLINDED, bodies, awaited=awaited)

    def _compute_tags(self, received: Messages, sender: str) -> NDArray[np.uint8]:
        """Multiply the n blinded IDs from `sender` by this party's secret scalar; return their tags
        (the first 16 bytes of each product), (n, 16), in the order received.

        `received`: messages by sender, with the list of blinded IDs.

        Raises RemoteProtocolError: the bytes are no points, there are not as many as expected, or
        one ID was blinded in two ways.
        """
        points = self._endpoint.parse_message(received, sender, Kind.BLINDED)
        self._backend.require_expected_size(sender, len(points) // POINT_BYTES)
        check_points(sender, points)
        multiply = partial(multiply_points, self._blindings[sender].scalar)
        products = self._map_blocks(f"blinding the IDs of {sender}", multiply, points)
        if len(set(split_points(products))) * POINT_BYTES < len(products):
            # Different points with equal products differ by a point of low order.
            raise RemoteProtocolError(
                f"{sender} sent one blinded ID in two ways; it does not follow the protocol"
            )
        return np.frombuffer(products, np.uint8).reshape(-1, POINT_BYTES)[:, :TAG_BYTES]

    def _map_blocks(
        self, activity: str, transform: Callable[[bytes], bytes], blocks: bytes
    ) -> bytes:
        """Apply `transform` to these 32-byte blocks (digests or points), chunk by chunk, in several
        threads; return the results, joined in order. Progress is reported as work on `activity`.
        """
        backend = self._backend
        block_count = len(blocks) // POINT_BYTES

        def report_progress(done: int) -> None:
            """Report that `done` blocks are done, if the caller wants reports."""
            if backend.progress is not None:
                backend.progress(Progress(self._me, activity, done, block_count))

        return map_in_threads(
            transform, blocks, threads=backend.threads, report_done=report_progress
        )


class EcdhIntersection(ResumableIntersection):
    """The backend `ecdh`: few bytes and no dealer; what it reveals is in `leaks`.

    Args:
        threads: number of threads in which this party blinds; None: one for each processor.
        secret: 32 bytes from which all randomness of messages is derived; None: it is fresh.
        expected_sizes: the number of IDs that a peer must announce, by name.
    """

    name: ClassVar[str] = "ecdh"
    needs_dealer: ClassVar[bool] = False
    has_pairwise_leak: ClassVar[bool] = True
    has_visible_sizes: ClassVar[bool] = True
    outputs: ClassVar[frozenset[Output]] = frozenset({Output.ROWS, Output.HUB_ROWS, Output.SIZE})
    leaks: ClassVar[tuple[str, ...]] = (
        "The hub learns its pairwise intersection with every member, even when it is refused.",
        "A member learns which of its own IDs all parties share, or that these are too few.",
    )

    @staticmethod
    def max_guesses(maximum_ids: int) -> Guesses:
        """Return how many guessed IDs a deviating party can test: a list has at most the announced
        number of points, and each point tests one ID.
        """
        return Guesses(hub=maximum_ids, member=maximum_ids)

    @staticmethod
    def compute_max_message_bytes(id_count: int) -> int:
        return count_message_bytes(POINT_BYTES * id_count)

    @property
    def max_message_bytes(self) -> int:
        return self.compute_max_message_bytes(self.agreement.maximum_ids)

    def make_hub(self, me: str, members: Sequence[str], ids: Sequence[bytes]) -> "EcdhHub":
        """Return the role of the hub `me` (the active) for these members (the passives). Raises
        LocalProtocolError: only the size is to be revealed and there is more than one member; or
        names, IDs or sizes do not fit the agreement.
        """
        check_parties(me, members)
        if self.agreement.output is Output.SIZE and len(members) > 1:
            raise LocalProtocolError(
                f"ecdh counts the IDs common to two parties, here are {1 + len(members)}; "
                "circuit counts those of more"
            )
        self._check_inputs(me, members, ids)
        return EcdhHub(me, members, ids, self)

    def make_member(self, me: str, hub: str, ids: Sequence[bytes]) -> "EcdhMember":
        check_parties(hub, [me])
        self._check_inputs(me, [hub], ids)
        return EcdhMember(me, hub, ids, self)

    def make_dealer(self, hub: str, members: Sequence[str]) -> Conversation:
        raise LocalProtocolError(
            f"an ecdh intersection has no dealer, only hub {hub} and members {', '.join(members)}"
        )


class EcdhHub(_EcdhRole):
    """The role of the hub (the active), which compares tags with each member."""

    def __init__(
        self, me: str, members: Sequence[str], ids: Sequence[bytes], backend: EcdhIntersection
    ) -> None:
        """Make the role of the hub `me` with its encoded IDs. `backend`: the intersection, with
        this party's threads, progress and secret.
        """
        super().__init__(me, members, ids, backend)
        # By member: position of each of the hub's rows in the member's list, -1 if it lacks the ID.
        self._positions: dict[str, RowIndices] = {}

    @property
    def overlaps(self) -> dict[str, RowIndices]:
        """Return, by member, the hub's rows that the member has, ascending; the hub learns them
        whatever is revealed.
        """
        return {
            member: np.flatnonzero(positions >= 0) for member, positions in self._positions.items()
        }

    def _run_role(self) -> RoleCoroutine:
        """Run the role: send blinded IDs, compute the tags of each member's IDs (their points,
        blinded by both parties), match them with the tags of the hub's IDs that the members return,
        and reveal the agreed output (steps 1 to 3 of the module's docstring).
        """
        own_tags = {}
        members = list(self._blindings)
        yield self._blind_ids()
        for member in members:
            received = yield wait_for([member])
            own_tags[member] = split_points(
                self._compute_tags(received, member).tobytes(), TAG_BYTES
            )
        for member in members:
            received = yield wait_for([member])
            tags = split_points(
                self._endpoint.parse_message(received, member, Kind.TAGS), TAG_BYTES
            )
            self._positions[member] = self._match_rows(member, tags, own_tags[member])
        return (yield from reveal_common_rows(self._endpoint, self._positions))

    def _match_rows(
        self, member: str, returned_tags: list[bytes], member_tags: list[bytes]
    ) -> RowIndices:
        """Return, for each of the hub's rows, its position in the list that the member sent; -1 if
        the member lacks the ID. Both parties blinded every ID, so equal IDs have equal tags.

        Args:
            member: name of the member.
            returned_tags: tags of the hub's IDs, computed by the member, in the order that the hub
                sent.
            member_tags: tags of the member's IDs, computed by the hub, in the member's order.

        Raises RemoteProtocolError: the member did not return one different tag for each ID.
        """
        sent_order = self._blindings[member].sent_rows.tolist()
        row_by_tag = dict(zip(returned_tags, sent_order, strict=False))  # lengths: see below
        if not len(row_by_tag) == len(returned_tags) == self._id_count:
            raise RemoteProtocolError(
                f"{member} returned {len(row_by_tag)} different tags for the {self._id_count} "
                f"blinded IDs of {self._me}"
            )
        hub_rows = np.array([row_by_tag.get(tag, -1) for tag in member_tags], np.int64)
        positions = np.full(self._id_count, -1, np.int64)
        common_positions = np.flatnonzero(hub_rows >= 0)
        positions[hub_rows[common_positions]] = common_positions
        return positions


class EcdhMember(_EcdhRole):
    """The role of a member (a passive), which exchanges messages with the hub alone."""

    def __init__(self, me: str, hub: str, ids: Sequence[bytes], backend: EcdhIntersection) -> None:
        """Make the role of the member `me` with its encoded IDs. `backend`: the intersection, with
        this party's threads, progress and secret.
        """
        super().__init__(me, [hub], ids, backend)
        self._hub = hub

    def _run_role(self) -> RoleCoroutine:
        """Run the role: send this party's blinded IDs, blind the hub's IDs once more and return
        their tags (shuffled if only the size is revealed), and parse what the hub reveals (steps 1
        to 3 of the module's docstring).
        """
        received = yield self._blind_ids([self._hub])
        tags = self._compute_tags(received, self._hub)
        if self._output is Output.SIZE:
            # So that the hub can count equal tags, but not tell whose they are.
            tags = tags[random_permutation(len(tags))]
        received = yield self._endpoint.make_round(
            Kind.TAGS, {self._hub: tags.tobytes()}, awaited=[self._hub]
        )
        sent_rows = self._blindings[self._hub].sent_rows
        return parse_revealed_rows(self._endpoint, received, self._hub, sent_rows, len(tags))


def digest_ids(ids: Sequence[bytes], *, session: bytes) -> bytes:
    """Return a 32-byte digest of each ID, joined: BLAKE2b keyed with the 32 bytes `session`.

    The digests are as secret as the IDs: whoever sees one can test guessed IDs.
    """
    hasher = hashlib.blake2b(key=session, digest_size=POINT_BYTES, person=b"apfed psi ecdh")
    return digest_each(ids, hasher).tobytes()


def check_points(sender: str, points: bytes) -> None:
    """Raise RemoteProtocolError, which names `sender`, unless the bytes are distinct points of
    Curve25519, 32 bytes each: u-coordinates below the prime 2^255 - 19, none of them of low order
    (1, 2, 4 or 8), since multiples of such a point would reveal bits of the scalar.
    """
    if len(points) % POINT_BYTES:
        raise RemoteProtocolError(
            f"{sender} sent {len(points)} bytes of points, not a multiple of {POINT_BYTES}"
        )
    point_rows = np.frombuffer(points, np.uint8).reshape(-1, POINT_BYTES)
    highest_byte = point_rows[:, -1]
    lowest_byte = point_rows[:, 0]
    # From 2^255 - 19 on a number below 2^255 has the bytes ED to FF, FF, ..., FF, 7F.
    has_large_lower_bytes = (point_rows[:, 1:-1] == 0xFF).all(axis=1) & (lowest_byte >= 0xED)
    is_not_reduced = (highest_byte > 0x7F) | ((highest_byte == 0x7F) & has_large_lower_bytes)
    if bool(is_not_reduced.any()):
        raise RemoteProtocolError(f"{sender} sent a point that is not a number below 2^255 - 19")
    distinct_points = set(split_points(points))
    if len(distinct_points) != len(point_rows):
        raise RemoteProtocolError(
            f"{sender} sent {len(point_rows) - len(distinct_points)} blinded ID(s) twice; "
            "its set has duplicates, or it does not follow the protocol"
        )
    if not _LOW_ORDER.isdisjoint(distinct_points):
        raise RemoteProtocolError(f"{sender} sent a point of low order, which would open a secret")


def split_points(points: bytes, item_bytes: int = POINT_BYTES) -> list[bytes]:
    """Return the points, or items of another `item_bytes`, that these bytes consist of."""
    return cast(list[bytes], np.frombuffer(points, f"V{item_bytes}").tolist())


def map_to_curve(digests: bytes) -> list[bytes]:
    """Return the points on the curve y^2 = u^3 + A u^2 + u (Curve25519), 32 bytes each, to which
    Elligator 2 maps 32-byte digests, read as numbers r below 2^255 (RFC 9380, section 6.7.1).

    The candidates for the u-coordinate are -A / (1 + 2 r^2) and -A minus that; exactly one of them
    lies on the curve.

    Six numbers give a point of low order, which libsodium refuses to multiply: 0 and the prime
    give 0, and the four roots of r^2 = -(A + 1) / 2 and of r^2 = -1 / (2 A + 2) give 1.
    """
    # One inversion for all denominators 1 + 2 r^2 (Montgomery's trick): invert their product, then
    # go back. `inverse` is the inverse of the product of all denominators up to the current one.
    products_and_denominators = []
    product = mpz(1)
    for digest in split_points(digests):
        r = mpz(int.from_bytes(digest, "little")) & _LOW_255_BITS
        denominator = (2 * r * r + 1) % _PRIME  # never 0, since -1/2 is no square
        products_and_denominators.append((product, denominator))
        product = product * denominator % _PRIME
    inverse = invert(product, _PRIME)
    points = []
    for product_before, denominator in reversed(products_and_denominators):
        u = -_CURVE_A * (inverse * product_before % _PRIME) % _PRIME
        inverse = inverse * denominator % _PRIME
        # On the curve exactly if u^3 + A u^2 + u is a square; else the second candidate is.
        if jacobi(u * (u * (u + _CURVE_A) + 1), _PRIME) != 1:
            u = (-_CURVE_A - u) % _PRIME
        points.append(int(u).to_bytes(POINT_BYTES, "little"))
    points.reverse()
    return points


def blind_digests(scalar: bytes, digests: bytes) -> bytes:
    """Return digests, mapped to the curve and multiplied by the scalar, 32 bytes each."""
    return b"".join([crypto_scalarmult(scalar, point) for point in map_to_curve(digests)])


def multiply_points(scalar: bytes, points: bytes) -> bytes:
    """Return each point multiplied by the scalar, 32 bytes each."""
    return b"".join([crypto_scalarmult(scalar, point) for point in split_points(points)])


def map_in_threads(
    transform: Callable[[bytes], bytes],
    blocks: bytes,
    *,
    threads: int | None = None,
    report_done: Callable[[int], None] | None = None,
) -> bytes:
    """Apply `transform` to chunks of `blocks` in several threads; return the results joined in
    order.

    Args:
        transform: maps 32-byte blocks to as many 32-byte blocks.
        blocks: the input, blocks of 32 bytes each, joined.
        threads: number of threads at most; None: one for each processor.
        report_done: called with the number of blocks done; None: not reported.
    """
    block_count = len(blocks) // POINT_BYTES
    chunk_count = max(1, math.ceil(block_count / _POINTS_PER_CHUNK))
    chunk_bounds = [POINT_BYTES * (block_count * k // chunk_count) for k in range(chunk_count + 1)]
    chunks = (blocks[chunk_bounds[k] : chunk_bounds[k + 1]] for k in range(chunk_count))
    needed_threads = min(chunk_count, threads or os.cpu_count() or 1)
    if needed_threads == 1:
        return b"".join(_report_results(map(transform, chunks), report_done))
    with ThreadPoolExecutor(needed_threads) as pool:
        try:
            return b"".join(_report_results(pool.map(transform, chunks), report_done))
        finally:
            # After an exception, cancel the chunks that no thread has begun.
            pool.shutdown(wait=False, cancel_futures=True)


def _report_results(
    results: Iterable[bytes], report_done: Callable[[int], None] | None
) -> Iterator[bytes]:
    """Yield the results, each some joined 32-byte blocks; after each result call `report_done`, if
    it is given, with the number of blocks so far.
    """
    blocks_done = 0
    for result in results:
        yield result
        blocks_done += len(result) // POINT_BYTES
        if report_done is not None:
            report_done(blocks_done)
