"""Learning tasks: what the active's model predicts, its loss, and how predictions are evaluated.

Run by: the active, in training, at the end of a run, and in `predict`. Passives read no label in
APFed, so only the active knows the task; if passives vote, the contract names the task. Each method
lists the tasks that it allows (`MethodSettings.tasks`). A new task is one class and one line in
`TASKS`: see docs/extend.md.

Letters: B rows, K outputs of the head.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Self

import torch.nn.functional as F
from torch import Tensor

from secure_apfed.data.labels import UNLABELLED, TargetScale
from secure_apfed.errors import DataError
from secure_apfed.measures.table import ACCURACY, Scored, compute_outputs
from secure_apfed.settings.plugins import PluginTable, require_class

LOSSES: Mapping[str, Callable[..., Tensor]] = MappingProxyType(
    {"squared": F.mse_loss, "absolute": F.l1_loss, "huber": F.huber_loss}
)
"""Errors of a regression by their names in the setting `train.loss`."""


class Task(ABC):
    """The learning task of one run, such as classification, with its loss, outputs and measures.

    Attributes:
        name: the task's key in `TASKS`.
        title: the task's name in reports.
        headline: the default main measure of a run.
        tells: name of the model's output for a row, such as "probabilities".
        measured_as: the task among those of `MEASURES` whose measures apply.
        learns_numbers: whether labels are numbers, standardised by a `TargetScale`; else they are
            classes.
        learns_counts: whether these numbers are counts, to which the Poisson deviance applies.
        link: in words, the quantity that the terms of a generalised linear model add up to.
        not_attacked: target of an attack -> the reason why no attack on it applies.
        learnt_by: names of the methods that learn the task, if it is defined outside of this
            package; built-in tasks are listed in `MethodSettings.tasks`.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    headline: ClassVar[str]
    tells: ClassVar[str]
    measured_as: ClassVar[str]
    learns_numbers: ClassVar[bool] = False
    learns_counts: ClassVar[bool] = False
    link: ClassVar[str] = "score"
    not_attacked: ClassVar[Mapping[str, str]] = {}
    learnt_by: ClassVar[tuple[str, ...]] = ()

    @classmethod
    @abstractmethod
    def from_targets(cls, targets: TargetScale | None, *, loss: str = "squared") -> Self:
        """Return the task of a run.

        `targets`: mean and scale of labels that are numbers; None: labels are classes. `loss`: name
        of a regression's error, a key of `LOSSES`.

        Raises DataError: the task cannot learn labels of this kind.
        """

    @abstractmethod
    def count_outputs(self, classes: int) -> int:
        """Return K, the number of outputs of the head for a row; `classes`: number of classes."""

    @abstractmethod
    def compute_loss(
        self, outputs_BK: Tensor, labels_B: Tensor, weights_K: Tensor | None = None
    ) -> Tensor:
        """Return the mean loss of a batch's labelled rows; 0 if no row has a label.

        `outputs_BK`: the head's outputs. `labels_B`: labels, `UNLABELLED` for an unknown one.
        `weights_K`: weight of each class; None: all equal.
        """

    def sum_losses(self, outputs_BK: Tensor, labels_B: Tensor) -> Tensor:
        """Return the sum of the losses of rows that all have a label."""
        return self.compute_loss(outputs_BK, labels_B) * len(labels_B)

    def check_labels(self, labels_n: Tensor, *, party: str) -> None:
        """Raise DataError if the task cannot learn a label; called before anything is sent.

        By default there is nothing to check. `labels_n`: the known labels of a party's table.
        """
        del labels_n, party

    @abstractmethod
    def decode_outputs(self, outputs_BK: Tensor) -> Tensor:
        """Return the predictions that a user reads: probabilities (B, K), or numbers (B,)."""

    @abstractmethod
    def score_outputs(self, outputs_BK: Tensor, labels_B: Tensor) -> Scored:
        """Return the predictions with the true labels of the rows, from which measures follow."""


def score_rows(
    task: Task, predict: Callable[[Tensor], Tensor], rows: Tensor, labels_N: Tensor
) -> Scored:
    """Return a model's predictions for some rows of a table, with their labels.

    Args:
        task: the learning task.
        predict: function from positions of rows (B,) to outputs (B, K).
        rows: positions in the table.
        labels_N: labels of all N rows of the table.
    """
    rows_on_device = rows.to(labels_N.device)
    return task.score_outputs(
        compute_outputs(predict, rows_on_device), labels_N[rows_on_device].cpu()
    )


class Classification(Task):
    """The task of predicting a row's class, one of two or more.

    The loss is the cross-entropy of the softmax of K outputs. Predictions are probabilities (B, K).
    """

    name: ClassVar[str] = "classification"
    title: ClassVar[str] = "classification"
    headline: ClassVar[str] = ACCURACY.name
    tells: ClassVar[str] = "probabilities"
    measured_as: ClassVar[str] = "classification"
    link: ClassVar[str] = "log-odds"

    @classmethod
    def from_targets(cls, targets: TargetScale | None, *, loss: str = "squared") -> Self:
        """Return the task.

        `targets`: scale of labels that are numbers; None: labels are classes. `loss` is unused: it
        is for regressions.

        Raises DataError: the labels are numbers.
        """
        if targets is not None:
            raise DataError(
                "task: classification tells classes, and these labels are numbers; say task: "
                "regression, or task: poisson for counts"
            )
        return cls()

    def count_outputs(self, classes: int) -> int:
        """Return one output for each class."""
        return classes

    def compute_loss(
        self, outputs_BK: Tensor, labels_B: Tensor, weights_K: Tensor | None = None
    ) -> Tensor:
        """Return the mean cross-entropy of the labelled rows; 0 if no row has a label.

        `outputs_BK`: the head's outputs. `weights_K`: weight of each class, by which the loss of
        its rows is multiplied; None: all 1.
        """
        labelled_B = labels_B != UNLABELLED
        # If all rows have a label, the simpler form is used. On a GPU it is not: to ask whether all
        # have one would wait for the GPU. The two forms differ only in the last bits.
        if weights_K is None and labels_B.device.type == "cpu" and bool(labelled_B.all()):
            return F.cross_entropy(outputs_BK, labels_B)
        total = F.cross_entropy(
            outputs_BK, labels_B, weight=weights_K, ignore_index=UNLABELLED, reduction="sum"
        )
        return total / labelled_B.sum().clamp(min=1)

    def sum_losses(self, outputs_BK: Tensor, labels_B: Tensor) -> Tensor:
        """Return the sum of the cross-entropies of rows that all have a label."""
        return F.cross_entropy(outputs_BK, labels_B, reduction="sum")

    def decode_outputs(self, outputs_BK: Tensor) -> Tensor:
        """Return the probability of each class, (B, K)."""
        return outputs_BK.softmax(1)

    def score_outputs(self, outputs_BK: Tensor, labels_B: Tensor) -> Scored:
        """Return the probabilities with the true classes of the rows."""
        return Scored.from_network_outputs(labels_B, outputs_BK)


_NUMBERS_NOT_ATTACKED: Mapping[str, str] = MappingProxyType(
    {
        "labels": "labels are numbers, and attacks on labels guess classes",
        "membership": "the model tells numbers, and attacks on membership read probabilities "
        "of classes",
    }
)


@dataclass(frozen=True, kw_only=True)
class _NumericTask(Task):
    """A task of predicting a number for each row, by one output of the head.

    Attributes:
        predicts: the kind of numbers, for errors.
        targets: mean and scale by which labels were standardised.
    """

    tells: ClassVar[str] = "prediction"
    learns_numbers: ClassVar[bool] = True
    not_attacked: ClassVar[Mapping[str, str]] = _NUMBERS_NOT_ATTACKED
    predicts: ClassVar[str]

    targets: TargetScale

    @classmethod
    def _require_targets(cls, targets: TargetScale | None) -> TargetScale:
        """Return the scale of the labels. Raises DataError: labels are classes."""
        if targets is None:
            raise DataError(
                f"task: {cls.name} predicts {cls.predicts}, and these labels are classes; give a "
                "table of numbers, or take task: classification"
            )
        return targets

    def count_outputs(self, classes: int) -> int:
        """Return one output, whatever the number of classes."""
        return 1

    def compute_loss(
        self, outputs_BK: Tensor, labels_B: Tensor, weights_K: Tensor | None = None
    ) -> Tensor:
        """Return the mean error of the labelled rows; 0 if no row has a label.

        `outputs_BK`: the head's single output, K = 1. `weights_K` is unused: it is for classes.
        """
        labelled_B = labels_B != UNLABELLED
        error_B = self._compute_errors(outputs_BK[:, 0], labels_B)
        return (error_B * labelled_B).sum() / labelled_B.sum().clamp(min=1)

    @abstractmethod
    def _compute_errors(self, outputs_B: Tensor, labels_B: Tensor) -> Tensor:
        """Return the error of each row, (B,); for a row without a label any finite number."""


@dataclass(frozen=True, kw_only=True)
class Regression(_NumericTask):
    """The task of predicting a number for each row, by squared, absolute or Huber's error.

    Labels are standardised by the labelled training rows, and a user gets predictions (B,) in the
    unit of the label column. Huber's error is squared below one standard deviation and linear above
    (P. Huber, Annals of Mathematical Statistics 35, 1964).

    Attributes:
        targets: mean and scale by which labels were standardised.
        error: name of the error, a key of `LOSSES`.
    """

    name: ClassVar[str] = "regression"
    title: ClassVar[str] = "regression"
    headline: ClassVar[str] = "r2"
    measured_as: ClassVar[str] = "regression"
    link: ClassVar[str] = "label"
    predicts: ClassVar[str] = "numbers"

    error: str = "squared"

    @classmethod
    def from_targets(cls, targets: TargetScale | None, *, loss: str = "squared") -> Self:
        """Return the task with this scale and error.

        `targets`: scale of labels that are numbers; None: labels are classes. `loss`: name of the
        error, a key of `LOSSES`.

        Raises DataError: the labels are classes.
        """
        return cls(targets=cls._require_targets(targets), error=loss)

    def _compute_errors(self, outputs_B: Tensor, labels_B: Tensor) -> Tensor:
        """Return the error of each row, (B,), between standardised numbers."""
        return LOSSES[self.error](outputs_B, labels_B, reduction="none")

    def decode_outputs(self, outputs_BK: Tensor) -> Tensor:
        """Return predictions (B,) in the unit of the labels."""
        return self.targets.decode(outputs_BK[:, 0])

    def score_outputs(self, outputs_BK: Tensor, labels_B: Tensor) -> Scored:
        """Return predictions with the true numbers of the rows, in the unit of the labels."""
        predictions_B = self.decode_outputs(outputs_BK)
        return Scored(truth=self.targets.decode(labels_B).numpy(), scores=predictions_B.numpy())


@dataclass(frozen=True, kw_only=True)
class Poisson(_NumericTask):
    """The task of predicting a count for each row, by Poisson regression with a log link.

    The expected count is m exp(output), where m is the mean label of the labelled training rows, so
    that training starts at the mean. The loss is Poisson's negative log-likelihood, divided by m
    (McCullagh and Nelder, Generalized Linear Models, 1989, chapter 6). Predictions (B,) are
    expected counts.

    Attributes:
        targets: mean and scale by which labels were standardised; m is the mean.
    """

    name: ClassVar[str] = "poisson"
    title: ClassVar[str] = "Poisson regression"
    headline: ClassVar[str] = "poisson_deviance"
    measured_as: ClassVar[str] = "poisson"
    learns_counts: ClassVar[bool] = True
    link: ClassVar[str] = "log of the expected count"
    predicts: ClassVar[str] = "counts"

    @classmethod
    def from_targets(cls, targets: TargetScale | None, *, loss: str = "squared") -> Self:
        """Return the task with this scale; `loss` is unused: it is for regressions.

        Raises DataError: the labels are classes.
        """
        return cls(targets=cls._require_targets(targets))

    def check_labels(self, labels_n: Tensor, *, party: str) -> None:
        """Raise DataError if a label is negative.

        `labels_n`: the known labels of a party's table, standardised.
        """
        counts_n = self.targets.decode(labels_n)
        # A count of 0 may decode to a tiny negative number.
        rounding = 1e-6 * (abs(self.targets.mean) + self.targets.scale)
        if negative := counts_n[counts_n < -rounding].tolist():
            raise DataError(
                f"{party}: task: poisson learns counts of 0 or more, and {len(negative)} labels "
                f"are negative, such as {negative[0]:g}; mend them, or take task: regression"
            )

    def _compute_errors(self, outputs_B: Tensor, labels_B: Tensor) -> Tensor:
        """Return (mu - y log mu) / m of each row, (B,), up to a constant.

        y is the count, mu the expected count, and m the mean count. Since mu = m exp(output), this
        is exp(output) - (y / m) * output.
        """
        # y / m from standardised labels; for a row without a label any finite number.
        relative_B = (1 + labels_B * (self.targets.scale / self.targets.mean)).clamp(min=0)
        return outputs_B.exp() - relative_B * outputs_B

    def decode_outputs(self, outputs_BK: Tensor) -> Tensor:
        """Return expected counts (B,)."""
        return self.targets.mean * outputs_BK[:, 0].double().exp()

    def score_outputs(self, outputs_BK: Tensor, labels_B: Tensor) -> Scored:
        """Return expected counts with the true counts of the rows."""
        # A count of 0 may decode to a tiny negative number.
        counts_B = self.targets.decode(labels_B).clamp(min=0)
        predictions_B = self.decode_outputs(outputs_BK)
        return Scored(truth=counts_B.numpy(), scores=predictions_B.numpy(), are_counts=True)


def _require_task(candidate: Any, code: str) -> type[Task]:
    """Return a plug-in's class, if it is a `Task` that lists the methods which learn it.

    `candidate`: the imported object. `code`: its import path, which every table of plug-ins passes;
    unused here.

    Raises TypeError: it is no such class.
    """
    del code
    task_class: type[Task] = require_class(candidate, Task)
    if not task_class.learnt_by:
        raise TypeError(
            f"{task_class.__name__} says in `learnt_by` no method that learns it; name some, as "
            '("apfed_c", "single_view")'
        )
    return task_class


TASKS: PluginTable[type[Task]] = PluginTable(
    {task.name: task for task in (Classification, Regression, Poisson)},
    plugin_kind="tasks",
    make_entry=_require_task,
)
"""Task classes by their names in the setting `task` of a run."""
