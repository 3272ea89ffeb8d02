"""What scores are worth as probabilities, and whether new rows are scored like those of training.

Run by: the active, on its own rows, during training, in a report and in `predict`.
Letters: B rows, K classes, E edges of E + 1 ranges of scores.
"""

from itertools import pairwise
from typing import Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, model_validator

from secure_apfed.errors import DataError
from secure_apfed.measures.scored import FloatArray, Scored

__all__ = [
    "CalibrationPoint", "ScoreRanges", "calibration_curve", "rows_for_stability", "stability_index",
]  # fmt: skip

_RANGES = 10
_ROWS_OF_A_RANGE = 25  # of fewer the index of new rows is high by chance
_LEAST_SHARE = 1e-4  # of an empty range, whose logarithm would be infinite
_ROUNDING = 1e-5  # of a score: other batches and devices add float32 in another order


class CalibrationPoint(BaseModel):
    """Rows of one range of scores: the mean score, the share that it foretells, and how many."""

    model_config = ConfigDict(frozen=True)

    foretold: float
    observed: float
    rows: int


def calibration_curve(scored: Scored, *, ranges: int = _RANGES) -> tuple[CalibrationPoint, ...]:
    """Shares that were foretold and observed, in ranges with about as many rows each.

    Of two classes they are of the second; of several of the likeliest class: how sure it is, and
    how often it is right. There are none of a training that diverged.

    Raises:
        DataError: scores that are no probabilities.
    """
    from sklearn.calibration import calibration_curve as curve

    if not scored.classes:
        raise DataError("measures: a calibration curve is of probabilities, got one number a row")
    if not len(scored.truth) or not scored.finite:
        return ()
    if scored.classes == 2:
        said_B, true_B = scored.scores[:, 1], scored.truth == 1
    else:
        said_B, true_B = scored.scores.max(axis=1), scored.scores.argmax(axis=1) == scored.truth
    observed, foretold = curve(true_B, said_B, n_bins=ranges, strategy="quantile", pos_label=True)
    edges = np.quantile(said_B, np.linspace(0, 1, ranges + 1))
    counts = np.bincount(np.searchsorted(edges[1:-1], said_B), minlength=ranges)
    return tuple(
        CalibrationPoint(foretold=float(one), observed=float(other), rows=int(count))
        for one, other, count in zip(foretold, observed, counts[counts > 0], strict=True)
    )


class ScoreRanges(BaseModel):
    """How the scores of training rows are spread: of two classes those of the second, of several
    those of the likeliest; of a task without classes what it tells.

    Attributes:
        edges: rising, between the ranges.
        shares: of the rows in each range, one more than edges.
    """

    model_config = ConfigDict(frozen=True)

    edges: tuple[float, ...]
    shares: tuple[float, ...]

    @model_validator(mode="after")
    def _fits(self) -> Self:
        rising = all(one < other for one, other in pairwise(self.edges))
        if len(self.shares) != len(self.edges) + 1 or not rising:
            raise ValueError("ranges of scores have rising edges, and one share more than edges")
        return self

    @classmethod
    def of(cls, probabilities_BK: FloatArray, *, ranges: int = _RANGES) -> "ScoreRanges":
        """The ranges with about as many rows each, fewer ranges of fewer than 250 rows; scores that
        rounding tells apart lie in one.

        Raises:
            DataError: no rows, or scores that are not finite.
        """
        said_B = _said(probabilities_BK)
        if not len(said_B) or not np.isfinite(said_B).all():
            raise DataError("measures: the spread of scores is of at least one row, all finite")
        count = min(ranges, max(2, len(said_B) // _ROWS_OF_A_RANGE))
        edges_E = _edges(np.sort(said_B), np.linspace(0, 1, count + 1)[1:-1])
        shares = _counts(said_B, edges_E) / len(said_B)
        return cls(edges=tuple(edges_E.tolist()), shares=tuple(shares.tolist()))

    def counts(self, probabilities_BK: FloatArray) -> NDArray[np.int64]:
        """How many of these rows lie in each range."""
        return _counts(_said(probabilities_BK), np.asarray(self.edges))


def rows_for_stability(trained: ScoreRanges) -> int:
    """So many new rows have a stability index: 25 for each range.

    Of N rows of the same people the index of E + 1 ranges is about E / N by chance alone, which of
    few rows is above any threshold that people read it by.
    """
    return _ROWS_OF_A_RANGE * len(trained.shares)


def stability_index(trained: ScoreRanges, counts: NDArray[np.int64]) -> float:
    """How far the scores of new rows are spread otherwise: the population stability index.

    The sum over the ranges of (new - trained) ln(new / trained). By a rule of thumb of credit
    scoring (Siddiqi, Credit Risk Scorecards, 2006) below 0.1 nothing has changed, and above 0.25
    much has; of fewer rows than `rows_for_stability` chance alone may be above that. An empty range
    counts as a share of 0.0001.

    Args:
        trained: of the training rows.
        counts: of new rows, by range, see `ScoreRanges.counts`.

    Raises:
        DataError: no rows.
    """
    if not counts.sum():
        raise DataError("measures: the stability of scores is of at least one row")
    old = np.clip(trained.shares, _LEAST_SHARE, None)
    new = np.clip(counts / counts.sum(), _LEAST_SHARE, None)
    return float(((new - old) * np.log(new / old)).sum())


def _said(probabilities_BK: FloatArray) -> FloatArray:
    if probabilities_BK.ndim == 1:
        return probabilities_BK
    two = probabilities_BK.shape[1] == 2
    return np.asarray(probabilities_BK[:, 1] if two else probabilities_BK.max(axis=1))


def _edges(sorted_B: FloatArray, shares_E: FloatArray) -> FloatArray:
    """In the middle between these quantiles and what is higher by more than rounding.

    Scores that rounding tells apart, and are as many as a range has, are a range by themselves:
    what lies beside them is another, even where no training row does.
    """
    at_E = np.quantile(sorted_B, shares_E, method="lower")
    # Near 0, too, scores are no better than the others.
    least = max(np.median(np.abs(sorted_B)), _ROUNDING * np.abs(sorted_B).max()) or 1.0
    apart_E = _ROUNDING * np.maximum(np.abs(at_E), least)
    first_E = np.searchsorted(sorted_B, at_E - apart_E, "left")
    end_E = np.searchsorted(sorted_B, at_E + apart_E, "right")
    ends_B = np.concatenate([[-np.inf], sorted_B, [np.inf]])  # sorted_B[i] is ends_B[i + 1]
    under_E = ends_B[first_E] / 2 + ends_B[first_E + 1] / 2
    over_E = ends_B[end_E] / 2 + ends_B[end_E + 1] / 2
    crowd_E = (end_E - first_E) * (len(shares_E) + 1) >= len(sorted_B)
    below_E = np.maximum(under_E, ends_B[first_E + 1] - apart_E)[crowd_E]
    above_E = np.where(crowd_E, np.minimum(over_E, ends_B[end_E] + apart_E), over_E)
    return np.unique(np.concatenate([below_E, above_E[np.isfinite(above_E)]]))


def _counts(said_B: FloatArray, edges_E: FloatArray) -> NDArray[np.int64]:
    return np.bincount(np.searchsorted(edges_E, said_B), minlength=len(edges_E) + 1)
