"""Sweeps: a table of all features, points that are run once, summaries, and what is stored."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

from apfed_experiments.columns import Table
from apfed_experiments.finished import FinishedRun
from apfed_experiments.study import Trial, base_config, centralise, finish, results_of
from apfed_experiments.sweep import COLUMNS, CONFIGS, LINES, points_of, run_sweep, summarise
from secure_apfed.config import Config
from secure_apfed.data import load_data
from secure_apfed.errors import CheckpointError, DataError
from secure_apfed.planning.stored import load_sweeps
from tests.experiments.finished_runs import finished


def small(name: str = "sweep-breast-cancer") -> Config:
    base = base_config(name)
    train = base.train.model_copy(update={"epochs": 2, "evaluate_every": 2})
    return base.model_copy(update={"train": train})


@pytest.mark.parametrize("name", CONFIGS)
def test_a_centralised_table_holds_everybodys_features_of_the_same_people(name: str) -> None:
    data = load_data(base_config(name).data, seed=3)
    whole = centralise(data)
    assert whole.passives == ()
    assert whole.active.ids == data.active.ids
    assert whole.active.labels is data.active.labels
    cut = 2 if name == "sweep-digits" else 1
    widths = [table.features.shape[cut] for table in data.tables]
    assert whole.active.features.shape[cut] == sum(widths)
    # One person's row, put together by hand.
    person = data.active.ids[7]
    rows = [data.active.features[7]] + [
        table.features[table.ids.index(person)] for table in data.passives
    ]
    assert torch.equal(whole.active.features[7], torch.cat(rows, dim=cut - 1))


def test_strips_stand_in_the_order_of_the_image_whichever_the_active_holds() -> None:
    settings = base_config("sweep-digits").data
    first = centralise(load_data(settings, seed=0)).active
    third = centralise(load_data(settings.model_copy(update={"active_view": 3}), seed=0)).active
    place = {person: row for row, person in enumerate(third.ids)}
    rows = [place[person] for person in first.ids]
    assert torch.equal(first.features, third.features[rows])
    settings = small().data.model_copy(update={"overlap": 0.5})
    with pytest.raises(DataError, match=r"passive-1 does not know \d+ .* needs data.overlap: 1.0"):
        centralise(load_data(settings, seed=0))


def test_every_line_has_its_points_and_changes_one_thing(tmp_path: Path) -> None:
    base = small()
    points = points_of(base, tmp_path, epsilons=[1.0, 4.0])
    trials = [point.trial(seed) for point in points for seed in (0, 1)]
    assert len(trials) == len({trial.path for trial in trials}) == 2 * (3 + 5 * 2)
    for point in points:
        settings, plain = point.config.model_dump(), base.model_dump()
        changed = {key for key, value in settings.items() if value != plain[key]}
        assert changed <= {"name", "method", "guard", "labels"}
        protected = (point.config.guard.epsilon, point.config.labels.epsilon)
        asked = [one for one in protected if one is not None]
        assert len(asked) == len(point.line.settings) - 1
    assert {line.key for line in LINES} == {point.line.key for point in points}


@pytest.fixture(scope="module", name="trial")
def _trial(tmp_path_factory: pytest.TempPathFactory) -> Trial:
    points = points_of(small(), tmp_path_factory.mktemp("sweep"), epsilons=[4.0])
    return next(point for point in points if point.line.key == "response").trial(0)


def test_a_point_is_run_once_and_read_afterwards(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = finish(trial).outcome
    privacy = first.privacy
    assert (privacy.epsilon_x, privacy.epsilon_y, privacy.releases) == (math.inf, 4.0, 2)
    assert 0.5 < first.accuracy["apfed_c"] <= 1

    def never(*_: object, **__: object) -> None:
        raise AssertionError("run again")

    monkeypatch.setattr("apfed_experiments.study.run", never)
    assert finish(trial).outcome == first


def test_other_settings_and_damage_are_refused(trial: Trial) -> None:
    finish(trial)
    train = trial.config.train.model_copy(update={"batch_size": 17})
    for changes in (
        {"config": trial.point.config.model_copy(update={"train": train})},
        {"centralised": True},
    ):
        other = dataclasses.replace(trial.point, **changes)
        with pytest.raises(CheckpointError, match="a run with other settings"):
            finish(other.trial(0))
    whole = trial.path.read_text()
    for damage in ("", "{", "[]", '{"settings": "x"}', whole.replace("accuracy", "precision")):
        trial.path.write_text(damage)
        with pytest.raises(CheckpointError, match="holds no figures of a run"):
            finish(trial)
    trial.path.write_text(whole)
    finish(trial)


def test_losses_are_paired_by_seed_and_intervals_hold_the_mean(tmp_path: Path) -> None:
    points = [
        point for point in points_of(small(), tmp_path, epsilons=[4.0])
        if point.line.key in ("single", "plain", "fresh")
    ]  # fmt: skip
    reached = {"single": (0.5, 0.5, 0.5), "plain": (0.9, 0.8, 0.7), "fresh": (0.8, 0.7, 0.6)}
    found = [
        (point.trial(seed), finished(reached[point.line.key][seed]))
        for seed in range(3)
        for point in points
    ]
    single, plain, fresh = summarise(points, results_of(found))
    assert [one["line"].key for one in (single, plain, fresh)] == ["single", "plain", "fresh"]
    assert fresh["loss"].mean == pytest.approx(0.1)
    assert fresh["loss"].high - fresh["loss"].low < 1e-9  # the same in every seed
    assert fresh["accuracy"].low < fresh["accuracy"].mean < fresh["accuracy"].high
    assert Table(COLUMNS, [fresh]).cells[0][1:3] == ("released rows (epsilon_x)", "4")


def test_a_sweep_writes_tables_pictures_a_page_and_what_plan_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("apfed_experiments.sweep.base_config", small)

    def made_up(trial: Trial) -> FinishedRun:
        releases = 2 if trial.config.method.has_passives else 0
        return finished(0.8 + trial.config.seed / 100, releases=releases)

    monkeypatch.setattr("apfed_experiments.study.finish", made_up)
    (sweep,) = run_sweep(
        tmp_path / "out", seeds=[0, 1], jobs=1, configs=["sweep-breast-cancer"],
        store=tmp_path / "stored.json", figures=tmp_path / "figures",
    )  # fmt: skip
    assert len(sweep.rows) == 3 + 5 * 3
    (stored,) = load_sweeps((tmp_path / "stored.json").read_text())
    assert (stored.dataset, stored.seeds) == ("breast_cancer", (0, 1))
    assert stored.settings["train"]["epochs"] == 2
    assert len(stored.points) == len(sweep.rows) - 1  # nobody holds the centralised table
    assert stored.alone.mean == pytest.approx(0.805)
    picture = (tmp_path / "figures" / "epsilon-breast-cancer.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    page = (tmp_path / "out" / "index.html").read_text()
    assert "data:image/png;base64," in page
    assert "Reports of the first seed" not in page
    assert "LP-MST" in page
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["format"] == 1
