"""What an active does about classes of unlike size: weights in its loss, and a threshold.

Run by: the active, on the labels that it may train on; nothing of it leaves. Both tell of the
labels' shares, so private training takes neither.
"""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from secure_apfed.errors import DataError
from secure_apfed.measures.scored import Scored
from secure_apfed.measures.table import MEASURES

__all__ = ["THRESHOLDS", "balanced_weights", "best_threshold"]

THRESHOLDS: Mapping[str, str] = MappingProxyType({
    name: one.title for name, one in MEASURES.items() if one.decides
})  # fmt: skip
"""Measures that a threshold can be chosen by: those of what is decided."""

_CANDIDATES = 200


def balanced_weights(labels_N: Tensor, classes: int) -> Tensor:
    """A weight for each class (K,) with which all classes count alike, and a labelled row 1.

    Rows / (classes with rows x rows of the class), as scikit-learn's "balanced"; a class without a
    row has weight 0, as nothing is learnt of it.

    Args:
        labels_N: below 0 where a row has none.
        classes: K.

    Raises:
        DataError: no row has a label.
    """
    counts_K = torch.bincount(labels_N[labels_N >= 0].cpu(), minlength=classes).double()
    if not counts_K.sum():
        raise DataError("class weights: no row has a label; label some, or leave weights out")
    weights_K = counts_K.sum() / ((counts_K > 0).sum() * counts_K)
    return torch.where(counts_K > 0, weights_K, 0.0)


def best_threshold(scored: Scored, measure: str) -> float:
    """The threshold of the second of two classes with the highest value of a measure.

    Candidates lie half-way between neighbouring scores, and are 200 of them at most, at even
    quantiles; of equals the one nearest to 0.5 is taken.

    Args:
        scored: rows whose labels may be learnt from; never test rows.
        measure: a key of `THRESHOLDS`.

    Raises:
        DataError: other than two classes, rows of one class, or another measure.
    """
    if measure not in THRESHOLDS:
        raise DataError(
            f"threshold: chosen by one of {', '.join(THRESHOLDS)}, which read decisions; "
            f"got {measure!r}"
        )
    if scored.classes != 2 or len(np.unique(scored.truth)) < 2:
        raise DataError(
            f"threshold: chosen between two classes with labelled rows of both; there are "
            f"{scored.classes} classes, and labels of {len(np.unique(scored.truth))}"
        )
    levels = np.unique(scored.scores[:, 1])
    between = (levels[1:] + levels[:-1]) / 2
    if len(between) > _CANDIDATES:
        between = np.quantile(between, np.linspace(0, 1, _CANDIDATES))
    candidates: list[float] = sorted({0.5, *between.tolist()}, key=lambda one: abs(one - 0.5))
    reached = {one: MEASURES[measure].of(scored.at(one)) for one in candidates}
    return max(candidates, key=reached.__getitem__)
