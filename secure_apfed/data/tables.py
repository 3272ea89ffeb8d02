"""The parties' own tables: one CSV or Parquet file each.

Run by: each party on its own file; `load_tables` plays all of them for a simulation. A
party's statistics come from its own rows alone: the active's training rows, all rows of a
passive; or from elsewhere, where it names an encoding. IDs are compared as text, "007" and
"7" differ.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from secure_apfed.data.column_encoding import ColumnEncoding, fit_columns
from secure_apfed.data.encoding import parse_encoding
from secure_apfed.data.frames import is_numeric, read_frame, to_texts
from secure_apfed.data.partition import choose_labelled, generator, split_rows
from secure_apfed.data.records import UNLABELLED, OwnData, PartyTable, VerticalData, check_distinct
from secure_apfed.data.settings import DataSettings, PartySettings
from secure_apfed.errors import CheckpointError, ConfigError, DataError
from secure_apfed.folder_files import read_json

__all__ = ["load_active", "load_own_tables", "load_passive", "load_tables"]

# Between the parts of an ID of several columns; no text file holds it by accident.
_JOINT = "\x1f"


@dataclass(frozen=True, eq=False)
class _Raw:
    """A party's rows as read: IDs, feature columns, and labels as text at the active.

    A label is None where its cell is empty.
    """

    ids: tuple[str, ...]
    features: pd.DataFrame
    categorical: tuple[str, ...]
    labels: tuple[str | None, ...] = ()

    def at(self, rows: NDArray[np.int64]) -> "_Raw":
        """Return the same with these rows only, in this order."""
        return _Raw(
            tuple(self.ids[row] for row in rows),
            self.features.iloc[rows],
            self.categorical,
            tuple(self.labels[row] for row in rows),
        )


def load_tables(settings: DataSettings, *, seed: int) -> VerticalData:
    """Return all parties' tables, the active first, each in its file's order.

    The active's rows are split with the seed; its test rows need not be known to all.

    Raises:
        DataError: a file or table is missing, damaged or unfit; names the party.
    """
    own = load_active(settings, seed=seed)
    names = [name for name in _parties(settings) if name != own.table.name]
    return VerticalData(
        active=own.table,
        passives=tuple(load_passive(settings, name) for name in names),
        classes=own.classes,
        train_rows=own.train_rows,
        test_rows=own.test_rows,
        labelled=own.labelled,
    )


def load_active(settings: DataSettings, *, seed: int) -> OwnData:
    """Return the active's table, its classes, its split, and the rows with labels to learn from.

    Rows with an empty cell in the label column train without a label and test nothing.

    Raises:
        DataError: as `load_tables`, and for labels that are outside the given classes, of one
            class only, or fewer than asked for.
    """
    name = settings.active
    raw = _read(settings, name, label_column=settings.label_column)
    classes = settings.classes or _infer_classes(raw.labels)
    labels = _number(raw.labels, classes, party=name)
    known = np.flatnonzero(labels != UNLABELLED)
    train, test = (
        known[rows]
        for rows in split_rows(
            labels[known], settings.test_fraction, seed=seed, split=settings.split
        )
    )
    train = np.sort(np.concatenate([train, np.flatnonzero(labels == UNLABELLED)]))
    if settings.limit is not None:
        train = generator(seed, "limit").permutation(train)[: settings.limit]
    kept = np.sort(np.concatenate([train, test]))
    is_train = np.isin(kept, train)
    raw, labels = raw.at(kept), labels[kept]
    encoding = _encoding_of(settings, name, raw, rows=np.flatnonzero(is_train))
    features = encoding.encode(raw.features, source=name)
    train_rows = np.flatnonzero(is_train)
    labelled = choose_labelled(
        labels[train_rows], settings.labelled, seed=seed, choice=settings.labelled_choice
    )
    return OwnData(
        table=PartyTable(name, raw.ids, features, torch.from_numpy(labels), encoding),
        train_rows=torch.from_numpy(train_rows),
        test_rows=torch.from_numpy(np.flatnonzero(~is_train)),
        classes=classes,
        labelled=None if labelled is None else torch.from_numpy(train_rows[labelled]),
    )


def load_own_tables(settings: DataSettings, name: str, *, seed: int) -> OwnData:
    """Return what one party holds, of its own file alone.

    Raises:
        ConfigError: the settings name no file for it.
        DataError: as `load_tables`.
    """
    if name not in _parties(settings):
        raise ConfigError(
            f"data.parties: there is no file of {name!r}; name its own file there (dataset: "
            "tables), or let the party's file say which prepared table is its own"
        )
    if name != settings.active:
        return OwnData(table=load_passive(settings, name))
    return load_active(settings, seed=seed)


def load_passive(settings: DataSettings, name: str) -> PartyTable:
    """Return one passive's table.

    Raises:
        DataError: as `load_tables`, and where the file holds the active's label column.
    """
    raw = _read(settings, name, label_column=None)
    encoding = _encoding_of(settings, name, raw, rows=np.arange(len(raw.ids)))
    return PartyTable(name, raw.ids, encoding.encode(raw.features, source=name), None, encoding)


def _encoding_of(
    settings: DataSettings, name: str, raw: _Raw, *, rows: NDArray[np.int64]
) -> ColumnEncoding:
    """The encoding that the party was given, which tells of none of its rows; else fitted."""
    party = _parties(settings)[name]
    if party.encoding is None:
        return fit_columns(
            raw.features.iloc[rows], categorical=raw.categorical, missing=party.missing, source=name
        )
    path = _path(settings, party.encoding)
    try:
        told = read_json(path, dict[str, Any])
        encoding = parse_encoding(told.get("encoding", told))
    except (CheckpointError, DataError) as error:
        raise DataError(f"{name}: {party.encoding} holds no encoding in JSON: {error}") from error
    if not isinstance(encoding, ColumnEncoding):
        raise DataError(f"{name}: {party.encoding} is an encoding of images, its file is a table")
    return encoding


def _parties(settings: DataSettings) -> dict[str, PartySettings]:
    return settings.parties or {}


def _read(settings: DataSettings, name: str, *, label_column: str | None) -> _Raw:
    party = _parties(settings)[name]
    given = party.id_column or settings.id_column
    id_columns = (given,) if isinstance(given, str) else given
    labels = () if label_column is None else (label_column,)
    texts = (*id_columns, *labels, *(party.categorical or ()))
    frame = read_frame(_path(settings, party.file), texts=texts, source=name)
    if not len(frame):
        raise DataError(f"{name}: {party.file} has no rows")
    named = (*texts, *(party.numeric or ()), *party.ignore)
    absent = [column for column in dict.fromkeys(named) if column not in frame.columns]
    if absent:
        raise DataError(
            f"{name}: {party.file} lacks the columns {', '.join(absent)}; it has "
            f"{', '.join(map(str, frame.columns))}"
        )
    numeric, categorical = _choose(frame, party, taken=(*id_columns, *labels))
    if label_column is None and settings.label_column in (*numeric, *categorical):
        raise DataError(
            f"{name}: its column {settings.label_column!r} is called like the active's labels, "
            "which a passive must not train on; put it under ignore or rename it"
        )
    features = frame[[*numeric, *categorical]]
    if party.missing == "drop":
        frame = frame[features.notna().all(axis=1)]
        features = features.loc[frame.index]
    if not len(frame):
        raise DataError(f"{name}: missing: drop leaves no row of {party.file}; try missing: mean")
    label_texts = tuple(to_texts(frame[label_column])) if label_column else (None,) * len(frame)
    ids = _complete(frame, id_columns, party=name)
    check_distinct(ids, party=name)
    return _Raw(ids, features, categorical, label_texts)


def _path(settings: DataSettings, file: Path) -> Path:
    return (settings.folder or Path()).expanduser() / file.expanduser()


def _choose(
    frame: pd.DataFrame, party: PartySettings, *, taken: tuple[str, ...]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the numeric and the categorical columns: as named, else by their types."""
    if party.numeric is not None or party.categorical is not None:
        return party.numeric or (), party.categorical or ()
    left = [str(name) for name in frame.columns if name not in (*taken, *party.ignore)]
    numeric = tuple(name for name in left if is_numeric(frame[name]))
    categorical = tuple(name for name in left if name not in numeric)
    for column in categorical:
        _refuse_mixed(frame[column], party=party)
    return numeric, categorical


def _refuse_mixed(column: "pd.Series", *, party: PartySettings) -> None:
    """A stray text among numbers must not silently make every number a category."""
    texts = [text for text in to_texts(column) if text is not None]
    numbers = pd.to_numeric(pd.Series(texts, dtype=str), errors="coerce").notna()
    if 0.5 < numbers.mean() < 1:
        stray = int((~numbers).sum())
        raise DataError(
            f"{party.file}: {stray} of {len(texts)} cells of column {column.name!r} are text and "
            "the rest are numbers; mend them, or list the column under numeric or categorical"
        )


def _complete(frame: pd.DataFrame, columns: tuple[str, ...], *, party: str) -> tuple[str, ...]:
    """Return one text a row made of these columns; an empty cell is an error."""
    parts = []
    for name in columns:
        texts = to_texts(frame[name])
        if None in texts:
            raise DataError(
                f"{party}: column {name!r} is empty in {texts.count(None)} rows, first in row "
                f"{texts.index(None)} (from 0); each row needs an ID"
            )
        parts.append([text or "" for text in texts])
    return tuple(_JOINT.join(row) for row in zip(*parts, strict=True))


def _infer_classes(labels: tuple[str | None, ...]) -> tuple[str, ...]:
    found = {label for label in labels if label is not None}
    whole = all(label.lstrip("-").isdecimal() for label in found)
    return tuple(sorted(found, key=int)) if whole else tuple(sorted(found))


def _number(
    labels: tuple[str | None, ...], classes: tuple[str, ...], *, party: str
) -> NDArray[np.int64]:
    places: dict[str | None, int] = {label: place for place, label in enumerate(classes)}
    outside = [label for label in labels if label is not None and label not in places]
    if outside:
        raise DataError(
            f"{party}: {len(outside)} labels lie outside the classes {', '.join(classes)}, such as "
            f"{', '.join(sorted(set(outside))[:5])}; mend them, or add the class"
        )
    known = [label for label in labels if label is not None]
    if len(set(known)) < 2:
        raise DataError(
            f"{party}: all {len(known)} labels are {' or '.join(set(known)) or 'empty'}; two "
            "classes are needed"
        )
    return np.array([places.get(label, UNLABELLED) for label in labels], dtype=np.int64)
