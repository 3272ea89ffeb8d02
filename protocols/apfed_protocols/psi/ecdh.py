"""Private set intersection by Diffie-Hellman: equal IDs, blinded by both, stay equal.

Run by: the active as the hub, each passive as a member, over authenticated and encrypted
links. Protects from: semi-honest parties that follow the protocol and look at what they
got. A party that lies about its set learns what a set with these IDs would learn.

With a_i the hub's fresh scalar for member i, b_i the member's, and P(x) an ID on the curve
(see `apfed_protocols.psi.ladder`), each list in a fresh random order of its sender:

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
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from apfed_protocols.conversation import Conversation, Outgoing
from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.ids import check_ids
from apfed_protocols.psi.ecdh_side import LAST, TAG_BYTES, Kind, Side
from apfed_protocols.psi.framing import Framing
from apfed_protocols.psi.interface import (
    Admit,
    Guesses,
    IntersectionAgreement,
    IntersectionTooSmallError,
    Output,
    Progress,
    check_parties,
)
from apfed_protocols.psi.ladder import POINT_BYTES, split_points
from apfed_protocols.psi.pairwise import POSITION_BYTES, check_places, common_rows
from apfed_protocols.psi.result import Opened, ResultHolder, check_choices
from apfed_protocols.randomness import random_permutation

__all__ = ["EcdhHub", "EcdhIntersection", "EcdhMember"]

Rows = NDArray[np.int64]
_NO_ROWS: Rows = np.empty(0, np.int64)


class EcdhIntersection:
    """The backend `ecdh`. Few bytes, no helper party; see `leaks`.

    Args:
        agreement: equal at all parties.
        threads: how many this party blinds with; None means one for each processor.
        pool: of processes that blind in place of threads, e.g. a `ProcessPoolExecutor`; they get
            points and scalars. It stays open.
        progress: told of every few thousand IDs.
        admit: asked before each role is made.
        secret: 32 bytes that scalars and orders follow from, so that a broken-off intersection can
            be repeated message by message. A party keeps it to itself and uses it with one set of
            IDs only. None: they are fresh.
    """

    name: ClassVar[str] = "ecdh"
    needs_dealer: ClassVar[bool] = False
    pairwise: ClassVar[bool] = True
    outputs: ClassVar[frozenset[Output]] = frozenset(LAST)
    leaks: ClassVar[tuple[str, ...]] = (
        "The hub learns its pairwise intersection with every member, even when it is refused.",
        "A member learns which of its own IDs all parties share, or that these are too few.",
    )

    @staticmethod
    def most_guesses(maximum_ids: int) -> Guesses:
        """Each list has as many points as were announced, each of one ID."""
        return Guesses(hub=maximum_ids, member=maximum_ids)

    def __init__(
        self,
        agreement: IntersectionAgreement,
        *,
        threads: int | None = None,
        pool: Executor | None = None,
        progress: Callable[[Progress], None] | None = None,
        admit: Admit | None = None,
        secret: bytes | None = None,
    ) -> None:
        check_choices(self.name, self.outputs, agreement, threads)
        if agreement.sizes:
            raise LocalProtocolError(
                "ecdh shows the true sizes of sets and deals nothing; circuit can use agreed sizes"
            )
        self.agreement, self._threads, self._progress = agreement, threads, progress
        self._admit, self._secret, self._pool = admit, secret, pool

    @staticmethod
    def longest_message(ids: int) -> int:
        """Bytes of the longest message of a party with so many IDs; its first one has as many."""
        return Framing.size(POINT_BYTES, ids)

    @property
    def longest(self) -> int:
        """Bytes of the longest message that a role takes."""
        return self.longest_message(self.agreement.maximum_ids)

    def hub(self, me: str, members: Sequence[str], ids: Sequence[bytes]) -> "EcdhHub":
        """The active's side. Raises LocalProtocolError on duplicate or empty IDs."""
        check_parties(me, members)
        if self.agreement.output is Output.SIZE and len(members) > 1:
            raise LocalProtocolError(
                f"ecdh counts the IDs common to two parties, here are {1 + len(members)}; "
                "circuit counts those of more"
            )
        return EcdhHub(self._side(me, members, ids), members)

    def member(self, me: str, hub: str, ids: Sequence[bytes]) -> "EcdhMember":
        """A passive's side. Raises LocalProtocolError on duplicate or empty IDs."""
        check_parties(hub, [me])
        return EcdhMember(self._side(me, [hub], ids), hub)

    def _side(self, me: str, peers: Sequence[str], ids: Sequence[bytes]) -> Side:
        check_ids(me, ids, self.agreement.maximum_ids)
        if self._admit is not None:
            self._admit(me, peers)
        return Side(
            me, ids, self.agreement,
            threads=self._threads, pool=self._pool, progress=self._progress, secret=self._secret,
        )  # fmt: skip

    def dealer(self, hub: str, members: Sequence[str]) -> Conversation:
        """Raise LocalProtocolError: Diffie-Hellman needs no dealer."""
        raise LocalProtocolError(
            f"an ecdh intersection has no dealer, only hub {hub} and members {', '.join(members)}"
        )


def _unexpected(sender: str, kind: Kind) -> RemoteProtocolError:
    return RemoteProtocolError(
        f"{sender} sent {kind.name.lower()} when the protocol does not expect it; "
        "a message was repeated, reordered or misdirected"
    )


def _tags(points: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(points, np.uint8).reshape(-1, POINT_BYTES)[:, :TAG_BYTES]


@dataclass
class _Pair:
    """What the hub holds of its run with one member.

    Attributes:
        places: where the member has each of the hub's rows, -1 for nowhere; shape (n,).
    """

    scalar: bytes = field(repr=False)
    order: Rows
    theirs: list[bytes] | None = None
    places: Rows | None = None


class EcdhHub(ResultHolder):
    """The hub's role; see `apfed_protocols.psi.interface.Aligner`."""

    def __init__(self, side: Side, members: Sequence[str]) -> None:
        super().__init__(side.me, side.agreement.output)
        self._side = side
        self._pairs = {member: _Pair(*side.draw(member)) for member in members}

    def start(self) -> Sequence[Outgoing]:
        side = self._side
        side.begin()
        return [
            Outgoing(member, side.pack(Kind.BLINDED, side.blind(pair.scalar, pair.order)))
            for member, pair in self._pairs.items()
        ]

    def receive(self, sender: str, body: bytes) -> Sequence[Outgoing]:
        if sender not in self._pairs:
            raise RemoteProtocolError(f"{sender} takes no part in this intersection")
        kind, items = self._side.unpack(sender, body)
        pair = self._pairs[sender]
        if kind is Kind.BLINDED and pair.theirs is None:
            tags = _tags(self._side.multiply(sender, pair.scalar, items))
            pair.theirs = split_points(tags.tobytes(), TAG_BYTES)
        elif kind is Kind.TAGS and pair.theirs is not None and pair.places is None:
            pair.places = self._match(sender, pair, items)
        else:
            raise _unexpected(sender, kind)
        matched = {name: one.places for name, one in self._pairs.items() if one.places is not None}
        return self._open(matched) if len(matched) == len(self._pairs) else []

    @property
    def overlaps(self) -> dict[str, Rows]:
        """Own rows shared with each member, ascending: known to the hub whatever is opened."""
        return {
            member: np.flatnonzero(pair.places >= 0) if pair.places is not None else _NO_ROWS
            for member, pair in self._pairs.items()
        }

    @property
    def places(self) -> dict[str, Rows]:
        """Where each of `rows` is in the list of each member; known to the hub alone."""
        rows = self.rows
        return {
            member: pair.places[rows] if pair.places is not None else _NO_ROWS
            for member, pair in self._pairs.items()
        }

    def _match(self, sender: str, pair: _Pair, items: bytes) -> Rows:
        """Return, for each own row, its place in the list of `sender`; -1 where it has none."""
        tags = split_points(items, TAG_BYTES)
        row_of_tag = dict(zip(tags, pair.order.tolist(), strict=False))
        if not len(row_of_tag) == len(tags) == self._side.size:
            raise RemoteProtocolError(
                f"{sender} returned {len(row_of_tag)} different tags for the {self._side.size} "
                f"blinded IDs of {self._side.me}"
            )
        places = np.full(self._side.size, -1, np.int64)
        shared = [
            (row_of_tag[tag], place)
            for place, tag in enumerate(pair.theirs or ())
            if tag in row_of_tag
        ]
        if shared:
            rows, found = np.array(shared, np.int64).T
            places[rows] = found
        return places

    def _open(self, places: Mapping[str, Rows]) -> Sequence[Outgoing]:
        side = self._side
        rows = common_rows(side.me, places, side.agreement.minimum_rows)
        if isinstance(rows, IntersectionTooSmallError):
            self._outcome = rows
            return [Outgoing(member, side.pack(Kind.REFUSAL)) for member in places]
        if self._output is Output.SIZE:
            # here "rows" are places in the member's own order of the tags, which tell nothing
            self._outcome = Opened(size=len(rows))
        else:
            self._outcome = Opened(rows=rows)
        return [
            Outgoing(member, side.pack(LAST[self._output], self._last_items(place[rows])))
            for member, place in places.items()
        ]

    def _last_items(self, opened: Rows) -> bytes:
        if self._output is Output.ROWS:
            return opened.astype(">u4").tobytes()
        return np.array(len(opened), ">u4").tobytes() if self._output is Output.SIZE else b""


class EcdhMember(ResultHolder):
    """A member's role; see `apfed_protocols.psi.interface.Aligner`.

    Attributes:
        order: the own row at each place of the list that the hub gets.
    """

    def __init__(self, side: Side, hub: str) -> None:
        super().__init__(side.me, side.agreement.output)
        self._side, self._hub = side, hub
        self._scalar, self.order = side.draw(hub)
        self._hub_size: int | None = None

    def start(self) -> Sequence[Outgoing]:
        side = self._side
        side.begin()
        return [Outgoing(self._hub, side.pack(Kind.BLINDED, side.blind(self._scalar, self.order)))]

    def receive(self, sender: str, body: bytes) -> Sequence[Outgoing]:
        if sender != self._hub:
            raise RemoteProtocolError(f"{sender} is not the hub of this intersection")
        side = self._side
        kind, items = side.unpack(sender, body)
        if kind is Kind.BLINDED and self._hub_size is None:
            tags = _tags(side.multiply(sender, self._scalar, items))
            self._hub_size = len(tags)
            if self._output is Output.SIZE:
                tags = tags[random_permutation(len(tags))]
            return [Outgoing(self._hub, side.pack(Kind.TAGS, tags.tobytes()))]
        if self._hub_size is None or self.finished:
            raise _unexpected(sender, kind)
        if kind is Kind.REFUSAL and side.agreement.minimum_rows:
            self._outcome = IntersectionTooSmallError.of(side.me, side.agreement.minimum_rows)
        elif kind is not LAST[self._output]:
            raise _unexpected(sender, kind)
        else:
            self._outcome = self._open(sender, items)
        return []

    def _open(self, sender: str, items: bytes) -> Opened:
        if self._output is Output.ROWS:
            places = check_places(
                sender, items, minimum=self._side.agreement.minimum_rows,
                own_size=self._side.size, hub_size=self._hub_size or 0,
            )  # fmt: skip
            return Opened(rows=self.order[places])
        if self._output is Output.HUB_ROWS:
            return Opened()
        size, most = int.from_bytes(items, "big"), min(self._side.size, self._hub_size or 0)
        minimum = self._side.agreement.minimum_rows
        if len(items) != POSITION_BYTES or not minimum <= size <= most:
            raise RemoteProtocolError(
                f"{sender} announces {size} common IDs, expected {minimum} to {most}"
            )
        return Opened(size=size)
