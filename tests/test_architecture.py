"""The architecture that docs/architecture.md promises, held against the source itself."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path

import pytest

from tests import architecture_rules
from tests.docs.pages import HOOK

Tree = Mapping[str, architecture_rules.Module]
Rule = Callable[[Tree], list[str]]

ROOT = Path(__file__).resolve().parent.parent

OURS = {"P": "apfed_protocols", "S": "secure_apfed", "A": "apfed_attacks", "E": "apfed_experiments"}

# By rule, planted modules as "NAME: SOURCE | NAME: SOURCE", and what it must say of them; packages
# of ours by their letters.
PLANTED: Mapping[Rule, tuple[tuple[str, str], ...]] = {
    architecture_rules.one_way: (
        ("P.a: import S.errors", "against the direction"),
        ("S.a: from A import run", "against the direction"),
        ("A.a: def f():\n import E", "against the direction"),
        ("S.cli: | E.a: from S import cli", "composition root"),
        ("S.interfaces: | S.runs.a: import S.interfaces", "composition root"),
    ),
    architecture_rules.find_import_cycles: (
        ("A.a: from A import b | A.b: import A.a", "apfed_attacks.a imports apfed_attacks.b"),
        ("A: from A.a import x | A.a: from A import y", "apfed_attacks.a imports apfed_attacks"),
    ),
    architecture_rules.settings_are_names: (
        ("S.settings.a: import numpy", "a:1 imports numpy"),
        (
            "S.settings.a: def f():\n from S.models import x",
            "a:2 imports secure_apfed.models",
        ),
        ("S.settings: from P.sums import x", "settings:1 imports apfed_protocols.sums"),
    ),
    architecture_rules.all_is_true: (
        ("A.a: __all__: list[str] = []\ndef b(): ...", "hides b"),
        ("P.trees: class B: ...", "has no __all__"),
    ),
    architecture_rules.no_pickled_arrays: (
        ("A.a: np.load('x', allow_pickle=True)", "allows pickles"),
    ),
    architecture_rules.find_attacks_that_ask_methods: (
        ("A.a: def f():\n from S.methods.terms import x", "a:2 imports secure_apfed.methods.terms"),
    ),
    architecture_rules.no_method_by_name: (
        ("A.a: m == 'tvfl'", "apfed_attacks.a:1 names tvfl"),
        ("S.a: x = ('tvfl', 'else')", "names tvfl"),
        ("S.methods.a: m == 'tvfl'", "names tvfl"),
        ("E.report.a: f('tvfl')", "names tvfl"),
        ("E.a: m in ('tvfl', 'x')", "names tvfl"),
        ("E.a: m.startswith('tvfl')", "names tvfl"),
        ("E.a: match m:\n  case 'x'|'tvfl': pass", "apfed_experiments.a:2 names tvfl"),
    ),
}

RULES = tuple(PLANTED)

ALLOWED: Mapping[Rule, tuple[str, ...]] = {
    architecture_rules.one_way: ("S.cli: import E | A.a: import P | S.commands.a: import A",),
    architecture_rules.find_import_cycles: ("A.a: import A.b | A.b: def f(): import A.a",),
    architecture_rules.settings_are_names: (
        "S.base.names: | S.settings.a: import re, pydantic, S.base.names\nimport S.settings",
    ),
    architecture_rules.all_is_true: (
        "A.a: __all__ = ['X', 'f']\nX = 1\ndef f(): ...\ndef _g(): ...",
        "A.a: def b(): ...",
        "S.cli: __all__ = ['main']\ndef main(): ...\ndef run(): ...",
    ),
    architecture_rules.no_pickled_arrays: ("A.a: np.load('x', allow_pickle=False)",),
    architecture_rules.find_attacks_that_ask_methods: ("A.live.a: from S.methods import METHODS",),
    architecture_rules.no_method_by_name: (
        "S.methods.a: name = 'tvfl'",
        "E.a: run(method='tvfl')\nm == 'tvfl-0'",
    ),
}


def plant_module(text: str) -> dict[str, architecture_rules.Module]:
    spelt = re.sub(r"\b[PSAE](?=[.: ]|$)", lambda letter: OURS[letter.group()], text)
    sources = dict(part.split(":", 1) for part in spelt.split(" | "))
    return {
        name: architecture_rules.parse(name, source.strip()) for name, source in sources.items()
    }


@pytest.fixture
def tree() -> Mapping[str, architecture_rules.Module]:
    """Every module of our packages, parsed once in a process."""
    return architecture_rules.the_tree(ROOT)


def test_the_tree_is_found(tree: Tree) -> None:
    assert {module.layer for module in tree.values()} == set(architecture_rules.LAYERS)
    assert "apfed_protocols.sums.interface" in tree


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_our_packages_keep(rule: Rule, tree: Tree) -> None:
    offences = rule(tree)
    assert not offences, "\n".join(offences)


def test_packages_give_all_that_they_say(tree: Tree) -> None:
    for name, module in tree.items():
        if module.is_package:
            loaded = import_module(name)
            names = getattr(loaded, "__all__", ())
            assert [each for each in names if not hasattr(loaded, each)] == [], name


def test_rules_find_what_is_planted_and_permit_the_rest() -> None:
    for rule in RULES:
        for sources, says in PLANTED[rule]:
            (offence,) = rule(plant_module(sources))
            assert says in offence
        for sources in ALLOWED[rule]:
            assert rule(plant_module(sources)) == []


UNSAFE = (
    "__all__ = ['b']",
    "import pickle",
    "from torch import load",
    "eval('1')",
    "exec('1')",
    "import marshal",
    "torch.load('x')",
    "yaml.load('x', Loader=yaml.FullLoader)",
)
SEEDED_OR_OUTSIDE = (
    "import random",
    "from numpy import random",
    "np.random.default_rng(1)",
    "import socket",
    "torch.manual_seed(1)",
    "import secrets",
    "os.urandom(1)",
    "from time import monotonic",
    "date.today()",
    "datetime.datetime.now()",
)


@pytest.mark.parametrize(
    ("module", "lines"),
    [
        ("attacks/apfed_attacks/a.py", UNSAFE),
        ("protocols/apfed_protocols/a.py", UNSAFE + SEEDED_OR_OUTSIDE),
    ],
)
def test_the_linter_refuses_what_protocols_must_not_do(module: str, lines: tuple[str, ...]) -> None:
    head = "import datetime\nimport os\nfrom datetime import date\nimport numpy as np\n"
    head += "import torch\nimport yaml\n"
    check = [sys.executable, "-m", "ruff", "check", "--output-format", "json", "-"]
    check += ["--select", "S,TID251,F822", "--stdin-filename", module]
    told = subprocess.run(
        check, cwd=ROOT, input=head + "\n".join(lines), capture_output=True, text=True, check=False
    )
    found = {one["location"]["row"] for one in json.loads(told.stdout)}
    assert found == {head.count("\n") + at for at, _ in enumerate(lines, start=1)}


LOADED = {
    "from secure_apfed import attacks, errors, exchange, privacy, psi, sums": 10,
    "from secure_apfed.sums import CkksSum": 30,
    "from secure_apfed import Config": 25,
    "from secure_apfed import load_model": 75,
    "from apfed_attacks import evaluate": 105,
}
"""What a part costs a reader: modules of ours that it loads, at most."""

ASKED = {
    "apfed": (25, 8),
    "single_view": (18, 10),
    "votes": (30, 9),
    "votes_randomised": (21, 9),
    "joint": (30, 12),
    "joint_sum": (29, 10),
    "joint_teacher": (21, 8),
}
"""What a method costs its reader: names of ours that its file imports, and modules, at most."""

FLOORS = 11  # of `secure_apfed`, at most
ROOMS = 26  # folders and files right in `secure_apfed`, at most; three of them only give names
KEYS = 175  # lines of the page of a run's keys, at most


@pytest.fixture(scope="module")
def loaded() -> dict[str, set[str]]:
    """The modules of ours that each statement loads."""
    return architecture_rules.list_loaded_modules([*LOADED, "from secure_apfed import run"])


@pytest.mark.parametrize(("statement", "maximum"), LOADED.items())
def test_a_part_loads_few_modules(
    statement: str, maximum: int, loaded: dict[str, set[str]]
) -> None:
    assert len(loaded[statement]) <= maximum, "\n".join(sorted(loaded[statement]))


@pytest.mark.parametrize(("method", "maximum"), ASKED.items())
def test_a_method_asks_few_names(method: str, maximum: tuple[int, int], tree: Tree) -> None:
    names, modules = architecture_rules.own_imports(tree[f"secure_apfed.methods.{method}"])
    assert names <= maximum[0]
    assert modules <= maximum[1]


def test_names_of_ours_are_counted_once_each() -> None:
    source = "import numpy\nfrom S.data import x, y\nfrom P import z\nfrom numpy import a\n"
    module = plant_module(f"S.a: {source}def f():\n from S.data import x")["secure_apfed.a"]
    assert architecture_rules.own_imports(module) == (3, 2)


def test_the_reader_of_a_model_loads_nothing_that_trains(loaded: dict[str, set[str]]) -> None:
    trains = (
        "secure_apfed.methods",
        "secure_apfed.exchange",
        "secure_apfed.alignment",
        "apfed_protocols.sums",
    )
    found = loaded["from secure_apfed import load_model"]
    assert "secure_apfed.runs.active_model" in found
    assert len(loaded["from secure_apfed import run"]) > max(LOADED.values()), "they are counted"
    assert not [name for name in found if name.startswith(trains)]


def test_the_evaluation_of_arrays_loads_nothing_of_runs(loaded: dict[str, set[str]]) -> None:
    of_runs = ("secure_apfed.methods", "secure_apfed.runs", "apfed_attacks.recorded")
    found = loaded["from apfed_attacks import evaluate"]
    assert "apfed_attacks.foreign" in found
    assert not [name for name in found if name.startswith(of_runs)]


def test_the_house_has_few_floors(tree: Tree) -> None:
    found = architecture_rules.floors(tree)
    assert len(found) <= FLOORS, "\n".join(found)


def test_the_house_has_few_rooms() -> None:
    rooms = {
        path.name
        for path in (ROOT / "secure_apfed").iterdir()
        if path.suffix == ".py" or (path / "__init__.py").is_file()
    }
    rooms.remove("__init__.py")
    assert len(rooms) <= ROOMS, "\n".join(sorted(rooms))


def test_floors_are_counted_by_parts_and_circles_whole() -> None:
    house = (
        "S.runs: | S.runs.a: import S.runs.b | S.runs.b: from S.data import x | S.data: | "
        "S.data.c: import S.names, P | P: | S.names: def late():\n import S.runs.a"
    )
    assert architecture_rules.floors(plant_module(house)) == ["runs", "data", "names"]
    house += " | S.models: from S.data import c | S.data.d: import S.models"
    assert architecture_rules.floors(plant_module(house)) == ["runs", "data", "models", "names"]


def test_settings_have_few_keys() -> None:
    assert len(HOOK.keys("run").splitlines()) <= KEYS
