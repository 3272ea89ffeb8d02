"""The architecture that docs/architecture.md promises, held against the source itself."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path

import pytest

from tests.architecture_rules import (
    LAYERS,
    Module,
    all_is_true,
    attacks_ask_no_method,
    floors,
    no_method_by_name,
    no_pickled_arrays,
    one_way,
    parse,
    settings_are_names,
    the_tree,
    without_cycles,
)
from tests.docs.pages import HOOK
from tests.loaded import modules_loaded

Rule = Callable[[Mapping[str, Module]], list[str]]

ROOT = Path(__file__).resolve().parent.parent
TREE = the_tree(ROOT)

RULES: tuple[Rule, ...] = (
    one_way,
    without_cycles,
    all_is_true,
    no_pickled_arrays,
    attacks_ask_no_method,
    settings_are_names,
    no_method_by_name,
)

# A rule, planted modules as "NAME: SOURCE | NAME: SOURCE", and what it must say of them.
PLANTED: tuple[tuple[Rule, str, str], ...] = (
    (one_way, "apfed_protocols.a: import secure_apfed.errors", "against the direction"),
    (one_way, "secure_apfed.a: from apfed_attacks import run", "against the direction"),
    (one_way, "apfed_attacks.a: def f():\n import apfed_experiments", "against the direction"),
    (
        one_way,
        "secure_apfed.cli: | apfed_experiments.a: from secure_apfed import cli",
        "composition root",
    ),
    (
        one_way,
        "secure_apfed.estimator: | secure_apfed.runs.a: import secure_apfed.estimator",
        "composition root",
    ),
    (
        without_cycles,
        "apfed_attacks.a: from apfed_attacks import b | apfed_attacks.b: import apfed_attacks.a",
        "apfed_attacks.a imports apfed_attacks.b",
    ),
    (
        without_cycles,
        (
            "apfed_attacks: from apfed_attacks.a import x | "
            "apfed_attacks.a: from apfed_attacks import y"
        ),
        "apfed_attacks.a imports apfed_attacks",
    ),
    (settings_are_names, "secure_apfed.settings.a: import numpy", "a:1 imports numpy"),
    (
        settings_are_names,
        "secure_apfed.settings.a: def f():\n from secure_apfed.models import NETWORKS",
        "a:2 imports secure_apfed.models",
    ),
    (
        settings_are_names,
        "secure_apfed.settings: from apfed_protocols.sums import SECURE_SUMS",
        "settings:1 imports apfed_protocols.sums",
    ),
    (all_is_true, "apfed_attacks.a: __all__: list[str] = []\ndef b(): ...", "hides b"),
    (all_is_true, "apfed_attacks.a: class B: ...", "has no __all__"),
    (no_pickled_arrays, "apfed_attacks.a: np.load('x', allow_pickle=True)", "allows pickles"),
    (
        attacks_ask_no_method,
        "apfed_attacks.a: def f():\n from secure_apfed.methods.terms import objective_of",
        "apfed_attacks.a:2 imports secure_apfed.methods.terms",
    ),
    (no_method_by_name, "apfed_attacks.a: m == 'tvfl'", "apfed_attacks.a:1 names tvfl"),
    (no_method_by_name, "secure_apfed.a: x = ('tvfl', 'else')", "names tvfl"),
    (no_method_by_name, "secure_apfed.methods.a: m == 'tvfl'", "names tvfl"),
    (no_method_by_name, "apfed_experiments.report.a: f('tvfl')", "names tvfl"),
    (no_method_by_name, "apfed_experiments.a: m in ('tvfl', 'x')", "names tvfl"),
    (no_method_by_name, "apfed_experiments.a: m.startswith('tvfl')", "names tvfl"),
    (
        no_method_by_name,
        "apfed_experiments.a: match m:\n  case 'x'|'tvfl': pass",
        "apfed_experiments.a:2 names tvfl",
    ),
)

ALLOWED: tuple[tuple[Rule, str], ...] = (
    (
        one_way,
        (
            "secure_apfed.cli: import apfed_experiments | apfed_attacks.a: import apfed_protocols"
            " | secure_apfed.commands.a: import apfed_attacks"
        ),
    ),
    (
        without_cycles,
        (
            "apfed_attacks.a: import apfed_attacks.b | "
            "apfed_attacks.b: def f(): import apfed_attacks.a"
        ),
    ),
    (
        settings_are_names,
        (
            "secure_apfed.names: | secure_apfed.settings.a: import re\nfrom pydantic import Field\n"
            "from secure_apfed import names\nfrom secure_apfed.settings import Settings"
            " | secure_apfed.data: import numpy"
        ),
    ),
    (all_is_true, "apfed_attacks.a: __all__ = ['X', 'f']\nX = 1\ndef f(): ...\ndef _g(): ..."),
    (all_is_true, "secure_apfed.cli: __all__ = ['main']\ndef main(): ...\ndef run(): ..."),
    (no_pickled_arrays, "apfed_attacks.a: np.load('x', allow_pickle=False)"),
    (attacks_ask_no_method, "apfed_attacks.live.a: from secure_apfed.methods import METHODS"),
    (no_method_by_name, "secure_apfed.methods.a: name = 'tvfl'"),
    (no_method_by_name, "apfed_experiments.a: run(method='tvfl')\nm == 'tvfl-0'"),
)


def _planted(text: str) -> dict[str, Module]:
    sources = dict(part.split(":", 1) for part in text.split(" | "))
    return {name: parse(name, source.strip()) for name, source in sources.items()}


def test_the_tree_is_found() -> None:
    assert {module.layer for module in TREE.values()} == set(LAYERS)
    assert "apfed_protocols.sums.interface" in TREE


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_our_packages_keep(rule: Rule) -> None:
    offences = rule(TREE)
    assert not offences, "\n".join(offences)


def test_packages_give_all_that_they_say() -> None:
    for name, module in TREE.items():
        if module.is_package:
            loaded = import_module(name)
            names = getattr(loaded, "__all__", ())
            assert [each for each in names if not hasattr(loaded, each)] == [], name


def test_rules_find_what_is_planted_and_permit_the_rest() -> None:
    for rule, sources, says in PLANTED:
        (offence,) = rule(_planted(sources))
        assert says in offence
    for rule, sources in ALLOWED:
        assert rule(_planted(sources)) == []


UNSAFE = (
    "__all__ = ['b']", "import pickle", "from torch import load", "eval('1')", "exec('1')",
    "import marshal", "torch.load('x')", "yaml.load('x', Loader=yaml.FullLoader)",
)  # fmt: skip
SEEDED_OR_OUTSIDE = (
    "import random", "from numpy import random", "np.random.default_rng(1)", "import socket",
    "torch.manual_seed(1)", "import secrets", "os.urandom(1)", "from time import monotonic",
    "date.today()", "datetime.datetime.now()",
)  # fmt: skip


@pytest.mark.parametrize(
    ("module", "lines"),
    [
        ("attacks/apfed_attacks/a.py", UNSAFE),
        ("protocols/apfed_protocols/a.py", UNSAFE + SEEDED_OR_OUTSIDE),
    ],
)
def test_the_linter_refuses_pickles_and_in_protocols_clocks_and_other_randomness(
    module: str, lines: tuple[str, ...]
) -> None:
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
    "from secure_apfed import CkksSum": 30,
    "from secure_apfed import Config": 60,
    "from secure_apfed import load_model": 100,
}
"""What a part costs a reader: modules of ours that it loads, at most."""

FLOORS = 11
"""Of `secure_apfed`, at most."""

KEYS = 157
"""Lines of the page of a run's keys, at most."""


@pytest.fixture(scope="module")
def loaded() -> dict[str, set[str]]:
    """The modules of ours that each statement loads."""
    return modules_loaded([*LOADED, "from secure_apfed import run"])


@pytest.mark.parametrize(("statement", "most"), LOADED.items())
def test_a_part_loads_few_modules(statement: str, most: int, loaded: dict[str, set[str]]) -> None:
    assert len(loaded[statement]) <= most, "\n".join(sorted(loaded[statement]))


def test_loaded_modules_are_counted(loaded: dict[str, set[str]]) -> None:
    assert len(loaded["from secure_apfed import run"]) > max(LOADED.values())


def test_the_reader_of_a_model_loads_nothing_that_trains(loaded: dict[str, set[str]]) -> None:
    trains = ("secure_apfed.methods", "secure_apfed.exchange", "secure_apfed.alignment",
              "apfed_protocols.sums")  # fmt: skip
    found = loaded["from secure_apfed import load_model"]
    assert "secure_apfed.runs.solo" in found
    assert not [name for name in found if name.startswith(trains)]


def test_the_house_has_few_floors() -> None:
    found = floors(TREE)
    assert len(found) <= FLOORS, "\n".join(found)


def test_floors_are_counted_by_parts_and_circles_whole() -> None:
    house = (
        "secure_apfed.runs: | secure_apfed.runs.a: import secure_apfed.runs.b | "
        "secure_apfed.runs.b: from secure_apfed.data import x | secure_apfed.data: | "
        "secure_apfed.data.c: import secure_apfed.names, apfed_protocols | apfed_protocols: | "
        "secure_apfed.names: def late():\n import secure_apfed.runs.a"
    )
    assert floors(_planted(house)) == ["runs", "data", "names"]
    house += (
        " | secure_apfed.solo: from secure_apfed.data import c"
        " | secure_apfed.data.d: import secure_apfed.solo"
    )
    assert floors(_planted(house)) == ["runs", "data", "solo", "names"]


def test_settings_have_few_keys() -> None:
    assert len(HOOK.keys("run").splitlines()) <= KEYS
