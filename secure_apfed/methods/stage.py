"""Setting the stage, the same for every method: contract, links, alignment, guards.

Run by: the session that plays all parties; across organisations each party does its part.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from protocols.conversation import Conversation
from protocols.seal import fresh_run_key
from secure_apfed.contract import AGGREGATOR, Contract, Participant, PartyRole, PassiveTerms
from secure_apfed.exchange import InMemoryTransport, Kind, Transcript
from secure_apfed.exchange.conversation import hold_conversation
from secure_apfed.exchange.outbox import Outbox
from secure_apfed.methods.aligning import DEALER, align_over, needs_dealer
from secure_apfed.methods.method import Start
from secure_apfed.parties import Seat

__all__ = ["DEALER", "Stage", "set_stage"]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What stands before the parties of a method are built.

    Attributes:
        contract: of this session; transcript: the recorded transport.
        outboxes: by party.
        alignment: by party with rows, positions in its own table, -1 where it has none.
    """

    contract: Contract
    transcript: Transcript
    outboxes: Mapping[str, Outbox]
    alignment: Mapping[str, Tensor]

    def seat(self, name: str) -> Seat:
        """The place of one party."""
        return Seat(name, self.contract, self.outboxes[name])

    def hold(self, kind: Kind, roles: Mapping[str, Conversation]) -> None:
        """Play an interactive protocol between its roles."""
        hold_conversation(kind, roles, self.outboxes, self.transcript)


def set_stage(
    start: Start, *, terms: Mapping[str, PassiveTerms], secure_sum: Mapping[str, Any]
) -> Stage:
    """Draw up the contract, open the links and align.

    Args:
        start: the session's beginning.
        terms: of every passive; empty where the active trains alone.
        secure_sum: the sum's public parameters; empty where no sum is needed.

    Raises:
        DataError: IDs that cannot be aligned.
        IntersectionTooSmallError: fewer common IDs than agreed.
    """
    roles = _roles(start, terms, aggregates=bool(secure_sum))
    run_keys = {name: fresh_run_key() for name in roles}
    public_keys = {name: key.public.hex() for name, key in run_keys.items()}
    contract = _contract(start, roles, public_keys, terms, secure_sum)
    transport = InMemoryTransport(
        session=contract.session, contract_hash=contract.digest, run_keys=run_keys
    )
    stage = Stage(
        contract=contract,
        transcript=Transcript(transport, start.config.transcript),
        outboxes={name: Outbox(contract.session, name) for name in roles},
        alignment=dict(start.alignment or {}),
    )
    if not terms or start.alignment is not None:
        return stage
    return replace(stage, alignment=align_over(stage, start.data, start.config.alignment))


def _roles(
    start: Start, terms: Mapping[str, PassiveTerms], *, aggregates: bool
) -> dict[str, PartyRole]:
    """Names and roles of all parties."""
    roles: dict[str, PartyRole] = {start.data.active.name: "active"}
    roles.update((name, "passive") for name in terms)
    if aggregates:
        roles[AGGREGATOR] = "aggregator"
    if terms and needs_dealer(start.config.alignment):
        roles[DEALER] = "dealer"
    return roles


def _contract(
    start: Start,
    roles: Mapping[str, PartyRole],
    public_keys: Mapping[str, str],
    terms: Mapping[str, PassiveTerms],
    secure_sum: Mapping[str, Any],
) -> Contract:
    config = start.config
    return Contract(
        session=start.session,
        method=config.method,
        participants=tuple(
            Participant(name=name, role=role, public_key=public_keys[name])
            for name, role in roles.items()
        ),
        passives=dict(terms),
        alignment=config.alignment.terms(),
        secure_sum=dict(secure_sum),
        guard=config.guard.model_dump(mode="json", exclude={"noise"}),
        minimum_batch=config.rules.minimum_batch,
        epochs=config.train.epochs,
        batch_size=config.train.batch_size,
        spare_answers=config.rules.spare_answers,
        when_a_party_leaves=_when_a_party_leaves(secure_sum, passives=len(terms)),
    )


def _when_a_party_leaves(
    secure_sum: Mapping[str, Any], *, passives: int
) -> Literal["abort", "recover"]:
    """Recover where the sum has a threshold, and it lies below the number of passives."""
    return "recover" if secure_sum.get("threshold", passives) < passives else "abort"
