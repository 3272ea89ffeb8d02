"""Sum by guard: its four cells, what its table says where nobody attacked, and a small run."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from apfed_experiments import sum_by_guard
from apfed_experiments.runner import run_study
from apfed_experiments.study import Point, StudyMetrics, load_base_config
from apfed_experiments.sum_by_guard import (
    DIRECTION_BY_KEY,
    compare_points,
    declare_study,
    make_points,
    make_study_rows,
    unify_baselines,
)
from secure_apfed.config import Config
from tests.experiments.run_folder import check_all_directions

BASE = load_base_config("main-digits")
KINDS = {key: direction.kind for key, direction in DIRECTION_BY_KEY.items()}


def figure(point: Point, seed: int, target: str, **more: Any) -> Mapping[str, Any]:
    row = {
        "point": point.name,
        "seed": seed,
        "epsilon_x": math.inf,
        "epsilon_y": math.inf,
        "epsilon_passives": math.inf,
        "releases": 1,
        "wire_bytes": 1,
        "shared": 0.0,
        "target": target,
        "name": target,
        "metric": "accuracy",
        "score": 0.5,
        "baseline": math.nan,
        "advantage": math.nan,
    }
    return {**row, **more}


def make_results(points: list[Point], read: Mapping[str, float]) -> StudyMetrics:
    """Results of two seeds, in which these directions were read by so much."""
    rows = []
    for point in points:
        for seed in range(2):
            rows.append(figure(point, seed, "task"))
            for kind, advantage in read.items():
                gained = advantage + seed / 10
                told = {"metric": "r2", "score": 0.1 + gained, "baseline": 0.1}
                rows.append(figure(point, seed, kind, advantage=gained, **told))
    return StudyMetrics(pd.DataFrame(rows))


def test_twelve_lines_are_four_cells_of_three_mixes(tmp_path: Path) -> None:
    points = make_points(BASE, tmp_path)
    assert len({point.name for point in points}) == len(points) == 12
    cells = [tuple(point.study_row.cells.values()) for point in points]
    assert len(set(cells)) == 12
    for point in points:
        objectives, total, guard = point.study_row.cells.values()
        config = point.config
        assert (config.secure_sum.masks == "none") is (total == "none")
        assert (config.guard.mechanism == "none") is (guard == "none")
        names = [one.objective.name for one in config.passives.values() if one.objective]
        assert tuple(dict.fromkeys(names)) == sum_by_guard.OBJECTIVES_BY_LABEL[objectives]
        assert config.data == BASE.data
        assert config.model == BASE.model


def test_cells_match_people_the_cheapest_way_and_keep_whom_they_match(tmp_path: Path) -> None:
    settings: dict[str, Any] = BASE.model_dump(mode="json", exclude_defaults=True)
    dealt = {"protocol": "circuit_crypten", "dealer": True, "pairwise_overlaps": "hidden"}
    settings["alignment"] = {**dealt, "minimum_rows": 9}
    points = make_points(Config.model_validate(settings), tmp_path)
    found = {one.name: one.config.alignment.model_dump(exclude_defaults=True) for one in points}
    assert [name for name, alignment in found.items() if alignment != {"minimum_rows": 9}] == []


@pytest.mark.parametrize("study_row", make_study_rows(BASE), ids=lambda study_row: study_row.key)
def test_every_direction_in_which_something_leaves_is_attacked(
    study_row: Any, tmp_path: Path
) -> None:
    usual = BASE.model_dump(mode="json", exclude_defaults=True)
    config = study_row.build_config(usual, name="cell")
    check_all_directions(config)


def test_a_cell_says_what_was_read_or_that_nobody_attacked(tmp_path: Path) -> None:
    points = make_points(BASE, tmp_path)[:1]
    read = {KINDS["active_features"]: 0.4, KINDS["passive_labels"]: 0.0}
    table = compare_points(points, make_results(points, read), seed_count=2)
    row = dict(zip(table.header, table.cells[0], strict=True))
    assert row["active: features of a passive, R2"].startswith("0.55 (+0.45 [")
    assert row["passive: labels, balanced accuracy"].startswith("0.15 (+0.05 [")
    assert row["aggregator: features of a passive, R2"] == "not attacked"
    assert row["passive: features of the active, R2"] == "not attacked"
    (plain,) = table.export_rows()
    assert plain["readings"]["active_features"]["advantage"]["mean"] == pytest.approx(0.45)
    assert plain["readings"]["aggregator_features"] is None


def test_attacks_of_one_reader_on_one_victim_share_the_best_baseline(tmp_path: Path) -> None:
    (point, *_) = make_points(BASE, tmp_path)
    kind = KINDS["active_features"]
    told = {"metric": "r2", "score": 0.7}
    unlucky = "one (30 pairs) by active on passive-1"
    usual = "other (30 pairs) by active on passive-1"
    elsewhere = "one (30 pairs) by active on passive-2"
    rows = [
        figure(point, 0, "task"),
        figure(point, 0, kind, name=unlucky, baseline=-0.3, advantage=1.0, **told),
        figure(point, 0, kind, name=usual, baseline=0.2, advantage=0.5, **told),
        figure(point, 0, kind, name=elsewhere, baseline=0.1, advantage=0.6, **told),
    ]
    found = unify_baselines(pd.DataFrame(rows)).set_index("name")
    assert found.loc[unlucky, "advantage"] == pytest.approx(0.5)
    assert found.loc[usual, "baseline"] == 0.2
    assert found.loc[elsewhere, "advantage"] == pytest.approx(0.6)
    assert bool(found["advantage"].isna().loc["task"])


def test_an_aggregator_of_ciphertexts_has_nothing_to_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        sum_by_guard, "SETTINGS_BY_SUM", {"ckks": {"scheme": "ckks", "masks": "none"}}
    )
    points = make_points(BASE, tmp_path)[:1]
    table = compare_points(points, make_results(points, {}), seed_count=2)
    told = dict(zip(table.header, table.cells[0], strict=True))
    said = "not applicable: nothing to read: ciphertexts (ckks)"
    assert told["aggregator: features of a passive, R2"] == said


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")
def test_a_small_study_is_run_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sum_by_guard, "OBJECTIVES_BY_LABEL", {"APFed-R": ("reconstruction",)})
    small: dict[str, Any] = BASE.model_dump(mode="json", exclude_defaults=True)
    small["data"]["limit"] = 300
    small["train"]["epochs"] = 3
    base = Config.model_validate(small)
    study = declare_study(base, tmp_path, seeds=[0])
    (table,) = run_study(study).tables
    (again,) = run_study(study).tables
    assert json.dumps(table.export_rows(), default=str) == json.dumps(
        again.export_rows(), default=str
    )
    read = {
        (row["sum"], row["guard"]): row["readings"]["aggregator_features"]["advantage"]["mean"]
        for row in table.export_rows()
    }
    assert min(of for (total, _), of in read.items() if total == "none") > 0.3
    assert max(of for (total, _), of in read.items() if total == "masked") < 0.2
    assert (tmp_path / "digits-sum-by-guard.md").is_file()
