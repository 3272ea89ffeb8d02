"""Signs of life: who computes for long tells those that may wait for it how far it is.

Run by: both ends of a link. A sign is sent by the very thread that computes, between two pieces of
its work, and says how many IDs are behind it; none comes of a computation that hangs, of a process
that was stopped, or of a thread that has nothing to do with the work. A sign only renews the
patience of who waits. Each stands for `IDS_A_SIGN` IDs of work, and how much work there can be
follows from the numbers of IDs, so everybody knows how many signs a peer may send at most: nobody
is kept waiting for ever by signs alone.
"""

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from apfed_protocols.errors import RemoteProtocolError
from secure_apfed.exchange.envelope import Envelope

__all__ = ["IDS_A_SIGN", "Pulse", "SignsHeard", "most_signs"]

IDS_A_SIGN = 2**16
"""Some 2.6 s of a thread that takes 40 us for an ID."""

_SPARE_SIGNS = 4
_DONE = struct.Struct(">Q")


def most_signs(work: int) -> int:
    """How many signs a party may send for so much work, in IDs, of its own.

    Twice as many as it makes: of a party that it waits for, too, others hear from it (see
    `Pulse.relay`).
    """
    return 2 * (work // IDS_A_SIGN) + _SPARE_SIGNS


class Pulse:
    """Sends signs of life of this party's work.

    Args:
        send: delivers a sign to a peer.
        peers: who may wait for this party.
    """

    def __init__(self, send: Callable[[str, bytes], None], peers: Sequence[str]) -> None:
        self._send, self._peers = send, tuple(peers)
        self._done = self._told = 0

    def worked(self, ids: int) -> None:
        """Note work on so many more IDs; tell the peers where it has become much."""
        self._done += ids
        if self._done - self._told >= IDS_A_SIGN:
            self._tell(self._peers)

    def relay(self, sender: str) -> None:
        """Pass on that `sender` is alive, for whom this party waits, to those who wait for it."""
        self._done = max(self._done, self._told + IDS_A_SIGN)
        self._tell([peer for peer in self._peers if peer != sender])

    def _tell(self, peers: Sequence[str]) -> None:
        self._told = self._done
        for peer in peers:
            self._send(peer, _DONE.pack(self._done))


class SignsHeard:
    """What this party heard of its peers, and how many more signs it takes of each.

    Attributes:
        relay: told who gave a sign.
    """

    def __init__(self, me: str) -> None:
        self._me = me
        self._left: dict[str, int] = {}
        self._done: dict[str, int] = {}
        self.relay: Callable[[str], None] = lambda sender: None

    def allow(self, signs: Mapping[str, int]) -> None:
        """Take so many more signs of these peers, in place of what was allowed before."""
        self._left |= signs

    @contextmanager
    def at_most(self, signs: Mapping[str, int]) -> Iterator[None]:
        """Take no more than so many within the block, nor more than was allowed before."""
        before = {peer: self._left.get(peer, 0) for peer in signs}
        within = {peer: min(count, before[peer]) for peer, count in signs.items()}
        self._left |= within
        try:
            yield
        finally:
            used = {peer: within[peer] - self._left[peer] for peer in signs}
            self._left |= {peer: before[peer] - used[peer] for peer in signs}

    def hear(self, envelope: Envelope) -> None:
        """Take a sign.

        Raises:
            RemoteProtocolError: malformed, of no progress, or one more than there can be.
        """
        sender, left = envelope.sender, self._left.get(envelope.sender, 0)
        if len(envelope.payload) != _DONE.size:
            raise RemoteProtocolError(f"{sender} sent {self._me} a malformed sign of life")
        (done,) = _DONE.unpack(envelope.payload)
        if done < self._done.get(sender, 0) + IDS_A_SIGN:
            raise RemoteProtocolError(
                f"{sender} sent {self._me} a sign of life without progress: {done} IDs done, after "
                f"{self._done.get(sender, 0)}; each stands for {IDS_A_SIGN} more"
            )
        if left <= 0:
            raise RemoteProtocolError(
                f"{sender} sent {self._me} more signs of life than its work can take, and nothing "
                "else; it keeps others waiting. Look at its log, then start all parties again"
            )
        self._left[sender], self._done[sender] = left - 1, done
        self.relay(sender)
