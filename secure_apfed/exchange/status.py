"""The status of a party in a session: its phase, what it waits for, and the state of its peers.

Run by: each party for itself. Its links and the driver of its script update the status, and a
display in another thread reads it. It contains names, counts and times, and nothing from payloads.
"""

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict
from threading import Lock
from types import MappingProxyType
from typing import Literal, Protocol, Self, TypeAlias

from pydantic import BaseModel, ConfigDict

from secure_apfed.exchange.drivers import BrokenLink
from secure_apfed.exchange.envelope import Envelope, Kind
from secure_apfed.exchange.links import Awaited
from secure_apfed.settings.promises import EpsilonName, GuaranteeState, Promise, describe_epsilon

# Share of the patience after which a peer is shown as silent; one that computes is silent, too.
_SILENT_SHARE = 0.5

PeerState: TypeAlias = Literal["expected", "connected", "awaited", "silent", "left"]


_BEFORE_FIRST_SESSION = Promise(figure="epsilon_x", epsilon=None, why="no session began yet")


class _Frozen(BaseModel):
    """A model whose fields cannot change, and which refuses unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class LinkBreak(_Frozen):
    """The state of a link whose connection broke and is being restored.

    Attributes:
        since_s: for how many seconds the connection has been broken.
        patience_s: after how many seconds of a break the peer counts as having left.
        why: the error that broke the connection, or the last attempt to restore it.
    """

    since_s: float
    patience_s: float
    why: str


class PeerStatus(_Frozen):
    """A peer as this party sees it.

    Attributes:
        state: expected (it has not connected yet), connected, awaited, silent (awaited, and nothing
            came from it for half of the patience), or left.
        silent_s: for how many seconds it is awaited and has sent nothing; null if it is not
            awaited.
        sign_s: seconds since its last message, or since this session began.
        sent_bytes, received_bytes: bytes sent to it and received from it, in all sessions of a run.
        refusal: why it has not connected yet, such as a refusal of one end; else "".
        broken: the state of its link, if the connection is broken; null: it works, or the peer has
            left, or all run in one process.
    """

    state: PeerState
    silent_s: float | None
    sign_s: float
    sent_bytes: int
    received_bytes: int
    refusal: str = ""
    broken: LinkBreak | None = None


class Waiting(_Frozen):
    """The message that a party waits for.

    Attributes:
        senders: the message comes from one of these peers.
        kinds: the message has one of these kinds.
        step: the step that the message must have; null: any.
        since_s: for how many seconds the party has waited.
        patience_s: after how many seconds the wait fails.
    """

    senders: tuple[str, ...]
    kinds: tuple[Kind, ...]
    step: int | None
    since_s: float
    patience_s: float


class Meeting(_Frozen):
    """A party's wait for the others to connect, before a session.

    Attributes:
        since_s: for how many seconds it has waited.
        patience_s: after how many seconds the wait fails.
    """

    since_s: float
    patience_s: float


class Status(_Frozen):
    """The state of one party at one moment, for the live view and `/status`.

    Attributes:
        party: name of the party.
        phase: connecting; agreement, alignment, set-up, training, prediction or checkpoint; ended
            or failed.
        step: step of the last message, null before training.
        waits: the message that the party waits for; null while it computes.
        meets: its wait for peers to connect; null at all other times.
        peers: state and traffic of each peer, by name.
        session: number of the session in this process: 1 for the first, 2 after one restart.
        figure: the kind of epsilon that bounds what the party's messages reveal, such as epsilon_x,
            a key of `promises.MEANING_BY_EPSILON`.
        epsilon: its value for all messages over all sessions; infinite or null: see `promise`.
        promise: "bounded" by a finite epsilon, "no guarantee" (epsilon is infinite), or "nothing is
            sent" (epsilon is null).
        less_protected: one sentence for each setting that protects less than by default, and for
            each organisation that can read or alter more because it runs several parties.
    """

    party: str
    phase: str
    step: int | None
    waits: Waiting | None
    meets: Meeting | None = None
    peers: dict[str, PeerStatus]
    epsilon: float | None
    figure: EpsilonName = "epsilon_x"
    promise: GuaranteeState
    session: int = 1
    less_protected: tuple[str, ...] = ()

    @property
    def sent_bytes(self) -> int:
        """The bytes sent to all peers, in all sessions of a run."""
        return sum(peer.sent_bytes for peer in self.peers.values())

    @property
    def received_bytes(self) -> int:
        """The bytes received from all peers, in all sessions of a run."""
        return sum(peer.received_bytes for peer in self.peers.values())

    @property
    def promise_text(self) -> str:
        """The name and value of the party's epsilon, or that there is none, in one line."""
        return describe_epsilon(self.figure, self.epsilon)

    def list_peers(self, state: PeerState) -> list[str]:
        """Return the names of the peers in this state, such as "silent"."""
        return [name for name, peer in self.peers.items() if peer.state == state]


class Meter(Protocol):
    """An object that states the privacy cost of the messages that a party has sent."""

    @property
    def charges(self) -> int:
        """The number of releases whose privacy cost is recorded; it grows with every batch."""

    @property
    def promise(self) -> Promise:
        """The privacy guarantee that covers all these releases."""


class StatusTracker:
    """A record of the present status of one party, for a display in another thread.

    The party's links and the driver of its script report to it what happens: it is a `LinkObserver`
    and a `WaitObserver`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Make a tracker before any session; `clock` returns the time in seconds."""
        self._clock = clock
        self._lock = Lock()
        self._party = ""
        self._phase = "connecting"
        self._step: int | None = None
        self._awaited: Awaited | None = None  # the message that the party waits for
        self._waits_since = 0.0  # on the clock
        self._patience_s = 0.0
        self._meter: Meter | None = None
        self._promise = _BEFORE_FIRST_SESSION  # the guarantee at the last sent message
        self._reason_by_missing_peer: Mapping[
            str, str
        ] = {}  # by peer that has not connected: the reason, or ""
        self._meets_since = 0.0  # on the clock: when the party began to wait for connections
        self._meeting_timeout_s = 0.0
        self._bytes_by_peer: dict[str, list[int]] = {}  # by peer: sent, received
        self._unheard_since: dict[str, float] = {}  # by awaited peer: when the wait for it began
        self._last_frame_at: dict[str, float] = {}  # by peer: when its last frame came
        self._session = 0
        self._less_protected: tuple[str, ...] = ()
        self._departed_peers: set[str] = set()
        # Returns the broken links by peer; `dict` returns none.
        self._list_broken_links: Callable[[], Mapping[str, BrokenLink]] = dict

    def start_session(
        self,
        party: str,
        peers: Collection[str],
        meter: Meter | None,
        *,
        meeting_timeout_s: float = 0.0,
        less_protected: Iterable[str] = (),
        earlier_bytes_by_peer: Mapping[str, tuple[int, int]] = MappingProxyType({}),
    ) -> None:
        """Record that a session starts, before any peer is connected; each session calls it once.

        Args:
            party: name of the party.
            peers: the other parties' names.
            meter: states the privacy cost of what the party sends; None: it sends nothing that has
                a cost.
            meeting_timeout_s: how many seconds it waits until all peers are connected; 0: not
                known.
            less_protected: sentences on settings that protect less; see `Status`.
            earlier_bytes_by_peer: the bytes sent and received in earlier sessions, to which this
                one adds.
        """
        with self._lock:
            self._party = party
            self._meter = meter
            self._promise = meter.promise if meter else _BEFORE_FIRST_SESSION
            self._meets_since = self._clock()
            self._meeting_timeout_s = meeting_timeout_s
            self._phase = "connecting"
            self._awaited = None
            self._less_protected = tuple(less_protected)
            self._reason_by_missing_peer = dict.fromkeys(peers, "")
            self._bytes_by_peer = {
                name: [*earlier_bytes_by_peer.get(name, (0, 0))] for name in peers
            }
            self._last_frame_at = dict.fromkeys(self._bytes_by_peer, self._clock())
            self._session += 1
            self._departed_peers.clear()
            self._list_broken_links = dict

    def observe_missing(self, missing: Mapping[str, str]) -> None:
        """Note the peers that have not connected yet, each with the reason, or "" if unknown."""
        with self._lock:
            self._reason_by_missing_peer = missing

    def observe_connection(
        self, list_broken_links: Callable[[], Mapping[str, BrokenLink]] = dict
    ) -> None:
        """Note that all peers are connected.

        `list_broken_links`: returns, by peer, the links that are broken at the moment of the call.
        """
        with self._lock:
            self._reason_by_missing_peer = {}
            self._phase = "agreement"
            self._list_broken_links = list_broken_links

    def __enter__(self) -> Self:
        """Return this tracker; leaving the `with` block sets the final phase."""
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        """Set the final phase: failed after an error of this type, else ended.

        SystemExit is how a command ends with an exit code, so it counts as ended.
        """
        with self._lock:
            self._awaited = None
            self._list_broken_links = dict
            self._phase = "ended" if error_type in (None, SystemExit) else "failed"

    def observe_outgoing(self, envelope: Envelope, frame: bytes) -> None:
        """Count the bytes of a sent message, and update step and privacy guarantee."""
        promise = self._meter.promise if self._meter else _BEFORE_FIRST_SESSION
        with self._lock:
            self._bytes_by_peer[envelope.receiver][0] += len(frame)
            self._promise = promise
            if envelope.step >= 0:
                self._step = envelope.step

    def observe_incoming(self, envelope: Envelope, frame: bytes) -> None:
        """Count the bytes of a received message, and update the step; after an ABORT its sender has
        left.
        """
        with self._lock:
            self._count_incoming(envelope.sender, frame)
            if envelope.step >= 0:
                self._step = envelope.step
            if envelope.kind is Kind.ABORT:
                self._departed_peers.add(envelope.sender)

    def observe_refusal(self, sender: str, frame: bytes) -> None:
        """Count the bytes of a message that could not be decrypted."""
        with self._lock:
            self._count_incoming(sender, frame)

    def observe_wait(self, awaited: Awaited, timeout_s: float) -> None:
        """Note the message that the role awaits, and since when each sender is awaited.

        `timeout_s`: seconds until the wait fails.
        """
        with self._lock:
            now = self._clock()
            earlier_waits = self._unheard_since
            self._awaited = awaited
            self._waits_since = now
            self._patience_s = timeout_s
            # A sender that was awaited already, and has sent nothing since, keeps its time.
            self._unheard_since = {name: earlier_waits.get(name, now) for name in awaited.senders}
            self._phase = awaited.phase

    def observe_departure(self, names: Iterable[str]) -> None:
        """Note that these peers left the session, or were silent for too long."""
        with self._lock:
            self._departed_peers |= set(names)
            self._awaited = None

    def build_status(self) -> Status:
        """Return the party's status at this moment, with times in seconds."""
        with self._lock:
            now = self._clock()
            awaited = self._awaited
            broken_links = self._list_broken_links()
            waits = None
            if awaited is not None:
                waits = Waiting(
                    senders=awaited.senders,
                    kinds=awaited.kinds,
                    step=awaited.step,
                    since_s=now - self._waits_since,
                    patience_s=self._patience_s,
                )
            meets = None
            if (
                self._phase == "connecting"
                and self._reason_by_missing_peer
                and self._meeting_timeout_s
            ):
                since_s = now - self._meets_since
                meets = Meeting(since_s=since_s, patience_s=self._meeting_timeout_s)
            return Status(
                party=self._party,
                phase=self._phase,
                step=self._step,
                waits=waits,
                meets=meets,
                peers={
                    name: self._build_peer_status(name, now, broken_links.get(name))
                    for name in self._bytes_by_peer
                },
                figure=self._promise.figure,
                epsilon=self._promise.epsilon,
                promise=self._promise.state,
                session=self._session,
                less_protected=self._less_protected,
            )

    def _build_peer_status(
        self, name: str, now: float, broken_link: BrokenLink | None
    ) -> PeerStatus:
        """Return one peer's status: connected, awaited, silent or gone, and the bytes exchanged.

        `now`: the clock's time, in seconds. `broken_link`: the state of a broken link to the peer;
        None: the link is not broken.
        """
        silent_s: float | None = None
        state: PeerState = "expected" if name in self._reason_by_missing_peer else "connected"
        if name in self._departed_peers:
            state = "left"
        elif self._awaited is not None and name in self._awaited.senders:
            silent_s = now - self._unheard_since[name]
            state = "silent" if silent_s >= _SILENT_SHARE * self._patience_s else "awaited"
        sent, received = self._bytes_by_peer[name]
        link_break: LinkBreak | None = None
        if broken_link is not None and state != "left":
            link_break = LinkBreak(**asdict(broken_link))
        return PeerStatus(
            state=state,
            silent_s=silent_s,
            sign_s=now - self._last_frame_at[name],
            sent_bytes=sent,
            received_bytes=received,
            refusal=self._reason_by_missing_peer.get(name, ""),
            broken=link_break,
        )

    def _count_incoming(self, sender: str, frame: bytes) -> None:
        """Count the frame's bytes, and record that its sender is alive and no longer awaited."""
        self._bytes_by_peer[sender][1] += len(frame)
        self._last_frame_at[sender] = self._clock()
        self._unheard_since.pop(sender, None)
        self._departed_peers.discard(sender)
        self._awaited = None
