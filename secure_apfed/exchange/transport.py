"""Carrying envelopes. The interface is two methods; in memory is the embedded default.

Run by: whoever plays one or more parties. Every envelope is sealed end to end between
its two parties, in memory as well, so that what is measured is what a deployment sends
and a message under another contract, replayed, reordered or altered is refused.
"""

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

from protocols.errors import LocalProtocolError, PartyLeftError, RemoteProtocolError
from protocols.seal import RunKey, SealedLink
from secure_apfed.exchange.envelope import Envelope, Kind

__all__ = ["InMemoryTransport", "Transport"]

_LENGTH_BYTES = 2


class Transport(Protocol):
    """Sends and receives envelopes for the parties that this process plays."""

    def send(self, envelope: Envelope) -> int:
        """Carry one envelope; return the bytes that it took on the wire."""
        ...

    def receive(self, receiver: str, *, sender: str, kind: Kind, step: int) -> Envelope:
        """Return the next envelope from `sender` to `receiver`.

        Raises:
            PartyLeftError: nothing came.
            RemoteProtocolError: something else came than what was expected here.
        """
        ...


class InMemoryTransport:
    """All parties in one process, one first-in-first-out queue for each directed pair.

    Args:
        session: the run; envelopes of another one are refused.
        contract_hash: 32 bytes that both ends of every link must share.
        run_keys: the key pair of every party that this process plays.
    """

    def __init__(
        self, *, session: str, contract_hash: bytes, run_keys: Mapping[str, RunKey]
    ) -> None:
        self._session = session
        self._frames: defaultdict[tuple[str, str], deque[bytes]] = defaultdict(deque)
        self._links = {
            (me, peer): SealedLink(
                me=me, peer=peer, run_key=run_keys[me], contract_hash=contract_hash
            )
            for me in run_keys for peer in run_keys if me != peer
        }  # fmt: skip
        for (me, peer), link in self._links.items():
            # Between machines hellos travel before the first envelope, with the public keys.
            link.agree(run_keys[peer].public, self._links[peer, me].hello)

    def _link(self, me: str, peer: str) -> SealedLink:
        try:
            return self._links[me, peer]
        except KeyError:
            names = ", ".join(sorted({name for name, _ in self._links}))
            raise LocalProtocolError(
                f"there is no link from {me!r} to {peer!r}; the parties are {names}"
            ) from None

    def send(self, envelope: Envelope) -> int:
        """Seal and queue one envelope; return its bytes on the wire."""
        if envelope.session != self._session:
            raise LocalProtocolError(
                f"{envelope.sender} sent an envelope of session {envelope.session!r}, "
                f"this one is {self._session!r}"
            )
        header = envelope.header
        sealed = self._link(envelope.sender, envelope.receiver).seal(
            envelope.payload, sequence=envelope.sequence, associated=header
        )
        frame = len(header).to_bytes(_LENGTH_BYTES, "big") + header + sealed
        self._frames[envelope.sender, envelope.receiver].append(frame)
        return len(frame)

    def receive(self, receiver: str, *, sender: str, kind: Kind, step: int) -> Envelope:
        """Open the next frame from `sender` and check that it is what is expected here."""
        link = self._link(receiver, sender)
        queue = self._frames[sender, receiver]
        if not queue:
            raise PartyLeftError(
                f"{receiver} expected {kind} of step {step} from {sender}; nothing came"
            )
        envelope = self._open(queue.popleft(), link)
        if (envelope.kind, envelope.step) != (kind, step):
            raise RemoteProtocolError(
                f"{receiver} expected {kind} of step {step} from {sender}, "
                f"got {envelope.kind} of step {envelope.step}"
            )
        return envelope

    def _open(self, frame: bytes, link: SealedLink) -> Envelope:
        sender, receiver = link.peer, link.me
        length = int.from_bytes(frame[:_LENGTH_BYTES], "big")
        header, sealed = (
            frame[_LENGTH_BYTES : _LENGTH_BYTES + length],
            frame[_LENGTH_BYTES + length :],
        )
        claimed = Envelope.parse_header(header)
        if (claimed.session, claimed.sender, claimed.receiver) != (self._session, sender, receiver):
            raise RemoteProtocolError(
                f"{receiver}: a frame on the link from {sender} claims to be from {claimed.sender} "
                f"to {claimed.receiver} in session {claimed.session!r}"
            )
        payload = link.open(sealed, sequence=claimed.sequence, associated=header)
        return replace(claimed, payload=payload)
