"""One session of a method with all parties in this process: the way to try out and to measure.

Run by: the experimenter. Every party is built from its own data and keys and plays its own script
over sealed links; only the experimenter's record of what they sent is of all of them.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from protocols.errors import RemoteProtocolError
from protocols.identity import Identity, fresh_identity
from protocols.randomness import fresh_key
from secure_apfed.contract import AGGREGATOR, Contract, Participant, PartyRole
from secure_apfed.data import VerticalData
from secure_apfed.exchange import Agreement, Greeting, InMemory, Links, Script, Transcript, agree
from secure_apfed.methods.aligning import (
    DEALER,
    align_as_active,
    align_as_passive,
    deal,
    needs_dealer,
)
from secure_apfed.methods.method import Agreed, Helper, Learner, Method, Own, meet, meet_all
from secure_apfed.privacy import PrivacyLedger
from secure_apfed.settings.run import RunSettings

__all__ = ["PartyTensors", "Session", "Start", "enter", "roles_of"]

T = TypeVar("T")
PartyTensors = Mapping[str, Mapping[str, Tensor]]
"""Tensors of a checkpoint, by party and name."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """What a session begins with.

    Attributes:
        config, data: of the run.
        noise_keys: by party, 32 bytes; secrets of their parties.
        identities: by party, its long-term key pair; fresh ones for those without.
        session: unique; names this session in every message.
        alignment: by party, from an earlier session of the run; None: intersect now.
        logs: folder of the ledgers' write-ahead logs; None: keep them in memory.
    """

    config: RunSettings
    data: VerticalData
    noise_keys: Mapping[str, bytes] = field(repr=False)
    identities: Mapping[str, Identity] = field(default_factory=dict)
    session: str = field(default_factory=lambda: secrets.token_hex(16))
    alignment: Mapping[str, Tensor] | None = None
    logs: Path | None = None

    def own(self, name: str, identity: Identity, known: Mapping[str, bytes]) -> Own:
        """What the party of this name brings, and nothing of anybody else's."""
        data = self.data
        tables = {table.name: table for table in data.tables}
        labelled: dict[str, Any] = {}
        if name == data.active.name:
            labelled = {
                "train_rows": data.train_rows, "test_rows": data.test_rows, "classes": data.classes
            }  # fmt: skip
        return Own(
            config=self.config,
            name=name,
            active=data.active.name,
            passives=tuple(table.name for table in data.passives),
            seed=self.config.seed,
            noise_key=self.noise_keys.get(name) or fresh_key(),
            identity=identity,
            known=known,
            table=tables.get(name),
            logs=self.logs,
            **labelled,
        )


class Session:
    """All parties of one session, set up and ready to train.

    Args:
        method: what they play.
        start: what they begin with.

    Attributes:
        contract: of this session; signatures: of it, by party.
        transcript: the experimenter's record of what is sent.
        network: drives the scripts.
        alignment: by party with rows, positions in its own table, -1 where it has none; empty
            where nothing is aligned.
        learner: the active's role; helpers: the others', by name.

    Raises:
        ConfigError, DataError, ModelError: settings, tables or networks that do not fit.
        CheckpointError: the active refused more sums of this run than it may go on after.
        IntersectionTooSmallError: fewer common IDs than agreed.
    """

    def __init__(self, method: Method, start: Start) -> None:
        self.headline, self._method, self._start = method.headline, method, start
        active = start.data.active.name
        names = tuple(table.name for table in start.data.passives)
        roles = roles_of(method, start.config, active, names)
        self.transcript = Transcript(start.config.transcript)
        self.network = InMemory(roles, self.transcript.record)
        self.alignment: dict[str, Tensor] = dict(start.alignment or {})
        self.helpers: dict[str, Helper] = {}
        self._saved: dict[str, dict[str, Tensor]] = {}
        identities = {name: start.identities.get(name) or fresh_identity() for name in roles}
        known = {name: identity.public for name, identity in identities.items()}
        for name, role in roles.items():
            if role != "active":
                own = start.own(name, identities[name], known)
                self.network.begin(name, self._take_part(own, role))
        self.learner: Learner = self.network.complete(
            active, self._set_up(start.own(active, identities[active], known))
        )

    async def _set_up(self, own: Own) -> Learner:
        """The active's script up to the first step."""
        active, links = own.name, self.network.links[own.name]
        agreement = await enter(own, links, self._method, session=self._start.session)
        self.contract = contract = agreement.contract
        self.signatures = agreement.signatures
        helpers = [*contract.passives, *contract.names("aggregator")]
        if contract.passives and active not in self.alignment:
            rows = await align_as_active(own, links, contract.session)
            self.alignment[active] = rows
            await meet_all(links, helpers)
        rows = self.alignment.get(active, torch.empty(0, dtype=torch.int64))
        learner = self._method.learner(own, contract, rows)
        await learner.set_up(links)
        await meet_all(links, helpers)
        return learner

    async def _take_part(self, own: Own, role: PartyRole) -> None:
        """The whole script of a party that helps."""
        name, links, aligned = own.name, self.network.links[own.name], own.active in self.alignment
        contract = (await enter(own, links, self._method)).contract
        if role == "dealer":
            if not aligned:
                await deal(own, links, contract.session)
            return
        if role == "passive" and not aligned:
            self.alignment[name] = await align_as_passive(own, links, contract.session)
        if not aligned:
            await meet(links, own.active)
        if role == "aggregator":
            helper = self._method.aggregator(own, contract)
        else:
            helper = self._method.passive(own, contract, self.alignment[name])
        self.helpers[name] = helper
        await helper.set_up(links)
        await meet(links, own.active)
        await helper.help(links, lambda step: self._save(helper))

    def _save(self, helper: Helper) -> None:
        """Keep what a party is now; it trains on in its own tensors."""
        self._saved[helper.name] = {key: one.clone() for key, one in helper.tensors().items()}

    @property
    def active(self) -> str:
        """The active's name."""
        return self.learner.name

    @property
    def present(self) -> list[str]:
        """The parties that help and have not fallen silent."""
        return [name for name in self.helpers if name not in self.learner.left]

    def play(self, script: Script[T]) -> T:
        """Play a script of the active to its end, and the others as far as they get meanwhile."""
        return self.network.complete(self.active, script)

    def step(self, step: int, rows_B: Tensor) -> float:
        """Play one training step of all parties; return the task loss."""
        return self.play_step(step, self.learner.step(self.links, step, rows_B))

    def play_step(self, step: int, script: Script[T]) -> T:
        """Play a script of the active as this step; keep the sum that it opens."""
        result = self.play(script)
        self.keep_opened(step)
        return result

    def keep_opened(self, step: int) -> None:
        """Record what the active decoded in this step, where it did."""
        if self.learner.opened is not None:
            self.transcript.keep_opened(step, self.learner.opened)

    def evaluate(self, *, next_step: int, final: bool) -> dict[str, float]:
        """Test accuracy by inference variant; see `Learner`."""
        return self.play(self.learner.evaluate(self.links, next_step=next_step, final=final))

    @property
    def links(self) -> Links:
        """The active's."""
        return self.network.links[self.active]

    @property
    def ledgers(self) -> dict[str, PrivacyLedger]:
        """By name: of every party that releases, and of private updates where there are."""
        return {name: one for role in self._parts() for name, one in role.ledgers.items()}

    @property
    def contributions(self) -> dict[str, PrivacyLedger]:
        """Those of `ledgers` that count a passive's contributions to sums with noise."""
        accounts = {role.name: role.contributions for role in self.helpers.values()}
        return {name: account for name, account in accounts.items() if account is not None}

    @property
    def secure_sum(self) -> dict[str, object]:
        """Public parameters of the sum and its rounding, empty where there is none."""
        agreed = dict(self.contract.secure_sum)
        return {**agreed, "rounding": self.learner.rounding} if agreed else {}

    def attendance(self) -> dict[str, object]:
        """Who fell silent in this session; empty where the method has no way on without one."""
        if not self.contract.secure_sum:
            return {}
        learner = self.learner
        return {"left": dict(learner.left), "steps_without_all": learner.steps_without_all}

    def networks(self) -> dict[str, nn.Module]:
        """By party, the network whose output it sends, where passives send any."""
        sent = {name: helper.sent_network() for name, helper in self.helpers.items()}
        return {name: network for name, network in sent.items() if network is not None}

    def tensors(self) -> PartyTensors:
        """State of all parties that hold any, each as it saved it last, or as it is."""
        return {
            role.name: self._saved.get(role.name) or role.tensors()
            for role in self._parts()
            if role.name != AGGREGATOR
        }

    def load_tensors(self, tensors: PartyTensors, *, next_step: int) -> None:
        """Restore what `tensors` returned before step `next_step`."""
        for role in self._parts():
            if role.name in tensors:
                role.load_tensors(tensors[role.name], next_step=next_step)

    def _parts(self) -> tuple[Learner | Helper, ...]:
        return (self.learner, *self.helpers.values())


def roles_of(
    method: Method, config: RunSettings, active: str, passives: Sequence[str]
) -> dict[str, PartyRole]:
    """Names and roles of all parties of a session."""
    roles: dict[str, PartyRole] = {active: "active"}
    if method.facts.has_passives:
        roles |= dict.fromkeys(passives, "passive")
    if method.facts.sums_gradients:
        roles[AGGREGATOR] = "aggregator"
    if method.facts.has_passives and needs_dealer(config.alignment):
        roles[DEALER] = "dealer"
    return roles


async def enter(own: Own, links: Links, method: Method, *, session: str | None = None) -> Agreement:
    """Agree on the contract of a session, which the active names; see `agree`."""
    return await agree(
        links,
        identity=own.identity,
        known=own.known,
        active=own.active,
        session=session,
        greeting=lambda run_key: Greeting(
            identity=own.identity.public,
            run_key=run_key.public,
            offer=method.offer(own) if own.table is not None else None,
        ),
        draw=lambda name, greetings: _draw(own, method, name, greetings),
    )


def _draw(own: Own, method: Method, session: str, greetings: Mapping[str, Greeting]) -> Contract:
    """The contract, as every party draws it up from the settings and the greetings."""
    config = own.config
    offers = {name: one.offer for name, one in greetings.items() if one.offer is not None}
    senders = {"active": (own.active,), "passives": own.passives, None: ()}
    expected = senders[method.facts.representations_from]
    if set(offers) != set(expected):
        raise RemoteProtocolError(
            f"{own.name}: representations are sent by {', '.join(expected) or 'nobody'} in "
            f"{method.facts.title}; what they are was said by {', '.join(offers) or 'nobody'}"
        )
    agreed = method.agree(own, offers, session)
    return Contract(
        session=session,
        method=config.method,
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
        alignment=config.alignment.terms(),
        secure_sum=dict(agreed.secure_sum),
        guard=config.guard.model_dump(mode="json"),
        minimum_batch=config.rules.minimum_batch,
        epochs=config.train.epochs,
        batch_size=config.train.batch_size,
        spare_answers=config.rules.spare_answers,
        when_a_party_leaves=_when_a_party_leaves(agreed),
    )


def _when_a_party_leaves(agreed: Agreed) -> Literal["abort", "recover"]:
    """Recover where the sum has a threshold, and it lies below the number of passives."""
    passives = len(agreed.passives)
    return "recover" if agreed.secure_sum.get("threshold", passives) < passives else "abort"
