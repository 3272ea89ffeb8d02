"""Private set intersections: the interface of every backend, and the parts that backends share.

Run by: the active as the hub, every passive as a member, for some backends a dealer without IDs.
Guarantee asked of every backend: an ID outside the intersection stays unknown to every other
party; what a backend reveals beyond the M-way intersection, it lists in `leaks`.

Messages are framed (`Desk`): any bytes either parse to a kind and as many items of that kind's
size as announced, or raise RemoteProtocolError. A role with many rounds is written top to bottom as
a `Script`, which reads and writes at a `Desk`. Where the parties agree on sizes, a set may turn out
smaller.
"""

import hashlib
import itertools
import struct
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import ClassVar, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from apfed_protocols.checks import MAX_ANNOUNCED_BYTES, take_numpy_integers
from apfed_protocols.conversation import Conversation, Outgoing
from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.ids import MAX_IDS, check_ids
from apfed_protocols.randomness import ForkCheck, random_permutation

__all__ = [
    "Admit",
    "Aligner",
    "DealtIntersection",
    "Desk",
    "Guesses",
    "Inbox",
    "IntersectionAgreement",
    "IntersectionResult",
    "IntersectionTooSmallError",
    "Membership",
    "Output",
    "Progress",
    "ResumableIntersection",
    "Script",
    "ScriptedIntersection",
    "SetIntersection",
    "Turn",
    "check_parties",
    "digest_each",
    "message_bytes",
    "open_rows",
    "parse_opened_rows",
    "three_different",
]

_POSITIONS = 2**32
Admit = Callable[[str, Sequence[str]], None]
"""Takes a party's own name and those of the peers with IDs; raises if it is not to take part."""

_HEADER = struct.Struct(">BB16sI")
_DIGEST_BYTES = 16

_MESSAGES_AHEAD = 4

Inbox = Mapping[str, bytes]
_Kind = TypeVar("_Kind", bound=IntEnum)

PLACES = 3
_IDS_OF_A_PIECE = 2**12

Rows = NDArray[np.int64]
POSITION_BYTES = 4


class IntersectionTooSmallError(LocalProtocolError):
    """The parties share fewer IDs than they agreed on as a minimum; nothing was opened."""

    @classmethod
    def for_party(cls, me: str, minimum_rows: int, detail: str = "") -> "IntersectionTooSmallError":
        """Return the error of one party, with the agreed minimum; `detail` continues its first
        clause.
        """
        return cls(
            f"{me}: the parties share fewer IDs than the agreed minimum of {minimum_rows}{detail}; "
            "nothing was opened. Check that all parties use the same ID column and the same "
            "normalisation"
        )


class Output(StrEnum):
    """The output: what opens at the end, and to whom.

    ROWS: the common rows, to all. HUB_ROWS: to the hub alone. SIZE: only how many rows are
    common, to all. SHARED: nothing; all hold shares of which hub rows are common.
    """

    ROWS = "rows"
    HUB_ROWS = "hub_rows"
    SIZE = "size"
    SHARED = "shared"


@dataclass(frozen=True)
class Progress:
    """The progress of one party with one piece of its work, in IDs or bins."""

    party: str
    work: str
    done: int
    total: int


@dataclass(frozen=True, kw_only=True)
class Guesses:
    """The number of IDs that a party that deviates tries out in one intersection, at most.

    Attributes:
        hub: at each member, of which it may try out others at another; member: at the hub.
    """

    hub: int
    member: int


@dataclass(frozen=True, kw_only=True)
class Membership:
    """A party's shares of which of the hub's IDs all parties have, for further protocols.

    The exclusive or of all parties' `shares` is True where the hub's ID in a place is common.

    Attributes:
        shares: bool, shape (places,); uniformly random to whoever lacks one party's.
        row_of_place: at the hub the row in each place, -1 for an empty one; else None.
    """

    shares: NDArray[np.bool_] = field(repr=False)
    row_of_place: NDArray[np.int64] | None = field(default=None, repr=False)


@dataclass(frozen=True, kw_only=True)
class IntersectionAgreement:
    """The terms that all parties fix before an intersection; public.

    Attributes:
        session: names the intersection; non-empty, used once.
        minimum_rows: below this size no party's rows are opened; 0 or more.
        maximum_ids: the largest set that a party accepts from a peer, 1 to 2^32 - 1. It
            limits what a party can probe by filling its set with guessed IDs; one that deviates
            tries out as many as the backend's `max_guesses` says.
        encoding: how records became ID bytes (normalisation), in any canonical text;
            parties that encode differently would find no common ID.
        dealer: the party that hands out randomness, for backends that need one. It holds no
            IDs and must not work together with any other party.
        output: what opens.
        sizes: how many IDs the hub and each member announce, by name; a party may have fewer,
            which stays hidden then. Empty: all announce their true numbers.
    """

    session: str
    minimum_rows: int = 2
    maximum_ids: int = MAX_IDS
    encoding: str = ""
    dealer: str = ""
    output: Output = Output.ROWS
    sizes: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise LocalProtocolError unless session, limits and sizes are in their ranges."""
        take_numpy_integers(self)
        if not self.session:
            raise LocalProtocolError("an intersection needs a session name")
        if not 0 < self.maximum_ids < _POSITIONS:
            raise LocalProtocolError(f"maximum_ids lies in 1..2^32 - 1, got {self.maximum_ids}")
        if any(not 0 <= size <= self.maximum_ids for size in self.sizes.values()):
            raise LocalProtocolError(
                f"sizes lie in 0..maximum_ids ({self.maximum_ids}), got {dict(self.sizes)}"
            )
        if not 0 <= self.minimum_rows <= self.maximum_ids:
            raise LocalProtocolError(
                f"minimum_rows lies in 0..maximum_ids ({self.maximum_ids}), got {self.minimum_rows}"
            )

    @property
    def digest(self) -> bytes:
        """Return SHA-256 over all fields, each preceded by its length."""
        numbers = (self.minimum_rows.to_bytes(4, "big"), self.maximum_ids.to_bytes(4, "big"))
        # the empty text stands where a field was, so that the digests of sessions stay
        texts = [self.session, self.encoding, self.dealer, self.output.value, ""]
        texts += [f"{size} {party}" for party, size in sorted(self.sizes.items())]
        parts = (*numbers, *(text.encode() for text in texts))
        framed = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
        return hashlib.sha256(b"secure-apfed intersection v3" + framed).digest()

    @property
    def largest_size(self) -> int:
        """Return the largest agreed size or, without agreed sizes, the largest that is accepted."""
        return max(self.sizes.values(), default=self.maximum_ids)

    def size_of(self, party: str) -> int:
        """Return how many IDs the party announces; LocalProtocolError if that is not agreed."""
        if party not in self.sizes:
            raise LocalProtocolError(
                f"no size is agreed for {party}, only for {', '.join(self.sizes) or 'nobody'}"
            )
        return self.sizes[party]

    def compute_announced_size(self, me: str, true_size: int) -> int:
        """Return how many IDs this party announces if it has `true_size` of them.

        Raises LocalProtocolError: it has more than it agreed to announce.
        """
        agreed = self.size_of(me) if self.sizes else true_size
        if true_size > agreed:
            raise LocalProtocolError(
                f"{me} has {true_size} IDs, the parties agreed that it announces {agreed}"
            )
        return agreed

    def check_announced_sizes(
        self, sender: str, sizes: Sequence[int], parties: Sequence[str]
    ) -> None:
        """Refuse sizes of these parties other than the agreed ones, or above the limit."""
        for size in sizes:
            if size > self.maximum_ids:
                raise RemoteProtocolError(
                    f"{sender} announces {size} IDs, the parties agreed on at most "
                    f"{self.maximum_ids}"
                )
        agreed = sorted(map(self.size_of, parties)) if self.sizes else sorted(sizes)
        if sorted(sizes) != agreed:
            raise RemoteProtocolError(
                f"{sender} announces {', '.join(map(str, sizes))} IDs, the parties agreed on "
                f"{', '.join(map(str, agreed))}"
            )


def check_parties(hub: str, members: Sequence[str], *others: str) -> None:
    """Refuse an intersection without members or with one party in two roles.

    `hub`: the hub's name.
    """
    parties = (hub, *members, *others)
    if not members or not all(parties) or len(set(parties)) != len(parties):
        raise LocalProtocolError(
            "an intersection has one hub and one or more different members, got hub "
            f"{hub!r}, members {', '.join(map(repr, members)) or 'none'}"
            + "".join(f", dealer {other!r}" for other in others)
        )


@dataclass(frozen=True, kw_only=True)
class IntersectionResult:
    """The outcome that one party learned; None where it did not.

    Attributes:
        places: at a hub that compares lists, where each of `rows` is in the list of each member.
        order: at a member whose list was compared, its own row at each place of that list.
    """

    rows: NDArray[np.int64] | None = field(default=None, repr=False)
    size: int | None = None
    membership: Membership | None = None
    places: Mapping[str, NDArray[np.int64]] | None = field(default=None, repr=False)
    order: NDArray[np.int64] | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Turn:
    """A turn: messages to send, and the parties that must each answer with one message."""

    outgoing: Sequence[Outgoing]
    awaited: Collection[str]


Script = Generator[Turn, Mapping[str, bytes], IntersectionResult | IntersectionTooSmallError]
"""Ends with what its party learned, or with the reason why it is nothing."""


class Aligner:
    """A party's side of an intersection: a `Conversation` that drives a script.

    What the agreed output gives is ready when `finished`. Its property raises
    IntersectionTooSmallError where the intersection is below the agreed minimum, and
    LocalProtocolError before the end or where it does not open to this party. What the script
    raises ends the role.
    """

    def __init__(
        self, me: str, peers: Collection[str], output: Output, script: Script, *, longest: int
    ) -> None:
        """Wrap a script that talks to `peers`; `longest` bounds a message in bytes."""
        self._me = me
        self._output = output
        self._outcome: IntersectionResult | IntersectionTooSmallError | None = None
        self._script = script
        self._longest = longest
        self._fork_check = ForkCheck(f"{me}: this role of an intersection")
        self._inbox: dict[str, deque[bytes]] = {peer: deque() for peer in peers}
        self._awaited: Collection[str] = ()
        self._started = self._failed = False

    def start(self) -> Iterable[Outgoing]:
        """Run the script to its first turn and return its messages; called once."""
        self._fork_check.require_own_process()
        if self._started:
            raise LocalProtocolError(f"{self._me}: an intersection is started once")
        self._started = True
        return self._run_turn(None)

    def receive(self, sender: str, body: bytes) -> Iterable[Outgoing]:
        """Queue one message, and resume the script once all awaited peers have answered. Raises
        RemoteProtocolError: a stranger, a message that is too long, or too many in advance.

        `body`: the bytes of the message.
        """
        self._fork_check.require_own_process()
        if not self._started:
            raise LocalProtocolError(f"{self._me}: call start before receive")
        if sender not in self._inbox:
            raise RemoteProtocolError(f"{sender} takes no part in this intersection")
        if self.is_finished or self._failed or len(self._inbox[sender]) >= _MESSAGES_AHEAD:
            raise RemoteProtocolError(
                f"{sender} sent a message when the protocol does not expect it: the intersection "
                f"is over, or {sender} is too far ahead"
            )
        if len(body) > self._longest:
            raise RemoteProtocolError(
                f"{sender} sent {len(body)} bytes, {self._me} takes at most {self._longest} in "
                "this intersection; compare alignment.maximum_ids of both"
            )
        self._inbox[sender].append(body)
        if not all(self._inbox[peer] for peer in self._awaited):
            return []
        return self._run_turn(self._pop_messages())

    def _pop_messages(self) -> Mapping[str, bytes]:
        """Return the next message of each awaited peer."""
        return {peer: self._inbox[peer].popleft() for peer in self._awaited}

    def _run_turn(self, messages: Mapping[str, bytes] | None) -> Iterable[Outgoing]:
        """Run up to the next turn at once; run further turns lazily, as the caller reads the
        messages.
        """
        return itertools.chain(self._resume_script(messages), self._run_rest())

    def _run_rest(self) -> Iterator[Outgoing]:
        """Yield the messages of further turns while all their awaited messages are here already."""
        while not self.is_finished and all(self._inbox[peer] for peer in self._awaited):
            yield from self._resume_script(self._pop_messages())

    def _resume_script(self, messages: Mapping[str, bytes] | None) -> Sequence[Outgoing]:
        """Run the script to its next turn or its end; return the messages to send. A script that
        raises leaves the role failed.
        """
        self._failed = True  # unless the script gets to its next turn or its end
        try:
            turn = next(self._script) if messages is None else self._script.send(messages)
        except StopIteration as end:
            self._outcome = end.value
            turn = Turn((), ())
        self._failed = False
        self._awaited = turn.awaited
        return turn.outgoing

    @property
    def is_finished(self) -> bool:
        return self._outcome is not None

    @property
    def rows(self) -> NDArray[np.int64]:
        """Return positions in this party's own ID list, in the order that all parties share.

        `rows[k]` of every party belongs to the same ID, for each k of the intersection.
        """
        rows = self._require_result().rows
        if rows is None:
            raise self._make_output_error("rows")
        return rows

    @property
    def size(self) -> int:
        """Return the number of IDs that all parties share."""
        opened = self._require_result()
        if opened.size is not None:
            return opened.size
        if opened.rows is not None:
            return len(opened.rows)
        raise self._make_output_error("size")

    @property
    def membership(self) -> Membership:
        """Return this party's shares of which IDs are common."""
        membership = self._require_result().membership
        if membership is None:
            raise self._make_output_error("shared membership")
        return membership

    @property
    def places(self) -> Mapping[str, NDArray[np.int64]]:
        """Return where each of `rows` is in each member's list; known to a hub that
        compares lists.
        """
        places = self._require_result().places
        if places is None:
            raise self._make_output_error("places in lists of members")
        return places

    @property
    def order(self) -> NDArray[np.int64]:
        """Return a member's own row at each place of the list that the hub compared."""
        order = self._require_result().order
        if order is None:
            raise self._make_output_error("order of its list")
        return order

    def _require_result(self) -> IntersectionResult:
        """Return what this party learned. Raises LocalProtocolError before the end, and
        IntersectionTooSmallError below the agreed minimum.
        """
        if self._outcome is None:
            raise LocalProtocolError(f"{self._me}: the intersection is not finished")
        if isinstance(self._outcome, IntersectionTooSmallError):
            raise self._outcome
        return self._outcome

    def _make_output_error(self, subject: str) -> LocalProtocolError:
        """Return the error for an output that the parties did not agree on; `subject` names it."""
        return LocalProtocolError(
            f"{self._me} has no {subject} of this intersection; the parties agreed on the output "
            f"{self._output.value!r}"
        )


class Desk(Generic[_Kind]):
    """A desk that frames one party's messages and reads those of its peers.

    `version` names the backend and its version, 0 to 255.
    """

    kinds: type[_Kind]
    version: ClassVar[int]
    work: ClassVar[str] = ""
    # Of those kinds whose messages are of items, at most one for each ID.
    item_bytes: ClassVar[Mapping[int, int]] = {}

    def __init__(
        self,
        me: str,
        agreement: IntersectionAgreement,
        progress: Callable[[Progress], None] | None = None,
        *,
        version: int | None = None,
    ) -> None:
        """Make the framing of one party's messages; `version` replaces that of the class.

        `progress`: called while this party works; None: not reported.
        """
        self.me = me
        self.agreement = agreement
        self._progress = progress
        self._version = version or self.version
        self._items = dict.fromkeys(map(int, self.kinds), 1) | dict(self.item_bytes)
        self._max_ids = agreement.maximum_ids if self.item_bytes else 2**32 - 1

    def report_progress(self, done: int, total: int) -> None:
        """Call the progress callback, if there is one."""
        if self._progress is not None:
            self._progress(Progress(self.me, self.work, done, total))

    def make_turn(self, kind: _Kind, bodies: Mapping[str, bytes], awaited: Collection[str]) -> Turn:
        """Frame the bodies by receiver, and wait for a message of each of `awaited`."""
        packed = {party: self._pack_message(kind, body) for party, body in bodies.items()}
        return Turn([Outgoing(party, body) for party, body in packed.items()], awaited)

    def kind_of(self, inbox: Inbox, sender: str) -> _Kind:
        """Return the kind of the message of `sender`."""
        return self.kinds(self._unpack_message(sender, inbox[sender])[0])

    def parse_message(
        self, inbox: Inbox, sender: str, kind: _Kind, length: int | None = None
    ) -> bytes:
        """Return the body of the message of `sender`, of this kind and length."""
        sent_kind, body = self._unpack_message(sender, inbox[sender])
        if sent_kind != kind:
            raise RemoteProtocolError(
                f"{sender} sent {self.kinds(sent_kind).name.lower()} when the protocol expects "
                f"{kind.name.lower()}; a message was repeated or reordered"
            )
        if length is not None and len(body) != length:
            raise RemoteProtocolError(
                f"{sender} sent {kind.name.lower()} of {len(body)} bytes, expected {length}"
            )
        return body

    def parse_words(
        self, inbox: Inbox, sender: str, kind: _Kind, shape: tuple[int, ...]
    ) -> NDArray[np.uint64]:
        """Return the 64-bit words of this shape in the message of `sender`."""
        body = self.parse_message(inbox, sender, kind, 8 * int(np.prod(shape)))
        return np.frombuffer(body, "<u8").reshape(shape)

    def _pack_message(self, kind: int, items: bytes) -> bytes:
        """Frame a body: version, kind, digest of the agreement, number of items. Raises
        LocalProtocolError: more items than a message holds.
        """
        count = len(items) // self._items[kind] if items else 0
        if count > self._max_ids:
            raise LocalProtocolError(
                f"a message of kind {kind} would have {count} items, a message holds at most "
                f"{self._max_ids}; such large sets are intersected in parts"
            )
        digest = self.agreement.digest[:_DIGEST_BYTES]
        return _HEADER.pack(self._version, kind, digest, count) + items

    def _unpack_message(self, sender: str, message: bytes) -> tuple[int, bytes]:
        """Return kind and body of a message. Raises RemoteProtocolError: another version, agreement
        or size.
        """
        if len(message) < _HEADER.size:
            raise RemoteProtocolError(f"{sender} sent {len(message)} bytes, too few for a header")
        version, kind, digest, count = _HEADER.unpack_from(message)
        if version != self._version or kind not in self._items:
            raise RemoteProtocolError(
                f"{sender} sent version {version}, kind {kind} of a set intersection; "
                f"this party speaks version {self._version}; use the same protocol and release "
                "at all parties"
            )
        if digest != self.agreement.digest[:_DIGEST_BYTES]:
            raise RemoteProtocolError(
                f"{sender} holds another agreement; compare session, minimum_rows, maximum_ids "
                "and the normalisation of IDs"
            )
        if count > self._max_ids:
            raise RemoteProtocolError(
                f"{sender} announces {count} items, this party accepts at most {self._max_ids}"
            )
        items = message[_HEADER.size :]
        if len(items) != count * self._items[kind]:
            raise RemoteProtocolError(
                f"{sender} announces {count} items of {self._items[kind]} bytes and sent "
                f"{len(items)} bytes"
            )
        return kind, items


def message_bytes(size: int) -> int:
    """Return the bytes of a framed message whose body has `size` bytes."""
    return _HEADER.size + size


def digest_each(ids: Sequence[bytes], keyed: "hashlib.blake2b") -> NDArray[np.uint8]:
    """Hash each ID under the key of `keyed`, shape (n, bytes of a digest).

    They are as secret as the IDs: who has the key can try out guessed IDs.
    """
    digests = np.empty((len(ids), keyed.digest_size), np.uint8)
    copy = keyed.copy
    for start in range(0, len(ids), _IDS_OF_A_PIECE):
        hashes = []  # millions of small objects would crowd the memory
        for identity in ids[start : start + _IDS_OF_A_PIECE]:
            hasher = copy()
            hasher.update(identity)
            hashes.append(hasher.digest())
        rows = np.frombuffer(b"".join(hashes), np.uint8)
        digests[start : start + _IDS_OF_A_PIECE] = rows.reshape(-1, keyed.digest_size)
    return digests


def three_different(words_n3: NDArray[np.uint64], size: int) -> NDArray[np.int64]:
    """Return uniform triples of different places below `size`, (n, 3).

    Their bias is at most size / 2^63.
    """
    first, second, third = (
        ((words_n3[:, k] >> np.uint64(1)) % np.uint64(size - k)).astype(np.int64)
        for k in range(PLACES)
    )
    second += second >= first
    low = np.minimum(first, second)
    high = np.maximum(first, second)
    third += third >= low
    third += third >= high
    return np.stack([first, second, third], axis=1)


def _find_common_rows(
    me: str, places: Mapping[str, Rows], minimum: int
) -> Rows | IntersectionTooSmallError:
    """Return the hub's rows that all share, in a random order; or why they stay closed.

    `places` say for each member where it has each of the hub's rows, -1 for nowhere; shape (n,).

    `minimum`: fewer common rows are not revealed.
    """
    shared = {member: place >= 0 for member, place in places.items()}
    common = np.flatnonzero(np.logical_and.reduce(list(shared.values())))
    if len(common) < minimum:
        counts = ", ".join(f"{int(with_it.sum())} with {name}" for name, with_it in shared.items())
        detail = f" ({len(common)} in common to all; {counts})"
        return IntersectionTooSmallError.for_party(me, minimum, detail)
    return common[random_permutation(len(common))]


def _check_places(sender: str, items: bytes, *, minimum: int, own_size: int, hub_size: int) -> Rows:
    """Parse the positions in this party's list that the hub revealed. Raises RemoteProtocolError:
    too few, repeated, out of range, or more than the hub has IDs.

    `items`: the hub's message: one position an item. `minimum`: fewer common rows are not revealed.
    """
    if len(items) % POSITION_BYTES:
        raise RemoteProtocolError(f"{sender} opened rows in {len(items)} bytes, not whole places")
    places = np.frombuffer(items, ">u4").astype(np.int64)
    if len(places) < minimum:
        raise RemoteProtocolError(
            f"{sender} opened {len(places)} rows, the parties agreed on at least {minimum}"
        )
    if len(places) and int(places.max()) >= own_size:
        raise RemoteProtocolError(
            f"{sender} names place {int(places.max())} of a list of {own_size} IDs"
        )
    if len(np.unique(places)) != len(places) or len(places) > hub_size:
        raise RemoteProtocolError(
            f"{sender} opened {len(places)} rows, of which {len(np.unique(places))} differ, "
            f"with a set of {hub_size} IDs"
        )
    return places


def open_rows(desk: Desk[_Kind], places: Mapping[str, Rows]) -> Script:
    """Send the hub's last message to each member: where its list has the common IDs, or a refusal.

    The message is empty where the hub alone is to know, and the size where only that is to open.

    `places`: by member, the position of each common row in its list.
    """
    rows = _find_common_rows(desk.me, places, desk.agreement.minimum_rows)
    if isinstance(rows, IntersectionTooSmallError):
        yield desk.make_turn(desk.kinds["REFUSAL"], dict.fromkeys(places, b""), ())
        return rows
    if desk.agreement.output is Output.SIZE:
        size = len(rows).to_bytes(POSITION_BYTES, "big")
        yield desk.make_turn(desk.kinds["SIZE"], dict.fromkeys(places, size), ())
        return IntersectionResult(size=len(rows))
    if desk.agreement.output is Output.HUB_ROWS:
        yield desk.make_turn(desk.kinds["DONE"], dict.fromkeys(places, b""), ())
    else:
        opened = {member: place[rows].astype(">u4").tobytes() for member, place in places.items()}
        yield desk.make_turn(desk.kinds["ROWS"], opened, ())
    opened_places = {member: place[rows] for member, place in places.items()}
    return IntersectionResult(rows=rows, places=opened_places)


def parse_opened_rows(
    desk: Desk[_Kind], inbox: Inbox, hub: str, order: Rows, hub_size: int
) -> IntersectionResult | IntersectionTooSmallError:
    """Read the hub's last message; `order` is the own row at each place of the member's list."""
    minimum = desk.agreement.minimum_rows
    output = desk.agreement.output
    if minimum and desk.kind_of(inbox, hub) is desk.kinds["REFUSAL"]:
        return IntersectionTooSmallError.for_party(desk.me, minimum)
    if output is Output.HUB_ROWS:
        desk.parse_message(inbox, hub, desk.kinds["DONE"], 0)
        return IntersectionResult(order=order)
    if output is Output.SIZE:
        items = desk.parse_message(inbox, hub, desk.kinds["SIZE"])
        largest = min(len(order), hub_size)
        size = int.from_bytes(items, "big")
        if len(items) != POSITION_BYTES or not minimum <= size <= largest:
            raise RemoteProtocolError(
                f"{hub} announces {size} common IDs, expected {minimum} to {largest}"
            )
        return IntersectionResult(size=size)
    items = desk.parse_message(inbox, hub, desk.kinds["ROWS"])
    places = _check_places(hub, items, minimum=minimum, own_size=len(order), hub_size=hub_size)
    return IntersectionResult(rows=order[places], order=order)


class SetIntersection(ABC):
    """A backend: makes the roles. IDs are bytes, distinct and not empty.

    Args:
        agreement: equal at all parties.
        threads: this party's own choice, at least 1; None lets the backend choose. Those on
            circuits and vectors compute on whole arrays in this process.
        progress: called while this party works.
        admit: asked before each role with IDs is made.

    Attributes:
        name: its key in the table of backends.
        needs_dealer: whether the party that `agreement.dealer` names must take part;
            without_dealer: the backend to take where there is none.
        outputs: what it can be asked for.
        pairwise: whether the hub learns its intersection with every single member.
        leaks: what it reveals beyond the intersection and the sizes, in sentences.
    """

    name: ClassVar[str]
    needs_dealer: ClassVar[bool]
    without_dealer: ClassVar[str] = ""
    outputs: ClassVar[frozenset[Output]]
    pairwise: ClassVar[bool]
    leaks: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        agreement: IntersectionAgreement,
        *,
        threads: int | None = None,
        progress: Callable[[Progress], None] | None = None,
        admit: Admit | None = None,
    ) -> None:
        """Describe an intersection, with one party's own choices. Raises LocalProtocolError: an
        output that this backend cannot give, no dealer where it needs one, or no thread.

        `progress`: called while this party works; None: not reported.
        """
        if threads is not None and threads < 1:
            raise LocalProtocolError(f"threads is at least 1, got {threads}")
        if agreement.output not in self.outputs:
            raise LocalProtocolError(
                f"{self.name} cannot give the output {agreement.output.value!r}; "
                f"it gives {', '.join(sorted(self.outputs))}"
            )
        if self.needs_dealer and not agreement.dealer:
            raise LocalProtocolError(
                f"a {self.name} intersection needs a dealer; name it in the agreement, or use "
                f"{self.without_dealer}, which needs none"
            )
        self.agreement = agreement
        self.progress = progress
        self.threads = threads
        self._admit = admit

    @property
    def largest_announced_size(self) -> int:
        """Return the most IDs that a peer may announce."""
        return self.agreement.largest_size

    @property
    @abstractmethod
    def longest(self) -> int:
        """Return the bytes of the longest message that its roles take."""

    @staticmethod
    @abstractmethod
    def max_guesses(maximum_ids: int) -> Guesses:
        """Return what a party that announces `maximum_ids` and sends what it likes can try out.

        IDs found by chance or search do not count: each costs 2^40 hashes or more.
        """

    @classmethod
    def count_announced_bytes(cls, size: int, *, own_size: int = 0, members: int = 1) -> int:
        """Return the memory that a role of `own_size` IDs takes by what a peer announces, at most.

        Messages that came are apart. None is taken where every array is as long as a message.

        Args:
            size: IDs that are announced; members: in the intersection.
        """
        del size, own_size, members
        return 0

    @classmethod
    def find_largest_size(cls, *, own_size: int = 0, members: int = 1) -> int:
        """Return the largest size that may be announced to such a role, 2^32 - 1 at most.

        `own_size`: how many IDs this party has. `members`: how many parties there are besides the
        hub.
        """

        def too_many(size: int) -> bool:
            return (
                cls.count_announced_bytes(size, own_size=own_size, members=members)
                > MAX_ANNOUNCED_BYTES
            )

        return bisect_left(range(_POSITIONS), True, lo=1, key=too_many) - 1

    @abstractmethod
    def make_hub(self, me: str, members: Sequence[str], ids: Sequence[bytes]) -> Aligner:
        """Return the active's side."""

    @abstractmethod
    def make_member(self, me: str, hub: str, ids: Sequence[bytes]) -> Aligner:
        """Return a passive's side; as `hub`."""

    @abstractmethod
    def make_dealer(self, hub: str, members: Sequence[str]) -> Conversation:
        """Return the dealer's side. Raises LocalProtocolError if the backend needs none."""

    def _check_inputs(self, me: str, peers: Sequence[str], ids: Sequence[bytes]) -> None:
        """Check all that can be checked before the first message."""
        check_ids(me, ids, self.agreement.maximum_ids)
        self.agreement.compute_announced_size(me, len(ids))
        self._require_memory(me, own_size=len(ids), members=len(peers))
        if self._admit is not None:
            self._admit(me, peers)

    def _require_memory(self, me: str, *, own_size: int, members: int) -> None:
        """Refuse an agreement by which a size that is announced takes more than is allowed.

        `own_size`: how many IDs this party has. `members`: how many parties there are besides the
        hub.
        """
        size = self.largest_announced_size
        needed = self.count_announced_bytes(size, own_size=own_size, members=members)
        if needed > MAX_ANNOUNCED_BYTES:
            largest = self.find_largest_size(own_size=own_size, members=members)
            raise LocalProtocolError(
                f"{me}: whoever announces {size:,} IDs to {self.name} would have {me} take "
                f"{needed / 2**30:,.1f} GiB, expected {MAX_ANNOUNCED_BYTES / 2**30:g} GiB at "
                f"most; agree on {largest:,} IDs at most (maximum_ids), or on ecdh"
            )


class ScriptedIntersection(SetIntersection):
    """A backend whose roles are scripts."""

    def make_hub(self, me: str, members: Sequence[str], ids: Sequence[bytes]) -> Aligner:
        """Return the active's side, which runs `_hub_script`."""
        helpers = self._list_helpers()
        check_parties(me, members, *helpers)
        self._check_inputs(me, members, ids)
        return self._make_aligner(me, [*members, *helpers], self._hub_script(me, members, ids))

    def make_member(self, me: str, hub: str, ids: Sequence[bytes]) -> Aligner:
        """Return a passive's side, which runs `_member_script`."""
        helpers = self._list_helpers()
        check_parties(hub, [me], *helpers)
        self._check_inputs(me, [hub], ids)
        return self._make_aligner(me, [hub, *helpers], self._member_script(me, hub, ids))

    def _list_helpers(self) -> Sequence[str]:
        return [self.agreement.dealer] if self.needs_dealer else []

    def _make_aligner(self, me: str, peers: Sequence[str], script: Script) -> Aligner:
        return Aligner(me, peers, self.agreement.output, script, longest=self.longest)

    @abstractmethod
    def _hub_script(self, me: str, members: Sequence[str], ids: Sequence[bytes]) -> Script: ...

    @abstractmethod
    def _member_script(self, me: str, hub: str, ids: Sequence[bytes]) -> Script: ...


class ResumableIntersection(SetIntersection):
    """A backend that can repeat a broken-off intersection message by message.

    So a session runs it bucket by bucket, see `secure_apfed.alignment.over_links`.

    Args:
        secret: 32 bytes that all randomness of messages follows from. A party keeps it to itself,
            uses it with one set of IDs only, and refuses a message that differs from that of the
            first attempt: else a mask would serve twice. None: it is fresh.
        expected_sizes: the number of IDs that a peer must announce, by name. A peer that is not
            named may announce any number up to the agreed one.

    Attributes:
        shows_sizes: whether the sizes of sets show, whatever was agreed.

    Raises:
        LocalProtocolError: sizes are agreed, and they show.
    """

    shows_sizes: ClassVar[bool] = False

    def __init__(
        self,
        agreement: IntersectionAgreement,
        *,
        threads: int | None = None,
        progress: Callable[[Progress], None] | None = None,
        admit: Admit | None = None,
        secret: bytes | None = None,
        expected_sizes: Mapping[str, int] | None = None,
    ) -> None:
        """Describe an intersection that can be resumed, with one party's own choices.

        `progress`: called while this party works; None: not reported.
        """
        super().__init__(agreement, threads=threads, progress=progress, admit=admit)
        if agreement.sizes and self.shows_sizes:
            raise LocalProtocolError(
                f"{self.name} shows the true sizes of sets; ot, vole, opprf and circuit take "
                "agreed sizes"
            )
        self.secret = secret
        self._expected_sizes = expected_sizes or {}

    @staticmethod
    @abstractmethod
    def longest_message(ids: int) -> int:
        """Return the bytes of the longest message where no party announces more IDs."""

    @property
    def largest_announced_size(self) -> int:
        """Return the most IDs that a peer may announce: the largest expected size, if
        there is one.
        """
        return max(self._expected_sizes.values(), default=self.agreement.largest_size)

    def require_expected_size(self, peer: str, size: int) -> None:
        """Refuse another number of IDs than this peer must announce."""
        expected = self._expected_sizes.get(peer, size)
        if size != expected:
            raise RemoteProtocolError(
                f"{peer} sent a list of {size} IDs for a bucket, expected {expected} by the size "
                "of its set; all parties fill up their lists"
            )


class DealtIntersection(ScriptedIntersection):
    """A backend with a dealer."""

    needs_dealer: ClassVar[bool] = True
    without_dealer: ClassVar[str] = "ot"
