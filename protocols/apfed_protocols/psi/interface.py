"""Private set intersections: the interface of every backend, and the parts that backends share.

Run by: the active as the hub (the party that exchanges messages with every other), every passive
as a member, and for some backends a dealer, which has no IDs and provides correlated randomness.
Guarantee asked of every backend: an ID outside the intersection stays unknown to every other
party; what a backend reveals beyond the M-way intersection, it lists in `leaks`.

Messages are framed (`Endpoint`): any bytes either parse to a kind and as many items of that kind's
size as announced, or raise RemoteProtocolError. A role with many rounds is written top to bottom as
a `RoleCoroutine`, which sends and parses messages at an `Endpoint`. Where the parties agree on
sizes, a set may be smaller than its agreed size.
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
from apfed_protocols.lazy_names import make_former_name
from apfed_protocols.randomness import ForkCheck, random_permutation

__all__ = [
    "AdmissionCheck",
    "Aligner",
    "CoroutineIntersection",
    "DealtIntersection",
    "Endpoint",
    "Guesses",
    "IntersectionAgreement",
    "IntersectionResult",
    "IntersectionTooSmallError",
    "Membership",
    "Messages",
    "Output",
    "Progress",
    "ResumableIntersection",
    "RoleCoroutine",
    "Round",
    "SetIntersection",
    "check_parties",
    "count_message_bytes",
    "digest_each",
    "draw_different_positions",
    "parse_revealed_rows",
    "require_own_rows",
    "reveal_common_rows",
    "wait_for",
]

_SIZE_LIMIT = 2**32
AdmissionCheck = Callable[[str, Sequence[str]], None]
"""Takes a party's own name and those of the peers with IDs; raises if it is not to take part."""

_HEADER = struct.Struct(">BB16sI")
_DIGEST_BYTES = 16

_MAX_MESSAGES_AHEAD = 4

Messages = Mapping[str, bytes]
"""The messages of one round, by sender."""
_Kind = TypeVar("_Kind", bound=IntEnum)

BINS_PER_ID = 3
_IDS_PER_CHUNK = 2**12

RowIndices = NDArray[np.int64]
POSITION_BYTES = 4


class IntersectionTooSmallError(LocalProtocolError):
    """The parties share fewer IDs than they agreed on as a minimum; nothing was revealed."""

    @classmethod
    def for_party(cls, me: str, minimum_rows: int, detail: str = "") -> "IntersectionTooSmallError":
        """Return the error to raise at the party named `me`.

        `minimum_rows`: the agreed least number of common rows. `detail`: text that the message
        shows after this number.
        """
        return cls(
            f"{me}: the parties share fewer IDs than the agreed minimum of {minimum_rows}{detail}; "
            "nothing was opened. Check that all parties use the same ID column and the same "
            "normalisation"
        )


class Output(StrEnum):
    """The output of an intersection: what is revealed at the end, and to whom.

    ROWS: the common rows, to all parties. HUB_ROWS: the common rows, to the hub alone. SIZE: the
    number of common rows, to all. SHARED: nothing; all hold secret shares of which of the hub's
    rows are common.
    """

    ROWS = "rows"
    HUB_ROWS = "hub_rows"
    SIZE = "size"
    SHARED = "shared"


@dataclass(frozen=True)
class Progress:
    """The progress of one party with one part of its work.

    Attributes:
        party: name of the party.
        work: what is being done, in words.
        done, total: numbers of IDs or hash-table bins that are done, and in all.
    """

    party: str
    work: str
    done: int
    total: int


@dataclass(frozen=True, kw_only=True)
class Guesses:
    """The largest number of guessed IDs that a party which deviates from the protocol can test in
    one intersection.

    Attributes:
        hub: guesses that the hub can test at each member; it may test other IDs at each member.
        member: guesses that a member can test at the hub.
    """

    hub: int
    member: int


@dataclass(frozen=True, kw_only=True)
class Membership:
    """A party's shares of which of the hub's IDs all parties have, for further protocols.

    The hub (the active) placed its IDs into the bins of a hash table, some of which stay empty. The
    XOR of all parties' `shares` of a bin is True where the hub's ID in it is common.

    Attributes:
        shares: XOR shares of one bit for each bin, bool, shape (bins,); uniformly random to anybody
            who lacks one party's.
        row_of_bin: row of the hub's table whose ID is in each bin, -1 for an empty bin, (bins,);
            None at every other party.
    """

    shares: NDArray[np.bool_] = field(repr=False)
    row_of_bin: NDArray[np.int64] | None = field(default=None, repr=False)

    row_of_place = make_former_name("row_of_place", "row_of_bin")


@dataclass(frozen=True, kw_only=True)
class IntersectionAgreement:
    """The public terms that all parties agree on before an intersection.

    Attributes:
        session: names the intersection; non-empty, used once.
        minimum_rows: least number of common rows; with fewer nobody's rows are revealed. 0 or more.
        maximum_ids: the largest set that a party accepts from a peer, 1 to 2^32 - 1. It
            limits how many guessed IDs a party can test by adding them to its set. A party that
            deviates from the protocol can test as many as the backend's `max_guesses` says.
        encoding: how records became ID bytes (normalisation), in any canonical text;
            parties that encode differently would find no common ID.
        dealer: the party that provides correlated randomness, for backends that need one. It
            holds no IDs and must not collude with any other party.
        output: what is revealed, and to whom.
        sizes: how many IDs the hub and each member announce, by name; a party may have fewer,
            and the difference stays hidden. Empty: all announce their true numbers.
    """

    session: str
    minimum_rows: int = 2
    maximum_ids: int = MAX_IDS
    encoding: str = ""
    dealer: str = ""
    output: Output = Output.ROWS
    sizes: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Turn NumPy integers into int, and validate all fields. Raises LocalProtocolError: the
        session is empty, or a limit or size is out of its range.
        """
        take_numpy_integers(self)
        if not self.session:
            raise LocalProtocolError("an intersection needs a session name")
        if not 0 < self.maximum_ids < _SIZE_LIMIT:
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
        """Return SHA-256 over all fields of the agreement, each preceded by its length."""
        limits = [self.minimum_rows.to_bytes(4, "big"), self.maximum_ids.to_bytes(4, "big")]
        # The empty text replaces a field that was removed, so that digests did not change.
        texts = [self.session, self.encoding, self.dealer, self.output.value, ""]
        texts += [f"{size} {party}" for party, size in sorted(self.sizes.items())]
        fields = limits + [text.encode() for text in texts]
        framed_fields = b"".join(len(content).to_bytes(4, "big") + content for content in fields)
        return hashlib.sha256(b"secure-apfed intersection v3" + framed_fields).digest()

    @property
    def largest_size(self) -> int:
        """Return the largest agreed size or, without agreed sizes, the largest that is accepted."""
        return max(self.sizes.values(), default=self.maximum_ids)

    def get_size(self, party: str) -> int:
        """Return how many IDs a party must announce. Raises LocalProtocolError: no size is agreed
        for it.
        """
        if party not in self.sizes:
            raise LocalProtocolError(
                f"no size is agreed for {party}, only for {', '.join(self.sizes) or 'nobody'}"
            )
        return self.sizes[party]

    def compute_announced_size(self, me: str, true_size: int) -> int:
        """Return how many IDs the party `me` announces if it has `true_size` IDs: the size agreed
        for it, or `true_size` if no sizes are agreed.

        Raises LocalProtocolError: `true_size` exceeds the agreed size.
        """
        announced_size = self.get_size(me) if self.sizes else true_size
        if true_size > announced_size:
            raise LocalProtocolError(
                f"{me} has {true_size} IDs, the parties agreed that it announces {announced_size}"
            )
        return announced_size

    def check_announced_sizes(
        self, sender: str, sizes: Sequence[int], parties: Sequence[str]
    ) -> None:
        """Raise RemoteProtocolError unless the announced sizes are at most `maximum_ids` and, if
        sizes are agreed, equal to the agreed sizes.

        Args:
            sender: the party that announces the sizes, for the error.
            sizes: the announced numbers of IDs of `parties`, in any order.
            parties: the parties that have these numbers of IDs.
        """
        for size in sizes:
            if size > self.maximum_ids:
                raise RemoteProtocolError(
                    f"{sender} announces {size} IDs, the parties agreed on at most "
                    f"{self.maximum_ids}"
                )
        if not self.sizes:
            return
        agreed_sizes = sorted(map(self.get_size, parties))
        if sorted(sizes) != agreed_sizes:
            raise RemoteProtocolError(
                f"{sender} announces {', '.join(map(str, sizes))} IDs, the parties agreed on "
                f"{', '.join(map(str, agreed_sizes))}"
            )


def check_parties(hub: str, members: Sequence[str], *dealers: str) -> None:
    """Raise LocalProtocolError for an intersection without members or with one party in two roles.

    `hub`: the party that exchanges messages with every other. `members`: the other parties with
    IDs. `dealers`: the dealer, a party without IDs that provides correlated randomness, if there is
    one.
    """
    parties = (hub, *members, *dealers)
    if not members or not all(parties) or len(set(parties)) != len(parties):
        raise LocalProtocolError(
            "an intersection has one hub and one or more different members, got hub "
            f"{hub!r}, members {', '.join(map(repr, members)) or 'none'}"
            + "".join(f", dealer {dealer!r}" for dealer in dealers)
        )


@dataclass(frozen=True, kw_only=True)
class IntersectionResult:
    """The result of an intersection at one party; a field is None where this party does not learn
    it.

    Attributes:
        rows: this party's common rows, in the order that all parties share.
        size: the number of common IDs.
        membership: shares of which of the hub's IDs are common.
        positions_by_member: position of each of `rows` in the list that a member sent, by member;
            only at a hub that compares lists.
        sent_rows: this member's own row at each position of the list that it sent; only at a member
            whose list the hub compared.
    """

    rows: NDArray[np.int64] | None = field(default=None, repr=False)
    size: int | None = None
    membership: Membership | None = None
    positions_by_member: Mapping[str, NDArray[np.int64]] | None = field(default=None, repr=False)
    sent_rows: NDArray[np.int64] | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Round:
    """A step of a role's coroutine: messages to send, and then parties to wait for.

    Attributes:
        outgoing: the messages.
        awaited: the parties of which the coroutine needs one message each before it continues.
    """

    outgoing: Sequence[Outgoing]
    awaited: Collection[str]


RoleCoroutine = Generator[Round, Messages, IntersectionResult | IntersectionTooSmallError]
"""A role as a generator: it yields rounds, receives the awaited messages, and returns its result or
the reason why nothing was revealed."""


def wait_for(senders: Collection[str]) -> Round:
    """Return a round that sends nothing, and waits for one message of each of these parties."""
    return Round(outgoing=(), awaited=senders)


class Aligner:
    """A party's role in an intersection: a `Conversation` that runs a coroutine.

    The properties return the agreed output once the role is finished. They raise
    IntersectionTooSmallError if the intersection is below the agreed minimum, and
    LocalProtocolError before the end or if the output is not revealed to this party. An exception
    of the coroutine ends the role.
    """

    def __init__(
        self,
        me: str,
        peers: Collection[str],
        output: Output,
        coroutine: RoleCoroutine,
        *,
        max_message_bytes: int,
    ) -> None:
        """Make the role of the party `me`, not started.

        Args:
            me: name of the party whose role this is.
            peers: the parties that it exchanges messages with.
            output: what the parties agreed to reveal, for errors.
            coroutine: the role, a generator that yields `Round`s and returns the result.
            max_message_bytes: bytes of the longest message that the role accepts.
        """
        self._me = me
        self._output = output
        # None until the coroutine ends.
        self._outcome: IntersectionResult | IntersectionTooSmallError | None = None
        self._coroutine = coroutine
        self._max_message_bytes = max_message_bytes
        # A forked copy of this role would send messages with the same secrets once more.
        self._fork_check = ForkCheck(f"{me}: this role of an intersection")
        # Messages that have arrived and that the coroutine did not take yet.
        self._inbox: dict[str, deque[bytes]] = {peer: deque() for peer in peers}
        # The peers whose next message the coroutine needs before it continues.
        self._awaited: Collection[str] = ()
        self._is_started = False
        self._has_failed = False

    def start(self) -> Iterable[Outgoing]:
        """Run the coroutine to the first point where it waits; return the messages to send.

        Raises LocalProtocolError: called twice, or in a forked process.
        """
        self._fork_check.require_own_process()
        if self._is_started:
            raise LocalProtocolError(f"{self._me}: an intersection is started once")
        self._is_started = True
        return self._run_rounds(None)

    def receive(self, sender: str, body: bytes) -> Iterable[Outgoing]:
        """Queue one message of `sender`. If all messages that the coroutine waits for are here now,
        resume it and return the messages to send; otherwise return no messages.

        Raises:
            RemoteProtocolError: `sender` takes no part, or sent a message that is too long or too
                early.
            LocalProtocolError: called before `start`, or in a forked process.
        """
        self._fork_check.require_own_process()
        if not self._is_started:
            raise LocalProtocolError(f"{self._me}: call start before receive")
        if sender not in self._inbox:
            raise RemoteProtocolError(f"{sender} takes no part in this intersection")
        is_too_far_ahead = len(self._inbox[sender]) >= _MAX_MESSAGES_AHEAD  # limits the memory
        if self.is_finished or self._has_failed or is_too_far_ahead:
            raise RemoteProtocolError(
                f"{sender} sent a message when the protocol does not expect it: the intersection "
                f"is over, or {sender} is too far ahead"
            )
        if len(body) > self._max_message_bytes:
            raise RemoteProtocolError(
                f"{sender} sent {len(body)} bytes, {self._me} takes at most "
                f"{self._max_message_bytes} in this intersection; compare alignment.maximum_ids "
                "of both"
            )
        self._inbox[sender].append(body)
        if not all(self._inbox[peer] for peer in self._awaited):
            return []
        return self._run_rounds(self._pop_messages())

    def _pop_messages(self) -> Mapping[str, bytes]:
        """Remove and return the next message of each awaited peer."""
        return {peer: self._inbox[peer].popleft() for peer in self._awaited}

    def _run_rounds(self, messages: Mapping[str, bytes] | None) -> Iterable[Outgoing]:
        """Resume the coroutine with the awaited messages by sender (None: start it); return the
        messages to send. If the messages of further rounds are here already, those rounds run while
        the caller iterates over the returned messages.
        """
        return itertools.chain(self._resume_coroutine(messages), self._run_ready_rounds())

    def _run_ready_rounds(self) -> Iterator[Outgoing]:
        """Run further rounds as long as all messages that they await are here already; yield their
        messages.
        """
        while not self.is_finished and all(self._inbox[peer] for peer in self._awaited):
            yield from self._resume_coroutine(self._pop_messages())

    def _resume_coroutine(self, messages: Mapping[str, bytes] | None) -> Sequence[Outgoing]:
        """Run the coroutine up to its next round or its end; return the messages to send.

        At its end, its return value becomes the outcome of this role. If the coroutine
        raises, the role is marked as failed and accepts no further message.

        `messages`: the awaited messages by sender; None: the coroutine starts.
        """
        self._has_failed = True  # reset below unless the coroutine raises
        try:
            next_round = (
                next(self._coroutine) if messages is None else self._coroutine.send(messages)
            )
        except StopIteration as end:
            self._outcome = end.value
            next_round = wait_for(())
        self._has_failed = False
        self._awaited = next_round.awaited
        return next_round.outgoing

    @property
    def is_finished(self) -> bool:
        return self._outcome is not None

    @property
    def rows(self) -> NDArray[np.int64]:
        """Return the positions of the common IDs in this party's own list: `rows[k]` of every party
        belongs to the same ID.
        """
        rows = self._require_result().rows
        if rows is None:
            raise self._make_output_error("rows")
        return rows

    @property
    def size(self) -> int:
        """Return the number of IDs that all parties share."""
        result = self._require_result()
        if result.size is not None:
            return result.size
        if result.rows is not None:
            return len(result.rows)
        raise self._make_output_error("size")

    @property
    def membership(self) -> Membership:
        """Return this party's shares of which IDs are common."""
        membership = self._require_result().membership
        if membership is None:
            raise self._make_output_error("shared membership")
        return membership

    @property
    def positions_by_member(self) -> Mapping[str, NDArray[np.int64]]:
        """Return, by member, the position of each common row in the list that the member sent;
        known only to a hub that compares lists. Raises LocalProtocolError: it is not known here.
        """
        places = self._require_result().positions_by_member
        if places is None:
            raise self._make_output_error("places in lists of members")
        return places

    @property
    def sent_rows(self) -> NDArray[np.int64]:
        """Return this member's own row at each position of the shuffled list that it sent to the
        hub. Raises LocalProtocolError: the hub did not compare lists, or this party is the hub.
        """
        sent_rows = self._require_result().sent_rows
        if sent_rows is None:
            raise self._make_output_error("order of its list")
        return sent_rows

    def _require_result(self) -> IntersectionResult:
        """Return this party's result.

        Raises:
            LocalProtocolError: the intersection is not finished.
            IntersectionTooSmallError: the parties share fewer IDs than the agreed minimum.
        """
        if self._outcome is None:
            raise LocalProtocolError(f"{self._me}: the intersection is not finished")
        if isinstance(self._outcome, IntersectionTooSmallError):
            raise self._outcome
        return self._outcome

    def _make_output_error(self, subject: str) -> LocalProtocolError:
        """Return the error for an output, called `subject`, that is not revealed to this party."""
        return LocalProtocolError(
            f"{self._me} has no {subject} of this intersection; the parties agreed on the output "
            f"{self._output.value!r}"
        )


class Endpoint(Generic[_Kind]):
    """A party's endpoint of one intersection: it frames the party's messages and parses those of
    its peers.

    Attributes:
        kinds: the backend's kinds of messages.
        version: number of the message format, 0 to 255, which is part of every message.
        work: what progress reports call the party's work.
        item_bytes: bytes of an item, by kind, for the kinds whose messages consist of items, at
            most one for each ID.
    """

    kinds: type[_Kind]
    version: ClassVar[int]
    work: ClassVar[str] = ""
    item_bytes: ClassVar[Mapping[int, int]] = {}

    def __init__(
        self,
        me: str,
        agreement: IntersectionAgreement,
        progress: Callable[[Progress], None] | None = None,
        *,
        version: int | None = None,
    ) -> None:
        """Make the endpoint of the party `me`.

        Args:
            me: name of the party.
            agreement: public terms of the intersection, whose digest is part of every message.
            progress: called with the progress of the party's work; None: it is not reported.
            version: number of the message format; None: that of the class.
        """
        self.me = me
        self.agreement = agreement
        self._progress = progress
        self._version = version or self.version
        # Bytes of one item, by kind; a kind without a size of its own counts single bytes.
        self._item_bytes_by_kind = dict.fromkeys(map(int, self.kinds), 1) | dict(self.item_bytes)
        # Where items stand for IDs, a message has at most one for each ID.
        self._max_items = agreement.maximum_ids if self.item_bytes else 2**32 - 1

    def report_progress(self, done: int, total: int) -> None:
        """Report that `done` of `total` IDs or bins are done, if the caller wants reports."""
        if self._progress is not None:
            self._progress(Progress(self.me, self.work, done, total))

    def make_round(
        self, kind: _Kind, bodies: Mapping[str, bytes], *, awaited: Collection[str]
    ) -> Round:
        """Return the step of a role that sends one message of this kind to each receiver, and then
        waits for one message of each party in `awaited`.

        `bodies`: the body of the message, without header, by receiver.
        """
        outgoing = [
            Outgoing(party, self._pack_message(kind, body)) for party, body in bodies.items()
        ]
        return Round(outgoing, awaited)

    def get_kind(self, received: Messages, sender: str) -> _Kind:
        """Return the kind of the message of `sender` in `received` (messages by sender). Raises
        RemoteProtocolError: the message is malformed.
        """
        return self.kinds(self._unpack_message(sender, received[sender])[0])

    def parse_message(
        self, received: Messages, sender: str, kind: _Kind, length: int | None = None
    ) -> bytes:
        """Return the body of a message that must be of this kind.

        Args:
            received: messages by sender.
            sender: the party whose message is parsed.
            kind: the kind of message that the protocol expects now.
            length: bytes that the body must have; None: any number.

        Raises RemoteProtocolError: the message is malformed, or of another kind or length.
        """
        sent_kind, body = self._unpack_message(sender, received[sender])
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
        self, received: Messages, sender: str, kind: _Kind, shape: tuple[int, ...]
    ) -> NDArray[np.uint64]:
        """Return the 64-bit words in the message of `sender` in `received` (messages by sender), as
        an array of this shape. Raises RemoteProtocolError: the message is malformed, or of another
        kind than `kind` or another size.
        """
        body = self.parse_message(received, sender, kind, 8 * int(np.prod(shape)))
        return np.frombuffer(body, "<u8").reshape(shape)

    def _pack_message(self, kind: int, items: bytes) -> bytes:
        """Return a message: a header (version, kind, digest of the agreement, number of items), and
        the items. Raises LocalProtocolError: the items are more than a message holds.
        """
        # A kind whose messages are always empty has items of 0 bytes.
        count = len(items) // self._item_bytes_by_kind[kind] if items else 0
        if count > self._max_items:
            raise LocalProtocolError(
                f"a message of kind {kind} would have {count} items, a message holds at most "
                f"{self._max_items}; such large sets are intersected in parts"
            )
        digest = self.agreement.digest[:_DIGEST_BYTES]
        return _HEADER.pack(self._version, kind, digest, count) + items

    def _unpack_message(self, sender: str, message: bytes) -> tuple[int, bytes]:
        """Return the kind of a message, and its items, which follow the header (version, kind,
        digest of the agreement, number of items).

        Raises RemoteProtocolError, which names `sender`: the message has another version, an
        unknown kind or another agreement, or not as many bytes of items as the header says.
        """
        if len(message) < _HEADER.size:
            raise RemoteProtocolError(f"{sender} sent {len(message)} bytes, too few for a header")
        version, kind, digest, count = _HEADER.unpack_from(message)
        if version != self._version or kind not in self._item_bytes_by_kind:
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
        if count > self._max_items:
            raise RemoteProtocolError(
                f"{sender} announces {count} items, this party accepts at most {self._max_items}"
            )
        items = message[_HEADER.size :]
        item_bytes = self._item_bytes_by_kind[kind]
        if len(items) != count * item_bytes:
            raise RemoteProtocolError(
                f"{sender} announces {count} items of {item_bytes} bytes and sent "
                f"{len(items)} bytes"
            )
        return kind, items


def count_message_bytes(size: int) -> int:
    """Return the bytes of a framed message whose body has `size` bytes."""
    return _HEADER.size + size


def digest_each(ids: Sequence[bytes], keyed_hasher: "hashlib.blake2b") -> NDArray[np.uint8]:
    """Return the BLAKE2b digest of each of n IDs as bytes, shape (n, bytes of a digest).

    The digests are as secret as the IDs: whoever has the key can test guessed IDs.

    `keyed_hasher`: a BLAKE2b object with the key, which has hashed nothing yet.
    """
    digests = np.empty((len(ids), keyed_hasher.digest_size), np.uint8)
    # A copy of the keyed state costs less than hashing the key again for each ID.
    copy_hasher = keyed_hasher.copy
    # In chunks, since millions of small bytes objects would take much memory.
    for start in range(0, len(ids), _IDS_PER_CHUNK):
        chunk_digests = []
        for identity in ids[start : start + _IDS_PER_CHUNK]:
            hasher = copy_hasher()
            hasher.update(identity)
            chunk_digests.append(hasher.digest())
        digest_rows = np.frombuffer(b"".join(chunk_digests), np.uint8)
        digests[start : start + _IDS_PER_CHUNK] = digest_rows.reshape(-1, keyed_hasher.digest_size)
    return digests


def draw_different_positions(
    words_n3: NDArray[np.uint64], position_count: int
) -> NDArray[np.int64]:
    """Return three different positions in 0..position_count - 1 for each of n IDs, (n, 3): the
    cells or bins of a hash table into which the ID is hashed.

    They are uniform up to a bias of position_count / 2^63. `words_n3`: three random 64-bit words
    for each ID, from its hash.
    """
    # One bit less, so that the numbers fit into int64.
    random_n3 = words_n3 >> np.uint64(1)
    # The k-th draw has k positions less to choose from.
    first, second, third = (
        (random_n3[:, k] % np.uint64(position_count - k)).astype(np.int64)
        for k in range(BINS_PER_ID)
    )
    # The second skips the first; the third skips both, the smaller one first.
    second += second >= first
    low = np.minimum(first, second)
    high = np.maximum(first, second)
    third += third >= low
    third += third >= high
    return np.stack([first, second, third], axis=1)


def _find_common_rows(
    me: str, positions_by_member: Mapping[str, RowIndices], minimum_rows: int
) -> RowIndices | IntersectionTooSmallError:
    """Return the hub's rows that all parties have, in a random order. If they are fewer than
    `minimum_rows`, return the error that says so; it is not raised, since the members must be told
    too.

    Args:
        me: name of the hub, for the error.
        positions_by_member: position of each of the hub's n rows in the list that a member sent, by
            member, (n,); -1 for a row that the member lacks.
        minimum_rows: the agreed minimum of common rows.
    """
    has_rows_by_member = {
        member: positions >= 0 for member, positions in positions_by_member.items()
    }
    common_rows = np.flatnonzero(np.logical_and.reduce(list(has_rows_by_member.values())))
    if len(common_rows) < minimum_rows:
        overlap_sizes = ", ".join(
            f"{int(has_row_n.sum())} with {member}"
            for member, has_row_n in has_rows_by_member.items()
        )
        detail = f" ({len(common_rows)} in common to all; {overlap_sizes})"
        return IntersectionTooSmallError.for_party(me, minimum_rows, detail)
    return common_rows[random_permutation(len(common_rows))]


def _parse_positions(
    sender: str, items: bytes, *, minimum_rows: int, own_size: int, hub_size: int
) -> RowIndices:
    """Return the positions (places) in this member's list that the hub opened: revealed as common.

    Args:
        sender: the hub, for errors.
        items: the positions as the hub sent them, four bytes each.
        minimum_rows: the agreed minimum of common rows.
        own_size: the number of IDs in this member's list.
        hub_size: the number of IDs that the hub announced.

    Raises RemoteProtocolError: there are too few positions, or more than the hub has IDs; or a
    position is repeated or out of range.
    """
    if len(items) % POSITION_BYTES:
        raise RemoteProtocolError(
            f"{sender} opened rows in {len(items)} bytes, expected a multiple of {POSITION_BYTES}"
        )
    positions = np.frombuffer(items, ">u4").astype(np.int64)
    if len(positions) < minimum_rows:
        raise RemoteProtocolError(
            f"{sender} opened {len(positions)} rows, the parties agreed on at least {minimum_rows}"
        )
    if len(positions) and int(positions.max()) >= own_size:
        raise RemoteProtocolError(
            f"{sender} names place {int(positions.max())} of a list of {own_size} IDs"
        )
    distinct_count = len(np.unique(positions))
    if distinct_count != len(positions) or len(positions) > hub_size:
        raise RemoteProtocolError(
            f"{sender} opened {len(positions)} rows, of which {distinct_count} differ, with a set "
            f"of {hub_size} IDs"
        )
    return positions


def reveal_common_rows(
    endpoint: Endpoint[_Kind], positions_by_member: Mapping[str, RowIndices]
) -> RoleCoroutine:
    """Run the last step of the hub's role, after the hub (the active) compared its list with that
    of every member: find the common rows, send each member the last message, and return the hub's
    result, or the error if too few rows are common.

    The last message depends on the agreed output: the positions of the common IDs in the member's
    list (ROWS), their number (SIZE), or nothing (HUB_ROWS). If fewer rows are common than the
    agreed minimum, the message is a refusal, and nothing is revealed.

    `endpoint`: frames the hub's messages. `positions_by_member`: position of each of the hub's n
    rows in the list that a member sent, by member, (n,); -1 for a row that the member lacks.
    """
    common_rows = _find_common_rows(
        endpoint.me, positions_by_member, endpoint.agreement.minimum_rows
    )
    empty_bodies = dict.fromkeys(positions_by_member, b"")  # an empty body for each member
    if isinstance(common_rows, IntersectionTooSmallError):
        yield endpoint.make_round(endpoint.kinds["REFUSAL"], empty_bodies, awaited=())
        return common_rows
    if endpoint.agreement.output is Output.SIZE:
        size = len(common_rows).to_bytes(POSITION_BYTES, "big")
        bodies = dict.fromkeys(positions_by_member, size)
        yield endpoint.make_round(endpoint.kinds["SIZE"], bodies, awaited=())
        return IntersectionResult(size=len(common_rows))
    common_positions_by_member = {
        member: positions[common_rows] for member, positions in positions_by_member.items()
    }
    if endpoint.agreement.output is Output.HUB_ROWS:
        yield endpoint.make_round(endpoint.kinds["DONE"], empty_bodies, awaited=())
    else:
        bodies = {
            member: positions.astype(">u4").tobytes()
            for member, positions in common_positions_by_member.items()
        }
        yield endpoint.make_round(endpoint.kinds["ROWS"], bodies, awaited=())
    return IntersectionResult(rows=common_rows, positions_by_member=common_positions_by_member)


def parse_revealed_rows(
    endpoint: Endpoint[_Kind], received: Messages, hub: str, sent_rows: RowIndices, hub_size: int
) -> IntersectionResult | IntersectionTooSmallError:
    """Parse the hub's last message at a member, and return the member's result, or the error if too
    few rows are common.

    The hub (the active) compared the lists of all parties. Its message has, by the agreed output,
    the positions of the common IDs in the member's list, their number, or nothing; or it is a
    refusal, since fewer rows are common than the agreed minimum.

    Args:
        endpoint: parses the messages that this member receives.
        received: messages by sender, with the hub's last message.
        hub: the hub's name.
        sent_rows: the member's own row at each position of the list that it sent.
        hub_size: the number of IDs that the hub announced.

    Raises RemoteProtocolError: the message is malformed or impossible.
    """
    minimum_rows = endpoint.agreement.minimum_rows
    output = endpoint.agreement.output
    if minimum_rows and endpoint.get_kind(received, hub) is endpoint.kinds["REFUSAL"]:
        return IntersectionTooSmallError.for_party(endpoint.me, minimum_rows)
    if output is Output.HUB_ROWS:
        endpoint.parse_message(received, hub, endpoint.kinds["DONE"], 0)
        return IntersectionResult(sent_rows=sent_rows)
    if output is Output.SIZE:
        items = endpoint.parse_message(received, hub, endpoint.kinds["SIZE"])
        max_size = min(len(sent_rows), hub_size)
        size = int.from_bytes(items, "big")
        if len(items) != POSITION_BYTES or not minimum_rows <= size <= max_size:
            raise RemoteProtocolError(
                f"{hub} announces {size} common IDs, expected {minimum_rows} to {max_size}"
            )
        return IntersectionResult(size=size)
    items = endpoint.parse_message(received, hub, endpoint.kinds["ROWS"])
    positions = _parse_positions(
        hub, items, minimum_rows=minimum_rows, own_size=len(sent_rows), hub_size=hub_size
    )
    return IntersectionResult(rows=sent_rows[positions], sent_rows=sent_rows)


def require_own_rows(
    result: IntersectionResult | IntersectionTooSmallError, own_size: int, *, me: str, hub: str
) -> None:
    """Raise RemoteProtocolError if the hub claims that a padding entry of the member's list is
    common: lists are filled up with random entries to the announced size.

    Args:
        result: the member's result of the intersection.
        own_size: the true number of the member's IDs.
        me: the member, for the error.
        hub: the hub, for the error.
    """
    if isinstance(result, IntersectionTooSmallError) or result.rows is None:
        return
    if (result.rows >= own_size).any():
        raise RemoteProtocolError(f"{hub} revealed a position at which {me} has no ID")


class SetIntersection(ABC):
    """A protocol for private set intersection (backend), which makes the parties' roles. IDs are
    bytes, distinct and not empty.

    Args:
        agreement: equal at all parties.
        threads: number of threads that this party computes with, at least 1; None: the backend's
            own choice. Backends on circuits and vectors compute on whole arrays and ignore it.
        progress: called with the progress of this party's work.
        check_admission: called with this party's name and its peers before each role with IDs is
            made; raises if the role must not be made.

    Attributes:
        name: key of the backend in `SET_INTERSECTIONS`.
        needs_dealer: whether the party that `agreement.dealer` names must take part.
        dealerless_alternative: the name of the backend to use if there is no dealer.
        outputs: what the backend can reveal.
        has_pairwise_leak: whether the hub learns its intersection with every single member.
        leaks: what the backend reveals beyond the intersection and the sizes, in sentences.
    """

    name: ClassVar[str]
    needs_dealer: ClassVar[bool]
    dealerless_alternative: ClassVar[str] = ""
    outputs: ClassVar[frozenset[Output]]
    has_pairwise_leak: ClassVar[bool]
    leaks: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        agreement: IntersectionAgreement,
        *,
        threads: int | None = None,
        progress: Callable[[Progress], None] | None = None,
        check_admission: AdmissionCheck | None = None,
    ) -> None:
        """Set up an intersection at one party; its role is made by `make_hub`, `make_member` or
        `make_dealer`.

        Raises LocalProtocolError: the backend does not support the agreed output, or needs a dealer
        and none is agreed; or `threads` is below 1.
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
                f"{self.dealerless_alternative}, which needs none"
            )
        self.agreement = agreement
        self.progress = progress
        self.threads = threads
        self._check_admission = check_admission

    @property
    def largest_announced_size(self) -> int:
        """Return the most IDs that a peer may announce."""
        return self.agreement.largest_size

    @property
    @abstractmethod
    def max_message_bytes(self) -> int:
        """Return the bytes of the longest message that its roles accept."""

    @staticmethod
    @abstractmethod
    def max_guesses(maximum_ids: int) -> Guesses:
        """Return how many guessed IDs a party can test against another's set if it announces
        `maximum_ids` IDs and deviates from the protocol.

        IDs found by chance or search do not count: each costs 2^40 hashes or more.
        """

    @classmethod
    def count_announced_bytes(
        cls, announced_size: int, *, own_size: int = 0, member_count: int = 1
    ) -> int:
        """Return the most bytes of memory that a role allocates because of the number of IDs that a
        peer announces, beside the messages that arrived; 0 if every array is as long as a message.
        A limit on it stops a peer that announces a huge set from exhausting this party's memory.

        Args:
            announced_size: the announced number of IDs.
            own_size: the number of this party's own IDs.
            member_count: the number of members in the intersection.
        """
        del announced_size, own_size, member_count
        return 0

    @classmethod
    def find_largest_size(cls, *, own_size: int = 0, member_count: int = 1) -> int:
        """Return the largest number of IDs, 2^32 - 1 at most, that a peer may announce without
        making this party allocate more than `MAX_ANNOUNCED_BYTES`.

        `own_size`: the number of this party's own IDs. `member_count`: how many parties with IDs
        there are beside the hub.
        """

        def takes_too_much(announced_size: int) -> bool:
            """Return whether this announced size makes the role allocate too much."""
            needed = cls.count_announced_bytes(
                announced_size, own_size=own_size, member_count=member_count
            )
            return needed > MAX_ANNOUNCED_BYTES

        # The memory grows with the size, so bisection finds the first size that takes too much.
        first_excess = bisect_left(range(_SIZE_LIMIT), x=True, lo=1, key=takes_too_much)
        return first_excess - 1

    @abstractmethod
    def make_hub(self, me: str, members: Sequence[str], ids: Sequence[bytes]) -> Aligner:
        """Return the role of the active, the hub named `me`, which exchanges messages with every
        member, with its IDs. Raises LocalProtocolError: names, IDs or sizes that do not fit the
        agreement.
        """

    @abstractmethod
    def make_member(self, me: str, hub: str, ids: Sequence[bytes]) -> Aligner:
        """Return the role of the passive named `me`, a member, which exchanges messages with the
        party `hub`, with its IDs. Raises LocalProtocolError: names, IDs or sizes that do not fit
        the agreement.
        """

    @abstractmethod
    def make_dealer(self, hub: str, members: Sequence[str]) -> Conversation:
        """Return the role of the dealer, a party without IDs that provides correlated randomness to
        hub and members. Raises LocalProtocolError: the backend has no dealer.
        """

    def _check_inputs(self, me: str, peers: Sequence[str], ids: Sequence[bytes]) -> None:
        """Check what this party, `me`, brings into an intersection with `peers`, and call
        `check_admission`, which may refuse to take part.

        Raises LocalProtocolError: the IDs do not fit the agreement, or the peers may announce sizes
        that need too much memory.
        """
        check_ids(me, ids, self.agreement.maximum_ids)
        self.agreement.compute_announced_size(me, len(ids))
        self._require_memory(me, own_size=len(ids), member_count=len(peers))
        if self._check_admission is not None:
            self._check_admission(me, peers)

    def _require_memory(self, me: str, *, own_size: int, member_count: int) -> None:
        """Raise LocalProtocolError if a peer may announce so many IDs that the party `me` would
        allocate more than `MAX_ANNOUNCED_BYTES`.

        `own_size`: the number of IDs of `me`. `member_count`: how many parties with IDs there are
        beside the hub.
        """
        max_announced_size = self.largest_announced_size
        needed = self.count_announced_bytes(
            max_announced_size, own_size=own_size, member_count=member_count
        )
        if needed > MAX_ANNOUNCED_BYTES:
            largest = self.find_largest_size(own_size=own_size, member_count=member_count)
            raise LocalProtocolError(
                f"{me}: whoever announces {max_announced_size:,} IDs to {self.name} would have "
                f"{me} take {needed / 2**30:,.1f} GiB, expected {MAX_ANNOUNCED_BYTES / 2**30:g} "
                f"GiB at most; agree on {largest:,} IDs at most (maximum_ids), or on ecdh"
            )


class CoroutineIntersection(SetIntersection):
    """A backend whose roles are written as coroutines."""

    def make_hub(self, me: str, members: Sequence[str], ids: Sequence[bytes]) -> Aligner:
        """Return the role of the hub `me` (the active, which exchanges messages with every member);
        it runs `_run_hub`. Raises LocalProtocolError: names, IDs or sizes that do not fit the
        agreement.
        """
        dealers = self._list_dealers()
        check_parties(me, members, *dealers)
        self._check_inputs(me, members, ids)
        return self._make_aligner(me, [*members, *dealers], self._run_hub(me, members, ids))

    def make_member(self, me: str, hub: str, ids: Sequence[bytes]) -> Aligner:
        """Return the role of the member `me` (a passive, which exchanges messages with `hub`); it
        runs `_run_member`. Raises LocalProtocolError: names, IDs or sizes that do not fit the
        agreement.
        """
        dealers = self._list_dealers()
        check_parties(hub, [me], *dealers)
        self._check_inputs(me, [hub], ids)
        return self._make_aligner(me, [hub, *dealers], self._run_member(me, hub, ids))

    def _list_dealers(self) -> Sequence[str]:
        """Return a list of the dealer's name, or an empty list if the backend needs no dealer."""
        return [self.agreement.dealer] if self.needs_dealer else []

    def _make_aligner(self, me: str, peers: Sequence[str], coroutine: RoleCoroutine) -> Aligner:
        """Return the role of the party `me` that runs this coroutine with these
        peers.
        """
        return Aligner(
            me, peers, self.agreement.output, coroutine, max_message_bytes=self.max_message_bytes
        )

    @abstractmethod
    def _run_hub(self, me: str, members: Sequence[str], ids: Sequence[bytes]) -> RoleCoroutine: ...

    @abstractmethod
    def _run_member(self, me: str, hub: str, ids: Sequence[bytes]) -> RoleCoroutine: ...


class ResumableIntersection(SetIntersection):
    """A backend that can repeat an interrupted intersection with the same messages.

    Large sets are split by a hash into buckets, which a session intersects one by one
    (`secure_apfed.alignment.over_links`).

    Args:
        secret: 32 bytes from which all randomness of messages is derived. A party keeps it secret,
            uses it with one set of IDs only, and refuses a message that differs from the message of
            the first attempt; otherwise a mask would be used twice. None: the randomness is fresh.
        expected_sizes: the number of IDs that a peer must announce, by name. A peer that is not
            named may announce any number up to the agreed one.

    Attributes:
        has_visible_sizes: whether messages reveal the true sizes of sets, whatever sizes are
            agreed.

    Raises:
        LocalProtocolError: sizes are agreed, but the messages reveal the true ones.
    """

    has_visible_sizes: ClassVar[bool] = False

    def __init__(
        self,
        agreement: IntersectionAgreement,
        *,
        threads: int | None = None,
        progress: Callable[[Progress], None] | None = None,
        check_admission: AdmissionCheck | None = None,
        secret: bytes | None = None,
        expected_sizes: Mapping[str, int] | None = None,
    ) -> None:
        """Set up an intersection; the first four arguments are those of the base class.

        Raises LocalProtocolError: sizes are agreed but the messages reveal the true sizes, or
        another argument does not fit (see `SetIntersection`).
        """
        super().__init__(
            agreement, threads=threads, progress=progress, check_admission=check_admission
        )
        if agreement.sizes and self.has_visible_sizes:
            raise LocalProtocolError(
                f"{self.name} shows the true sizes of sets; ot, vole, opprf and circuit take "
                "agreed sizes"
            )
        self.secret = secret
        self._expected_sizes = expected_sizes or {}

    @staticmethod
    @abstractmethod
    def compute_max_message_bytes(id_count: int) -> int:
        """Return the bytes of the longest message if no party announces more than `ids` IDs."""

    @property
    def largest_announced_size(self) -> int:
        """Return the most IDs that a peer may announce: the largest expected size or, without
        expected sizes, the agreed limit.
        """
        return max(self._expected_sizes.values(), default=self.agreement.largest_size)

    def require_expected_size(self, peer: str, announced_size: int) -> None:
        """Raise RemoteProtocolError if `peer` announced `announced_size` IDs and this party expects
        another number. A peer without an expected size may announce any number.
        """
        expected_size = self._expected_sizes.get(peer, announced_size)
        if announced_size != expected_size:
            raise RemoteProtocolError(
                f"{peer} sent a list of {announced_size} IDs for a bucket, expected "
                f"{expected_size} by the size of its set; all parties fill up their lists"
            )


class DealtIntersection(CoroutineIntersection):
    """A backend that needs a dealer."""

    needs_dealer: ClassVar[bool] = True
    dealerless_alternative: ClassVar[str] = "ot"
