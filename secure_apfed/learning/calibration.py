"""Calibrated probabilities for two classes of which one is rare.

Run by: the active, on its own rows. No test row is read: how well scores separate labelled rows is
measured by scores of models that had not seen their labels, and how frequent the second class is by
the labels. Both are shrunk towards usual values, the more the fewer labels there are, so that two
positive labels do not cause confident predictions.

Letters: N rows, n of them labelled.
"""

from dataclasses import dataclass

import numpy as np
import scipy
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

RARE_SHARE = 1 / 3
"""Share of rows below which the rarer of two classes counts as rare.

Then probabilities are calibrated unless settings say otherwise, and fewer than 30 rows of the class
cause a warning."""

_PRIOR_SLOPE = 0.3
_PRIOR_DEVIATION = 0.3
"""The normal prior of the slope: log-odds that one standard deviation of a score adds. A slope of
0.3 is an AUC of 0.58, as is usual where a class is rare and labels are few."""
_MIN_SLOPE = 0.05
_MAX_SLOPE = 3.0
_MAX_LOG_ODDS = 30.0
"""Log-odds beyond which a probability is 0 or 1."""


def is_rare(labels_n: Integers, share: float, *, classes: int = 2) -> bool:
    """Return whether labels have two classes, of which the rarer has a share below `share`."""
    counts_K = np.bincount(labels_n, minlength=classes)
    return classes == 2 and 0 < counts_K.min() < share * counts_K.sum()


def standardise_scores(scores: Floats, reference_N: Floats) -> Floats:
    """Return scores standardised by the mean and standard deviation of N reference scores.

    If all reference scores are equal, the result is zeros.
    """
    deviation = float(reference_N.std())
    centred = scores - reference_N.mean()
    return np.asarray(centred / deviation if deviation > 0 else np.zeros_like(centred))


def fit_slope(scores_n: Floats, labels_n: Integers) -> float:
    """Return the log-odds that one unit of these scores adds.

    It is fitted by Platt's regression (1999) with a normal prior on the slope, and a free
    intercept. It is limited to positive values, so that probabilities rank rows as scores do.

    Args:
        scores_n: standardised scores of labelled rows, by models trained without their labels.
        labels_n: the labels of these rows, 0 or 1.
    """
    # Labels of one class say nothing about the slope, so the prior's mean is returned.
    if len(np.unique(labels_n)) < 2:
        return _PRIOR_SLOPE
    positive_rate = float(labels_n.mean())

    def compute_loss(slope_and_intercept: Floats) -> float:
        """Return the negative log posterior of slope and intercept, up to a constant.

        The likelihood is that of a logistic regression of the labels on the scores; the slope has a
        normal prior.
        """
        slope, intercept = slope_and_intercept
        log_odds_n = slope * scores_n + intercept
        negative_log_likelihood_n = np.logaddexp(0, log_odds_n) - labels_n * log_odds_n
        prior_deviations = (slope - _PRIOR_SLOPE) / _PRIOR_DEVIATION
        return float(negative_log_likelihood_n.sum() + prior_deviations**2 / 2)

    start = np.array([_PRIOR_SLOPE, scipy.special.logit(positive_rate)])
    slope = scipy.optimize.minimize(compute_loss, start, method="L-BFGS-B").x[0]
    return float(np.clip(slope, _MIN_SLOPE, _MAX_SLOPE))


def _solve_offset(log_odds_N: Floats, positive_rate: float) -> float:
    """Return the offset of these log-odds that makes their mean probability `positive_rate`.

    The mean probability rises with the offset, so that a root search finds it.
    """
    max_offset = _MAX_LOG_ODDS + float(np.abs(log_odds_N).max())

    def compute_excess(offset: float) -> float:
        """Return by how much the mean probability exceeds `positive_rate`."""
        return float(scipy.special.expit(log_odds_N + offset).mean() - positive_rate)

    return float(scipy.optimize.brentq(compute_excess, -max_offset, max_offset))


@dataclass(frozen=True, kw_only=True)
class PlattLine:
    """A calibration: the log-odds of the second class are slope times score plus offset."""

    slope: float
    offset: float

    @classmethod
    def from_scores(
        cls,
        scores_N: Floats,
        held_out_scores_n: Floats,
        labels_n: Integers,
        unlabelled_scores: Floats,
        *,
        positive_rate: float,
    ) -> "PlattLine":
        """Calibrate a model by held-out scores of other models of the same kind.

        The slope comes from the held-out scores. The offset makes the mean probability equal to
        `positive_rate`. Calibrating a calibrated model again changes nothing except for rounding.

        Args:
            scores_N: the model's scores of N rows whose label it does not know.
            held_out_scores_n: standardised scores of n labelled rows, by models trained without
                them.
            labels_n: the labels of these rows, 0 or 1.
            unlabelled_scores: standardised scores of rows without a label, by the same models.
            positive_rate: the share of the second class.
        """
        standardised_slope = fit_slope(held_out_scores_n, labels_n)
        deviation = float(scores_N.std())
        # A model with equal scores ranks no row above another, so every row gets the rate.
        if not deviation > 0:
            rate_log_odds = scipy.special.logit(positive_rate)
            return cls(slope=1.0, offset=float(rate_log_odds - scores_N.mean()))
        slope = standardised_slope / deviation
        # Scores are standardised by this model's mean and deviation before the fitted line.
        standardised_offset = _solve_offset(standardised_slope * unlabelled_scores, positive_rate)
        return cls(slope=slope, offset=standardised_offset - slope * float(scores_N.mean()))
