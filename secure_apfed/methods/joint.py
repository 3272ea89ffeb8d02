"""Joint training and joint prediction: typical VFL (Section 2 of APFed) and vertical SplitNN.

Everybody encodes; the active's head reads all representations, concatenated, and every passive
learns from the gradient of the task loss on what it sent, which tells it about labels. A step takes
3M envelopes: requests, representations, gradients. Training and the full inference need every
party. What is left when the passives are gone (Section 5.1) say TVFL-0, -A and -R: they replace the
passives' representations at inference by zeros, by the mean of the active's (one number, over the
evaluation batch), or by uniform noise between the smallest and the largest of them, as the authors'
release does.

`split_nn` is the same with the networks with which APC-VFL compares (its Figure 1 and Appendix B);
the parties predict together only. `split_nn_sum` merges by sum instead, and passives contribute to
a `SecureSum`: the active reads the sum of their representations and no single one, in training and
for every row that is predicted. Discrete Gaussian noise under the sum (`secure_sum.noise`) makes
each contribution private, the encoders held fixed. With `linear` networks it is vertical softmax
regression.

A passive emits its representations behind its own guard, or under the sum; the active the gradients
on them.

`joint_teacher_sum`: all parties train one model on the labelled rows, which labels the others once.

Training is that of `split_nn_sum`, on the aligned rows that have a label. Then the active asks once
more, for the aligned training rows without one; the joint model labels these, and the active's
student learns the labels from the active's own features. It predicts alone. Help is worth most
where few rows have a label and many more are aligned. Of a labelled row the student learns the true
label, never the teacher's, who was fitted to it. A sum is no more hidden than it has numbers fewer
than the passives have features: docs/leaks.

`epsilon` puts k-ary randomised response between the teacher and the student. It covers, at
delta 0, what the finished student says of the passives' features of one person without a label:
they reach the student by this one label alone, since the teacher was fitted without that person. It
covers nothing that the active itself reads, which has the person's sum already; nor a person with a
label, on whom the teacher was fitted; nor the teacher, or checkpoints, which hold it.

Letters: N rows of a table, B batch, D numbers of a representation, K classes, U aligned training
rows.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn

from apfed_protocols.errors import RemoteProtocolError
from apfed_protocols.randomness import derive_key
from secure_apfed.base.seeds import seed_draws
from secure_apfed.contract import Contract, PassiveTerms, RepresentationTerms
from secure_apfed.data.lazy_rows import select_rows
from secure_apfed.errors import ConfigError
from secure_apfed.exchange import Envelope, Kind, Links, TensorSpec, pack_tensors, unpack_tensors
from secure_apfed.labellers import (
    LABELLERS,
    Spreading,
    harden_votes,
    labeller_for_oneself,
    make_labeller,
)
from secure_apfed.labellers.measured import check_votes
from secure_apfed.learning.descent import ActiveNetworks, MakeOptimizer, Trainer, joint_loss
from secure_apfed.learning.own_code import name_part
from secure_apfed.learning.release import Releases, check_rows, parse_representations
from secure_apfed.measures.table import Scored, score_model
from secure_apfed.methods.accounts import defences_of, describe_sum, guard_for, ledger_for
from secure_apfed.methods.alignment import positions_in, positions_of
from secure_apfed.methods.method import (
    ActiveRole,
    HelperRole,
    Lockstep,
    Method,
    PartyContext,
    SessionTerms,
    StepCounter,
)
from secure_apfed.methods.student import (
    Student,
    make_labeller_prior,
    side_by_side,
    train_student,
    weigh_votes,
)
from secure_apfed.methods.sum_end import (
    ActiveSum,
    Admitted,
    Allowance,
    PassiveSum,
    SessionSum,
    StepGate,
    SumHelper,
    SumLearner,
    SumMethod,
)
from secure_apfed.methods.terms import (
    bound_sent_rows,
    check_passives,
    clip_of,
    require_own_terms,
    settings_of,
)
from secure_apfed.networks.models import Shape, family_for, output_shape, require_scores
from secure_apfed.privacy.defences import Leaving
from secure_apfed.privacy.guard import joint_releases_statement
from secure_apfed.privacy.measured import check_row_wise
from secure_apfed.privacy.noise import clip_rows
from secure_apfed.privacy.randomised_response import VoteResponse
from secure_apfed.settings.method import FormSettings, MethodSettings, Side
from secure_apfed.settings.privacy import LARGEST_LABEL_EPSILON
from secure_apfed.settings.protection import NOBODY, PASSIVES, higher_is_less
from secure_apfed.settings.run import RunSettings
from secure_apfed.settings.training import ModelSettings, TrainSettings

SUM = "the others"
"""The one part that the head reads where representations are summed."""
HEAD = "head"

Floats = NDArray[np.float64]

_ALL_ROWS = bytes(8)  # it answers for all training rows, and no others


class JointSettings(MethodSettings):
    """The settings of joint training, whoever predicts in the end; see `MethodSettings`."""

    predicts_alone = False
    representations_from: ClassVar[Side | None] = "passives"
    returns_gradients = True
    stops_early = True


class TvflSettings(JointSettings):
    """The settings of joint training and joint inference; see `MethodSettings`."""

    name: Literal["tvfl"]

    title = "TVFL, all views"


class SplitNnSettings(JointSettings):
    """The settings of SplitNN that concatenates; see `MethodSettings`."""

    name: Literal["split_nn"]

    title = "SplitNN"


class SummedSplitNnSettings(MethodSettings):
    """The settings of SplitNN that merges by a secure sum; see `MethodSettings`."""

    name: Literal["split_nn_sum"]

    title = "SplitNN, summed"
    predicts_alone = False
    sums_representations = True
    returns_gradients = True
    stops_early = True

    def linear_numbers(self, config: RunSettings, classes: int) -> float:
        """Return how many linear numbers are read, in each epoch by other weights.

        Through other layers than linear ones they are nearly linear.
        """
        return _count_summed_numbers(config, config.model) * config.train.epochs


def _count_summed_numbers(config: RunSettings, model: ModelSettings) -> int:
    """Return the numbers of a representation that passives sum, which all have alike."""
    named = [settings.model or model for settings in config.passives.values()]
    return max((of.representation_size for of in named), default=model.representation_size)


def _draw_uniform(own_BD: Tensor, like_BD: Tensor) -> Tensor:
    low = own_BD.min()
    high = own_BD.max()
    return low + (high - low) * torch.rand_like(like_BD)


FILLS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "tvfl_0": lambda own_BD, like_BD: torch.zeros_like(like_BD),
    "tvfl_a": lambda own_BD, like_BD: own_BD.mean().expand_as(like_BD),
    "tvfl_r": _draw_uniform,
}


@dataclass(frozen=True, eq=False)
class JointScores:
    """The scores of rows by all parties' model, (B, K), and the representations that it read."""

    scores: Tensor
    representations: tuple[Tensor, ...]


class TvflActive(SumLearner):
    """The active: encodes its own view, asks for the passives', trains the head on all of them.
    `sum_end`: its end of the sum where passives answer under one; None: they answer singly.
    """

    def __init__(
        self,
        own: PartyContext,
        contract: Contract,
        aligned: Tensor,
        trainer: "HeadTrainer",
        *,
        guarantee: str,
        sum_end: ActiveSum | None = None,
    ) -> None:
        super().__init__(sum_end)
        self.name = own.name
        self.contract = contract
        self.trainer = trainer
        self.kept = {"": trainer}
        self.predicts_with = {"encoder": trainer.encoder, "head": trainer.head}
        self.guarantee = guarantee
        self._defences = defences_of(own, "returned gradients")
        self.smallest_batch = own.config.rules.minimum_batch
        self.training_rows = positions_of(aligned, own.data.labelled_rows)
        self._aligned = aligned
        self._seed = own.secrets.seed
        self._test_rows = own.data.test_rows
        self._classes = len(own.data.classes)
        self._code_alone = own.code.copy_encoder()
        self._own = own
        self._alone: Student | None = None
        self._aligned_test_rows = positions_of(aligned, own.data.test_rows)

    async def train_step(self, links: Links, step: int, rows_B: Tensor) -> float:
        """Ask, learn, return gradients (3M envelopes); rows are alignment positions."""
        parts = self.parse_answers(
            rows_B, await self.request_representations(links, step, rows_B, learn=True)
        )
        loss, gradients = self.train_on_parts(step, rows_B, parts)
        for name, payload in gradients.items():
            links.send(name, Kind.GRADIENTS, step, payload)
        return loss

    @staticmethod
    def pack_request(rows_B: Tensor, *, learn: bool = True) -> bytes:
        """Ask for the representations of these alignment positions, of every passive alike."""
        return pack_tensors({"rows": rows_B}, {"learn": learn})

    async def request_representations(
        self, links: Links, step: int, rows_B: Tensor, *, learn: bool
    ) -> list[Envelope]:
        request = self.pack_request(rows_B, learn=learn)
        for name in self.contract.passives:
            links.send(name, Kind.REQUEST, step, request)
        return [
            await links.receive(name, Kind.REPRESENTATIONS, step=step)
            for name in self.contract.passives
        ]

    def parse_answers(self, rows_B: Tensor, answers: Sequence[Envelope]) -> dict[str, Tensor]:
        """Return the passives' representations of the requested rows, by passive.

        Raises RemoteProtocolError: a passive is missing or answered twice, other rows or shapes, or
        norms out of bounds.
        """
        senders = [envelope.sender for envelope in answers]
        if sorted(senders) != sorted(self.contract.passives):
            raise RemoteProtocolError(
                f"one answer of each of {', '.join(self.contract.passives)} was expected, "
                f"got {', '.join(senders) or 'none'}"
            )
        read: dict[str, Tensor] = {}
        for envelope in answers:
            terms = self.contract.passives[envelope.sender].representation
            got_B, h_BD = parse_representations(
                envelope, terms, aligned=len(self._aligned), minimum=1
            )
            if not torch.equal(got_B, rows_B):
                raise RemoteProtocolError(f"{envelope.sender} answered for other rows than asked")
            read[envelope.sender] = self.trainer.compute.move_tensor(h_BD)
        return read

    def own_rows(self, rows_B: Tensor) -> Tensor:
        return self._aligned[rows_B].to(self.trainer.compute.device)

    def train_on_parts(
        self, step: int, rows_B: Tensor, parts: Mapping[str, Tensor]
    ) -> tuple[float, dict[str, bytes]]:
        """Take one step on the task loss; return the loss, and the gradient for each part by
        name.
        """
        own_B = self.own_rows(rows_B)
        loss, gradients = self.trainer.train_on_parts(step, own_B, parts)
        labels_B = self.trainer.labels_N[own_B]
        packed = dict[str, bytes]()
        for name, gradient_B in gradients.items():
            leaving_B = gradient_B
            for defence in self._defences:
                leaving_BD = defence.protect_gradient(
                    leaving_B.flatten(1), Leaving(step, name, labels_B)
                )
                leaving_B = leaving_BD.reshape(gradient_B.shape)
            packed[name] = pack_tensors({"gradient": leaving_B})
        return loss.item(), packed

    async def evaluate(self, links: Links, *, next_step: int, final: bool) -> dict[str, Scored]:
        """Return the scores by fill; at the end also the joint scores of the aligned test rows.

        The full inference sends representations of test rows, which the ledgers count.
        """
        with self.trainer.evaluation_mode():
            said = {name: self._score_fill(name) for name in FILLS}
            if final:
                together = await self._score_jointly(links, next_step)
                said = {"tvfl": together, **said, "tvfl_alone": self.score_local_model()}
        return said

    def score_local_model(self) -> Scored:
        """Train a model on the active's own features and labels, and return its test scores.

        It is for the day when the others are gone.
        """
        own = self._own
        held = replace(own.data, train_rows=own.data.labelled_rows, labelled=None)
        apart = replace(own, held=held, code=self._code_alone)
        student = Student(apart, torch.arange(len(held.table.ids)))
        student.fit_to_labels(np.zeros((len(student.rows_U), student.classes)))
        train_student(student, own.config)
        self._alone = student
        return student.score_rows(self._test_rows)

    def get_fallback_networks(self) -> ActiveNetworks | None:
        return None if self._alone is None else self._alone.networks

    def _score_fill(self, name: str) -> Scored:
        trainer = self.trainer
        shapes = {
            passive: terms.representation.shape for passive, terms in self.contract.passives.items()
        }

        def predict_rows(rows_B: Tensor) -> Tensor:
            with trainer.compute.prepare_forward(self._seed, "fill", name):
                own_BD = trainer.encoder(trainer.features_N[rows_B])
                parts = {
                    passive: FILLS[name](own_BD, own_BD.new_empty(len(rows_B), *shape))
                    for passive, shape in shapes.items()
                }
                return trainer.compute_scores(own_BD, parts)

        return score_model(predict_rows, self._test_rows, trainer.labels_N)

    async def _score_jointly(self, links: Links, next_step: int) -> Scored:
        labels_N = self.trainer.labels_N.cpu()
        truth = [labels_N[:0]]
        scores = [torch.empty(0, self._classes)]
        for index, rows_B in enumerate(self.parts_of(self._aligned_test_rows)):
            joint = await self.predict_jointly(links, next_step + index, rows_B)
            scores.append(joint.scores.detach().double().cpu())
            truth.append(labels_N[self._aligned[rows_B].cpu()])
        return Scored.from_network_outputs(torch.cat(truth), torch.cat(scores))

    async def compute_held_out_loss(self, links: Links, steps: StepCounter, rows: Tensor) -> float:
        """Return the loss of the joint model, for which every passive represents these
        positions.
        """
        total = 0.0
        asked = 0
        with self.trainer.evaluation_mode():
            for rows_B in self.parts_of(rows):
                scores_BK = (await self.predict_jointly(links, steps.next_step, rows_B)).scores
                steps.count_step(None)
                labels_B = self.trainer.labels_N[self._aligned[rows_B].to(scores_BK.device)]
                total += float(F.cross_entropy(scores_BK, labels_B, reduction="sum"))
                asked += len(rows_B)
        return total / asked if asked else math.nan

    def parts_of(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Split rows into equal parts that passives answer: neither too large nor too small."""
        parts = rows.tensor_split(max(1, math.ceil(len(rows) / self.contract.batch_size)))
        return tuple(rows_B for rows_B in parts if len(rows_B) >= self.smallest_batch)

    async def predict_jointly(self, links: Links, step: int, rows_B: Tensor) -> JointScores:
        """Return the joint prediction of all parties at these alignment positions; nobody learns
        from it.
        """
        answers = await self.request_representations(links, step, rows_B, learn=False)
        return self._compute_joint(rows_B, lambda: self.parse_answers(rows_B, answers))

    def _compute_joint(
        self, rows_B: Tensor, read: Callable[[], Mapping[str, Tensor]]
    ) -> JointScores:
        trainer = self.trainer
        own_B = self.own_rows(rows_B)
        with torch.no_grad(), trainer.compute.prepare_forward(self._seed, "together"):
            own_BD = trainer.encoder(trainer.features_N[own_B])
            parts = read()
            scores_BK = trainer.compute_scores(own_BD, parts)
        return JointScores(scores=scores_BK, representations=trainer.merge_parts(own_BD, parts))


class SplitNnActive(TvflActive):
    """The active of SplitNN, which predicts with all parties only; see `TvflActive`."""

    headline = "split_nn"

    async def evaluate(self, links: Links, *, next_step: int, final: bool) -> dict[str, Scored]:
        """Return, at the end, the joint scores of the aligned test rows, and the local ones."""
        if not final:
            return {}
        with self.trainer.evaluation_mode():
            together = await self._score_jointly(links, next_step)
        return {self.headline: together, f"{self.headline}_alone": self.score_local_model()}


class SummedSplitNnActive(SplitNnActive):
    """An active that reads the secure sum of the passives' representations; see `SplitNnActive`."""

    headline = "split_nn_sum"

    async def train_step(self, links: Links, step: int, rows_B: Tensor) -> float:
        """Run one step of the active: two messages with each passive, and one sum."""
        others_BD = await self._request_sum(links, step, rows_B, learn=True)
        loss, gradients = self.train_on_parts(step, rows_B, {SUM: others_BD})
        for name in self.contract.passives:
            links.send(name, Kind.GRADIENTS, step, gradients[SUM])
        return loss

    async def predict_jointly(self, links: Links, step: int, rows_B: Tensor) -> JointScores:
        others_BD = await self._request_sum(links, step, rows_B, learn=False)
        self.check_teacher(rows_B, others_BD)
        return self._compute_joint(rows_B, lambda: {SUM: others_BD})

    def check_teacher(self, rows_B: Tensor, others_BD: Tensor) -> None:
        """Check what one person's sum may move of what is said of others; nothing, unless a method
        promises something of it.
        """

    async def _request_sum(self, links: Links, step: int, rows_B: Tensor, *, learn: bool) -> Tensor:
        assert self.sum is not None
        request = self.pack_request(rows_B, learn=learn)
        terms = next(iter(self.contract.passives.values())).representation
        self.sum.send_request(links, Kind.REQUEST, step, request)
        sum_BD = await self.sum.receive_sum(links, step, rows_B, request, math.prod(terms.shape))
        return self.trainer.compute.move_tensor(sum_BD)


class EncodingPassive(HelperRole):
    """A passive that encodes its own view on request, and learns from the gradient that comes back.
    `trainer`: its encoder, over its features in the order of the alignment.
    """

    asks: tuple[Kind, ...] = (Kind.REQUEST, Kind.GRADIENTS)

    def __init__(self, name: str, contract: Contract, trainer: "EncoderTrainer") -> None:
        self.name = name
        self.contract = contract
        self.trainer = trainer
        self.predicts_with = {"encoder": trainer.encoder}
        # Modes, learning or not, in which a bound rests on rows that stand alone; unmeasured yet.
        self.unmeasured: set[bool] = set()
        self._due: tuple[int, Tensor] | None = None

    def get_sent_network(self) -> nn.Module | None:
        return self.trainer.encoder

    async def predict(self, links: Links, message: Envelope, about: bytes) -> None:
        """Answer a request that nobody learns from; `about`: which people that is, to who knows."""
        await self.answer_message(links, message)

    def rows_of(self, message: Envelope) -> tuple[Tensor, bool]:
        """Return the positions that the active asks for, and whether this party learns from its
        answer.

        Raises RemoteProtocolError: the request breaks a rule.
        """
        expected = {"rows": TensorSpec(torch.int64, (None,))}
        tensors, meta = unpack_tensors(message.payload, expected, sender=message.sender)
        check_rows(
            tensors["rows"],
            aligned=len(self.trainer.features_N),
            minimum=self.contract.minimum_batch,
            sender=message.sender,
        )
        return tensors["rows"], meta.get("learn") is True

    def encode_rows(self, step: int, rows_B: Tensor, *, learn: bool) -> Tensor:
        """Encode these positions; no gradient on an earlier answer is due any more. Raises
        PromiseError: rows of the first batch move each other where a bound rests on it.
        """
        self._due = None  # also where sending fails after this
        if learn in self.unmeasured and len(rows_B) > 1:
            self.trainer.check_rows(rows_B, learn=learn)
            self.unmeasured.discard(learn)
        return self.trainer.encode_rows(step, rows_B, learn=learn)

    def expect_gradient(self, step: int, z_BD: Tensor, *, learn: bool) -> None:
        """Remember what left, where a gradient on it is due."""
        self._due = (step, z_BD) if learn else None

    def apply_gradient(self, message: Envelope) -> None:
        """Take one step from the gradient on what was sent last.

        Raises RemoteProtocolError: no gradient is due, or one of another shape, or not finite.
        """
        sender = message.sender
        if self._due is None or message.step != self._due[0]:
            raise RemoteProtocolError(
                f"{sender} sent a gradient for step {message.step}, which waits for none"
            )
        z_BD = self._due[1]
        expected = {"gradient": TensorSpec(self.trainer.compute.dtype, tuple(z_BD.shape))}
        tensors, _ = unpack_tensors(message.payload, expected, sender=sender)
        if not bool(tensors["gradient"].isfinite().all()):
            raise RemoteProtocolError(f"{sender} sent a gradient that is not finite")
        self.trainer.apply_gradient(z_BD, tensors["gradient"])
        self._due = None


class TvflPassive(EncodingPassive):
    """A passive that sends its representations to the active, behind a guard; see
    `EncodingPassive`.
    """

    def __init__(
        self, own: PartyContext, contract: Contract, trainer: "EncoderTrainer", releases: Releases
    ) -> None:
        super().__init__(own.name, contract, trainer)
        self.ledgers = {self.name: releases.ledger}
        if math.isfinite(releases.guard.mechanism().mu):
            self.unmeasured = {True, False}
        self._releases = releases
        self._gate = StepGate(self.name)
        people = len(trainer.features_N)  # whom the final inference asks about once more
        self._allowance = Allowance.from_contract(own, contract, aligned=people, beyond=1)
        self.kept = {"": trainer, "allowance": self._allowance, "guard": releases.guard}

    async def answer_message(self, links: Links, message: Envelope) -> None:
        if message.kind is Kind.GRADIENTS:
            self.apply_gradient(message)
        else:
            payload = self.represent(message)
            links.send(message.sender, Kind.REPRESENTATIONS, message.step, payload)

    def represent(self, message: Envelope) -> bytes:
        """Encode and guard the rows that the active asked for. Raises RemoteProtocolError: the
        request breaks a rule; BudgetExhaustedError: sending would exceed the privacy budget;
        nothing is sent.
        """
        rows_B, learn = self.rows_of(message)
        step = message.step
        sender = message.sender
        self._allowance.check_batch(step, rows_B, sender=sender)
        self._gate.enter(step, sender=sender)
        released = self._releases.release(
            self.encode_rows(step, rows_B, learn=learn),
            step=step,
            rows=rows_B,
            count=lambda digest: self._allowance.count_answers(step, rows_B, digest, sender=sender),
        )
        self.expect_gradient(step, released.z, learn=learn)
        return released.payload

    def load_tensors(self, tensors: Mapping[str, Tensor], *, next_step: int) -> None:
        super().load_tensors(tensors, next_step=next_step)
        self._gate.last = next_step - 1


class SummedPassive(SumHelper, EncodingPassive):
    """A passive that adds its representations to a secure sum; the active reads only the sum.

    `clip`: C, the L2 bound of one row; None: none.
    """

    def __init__(
        self, sum_end: PassiveSum, trainer: "EncoderTrainer", *, clip: float | None
    ) -> None:
        EncodingPassive.__init__(self, sum_end.name, sum_end.contract, trainer)
        SumHelper.__init__(self, sum_end, {"": trainer})
        if sum_end.noise is not None:
            self.unmeasured = {True, False}
        self._clip = clip

    async def answer_message(self, links: Links, message: Envelope) -> None:
        if message.kind is Kind.GRADIENTS:
            self.apply_gradient(message)
            return
        rows_B, learn = self.rows_of(message)
        await self._add_to_sum(links, self.sum.admit_request(message, rows_B), rows_B, learn=learn)

    async def predict(self, links: Links, message: Envelope, about: bytes) -> None:
        """See `EncodingPassive`. What is added is bound to the people, of whom each passive has
        places of its own: a sum of one person here and another there opens to nobody.
        """
        rows_B, _ = self.rows_of(message)
        asked = replace(message, payload=about)
        same_B = torch.arange(len(rows_B))
        admitted = self.sum.admit_request(asked, same_B, counted=rows_B)
        await self._add_to_sum(links, admitted, rows_B, learn=False)

    async def _add_to_sum(
        self, links: Links, admitted: Admitted, rows_B: Tensor, *, learn: bool
    ) -> None:
        step = admitted.step
        z_BD = self.encode_rows(step, rows_B, learn=learn).flatten(1)
        if self._clip is not None:
            z_BD = clip_rows(z_BD, self._clip)
        await self.sum.send_answer(links, admitted, z_BD.detach().cpu().double().numpy())
        self.expect_gradient(step, z_BD, learn=learn)


class HeadTrainer(Trainer):
    """The active's encoder, and the head over all parties' representations, concatenated.

    Args:
        owner, encoder, head, features_N, labels_N: the active and what it has.
        passives: whose representations follow its own, in the order of the head.
    """

    def __init__(
        self,
        owner: str,
        encoder: nn.Module,
        head: nn.Module,
        *,
        features_N: Tensor,
        labels_N: Tensor,
        passives: Sequence[str],
        train: TrainSettings,
        seed: int,
        optimizer: MakeOptimizer | None = None,
    ) -> None:
        self.encoder = encoder
        self.head = head
        modules = {"encoder": encoder, "head": head}
        super().__init__(owner, modules, train=train, seed=seed, optimizer=optimizer)
        self._passives = tuple(passives)
        self.features_N, self.labels_N = map(self.compute.move_tensor, (features_N, labels_N))

    def train_on_parts(
        self, step: int, own_B: Tensor, parts: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Descend once; return the task loss and its gradient by each passive's part."""
        parts = {name: h_B.requires_grad_() for name, h_B in parts.items()}
        self.zero_grad()
        with self.forward_pass(step):
            scores_BK = self.compute_scores(self.encoder(self.features_N[own_B]), parts)
        loss = F.cross_entropy(scores_BK.to(self.compute.dtype), self.labels_N[own_B])
        loss.backward()
        self.step()
        return loss, {name: h_B.grad for name, h_B in parts.items() if h_B.grad is not None}

    def compute_scores(self, own_B: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
        read = [h_B.flatten(1) for h_B in self.merge_parts(own_B, parts)]
        scores_BK: Tensor = self.head(torch.cat(read, dim=1))
        return scores_BK

    def merge_parts(self, own_B: Tensor, parts: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Return the inputs of the head, side by side."""
        return (own_B, *(parts[name] for name in self._passives))


class SumTrainer(HeadTrainer):
    """The head reads the sum of all parties' representations: its one part is that of the others.

    With linear encoders and no clip that is one network on the concatenated table.
    """

    def merge_parts(self, own_B: Tensor, parts: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        (others_BD,) = (parts[name] for name in self._passives)
        return (own_B.flatten(1) + others_BD,)


class EncoderTrainer(Trainer):
    """A passive's encoder, which learns from the gradient on what it sent."""

    def __init__(
        self,
        owner: str,
        encoder: nn.Module,
        *,
        features_N: Tensor,
        train: TrainSettings,
        seed: int,
        optimizer: MakeOptimizer | None = None,
    ) -> None:
        self.encoder = encoder
        modules = {"encoder": encoder}
        super().__init__(owner, modules, train=train, seed=seed, optimizer=optimizer)
        self.features_N = self.compute.move_tensor(features_N)

    def check_rows(self, rows_B: Tensor, *, learn: bool) -> None:
        """Refuse an encoder in which one of these rows moves another; see `check_row_wise`."""
        features_B = self.features_N[rows_B.to(self.compute.device)]
        check_row_wise(self.encoder, features_B, training=learn, owner=self._owner)

    def encode_rows(self, step: int, rows_B: Tensor, *, learn: bool) -> Tensor:
        """Return what goes to the guard; with `learn` in the autograd graph, with dropout."""
        self.set_training(learn)
        with torch.set_grad_enabled(learn), self.forward_pass(step):
            h_B: Tensor = self.encoder(self.features_N[rows_B.to(self.compute.device)])
        return h_B.to(self.compute.dtype)

    def apply_gradient(self, z_B: Tensor, gradient_B: Tensor) -> None:
        """Descend once from the gradient on z, which was represented last."""
        self.zero_grad()
        joint_loss(z_B.new_zeros(()), z_B, self.compute.move_tensor(gradient_B)).backward()
        self.step()


class Tvfl(Method):
    """The method TVFL; see `Method`."""

    settings: type[MethodSettings] = TvflSettings
    kind: type[TvflActive] = TvflActive
    has_student: ClassVar[bool] = False
    """True if the active's own model is another network than the one in the exchange."""

    def pick_model(self, config: RunSettings) -> ModelSettings:
        """Return the networks of the active, and of passives that have none of their own."""
        return config.model

    def build_sent_network(self, config: RunSettings, passive: str, features: Shape) -> nn.Module:
        model = settings_of(config, passive).model or self.pick_model(config)
        return family_for(model, features).make_encoder(features, model)

    def offer_terms(self, own: PartyContext) -> RepresentationTerms | None:
        check_passives(own.config, own.passives)
        if own.name == own.active:
            return None
        shape = output_shape(self._make_encoder(own), own.data.table.shape)
        return bound_sent_rows(own.config, shape, guard_for(own))

    def derive_terms(
        self, own: PartyContext, offers: Mapping[str, RepresentationTerms], session: str
    ) -> SessionTerms:
        guard = guard_for(own)
        for name, offered in offers.items():
            require_own_terms(
                own.name, name, offered, bound_sent_rows(own.config, offered.shape, guard)
            )
        return SessionTerms(
            passives={
                name: PassiveTerms(objective=None, weight=1.0, representation=offers[name])
                for name in own.passives
            }
        )

    def build_active(self, own: PartyContext, contract: Contract, rows: Tensor) -> ActiveRole:
        trainer = self.make_head_trainer(own, contract)
        promised = joint_releases_statement(
            guard_for(own).describe_guarantee(), len(contract.passives)
        )
        return self.kind(own, contract, rows, trainer, guarantee=promised)

    def build_passive(self, own: PartyContext, contract: Contract, rows: Tensor) -> HelperRole:
        guard = guard_for(own)
        releases = Releases(guard, ledger_for(own, guard, aligned=len(rows)))
        return TvflPassive(own, contract, self._make_encoder_trainer(own, rows), releases)

    def make_simulated_step(
        self, active: ActiveRole, passives: Mapping[str, HelperRole]
    ) -> Lockstep:
        assert isinstance(active, TvflActive)
        others = {name: role for name, role in passives.items() if isinstance(role, TvflPassive)}

        def run_step(step: int, rows_B: Tensor) -> None:
            sent = {
                name: passive.trainer.encode_rows(step, rows_B, learn=True)
                for name, passive in others.items()
            }
            read = {name: h_B.detach().clone() for name, h_B in sent.items()}
            _, gradients = active.trainer.train_on_parts(step, active.own_rows(rows_B), read)
            for name, gradient_B in gradients.items():
                others[name].trainer.apply_gradient(sent[name], gradient_B)

        return run_step

    def make_head_trainer(self, own: PartyContext, contract: Contract) -> "HeadTrainer":
        """Return the active's networks, whose head reads the representations of each passive."""
        return self._make_trainer(HeadTrainer, own, contract, tuple(contract.passives))

    def _make_trainer(
        self,
        kind: "type[HeadTrainer]",
        own: PartyContext,
        contract: Contract,
        parts: tuple[str, ...],
    ) -> "HeadTrainer":
        """Return the active's networks at their reproducible start; the head reads these parts."""
        config = own.config
        table = own.data.table
        encoder = self._make_encoder(own)
        shape = output_shape(encoder, table.shape)
        model = self.pick_model(own.config)
        sent = [contract.passives[name].representation.shape for name in parts if name != SUM]
        size = sum(math.prod(each) for each in (shape, *sent))
        with seed_draws(own.secrets.seed, own.name, "head"):
            head = own.find_family(model, table.shape).make_head(size, len(own.data.classes), model)
        if own.code.head is not None:
            with name_part(own.name, "head"):
                require_scores(head, (size,), len(own.data.classes))
        assert table.labels is not None
        return kind(
            own.name,
            encoder,
            head,
            features_N=table.features,
            labels_N=table.labels,
            passives=parts,
            train=config.train,
            seed=own.secrets.seed,
            optimizer=own.code.optimizer,
        )

    def _make_encoder_trainer(self, own: PartyContext, rows: Tensor) -> "EncoderTrainer":
        return EncoderTrainer(
            own.name,
            self._make_encoder(own),
            features_N=select_rows(own.data.table.features, rows),
            train=own.config.train,
            seed=own.secrets.seed,
            optimizer=own.code.optimizer,
        )

    def _make_encoder(self, own: PartyContext) -> nn.Module:
        """Return a party's encoder at its reproducible start."""
        config = own.config
        features = own.data.table.shape
        with seed_draws(own.secrets.seed, own.name, "encoder"):
            if own.name != own.active and own.code.find_family() is None:
                return self.build_sent_network(config, own.name, features)
            model = self.pick_model(config)
            family = own.find_family(model, features)
            if self.has_student and own.fresh_networks is not None:
                family = own.fresh_networks  # the student trains the network that was handed in
            return family.make_encoder(features, model)


class SplitNn(Tvfl):
    """The method of vertical SplitNN that concatenates; see `Method`."""

    settings = SplitNnSettings
    kind = SplitNnActive


class SummedSplitNn(SumMethod, Tvfl):
    """The method of vertical SplitNN that merges by a secure sum; see `Method`."""

    settings: type[MethodSettings] = SummedSplitNnSettings
    kind = SummedSplitNnActive
    make_simulated_step = Method.make_simulated_step

    def derive_terms(
        self, own: PartyContext, offers: Mapping[str, RepresentationTerms], session: str
    ) -> SessionTerms:
        agreed = super().derive_terms(own, offers, session)
        sizes = {name: math.prod(offered.shape) for name, offered in offers.items()}
        if own.name == own.active:
            sizes[own.name] = math.prod(output_shape(self._make_encoder(own), own.data.table.shape))
        if len(set(sizes.values())) > 1:
            said = ", ".join(f"{size} at {name}" for name, size in sizes.items())
            raise ConfigError(
                f"{own.config.method.name}: representations are added, so all have as many "
                f"numbers; got {said}; give all parties one model.representation"
            )
        shape = offers[own.passives[0]].shape
        return replace(agreed, secure_sum=describe_sum(own, session, shape))

    def build_active(self, own: PartyContext, contract: Contract, rows: Tensor) -> ActiveRole:
        agreed = SessionSum.from_contract(own, contract)
        guarantee = "no guarantee: sums of representations are opened without noise"
        if agreed.noise is not None:
            guarantee = "representations are read as their noised sum alone"
        return self.kind(
            own,
            contract,
            rows,
            self.make_head_trainer(own, contract),
            guarantee=guarantee,
            sum_end=agreed.make_active_end(),
        )

    def make_head_trainer(self, own: PartyContext, contract: Contract) -> HeadTrainer:
        return self._make_trainer(SumTrainer, own, contract, (SUM,))

    def build_passive(self, own: PartyContext, contract: Contract, rows: Tensor) -> HelperRole:
        sum_end = SessionSum.from_contract(own, contract).make_passive_end(
            people=len(rows), beyond=1
        )
        trainer = self._make_encoder_trainer(own, rows)
        return SummedPassive(sum_end, trainer, clip=clip_of(own.config))


class TeacherActive(SummedSplitNnActive):
    """An active whose student learns from the joint model in the end; see `SummedSplitNnActive`."""

    def __init__(
        self,
        own: PartyContext,
        contract: Contract,
        aligned: Tensor,
        trainer: HeadTrainer,
        *,
        guarantee: str,
        sum_end: ActiveSum | None = None,
    ) -> None:
        guarantee += _response_statement(own)
        super().__init__(own, contract, aligned, trainer, guarantee=guarantee, sum_end=sum_end)
        self.student = Student(own, aligned)
        self._config = own.config
        self.kept = {"": trainer, "student": self.student}
        self._train_rows = positions_in(aligned, self.student.rows_U)
        self._key = derive_key(own.secrets.noise_key, b"secure-apfed teacher v1")
        self._check_due = TeacherSettings.from_run_settings(self._config).epsilon is not None

    async def finish_training(self, links: Links, steps: StepCounter) -> None:
        """Ask for the rows that the teacher is to label, label them, and train the student."""
        settings = TeacherSettings.from_run_settings(self._config)
        labelled = torch.zeros(len(self._train_rows), dtype=torch.bool)
        labelled[torch.from_numpy(self.student.labelled)] = True
        places = torch.arange(len(labelled))
        if settings.labels == HEAD:
            places = places[~labelled]
        with self.trainer.evaluation_mode():
            answers = [
                (places_B.numpy(), await self._ask_once(links, steps, self._train_rows[places_B]))
                for places_B in self.parts_of(places)
            ]
        labels_UK = np.zeros((len(labelled), self.student.classes))
        if answers:
            places_V = np.concatenate([places_B for places_B, _ in answers])
            labels_UK[places_V] = self._label_rows(places_V, [joint for _, joint in answers])
        if settings.epsilon is not None:
            labels_UK = self.randomise_labels(labels_UK, settings.epsilon)
        self.student.fit_to_labels(labels_UK)
        train_student(self.student, self._config)

    def check_teacher(self, rows_B: Tensor, others_BD: Tensor) -> None:
        """Refuse a head that lets one person's sum move another's label, where a label is answered
        as one person's. Raises PromiseError: names the head, and what moved.
        """
        if self._check_due and len(rows_B) > 1:
            check_row_wise(self.trainer.head, others_BD, training=False, owner=self.name)
            self._check_due = False

    async def _ask_once(self, links: Links, steps: StepCounter, rows_B: Tensor) -> JointScores:
        joint = await self.predict_jointly(links, steps.next_step, rows_B)
        steps.count_step(None)
        return joint

    def _label_rows(self, places_V: NDArray[np.int64], joints: list[JointScores]) -> Floats:
        """Return the teacher's labels at these places of the training rows, (V, K)."""
        settings = TeacherSettings.from_run_settings(self._config)
        if settings.labels == HEAD:
            scores_VK = torch.cat([joint.scores for joint in joints]).double()
            labels_VK = scores_VK.softmax(1).cpu().numpy()
        else:
            known = np.isin(places_V, self.student.labelled)
            class_of = dict(zip(self.student.labelled, self.student.labels, strict=True))
            labels = np.array([class_of[place] for place in places_V[known]], dtype=np.int64)
            read_VD = side_by_side(
                torch.cat(parts)
                for parts in zip(*(joint.representations for joint in joints), strict=True)
            )
            labeller = make_labeller(settings.labels)
            asked = read_VD, np.flatnonzero(known), labels, self.student.classes
            if settings.epsilon is not None:
                check_votes(labeller, *asked, owner=self.name, is_judge=False)
            labels_VK = labeller.label_rows(*asked)
        return harden_votes(labels_VK) if settings.form == "hard" else labels_VK

    def randomise_labels(self, labels_UK: Floats, epsilon: float) -> Floats:
        """Return labels for the student under randomised response, combined with its own prior."""
        response = VoteResponse(epsilon=epsilon, classes=self.student.classes)
        answers_U = response.randomise_votes(
            harden_votes(labels_UK), key=self._key, about=_ALL_ROWS
        )
        estimate_UK = response.estimate_sum(answers_U[None])
        prior = make_labeller_prior(Spreading())
        return weigh_votes(estimate_UK, self.student, prior, seed=self._seed).likely

    async def evaluate(self, links: Links, *, next_step: int, final: bool) -> dict[str, Scored]:
        """Return, at the end, the student's scores, and the teacher's with all parties present."""
        if not final:
            return {}
        with self.trainer.evaluation_mode():
            together = await self._score_jointly(links, next_step)
        name = self._config.method.name
        said = {name: self.student.score_rows(self._test_rows)}
        return {**said, f"{name}_together": together} if len(together.truth) else said

    def get_solo_networks(self) -> ActiveNetworks | None:
        return self.student.networks

    def refit_excluding(self, rows: Tensor) -> ActiveNetworks | None:
        return self.student.refit_excluding(rows)


class TeacherSettings(FormSettings):
    """The joint model and how it labels rows.

    Attributes:
        model: networks of the active and of passives that have none of their own. The run's `model`
            is the student.
        labels: "head" is the joint model's own; a key of `LABELLERS` labels from what it reads,
            with one more representation of each labelled row.
        epsilon: of the randomised response under which the student learns each label that is not
            the active's own; null: none. Labels are hard then. It holds against whoever has the
            finished student alone.
    """

    name: Literal["joint_teacher_sum"]
    model: ModelSettings = ModelSettings(network="linear", representation=16)
    labels: Annotated[str, NOBODY] = HEAD
    epsilon: Annotated[
        float | None, higher_is_less(PASSIVES, "the finished model tells more of them")
    ] = Field(None, gt=0, le=LARGEST_LABEL_EPSILON)

    title = "joint teacher, summed"
    predicts_alone = True
    sums_representations = True
    teacher = "joint model"
    returns_gradients = True
    stops_early = True

    @field_validator("labels")
    @classmethod
    def _is_known(cls, name: str) -> str:
        return labeller_for_oneself(name, also=(HEAD,))

    @model_validator(mode="after")
    def _others_move_no_label(self) -> Self:
        noised = self.epsilon is not None
        if noised and self.labels != HEAD and not LABELLERS[self.labels].inductive:
            raise ValueError(
                f"epsilon: under labels: {self.labels} a person moves other people's labels, too, "
                f"and no epsilon of one label covers that; use {HEAD}, or leave epsilon out"
            )
        return self

    def linear_numbers(self, config: RunSettings, classes: int) -> float:
        releases = config.train.epochs + self.asks_again
        return _count_summed_numbers(config, self.model) * releases

    @property
    def asks_again(self) -> bool:
        """A teacher other than the head reads labelled rows once more, after training."""
        return self.labels != HEAD


class JointTeacher(SummedSplitNn):
    """A joint teacher under a secure sum; see `Method`."""

    has_student = True
    settings = TeacherSettings
    kind = TeacherActive

    def build_passive(self, own: PartyContext, contract: Contract, rows: Tensor) -> HelperRole:
        """See `Method`. Each label of the teacher's is answered as one person's, so that no other
        row may move it.
        """
        role = super().build_passive(own, contract, rows)
        assert isinstance(role, SummedPassive)
        if TeacherSettings.from_run_settings(own.config).epsilon is not None:
            role.unmeasured.add(False)
        return role

    def pick_model(self, config: RunSettings) -> ModelSettings:
        return TeacherSettings.from_run_settings(config).model


def _response_statement(own: PartyContext) -> str:
    """Return the guarantee of randomised response between teacher and student; "" if there is
    none.
    """
    epsilon = TeacherSettings.from_run_settings(own.config).epsilon
    if epsilon is None:
        return ""
    seeded = own.config.guard.noise != "secret"
    classes = len(own.data.classes)
    against = "whoever has the finished student alone" + (
        " and does not know the run's seed" if seeded else ""
    )
    return (
        f"; the student learns each label of the teacher's under {classes}-ary randomised "
        f"response of epsilon {epsilon:g}, delta 0, against {against}, for one person without a "
        "label, with the teacher held fixed; against the active, which read their sums, "
        "and for people with a label it gives nothing"
    )
