"""How a party enters a session: what it brings and holds, the contract, and where it stands.

Every party draws the contract up for itself, from the settings and from what all say of themselves.
Where a run goes on, the active says of which run and from where; all say which steps they hold, and
the session goes on from the newest that all do.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from apfed_protocols.errors import RemoteProtocolError
from secure_apfed.contract import AGGREGATOR, Contract, Participant, PartyRole, Resumption
from secure_apfed.errors import CheckpointError, ConfigError
from secure_apfed.exchange import Agreement, Greeting, Links, agree
from secure_apfed.methods.accounts import require_no_releases
from secure_apfed.methods.alignment import DEALER, allow_signs, needs_dealer
from secure_apfed.methods.method import Agreed, Method, Own, PartyState
from secure_apfed.methods.terms import asked_of
from secure_apfed.settings import SilentPassive
from secure_apfed.settings.run import RunSettings

__all__ = ["enter", "roles_of", "standing"]


def roles_of(
    method: Method, config: RunSettings, active: str, passives: Sequence[str]
) -> dict[str, PartyRole]:
    roles: dict[str, PartyRole] = {active: "active"}
    if method.settings.has_passives:
        roles |= dict.fromkeys(passives, "passive")
    if method.declared.aggregates:
        roles[AGGREGATOR] = "aggregator"
    if method.declared.takes_dealer or (method.declared.aligns and needs_dealer(config.alignment)):
        roles[DEALER] = "dealer"
    return roles


async def enter(own: Own, links: Links, method: Method, *, session: str | None = None) -> Agreement:
    agreement = await agree(
        links,
        identity=own.secrets.identity,
        known=own.known,
        active=own.active,
        session=session,
        greeting=lambda run_key: Greeting(
            identity=own.secrets.identity.public,
            run_key=run_key.public,
            offer=method.offer(own) if own.held is not None else None,
            **_held(own),
        ),
        draw=lambda name, greetings: _draw(own, method, name, greetings),
    )
    links.unit_s = agreement.contract.patience_s
    links.needed = _needed(own, agreement.contract)
    if own.secrets.keeper is not None:
        own.secrets.keeper.agreed(agreement.contract, agreement.signatures)
    allow_signs(own, links)
    return agreement


def _needed(own: Own, contract: Contract) -> tuple[str, ...]:
    """The peers whose leaving ends the session: no dealer, who is done early."""
    recovers = contract.silent_passive == "recover"
    roles = ("active", "aggregator") if recovers else ("active", "aggregator", "passive")
    return tuple(name for role in roles for name in contract.names(role) if name != own.name)


def _held(own: Own) -> dict[str, Any]:
    """What a greeting says of checkpoints: which steps, and at the active where it would go on."""
    keeper = own.secrets.keeper
    if keeper is None or own.held is None:
        return {}
    if own.name != own.active:
        return {"holds": keeper.steps()}
    state = keeper.latest()
    resumes = Resumption(run=state.run, step=state.step) if state else None
    return {"holds": keeper.steps(), "resumes": resumes}


def _draw(own: Own, method: Method, session: str, greetings: Mapping[str, Greeting]) -> Contract:
    """The contract, as every party draws it up from the settings and the greetings."""
    config = own.config
    offers = {
        name: greeting.offer for name, greeting in greetings.items() if greeting.offer is not None
    }
    declared = method.declared
    names = {"active": (own.active,), "passives": own.passives}
    expected = [name for side in declared.offers for name in names[side]]
    if set(offers) != set(expected):
        raise RemoteProtocolError(
            f"{own.name}: in {declared.title} what a row is that parties send is said by "
            f"{', '.join(expected) or 'nobody'}; it was said by {', '.join(offers) or 'nobody'}"
        )
    agreed, asked = method.agree(own, offers, session), asked_of(config)
    silent = _when_silent(own, agreed)
    return Contract(
        session=session,
        participants=tuple(
            Participant(
                name=name,
                role=role,
                identity=greetings[name].identity.hex(),
                public_key=greetings[name].run_key.hex(),
            )
            for name, role in roles_of(method, config, own.active, own.passives).items()
        ),
        passives=dict(agreed.passives),
        settings=config.terms(),
        secure_sum=dict(agreed.secure_sum),
        minimum_batch=config.rules.minimum_batch,
        epochs=asked.releases,
        batch_size=asked.rows,
        spare_answers=config.rules.spare_answers,
        silent_passive=silent,
        patience_s=config.rules.patience_s,
        restarts=config.rules.restarts,
        resumes=_resumption(own, greetings, silent),
    )


def _when_silent(own: Own, agreed: Agreed) -> SilentPassive:
    """What the silence of a passive does: as the settings say, or as the sum allows. Raises
    ConfigError: they say to go on without it, and there would be no sum, or none to read.
    """
    asked, passives = own.config.rules.silent_passive, len(agreed.passives)
    threshold = agreed.secure_sum.get("threshold", passives)
    recovers = own.config.method.goes_on_without and threshold < passives
    if asked != "recover" or recovers:
        silent = asked or ("recover" if recovers else "stop")
        if silent == "stop" and own.config.rules.restarts:
            raise ConfigError(
                "rules.restarts: where the silence of a passive stops the run, nobody begins again "
                "by itself; leave it at 0, or say rules.silent_passive: wait, or recover"
            )
        return silent
    if not own.config.method.goes_on_without:
        raise ConfigError(
            f"rules.silent_passive: method {own.config.method.name} needs every passive in every "
            "step; say stop or wait"
        )
    raise ConfigError(
        f"rules.silent_passive: the sum needs all {passives} passives, so no step goes on without "
        "one; take recoverable masks with a threshold above half of the passives and below all, as "
        f"secure_sum: {{scheme: plain, masks: recoverable, threshold: {passives // 2 + 1}}}"
        f"{' with 3 passives or more' if passives < 3 else ''}, or say stop or wait"
    )


def _resumption(
    own: Own, greetings: Mapping[str, Greeting], silent: SilentPassive
) -> Resumption | None:
    """Where all go on: the newest step that all hold.

    Where a run goes on without a passive, it is the active's newest: who was left out has an older
    one, and comes back with that.
    """
    newest = greetings[own.active].resumes
    if newest is None or silent == "recover":
        return newest
    holding = [own.active, *(name for name in own.passives if name in greetings)]
    shared = set.intersection(*(set(greetings[name].holds) for name in holding))
    # Without a common one, whoever lacks the active's newest says so (see `standing`).
    step = max((step for step in shared if step <= newest.step), default=newest.step)
    return newest.model_copy(update={"step": step})


def standing(own: Own, contract: Contract) -> tuple[PartyState | None, Tensor | None]:
    """What this party goes on from, and the rows it knows by position; None: it intersects now.
    Raises CheckpointError: the session goes on where this party cannot.
    """
    resumes, keeper = contract.resumes, own.secrets.keeper
    state = keeper.latest(until=resumes.step if resumes else None) if keeper else None
    if resumes is None:
        if state and state.step > 0 and own.name != own.active:
            raise CheckpointError(
                f"{own.name}: {contract.active} begins anew, and the folder of {own.name} holds "
                f"step {state.step} of a run; resume that run, or choose another folder"
            )
        if own.name != own.active:
            require_no_releases(own)
        return None, own.aligned
    if own.held is None:
        return None, torch.empty(0, dtype=torch.int64)  # it holds nothing of a step
    # Who fell silent and is back has an older one, where the run went on without it.
    if state is None or (state.step != resumes.step and contract.silent_passive != "recover"):
        held = f"step {state.step}" if state else "no step before it"
        raise CheckpointError(
            f"{own.name}: {contract.active} goes on from step {resumes.step}, and the folder of "
            f"{own.name} holds {held}; put its checkpoint back, or begin a new run"
        )
    if state.run != resumes.run:
        raise CheckpointError(
            f"{own.name}: {contract.active} goes on with the run {resumes.run}, and the "
            f"checkpoint of {own.name} is of {state.run}, whose rows stand in another order; put "
            "the checkpoints of one run back at all parties"
        )
    return state, state.rows
