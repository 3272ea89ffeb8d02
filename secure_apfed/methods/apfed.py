"""APFed (Section 3): passives help during training, the active predicts alone afterwards.

Algorithm 1 in three scripts. `ApfedActive.train_step`: the active represents a batch, sends the
same to every passive, and updates from the sum of their gradients. `ApfedPassive.answer_message`: a
passive descends on its own loss, and contributes its gradient with respect to the received z. The
aggregator adds masked contributions (`secure_apfed.methods.session_sum`). The active without
passives is SingleVL (`secure_apfed.methods.single_view`).

With `train.labels: after` the task loss stays out of these steps: the encoder learns from the
passives' gradients alone, nothing that is sent depends on a label, and local models over the
features and their representation learn the labels at the end (`secure_apfed.methods.local_models`).

The active sends its representations after the guard and nothing else; a passive sends its
contribution to a secure sum. The networks and their gradient descent are in
`secure_apfed.learning.trainers`, which sends no message.

Letters: N rows of a table or positions of the alignment, B rows of a batch, A rows of a batch that
are aligned and sent, D numbers of a representation.
"""

import math
from collections.abc import Mapping
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from secure_apfed.contract import Contract, RepresentationBounds
from secure_apfed.exchange import Envelope, Kind, Links
from secure_apfed.learning.trainers import ForwardPass, PassiveDescent
from secure_apfed.methods.method import ActiveRole, HelperRole, Lockstep, SessionTerms
from secure_apfed.methods.party import ActiveParts, PartyContext
from secure_apfed.methods.session_sum import (
    ActiveSum,
    AdmittedRequest,
    PassiveSum,
    SessionSum,
    SumHelper,
    SumLearner,
    SumMethod,
)
from secure_apfed.methods.single_view import SingleView, SingleViewActive
from secure_apfed.settings import ContrastiveSettings, MethodSettings, ReconstructionSettings


class ApfedSettings(MethodSettings):
    """The settings of APFed, whatever passives optimise; see `MethodSettings`."""

    can_predict_locally = True
    representation_sender = "active"
    has_gradient_sum = True
    can_use_dp_sgd = True
    can_align_pairwise = True
    can_stop_early = True
    can_use_unaligned_rows = True
    can_weight_classes = True
    tasks = ("classification", "regression")


class MixedApfedSettings(ApfedSettings):
    """The settings of APFed where every passive names its own objective; see `ApfedSettings`."""

    name: Literal["apfed"]

    title = "APFed"


class ApfedRSettings(ApfedSettings):
    """The settings of APFed where all passives reconstruct features; see `ApfedSettings`."""

    name: Literal["apfed_r"]

    title = "APFed-R"
    fixed_objective = ReconstructionSettings()


class ApfedCSettings(ApfedSettings):
    """The settings of APFed where all passives use a contrastive loss; see `ApfedSettings`."""

    name: Literal["apfed_c"]

    title = "APFed-C"
    fixed_objective = ContrastiveSettings()


class ApfedActive(SumLearner, SingleViewActive):
    """The active of APFed: it has the labels, sends representations of its rows behind a guard
    (which clips and perturbs them), and descends the sum of gradients that comes back.

    Attributes:
        min_norm: the smallest L2 norm of a row's representation that every passive accepts.
    """

    def __init__(self, parts: ActiveParts, active_sum: ActiveSum) -> None:
        """Make the active's role in APFed; find the alignment position of each row of its table.

        `parts`: the active's inputs, networks and privacy ledgers. `active_sum`: the active's side
        of the secure sum, which sends requests and decodes sums.
        """
        super().__init__(parts)
        self.use_active_sum(active_sum)
        bounds = [terms.representation for terms in self.contract.passives.values()]
        self.min_spread = max(bound.minimum_spread for bound in bounds)
        self.min_norm = max(bound.minimum_norm for bound in bounds)
        self._releases = parts.protection.charged_guard
        assert parts.aligned_rows is not None
        # By row of the table; -1: the row is not aligned.
        self._position_N = torch.full((len(parts.party.data.table.ids),), -1, dtype=torch.int64)
        self._position_N[parts.aligned_rows] = torch.arange(len(parts.aligned_rows))

    async def train_step(self, links: Links, step: int, rows_B: Tensor) -> float | Tensor:
        """Send representations, receive the sum of gradients, update (Alg. 1, active client).

        Representations that passives would refuse, since they are nearly constant, are not sent.
        The ledger counts them all the same, since the guard has drawn its noise. `rows_B`: rows of
        the active's own table. Returns the task loss.

        Raises:
            BudgetExhaustedError: sending, or the update, would exceed a privacy budget.
            ModelError: representations, gradients or parameters that are not finite.
            RemoteProtocolError: the sum answers another request; nothing is updated then.
        """
        # A step without a sum must not leave an earlier one in the record.
        self.active_sum.decoded_sum = None
        batch, rows_A = self.forward(step, rows_B)
        # No row is sent: the active trains alone.
        if batch.h_A is None:
            return self.trainer.train_on_batch(batch)
        released = self._releases.release(
            batch.h_A,
            step=step,
            rows_B=rows_A,
            should_measure_spread=self.min_spread > 0,
            min_norm=self.min_norm,
        )
        z_A = released.z_B
        if self.warn_if_near_constant(z_A, step=step, spread=released.spread):
            return self.trainer.train_on_batch(batch)
        self.active_sum.send_request(links, Kind.REPRESENTATIONS, step, released.payload)
        row_size = math.prod(z_A.shape[1:])
        sum_AD = await self.active_sum.receive_sum(links, step, rows_A, released.payload, row_size)
        return self.train_on_sum(batch, rows_A, z_A, sum_AD)

    def forward(self, step: int, rows_B: Tensor) -> tuple[ForwardPass, Tensor]:
        """Run the forward pass of one batch, rows `rows_B` of the active's table.

        Returns the batch with `h`, the representations to send, and the alignment positions of its
        A aligned rows. Only aligned rows are sent. In two cases no row is sent (`h` is None), and
        the active trains alone: if fewer rows are aligned than the contract's minimum, or if this
        step was answered in an earlier session without a passive that is present now. In the latter
        case the two sums would reveal that passive's gradient.
        """
        position_B = self._position_N[rows_B]
        aligned_index = (position_B >= 0).nonzero().flatten()
        requests_help = len(aligned_index) >= self.contract.minimum_batch
        if self.active_sum.was_answered_without_some(step):
            requests_help = False
            self.active_sum.incomplete_step_count += 1
        batch = self.trainer.forward(step, rows_B, aligned_index if requests_help else None)
        return batch, position_B[aligned_index]

    def train_on_sum(
        self, batch: ForwardPass, rows_A: Tensor, z_A: Tensor, sum_AD: Tensor
    ) -> float | Tensor:
        """Update from task loss and the passives' sum together (Eq. 9); return the task loss.

        Args:
            batch: the forward pass of the batch: loss and representations.
            rows_A: alignment positions (indices into the common list of people) of the A rows that
                were sent.
            z_A: the released representations, still in the autograd graph.
            sum_AD: the sum of the passives' gradients by z, D numbers a row. It is the sum over
                passives p of lambda_p A dL_p/dz, where lambda_p is the weight of passive p, and L_p
                the mean of its loss over the A rows.
        """
        # With `train.labels: after`, local models learn from the stored sums once training is over.
        if self.final_fit is not None:
            self.final_fit.received_sums.add_sums(rows_A, sum_AD)
        gradient_A = self.trainer.compute.move_batch(sum_AD / len(sum_AD)).reshape(z_A.shape)
        return self.trainer.train_on_gradient(batch, z_A, gradient_A)


class ApfedPassive(SumHelper):
    """A passive of APFed: it receives representations z, and answers with the gradient of its own
    objective by z. It learns no label.

    Attributes:
        trainer: the passive's objective on its features.
        terms: the contract's bounds on the representations that it receives.
        weight: lambda_p of Eq. 9, the weight of its gradient in the sum.
    """

    request_kinds = (Kind.REPRESENTATIONS,)

    def __init__(
        self, passive_sum: PassiveSum, trainer: PassiveDescent, *, is_known_N: Tensor | None = None
    ) -> None:
        """Make a passive's role in APFed.

        Args:
            passive_sum: the passive's side of the secure sum, which checks requests and masks
                contributions.
            trainer: the passive's objective on its features, with rows in alignment order.
            is_known_N: whether it knows the person at each of the N positions, bool; None: all.
        """
        super().__init__(passive_sum, {"": trainer})
        self.trainer = trainer
        terms = self.contract.passives[self.name]
        self.terms = terms.representation
        self.weight = terms.weight
        self._position_count = len(trainer.features_N)
        self._is_known_N = is_known_N

    async def answer_message(self, links: Links, message: Envelope) -> None:
        """Take one step on the own objective, and add its gradient to the secure sum.

        This is the passive client of Alg. 1. The received batch is checked first.
        """
        await self.passive_sum.send_answer(links, *self.compute_contribution(message))

    def compute_contribution(
        self, message: Envelope
    ) -> tuple[AdmittedRequest, NDArray[np.floating]]:
        """Return the admitted request, and what this passive contributes to the sum.

        The contribution is the gradient of each row's own loss times the passive's weight, after
        the configured defences: D numbers for each of B rows. Raises RemoteProtocolError: the batch
        breaks a rule of the contract. Nothing is sent then; nothing is computed either, unless the
        batch may repeat one of an earlier session.
        """
        admitted_request, z_BD = self.admit_batch(message)
        gradient_BD = self.compute_gradient(
            admitted_request.step, admitted_request.rows, z_BD
        ).flatten(1)
        if self.passive_sum.defences:
            gradient_BD = self.passive_sum.defend_gradient(admitted_request, gradient_BD)
        return admitted_request, gradient_BD.cpu().numpy()

    def admit_batch(self, message: Envelope) -> tuple[AdmittedRequest, Tensor]:
        """Return the request, admitted for one answer, and its representations of B rows.

        Raises RemoteProtocolError: positions or representations break a rule of the contract.
        """
        return self.passive_sum.admit_representations(message, position_count=self._position_count)

    def compute_gradient(self, step: int, rows_B: Tensor, z_BD: Tensor) -> Tensor:
        """Take one step on the own objective; return the gradient of each row's loss by `z_BD`.

        The gradient is multiplied by the passive's weight. It is zero for people whom the passive
        does not know. If it does not know all people of the batch, it may learn nothing and return
        zeros only: when it knows fewer people than the contract's minimum batch, or when the
        representations of those it knows are nearly constant. An honest active may send such a
        batch, so it is not refused. Zeros tell the sender only what it can compute itself.

        `rows_B`: B alignment positions (indices into the common list of people). `z_BD`: the
        received representations of these rows.
        """
        is_known_B = None if self._is_known_N is None else self._is_known_N[rows_B]
        if is_known_B is None or bool(is_known_B.all()):
            gradient_BD = self.trainer.train_on_rows(step, rows_B, z_BD, weight=self.weight)
            return gradient_BD.to(z_BD)
        known_count = int(is_known_B.sum())
        known_z_BD = z_BD[is_known_B]
        gradient_BD = torch.zeros_like(z_BD)
        if known_count < self.contract.minimum_batch or self.is_narrow(known_z_BD):
            return gradient_BD
        known_gradient_BD = self.trainer.train_on_rows(
            step, rows_B[is_known_B], known_z_BD, weight=self.weight
        )
        gradient_BD[is_known_B] = known_gradient_BD.to(gradient_BD)
        return gradient_BD


class Apfed(SumMethod, SingleView):
    """The method APFed: the active of SingleVL, with passives that help; see `Method`."""

    def __init__(self, settings: type[ApfedSettings]) -> None:
        """Make the method; `settings`: the class of its settings."""
        self.settings = settings

    def offer_terms(self, party: PartyContext) -> RepresentationBounds | None:
        """Return the bounds on the representations that the active sends; None at a passive."""
        if party.name != party.active:
            return None
        party.require_passives()
        _, shape = party.build_networks(sends_representations=True)
        return party.bound_representations(shape)

    def derive_terms(
        self, party: PartyContext, proposed_terms: Mapping[str, RepresentationBounds], session: str
    ) -> SessionTerms:
        """Return the terms: the active's bounds, each passive's objective and weight, and the
        parameters of the secure sum.

        `proposed_terms`: mapping from party name to the bounds that its `offer_terms` returned;
        only the active offers any. `session`: name of this session, the same at all parties.
        """
        bounds = proposed_terms[party.active]
        shape = bounds.shape if party.projection_size is None else (party.projection_size,)
        # Called only for its exception: each party compares the active's offer with its own
        # settings.
        party.require_terms(party.active, bounds, party.bound_representations(shape))
        return SessionTerms(
            passives={name: party.state_passive_terms(name, bounds) for name in party.passives},
            secure_sum=party.describe_sum(session, bounds.shape),
        )

    def build_active(self, party: PartyContext, contract: Contract, rows: Tensor) -> ActiveRole:
        """Return the active's role, with its guard, privacy ledgers and side of the secure sum.

        `rows`: the row of its table at each of the N alignment positions.
        """
        parts = party.build_active_parts(contract, rows, sends_representations=True)
        dtype = parts.trainer.compute.dtype
        active_sum = SessionSum.from_contract(party, contract).make_active_sum(dtype)
        return ApfedActive(parts, active_sum)

    def build_passive(self, party: PartyContext, contract: Contract, rows: Tensor) -> HelperRole:
        """Return a passive's role, with its objective, defences and side of the secure sum.

        `rows`: the row of its table at each of the N alignment positions; -1: it does not know the
        person there.
        """
        is_known_N = None if bool((rows >= 0).all()) else rows >= 0
        terms = contract.passives[party.name]
        passive_sum = SessionSum.from_contract(party, contract).make_passive_sum(
            person_count=len(rows),
            is_known_N=is_known_N,
            counts_repeats_once=True,
            defences=party.make_defences("contributions"),
        )
        trainer = party.build_passive_trainer(
            terms,
            rows,
            is_noised=passive_sum.noise is not None,
            is_defended=bool(passive_sum.defences),
        )
        return ApfedPassive(passive_sum, trainer, is_known_N=is_known_N)

    def make_simulated_step(
        self, active: ActiveRole, passives: Mapping[str, HelperRole]
    ) -> Lockstep:
        """Return a training step that adds the passives' gradients directly, without messages."""
        assert isinstance(active, ApfedActive)
        apfed_passives = [role for role in passives.values() if isinstance(role, ApfedPassive)]

        def run_step(step: int, rows_B: Tensor) -> None:
            """Train all parties on these rows of the active's table.

            A batch whose representations would not be sent trains the active alone.
            """
            batch, rows_A = active.forward(step, rows_B)
            z_A = batch.h_A
            if z_A is None or active.warn_if_near_constant(z_A, step=step):
                active.trainer.train_on_batch(batch)
                return
            sent_A = z_A.detach()
            gradients = [
                # Each passive gets a copy, as it would in a message.
                passive.compute_gradient(step, rows_A, sent_A.clone())
                for passive in apfed_passives
            ]
            sum_AD = torch.stack([gradient.flatten(1).double() for gradient in gradients]).sum(0)
            active.train_on_sum(batch, rows_A, z_A, sum_AD)

        return run_step
