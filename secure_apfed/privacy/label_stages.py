"""LP-MST: labels answered part by part, the later ones with what a model expects of them.

Run by: the active, on its training labels. Against: whoever reads anything that the labels
move afterwards, as for `LabelResponse`.

Ghazi, Golowich, Kumar, Manurangsi and Zhang 2021, Deep Learning with Label Differential
Privacy, Algorithms 1 to 3. The training rows are cut into disjoint parts. The first is
answered by randomised response; each later one by `RRWithPrior` with the model that was
trained on the answers before it as prior: only the k classes that the model thinks likeliest
are answered, so that fewer answers are noise where the model knows something. Two deviations:
one model goes on training where the paper trains a new one in each stage, and its priors are
taken as they are, without the paper's temperature.

Guarantee: epsilon_y label differential privacy, delta 0, replace-one label, features public:
each label is answered once, and a prior reads answers of other labels only. A bad prior costs
accuracy and no privacy. Needs: parts that do not depend on labels, and a model that has read
no label but through these answers.

Letters: N labels, K classes.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from apfed_protocols.errors import LocalProtocolError
from secure_apfed.errors import ConfigError, ModelError
from secure_apfed.privacy.label_mechanism import chances, check_labels, check_strength, is_below
from secure_apfed.settings.privacy import LabelSettings

__all__ = ["MultiStageResponse", "first_epoch_of"]

_SUM_TOLERANCE = 1e-3


def first_epoch_of(stage: int, *, stages: int, epochs: int) -> int:
    """The epoch from which the labels of a stage take part; both count from 0."""
    return stage * epochs // stages


@dataclass(frozen=True, kw_only=True)
class MultiStageResponse:
    """`RRWithPrior` for every label, part by part.

    Attributes:
        epsilon: epsilon_y, above 0 and at most 40.
        classes: K, at least 2.
        stages: parts, at least 2.
    """

    name: ClassVar[str] = "lp_mst"
    unsafe: ClassVar[bool] = False

    epsilon: float
    classes: int
    stages: int = 2

    def __post_init__(self) -> None:
        check_strength(self.epsilon, self.classes)
        if self.stages < 2:
            raise ConfigError(
                f"lp_mst has at least 2 stages, got {self.stages}; one stage is randomised_response"
            )

    @classmethod
    def from_settings(cls, settings: LabelSettings, *, classes: int) -> "MultiStageResponse":
        assert settings.epsilon is not None
        return cls(epsilon=settings.epsilon, classes=classes)

    def statement(self) -> str:
        return (
            f"label DP, epsilon_y {self.epsilon:g}, delta 0, for any number of epochs: each "
            f"training label is answered once, in one of {self.stages} stages (LP-MST); "
            "features are not covered"
        )

    def widths(self, prior_NK: NDArray[np.float64]) -> NDArray[np.int64]:
        """How many (k) of each row's likeliest classes are answered (Algorithm 2, line 2).

        The k that maximises e^eps / (e^eps + k - 1) times the prior of the k likeliest classes,
        which is the expected chance that the answer is right; the smallest, if several do.
        """
        likeliest_NK = np.sort(prior_NK, axis=1)[:, ::-1]
        keep_K = math.exp(self.epsilon) / (math.exp(self.epsilon) + np.arange(prior_NK.shape[1]))
        right_NK: NDArray[np.float64] = keep_K * likeliest_NK.cumsum(axis=1)
        best_N: NDArray[np.int64] = right_NK.argmax(axis=1)
        return best_N + 1

    def answer(
        self, labels_N: torch.Tensor, *, key: bytes, prior_NK: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the labels to train on; see `LabelMechanism.answer`.

        Algorithm 1 with the k of `widths`: a label among the k likeliest is kept with
        probability e^eps / (e^eps + k - 1) and otherwise becomes one of the other k - 1; any
        other label becomes one of the k. Chances are rounded as by `LabelResponse`.
        """
        labels = check_labels(labels_N, self.classes)
        prior = self._prior(prior_NK, len(labels))
        width = self.widths(prior)
        # Classes from the likeliest on; of equal ones the first stands first.
        order_NK = np.argsort(-prior, axis=1, kind="stable")
        rank = np.argsort(order_NK, axis=1, kind="stable")[np.arange(len(labels)), labels]
        facts = f"lp_mst {float(self.epsilon)!r} {self.classes}"
        contents = (labels.astype("<i8"), prior.astype("<f8"))
        chance, choice = chances(key, facts, *contents, count=len(labels))
        inside = rank < width
        replaced = is_below(chance, (width - 1) / (math.exp(self.epsilon) + width - 1))
        others = np.maximum(width - 1, 1)
        moved = (rank + 1 + (choice % others.astype(np.uint64)).astype(np.int64)) % width
        anywhere = (choice % width.astype(np.uint64)).astype(np.int64)
        answered = np.where(inside, np.where(replaced, moved, rank), anywhere)
        answers = order_NK[np.arange(len(labels)), answered]
        return torch.from_numpy(answers).to(labels_N.device)

    def _prior(self, prior_NK: torch.Tensor | None, count: int) -> NDArray[np.float64]:
        if prior_NK is None:
            return np.full((count, self.classes), 1 / self.classes)
        if tuple(prior_NK.shape) != (count, self.classes) or not prior_NK.is_floating_point():
            raise LocalProtocolError(
                f"a prior has shape ({count}, {self.classes}), a probability of each class for "
                f"each label, got {prior_NK.dtype} of shape {tuple(prior_NK.shape)}"
            )
        prior: NDArray[np.float64] = prior_NK.detach().double().cpu().numpy()
        if not (prior >= 0).all() or (abs(prior.sum(axis=1) - 1) > _SUM_TOLERANCE).any():
            raise ModelError(
                "the model gives no probabilities for the next part of the labels; did its "
                "training diverge? lower train.learning_rate or train.max_gradient_norm"
            )
        return prior
