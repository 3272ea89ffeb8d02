"""A joint teacher: a joint model under a secure sum labels the active's rows once.

Training is that of `split_nn_sum` (`secure_apfed.methods.joint_sum`), on the aligned rows that have
a label. Then the active requests sums once more, for the aligned training rows without a label; the
joint model labels these, and the active's student learns the labels from the active's own features.
The student predicts alone. It gains most where few rows have a label and many more are aligned. For
a labelled row the student learns the true label, never the teacher's, since the teacher was fitted
to it. The more numbers a sum has, compared with the passives' features, the more it reveals of
them: docs/leaks.

`epsilon` puts k-ary randomised response between the teacher and the student. It covers, at delta 0,
what the finished student reveals of the passives' features of one person without a label: they
reach the student by this one label alone, since the teacher was fitted without that person. It does
not cover what the active itself reads, which has the person's sum already; nor a person with a
label, on whom the teacher was fitted; nor the teacher, nor checkpoints, which contain the teacher.

Letters: N positions of the alignment, B rows of a batch, D numbers of a representation, K classes,
U aligned training rows, V of them that the teacher labels.
"""

from collections.abc import Sequence
from typing import Annotated, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator
from torch import Tensor

from secure_apfed.exchange import Links
from secure_apfed.labellers import (
    LABELLERS,
    Spreading,
    Voter,
    harden_votes,
    take_labeller_without_noise,
)
from secure_apfed.methods.joint_sum import (
    SummedJointSettings,
    SummedParts,
    SummedSplitNn,
    SummedSplitNnActive,
)
from secure_apfed.methods.method import Scores, StepCounter
from secure_apfed.methods.party import PartyContext
from secure_apfed.methods.student import (
    Student,
    TaughtActive,
    make_labeller_prior,
    standardise_parts,
)
from secure_apfed.privacy.randomised_response import VoteResponse
from secure_apfed.settings import FormSettings, ModelSettings, protects

HEAD = "head"

Floats = NDArray[np.float64]

_ALL_ROWS = bytes(8)
"""Constant that stands for "all training rows" where the noise of randomised response is derived.
"""


class TeacherActive(TaughtActive, SummedSplitNnActive):
    """An active whose student learns from the joint model in the end; see `SummedSplitNnActive`."""

    student: Student

    def __init__(self, parts: SummedParts) -> None:
        """Make the active's role; build its student, and the key of randomised response.

        The guarantee of randomised response is appended to that of the secure sums.
        """
        super().__init__(parts)
        party = parts.party
        settings = TeacherSettings.from_run_settings(party.config)
        self.guarantee += _describe_response(party)
        self.student = Student(party, parts.aligned_rows)
        self.checkpoint_parts = {"": self.trainer, "student": self.student}
        self._settings = settings
        self._voter: Voter | None = None
        if settings.labels != HEAD:
            self._voter = Voter(
                party.make_labeller(settings.labels, None),
                owner=party.name,
                is_tested=settings.epsilon is not None,
                has_hard_votes=settings.form == "hard",
            )
        self._key = party.derive_key(b"secure-apfed teacher v1")
        self._check_due = settings.epsilon is not None

    async def finish_training(self, links: Links, steps: StepCounter) -> None:
        """Label rows with the joint model, and train the student on these labels.

        The passives' sums of these rows are requested first.
        A labeller other than the joint model's head also learns from labelled rows, so it needs
        their sums, too. Every request counts as a step in `steps`.
        """
        settings = self._settings
        has_label_U = torch.zeros(len(self.student.positions_U), dtype=torch.bool)
        has_label_U[torch.from_numpy(self.student.labelled_n)] = True
        # The head labels unlabelled rows only; another labeller also learns from labelled ones.
        requested = torch.arange(len(has_label_U))
        if settings.labels == HEAD:
            requested = requested[~has_label_U]
        batches = self.split_into_batches(requested)
        labels_UK = np.zeros((len(has_label_U), self.student.classes))
        if batches:
            index_V = torch.cat(batches).numpy()
            joint = await self.predict_batches(
                links, steps, [self.student.positions_U[index_B] for index_B in batches]
            )
            labels_UK[index_V] = self._label_rows(index_V, joint.scores, joint.representations)
        if settings.epsilon is not None:
            labels_UK = self.randomise_labels(labels_UK, settings.epsilon)
        self.student.fit_to_labels(labels_UK)
        self.student.train_by_descent()

    def check_teacher(self, rows_B: Tensor, others_BD: Tensor) -> None:
        """Refuse a head in which one person's sum changes another person's label.

        It is tested only with an epsilon, which covers one person's label, and only at the first
        batch. `rows_B`: B alignment positions. `others_BD`: the sum of the passives'
        representations of these rows, D numbers each. Raises PromiseError: names the head, and the
        change.
        """
        if self._check_due and len(rows_B) > 1:
            self.trainer.check_head(others_BD)
            self._check_due = False

    def _label_rows(
        self, index_V: NDArray[np.int64], scores_VK: Tensor, parts: Sequence[Tensor]
    ) -> Floats:
        """Return the teacher's labels of V training rows: probabilities of K classes for each.

        If the settings say "hard", a label names one class instead. `index_V`: indices of these
        rows among the student's. `scores_VK`: the joint model's scores. `parts`: what its head
        read: for each party, D numbers for each row.
        """
        if self._voter is None:
            labels_VK = scores_VK.double().softmax(1).cpu().numpy()
            return harden_votes(labels_VK) if self._settings.form == "hard" else labels_VK
        has_label_V = np.isin(index_V, self.student.labelled_n)
        class_by_index = dict(zip(self.student.labelled_n, self.student.labels_n, strict=True))
        labels = np.array([class_by_index[index] for index in index_V[has_label_V]], dtype=np.int64)
        # The labeller reads the representations of all parties side by side.
        return self._voter.label_rows(
            standardise_parts(parts), np.flatnonzero(has_label_V), labels, self.student.classes
        )

    def randomise_labels(self, labels_UK: Floats, epsilon: float) -> Floats:
        """Return K class probabilities for each of U rows, from randomised labels and a prior.

        The randomised labels are the teacher's after randomised response; the prior is a labeller
        on the active's own features. `labels_UK`: the teacher's labels. `epsilon`: privacy cost of
        the randomised response to each label, at delta 0.
        """
        response = VoteResponse(epsilon=epsilon, classes=self.student.classes)
        answers_U = response.randomise_votes(
            harden_votes(labels_UK), key=self._key, about=_ALL_ROWS
        )
        estimate_UK = response.estimate_sum(answers_U[None])
        prior = make_labeller_prior(Spreading())
        return self.student.weigh_votes(estimate_UK, prior, seed=self._seed).likely_UK

    async def evaluate(self, links: Links, *, next_step: int, is_final: bool) -> Scores:
        """Return, after training, the test scores of the student and of the joint model.

        `next_step`: step numbers from it on are unused. `is_final`: whether training is over.
        """
        if not is_final:
            return {}
        with self.trainer.evaluation_mode():
            together = await self._score_jointly(links, next_step)
        name = self._settings.name
        scores: Scores = {name: self.student.score_rows(self._test_rows)}
        return {**scores, f"{name}_together": together} if len(together.truth) else scores


class TeacherSettings(SummedJointSettings, FormSettings):
    """The joint model and how it labels rows.

    Attributes:
        model: networks of the active, and of passives that have none of their own. The run's
            `model` is the student.
        labels: the source of the student's labels: "head", the joint model's own head; or a key of
            `LABELLERS`, which reads the same input and one more representation of each labelled
            row.
        epsilon: the epsilon of randomised response on each label that the student learns and that
            is not the active's own; null: none. The labels are hard then. The guarantee is for an
            adversary that sees only the finished student.
    """

    name: Literal["joint_teacher_sum"]
    model: ModelSettings = ModelSettings(network="linear", representation=16)
    labels: Annotated[str, protects("nobody")] = HEAD
    epsilon: Annotated[
        float | None, protects("the passives", higher="the finished model tells more of them")
    ] = Field(None, gt=0, le=VoteResponse.largest_epsilon)

    title = "joint teacher, summed"
    can_predict_locally = True
    teacher = "joint model"

    @field_validator("labels")
    @classmethod
    def _is_known(cls, name: str) -> str:
        """Refuse the name of an unknown labeller, or of one that adds noise."""
        return take_labeller_without_noise(name, also=(HEAD,))

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

    @property
    def joint_model(self) -> ModelSettings:
        """The networks of the active, and of passives that have none of their own."""
        return self.model

    @property
    def rests_on_encoders(self) -> bool:
        """True with an epsilon: it covers one person's label, so rows must not affect others."""
        return self.epsilon is not None

    @property
    def labeller_names(self) -> tuple[str, ...]:
        """The labellers that the method uses, as keys of `LABELLERS`; empty: the head labels."""
        return () if self.labels == HEAD else (self.labels,)

    @property
    def needs_sums_after_training(self) -> bool:
        """True if labelled rows are requested once more after training, for a labeller."""
        return self.labels != HEAD


class JointTeacher(SummedSplitNn):
    """A joint teacher under a secure sum; see `Method`."""

    has_student = True
    settings = TeacherSettings
    active_class = TeacherActive


def _describe_response(party: PartyContext) -> str:
    """Return in words the guarantee of randomised response between teacher and student.

    It is empty without an epsilon.
    """
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
