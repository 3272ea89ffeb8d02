"""The aggregator: adds what it cannot read. Holds no key of the secure sum."""

from collections.abc import Sequence

from protocols.errors import RemoteProtocolError
from protocols.sums import SumCombiner
from secure_apfed.exchange import Envelope, Kind
from secure_apfed.parties.party import Party, Seat

__all__ = ["AggregatorParty"]


class AggregatorParty(Party):
    """Adds one contribution of every passive and forwards the sum to the active.

    Args:
        combiner: its end of the secure sum.
    """

    def __init__(self, seat: Seat, *, combiner: SumCombiner) -> None:
        super().__init__(seat)
        self.combiner = combiner

    def combine(self, envelopes: Sequence[Envelope]) -> Envelope:
        """Combine the contributions of one step.

        Raises:
            RemoteProtocolError: one is missing, doubled, malformed, or answers another
                message than the rest.
        """
        contributions = {envelope.sender: envelope.payload for envelope in envelopes}
        if len(contributions) < len(envelopes):
            senders = ", ".join(envelope.sender for envelope in envelopes)
            raise RemoteProtocolError(
                f"a party contributed twice to one sum; it came from {senders}"
            )
        body = self.combiner.combine(contributions)
        return self.outbox.write(Kind.SUM, envelopes[0].step, self.contract.active, body)
