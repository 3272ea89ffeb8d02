"""Reports, lists of runs and the built site in headless Chromium, the system's own package."""

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from apfed_experiments.columns import Column, Table
from apfed_experiments.drawing import Picture, open_figure
from apfed_experiments.report import write_report
from apfed_experiments.report.page import Part, write_runs_page, write_study_page
from apfed_experiments.run_list import list_runs
from tests.docs.pages import built_site
from tests.experiments.run_folder import attack_result, config_of, write_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Request

pytestmark = pytest.mark.slow

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
QUIET = ("--disable-gpu", "--no-first-run", "--disable-background-networking", "--no-sandbox")
PHONE = 390
DESK = 1400

# What a screen reader says of what can be reached by the keyboard.
UNNAMED = """() => [...document.querySelectorAll("a[href], button, input, select, summary")]
    .filter(e => e.offsetParent && !e.closest("[aria-hidden=true]"))
    .filter(e => !(e.ariaLabel || e.title || e.innerText?.trim()
        || [...(e.labels || [])].some(label => label.innerText.trim())
        || [...e.querySelectorAll("img")].some(image => image.alt)))
    .map(e => e.outerHTML.slice(0, 120))"""
UNDRAWN = """() => [...document.images].filter(e => !e.complete || !e.naturalWidth || !e.alt)
    .map(e => e.outerHTML.slice(0, 120))"""
SKIPPED = """() => [...document.querySelectorAll("h1, h2, h3, h4, h5")].map(e => +e.tagName[1])
    .filter((level, at, all) => at && level > all[at - 1] + 1)"""
# Boxes of tables that hide what is wider than they are: a last column.
CUT = """() => [...document.querySelectorAll(".wide")]
    .filter(e => e.offsetParent && e.scrollWidth > e.clientWidth + 1)
    .map(e => e.textContent.trim().slice(0, 80))"""
# Pictures that are wider than their frame, where this does not scroll by itself.
OUTSIDE = """() => [...document.querySelectorAll("figure")]
    .filter(e => e.scrollWidth > e.clientWidth + 1 && !e.matches(".broad"))
    .map(e => e.textContent.trim().slice(0, 80))"""
SIDEWAYS = "() => document.documentElement.scrollWidth - window.innerWidth"
# Contrast of a page's own text, by WCAG 2: (lighter + .05) / (darker + .05).
CONTRAST = """() => {
    const light = colour => {
        const [r, g, b] = colour.match(/[\\d.]+/g).map(Number).map(v => v / 255)
            .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const style = getComputedStyle(document.body);
    const [low, high] = [light(style.color), light(style.backgroundColor)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
}"""


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    playwright = pytest.importorskip("playwright.sync_api", reason="needs the extra browser")
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here; install the system's package `chromium`")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A report of a run that was attacked, the list of two runs, and two pages of the site."""
    runs = tmp_path_factory.mktemp("runs")
    guarded = write_run(
        runs / "guarded",
        config_of(guard="{mechanism: gaussian, epsilon: 8.0}"),
        accuracy={"apfed_c": 0.912},
        epsilon=7.98,
        attacks=[attack_result()],
    )
    write_run(runs / "plain", config_of(), accuracy={"apfed_c": 0.93})
    report = write_report(guarded)
    listed = write_runs_page(list_runs(runs), runs / "runs.html", title="Runs")
    site = built_site(tmp_path_factory.mktemp("site"))
    header = ("a line of a study", *(f"advantage, active reads features {at}" for at in range(11)))
    cells = ("apfed_c, a defence at a strength", *["+0.123 [-0.045, +0.291] model_completion"] * 11)
    with open_figure(runs / "picture.png", (12.0, 4.0)) as figure:
        figure.subplots()
    picture = Picture(path=runs / "picture.png", title="A study", caption="What it shows.")
    columns = [Column(name=name, title=name) for name in header]
    table = Table(columns, [dict(zip(header, cells, strict=True))])
    part = Part(name="leaderboard", table=table, pictures=[picture])
    write_study_page(runs / "index.html", title="Study", reading_guide="", parts=[part])
    return {
        "study": runs / "index.html",
        "report": report,
        "list": listed,
        "start": site / "index.html",
        "page": site / "leaks.html",
        "reference": site / "api" / "runs.html",
    }


@contextmanager
def open_page(
    browser: "Browser", path: Path, **options: Any
) -> "Iterator[tuple[Page, list[str], list[str]]]":
    """The page, what it says on its console, and what it asks of others."""
    said, asked = list[str](), list[str]()

    def ask(request: "Request") -> None:
        if not request.url.startswith(("file:", "data:", "blob:")):
            asked.append(request.url)

    with browser.new_context(**options) as context:
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", ask)
        page.goto(path.as_uri())
        yield page, said, asked


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [PHONE, DESK])
@pytest.mark.parametrize("name", ["report", "list", "start", "page"])
def test_a_page_is_whole_on_a_phone_and_a_desk_by_day_and_night(
    name: str, width: int, scheme: str, browser: "Browser", pages: dict[str, Path]
) -> None:
    size = {"width": width, "height": 900}
    with open_page(browser, pages[name], viewport=size, color_scheme=scheme) as (page, said, asked):
        assert page.evaluate(SIDEWAYS) <= 0
        assert page.evaluate(UNDRAWN) == []
        assert page.evaluate(UNNAMED) == []
        assert page.evaluate(SKIPPED) == []
        assert page.evaluate(CONTRAST) >= 4.5
        assert page.title()
        assert page.locator("html").get_attribute("lang") == "en"
        assert said == asked == []


@pytest.mark.parametrize("width", [PHONE, 1280, 1800])
@pytest.mark.parametrize("name", ["report", "list", "study"])
def test_no_table_hides_its_last_column(
    name: str, width: int, browser: "Browser", pages: dict[str, Path]
) -> None:
    size = {"width": width, "height": 900}
    with open_page(browser, pages[name], viewport=size) as (page, _, _):
        assert page.locator(".wide").count()
        assert page.evaluate(CUT) == []
        assert page.evaluate(SIDEWAYS) <= 0


@pytest.mark.parametrize("width", [PHONE, DESK])
@pytest.mark.parametrize("name", ["report", "study"])
def test_pictures_fit_the_page_or_scroll_in_a_frame_of_their_own(
    name: str, width: int, browser: "Browser", pages: dict[str, Path]
) -> None:
    with open_page(browser, pages[name], viewport={"width": width, "height": 900}) as (page, _, _):
        assert page.locator("figure").count()
        assert page.evaluate(OUTSIDE) == []
        assert page.evaluate(SIDEWAYS) <= 0


@pytest.mark.parametrize("name", ["report", "list"])
def test_the_keyboard_reaches_all_that_can_be_used(
    name: str, browser: "Browser", pages: dict[str, Path]
) -> None:
    with open_page(browser, pages[name]) as (page, _, _):
        usable = page.locator("a[href], button, input, select, summary").count()
        reached = set[str]()
        for _ in range(usable):
            page.keyboard.press("Tab")
            reached.add(page.evaluate("document.activeElement.outerHTML"))
        page.keyboard.press("Tab")
        assert "<body" not in "".join(reached)
        assert bool(usable) is bool(reached)


def test_a_list_of_runs_is_sorted_and_filtered_by_hand(
    browser: "Browser", pages: dict[str, Path]
) -> None:
    with open_page(browser, pages["list"]) as (page, said, _):
        rows = page.locator("tbody tr:visible")
        assert rows.count() == 2
        page.locator("input").first.fill("guarded")
        assert rows.count() == 1
        assert said == []


@contextmanager
def serve_folder(folder: Path) -> Iterator[str]:
    """Serve a folder on this machine; yield its address."""
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def search_site(page: "Page", words: str) -> list[str]:
    """Type words into the site's search; return the pages that it finds, the best one first."""
    page.locator(".md-search__input").click()
    page.locator(".md-search__input").press_sequentially(words)
    page.wait_for_selector(".md-search-result__link", state="attached")
    found = page.locator(".md-search-result__link").evaluate_all("all => all.map(e => e.href)")
    return [str(address).partition("?")[0].rpartition("/")[2] for address in found]


@pytest.mark.parametrize("name", ["start", "reference"])
@pytest.mark.parametrize("is_served", [False, True], ids=["from the disk", "served"])
def test_the_search_finds_the_page_that_answers(
    is_served: bool, name: str, browser: "Browser", pages: dict[str, Path]
) -> None:
    site = pages["start"].parent
    with (
        serve_folder(site) as address,
        open_page(browser, pages[name], viewport={"width": DESK, "height": 900}) as (
            page,
            said,
            asked,
        ),
    ):
        if is_served:
            page.goto(f"{address}/{pages[name].relative_to(site).as_posix()}")
        asked.clear()
        found = search_site(page, "revoke a certificate")
        assert "between-organisations.html" in found[:3]
        assert said == []
        assert [each for each in asked if not each.startswith(address)] == []
