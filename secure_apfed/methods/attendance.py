"""Who of the passives still takes part in a session, and what happens when one falls silent.

Kept by: the method, for the aggregator, which is the one that notices. The contract says
whether the run stops for all then, or goes on with those who are left. Who fell silent
stays out until the next session.
"""

from collections.abc import Mapping, Sequence

from protocols.errors import PartyLeftError
from secure_apfed.contract import AGGREGATOR, Contract
from secure_apfed.exchange import Envelope, Kind, Transport

__all__ = ["Attendance"]


class Attendance:
    """Attributes:
    left: those who fell silent, and in which step.
    steps_without_all: steps that were finished without somebody.
    """

    def __init__(self, contract: Contract) -> None:
        self._contract = contract
        self.left: dict[str, int] = {}
        self.steps_without_all = 0

    @property
    def present(self) -> Sequence[str]:
        """The passives who take part, in the contract's order."""
        return [name for name in self._contract.passives if name not in self.left]

    def gather(self, channel: Transport, kind: Kind, step: int) -> list[Envelope]:
        """What the aggregator receives of one kind, one envelope of each passive that sends.

        Raises:
            PartyLeftError: one fell silent, and the contract says to stop.
        """
        arrived = []
        for name in self.present:
            try:
                arrived.append(channel.receive(AGGREGATOR, sender=name, kind=kind, step=step))
            except PartyLeftError as error:
                if self._contract.when_a_party_leaves == "abort":
                    raise PartyLeftError(
                        f"{error}; the contract says to stop when a party leaves: resume once "
                        f"{name} is back, or agree on recoverable masks (secure_sum.masks) with a "
                        "threshold below the number of passives"
                    ) from error
                self.left[name] = step
        return arrived

    def finish_step(self) -> None:
        """Count a step whose sum the active has opened."""
        self.steps_without_all += bool(self.left)

    def facts(self) -> Mapping[str, object]:
        """For the result of a run."""
        return {"left": dict(self.left), "steps_without_all": self.steps_without_all}
