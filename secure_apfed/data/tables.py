"""The parties' own tables: a file each, several, or a query of a database.

Run by: each party on its own; `load_tables` plays all of them for a simulation. A
party's statistics come from its own rows alone: the active's training rows, all rows of a
passive; or from elsewhere, where it names an encoding. IDs are compared as text, "007" and
"7" differ. Of columns that should perhaps not train a model, an ID as a feature or the label in
disguise, the party is warned before they are encoded: both are guesses.
"""

import difflib
import hashlib
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow
import torch
from numpy.typing import NDArray
from pyarrow import default_memory_pool

from apfed_protocols.ids import EMPTY, JOINT, id_texts
from secure_apfed.data.catalogue import labels_are_numbers, party_names
from secure_apfed.data.databases import query_table
from secure_apfed.data.encoding import (
    CellCounts,
    ColumnEncoding,
    View,
    fit_views,
    locate_views,
    parse_encoding,
)
from secure_apfed.data.frames import (
    BLANK,
    are_padded_codes,
    files_of,
    has_measures,
    is_csv,
    is_empty,
    is_numeric,
    only_columns,
    place_of,
    read_frame,
    refuse_look_alikes,
    to_texts,
)
from secure_apfed.data.labels import (
    UNLABELLED,
    TargetScale,
    choose_positive,
    class_labels,
    put_positive_last,
    read_numbers,
    warn_of_empty_words,
)
from secure_apfed.data.partition import choose_labelled, generator, passive_labels, split_rows
from secure_apfed.data.records import OwnData, PartyTable, VerticalData, check_distinct
from secure_apfed.errors import CheckpointError, ConfigError, DataError, SuspectColumnWarning
from secure_apfed.files import read_json
from secure_apfed.settings.data import DataSettings, PartySettings, ViewColumns

_FEWEST_ROWS = 20
_DISTINCT = 0.5
_SAMPLE = 1000
_NAMELESS = "Unnamed: "  # as pandas calls columns without a name, and numbers them from 0
# The one view of parties that all hold the same columns.
_ALL = "all"


def _warn_of_ids(features: pd.DataFrame, categorical: Sequence[str], *, source: str) -> None:
    if len(features) < _FEWEST_ROWS:
        return
    for name, column in features.items():
        why = ""
        if name in categorical:
            if (different := column.nunique()) > _DISTINCT * len(column):
                why = f"{different} different texts"
        elif is_numeric(column) and _counts_rows(column):
            why = "whole numbers without a gap"
        if why:
            _warn(
                f"{source}: column {name!r} looks like an ID: its {len(column)} rows hold {why}; a "
                "model learns such rows by heart and nothing else from it. Put it under ignore "
                "unless it is a feature"
            )


def _counts_rows(column: "pd.Series") -> bool:
    values = column.dropna().to_numpy()
    if len(values) < len(column) or not np.issubdtype(values.dtype, np.integer):
        return False
    return len(np.unique(values)) == len(values) == int(values.max()) - int(values.min()) + 1


def _warn(what: str) -> None:
    warnings.warn(what, SuspectColumnWarning, stacklevel=3)


def warn_of_labels(
    features: pd.DataFrame, labels: Sequence[str | None], *, source: str, label: str,
    numbers: bool = False,
) -> None:  # fmt: skip
    """Warn of a column that alone tells every known label: by its values, or by cuts between them.

    A column of as many values as rows tells them, too, and is taken by its order alone; labels that
    are `numbers` rise or fall in that order. An empty cell is a value, or its row is left out.
    """
    known = np.array([row for row, text in enumerate(labels) if text is not None], dtype=np.int64)
    if len(known) < _FEWEST_ROWS:
        return
    told = pd.Series([labels[row] for row in known])
    truth, tells = pd.Series(pd.factorize(told)[0]), _tells
    if numbers:
        truth, tells = pd.to_numeric(told, errors="coerce"), _orders
    for name in features.columns:
        column = features[name].iloc[known].reset_index(drop=True)
        full = column.notna()
        parts = [(column, truth)]
        if _FEWEST_ROWS <= full.sum() < len(column):
            parts.append((column[full], truth[full]))
        if any(tells(*part) for part in parts):
            _warn(
                f"{source}: column {name!r} alone tells {label!r} of all {len(known)} rows that "
                "have one; it may be the label in disguise, or known only after it. Put it under "
                "ignore unless it is there when the model predicts"
            )


def _tells(column: "pd.Series", truth: "pd.Series") -> bool:
    """Whether its values, or cuts between them, part the classes; empty cells come last."""
    classes = truth.nunique()
    if not 1 < classes <= len(truth) / 2:
        return False
    if column.nunique(dropna=False) <= len(column) / 2:
        return bool((truth.groupby(column, dropna=False).nunique() == 1).all())
    if not is_numeric(column):
        return False
    numbers, targets = column.to_numpy(np.float64, na_value=np.nan), truth.to_numpy()
    for rows in (slice(_SAMPLE), slice(None)):  # most columns show it in the first few rows
        in_order = targets[rows][np.argsort(numbers[rows], kind="stable")]
        if np.count_nonzero(in_order[1:] != in_order[:-1]) >= classes:
            return False
    return True


def _orders(column: "pd.Series", truth: "pd.Series") -> bool:
    """Whether labels that are numbers rise or fall with it throughout."""
    if not is_numeric(column):
        return False
    numbers, targets = column.to_numpy(np.float64, na_value=np.nan), truth.to_numpy(np.float64)
    for rows in (slice(_SAMPLE), slice(None)):  # most columns show it in the first few rows
        one, other = numbers[rows], targets[rows]
        if np.isnan(one).any() or np.isnan(other).any():
            return False
        if min(len(np.unique(one)), len(np.unique(other))) <= len(one) / 2:
            return False
        orders = (sign * other[np.lexsort((sign * other, one))] for sign in (1.0, -1.0))
        if not any((np.diff(in_order) >= 0).all() for in_order in orders):
            return False
    return True


@dataclass(frozen=True, eq=False)
class RawTable:
    """A party's rows as read; labels as texts where it holds any, None where the cell is empty."""

    ids: tuple[str, ...]
    features: pd.DataFrame
    categorical: tuple[str, ...]
    labels: tuple[str | None, ...] = ()

    def at(self, rows: NDArray[np.int64]) -> "RawTable":
        return RawTable(
            tuple(self.ids[row] for row in rows),
            self.features.iloc[rows],
            self.categorical,
            tuple(self.labels[row] for row in rows),
        )


def read_raw(settings: DataSettings, name: str) -> RawTable:
    """Read the table of this party, with labels where the settings say that it holds some."""
    party = (settings.parties or {})[name]
    label_column = settings.label_column if settings.holds_labels(name) else None
    id_columns = settings.id_columns(name)
    labels = () if label_column is None else (label_column,)
    words = (*labels, *(party.categorical or ()))
    texts = (*id_columns, *words)
    frame = read_frame(
        given_table(settings, name), texts=texts, words=words, source=name, called=party.called
    )
    if not len(frame):
        raise DataError(f"{name}: {party.called} has no rows")
    named = (*texts, *(party.numeric or ()), *party.ignore)
    if absent := [column for column in dict.fromkeys(named) if column not in frame.columns]:
        raise DataError(
            f"{name}: {party.called} lacks the columns {', '.join(absent)}; it has "
            f"{', '.join(map(str, frame.columns))}{_guess(absent[0], frame)}"
        )
    numeric, categorical = _choose(frame, party, taken=(*id_columns, *labels))
    if label_column is None and settings.label_column in (*numeric, *categorical):
        raise DataError(
            f"{name}: its column {settings.label_column!r} is called like the active's labels, "
            "which a passive must not train on; put it under ignore or rename it"
        )
    for column in categorical:
        if is_csv(frame) and party.encoding is None:
            frame[column] = _without_words(frame[column], source=name)
    if party.missing == "drop":
        empty = [is_empty(frame[column]) for column in numeric]
        empty += [is_empty(frame[column], BLANK) for column in categorical]
        frame = frame[~np.any(empty, axis=0)]
    if not len(frame):
        raise DataError(
            f"{name}: data.parties.{name}.missing: drop leaves no row of {party.called}; say mean"
        )
    label_texts = _labels(frame, label_column, settings, party=name)
    ids = tuple(_ids(frame, id_columns, file=party.called, party=name))
    check_distinct(ids, party=name, place=lambda row: place_of(frame, row))
    for column in {*frame.columns} - {*numeric, *categorical}:
        del frame[column]  # in place: of a long table there is no second copy
    features = only_columns(frame, (*numeric, *categorical))
    _warn_of_ids(features, categorical, source=name)
    if label_column is not None:
        warn_of_labels(
            features, label_texts, source=name, label=label_column,
            numbers=labels_are_numbers(settings),
        )  # fmt: skip
    return RawTable(ids, features, categorical, label_texts)


def _labels(
    frame: pd.DataFrame, column: str | None, settings: DataSettings, *, party: str
) -> tuple[str | None, ...]:
    """Of "NA" and the like there is a label only where it is a class."""
    if column is None:
        return (None,) * len(frame)
    texts = to_texts(frame[column])
    if labels_are_numbers(settings):
        empty = EMPTY if is_csv(frame) else frozenset[str]()
    else:
        empty = warn_of_empty_words(
            texts, party=party, column=column, listed=settings.named_classes,
            count=is_csv(frame),
        )  # fmt: skip
    return tuple(None if text == "" or text in empty else text for text in texts)


def _guess(absent: str, frame: pd.DataFrame) -> str:
    names = {str(one).casefold(): str(one) for one in frame.columns}
    near = difflib.get_close_matches(absent.casefold(), names, n=1)
    return f"; is {absent!r} called {names[near[0]]!r}?" if near else ""


def given_table(settings: DataSettings, name: str) -> Path | pyarrow.Table:
    """A path, or what the query of this party tells now."""
    party = (settings.parties or {})[name]
    if party.database is None:
        return party_path(settings, party.file)
    return query_table(party.database, partial(party_path, settings), party=name)


def party_path(settings: DataSettings, file: Path | None) -> Path:
    if file is None:
        raise ConfigError(
            "data.parties: a file is not named here, so that its party alone can read it; name it, "
            "or let that party do what needs it (secure-apfed plan --config PARTY.yaml needs none)"
        )
    return (settings.folder or Path()).expanduser() / file.expanduser()


def _choose(
    frame: pd.DataFrame, party: PartySettings, *, taken: tuple[str, ...]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The numeric columns, dates among them, and the categorical ones: as named, else by type."""
    if party.numeric is not None or party.categorical is not None:
        return party.numeric or (), party.categorical or ()
    left = [name for name in frame.columns if name not in (*taken, *party.ignore)]
    if nameless := [name for name in left if name.startswith(_NAMELESS)]:
        place = int(nameless[0].removeprefix(_NAMELESS)) + 1
        raise DataError(
            f"{party.called} has no name for its column {place} (from 1); name it in the first "
            f"line, leave the column out, or put {nameless[0]!r} under ignore"
        )
    numeric = tuple(name for name in left if has_measures(frame[name]))
    categorical = tuple(name for name in left if name not in numeric)
    for column in categorical:
        if are_padded_codes(frame[column]):
            _warn(
                f"{party.called}: column {column!r} holds digits, some with leading zeros, and is "
                "taken as a category; list it under numeric if its cells are numbers, or under "
                "categorical"
            )
        else:
            # What a stray text among numbers must not silently do is to make each a category.
            refuse_look_alikes(frame[column], source=party.called)
    return numeric, categorical


def _without_words(column: "pd.Series", *, source: str) -> "pd.Series":
    """A column of a CSV file, where words such as NA count as empty, even among texts."""
    empty = is_empty(column)
    texts = (cell.strip() for cell in column[empty].tolist() if isinstance(cell, str))
    if said := Counter(text for text in texts if text):
        counts = ", ".join(f"{word!r} ({count})" for word, count in sorted(said.items()))
        _warn(
            f"{source}: cells {counts} of column {column.name!r} count as empty; if they are a "
            "category, write another word, or save the table as Parquet, where they are texts"
        )
    return column.mask(empty) if empty.any() else column


def _ids(frame: pd.DataFrame, columns: tuple[str, ...], *, file: str, party: str) -> list[str]:
    """One text a row made of these columns, by the rules of `apfed_protocols.ids`."""
    parts = [
        id_texts(
            frame[name], party=party, what=f"column {name!r} of {file}",
            place=lambda row: place_of(frame, row), strip=True, part=len(columns) > 1,
            key=f"data.parties.{party}.id_column",
        )
        for name in columns
    ]  # fmt: skip
    return list(map(JOINT.join, zip(*parts, strict=True)))


def load_tables(settings: DataSettings, *, seed: int) -> VerticalData:
    """Return all parties' tables, the active first, each in its file's order.

    The active's rows are split with the seed; its test rows need not be known to all.
    """
    own = _active(settings, seed=seed)
    return VerticalData(
        **vars(own),
        passives=tuple(
            _passive(settings, name, seed=seed)[0] for name in party_names(settings)[1:]
        ),
        labels_at=settings.labels_at,
        horizontal=settings.horizontal,
    )


def files_digest(settings: DataSettings, *, of: Sequence[str] | None = None) -> str:
    """SHA-256 (hex) of parties' own files, and of the rows that their queries give now: figures
    that were kept of others are not taken.

    Empty of a data set of the catalogue, which holds the same always.
    """
    if settings.parties is None:
        return ""
    found = hashlib.sha256()
    parties = {name: own for name, own in settings.parties.items() if of is None or name in of}
    for name, party in sorted(parties.items()):
        encoding = party.encoding and party_path(settings, party.encoding)
        for given in (given_table(settings, name), encoding):
            found.update(repr((name, _digest(given, name))).encode())
    return found.hexdigest()


def _digest(given: Path | pyarrow.Table | None, party: str) -> list[str] | None:
    """Of a file, of all files of a folder or a pattern, or of a query's columns and rows."""
    if given is None:
        return None
    if not isinstance(given, Path):
        rows = pd.util.hash_pandas_object(given.to_pandas(), index=False).to_numpy().tobytes()
        return [*given.column_names, hashlib.sha256(rows).hexdigest()]
    found = []
    for one in files_of(given, source=party):
        try:
            with one.open("rb") as file:
                found.append(hashlib.file_digest(file, "sha256").hexdigest())
        except OSError as error:
            raise DataError(f"{party}: {one} cannot be read ({error}); check the path") from error
    return found


def _active(settings: DataSettings, *, seed: int) -> OwnData:
    """Return the active's table, its classes, its split, and the rows with labels to learn from.

    Rows with an empty cell in the label column train without a label and test nothing.
    """
    name = settings.active
    raw = read_raw(settings, name)
    labels, groups, classes = _labels_of(settings, raw, party=name)
    known = np.flatnonzero(groups != UNLABELLED)
    share, choice = settings.test_fraction, settings.split
    train, test = (
        known[rows] for rows in split_rows(groups[known], share, seed=seed, split=choice)
    )
    train = np.sort(np.concatenate([train, np.flatnonzero(groups == UNLABELLED)]))
    if settings.limit is not None:
        train = generator(seed, "limit").permutation(train)[: settings.limit]
    kept = np.sort(np.concatenate([train, test]))
    is_train = np.isin(kept, train)
    if len(kept) < len(labels):
        raw, labels, groups = raw.at(kept), labels[kept], groups[kept]
    train_rows = np.flatnonzero(is_train)
    features, encoding, views = _encoded(settings, name, raw, rows=train_rows)
    chosen = choose_labelled(groups[train_rows], settings.labelled, seed=seed, choice=choice)
    learnt = train_rows if chosen is None else train_rows[chosen]
    targets = TargetScale.of(labels[learnt], party=name) if labels_are_numbers(settings) else None
    told = targets.encode(labels, party=name) if targets else torch.from_numpy(labels)
    return OwnData(
        table=PartyTable(name, raw.ids, features, told, encoding, views),
        train_rows=torch.from_numpy(train_rows),
        test_rows=torch.from_numpy(np.flatnonzero(~is_train)),
        classes=classes,
        labelled=None if chosen is None else torch.from_numpy(learnt),
        targets=targets,
    )


def _labels_of(
    settings: DataSettings, raw: RawTable, *, party: str
) -> tuple[NDArray[Any], NDArray[np.int64], tuple[str, ...]]:
    """Labels as they are learnt, the classes by which rows are drawn, and the names of classes;
    of numbers, all rows that have one are drawn alike.
    """
    column = settings.label_column
    if labels_are_numbers(settings):
        numbers = read_numbers(raw.labels, party=party, column=column)
        return numbers, np.where(np.isnan(numbers), UNLABELLED, 0), ()
    known = [label for label in raw.labels if label is not None]
    if not known:
        raise DataError(
            f"{party}: its label column is empty in all {len(raw.labels)} rows; name the column "
            "that holds labels as label_column"
        )
    if len(set(known)) < 2:
        raise DataError(
            f"{party}: all {len(known)} labels are {known[0]:.40}; two classes are needed, so "
            "add rows of another one"
        )
    listed = settings.named_classes or None
    labels, classes = class_labels(raw.labels, listed, party=party, column=column)
    positive = settings.positive
    if positive is None and listed is None and len(classes) == 2 and settings.split == "by_class":
        positive = choose_positive(labels, classes)
    # Rows are drawn by the classes in their order, so that the choice moves nobody to a test row.
    groups = labels
    labels, classes = put_positive_last(labels, classes, positive, where=f"{party}: positive")
    return labels, groups, classes


def load_own_tables(settings: DataSettings, name: str, *, seed: int) -> OwnData:
    """Return what one party holds, of its own file alone."""
    if name not in (settings.parties or {}):
        raise ConfigError(
            f"data.parties: there is no file of {name!r}; name its own file there (dataset: "
            "tables), or let the party's file say which prepared table is its own"
        )
    if name == settings.active:
        own = _active(settings, seed=seed)
    else:
        table, classes = _passive(settings, name, seed=seed)
        own = OwnData.of_passive(table, classes)
    default_memory_pool().release_unused()  # of the columns as they were read
    return own


def _passive(settings: DataSettings, name: str, *, seed: int) -> tuple[PartyTable, tuple[str, ...]]:
    """Read one passive's table, and its classes where it holds labels.

    It has labels of people whom the active tests, too: only the active can leave them out.
    """
    raw = read_raw(settings, name)
    features, encoding, views = _encoded(settings, name, raw, rows=np.arange(len(raw.ids)))
    labels = None
    classes = settings.named_classes
    if settings.holds_labels(name):
        told, classes = class_labels(raw.labels, classes, party=name, column=settings.label_column)
        told, classes = put_positive_last(
            told, classes, settings.positive, where=f"{name}: positive"
        )
        known, choice = settings.labelled, settings.split
        labels = torch.from_numpy(passive_labels(told, known, seed=seed, choice=choice, party=name))
    return PartyTable(name, raw.ids, features, labels, encoding, views), classes


def _encoded(
    settings: DataSettings, name: str, raw: RawTable, *, rows: NDArray[np.int64]
) -> tuple[torch.Tensor, ColumnEncoding, dict[str, View]]:
    """The features of all rows, how they were encoded, and where the party's views are among them.

    A given encoding tells of none of its rows; else it is fitted to these.
    """
    party = (settings.parties or {})[name]
    views, counts = _views_of(settings, name, raw.features), CellCounts()
    if party.encoding is None:
        encoding = fit_views(
            raw.features if len(rows) == len(raw.ids) else raw.features.iloc[rows], views,
            categorical=raw.categorical, missing=party.missing,
            most=party.rare_categories.most, source=name,
        )  # fmt: skip
    else:
        encoding = _given_encoding(party_path(settings, party.encoding), party.encoding, name)
        if settings.view_columns is None:
            columns = tuple(column.name for column in encoding.columns)
            views = {view: ViewColumns(columns=columns) for view in views}
    located = locate_views(encoding, views, source=name)
    features = encoding.encode(raw.features, source=name, counts=counts)
    if party.encoding is not None:
        counts.warn(source=name)
    return features, encoding, located


def _given_encoding(path: Path, called: Path, party: str) -> ColumnEncoding:
    try:
        content = read_json(path, dict[str, Any])
        encoding = parse_encoding(content.get("encoding", content))
    except (CheckpointError, DataError) as error:
        raise DataError(f"{party}: {called} holds no encoding in JSON: {error}") from error
    if not isinstance(encoding, ColumnEncoding):
        raise DataError(f"{party}: {called} is an encoding of images, its file is a table")
    return encoding


def _views_of(settings: DataSettings, name: str, features: pd.DataFrame) -> dict[str, ViewColumns]:
    """The party's views by the columns of its own; one of all columns where none are named."""
    columns = tuple(map(str, features.columns))
    if not columns:
        raise DataError(f"{name}: no feature columns are left; name some as numeric or categorical")
    if settings.view_columns is None:
        return {_ALL if settings.horizontal else name: ViewColumns(columns=columns)}
    every = settings.view_columns.items()
    own = {name: view for name, view in every if not set(columns).isdisjoint(view.columns)}
    listed = [column for view in own.values() for column in view.columns]
    wrong = [column for column in dict.fromkeys((*listed, *columns))
             if listed.count(column) != 1 or column not in columns]  # fmt: skip
    if wrong:
        raise DataError(
            f"{name}: view_columns must name each of its feature columns once, and all of a view "
            f"or none; look at {', '.join(wrong[:5])}: put them under ignore, or into one view"
        )
    return own
