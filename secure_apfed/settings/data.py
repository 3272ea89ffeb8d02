"""The settings of a run's data: the data set, its division between parties, and the people of each
party.

`secure_apfed.data.catalogue.check_data` checks that the set exists and can be divided so.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import Field, field_validator, model_validator

from secure_apfed.base.names import ByParty, ColumnName, DateFormat, Name, PartyName
from secure_apfed.settings import Settings, protects
from secure_apfed.settings.plugins import IMPORT_PATH, trust_own_code

OWN_TABLES = "tables"
"""Value of `dataset` for the parties' own tables."""

ROWS_BY_OWN_CODE = "own"
"""Value of `rows` for code that the party names in its own file."""

BUILT_IN_ACTIVE_NAME = "active"
"""The active's name where the set is built in."""

MAX_PARTIES = 1024
"""Largest number of parties of a run, since each has links to the others."""

MAX_CATEGORIES = 256
"""Largest number of categories of one column that get a feature each."""

# Where a database's password may be.
_CREDENTIALS_FORM = "{env: NAME}, or {file: PATH} of a file of mode 600"
# The password in a URL as SQLAlchemy finds it, or under these keys after the question mark.
_PASSWORD_PATTERN = re.compile(
    r"[\w+.-]+://([^:/]*:[^@]*@|.*[?&;][^=]*(pass|pwd|secret|token|odbc_connect)[^=]*=)", re.I
)
# What is no SQL: texts, names in quotes and comments.
_QUOTED_SQL = re.compile(
    r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|`[^`]*`|\$(\w*)\$.*?\$\1\$|--[^\n]*|/\*.*?\*/""", re.S
)
_WRITING_KEYWORDS = r"\b(insert|update|delete|merge|into|create|drop|alter|truncate)\b"

Missing: TypeAlias = Literal["error", "mean", "drop"]
_Share = Annotated[float, Field(gt=0, lt=1)]
_Views: TypeAlias = (
    Annotated[int, Field(ge=2, le=MAX_PARTIES)]
    | Annotated[tuple[str, ...], Field(min_length=1, max_length=MAX_PARTIES)]
)
_Count = Annotated[int, Field(ge=1)]


class RareCategories(Settings):
    """The encoding of columns with many categories.

    Attributes:
        most: the number of most frequent categories that get a feature each. Null: 256, and a
            column with more is refused.
    """

    most: int | None = Field(None, ge=1, le=MAX_CATEGORIES)


class ViewColumns(Settings):
    """A view by the raw columns that it is made of.

    Attributes:
        columns: the names of the view's columns, in order.
        sequence: [steps, channels] of a view of sequences. It has 1 + steps * channels columns: the
            number of steps in use, then step after step; null: plain columns.
    """

    columns: tuple[ColumnName, ...] = Field(min_length=1)
    sequence: tuple[_Count, _Count] | None = None

    @model_validator(mode="after")
    def _check_columns(self) -> Self:
        """Refuse repeated columns, and another number of columns than the sequence needs."""
        if len(set(self.columns)) != len(self.columns):
            raise ValueError("columns: a column is listed twice; a view has it once")
        if self.sequence is None:
            return self
        steps, channels = self.sequence
        column_count = 1 + steps * channels  # the first says how many steps are in use
        if len(self.columns) != column_count:
            raise ValueError(
                f"sequence: {steps} steps of {channels} channels and the number of steps in use "
                f"are {column_count} columns, got {len(self.columns)}"
            )
        return self


class Database(Settings):
    """A party's rows as a query of its own database; needs the extra `sql`.

    Attributes:
        url: the address as SQLAlchemy takes it, without a password:
            postgresql+psycopg://reader@host/name. Or sqlite:///crm.db, duckdb:///crm.duckdb;
            relative paths of files start as `file` does.
        query: one SELECT with an ORDER BY. Without an order, rows could differ from session to
            session.
        credentials: where the password is: {env: NAME}, an environment variable, or {file: PATH},
            of mode 600. Null: the database needs none.
    """

    url: str
    query: str
    credentials: dict[Literal["env", "file"], str] | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_url_and_credentials(cls, given_settings: Any) -> Any:
        """Refuse malformed settings here, before validation, since pydantic's errors would show
        their values, among them a password.

        `given_settings`: the settings as they were given.
        """
        values = given_settings.__dict__ if isinstance(given_settings, Database) else given_settings
        if not isinstance(values, Mapping):
            raise ValueError("expected url and query, and credentials where it asks for a password")
        url = str(values.get("url"))
        credentials = values.get("credentials")
        if _PASSWORD_PATTERN.match(url):
            raise ValueError(
                "url: it holds a password, which would stand in every copy of this file; leave it "
                f"out, and say where it is: credentials: {_CREDENTIALS_FORM}"
            )
        if not re.match(r"\w[\w+]*://", url):
            raise ValueError(
                "url: expected one as sqlite:///crm.db or postgresql+psycopg://me@host/x"
            )
        has_one_place = isinstance(credentials, Mapping) and [*credentials] in (["env"], ["file"])
        if credentials is not None and not has_one_place:
            raise ValueError(f"credentials: expected {_CREDENTIALS_FORM}")
        return given_settings

    @field_validator("query")
    @classmethod
    def _check_query(cls, query: str) -> str:
        """Refuse a query that is not one ordered SELECT, or that could write."""
        # Without texts, quoted names and comments, in which any word may stand.
        sql_without_quotes = _QUOTED_SQL.sub(" ", query).strip().rstrip("; \n").lower()
        if ";" in sql_without_quotes:
            raise ValueError("has several statements; give one SELECT")
        if not re.match(r"(select|with)\b", sql_without_quotes):
            raise ValueError("is no SELECT, which alone reads a table")
        writing_keywords = re.findall(_WRITING_KEYWORDS, sql_without_quotes)
        if writing_keywords:
            raise ValueError(
                f"{writing_keywords[0].upper()} writes, and a table is only read; quote it if it "
                "is a name"
            )
        if not re.search(r"\border\s+by\b", sql_without_quotes):
            raise ValueError("has no ORDER BY: any row may come first")
        return query


class PartySettings(Settings):
    """A party's own table, for `dataset: tables`.

    Attributes:
        file: a CSV, Parquet or Arrow file, a folder of such files, or a pattern. An example is
            sales/2026-*.csv. A relative path starts at `data.folder`, or at the working directory
            if no folder is given. Null: a query, or the table is only at that party.
        database: a query instead of a file.
        rows: arrays instead of columns: a file (.npy, .npz, .safetensors), a folder of images, or
            code, such as my_data:make_rows; "own": code that the party names in its own file. Row k
            of a file belongs to line k of the table; the table's one further column names the
            images. Without a table, IDs and labels come with the rows. Nothing is standardised.
            Null: columns.
        id_column: one or several columns that identify a row; null takes `data.id_column`.
        numeric: columns to standardise, regardless of their cells' form.
        categorical: columns to one-hot encode. Words such as NA and None are categories there, and
            only a blank cell is empty. Columns in neither list are read by their type.
        ignore: columns to leave out, also from the two lists; all others are used.
        missing: what to do with empty cells: "error" refuses them, "mean" replaces them by the
            column's mean or by no category, "drop" leaves the row out. Null takes `data.missing`.
        date_formats: how dates are written besides 2026-01-31, such as "%d.%m.%Y": columns whose
            cells are all such dates become days since 1970-01-01. Null takes `data.date_formats`.
        rare_categories: how columns with many categories are encoded.
        encoding: a JSON file with the encoding to use, or a model card with one; null fits the
            encoding to the party's own rows. The card then reveals means, scales and categories.
    """

    file: Path | None = None
    database: Database | None = None
    rows: str | None = None
    id_column: ColumnName | tuple[ColumnName, ...] | None = None
    numeric: tuple[ColumnName, ...] | None = None
    categorical: tuple[ColumnName, ...] | None = None
    ignore: tuple[ColumnName, ...] = ()
    missing: Missing | None = None
    date_formats: tuple[DateFormat, ...] | None = None
    rare_categories: RareCategories = RareCategories()
    encoding: Path | None = None

    @property
    def table_name(self) -> str:
        """The table's name in errors: its file, or "its query"."""
        return "its query" if self.file is None else str(self.file)

    @property
    def has_table(self) -> bool:
        """True if the settings name a table of IDs, labels and columns."""
        return self.file is not None or self.database is not None

    @property
    def is_read_from_file(self) -> bool:
        """True if the settings name a file of the table or rows, and no code makes its rows."""
        names_a_file = self.file is not None or (self.rows is not None and not self.has_table)
        return names_a_file and self.rows_import_path is None

    @property
    def rows_import_path(self) -> str | None:
        """The code that makes its rows, as package.module:Name, or "own"; None: no code."""
        rows = self.rows or ""
        return rows if rows == ROWS_BY_OWN_CODE or IMPORT_PATH.fullmatch(rows) else None

    @model_validator(mode="after")
    def _check_rows_settings(self) -> Self:
        """Refuse settings of columns beside `rows`, whose arrays are taken as they are.

        Code that the party's own settings name in `rows` is noted, to be imported later.
        """
        if self.rows is None:
            return self
        if self.rows_import_path not in (None, ROWS_BY_OWN_CODE):
            trust_own_code(self.rows)
        column_keys = ("numeric", "categorical", "encoding")
        given_keys = [key for key in column_keys if getattr(self, key) is not None]
        if given_keys:
            raise ValueError(
                f"rows: they are taken as they are, and {', '.join(given_keys)} is of columns; "
                "leave one of the two out"
            )
        return self

    @model_validator(mode="after")
    def _check_one_source(self) -> Self:
        """Refuse a table given both as a file and as a database query."""
        if self.file is not None and self.database is not None:
            raise ValueError("give the table as file or as database, one of the two")
        return self

    @model_validator(mode="after")
    def _check_column_lists(self) -> Self:
        """Refuse a column listed as numeric and as categorical."""
        ignored = set(self.ignore)  # left out of both lists
        categorical = set(self.categorical or ())
        listed_twice = [
            name for name in self.numeric or () if name in categorical and name not in ignored
        ]
        if listed_twice:
            raise ValueError(
                f"{', '.join(listed_twice)} is listed under numeric and under categorical; leave "
                "it in one"
            )
        return self


class TableShape(Settings):
    """The facts about its own table that a party reveals before a run, so that others can plan.

    Attributes:
        rows: rounded to two digits; features: numbers that a row is encoded to.
        labelled: rows with a label to learn from, rounded, and classes (0: they are numbers), at a
            party with labels.
        columns: names of the columns, if the party reveals them.
    """

    rows: int = Field(1000, ge=1, le=2**32)
    features: int = Field(10, ge=1, le=2**20)
    labelled: int | None = Field(None, ge=0, le=2**32)
    classes: int | None = Field(None, ge=0, le=2**16)
    columns: Annotated[tuple[ColumnName, ...], Field(max_length=2**12)] | None = None


class DataSettings(Settings):
    """The data of one run.

    Attributes:
        dataset: a key of `DATASETS`, or "tables" for the parties' own files.
        partition: "vertical" gives each party different features of the same people, "horizontal"
            gives each party different people with all features and labels. Each party gets equally
            many people of each class. The test rows are the active's. Your own tables stay as they
            are.
        clients: the number of parties under a horizontal partition of a built-in set; null takes 4.
        labels_at: passives that also have labels of their own people, except of test rows.
        views: for images, the number of strips; for tables, the names of natural views, in order.
            Null takes the catalogue's number, or all.
        active_view: the number of the view that the active has, from 1.
        rows: the largest number of people to take from a built-in set. They are drawn before
            anything else. Null takes all.
        rows_per_class: how many people to draw of each class, instead of `rows`.
        overlap: the share of each passive's training people that the active has too, and vice
            versa. Your own tables overlap as they do.
        aligned: how many of the active's training people all passives have, instead of `overlap`.
            Besides these and the test rows, passives have no people.
        test_fraction: the share of the active's rows that are test rows, if the set has no official
            split.
        split: how test rows and labelled rows are drawn: "by_class" (stratified) or "at_random"
            (reads no label). The first draws at least one labelled row of each class; a changed
            label changes the split.
        limit: the largest number of training rows at the active, after a seeded shuffle.
        labelled: how many of the active's training rows have a label to learn from, or, below 1,
            which share. Null: all that have one. No training reads the other labels. In your own
            tables a row without a label has an empty cell. Passives with labels have as many, drawn
            from their own rows.
        memory_map: whether own tables are read by columns and blocks, and stay on disk in training:
            "always", "never", or "auto", from 1 GiB of files on. The result is the same; local
            baselines learn from a sample. The disk is that of TMPDIR, else of /var/tmp.
        folder: where to look for files; null takes SECURE_APFED_DATA, else ~/.cache/secure-apfed.
            The first is a list with the system's path separator.
        columns: for built-in tables, the columns of each party, by name or by position from 0. The
            party called "active" is required.
        view_columns: for your own tables, the columns of each view. A party has the views whose
            columns it has, and these must be all of its columns. Null: one view for each party.
        parties: the table of each party, for `dataset: tables`.
        missing: what all parties do with empty cells, unless a party's own setting differs.
        date_formats: how dates are written at all parties, unless a party's own setting differs.
        active: the name of the active among `parties`.
        id_column: the columns that identify a row in every party's file, unless a party's own
            setting differs.
        label_column: the column of labels, at each party with labels.
        classes: the labels in the order of the network's outputs; null infers them from the
            active's. Other parties with labels cannot infer them. "numbers" means no classes; this
            is the default of your own tables under `task: regression`, and splits then read no
            label.
        positive: for two classes, the positive one: average precision, F1, lift, thresholds and
            calibration refer to it, and it is the network's second output. Null: of own tables
            whose classes are inferred the rarer of the active's labels, or the last in order where
            `split` is at_random, which reads no label; otherwise the last of the listed classes.
    """

    dataset: Annotated[str, protects("nobody")] = "digits"
    partition: Annotated[Literal["vertical", "horizontal"], protects("nobody")] = "vertical"
    clients: Annotated[int | None, protects("nobody")] = Field(None, ge=2, le=MAX_PARTIES)
    labels_at: Annotated[
        tuple[PartyName, ...],
        protects("the passives", higher="labels that they hold are read out of sums or updates"),
    ] = ()
    views: Annotated[_Views | None, protects("nobody")] = None
    active_view: Annotated[int, protects("nobody")] = Field(1, ge=1)
    rows: Annotated[int | None, protects("nobody")] = Field(None, ge=2)
    rows_per_class: Annotated[int | None, protects("nobody")] = Field(None, ge=2)
    overlap: Annotated[float, protects("nobody")] = Field(1.0, gt=0, le=1)
    aligned: Annotated[int | None, protects("nobody")] = Field(None, ge=1)
    test_fraction: Annotated[float, protects("nobody")] = Field(0.25, gt=0, lt=1)
    split: Annotated[Literal["by_class", "at_random"], protects("nobody")] = "by_class"
    limit: Annotated[int | None, protects("nobody")] = Field(None, ge=1)
    labelled: Annotated[Annotated[int, Field(ge=2)] | _Share | None, protects("nobody")] = None
    memory_map: Annotated[Literal["auto", "always", "never"], protects("nobody")] = "auto"
    folder: Annotated[Path | None, protects("nobody")] = None
    columns: Annotated[ByParty[tuple[int | str, ...]] | None, protects("nobody")] = None
    view_columns: Annotated[dict[Name, ViewColumns] | None, protects("nobody")] = Field(
        None, min_length=1
    )
    parties: Annotated[
        Annotated[ByParty[PartySettings], Field(max_length=MAX_PARTIES)] | None, protects("nobody")
    ] = None
    missing: Annotated[Missing, protects("nobody")] = "error"
    date_formats: Annotated[tuple[DateFormat, ...], protects("nobody")] = ()
    active: Annotated[PartyName, protects("nobody")] = "active"
    id_column: Annotated[ColumnName | tuple[ColumnName, ...], protects("nobody")] = "id"
    label_column: Annotated[ColumnName, protects("nobody")] = "label"
    classes: Annotated[
        Annotated[tuple[str, ...], Field(min_length=2)] | Literal["numbers"] | None,
        protects("nobody"),
    ] = None
    positive: Annotated[str | None, protects("nobody")] = None

    def collect_terms(self) -> dict[str, Any]:
        """Return the settings that all parties sign: which parties have labels and, if several do,
        the classes in their order.

        All other settings of data concern single parties.
        """
        keys = {"partition", "labels_at"}
        if self.is_horizontal or self.labels_at:
            keys.add("classes")
            if self.positive is not None:
                keys.add("positive")
        return self.model_dump(mode="json", include=keys)

    @property
    def explicit_views(self) -> tuple[str, ...]:
        """The listed names of views; empty if `views` is a number or not given."""
        return self.views if isinstance(self.views, tuple) else ()

    @property
    def explicit_classes(self) -> tuple[str, ...]:
        """The listed classes; empty if they are inferred, or if labels are numbers."""
        return self.classes if isinstance(self.classes, tuple) else ()

    @property
    def active_name(self) -> str:
        """The active party's name; built-in sets have fixed names."""
        return self.active if self.dataset == OWN_TABLES else BUILT_IN_ACTIVE_NAME

    @property
    def is_horizontal(self) -> bool:
        """True if parties have different people with the same features and labels."""
        return self.partition == "horizontal"

    def find_id_columns(self, party: str) -> tuple[str, ...]:
        """Return the columns that identify a row in the own table of the party `party`."""
        columns = (self.parties or {})[party].id_column or self.id_column
        return (columns,) if isinstance(columns, str) else columns

    def find_missing_rule(self, party: str) -> Missing:
        """Return how the party `party` treats empty cells."""
        return (self.parties or {})[party].missing or self.missing

    def find_date_formats(self, party: str) -> tuple[str, ...]:
        """Return the date formats in the own table of the party `party`."""
        own_formats = (self.parties or {})[party].date_formats
        return self.date_formats if own_formats is None else own_formats

    def has_labels(self, party: str) -> bool:
        """Return whether the party `party` has labels of its people."""
        return self.is_horizontal or party == self.active_name or party in self.labels_at

    @field_validator("classes")
    @classmethod
    def _check_class_names(
        cls, names: tuple[str, ...] | str | None
    ) -> tuple[str, ...] | str | None:
        """Return class names without outer blanks. Raises ValueError: one is named twice."""
        if not isinstance(names, tuple):
            return names
        if len(set(map(str.strip, names))) < len(names):
            raise ValueError(f"a class is named twice among {', '.join(names)}; name each once")
        return tuple(map(str.strip, names))

    @model_validator(mode="after")
    def _check_positive_class(self) -> Self:
        """Refuse a positive class unless it is one of two classes."""
        if self.positive is None:
            return self
        if self.classes == "numbers":
            raise ValueError("positive: it is one of two classes, and labels are numbers here")
        if self.classes is not None and (
            len(self.classes) != 2 or self.positive not in self.classes
        ):
            raise ValueError(
                f"positive: expected one of two classes, got {self.positive!r} of "
                f"{', '.join(self.classes)}; correct it, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _check_division(self) -> Self:
        """Refuse settings that contradict each other on how people are divided."""
        if self.rows is not None and self.rows_per_class is not None:
            raise ValueError("give rows or rows_per_class, not both")
        if self.aligned is not None and self.overlap != 1:
            raise ValueError("give aligned or overlap, not both")
        if self.clients is not None and not self.is_horizontal:
            raise ValueError("clients: is the number of parties under partition: horizontal only")
        if self.labels_at and self.is_horizontal:
            raise ValueError(
                "labels_at: under partition: horizontal all parties hold labels; leave it out"
            )
        return self
