"""The architecture that docs/architecture.md promises, held against the source itself."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.architecture_rules import (
    LAYERS,
    Module,
    all_is_true,
    attacks_ask_no_method,
    documented,
    no_method_by_name,
    one_way,
    parse,
    the_tree,
    unsafe_calls,
    without_cycles,
    without_weak_randomness_or_io,
)

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
