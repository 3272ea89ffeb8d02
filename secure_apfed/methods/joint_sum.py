"""Joint training under a secure sum: vertical SplitNN that merges by sum.

Training and joint prediction are those of `secure_apfed.methods.joint`, but passives contribute to
a `SecureSum`: the active reads the sum of their representations and no single one, in training and
for every row that is predicted. Discrete Gaussian noise in each contribution (`secure_sum.noise`)
makes it differentially private, the encoders held fixed. With `glm` networks it is a generalised
linear model of all columns: logistic, softmax, linear or Poisson regression.

A passive adds its representations to the secure sum; the active sends the gradients on them.

Letters: N positions of the alignment, B rows of a batch, D numbers of a representation, K classes.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from secure_apfed.contract import Contract, RepresentationBounds
from secure_apfed.errors import ConfigError
from secure_apfed.exchange import Envelope, Kind, Links
from secure_apfed.learning.trainers import EncoderTrainer, HeadTrainer, SumTrainer
from secure_apfed.methods.joint import EncodingPassive, JointParts, JointScores, SplitNnActive, Tvfl
from secure_apfed.methods.method import ActiveRole, HelperRole, Method, SessionTerms
from secure_apfed.methods.party import PartyContext
from secure_apfed.methods.session_sum import (
    AdmittedRequest,
    PassiveSum,
    SessionSum,
    SumHelper,
    SumLearner,
    SumMethod,
)
from secure_apfed.privacy.noise import clip_and_fetch
from secure_apfed.settings import MethodSettings, ModelSettings, RunSettings

SUM = "the others"
"""The name under which the head gets the sum of the passives' representations."""


class SummedJointSettings(MethodSettings):
    """The settings of a joint model whose head reads a secure sum; see `MethodSettings`."""

    has_representation_sum = True
    has_returned_gradients = True
    can_stop_early = True

    @property
    def joint_model(self) -> ModelSettings | None:
        """The networks of the active, and of passives that have none of their own; None: the run's
        `model`.
        """
        return None

    @property
    def rests_on_encoders(self) -> bool:
        """True if passives' encoders must be tested: a row may not change another row's output.

        An epsilon other than the sums' own assumes this for prediction.
        """
        return False

    def bound_linear_combinations(self, config: RunSettings, classes: int) -> float:
        """Return how many linear combinations of a person's features a run reveals to the active.

        Each epoch reveals the D numbers of a summed representation, with other weights. Non-linear
        networks are counted like linear ones, which they nearly are for one person.
        """
        releases = config.train.epochs + self.needs_sums_after_training
        return count_summed_numbers(config, self.joint_model or config.model) * releases


class SummedSplitNnSettings(SummedJointSettings):
    """The settings of SplitNN that merges by a secure sum; see `MethodSettings`."""

    name: Literal["split_nn_sum"]

    title = "SplitNN, summed"
    can_predict_locally = False
    can_weight_classes = True
    tasks = ("classification", "regression", "poisson")


def count_summed_numbers(config: RunSettings, model: ModelSettings) -> int:
    """Return how many numbers a summed representation has; all passives send equally many.

    `model`: the network settings of a passive without settings of its own.
    """
    models = [settings.model or model for settings in config.passives.values()]
    sizes = [passive_model.representation_size for passive_model in models]
    return max(sizes, default=model.representation_size)


@dataclass(frozen=True, kw_only=True)
class SummedParts(JointParts):
    """The parts from which an active's role under a secure sum is made; see `JointParts`.

    Attributes:
        session_sum: the session's secure sum.
    """

    session_sum: SessionSum


class SummedSplitNnActive(SumLearner, SplitNnActive):
    """An active that reads the secure sum of the passives' representations; see `SplitNnActive`."""

    headline = "split_nn_sum"

    def __init__(self, parts: SummedParts) -> None:
        """Make the active's role in joint training with a secure sum.

        `parts`: the active's inputs, networks and contract, and the sum.
        """
        super().__init__(parts)
        self.use_active_sum(parts.session_sum.make_active_sum())

    async def train_step(self, links: Links, step: int, rows_B: Tensor) -> float | Tensor:
        """Request the sum of representations, train the head on it, and send its gradient.

        Every passive gets the same gradient, since the sum's derivative by each summand is 1.
        `rows_B`: alignment positions, (B,). Returns the task loss.
        """
        others_BD = await self._request_sum(links, step, rows_B, is_training=True)
        loss, gradients = self.train_on_parts(step, rows_B, {SUM: others_BD})
        for name in self.contract.passives:
            links.send(name, Kind.GRADIENTS, step, gradients[SUM])
        return loss

    async def predict_jointly(self, links: Links, step: int, rows_B: Tensor) -> JointScores:
        """Request the sum of the passives' representations, and return the joint prediction.

        `step`: an unused step number. `rows_B`: alignment positions, (B,).
        """
        others_BD = await self._request_sum(links, step, rows_B, is_training=False)
        self.check_teacher(rows_B, others_BD)
        return self._compute_joint(rows_B, lambda: {SUM: others_BD})

    def check_teacher(self, rows_B: Tensor, others_BD: Tensor) -> None:
        """Check that one person's sum does not change other people's predictions.

        Here it checks nothing; a method whose privacy bound rests on this property overrides it.
        `rows_B`: alignment positions, (B,). `others_BD`: the sum of the passives' representations,
        D numbers for each position.
        """

    async def _request_sum(
        self, links: Links, step: int, rows_B: Tensor, *, is_training: bool
    ) -> Tensor:
        """Request and return the sum of the passives' representations at B alignment positions.

        `is_training`: whether the active will send a gradient for it. The sum is (B, D).
        """
        request = self.pack_request(rows_B, is_training=is_training)
        any_passive = next(
            iter(self.contract.passives.values())
        )  # all representations have one shape
        row_size = math.prod(any_passive.representation.shape)
        self.active_sum.send_request(links, Kind.REQUEST, step, request)
        sum_BD = await self.active_sum.receive_sum(links, step, rows_B, request, row_size)
        return self.trainer.compute.move_batch(sum_BD)


class SummedPassive(SumHelper, EncodingPassive):
    """A passive that adds its representations to a secure sum; the active reads only the sum."""

    def __init__(
        self, passive_sum: PassiveSum, trainer: EncoderTrainer, *, clip: float | None
    ) -> None:
        """Make a passive's role in joint training with a secure sum.

        With noise, the privacy bound needs an encoder in which a row changes no other row's
        representation. The first request tests that, in training and in prediction.

        Args:
            passive_sum: the passive's side of the secure sum, which checks requests and masks
                contributions.
            trainer: the passive's encoder and its features, in alignment order.
            clip: the L2 bound of one row's representation; None: unbounded.
        """
        EncodingPassive.__init__(self, passive_sum.name, passive_sum.contract, trainer)
        SumHelper.__init__(self, passive_sum, {"": trainer})
        if passive_sum.noise is not None:
            self.unchecked_modes = {True, False}  # training and prediction are still to be tested
        self._clip = clip

    async def answer_message(self, links: Links, message: Envelope) -> None:
        """Train on a gradient, or add the representations of the requested rows to the sum.

        Raises RemoteProtocolError: the message breaks a rule.
        """
        if message.kind is Kind.GRADIENTS:
            self.apply_gradient(message)
            return
        rows_B, is_training = self.parse_request(message)
        admitted_request = self.passive_sum.admit_request(message, rows_B)
        await self._add_to_sum(links, admitted_request, rows_B, is_training=is_training)

    async def predict(self, links: Links, message: Envelope, people_digest: bytes) -> None:
        """Answer a request for a prediction: add representations to the sum, without training.

        In a prediction session each passive numbers its people in its own way. So the contribution
        is bound to a digest of the people, and to their order in the request: a sum over different
        people does not decode.

        `message`: the request, with this passive's positions. `people_digest`: the digest of the
        people.
        """
        rows_B, _ = self.parse_request(message)
        request = replace(message, payload=people_digest)
        # The sum is bound to places in the request; limits count this passive's own positions.
        order_B = torch.arange(len(rows_B))
        admitted_request = self.passive_sum.admit_request(request, order_B, counted_rows=rows_B)
        await self._add_to_sum(links, admitted_request, rows_B, is_training=False)

    async def _add_to_sum(
        self, links: Links, admitted_request: AdmittedRequest, rows_B: Tensor, *, is_training: bool
    ) -> None:
        """Encode and clip the rows at these positions, and add the representations to the sum.

        `is_training`: whether the active's gradient for them is expected next.
        """
        step = admitted_request.step
        z_BD = self.encode_rows(step, rows_B, is_training=is_training).flatten(1)
        if self._clip is None:
            (sent_BD,) = self.trainer.compute.fetch_batch(z_BD)
        else:
            z_BD, sent_BD = clip_and_fetch(z_BD, self._clip)
        await self.passive_sum.send_answer(links, admitted_request, sent_BD.double().numpy())
        self.expect_gradient(step, z_BD, is_training=is_training)


class SummedSplitNn(SumMethod, Tvfl):
    """The method of vertical SplitNN that merges by a secure sum; see `Method`."""

    settings: type[MethodSettings] = SummedSplitNnSettings
    active_class: type[SummedSplitNnActive] = SummedSplitNnActive
    make_simulated_step = Method.make_simulated_step

    def find_common_model(self, config: RunSettings) -> ModelSettings:
        return SummedJointSettings.from_run_settings(config).joint_model or config.model

    def derive_terms(
        self, party: PartyContext, proposed_terms: Mapping[str, RepresentationBounds], session: str
    ) -> SessionTerms:
        """Return the terms: each passive's bounds, and the parameters of the sum.

        `proposed_terms`: mapping from passive name to the bounds that its `offer_terms` returned.
        `session`: name of this session, the same at all parties. Raises ConfigError: the parties'
        representations have different sizes.
        """
        agreed_terms = super().derive_terms(party, proposed_terms, session)
        sizes = {name: math.prod(offered.shape) for name, offered in proposed_terms.items()}
        # Only the active knows the size of its own representation, which is added, too.
        if party.name == party.active:
            _, own_shape = self._build_encoder(party)
            sizes[party.name] = math.prod(own_shape)
        if len(set(sizes.values())) > 1:
            sizes_text = ", ".join(f"{size} at {name}" for name, size in sizes.items())
            raise ConfigError(
                f"{party.config.method.name}: representations are added, so all have as many "
                f"numbers; got {sizes_text}; give all parties one model.representation"
            )
        shape = proposed_terms[party.passives[0]].shape
        return replace(agreed_terms, secure_sum=party.describe_sum(session, shape))

    def build_active(self, party: PartyContext, contract: Contract, rows: Tensor) -> ActiveRole:
        """Return the active's role; its stated guarantee depends on whether passives add noise.

        `rows`: the row of its table at each of the N alignment positions.
        """
        session_sum = SessionSum.from_contract(party, contract)
        guarantee = "no guarantee: sums of representations are opened without noise"
        if session_sum.noise is not None:
            guarantee = "representations are read as their noised sum alone"
        return self.active_class(
            SummedParts(
                party=party,
                contract=contract,
                aligned_rows=rows,
                trainer=self.make_head_trainer(party, contract),
                guarantee=guarantee,
                session_sum=session_sum,
            )
        )

    def make_head_trainer(self, party: PartyContext, contract: Contract) -> HeadTrainer:
        """Return the active's networks, whose head reads the sum of all representations.

        The passives' sum is added to the active's own representation, so the head has no further
        inputs for it.
        """
        extra_width_by_input = {SUM: 0}
        return self._make_trainer(SumTrainer, party, extra_width_by_input)

    def build_passive(self, party: PartyContext, contract: Contract, rows: Tensor) -> HelperRole:
        """Return a passive's role.

        `rows`: the row of its table at each of the N alignment positions.
        """
        session_sum = SessionSum.from_contract(party, contract)
        # The joint prediction after training needs one answer beyond those of the epochs.
        passive_sum = session_sum.make_passive_sum(person_count=len(rows), extra_answers=1)
        trainer = self._make_encoder_trainer(party, rows)
        role = SummedPassive(passive_sum, trainer, clip=session_sum.clip)
        if SummedJointSettings.from_run_settings(party.config).rests_on_encoders:
            # The encoder is still to be tested for prediction (`is_training` is False).
            role.unchecked_modes.add(False)
        return role
