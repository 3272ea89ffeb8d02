"""What every test runs under: one thread a process, no screen, the same examples each time."""

import gc
import json
import multiprocessing
import os
import pkgutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TypeAlias

import pytest
from hypothesis import settings

# Workers of xdist share the cores.
# Set before the first import of torch, matplotlib or a subprocess of ours.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
# Tests start hundreds of processes; each would compile all of our modules again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let one environment leave out what passed in another, as `make test` does."""
    group = parser.getgroup("two environments")
    group.addoption("--write-passed", type=Path, help="write the names of tests that passed here")
    group.addoption("--skip-passed", type=Path, help="leave out the tests that this file names")


class _PassedTests:
    """A list of the tests that passed, written at the end by the process that hears of all."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._names: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self._names.append(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self._file.write_text(json.dumps(self._names))


def pytest_configure(config: pytest.Config) -> None:
    """Write who passed, where that was asked for; workers of xdist leave it to who started them."""
    file = config.getoption("write_passed", None)
    if file is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_PassedTests(file))


def _leave_out(config: pytest.Config, items: list[pytest.Item], file: Path) -> None:
    passed = set(json.loads(file.read_text()))
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
    items[:] = [item for item in items if item.nodeid not in passed]


_PLUGIN_TABLES = {
    "secure_apfed.labellers": "LABELLERS",
    "secure_apfed.measures.tasks": "TASKS",
    "secure_apfed.methods": "METHODS",
    "secure_apfed.data.catalogue": "DATASETS",
    "secure_apfed.privacy.defences": "DEFENCES",
    "secure_apfed.privacy.guard": "GUARDS",
    "apfed_attacks.table": "ATTACKS",
}


@pytest.fixture(autouse=True, scope="module")
def _forget_plugins() -> Iterator[None]:
    """Take out of our tables what the tests of a file took in: other files find ours alone."""
    yield
    for module, name in _PLUGIN_TABLES.items():
        if module in sys.modules:
            table = getattr(sys.modules[module], name)
            for plugin in set(table) - set(table.built_in_names):
                del table[plugin]


@pytest.fixture(autouse=True, scope="session")
def _quick_transfers() -> Iterator[None]:
    """Base transfers of `ot` cost 0.2 s a pair of parties; tests of them play the real ones."""
    from tests.contracts.intersections import use_quick_transfers

    with pytest.MonkeyPatch.context() as patch:
        use_quick_transfers(patch)
        yield


@pytest.hookimpl(tryfirst=True)  # before slow tests are left out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`sampled(every=k)`: of a test's cases the first and every k-th after it, others are slow."""
    seen = Counter[str]()
    for item in items:
        sampled = item.get_closest_marker("sampled")
        if sampled is not None:
            test = item.nodeid.partition("[")[0]
            if seen[test] % sampled.kwargs["every"]:
                item.add_marker(pytest.mark.slow)
            seen[test] += 1
    file = config.getoption("skip_passed", None)
    if file is not None:
        _leave_out(config, items, file)


def pytest_collection_finish() -> None:
    """Freeze what was imported: to walk through it again and again costs a tenth of all."""
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)


Children: TypeAlias = Callable[[], set[BaseProcess]]


@pytest.fixture
def own_children() -> Children:
    """The processes that this test began and that still run; an earlier one's pool may be kept."""
    before = set(multiprocessing.active_children())
    return lambda: set(multiprocessing.active_children()) - before


STARTS_OTHERS = ("local", "links")
"""Folders whose tests start processes of their own, which must find the same as this one."""
TRAINS_NOTHING = ("protocols", "contracts")
"""Those of `apfed_protocols`, beside which nothing else need be there."""


def _below(request: pytest.FixtureRequest, *folders: str) -> bool:
    return any(request.path.is_relative_to(Path(__file__).parent / name) for name in folders)


_FEW_TREES = 12
"""Of each forest that learns votes; those of a run have five times as many."""
_FEW_STEPS = 40
"""Of MixMatch; a test that asks how good it is trains it whole."""
_TEACHERS = (
    "secure_apfed.methods.student._TREE_COUNT",
    "secure_apfed.methods.local_models.TEACHERS",
)
_MIXMATCH = ("secure_apfed.baselines.networks._MIXMATCH_STEPS",)
_WHOLE = {
    "every_teacher": _TEACHERS,
    "whole_mixmatch": _MIXMATCH,
    "slow": (*_TEACHERS, *_MIXMATCH),
}
"""By marker: what a test so marked has as users have it."""


@pytest.fixture(scope="module", autouse=True)
def _short_runs(request: pytest.FixtureRequest) -> Iterator[Mapping[str, object]]:
    """Runs of tests, and those that a module's tests share, measure, choose of, and are taught by
    two local models; all have tests of their own. Give what stands elsewhere, by its place.
    """
    if _below(request, *TRAINS_NOTHING):
        yield {}
        return
    from secure_apfed.baselines import BASELINES

    few = {name: BASELINES[name] for name in ("ridge", "logistic")}
    short: dict[str, object] = {"apfed_experiments.baselines.list_candidates": lambda: few}
    if not _below(request, *STARTS_OTHERS):
        taught: tuple[object, ...] = (_FEW_TREES, tuple(few.values()))
        short |= {
            "secure_apfed.baselines.BASELINES": few,
            "secure_apfed.baselines.COMBINATIONS": {},
        }
        short |= dict(zip(_TEACHERS, taught, strict=True))
        short |= dict.fromkeys(_MIXMATCH, _FEW_STEPS)
        short["secure_apfed.methods.sum_students.TEACHERS"] = tuple(few)
    whole = {place: pkgutil.resolve_name(place) for place in short}
    with pytest.MonkeyPatch.context() as patch:
        for place, value in short.items():
            patch.setattr(place, value)
        yield whole


@pytest.fixture(autouse=True)
def _whole_where_marked(
    request: pytest.FixtureRequest,
    _short_runs: Mapping[str, object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Give a marked test all teachers, or all steps."""
    for marker, places in _WHOLE.items():
        if request.node.get_closest_marker(marker) is not None:
            for place in places:
                if place in _short_runs:
                    monkeypatch.setattr(place, _short_runs[place])
