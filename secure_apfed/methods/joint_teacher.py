"""A joint teacher: a joint model under a secure sum labels the active's rows once.

Training is that of `split_nn_sum` (`secure_apfed.methods.joint_sum`), on the aligned rows that have
a label. Then the active asks once more, for the aligned training rows without one; the joint model
labels these, and the active's student learns the labels from the active's own features. It predicts
alone. Help is worth most where few rows have a label and many more are aligned. Of a labelled row
the student learns the true label, never the teacher's, who was fitted to it. A sum is no more
hidden than it has numbers fewer than the passives have features: docs/leaks.

`epsilon` puts k-ary randomised response between the teacher and the student. It covers, at
delta 0, what the finished student says of the passives' features of one person without a label:
they reach the student by this one label alone, since the teacher was fitted without that person. It
covers nothing that the active itself reads, which has the person's sum already; nor a person with a
label, on whom the teacher was fitted; nor the teacher, or checkpoints, which hold it.

Letters: B batch, D numbers of a representation, K classes, U aligned training rows, V of them that
the teacher labels.
"""

from typing import Annotated, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator
from torch import Tensor

from secure_apfed.contract import Contract
from secure_apfed.exchange import Links
from secure_apfed.labellers import (
    LABELLERS,
    Spreading,
    harden_votes,
    labeller_for_oneself,
    make_labeller,
)
from secure_apfed.labellers.measured import check_votes
from secure_apfed.learning.descent import ActiveNetworks
from secure_apfed.learning.trainers import HeadTrainer
from secure_apfed.measures.table import Scored
from secure_apfed.methods.alignment import find_positions
from secure_apfed.methods.joint import JointScores
from secure_apfed.methods.joint_sum import (
    SummedPassive,
    SummedSplitNn,
    SummedSplitNnActive,
    count_summed_numbers,
)
from secure_apfed.methods.method import HelperRole, StepCounter
from secure_apfed.methods.party import PartyContext
from secure_apfed.methods.student import (
    Student,
    make_labeller_prior,
    standardise_parts,
    train_student,
    weigh_votes,
)
from secure_apfed.methods.sum_end import ActiveSum
from secure_apfed.privacy.measured import check_row_wise
from secure_apfed.privacy.randomised_response import VoteResponse
from secure_apfed.settings.method import FormSettings
from secure_apfed.settings.privacy import LARGEST_LABEL_EPSILON
from secure_apfed.settings.protection import NOBODY, PASSIVES, higher_is_less
from secure_apfed.settings.run import RunSettings
from secure_apfed.settings.training import ModelSettings

HEAD = "head"

Floats = NDArray[np.float64]

_ALL_ROWS = bytes(8)  # it answers for all training rows, and no others


class TeacherActive(SummedSplitNnActive):
    """An active whose student learns from the joint model in the end; see `SummedSplitNnActive`."""

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
        """Make the active's role with a joint teacher: build its student, and the key of randomised
        response.

        `aligned`: row of the active's table at each position, (N,). `guarantee`: what the session
        promises, in words.
        """
        guarantee += _describe_response(party)
        super().__init__(party, contract, aligned, trainer, guarantee=guarantee, sum_end=sum_end)
        self.student = Student(party, aligned)
        self._config = party.config
        self.checkpoint_parts = {"": trainer, "student": self.student}
        self._train_rows = find_positions(aligned, self.student.rows_U)
        self._key = party.derive_key(b"secure-apfed teacher v1")
        self._check_due = TeacherSettings.from_run_settings(self._config).epsilon is not None

    async def finish_training(self, links: Links, steps: StepCounter) -> None:
        """Request the sums of rows to label, label them with the joint model, and train the
        student.
        """
        settings = TeacherSettings.from_run_settings(self._config)
        labelled = torch.zeros(len(self._train_rows), dtype=torch.bool)
        labelled[torch.from_numpy(self.student.labelled)] = True
        places = torch.arange(len(labelled))
        if settings.labels == HEAD:
            places = places[~labelled]
        with self.trainer.evaluation_mode():
            answers = [
                (
                    places_B.numpy(),
                    await self._request_predictions(links, steps, self._train_rows[places_B]),
                )
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
        """Refuse a head in which one person's sum changes another person's label.

        Only with an epsilon, which covers one person's label. Raises PromiseError: names the head,
        and the change.

        `others_BD`: sums of the passives' representations.
        """
        if self._check_due and len(rows_B) > 1:
            check_row_wise(self.trainer.head, others_BD, training=False, owner=self.name)
            self._check_due = False

    async def _request_predictions(
        self, links: Links, steps: StepCounter, rows_B: Tensor
    ) -> JointScores:
        """Return the joint prediction of these rows, as a step of the run."""
        joint = await self.predict_jointly(links, steps.next_step, rows_B)
        steps.count_step(None)
        return joint

    def _label_rows(self, places_V: NDArray[np.int64], joints: list[JointScores]) -> Floats:
        """Return the teacher's labels, (V, K), at these indices of the training rows.

        `places_V`: the indices.
        """
        settings = TeacherSettings.from_run_settings(self._config)
        if settings.labels == HEAD:
            scores_VK = torch.cat([joint.scores for joint in joints]).double()
            labels_VK = scores_VK.softmax(1).cpu().numpy()
        else:
            known = np.isin(places_V, self.student.labelled)
            class_of = dict(zip(self.student.labelled, self.student.labels, strict=True))
            labels = np.array([class_of[place] for place in places_V[known]], dtype=np.int64)
            read_VD = standardise_parts(
                torch.cat(parts)
                for parts in zip(*(joint.representations for joint in joints), strict=True)
            )
            labeller = make_labeller(settings.labels)
            inputs = read_VD, np.flatnonzero(known), labels, self.student.classes
            if settings.epsilon is not None:
                check_votes(labeller, *inputs, owner=self.name, is_judge=False)
            labels_VK = labeller.label_rows(*inputs)
        return harden_votes(labels_VK) if settings.form == "hard" else labels_VK

    def randomise_labels(self, labels_UK: Floats, epsilon: float) -> Floats:
        """Return the teacher's labels after randomised response, combined with the student's own
        prior.
        """
        response = VoteResponse(epsilon=epsilon, classes=self.student.classes)
        answers_U = response.randomise_votes(
            harden_votes(labels_UK), key=self._key, about=_ALL_ROWS
        )
        estimate_UK = response.estimate_sum(answers_U[None])
        prior = make_labeller_prior(Spreading())
        return weigh_votes(estimate_UK, self.student, prior, seed=self._seed).likely

    async def evaluate(self, links: Links, *, next_step: int, is_final: bool) -> dict[str, Scored]:
        """Return, after training, the student's scores, and the joint model's with all parties
        present.

        `next_step`: step numbers from it on are unused. `is_final`: whether training is over.
        """
        if not is_final:
            return {}
        with self.trainer.evaluation_mode():
            together = await self._score_jointly(links, next_step)
        name = self._config.method.name
        scores = {name: self.student.score_rows(self._test_rows)}
        return {**scores, f"{name}_together": together} if len(together.truth) else scores

    def get_solo_networks(self) -> ActiveNetworks | None:
        return self.student.networks

    def refit_excluding(self, rows: Tensor) -> ActiveNetworks | None:
        return self.student.refit_excluding(rows)


class TeacherSettings(FormSettings):
    """The joint model and how it labels rows.

    Attributes:
        model: networks of the active, and of passives that have none of their own. The run's
            `model` is the student.
        labels: who labels rows for the student: "head", the joint model's own head; or a key of
            `LABELLERS`, which reads the same input and one more representation of each labelled
            row.
        epsilon: the epsilon of randomised response on each label that the student learns and that
            is not the active's own; null: none. The labels are hard then. The guarantee is for an
            adversary that sees only the finished student.
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
    def _check_labeller_of_epsilon(self) -> Self:
        """Refuse an epsilon with a labeller in which one person moves other people's labels."""
        noised = self.epsilon is not None
        if noised and self.labels != HEAD and not LABELLERS[self.labels].inductive:
            raise ValueError(
                f"epsilon: under labels: {self.labels} a person moves other people's labels, too, "
                f"and no epsilon of one label covers that; use {HEAD}, or leave epsilon out"
            )
        return self

    def linear_numbers(self, config: RunSettings, classes: int) -> float:
        releases = config.train.epochs + self.asks_again
        return count_summed_numbers(config, self.model) * releases

    @property
    def labellers(self) -> tuple[str, ...]:
        return () if self.labels == HEAD else (self.labels,)

    @property
    def asks_again(self) -> bool:
        """A teacher other than the head reads labelled rows once more, after training."""
        return self.labels != HEAD


class JointTeacher(SummedSplitNn):
    """A joint teacher under a secure sum; see `Method`."""

    has_student = True
    settings = TeacherSettings
    kind = TeacherActive

    def build_passive(self, party: PartyContext, contract: Contract, rows: Tensor) -> HelperRole:
        """Return a passive's role, which encodes its rows for the secure sum.

        An epsilon covers one label as one person's, so the encoder must not let a row move others.
        """
        role = super().build_passive(party, contract, rows)
        assert isinstance(role, SummedPassive)
        if TeacherSettings.from_run_settings(party.config).epsilon is not None:
            role.unchecked_modes.add(False)
        return role

    def pick_model(self, config: RunSettings) -> ModelSettings:
        return TeacherSettings.from_run_settings(config).model


def _describe_response(party: PartyContext) -> str:
    """Return the guarantee of randomised response between teacher and student; "" without it."""
    epsilon = TeacherSettings.from_run_settings(party.config).epsilon
    if epsilon is None:
        return ""
    seeded = party.config.guard.noise != "secret"
    classes = len(party.data.classes)
    against = "whoever has the finished student alone" + (
        " and does not know the run's seed" if seeded else ""
    )
    return (
        f"; the student learns each label of the teacher's under {classes}-ary randomised "
        f"response of epsilon {epsilon:g}, delta 0, against {against}, for one person without a "
        "label, with the teacher held fixed; against the active, which read their sums, "
        "and for people with a label it gives nothing"
    )
