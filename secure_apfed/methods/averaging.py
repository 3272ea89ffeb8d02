"""H-FedMV and S-FedMV: parties with the same views of other people average their weights.

Nothing is aligned: every party has labels and all views of people of its own. A step is one round
of FedMV's Algorithm 3, or 4: the active sends the average, every party trains from it, and the
average becomes the sum of all parties' weights, each by its share of rows. There is no server as in
the paper: the active, which is one of the parties, reads the others' weighted sum alone, through a
`SecureSum`. S-FedMV averages GRUs first, `rounds` rounds long; their last
states are the views from there on.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal, Self

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from apfed_protocols.errors import RemoteProtocolError
from secure_apfed.contract import Contract, RepresentationTerms
from secure_apfed.data import UNLABELLED
from secure_apfed.errors import ConfigError
from secure_apfed.exchange import Links
from secure_apfed.learning.averaging import LinearViews, SequenceViews, Stages
from secure_apfed.learning.multiview import Floats, Pull, ViewModel, joint_weights
from secure_apfed.measures import Scored, scored_by
from secure_apfed.methods.accounts import answers_log, refused_sums
from secure_apfed.methods.apfed import ApfedAggregator
from secure_apfed.methods.method import Agreed, Helper, Learner, Method, Own
from secure_apfed.methods.pseudo_labels import (
    FedMvSettings,
    agreed_sum,
    label_terms,
    parameters_of_sum,
    pull_of,
)
from secure_apfed.methods.summing import OpenedSums, SummingHelper
from secure_apfed.methods.terms import check_passives, clip_of, require_own_terms
from secure_apfed.models import SequenceEncoder, encoder_and_head
from secure_apfed.parties import ActiveNetworks, Compute
from secure_apfed.parties.averaging import AveragingActive, AveragingPassive
from secure_apfed.seeds import derive_seed, seeded
from secure_apfed.settings.multiview import MultiviewSettings, RecurrentSettings
from secure_apfed.settings.run import RunSettings

__all__ = [
    "Averaging", "AveragingLearner", "AveragingSettings", "HFedMvSettings", "SFedMvSettings",
    "linear_views",
]  # fmt: skip


class AveragingLearner(Learner):
    """The active's role; see `Learner`.

    Args:
        party: the active, set up; sums: its end of the sum.
        networks: that predict alone, to which the average is written.
        own: what it brings; headline: what its accuracy is called; rounding: of the sum.
    """

    guarantee = "no guarantee: sums of weights are opened without noise"
    smallest_batch = 1

    def __init__(
        self, party: AveragingActive, own: Own, *, sums: OpenedSums, networks: ActiveNetworks,
        headline: str, rounding: float,
    ) -> None:  # fmt: skip
        super().__init__()
        self.name, self.party, self.rounding = party.name, party, rounding
        self.training_rows = own.train_rows
        self._own, self._sums, self._headline = own, sums, headline
        self._compute = Compute.of(own.config.train)
        self._networks = networks.to(self._compute.device, self._compute.dtype)

    @property
    def opened(self) -> Tensor | None:
        return self._sums.opened

    async def set_up(self, links: Links) -> None:
        """Its end of the sum."""
        await self._sums.set_up(links)

    async def step(self, links: Links, step: int, rows_B: Tensor) -> float:
        """One round of all parties (2M + 1 envelopes, or 4M + 1)."""
        rows_R, request = self.party.request(step)
        loss = self.party.train(step)
        across = self.party.stages.at(step).weights.shape[1]
        opened_RW = await self._sums.open(links, step, rows_R, request, numbers=across)
        self.party.average(step, np.asarray(opened_RW.double().numpy()))
        return loss

    async def evaluate(self, links: Links, *, next_step: int, final: bool) -> dict[str, Scored]:
        """What the active says alone; needs no exchange."""
        networks, own, compute = self.solo().eval(), self._own, self._compute
        features_N, labels_N = compute.place(own.rows.features), own.rows.labels
        assert labels_N is not None
        alone = scored_by(
            lambda rows_B: networks(features_N[rows_B], None)[0],
            own.test_rows,
            labels_N.to(compute.device),
        )
        return {self._headline: alone}

    def solo(self) -> ActiveNetworks:
        """The average, as networks: what all views say where FedMV's Eqs. (18) and (19) end."""
        stages, networks = self.party.stages, self._networks
        if stages.recurrent is not None:
            networks.encoder.load_state_dict(stages.recurrent.encoder.state_dict())
        if stages.views is not None:
            weights = joint_weights([view.zeta for view in stages.views.views])
            parts = [
                weight * view.weights_FC
                for weight, view in zip(weights, stages.views.views, strict=True)
            ]
            joint_KD = torch.from_numpy(np.concatenate(parts).T)
        else:
            assert stages.recurrent is not None
            joint_KD = stages.recurrent.joint_head
        assert isinstance(networks.head, nn.Linear)
        with torch.no_grad():
            networks.head.weight.copy_(joint_KD)
        return networks

    def tensors(self) -> dict[str, Tensor]:
        return self.party.tensors()

    def load_tensors(self, tensors: Mapping[str, Tensor], *, next_step: int) -> None:
        self.party.load_tensors(tensors)


class AveragingSettings(FedMvSettings):
    """Parties average the weights of their views; see `MultiviewSettings`."""

    averages = "weights"

    def check(self, config: RunSettings) -> None:
        """See `MethodSettings`; also that no passive is weighted by hand."""
        super().check(config)
        weighted = [name for name, one in config.passives.items() if one.weight != 1.0]
        if weighted:
            raise ValueError(
                f"passives.{weighted[0]}.weight: in method {self.name} a party counts by the rows "
                "that it trains on; leave weight out"
            )


class HFedMvSettings(AveragingSettings):
    """H-FedMV; see `MultiviewSettings`."""

    name: Literal["h_fedmv"]

    title = "H-FedMV"


class SFedMvSettings(AveragingSettings):
    """S-FedMV: views are sequences, which GRUs make views of first; see `MultiviewSettings`.

    Attributes:
        rounds: in which parties average GRUs; the run's other epochs average the views' weights.
        local_epochs: of each party between two averages.
    """

    name: Literal["s_fedmv"]
    rounds: int = Field(20, ge=1)
    local_epochs: int = Field(1, ge=1)

    title = "S-FedMV"
    network = "gru"
    reads_sequences = True

    def rehearsed(self, steps: int, epochs: int) -> Self:
        """See `MethodSettings`: so many of the steps average GRUs as of the run's."""
        return self.model_copy(update={"rounds": max(1, round(steps * self.rounds / epochs))})


class Averaging(Method):
    """The method; see `Method`.

    Args:
        settings: see `Method`.
    """

    def __init__(self, settings: type[AveragingSettings]) -> None:
        self.settings, self._recurrent = settings, settings.reads_sequences

    def offer(self, own: Own) -> RepresentationTerms | None:
        """See `Method`: each party says how many classes it has, how many rows it trains on, and
        what its features are.
        """
        check_passives(own.config, own.passives)
        terms = label_terms(own, len(own.classes))
        told = {"rows": len(own.train_rows), "features": own.held.table.layout}
        return terms.model_copy(update=told)

    def agree(self, own: Own, offers: Mapping[str, RepresentationTerms], session: str) -> Agreed:
        for name, offered in offers.items():
            classes = math.prod(offers[own.active].shape)
            features = offers[own.active].features
            if offered.features != features:
                raise RemoteProtocolError(
                    f"{name} has other features than {own.active}, or in another order: weights of "
                    "different columns, kinds or categories would be averaged. Give both the same "
                    "columns in the same order and one encoding (data.parties.X.encoding)"
                )
            told = {"rows": offered.rows, "features": features}
            expected = label_terms(own, classes).model_copy(update=told)
            require_own_terms(own.name, name, offered, expected)
            if offered.rows is None:
                raise RemoteProtocolError(f"{name} says not on how many rows it trains")
        rows = {name: offered.rows or 0 for name, offered in offers.items()}
        return parameters_of_sum(own, offers, session, weights={
            name: rows[name] / sum(rows.values()) for name in own.passives
        })  # fmt: skip

    def learner(self, own: Own, contract: Contract, rows: Tensor) -> Learner:
        secure_sum, stages = agreed_sum(own, contract), self._stages(own)
        share = 1.0 - sum(terms.weight for terms in contract.passives.values())
        with seeded(own.seed, own.name, "networks"):
            parts = encoder_and_head(own.config.model, own.features, len(own.classes))
        return AveragingLearner(
            AveragingActive(own.name, contract, stages=stages, share=share),
            own,
            networks=ActiveNetworks(*parts),
            headline=self.headline,
            sums=OpenedSums(contract, secure_sum.receiver(), refused_sums(own)),
            rounding=secure_sum.rounding(),
        )

    def passive(self, own: Own, contract: Contract, rows: Tensor) -> Helper:
        secure_sum = agreed_sum(own, contract)
        terms = contract.passives[own.name]
        if terms.representation.shape != (len(own.classes),):
            raise ConfigError(
                f"{own.name} has labels of {len(own.classes)} classes, {contract.active} of "
                f"{math.prod(terms.representation.shape)}; name the same classes at all parties"
            )
        party = AveragingPassive(
            own.name,
            contract,
            stages=self._stages(own),
            share=terms.weight,
            contributor=secure_sum.contributor(own.name),
            clip=clip_of(own.config),
            answers=answers_log(own),
        )
        return SummingHelper(party, rounds=secure_sum.rounds)

    def aggregator(self, own: Own, contract: Contract) -> Helper:
        secure_sum = agreed_sum(own, contract)
        return ApfedAggregator(contract, secure_sum.combiner(), rounds=secure_sum.rounds)

    def _stages(self, own: Own) -> Stages:
        """One party's copy of the model at its start; the active's goes to all."""
        if not own.held.views:
            raise ConfigError(
                f"{own.name}: method {own.config.method.name} learns from several views, and this "
                "party's columns have none; name them in data.view_columns"
            )
        features_NF = own.rows.features[own.train_rows]
        if not self._recurrent:
            views = [features_NF[:, view.columns] for view in own.held.views.values()]
            return Stages(lambda: _linear(own, views))
        recurrent, rounds = _recurrent(own), SFedMvSettings.of(own.config).rounds

        def after() -> LinearViews:
            with torch.no_grad():
                return _linear(own, recurrent.encoder.parts(recurrent.place(features_NF)))

        return Stages(after, recurrent=recurrent, rounds=rounds)


def _linear(own: Own, views: Sequence[Tensor]) -> LinearViews:
    pull = pull_of(own, own.train_rows, eta=MultiviewSettings.of(own.config).eta, own=False)
    settings = MultiviewSettings.of(own.config)
    return linear_views(settings, views, pull, owner=own.name, seed=own.seed)


def linear_views(
    settings: MultiviewSettings, views: Sequence[Tensor], pull: Pull, *, owner: str, seed: int
) -> LinearViews:
    """One party's model of its views (N, F) at its start.

    Args:
        settings: of the method.
        views: one by one, of the rows that train.
        pull: of their labels.
        owner: whose random numbers it starts from.
        seed: of these.
    """
    models = [
        ViewModel.begin(
            _numbers(view),
            pull.truth_NC.shape[1],
            np.random.default_rng(derive_seed(seed, owner, "view", at)),
            beta=settings.beta,
            zeta=settings.zeta,
            tolerance=settings.tolerance,
            most_rounds=settings.most_rounds,
        )
        for at, view in enumerate(views)
    ]
    return LinearViews(models, pull, tolerance=settings.tolerance, rounds=settings.most_rounds)


def _numbers(view_NF: Tensor) -> Floats:
    return np.asarray(view_NF.double().cpu().numpy())


def _recurrent(own: Own) -> SequenceViews:
    config, classes = own.config, len(own.classes)
    with seeded(own.seed, own.name, "networks"):
        encoder, _ = encoder_and_head(config.model, own.features, classes)
        assert isinstance(encoder, SequenceEncoder)
        size = 2 * config.model.representation
        heads = nn.ModuleList(nn.Linear(size, classes, bias=False) for _ in encoder.sequences)
    labels_N = own.rows.labels
    assert labels_N is not None
    told_N = torch.full_like(labels_N, UNLABELLED)
    told_N[own.labelled_rows] = labels_N[own.labelled_rows]
    return SequenceViews(
        own.name,
        encoder=encoder,
        heads=heads,
        features_N=own.rows.features,
        labels_N=told_N,
        settings=RecurrentSettings(local_epochs=SFedMvSettings.of(config).local_epochs),
        compute=Compute.of(config.train),
        seed=own.seed,
    )
