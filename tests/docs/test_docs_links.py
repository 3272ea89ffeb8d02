"""Links between documents lead to files and headings; some pages keep what they promise."""

import re
from pathlib import Path

import pytest

from tests.docs.pages import DOCUMENTS, HOOK, ROOT, text_of

_LINK = re.compile(r"\]\(([^)\s]+)\)")
_FENCED = re.compile(r"^( *)```.*?^\1```$", re.DOTALL | re.MULTILINE)
_FIGURE = re.compile(r"[+-]\d+\.\d \[[+-]\d+\.\d, [+-]\d+\.\d\]")


def _links(document: str) -> list[str]:
    text = HOOK.today(text_of(document)) if document == "CHANGELOG.md" else text_of(document)
    found = _LINK.findall(_FENCED.sub("", text))
    return [link for link in found if not re.match(r"[a-z]+:", link)]


def _anchors(path: Path) -> set[str]:
    """Of a page's headings, as MkDocs and GitHub name them."""
    text = _FENCED.sub("", path.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ +(.+)$", text, re.MULTILINE)
    plain = [re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings]
    return {re.sub(r"\s+", "-", heading) for heading in plain}


def broken_links(document: str, links: list[str]) -> list[str]:
    """Those of the document's links that lead nowhere."""
    broken = []
    for link in links:
        name, _, anchor = link.partition("#")
        target = (ROOT / document).parent / name if name else ROOT / document
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_link_leads_somewhere(document: str) -> None:
    assert broken_links(document, _links(document)) == []


def test_broken_links_would_be_found() -> None:
    links = ["nowhere.md", "results.md#no-such-heading", "results.md#the-main-job"]
    assert broken_links("docs/start.md", links) == links[:2]


def test_the_start_page_is_read_in_five_minutes() -> None:
    assert len(text_of("docs/start.md").split()) < 1000


def test_every_gain_of_the_decision_page_was_measured() -> None:
    figures = _FIGURE.findall(text_of("docs/which-method.md"))
    measured = text_of("docs/results.md")
    assert len(figures) > 20
    assert [figure for figure in figures if figure not in measured] == []
