"""For tests of single parties: contract, links, sums, envelopes, roles, random tables, meddling."""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any, TypeVar

import msgpack
import pytest
import torch
from torch import Tensor, nn

from apfed_protocols.seal import SealedLink, fresh_run_key
from apfed_protocols.sums import PlainSum, SumAgreement, SumContributor, SumReceiver
from secure_apfed.config import Config
from secure_apfed.contract import Contract
from secure_apfed.data import ColumnEncoding, OwnData, PartyTable, VerticalData
from secure_apfed.exchange import Envelope, InMemoryNetwork, Kind, Links, pack_tensors
from secure_apfed.learning.descent import ActiveNetworks
from secure_apfed.learning.release import ActiveProtections, ChargedGuard, ContributionNoise
from secure_apfed.learning.trainers import ActiveTrainer, PassiveTrainer
from secure_apfed.methods import PartyContext, Session, SimulationInputs, fresh_secrets
from secure_apfed.methods.apfed import ApfedActive, ApfedPassive
from secure_apfed.methods.party import ActiveParts
from secure_apfed.methods.session_sum import (
    ActiveSum,
    AnswerLimits,
    PassiveSum,
    RefusedSums,
    make_step_binding,
)
from secure_apfed.methods.single_view import SingleViewActive
from secure_apfed.privacy.dp_sgd import PrivateUpdates
from secure_apfed.privacy.guard import RepresentationGuard
from secure_apfed.privacy.ledger import PrivacyLedger
from secure_apfed.settings import TrainSettings
from tests.secure_apfed.small_runs import Said, small_config

Network = TypeVar("Network", bound=InMemoryNetwork)
SESSION = "session"
PASSIVES = ("p1", "p2")
TRAIN = TrainSettings(learning_rate=0.1, precision="float64", device="cpu")
ROWS = 40
COLUMNS = 5
CLASSES = 3


def contract(
    *,
    shape: Sequence[int] = (3,),
    minimum_batch: int = 2,
    norms: tuple[float, float] = (1e-6, 100.0),
    weights: Mapping[str, float] | None = None,
    spread: float = 0.0,
    passives: Sequence[str] = PASSIVES,
    batch_size: int = 8,
) -> Contract:
    helpers = dict.fromkeys(passives, "passive")
    roles = {"active": "active", **helpers, "aggregator": "aggregator"}
    representation = {
        "shape": tuple(shape),
        "dtype": "float64",
        "minimum_norm": norms[0],
        "maximum_norm": norms[1],
        "minimum_spread": spread,
    }
    return Contract.model_validate(
        {
            "session": SESSION,
            "settings": {"guard": {"mechanism": "gaussian"}},
            "participants": [
                {"name": name, "role": role, "identity": "00" * 32, "public_key": "00" * 32}
                for name, role in roles.items()
            ],
            "passives": {
                name: {
                    "objective": {"name": "reconstruction"},
                    "weight": (weights or {}).get(name, 1.0),
                    "representation": representation,
                }
                for name in passives
            },
            "secure_sum": {},
            "minimum_batch": minimum_batch,
            "epochs": 100,
            "batch_size": batch_size,
        }
    )


def actives_own(logs: Path | None = None) -> PartyContext:
    config = small_config("apfed_c")
    secrets = fresh_secrets(config, "active", log_folder=logs)
    return PartyContext(
        config=config,
        name="active",
        active="active",
        passives=PASSIVES,
        secrets=secrets,
        identity_by_party={},
    )


def plain_sum(*, noise: int | None = None) -> PlainSum:
    """Return a sum of both passives, without a clip, but where there is noise under it."""
    agreement = SumAgreement(
        session=SESSION,
        receiver="active",
        aggregator="aggregator",
        contributors=PASSIVES,
        clip_norm=1.0,
        noise=noise,
    )
    return PlainSum(agreement, clip=noise is not None, quantise=noise is not None)


def sum_of(step: int, rows: Tensor, sent: bytes, gradients: Sequence[Tensor]) -> bytes:
    sums = plain_sum()
    binding = make_step_binding(SESSION, step, rows, sent)
    frames = {
        name: sums.make_contributor(name).contribute(gradient.numpy(), binding)
        for name, gradient in zip(PASSIVES, gradients, strict=True)
    }
    return sums.make_aggregator().combine(frames)


def network(
    kind: type[Network],
    *names: str,
    record: Callable[[Envelope, int], None] = lambda envelope, wire_bytes: None,
) -> Network:
    """Sealed links of parties of these names, under one contract."""
    made = kind(names, record)
    seal_all(made.links)
    return made


def seal_all(links_of: Mapping[str, Links]) -> None:
    """Links of all parties to each other."""
    keys = {name: fresh_run_key() for name in links_of}
    ends = {
        (me, peer): SealedLink(me=me, peer=peer, run_key=keys[me], contract_hash=bytes(32))
        for me, peer in permutations(keys, 2)
    }
    for (me, peer), seal in ends.items():
        seal.agree(keys[peer].public, ends[peer, me].hello)
    for me, links in links_of.items():
        links.seal(SESSION, {peer: ends[me, peer] for peer in keys if peer != me})


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def envelope(payload: bytes, *, kind: Kind, step: int = 0, **changes: Any) -> Envelope:
    """From the active to p1, unless changed."""
    usual: dict[str, Any] = {
        "session": SESSION,
        "step": step,
        "kind": kind,
        "sender": "active",
        "receiver": "p1",
        "sequence": 0,
        "payload": payload,
    }
    return Envelope(**{**usual, **changes})


def representations(rows: Tensor, z: Tensor, *, step: int = 0, **changes: Any) -> Envelope:
    payload = pack_tensors({"rows": rows, "z": z})
    return envelope(payload, kind=Kind.REPRESENTATIONS, step=step, **changes)


def clone_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy a party's state so that training cannot reach it."""
    return {name: value.detach().clone() for name, value in tensors.items()}


def descent_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A party's state without the counts of its answers."""
    return {name: value for name, value in tensors.items() if not name.startswith("allowance.")}


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Tell whether two states are equal bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


class _Waits:
    """What a script waits for that nobody drives but the test."""

    def __await__(self) -> Generator[None, Envelope, Envelope]:
        return (yield)


class LoneActive:
    """An active of APFed without links: `represent` a batch, then `update` from a sum.

    Attributes:
        role: the active; ledger: of what it releases.
    """

    def __init__(
        self,
        table: PartyTable,
        networks: ActiveNetworks,
        guard: RepresentationGuard,
        *,
        alignment: Tensor,
        agreed: Contract | None = None,
        private: PrivateUpdates | None = None,
        train: TrainSettings = TRAIN,
        receiver: SumReceiver | None = None,
    ) -> None:
        agreed = agreed or contract()
        rows = torch.arange(len(table.ids))
        assert table.labels is not None
        held = OwnData(table=table, train_rows=rows, test_rows=rows[:0], classes=("a", "b", "c"))
        own = replace(actives_own(), data_or_none=held)
        self.ledger = PrivacyLedger(
            guard.mechanism(), delta=1e-5, budget=None, rows=len(alignment), log=None
        )
        accounts = ActiveProtections(
            charged_guard=ChargedGuard(guard, self.ledger), is_sending=True, private_updates=private
        )
        trainer = ActiveTrainer(
            "active",
            networks,
            features_N=table.features,
            labels_N=table.labels,
            train=train,
            seed=0,
            private_updates=private,
            needs_independent_rows=accounts.needs_independent_rows,
        )
        self.role = ApfedActive(
            ActiveParts(
                party=own,
                contract=agreed,
                trainer=trainer,
                protection=accounts,
                aligned_rows=alignment,
            ),
            ActiveSum(agreed, receiver or plain_sum().make_receiver(), RefusedSums(own)),
        )
        self.sent: bytes | None = None
        self._loss = 0.0

    def represent(self, step: int, rows: Tensor) -> bytes | None:
        """Play a step up to the sum; return what every passive gets, None: nothing."""
        links: Any = self
        self.sent = None
        self._step = step
        self._script = self.role.train_step(links, step, rows)
        try:
            self._script.send(None)
        except StopIteration as ended:
            self._loss = ended.value
        return self.sent

    def update(self, combined: bytes | None) -> float:
        """Play the rest of the step, with this sum where one is waited for; return the loss."""
        if self.sent is None:
            return self._loss
        payload = msgpack.packb([list(self.role.contract.passives), combined])
        message: Any = envelope(payload, kind=Kind.SUM, step=self._step, sender="aggregator")
        try:
            self._script.send(message)
        except StopIteration as ended:
            loss: float = ended.value
            return loss
        raise AssertionError("the step waits for more than the sum")

    def send(self, to: str, kind: Kind, step: int, payload: bytes = b"") -> None:
        assert (kind, step) == (Kind.REPRESENTATIONS, self._step)
        assert self.sent in (None, payload)
        self.sent = payload

    async def receive(self, *_: object, **__: object) -> Envelope:
        return await _Waits()


def lone_passive(
    agreed: Contract,
    objective: nn.Module,
    features_N: Tensor,
    name: str = "p1",
    *,
    answers: Path | None = None,
    is_known_N: Tensor | None = None,
    noise: ContributionNoise | None = None,
    train: TrainSettings = TRAIN,
    contributor: SumContributor | None = None,
) -> ApfedPassive:
    """A passive of APFed without links; see `contributed`."""
    passive_sum = PassiveSum(
        name,
        agreed,
        contributor or plain_sum(noise=1000 if noise else None).make_contributor(name),
        answer_limits=AnswerLimits(name, agreed, position_count=len(features_N), log_path=answers),
        noise=noise,
        is_known_N=is_known_N,
        counts_repeats_once=True,
    )
    trainer = PassiveTrainer(
        name,
        objective,
        features_N=features_N,
        train=train,
        seed=0,
        needs_independent_rows=noise is not None,
    )
    return ApfedPassive(passive_sum, trainer, is_known_N=is_known_N)


def contribute_to(passive: ApfedPassive, message: Envelope) -> bytes:
    return passive.passive_sum.protect_answer(*passive.compute_contribution(message))


def random_data(
    known: Mapping[str, Sequence[int]], *, strangers: int = 5, train: int = 32
) -> VerticalData:
    """Each passive knows these of the active's people and some strangers, in an own order."""
    generator = torch.Generator().manual_seed(7)

    def table(name: str, ids: list[str], labels: Tensor | None) -> PartyTable:
        features = torch.randn(len(ids), COLUMNS, generator=generator)
        encoding = ColumnEncoding.for_numeric_columns(
            tuple(f"{name}{column}" for column in range(COLUMNS))
        )
        return PartyTable(name, tuple(ids), features, labels, encoding)

    people = [f"person {row}" for row in range(ROWS)]
    rows = torch.arange(ROWS)
    active = table("active", people, rows % CLASSES)
    passives = []
    for name, mine in known.items():
        own = [*(people[row] for row in mine), *(f"stranger {name} {k}" for k in range(strangers))]
        order = torch.randperm(len(own), generator=generator).tolist()
        passives.append(table(name, [own[row] for row in order], None))
    return VerticalData(
        table=active,
        passives=tuple(passives),
        classes=("a", "b", "c"),
        train_rows=rows[:train],
        test_rows=rows[train:],
    )


def step_config(method: Said, **changes: Any) -> Config:
    """A plain sum without clip and no guard; changes replace whole sections."""
    settings: dict[str, Any] = {
        "name": "test",
        "method": method,
        "party_seeds": "shared_for_comparison",
        "data": {"dataset": "digits"},
        "model": {"network": "mlp", "hidden": [6], "representation": 4, "projection": 4},
        "train": {"precision": "float64", "learning_rate": 0.1, "device": "cpu", "batch_size": 16},
        "secure_sum": {"scheme": "plain", "clip": None, "allow_single_passive": True},
        "guard": {"mechanism": "none"},
    }
    return Config.model_validate({**settings, **changes})


def active_of(session: Session) -> SingleViewActive:
    """Return the active of APFed, or that of SingleVL."""
    assert isinstance(session.active_role, SingleViewActive)
    return session.active_role


def passives_of(session: Session) -> list[ApfedPassive]:
    helpers = [session.helpers[name] for name in session.contract.passives]
    return [helper for helper in helpers if isinstance(helper, ApfedPassive)]


def own_of(start: SimulationInputs, name: str) -> PartyContext:
    secrets = start.secrets.get(name) or fresh_secrets(start.config, name)
    return start.build_context(name, secrets, {name: secrets.identity.public})


def alter_message(
    patch: pytest.MonkeyPatch, kind: Kind, change: Callable[[bytes], bytes | None], who: str = ""
) -> list[str]:
    """Let this party, or whoever is the first to send this kind, send something else; None:
    nothing, now and later. Returns the list of who did, filled once it is sent.
    """
    send = Links.send
    senders: list[str] = []

    def send_changed(self: Links, to: str, what: Kind, step: int, payload: bytes = b"") -> None:
        if what is kind and self.me == (who or self.me):
            changed = change(payload)
            if changed is None and self.me in (senders or [self.me]):
                senders[:] = [self.me]
                return
            if not senders and changed is not None:
                senders.append(self.me)
                payload = changed
        send(self, to, what, step, payload)

    patch.setattr(Links, "send", send_changed)
    return senders
