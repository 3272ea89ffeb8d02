"""Tables of studies: columns define how a row is read and shown, in every output format.

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

from apfed_attacks.headlines import list_directions
from apfed_attacks.interface import NOT_ATTACKED
from apfed_experiments.summary import Gain, Interval, Row, adjust_p_values
from secure_apfed.base.files import to_csv, write_atomically
from secure_apfed.settings import RunSettings
from secure_apfed.settings.promises import spell_epsilon

Formatter: TypeAlias = Callable[[Any], str]
"""Function that writes a value for people."""


def make_formatter(
    number_format: str, *, scale: float = 1.0, minimum: float = -math.inf, maximum: float = math.inf
) -> Formatter:
    """Return a function that formats an interval or a number; it leaves text unchanged.

    Args:
        number_format: format specification of one number.
        scale: factor of the written numbers.
        minimum, maximum: least and greatest possible value, before scaling; intervals end there.
    """

    def format_value(value: Interval | float | str) -> str:
        """Return an interval with its ends clipped, a number in the form, or the text itself."""
        if isinstance(value, Interval):
            return value.clip_ends(minimum, maximum).format_text(
                scale=scale, number_format=number_format
            )
        return value if isinstance(value, str) else f"{scale * value:{number_format}}"

    return format_value


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of a study's table.

    Attributes:
        name: key of the column's value in a row; a row without it is exported without this column.
        title: header; None: the column is exported to programs but not shown to people.
        format_value: function that returns the text of a value.
        missing_text: text of a cell whose value is None.
        make_note: function of the row, whose text follows the value in brackets; empty: no
            brackets.
        export_keys: names of the exported numbers. None: the column's name; (): nothing is
            exported; three names for an interval's mean, low and high; as many as a tuple has
            parts.
        export_scale: factor of the exported numbers.
    """

    name: str
    title: str | None = None
    format_value: Formatter = str
    missing_text: str = ""
    make_note: Callable[[Row], str] = lambda row: ""
    export_keys: tuple[str, ...] | None = None
    export_scale: float = 1.0

    def format_cell(self, row: Row) -> str:
        """Return the text of this column's cell of a row, with its note in brackets."""
        value = row.get(self.name)
        if value is None:
            return self.missing_text
        note = self.make_note(row)
        text = self.format_value(value)
        return f"{text} ({note})" if note else text

    def export_fields(self, row: Row) -> Row:
        """Return the values of this column's cell by key, for programs.

        A column with several keys exports one number for each, NaN for a missing value. The result
        is empty if the row lacks the column, or the column is not exported.
        """
        keys = (self.name,) if self.export_keys is None else self.export_keys
        if self.name not in row or not keys:
            return {}
        value = row[self.name]
        if len(keys) == 1:
            (key,) = keys
            # Only numbers have a scale; other values, such as intervals, are exported whole.
            return {
                key: self.export_scale * value if self.export_scale != 1.0 else export_value(value)
            }
        if value is None:
            return dict.fromkeys(keys, math.nan)
        numbers = value if isinstance(value, tuple) else astuple(value)
        return {key: self.export_scale * number for key, number in zip(keys, numbers, strict=True)}


def format_epsilon(epsilon: float) -> str:
    """Return an epsilon as text: a number, "no guarantee" for infinity, or that nothing is sent for
    0.
    """
    return spell_epsilon(epsilon or None)


EPSILON = Column(name="epsilon", title="epsilon", format_value=format_epsilon)
P_HOLM = Column(
    name="p_holm",
    title="p, Holm",
    format_value=lambda p: "" if math.isnan(p) else "< 0.001" if p < 0.001 else f"{p:.2g}",
)


def make_percent_formatter(number_format: str = ".1f") -> Formatter:
    """Return a function that formats a share, 0 to 1, or its interval in per cent."""
    return make_formatter(number_format, scale=100, minimum=0.0, maximum=1.0)


ACCURACY_SHARE = Column(
    name="accuracy",
    title="accuracy %",
    format_value=make_percent_formatter(),
    export_keys=("accuracy", "accuracy_low", "accuracy_high"),
)


def make_points_formatter(number_format: str = "+.1f") -> Formatter:
    """Return a function that formats a difference of two shares in percentage points."""
    return make_formatter(number_format, scale=100, minimum=-1.0, maximum=1.0)


def describe_missing_attack(config: RunSettings, direction_title: str) -> str:
    """Return why no attack ran in a leak direction: "not applicable" with a reason, or "not
    attacked".

    `direction_title`: title of the direction, who reads whose what, such as "passive reads labels".
    """
    reason_by_kind = {
        direction.kind: reason for direction, reason in list_directions(config).items()
    }
    reason = reason_by_kind.get(direction_title, "")
    return f"not applicable: {reason}" if reason else NOT_ATTACKED


def make_hidden_columns(*names: str) -> tuple[Column, ...]:
    """Return columns that are exported under these names and not shown to people."""
    return tuple(Column(name=name) for name in names)


def make_visible_column(
    name: str, title: str, format_value: Formatter = str, *, missing_text: str = ""
) -> Column:
    """Return a column that is shown to people and not exported.

    `format_value`: function that returns the text of a value. `missing_text`: text of a cell
    without a value.
    """
    return Column(
        name=name, title=title, format_value=format_value, missing_text=missing_text, export_keys=()
    )


@dataclass(frozen=True)
class Table:
    """Rows of a study with the columns that show and export them."""

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
        visible_columns = [column for column in self.columns if column.title is not None]
        return [tuple(column.format_cell(row) for column in visible_columns) for row in self.rows]

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
        """Return the visible cells as Markdown, followed by the notes as paragraphs."""
        return format_markdown(self.header, self.cells) + "".join(f"\n{note}\n" for note in notes)

    def format_csv(self) -> str:
        """Return the exported rows as CSV; nested values have columns with dotted names."""
        return to_csv(pd.json_normalize(self.export_rows()))


def format_markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of these texts, each row as long as the header; it ends with a line break."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def make_plain_table(rows: Sequence[Row], title: str = "") -> Table:
    """Return a table with a column for every key of these rows, and three digits of each number."""

    def format_value(value: object) -> str:
        """Return a value as text, numbers with three digits."""
        return make_formatter(".3g")(value) if isinstance(value, Interval | float) else str(value)

    def format_epsilon_value(value: object) -> str:
        """Return an epsilon, or its interval over the seeds, as text."""
        if isinstance(value, Interval) and value.low == value.high:
            value = value.mean  # the same in every seed
        return format_epsilon(value) if isinstance(value, float) else format_value(value)

    names = dict.fromkeys(name for row in rows for name in row)
    formatter_by_name = dict.fromkeys(names, format_value)
    if "epsilon" in formatter_by_name:
        formatter_by_name["epsilon"] = format_epsilon_value
    columns = [
        Column(name=name, title=name, format_value=form) for name, form in formatter_by_name.items()
    ]
    return Table(columns, rows, title)


def export_value(value: Any) -> Any:
    """Return a row's value for programs.

    Dataclasses become dictionaries, and objects with `as_json` what that returns. Other values are
    unchanged.
    """
    if hasattr(value, "as_json"):
        return value.as_json()
    if isinstance(value, Mapping):
        return {key: export_value(inner) for key, inner in value.items()}
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def add_gain_p_values(rows: Sequence[Row], seed_count: int) -> None:
    """Set `p_holm` of every row: the p-value of its `gain`, adjusted for the number of rows (Holm).

    `gain` is a `Gain` or an interval; None or missing: `p_holm` is NaN. `seed_count`: number of
    seeds.
    """
    gains = [row.get("gain") for row in rows]
    intervals = [gain.gain_over_chosen if isinstance(gain, Gain) else gain for gain in gains]
    for row, p_value in zip(rows, adjust_p_values(intervals, seed_count), strict=True):
        row["p_holm"] = p_value


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically, so that nobody reads half of it."""
    write_atomically(path, text.encode())
