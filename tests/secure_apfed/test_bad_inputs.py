"""Each bad table is told by its place and what to do; the page of the documents has the words."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from secure_apfed.data.encoding import fit_columns
from tests.secure_apfed.bad_inputs import CASES, ROWS, WARNED, Case, good, page, said

_PAGE = Path(__file__).parent / "bad_inputs.md"


def test_the_page_says_what_is_said_in_a_line_each() -> None:
    assert _PAGE.read_text("utf-8") == page()
    for case in (*CASES, *WARNED):
        told = said(case)
        assert told, case.title
        assert not any("\n" in text for text in told), case.title


def test_nothing_is_said_of_usual_columns() -> None:
    usual: dict[str, dict[str, Any]] = {
        "a constant": {"sum": 1.0},
        "truth values": {"flag": [row % 3 == 0 for row in range(ROWS)]},
        "dates": {"since": [f"2026-01-{row % 28 + 1:02d}" for row in range(ROWS)]},
        "many different numbers": {"x": np.random.default_rng(1).normal(size=ROWS)},
        "codes with gaps": {"branch": [7 * (row % 20) for row in range(ROWS)]},
    }
    for title, columns in usual.items():
        frame = good().assign(**columns)
        assert said(Case(title, partial(frame.to_csv, index=False))) == (), title


def test_dates_are_days_in_every_form_of_the_same() -> None:
    texts = pd.DataFrame({"since": ["1970-01-02", "1970-01-03T12:00:00Z", None]})
    read = pd.DataFrame({"since": pd.to_datetime(texts["since"], format="ISO8601", utc=True)})
    encoding = fit_columns(texts, missing="mean", source="bank")
    assert encoding.columns[0].kind == "date"
    expected = encoding.encode(texts)
    np.testing.assert_allclose(expected.flatten(), [-1.0, 1.0, 0.0], atol=1e-6)
    np.testing.assert_array_equal(encoding.encode(read), expected)
