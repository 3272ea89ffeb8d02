"""The documents, what docs/deploy takes for granted, the site and the notebooks."""

import ast
import contextlib
import doctest
import inspect
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pandas as pd
import pytest
import typer
import yaml
from nbclient import NotebookClient
from sklearn.datasets import load_digits

import secure_apfed
from secure_apfed.cli import app, execute
from secure_apfed.config.file import load_config_text
from secure_apfed.config.plain_yaml import parse_yaml
from tests.architecture_rules import LAYERS, list_public_names, read_sources, the_tree
from tests.docs.pages import DOCS, DOCUMENTS, HOOK, ROOT, blocks, built_site, command_lines, text_of
from tests.docs.prose import CONSTANTS, EVERYWHERE, figures_without_source
from tests.links.trained_parties import train_parties
from tests.public_names import EVERYDAY_NAMES, load_public_names

START = "docs/start.md"
TUTORIAL = "docs/tutorial.md"
WITH_EXAMPLES = [name for name, text in read_sources(ROOT).items() if ">>> " in text]
SERVED = "secure_apfed.organisations.served"


def find_examples(name: str) -> dict[str, doctest.DocTest]:
    """Return a module's examples by the name that they describe.

    Doctest itself passes over decorated functions, since their wrapper is of another module.
    """
    module = import_module(name)
    decorated = [
        inspect.unwrap(value)
        for value in vars(module).values()
        if callable(value) and hasattr(value, "__wrapped__")
    ]
    finder = doctest.DocTestFinder()
    tests = finder.find(module)
    for function in decorated:
        if function.__module__ == name:
            tests += finder.find(function, f"{name}.{function.__name__}", module)
    return {test.name: test for test in tests if test.examples}


def go_to_trained_parties(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Go to the folder of a run whose parties have trained, with a table of new people."""
    files = train_parties(folder, "split_nn_sum")
    shutil.copy(files["new"], folder / "run")
    monkeypatch.chdir(folder / "run")


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_the_examples_in_a_module_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == SERVED:
        go_to_trained_parties(tmp_path, monkeypatch)
    examples = find_examples(name)
    failed = {
        each: test
        for each, test in examples.items()
        if doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test).failed
    }
    assert examples
    assert not failed, f"see what doctest printed of {[*failed]}"


@pytest.mark.parametrize("name", EVERYDAY_NAMES)
def test_an_everyday_name_has_a_short_example(name: str) -> None:
    value = getattr(secure_apfed, name)
    examples = find_examples(value.__module__)[f"{value.__module__}.{name}"].examples
    text = inspect.getdoc(value) or ""
    assert "\nExamples:\n" in text, "so that the reference sets it as code"
    assert re.search(r">>> from (secure_apfed|apfed_protocols) import ", text), "as a reader would"
    assert 2 <= len(examples) <= 10


def missing(code: str) -> list[str]:
    """List imports of ours that do not exist; read from sources, since extras may lack."""
    offences = []
    modules = the_tree(ROOT)
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in LAYERS:
            home = modules.get(str(node.module))
            names = {alias.name for alias in node.names}
            known = list_public_names(home) if home else set()
            if node.module == "secure_apfed":  # which gives all of the other
                known |= list_public_names(modules["apfed_protocols"])
            offences += [
                f"{node.module}: {name}"
                for name in sorted(names - known)
                if f"{node.module}.{name}" not in modules
            ]
    return offences


@pytest.mark.parametrize("document", [each for each in DOCUMENTS if blocks(each, "python")])
def test_python_compiles_and_imports_what_is_there(document: str) -> None:
    assert [name for code in blocks(document, "python") for name in missing(code)] == []


def test_a_name_that_is_not_there_would_be_found() -> None:
    code = "from secure_apfed import run, walk\nfrom secure_apfed.walks import far\nimport numpy"
    assert missing(code) == ["secure_apfed: walk", "secure_apfed.walks: far"]


@pytest.mark.parametrize("document", [each for each in DOCUMENTS if blocks(each, "yaml")])
def test_yaml_is_plain_and_files_of_runs_are_taken(document: str) -> None:
    for text in blocks(document, "yaml"):
        given: Any = parse_yaml(text, document)[0]
        # A guide's run names what the guide adds, and is run beside it.
        of_a_run = {"name", "method", "data"} <= set(given)
        if of_a_run and not document.startswith(("docs/add-a", "docs/extend")):
            assert load_config_text(text, source=document).name == given["name"]


def test_json_is_json() -> None:
    for document in DOCUMENTS:
        for text in blocks(document, "json"):
            json.loads(text)


@pytest.mark.slow
def test_the_start_page_runs_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (text,) = blocks(START, "yaml")
    (tmp_path / "run.yaml").write_text(text)
    np.save(tmp_path / "new_images.npy", load_digits().images[:3, None])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    lines = [line for block in blocks(START, "sh") for line in block.splitlines()]
    calls = [shlex.split(line, comments=True) for line in lines if line.startswith("secure-apfed")]
    ended = [(program, execute(arguments)) for program, *arguments in calls]
    assert ended == [("secure-apfed", 0)] * len(calls)
    printed = capsys.readouterr().out
    readings = ("accuracy, APFed-C", "gain", "epsilon_x", "active reads features of passive-1")
    assert [each for each in (*readings, "best local model") if each not in printed] == []
    for folder in ("encrypted", "first", "one-number"):
        assert re.search(rf"^{folder} +apfed_c", printed, re.MULTILINE), printed
    there = ("runs/first/report.html", "runs.html", "model.onnx")
    assert all((tmp_path / name).is_file() for name in there)


def test_the_tutorial_makes_its_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (script,) = blocks(TUTORIAL, "python")
    exec(compile(script, TUTORIAL, "exec"), {})
    config = load_config_text(blocks(TUTORIAL, "yaml")[0])
    assert config.data.parties is not None
    columns = {
        name: set(pd.read_csv(party.file or f"{name}.csv").columns)
        for name, party in config.data.parties.items()
    }
    assert all(config.data.id_column in of_party for of_party in columns.values())
    assert config.data.label_column in columns[config.data.active]
    assert columns[config.data.active] - {"late"} == set(pd.read_csv("new.csv").columns)


@pytest.mark.slow
def test_the_split_network_is_private_to_the_end_of_its_budget() -> None:
    command = [sys.executable, str(DOCS / "examples" / "split_nn.py")]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert re.findall(r"epsilon (\S+)$", told, re.MULTILINE) == ["8"] * 5
    figures = {key: re.findall(rf"{key} +(\S+)", told) for key in ("alone", "plain", "private")}
    alone, plain, private = (np.mean([*map(float, each)]) for each in figures.values())
    assert plain - alone > 0.05
    assert alone - 0.02 < private < plain
    assert "labels found" in told  # in the gradients, on which there is no guard


# Commands.

# What a wrong call raises: typer names its child alone.
UsageError: Any = typer.BadParameter.__base__
COMMANDS = typer.main.get_command(app)


def parse(arguments: list[str], *, whole: bool) -> None:
    """Read the last command's options, run nothing; what is not `whole` may lack arguments."""
    command = COMMANDS
    rest = list(arguments)
    while isinstance(command, typer.core.TyperGroup) and rest:
        name = rest.pop(0)
        assert name in command.commands, f"secure-apfed has no {name}"
        command = command.commands[name]
    if not whole and not rest:
        return
    try:
        with contextlib.suppress(typer.Exit):  # an option that prints something and ends
            command.make_context("call", rest)
    except UsageError as error:
        if whole or not error.format_message().startswith("Missing"):
            raise


@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_command_line_takes_every_call(document: str) -> None:
    for arguments, whole in command_lines(document, "secure-apfed"):
        parse(arguments, whole=whole)


def test_there_are_calls() -> None:
    calls = [call for document in DOCUMENTS for call in command_lines(document, "secure-apfed")]
    assert len(calls) > 50


@pytest.mark.parametrize(
    ("wrong", "whole"),
    [
        ("run run.yaml --outptu x", True),
        ("run --outptu x", False),
        ("run", True),
        ("study main --jobs many", True),
    ],
)
def test_a_wrong_call_would_be_found(wrong: str, whole: bool) -> None:
    with pytest.raises(UsageError):
        parse(wrong.split(), whole=whole)


@pytest.mark.parametrize("wrong", ["trian run.yaml", "study trian"])
def test_a_call_of_no_command_would_be_found(wrong: str) -> None:
    with pytest.raises(AssertionError, match="has no trian"):
        parse(wrong.split(), whole=False)


DEPLOY = DOCS / "deploy"
SERVICES = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]


def test_services_and_the_unit_say_commands_that_there_are() -> None:
    for service in SERVICES.values():
        parse(service["command"], whole=True)
    lines = (DEPLOY / "secure-apfed-party.service").read_text().splitlines()
    (start,) = [line for line in lines if line.startswith("ExecStart=")]
    program, *words = shlex.split(start.removeprefix("ExecStart="))
    assert program.endswith("/secure-apfed")
    parse(words, whole=True)


def test_no_two_parties_share_a_network_or_a_folder() -> None:
    parties = {name: one for name, one in SERVICES.items() if name != "relay"}
    networks = [network for one in parties.values() for network in one["networks"]]
    volumes = [volume for one in parties.values() for volume in one["volumes"]]
    assert len(networks) == len(set(networks)) == len(parties)
    assert len(volumes) == len(set(volumes)) == len(parties)
    assert {len(one["networks"]) for one in parties.values()} == {1}
    assert {len(one["volumes"]) for one in parties.values()} == {1}
    assert set(SERVICES["relay"]["networks"]) == {one["networks"][0] for one in parties.values()}


def test_the_image_copies_what_there_is_and_no_data() -> None:
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    copied = [word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]]
    assert copied
    assert all((ROOT / name).exists() for name in copied)
    assert "USER apfed" in lines


# Links.

_LINK = re.compile(r"\]\(([^)\s]+)\)")
_FENCED = re.compile(r"^( *)```.*?^\1```$", re.DOTALL | re.MULTILINE)


def _links(document: str) -> list[str]:
    found = _LINK.findall(_FENCED.sub("", text_of(document)))
    return [link for link in found if not re.match(r"[a-z]+:", link)]


def _anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as MkDocs and GitHub name them."""
    text = _FENCED.sub("", path.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ +(.+)$", text, re.MULTILINE)
    plain = [re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings]
    return {re.sub(r"\s+", "-", heading) for heading in plain}


def broken_links(document: str, links: list[str]) -> list[str]:
    """List the document's links that lead nowhere."""
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


# What is generated.


@pytest.mark.parametrize("document", [one for one in DOCUMENTS if "<!-- " in text_of(one)])
def test_a_page_holds_what_is_generated(document: str) -> None:
    """`python docs/site_pages.py` writes it."""
    assert HOOK.renewed(text_of(document)) == text_of(document)


def test_another_figure_would_be_found() -> None:
    page = text_of("docs/results.md")
    figure = json.loads((DOCS / "data" / "results.json").read_bytes())["gains"]["rows"][0][3]
    assert figure in page
    wrong = page.replace(figure, "+99.5 [+98.4, +99.6]")
    assert HOOK.renewed(wrong) == page


@pytest.mark.parametrize("path", sorted((DOCS / "data").glob("*.json")), ids=lambda path: path.stem)
def test_every_stored_table_is_whole_and_shown_somewhere(path: Path) -> None:
    shown = "".join(map(text_of, DOCUMENTS))
    tables = json.loads(path.read_bytes())
    assert [n for n in tables if f"<!-- table: {path.stem}.{n} -->" not in shown] == []
    widths = {
        name: ({len(row) for row in table["rows"]}, {len(table["columns"])})
        for name, table in tables.items()
        if "of" not in table
    }
    assert [name for name, (rows, columns) in widths.items() if rows != columns] == []


# Figures in sentences.

MEASURED_PAGES = [
    "README.md",
    *sorted(f"docs/{path.name}" for path in DOCS.glob("*.md")),
    "experiments/apfed_experiments/report/who_learns.md",
]


@pytest.mark.parametrize("document", MEASURED_PAGES)
def test_every_measured_figure_in_prose_names_its_source(document: str) -> None:
    """A figure that no measurement gave is named in `tests.docs.prose.CONSTANTS`."""
    assert figures_without_source(text_of(document), CONSTANTS.get(document, ())) == []


@pytest.mark.parametrize(
    ("sentence", "figures"),
    [
        ("Votes reach 51.7 and 58.7 % there.", ["51.7", "58.7"]),
        ("It gains 1.2 points [-1.7, 4.0] there.", ["1.2 points [-1.7, 4.0]"]),
        ("Joint prediction is worth +.151 here.", ["+.151"]),
        ("It takes 35 s, 2 min or 12 seconds.", ["35", "2", "12"]),
        ("It takes about a minute and a half on two cores.", ["a minute and a half"]),
        ("Both send 3.8 MB.", ["3.8"]),
        ("R2 of features is .91 there.", [".91"]),
        ("An AUC of 0.63 is reached.", ["0.63"]),
        ("| digits | -0.3 [-1.1, +0.4] |", ["-0.3 [-1.1, +0.4]"]),
        ("Alone 73.6\n%, with help 74.8 %.", ["73.6", "74.8"]),
        ("They gain\n+0.144\n[+0.135, +0.154].", ["+0.144\n[+0.135, +0.154]"]),
        ("Python 3.11 and torch 2.13.0 with 95 % intervals.", []),
        ("Set `epsilon: 0.5 %` in [the file](a-3.5 s.md).", []),
        ("```sh\nsleep 5 s\n```", []),
        ("It gains +1.2<!-- =results.gains:x:gain --> there.", []),
    ],
)
def test_a_measured_figure_is_known_by_its_looks(sentence: str, figures: list[str]) -> None:
    found = figures_without_source(sentence)
    assert [re.findall(">>(.*)<<", one, re.DOTALL)[0] for one in found] == figures


@pytest.mark.parametrize("page", [page for page in MEASURED_PAGES if page in CONSTANTS])
def test_every_constant_still_stands_on_its_page(page: str) -> None:
    words = " ".join(text_of(page).split())
    assert [one for one in CONSTANTS[page] if " ".join(one.split()) not in words] == []
    assert len(EVERYWHERE) < 12


SOURCE = "results.gains:votes-digits-n20:gain"


@pytest.mark.parametrize(
    ("written", "source", "renewed"),
    [
        ("+99.9 [-1.0, +1.0]", SOURCE, "+11.8 [+8.0, +15.7]"),
        ("99.9 points [1.0, 1.0]", SOURCE, "11.8 points [8.0, 15.7]"),
        ("+99", SOURCE, "+12"),
        ("+.151", "results.credit-all:tvfl:gain", "+.144"),
        ("0.15", "results.credit-all:tvfl:gain", "0.14"),
        ("-9.9", "results.noise:1:digits", "-2.2"),
        ("1.5", "performance.commands:make-run:minutes", "2.6"),
    ],
)
def test_a_figure_is_renewed_in_the_form_that_its_sentence_has(
    written: str, source: str, renewed: str
) -> None:
    page = f"It gains {written}<!-- ={source} --> there."
    assert HOOK.renewed(page) == f"It gains {renewed}<!-- ={source} --> there."


@pytest.mark.parametrize(
    ("page", "says"),
    [
        ("1<!-- =results.gains:votes-digits:gain -->", "names 4 of"),
        ("1<!-- =results.gains:votes-nothing:gain -->", "names 0 of"),
        ("1<!-- =results.gains:votes-digits-n20:loss -->", "names 0 of"),
        ("1<!-- =results.nowhere:a:b -->", "no table nowhere"),
        ("1<!-- =results.help:a:b -->", "no table help of its own"),
        ("1<!-- =gains -->", "expected FILE.TABLE:ROW:COLUMN"),
        ("1 [2, 3]<!-- =results.gains:votes-digits-n20:accuracy -->", "holds '51.9'"),
        ("none<!-- =results.gains:votes-digits-n20:gain -->", "stand behind no figure"),
    ],
)
def test_a_source_that_names_no_figure_is_refused(page: str, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        HOOK.renewed(page)


def test_every_key_of_a_run_and_every_epsilon_is_told() -> None:
    rows = re.findall(r"^\| `[\w.]+` \|.*$", text_of("docs/run-yaml.md"), re.MULTILINE)
    assert len(rows) > 140
    assert [row for row in rows if len(row.split(" | ")[2].split()) < 2] == []
    words = text_of("docs/glossary.md")
    kinds = ("x", "y", "v", "w", "c", "model")
    assert [of for of in kinds if f"| epsilon_{of} |" not in words] == []


# The site and the notebooks.


def test_every_document_stands_in_the_menu() -> None:
    menu = text_of("mkdocs.yml").partition("\nnav:")[2].partition("\nplugins:")[0]
    named = set(re.findall(r"- (\S+\.md)$", menu, re.MULTILINE))
    linked = "".join(text_of(f"docs/{page}") for page in named if (DOCS / page).exists())
    documents = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    lost = [page for page in documents - named if Path(page).name not in linked]
    made_with_the_site = {
        "changelog.md",
        "conduct.md",
        "contributing.md",
        "security.md",
        "who-learns-what.md",
    }
    assert (lost, named - documents) == ([], made_with_the_site)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built_site(tmp_path_factory.mktemp("site"))


SHOWN = ("stylesheet", "icon", "preload", "preconnect")


class _Fetched(HTMLParser):
    """Collects what a browser fetches to show a page."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        shown = tag == "link" and given.get("rel") in SHOWN
        address = given.get("href") if shown else given.get("src")
        if address:
            self.addresses.append(address)


@pytest.mark.slow
def test_pages_fetch_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        parser = _Fetched()
        parser.feed(page.read_text(encoding="utf-8"))
        assert parser.addresses
        outside = [one for one in parser.addresses if re.match(r"(https?:)?//", one)]
        assert (page.name, outside) == (page.name, [])
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()[\s\"']*(https?:)?//", sheet.read_text("utf-8"))


@pytest.mark.slow
def test_every_document_is_a_page(site: Path) -> None:
    sources = (path.relative_to(DOCS).with_suffix(".html") for path in DOCS.rglob("*.md"))
    pages = {path.relative_to(site) for path in site.rglob("*.html")}
    assert {*sources, Path("changelog.html"), Path("contributing.html")} <= pages


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "name"),
    [
        ("runs", "secure_apfed.runs.run.run"),
        ("sums", "apfed_protocols.sums.MaskedSum"),
        ("alignment", "apfed_protocols.psi.align"),
        ("attacks", "apfed_attacks.run.run_attacks"),
    ],
)
def test_the_reference_describes_public_names(site: Path, page: str, name: str) -> None:
    text = (site / "api" / f"{page}.html").read_text(encoding="utf-8")
    assert f'id="{name}"' in text


@pytest.mark.slow
def test_the_reference_shows_an_example_at_every_everyday_name(site: Path) -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in (site / "api").glob("*.html"))
    parts = dict(re.findall(r'<h\d id="([\w.]+)"(.*?)(?=<h\d id=)', pages, re.DOTALL))
    places = {name: f"{getattr(secure_apfed, name).__module__}.{name}" for name in EVERYDAY_NAMES}
    prompt = '<span class="gp">&gt;&gt;&gt; </span>'
    assert [name for name, place in places.items() if prompt not in parts[place]] == []


def test_every_public_name_stands_in_the_reference_and_in_prose() -> None:
    pages = "".join(text_of(f"docs/api/{path.name}") for path in (DOCS / "api").glob("*.md"))
    described = re.findall(r"^::: (\S+)$", pages, re.MULTILINE)
    prose = text_of("docs/python.md")
    values = load_public_names()
    # A table has no module of its own, nor have names for types.
    homes = {
        name: value.__module__
        for name, value in values.items()
        if callable(value) and value.__module__ != "typing"
    }
    places = {name: f"{home}.{name}." for name, home in homes.items()}
    parts = tuple(f"{part}." for part in described)
    assert [name for name, place in places.items() if not place.startswith(parts)] == []
    assert [name for name in values if f"`{name}`" not in prose] == []
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", secure_apfed.__version__)


NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_stripped_and_the_page_names_it(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.outputs for cell in code if cell.outputs or cell.execution_count] == []
    assert [found for cell in code for found in missing(cell.source)] == []
    assert f"({path.name})" in text_of("docs/notebooks/index.md")


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    notebook = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=250, kernel_name="python3", resources=where).execute()
    assert list(tmp_path.iterdir()) == []
