"""The division of a data set: test rows, labelled rows, and the people and features of each party.

Experiment design only. Everything follows from the run's seed through NumPy generators; nothing
here makes a key.
"""

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from secure_apfed.base.seeds import derive_seed
from secure_apfed.data.labels import UNLABELLED
from secure_apfed.errors import ConfigError, DataError
from secure_apfed.settings.data import BUILT_IN_ACTIVE_NAME

Rows: TypeAlias = NDArray[np.int64]


def make_generator(seed: int, purpose: str) -> np.random.Generator:
    """Return a random generator for this purpose; generators of other purposes are independent.

    The same seed and purpose give the same generator.
    """
    return np.random.default_rng(derive_seed(seed, "data", purpose))


def split_rows(
    labels_N: Rows, test_fraction: float, *, seed: int, split: str = "by_class"
) -> tuple[Rows, Rows]:
    """Return the positions of training and test rows, each ascending.

    Args:
        labels_N: classes of all rows.
        test_fraction: share of test rows, in (0, 1).
        seed: seed of the split.
        split: "by_class" puts the rounded share of each class into the test rows; "at_random" reads
            no label and takes the share of all rows.

    Raises DataError: one side would be empty.
    """
    generator = make_generator(seed, "split")
    # The share of test rows is taken from each group: from each class, or from all rows as one.
    group_N = np.zeros_like(labels_N) if split == "at_random" else labels_N
    test_rows_by_group = [np.empty(0, np.int64)]
    for group in np.unique(group_N):
        rows = generator.permutation(np.flatnonzero(group_N == group))
        test_rows_by_group.append(rows[: round(test_fraction * len(rows))])
    test_rows = np.sort(np.concatenate(test_rows_by_group)).astype(np.int64)
    train_rows = np.setdiff1d(np.arange(len(labels_N), dtype=np.int64), test_rows)
    if not len(test_rows) or not len(train_rows):
        raise DataError(
            f"test_fraction {test_fraction} of {len(labels_N)} rows leaves {len(train_rows)} "
            f"training and {len(test_rows)} test rows; both sides need some: "
            "take another test_fraction, or more rows of each class"
        )
    return train_rows, test_rows


def choose_labelled_rows(
    labels_T: Rows,
    wanted: float | None,
    *,
    seed: int,
    choice: str = "by_class",
    party: str | None = None,
) -> Rows | None:
    """Return the positions of the rows, among T training rows, whose labels training may use.

    None means all T rows. With the same seed, a smaller choice is a subset of a larger one.

    Args:
        labels_T: classes of the training rows, `UNLABELLED` for a row without a label.
        wanted: a number of rows, or a share (below 1) of the rows with a label; None: all rows with
            a label.
        seed: seed of the choice.
        choice: "by_class" takes one row of each class first, and then keeps the classes' shares;
            "at_random" ignores classes.
        party: name of the passive that chooses, so that passives choose differently; None: the
            active.

    Raises DataError: fewer rows are wanted than there are classes, or more than have a label.
    """
    known = np.flatnonzero(labels_T != UNLABELLED)
    if wanted is None:
        return None if len(known) == len(labels_T) else known
    count = round(wanted * len(known)) if wanted < 1 else int(wanted)
    classes = np.unique(labels_T[known])
    if not len(classes) <= count <= len(known):
        where = f" at {party}" if party is not None else ""
        remedy = "give some of them a label"
        if len(known):
            remedy = (
                f"say {len(classes)} to {len(known)}, or leave data.labelled out to learn from all"
            )
        raise DataError(
            f"data.labelled: {count} labelled rows are wanted{where}, at least one for each of "
            f"{len(classes)} classes; {len(known)} training rows have a label: {remedy}"
        )
    purpose = f"labelled {party}" if party is not None else "labelled"
    shuffled = make_generator(seed, purpose).permutation(known)
    if choice == "at_random":
        return np.sort(shuffled[:count])
    # Row k of a class with share s has rank k / s: one of each class first, then by the shares.
    queues = [shuffled[labels_T[shuffled] == label] for label in classes]
    ranks = [np.arange(len(queue)) / (len(queue) / len(known)) for queue in queues]
    order = np.argsort(np.concatenate(ranks), kind="stable")
    return np.sort(np.concatenate(queues)[order[:count]])


def passive_labels(
    labels_N: Rows, wanted: float | None, *, seed: int, choice: str, party: str
) -> Rows:
    """Return the labels (N,) that a passive may use in training.

    The labels of rows that `choose_labelled_rows` does not choose become `UNLABELLED`.

    Args:
        labels_N: classes of the passive's rows, `UNLABELLED` for a row without a label.
        wanted: a number of rows, or a share (below 1) of the rows with a label; None: all.
        seed: seed of the choice.
        choice: "by_class", which keeps the classes' shares, or "at_random".
        party: the passive's name.
    """
    chosen = choose_labelled_rows(labels_N, wanted, seed=seed, choice=choice, party=party)
    if chosen is None:
        return labels_N
    known_N = np.full_like(labels_N, UNLABELLED)
    known_N[chosen] = labels_N[chosen]
    return known_N


def draw_person_ids(count: int, *, seed: int) -> NDArray[np.str_]:
    """Return `count` distinct IDs in random order, so that an ID reveals nothing of its row."""
    numbers = make_generator(seed, "ids").permutation(count)
    return np.array([f"person-{number:06d}" for number in numbers])


def cut_columns(
    available: Sequence[str], chosen: Mapping[str, Sequence[int | str]]
) -> dict[str, tuple[str, ...]]:
    """Return the names of each party's columns, by party; the active comes first.

    `available`: names of all columns. `chosen`: columns by party, as names or indices.

    Raises ConfigError: a party has no column, a column is unknown, or a column is listed twice.
    """
    parties = {BUILT_IN_ACTIVE_NAME: chosen[BUILT_IN_ACTIVE_NAME]} | dict(chosen)
    names_by_party = {
        party: tuple(_find_column(available, column, party) for column in columns)
        for party, columns in parties.items()
    }
    owner_by_column: dict[str, str] = {}
    for party, names in names_by_party.items():
        if not names:
            raise ConfigError(f"columns: {party} has none; each party needs at least one")
        for name in names:
            if name in owner_by_column:
                raise ConfigError(
                    f"columns: {name!r} is given to {owner_by_column[name]} and to {party}; "
                    "a column belongs to one party, once"
                )
            owner_by_column[name] = party
    return names_by_party


def _find_column(available: Sequence[str], column: int | str, party: str) -> str:
    """Return the column with this name or index. Raises ConfigError: no such column.

    `available`: names of all columns.
    """
    if isinstance(column, int):
        if 0 <= column < len(available):
            return available[column]
        request = f"column {column}, the set has 0 to {len(available) - 1}"
    elif column in available:
        return column
    else:
        request = f"{column!r}; the set has {', '.join(available)}"
    raise ConfigError(f"columns: {party} asks for {request}")


class Holdings(NamedTuple):
    """A division of the pool's training rows among the parties.

    The pool is the whole data set. Rows are positions in it, in a random order that is not yet the
    order of any party's table.

    Attributes:
        shared: rows that the active and all passives have.
        active_only: rows that only the active has.
        strangers: rows that all passives have, and the active lacks. With them a simulation also
            shows that the active does not learn whom passives have in common.
    """

    shared: Rows
    active_only: Rows
    strangers: Rows


def count_shared_rows(rows: int, overlap: float) -> int:
    """Return floor(overlap * rows), exact for a decimal overlap such as 0.7."""
    return math.floor(Fraction(str(overlap)) * rows)


def draw_people(
    labels_N: Rows, *, rows: int | None, rows_per_class: int | None, seed: int
) -> Rows | None:
    """Return the positions of randomly chosen people, ascending; None: all are kept.

    Args:
        labels_N: classes of all people.
        rows: number of people to choose from all; None: `rows_per_class` decides.
        rows_per_class: number of people to choose from each class; used only without `rows`.
        seed: seed of the choice.

    Raises DataError: fewer people are in the set, or in a class, than are asked for.
    """
    if rows is None and rows_per_class is None:
        return None
    order = make_generator(seed, "drawn people").permutation(len(labels_N))
    groups = [order]
    if not rows:
        groups = [order[labels_N[order] == label] for label in np.unique(labels_N)]
    wanted = rows or rows_per_class or 0  # people from each group
    available = min(map(len, groups))
    if wanted > available:
        raise DataError(
            f"data.{'rows' if rows else 'rows_per_class'}: {wanted} people are wanted, and the set "
            f"has {available}{'' if rows else ' of its smallest class'}; ask for fewer"
        )
    return np.sort(np.concatenate([group[:wanted] for group in groups]))


def deal_people(
    train_rows: Rows, *, overlap: float, limit: int | None, seed: int, aligned: int | None = None
) -> Holdings:
    """Choose the people of the active and of the passives from T training rows of the pool.

    Every party gets A rows. S = floor(overlap * A) of them are shared by all parties. The passives'
    other A - S rows are strangers, whom the active lacks. So A + (A - S) <= T must hold, and A is
    the largest such number (at most `limit`). The active therefore trains on only about
    T / (2 - overlap) rows. The strangers are needed: if the active knew all people of a passive,
    alignment would look too easy.

    With `aligned` the active gets all training rows (at most `limit`). `aligned` of them are
    shared, and there are no strangers.

    Args:
        train_rows: T positions in the pool.
        overlap: share of the active's rows that all parties have, in (0, 1].
        limit: the most rows of the active; None: no limit.
        seed: seed of the choice.
        aligned: number of shared rows, in place of `overlap`; None: `overlap` decides.

    Raises DataError: nobody would be shared, or more people are wanted than the active has.
    """
    rows = make_generator(seed, "people").permutation(train_rows)
    active = math.floor(len(rows) / (2 - Fraction(str(overlap))))
    # The number of shared rows is rounded down, so T / (2 - overlap) may be one row too many.
    while 2 * active - count_shared_rows(active, overlap) > len(rows):
        active -= 1
    active = min(active, limit or active)
    shared = count_shared_rows(active, overlap) if aligned is None else aligned
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
    end = 2 * active - shared if aligned is None else active
    return Holdings(rows[:shared], rows[shared:active], rows[active:end])


def deal_clients(
    labels_N: Rows, train_rows: Rows, *, clients: int, limit: int | None, seed: int
) -> tuple[Rows, ...]:
    """Return the training rows of each client of a horizontal partition.

    All clients get equally many rows, and about equally many of each class. Each class is shuffled
    and dealt in turns. Rows that do not divide evenly, or exceed a client's `limit`, are left out,
    from each class in proportion. The rows are not yet in the order of a client's table. Source:
    FedMV, section 8.2.

    Args:
        labels_N: classes of all rows of the pool, which is the whole data set.
        train_rows: positions of the training rows in the pool.
        clients: number of clients.
        limit: the most rows of a client; None: no limit.
        seed: seed of the shuffle.

    Raises DataError: fewer rows than clients.
    """
    order = make_generator(seed, "clients").permutation(train_rows)
    rows_by_class = order[np.argsort(labels_N[order], kind="stable")]
    size = min(len(rows_by_class) // clients, limit or len(rows_by_class))
    if not size:
        raise DataError(
            f"clients: {len(rows_by_class)} training rows are too few for {clients} clients; ask "
            "for fewer clients or more rows"
        )
    rows_by_client = (rows_by_class[client::clients] for client in range(clients))
    # A client's rows are cut into `size` equal sections, and the middle row of each is taken. As
    # rows are ordered by class, this leaves out rows of each class in proportion.
    return tuple(
        rows[(2 * np.arange(size) + 1) * len(rows) // (2 * size)] for rows in rows_by_client
    )
