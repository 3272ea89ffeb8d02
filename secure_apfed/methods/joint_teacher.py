"""Joint teacher: all parties train one model on the labelled rows, which labels the others once.

Training is that of `tvfl`, on the aligned rows that have a label. Then the active asks the passives
once more, for the aligned training rows without one; the joint model labels these, and the active's
student learns the labels from the active's own features. It predicts alone. Help is worth most
where few rows have a label and many more are aligned.

`epsilon` puts k-ary randomised response between the teacher and the student. It covers, at
delta 0, what the finished student says of the passives' features of one person without a label:
they reach the student by this one label alone, since the teacher was fitted without that person. It
covers nothing that the active itself reads, which has the person's representation already; nor a
person with a label, on whom the teacher was fitted; nor the teacher, or checkpoints, which hold it.

Letters: U aligned training rows, B batch, K classes.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator
from torch import Tensor

from apfed_protocols.randomness import derive_key
from secure_apfed.contract import Contract
from secure_apfed.defences import GradientDefence
from secure_apfed.exchange import Links
from secure_apfed.labellers import LABELLERS, Spreading, hard, labeller_for_oneself, make_labeller
from secure_apfed.learning.descent import ActiveNetworks, prefixed, without_prefix
from secure_apfed.learning.votes import Votes
from secure_apfed.measures import Scored
from secure_apfed.methods.alignment import positions_in
from secure_apfed.methods.joint import HeadTrainer, Joint, JointSettings, Tvfl, TvflActive
from secure_apfed.methods.method import Learner, Method, Own, Steps
from secure_apfed.methods.student import (
    by_labeller,
    side_by_side,
    student_of,
    train_student,
    with_prior,
)
from secure_apfed.privacy.randomised_response import VoteResponse
from secure_apfed.settings.method import FormSettings
from secure_apfed.settings.privacy import LARGEST_LABEL_EPSILON
from secure_apfed.settings.run import RunSettings
from secure_apfed.settings.training import ModelSettings

__all__ = ["JointTeacher", "JointTeacherActive", "JointTeacherSettings"]

HEAD = "head"

Floats = NDArray[np.float64]

_ALL_ROWS = bytes(8)  # it answers for all training rows, and no others


class JointTeacherActive(TvflActive):
    """The active, whose student learns from the joint model in the end; see `TvflActive`."""

    def __init__(
        self, own: Own, contract: Contract, aligned: Tensor, trainer: HeadTrainer, *,
        guarantee: str, defences: Sequence[GradientDefence] = (),
    ) -> None:  # fmt: skip
        guarantee += _response_statement(own)
        super().__init__(own, contract, aligned, trainer, guarantee=guarantee, defences=defences)
        self.student, self._config = student_of(own, aligned), own.config
        self._train_rows = positions_in(aligned, self.student.rows_U)
        self._key = derive_key(own.secrets.noise_key, b"secure-apfed teacher v1")

    async def conclude(self, links: Links, steps: Steps) -> None:
        """Ask for the rows that the teacher is to label, label them, and train the student."""
        settings = JointTeacherSettings.of(self._config)
        labelled = torch.zeros(len(self._train_rows), dtype=torch.bool)
        labelled[torch.from_numpy(self.student.labelled)] = True
        places = torch.arange(len(labelled))
        if settings.labels == HEAD:
            places = places[~labelled]
        with self.trainer.evaluating():
            answers = [
                (places_B.numpy(), await self._ask_once(links, steps, self._train_rows[places_B]))
                for places_B in self.parts_of(places)
            ]
        labels_UK = np.zeros((len(labelled), self.student.classes))
        if answers:
            places_V = np.concatenate([places_B for places_B, _ in answers])
            labels_UK[places_V] = self._label(places_V, [joint for _, joint in answers])
        if settings.epsilon is not None:
            labels_UK = self.answered(labels_UK, settings.epsilon)
        self.student.teach(labels_UK)
        train_student(self.student, self._config)

    async def _ask_once(self, links: Links, steps: Steps, rows_B: Tensor) -> Joint:
        joint = await self.joint(links, steps.next_step, rows_B)
        steps.stepped(None)
        return joint

    def _label(self, places_V: NDArray[np.int64], joints: list[Joint]) -> Floats:
        """What the teacher says of these places of the training rows, (V, K)."""
        settings = JointTeacherSettings.of(self._config)
        if settings.labels == HEAD:
            scores_VK = torch.cat([joint.scores for joint in joints]).double()
            labels_VK = scores_VK.softmax(1).cpu().numpy()
        else:
            known = np.isin(places_V, self.student.labelled)
            class_of = dict(zip(self.student.labelled, self.student.labels, strict=True))
            labels = np.array([class_of[place] for place in places_V[known]], dtype=np.int64)
            labels_VK = make_labeller(settings.labels).label(
                side_by_side(
                    torch.cat(parts)
                    for parts in zip(*(joint.representations for joint in joints), strict=True)
                ),
                np.flatnonzero(known), labels, self.student.classes,
            )  # fmt: skip
        return hard(labels_VK) if settings.form == "hard" else labels_VK

    def answered(self, labels_UK: Floats, epsilon: float) -> Floats:
        """The labels that the student learns under randomised response, with its own prior."""
        response = VoteResponse(epsilon=epsilon, classes=self.student.classes)
        answers_U = response.answer(hard(labels_UK), key=self._key, about=_ALL_ROWS)
        estimate_UK = response.estimate(answers_U[None])
        variance_U = response.variance(estimate_UK, parties=1).mean(axis=1).clip(min=0.0)
        votes = Votes(totals=estimate_UK, variance=variance_U, voters=1)
        return with_prior(votes, self.student, by_labeller(Spreading()), seed=self._seed)

    async def evaluate(self, links: Links, *, next_step: int, final: bool) -> dict[str, Scored]:
        """At the end what the student says alone, and the teacher with all parties present."""
        if not final:
            return {}
        with self.trainer.evaluating():
            together = await self._together(links, next_step)
        name = self._config.method.name
        said = {name: self.student.scored(self._test_rows)}
        return {**said, f"{name}_together": together} if len(together.truth) else said

    def solo(self) -> ActiveNetworks | None:
        return self.student.networks

    def tensors(self) -> dict[str, Tensor]:
        return super().tensors() | prefixed("student", self.student.tensors())

    def load_tensors(self, tensors: Mapping[str, Tensor], *, next_step: int) -> None:
        super().load_tensors(tensors, next_step=next_step)
        self.student.load_tensors(without_prefix("student", tensors))


class JointTeacherSettings(FormSettings, JointSettings):
    """The joint model and how it labels rows.

    Attributes:
        model: networks of the active and of passives that have none of their own; the run's
            `model` is the student.
        labels: "head" is the joint model's own head; a key of `LABELLERS` labels the rows from all
            parties' representations, which takes one more of each labelled row.
        epsilon: of the randomised response under which the student learns each label that is not
            the active's own; null: none. Labels are hard then. It holds against whoever has the
            finished student alone.
    """

    name: Literal["joint_teacher"]
    model: ModelSettings = ModelSettings(network="linear", representation=16)
    labels: str = HEAD
    epsilon: float | None = Field(None, gt=0, le=LARGEST_LABEL_EPSILON)

    title = "joint teacher"
    predicts_alone = True
    teacher = "joint model"

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

    @property
    def asks_again(self) -> bool:
        """A teacher other than the head reads labelled rows once more, after training."""
        return self.labels != HEAD


class JointTeacher(Tvfl):
    """The method; see `Method`."""

    settings = JointTeacherSettings

    def model(self, config: RunSettings) -> ModelSettings:
        return JointTeacherSettings.of(config).model

    lockstep = Method.lockstep  # the student learns after the last step

    def learner(self, own: Own, contract: Contract, rows: Tensor) -> Learner:
        return self.active(JointTeacherActive, own, contract, rows)


def _response_statement(own: Own) -> str:
    """What randomised response between teacher and student gives, in words; may be empty."""
    epsilon = JointTeacherSettings.of(own.config).epsilon
    if epsilon is None:
        return ""
    seeded, classes = own.config.guard.noise != "secret", len(own.data.classes)
    against = "whoever has the finished student alone" + (
        " and does not know the run's seed" if seeded else ""
    )
    return (
        f"; the student learns each label of the teacher's under {classes}-ary randomised "
        f"response of epsilon {epsilon:g}, delta 0, against {against}, for one person without a "
        "label, with the teacher held fixed; against the active, which read the representations, "
        "and for people with a label it gives nothing"
    )
