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
    wanted_count_or_share: float | None,
    *,
    seed: int,
    choice: str = "by_class",
    party: str | None = None,
) -> Rows | None:
    """Return the positions of the rows, among T training rows, whose labels training may use.

    None means all T rows. With the same seed, a smaller choice is a subset of a larger one.

    Args:
        labels_T: classes of the training rows, `UNLABELLED` for a row without a label.
        wanted_count_or_share: a number of rows, or a share (below 1) of the rows with a label;
            None: all rows with a label.
        seed: seed of the choice.
        choice: "by_class" takes one row of each class first, and then keeps the classes' shares;
            "at_random" ignores classes.
        party: name of the passive that chooses, so that passives choose differently; None: the
            active.

    Raises DataError: fewer rows are wanted than there are classes, or more than have a label.
    """
    labelled_rows = np.flatnonzero(labels_T != UNLABELLED)
    if wanted_count_or_share is None:
        return None if len(labelled_rows) == len(labels_T) else labelled_rows
    count = int(wanted_count_or_share)
    if wanted_count_or_share < 1:  # a share of the labelled rows
        count = round(wanted_count_or_share * len(labelled_rows))
    classes = np.unique(labels_T[labelled_rows])
    if not len(classes) <= count <= len(labelled_rows):
        party_text = f" at {party}" if party is not None else ""
        remedy = "give some of them a label"
        if len(labelled_rows):
            remedy = (
                f"say {len(classes)} to {len(labelled_rows)}, or leave data.labelled out to learn "
                "from all"
            )
        raise DataError(
            f"data.labelled: {count} labelled rows are wanted{party_text}, at least one for each "
            f"of {len(classes)} classes; {len(labelled_rows)} training rows have a label: {remedy}"
        )
    purpose = f"labelled {party}" if party is not None else "labelled"
    shuffled_rows = make_generator(seed, purpose).permutation(labelled_rows)
    if choice == "at_random":
        return np.sort(shuffled_rows[:count])
    # Row k of a class with share s has rank k / s: one of each class first, then by the shares.
    rows_by_class = [shuffled_rows[labels_T[shuffled_rows] == label] for label in classes]
    ranks = [np.arange(len(rows)) / (len(rows) / len(labelled_rows)) for rows in rows_by_class]
    order = np.argsort(np.concatenate(ranks), kind="stable")
    return np.sort(np.concatenate(rows_by_class)[order[:count]])


def hide_passive_labels(
    labels_N: Rows, wanted_count_or_share: float | None, *, seed: int, choice: str, party: str
) -> Rows:
    """Return the labels (N,) that a passive may use in training.

    The labels of rows that `choose_labelled_rows` does not choose become `UNLABELLED`.

    Args:
        labels_N: classes of the passive's rows, `UNLABELLED` for a row without a label.
        wanted_count_or_share: a number of rows, or a share (below 1) of the rows with a label;
            None: all.
        seed: seed of the choice.
        choice: "by_class", which keeps the classes' shares, or "at_random".
        party: the passive's name.
    """
    chosen_rows = choose_labelled_rows(
        labels_N, wanted_count_or_share, seed=seed, choice=choice, party=party
    )
    if chosen_rows is None:
        return labels_N
    known_labels_N = np.full_like(labels_N, UNLABELLED)
    known_labels_N[chosen_rows] = labels_N[chosen_rows]
    return known_labels_N


def draw_person_ids(count: int, *, seed: int) -> NDArray[np.str_]:
    """Return `count` distinct IDs in random order, so that an ID reveals nothing of its row."""
    numbers = make_generator(seed, "ids").permutation(count)
    return np.array([f"person-{number:06d}" for number in numbers])


def cut_columns(
    all_columns: Sequence[str], columns_by_party: Mapping[str, Sequence[int | str]]
) -> dict[str, tuple[str, ...]]:
    """Return the names of each party's columns, by party; the active comes first.

    `all_columns`: names of all columns. `columns_by_party`: columns by party, as names or indices.

    Raises ConfigError: a party has no column, a column is unknown, or a column is listed twice.
    """
    columns_active_first = {BUILT_IN_ACTIVE_NAME: columns_by_party[BUILT_IN_ACTIVE_NAME]} | dict(
        columns_by_party
    )
    names_by_party = {
        party: tuple(_find_column(all_columns, column, party) for column in columns)
        for party, columns in columns_active_first.items()
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


def _find_column(all_columns: Sequence[str], column: int | str, party: str) -> str:
    """Return the column with this name or index. Raises ConfigError: no such column.

    `all_columns`: names of all columns.
    """
    if isinstance(column, int):
        if 0 <= column < len(all_columns):
            return all_columns[column]
        request = f"column {column}, the set has 0 to {len(all_columns) - 1}"
    elif column in all_columns:
        return column
    else:
        request = f"{column!r}; the set has {', '.join(all_columns)}"
    raise ConfigError(f"columns: {party} asks for {request}")


class PeopleDivision(NamedTuple):
    """A division of the pool's training rows among the parties.

    The pool is the whole data set. Rows are positions in it, in a random order that is not yet the
    order of any party's table.

    Attributes:
        shared_rows: rows that the active and all passives have.
        active_only_rows: rows that only the active has.
        passive_only_rows: rows that all passives have, and the active lacks. With them a simulation
            also shows that the active does not learn whom passives have in common.
    """

    shared_rows: Rows
    active_only_rows: Rows
    passive_only_rows: Rows


def count_shared_rows(row_count: int, overlap: float) -> int:
    """Return floor(overlap * rows), exact for a decimal overlap such as 0.7."""
    return math.floor(Fraction(str(overlap)) * row_count)


def _count_active_rows(row_count: int, overlap: float) -> int:
    """Return the most rows A that the active can have of `row_count` rows.

    Besides them the passives need A - floor(overlap * A) rows that the active lacks.
    """
    active_row_count = math.floor(row_count / (2 - Fraction(str(overlap))))
    # The number of shared rows is rounded down, so this may be one row too many.
    while 2 * active_row_count - count_shared_rows(active_row_count, overlap) > row_count:
        active_row_count -= 1
    return active_row_count


def draw_people(
    labels_N: Rows, *, people_count: int | None, people_per_class: int | None, seed: int
) -> Rows | None:
    """Return the positions of randomly chosen people, ascending; None: all are kept.

    Args:
        labels_N: classes of all people.
        people_count: number of people to choose from all; None: `people_per_class` decides.
        people_per_class: number of people to choose from each class; used only without
            `people_count`.
        seed: seed of the choice.

    Raises DataError: fewer people are in the set, or in a class, than are asked for.
    """
    if people_count is None and people_per_class is None:
        return None
    order = make_generator(seed, "drawn people").permutation(len(labels_N))
    groups = [order]
    if not people_count:
        groups = [order[labels_N[order] == label] for label in np.unique(labels_N)]
    wanted_per_group = people_count or people_per_class or 0  # people from each group
    smallest_group_size = min(map(len, groups))
    if wanted_per_group > smallest_group_size:
        raise DataError(
            f"data.{'rows' if people_count else 'rows_per_class'}: {wanted_per_group} people are "
            "wanted, and the set "
            f"has {smallest_group_size}{'' if people_count else ' of its smallest class'}; ask for "
            "fewer"
        )
    return np.sort(np.concatenate([group[:wanted_per_group] for group in groups]))


def deal_people(
    train_rows: Rows,
    *,
    overlap: float,
    max_active_rows: int | None,
    seed: int,
    aligned_row_count: int | None = None,
) -> PeopleDivision:
    """Choose the people of the active and of the passives from T training rows of the pool.

    Every party gets A rows. S = floor(overlap * A) of them are shared by all parties. The passives'
    other A - S rows are passive-only: the active lacks them. So A + (A - S) <= T must hold, and A
    is the largest such number (at most `max_active_rows`). The active therefore trains on only
    about T / (2 - overlap) rows. The passive-only rows are needed: if the active knew all people of
    a passive, alignment would look too easy.

    With `aligned_row_count` the active gets all training rows (at most `max_active_rows`).
    `aligned_row_count` of them are shared, and there are no passive-only rows.

    Args:
        train_rows: T positions in the pool.
        overlap: share of the active's rows that all parties have, in (0, 1].
        max_active_rows: the most rows of the active; None: no limit.
        seed: seed of the choice.
        aligned_row_count: number of shared rows, in place of `overlap`; None: `overlap` decides.

    Raises DataError: nobody would be shared, or more people are wanted than the active has.
    """
    shuffled_rows = make_generator(seed, "people").permutation(train_rows)
    active_row_count = len(shuffled_rows)
    if aligned_row_count is None:
        active_row_count = _count_active_rows(len(shuffled_rows), overlap)
    active_row_count = min(active_row_count, max_active_rows or active_row_count)
    shared_row_count = aligned_row_count
    if shared_row_count is None:
        shared_row_count = count_shared_rows(active_row_count, overlap)
    if not shared_row_count:
        raise DataError(
            f"overlap {overlap} of {active_row_count} training rows leaves nobody whom all parties "
            "know; raise overlap or limit"
        )
    if shared_row_count > active_row_count:
        raise DataError(
            f"data.aligned: {shared_row_count} aligned people are wanted, and the active has "
            f"{active_row_count} training rows; ask for fewer, or for more rows"
        )
    passive_rows_end = (
        2 * active_row_count - shared_row_count if aligned_row_count is None else active_row_count
    )
    return PeopleDivision(
        shuffled_rows[:shared_row_count],
        shuffled_rows[shared_row_count:active_row_count],
        shuffled_rows[active_row_count:passive_rows_end],
    )


def deal_clients(
    labels_N: Rows, train_rows: Rows, *, client_count: int, max_client_rows: int | None, seed: int
) -> tuple[Rows, ...]:
    """Return the training rows of each client of a horizontal partition.

    All clients get equally many rows, and about equally many of each class. Each class is shuffled
    and dealt in turns. Rows that do not divide evenly, or exceed a client's `max_client_rows`, are
    left out, from each class in proportion. The rows are not yet in the order of a client's table.
    Source: FedMV, section 8.2.

    Args:
        labels_N: classes of all rows of the pool, which is the whole data set.
        train_rows: positions of the training rows in the pool.
        client_count: number of clients.
        max_client_rows: the most rows of a client; None: no limit.
        seed: seed of the shuffle.

    Raises DataError: fewer rows than clients.
    """
    order = make_generator(seed, "clients").permutation(train_rows)
    rows_by_class = order[np.argsort(labels_N[order], kind="stable")]
    client_row_count = min(
        len(rows_by_class) // client_count, max_client_rows or len(rows_by_class)
    )
    if not client_row_count:
        raise DataError(
            f"clients: {len(rows_by_class)} training rows are too few for {client_count} clients; "
            "ask for fewer clients or more rows"
        )
    rows_by_client = (rows_by_class[client::client_count] for client in range(client_count))
    # A client's rows are cut into `size` equal sections, and the middle row of each is taken. As
    # rows are ordered by class, this leaves out rows of each class in proportion.
    return tuple(
        rows[(2 * np.arange(client_row_count) + 1) * len(rows) // (2 * client_row_count)]
        for rows in rows_by_client
    )
