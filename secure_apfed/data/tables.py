"""The parties' own tables: one CSV or Parquet file each.

Run by: each party on its own file; `load_tables` plays all of them for a simulation. A
party's statistics come from its own rows alone: the active's training rows, all rows of a
passive; or from elsewhere, where it names an encoding. IDs are compared as text, "007" and
"7" differ.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from pyarrow import default_memory_pool

from secure_apfed.data.catalogue import labels_are_numbers, party_names
from secure_apfed.data.encoding import (
    CellCounts,
    ColumnEncoding,
    View,
    fit_views,
    locate_views,
    parse_encoding,
)
from secure_apfed.data.labels import TargetScale, anomaly_labels, class_labels, read_numbers
from secure_apfed.data.partition import choose_labelled, generator, passive_labels, split_rows
from secure_apfed.data.records import UNLABELLED, OwnData, PartyTable, VerticalData
from secure_apfed.data.tables import RawTable, party_path, read_raw
from secure_apfed.errors import CheckpointError, ConfigError, DataError
from secure_apfed.files import read_json
from secure_apfed.settings.data import DataSettings, ViewColumns

__all__ = ["files_digest", "load_active", "load_own_tables", "load_passive", "load_tables"]

# The one view of parties that all hold the same columns.
_ALL = "all"


def load_tables(settings: DataSettings, *, seed: int) -> VerticalData:
    """Return all parties' tables, the active first, each in its file's order.

    The active's rows are split with the seed; its test rows need not be known to all.

    Raises:
        DataError: a file or table is missing, damaged or unfit; names the party.
    """
    own = load_active(settings, seed=seed)
    return VerticalData(
        active=own.table,
        passives=tuple(
            load_passive(settings, name, seed=seed) for name in party_names(settings)[1:]
        ),
        classes=own.classes,
        train_rows=own.train_rows,
        test_rows=own.test_rows,
        labelled=own.labelled,
        labels_at=settings.labels_at,
        horizontal=settings.horizontal,
        targets=own.targets,
        one_class=settings.anomaly is not None,
    )


def files_digest(settings: DataSettings, *, of: Sequence[str] | None = None) -> str:
    """SHA-256 (hex) of parties' own files: figures that were kept of others are not taken.

    Empty of a data set of the catalogue, which holds the same always.

    Args:
        settings: that name the files.
        of: parties; None: all.

    Raises:
        DataError: a file cannot be read.
    """
    if settings.parties is None:
        return ""
    found = hashlib.sha256()
    for name, party in sorted(settings.parties.items()):
        if of is not None and name not in of:
            continue
        for given in (party.file, party.encoding):
            path = None if given is None else party_path(settings, given)
            found.update(repr((name, None if path is None else _digest(path, name))).encode())
    return found.hexdigest()


def _digest(path: Path, party: str) -> list[str]:
    """Of a file, or of all files of a Parquet file that is a folder."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    found = []
    for one in files:
        try:
            if not one.is_dir():
                with one.open("rb") as file:
                    found.append(hashlib.file_digest(file, "sha256").hexdigest())
        except OSError as error:
            raise DataError(f"{party}: {one} cannot be read ({error}); check the path") from error
    return found


def load_active(settings: DataSettings, *, seed: int) -> OwnData:
    """Return the active's table, its classes, its split, and the rows with labels to learn from.

    Rows with an empty cell in the label column train without a label and test nothing.

    Raises:
        DataError: as `load_tables`, and for labels that are outside the given classes, of one
            class only, or fewer than asked for.
    """
    name = settings.active
    raw = read_raw(settings, name)
    labels, groups, classes = _labels_of(settings, raw, party=name)
    known = np.flatnonzero(groups != UNLABELLED)
    train, test = (
        known[rows]
        for rows in split_rows(
            groups[known], settings.test_fraction, seed=seed, split=settings.split
        )
    )
    if settings.anomaly is not None:
        train = train[groups[train] == 0]
    train = np.sort(np.concatenate([train, np.flatnonzero(groups == UNLABELLED)]))
    if settings.limit is not None:
        train = generator(seed, "limit").permutation(train)[: settings.limit]
    kept = np.sort(np.concatenate([train, test]))
    is_train = np.isin(kept, train)
    if len(kept) < len(labels):
        raw, labels, groups = raw.at(kept), labels[kept], groups[kept]
    train_rows = np.flatnonzero(is_train)
    encoding, views = _encoding_of(settings, name, raw, rows=train_rows)
    features = _features_of(settings, name, raw, encoding)
    labelled = choose_labelled(
        groups[train_rows], settings.labelled, seed=seed, choice=settings.split
    )
    learnt = train_rows if labelled is None else train_rows[labelled]
    targets = TargetScale.of(labels[learnt], party=name) if labels_are_numbers(settings) else None
    told = targets.encode(labels, party=name) if targets else torch.from_numpy(labels)
    return OwnData(
        table=PartyTable(name, raw.ids, features, told, encoding, views),
        train_rows=torch.from_numpy(train_rows),
        test_rows=torch.from_numpy(np.flatnonzero(~is_train)),
        classes=classes,
        labelled=None if labelled is None else torch.from_numpy(train_rows[labelled]),
        targets=targets,
    )


def _labels_of(
    settings: DataSettings, raw: RawTable, *, party: str
) -> tuple[NDArray[Any], NDArray[np.int64], tuple[str, ...]]:
    """Labels as they are learnt, the classes by which rows are drawn, and the names of classes.

    Numbers have no classes: all rows that have one are drawn alike.
    """
    if labels_are_numbers(settings):
        numbers = read_numbers(raw.labels, party=party, column=settings.label_column)
        return numbers, np.where(np.isnan(numbers), UNLABELLED, 0), ()
    _check_two(raw.labels, party=party)
    column = settings.label_column
    if settings.anomaly is not None:
        told = anomaly_labels(raw.labels, settings.anomaly, party=party, column=column)
        return told, told, settings.class_names(())
    listed = settings.named_classes or None
    labels, classes = class_labels(raw.labels, listed, party=party, column=column)
    return labels, labels, classes


def load_own_tables(settings: DataSettings, name: str, *, seed: int) -> OwnData:
    """Return what one party holds, of its own file alone.

    Raises:
        ConfigError: the settings name no file for it.
        DataError: as `load_tables`.
    """
    if name not in (settings.parties or {}):
        raise ConfigError(
            f"data.parties: there is no file of {name!r}; name its own file there (dataset: "
            "tables), or let the party's file say which prepared table is its own"
        )
    if name != settings.active:
        passive = load_passive(settings, name, seed=seed)
        own = OwnData.of_passive(passive, settings.named_classes)
    else:
        own = load_active(settings, seed=seed)
    default_memory_pool().release_unused()  # of the columns as they were read
    return own


def load_passive(settings: DataSettings, name: str, *, seed: int) -> PartyTable:
    """Return one passive's table, with labels where the settings say that it holds some.

    Labels of people whom the active tests are labels, too: only the party that has them can leave
    them out.

    Raises:
        DataError: as `load_tables`, and where the file holds the active's label column, or labels
            outside the given classes.
    """
    raw = read_raw(settings, name)
    encoding, views = _encoding_of(settings, name, raw, rows=np.arange(len(raw.ids)))
    labels = None
    if settings.holds_labels(name):
        told, _ = class_labels(
            raw.labels, settings.named_classes, party=name, column=settings.label_column
        )
        known = passive_labels(
            told, settings.labelled, seed=seed, choice=settings.split, party=name
        )
        labels = torch.from_numpy(known)
    features = _features_of(settings, name, raw, encoding)
    return PartyTable(name, raw.ids, features, labels, encoding, views)


def _features_of(
    settings: DataSettings, name: str, raw: RawTable, encoding: ColumnEncoding
) -> torch.Tensor:
    """Of all rows; an encoding that was given may have been fitted to others, which is told."""
    counts = CellCounts()
    features = encoding.encode(raw.features, source=name, counts=counts)
    if (settings.parties or {})[name].encoding is not None:
        counts.warn(source=name)
    return features


def _encoding_of(
    settings: DataSettings, name: str, raw: RawTable, *, rows: NDArray[np.int64]
) -> tuple[ColumnEncoding, dict[str, View]]:
    """The encoding that the party was given, which tells of none of its rows, else fitted; and
    where its views are among the features.
    """
    party = (settings.parties or {})[name]
    views = _views_of(settings, name, raw.features)
    if party.encoding is None:
        fitted_on = raw.features if len(rows) == len(raw.ids) else raw.features.iloc[rows]
        encoding = fit_views(
            fitted_on, views, categorical=raw.categorical, missing=party.missing,
            rare=party.rare_categories, source=name,
        )  # fmt: skip
        return encoding, locate_views(encoding, views, source=name)
    path = party_path(settings, party.encoding)
    try:
        told = read_json(path, dict[str, Any])
        given = parse_encoding(told.get("encoding", told))
    except (CheckpointError, DataError) as error:
        raise DataError(f"{name}: {party.encoding} holds no encoding in JSON: {error}") from error
    if not isinstance(given, ColumnEncoding):
        raise DataError(f"{name}: {party.encoding} is an encoding of images, its file is a table")
    if settings.view_columns is None:
        views = {view: ViewColumns(columns=tuple(c.name for c in given.columns)) for view in views}
    return given, locate_views(given, views, source=name)


def _views_of(settings: DataSettings, name: str, features: pd.DataFrame) -> dict[str, ViewColumns]:
    """The party's views by the columns of its own; one of all columns where none are named."""
    columns = tuple(map(str, features.columns))
    if not columns:
        raise DataError(f"{name}: no feature columns are left; name some as numeric or categorical")
    if settings.view_columns is None:
        return {_ALL if settings.horizontal else name: ViewColumns(columns=columns)}
    own = {
        view: one
        for view, one in settings.view_columns.items()
        if not set(columns).isdisjoint(one.columns)
    }
    listed = [column for one in own.values() for column in one.columns]
    wrong = [column for column in dict.fromkeys((*listed, *columns))
             if listed.count(column) != 1 or column not in columns]  # fmt: skip
    if wrong:
        raise DataError(
            f"{name}: view_columns must name each of its feature columns once, and all of a view "
            f"or none; look at {', '.join(wrong[:5])}: put them under ignore, or into one view"
        )
    return own


def _check_two(labels: tuple[str | None, ...], *, party: str) -> None:
    known = [label for label in labels if label is not None]
    if not known:
        raise DataError(
            f"{party}: its label column is empty in all {len(labels)} rows; name the column that "
            "holds labels as label_column"
        )
    if len(set(known)) < 2:
        raise DataError(
            f"{party}: all {len(known)} labels are {known[0]:.40}; two classes are needed, so "
            "add rows of another one"
        )
