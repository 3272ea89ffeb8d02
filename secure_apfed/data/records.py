"""The data of one party, and of all parties of a simulated run; checked on creation, and stored as
a file.

Whoever prepares a simulation has all tables, and writes one such file into each party's folder. A
party reads only its own. Layout: safetensors; IDs, classes and encoding as JSON in its header.
Letters: N rows of a table, F features.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save

from apfed_protocols.ids import require_comparable
from secure_apfed.base.files import load_bytes
from secure_apfed.base.names import check_parties
from secure_apfed.data.encoding import FeatureEncoding, View, check_views, parse_encoding
from secure_apfed.data.labels import UNLABELLED, TargetScale
from secure_apfed.data.lazy_rows import is_lazy
from secure_apfed.errors import CheckpointError, DataError

_NO_ROWS = torch.empty(0, dtype=torch.int64)
_HEADER_KEY = "party"


def _is_finite(features_NF: torch.Tensor) -> bool:
    """Return whether all features (N, F) are finite.

    Where one row was expanded to all (`Tensor.expand`), all rows are the same memory: only the
    first is checked.
    """
    is_expanded = features_NF.ndim > 1 and features_NF.stride(0) == 0
    checked_rows = features_NF[:1] if is_expanded else features_NF
    return bool(checked_rows.isfinite().all())


@dataclass(frozen=True, eq=False)
class PartyTable:
    """A party's table: IDs, features, and labels if it has them.

    Attributes:
        name: the party.
        ids: distinct, in the party's own order; a tuple, or mapped (`MappedIds`).
        features: float32 (N, columns) or (N, channels, height, width); rows of a data set
            (`LazyRows`) are read, and checked, when a step needs them.
        labels: (N,), int64 class indices, or standardised float32 where labels are numbers to
            predict; `UNLABELLED` for a row without one; None: the party holds no labels.
        encoding: how raw columns or images became the features, for prediction later.
        views: name -> the range of features that form a view; empty for images.
    """

    name: str
    ids: Sequence[str] = field(repr=False)
    features: torch.Tensor = field(repr=False)
    labels: torch.Tensor | None = field(repr=False)
    encoding: FeatureEncoding = field(repr=False)
    views: Mapping[str, View] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        """Check IDs, features, labels, encoding and views against each other. Raises DataError."""
        rows = len(self.ids)
        if not rows:
            raise DataError(f"{self.name}: its table is empty; at least one row is needed")
        check_distinct(self.ids, party=self.name)
        if len(self.features) != rows:
            raise DataError(f"{self.name}: {rows} IDs, but features of {len(self.features)} rows")
        if self.labels is not None and tuple(self.labels.shape) != (rows,):
            raise DataError(
                f"{self.name}: {rows} IDs, but labels of shape {tuple(self.labels.shape)}"
            )
        if tuple(self.features.shape[1:]) != self.encoding.shape:
            raise DataError(
                f"{self.name}: its encoding gives rows of shape {self.encoding.shape}, the "
                f"features have {tuple(self.features.shape[1:])}"
            )
        if not is_lazy(self.features) and not _is_finite(self.features):
            bad_F = (~self.features.isfinite()).flatten(1).sum(0)
            worst_feature = int(bad_F.argmax())
            name = self.encoding.feature_name(worst_feature)
            raise DataError(
                f"{self.name}: {int(bad_F.sum())} features are NaN or infinite, "
                f"{int(bad_F[worst_feature])} of them in {name!r}; mend the "
                "rows or leave them out"
            )
        check_views(self.features, self.views, party=self.name)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one row's features."""
        return tuple(self.features.shape[1:])

    @property
    def layout(self) -> str:
        """The SHA-256 (hex) of what each feature means: its column, kind, category and view.

        Two parties with equal digests can add up representations or weights feature by feature.
        Means and scales are not included, as each party has its own.
        """
        content = {"features": self.encoding.layout, "views": _encode_views(self.views)}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True, eq=False)
class OwnData:
    """A party's data for a run: its table, and the division of its rows into training and test.

    Attributes:
        table: table of the party.
        train_rows, test_rows: positions in the table, int64, disjoint, ascending, at a party with
            labels; empty elsewhere. All rows of a passive with labels are training rows.
        classes: names in the order of the labels, at a party that has them; empty where labels are
            numbers.
        labelled: the training rows whose labels may be used in training; None: all of them.
        targets: how labels that are numbers were standardised; None: they are classes.
    """

    table: PartyTable
    train_rows: torch.Tensor = field(default_factory=lambda: _NO_ROWS, repr=False)
    test_rows: torch.Tensor = field(default_factory=lambda: _NO_ROWS, repr=False)
    classes: tuple[str, ...] = ()
    labelled: torch.Tensor | None = field(default=None, repr=False)
    targets: TargetScale | None = None

    @classmethod
    def for_passive(cls, table: PartyTable, classes: tuple[str, ...]) -> "OwnData":
        """Return the data of a passive with this table.

        If the table has labels, all rows are training rows, and `classes` names its classes. Rows
        without a label are then left out of `labelled`.
        """
        if table.labels is None:
            return cls(table=table)
        labelled = torch.nonzero(table.labels != UNLABELLED).flatten()
        return cls(
            table=table,
            train_rows=torch.arange(len(table.ids)),
            classes=classes,
            labelled=None if len(labelled) == len(table.ids) else labelled,
        )

    @property
    def labelled_rows(self) -> torch.Tensor:
        """The training rows whose labels may be used in training."""
        return self.train_rows if self.labelled is None else self.labelled

    @property
    def views(self) -> Mapping[str, View]:
        """The views of the party's table: name -> range of features."""
        return self.table.views


@dataclass(frozen=True, kw_only=True, eq=False)
class VerticalData(OwnData):
    """The active's data and all passives' tables, for simulation; between organisations each party
    has only its own.

    Attributes:
        labels_at: passives that hold labels, too.
        is_horizontal: every party has all features and labels, of different people; nothing is
            aligned.
    """

    passives: tuple[PartyTable, ...]
    labels_at: tuple[str, ...] = ()
    is_horizontal: bool = False

    @property
    def active(self) -> PartyTable:
        """The active's table."""
        return self.table

    @property
    def tables(self) -> tuple[PartyTable, ...]:
        """All parties' tables, the active's first."""
        return (self.table, *self.passives)

    def select_party(self, name: str) -> OwnData | None:
        """Return the data of the party of this name; None if it has none (an aggregator)."""
        if name == self.table.name:
            return OwnData(**{field.name: getattr(self, field.name) for field in fields(OwnData)})
        for table in self.passives:
            if table.name == name:
                return OwnData.for_passive(table, self.classes)
        return None

    def replace_own(self, data: OwnData) -> "VerticalData":
        """Return the same data with `data` in place of the active's table and split.

        The passives' tables stay the same.
        """
        return replace(self, **vars(data))

    def compare_ids(self, rule: Callable[[str], str]) -> None:
        """Raise DataError if two parties have no ID in common.

        `rule`: a function that normalises an ID before the comparison. A horizontal partition is
        not checked, as its parties have different people.
        """
        if not self.is_horizontal:
            require_comparable({table.name: map(rule, table.ids) for table in self.tables})

    def __post_init__(self) -> None:
        """Check names, rows, labels and passives' tables. Raises DataError."""
        names = [table.name for table in self.tables]
        if len(set(names)) != len(names):
            raise DataError(f"two parties have one name among {', '.join(names)}; rename one")
        try:
            check_parties(names)
        except ValueError as error:
            raise DataError(str(error)) from None
        if absent := sorted(set(self.labels_at) - set(names[1:])):
            raise DataError(f"labels_at: there is no passive {', '.join(absent)}")
        self._check_rows()
        self._check_labels()
        for passive in self.passives:
            self._check_passive(passive)

    def _check_rows(self) -> None:
        """Raise DataError unless train, test and labelled rows are distinct and in range."""
        rows = torch.cat([self.train_rows, self.test_rows])
        if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < len(self.active.ids):
            raise DataError(
                f"{self.active.name}: train and test rows lie in 0 to {len(self.active.ids) - 1}, "
                f"got {int(rows.min())} to {int(rows.max())}"
            )
        if len(torch.unique(rows)) != len(rows):
            raise DataError(
                f"{self.active.name}: a row is listed twice in the train and test splits"
            )
        if not bool(torch.isin(self.labelled_rows, self.train_rows).all()):
            raise DataError(f"{self.active.name}: labelled rows are among its training rows")

    def _check_passive(self, table: PartyTable) -> None:
        """Raise DataError unless a passive's labels and features fit the partition.

        A passive must have labels if the partition is horizontal or `labels_at` names it, and else
        must have none. In a horizontal partition its features must mean the same as the active's.
        """
        name = table.name
        labels_N = table.labels
        reason = "the partition is horizontal" if self.is_horizontal else "it is in labels_at"
        needs_labels = self.is_horizontal or name in self.labels_at
        if labels_N is None and needs_labels:
            raise DataError(f"{name}: {reason}, and it has no labels; give it those of its rows")
        if labels_N is not None and not needs_labels:
            raise DataError(
                f"{name} is passive and holds no labels; give it None, or name it in labels_at"
            )
        if labels_N is not None:
            known_labels = labels_N[labels_N != UNLABELLED]
            if not len(known_labels) or not bool(
                ((known_labels >= 0) & (known_labels < len(self.classes))).all()
            ):
                raise DataError(
                    f"{name}: {len(known_labels)} of its rows have a label, at least one is "
                    f"needed, and all of 0 to {len(self.classes) - 1}"
                )
        if self.is_horizontal and table.layout != self.active.layout:
            raise DataError(
                f"{name}: under a horizontal partition all parties have the same features in the "
                f"same order and the same views; those of {name} are others than "
                f"{self.active.name}'s: "
                "give all of them the same columns in one order, of the same categories, and one "
                "encoding"
            )

    def _check_labels(self) -> None:
        """Raise DataError unless the active's labels are numbers of classes, with two classes or
        more among the labelled rows. Labels to predict as numbers are checked by `_check_targets`.
        """
        labels_N = self.active.labels
        if labels_N is None:
            raise DataError(f"{self.active.name} is the active and needs labels, it has none")
        if self.targets is not None:
            self._check_targets(labels_N)
            return
        is_outside = (labels_N < 0) | (labels_N >= len(self.classes))
        is_needed = torch.zeros_like(is_outside)
        is_needed[torch.cat([self.labelled_rows, self.test_rows])] = True
        is_wrong = is_outside & (is_needed | (labels_N != UNLABELLED))
        if bool(is_wrong.any()):
            raise DataError(
                f"{self.active.name}: {int(is_wrong.sum())} labels lie outside the "
                f"{len(self.classes)} classes, first {int(labels_N[is_wrong][0])}; "
                f"expected 0 to {len(self.classes) - 1}"
            )
        if len(labels_N[self.labelled_rows].unique()) < 2:
            raise DataError(
                f"{self.active.name}: the {len(self.labelled_rows)} labelled training rows are all "
                "of one class, so there is nothing to learn; add rows of another class, or raise "
                "data.limit or data.labelled"
            )

    def _check_targets(self, labels_N: torch.Tensor) -> None:
        """Raise DataError unless labels to predict as numbers are floating point and known.

        Labels must be known, and finite, at labelled training rows and at test rows.
        """
        needed_labels = labels_N[torch.cat([self.labelled_rows, self.test_rows])]
        if not labels_N.is_floating_point() or self.classes:
            raise DataError(
                f"{self.active.name}: labels that are numbers are float32 and have no classes, got "
                f"{labels_N.dtype} and {len(self.classes)} classes"
            )
        if not bool((needed_labels.isfinite() & (needed_labels != UNLABELLED)).all()):
            raise DataError(
                f"{self.active.name}: a labelled training row or a test row has no number as its "
                "label; leave these rows out"
            )


def check_distinct(
    ids: Sequence[str], *, party: str, describe_row: Callable[[int], str] = "row {} (from 0)".format
) -> None:
    """Raise DataError if an ID occurs twice.

    Hashes of 64 bits are compared first, so that all IDs of a table on disk are never in memory.
    Only the IDs with an equal hash are then compared as texts.

    Args:
        ids: one ID a row; a tuple, or a sequence that reads from disk.
        party: name of the owner, for the error.
        describe_row: function that describes a row's position in words, for the error.
    """
    hashes_N = np.fromiter(map(hash, ids), np.int64, count=len(ids))
    in_order = np.sort(hashes_N)
    repeated_hashes = in_order[1:][in_order[1:] == in_order[:-1]]
    if not len(repeated_hashes):
        return
    candidate_rows = np.flatnonzero(np.isin(hashes_N, repeated_hashes)).tolist()
    candidates = {row: ids[row] for row in candidate_rows}
    repeated = [text for text, count in Counter(candidates.values()).items() if count > 1]
    if not repeated:
        return
    rows = [row for row, text in candidates.items() if text == repeated[0]]
    raise DataError(
        f"{party}: {len(repeated)} IDs occur more than once, the first in "
        f"{', '.join(map(describe_row, rows[:5]))}; each row needs its own ID, or name more ID "
        "columns"
    )


def pack_own(data: OwnData) -> bytes:
    """Return one party's data as the bytes of a safetensors file."""
    table = data.table
    tensors = {
        "features": table.features,
        "train_rows": data.train_rows,
        "test_rows": data.test_rows,
        "labels": table.labels,
        "labelled": data.labelled,
    }
    header = {
        "name": table.name,
        "ids": tuple(table.ids),
        "classes": data.classes,
        "targets": None if data.targets is None else data.targets.model_dump(),
        "encoding": table.encoding.model_dump(mode="json"),
        "views": _encode_views(table.views),
    }
    present = {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}
    return save(present, metadata={_HEADER_KEY: json.dumps(header)})


def load_own(path: Path, name: str) -> OwnData:
    """Read the data of the party `name` from a file that `pack_own` made.

    Raises DataError: the file belongs to another party, or is damaged.
    """
    try:
        tensors = load(load_bytes(path))
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {})[_HEADER_KEY])
        if header["name"] != name:
            raise DataError(
                f"{name}: {path} holds the rows of {header['name']}; give each party its own"
            )
        views = {view: _parse_view(*values) for view, values in header["views"].items()}
        table = PartyTable(
            name,
            tuple(header["ids"]),
            tensors["features"],
            tensors.get("labels"),
            parse_encoding(header["encoding"]),
            views,
        )
        scale = header.get("targets")
        return OwnData(
            table=table,
            train_rows=tensors["train_rows"],
            test_rows=tensors["test_rows"],
            classes=tuple(header["classes"]),
            labelled=tensors.get("labelled"),
            targets=TargetScale.model_validate(scale) if scale else None,
        )
    except (
        CheckpointError,
        SafetensorError,
        KeyError,
        ValueError,
        TypeError,
        AttributeError,
    ) as error:
        raise DataError(f"{name}: {path} holds no prepared rows ({error})") from error


def _encode_views(views: Mapping[str, View]) -> dict[str, tuple[object, ...]]:
    """Return each view's fields as plain values, for JSON."""
    return {name: astuple(view) for name, view in views.items()}


def _parse_view(first_feature: int, end_feature: int, sequence: list[int] | None) -> View:
    """Return a view from the plain values that `_encode_views` wrote.

    `first_feature`, `end_feature`: the range of features of the view. `sequence`: its number of
    steps and of channels; None: the view is not a sequence.
    """
    if sequence is None:
        return View(int(first_feature), int(end_feature))
    steps, channels = sequence
    return View(int(first_feature), int(end_feature), (int(steps), int(channels)))
