"""Attacks on runs of one's own code: in the result of `train`, and from a stored folder."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn

from apfed_attacks.interface import AttackResult
from apfed_attacks.run import run_attacks
from apfed_experiments.finished import mount_attacks
from secure_apfed import Passive, load_model
from secure_apfed.attacks import load_recording
from secure_apfed.cli import execute
from secure_apfed.errors import ConfigError, DataError, ModelError
from secure_apfed.interfaces.training import load_training_recording, train
from secure_apfed.interfaces.training_result import TrainingResult
from secure_apfed.runs.run import run_in_memory
from secure_apfed.settings.plugins import import_callable
from tests.secure_apfed.small_runs import small_config
from tests.secure_apfed.test_training import (
    PARTIES,
    QUICK,
    beside,
    draw,
    make_active,
    make_passive,
    parameters_of,
)

__all__ = ["beside"]

ATTACKS: list[str | Mapping[str, Any]] = [
    "model_completion",
    {"name": "inverse_network", "options": {"shadow_rows": 40}},
    {"name": "membership", "options": {"shadow_models": 4, "epochs": 1}},
]
SAME = {**QUICK, "party_seeds": "shared_for_comparison"}


def encode(features: tuple[int, ...]) -> nn.Module:
    return nn.Sequential(nn.Linear(features[0], 8), nn.ReLU(), nn.Linear(8, 6))


def score(features: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Linear(features[0], classes)


def make_parties() -> tuple[Any, list[Passive]]:
    return make_active(encoder=encode, head=score), [make_passive(), make_passive("registry")]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrainingResult]:
    """A run of one's own code in a folder, with attacks."""
    folder: Path = tmp_path_factory.mktemp("trained") / "run"
    active, passives = make_parties()
    return folder, train(active, passives, attacks=ATTACKS, folder=folder, **SAME)


def test_each_attack_that_was_asked_for_has_results(
    trained: tuple[Path, TrainingResult],
) -> None:
    _, result = trained
    found = {each.attack for each in result.attacks if each.advantage is not None}
    declined = {each.attack: each.reason for each in result.attacks}
    assert found == {"model_completion", "inverse_network", "membership"}, declined
    pairs = {each.options.get("shadow_rows") for each in result.attacks if is_inversion(each)}
    assert pairs == {40}


def is_inversion(result: AttackResult) -> bool:
    return result.attack == "inverse_network"


def test_the_same_attacks_are_mounted_without_a_folder(
    trained: tuple[Path, TrainingResult],
) -> None:
    _, result = trained
    active, passives = make_parties()
    again = train(active, passives, attacks=ATTACKS, **SAME)
    assert [each.setting for each in again.attacks] == [each.setting for each in result.attacks]


@pytest.mark.parametrize(
    "direction",
    [
        "passive reads labels",
        "passive reads features of clinic",
        "outsider reads who trained",
        "active reads features of lab: not attacked",
    ],
)
def test_the_report_says_what_each_direction_tells(
    direction: str, trained: tuple[Path, TrainingResult]
) -> None:
    _, result = trained
    assert any(line.startswith(direction) for line in result.report.splitlines())


def test_a_report_says_that_no_attack_was_asked_for() -> None:
    active, passives = make_parties()
    result = train(active, passives, **QUICK)
    assert result.attacks == ()
    assert "attacks: none was asked for" in result.report


def test_a_wrong_name_is_refused_before_the_training() -> None:
    active = make_active()
    before = parameters_of(active.encoder)
    with pytest.raises(ConfigError, match=r"attacks: .*did you mean 'membership'"):
        train(active, [make_passive(), make_passive("b")], attacks=["membershp"], **QUICK)
    assert torch.equal(before, parameters_of(active.encoder))


def test_a_stored_run_is_attacked_again_with_what_made_its_networks(
    trained: tuple[Path, TrainingResult],
) -> None:
    folder, result = trained
    recording = load_training_recording(folder, *make_parties())
    found = run_attacks(recording, recording.config.attacks, seed=recording.config.seed)
    assert found == result.attacks
    assert mount_attacks(folder, recording=recording) == result.attacks


def test_a_stored_run_needs_the_rows_that_were_handed_in(
    trained: tuple[Path, TrainingResult],
) -> None:
    folder, _ = trained
    active, passives = make_parties()
    with pytest.raises(ConfigError, match=r"data\.parties\.clinic\.file"):
        load_recording(folder, encoder=encode, head=score)
    with pytest.raises(DataError, match="120 IDs, but 119 rows"):
        load_training_recording(folder, active, [make_passive(rows=torch.ones(119, 4)), *passives])


def test_modules_that_are_handed_in_take_the_weights_of_the_run(
    trained: tuple[Path, TrainingResult],
) -> None:
    folder, result = trained
    active = make_active(encoder=encode((4,)), head=nn.Linear(6, 2))
    recording = load_training_recording(folder, active, make_parties()[1])
    assert recording.model is not None
    assert torch.equal(parameters_of(recording.model), parameters_of(result.model))
    assert torch.equal(parameters_of(active.encoder), parameters_of(result.model[0]))


def test_a_run_by_names_is_loaded_with_its_code(beside: Path) -> None:
    changes = {"network": "my_own_nets:encode", "head_network": "my_own_nets:score"}
    run_in_memory(small_config("apfed_r", model={**changes, "projection": 4}), beside / "run")
    with pytest.raises(ModelError, match=r"load_model\(folder, encoder=...\)"):
        load_recording(beside / "run")
    made = {
        name: import_callable(f"my_own_nets:{name}", setting="") for name in ("encode", "score")
    }
    recording = load_recording(beside / "run", encoder=made["encode"], head=made["score"])
    assert recording.model is not None
    assert tuple(recording.model(recording.data.table.features[:3]).shape) == (3, 2)


def test_networks_whose_output_passives_sent_are_handed_in_by_party(tmp_path: Path) -> None:
    encoders = {"lab": nn.Linear(4, 6), "b": nn.Linear(4, 6)}
    passives = [make_passive(name, encoder=encoder) for name, encoder in encoders.items()]
    changes: dict[str, Any] = {"method": "split_nn", "model": {"projection": "none"}}
    folder = tmp_path / "run"
    train(make_active(head=nn.Linear(18, 2)), passives, folder=folder, **{**QUICK, **changes})
    with pytest.raises(ModelError, match=r"load_recording\(folder, encoders=\{'lab': ...\}\)"):
        load_training_recording(folder, make_active(), [make_passive(), make_passive("b")])
    assert load_model(folder, encoder=make_active().encoder).classes == ("0", "1")
    recording = load_training_recording(
        folder,
        make_active(),
        [make_passive(name, encoder=nn.Linear(4, 6)) for name in encoders],
    )
    for name, trained in encoders.items():
        assert torch.equal(parameters_of(recording.encoders[name]), parameters_of(trained))


def test_of_other_networks_the_weights_do_not_fit(trained: tuple[Path, TrainingResult]) -> None:
    folder, _ = trained
    with pytest.raises(ModelError, match="do not make a model"):
        load_training_recording(
            folder, make_active(encoder=nn.Linear(4, 7), head=nn.Linear(7, 2)), make_parties()[1]
        )


OURS = ("--encoder", "my_own_nets:encode", "--head", "my_own_nets:score")


@pytest.fixture
def named(beside: Path) -> Path:
    """The folder of a run whose own file names code beside it."""
    changes = {"network": "my_own_nets:encode", "head_network": "my_own_nets:score"}
    model = {**changes, "projection": 4}
    config = small_config("apfed_r", model=model, attacks=["model_completion"])
    run_in_memory(config, beside / "run")
    return beside / "run"


def test_commands_take_the_code_that_their_caller_names(
    named: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute(["attack", str(named), "--attacks", "model_completion", "--json", *OURS]) == 0
    found = json.loads(capsys.readouterr().out)["attacks"]
    assert {each["attack"] for each in found} == {"model_completion"}
    assert any(each["applicable"] for each in found)
    model = load_model(named, encoder=import_callable("my_own_nets:encode", setting=""), head=score)
    columns = [column["name"] for column in model.card["encoding"]["columns"]]
    frame = pd.DataFrame(draw(3, len(columns)).numpy(), columns=columns)
    frame.to_csv(named.parent / "rows.csv", index=False)
    rows = ["--data", str(named.parent / "rows.csv"), "--json"]
    assert execute(["predict", "--model", str(named), *rows, *OURS]) == 0
    assert len(json.loads(capsys.readouterr().out)["predictions"]) == 3


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ((), "--encoder module:Name"),
        (OURS[:2], "--head module:Name"),
        (("--encoder", "my_own_nets:absent"), "my_own_nets has no 'absent'"),
        (("--encoder", "my_own_nets"), "expected code as package.module:Name"),
        (("--passive-encoder", "my_own_nets:encode"), "expected PASSIVE=MODULE:NAME"),
    ],
)
def test_a_command_without_the_code_says_how_it_is_named(
    named: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], advice: str
) -> None:
    assert execute(["attack", str(named), "--attacks", "model_completion", *options, "--json"])
    assert advice in json.loads(capsys.readouterr().out)["error"]["message"]


def test_a_command_on_a_run_of_handed_in_rows_names_the_program_that_loads_it(
    trained: tuple[Path, TrainingResult], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = trained
    assert execute(["attack", str(folder), "--attacks", "membership", "--json"]) == 2
    message = json.loads(capsys.readouterr().out)["error"]["message"]
    assert "load_training_recording(folder, active, passives)" in message


class Wrapped(nn.Module):
    """An encoder that takes an argument with a default."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 6))

    def forward(self, x: Any) -> Any:
        return self.layers(x)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a class of one's own, and of a head of ours."""
    folder: Path = tmp_path_factory.mktemp("stored") / "run"
    passives = [make_passive(), make_passive("registry")]
    train(make_active(encoder=Wrapped, head=None), passives, folder=folder, **SAME)
    return folder


def test_a_stored_model_takes_a_class_a_function_or_a_module(stored: Path) -> None:
    module = Wrapped()
    sources: list[Any] = [Wrapped, lambda: Wrapped(8), lambda features: Wrapped(), module]
    models = [load_model(stored, encoder=source) for source in sources]
    rows = draw(5, 4)
    for model in models[1:]:
        assert torch.equal(model.network(rows), models[0].network(rows))
    assert not models[0].network.training
    network: Any = models[0].network
    assert torch.equal(parameters_of(module), parameters_of(network[0]))


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ({}, r"own is code of a party's own.*load_model\(folder, encoder=...\)"),
        ({"encoder": Wrapped, "head": nn.Linear(6, 2)}, r"its head is of this library.*leave head"),
        ({"encoder": nn.Linear(4, 6)}, "(?s)do not make a model: .*Missing key"),
        ({"encoder": lambda: Wrapped(9)}, "(?s)do not make a model: .*size mismatch"),
        ({"encoder": lambda width: Wrapped(width)}, "cannot be made: TypeError: .*'width'"),
        ({"encoder": lambda: "resnet"}, "makes a str, expected an nn.Module"),
    ],
)
def test_other_code_does_not_load_it(stored: Path, given: dict[str, Any], advice: str) -> None:
    with pytest.raises(ModelError, match=advice):
        load_model(stored, **given)


def test_a_text_names_no_code_in_python(stored: Path) -> None:
    with pytest.raises(ConfigError, match=r"encoder: code of one's own is an nn\.Module"):
        load_model(stored, encoder="my_nets:encode")  # type: ignore[arg-type]


def test_networks_of_ours_take_no_code(tmp_path: Path) -> None:
    active = make_active(encoder=None, head=nn.Linear(8, 2))
    model = {"hidden": [8], "representation": 8, "projection": 2}
    passives = [make_passive(), make_passive("registry")]
    result = train(active, passives, folder=tmp_path / "run", **{**SAME, "model": model})
    with pytest.raises(ModelError, match=r"its encoder is of this library \(auto\)"):
        load_model(tmp_path / "run", encoder=encode, head=score)
    with pytest.raises(ModelError, match="its head is code of one's own, too"):
        load_model(tmp_path / "run")
    loaded = load_model(tmp_path / "run", head=score)
    rows = draw(5, 4)
    assert torch.equal(loaded.network(rows), result.model(rows))


@pytest.mark.slow
@pytest.mark.parametrize("kind", PARTIES)
def test_every_attack_runs_or_says_why_not(kind: str) -> None:
    parties: Any = PARTIES[kind]()
    result = train(*parties, attacks="all", **QUICK)
    assert result.attacks
    for found in result.attacks:
        check_runs_or_declines(found)


def check_runs_or_declines(found: AttackResult) -> None:
    assert found.applicable is (found.advantage is not None), found
    assert found.applicable or found.reason, found
