"""Joint training under a secure sum: vertical SplitNN that merges by sum.

Training and joint prediction are those of `secure_apfed.methods.joint`, but passives contribute to
a `SecureSum`: the active reads the sum of their representations and no single one, in training and
for every row that is predicted. Discrete Gaussian noise under the sum (`secure_sum.noise`) makes
each contribution private, the encoders held fixed. With `glm` networks it is a generalised linear
model of all columns: logistic, softmax, linear or Poisson regression.

A passive emits its representations under the sum; the active the gradients on them.

Letters: B batch, D numbers of a representation, K classes.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from secure_apfed.contract import Contract, RepresentationTerms
from secure_apfed.errors import ConfigError
from secure_apfed.exchange import Envelope, Kind, Links
from secure_apfed.learning.trainers import EncoderTrainer, HeadTrainer, SumTrainer
from secure_apfed.methods.joint import EncodingPassive, JointScores, SplitNnActive, Tvfl
from secure_apfed.methods.method import ActiveRole, HelperRole, Method, SessionTerms
from secure_apfed.methods.party import PartyContext
from secure_apfed.methods.sum_end import (
    ActiveSum,
    AdmittedRequest,
    PassiveSum,
    SessionSum,
    SumHelper,
    SumLearner,
    SumMethod,
)
from secure_apfed.privacy.noise import clip_and_fetch
from secure_apfed.settings.method import MethodSettings
from secure_apfed.settings.run import RunSettings
from secure_apfed.settings.training import ModelSettings

SUM = "the others"
"""The one part that the head reads where representations are summed."""


class SummedSplitNnSettings(MethodSettings):
    """The settings of SplitNN that merges by a secure sum; see `MethodSettings`."""

    name: Literal["split_nn_sum"]

    title = "SplitNN, summed"
    predicts_alone = False
    sums_representations = True
    returns_gradients = True
    stops_early = True
    weighs_classes = True
    tasks = ("classification", "regression", "poisson")

    def linear_numbers(self, config: RunSettings, classes: int) -> float:
        """Return how many linear numbers of a person are read: D in each epoch, by other weights.

        Other layers than linear ones are nearly linear, so they count the same.
        """
        return count_summed_numbers(config, config.model) * config.train.epochs


def count_summed_numbers(config: RunSettings, model: ModelSettings) -> int:
    """Return D, the size of the representations that passives add; all have the same."""
    named = [settings.model or model for settings in config.passives.values()]
    return max(
        (named_settings.representation_size for named_settings in named),
        default=model.representation_size,
    )


class SummedSplitNnActive(SumLearner, SplitNnActive):
    """An active that reads the secure sum of the passives' representations; see `SplitNnActive`."""

    headline = "split_nn_sum"

    def __init__(
        self,
        party: PartyContext,
        contract: Contract,
        aligned: Tensor,
        trainer: HeadTrainer,
        *,
        guarantee: str,
        sum_end: ActiveSum,
    ) -> None:
        """Make the active's role in SplitNN with a secure sum.

        `aligned`: row of the active's table at each position, (N,). `guarantee`: what the session
        promises, in words.
        """
        super().__init__(party, contract, aligned, trainer, guarantee=guarantee)
        self.read_from(sum_end)

    async def train_step(self, links: Links, step: int, rows_B: Tensor) -> float | Tensor:
        """Run one training step: two messages with each passive, and one secure sum."""
        others_BD = await self._request_sum(links, step, rows_B, is_training=True)
        loss, gradients = self.train_on_parts(step, rows_B, {SUM: others_BD})
        for name in self.contract.passives:
            links.send(name, Kind.GRADIENTS, step, gradients[SUM])
        return loss

    async def predict_jointly(self, links: Links, step: int, rows_B: Tensor) -> JointScores:
        """Return the joint prediction of these rows from the sum of all passives'
        representations.
        """
        others_BD = await self._request_sum(links, step, rows_B, is_training=False)
        self.check_teacher(rows_B, others_BD)
        return self._compute_joint(rows_B, lambda: {SUM: others_BD})

    def check_teacher(self, rows_B: Tensor, others_BD: Tensor) -> None:
        """Check how far one person's sum moves other people's predictions.

        By default nothing: only methods that promise a bound override it.
        """

    async def _request_sum(
        self, links: Links, step: int, rows_B: Tensor, *, is_training: bool
    ) -> Tensor:
        """Return the decoded sum (B, D) of the passives' representations of these rows.

        `is_training`: whether gradients for these rows follow.
        """
        request = self.pack_request(rows_B, is_training=is_training)
        terms = next(iter(self.contract.passives.values())).representation
        self.sum.send_request(links, Kind.REQUEST, step, request)
        sum_BD = await self.sum.receive_sum(links, step, rows_B, request, math.prod(terms.shape))
        return self.trainer.compute.move_batch(sum_BD)


class SummedPassive(SumHelper, EncodingPassive):
    """A passive that adds its representations to a secure sum; the active reads only the sum.

    `clip`: C, the L2 bound of one row; None: none.
    """

    def __init__(self, sum_end: PassiveSum, trainer: EncoderTrainer, *, clip: float | None) -> None:
        """Make a passive's role in SplitNN with a secure sum; with noise its encoder must not mix
        rows, which is measured.
        """
        EncodingPassive.__init__(self, sum_end.name, sum_end.contract, trainer)
        SumHelper.__init__(self, sum_end, {"": trainer})
        if sum_end.noise is not None:
            self.unchecked_modes = {True, False}
        self._clip = clip

    async def answer_message(self, links: Links, message: Envelope) -> None:
        """Apply a gradient, or add representations of the requested rows to the sum."""
        if message.kind is Kind.GRADIENTS:
            self.apply_gradient(message)
            return
        rows_B, learn = self.rows_of(message)
        await self._add_to_sum(
            links, self.sum.admit_request(message, rows_B), rows_B, is_training=learn
        )

    async def predict(self, links: Links, message: Envelope, about: bytes) -> None:
        """Add representations to the sum without training; see `EncodingPassive`.

        The contribution is bound to the people's digest, since each passive has positions of its
        own: a sum over different people would not decrypt.

        `about`: identifies the people, for independent noise.
        """
        rows_B, _ = self.rows_of(message)
        request = replace(message, payload=about)
        same_B = torch.arange(len(rows_B))
        admitted = self.sum.admit_request(request, same_B, counted_rows=rows_B)
        await self._add_to_sum(links, admitted, rows_B, is_training=False)

    async def _add_to_sum(
        self, links: Links, admitted: AdmittedRequest, rows_B: Tensor, *, is_training: bool
    ) -> None:
        """Encode and clip these rows, contribute them, and expect a gradient if `is_training`."""
        step = admitted.step
        z_BD = self.encode_rows(step, rows_B, is_training=is_training).flatten(1)
        if self._clip is None:
            (sent_BD,) = self.trainer.compute.fetch_batch(z_BD)
        else:
            z_BD, sent_BD = clip_and_fetch(z_BD, self._clip)
        await self.sum.send_answer(links, admitted, sent_BD.double().numpy())
        self.expect_gradient(step, z_BD, is_training=is_training)


class SummedSplitNn(SumMethod, Tvfl):
    """The method of vertical SplitNN that merges by a secure sum; see `Method`."""

    settings: type[MethodSettings] = SummedSplitNnSettings
    kind: type[SummedSplitNnActive] = SummedSplitNnActive
    make_simulated_step = Method.make_simulated_step

    def derive_terms(
        self, party: PartyContext, offers: Mapping[str, RepresentationTerms], session: str
    ) -> SessionTerms:
        """Return the terms of the sum. Raises ConfigError: representations of different sizes.

        `offers`: each passive's offered terms. `session`: the session's name.
        """
        agreed = super().derive_terms(party, offers, session)
        sizes = {name: math.prod(offered.shape) for name, offered in offers.items()}
        if party.name == party.active:
            _, own_shape = self._build_encoder(party)
            sizes[party.name] = math.prod(own_shape)
        if len(set(sizes.values())) > 1:
            sizes_text = ", ".join(f"{size} at {name}" for name, size in sizes.items())
            raise ConfigError(
                f"{party.config.method.name}: representations are added, so all have as many "
                f"numbers; got {sizes_text}; give all parties one model.representation"
            )
        shape = offers[party.passives[0]].shape
        return replace(agreed, secure_sum=party.describe_sum(session, shape))

    def build_active(self, party: PartyContext, contract: Contract, rows: Tensor) -> ActiveRole:
        """Return the active's role, with the guarantee that noise under the sum gives."""
        agreed = SessionSum.from_contract(party, contract)
        guarantee = "no guarantee: sums of representations are opened without noise"
        if agreed.noise is not None:
            guarantee = "representations are read as their noised sum alone"
        return self.kind(
            party,
            contract,
            rows,
            self.make_head_trainer(party, contract),
            guarantee=guarantee,
            sum_end=agreed.make_active_end(),
        )

    def make_head_trainer(self, party: PartyContext, contract: Contract) -> HeadTrainer:
        return self._make_trainer(SumTrainer, party, {SUM: 0})  # it is added to the active's own

    def build_passive(self, party: PartyContext, contract: Contract, rows: Tensor) -> HelperRole:
        """Return a passive's role; every row may be answered once more, for the final inference."""
        agreed = SessionSum.from_contract(party, contract)
        sum_end = agreed.make_passive_end(people=len(rows), extra_answers=1)
        trainer = self._make_encoder_trainer(party, rows)
        return SummedPassive(sum_end, trainer, clip=agreed.clip)
