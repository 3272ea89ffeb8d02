"""One party's links to its peers across machines: a transport that outlives its connections.

Run by: the driver of one role (`drivers.play_one`), with one `ResumableLink` for each peer. Cut
connections are made anew and nothing is lost; a peer that gives no sign of life for longer than the
patience has left.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import Self

from protocols.errors import PartyLeftError, RemoteProtocolError
from secure_apfed.exchange.links import Awaited, Frame
from secure_apfed.exchange.resumable_link import Connection, ResumableLink

__all__ = ["Linked"]

_FLUSH_S, _LINGER_S = 5.0, 2.0


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
        self._me, self._end = me, end
        self._news = threading.Event()
        self._links = {
            peer: ResumableLink(
                peer, dial, patience_s=patience_s, first_s=meet_s, on_change=self._news.set
            )
            for peer, dial in connect.items()
        }

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
            gone = tuple(name for name in awaited.senders if self._links[name].failure)
            if len(awaited.senders) - len(gone) < awaited.least:
                why = "; ".join(dict.fromkeys(self._links[name].failure for name in gone))
                raise PartyLeftError(f"{awaited.phase}: {awaited}; {why}", left=gone)
            left = deadline - time.monotonic()
            if left <= 0:
                raise PartyLeftError(
                    f"{awaited.phase}: {awaited}; nothing came for {timeout_s:g} s",
                    left=awaited.senders,
                )
            self._news.wait(left)

    def close(self) -> None:
        """Let the peers have what was sent, and end; waits a few seconds at most."""
        closing = [threading.Thread(target=_close, args=(link,)) for link in self._links.values()]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()
        self._end()


def _close(link: ResumableLink) -> None:
    with contextlib.suppress(RemoteProtocolError):  # whoever lacks something was waited for
        link.close(_FLUSH_S, linger_s=_LINGER_S)
