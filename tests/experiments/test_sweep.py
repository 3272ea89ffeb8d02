"""Sweeps: a table of all features, points that are run once, summaries, and what is stored."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.centralised import centralise
from experiments.main_job import base_config
from experiments.sweep import CONFIGS, LINES, points_of, run_point, run_sweep, summarise
from experiments.sweep.points import Point, PointResult
from experiments.sweep.summary import as_markdown
from secure_apfed.config import Config
from secure_apfed.data import load_data
from secure_apfed.errors import CheckpointError, ConfigError, DataError
from secure_apfed.planning.stored_sweeps import load_sweeps


def small(name: str = "sweep-breast-cancer") -> Config:
    base = base_config(name)
    train = base.train.model_copy(update={"epochs": 2, "evaluate_every": 2})
    return base.model_copy(update={"train": train})


def result(line: str, epsilon: float, seed: int, accuracy: float) -> PointResult:
    return PointResult(
        line=line, epsilon=epsilon, seed=seed, accuracy=accuracy, epsilon_x=0.0, epsilon_y=0.0,
        releases=2, settings="",
    )  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS[:2])
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


def test_people_whom_a_passive_does_not_know_are_named() -> None:
    settings = small().data.model_copy(update={"overlap": 0.5})
    with pytest.raises(DataError, match=r"passive-1 does not know \d+ .* needs data.overlap: 1.0"):
        centralise(load_data(settings, seed=0))


def test_every_line_has_its_points_and_changes_one_thing(tmp_path: Path) -> None:
    base = small()
    every = list(points_of(base, tmp_path, seeds=[0, 1], epsilons=[1.0, 4.0]))
    assert len(every) == 2 * (3 + 5 * 2)
    assert (
        len({point.file for point in every})
        == len({point.measurement.digest for point in every})
        == 26
    )
    for point in every:
        told, plain = point.config.model_dump(), base.model_dump()
        changed = {key for key, value in told.items() if value != plain[key]}
        assert changed <= {"name", "seed", "method", "guard", "labels"}
        protected = (point.config.guard.epsilon, point.config.labels.epsilon)
        asked = point.epsilon if math.isfinite(point.epsilon) else None
        assert [one for one in protected if one is not None] == ([asked] if asked else [])
    assert {line.key for line in LINES} == {point.line.key for point in every}


@pytest.fixture(scope="module", name="point")
def _point(tmp_path_factory: pytest.TempPathFactory) -> Point:
    folder = tmp_path_factory.mktemp("sweep")
    every = points_of(small(), folder, seeds=[0], epsilons=[4.0])
    return next(point for point in every if point.line.key == "response")


def test_a_point_is_run_once_and_read_afterwards(
    point: Point, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run_point(point)
    assert (first.epsilon_x, first.epsilon_y, first.releases) == (math.inf, 4.0, 2)
    assert 0.5 < first.accuracy <= 1

    def never(*_: object, **__: object) -> None:
        raise AssertionError("run again")

    monkeypatch.setattr("experiments.measured.run", never)
    assert run_point(point) == first


def test_other_settings_and_damage_are_refused(point: Point) -> None:
    run_point(point)
    config = point.config.model_copy(update={"seed": 9})
    other = Point(line=point.line, epsilon=point.epsilon, config=config, file=point.file)
    with pytest.raises(CheckpointError, match="a run with other settings"):
        run_point(other)
    whole = point.file.read_text()
    for damage in ("", "{", "[]", '{"accuracy": 1}', whole.replace("accuracy", "precision")):
        point.file.write_text(damage)
        with pytest.raises(CheckpointError, match="holds no figures of a run"):
            run_point(point)
    point.file.write_text(whole)
    run_point(point)


def test_losses_are_paired_by_seed_and_intervals_hold_the_mean() -> None:
    bare = [result("plain", math.inf, seed, 0.9 - seed / 10) for seed in range(3)]
    alone = [result("single", math.inf, seed, 0.5) for seed in range(3)]
    noisy = [result("fresh", 4.0, seed, 0.8 - seed / 10) for seed in range(3)]
    single, plain, fresh = summarise([*noisy, *bare, *alone])
    assert [one.line.key for one in (single, plain, fresh)] == ["single", "plain", "fresh"]
    assert fresh.loss.mean == pytest.approx(0.1)
    assert fresh.loss.high - fresh.loss.low < 1e-9  # the same in every seed
    assert fresh.accuracy.low < fresh.accuracy.mean < fresh.accuracy.high
    assert fresh.cells()[1:3] == ("released rows (epsilon_x)", "4")
    assert as_markdown([single, fresh]).count("\n") == 4


def test_a_missing_seed_is_not_passed_over() -> None:
    bare = [result("plain", math.inf, seed, 0.9) for seed in range(2)]
    with pytest.raises(ConfigError, match="has no run for"):
        summarise([*bare, result("fresh", 4.0, 1, 0.8)])


def test_a_sweep_writes_tables_pictures_a_page_and_what_plan_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("experiments.sweep.run.base_config", small)

    def made_up(told: Any) -> PointResult:
        nothing = told.config.method == "single_view"
        return PointResult(
            line=told.line.key, epsilon=told.epsilon, seed=told.config.seed,
            accuracy=0.8 + told.config.seed / 100, epsilon_x=0.0, epsilon_y=0.0,
            releases=0 if nothing else 2, settings="",
        )  # fmt: skip

    monkeypatch.setattr("experiments.sweep.run.run_point", made_up)
    (tmp_path / "out").mkdir()
    (sweep,) = run_sweep(
        tmp_path / "out", seeds=[0, 1], jobs=1, configs=["sweep-breast-cancer"],
        store=tmp_path / "stored.json", figures=tmp_path / "figures",
    )  # fmt: skip
    assert len(sweep.points) == 3 + 5 * 3
    (stored,) = load_sweeps((tmp_path / "stored.json").read_text())
    assert (stored.dataset, stored.seeds, stored.epochs) == ("breast_cancer", (0, 1), 2)
    assert len(stored.points) == len(sweep.points) - 1  # nobody holds the centralised table
    assert stored.alone.mean == pytest.approx(0.805)
    picture = (tmp_path / "figures" / "epsilon-breast-cancer.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    page = (tmp_path / "out" / "index.html").read_text()
    assert "data:image/png;base64," in page
    assert "Reports of the first seed" not in page
    assert "LP-MST" in page
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["format"] == 1
