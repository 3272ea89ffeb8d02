"""Which labelled rows are held out when few labels must both teach and judge."""

import numpy as np

from secure_apfed.seeds import derive_seed
from secure_apfed.solo.interface import IntArray

__all__ = ["ENOUGH_LABELS", "held_out"]

ENOUGH_LABELS = 400
"""From so many labels on, one part of them judges well enough and the others are not held out."""


def held_out(labels_n: IntArray, folds: int, seed: int) -> list[IntArray]:
    """Return disjoint parts of the labelled rows, as positions in `labels_n`.

    Each class is spread over the parts as evenly as it goes. There are `folds` parts, or as many as
    the rarest class has labels if that is fewer: what is left then holds the classes in the same
    shares. (Held out from two labels each in five parts, a class would be the rarest of those left,
    and ridge regression was right about none of them.) The only label of a class is never held
    out, so every class that can be predicted stays known. Empty where every class has one label;
    the first of `folds` parts alone where there are `ENOUGH_LABELS`.
    """
    drawn = np.random.default_rng(derive_seed(seed, "solo", "folds"))
    members = [np.flatnonzero(labels_n == one) for one in np.unique(labels_n)]
    order = [drawn.permutation(rows) for rows in members if len(rows) > 1]
    if not order:
        return []
    rows = np.concatenate(order)
    if len(labels_n) >= ENOUGH_LABELS:
        return [np.sort(rows[::folds])]
    folds = min(folds, *map(len, order))
    return [np.sort(rows[at::folds]) for at in range(folds)]
