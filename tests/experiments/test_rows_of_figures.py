"""Every figure stands beside the number of test rows that it was measured on."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from apfed_experiments.baselines import (
    DIFFERENT_TEST_ROWS,
    BaselineResult,
    BaselinesRecord,
    RunGain,
    digest_settings,
    load_baselines,
    locate_baseline_predictions,
    locate_baselines,
    measure_gain,
    measure_run_baselines,
    restrict_baselines,
)
from apfed_experiments.finished import FinishedRun, load_finished_run
from apfed_experiments.report import load_run, write_report
from apfed_experiments.report.contents import iter_tiles
from apfed_experiments.run_list import list_runs
from apfed_experiments.several import declare_study
from apfed_experiments.study import iter_metric_rows
from apfed_experiments.variants import describe_tested_rows
from secure_apfed.cli import execute
from secure_apfed.config.file import dump_settings
from secure_apfed.measures.table import ACCURACY, MEASURES, Scored
from secure_apfed.runs.folder import RunFolder, load_tested_rows, save_scores
from secure_apfed.runs.outcome import Outcome, count_measured_rows
from secure_apfed.runs.run import run
from tests.experiments.run_folder import config_of, make_votes_config, own_tables, write_run

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")
JOINT: dict[str, Any] = {
    "method": "tvfl",
    "model": {"hidden": [8], "representation": 4, "dropout": 0.0},
    "train": {"epochs": 2, "batch_size": 32, "learning_rate": 0.05},
    "secure_sum": {"scheme": "plain"},
    "guard": {"mechanism": "none"},
}
"""Joint inference, which says something of the people alone whom all parties know."""


def tables_of_fewer(folder: Path) -> dict[str, Any]:
    """Return own tables of which one party lacks a third of the people."""
    data = own_tables(folder)
    shop = pd.read_csv(folder / "shop.csv")
    shop[shop.index % 3 != 0].to_csv(folder / "shop.csv", index=False)
    return data


def play(folder: Path, **settings: Any) -> Path:
    """Play a run with its baselines; return its folder."""
    config = make_votes_config(**settings)
    result = run(config, folder)
    assert measure_run_baselines(config, folder, result.trained) is not None
    return folder


@pytest.fixture(scope="module")
def joint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a finished run of TVFL whose joint inference says nothing of some test rows."""
    folder = tmp_path_factory.mktemp("joint")
    return play(folder / "run", **JOINT, data=tables_of_fewer(folder), measure="auc")


def counts_of_scores(folder: Path) -> dict[str, int]:
    tensors = load_file(RunFolder(folder).test_scores)
    return {
        name.removesuffix("/truth"): len(tensor)
        for name, tensor in tensors.items()
        if name.endswith("/truth")
    }


def test_a_run_writes_how_many_rows_each_variant_was_measured_on(joint: Path) -> None:
    outcome = load_finished_run(joint).outcome
    assert outcome.measured_rows == counts_of_scores(joint)
    assert outcome.test_rows is not None
    assert 0 < outcome.measured_rows["tvfl"] < outcome.test_rows
    assert outcome.measured_rows["tvfl_0"] == outcome.test_rows


def test_the_gain_has_the_models_own_rows_and_figure(joint: Path) -> None:
    finished = load_finished_run(joint)
    gain = finished.gain
    assert gain is not None
    assert finished.local_models is not None
    rows = finished.outcome.measured_rows["tvfl"]
    assert gain.rows == finished.local_models.rows == rows
    assert gain.reached == pytest.approx(finished.outcome.scores["tvfl"])
    assert gain.alone == pytest.approx(finished.local_models.best.test)
    assert gain.value == pytest.approx(gain.reached - gain.alone)
    kept = load_file(RunFolder(joint).baseline_predictions)
    assert len(kept[f"{finished.local_models.best.name}/truth"]) == rows


def test_a_report_shows_the_baselines_that_a_study_measured(joint: Path, tmp_path: Path) -> None:
    alone = load_finished_run(joint).local_models
    assert alone is not None
    folder = shutil.copytree(joint, tmp_path / "of a study")
    RunFolder(folder).local_models.unlink()
    RunFolder(folder).baseline_predictions.unlink()
    assert "nobody measured what the active would do alone" in write_report(folder).read_text()
    page = write_report(folder, local_models=alone).read_text()
    assert f"over {alone.best.title}" in page
    assert "nobody measured" not in page


def test_the_gain_is_one_on_every_surface(joint: Path) -> None:
    """The report, its tiles, the document for programs, the list, and the file of local models."""
    run_read = load_run(joint)
    gain = run_read.gain
    assert gain is not None
    page = write_report(joint).read_text("utf-8")
    tiles = {tile.name: tile for tile in iter_tiles(run_read)}
    document = json.loads((joint / "privacy.json").read_bytes())
    (listed,) = list_runs(joint)
    stored = BaselinesRecord.model_validate_json(RunFolder(joint).local_models.read_bytes()).gain
    assert gain.comparison_text in page
    assert tiles["gain"].value == gain.value_text
    assert document["gain"] == gain.comparison_text
    assert listed.gain == gain.value
    assert listed.gain_text == gain.value_text
    assert stored == gain
    assert measure_gain(RunFolder(joint), run_read.config, store_without_gain(joint)) == gain


def store_without_gain(folder: Path) -> BaselinesRecord:
    record = BaselinesRecord.model_validate_json(RunFolder(folder).local_models.read_bytes())
    return record.model_copy(update={"gain": None})


def test_every_tile_of_a_figure_counts_its_own_rows(joint: Path) -> None:
    run_read = load_run(joint)
    every = run_read.outcome.test_rows
    for variant, count in counts_of_scores(joint).items():
        title = run_read.title_inference(variant)
        notes = [tile.note for tile in iter_tiles(run_read) if tile.name.startswith(f"{title} ")]
        few = f"of {count} of {every} test rows, whom all parties know"
        assert len(notes) == 2  # AUC and accuracy
        assert set(notes) == {f"of {every} test rows" if count == every else few}
    best = next(tile for tile in iter_tiles(run_read) if tile.name == "best local model")
    assert best.note.endswith(f"of {counts_of_scores(joint)['tvfl']} test rows")


@pytest.mark.slow
def test_several_seeds_compare_on_the_models_rows(tmp_path: Path) -> None:
    config = make_votes_config(**JOINT, data=tables_of_fewer(tmp_path), measure="auc")
    study = declare_study(config, tmp_path / "out", seed_count=2)
    found = study.measure(jobs=1, on_done=lambda done, total: None)
    gain = found.summary.gain
    assert gain is not None
    counts = []
    differences = []
    for seed, folder in found.folder_by_seed.items():
        (listed,) = list_runs(folder)
        assert listed.run_gain is None  # the study's baselines are of all test rows
        assert listed.gain_text == DIFFERENT_TEST_ROWS
        tested = load_tested_rows(RunFolder(folder))
        assert tested is not None
        own = config.model_copy(update={"seed": seed})
        path = locate_baselines(own, folder.parent)
        restricted = restrict_baselines(load_baselines(own, path), path, tested)
        assert restricted is not None
        (name,) = (each.name for each in restricted.baselines if each.name == gain.baseline)
        counts.append(int(tested.sum()))
        differences.append(found.score_by_seed[seed] - restricted.find_baseline(name).test)
    assert gain.test_row_range == (min(counts), max(counts))
    assert gain.gain_over_chosen.mean == pytest.approx(np.mean(differences))
    assert "test rows of each seed" in gain.sentence


# How many rows a figure is of, by what a run's result says.
COUNTS = {
    "as the run wrote": ("tvfl", {"tvfl": 7}, "of 7 of 10 test rows, whom all parties know"),
    "of all": ("tvfl", {"tvfl": 10}, "of 10 test rows"),
    "of none": ("tvfl", {"tvfl": 0}, "of none of 10 test rows"),
    "older, joint": ("tvfl", {}, "of some of 10 test rows"),
    "older, alone": ("votes", {}, "of 10 test rows"),
}


@pytest.mark.parametrize("case", COUNTS)
def test_rows_are_told_as_they_are_known(case: str) -> None:
    method, counts, expected = COUNTS[case]
    outcome = make_outcome({method: 0.5}, measured_rows=counts, test_rows=10)
    assert describe_tested_rows(config_of(method), outcome, method) == expected


def make_outcome(accuracy: Mapping[str, float], **changed: Any) -> Outcome:
    privacy = {"epsilon_x": None, "epsilon_y": None, "epsilon_model": None}
    told = {"method": next(iter(accuracy)), "accuracy": accuracy, "privacy": privacy}
    return Outcome.model_validate({**told, "wire_bytes": 1, "seconds": 1.0, **changed})


def test_a_gain_of_other_rows_is_never_told(tmp_path: Path) -> None:
    """The model says something of 250 rows, the baseline's figure is of all 410."""
    config = config_of("tvfl")
    path = write_run(tmp_path / "run", config, accuracy={"tvfl": 0.9})
    result = json.loads((path / "result.json").read_bytes())
    result["measured_rows"] = {"tvfl": 250}
    (path / "result.json").write_text(json.dumps(result))
    best = BaselineResult(name="ridge", title="Ridge", validation=0.8, test=0.6)
    record = BaselinesRecord(settings=digest_settings(config), baselines=(best,))
    RunFolder(path).local_models.write_text(record.model_dump_json())
    run_read = load_run(path)
    assert run_read.gain is None
    assert (
        next(tile for tile in iter_tiles(run_read) if tile.name == "gain").value == "not reported"
    )
    assert DIFFERENT_TEST_ROWS in write_report(path).read_text("utf-8")
    same = record.model_copy(update={"rows": 250})
    gain = measure_gain(RunFolder(path), config, same)
    assert gain is not None
    assert (gain.rows, gain.interval_text) == (250, "")
    assert gain.value == pytest.approx(0.3)


@pytest.mark.parametrize("name", ["accuracy", "auc", "log_loss"])
def test_baselines_of_a_study_are_measured_anew_on_some_rows(name: str, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    truth = draw.integers(0, 2, size=40)
    scores = draw.dirichlet([1.0, 1.0], size=40)
    scored = Scored.from_probabilities(truth, scores)
    tested = torch.arange(40) % 4 != 0
    path = tmp_path / "solo.json"
    best = BaselineResult(
        name="ridge",
        title="Ridge",
        validation=0.8,
        test=MEASURES[name].compute_value(scored),
        ranked={"auc": MEASURES["auc"].compute_value(scored)},
        influence=tuple([0.5] * 40),
    )
    people = tuple(f"p{at}" for at in range(40))
    record = BaselinesRecord(settings="x", baselines=(best,), measure=name, people=people, rows=40)
    assert restrict_baselines(record, path, tested) is None
    save_scores(locate_baseline_predictions(path), {"ridge": scored})
    found = restrict_baselines(record, path, tested)
    assert found is not None
    some = scored.select_rows(tested.nonzero().flatten().numpy())
    assert found.rows == len(some.truth) == 30
    assert found.people == tuple(person for at, person in enumerate(people) if at % 4)
    assert found.best.test == pytest.approx(MEASURES[name].compute_value(some))
    assert found.best.ranked["auc"] == pytest.approx(MEASURES["auc"].compute_value(some))
    assert len(found.best.influence) == 30
    assert restrict_baselines(record, path, tested[:20]) is None


def test_an_interval_is_not_invented() -> None:
    gain = RunGain(
        measure=ACCURACY.name, baseline="Ridge", rows=1200, reached=0.9, alone=0.8, value=0.1
    )
    assert gain.comparison_text == "+10.0 points against Ridge on the same 1,200 test rows"
    wide = gain.model_copy(update={"low": -0.02, "high": 0.2})
    assert wide.comparison_text.endswith("95 % over them, paired: -2.0 points to +20.0 points")


def test_figures_of_a_study_tell_baselines_of_the_same_rows() -> None:
    best = BaselineResult(name="ridge", title="Ridge", validation=0.8, test=0.6)
    local_models = BaselinesRecord(settings="x", baselines=(best,), rows=250)
    outcome = make_outcome({"tvfl": 0.9}, measured_rows={"tvfl": 250}, test_rows=410)
    finished = FinishedRun(
        config=config_of("tvfl"), outcome=outcome, attacks=None, local_models=local_models
    )
    rows = {figure["target"]: figure["rows"] for figure in iter_metric_rows(finished)}
    assert rows == {"task": 250, "solo": 250}
    assert count_measured_rows(finished.config, outcome, "tvfl") == 250
    older = replace(finished, local_models=local_models.model_copy(update={"rows": None}))
    assert [figure["target"] for figure in iter_metric_rows(older)] == ["task"]


@pytest.mark.parametrize("helps", ["judged", "always"])
def test_the_screen_says_whether_votes_are_used(
    helps: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    method = {"name": "votes", "prior": "labeller", "help": helps}
    data = {"dataset": "digits", "views": 4, "labelled": 30, "limit": 120, "rows": 200}
    (tmp_path / "run.yaml").write_text(dump_settings(make_votes_config(method=method, data=data)))
    folder = tmp_path / "run"
    call = ["run", str(tmp_path / "run.yaml"), "--output", str(folder), "--no-baselines"]
    assert execute(call) == 0
    screen = " ".join(capsys.readouterr().out.split())  # lines are as long as the terminal is wide
    found = load_finished_run(folder).outcome.help
    assert found is not None
    assert f"votes {found}" in screen
