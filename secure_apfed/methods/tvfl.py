"""Typical VFL (Section 2) and what is left of it when the passives are gone (Section 5.1).

`Tvfl.step` is the whole protocol of one step. Training and the full inference need every
party; TVFL-0, -A and -R replace the passives' representations at inference by zeros, by
the mean of the active's (one number, over the evaluation batch), or by uniform noise
between the smallest and the largest of them, as the authors' release does.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from secure_apfed.contract import Contract, PassiveTerms
from secure_apfed.data import PartyTable
from secure_apfed.defences import gradient_chain, label_code, representation_chain
from secure_apfed.exchange import Envelope, Kind, Transcript
from secure_apfed.methods.accounts import answers_log, guard_for, ledger_for
from secure_apfed.methods.aligning import positions_of
from secure_apfed.methods.defending import surroundings_of
from secure_apfed.methods.method import PartyTensors, Start, restore_state, state_of
from secure_apfed.methods.stage import Stage, set_stage
from secure_apfed.methods.terms import check_passives, model_of, representation_terms
from secure_apfed.models import ModelSettings, Shape, family_for, output_shape
from secure_apfed.parties import (
    ActiveNetworks,
    Compute,
    TvflActive,
    TvflPassive,
    accuracy_of,
)
from secure_apfed.privacy import PrivacyLedger, WholeTraining
from secure_apfed.privacy.guard import joint_releases_statement
from secure_apfed.seeds import seeded

__all__ = ["Tvfl", "open_tvfl"]


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


@dataclass(kw_only=True)
class Tvfl:
    """Joint training and joint inference between parties that are set up; see `Method`."""

    headline: str
    contract: Contract
    transcript: Transcript
    alignment: Mapping[str, Tensor]
    active: TvflActive
    passives: list[TvflPassive]
    ledgers: Mapping[str, PrivacyLedger]
    guarantee: str
    secure_sum: Mapping[str, object]
    training_rows: Tensor
    test_rows: Tensor
    aligned_test_rows: Tensor
    smallest_batch: int
    seed: int
    contributions: Mapping[str, PrivacyLedger] = field(default_factory=dict)
    training: WholeTraining | None = None

    def step(self, step: int, rows_B: Tensor) -> float:
        """All roles of one step; rows are alignment positions (3M envelopes)."""
        answers = self._ask(step, rows_B, learn=True)
        for envelope in self.active.learn(step, rows_B, answers):
            self.transcript.send(envelope)
        for passive in self.passives:
            passive.learn(self._receive(passive.name, self.active.name, Kind.GRADIENTS, step))
        return self.active.task_loss.item()

    def _ask(self, step: int, rows_B: Tensor, *, learn: bool) -> list[Envelope]:
        """The passives' representations of these alignment positions."""
        for envelope in self.active.request(step, rows_B, learn=learn):
            self.transcript.send(envelope)
        for passive in self.passives:
            request = self._receive(passive.name, self.active.name, Kind.REQUEST, step)
            self.transcript.send(passive.represent(request))
        return [
            self._receive(self.active.name, passive.name, Kind.REPRESENTATIONS, step)
            for passive in self.passives
        ]

    def _receive(self, receiver: str, sender: str, kind: Kind, step: int) -> Envelope:
        return self.transcript.receive(receiver, sender=sender, kind=kind, step=step)

    def evaluate(self, *, next_step: int, final: bool) -> dict[str, float]:
        """Accuracy by fill; at the end also with all parties, on the aligned test rows.

        The full inference sends representations of test rows, which the ledgers count.
        """
        self.active.learner.set_training(False)
        try:
            accuracies = {name: self._alone(name) for name in FILLS}
            if final:
                accuracies = {"tvfl": self._together(next_step), **accuracies}
        finally:
            self.active.learner.set_training(True)
        return accuracies

    def _alone(self, name: str) -> float:
        compute = self.active.learner.compute
        shapes = {
            passive: terms.representation.shape for passive, terms in self.contract.passives.items()
        }

        def predict(rows_B: Tensor) -> Tensor:
            with compute.forward(self.seed, "fill", name):
                own_BD = self.active.learner.encoder(self.active.learner.features_N[rows_B])
                parts = {
                    passive: FILLS[name](own_BD, own_BD.new_empty(len(rows_B), *shape))
                    for passive, shape in shapes.items()
                }
                return self.active.learner.predict(own_BD, parts)

        return accuracy_of(predict, self.test_rows, self.active.learner.labels_N)

    @torch.no_grad()
    def _together(self, next_step: int) -> float:
        count = len(self.aligned_test_rows)
        if count < self.smallest_batch:
            return math.nan  # the passives answer no smaller batch
        own = self.alignment[self.active.name]
        parts = math.ceil(count / self.contract.batch_size)
        correct = 0
        for index, rows_B in enumerate(self.aligned_test_rows.tensor_split(parts)):
            answers = self._ask(next_step + index, rows_B, learn=False)
            own_B = own[rows_B].to(self.active.learner.compute.device)
            with self.active.learner.compute.forward(self.seed, "together"):
                own_BD = self.active.learner.encoder(self.active.learner.features_N[own_B])
                scores_BK = self.active.learner.predict(own_BD, self.active.read(rows_B, answers))
            correct += int((scores_BK.argmax(1) == self.active.learner.labels_N[own_B]).sum())
        return correct / count

    def attendance(self) -> Mapping[str, object]:
        """Every passive is needed in every step."""
        return {}

    def solo(self) -> ActiveNetworks | None:
        """None: the model cannot predict without the passives."""
        return None

    def tensors(self) -> PartyTensors:
        """State of all parties."""
        return state_of(self.active, self.passives)

    def load_tensors(self, tensors: PartyTensors, *, next_step: int) -> None:
        """Restore what `tensors` returned before step `next_step`."""
        restore_state(self.active, self.passives, tensors, next_step=next_step)


def open_tvfl(start: Start) -> Tvfl:
    """Set up TVFL between all parties of the data; raises as `open_apfed`."""
    config, data = start.config, start.data
    check_passives(config, [table.name for table in data.passives])
    encoders = {table.name: _encoder(start, table) for table in data.tables}
    terms = {table.name: _terms(start, table, encoders) for table in data.passives}
    head = _head(start, encoders)
    stage = set_stage(start, terms=terms, secure_sum={})
    passives = _passive_parties(start, stage, encoders)
    aligned = stage.alignment[data.active.name]
    around = surroundings_of(start, data.active.name, ())
    return Tvfl(
        headline="tvfl",
        contract=stage.contract,
        transcript=stage.transcript,
        alignment=stage.alignment,
        active=TvflActive(
            stage.seat(data.active.name),
            table=data.active,
            alignment=aligned,
            encoder=encoders[data.active.name],
            head=head,
            train=config.train,
            compute=Compute.of(config.train),
            seed=config.seed,
            defences=gradient_chain(config.defences, around),
            code=label_code(config.defences, around),
        ),
        passives=passives,
        ledgers={passive.name: passive.ledger for passive in passives},
        guarantee=joint_releases_statement(
            guard_for(start, passives[0].name).statement(), len(passives)
        ),
        secure_sum={},
        training_rows=positions_of(aligned, data.train_rows),
        test_rows=data.test_rows,
        aligned_test_rows=positions_of(aligned, data.test_rows),
        smallest_batch=config.rules.minimum_batch,
        seed=config.seed,
    )


def _encoder(start: Start, table: PartyTable) -> nn.Module:
    """A party's encoder at its reproducible start."""
    features, model = _features_of(table), _model_of(start, table)
    with seeded(start.config.seed, table.name, "encoder"):
        return family_for(model, features).encoder(features, model)


def _head(start: Start, encoders: Mapping[str, nn.Module]) -> nn.Module:
    """The head over all parties' representations, concatenated: fc(views x d, ...)."""
    config, data = start.config, start.data
    size = sum(
        math.prod(output_shape(encoders[table.name], _features_of(table))) for table in data.tables
    )
    family = family_for(config.model, _features_of(data.active))
    with seeded(config.seed, data.active.name, "head"):
        return family.head(size, len(data.classes), config.model)


def _terms(start: Start, table: PartyTable, encoders: Mapping[str, nn.Module]) -> PassiveTerms:
    shape = output_shape(encoders[table.name], _features_of(table))
    representation = representation_terms(
        start.config, shape, guard_for(start, table.name), projected=False
    )
    # The active answers with the gradient of its own loss: directions tell it nothing.
    representation = representation.model_copy(update={"minimum_spread": 0.0})
    return PassiveTerms(objective=None, weight=1.0, representation=representation)


def _features_of(table: PartyTable) -> Shape:
    return tuple(table.features.shape[1:])


def _model_of(start: Start, table: PartyTable) -> ModelSettings:
    config = start.config
    return config.model if table is start.data.active else model_of(config, table.name)


def _passive_parties(
    start: Start, stage: Stage, encoders: Mapping[str, nn.Module]
) -> list[TvflPassive]:
    config = start.config
    parties = []
    for table in start.data.passives:
        guard = guard_for(start, table.name)
        alignment = stage.alignment[table.name]
        shape = stage.contract.passives[table.name].representation.shape
        around = surroundings_of(start, table.name, shape)
        parties.append(
            TvflPassive(
                stage.seat(table.name),
                features_N=table.features[alignment],
                encoder=encoders[table.name],
                guard=guard,
                ledger=ledger_for(start, table.name, guard, aligned=len(alignment)),
                train=config.train,
                compute=Compute.of(config.train),
                seed=config.seed,
                answers=answers_log(start, table.name),
                defences=representation_chain(config.defences, around),
            )
        )
    return parties
