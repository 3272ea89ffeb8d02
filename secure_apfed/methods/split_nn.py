"""Vertical SplitNN: all parties encode, the active's network goes on; they predict together.

`split_nn` concatenates the representations, which the active reads one by one, as in TVFL; the
networks are those with which APC-VFL compares (its Figure 1 and Appendix B).

`split_nn_sum` merges by sum instead, and passives contribute to a `SecureSum`: the active reads the
sum of their representations and no single one, in training and for every row that is predicted.
Discrete Gaussian noise under the sum (`secure_sum.noise`) makes each contribution private, the
encoders held fixed. The gradient on the sum is the same for all passives and tells them of labels,
as in TVFL. With `linear` networks it is vertical softmax regression.
Letters: B batch, D numbers of a representation, K classes.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from apfed_protocols.sums import SecureSum, SumReceiver
from secure_apfed.contract import Contract, RepresentationTerms
from secure_apfed.defences import representation_chain
from secure_apfed.errors import ConfigError
from secure_apfed.exchange import Kind, Links
from secure_apfed.measures import Scored
from secure_apfed.methods.accounts import answers_log, refused_sums, surroundings_of
from secure_apfed.methods.method import Agreed, Helper, Learner, Own
from secure_apfed.methods.sum_end import SumAggregator
from secure_apfed.methods.sum_noise import (
    NoisePlan,
    contribution_noise,
    parameters_of,
    sum_and_noise,
)
from secure_apfed.methods.summing import OpenedSums, SummingHelper
from secure_apfed.methods.terms import clip_of
from secure_apfed.methods.tvfl import Joint, JointSettings, Tvfl, TvflLearner
from secure_apfed.models import output_shape
from secure_apfed.parties import Compute, SummedPassive, TvflActive
from secure_apfed.parties.rules import RefusedSums
from secure_apfed.settings.method import MethodSettings

__all__ = [
    "SplitNn",
    "SplitNnLearner",
    "SplitNnSettings",
    "SummedSplitNn",
    "SummedSplitNnLearner",
    "SummedSplitNnSettings",
]

_SUM = "the others"


class SplitNnLearner(TvflLearner):
    """The active's role, which predicts with all parties only; see `TvflLearner`."""

    headline = "split_nn"

    async def evaluate(self, links: Links, *, next_step: int, final: bool) -> dict[str, Scored]:
        """At the end what all parties say together of the aligned test rows."""
        if not final:
            return {}
        self.party.trainer.set_training(False)
        try:
            return {self.headline: await self._together(links, next_step)}
        finally:
            self.party.trainer.set_training(True)


class SummedSplitNnLearner(SplitNnLearner):
    """Reads the secure sum of the passives' representations; see `SplitNnLearner`."""

    headline = "split_nn_sum"

    def __init__(
        self, party: TvflActive, own: Own, aligned: Tensor, *, guarantee: str,
        receiver: SumReceiver, refused: RefusedSums, rounding: float,
    ) -> None:  # fmt: skip
        super().__init__(party, own, aligned, guarantee=guarantee)
        self.rounding = rounding
        self._sums = OpenedSums(party.contract, receiver, refused)

    @property
    def opened(self) -> Tensor | None:
        return self._sums.opened

    async def set_up(self, links: Links) -> None:
        """Its end of the sum."""
        await self._sums.set_up(links)

    async def step(self, links: Links, step: int, rows_B: Tensor) -> float:
        """One step of the active: two messages with each passive, and one sum."""
        others_BD = await self._summed(links, step, rows_B, learn=True)
        gradients = self.party.learn_of(step, rows_B, {_SUM: others_BD})
        for name in self.party.contract.passives:
            links.send(name, Kind.GRADIENTS, step, gradients[_SUM])
        return self.party.task_loss.item()

    async def joint(self, links: Links, step: int, rows_B: Tensor) -> Joint:
        """What all parties together say of these alignment positions; nobody learns from it."""
        trainer = self.party.trainer
        others_BD = await self._summed(links, step, rows_B, learn=False)
        own_B = self._aligned[rows_B].to(trainer.compute.device)
        with torch.no_grad(), trainer.compute.forward(self._seed, "together"):
            own_BD = trainer.encoder(trainer.features_N[own_B])
            scores_BK = trainer.predict(own_BD, {_SUM: others_BD})
        return Joint(scores=scores_BK, representations=(own_BD, others_BD))

    async def _summed(self, links: Links, step: int, rows_B: Tensor, *, learn: bool) -> Tensor:
        """Ask the passives, and open the sum of what they represent."""
        request, compute = self.party.request(rows_B, learn=learn), self.party.trainer.compute
        terms = next(iter(self.party.contract.passives.values()))
        size = math.prod(terms.representation.shape)
        return compute.place(await self._sums.open(links, step, rows_B, request, numbers=size))


class SplitNnSettings(JointSettings):
    """SplitNN that concatenates; see `MethodSettings`."""

    name: Literal["split_nn"]

    title = "SplitNN"


class SummedSplitNnSettings(MethodSettings):
    """SplitNN that merges by a secure sum; see `MethodSettings`."""

    name: Literal["split_nn_sum"]

    title = "SplitNN, summed"
    predicts_alone = False
    sums_representations = True
    returns_gradients = True
    stops_early = True


class SplitNn(Tvfl):
    """Vertical SplitNN that concatenates; see `Method`."""

    settings = SplitNnSettings

    def learner(self, own: Own, contract: Contract, rows: Tensor) -> Learner:
        party = self.active_party(own, contract, rows)
        return SplitNnLearner(party, own, rows, guarantee=self.guarantee(own, contract))


class SummedSplitNn(Tvfl):
    """Vertical SplitNN that merges by a secure sum; see `Method`."""

    settings = SummedSplitNnSettings

    def agree(self, own: Own, offers: Mapping[str, RepresentationTerms], session: str) -> Agreed:
        agreed = super().agree(own, offers, session)
        sizes = {name: math.prod(offered.shape) for name, offered in offers.items()}
        if own.name == own.active:
            sizes[own.name] = math.prod(output_shape(self._encoder(own), own.data.table.shape))
        if len(set(sizes.values())) > 1:
            said = ", ".join(f"{size} at {name}" for name, size in sizes.items())
            raise ConfigError(
                f"{own.config.method.name}: representations are added, so all have as many "
                f"numbers; got {said}; give all parties one model.representation"
            )
        secure_sum, noise = self._sum(own, session, offers)
        parameters = parameters_of(own.config, secure_sum, noise)
        return replace(agreed, secure_sum=parameters)

    def learner(self, own: Own, contract: Contract, rows: Tensor) -> Learner:
        secure_sum, noise = self._agreed(own, contract)
        party = self.active_party(own, contract, rows, others=(_SUM,))
        guarantee = "no guarantee: sums of representations are opened without noise"
        if noise is not None:
            guarantee = "representations are read as their noised sum alone"
        return SummedSplitNnLearner(
            party, own, rows, guarantee=guarantee, receiver=secure_sum.receiver(),
            refused=refused_sums(own), rounding=secure_sum.rounding(),
        )  # fmt: skip

    def passive(self, own: Own, contract: Contract, rows: Tensor) -> Helper:
        config, (secure_sum, noise) = own.config, self._agreed(own, contract)
        shape = contract.passives[own.name].representation.shape
        party = SummedPassive(
            own.name,
            contract,
            contributor=secure_sum.contributor(own.name),
            clip=clip_of(config),
            noise=contribution_noise(own, shape, plan=noise, aligned=len(rows)),
            features_N=own.data.table.features[rows],
            encoder=self._encoder(own),
            train=config.train,
            compute=Compute.of(config.train),
            seed=own.secrets.seed,
            answers=answers_log(own),
            defences=representation_chain(config.defences, surroundings_of(own, shape)),
        )
        return SummingHelper(
            party, rounds=secure_sum.rounds, noise=party.noise, learn=party.learn,
            network=party.encoder,
        )  # fmt: skip

    def aggregator(self, own: Own, contract: Contract) -> Helper:
        secure_sum, _ = self._agreed(own, contract)
        return SumAggregator(contract, secure_sum.combiner(), rounds=secure_sum.rounds)

    def _agreed(self, own: Own, contract: Contract) -> tuple[SecureSum, NoisePlan | None]:
        terms = {name: one.representation for name, one in contract.passives.items()}
        return self._sum(own, contract.session, terms)

    def _sum(
        self, own: Own, session: str, terms: Mapping[str, RepresentationTerms]
    ) -> tuple[SecureSum, NoisePlan | None]:
        names = tuple(own.passives)
        return sum_and_noise(own.config, session, own.active, names, terms[names[0]].shape)
