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
    """The state of a link whose connection broke, and which tries to reconnect.

    Attributes:
        since_s: an age: for how many seconds it has been broken.
        patience_s: the age at which its peer counts as having left.
        why: what broke it, or the last attempt to connect again.
    """

    since_s: float
    patience_s: float
    why: str


class Transport(Protocol):
    """A carrier of one party's frames to and from its peers, each link in order."""

    def send_frame(self, receiver: str, frame: bytes) -> None:
        """Send a frame, without waiting for its arrival."""

    def receive_frame(self, awaited: Awaited, timeout_s: float) -> Frame:
        """Wait for a frame from one of the awaited senders, at most `timeout_s` seconds.

        Raises PartyLeftError: fewer of them than `awaited.least` remain, or nothing came in time.
        """

    def find_rejoining(self, names: Collection[str]) -> Collection[str]:
        """Return which of these peers, who left, wait for a new session.

        They cannot take part in the present one. Some transports look for them in the background,
        from the first call on.
        """

    def list_broken_links(self) -> Mapping[str, BrokenLink]:
        """Return by peer the links that are broken and may be restored."""

    def close(self) -> None:
        """Deliver all sent frames, then end."""


class WaitObserver(Protocol):
    """An observer of what one role waits for, and of who is known to have left."""

    def observe_wait(self, awaited: Awaited, timeout_s: float) -> None:
        """Note that the role starts to wait, for at most this many seconds."""

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

    If the script fails, the peers are notified that it stops.

    Args:
        script: the role.
        links: the role's links, over which peers are notified if the script fails.
        transport: carries its frames.
        timeout_s: seconds of one unit of patience, unless the contract says otherwise.
        observer: notified of waits and departures; None: nobody.
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
    """Run a script to its end, over a transport that stays open, and return its result.

    `script`: the role. `transport`: carries its frames. `timeout_s`: seconds of one unit of
    patience, unless the contract says otherwise. `observer`: notified of waits and departures;
    None: nobody.
    """
    role = _RunningScript(script)
    event: Frame | PartyLeftError | None = None
    try:
        role.advance(event)
        while role.awaited is not None:
            patience_s = (role.awaited.unit_s or timeout_s) * role.awaited.patience
            if observer:
                observer.observe_wait(role.awaited, patience_s)
            try:
                event = transport.receive_frame(role.awaited, patience_s)
            except PartyLeftError as error:
                event = error
                if observer:
                    observer.observe_departure(error.left)
            role.advance(event)
    finally:
        role.close()
    result: T = role.result
    return result


class InMemoryNetwork:
    """A network that runs all roles of a session in one process, deterministically and without a
    clock.

    Every link is a FIFO queue. If all roles wait and no frame is under way, a party has fallen
    silent: the role with the least patience gets a PartyLeftError first, as it would between
    machines.

    Args:
        names: names of all parties.
        record: called with every envelope that is sent and its bytes on the wire.

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
        # Names of parties for which a frame may have come, in the order of sending.
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
        """Put a frame into the receiver's queue, in the order of sending."""
        self._inboxes[receiver].append((sender, frame))
        self._receivers.append(receiver)

    def start_script(self, name: str, script: Script[Any]) -> "_RunningScript":
        """Run a party's script up to its first wait; it goes on when messages for it are delivered.

        Raises LocalProtocolError: the party runs another script.
        """
        current = self._roles.get(name)
        if current is not None and not current.ended:
            script.close()
            raise LocalProtocolError(f"{name} plays a script already, which has not ended")
        role = _RunningScript(script)
        self._roles[name] = role
        with self._end_scripts_on_error():
            role.advance(None)
        self._receivers.append(name)  # a frame may have come for it before
        return role

    def replace_script(self, name: str, script: Script[Any]) -> None:
        """Stop this party's script where it waits, and let it run another one."""
        if name in self._roles:
            self._roles[name].close()
        self.start_script(name, script)

    def run_script(self, name: str, script: Script[T]) -> T:
        """Run a party's script to its end, and the others until no frame can be delivered.

        Returns the script's result. An error of any script ends all of them, and is raised.

        Raises LocalProtocolError: the party runs another script.
        """
        result: T = self.run_scripts({name: script})[name]
        return result

    def run_scripts(self, scripts: Mapping[str, Script[Any]]) -> dict[str, Any]:
        """Run all these scripts to their ends; return their results by party."""
        unstarted = dict(scripts)
        try:
            for name in scripts:
                self.start_script(name, unstarted.pop(name))
        finally:
            for script in unstarted.values():
                script.close()  # a script before it failed, so it was not started
        with self._end_scripts_on_error():
            for name in scripts:
                while not self._roles[name].ended:
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

        Returns False if there is none.
        """
        while self._receivers:
            name = self._receivers.popleft()
            role = self._roles.get(name)
            inbox = self._inboxes[name]
            if role is None or role.awaited is None:
                continue
            for index, (sender, _) in enumerate(inbox):
                if sender in role.awaited.senders:
                    frame = inbox[index]
                    del inbox[index]
                    self._receivers.append(name)  # its next frame may be deliverable after this one
                    role.advance(frame)
                    return True
        return False

    def _raise_timeout(self) -> None:
        """Raise PartyLeftError in the waiting script that would notice first between machines.

        Called when all scripts wait and no frame is under way. First is a script whose awaited
        senders have ended, else the one with the least patience.
        """
        ended = {name for name, role in self._roles.items() if role.ended}

        def list_gone_senders(awaited: Awaited) -> tuple[str, ...]:
            """Return the awaited senders that left, if too few remain; else none."""
            departed = tuple(name for name in awaited.senders if name in ended)
            return departed if len(awaited.senders) - len(departed) < awaited.least else ()

        waiting = {name: role.awaited for name, role in self._roles.items() if role.awaited}
        if not waiting:
            raise LocalProtocolError("no role waits for anything, and not all have ended")
        name = min(
            waiting,
            key=lambda name: 0 if list_gone_senders(waiting[name]) else waiting[name].patience,
        )
        awaited = waiting[name]
        self._receivers.append(name)  # what it awaits after this error may have come before
        error = PartyLeftError(
            f"{awaited}; nothing came", left=list_gone_senders(awaited) or awaited.senders
        )
        self._roles[name].advance(error)


class _RunningScript:
    """A script under way.

    Attributes:
        awaited: the message that it waits for; None: it is not waiting.
        ended: whether it has returned, failed or been closed.
        result: what it returned; None before.
    """

    def __init__(self, script: Script[Any]) -> None:
        """Take the script, which has not run yet."""
        self._script = script
        self.awaited: Awaited | None = None
        self.ended = False
        self.result: Any = None

    def advance(self, event: Frame | PartyLeftError | None) -> None:
        """Run the script up to the next message that it awaits, or to its end.

        `event`: the message or departure that it awaited; None: start.
        """
        self.awaited = None
        try:
            if isinstance(event, PartyLeftError):
                self.awaited = self._script.throw(event)
            else:
                # None starts the coroutine.
                self.awaited = self._script.send(event)  # type: ignore[arg-type]
        except StopIteration as end:
            self.ended = True
            self.result = end.value
        except BaseException:
            self.ended = True
            raise

    def close(self) -> None:
        """Stop the script where it waits."""
        self.awaited = None
        self.ended = True
        self._script.close()
