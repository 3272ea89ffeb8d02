"""Code of others by name: where it may stand, who may name it, and what it may be."""

import math
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from apfed_attacks.table import expand_choices
from secure_apfed.config import Config
from secure_apfed.config.file import load_config_text, load_settings_text
from secure_apfed.config.plain_yaml import format_yaml
from secure_apfed.data.catalogue import DATASETS
from secure_apfed.errors import ConfigError, PromiseError
from secure_apfed.labellers import LABELLERS
from secure_apfed.learning.own_code import (
    UserFunctions,
    UserFunctionSettings,
    refuse_user_functions,
    split_user_functions,
)
from secure_apfed.measures.tasks import TASKS
from secure_apfed.methods import METHODS
from secure_apfed.privacy.defences import DEFENCES, Leaving, gradient_defences
from secure_apfed.privacy.guard import GUARDS, make_guard
from secure_apfed.privacy.noise import NoiseSource
from secure_apfed.runs.active_model import load_model
from secure_apfed.runs.folder import RunFolder
from secure_apfed.runs.run import run, run_in_memory
from secure_apfed.settings import OwnLossSettings, plugins
from secure_apfed.settings.plugins import ENTRY_POINT_GROUPS, PluginKind
from secure_apfed.testing import check_method, check_objective
from tests.docs.pages import DOCS
from tests.secure_apfed.small_runs import small_config

CODE = '''
from dataclasses import replace

import torch
from pydantic import Field

from apfed_attacks.labels.representations import ModelCompletion
from secure_apfed.data.catalogue import DATASETS
from secure_apfed.labellers import Ridge
from secure_apfed.measures.tasks import Classification
from secure_apfed.methods.single_view import SingleView
from secure_apfed.networks.objectives import Objective
from secure_apfed.privacy.defences import GradientDefence
from secure_apfed.privacy.guard import GaussianGuard, RepresentationGuard
from secure_apfed.settings import Settings
from secure_apfed.settings import MethodSettings


class MethodOfOthersSettings(MethodSettings):
    columns: int = Field(4, ge=1)

    title = "a method of others"
    can_predict_locally = True
    has_passives = False


class OfMethods(SingleView):
    settings = MethodOfOthersSettings


class OfTasks(Classification):
    name = "stages"
    learnt_by = ("apfed_c",)


class OfLabellers(Ridge):
    name = "ridge_of_others"


OfDatasets = replace(DATASETS["breast_cancer"], title="People")


def OfNetworks(features):
    return torch.nn.Linear(features[0], 4)


class MarginSettings(Settings):
    margin: float = Field(0.5, ge=0, le=1)


class OfObjectives(Objective):
    settings = MarginSettings

    def __init__(self, settings, *, representation, features):
        super().__init__()
        self.margin = settings.margin
        self.decoder = torch.nn.Linear(representation[0], features[0])

    def forward(self, z_BD, features_B):
        return (self.decoder(z_BD) - features_B).abs().clamp(min=self.margin).mean()


class Mixed(OfObjectives):
    """Its rows read each other, whatever somebody says of it."""

    def forward(self, z_BD, features_B):
        return super().forward(z_BD - z_BD.mean(0), features_B)


class Halved(Settings):
    factor: float = Field(0.5, gt=0, lt=1)


class OfDefences(GradientDefence):
    name = "halved"
    protects = ("contributions",)
    gives = "it halves gradients"
    settings = Halved

    def __init__(self, settings, *, noise, classes):
        self.factor = settings.factor

    def protect_gradient(self, gradient_BD, leaving):
        return gradient_BD * self.factor


class OfGuards(GaussianGuard):
    name = "gaussian_of_others"


class Silent(RepresentationGuard):
    """It says nothing of its noise."""

    name = "silent"

    def release(self, h_BD, *, step, rows):
        return h_BD


class OfAttacks(ModelCompletion):
    name = "completion_of_others"


class WithAName(MethodOfOthersSettings):
    name: __import__("typing").Literal["taken"]


class Named(SingleView):
    settings = WithAName


class Untaught(Classification):
    name = "untaught"


class Another(ModelCompletion):
    pass


NUMBER = 3
'''
KINDS: tuple[PluginKind, ...] = tuple(ENTRY_POINT_GROUPS)
# Kinds whose names are looked up as settings are read, and not later.
AT_ONCE: tuple[PluginKind, ...] = (
    "datasets",
    "defences",
    "guards",
    "labellers",
    "methods",
    "tasks",
)


def text_with(kind: PluginKind, name: Any) -> str:
    """A run's file in which this name stands where names of the kind do."""
    like = {"labellers": "votes", "objectives": "apfed"}.get(kind, "apfed_c")
    content: dict[str, Any] = small_config(like).model_dump(mode="json", exclude_unset=True)
    holder, key = {
        "attacks": (content, "attacks"),
        "datasets": (content["data"], "dataset"),
        "defences": (content, "defences"),
        "guards": (content["guard"], "mechanism"),
        "labellers": (content["method"], "labeller"),
        "methods": (content, "method"),
        "networks": (content["model"], "network"),
        "objectives": (content.setdefault("passives", {}).setdefault("default", {}), "objective"),
        "tasks": (content, "task"),
    }[kind]
    if kind == "defences":
        name = [name if isinstance(name, dict) else {"kind": name}]
    holder[key] = [name] if kind == "attacks" else name
    return format_yaml(content)


def take(text: str) -> Config:
    """Read a run's file of one's own, and look up its attacks, as `run` does."""
    config = load_config_text(text, own=True)
    expand_choices(config.attacks)
    return config


def use_of_others(text: str) -> None:
    """Read a proposal or a shared file, ask it for code, and look up its attacks."""
    config = load_config_text(text, source="a proposal")
    refuse_user_functions(config, source="a proposal")
    expand_choices(config.attacks)


def class_of(kind: PluginKind) -> str:
    return f"Of{kind.capitalize()}"


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with code of others, from which a command is started."""
    (tmp_path / "code_of_others.py").write_text(CODE)
    (tmp_path / "never_loaded.py").write_text("raise SystemExit('it was imported')")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def installed(beside: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same as an installed package, which declares a name of each kind."""
    info = beside / "of_others-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: of-others\nVersion: 1.0\n")
    lines = []
    for kind in KINDS:
        lines += [f"[{ENTRY_POINT_GROUPS[kind]}]", f"of_{kind} = code_of_others:{class_of(kind)}"]
        lines += [f"unseen_{kind} = never_loaded:Thing"]
    (info / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(beside)
    return beside


def code_in(config: Config, kind: PluginKind) -> str:
    objective = config.passives["default"].objective
    finders: Mapping[PluginKind, Callable[[], Any]] = {
        "attacks": lambda: config.attacks[0].name,
        "datasets": lambda: config.data.dataset,
        "defences": lambda: config.defences[0].kind,
        "guards": lambda: config.guard.mechanism,
        "labellers": lambda: config.method.labeller_names[0],
        "methods": lambda: config.method.name,
        "networks": lambda: config.model.network,
        "objectives": lambda: objective.code if isinstance(objective, OwnLossSettings) else "",
        "tasks": lambda: config.task,
    }
    return str(finders[kind]())


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_takes_code_where_a_name_may_stand(beside: Path, kind: PluginKind) -> None:
    code = f"code_of_others:{class_of(kind)}"
    assert code_in(take(text_with(kind, code)), kind) == code


@pytest.mark.parametrize("kind", KINDS)
def test_a_name_of_an_installed_package_stands_for_its_code(
    installed: Path, kind: PluginKind
) -> None:
    expected = f"of_{kind}" if kind == "attacks" else f"code_of_others:{class_of(kind)}"
    assert code_in(take(text_with(kind, f"of_{kind}")), kind) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_misspelt_name_of_an_installed_package_is_suggested(
    installed: Path, kind: PluginKind
) -> None:
    with pytest.raises(ConfigError, match=f"did you mean 'of_{kind}'"):
        take(text_with(kind, f"oof_{kind}"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["never_loaded:Thing", "unseen_{}"])
def test_nobody_names_code_for_another(installed: Path, kind: PluginKind, name: str) -> None:
    with pytest.raises(ConfigError, match=r"names code|is unknown|expected one of"):
        use_of_others(text_with(kind, name.format(kind)))
    assert "never_loaded" not in sys.modules


@pytest.mark.parametrize("kind", AT_ONCE)
def test_the_refusal_says_how_a_party_takes_what_it_trusts(
    beside: Path, kind: PluginKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugins, "_trusted_import_paths", set())
    code = f"code_of_others:{class_of(kind)}"
    for table in (DATASETS, DEFENCES, GUARDS, LABELLERS, METHODS, TASKS):
        monkeypatch.delitem(table, code, raising=False)
    text = text_with(kind, code)
    with pytest.raises(ConfigError, match=f"set the environment variable (.*)={code}") as refused:
        load_config_text(text)
    variable = str(refused.value).rpartition("variable ")[2].partition("=")[0]
    monkeypatch.setenv(variable, f"other:Thing, {code}")
    assert code_in(load_config_text(text), kind) == code


WRONG: Mapping[str, tuple[PluginKind, str]] = {
    "Absent": ("methods", "has no 'Absent'"),
    "NUMBER": ("methods", r"expected a secure_apfed.methods.Method, or a subclass, got int"),
    "OfTasks": ("methods", "expected a subclass of .*Method, got OfTasks"),
    "Named": ("methods", "leave `name` out of WithAName"),
    "OfMethods": ("tasks", "expected a subclass of .*Task, got OfMethods"),
    "Untaught": ("tasks", "says in `learnt_by` no method that learns it"),
    "OfLabellers": ("datasets", "expected a .*DataSet, got ABCMeta"),
    "OfDatasets": ("labellers", "expected a subclass of .*Labeller, got DataSet"),
    "OfGuards": ("defences", "expected a subclass of .*GradientDefence, got OfGuards"),
    "OfDefences": ("guards", "expected a subclass of .*RepresentationGuard, got OfDefences"),
    "Another": ("attacks", "there is another attack model_completion"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_plugin_of_its_kind_is_refused(beside: Path, name: str) -> None:
    kind, advice = WRONG[name]
    with pytest.raises(ConfigError, match=advice):
        take(text_with(kind, f"code_of_others:{name}"))


SETTINGS: Mapping[str, tuple[PluginKind, Mapping[str, Any], str]] = {
    "a method's unknown key": ("methods", {"colums": 3}, "did you mean 'columns'"),
    "a method's wrong type": ("methods", {"columns": "x"}, "columns: expected a whole number"),
    "a method's range": ("methods", {"columns": 0}, "columns: expected a number >= 1"),
    "a defence's unknown key": ("defences", {"facto": 0.2}, "facto: is an unknown key; did you me"),
    "a defence's range": ("defences", {"factor": 2}, "factor: expected a number < 1, got 2"),
    "an objective's unknown key": ("objectives", {"margi": 0.2}, "margi: is an unknown key; did y"),
    "an objective's wrong type": ("objectives", {"margin": "x"}, "margin: expected a number, got"),
    "an objective's range": ("objectives", {"margin": 2}, r"margin: expected a number <= 1, got 2"),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_of_others_are_validated_as_ours(beside: Path, case: str) -> None:
    kind, options, advice = SETTINGS[case]
    key = "kind" if kind == "defences" else "name"
    said = {key: f"code_of_others:{class_of(kind)}", **options}
    with pytest.raises(ConfigError, match=advice):
        run_in_memory(load_config_text(text_with(kind, said), own=True), None)


@pytest.mark.parametrize(("name", "epsilon"), [("OfGuards", 8.0), ("Silent", math.inf)])
def test_a_guard_of_others_promises_what_it_says(beside: Path, name: str, epsilon: float) -> None:
    config = load_config_text(text_with("guards", f"code_of_others:{name}"), own=True)
    guard = make_guard(config.guard, delta=config.delta, releases=10, key=bytes(32))
    assert guard.mechanism().epsilon_of(10, config.delta) == pytest.approx(epsilon, rel=1e-3)


def test_a_defence_of_others_changes_what_leaves(beside: Path) -> None:
    said = {"kind": "code_of_others:OfDefences", "factor": 0.25}
    config = load_config_text(text_with("defences", said), own=True)
    noise = NoiseSource(bytes(32), secret=True)
    (defence,) = gradient_defences(config.defences, "contributions", noise=noise, classes=2)
    gradient_BD = torch.ones(3, 2)
    assert torch.equal(
        defence.protect_gradient(gradient_BD, Leaving(0, "active")), 0.25 * gradient_BD
    )


def test_a_partys_own_file_names_what_is_installed(installed: Path) -> None:
    text = "network: of_networks\nobjective: of_objectives\n"
    settings = load_settings_text(UserFunctionSettings, text, source="party.yaml", own=True)
    assert settings.network == "code_of_others:OfNetworks"
    assert settings.objective == "code_of_others:OfObjectives"


def test_options_go_to_the_party_alone(beside: Path) -> None:
    said = {"name": "code_of_others:OfObjectives", "margin": 0.25}
    config = load_config_text(text_with("objectives", said), own=True)
    shared, named = split_user_functions(config, "active", ("passive-1",))
    assert "margin" not in shared.model_dump_json()
    refuse_user_functions(shared, source="the proposal")
    code = UserFunctions.from_settings(named["passive-1"], code_folder=beside)
    settings = shared.passives["default"].objective
    assert isinstance(settings, OwnLossSettings)
    made: Any = code.make_objective(settings, owner="p", representation=(4,), features=(3,))
    assert made.margin == 0.25


@pytest.mark.parametrize(("name", "keeps"), [("OfObjectives", True), ("Mixed", False)])
def test_what_somebody_says_of_a_class_of_objectives_is_measured(
    beside: Path, name: str, keeps: bool
) -> None:
    code = UserFunctions.from_settings(
        split_user_functions(
            load_config_text(text_with("objectives", f"code_of_others:{name}"), own=True),
            "active",
            ("passive-1",),
        )[1]["passive-1"]
    )
    made = code.make_objective(
        OwnLossSettings(row_wise=True), owner="p", representation=(4,), features=(3,)
    )
    draw = torch.Generator().manual_seed(0)
    batch = torch.randn(8, 4, generator=draw), torch.randn(8, 3, generator=draw)
    if keeps:
        check_objective(made, *batch)
        return
    with pytest.raises(PromiseError, match="Mixed says row_wise = True"):
        check_objective(made, *batch)


def test_a_folder_or_model_that_names_code_is_refused_unless_this_process_took_it(
    beside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(load_config_text(text_with("tasks", "code_of_others:OfTasks"), own=True), beside / "run")
    assert load_model(beside / "run").classes == ("malignant", "benign")
    monkeypatch.delitem(TASKS, "code_of_others:OfTasks")
    monkeypatch.delitem(sys.modules, "code_of_others")
    for read in (load_model, lambda path: RunFolder(path).load_config()):
        with pytest.raises(ConfigError, match="only the party that runs code may name it"):
            read(beside / "run")
    assert "code_of_others" not in sys.modules


def test_an_attack_that_a_folder_names_is_refused(beside: Path) -> None:
    text = text_with("attacks", "never_loaded:Thing")
    with pytest.raises(ConfigError, match="only the party that runs code may name it"):
        expand_choices(load_config_text(text, source="runs/theirs/config.yaml").attacks)


def test_another_process_of_the_party_takes_its_settings(
    beside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config_text(text_with("tasks", "code_of_others:OfTasks"), own=True)
    sent = pickle.dumps(config)
    monkeypatch.delitem(TASKS, config.task)
    assert pickle.loads(sent) == config
    assert config.task in TASKS


@pytest.mark.slow
def test_a_method_of_others_keeps_the_contract_of_ours(beside: Path) -> None:
    check_method(
        load_config_text(text_with("methods", {"name": "code_of_others:OfMethods"}), own=True),
        beside,
    )


@pytest.mark.slow
def test_the_printed_package_is_installed_and_trains(tmp_path: Path) -> None:
    """Without a network: a wheel is built from the folder, and put into a folder of its own."""
    target = tmp_path / "installed"
    package = DOCS / "examples" / "barlow_twins"
    how = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--target", str(target)]
    subprocess.run([sys.executable, "-m", "pip", "install", *how, str(package)], check=True)
    said = {"name": "barlow_twins", "off_diagonal": 0.01}
    (tmp_path / "run.yaml").write_text(text_with("objectives", said))
    command = [sys.executable, "-m", "secure_apfed.cli", "run", "run.yaml", "--no-baselines"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(target), *sys.path])}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    card = (tmp_path / "runs" / "test" / "config.yaml").read_text()
    assert "apfed_barlow_twins:BarlowTwins" in card
