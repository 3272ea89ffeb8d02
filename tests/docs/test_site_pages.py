"""What of the pages is generated is what its source says now."""

import json
import re
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, DOCUMENTS, HOOK, text_of


@pytest.mark.parametrize("document", [one for one in DOCUMENTS if "<!-- end -->" in text_of(one)])
def test_a_page_holds_what_is_generated(document: str) -> None:
    """`python docs/site_pages.py` writes it."""
    assert HOOK.renewed(text_of(document)) == text_of(document)


def test_another_figure_would_be_found() -> None:
    page = text_of("docs/results.md")
    assert "+17.4 [+13.3, +21.6]" in page
    wrong = page.replace("+17.4 [+13.3, +21.6]", "+18.4 [+13.3, +21.6]")
    assert HOOK.renewed(wrong) == page


@pytest.mark.parametrize("path", sorted((DOCS / "data").glob("*.json")), ids=lambda path: path.stem)
def test_every_stored_table_is_whole_and_shown_somewhere(path: Path) -> None:
    shown = "".join(map(text_of, DOCUMENTS))
    for name, table in json.loads(path.read_bytes()).items():
        assert f"<!-- table: {path.stem}.{name} -->" in shown
        if "of" not in table:
            assert {len(row) for row in table["rows"]} == {len(table["columns"])}


def test_every_key_of_a_run_is_told() -> None:
    rows = re.findall(r"^\| `[\w.]+` \|.*$", text_of("docs/run-yaml.md"), re.MULTILINE)
    assert len(rows) > 140
    assert [row for row in rows if len(row.split(" | ")[2].split()) < 2] == []


def test_a_glossary_has_every_epsilon() -> None:
    words = text_of("docs/glossary.md")
    for of in ("x", "y", "v", "w", "c", "model"):
        assert f"| epsilon_{of} |" in words
