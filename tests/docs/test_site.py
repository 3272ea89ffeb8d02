"""The site is built without a warning, and a reader's browser asks no other host for anything."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, built_site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built_site(tmp_path_factory.mktemp("site"))


class _Fetched(HTMLParser):
    """Collects what a browser fetches to show a page."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        shown = tag == "link" and given.get("rel") in (
            "stylesheet",
            "icon",
            "preload",
            "preconnect",
        )
        address = given.get("href") if shown else given.get("src")
        if address:
            self.addresses.append(address)


def test_pages_fetch_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        parser = _Fetched()
        parser.feed(page.read_text(encoding="utf-8"))
        assert parser.addresses
        outside = [one for one in parser.addresses if re.match(r"(https?:)?//", one)]
        assert (page.name, outside) == (page.name, [])
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()[\s\"']*(https?:)?//", sheet.read_text("utf-8"))


def test_every_document_is_a_page(site: Path) -> None:
    sources = (path.relative_to(DOCS).with_suffix(".html") for path in DOCS.rglob("*.md"))
    pages = {path.relative_to(site) for path in site.rglob("*.html")}
    assert {*sources, Path("changelog.html"), Path("contributing.html")} <= pages


@pytest.mark.parametrize(
    ("page", "name"),
    [("runs", "secure_apfed.runs.run.run"), ("sums", "apfed_protocols.sums.MaskedSum"),
     ("alignment", "apfed_protocols.psi.align"), ("attacks", "apfed_attacks.run.mount")],
)  # fmt: skip
def test_the_reference_describes_public_names(site: Path, page: str, name: str) -> None:
    text = (site / "api" / f"{page}.html").read_text(encoding="utf-8")
    assert f'id="{name}"' in text
