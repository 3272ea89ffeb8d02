"""Typical VFL (Section 2) and what is left of it when the passives are gone (Section 5.1).

A step takes 3M envelopes: requests, representations, gradients. Training and the full inference
need every party; TVFL-0, -A and -R replace the passives' representations at inference by zeros, by
the mean of the active's (one number, over the evaluation batch), or by uniform noise
between the smallest and the largest of them, as the authors' release does.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secure_apfed.contract import Contract, RepresentationTerms
from secure_apfed.defences import gradient_chain, label_code, representation_chain
from secure_apfed.exchange import Envelope, Kind, Links
from secure_apfed.measures import Scored, scored_by
from secure_apfed.methods.accounts import answers_log, guard_for, ledger_for, surroundings_of
from secure_apfed.methods.alignment import positions_of
from secure_apfed.methods.method import (
    Agreed,
    Helper,
    Learner,
    Lockstep,
    Method,
    Own,
    Save,
    Steps,
    keep_or_end,
)
from secure_apfed.methods.terms import (
    agree_with_senders,
    check_passives,
    sent_terms,
    settings_of,
)
from secure_apfed.models import Shape, family_for, output_shape
from secure_apfed.parties import Compute, TvflActive, TvflPassive
from secure_apfed.privacy.guard import joint_releases_statement
from secure_apfed.seeds import seeded
from secure_apfed.settings.method import MethodSettings
from secure_apfed.settings.model import ModelSettings
from secure_apfed.settings.run import RunSettings

__all__ = ["Joint", "JointSettings", "Tvfl", "TvflHelper", "TvflLearner", "TvflSettings"]


def _zeros(own_BD: Tensor, like_BD: Tensor) -> Tensor:
    return torch.zeros_like(like_BD)


def _mean(own_BD: Tensor, like_BD: Tensor) -> Tensor:
    return own_BD.mean().expand_as(like_BD)


def _uniform(own_BD: Tensor, like_BD: Tensor) -> Tensor:
    low, high = own_BD.min(), own_BD.max()
    return low + (high - low) * torch.rand_like(like_BD)


FILLS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "tvfl_0": _zeros,
    "tvfl_a": _mean,
    "tvfl_r": _uniform,
}


@dataclass(frozen=True, eq=False)
class Joint:
    """Scores of rows by all parties' model, (B, K), and the representations that it read."""

    scores: Tensor
    representations: tuple[Tensor, ...]


class TvflLearner(Learner):
    """The active's role; see `Learner`.

    Args:
        party: the active, set up; test_rows: of its table.
        aligned: its row at each position of the alignment; aligned_test_rows: positions.
        guarantee: what the passives' guards promise.
    """

    def __init__(self, party: TvflActive, own: Own, aligned: Tensor, *, guarantee: str) -> None:
        super().__init__()
        self.name, self.party, self.guarantee = party.name, party, guarantee
        self.smallest_batch = own.config.rules.minimum_batch
        self.training_rows = positions_of(aligned, own.data.labelled_rows)
        self._aligned, self._seed = aligned, own.secrets.seed
        self._test_rows, self._classes = own.data.test_rows, len(own.data.classes)
        self._aligned_test_rows = positions_of(aligned, own.data.test_rows)

    async def step(self, links: Links, step: int, rows_B: Tensor) -> float:
        """One step of the active; rows are alignment positions (3M envelopes)."""
        answers = await self.ask(links, step, rows_B, learn=True)
        for name, gradient in self.party.learn(step, rows_B, answers).items():
            links.send(name, Kind.GRADIENTS, step, gradient)
        return self.party.task_loss.item()

    async def ask(self, links: Links, step: int, rows_B: Tensor, *, learn: bool) -> list[Envelope]:
        """The passives' representations of these alignment positions."""
        passives, request = self.party.contract.passives, self.party.request(rows_B, learn=learn)
        for name in passives:
            links.send(name, Kind.REQUEST, step, request)
        return [await links.receive(name, Kind.REPRESENTATIONS, step=step) for name in passives]

    async def evaluate(self, links: Links, *, next_step: int, final: bool) -> dict[str, Scored]:
        """What is said by fill; at the end also with all parties, of the aligned test rows.

        The full inference sends representations of test rows, which the ledgers count.
        """
        self.party.trainer.set_training(False)
        try:
            said = {name: self._alone(name) for name in FILLS}
            if final:
                said = {"tvfl": await self._together(links, next_step), **said}
        finally:
            self.party.trainer.set_training(True)
        return said

    def _alone(self, name: str) -> Scored:
        party, trainer = self.party, self.party.trainer
        shapes = {
            passive: terms.representation.shape
            for passive, terms in party.contract.passives.items()
        }

        def predict(rows_B: Tensor) -> Tensor:
            with trainer.compute.forward(self._seed, "fill", name):
                own_BD = trainer.encoder(trainer.features_N[rows_B])
                parts = {
                    passive: FILLS[name](own_BD, own_BD.new_empty(len(rows_B), *shape))
                    for passive, shape in shapes.items()
                }
                return trainer.predict(own_BD, parts)

        return scored_by(predict, self._test_rows, trainer.labels_N)

    async def _together(self, links: Links, next_step: int) -> Scored:
        labels_N = self.party.trainer.labels_N.cpu()
        truth, scores = [labels_N[:0]], [torch.empty(0, self._classes)]
        for index, rows_B in enumerate(self.parts_of(self._aligned_test_rows)):
            told = await self.joint(links, next_step + index, rows_B)
            scores.append(told.scores.detach().double().cpu())
            truth.append(labels_N[self._aligned[rows_B].cpu()])
        return Scored.of_network(torch.cat(truth), torch.cat(scores))

    async def loss_on(self, links: Links, steps: Steps, rows: Tensor) -> float:
        """The loss of the joint model, for which every passive represents these positions."""
        party, total, asked = self.party, 0.0, 0
        party.trainer.set_training(False)
        try:
            for rows_B in self.parts_of(rows):
                scores_BK = (await self.joint(links, steps.next_step, rows_B)).scores
                steps.stepped(None)
                labels_B = party.trainer.labels_N[self._aligned[rows_B].to(scores_BK.device)]
                total += float(F.cross_entropy(scores_BK, labels_B, reduction="sum"))
                asked += len(rows_B)
        finally:
            party.trainer.set_training(True)
        return total / asked if asked else math.nan

    def parts_of(self, rows: Tensor) -> tuple[Tensor, ...]:
        """These rows in equal parts that the passives answer: neither too large nor too small."""
        parts = rows.tensor_split(max(1, math.ceil(len(rows) / self.party.contract.batch_size)))
        return tuple(rows_B for rows_B in parts if len(rows_B) >= self.smallest_batch)

    async def joint(self, links: Links, step: int, rows_B: Tensor) -> Joint:
        """What all parties together say of these alignment positions; nobody learns from it."""
        party, trainer = self.party, self.party.trainer
        answers = await self.ask(links, step, rows_B, learn=False)
        own_B = self._aligned[rows_B].to(trainer.compute.device)
        with torch.no_grad(), trainer.compute.forward(self._seed, "together"):
            own_BD = trainer.encoder(trainer.features_N[own_B])
            parts = party.read(rows_B, answers)
            scores_BK = trainer.predict(own_BD, parts)
        return Joint(scores=scores_BK, representations=(own_BD, *parts.values()))

    def tensors(self) -> dict[str, Tensor]:
        return self.party.tensors()

    def load_tensors(self, tensors: Mapping[str, Tensor], *, next_step: int) -> None:
        self.party.load_tensors(tensors)


class TvflHelper(Helper):
    """A passive's role; see `Helper`.

    Attributes:
        asks: what it answers or learns from.
    """

    asks: tuple[Kind, ...] = (Kind.REQUEST, Kind.GRADIENTS)

    def __init__(self, party: TvflPassive) -> None:
        self.name, self.party = party.name, party
        self.ledgers = {party.name: party.ledger}

    def sent_network(self) -> nn.Module | None:
        """Its encoder."""
        return self.party.encoder

    async def help(self, links: Links, save: Save) -> None:
        """Answer requests, and learn from the gradients that come back."""
        active = self.party.contract.active
        while True:
            message = await links.receive(active, *self.asks, Kind.CHECKPOINT, Kind.END, patience=8)
            if message.kind is Kind.REQUEST:
                h = self.party.represent(message)
                links.send(active, Kind.REPRESENTATIONS, message.step, h)
            elif message.kind is Kind.GRADIENTS:
                self.party.learn(message)
            elif not keep_or_end(message.kind, message.step, links, active, save):
                return

    def tensors(self) -> dict[str, Tensor]:
        return self.party.tensors()

    def load_tensors(self, tensors: Mapping[str, Tensor], *, next_step: int) -> None:
        self.party.load_tensors(tensors, last_step=next_step - 1)


class JointSettings(MethodSettings):
    """Joint training, whoever predicts in the end; see `MethodSettings`."""

    predicts_alone = False
    representations_from = "passives"
    returns_gradients = True
    stops_early = True


class TvflSettings(JointSettings):
    """Joint training and joint inference; see `MethodSettings`."""

    name: Literal["tvfl"]

    title = "TVFL, all views"


class Tvfl(Method):
    """The method; see `Method`."""

    settings: type[MethodSettings] = TvflSettings

    def model(self, config: RunSettings) -> ModelSettings:
        """Networks of the active, and of passives that have none of their own."""
        return config.model

    def sent_network(self, config: RunSettings, passive: str, features: Shape) -> nn.Module:
        model = settings_of(config, passive).model or self.model(config)
        return family_for(model, features).encoder(features, model)

    def offer(self, own: Own) -> RepresentationTerms | None:
        """See `Method`: every passive sends representations."""
        check_passives(own.config, own.passives)
        if own.name == own.active:
            return None
        shape = output_shape(self._encoder(own), own.data.table.shape)
        return sent_terms(own.config, shape, guard_for(own))

    def agree(self, own: Own, offers: Mapping[str, RepresentationTerms], session: str) -> Agreed:
        shapes = {name: offered.shape for name, offered in offers.items()}
        return agree_with_senders(own, offers, shapes, guard_for(own))

    def learner(self, own: Own, contract: Contract, rows: Tensor) -> Learner:
        party = self.active_party(own, contract, rows)
        return TvflLearner(party, own, rows, guarantee=self.guarantee(own, contract))

    def guarantee(self, own: Own, contract: Contract) -> str:
        """What the passives' guards promise."""
        return joint_releases_statement(guard_for(own).statement(), len(contract.passives))

    def active_party(
        self, own: Own, contract: Contract, rows: Tensor, *, others: Sequence[str] | None = None
    ) -> TvflActive:
        """The active, with its networks at their reproducible start; `others` are one sum."""
        config, around, encoder = own.config, surroundings_of(own, ()), self._encoder(own)
        shape = output_shape(encoder, own.data.table.shape)
        return TvflActive(
            own.name,
            contract,
            table=own.data.table,
            alignment=rows,
            encoder=encoder,
            head=_head(own, contract, shape, self.model(config), summed=others is not None),
            others=others,
            train=config.train,
            compute=Compute.of(config.train),
            seed=own.secrets.seed,
            defences=gradient_chain(config.defences, around, "returned gradients"),
            code=label_code(config.defences, around),
        )

    def passive(self, own: Own, contract: Contract, rows: Tensor) -> Helper:
        config, guard = own.config, guard_for(own)
        shape = contract.passives[own.name].representation.shape
        return TvflHelper(
            TvflPassive(
                own.name,
                contract,
                features_N=own.data.table.features[rows],
                encoder=self._encoder(own),
                guard=guard,
                ledger=ledger_for(own, guard, aligned=len(rows)),
                train=config.train,
                compute=Compute.of(config.train),
                seed=own.secrets.seed,
                answers=answers_log(own),
                defences=representation_chain(config.defences, surroundings_of(own, shape)),
            )
        )

    def lockstep(self, active: Learner, passives: Mapping[str, Helper]) -> Lockstep:
        return _lockstep(active, passives)

    def _encoder(self, own: Own) -> nn.Module:
        """A party's encoder at its reproducible start."""
        config, features = own.config, own.data.table.shape
        with seeded(own.secrets.seed, own.name, "encoder"):
            if own.name != own.active:
                return self.sent_network(config, own.name, features)
            model = self.model(config)
            return family_for(model, features).encoder(features, model)


def _lockstep(active: Learner, passives: Mapping[str, Helper]) -> Lockstep:
    """Section 2: all encode, the head reads all, each learns from its own gradient."""
    assert isinstance(active, TvflLearner)
    party = active.party
    others = {name: one.party for name, one in passives.items() if isinstance(one, TvflHelper)}

    def step(step: int, rows_B: Tensor) -> None:
        sent = {
            name: one.trainer.represent(step, rows_B, learn=True) for name, one in others.items()
        }
        read = {name: h_B.detach().clone() for name, h_B in sent.items()}
        _, gradients = party.trainer.learn(step, party.own_rows(rows_B), read)
        for name, gradient_B in gradients.items():
            others[name].trainer.update(sent[name], gradient_B)

    return step


def _head(
    own: Own, contract: Contract, shape: Shape, model: ModelSettings, *, summed: bool
) -> nn.Module:
    """The head over all parties' representations, concatenated: fc(views x d, ...); or added."""
    sent = () if summed else (terms.representation.shape for terms in contract.passives.values())
    size = sum(math.prod(each) for each in (shape, *sent))
    family = family_for(model, own.data.table.shape)
    with seeded(own.secrets.seed, own.name, "head"):
        return family.head(size, len(own.data.classes), model)
