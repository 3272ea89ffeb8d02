"""Every value of every setting goes through plan, project, join and check, or is a sentence."""

import copy
import itertools
import shutil
import types
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Union

import annotated_types
import numpy as np
import pandas as pd
import pytest
from pydantic.fields import FieldInfo

from apfed_protocols.psi import SET_INTERSECTIONS
from secure_apfed.alignment import make_intersection
from secure_apfed.commands.check import Checks
from secure_apfed.commands.project import _show_proposal
from secure_apfed.config.file import load_config_text
from secure_apfed.config.plain_yaml import format_yaml
from secure_apfed.errors import ApfedError, ConfigError
from secure_apfed.methods import METHODS, assign_roles
from secure_apfed.organisations import project
from secure_apfed.runs.folder import SEALED_PROJECT
from secure_apfed.settings import RunSettings, Settings

ROWS = 24
BASES: Mapping[str, dict[str, Any]] = {
    "votes": {"method": "votes", "guard": {"mechanism": "none"}},
    "split_nn_sum": {
        "method": "split_nn_sum",
        "guard": {"mechanism": "none"},
        "secure_sum": {"scheme": "plain", "masks": "pairwise", "clip": 8.0},
    },
    "apfed": {
        "method": "apfed",
        "guard": {"mechanism": "gaussian", "epsilon": 8.0},
        "secure_sum": {"scheme": "plain", "masks": "pairwise", "clip": 1.0},
        "passives": {"default": {"objective": {"name": "contrastive"}}},
    },
}
# What only works where other keys are set, too: these are set with the value.
WITH: Mapping[str, dict[str, Any]] = {
    "alignment.protocol=vole": {"alignment": {"dealer": True}},
    "alignment.protocol=opprf": {"alignment": {"dealer": True}},
    "alignment.runs_with_a_peer=1": {"alignment": {"history": "history"}},
}
# Where a name is looked up in a table.
TABLES: Mapping[str, tuple[str, ...]] = {
    "alignment.protocol": ("auto", "ot", "ecdh", "vole", "opprf", "opprf_ot", "circuit"),
    "method": tuple(METHODS),
    "task": ("classification", "regression", "ranking"),
    "measure": ("accuracy", "auc", "f1"),
    "secure_sum.scheme": ("plain", "ckks", "bfv", "crypten"),
    "model.network": ("mlp", "linear", "cnn", "gru"),
}
# Of numbers without an end, what is beyond any use; and of what would only cost time here.
LARGEST = 1_000
SKIPPED = ("name", "seed", "train.device", "data.folder", "data.limit")


def values_of(annotation: Any, metadata: list[Any]) -> Iterator[Any]:
    """Yield what a field may be: every word of a few, and the ends of what is counted."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        inner, *marks = typing.get_args(annotation)
        yield from values_of(inner, [*marks, *metadata])
    elif origin is Literal:
        yield from typing.get_args(annotation)
    elif origin in (Union, types.UnionType):
        for part in typing.get_args(annotation):
            yield from values_of(part, metadata)
    elif annotation is bool:
        yield from (False, True)
    elif annotation is type(None):
        yield None
    elif annotation in (int, float):
        yield from ends_of(annotation, metadata)


def ends_of(kind: type[int] | type[float], metadata: list[Any]) -> Iterator[Any]:
    """Yield the smallest and largest number that a field takes, and those right beyond."""
    marks = [
        mark for one in metadata for mark in (one.metadata if isinstance(one, FieldInfo) else [one])
    ]
    near = 1 if kind is int else 1e-6
    low: float | None = None
    high: float = LARGEST
    for mark in marks:
        if isinstance(mark, annotated_types.Ge):
            low = bound_of(mark.ge)
        if isinstance(mark, annotated_types.Gt):
            low = bound_of(mark.gt) + near
        if isinstance(mark, annotated_types.Le):
            high = min(high, bound_of(mark.le))
        if isinstance(mark, annotated_types.Lt):
            high = min(high, bound_of(mark.lt) - near)
    if low is not None:
        yield from (kind(low), kind(low) - 1)
    yield kind(high)


def bound_of(value: Any) -> float:
    return float(value)


def flatten_settings(annotation: Any) -> type[Settings] | None:
    """Return the section that a field is, if it is one, or null."""
    parts = typing.get_args(annotation) or (annotation,)
    found = [one for one in parts if isinstance(one, type) and issubclass(one, Settings)]
    return found[0] if found else None


def walk(kind: type[Settings], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every key, with each value to try."""
    for name, field in kind.model_fields.items():
        key = f"{above}{name}"
        if key in SKIPPED:
            continue
        if key in TABLES:
            yield from ((key, value) for value in TABLES[key])
        elif (section := flatten_settings(field.annotation)) is not None and name != "method":
            yield from walk(section, f"{key}.")
        else:
            for value in dict.fromkeys(values_of(field.annotation, list(field.metadata))):
                yield key, value


CASES = [
    pytest.param(base, key, value, id=f"{base}-{key}={value}")
    for (key, value), base in itertools.product(dict.fromkeys(walk(RunSettings)), BASES)
]


def change_setting(base: str, key: str, value: Any, folder: Path) -> dict[str, Any]:
    """Return the settings of a run between three tables, of which one key has this value."""
    settings: dict[str, Any] = {
        "name": "walked",
        "data": {
            "dataset": "tables",
            "active": "bank",
            "id_column": "id",
            "label_column": "late",
            "parties": {"bank": {"file": str(folder / "bank.csv")}, "shop": {}, "clinic": {}},
        },
        "model": {"network": "mlp", "hidden": [4], "representation": 2},
        "train": {"epochs": 1, "batch_size": 8},
        **copy.deepcopy(BASES[base]),
    }
    merge(settings, WITH.get(f"{key}={value}", {}))
    *above, last = key.split(".")
    place = settings
    for name in above:
        place = place.setdefault(name, {})
        if not isinstance(place, dict):
            pytest.skip(f"{name} has no settings here")
    place[last] = value
    return settings


def merge(into: dict[str, Any], more: Mapping[str, Any]) -> None:
    for name, value in more.items():
        if isinstance(value, Mapping):
            merge(into.setdefault(name, {}), value)
        else:
            into[name] = value


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tables")
    draw = np.random.default_rng(0)
    for name in ("bank", "shop", "clinic"):
        rows = pd.DataFrame({"id": [f"{at:04d}" for at in range(ROWS)]})
        rows[f"{name}-a"], rows[f"{name}-b"] = draw.normal(size=(2, ROWS))
        if name == "bank":
            rows["late"] = np.where(rows["bank-a"] > 0, "yes", "no")
        rows.to_csv(folder / f"{name}.csv", index=False)
    return folder


def go_through(settings: Mapping[str, Any], tables: Path, folder: Path) -> None:
    """Propose, join, seal, take over and check, all parties in this process.

    Raises ApfedError: the settings are refused, with a sentence.
    """
    config = load_config_text(format_yaml(settings), source="run.yaml")
    roles = assign_roles(METHODS[config.method.name], config, "bank", ("shop", "clinic"))
    addresses = {name: f"127.0.0.1:{7001 + at}" for at, name in enumerate(roles)}
    run_by = {name: f"of {name}" for name in roles if name in ("aggregator", "dealer")}
    home = {name: folder / name for name in roles}

    def show(name: str) -> Any:
        return lambda *asked: _show_proposal(*asked, party=name, as_json=True)

    project.propose_project(
        config, "bank", home["bank"], addresses=addresses, run_by=run_by, show=show("bank")
    )
    proposal = home["bank"] / project.PROPOSAL_FILE
    answers = []
    for name in [one for one in roles if one != "bank"]:
        table = tables / f"{name}.csv"
        own = {"file": str(table)} if table.exists() else None
        project.answer_proposal(proposal, name, home[name], table=own, show=show(name))
        answers.append(home[name] / project.ANSWER_FILE.format(name))
    project.seal_project(answers, home["bank"])
    for name in ("shop", "bank"):
        if name in roles:
            if name != "bank":
                project.accept_project(home["bank"] / SEALED_PROJECT, name, home[name])
            checks = Checks(home[name] / "party.yaml")
            for finding in checks._check_contract():
                assert finding.state != "missing", finding


def refusal_of(attempt: Callable[[], object]) -> str:
    """Return with which sentence something was refused, or nothing; all else is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            attempt()
        except ApfedError as refused:
            return str(refused) or "refused without a word"
    return ""


def draw_up(settings: Mapping[str, Any]) -> None:
    """Do of a proposal what needs no table: its settings, its terms, and its intersections."""
    config = load_config_text(format_yaml(settings), source="run.yaml")
    shared = load_config_text(format_yaml(project.list_shared_settings(config)), source="proposal")
    assert shared.collect_terms() == config.collect_terms()
    trial = config.alignment.for_trial_ids()
    for protocol in SET_INTERSECTIONS:
        one = trial.model_copy(update={"protocol": protocol})
        make_intersection(one, session=f"plan {protocol}", dealer="dealer")


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize(("base", "key", "value"), CASES)
def test_a_value_is_drawn_up_or_refused_with_a_sentence(
    base: str, key: str, value: Any, tables: Path
) -> None:
    """The fast half: without a table, a forecast, or keys."""
    settings = change_setting(base, key, value, tables)
    assert refusal_of(lambda: draw_up(settings)) != "refused without a word"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("base", "key", "value"), CASES)
def test_a_value_goes_through_or_is_refused_with_a_sentence(
    base: str,
    key: str,
    value: Any,
    tables: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = change_setting(base, key, value, tables)
    said = refusal_of(lambda: go_through(settings, tables, tmp_path))
    assert said != "refused without a word"


def test_a_method_without_passives_is_no_project(tables: Path, tmp_path: Path) -> None:
    settings = change_setting("apfed", "method", "single_view", tables)
    said = refusal_of(lambda: go_through(settings, tables, tmp_path))
    assert "single_view trains the active alone" in said


HIDDEN = [
    pytest.param(base, id=base, marks=[] if base == "split_nn_sum" else [pytest.mark.slow])
    for base in BASES
]


@pytest.mark.slow
@pytest.mark.parametrize("base", HIDDEN)
def test_hidden_overlaps_go_through(
    base: str, tables: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = change_setting(base, "alignment.pairwise_overlaps", "hidden", tables)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        go_through(settings, tables, tmp_path)
    if base == "split_nn_sum":
        assert "not served, since a lookup tells whom" in capsys.readouterr().out
    run = tmp_path / "shop" / project.RUN_FILE
    run.write_text(
        run.read_text().replace("overlaps: hidden", "overlaps: shown\n  protocol: opprf_ot")
    )
    checks = Checks(tmp_path / "shop" / "party.yaml")
    with pytest.raises(ConfigError, match=r"differs .* in alignment\.pairwise_overlaps"):
        list(checks._check_contract())
    shutil.rmtree(tmp_path / "shop")


def test_every_section_and_every_kind_of_value_is_walked() -> None:
    keys = {key for key, _ in walk(RunSettings)}
    assert {key.partition(".")[0] for key in keys} >= {
        "method",
        "task",
        "alignment",
        "secure_sum",
        "guard",
        "train",
        "rules",
        "labels",
        "model",
        "transcript",
        "dp_sgd",
        "data",
        "delta",
        "colluders",
    }
    walked = list(walk(RunSettings))
    assert {value for key, value in walked if key == "alignment.pairwise_overlaps"} == {
        "shown",
        "hidden",
    }
    assert ("rules.restarts", -1) in walked
    assert len(walked) > 100
