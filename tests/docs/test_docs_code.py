"""Code in the documents: it compiles, what it imports is there, and whole files are taken.

What the guides' examples do is tested beside what they explain; here the start page and the
tutorial's tables are run as printed.
"""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.datasets import load_digits

from secure_apfed.cli import execute
from secure_apfed.config.file import load_config_text
from secure_apfed.config.plain_yaml import parse_yaml
from tests.architecture_rules import LAYERS, the_tree
from tests.docs.pages import DOCUMENTS, ROOT, blocks

START, TUTORIAL = "docs/start.md", "docs/tutorial.md"
TREE = the_tree(ROOT)


def _imports(code: str) -> Iterator[tuple[str, str | None]]:
    """Yield each module of ours that is imported, and each name from it."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            named: list[tuple[str, str | None]] = [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            named = [(node.module, alias.name) for alias in node.names]
        else:
            continue
        yield from ((module, name) for module, name in named if module.split(".")[0] in LAYERS)


def missing(code: str) -> list[str]:
    """What the code imports of us that is not there; read from sources, since extras may lack."""
    offences = []
    for module, name in _imports(code):
        if module not in TREE or not (
            name is None or name in _public(module) or f"{module}.{name}" in TREE
        ):
            offences.append(f"{module}: {name}")
    return offences


def _public(module: str) -> set[str]:
    for node in ast.walk(TREE[module].tree):
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if isinstance(value, ast.List) and ast.unparse(node).startswith("__all__"):
            return set(ast.literal_eval(value))
    return set()


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


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the start page's file, and an image to predict."""
    folder = tmp_path_factory.mktemp("start")
    (text,) = blocks(START, "yaml")
    (folder / "run.yaml").write_text(text)
    np.save(folder / "new_images.npy", load_digits().images[:3, None])
    return folder


@pytest.mark.slow
def test_the_start_page_runs_as_printed(
    started: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(started)
    monkeypatch.setenv("COLUMNS", "160")
    lines = [line for block in blocks(START, "sh") for line in block.splitlines()]
    calls = [line.split("#")[0].split() for line in lines if line.startswith("secure-apfed")]
    for program, *arguments in calls:
        assert (program, execute(arguments)) == ("secure-apfed", 0)
    told = capsys.readouterr().out
    assert "epsilon_v of passive-1, one person's votes" in told
    assert "best alone" in told
    assert re.search(r"^encrypted +votes_encrypted", told, re.MULTILINE)
    there = ("runs/first/report.html", "runs.html", "model.onnx")
    assert all((started / name).is_file() for name in there)


def test_the_tutorial_makes_the_tables_that_its_run_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (script,) = blocks(TUTORIAL, "python")
    exec(compile(script, TUTORIAL, "exec"), {})
    config = load_config_text(blocks(TUTORIAL, "yaml")[0])
    assert config.data.parties is not None
    columns = {
        name: set(pd.read_csv(party.file).columns) for name, party in config.data.parties.items()
    }
    assert all(config.data.id_column in of_party for of_party in columns.values())
    assert config.data.label_column in columns[config.data.active]
    assert columns[config.data.active] - {"late"} == set(pd.read_csv("new_customers.csv").columns)
