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
    make_labeller,
    take_labeller_without_noise,
)
from secure_apfed.labellers.measured import check_votes
from secure_apfed.learning.descent import ActiveNetworks
from secure_apfed.learning.trainers import HeadTrainer
from secure_apfed.measures.table import Scored
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
)
from secure_apfed.methods.sum_end import ActiveSum
from secure_apfed.privacy.measured import check_row_wise
from secure_apfed.privacy.randomised_response import VoteResponse
from secure_apfed.settings import protects
from secure_apfed.settings.method import FormSettings
from secure_apfed.settings.privacy import LARGEST_LABEL_EPSILON
from secure_apfed.settings.run import RunSettings
from secure_apfed.settings.training import ModelSettings

HEAD = "head"

Floats = NDArray[np.float64]

_ALL_ROWS = bytes(8)
"""Constant that stands for "all training rows" where the noise of randomised response is derived.
"""


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
        """Make the active's role; build its student, and the key of randomised response.

        The arguments are those of `SummedSplitNnActive`. `guarantee`: the guarantee of the secure
        sums, in a sentence; that of randomised response is appended.
        """
        guarantee += _describe_response(party)
        super().__init__(party, contract, aligned, trainer, guarantee=guarantee, sum_end=sum_end)
        self.student = Student(party, aligned)
        self._config = party.config
        self.checkpoint_parts = {"": trainer, "student": self.student}
        self._key = party.derive_key(b"secure-apfed teacher v1")
        self._check_due = TeacherSettings.from_run_settings(self._config).epsilon is not None

    async def finish_training(self, links: Links, steps: StepCounter) -> None:
        """Request the sums of rows to label, label them with the joint model, and train the
        student.

        A labeller other than the joint model's head also needs the sums of labelled rows. Every
        request counts as a step in `steps`.
        """
        settings = TeacherSettings.from_run_settings(self._config)
        has_label_U = torch.zeros(len(self.student.positions_U), dtype=torch.bool)
        has_label_U[torch.from_numpy(self.student.labelled)] = True
        # The head labels unlabelled rows only; another labeller also learns from labelled ones.
        requested = torch.arange(len(has_label_U))
        if settings.labels == HEAD:
            requested = requested[~has_label_U]
        batches = self.split_into_batches(requested)
        with self.trainer.evaluation_mode():
            predictions = [
                await self._request_predictions(links, steps, self.student.positions_U[index_B])
                for index_B in batches
            ]
        labels_UK = np.zeros((len(has_label_U), self.student.classes))
        if predictions:
            index_V = torch.cat(batches).numpy()
            labels_UK[index_V] = self._label_rows(index_V, predictions)
        if settings.epsilon is not None:
            labels_UK = self.randomise_labels(labels_UK, settings.epsilon)
        self.student.fit_to_labels(labels_UK)
        self.student.train_by_descent()

    def check_teacher(self, rows_B: Tensor, others_BD: Tensor) -> None:
        """Refuse a head in which one person's sum changes another person's label.

        Only with an epsilon, which covers one person's label, and only at the first batch.
        `rows_B`: alignment positions, (B,). `others_BD`: the sum of the passives' representations
        of these rows. Raises PromiseError: names the head, and the change.
        """
        if self._check_due and len(rows_B) > 1:
            check_row_wise(self.trainer.head, others_BD, training=False, owner=self.name)
            self._check_due = False

    async def _request_predictions(
        self, links: Links, steps: StepCounter, rows_B: Tensor
    ) -> JointScores:
        """Return the joint prediction at these alignment positions; the request counts as a step of
        the run.
        """
        joint = await self.predict_jointly(links, steps.next_step, rows_B)
        steps.count_step(None)
        return joint

    def _label_rows(self, index_V: NDArray[np.int64], predictions: list[JointScores]) -> Floats:
        """Return the teacher's labels of some training rows: class probabilities (V, K), or one
        class each if the settings say "hard".

        `index_V`: indices of these rows among the student's. `predictions`: the joint model's
        scores of these rows, batch by batch.
        """
        settings = TeacherSettings.from_run_settings(self._config)
        if settings.labels == HEAD:
            scores_VK = torch.cat([joint.scores for joint in predictions]).double()
            labels_VK = scores_VK.softmax(1).cpu().numpy()
        else:
            has_label_V = np.isin(index_V, self.student.labelled)
            class_by_index = dict(zip(self.student.labelled, self.student.labels, strict=True))
            labels = np.array(
                [class_by_index[index] for index in index_V[has_label_V]], dtype=np.int64
            )
            batches_by_party = zip(*(joint.representations for joint in predictions), strict=True)
            # The labeller reads the representations of all parties side by side.
            read_VD = standardise_parts(torch.cat(batches) for batches in batches_by_party)
            labeller = make_labeller(settings.labels)
            inputs = read_VD, np.flatnonzero(has_label_V), labels, self.student.classes
            if settings.epsilon is not None:
                check_votes(labeller, *inputs, owner=self.name, is_judge=False)
            labels_VK = labeller.label_rows(*inputs)
        return harden_votes(labels_VK) if settings.form == "hard" else labels_VK

    def randomise_labels(self, labels_UK: Floats, epsilon: float) -> Floats:
        """Return class probabilities (U, K) from the teacher's labels after randomised response and
        from a prior by the active's own features.

        `labels_UK`: the teacher's labels. `epsilon`: privacy cost of the randomised response to
        each label, at delta 0.
        """
        response = VoteResponse(epsilon=epsilon, classes=self.student.classes)
        answers_U = response.randomise_votes(
            harden_votes(labels_UK), key=self._key, about=_ALL_ROWS
        )
        estimate_UK = response.estimate_sum(answers_U[None])
        prior = make_labeller_prior(Spreading())
        return self.student.weigh_votes(estimate_UK, prior, seed=self._seed).likely

    async def evaluate(self, links: Links, *, next_step: int, is_final: bool) -> dict[str, Scored]:
        """Return, after training, the test scores of the student and of the joint model.

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

    def linear_numbers(self, config: RunSettings, classes: int) -> float:
        """Return how many linear combinations of a person's features are revealed in all sums."""
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
    active_class = TeacherActive

    def build_passive(self, party: PartyContext, contract: Contract, rows: Tensor) -> HelperRole:
        """Return a passive's role, which encodes its rows for the secure sum.

        With an epsilon, which is of one person's label, its encoder is tested: rows must not change
        each other's representations. `rows`: the row of its table at each alignment position.
        """
        role = super().build_passive(party, contract, rows)
        assert isinstance(role, SummedPassive)
        if TeacherSettings.from_run_settings(party.config).epsilon is not None:
            role.unchecked_modes.add(False)
        return role

    def pick_model(self, config: RunSettings) -> ModelSettings:
        return TeacherSettings.from_run_settings(config).model


def _describe_response(party: PartyContext) -> str:
    """Return the guarantee of randomised response between teacher and student, in words; "" without
    an epsilon.
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
