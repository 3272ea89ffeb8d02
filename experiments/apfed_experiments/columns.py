"""Tables of studies: columns say how a row is read and shown, and every output format follows.

A study makes rows of values by name; its columns say which of them people see and how, and under
which names programs find them. Text, JSON, CSV and Markdown are made here alone. Nothing is written
through a link: files are made beside their place and moved there.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, is_dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pandas as pd

from apfed_attacks.headlines import NOT_ATTACKED, list_directions
from apfed_experiments.summary import Gain, Interval, Row, adjust_p_values
from secure_apfed.base.files import to_csv, write_atomically
from secure_apfed.settings.promises import epsilon_words
from secure_apfed.settings.run import RunSettings

Form: TypeAlias = Callable[[Any], str]
"""Function that writes a value for people."""


def make_form(
    form: str, *, scale: float = 1.0, minimum: float = -math.inf, maximum: float = math.inf
) -> Form:
    """Return a function that formats an interval or a number; it leaves text unchanged.

    Args:
        form: of one number.
        scale: of what is written.
        minimum, maximum: that the value can be, before the scale; intervals end there.
    """

    def format_value(value: Interval | float | str) -> str:
        if isinstance(value, Interval):
            return value.clip_ends(minimum, maximum).format_text(scale=scale, form=form)
        return value if isinstance(value, str) else f"{scale * value:{form}}"

    return format_value


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of a study's table.

    Attributes:
        name: under which a row holds its value; a row without it has no cell, and programs no key.
        title: above it; None: people do not see it. form: of a value; missing: what stands for
            None.
        note: what stands behind it in brackets, of the row; empty: nothing.
        keys: for programs: none, the name alone, or those of an interval's mean, low and high (or
            of the parts of a tuple); scale: of the numbers for programs.
    """

    name: str
    title: str | None = None
    form: Form = str
    missing: str = ""
    note: Callable[[Row], str] = lambda row: ""
    keys: tuple[str, ...] | None = None
    scale: float = 1.0

    def format_cell(self, row: Row) -> str:
        """Return the text of this column's cell of a row, with its note in brackets."""
        value = row.get(self.name)
        if value is None:
            return self.missing
        note = self.note(row)
        return f"{self.form(value)} ({note})" if note else self.form(value)

    def export_fields(self, row: Row) -> Row:
        """Return the values of this column's cell by key, for programs."""
        keys = (self.name,) if self.keys is None else self.keys
        if self.name not in row or not keys:
            return {}
        value = row[self.name]
        if len(keys) == 1:
            return {keys[0]: self.scale * value if self.scale != 1.0 else export_value(value)}
        if value is None:
            value = (math.nan,) * len(keys)
        ends = value if isinstance(value, tuple) else astuple(value)
        return {key: self.scale * end for key, end in zip(keys, ends, strict=True)}


def format_epsilon(epsilon: float) -> str:
    """Return an epsilon that was spent: a figure, or in words that none is promised or needed."""
    return epsilon_words(epsilon or None)


EPSILON = Column(name="epsilon", title="epsilon", form=format_epsilon)
P_HOLM = Column(
    name="p_holm",
    title="p, Holm",
    form=lambda p: "" if math.isnan(p) else "< 0.001" if p < 0.001 else f"{p:.2g}",
)


def share_of_rows(form: str = ".1f") -> Form:
    """Return how an accuracy is written in per cent."""
    return make_form(form, scale=100, minimum=0.0, maximum=1.0)


ACCURACY_SHARE = Column(
    name="accuracy",
    title="accuracy %",
    form=share_of_rows(),
    keys=("accuracy", "accuracy_low", "accuracy_high"),
)


def difference_of_shares(form: str = "+.1f") -> Form:
    """Return how a difference of two accuracies is written in points."""
    return make_form(form, scale=100, minimum=-1.0, maximum=1.0)


def missing_leak(config: RunSettings, kind: str) -> str:
    """Return the text for a direction in which no attack ran; never a figure."""
    expected = {direction.kind: reason for direction, reason in list_directions(config).items()}
    reason = expected.get(kind, "")
    return f"not applicable: {reason}" if reason else NOT_ATTACKED


def make_hidden_columns(*names: str) -> tuple[Column, ...]:
    """Return columns that programs find under these names, and people do not see."""
    return tuple(Column(name=name) for name in names)


def make_visible_column(name: str, title: str, form: Form = str, *, missing: str = "") -> Column:
    """Return a column that people see, and programs do not find."""
    return Column(name=name, title=title, form=form, missing=missing, keys=())


@dataclass(frozen=True)
class Table:
    columns: Sequence[Column]
    rows: Sequence[Row]
    title: str = ""

    @property
    def header(self) -> tuple[str, ...]:
        """Return the titles of the visible columns."""
        return tuple(column.title for column in self.columns if column.title is not None)

    @property
    def cells(self) -> list[tuple[str, ...]]:
        """Return the texts of all visible cells, row by row."""
        visible = [column for column in self.columns if column.title is not None]
        return [tuple(column.format_cell(row) for column in visible) for row in self.rows]

    def export_rows(self) -> list[Row]:
        """Return all rows for programs, with the keys that their columns name."""
        return [
            {
                key: value
                for column in self.columns
                for key, value in column.export_fields(row).items()
            }
            for row in self.rows
        ]

    def format_markdown(self, notes: Iterable[str] = ()) -> str:
        return format_markdown(self.header, self.cells) + "".join(f"\n{note}\n" for note in notes)

    def format_csv(self) -> str:
        return to_csv(pd.json_normalize(self.export_rows()))


def format_markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of these texts, each row as long as the header; it ends with a line break."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def table_of(rows: Sequence[Row], title: str = "") -> Table:
    """Return a table of all that occurs in these rows, with three digits of each number."""

    def format_value(value: object) -> str:
        return make_form(".3g")(value) if isinstance(value, Interval | float) else str(value)

    def text_of_epsilon(value: object) -> str:
        if isinstance(value, Interval) and value.low == value.high:
            value = value.mean
        return format_epsilon(value) if isinstance(value, float) else format_value(value)

    names = dict.fromkeys(name for row in rows for name in row)
    columns = [
        Column(name=name, title=name, form=text_of_epsilon if name == "epsilon" else format_value)
        for name in names
    ]
    return Table(columns, rows, title)


def export_value(value: Any) -> Any:
    """Return a row's value for programs: a dataclass as a dictionary, unless it has its
    own export.
    """
    if hasattr(value, "as_json"):
        return value.as_json()
    if isinstance(value, Mapping):
        return {key: export_value(inner) for key, inner in value.items()}
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def add_p_values(rows: Sequence[Row], seeds: int) -> None:
    """Note `p_holm` of every row: of its `gain`, adjusted for all that these rows compare."""
    gains = [row.get("gain") for row in rows]
    improvements = [gain.over_chosen if isinstance(gain, Gain) else gain for gain in gains]
    for row, p in zip(rows, adjust_p_values(improvements, seeds), strict=True):
        row["p_holm"] = p


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically, so that nobody reads half of it."""
    write_atomically(path, text.encode())
