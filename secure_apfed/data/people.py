"""Who holds which people, under vertical and horizontal partitions. Experiment design only.

Everything follows from the run's seed through NumPy generators; nothing here makes a key.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from secure_apfed.data.partition import generator
from secure_apfed.errors import DataError

__all__ = ["Holdings", "deal_clients", "deal_people", "draw_people", "shared_rows"]

Rows = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Holdings:
    """Which rows of the pool each kind of party holds, in no party's order.

    Attributes:
        shared: training rows that the active and every passive hold.
        active_only: the active's other training rows.
        strangers: the passives' rows that the active lacks; the same for all passives, so
            that passives know people in common whom the active must not learn of.
        test: test rows, held by all, so that TVFL can be evaluated.
    """

    shared: Rows
    active_only: Rows
    strangers: Rows
    test: Rows

    @property
    def train(self) -> Rows:
        """The active's training rows."""
        return np.concatenate([self.shared, self.active_only])

    def of(self, *, active: bool) -> Rows:
        """All rows of the active or of a passive."""
        return np.concatenate([self.train if active else self.passive_train, self.test])

    @property
    def passive_train(self) -> Rows:
        """A passive's rows outside the test split."""
        return np.concatenate([self.shared, self.strangers])


def shared_rows(rows: int, overlap: float) -> int:
    """Return floor(overlap * rows), exact for a decimal overlap such as 0.7."""
    return math.floor(Fraction(str(overlap)) * rows)


def draw_people(
    labels_N: Rows, *, rows: int | None, rows_per_class: int | None, seed: int
) -> Rows | None:
    """Return the people to go on with, ascending: so many, or so many of each class; None: all.

    Raises:
        DataError: there are fewer.
    """
    if rows is None and rows_per_class is None:
        return None
    drawn = generator(seed, "drawn people").permutation(len(labels_N))
    counts = np.unique_counts(labels_N).counts
    wanted, found = (rows, len(drawn)) if rows else (rows_per_class, int(counts.min()))
    assert wanted is not None
    if wanted > found:
        kind = "rows" if rows else "rows_per_class"
        raise DataError(
            f"data.{kind}: {wanted} people are wanted, and the set has {found}"
            f"{'' if rows else ' of its smallest class'}; ask for fewer"
        )
    if rows:
        return np.sort(drawn[:rows])
    by_class = [drawn[labels_N[drawn] == label][:wanted] for label in np.unique(labels_N)]
    return np.sort(np.concatenate(by_class))


def deal_people(
    train_rows: Rows, test_rows: Rows, *, overlap: float, limit: int | None, seed: int,
    aligned: int | None = None,
) -> Holdings:  # fmt: skip
    """Choose the people of the active and of the passives.

    With T training rows in the pool, the active gets the largest number A (at most `limit`)
    for which every passive can hold as many: S = floor(overlap * A) shared ones and A - S
    strangers kept from the active, so A + (A - S) <= T. Hence overlap is the shared part of
    the active's training rows and of each passive's, and the intersection of all parties is
    exactly the S shared rows. The price is that the active trains on about T / (2 - overlap)
    rows: a passive whose people the active all knows would make alignment look too easy.

    Where `aligned` is given, the active gets all training rows (at most `limit`), so many of them
    are shared, and there are no strangers.

    Raises:
        DataError: nobody would be shared, or more people than the active has.
    """
    rows = generator(seed, "people").permutation(train_rows)
    active = math.floor(len(rows) / (2 - Fraction(str(overlap))))
    while 2 * active - shared_rows(active, overlap) > len(rows):
        active -= 1
    active = min(active, limit or active)
    shared = shared_rows(active, overlap) if aligned is None else aligned
    if not shared:
        raise DataError(
            f"overlap {overlap} of {active} training rows leaves nobody whom all parties know; "
            "raise overlap or limit"
        )
    if shared > active:
        raise DataError(
            f"data.aligned: {shared} aligned people are wanted, and the active has {active} "
            "training rows; ask for fewer, or for more rows"
        )
    strangers = active - shared if aligned is None else 0
    return Holdings(
        shared=rows[:shared],
        active_only=rows[shared:active],
        strangers=rows[active : active + strangers],
        test=test_rows,
    )


def deal_clients(
    labels_N: Rows, train_rows: Rows, *, clients: int, limit: int | None, seed: int
) -> tuple[Rows, ...]:
    """Return the training rows of each client: equally many, and of each class equally many.

    Each class is shuffled and dealt round; what does not go into equal parts, or is beyond `limit`
    of a client, is left out of each class by its share. In no party's order.

    Source: FedMV, section 8.2.

    Raises:
        DataError: fewer rows than clients.
    """
    drawn = generator(seed, "clients").permutation(train_rows)
    by_class = drawn[np.argsort(labels_N[drawn], kind="stable")]
    each = min(len(by_class) // clients, limit or len(by_class))
    if not each:
        raise DataError(
            f"clients: {len(by_class)} training rows are too few for {clients} clients; ask for "
            "fewer clients or more rows"
        )
    dealt = (by_class[at::clients] for at in range(clients))
    return tuple(rows[(2 * np.arange(each) + 1) * len(rows) // (2 * each)] for rows in dealt)
