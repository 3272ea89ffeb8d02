"""APFed (Section 3): passives help during training, the active predicts alone afterwards.

`Apfed.step` is the whole protocol of one step with all roles in order. SingleVL is the
same without passives: the active trains on its own loss.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from secure_apfed.contract import AGGREGATOR, Contract
from secure_apfed.exchange import Kind, Transcript
from secure_apfed.facts import MethodFacts
from secure_apfed.methods.attendance import Attendance
from secure_apfed.methods.method import PartyTensors, restore_state, state_of
from secure_apfed.objectives import ContrastiveSettings, ReconstructionSettings
from secure_apfed.parties import ActiveNetworks, ActiveParty, AggregatorParty, PassiveParty
from secure_apfed.privacy import PrivacyLedger, WholeTraining

__all__ = ["APFED", "APFED_C", "APFED_R", "SINGLE_VIEW", "Apfed"]

APFED = MethodFacts(
    title="APFed",
    predicts_alone=True,
    representations_from="active",
    sums_gradients=True,
    trains_privately=True,
    takes_pairwise=True,
)
APFED_R = replace(APFED, title="APFed-R", own_objective=ReconstructionSettings())
APFED_C = replace(APFED, title="APFed-C", own_objective=ContrastiveSettings())
SINGLE_VIEW = MethodFacts(
    title="SingleVL", predicts_alone=True, has_passives=False, trains_privately=True
)


@dataclass(kw_only=True)
class Apfed:
    """Active-passive federated learning between parties that are set up; see `Method`."""

    headline: str
    contract: Contract
    transcript: Transcript
    alignment: Mapping[str, Tensor]
    active: ActiveParty
    passives: list[PassiveParty]
    aggregator: AggregatorParty | None
    ledgers: Mapping[str, PrivacyLedger]
    training: WholeTraining | None
    guarantee: str
    secure_sum: Mapping[str, object]
    training_rows: Tensor
    test_rows: Tensor
    contributions: Mapping[str, PrivacyLedger] = field(default_factory=dict)
    rounds: int = 1
    smallest_batch: int = 2

    def __post_init__(self) -> None:
        self.roll = Attendance(self.contract)
        for passive in self.passives:
            passive.wait()

    def step(self, step: int, rows_B: Tensor) -> float:
        """All roles of one step, in protocol order (Alg. 1).

        2M + 1 envelopes with M passives present; 4M + 1 where the sum has two rounds.
        """
        channel, active, aggregator = self.transcript, self.active, self.aggregator
        envelopes = active.represent(step, rows_B)
        if not envelopes or aggregator is None:
            return active.update(None)
        for envelope in envelopes:
            if envelope.receiver in self.roll.present:
                channel.send(envelope)
        for passive in self._present():
            received = channel.receive(
                passive.name, sender=active.name, kind=Kind.REPRESENTATIONS, step=step
            )
            channel.send(passive.contribute(received))
        bodies = self.roll.gather(channel, Kind.CONTRIBUTION, step)
        if self.rounds == 2:
            for request in aggregator.ask(bodies):
                channel.send(request)
            for passive in self._present():
                received = channel.receive(
                    passive.name, sender=AGGREGATOR, kind=Kind.SUM_REQUEST, step=step
                )
                channel.send(passive.answer(received))
            bodies = self.roll.gather(channel, Kind.SUM_ANSWER, step)
        channel.send(aggregator.combine(bodies))
        for passive in self._present():
            passive.wait()
        loss = active.update(
            channel.receive(active.name, sender=AGGREGATOR, kind=Kind.SUM, step=step)
        )
        if active.opened is not None:
            channel.keep_opened(step, active.opened)
        self.roll.finish_step()
        return loss

    def _present(self) -> list[PassiveParty]:
        """The passives that take part still."""
        return [passive for passive in self.passives if passive.name in self.roll.present]

    def attendance(self) -> Mapping[str, object]:
        """Who fell silent in this session, and how many steps went on without somebody."""
        return self.roll.facts() if self.passives else {}

    def evaluate(self, *, next_step: int, final: bool) -> dict[str, float]:
        """Accuracy of the active alone; needs no exchange."""
        return {self.headline: self.active.accuracy(self.test_rows)}

    def solo(self) -> ActiveNetworks | None:
        """The active's own networks: that is the point of the method."""
        return self.active.networks

    def encoders(self) -> Mapping[str, nn.Module]:
        """None: no passive sends representations."""
        return {}

    def tensors(self) -> PartyTensors:
        """State of all parties."""
        return state_of(self.active, self.passives)

    def load_tensors(self, tensors: PartyTensors, *, next_step: int) -> None:
        """Restore what `tensors` returned before step `next_step`."""
        restore_state(self.active, self.passives, tensors, next_step=next_step)
