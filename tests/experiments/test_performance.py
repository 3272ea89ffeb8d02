"""docs/performance.md: its tables are what was measured, and nothing else of it changes."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from apfed_experiments.bench import (
    BENCHES,
    Measured,
    block,
    read_measured,
    renewed,
    write_performance,
)
from secure_apfed.errors import DataError

DOCS = Path(__file__).resolve().parents[2] / "docs"
MEASURED: Measured = {
    "bench": "psi", "source": "0", "quick": False, "cases": "*", "date": "2025-01-31",
    "load": 0.25, "stolen": 0.0123, "clock_step": 0.02,
    "machine": {"processor": "P", "cores": 2, "gpu": None, "python": "3", "torch": "2"},
    "rows": [
        {
            "case": "vole/9", "seconds": 0.0125, "peer": "spu-rr22/9", "ratio": 0.664,
            "bytes": 33_000, "rounds": 3, "peak_memory": 470_000_000, "dealt_bytes": 21,
        },
        {"case": "spu-rr22/9", "seconds": None, "peer": None, "reason": "no <spu>\nhere"},
        {"case": "spu-ecdh/9", "seconds": None, "peer": None, "reason": "no <spu>\nhere"},
    ],
}  # fmt: skip
BLOCK = """\
2025-01-31: P, 2 cores, no GPU, Python 3, torch 2, load 0.2 when it began, 1.2% stolen. \
*Ratio*: seconds over the peer's. The clock moved by 20.0 ms.

| case | seconds | peer | ratio | bytes | rounds | peak memory | dealt bytes |
| --- | --- | --- | --- | --- | --- | --- | --- |
| `vole/9` | 12.5 ms | spu-rr22/9 | 0.664 | 33.0 kB | 3 | 470 MB | 21 B |

Not measured: `spu-rr22/9`, `spu-ecdh/9`: no &lt;spu> here
"""


def test_the_tables_of_the_page_are_what_was_measured() -> None:
    """`secure-apfed performance` writes them."""
    page = (DOCS / "performance.md").read_text("utf-8")
    assert renewed(page, read_measured(DOCS / "performance")) == page


def test_what_is_published_is_small_and_tells_the_machine_but_not_its_paths() -> None:
    for path in (DOCS / "performance").glob("*.json"):
        assert path.stat().st_size < 100_000
        assert "/home/" not in path.read_text("utf-8")


def test_a_table_says_what_was_measured_on_what_and_what_was_not() -> None:
    assert block(MEASURED) == BLOCK


def test_all_but_the_tables_stays(tmp_path: Path) -> None:
    (tmp_path / "psi.json").write_text(json.dumps(MEASURED))
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- bench psi -->\nold\n<!-- end psi -->\nafter\n")
    for _ in range(2):
        write_performance(page, tmp_path)
        text = f"before\n<!-- bench psi -->\n{BLOCK}<!-- end psi -->\nafter\n"
        assert page.read_text() == text


def test_a_place_may_show_some_cases_only() -> None:
    text = renewed("<!-- bench psi vole/* -->\n<!-- end psi -->\n", {"psi": MEASURED})
    assert text.startswith("<!-- bench psi vole/* -->\n2025-01-31, cases `vole/*`: P, 2 cores")
    assert "Not measured" not in text
    assert renewed(text, {"psi": MEASURED}) == text


def test_a_machine_is_told_once() -> None:
    assert block(MEASURED, above=MEASURED["machine"]).startswith("2025-01-31: there, load 0.2")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "the page has no place for bench psi; write <!-- bench psi -->"),
        (
            "<!-- bench psi -->\n<!-- end psi -->\n<!-- bench votes -->\n<!-- end votes -->\n",
            "a place for bench votes, which was not measured",
        ),
    ],
)
def test_a_place_without_a_bench_and_a_bench_without_a_place_are_errors(
    text: str, says: str
) -> None:
    with pytest.raises(DataError, match=says):
        renewed(text, {"psi": MEASURED})


@pytest.mark.parametrize("change", [{"bench": "none"}, {"rows": [[]]}, {"machine": 1}])
def test_a_file_of_something_else_is_an_error(change: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no figures"):
        read_measured(tmp_path)
    (tmp_path / "psi.json").write_text(json.dumps(copy.deepcopy(MEASURED) | change))
    with pytest.raises(DataError, match=r"psi\.json is not what a bench wrote"):
        read_measured(tmp_path)


def test_every_measured_bench_is_one_of_the_table() -> None:
    assert set(read_measured(DOCS / "performance")) <= set(BENCHES)
