"""Private set intersection by Diffie-Hellman: equal IDs, blinded by both, stay equal.

Run by: the active as the hub, each passive as a member, over authenticated and encrypted
links. Protects from: semi-honest parties that follow the protocol and look at what they
got. A party that lies about its set learns what a set with these IDs would learn.

With a_i the hub's fresh scalar for member i, b_i the member's, and P(x) an ID on the curve
(see `protocols.psi.curve`), each list in a fresh random order of its sender:

1. hub -> i: a_i P(x) for its IDs; i -> hub: b_i P(y) for its IDs (at the same time).
2. i -> hub: b_i a_i P(x) in the order received, as 16-byte tags. The hub computes
   a_i b_i P(y); equal tags are the IDs shared with i.
3. When all members answered, hub -> i: where in the list of i the IDs are that all share,
   in one random order for all; or the refusal, if these are too few.

Two members cannot compare what the hub sent them, because a_i differs. Tags of two
different IDs agree with probability below 2^-81 for sets of 10 million.
Source: C. Meadows, IEEE S&P 1986; Huberman, Franklin and Hogg, EC 1999.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from protocols.conversation import Conversation, Outgoing
from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.psi import curve
from protocols.psi.framing import Framing
from protocols.psi.interface import (
    IntersectionAgreement,
    IntersectionTooSmallError,
    check_ids,
    check_parties,
    opened_rows,
)
from protocols.randomness import fresh_key, random_permutation

__all__ = ["EcdhIntersection"]

Rows = NDArray[np.int64]

_VERSION = 1
_TAG_BYTES = 16
_POSITION_BYTES = 4


class _Kind(IntEnum):
    BLINDED = 1
    TAGS = 2
    ROWS = 3
    REFUSAL = 4


_ITEM_BYTES: Mapping[int, int] = {
    _Kind.BLINDED: curve.POINT_BYTES,
    _Kind.TAGS: _TAG_BYTES,
    _Kind.ROWS: _POSITION_BYTES,
    _Kind.REFUSAL: 0,
}


class EcdhIntersection:
    """The backend `ecdh`. Few bytes, no helper party; see `leaks`.

    Args:
        agreement: equal at all parties.
        processes: how many interpreters this party blinds with; None means one for each
            processor when the set has at least `curve.PARALLEL_THRESHOLD` IDs, else none
            but this one.
    """

    name: ClassVar[str] = "ecdh"
    needs_dealer: ClassVar[bool] = False
    leaks: ClassVar[tuple[str, ...]] = (
        "The hub learns its pairwise intersection with every member, even when it is refused.",
        "A member learns which of its own IDs all parties share, or that these are too few.",
    )

    def __init__(self, agreement: IntersectionAgreement, *, processes: int | None = None) -> None:
        if processes is not None and processes < 1:
            raise LocalProtocolError(f"processes is at least 1, got {processes}")
        self.agreement, self.processes = agreement, processes

    def hub(self, me: str, members: Sequence[str], ids: Sequence[bytes]) -> "_Hub":
        """The active's side. Raises LocalProtocolError on duplicate or empty IDs."""
        check_parties(me, members)
        return _Hub(_Side(me, ids, self), members)

    def member(self, me: str, hub: str, ids: Sequence[bytes]) -> "_Member":
        """A passive's side. Raises LocalProtocolError on duplicate or empty IDs."""
        check_parties(hub, [me])
        return _Member(_Side(me, ids, self), hub)

    def dealer(self, hub: str, members: Sequence[str]) -> Conversation:
        """Raise LocalProtocolError: Diffie-Hellman needs no dealer."""
        raise LocalProtocolError(
            f"an ecdh intersection has no dealer, only hub {hub} and members {', '.join(members)}"
        )


class _Side:
    """What both roles share: the own set, the message format, the result."""

    def __init__(self, me: str, ids: Sequence[bytes], backend: EcdhIntersection) -> None:
        self.agreement, self.processes = backend.agreement, backend.processes
        check_ids(me, ids, self.agreement.maximum_ids)
        self.me, self.size = me, len(ids)
        self._framing = Framing(self.agreement, _VERSION, _ITEM_BYTES, self.agreement.maximum_ids)
        self._digests = curve.digest_ids(ids, session=self.agreement.digest)
        self.started = False
        self.result: Rows | IntersectionTooSmallError | None = None

    def begin(self) -> None:
        if self.started:
            raise LocalProtocolError(f"{self.me}: an intersection is started once")
        self.started = True

    def blind(self, scalar: bytes, order: Rows) -> bytes:
        """Return the own IDs, blinded, with the ID of row `order[k]` at place k."""
        rows = np.frombuffer(self._digests, np.uint8).reshape(-1, curve.POINT_BYTES)
        return curve.blind_digests(scalar, rows[order].tobytes(), processes=self.processes)

    def multiply(self, scalar: bytes, points: bytes) -> bytes:
        return curve.multiply_points(scalar, points, processes=self.processes)

    def pack(self, kind: _Kind, items: bytes = b"") -> bytes:
        return self._framing.pack(kind, items)

    def unpack(self, sender: str, message: bytes) -> tuple[_Kind, bytes]:
        if not self.started:
            raise LocalProtocolError(f"{self.me}: call start before receive")
        kind, items = self._framing.unpack(sender, message)
        return _Kind(kind), items

    @property
    def rows(self) -> Rows:
        return opened_rows(self.me, self.result)


def _unexpected(sender: str, kind: _Kind) -> RemoteProtocolError:
    return RemoteProtocolError(
        f"{sender} sent {kind.name.lower()} when the protocol does not expect it; "
        "a message was repeated, reordered or misdirected"
    )


def _tags(points: bytes) -> list[bytes]:
    return [point[:_TAG_BYTES] for point in curve.split_points(points)]


@dataclass
class _Pair:
    """What the hub holds of its run with one member."""

    scalar: bytes = field(repr=False)
    order: Rows
    theirs: list[bytes] | None = None
    place_of_row: dict[int, int] | None = None


class _Hub:
    def __init__(self, side: _Side, members: Sequence[str]) -> None:
        self._side = side
        self._pairs = {
            member: _Pair(fresh_key(), random_permutation(side.size)) for member in members
        }

    @property
    def finished(self) -> bool:
        return self._side.result is not None

    @property
    def rows(self) -> Rows:
        return self._side.rows

    def start(self) -> Sequence[Outgoing]:
        side = self._side
        side.begin()
        return [
            Outgoing(member, side.pack(_Kind.BLINDED, side.blind(pair.scalar, pair.order)))
            for member, pair in self._pairs.items()
        ]

    def receive(self, sender: str, body: bytes) -> Sequence[Outgoing]:
        if sender not in self._pairs:
            raise RemoteProtocolError(f"{sender} takes no part in this intersection")
        kind, items = self._side.unpack(sender, body)
        pair = self._pairs[sender]
        if kind is _Kind.BLINDED and pair.theirs is None:
            curve.check_points(sender, items)
            pair.theirs = _tags(self._side.multiply(pair.scalar, items))
        elif kind is _Kind.TAGS and pair.theirs is not None and pair.place_of_row is None:
            pair.place_of_row = self._match(sender, pair, items)
        else:
            raise _unexpected(sender, kind)
        if any(pair.place_of_row is None for pair in self._pairs.values()):
            return []
        return self._open()

    def _match(self, sender: str, pair: _Pair, items: bytes) -> dict[int, int]:
        """Return, for each own row shared with `sender`, its place in the list of `sender`."""
        tags = [items[k : k + _TAG_BYTES] for k in range(0, len(items), _TAG_BYTES)]
        row_of_tag = dict(zip(tags, pair.order.tolist(), strict=False))
        if not len(row_of_tag) == len(tags) == self._side.size:
            raise RemoteProtocolError(
                f"{sender} returned {len(row_of_tag)} different tags for the {self._side.size} "
                f"blinded IDs of {self._side.me}"
            )
        shared = enumerate(pair.theirs or ())
        return {row_of_tag[tag]: place for place, tag in shared if tag in row_of_tag}

    def _open(self) -> Sequence[Outgoing]:
        side, places = self._side, {m: p.place_of_row or {} for m, p in self._pairs.items()}
        common = np.array(sorted(set.intersection(*map(set, places.values()))), np.int64)
        minimum = side.agreement.minimum_rows
        if len(common) < minimum:
            found = ", ".join(f"{len(place)} with {member}" for member, place in places.items())
            side.result = IntersectionTooSmallError.of(
                side.me, minimum, f" ({len(common)} in common to all; {found})"
            )
            return [Outgoing(member, side.pack(_Kind.REFUSAL)) for member in places]
        side.result = common[random_permutation(len(common))]
        return [
            Outgoing(member, side.pack(_Kind.ROWS, _places(place, side.result)))
            for member, place in places.items()
        ]


def _places(place_of_row: dict[int, int], rows: Rows) -> bytes:
    return np.array([place_of_row[row] for row in rows.tolist()], ">u4").tobytes()


class _Member:
    def __init__(self, side: _Side, hub: str) -> None:
        self._side, self._hub = side, hub
        self._scalar, self._order = fresh_key(), random_permutation(side.size)
        self._hub_size: int | None = None

    @property
    def finished(self) -> bool:
        return self._side.result is not None

    @property
    def rows(self) -> Rows:
        return self._side.rows

    def start(self) -> Sequence[Outgoing]:
        side = self._side
        side.begin()
        return [
            Outgoing(self._hub, side.pack(_Kind.BLINDED, side.blind(self._scalar, self._order)))
        ]

    def receive(self, sender: str, body: bytes) -> Sequence[Outgoing]:
        if sender != self._hub:
            raise RemoteProtocolError(f"{sender} is not the hub of this intersection")
        side = self._side
        kind, items = side.unpack(sender, body)
        if kind is _Kind.BLINDED and self._hub_size is None:
            curve.check_points(sender, items)
            tags = b"".join(_tags(side.multiply(self._scalar, items)))
            self._hub_size = len(items) // curve.POINT_BYTES
            return [Outgoing(self._hub, side.pack(_Kind.TAGS, tags))]
        if self._hub_size is None or self.finished or kind in (_Kind.BLINDED, _Kind.TAGS):
            raise _unexpected(sender, kind)
        if kind is _Kind.REFUSAL:
            minimum = side.agreement.minimum_rows
            side.result = IntersectionTooSmallError.of(side.me, minimum)
        else:
            side.result = self._order[self._check_places(sender, items)]
        return []

    def _check_places(self, sender: str, items: bytes) -> Rows:
        places = np.frombuffer(items, ">u4").astype(np.int64)
        minimum, size = self._side.agreement.minimum_rows, self._side.size
        if len(places) < minimum:
            raise RemoteProtocolError(
                f"{sender} opened {len(places)} rows, the parties agreed on at least {minimum}"
            )
        if len(places) and int(places.max()) >= size:
            raise RemoteProtocolError(
                f"{sender} names place {int(places.max())} of a list of {size} IDs"
            )
        if len(np.unique(places)) != len(places) or len(places) > (self._hub_size or 0):
            raise RemoteProtocolError(
                f"{sender} opened {len(places)} rows, of which {len(np.unique(places))} differ, "
                f"with a set of {self._hub_size} IDs"
            )
        return places
