"""What a run says about its data: which set, how it is cut between parties, who knows whom."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from secure_apfed.data.catalogue import TABLES, find_dataset
from secure_apfed.data.cells import ColumnName
from secure_apfed.data.column_encoding import Missing, RareCategories
from secure_apfed.data.partition import BUILT_IN_ACTIVE, party_names
from secure_apfed.data.readers import DataSet
from secure_apfed.data.views import ViewColumns
from secure_apfed.errors import ConfigError
from secure_apfed.names import ByParty, Name, PartyName
from secure_apfed.settings import Settings

__all__ = ["ANOMALY_CLASSES", "DataSettings", "PartySettings"]

ANOMALY_CLASSES = ("normal", "anomaly")
"""Of a run whose training rows are normal alone."""

Share = Annotated[float, Field(gt=0, lt=1)]
_CLIENTS = 4
_OF_BUILT_IN = (
    "views", "columns", "natural_views", "clients", "rows", "rows_per_class", "aligned",
)  # fmt: skip


class PartySettings(Settings):
    """One party's own file, for `dataset: tables`.

    Attributes:
        file: CSV or Parquet; a relative path starts at `data.folder`, or at the working
            directory where no folder is given.
        id_column: one or several columns that name a row; null takes `data.id_column`.
        numeric, categorical: columns to standardise and to one-hot encode; where both are
            null, every other column is used, by its type. Naming one list uses it alone.
        ignore: columns to leave out.
        missing: what to do about empty cells: "error" names them, "mean" takes a numeric
            column's mean and no category, "drop" leaves the row out.
        rare_categories: what becomes of columns with many categories.
        encoding: JSON file with the encoding to use, or a model card that holds one; null fits
            means, scales and categories to the party's own rows, which they then tell of.
    """

    file: Path
    id_column: ColumnName | tuple[ColumnName, ...] | None = None
    numeric: tuple[ColumnName, ...] | None = None
    categorical: tuple[ColumnName, ...] | None = None
    ignore: tuple[ColumnName, ...] = ()
    missing: Missing = "error"
    rare_categories: RareCategories = RareCategories()
    encoding: Path | None = None


class DataSettings(Settings):
    """The data of one run.

    Attributes:
        dataset: a key of `DATASETS`, or "tables" for the parties' own files.
        partition: "vertical" gives each party other features of the same people, "horizontal"
            gives each party all features of other people, with their labels, equally many of each
            class; the test rows are the active's. Own tables are as they are.
        clients: parties under a horizontal partition of a built-in set; null takes 4.
        labels_at: passives that hold the labels of their own people, too, but for test rows.
        views: m, the strips that an image is cut into; null takes the catalogue's number.
            Sets of tables have natural views, whose number is fixed.
        natural_views: those to use of a set of tables, in this order; null takes all.
        active_view: i, the view that the active holds, from 1.
        rows: at most this many people of a built-in set, drawn before anything else; rows_per_class
            draws so many of each class instead. Null takes all.
        overlap: the share of each passive's training people that the active knows too, and
            the other way round; 1 is all. Own tables overlap as they do.
        aligned: in place of overlap, how many of the active's training people all passives hold;
            beside them and the test rows passives hold nobody.
        test_fraction: of the active's rows, where the set has no official split.
        split: "by_class" takes that share of each class, so that a label moves the split;
            "at_random" reads no label.
        limit: at most this many training rows at the active, after a seeded shuffle.
        labelled: how many of the active's training rows have a label to learn from, as a number
            of rows or, below 1, as a share; null: all that have one. The labels of the others
            reach nothing that trains. In own tables a row without a label is one with an empty
            cell. Passives that hold labels hold as many, drawn of their own rows.
        labelled_choice: "by_class" takes of each class by its share, one row at least;
            "at_random" reads no label.
        folder: where to look for files; null takes SECURE_APFED_DATA (a list with the
            system's path separator), else ~/.cache/secure-apfed.
        columns: party -> columns by name, or by position from 0, for sets of tables; the
            party called "active" is required.
        view_columns: view -> its columns, for own tables; a party's views are those whose columns
            it has, and they must be all of its columns. Null: one view a party.
        parties: party -> its file, for `dataset: tables`.
        active: which of `parties` is the active.
        id_column: columns that name a row in every party's file, unless the party differs.
        label_column: the column of labels, at whoever holds any.
        numeric_labels: whether the labels of own tables are numbers to predict (`task: regression`)
            and no classes; of a built-in set the catalogue says so. Splits read no label then.
        anomaly: the label whose rows are anomalies (`task: anomaly`); the active trains on the
            others and on rows without a label, and test rows are of both.
        classes: the labels in the order of the network's outputs; null infers them from the
            active's, which other parties with labels cannot.
    """

    dataset: str = "digits"
    partition: Literal["vertical", "horizontal"] = "vertical"
    clients: int | None = Field(None, ge=2)
    labels_at: tuple[PartyName, ...] = ()
    views: int | None = Field(None, ge=2)
    natural_views: tuple[str, ...] | None = Field(None, min_length=1)
    active_view: int = Field(1, ge=1)
    rows: int | None = Field(None, ge=2)
    rows_per_class: int | None = Field(None, ge=2)
    overlap: float = Field(1.0, gt=0, le=1)
    aligned: int | None = Field(None, ge=1)
    test_fraction: float = Field(0.25, gt=0, lt=1)
    split: Literal["by_class", "at_random"] = "by_class"
    limit: int | None = Field(None, ge=1)
    labelled: Annotated[int, Field(ge=2)] | Share | None = None
    labelled_choice: Literal["by_class", "at_random"] = "by_class"
    folder: Path | None = None
    columns: ByParty[tuple[int | str, ...]] | None = None
    view_columns: dict[Name, ViewColumns] | None = Field(None, min_length=1)
    parties: ByParty[PartySettings] | None = None
    active: PartyName = "active"
    id_column: ColumnName | tuple[ColumnName, ...] = "id"
    label_column: ColumnName = "label"
    numeric_labels: bool = False
    anomaly: str | None = None
    classes: tuple[str, ...] | None = Field(None, min_length=2)

    @property
    def labels_are_numbers(self) -> bool:
        """Whether there are no classes, but numbers to predict."""
        if self.dataset == TABLES:
            return self.numeric_labels
        return find_dataset(self.dataset).numeric_labels

    def terms(self) -> dict[str, Any]:
        """Who holds labels and, where several do, how they number the classes."""
        told = {"partition", "labels_at"}
        if self.horizontal or self.labels_at:
            told |= {"classes", "anomaly"}
        return self.model_dump(mode="json", include=told)

    def class_names(self, known: tuple[str, ...]) -> tuple[str, ...]:
        """Of the run: those that are known, or normal rows and anomalies."""
        return known if self.anomaly is None else ANOMALY_CLASSES

    @property
    def active_name(self) -> str:
        """The active party's name: built-in sets have parties of their own."""
        return self.active if self.dataset == TABLES else BUILT_IN_ACTIVE

    @field_validator("classes")
    @classmethod
    def _classes_differ(cls, names: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if names is not None and len(set(map(str.strip, names))) < len(names):
            raise ValueError(f"a class is named twice among {', '.join(names)}; name each once")
        return None if names is None else tuple(map(str.strip, names))

    @field_validator("dataset")
    @classmethod
    def _dataset_exists(cls, name: str) -> str:
        try:
            return name if name == TABLES else find_dataset(name).name
        except ConfigError as error:
            raise ValueError(str(error)) from error

    @property
    def horizontal(self) -> bool:
        """Whether parties hold all features of other people."""
        return self.partition == "horizontal"

    @property
    def party_names(self) -> tuple[str, ...]:
        """Of all parties with features, the active first."""
        if self.dataset == TABLES:
            names = self.parties or {}
            return (self.active, *(name for name in names if name != self.active))
        if self.columns is not None:
            return (BUILT_IN_ACTIVE, *(one for one in self.columns if one != BUILT_IN_ACTIVE))
        return party_names(self.view_count)

    def holds_labels(self, name: str) -> bool:
        """Whether the party of this name holds labels."""
        return self.horizontal or name == self.active_name or name in self.labels_at

    @model_validator(mode="after")
    def _fits_the_dataset(self) -> Self:
        if self.dataset == TABLES:
            self._check_own_tables()
        else:
            self._check_built_in()
        self._check_partition()
        if self.labels_are_numbers:
            self._check_numbers()
        if self.anomaly is not None:
            self._check_anomaly()
        return self

    def _check_anomaly(self) -> None:
        """Nothing is learnt from labels, and the classes are two."""
        given = [key for key in ("classes", "labelled") if getattr(self, key) is not None]
        if given or self.labels_are_numbers:
            raise ValueError(
                f"anomaly: the classes are {' and '.join(ANOMALY_CLASSES)}, and no label is learnt "
                f"from; leave {' and '.join(given) or 'numeric_labels'} out"
            )
        if self.horizontal or self.labels_at:
            raise ValueError(
                f"anomaly: the active alone knows it; leave "
                f"{'partition' if self.horizontal else 'labels_at'} out"
            )
        known = () if self.dataset == TABLES else find_dataset(self.dataset).classes
        if known and self.anomaly not in known:
            raise ValueError(f"anomaly: {self.dataset} has the classes {', '.join(known)}")

    def _check_numbers(self) -> None:
        """What is cut by classes, or known to several parties, needs classes."""
        by_class = [key for key in ("classes", "rows_per_class") if getattr(self, key) is not None]
        if by_class:
            raise ValueError(
                f"{' and '.join(by_class)}: the labels of {self.dataset} are numbers and no "
                "classes; leave it out"
            )
        if self.horizontal or self.labels_at:
            raise ValueError(
                f"{'partition' if self.horizontal else 'labels_at'}: labels that are numbers are "
                "the active's alone; take partition: vertical without labels_at"
            )

    def _check_own_tables(self) -> None:
        given = [key for key in _OF_BUILT_IN if getattr(self, key) is not None]
        if given:
            raise ValueError(
                f"dataset: {TABLES} takes its views from parties and view_columns, and people as "
                f"they are; leave {' and '.join(given)} out"
            )
        if not self.parties or len(self.parties) < 2:
            raise ValueError(f"dataset: {TABLES} needs at least two entries in parties")
        if self.active not in self.parties:
            raise ValueError(
                f"active: {self.active!r} is not one of parties: {', '.join(self.parties)}"
            )
        if (self.horizontal or self.labels_at) and self.classes is None:
            raise ValueError(
                "classes: several parties hold labels, and must number them alike; list the "
                "classes, as classes: ['no', 'yes']"
            )

    def _check_built_in(self) -> None:
        given = [key for key in ("parties", "classes", "view_columns", "numeric_labels")
                 if getattr(self, key) not in (None, False)]  # fmt: skip
        if given:
            raise ValueError(
                f"{' and '.join(given)} belong to dataset: {TABLES}, not to {self.dataset}"
            )
        dataset = find_dataset(self.dataset)
        if self.natural_views is not None:
            known = dataset.natural_views
            unknown = [view for view in self.natural_views if view not in known]
            if unknown or len(set(self.natural_views)) != len(self.natural_views):
                raise ValueError(
                    f"natural_views: expected different ones of {', '.join(known) or 'none'}, "
                    f"which {self.dataset} has; got {', '.join(self.natural_views)}"
                )
        if self.horizontal:
            self._check_horizontal()
        elif self.columns is not None:
            self._check_columns(dataset)
        else:
            self._check_views(dataset)

    def _check_horizontal(self) -> None:
        """What cuts features or people apart belongs to the vertical partition."""
        plain = DataSettings.model_fields
        given = [key for key in ("views", "active_view", "columns", "overlap", "aligned")
                 if getattr(self, key) != plain[key].default]  # fmt: skip
        if given:
            raise ValueError(
                f"partition: horizontal gives every party all features of people of its own; leave "
                f"{' and '.join(given)} out, or take partition: vertical"
            )

    def _check_columns(self, dataset: DataSet) -> None:
        if dataset.height is not None:
            raise ValueError(
                f"{self.dataset} holds images, which views cut; columns are for tables"
            )
        if BUILT_IN_ACTIVE not in (self.columns or {}) or self.view_count < 2:
            raise ValueError(
                "columns needs an entry for active and one for each passive, such as passive-1"
            )
        if self.views is not None or self.natural_views is not None:
            raise ValueError("give columns or views, not both")

    def _check_views(self, dataset: DataSet) -> None:
        natural = len(self.natural_views or dataset.natural_views)
        if dataset.height is None and self.views not in (None, natural):
            raise ValueError(
                f"views: {self.dataset} is a table of {natural} natural views, got "
                f"{self.views}; leave views out or cut it with columns"
            )
        if dataset.height is not None and self.view_count > dataset.height:
            raise ValueError(
                f"views: an image of {self.dataset} has {dataset.height} rows, fewer than "
                f"{self.views} views"
            )
        if self.view_count < 2:
            raise ValueError(
                "natural_views: a vertical partition is of two views at least; name another, or "
                "take partition: horizontal"
            )
        if self.active_view > self.view_count:
            raise ValueError(
                f"active_view: must be 1 to {self.view_count}, the number of views, got "
                f"{self.active_view}"
            )

    def _check_partition(self) -> None:
        if self.rows is not None and self.rows_per_class is not None:
            raise ValueError("give rows or rows_per_class, not both")
        if self.aligned is not None and self.overlap != 1:
            raise ValueError("give aligned or overlap, not both")
        if self.clients is not None and not self.horizontal:
            raise ValueError("clients: is the number of parties under partition: horizontal only")
        if self.labels_at and self.horizontal:
            raise ValueError(
                "labels_at: under partition: horizontal all parties hold labels; leave it out"
            )
        passives = self.party_names[1:]
        unknown = [name for name in self.labels_at if name not in passives]
        if unknown:
            raise ValueError(
                f"labels_at: {', '.join(unknown)} is no passive; there are {', '.join(passives)}"
            )

    @property
    def view_count(self) -> int:
        """The number of parties with features: m."""
        if self.dataset == TABLES:
            return len(self.parties or ())
        if self.horizontal:
            return self.clients or _CLIENTS
        if self.columns is not None:
            return len(self.columns)
        if self.natural_views is not None:
            return len(self.natural_views)
        return self.views or find_dataset(self.dataset).views
