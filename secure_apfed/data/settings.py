"""What a run says about its data: which set, how it is cut between parties, who knows whom."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from secure_apfed.data.catalogue import TABLES, find_dataset
from secure_apfed.data.column_encoding import Missing
from secure_apfed.data.partition import BUILT_IN_ACTIVE
from secure_apfed.errors import ConfigError
from secure_apfed.names import ByParty, PartyName
from secure_apfed.settings import Settings

__all__ = ["DataSettings", "PartySettings"]

Share = Annotated[float, Field(gt=0, lt=1)]


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
        encoding: JSON file with the encoding to use, or a model card that holds one; null fits
            means, scales and categories to the party's own rows, which they then tell of.
    """

    file: Path
    id_column: str | tuple[str, ...] | None = None
    numeric: tuple[str, ...] | None = None
    categorical: tuple[str, ...] | None = None
    ignore: tuple[str, ...] = ()
    missing: Missing = "error"
    encoding: Path | None = None


class DataSettings(Settings):
    """The data of one run.

    Attributes:
        dataset: a key of `DATASETS`, or "tables" for the parties' own files.
        views: m, the strips that an image is cut into; null takes the catalogue's number.
            Sets of tables have natural views, whose number is fixed.
        active_view: i, the view that the active holds, from 1.
        overlap: the share of each passive's training people that the active knows too, and
            the other way round; 1 is all. Own tables overlap as they do.
        test_fraction: of the active's rows, where the set has no official split.
        split: "by_class" takes that share of each class, so that a label moves the split;
            "at_random" reads no label.
        limit: at most this many training rows at the active, after a seeded shuffle.
        labelled: how many of the active's training rows have a label to learn from, as a number
            of rows or, below 1, as a share; null: all that have one. The labels of the others
            reach nothing that trains. In own tables a row without a label is one with an empty
            cell.
        labelled_choice: "by_class" takes of each class by its share, one row at least;
            "at_random" reads no label.
        folder: where to look for files; null takes SECURE_APFED_DATA (a list with the
            system's path separator), else ~/.cache/secure-apfed.
        columns: party -> columns by name, or by position from 0, for sets of tables; the
            party called "active" is required.
        parties: party -> its file, for `dataset: tables`.
        active: which of `parties` is the active.
        id_column: columns that name a row in every party's file, unless the party differs.
        label_column: the active's column of labels.
        classes: the labels in the order of the network's outputs; null infers them.
    """

    dataset: str = "digits"
    views: int | None = Field(None, ge=2)
    active_view: int = Field(1, ge=1)
    overlap: float = Field(1.0, gt=0, le=1)
    test_fraction: float = Field(0.25, gt=0, lt=1)
    split: Literal["by_class", "at_random"] = "by_class"
    limit: int | None = Field(None, ge=1)
    labelled: Annotated[int, Field(ge=2)] | Share | None = None
    labelled_choice: Literal["by_class", "at_random"] = "by_class"
    folder: Path | None = None
    columns: ByParty[tuple[int | str, ...]] | None = None
    parties: ByParty[PartySettings] | None = None
    active: PartyName = "active"
    id_column: str | tuple[str, ...] = "id"
    label_column: str = "label"
    classes: tuple[str, ...] | None = Field(None, min_length=2)

    @property
    def active_name(self) -> str:
        """The active party's name: built-in sets have parties of their own."""
        return self.active if self.dataset == TABLES else BUILT_IN_ACTIVE

    @field_validator("dataset")
    @classmethod
    def _dataset_exists(cls, name: str) -> str:
        try:
            return name if name == TABLES else find_dataset(name).name
        except ConfigError as error:
            raise ValueError(str(error)) from error

    @model_validator(mode="after")
    def _fits_the_dataset(self) -> Self:
        if self.dataset == TABLES:
            self._check_own_tables()
        elif self.parties is not None or self.classes is not None:
            raise ValueError(
                f"parties and classes belong to dataset: {TABLES}, not to {self.dataset}"
            )
        else:
            self._check_views()
        return self

    def _check_own_tables(self) -> None:
        if self.views is not None or self.columns is not None:
            raise ValueError(
                f"dataset: {TABLES} takes its views from parties; leave views and columns out"
            )
        if not self.parties or len(self.parties) < 2:
            raise ValueError(f"dataset: {TABLES} needs at least two entries in parties")
        if self.active not in self.parties:
            raise ValueError(
                f"active: {self.active!r} is not one of parties: {', '.join(self.parties)}"
            )

    def _check_views(self) -> None:
        dataset = find_dataset(self.dataset)
        if self.columns is not None:
            if dataset.height is not None:
                raise ValueError(
                    f"{self.dataset} holds images, which views cut; columns are for tables"
                )
            if "active" not in self.columns or len(self.columns) < 2:
                raise ValueError(
                    "columns needs an entry for active and one for each passive, such as passive-1"
                )
            if self.views is not None:
                raise ValueError("give columns or views, not both")
            return
        if dataset.height is None and self.views not in (None, dataset.views):
            raise ValueError(
                f"views: {self.dataset} is a table of {dataset.views} natural views, got "
                f"{self.views}; leave views out or cut it with columns"
            )
        if dataset.height is not None and self.view_count > dataset.height:
            raise ValueError(
                f"views: an image of {self.dataset} has {dataset.height} rows, fewer than "
                f"{self.views} views"
            )
        if self.active_view > self.view_count:
            raise ValueError(
                f"active_view: must be 1 to {self.view_count}, the number of views, got "
                f"{self.active_view}"
            )

    @property
    def view_count(self) -> int:
        """The number of parties with features: m."""
        if self.dataset == TABLES:
            return len(self.parties or ())
        if self.columns is not None:
            return len(self.columns)
        return self.views or find_dataset(self.dataset).views
