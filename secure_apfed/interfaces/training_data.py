"""All parties' tables and the active's split into training and test rows, for `train`."""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from secure_apfed.alignment.ids import make_id_rules
from secure_apfed.config import Config
from secure_apfed.data.labels import UNLABELLED
from secure_apfed.data.partition import choose_labelled_rows, split_rows
from secure_apfed.data.records import VerticalData
from secure_apfed.errors import ConfigError, FewRowsWarning
from secure_apfed.interfaces.class_labels import read_labels
from secure_apfed.interfaces.parties import Active, Passive
from secure_apfed.interfaces.party_tables import find_kept_rows, make_table, read_ids
from secure_apfed.interfaces.training_settings import DataChoice


def make_data(
    active: Active,
    passives: Sequence[Passive],
    data_choice: DataChoice,
    *,
    labelled: float | None,
    test_fraction: float,
    seed: int,
) -> tuple[VerticalData, tuple[Any, ...], NDArray[np.int64]]:
    """Return all parties' tables with the active's split, the classes, and the active's kept rows.

    Args:
        active, passives: the parties, as the user passed them.
        data_choice: how labels are read and rows are split.
        labelled: number of training rows that keep their label; below 1 it is their share; None:
            all.
        test_fraction: share of the labelled rows that are test rows.
        seed: seed of the split.

    Returns:
        The tables; the classes, in the order of the scores, as the labels write them; and the
        positions, among the active's rows as passed, of the rows in its table.

    Raises:
        ConfigError: `labelled` or `missing` is not valid.
        DataError: rows, IDs or labels do not fit each other.
    """
    if labelled is not None and labelled <= 0:
        raise ConfigError(
            f"labelled={labelled!r}: expected how many training rows keep their label, 2 or more, "
            "or which share of them, below 1"
        )
    own_ids = read_ids(active)
    labels_N, classes = read_labels(active, data_choice)
    kept_rows = find_kept_rows(active)
    labels_N = labels_N[kept_rows]
    labelled_positions = np.flatnonzero(labels_N.numpy() != UNLABELLED)
    _, test_positions = split_rows(
        labels_N.numpy()[labelled_positions], test_fraction, seed=seed, split=data_choice.split
    )
    test_rows = labelled_positions[test_positions]
    # Rows without a label are training rows.
    train_rows = np.setdiff1d(np.arange(len(labels_N)), test_rows)
    kept_label_positions = choose_labelled_rows(
        labels_N.numpy()[train_rows], labelled, seed=seed, choice=data_choice.split
    )
    data = VerticalData(
        table=make_table(
            active, own_ids, kept_rows, class_indices_N=labels_N, fitted_rows=train_rows
        ),
        train_rows=torch.from_numpy(train_rows),
        test_rows=torch.from_numpy(test_rows),
        classes=tuple(str(name) for name in classes),
        labelled=None
        if kept_label_positions is None
        else torch.from_numpy(np.sort(train_rows[kept_label_positions])),
        passives=tuple(
            make_table(party, read_ids(party), find_kept_rows(party), class_indices_N=None)
            for party in passives
        ),
    )
    return data, classes, kept_rows


# A warning is issued if fewer people are common than this share of the active's people, or than
# this number.
_SMALL_COMMON_SHARE = 0.1
_SMALL_COMMON_COUNT = 20


def count_common(data: VerticalData, config: Config) -> int:
    """Return the number of the active's people whom all passives know; warn if it is small.

    Under pairwise alignment people count whom at least one passive knows.
    """
    normalise_id = make_id_rules(config.alignment).normalise_text
    own_ids = set(map(normalise_id, data.table.ids))
    shared_ids_by_passive = [
        own_ids.intersection(map(normalise_id, table.ids)) for table in data.passives
    ]
    is_pairwise = config.alignment.mode == "pairwise"
    common_ids = (
        set.union(*shared_ids_by_passive)
        if is_pairwise
        else set.intersection(*shared_ids_by_passive)
    )
    people_count = len(data.table.ids)
    if 0 < len(common_ids) < max(_SMALL_COMMON_COUNT, _SMALL_COMMON_SHARE * people_count):
        knowing_passives = "at least one passive" if is_pairwise else "all passives"
        count_text = ", ".join(
            f"{table.name} {len(ids)}"
            for table, ids in zip(data.passives, shared_ids_by_passive, strict=True)
        )
        warnings.warn(
            f"{data.table.name}: {len(common_ids)} of its {people_count} people are known to "
            f"{knowing_passives} "
            f"({count_text}), so help comes from these alone, and can hardly be measured; check "
            "that "
            "all parties write IDs in one way, or hand in passives that know more of these people",
            FewRowsWarning,
            stacklevel=2,
        )
    return len(common_ids)
