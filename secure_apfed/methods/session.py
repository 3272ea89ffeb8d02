"""One session of a method with all parties in this process: the way to try out and to measure.

Run by: the experimenter. Every party is built from its own data and keys and plays its own script
over sealed links; only the experimenter's record of what they sent is of all of them.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from protocols.seal import fresh_run_key
from secure_apfed.config import Config
from secure_apfed.contract import AGGREGATOR, Contract, Participant, PartyRole
from secure_apfed.data import VerticalData
from secure_apfed.exchange import InMemory, Links, Script, Transcript
from secure_apfed.methods.aligning import (
    DEALER,
    align_as_active,
    align_as_passive,
    deal,
    needs_dealer,
)
from secure_apfed.methods.method import Agreed, Helper, Learner, Method, Own, meet, meet_all
from secure_apfed.privacy import PrivacyLedger

__all__ = ["PartyTensors", "Session", "Start"]

T = TypeVar("T")
PartyTensors = Mapping[str, Mapping[str, Tensor]]
"""Tensors of a checkpoint, by party and name."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """What a session begins with.

    Attributes:
        config, data: of the run.
        noise_keys: by party, 32 bytes; secrets of their parties.
        session: unique; names this session in every message.
        alignment: by party, from an earlier session of the run; None: intersect now.
        logs: folder of the ledgers' write-ahead logs; None: keep them in memory.
    """

    config: Config
    data: VerticalData
    noise_keys: Mapping[str, bytes] = field(repr=False)
    session: str = field(default_factory=lambda: secrets.token_hex(16))
    alignment: Mapping[str, Tensor] | None = None
    logs: Path | None = None

    def own(self, name: str) -> Own:
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
            noise_key=self.noise_keys.get(name, b""),
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
        contract: of this session.
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
        self._owns = {name: start.own(name) for name in (active, *self._passives())}
        agreed = self._agree()
        roles = self._roles(agreed)
        run_keys = {name: fresh_run_key() for name in roles}
        self.contract = _contract(
            start, {name: key.public.hex() for name, key in run_keys.items()}, roles, agreed
        )
        self.transcript = Transcript(start.config.transcript)
        self.network = InMemory(
            session=self.contract.session, contract_hash=self.contract.digest, run_keys=run_keys,
            record=self.transcript.record,
        )  # fmt: skip
        self.alignment: dict[str, Tensor] = dict(start.alignment or {})
        self.helpers: dict[str, Helper] = {}
        self._saved: dict[str, dict[str, Tensor]] = {}
        for name, role in roles.items():
            if role != "active":
                self.network.begin(name, self._take_part(name, role))
        self.learner: Learner = self.network.complete(active, self._set_up(active))

    def _passives(self) -> tuple[str, ...]:
        return tuple(table.name for table in self._start.data.passives)

    def _agree(self) -> Agreed:
        """The terms, from what each party offers of its own."""
        offered = {name: self._method.offer(own) for name, own in self._owns.items()}
        offers = {name: terms for name, terms in offered.items() if terms is not None}
        own = self._owns[self._start.data.active.name]
        return self._method.agree(own, offers, self._start.session)

    def _roles(self, agreed: Agreed) -> dict[str, PartyRole]:
        """Names and roles of all parties."""
        roles: dict[str, PartyRole] = {self._start.data.active.name: "active"}
        roles.update((name, "passive") for name in agreed.passives)
        if agreed.secure_sum:
            roles[AGGREGATOR] = "aggregator"
        if agreed.passives and needs_dealer(self._start.config.alignment):
            roles[DEALER] = "dealer"
        return roles

    async def _set_up(self, active: str) -> Learner:
        """The active's script up to the first step."""
        own, links, contract = self._owns[active], self.network.links[active], self.contract
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

    async def _take_part(self, name: str, role: PartyRole) -> None:
        """The whole script of a party that helps."""
        own, links, contract = self._start.own(name), self.network.links[name], self.contract
        aligned = contract.active in self.alignment
        if role == "dealer":
            if not aligned:
                await deal(own, links, contract.session)
            return
        if role == "passive" and not aligned:
            self.alignment[name] = await align_as_passive(own, links, contract.session)
        if not aligned:
            await meet(links, contract.active)
        if role == "aggregator":
            helper = self._method.aggregator(own, contract)
        else:
            helper = self._method.passive(own, contract, self.alignment[name])
        self.helpers[name] = helper
        await helper.set_up(links)
        await meet(links, contract.active)
        await helper.help(links, lambda step: self._saved.update({name: helper.tensors()}))

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
        sent = {name: helper.sent_networks() for name, helper in self.helpers.items()}
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


def _contract(
    start: Start, public_keys: Mapping[str, str], roles: Mapping[str, PartyRole], agreed: Agreed
) -> Contract:
    config, secure_sum = start.config, agreed.secure_sum
    return Contract(
        session=start.session,
        method=config.method,
        participants=tuple(
            Participant(name=name, role=role, public_key=public_keys[name])
            for name, role in roles.items()
        ),
        passives=dict(agreed.passives),
        alignment=config.alignment.terms(),
        secure_sum=dict(secure_sum),
        guard=config.guard.model_dump(mode="json", exclude={"noise"}),
        minimum_batch=config.rules.minimum_batch,
        epochs=config.train.epochs,
        batch_size=config.train.batch_size,
        spare_answers=config.rules.spare_answers,
        when_a_party_leaves=_when_a_party_leaves(secure_sum, passives=len(agreed.passives)),
    )


def _when_a_party_leaves(
    secure_sum: Mapping[str, Any], *, passives: int
) -> Literal["abort", "recover"]:
    """Recover where the sum has a threshold, and it lies below the number of passives."""
    return "recover" if secure_sum.get("threshold", passives) < passives else "abort"
