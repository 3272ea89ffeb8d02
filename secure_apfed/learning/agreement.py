"""How far each passive's votes agree with others' and with labels, out of answers by chance.

Run by: the active where it reads every passive's randomised answers; it computes with what it has
been given, so that nothing more is opened and no epsilon is spent. A passive that votes against
what its features say agrees less than it should. So does one whose features say little: the figure
finds votes that do not fit, and proves no ill will.

Where votes are summed there is no such figure: an active that has the total, and the total without
one passive, has that passive's votes; and a count that a passive gives of itself is worth its word.

Letters: M passives, U rows, n of them labelled, K classes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from secure_apfed.privacy.randomised_response import VoteResponse

__all__ = ["Agreement", "agreements"]

Integers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Shares of rows, without bias; the noise of answers may carry them below 0 or above 1.

    Attributes:
        others: on which it votes as another passive does, mean over the others; None: alone.
        labels: of the labelled rows on which it votes as they are labelled.
        others_noise, labels_noise: one standard deviation by the chance in answers, at most.
    """

    others: float | None
    labels: float
    others_noise: float
    labels_noise: float


def agreements(
    response: VoteResponse,
    answers_MU: Integers,
    *,
    names: Sequence[str],
    labelled_n: Integers,
    labels_n: Integers,
) -> Mapping[str, Agreement]:
    """Return the agreement of each passive, by name.

    Two answers are the same with probability s = p^2 + (K - 1) q^2 where the votes are, and with
    d = 2 p q + (K - 2) q^2 where they are not, so (share - d) / (s - d) is the share of equal votes
    without bias; s - d = (p - q)^2. With a label it is (share - q) / (p - q). Who has no vote
    counts as one that votes any class.
    """
    p, q, classes = response.keep_probability, response.other_probability, response.classes
    different = 2 * p * q + (classes - 2) * q**2
    passives, rows = answers_MU.shape
    found = {}
    for at, name in enumerate(names):
        same = [
            float((answers_MU[at] == answers_MU[other]).mean())
            for other in range(passives)
            if other != at
        ]
        right = float((answers_MU[at][labelled_n] == labels_n).mean())
        found[name] = Agreement(
            others=(float(np.mean(same)) - different) / (p - q) ** 2 if same else None,
            labels=(right - q) / (p - q),
            # A share of rows that are answered independently has at most 1 / (2 sqrt rows).
            others_noise=0.5 / math.sqrt(rows) / (p - q) ** 2,
            labels_noise=0.5 / math.sqrt(len(labelled_n)) / (p - q),
        )
    return found
