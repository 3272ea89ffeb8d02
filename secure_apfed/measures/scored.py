"""What a model says of rows whose truth is known, as measures read it.

Letters: B rows, K classes.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self, TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from secure_apfed.errors import DataError

__all__ = ["FloatArray", "Scored", "probabilities_of", "scored_by"]

FloatArray: TypeAlias = NDArray[np.float64]

_EVALUATION_ROWS = 4096


@dataclass(frozen=True, eq=False, kw_only=True)
class Scored:
    """Rows with their truth, and what a model says of them.

    Attributes:
        truth: (B,), classes 0 to K - 1; floating, the targets of a regression; where scores are of
            anomalies, whole: 1 is one.
        scores: (B, K), probabilities of each class; of a regression (B,), the predictions; of
            anomalies (B,), higher for what is stranger.
        threshold: of two classes, the probability of the second from which on it is decided for;
            None: the likeliest class is.

    Raises:
        DataError: shapes that do not fit, or a threshold where there are not two classes.
    """

    truth: NDArray[np.int64] | FloatArray = field(repr=False)
    scores: FloatArray = field(repr=False)
    threshold: float | None = None

    def __post_init__(self) -> None:
        if self.truth.ndim != 1 or self.scores.ndim not in (1, 2):
            raise DataError(
                "measures: truth is a list and scores one number a row, or one a row and class; "
                f"got shapes {self.truth.shape} and {self.scores.shape}"
            )
        if len(self.truth) != len(self.scores):
            raise DataError(
                f"measures: {len(self.truth)} rows of truth and {len(self.scores)} of scores; give "
                "each row one of both"
            )
        if self.threshold is not None and self.classes != 2:
            raise DataError(
                f"measures: a threshold decides between two classes, and there are {self.classes}; "
                "leave it out"
            )

    @classmethod
    def of_classes(cls, truth: ArrayLike, probabilities: ArrayLike) -> Self:
        """Of labels (B,), and probabilities (B, K) or, of two classes, (B,) of the second.

        Raises:
            DataError: labels that are no classes, or probabilities that are none.
        """
        labels_B = np.asarray(truth, dtype=np.int64)
        shares = np.asarray(probabilities, dtype=np.float64)
        shares_BK = np.column_stack([1 - shares, shares]) if shares.ndim == 1 else shares
        if shares_BK.ndim != 2 or shares_BK.shape[1] < 2:
            raise DataError(f"measures: probabilities are (B, K) or (B,), got {shares.shape}")
        if not ((shares_BK >= 0).all() and np.allclose(shares_BK.sum(axis=1), 1, atol=1e-4)):
            raise DataError(
                "measures: the probabilities of a row are at least 0 and add up to 1; take the "
                "softmax of a network's scores first"
            )
        if len(labels_B) and not 0 <= labels_B.min() <= labels_B.max() < shares_BK.shape[1]:
            raise DataError(
                f"measures: labels lie in 0 to {shares_BK.shape[1] - 1}, got {labels_B.min()} to "
                f"{labels_B.max()}"
            )
        return cls(truth=labels_B, scores=shares_BK)

    @classmethod
    def of_network(cls, truth: ArrayLike, scores_BK: ArrayLike) -> Self:
        """Of labels (B,) and what a network gives, (B, K), whose softmax `predict` tells.

        A training that diverged gives what is not finite, of which measures are NaN.
        """
        shares_BK = torch.as_tensor(scores_BK, dtype=torch.float64).softmax(1).numpy()
        return cls(truth=np.asarray(truth, dtype=np.int64), scores=shares_BK)

    @property
    def classes(self) -> int:
        """K; 0 of a regression, and of anomalies."""
        return self.scores.shape[1] if self.scores.ndim == 2 else 0

    @cached_property
    def finite(self) -> bool:
        """Whether each score is a finite number; of a training that diverged some are none."""
        return bool(np.isfinite(self.scores).all())

    @cached_property
    def decided(self) -> NDArray[np.int64]:
        """The class (B,) that each row is given."""
        if self.threshold is None:
            return np.asarray(self.scores.argmax(axis=1), dtype=np.int64)
        return np.asarray(self.scores[:, 1] >= self.threshold, dtype=np.int64)

    def at(self, threshold: float | None) -> Self:
        """The same rows, decided at another threshold."""
        return replace(self, threshold=threshold)

    def rows(self, places: NDArray[np.int64]) -> Self:
        """Some of the rows, or some more than once."""
        return replace(self, truth=self.truth[places], scores=self.scores[places])


@torch.no_grad()
def scored_by(predict: Callable[[Tensor], Tensor], rows: Tensor, labels_N: Tensor) -> Scored:
    """Ask a model for the scores (B, K) of `rows` of a table, a few thousand at a time.

    Args:
        predict: rows of the table to scores of a network.
        rows: positions in the table.
        labels_N: of the table.
    """
    parts = [
        predict(rows_B).double().cpu()
        for rows_B in rows.to(labels_N.device).split(_EVALUATION_ROWS)
    ]
    return Scored.of_network(labels_N[rows.to(labels_N.device)].cpu(), torch.cat(parts))


def probabilities_of(scores_BK: FloatArray) -> FloatArray:
    """What scores say that are meant to be probabilities, and may leave 0 to 1 as a regression's.

    Those below 0 count as 0, and a row adds up to 1; a row that says nothing has all alike.
    """
    shares_BK = scores_BK.clip(min=0.0)
    total_B1 = shares_BK.sum(axis=1, keepdims=True)
    even = np.full_like(shares_BK, 1 / shares_BK.shape[1])
    return np.asarray(np.divide(shares_BK, total_B1, out=even, where=total_B1 > 0))
