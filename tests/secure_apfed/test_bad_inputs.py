"""Each bad table is told by its place and what to do; the page of the documents has the words."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from secure_apfed.data.column_encoding import DateColumn, fit_columns
from secure_apfed.errors import DataError
from tests.secure_apfed.bad_inputs import CASES, ROWS, WARNED, Case, good, page, said

_PAGE = Path(__file__).parent / "bad_inputs.md"


@pytest.mark.parametrize("case", [*CASES, *WARNED], ids=lambda case: case.title)
def test_what_is_said_names_the_place_and_the_remedy(case: Case) -> None:
    told = said(case)
    assert told
    assert not [part for part in case.parts if part not in " ".join(told)]


@pytest.mark.parametrize(
    ("title", "columns"),
    [
        ("a constant", {"sum": 1.0}),
        ("truth values", {"flag": [row % 3 == 0 for row in range(ROWS)]}),
        ("dates", {"since": [f"2026-01-{row % 28 + 1:02d}" for row in range(ROWS)]}),
        ("many different numbers", {"x": np.random.default_rng(1).normal(size=ROWS)}),
        ("codes with gaps", {"branch": [7 * (row % 20) for row in range(ROWS)]}),
    ],
)
def test_nothing_is_said_of_usual_columns(title: str, columns: dict[str, Any]) -> None:
    def write(path: Path) -> None:
        good().assign(**columns).to_csv(path, index=False)

    assert said(Case(title, write, ())) == ()


def test_the_page_says_what_is_said() -> None:
    assert _PAGE.read_text("utf-8") == page()


def test_dates_are_days_in_every_form_of_the_same() -> None:
    texts = pd.DataFrame({"since": ["1970-01-02", "1970-01-03T12:00:00Z", None]})
    read = pd.DataFrame({"since": pd.to_datetime(texts["since"], format="ISO8601", utc=True)})
    encoding = fit_columns(texts, missing="mean", source="bank")
    assert isinstance(encoding.columns[0], DateColumn)
    expected = encoding.encode(texts)
    np.testing.assert_allclose(expected.flatten(), [-1.0, 1.0, 0.0], atol=1e-6)
    np.testing.assert_array_equal(encoding.encode(read), expected)


def test_a_date_column_refuses_what_is_no_date() -> None:
    encoding = fit_columns(pd.DataFrame({"since": ["2026-01-31", "2026-02-01"]}), source="bank")
    with pytest.raises(DataError, match=r"1 cells are none, first in row 1"):
        encoding.encode(pd.DataFrame({"since": ["2026-01-31", "soon"]}))
