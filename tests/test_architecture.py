"""The architecture that docs/architecture.md promises, held against the source itself."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel

from secure_apfed.methods import METHODS
from secure_apfed.settings import Settings
from secure_apfed.settings.run import RunSettings
from tests.architecture_rules import (
    LAYERS,
    Module,
    all_is_true,
    attacks_ask_no_method,
    documented,
    floors,
    no_method_by_name,
    one_way,
    parse,
    settings_are_names,
    the_tree,
    unsafe_calls,
    without_cycles,
    without_weak_randomness_or_io,
)
from tests.loaded import modules_loaded

Rule = Callable[[Mapping[str, Module]], list[str]]

ROOT = Path(__file__).resolve().parent.parent
TREE = the_tree(ROOT)

RULES: tuple[Rule, ...] = (
    one_way,
    without_cycles,
    all_is_true,
    without_weak_randomness_or_io,
    unsafe_calls,
    documented,
    attacks_ask_no_method,
    settings_are_names,
)

_TABLE = {"secure_apfed.methods": "METHODS: dict[str, int] = {'tvfl': 1}"}

# A rule, planted modules by name, and what it must say of them.
PLANTED: tuple[tuple[Rule, dict[str, str], str], ...] = (
    (one_way, {"apfed_protocols.a": "import secure_apfed.errors"}, "against the direction"),
    (one_way, {"secure_apfed.a": "from apfed_attacks import run"}, "against the direction"),
    (
        one_way,
        {"apfed_attacks.a": "def f():\n    import apfed_experiments"},
        "against the direction",
    ),
    (
        one_way,
        {"secure_apfed.cli": "", "apfed_experiments.a": "from secure_apfed import cli"},
        "composition root",
    ),
    (
        one_way,
        {"secure_apfed.estimator": "", "secure_apfed.runs.a": "import secure_apfed.estimator"},
        "composition root",
    ),
    (
        without_cycles,
        {
            "apfed_attacks.a": "from apfed_attacks import b",
            "apfed_attacks.b": "import apfed_attacks.a",
        },
        "apfed_attacks.a imports apfed_attacks.b",
    ),
    (
        without_cycles,
        {
            "apfed_attacks": "from apfed_attacks.a import x",
            "apfed_attacks.a": "from apfed_attacks import y",
        },
        "apfed_attacks.a imports apfed_attacks",
    ),
    (settings_are_names, {"secure_apfed.settings.a": "import numpy"}, "a:1 imports numpy"),
    (
        settings_are_names,
        {"secure_apfed.settings.a": "def f():\n    from secure_apfed.models import NETWORKS"},
        "a:2 imports secure_apfed.models",
    ),
    (
        settings_are_names,
        {"secure_apfed.settings": "from apfed_protocols.sums import SECURE_SUMS"},
        "settings:1 imports apfed_protocols.sums",
    ),
    (all_is_true, {"apfed_attacks.a": "__all__ = ['b']"}, "exports b"),
    (all_is_true, {"apfed_attacks.a": "__all__: list[str] = []\ndef b(): ..."}, "hides b"),
    (all_is_true, {"apfed_attacks.a": "class B: ..."}, "has no __all__"),
    (without_weak_randomness_or_io, {"apfed_protocols.a": "import random"}, "uses random"),
    (
        without_weak_randomness_or_io,
        {"apfed_protocols.a": "from numpy import random"},
        "numpy.random",
    ),
    (without_weak_randomness_or_io, {"apfed_protocols.a": "np.random.default_rng(1)"}, "np.random"),
    (without_weak_randomness_or_io, {"apfed_protocols.a": "torch.manual_seed(1)"}, "manual_seed"),
    (without_weak_randomness_or_io, {"apfed_protocols.a": "import secrets"}, "uses secrets"),
    (
        without_weak_randomness_or_io,
        {"apfed_protocols.a": "from time import monotonic"},
        "uses time",
    ),
    (without_weak_randomness_or_io, {"apfed_protocols.a": "x = date.today()"}, "uses date.today"),
    (
        without_weak_randomness_or_io,
        {"apfed_protocols.a": "import datetime\nx = datetime.datetime.now()"},
        "uses datetime.datetime.now",
    ),
    (unsafe_calls, {"apfed_attacks.a": "import pickle"}, "uses pickle"),
    (unsafe_calls, {"apfed_attacks.a": "torch.load('x')"}, "uses torch.load"),
    (unsafe_calls, {"apfed_attacks.a": "from torch import load"}, "uses torch.load"),
    (unsafe_calls, {"apfed_attacks.a": "eval('1')"}, "calls eval"),
    (unsafe_calls, {"apfed_attacks.a": "np.load('x', allow_pickle=True)"}, "allows pickles"),
    (unsafe_calls, {"apfed_attacks.a": "yaml.load(text, Loader=yaml.FullLoader)"}, "FullLoader"),
    (documented, {"apfed_attacks.a": "x = 1"}, "no docstring"),
    (
        attacks_ask_no_method,
        {"apfed_attacks.a": "def f():\n    from secure_apfed.methods.terms import objective_of"},
        "apfed_attacks.a:2 imports secure_apfed.methods.terms",
    ),
    (
        no_method_by_name,
        {**_TABLE, "apfed_attacks.a": "m == 'tvfl'"},
        "apfed_attacks.a:1 names tvfl",
    ),
    (no_method_by_name, {**_TABLE, "secure_apfed.a": "x = ('tvfl', 'else')"}, "names tvfl"),
    (no_method_by_name, {**_TABLE, "apfed_experiments.report.a": "f('tvfl')"}, "names tvfl"),
    (no_method_by_name, {**_TABLE, "apfed_experiments.a": "m in ('tvfl', 'x')"}, "names tvfl"),
    (no_method_by_name, {**_TABLE, "apfed_experiments.a": "m.startswith('tvfl')"}, "names tvfl"),
    (
        no_method_by_name,
        {**_TABLE, "apfed_experiments.a": "match m:\n  case 'x' | 'tvfl': pass"},
        "apfed_experiments.a:2 names tvfl",
    ),
)

ALLOWED: tuple[tuple[Rule, dict[str, str]], ...] = (
    (
        one_way,
        {
            "secure_apfed.cli": "import apfed_experiments",
            "secure_apfed.commands.a": "import apfed_attacks",
            "apfed_attacks.a": "import apfed_protocols",
        },
    ),
    (
        without_cycles,
        {
            "apfed_attacks.a": "import apfed_attacks.b",
            "apfed_attacks.b": "def f(): import apfed_attacks.a",
        },
    ),
    (
        settings_are_names,
        {
            "secure_apfed.names": "",
            "secure_apfed.settings.a": (
                "import re\nfrom pydantic import Field\nfrom secure_apfed import names\n"
                "from secure_apfed.settings import Settings"
            ),
            "secure_apfed.data": "import numpy",
        },
    ),
    (all_is_true, {"apfed_attacks.a": "__all__ = ['X', 'f']\nX = 1\ndef f(): ...\ndef _g(): ..."}),
    (all_is_true, {"secure_apfed.cli": "__all__ = ['main']\ndef main(): ...\ndef run(): ..."}),
    (without_weak_randomness_or_io, {"apfed_protocols.randomness": "import secrets"}),
    (without_weak_randomness_or_io, {"apfed_protocols.a": "from datetime import date"}),
    (without_weak_randomness_or_io, {"apfed_attacks.a": "import time, random"}),
    (unsafe_calls, {"apfed_attacks.a": "network.eval()\nnp.load('x', allow_pickle=False)"}),
    (attacks_ask_no_method, {"apfed_attacks.live.a": "from secure_apfed.methods import METHODS"}),
    (no_method_by_name, {**_TABLE, "secure_apfed.methods.a": "m == 'tvfl'"}),
    (no_method_by_name, {**_TABLE, "apfed_experiments.a": "run(method='tvfl')\nm == 'tvfl-0'"}),
)


def _planted(sources: Mapping[str, str]) -> dict[str, Module]:
    return {name: parse(name, source) for name, source in sources.items()}


def test_the_tree_is_found() -> None:
    assert {module.layer for module in TREE.values()} == set(LAYERS)
    assert "apfed_protocols.sums.interface" in TREE


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_our_packages_keep(rule: Rule) -> None:
    offences = rule(TREE)
    assert not offences, "\n".join(offences)


def test_no_method_is_asked_for_by_name() -> None:
    offences = no_method_by_name(TREE)
    assert not offences, "\n".join(offences)


@pytest.mark.parametrize(("rule", "sources", "says"), PLANTED)
def test_a_rule_finds(rule: Rule, sources: dict[str, str], says: str) -> None:
    offences = rule(_planted(sources))
    assert len(offences) == 1
    assert says in offences[0]


@pytest.mark.parametrize(("rule", "sources"), ALLOWED)
def test_a_rule_permits(rule: Rule, sources: dict[str, str]) -> None:
    assert rule(_planted(sources)) == []


LOADED = {
    "from secure_apfed import CkksSum": 30,
    "from secure_apfed import Config": 60,
    "from secure_apfed import load_model": 100,
}
"""What a part costs a reader: modules of ours that it loads, at most."""

FLOORS = 11
"""Of `secure_apfed`, at most."""

KEYS = 140
"""That settings of a run may have, at most."""


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
    house = {
        "secure_apfed.runs": "", "secure_apfed.runs.a": "import secure_apfed.runs.b",
        "secure_apfed.runs.b": "from secure_apfed.data import x", "secure_apfed.data": "",
        "secure_apfed.data.c": "import secure_apfed.names, apfed_protocols", "apfed_protocols": "",
        "secure_apfed.names": "def late():\n    import secure_apfed.runs.a",
    }  # fmt: skip
    assert floors(_planted(house)) == ["runs", "data", "names"]
    house["secure_apfed.solo"] = "from secure_apfed.data import c"
    house["secure_apfed.data.d"] = "import secure_apfed.solo"
    assert floors(_planted(house)) == ["runs", "data", "solo", "names"]


def _keys(*settings: type[BaseModel]) -> set[tuple[str, str]]:
    """Class and name of each key of settings and of those within them, where it is declared.

    A key with a single value only tells one class of a union from the others, and is not counted.
    """
    found, seen, left = set[tuple[str, str]](), set[type[BaseModel]](), list(settings)
    while left:
        if (cls := left.pop()) in seen:
            continue
        seen.add(cls)
        for name, field in cls.model_fields.items():
            within = list(_settings_in(field.annotation))
            left += within
            told = get_origin(field.annotation) is Literal and len(get_args(field.annotation)) == 1
            if not within and not told:
                home = next(
                    one for one in cls.__mro__[::-1] if name in getattr(one, "model_fields", ())
                )
                found.add((home.__name__, name))
    return found


def _settings_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _settings_in(inner)


def test_settings_have_few_keys() -> None:
    found = _keys(RunSettings, *(method.settings for method in METHODS.values()))
    assert len(found) <= KEYS, "\n".join(f"{cls}.{name}" for cls, name in sorted(found))


def test_keys_are_counted_where_they_are_declared() -> None:
    class Of(Settings):
        epsilon: float = 1.0

    class One(Of):
        kind: Literal["one"] = "one"

    class Two(Of):
        kind: Literal["two"] = "two"
        delta: float = 1.0

    class All(Settings):
        mode: Literal["a", "b"] = "a"
        each: tuple[One | Two, ...] = ()

    assert _keys(All) == {("All", "mode"), ("Of", "epsilon"), ("Two", "delta")}
