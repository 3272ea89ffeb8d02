"""One party's links to its peers across machines: a transport that outlives its connections.

Run by: the driver of one role (`drivers.play_one`), with one `ResumableLink` for each peer. Cut
connections are made anew and nothing is lost; a peer that gives no sign of life for longer than the
patience has left.
"""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Self

from apfed_protocols.errors import PartyLeftError, RemoteProtocolError
from secure_apfed.exchange.links import Awaited, Frame
from secure_apfed.exchange.resumable_link import Connection, ResumableLink, Silence

__all__ = ["Linked"]

_FLUSH_S, _LINGER_S = 5.0, 2.0
_GREETING_S, _LOOK_AGAIN_S = 2.0, 2.0
_PRESENT_S = 15.0  # for so long after its greeting a peer is taken to wait still


class Linked:
    """Links to all peers; see `secure_apfed.exchange.drivers.Transport`.

    Args:
        me: the party.
        connect: by peer, what makes an authenticated connection to it, or raises OSError.
        patience_s: how long a peer may give no sign of life.
        meet_s: the same until it came first.
        end: what is to be ended with the links, such as a port.
    """

    def __init__(
        self, me: str, connect: Mapping[str, Callable[[], Connection]], *,
        patience_s: float, meet_s: float, end: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._me, self._connect, self._end = me, connect, end
        self._lookouts: dict[str, _Lookout] = {}
        self._news = threading.Event()
        self._links = {
            peer: ResumableLink(
                peer, dial, patience_s=patience_s, first_s=meet_s, on_change=self._news.set
            )
            for peer, dial in connect.items()
        }
        self._silence = Silence(lambda name: self._links[name].failure)

    @classmethod
    def meet(
        cls, me: str, connect: Mapping[str, Callable[[], Connection]], *,
        patience_s: float, meet_s: float, end: Callable[[], None] = lambda: None,
    ) -> Self:  # fmt: skip
        """Links to peers that all have come.

        Raises:
            PartyLeftError: names those who did not come.
        """
        here = cls(me, connect, patience_s=patience_s, meet_s=meet_s, end=end)
        try:
            here._await_all(meet_s)
        except BaseException:
            here.close()
            raise
        return here

    def _await_all(self, meet_s: float) -> None:
        deadline = time.monotonic() + meet_s
        while missing := [peer for peer, link in self._links.items() if not link.connected]:
            self._news.clear()
            failed = [peer for peer in missing if self._links[peer].failure]
            if failed or time.monotonic() > deadline:
                blamed = failed or missing
                why = "; ".join(self._links[peer].state for peer in blamed)
                raise PartyLeftError(
                    f"agreement: {self._me} has no link to {' and '.join(blamed)}: {why}",
                    left=tuple(blamed),
                )
            self._news.wait(max(0.0, min(1.0, deadline - time.monotonic())))

    def post(self, receiver: str, frame: bytes) -> None:
        """Send a frame; whether it arrives shows in what comes back."""
        if receiver in self._lookouts:
            return  # its link is over
        try:
            self._links[receiver].send(frame)
        except RemoteProtocolError:
            self._news.set()  # whoever waits for this peer is told why

    def take(self, awaited: Awaited, timeout_s: float) -> Frame:
        """Wait for a frame of one of the awaited.

        Raises:
            PartyLeftError: too few of them are there still, or nothing came in time.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            self._news.clear()
            came = {
                since: name
                for name in awaited.senders
                if (since := self._links[name].waiting_since) is not None
            }
            if came:
                first = came[min(came)]
                return first, self._links[first].receive(0.0)
            self._news.wait(self._silence.bear(awaited, timeout_s, deadline=deadline))

    def returned(self, names: Collection[str]) -> list[str]:
        """Those that were there lately, ready to greet; looked for since they were first asked for.

        Their links are over from then on.
        """
        for name in set(names) - set(self._lookouts):
            self._lookouts[name] = _Lookout(self._connect[name], self._links[name])
        return [name for name in names if self._lookouts[name].found]

    def close(self) -> None:
        """Let the peers have what was sent, and end; waits a few seconds at most."""
        closing = [threading.Thread(target=_close, args=(link,))
                   for name, link in self._links.items() if name not in self._lookouts]  # fmt: skip
        for lookout in self._lookouts.values():
            lookout.end()
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()
        self._end()


def _close(link: ResumableLink) -> None:
    with contextlib.suppress(RemoteProtocolError):  # whoever lacks something was waited for
        link.close(_FLUSH_S, linger_s=_LINGER_S)


class _Lookout:
    """Finds out whether a peer is there again that a session goes on without.

    It comes as to any session: a connection that is proven, on which it greets. That connection is
    closed; the next session makes its own.
    """

    def __init__(self, connect: Callable[[], Connection], link: ResumableLink) -> None:
        self._connect, self._link = connect, link
        self._ended, self._greeted = threading.Event(), -math.inf
        threading.Thread(target=self._look, daemon=True).start()

    @property
    def found(self) -> bool:
        """Whether it was there lately."""
        return time.monotonic() < self._greeted + _PRESENT_S

    def end(self) -> None:
        """Look no more."""
        self._ended.set()

    def _look(self) -> None:
        _close(self._link)  # it is told that it was left out, if its process lives
        while not self._ended.is_set():
            if self._greets():
                self._greeted = time.monotonic()
            self._ended.wait(_LOOK_AGAIN_S)

    def _greets(self) -> bool:
        try:
            connection = self._connect()
            try:
                if not connection.poll(_GREETING_S):
                    return False
                connection.recv_bytes()
                return not connection.poll(0.0)  # whoever is there waits for an answer
            finally:
                connection.close()
        except (OSError, EOFError, RemoteProtocolError):
            return False
