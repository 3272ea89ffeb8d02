"""docs/extend.md as printed: the labeller and the task that it adds keep what is asked."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from apfed_experiments.baselines import measure_run_baselines
from apfed_experiments.finished import mount_attacks
from apfed_experiments.report import write_report
from secure_apfed.cli import execute
from secure_apfed.config import AttackChoice, Config
from secure_apfed.config.file import load_config_text
from secure_apfed.data import load_data
from secure_apfed.labellers import LABELLERS
from secure_apfed.measures.tasks import TASKS
from secure_apfed.methods import METHODS
from secure_apfed.runs.active_model import load_model
from secure_apfed.runs.folder import RunFolder
from secure_apfed.runs.run import run
from secure_apfed.settings import ModelSettings
from secure_apfed.testing import check_objective
from tests.docs.pages import blocks, program_of
from tests.secure_apfed import test_labellers
from tests.secure_apfed.small_runs import read_stderr


def register(monkeypatch: pytest.MonkeyPatch, table: Mapping[str, Any], entry: Any) -> None:
    """The line in a table, for whoever has it."""
    if isinstance(table, dict):
        monkeypatch.setitem(table, entry.name, entry)
        return
    longer = {**table, entry.name: entry}
    for module in list(sys.modules.values()):
        for key, value in list(vars(module).items()):
            if value is table:
                monkeypatch.setattr(module, key, longer)


EXTEND = "docs/extend.md"  # its programs: a labeller, a task, a secure sum, an objective


def load_printed_config(at: int) -> Config:
    text = blocks(EXTEND, "yaml")[at]
    return load_config_text(f"{text}party_seeds: shared_for_comparison\n", source=EXTEND)


@pytest.fixture
def neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    kind = program_of(EXTEND, tmp_path, at=0).Neighbours
    register(monkeypatch, LABELLERS, kind)
    return str(kind.name)


def test_the_printed_labeller_keeps_the_contract(neighbours: str) -> None:
    for holds in (
        test_labellers.test_rows_of_votes_are_short_and_those_of_linear_ones_a_matrix_times_labels,
        test_labellers.test_who_has_no_label_moves_others_only_where_it_is_said,
        test_labellers.test_clouds_are_told_apart_and_nothing_is_drawn,
    ):
        holds(neighbours)
    for opening in (test_labellers.RESPONSE, test_labellers.SUM):
        test_labellers.test_what_is_claimed_follows_from_facts_of_the_labeller(opening, neighbours)


@pytest.mark.slow
@pytest.mark.usefixtures("neighbours")
def test_the_printed_run_votes_by_it(tmp_path: Path) -> None:
    config = load_printed_config(0)
    result = run(config, tmp_path / "run")
    assert result.scores["votes"] > 0.4
    page = write_report(tmp_path / "run").read_text()
    assert "the nearest labelled rows, 3 of them" in page
    encrypted = {"method": {"name": "votes_encrypted", "labeller": "neighbours"}}
    Config.model_validate(config.model_dump(exclude_unset=True) | encrypted)


def test_the_printed_objective_reads_each_row_alone(tmp_path: Path) -> None:
    guide = program_of(EXTEND, tmp_path, at=3)
    model = ModelSettings(hidden=(8,), dropout=0.0)
    objective = guide.Absolute(
        guide.AbsoluteSettings(), representation=(4,), features=(5,), model=model
    )
    draw = torch.Generator().manual_seed(0)
    z_BD, features_BF = torch.randn(6, 4, generator=draw), torch.randn(6, 5, generator=draw)
    check_objective(objective, z_BD, features_BF)
    assert objective(z_BD, features_BF).shape == ()


@pytest.fixture
def ordinal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    kind = program_of(EXTEND, tmp_path, at=1).Ordinal
    register(monkeypatch, TASKS, kind)
    settings = METHODS["apfed_c"].settings
    monkeypatch.setattr(settings, "tasks", (*settings.tasks, kind.name))
    return kind()


def test_the_printed_loss_is_of_what_is_told(ordinal: Any) -> None:
    outputs = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 1, 2, 3, -100, 3])
    told = ordinal.decode_outputs(outputs)
    torch.testing.assert_close(told.sum(1), torch.ones(6, dtype=torch.float64))
    expected = F.nll_loss(told.log(), labels)
    torch.testing.assert_close(ordinal.compute_loss(outputs, labels), expected)
    assert ordinal.compute_loss(outputs, torch.full((6,), -100)) == 0


@pytest.mark.slow
@pytest.mark.usefixtures("ordinal")
def test_the_printed_task_is_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load_printed_config(1)
    folder = tmp_path / "run"
    result = run(config, folder)
    assert config.measure == "accuracy"
    reached = result.scores["apfed_c"]
    assert reached > 0.4
    local_models = measure_run_baselines(config, folder, result.trained)
    assert local_models is not None
    assert local_models.best.test > 0.4
    found = mount_attacks(folder, [AttackChoice(name="membership")])
    assert {one.reason for one in found} == {
        "task is ordinal: attacks on membership read the softmax of a network's outputs"
    }
    assert "classes in an order" in write_report(folder).read_text()
    data = load_data(config.data, seed=config.seed)
    told = load_model(folder).predict(data.active.features[data.test_rows])
    assert data.active.labels is not None
    right = told.argmax(1) == data.active.labels[data.test_rows]
    assert float(right.float().mean()) == pytest.approx(reached)
    config_file = RunFolder(folder).config
    refused = ["run", str(config_file), "--output", str(tmp_path / "no"), "--set"]
    assert execute([*refused, "measure=rmse"]) == 2
    assert "task is ordinal; use accuracy, auc" in read_stderr(capsys)
    assert execute([*refused, "train.spread_labels=true"]) == 2
