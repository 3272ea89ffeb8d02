"""VFedTrans: the active reads singular vectors of all parties' aligned rows, and distils them.

A key generator, the dealer, hands out orthogonal masks; the active names its aligned training
rows; all parties send the aggregator their masked tables of these; it decomposes their sum, and the
active takes the mask off the left singular vectors (FedSVD, `apfed_protocols.svd`: the five
exchanges of APC-VFL, Appendix E.3). Everything else the active does alone
(`secure_apfed.learning.transfer`). No label leaves the active. Nothing of this has noise: what
masks and vectors tell stands in docs/decomposition.md.

Source: Huang et al. 2023 (VFedTrans) with FedSVD (Chai et al. 2022), as APC-VFL compares with it.
`model.representation` is how many singular vectors are taken; VFedTrans takes as many as the
parties have features together.
"""

import math
from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from apfed_protocols.errors import RemoteProtocolError
from apfed_protocols.svd import SvdAgreement, SvdDealer, SvdOwner, SvdReceiver, SvdServer
from apfed_protocols.svd.agreement import MOST_FEATURES, MOST_MASK_ROWS
from secure_apfed.contract import AGGREGATOR, Contract, PassiveTerms, RepresentationTerms
from secure_apfed.data import OwnData
from secure_apfed.errors import ConfigError
from secure_apfed.exchange import BEFORE_TRAINING, Envelope, Kind, Links
from secure_apfed.learning.transfer import Transferred
from secure_apfed.methods.accounts import answers_log
from secure_apfed.methods.alignment import DEALER, next_dealt, positions_in
from secure_apfed.methods.method import (
    Agreed,
    Helper,
    Learner,
    Method,
    Own,
    Save,
    Steps,
    keep_or_end,
)
from secure_apfed.methods.students import StudentLearner
from secure_apfed.methods.terms import check_passives, require_own_terms
from secure_apfed.methods.vote_protocol import unless_untold
from secure_apfed.models import Enriched, family_for
from secure_apfed.parties import Compute, DecomposedPassive, RowsAsked
from secure_apfed.seeds import seeded
from secure_apfed.settings.distillation import DistillationSettings
from secure_apfed.settings.method import MethodSettings
from secure_apfed.settings.run import RunSettings

__all__ = [
    "VFedTrans",
    "VFedTransAggregator",
    "VFedTransHelper",
    "VFedTransLearner",
    "VFedTransSettings",
]

_LARGEST = 1e100  # as `apfed_protocols.svd` takes


class VFedTransLearner(StudentLearner):
    """The active's role; see `StudentLearner`. `receiver` is its end of the decomposition."""

    student: Transferred

    def __init__(
        self, contract: Contract, own: Own, aligned: Tensor, *, student: Transferred,
        headline: str, receiver: SvdReceiver,
    ) -> None:  # fmt: skip
        guarantee = (
            "no guarantee: the active reads singular vectors of all parties' rows, and the "
            "aggregator their tables under orthogonal masks, without noise"
        )
        super().__init__(own, student, headline=headline, guarantee=guarantee)
        self.smallest_batch = max(contract.minimum_batch, receiver.agreement.vectors)
        self._contract, self._aligned, self._receiver = contract, aligned, receiver
        self._features_N = own.data.table.features
        self._opened: Tensor | None = None

    @property
    def opened(self) -> Tensor | None:
        """The singular vectors, a row for each row asked for, (U, D)."""
        return self._opened

    async def set_up(self, links: Links) -> None:
        """The masks that the dealer drew."""
        if self._contract.at_start:
            self._receiver.take((await next_dealt(links)).payload)

    async def teach(self, links: Links, steps: Steps) -> None:
        step, contract, receiver = steps.next_step, self._contract, self._receiver
        asked = RowsAsked.of(positions_in(self._aligned, self.training_rows), contract)
        for name in contract.passives:
            links.send(name, Kind.REQUEST, step, asked.payload)
        own_UF = self._features_N[self.training_rows].flatten(1).double().numpy()
        links.send(AGGREGATOR, Kind.CONTRIBUTION, step, receiver.mask(own_UF, asked.people))
        message = await links.receive(AGGREGATOR, Kind.SINGULAR_VECTORS, step=step, patience=4)
        vectors_UD = receiver.open(message.payload, asked.people, rows=len(own_UF))
        self._opened = torch.from_numpy(vectors_UD)
        self.student.teach(self._opened)
        steps.stepped(0.0)


class VFedTransHelper(Helper):
    """A passive's role: it masks its rows once; see `Helper`."""

    asks = (Kind.REQUEST,)

    def __init__(self, party: DecomposedPassive) -> None:
        self.name, self.party, self.contract = party.name, party, party.contract

    async def set_up(self, links: Links) -> None:
        """The masks that the dealer drew."""
        if self.party.contract.at_start:
            self.party.take((await next_dealt(links)).payload)

    async def answer(self, links: Links, message: Envelope) -> None:
        links.send(AGGREGATOR, Kind.CONTRIBUTION, message.step, self.party.mask(message))

    def tensors(self) -> dict[str, Tensor]:
        return self.party.tensors()

    def load_tensors(self, tensors: Mapping[str, Tensor], *, next_step: int) -> None:
        self.party.load_tensors(tensors)


class VFedTransAggregator(Helper):
    """The aggregator's role: it decomposes the sum of all masked tables once; see `Helper`."""

    name = AGGREGATOR

    def __init__(self, contract: Contract, server: SvdServer) -> None:
        self._contract, self._server = contract, server
        self._due = contract.at_start

    async def help(self, links: Links, save: Save) -> None:
        """Take one table of every owner, until the session ends."""
        active, owners = self._contract.active, self._server.agreement.owners
        while True:
            message = await links.receive(
                owners, Kind.CONTRIBUTION, Kind.CHECKPOINT, Kind.END, least=len(owners), patience=8
            )
            if message.kind is Kind.CONTRIBUTION:
                await self._decompose(links, message)
            elif message.sender != active:
                raise RemoteProtocolError(f"{message.sender} may send no {message.kind}")
            elif not keep_or_end(message.kind, message.step, links, active, save):
                return

    async def _decompose(self, links: Links, first: Envelope) -> None:
        """Gather the tables of all owners, of which this one came first, and answer."""
        active, step = self._contract.active, first.step
        if not self._due:
            raise RemoteProtocolError(
                f"{first.sender} sent a table twice, or after the step in which it was due; a run "
                "decomposes once"
            )
        self._due = False
        tables = {first.sender: first.payload}
        while missing := [name for name in self._server.agreement.owners if name not in tables]:
            with unless_untold(active):
                other = await links.receive(
                    missing, Kind.CONTRIBUTION, step=step, least=len(missing)
                )
            tables[other.sender] = other.payload
        links.send(active, Kind.SINGULAR_VECTORS, step, self._server.factor(tables))


class VFedTransSettings(MethodSettings, DistillationSettings):
    """How all parties' tables are decomposed, and the student whose code resembles the vectors.

    Attributes:
        mask_rows: rows of one block of the orthogonal mask, at most. A block for all rows hides
            most, and takes the cube of their number in time. `model.representation` of the run
            says how many vectors there are.
    """

    name: Literal["vfedtrans"]
    mask_rows: int = Field(1024, ge=2, le=MOST_MASK_ROWS)

    title = "VFedTrans"
    predicts_alone = True
    teacher = "shared singular vectors"

    def check(self, config: RunSettings) -> None:
        """See `MethodSettings`."""
        if config.model.network != "enriched" or config.model.head:
            raise ValueError(
                f"model.network: method {self.name} classifies the active's own features beside "
                f"the student's code by logistic regression, and {config.model.network} has "
                "another head; use enriched, without model.head"
            )


class VFedTrans(Method):
    """The method; see `Method`."""

    settings = VFedTransSettings

    def labels_learnt(self, config: RunSettings, held: OwnData, aligned: Tensor) -> Tensor:
        """Of people whom only the active knows, too: its classifier reads what the student says."""
        return held.labelled_rows

    def offer(self, own: Own) -> RepresentationTerms | None:
        """Every party with a table says how many features it has."""
        check_passives(own.config, own.passives)
        return _row_of(math.prod(own.data.table.shape))

    def agree(self, own: Own, offers: Mapping[str, RepresentationTerms], session: str) -> Agreed:
        features = {name: math.prod(offered.shape) for name, offered in offers.items()}
        for name, count in features.items():
            require_own_terms(own.name, name, offers[name], _row_of(count))
        total, vectors = sum(features.values()), own.config.model.representation
        if total > MOST_FEATURES:
            raise ConfigError(
                f"data: the parties have {total} features together, and no more than "
                f"{MOST_FEATURES} are decomposed; leave columns out"
            )
        if vectors > total:
            raise ConfigError(
                f"model.representation: {vectors} singular vectors of {total} features, those of "
                f"all parties together; say {total} or less"
            )
        terms = PassiveTerms(objective=None, weight=1.0, representation=_row_of(total))
        return Agreed(
            passives=dict.fromkeys(own.passives, terms),
            secure_sum={
                "scheme": "svd",
                "masks": "orthogonal",
                "features": features,
                "vectors": vectors,
                "mask_rows": VFedTransSettings.of(own.config).mask_rows,
            },
        )

    def learner(self, own: Own, contract: Contract, rows: Tensor) -> Learner:
        return VFedTransLearner(
            contract,
            own,
            rows,
            student=_student(own, rows),
            headline=self.headline,
            receiver=SvdReceiver(_agreement(own, contract)),
        )

    def passive(self, own: Own, contract: Contract, rows: Tensor) -> Helper:
        return VFedTransHelper(
            DecomposedPassive(
                own.name,
                contract,
                features_N=own.data.table.features[rows],
                owner=SvdOwner(_agreement(own, contract), own.name) if contract.at_start else None,
                answers=answers_log(own),
            )
        )

    def aggregator(self, own: Own, contract: Contract) -> Helper:
        return VFedTransAggregator(contract, SvdServer(_agreement(own, contract)))

    async def deal(self, own: Own, links: Links, contract: Contract) -> None:
        """The masks: a seed for all, and for each owner its part of the mask of columns."""
        if contract.at_start:
            for message in SvdDealer(_agreement(own, contract)).deal():
                links.send(message.receiver, Kind.DEALT, BEFORE_TRAINING, message.body)


def _row_of(numbers: int) -> RepresentationTerms:
    return RepresentationTerms(
        shape=(numbers,), dtype="float64", minimum_norm=0.0, maximum_norm=_LARGEST
    )


def _agreement(own: Own, contract: Contract) -> SvdAgreement:
    """What the contract says of this session's decomposition."""
    agreed, owners = contract.secure_sum, (contract.active, *contract.passives)
    return SvdAgreement(
        session=contract.digest.hex(),
        server=AGGREGATOR,
        dealer=DEALER,
        owners=owners,
        features=tuple(agreed["features"][name] for name in owners),
        receiver=contract.active,
        vectors=agreed["vectors"],
        mask_rows=agreed["mask_rows"],
        most_rows=own.config.alignment.maximum_ids,
    )


def _student(own: Own, aligned: Tensor) -> Transferred:
    """The active's networks at their reproducible start."""
    config = own.config
    model, family = config.model, family_for(config.model, own.data.table.shape)
    numbers = math.prod(own.data.table.shape) + model.representation
    with seeded(own.secrets.seed, own.name, "student"):
        enriched = family.encoder(own.data.table.shape, model)
        assert isinstance(enriched, Enriched)
        decoder = family.decoder((model.representation,), own.data.table.shape, model)
        head = family.head(numbers, len(own.data.classes), model)
    return Transferred(
        own.name,
        data=own.data,
        rows_U=own.data.train_rows[torch.isin(own.data.train_rows, aligned)],
        enriched=enriched,
        decoder=decoder,
        head=head,
        settings=VFedTransSettings.of(config),
        compute=Compute.of(config.train),
        seed=own.secrets.seed,
    )
