"""MMVFL and V-FedMV: each party has a view, and all agree on pseudo-labels.

A step is one iteration of MMVFL's Algorithm 1 or FedMV's Algorithm 2: the active sends the common
pseudo-labels Z, every party updates its weights W_k and its pseudo-labels Z_k, and Z becomes the
mean of these, weighted by zeta_k. There is no server as in the papers: the active averages, and
reads the passives' weighted sum alone, through a `SecureSum`. The labels, which FedMV gives all
parties, stay with the active; without a label a row is drawn by its pseudo-labels alone. Every
party can predict by its own X_k W_k afterwards; all together by FedMV's Eqs. (12) and (13), of
which one sum gives the end.
Letters: B batch, C classes.
"""

import math
from collections.abc import Mapping
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from apfed_protocols.sums import SecureSum
from secure_apfed.contract import Contract, PassiveTerms, RepresentationTerms
from secure_apfed.data import UNLABELLED
from secure_apfed.exchange import Links
from secure_apfed.learning.multiview import Floats, Pull, ViewModel, start
from secure_apfed.measures import Scored, scored_by
from secure_apfed.methods.accounts import answers_log, guard_for, refused_sums
from secure_apfed.methods.alignment import positions_of
from secure_apfed.methods.method import Agreed, Helper, Learner, Method, Own
from secure_apfed.methods.sum_end import SumAggregator
from secure_apfed.methods.summing import OpenedSums, SummingHelper
from secure_apfed.methods.terms import (
    check_passives,
    clip_of,
    make_sum,
    representation_terms,
    require_own_terms,
    settings_of,
)
from secure_apfed.models import encoder_and_head
from secure_apfed.parties import ActiveNetworks, Compute
from secure_apfed.parties.pseudo_labels import PseudoLabelActive, PseudoLabelPassive
from secure_apfed.seeds import derive_seed, seeded
from secure_apfed.settings.multiview import MultiviewSettings

__all__ = [
    "FedMvSettings",
    "MmvflSettings",
    "PseudoLabelLearner",
    "PseudoLabels",
    "VFedMvSettings",
    "agreed_sum",
    "label_terms",
    "parameters_of_sum",
    "pull_of",
]


class PseudoLabelLearner(Learner):
    """The active's role; see `Learner`.

    Args:
        party: the active, set up; sums: its end of the sum.
        networks: that predict alone, whose last layer is made of its view's weights.
        own: what it brings; aligned: its row at each position of the alignment.
        headline: what its accuracy is called; rounding: of the sum.
    """

    guarantee = "no guarantee: sums of pseudo-labels are opened without noise"

    def __init__(
        self, party: PseudoLabelActive, own: Own, aligned: Tensor, *, sums: OpenedSums,
        networks: ActiveNetworks, headline: str, rounding: float,
    ) -> None:  # fmt: skip
        super().__init__()
        self.name, self.party, self.rounding = party.name, party, rounding
        self.smallest_batch = own.config.rules.minimum_batch
        self.training_rows = positions_of(aligned, own.data.train_rows)
        self._aligned, self._own, self._sums = aligned, own, sums
        self._compute = Compute.of(own.config.train)
        self._networks = networks.to(self._compute.device, self._compute.dtype)
        self._headline = headline
        self._test_positions = positions_of(aligned, own.data.test_rows)

    @property
    def opened(self) -> Tensor | None:
        return self._sums.opened

    async def set_up(self, links: Links) -> None:
        """Its end of the sum."""
        await self._sums.set_up(links)

    async def step(self, links: Links, step: int, rows_B: Tensor) -> float:
        """One iteration of all parties (2M + 1 envelopes, or 4M + 1)."""
        request = self.party.request(rows_B)
        self.party.learn(rows_B)
        return self.party.average(rows_B, await self._open(links, step, rows_B, request))

    async def evaluate(self, links: Links, *, next_step: int, final: bool) -> dict[str, Scored]:
        """What the active says alone; at the end all parties together, too."""
        networks, own, compute = self.solo(), self._own, self._compute
        features_N, labels_N = compute.place(own.data.table.features), own.data.table.labels
        assert labels_N is not None
        alone = scored_by(
            lambda rows_B: networks(features_N[rows_B], None)[0],
            own.data.test_rows,
            labels_N.to(compute.device),
        )
        if not final:
            return {self._headline: alone}
        together = await self._together(links, next_step, labels_N)
        return {self._headline: alone, f"{self._headline}_together": together}

    async def _together(self, links: Links, step: int, labels_N: Tensor) -> Scored:
        rows_B = self._test_positions
        truth_B = labels_N[self._aligned[rows_B]]
        if len(rows_B) < self.smallest_batch:
            return Scored.of_network(truth_B[:0], np.empty((0, self.party.common_NC.shape[1])))
        opened_BC = await self._open(links, step, rows_B, self.party.question(rows_B))
        return Scored.of_network(truth_B, self.party.joint(rows_B, opened_BC))

    async def _open(self, links: Links, step: int, rows_B: Tensor, request: bytes) -> Floats:
        classes = self.party.common_NC.shape[1]
        opened_BC = await self._sums.open(links, step, rows_B, request, numbers=classes)
        return np.asarray(opened_BC.double().numpy())

    def solo(self) -> ActiveNetworks:
        """X_1 W_1, as networks."""
        head = self._networks.head
        assert isinstance(head, torch.nn.Linear)
        with torch.no_grad():
            head.weight.copy_(torch.from_numpy(self.party.view.weights_FC.T))
        return self._networks

    def tensors(self) -> dict[str, Tensor]:
        return self.party.tensors()

    def load_tensors(self, tensors: Mapping[str, Tensor], *, next_step: int) -> None:
        self.party.load_tensors(tensors)


class MmvflSettings(MultiviewSettings):
    """MMVFL: the labels draw the active's own pseudo-labels; see `MultiviewSettings`."""

    name: Literal["mmvfl"]
    beta: float = Field(1.0, ge=0)
    zeta: float = Field(1000.0, gt=0)
    eta: float = Field(1000.0, gt=0)

    title = "MMVFL"
    averages = "pseudo-labels"
    takes_labels_of_passives = True


class FedMvSettings(MultiviewSettings):
    """FedMV in its three forms: the labels draw the common pseudo-labels."""

    beta: float = Field(4.0, ge=0)
    zeta: float = Field(8.0, gt=0)
    eta: float = Field(8.0, gt=0)


class VFedMvSettings(FedMvSettings):
    """V-FedMV; see `MultiviewSettings`."""

    name: Literal["v_fedmv"]

    title = "V-FedMV"
    averages = "pseudo-labels"


class PseudoLabels(Method):
    """The method; see `Method`.

    Args:
        settings: see `Method`; own: whether the labels draw the active's own pseudo-labels, or
            the common ones.
    """

    def __init__(self, settings: type[MultiviewSettings], *, own: bool) -> None:
        self.settings, self._own = settings, own

    def offer(self, own: Own) -> RepresentationTerms | None:
        """See `Method`: the active says how many classes there are."""
        if own.name != own.active:
            return None
        check_passives(own.config, own.passives)
        return label_terms(own, len(own.data.classes))

    def agree(self, own: Own, offers: Mapping[str, RepresentationTerms], session: str) -> Agreed:
        offered = offers[own.active]
        require_own_terms(own.name, own.active, offered, label_terms(own, math.prod(offered.shape)))
        weights = {name: settings_of(own.config, name).weight for name in own.passives}
        offers = dict.fromkeys(own.passives, offered)
        return parameters_of_sum(own, offers, session, weights=weights)

    def learner(self, own: Own, contract: Contract, rows: Tensor) -> Learner:
        secure_sum, classes = agreed_sum(own, contract), len(own.data.classes)
        train = positions_of(rows, own.data.train_rows)
        common_NC = np.zeros((len(rows), classes))
        rng = np.random.default_rng(derive_seed(own.config.seed, "common pseudo-labels"))
        common_NC[train.numpy()] = start(len(train), classes, rng)
        with seeded(own.secrets.seed, own.name, "networks"):
            parts = encoder_and_head(own.config.model, own.data.table.shape, classes)
        party = PseudoLabelActive(
            own.name,
            contract,
            view=self._view(own, contract, rows, classes),
            common_NC=common_NC,
            pull=self._pull(own, rows),
            zetas=self._zetas(own, contract),
        )
        return PseudoLabelLearner(
            party, own, rows, networks=ActiveNetworks(*parts), headline=self.headline,
            sums=OpenedSums(contract, secure_sum.receiver(), refused_sums(own)),
            rounding=secure_sum.rounding(),
        )  # fmt: skip

    def passive(self, own: Own, contract: Contract, rows: Tensor) -> Helper:
        secure_sum = agreed_sum(own, contract)
        (classes,) = contract.passives[own.name].representation.shape
        party = PseudoLabelPassive(
            own.name,
            contract,
            view=self._view(own, contract, rows, classes),
            zetas=self._zetas(own, contract),
            contributor=secure_sum.contributor(own.name),
            clip=clip_of(own.config),
            answers=answers_log(own),
            pull=self._pull(own, rows) if own.data.table.labels is not None else None,
        )
        return SummingHelper(party, rounds=secure_sum.rounds)

    def aggregator(self, own: Own, contract: Contract) -> Helper:
        secure_sum = agreed_sum(own, contract)
        return SumAggregator(contract, secure_sum.combiner(), rounds=secure_sum.rounds)

    def _view(self, own: Own, contract: Contract, rows: Tensor, classes: int) -> ViewModel:
        """One party's view of the aligned people at its start, with the zeta_k that was agreed."""
        settings, order = MultiviewSettings.of(own.config), rows.argsort().numpy()
        view = ViewModel.begin(
            own.data.table.features[rows].flatten(1).double().numpy(),
            classes,
            np.random.default_rng(derive_seed(own.secrets.seed, own.name, "view")),
            beta=settings.beta,
            zeta=self._zetas(own, contract)[own.name],
            tolerance=settings.tolerance,
            most_rounds=settings.most_rounds,
        )
        # In the table's order: that of the alignment is random.
        drawn_NC = view.labels_NC.copy()
        view.labels_NC[order] = drawn_NC
        return view

    def _pull(self, own: Own, rows: Tensor) -> Pull:
        return pull_of(own, rows, eta=MultiviewSettings.of(own.config).eta, own=self._own)

    def _zetas(self, own: Own, contract: Contract) -> dict[str, float]:
        """zeta_k of every party, in its own update (MMVFL, Eq. 12; FedMV, Eqs. 8, 13) as in Z."""
        zeta = MultiviewSettings.of(own.config).zeta
        weights = {name: terms.weight for name, terms in contract.passives.items()}
        return {name: zeta * weight for name, weight in {own.active: 1.0, **weights}.items()}


def pull_of(who: Own, rows: Tensor, *, eta: float, own: bool) -> Pull:
    """Of the labels that a party may learn from, on these rows of its table; see `Pull`."""
    labels_N = who.data.table.labels
    assert labels_N is not None
    labels_B = labels_N[rows]
    told_B = torch.isin(rows, who.data.labelled_rows) & (labels_B != UNLABELLED)
    told_B1 = told_B.double().unsqueeze(1)
    truth_BC = F.one_hot(labels_B.clamp(min=0), len(who.data.classes)).double() * told_B1
    return Pull(truth_BC.numpy(), (eta * told_B1).numpy(), own)


def label_terms(own: Own, classes: int) -> RepresentationTerms:
    """What a row of the common pseudo-labels may be."""
    terms = representation_terms(own.config, (classes,), guard_for(own), projected=False)
    return terms.model_copy(update={"dtype": "float64", "minimum_spread": 0.0})


def parameters_of_sum(
    own: Own, terms: Mapping[str, RepresentationTerms], session: str, *,
    weights: Mapping[str, float],
) -> Agreed:  # fmt: skip
    """What all agree on of a sum without noise, to which passives contribute by these weights."""
    secure_sum = make_sum(own.config, session, own.active, own.passives)
    settings = own.config.secure_sum.model_dump(mode="json", exclude={"threshold"})
    return Agreed(
        passives={
            name: PassiveTerms(objective=None, weight=weights[name], representation=terms[name])
            for name in own.passives
        },
        secure_sum={**secure_sum.parameters(), **settings},
    )


def agreed_sum(own: Own, contract: Contract) -> SecureSum:
    """The sum, as each party describes it for itself."""
    return make_sum(own.config, contract.session, own.active, tuple(contract.passives))
