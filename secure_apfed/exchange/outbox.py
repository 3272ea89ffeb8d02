"""What a party writes: envelopes, numbered on each link."""

from collections import Counter

from secure_apfed.exchange.envelope import Envelope, Kind

__all__ = ["Outbox"]


class Outbox:
    """Numbers the envelopes of one party in one session.

    Args:
        session: the run's session.
        sender: this party's name.
    """

    def __init__(self, session: str, sender: str) -> None:
        self._session, self._sender = session, sender
        self._written: Counter[str] = Counter()

    def write(self, kind: Kind, step: int, receiver: str, payload: bytes) -> Envelope:
        """Return the next envelope to `receiver`."""
        envelope = Envelope(
            session=self._session,
            step=step,
            kind=kind,
            sender=self._sender,
            receiver=receiver,
            sequence=self._written[receiver],
            payload=payload,
        )
        self._written[receiver] += 1
        return envelope
