"""Tables as they should not be, as people bring them; what is said of each, as a page.

`python -m tests.secure_apfed.bad_inputs > tests/secure_apfed/bad_inputs.md` writes the page anew.
"""

import gzip
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from secure_apfed.data.tables import load_own_tables
from secure_apfed.errors import ApfedError, SuspectColumnWarning
from secure_apfed.settings.data import DataSettings

ROWS = 60
_HEAD = """# Bad inputs

What is said when a table is not as it should be. Each was tried as a new user would, as `bank.csv`
of the active `bank` with the columns id, age, sum, job and the label y; a test tries all of them
again and compares this page. Lines are those of the file, blank ones not counted.
"""


def good() -> pd.DataFrame:
    """A table that nothing is wrong with."""
    rng = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "id": [f"p{row}" for row in range(ROWS)],
            "age": rng.integers(20, 80, ROWS),
            "sum": rng.normal(size=ROWS).round(3),
            "job": rng.choice(["a", "b", "c"], ROWS),
            "y": rng.choice(["no", "yes"], ROWS),
        }
    )


@dataclass(frozen=True)
class Case:
    """One of them.

    Attributes:
        title: what is wrong.
        write: writes the file of this path.
        name: of the file.
        missing: what its party says of empty cells.
    """

    title: str
    write: Callable[[Path], object]
    name: str = "bank.csv"
    missing: str = "error"


def _csv(**columns: Any) -> Callable[[Path], object]:
    """The good table with some columns replaced or added."""
    return lambda path: good().assign(**columns).to_csv(path, index=False)


def _cell(column: str, row: int, value: Any) -> Callable[[Path], object]:
    def write(path: Path) -> None:
        frame = good().astype({column: "object"})
        frame.loc[row, column] = value
        frame.to_csv(path, index=False)

    return write


def _text(change: Callable[[str], str], encoding: str = "utf-8") -> Callable[[Path], object]:
    return lambda path: path.write_bytes(change(good().to_csv(index=False)).encode(encoding))


def _half_parquet(path: Path) -> None:
    good().to_parquet(path)
    path.write_bytes(path.read_bytes()[:500])


def _ragged(text: str) -> str:
    lines = text.splitlines()
    return "\n".join([*lines[:12], f"{lines[12]},more", *lines[13:]])


def _many_categories(path: Path) -> None:
    rows = np.arange(10**4)
    codes, labels = np.char.add("c", rows.astype(str)), np.where(rows % 2, "yes", "no")
    pd.DataFrame({"id": rows, "code": codes, "y": labels}).to_csv(path, index=False)


def _nested(*, lists: bool) -> Callable[[Path], object]:
    def write(path: Path) -> None:
        frame = good()
        cells: list[Any] = [[row, 1] if lists else {"a": row} for row in range(ROWS)]
        frame["x"] = pd.Series(cells, dtype=object)
        frame.to_parquet(path)

    return write


CASES: tuple[Case, ...] = (
    Case("columns apart by semicolons", _text(lambda text: text.replace(",", ";"))),
    Case("columns apart by tabs", _text(lambda text: text.replace(",", "\t"))),
    Case("Latin-1", _text(lambda text: text.replace("job", "Größe"), "latin-1")),
    Case("UTF-16", _text(str, "utf-16")),
    Case("an empty file", lambda path: path.write_text("")),
    Case("a header and no row", lambda path: good().iloc[:0].to_csv(path, index=False)),
    Case("no such file", lambda path: None),
    Case("a folder", Path.mkdir),
    Case("a workbook", lambda path: path.write_bytes(b"PK\x03\x04"), "bank.xlsx"),
    Case("packed by its name alone",
         lambda path: good().to_csv(path, compression=None), "bank.csv.gz"),
    Case("packed and cut",
         lambda path: path.write_bytes(gzip.compress(b"id,y\n" * 999)[:40]), "bank.csv.gz"),
    Case("a line with a cell too many", _text(_ragged)),
    Case("a quote that is never closed", _text(lambda text: text.replace("p5,", '"p5,'))),
    Case("NUL bytes", _text(lambda text: text.replace("p5,", "p\x005,"))),
    Case("a column without a name", _text(lambda text: text.replace("id,age", "id,", 1))),
    Case("two columns of one name", _text(lambda text: text.replace("sum", "age", 1))),
    Case("no ID column", _text(lambda text: text.replace("id,", "ID,", 1))),
    Case("no label column", lambda path: good().drop(columns="y").to_csv(path, index=False)),
    Case("an ID twice", _cell("id", 9, "p3")),
    Case("an empty ID", _cell("id", 9, None)),
    Case("labels of one class", _csv(y="no")),
    Case("no label at all", _csv(y=None)),
    Case("a label in two spellings", _cell("y", 4, "Yes")),
    Case("a label that is no class", _cell("y", 4, "maybe")),
    Case("a text among numbers", _cell("age", 7, "unknown")),
    Case("decimal commas", _csv(sum=[f"{row},5" for row in range(ROWS)])),
    Case("commas between thousands", _csv(sum=[f"{row + 1},234,567" for row in range(ROWS)])),
    Case("per cent", _csv(sum=[f"{row}%" for row in range(ROWS)])),
    Case("a currency", _csv(sum=[f"{row} €" for row in range(ROWS)])),
    Case("dates by day and month", _csv(since=[f"{row % 28 + 1}.1.2026" for row in range(ROWS)])),
    Case("a date that there is not", _csv(since=["2026-02-30", *["2026-01-31"] * (ROWS - 1)])),
    Case("empty cells", _cell("age", 5, None)),
    Case("an empty column", _csv(sum=None)),
    Case("an infinite number", _cell("sum", 5, "inf")),
    Case("a number too large", _cell("sum", 5, "1e300")),
    Case("10^4 categories", _many_categories),
    Case("Parquet with records in cells", _nested(lists=False), "bank.parquet"),
    Case("Parquet with lists in cells", _nested(lists=True), "bank.parquet"),
    Case("half of a Parquet file", _half_parquet, "bank.parquet"),
)  # fmt: skip

WARNED: tuple[Case, ...] = (
    Case("the label in disguise", lambda path: good().assign(
        decision=lambda frame: np.where(frame["y"] == "yes", "granted", "refused")
    ).to_csv(path, index=False)),
    Case("row numbers as a feature", _csv(number=range(ROWS))),
    Case("codes with leading zeros", _csv(plz=[f"{row % 7:05d}" for row in range(ROWS)])),
    Case("NA as a category", lambda path: good().assign(
        since=["2026-01-31", "NA"] * (ROWS // 2), level=["None", "low", "high"] * (ROWS // 3)
    ).to_csv(path, index=False), missing="mean"),
    Case("an ID as a feature", _csv(iban=[f"DE{row:05d}" for row in range(ROWS)])),
)  # fmt: skip
"""Those that are taken, with a warning."""


@cache
def said(case: Case) -> tuple[str, ...]:
    """The error's text, or those of the warnings."""
    with tempfile.TemporaryDirectory() as folder:
        return _said(case, Path(folder))


def _said(case: Case, folder: Path) -> tuple[str, ...]:
    path = folder / case.name
    case.write(path)
    settings = DataSettings.model_validate(
        {
            "dataset": "tables", "active": "bank", "classes": ["no", "yes"], "id_column": "id",
            "label_column": "y", "folder": folder,
            "parties": {
                "bank": {"file": case.name, "missing": case.missing}, "shop": {"file": "shop.csv"},
            },
        }
    )  # fmt: skip
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SuspectColumnWarning)
        try:
            load_own_tables(settings, "bank", seed=0)
        except ApfedError as error:
            return (str(error).replace(f"{folder}/", ""),)
    return tuple(str(one.message) for one in caught)


def page() -> str:
    """tests/secure_apfed/bad_inputs.md."""
    told: Mapping[str, tuple[Case, ...]] = {"Refused": CASES, "Taken with a warning": WARNED}
    lines = [_HEAD]
    for title, cases in told.items():
        lines += [f"## {title}", "", "| what was wrong | what was said |", "|---|---|"]
        for case in cases:
            text = " ".join(" ".join(said(case)).split())
            lines.append(f"| {case.title} | {text.replace('|', chr(92) + '|')} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
