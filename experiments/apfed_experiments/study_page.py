"""How studies are written: one form of tables, one style of pictures, one page.

Nothing is written through a link: files are made beside their place and moved there.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
from matplotlib.figure import Figure

from apfed_experiments.drawing import ATTACK, OTHER, OURS, STYLE, Picture
from apfed_experiments.report.page import fill, inside
from apfed_experiments.summary import Interval, Row
from apfed_experiments.words import number
from secure_apfed.files import write_atomically

__all__ = [
    "ATTACK", "COLOURS", "OTHER", "OURS", "Part", "Picture", "drawing", "markdown", "number",
    "table_of", "write_comparison", "write_page", "write_text",
]  # fmt: skip

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
"""Okabe and Ito's (2008), which people with any colour vision can tell apart."""


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of these texts, each row as long as the header; it ends with a line break."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def table_of(
    rows: Sequence[Row], *, form: str = ".3g", missing: str = ""
) -> tuple[list[str], list[list[str]]]:
    """The columns that occur in these rows, and the texts of each; `form` is that of a number."""

    def text(value: object) -> str:
        if value is None:
            return missing
        if isinstance(value, Interval):
            return value.text(form=form)
        return f"{value:{form}}" if isinstance(value, float) else str(value)

    columns = list(dict.fromkeys(column for row in rows for column in row))
    return columns, [[text(row.get(column)) for column in columns] for row in rows]


def write_text(path: Path, text: str) -> None:
    """Write or replace a file, in UTF-8."""
    write_atomically(path, text.encode())


@contextmanager
def drawing(
    path: Path, size: tuple[float, float], *, layout: Literal["constrained"] | None = "constrained"
) -> Iterator[Figure]:
    """A figure, `size` in inches, that is written as a PNG when the block ends."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=size, layout=layout)
        yield figure
        pixels = BytesIO()
        figure.savefig(pixels, format="png")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, pixels.getvalue())


def write_page(folder: Path, template: str, *, pictures: Sequence[Picture], **values: Any) -> None:
    """Write index.html, which holds the pictures, from a template of the reports."""
    page = fill(template, pictures=[inside(picture) for picture in pictures], **values)
    write_text(folder / "index.html", page)


@dataclass(frozen=True, kw_only=True)
class Part:
    """One data set of a comparison.

    Attributes:
        rows: of its table.
        reports: label and address, relative to the page, of single runs' reports.
    """

    title: str
    picture: Picture
    rows: Sequence[Sequence[str]]
    reports: Sequence[tuple[str, str]] = ()


def write_comparison(
    folder: Path, *, title: str, reading: str, header: Sequence[str], parts: Sequence[Part]
) -> None:
    """Write index.html: how to read it, a picture and a table for each data set, links to runs."""
    write_page(
        folder, "comparison.html.jinja", pictures=(), title=title, reading=reading, header=header,
        parts=[
            {
                "title": part.title, "picture": inside(part.picture), "rows": part.rows,
                "reports": part.reports,
            }
            for part in parts
        ],
    )  # fmt: skip
