"""The aggregator: adds what it cannot read. Holds no key of the secure sum."""

from collections.abc import Sequence

from protocols.errors import RemoteProtocolError
from protocols.sums import SumCombiner
from secure_apfed.exchange import Envelope, Kind
from secure_apfed.parties.party import Party, Seat

__all__ = ["AggregatorParty"]


class AggregatorParty(Party):
    """Adds one contribution of every passive and forwards the sum to the active.

    Where the sum has two rounds, it asks the passives once more before it adds.

    Args:
        combiner: its end of the secure sum.
    """

    def __init__(self, seat: Seat, *, combiner: SumCombiner) -> None:
        super().__init__(seat)
        self.combiner = combiner

    def ask(self, envelopes: Sequence[Envelope]) -> list[Envelope]:
        """Take the contributions of one step; return what each passive is asked about them.

        Raises:
            LocalProtocolError: the sum has one round.
            RemoteProtocolError: as `combine`.
        """
        requests = self.combiner.ask(_by_sender(envelopes))
        return [
            self.outbox.write(Kind.SUM_REQUEST, envelopes[0].step, passive, body)
            for passive, body in requests.items()
        ]

    def combine(self, envelopes: Sequence[Envelope]) -> Envelope:
        """Combine the contributions of one step, or the answers where the sum has two rounds.

        Raises:
            RemoteProtocolError: one is missing, doubled, malformed, or answers another
                message than the rest.
        """
        body = self.combiner.combine(_by_sender(envelopes))
        return self.outbox.write(Kind.SUM, envelopes[0].step, self.contract.active, body)


def _by_sender(envelopes: Sequence[Envelope]) -> dict[str, bytes]:
    bodies = {envelope.sender: envelope.payload for envelope in envelopes}
    if len(bodies) < len(envelopes):
        senders = ", ".join(envelope.sender for envelope in envelopes)
        raise RemoteProtocolError(f"a party contributed twice to one sum; it came from {senders}")
    return bodies
