"""The drivers of roles: all of a session in this process, or one of them over a transport.

The protocol is written once, as one script a role (see `secure_apfed.exchange.links`); a driver
only carries frames, and informs a waiting script when a party left.
"""

import contextlib
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from apfed_protocols.errors import LocalProtocolError, PartyLeftError
from secure_apfed.exchange.envelope import Envelope
from secure_apfed.exchange.links import Awaited, Frame, Links, Script

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class BrokenLink:
    """The state of a link to a peer whose connection broke and is being restored.

    Attributes:
        since_s: for how many seconds the connection has been broken.
        patience_s: after how many seconds of a break the peer counts as having left.
        why: the error that broke the connection, or the last attempt to restore it.
    """

    since_s: float
    patience_s: float
    why: str


class Transport(Protocol):
    """A carrier of one party's encrypted messages (frames) to and from its peers.

    The messages of each peer arrive in the order of sending.
    """

    def send_frame(self, receiver: str, frame: bytes) -> None:
        """Send an encrypted message to a peer, without waiting for its arrival."""

    def receive_frame(self, awaited: Awaited, timeout_s: float) -> Frame:
        """Wait at most `timeout_s` seconds for a frame from one of the awaited senders.

        Returns the sender's name and the frame.

        Raises PartyLeftError: fewer awaited senders than `awaited.least` are still connected, or
            nothing came in time.
        """

    def find_rejoining(self, names: Collection[str]) -> Collection[str]:
        """Return which of these peers, which left the session, are ready for a new one.

        They cannot take part in the present session. Some transports look for them in the
        background, from the first call on.
        """

    def list_broken_links(self) -> Mapping[str, BrokenLink]:
        """Return, by peer, the state of each link that is broken and may be restored."""

    def close(self) -> None:
        """Deliver all sent frames, then end."""


class WaitObserver(Protocol):
    """An observer of the messages that one role waits for, and of the peers that left."""

    def observe_wait(self, awaited: Awaited, timeout_s: float) -> None:
        """Note that the role starts to wait for a message, for at most `timeout_s` seconds."""

    def observe_departure(self, names: Iterable[str]) -> None:
        """Note which peers left, or were silent for too long."""


def run_role(
    script: Script[T],
    links: Links,
    transport: Transport,
    *,
    timeout_s: float,
    observer: WaitObserver | None = None,
) -> T:
    """Run one role's script to its end, return its result, and close the transport.

    If the script fails, the peers are notified that it stops, and its error is raised.

    Args:
        script: the role's coroutine, which yields the message that it waits for.
        links: the role's links, over which peers are notified if the script fails.
        transport: carries the role's messages.
        timeout_s: seconds of one unit of patience (see `Awaited`) where the contract of all parties
            sets none.
        observer: notified of waits and departures of peers; None: nobody is.
    """
    try:
        return run_script(script, transport, timeout_s=timeout_s, observer=observer)
    except BaseException as error:
        with contextlib.suppress(Exception):  # the error matters more than a failed notice of it
            links.abort(error)
        raise
    finally:
        transport.close()


def run_script(
    script: Script[T],
    transport: Transport,
    *,
    timeout_s: float,
    observer: WaitObserver | None = None,
) -> T:
    """Run a role's script to its end, over a transport that stays open, and return its result.

    Args:
        script: the role's coroutine, which yields the message that it waits for.
        transport: carries the role's messages.
        timeout_s: seconds of one unit of patience (see `Awaited`) where the contract of all parties
            sets none.
        observer: notified of waits and departures of peers; None: nobody is.
    """
    role = _RunningScript(script)
    event: Frame | PartyLeftError
    try:
        role.start()
        while role.awaited is not None:
            patience_s = (role.awaited.unit_s or timeout_s) * role.awaited.patience
            if observer:
                observer.observe_wait(role.awaited, patience_s)
            try:
                event = transport.receive_frame(role.awaited, patience_s)
            except PartyLeftError as error:
                event = error
                if observer:
                    observer.observe_departure(error.missing_parties)
            role.advance(event)
    finally:
        role.close()
    result: T = role.result
    return result


class InMemoryNetwork:
    """A network that runs all roles of a session in one process, deterministically and without a
    clock.

    Every link is a FIFO queue. If all roles wait and no frame is under way, a party has fallen
    silent. Then the role with the least patience gets a PartyLeftError first, as it would between
    machines.

    Args:
        names: names of all parties.
        record: called with every envelope that is sent, and its size in bytes with header and
            encryption.

    Attributes:
        links: each party's links, by its name.
    """

    def __init__(
        self,
        names: Iterable[str],
        record: Callable[[Envelope, int], None] = lambda envelope, wire_bytes: None,
    ) -> None:
        """Create a queue and links for every party."""
        self._inboxes: defaultdict[str, deque[Frame]] = defaultdict(deque)
        # Names of parties that may have a deliverable frame, in the order of sending; a name may
        # occur several times.
        self._receivers: deque[str] = deque()
        self._roles: dict[str, _RunningScript] = {}
        all_names = tuple(names)
        self.links = {
            name: Links(
                name,
                [peer for peer in all_names if peer != name],
                partial(self.queue_frame, name),
                record,
            )
            for name in all_names
        }

    def queue_frame(self, sender: str, receiver: str, frame: bytes) -> None:
        """Append a sent frame to the receiver's queue; it is delivered when a script awaits it."""
        self._inboxes[receiver].append((sender, frame))
        self._receivers.append(receiver)

    def start_script(self, name: str, script: Script[Any]) -> "_RunningScript":
        """Run a party's script up to its first wait, and return it.

        It continues when `run_script` or `run_scripts` delivers messages.

        Raises LocalProtocolError: the party runs another script, which has not ended.
        """
        current = self._roles.get(name)
        if current is not None and not current.is_ended:
            script.close()
            raise LocalProtocolError(f"{name} plays a script already, which has not ended")
        role = _RunningScript(script)
        self._roles[name] = role
        with self._end_scripts_on_error():
            role.start()
        self._receivers.append(name)  # a frame may have come for it before
        return role

    def replace_script(self, name: str, script: Script[Any]) -> None:
        """Stop a party's script where it waits, and start another script for the party."""
        if name in self._roles:
            self._roles[name].close()
        self.start_script(name, script)

    def run_script(self, name: str, script: Script[T]) -> T:
        """Run a party's script to its end, and return its result.

        Scripts of other parties that were started before run, too, until no message can be
        delivered. An error of any script ends all of them, and is raised.

        Raises LocalProtocolError: the party runs another script, which has not ended.
        """
        result: T = self.run_scripts({name: script})[name]
        return result

    def run_scripts(self, scripts: Mapping[str, Script[Any]]) -> dict[str, Any]:
        """Run the scripts of several parties, by name, to their ends; return their results by name.

        An error of any script ends all of them, and is raised.
        """
        unstarted = dict(scripts)
        try:
            for name in scripts:
                self.start_script(name, unstarted.pop(name))
        finally:
            for script in unstarted.values():
                script.close()  # a script before it failed, so it was not started
        with self._end_scripts_on_error():
            for name in scripts:
                while not self._roles[name].is_ended:
                    if not self._deliver_frame():
                        self._raise_timeout()
            while self._deliver_frame():
                pass  # other scripts may still react to the last messages
        return {name: self._roles[name].result for name in scripts}

    def close(self) -> None:
        """End every script where it waits."""
        for role in self._roles.values():
            role.close()

    @contextlib.contextmanager
    def _end_scripts_on_error(self) -> Iterator[None]:
        """End all scripts if an error leaves the `with` block."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _deliver_frame(self) -> bool:
        """Deliver the oldest frame that a script awaits, and run that script up to its next wait.

        Returns whether there was such a frame.
        """
        while self._receivers:
            name = self._receivers.popleft()
            role = self._roles.get(name)
            inbox = self._inboxes[name]
            if role is None or role.awaited is None:
                continue  # its frames stay in the inbox until its next wait
            for index, (sender, _) in enumerate(inbox):
                if sender in role.awaited.senders:
                    frame = inbox[index]
                    del inbox[index]
                    self._receivers.append(name)  # its next frame may be deliverable after this one
                    role.advance(frame)
                    return True
        return False

    def _raise_timeout(self) -> None:
        """Raise PartyLeftError in the waiting script that would time out first between machines.

        Called when all scripts wait and no frame is under way. A script too many of whose awaited
        senders have ended is first, else the script with the least patience.
        """
        awaited_by_party = {
            name: role.awaited for name, role in self._roles.items() if role.awaited
        }
        if not awaited_by_party:
            raise LocalProtocolError("no role waits for anything, and not all have ended")
        gone_senders_by_party = {
            name: self._list_gone_senders(awaited) for name, awaited in awaited_by_party.items()
        }
        patience_by_party = {
            name: 0 if gone_senders_by_party[name] else awaited.patience
            for name, awaited in awaited_by_party.items()
        }
        name = min(patience_by_party, key=patience_by_party.__getitem__)
        awaited = awaited_by_party[name]
        self._receivers.append(name)  # what it awaits after this error may have come before
        error = PartyLeftError(
            f"{awaited}; nothing came",
            missing_parties=gone_senders_by_party[name] or awaited.senders,
        )
        self._roles[name].advance(error)

    def _list_gone_senders(self, awaited: Awaited) -> tuple[str, ...]:
        """Return the awaited senders whose scripts have ended; empty if enough others remain."""
        gone_senders = tuple(
            sender
            for sender in awaited.senders
            if sender in self._roles and self._roles[sender].is_ended
        )
        remaining_count = len(awaited.senders) - len(gone_senders)
        return gone_senders if remaining_count < awaited.min_senders else ()


class _RunningScript:
    """A role's script (a coroutine) under way.

    Attributes:
        awaited: the message that the script waits for; None: it is not waiting.
        is_ended: whether the script has returned, failed or been closed.
        result: what the script returned; None before.
    """

    def __init__(self, script: Script[Any]) -> None:
        """Wrap a script that has not run yet; `start` runs it."""
        self._script = script
        self.awaited: Awaited | None = None
        self.is_ended = False
        self.result: Any = None

    def start(self) -> None:
        """Run the script up to the first message that it awaits, or to its end."""
        self._resume(None)

    def advance(self, event: Frame | PartyLeftError) -> None:
        """Run the waiting script up to the next message that it awaits, or to its end.

        `event`: the frame that the script awaited, or an error to raise in it since none came.
        """
        self._resume(event)

    def _resume(self, event: Frame | PartyLeftError | None) -> None:
        """Resume the coroutine with an event, or start it with None; update the attributes."""
        self.awaited = None
        try:
            if isinstance(event, PartyLeftError):
                self.awaited = self._script.throw(event)
            else:
                # A coroutine is started by sending None.
                self.awaited = self._script.send(event)  # type: ignore[arg-type]
        except StopIteration as end:
            self.is_ended = True
            self.result = end.value
        except BaseException:
            self.is_ended = True
            raise

    def close(self) -> None:
        """Stop the script where it waits."""
        self.awaited = None
        self.is_ended = True
        self._script.close()
