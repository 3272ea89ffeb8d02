"""Joint training and joint prediction: typical VFL (Section 2 of APFed) and vertical SplitNN.

All parties encode; the active's head reads all representations, concatenated, and every passive
learns from the gradient of the task loss on what it sent, which reveals something about labels. A
step takes 3M envelopes: requests, representations, gradients. Training and the full inference need
every party. The variants TVFL-0, -A and -R measure the model without passives (Section 5.1): they
replace the passives' representations at inference by zeros, by the mean of the active's (one
number, over the evaluation batch), or by uniform noise between the smallest and the largest of
these, as the authors' release does.

`split_nn` is the same with the networks with which APC-VFL compares (its Figure 1 and Appendix B);
the parties predict together only. Under a secure sum it is `secure_apfed.methods.joint_sum`.

A passive sends its representations after its own guard; the active sends the gradients on them.

Letters: N rows of a table or positions of the alignment, B rows of a batch, D numbers of a
representation, K classes.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from apfed_protocols.errors import RemoteProtocolError
from secure_apfed.contract import Contract, RepresentationBounds
from secure_apfed.exchange import Envelope, Kind, Links, TensorSpec, pack_tensors, unpack_tensors
from secure_apfed.learning.release import ChargedGuard, check_rows, parse_representations
from secure_apfed.learning.trainers import EncoderTrainer, HeadTrainer
from secure_apfed.measures.table import Scored
from secure_apfed.methods.method import (
    ActiveRole,
    HelperRole,
    Lockstep,
    Method,
    Scores,
    SessionTerms,
    StepCounter,
)
from secure_apfed.methods.party import PartyContext
from secure_apfed.methods.session_sum import (
    AnswerLimits,
    StepGate,
)
from secure_apfed.methods.student import LocalTraining
from secure_apfed.networks.models import Shape
from secure_apfed.settings import MethodSettings, ModelSettings, RunSettings


class JointSettings(MethodSettings):
    """The settings of joint training; see `MethodSettings`."""

    can_predict_locally = False
    representation_sender = "passives"
    has_returned_gradients = True
    can_stop_early = True
    can_weight_classes = True


class TvflSettings(JointSettings):
    """The settings of joint training and joint inference; see `MethodSettings`."""

    name: Literal["tvfl"]

    title = "TVFL, all views"


class SplitNnSettings(JointSettings):
    """The settings of SplitNN that concatenates; see `MethodSettings`."""

    name: Literal["split_nn"]

    title = "SplitNN"


def _draw_uniform(own_BD: Tensor, shape: Shape) -> Tensor:
    """Return uniform noise of this shape, between the smallest and largest number of `own_BD`.

    `own_BD`: the active's representations of B rows, D numbers each.
    """
    low = own_BD.min()
    high = own_BD.max()
    return low + (high - low) * torch.rand(shape, dtype=own_BD.dtype, device=own_BD.device)


# By inference variant: function from the active's representations, and the shape of a passive's, to
# the values that substitute the passive's.
SUBSTITUTES: Mapping[str, Callable[[Tensor, Shape], Tensor]] = {
    "tvfl_0": lambda own_BD, shape: own_BD.new_zeros(shape),
    "tvfl_a": lambda own_BD, shape: own_BD.mean().expand(shape),
    "tvfl_r": _draw_uniform,
}


@dataclass(frozen=True, eq=False)
class JointScores:
    """The joint model's scores of B rows, and what its head read of them.

    Attributes:
        scores: K numbers for each row.
        representations: for each party D numbers for each row.
    """

    scores: Tensor
    representations: tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class JointParts:
    """The parts from which an active's role in joint training is made.

    Attributes:
        party: the active's inputs.
        contract: the session's contract.
        aligned_rows: the row of its table at each of the N alignment positions.
        trainer: the active's encoder and head.
        guarantee: the privacy guarantee of what passives send, in a sentence for the report.
    """

    party: PartyContext
    contract: Contract
    aligned_rows: Tensor
    trainer: HeadTrainer
    guarantee: str


class TvflActive(ActiveRole):
    """The active of split learning: it encodes its own columns, requests the passives'
    representations, and trains the head on all of them.
    """

    def __init__(self, parts: JointParts) -> None:
        """Make the active's role in joint training.

        `parts`: the active's inputs, networks and contract.
        """
        super().__init__()
        party = parts.party
        trainer = parts.trainer
        self.name = party.name
        self.contract = parts.contract
        self.trainer = trainer
        self.checkpoint_parts = {"": trainer}
        self.prediction_networks = {"encoder": trainer.encoder, "head": trainer.head}
        self.guarantee = parts.guarantee
        self._defences = party.make_defences("returned gradients")
        self.min_batch_rows = party.config.rules.minimum_batch
        self.training_rows = party.find_positions(parts.aligned_rows, party.data.labelled_rows)
        self._own_row_by_position = parts.aligned_rows
        self._seed = party.secrets.seed
        self._test_rows = party.data.test_rows
        self._local_training = LocalTraining(party)
        self._party = party
        self._aligned_test_rows = party.find_positions(parts.aligned_rows, party.data.test_rows)
        if party.config.method.can_weight_classes:
            learnt_rows = parts.aligned_rows[self.list_learnt_rows(party.config)]
            trainer.weigh_classes(learnt_rows, len(party.data.classes))

    async def train_step(self, links: Links, step: int, rows_B: Tensor) -> float | Tensor:
        """Request representations, train the head on them, and send gradients back.

        That takes three envelopes for each passive. `rows_B`: B alignment positions (indices into
        the common list of people). Returns the task loss.
        """
        answers = await self.request_representations(links, step, rows_B, is_training=True)
        representation_by_passive = self.parse_answers(rows_B, answers)
        loss, gradients = self.train_on_parts(step, rows_B, representation_by_passive)
        for name, payload in gradients.items():
            links.send(name, Kind.GRADIENTS, step, payload)
        return loss

    @staticmethod
    def pack_request(rows_B: Tensor, *, is_training: bool = True) -> bytes:
        """Encode a request for representations of these alignment positions.

        Every passive gets the same bytes. `is_training`: whether the passive should expect a
        gradient on its answer.
        """
        return pack_tensors({"rows": rows_B}, {"learn": is_training})

    async def request_representations(
        self, links: Links, step: int, rows_B: Tensor, *, is_training: bool
    ) -> list[Envelope]:
        """Request representations from all passives, and return their messages.

        `rows_B`: the requested alignment positions. `is_training`: whether the active will send
        gradients on the representations.
        """
        request = self.pack_request(rows_B, is_training=is_training)
        for name in self.contract.passives:
            links.send(name, Kind.REQUEST, step, request)
        return [
            await links.receive(name, Kind.REPRESENTATIONS, step=step)
            for name in self.contract.passives
        ]

    def parse_answers(self, rows_B: Tensor, answers: Sequence[Envelope]) -> dict[str, Tensor]:
        """Return each passive's representations of the B requested positions, D numbers each.

        `answers`: one message with representations from each passive. Raises RemoteProtocolError: a
        passive is missing or answered twice, or its message is about other rows, has another shape,
        or norms out of bounds.
        """
        senders = [envelope.sender for envelope in answers]
        if sorted(senders) != sorted(self.contract.passives):
            raise RemoteProtocolError(
                f"one answer of each of {', '.join(self.contract.passives)} was expected, "
                f"got {', '.join(senders) or 'none'}"
            )
        representation_by_passive: dict[str, Tensor] = {}
        for envelope in answers:
            terms = self.contract.passives[envelope.sender].representation
            answered_B, h_BD = parse_representations(
                envelope, terms, alignment_size=len(self._own_row_by_position), min_rows=1
            )
            if not torch.equal(answered_B, rows_B):
                raise RemoteProtocolError(f"{envelope.sender} answered for other rows than asked")
            representation_by_passive[envelope.sender] = self.trainer.compute.move_batch(h_BD)
        return representation_by_passive

    def own_rows(self, rows_B: Tensor) -> Tensor:
        """Return the rows of the active's table at these alignment positions."""
        return self._own_row_by_position[rows_B]

    def train_on_parts(
        self, step: int, rows_B: Tensor, representation_by_sender: Mapping[str, Tensor]
    ) -> tuple[float | Tensor, dict[str, bytes]]:
        """Take one step on the task loss; return the loss, and each passive's packed gradient.

        The gradients are changed by the configured defences first. `rows_B`: B alignment positions
        (indices into the common list of people). `representation_by_sender`: mapping from passive
        name to its representations of these rows.
        """
        own_B = self.own_rows(rows_B)
        loss, gradients = self.trainer.train_on_representations(
            step, own_B, representation_by_sender
        )
        if self._defences:
            # Some defences need the true labels of the rows.
            labels_B = self.trainer.labels_N[self.trainer.compute.move_batch(own_B)]
            gradients = {
                name: self._defences.protect_gradient(
                    gradient_B, step=step, receiver=name, labels_B=labels_B
                )
                for name, gradient_B in gradients.items()
            }
        # One transfer for the gradients of all passives.
        fetched = self.trainer.compute.fetch_batch(*gradients.values())
        packed_gradient_by_sender = {
            name: pack_tensors({"gradient": gradient_B})
            for name, gradient_B in zip(gradients, fetched, strict=True)
        }
        return loss, packed_gradient_by_sender

    async def evaluate(self, links: Links, *, next_step: int, is_final: bool) -> Scores:
        """Return the test scores for each way to replace the passives' representations.

        The ways are the keys of `SUBSTITUTES`: by zeros, the active's mean, or noise. At the end
        also return the scores of joint prediction and of a local model. Joint prediction requests
        representations of test rows, which the passives' ledgers count.

        `next_step`: step numbers from it on are unused. `is_final`: whether training is over.
        """
        with self.trainer.evaluation_mode():
            scores = {name: self._score_with_substitutes(name) for name in SUBSTITUTES}
            if is_final:
                together = await self._score_jointly(links, next_step)
                scores = {"tvfl": together, **scores, "tvfl_alone": self.score_local_model()}
        return scores

    def score_local_model(self) -> Scored:
        """Train a model on the active's own features and labels, and return its test scores.

        It predicts for the active when the passives are gone (`fallback_networks`).
        """
        self.fallback_networks, scored = self._local_training.train_model()
        return scored

    def _score_with_substitutes(self, variant: str) -> Scored:
        """Return test scores where the passives' representations are substituted.

        `variant`: the kind of substitute, a key of `SUBSTITUTES`.
        """
        trainer = self.trainer
        shapes = {
            passive: terms.representation.shape for passive, terms in self.contract.passives.items()
        }

        def predict_rows(rows_B: Tensor) -> Tensor:
            """Return K scores of each of these B rows, with substituted representations."""
            with trainer.compute.prepare_forward(self._seed, "fill", variant):
                own_BD = trainer.encoder(trainer.features_N[rows_B])
                representation_by_passive = {
                    passive: SUBSTITUTES[variant](own_BD, (len(rows_B), *shape))
                    for passive, shape in shapes.items()
                }
                return trainer.compute_scores(own_BD, representation_by_passive)

        return trainer.score_predictions(predict_rows, self._test_rows)

    async def _score_jointly(self, links: Links, next_step: int) -> Scored:
        """Return the joint scores of the aligned test rows, requested in batches.

        `next_step`: step numbers from it on are unused.
        """
        labels_N = self.trainer.labels_N.cpu()
        # Both lists begin with an empty tensor, since there may be no batch to concatenate.
        labels = [labels_N[:0]]
        scores = [torch.empty(0, self._party.output_count)]
        for index, rows_B in enumerate(self.split_into_batches(self._aligned_test_rows)):
            joint = await self.predict_jointly(links, next_step + index, rows_B)
            scores.append(joint.scores.detach().double().cpu())
            labels.append(labels_N[self._own_row_by_position[rows_B].cpu()])
        return self.trainer.task.score_outputs(torch.cat(scores), torch.cat(labels))

    async def compute_held_out_loss(self, links: Links, steps: StepCounter, rows: Tensor) -> float:
        """Return the joint model's mean loss on these alignment positions, without training.

        Every requested batch counts as a step in `steps`. NaN: the rows are too few for a batch.
        """
        loss_sum = 0.0
        scored_count = 0
        with self.trainer.evaluation_mode():
            for rows_B in self.split_into_batches(rows):
                scores_BK = (await self.predict_jointly(links, steps.next_step, rows_B)).scores
                steps.count_step(None)
                own_B = self._own_row_by_position[rows_B].to(scores_BK.device)
                labels_B = self.trainer.labels_N[own_B]
                loss_sum += float(self.trainer.task.sum_losses(scores_BK, labels_B))
                scored_count += len(rows_B)
        return loss_sum / scored_count if scored_count else math.nan

    def split_into_batches(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Split alignment positions into equal batches of at most the contract's batch size.

        Batches smaller than passives answer are left out.
        """
        batch_count = max(1, math.ceil(len(rows) / self.contract.batch_size))
        batches = rows.tensor_split(batch_count)
        return tuple(rows_B for rows_B in batches if len(rows_B) >= self.min_batch_rows)

    async def predict_batches(
        self, links: Links, steps: StepCounter, batches: Sequence[Tensor]
    ) -> JointScores:
        """Request the joint prediction of one or more batches of alignment positions.

        Each batch counts as a step in `steps`. Returns the prediction for all positions, in their
        order.
        """
        joint = []
        with self.trainer.evaluation_mode():
            for rows_B in batches:
                joint.append(await self.predict_jointly(links, steps.next_step, rows_B))
                steps.count_step(None)
        representations_of_parties = zip(*(scored.representations for scored in joint), strict=True)
        return JointScores(
            scores=torch.cat([scored.scores for scored in joint]),
            representations=tuple(
                torch.cat(batches_of_party) for batches_of_party in representations_of_parties
            ),
        )

    async def predict_jointly(self, links: Links, step: int, rows_B: Tensor) -> JointScores:
        """Request representations, and return the joint prediction; nobody trains.

        `rows_B`: the alignment positions to predict.
        """
        answers = await self.request_representations(links, step, rows_B, is_training=False)
        return self._compute_joint(rows_B, lambda: self.parse_answers(rows_B, answers))

    def _compute_joint(
        self, rows_B: Tensor, read_representations: Callable[[], Mapping[str, Tensor]]
    ) -> JointScores:
        """Return the joint model's scores of B alignment positions, and what its head read.

        `read_representations`: returns the representations of the other parties, by name; it is
        called after the active has encoded its own rows.
        """
        trainer = self.trainer
        own_B = self.own_rows(rows_B)
        with torch.no_grad(), trainer.compute.prepare_forward(self._seed, "together"):
            own_BD = trainer.encoder(trainer.compute.take_rows(trainer.features_N, own_B))
            parts = read_representations()
            scores_BK = trainer.compute_scores(own_BD, parts)
        return JointScores(
            scores=scores_BK, representations=trainer.merge_representations(own_BD, parts)
        )


class SplitNnActive(TvflActive):
    """The active of SplitNN, which predicts with all parties only; see `TvflActive`."""

    headline = "split_nn"

    async def evaluate(self, links: Links, *, next_step: int, is_final: bool) -> Scores:
        """Return, at the end, the joint scores of the aligned test rows, and the local ones."""
        if not is_final:
            return {}
        with self.trainer.evaluation_mode():
            together = await self._score_jointly(links, next_step)
        return {self.headline: together, f"{self.headline}_alone": self.score_local_model()}


class EncodingPassive(HelperRole):
    """A passive that encodes its features on request, and learns from the returned gradient.

    Attributes:
        unchecked_modes: the values of `is_training` for which the encoder must still be tested: a
            privacy bound assumes that no row changes another's representation.
    """

    request_kinds: tuple[Kind, ...] = (Kind.REQUEST, Kind.GRADIENTS)

    def __init__(self, name: str, contract: Contract, trainer: EncoderTrainer) -> None:
        """Make a passive's role.

        `trainer`: the passive's encoder and its features, in alignment order.
        """
        self.name = name
        self.contract = contract
        self.trainer = trainer
        self.prediction_networks = {"encoder": trainer.encoder}
        self.unchecked_modes: set[bool] = set()
        self._awaited_gradient: tuple[int, Tensor] | None = None

    def get_sent_network(self) -> nn.Module | None:
        """Return the passive's encoder, whose output leaves the party."""
        return self.trainer.encoder

    async def predict(self, links: Links, message: Envelope, people_digest: bytes) -> None:
        """Answer a request for a prediction, without training on it.

        `people_digest`: a digest of the people to predict, the same at all passives; only secure
        sums use it.
        """
        await self.answer_message(links, message)

    def parse_request(self, message: Envelope) -> tuple[Tensor, bool]:
        """Return the B requested alignment positions, and whether the request is for training.

        Raises RemoteProtocolError: the request breaks a rule.
        """
        expected = {"rows": TensorSpec(torch.int64, (None,))}
        tensors, meta = unpack_tensors(message.payload, expected, sender=message.sender)
        check_rows(
            tensors["rows"],
            alignment_size=len(self.trainer.features_N),
            min_rows=self.contract.minimum_batch,
            sender=message.sender,
        )
        return tensors["rows"], meta.get("learn") is True

    def encode_rows(self, step: int, rows_B: Tensor, *, is_training: bool) -> Tensor:
        """Return the representations of B alignment positions, (B, *shape).

        A gradient on earlier representations is not accepted any more. In the first batch the
        encoder is tested, where a privacy bound needs it. `is_training`: whether a gradient on
        these representations is to be expected. Raises PromiseError: one row changes another's
        representation, and the bound assumes that it does not.
        """
        self._awaited_gradient = None  # stays so if sending fails
        if is_training in self.unchecked_modes and len(rows_B) > 1:
            self.trainer.check_rows(rows_B, is_training=is_training)
            self.unchecked_modes.discard(is_training)
        return self.trainer.encode_rows(step, rows_B, is_training=is_training)

    def expect_gradient(self, step: int, z_BD: Tensor, *, is_training: bool) -> None:
        """Store the sent representations if a gradient on them will arrive (`is_training`).

        `z_BD`: the representations of B rows, still in the autograd graph.
        """
        self._awaited_gradient = (step, z_BD) if is_training else None

    def apply_gradient(self, message: Envelope) -> None:
        """Take one training step from the gradient on the representations sent last.

        Raises RemoteProtocolError: no gradient is due, or it has another shape or is not finite.
        """
        sender = message.sender
        awaited_step, z_BD = self._awaited_gradient or (None, None)
        if z_BD is None or message.step != awaited_step:
            raise RemoteProtocolError(
                f"{sender} sent a gradient for step {message.step}, which waits for none"
            )
        expected = {"gradient": TensorSpec(self.trainer.compute.dtype, tuple(z_BD.shape))}
        tensors, _ = unpack_tensors(message.payload, expected, sender=sender)
        if not bool(tensors["gradient"].isfinite().all()):
            raise RemoteProtocolError(f"{sender} sent a gradient that is not finite")
        self.trainer.apply_gradient(z_BD, tensors["gradient"])
        self._awaited_gradient = None


class TvflPassive(EncodingPassive):
    """A passive that sends its representations to the active, behind a guard; see
    `EncodingPassive`.
    """

    def __init__(
        self,
        party: PartyContext,
        contract: Contract,
        trainer: EncoderTrainer,
        releases: ChargedGuard,
    ) -> None:
        """Make a passive's role.

        It may answer once more for each row than training needs: for the joint prediction at the
        end.

        `trainer`: the passive's encoder and its features. `releases`: the passive's guard, which
        clips and perturbs representations, with the privacy ledger. If the guard adds noise, the
        encoder's rows must not change each other's representations, which is tested.
        """
        super().__init__(party.name, contract, trainer)
        self.ledgers = {self.name: releases.ledger}
        # A finite mu means that the guard adds noise.
        if math.isfinite(releases.guard.mechanism().mu):
            self.unchecked_modes = {True, False}
        self._releases = releases
        self._gate = StepGate(self.name)
        people = len(trainer.features_N)
        self._answer_limits = AnswerLimits.from_contract(
            party, contract, position_count=people, extra_answers=1
        )
        self.checkpoint_parts = {
            "": trainer,
            "allowance": self._answer_limits,
            "guard": releases.guard,
        }

    async def answer_message(self, links: Links, message: Envelope) -> None:
        """Train on a gradient, or answer a request with guarded representations.

        Raises RemoteProtocolError: the message breaks a rule; BudgetExhaustedError: answering would
        exceed the privacy budget; nothing is sent.
        """
        if message.kind is Kind.GRADIENTS:
            self.apply_gradient(message)
        else:
            payload = self.represent(message)
            links.send(message.sender, Kind.REPRESENTATIONS, message.step, payload)

    def represent(self, message: Envelope) -> bytes:
        """Return the guarded representations of the requested rows as bytes.

        The answer is counted for each row, and its privacy cost is recorded in the ledger.

        Raises RemoteProtocolError: the request breaks a rule; BudgetExhaustedError: sending would
        exceed the privacy budget; nothing is sent.
        """
        rows_B, is_training = self.parse_request(message)
        step = message.step
        sender = message.sender
        # Refused before anything is computed.
        self._answer_limits.check_batch(step, rows_B, sender=sender)
        self._gate.enter(step, sender=sender)
        released = self._releases.release(
            self.encode_rows(step, rows_B, is_training=is_training),
            step=step,
            rows_B=rows_B,
            record_digest=lambda digest: self._answer_limits.count_answers(
                step, rows_B, digest, sender=sender
            ),
        )
        self.expect_gradient(step, released.z_B, is_training=is_training)
        return released.payload

    def load_tensors(self, tensors: Mapping[str, Tensor], *, next_step: int) -> None:
        """Restore the state; steps before `next_step` are not answered again."""
        super().load_tensors(tensors, next_step=next_step)
        self._gate.last_step = next_step - 1


class Tvfl(Method):
    """The method TVFL; see `Method`.

    Attributes:
        active_class: the class of the active's role.
        has_student: whether the active's final model is another network than the one that it trains
            jointly.
    """

    settings: type[MethodSettings] = TvflSettings
    active_class: type[TvflActive] = TvflActive
    has_student: ClassVar[bool] = False

    def find_common_model(self, config: RunSettings) -> ModelSettings:
        """Return the network settings of the active, and of passives without their own."""
        return config.model

    def find_sent_model(self, config: RunSettings, passive: str) -> ModelSettings:
        """Return the settings of this passive's encoder: its own, or that of `pick_model`."""
        return config.find_passive_settings(passive).model or self.find_common_model(config)

    def offer_terms(self, party: PartyContext) -> RepresentationBounds | None:
        """Return the bounds on the representations that a passive sends; None at the active."""
        party.require_passives()
        if party.name == party.active:
            return None
        _, shape = self._build_encoder(party)
        return party.bound_sent_rows(shape)

    def derive_terms(
        self, party: PartyContext, proposed_terms: Mapping[str, RepresentationBounds], session: str
    ) -> SessionTerms:
        """Return the terms: each passive's bounds, as it offered them.

        `proposed_terms`: mapping from passive name to the bounds that its `offer_terms` returned.
        `session`: name of this session; not used here. Raises RemoteProtocolError: bounds that the
        settings do not give for this shape.
        """
        for name, offered in proposed_terms.items():
            party.require_terms(name, offered, party.bound_sent_rows(offered.shape))
        return SessionTerms.from_bounds({name: proposed_terms[name] for name in party.passives})

    def build_active(self, party: PartyContext, contract: Contract, rows: Tensor) -> ActiveRole:
        """Return the active's role, with the guarantee for the releases of all passives together.

        `rows`: the row of its table at each of the N alignment positions.
        """
        trainer = self.make_head_trainer(party, contract)
        return self.active_class(
            JointParts(
                party=party,
                contract=contract,
                aligned_rows=rows,
                trainer=trainer,
                guarantee=party.describe_joint_releases(),
            )
        )

    def build_passive(self, party: PartyContext, contract: Contract, rows: Tensor) -> HelperRole:
        """Return a passive's role.

        `rows`: the row of its table at each of the N alignment positions.
        """
        trainer = self._make_encoder_trainer(party, rows)
        return TvflPassive(party, contract, trainer, party.open_releases(len(rows)))

    def make_simulated_step(
        self, active: ActiveRole, passives: Mapping[str, HelperRole]
    ) -> Lockstep:
        """Return a training step without messages: encode, train the head, apply gradients."""
        assert isinstance(active, TvflActive)
        encoding_passives = {
            name: role for name, role in passives.items() if isinstance(role, TvflPassive)
        }

        def run_step(step: int, rows_B: Tensor) -> None:
            """Train all parties on these alignment positions."""
            sent_by_passive = {
                name: passive.trainer.encode_rows(step, rows_B, is_training=True)
                for name, passive in encoding_passives.items()
            }
            # Copies outside the passives' graphs, as if they had been sent.
            representation_by_passive = {
                name: h_B.detach().clone() for name, h_B in sent_by_passive.items()
            }
            _, gradients = active.trainer.train_on_representations(
                step, active.own_rows(rows_B), representation_by_passive
            )
            for name, gradient_B in gradients.items():
                trainer = encoding_passives[name].trainer
                trainer.apply_gradient(sent_by_passive[name], gradient_B)

        return run_step

    def make_head_trainer(self, party: PartyContext, contract: Contract) -> HeadTrainer:
        """Return the active's networks, whose head reads the representations of each passive."""
        width_by_input = {
            name: math.prod(terms.representation.shape) for name, terms in contract.passives.items()
        }
        return self._make_trainer(HeadTrainer, party, width_by_input)

    def _make_trainer(
        self,
        trainer_class: type[HeadTrainer],
        party: PartyContext,
        width_by_input: Mapping[str, int],
    ) -> HeadTrainer:
        """Return the active's untrained networks with their optimiser, as a `trainer_class`.

        Their weights follow from the party's seed.

        `width_by_input`: mapping from the name of each input that the head gets from other parties
        to the number of values by which it widens the head's input.
        """
        table = party.data.table
        encoder, shape = self._build_encoder(party)
        head_size = math.prod(shape) + sum(width_by_input.values())
        head = party.build_head(
            self.find_common_model(party.config), (head_size,), party.output_count
        )
        assert table.labels is not None
        return trainer_class(
            party.name,
            encoder,
            head,
            features_N=table.features,
            labels_N=table.labels,
            passives=tuple(width_by_input),
            train=party.config.train,
            seed=party.secrets.seed,
            task=party.task,
            own_optimization=party.own_code.optimization,
        )

    def _make_encoder_trainer(self, party: PartyContext, rows: Tensor) -> EncoderTrainer:
        """Return the trainer of this passive's encoder, with features in alignment order.

        `rows`: the row of its table at each of the N alignment positions.
        """
        encoder, _ = self._build_encoder(party)
        return EncoderTrainer(
            party.name,
            encoder,
            features_N=party.features_of(rows),
            train=party.config.train,
            seed=party.secrets.seed,
            own_optimization=party.own_code.optimization,
        )

    def _build_encoder(self, party: PartyContext) -> tuple[nn.Module, tuple[int, ...]]:
        """Return a party's untrained encoder, and the shape of its output for a row."""
        if party.name != party.active:
            return party.build_encoder(self.find_sent_model(party.config, party.name))
        # The network that the user passed in is trained by the student; joint training needs a
        # copy.
        family = party.fresh_networks if self.has_student else None
        return party.build_encoder(self.find_common_model(party.config), family)


class SplitNn(Tvfl):
    """The method of vertical SplitNN that concatenates; see `Method`."""

    settings = SplitNnSettings
    active_class = SplitNnActive
