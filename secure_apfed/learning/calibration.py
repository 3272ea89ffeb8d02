"""Two classes of which one is rare: probabilities that are met, and votes that are not drowned.

Run by: the active, on its own rows. No test row is read: how far scores tell labelled rows apart is
judged by scores of models that had not seen their labels, and how frequent the second class is by
the labels. Both are drawn to what is usual by how few labels say it, so that two positives make
nobody sure of anything.

Letters: N rows, n of them labelled, U rows to vote on.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq, minimize
from scipy.special import expit, logit
from scipy.stats import norm, rankdata

__all__ = ["RARE", "SKEWED", "Straight", "in_deviations", "is_rare", "likely_rare", "slope_of"]

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

SKEWED = 1 / 3
"""Of two classes the rarer has a smaller share: probabilities are calibrated unless settings say
otherwise, and fewer than 30 rows of it are warned of."""
RARE = 0.1
"""Share of the rarer of two classes up to which votes are read by how they rank rows."""

_USUAL, _SPREAD = 0.3, 0.3
"""Log-odds that one deviation of a score adds (mean, deviation); .3 is an AUC of .58, as is usual
where a class is rare and labels are few."""
_LEAST, _MOST = 0.05, 3.0
_FARTHEST = 30.0


def is_rare(labels_n: Integers, share: float, *, classes: int = 2) -> bool:
    """Whether these labels are of two classes, of which the rarer has a share below this."""
    counts_K = np.bincount(labels_n, minlength=classes)
    return classes == 2 and 0 < counts_K.min() < share * counts_K.sum()


def in_deviations(scores: Floats, others_N: Floats) -> Floats:
    """Scores about the mean of others, in their standard deviations; zeros where all are alike."""
    deviation = float(others_N.std())
    about = scores - others_N.mean()
    return np.asarray(about / deviation if deviation > 0 else np.zeros_like(about))


def slope_of(scores_n: Floats, labels_n: Integers) -> float:
    """Log-odds that a unit of these scores adds, at least a little, so that ranks are kept.

    Platt's regression (1999) with a normal prior on its slope, the intercept being free. Scores are
    of models that have not seen the labels, in deviations over all rows.
    """
    if len(np.unique(labels_n)) < 2:
        return _USUAL
    rate = float(labels_n.mean())

    def loss(theta: Floats) -> float:
        z_n = theta[0] * scores_n + theta[1]
        misfit = np.logaddexp(0, z_n) - labels_n * z_n
        return float(misfit.sum() + ((theta[0] - _USUAL) / _SPREAD) ** 2 / 2)

    slope = minimize(loss, np.array([_USUAL, logit(rate)]), method="L-BFGS-B").x[0]
    return float(np.clip(slope, _LEAST, _MOST))


def _offset(z_N: Floats, rate: float) -> float:
    """What makes the mean probability of these log-odds the rate."""
    far = _FARTHEST + float(np.abs(z_N).max())
    return float(brentq(lambda by: float(expit(z_N + by).mean()) - rate, -far, far))


@dataclass(frozen=True, kw_only=True)
class Straight:
    """Log-odds from scores: slope times score plus offset."""

    slope: float
    offset: float

    @classmethod
    def of(
        cls, scores_N: Floats, unseen_n: Floats, labels_n: Integers, others: Floats, *, rate: float
    ) -> "Straight":
        """Calibrate a model by what others say of rows that they had not seen.

        Applied to what it calibrated it changes nothing but by rounding.

        Args:
            scores_N: by the model, of rows that it has no label of.
            unseen_n: of labelled rows, by models without them, in deviations; labels_n: theirs.
            others: the same of rows of which nobody knows a label.
            rate: share of the second class that the mean probability is to be.
        """
        slope, deviation = slope_of(unseen_n, labels_n), float(scores_N.std())
        if not deviation > 0:
            return cls(slope=1.0, offset=float(logit(rate) - scores_N.mean()))
        by = slope / deviation
        offset = _offset(slope * others, rate) - by * float(scores_N.mean())
        return cls(slope=by, offset=offset)


def _ranked(scores_U: Floats) -> Floats:
    """Normal scores of the ranks (van der Waerden); zeros where all are alike."""
    return np.asarray(norm.ppf((rankdata(scores_U) - 0.5) / len(scores_U)))


def likely_rare(
    totals_U: Floats, noise_U: Floats, own_U: Floats, unseen: Iterable[tuple[Floats, Integers]],
    labels_n: Integers, *, labelled: Integers,
) -> Floats:  # fmt: skip
    """Return the probability of the second of two classes for each row (U,), where one is rare.

    A vote of shares names the frequent class nearly always, and so does a prior that is right: read
    as names they tell nothing. Both are read as ranks here, whose normal scores have about one
    deviation within each class: the log-odds of a row are those of the class, and what its place
    among all rows adds (linear discriminant analysis). What a vote's place adds comes from how it
    varies with the prior's probability, which has seen neither its noise nor any other label.

    Args:
        totals_U: votes for the second class less those for the first; all alike: none voted.
        noise_U: variance of these by noise alone.
        own_U: what the active believes, as scores of the second class over the first; unseen: the
            same of folds of labelled rows: all rows' scores without their labels, and their places
            in `labels_n`.
        labelled: places of labelled rows.
    """
    rate = float(labels_n.mean())
    folds = [(_ranked(scores_U)[labelled[part]], labels_n[part]) for scores_U, part in unseen]
    slope = _USUAL
    if folds:
        scores_n, known_n = (np.concatenate(of) for of in zip(*folds, strict=True))
        slope = slope_of(scores_n, known_n)
    unshown = np.setdiff1d(np.arange(len(totals_U)), labelled)
    if not len(unshown):
        unshown = labelled
    z_U, votes_U = slope * _ranked(own_U), _ranked(totals_U)
    z_U += _offset(z_U[unshown], rate)
    if not votes_U.any():
        return np.asarray(expit(z_U))
    said_V = expit(z_U[unshown]) - expit(z_U[unshown]).mean()
    power = float(totals_U[unshown].var())
    heard = max(0.0, 1 - float(noise_U[unshown].mean()) / power) if power > 0 else 0.0
    precision = 1 / _SPREAD**2
    # The regression of votes on the prior, drawn to what is usual of votes that are heard so well.
    added = (said_V @ votes_U[unshown] + precision * _USUAL * heard**0.5) / (
        said_V @ said_V + precision
    )
    z_U += float(np.clip(added, 0, _MOST)) * votes_U
    return np.asarray(expit(z_U + _offset(z_U[unshown], rate)))
