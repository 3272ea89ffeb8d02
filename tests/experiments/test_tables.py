"""The papers' tables: jobs fill every line, run once, and stand beside what the papers print."""

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from apfed_experiments.runner import StudyResults, run_study
from apfed_experiments.summary import Interval
from apfed_experiments.tables import TABLES, apfed, find_table
from apfed_experiments.tables.apc_vfl import SCENARIOS, measure_exchange, score_local, score_student
from apfed_experiments.tables.mmvfl import select_features
from apfed_experiments.tables.table import (
    Job,
    PaperTable,
    PaperValue,
    TableExtent,
    TableRow,
    _draw_curves,
    declare_study,
)
from secure_apfed.cli import execute
from secure_apfed.config import Config
from secure_apfed.data import load_data
from secure_apfed.errors import CheckpointError, ConfigError, DataError, ModelError
from secure_apfed.learning.autoencoder import DistillationSettings
from tests.secure_apfed.small_runs import run_as_json

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")
VALUES = {("a", 0): 10.0, ("a", 1): 12.0, ("b", 0): 7.0, ("b", 1): 7.0}


def measure_figures(*, seed: int, name: str) -> Mapping[str, float]:
    return {"found": VALUES[name, seed]}


def impossible(*, seed: int, name: str) -> Mapping[str, float]:
    raise DataError(f"no data for {name}")


def job(name: str, measure: Callable[..., Mapping[str, float]] = measure_figures) -> Job:
    return Job(label=name, measure=measure, settings={"name": name})


def line(
    name: str, measure: Callable[..., Mapping[str, float]] = measure_figures, **more: Any
) -> TableRow:
    cells = {"method": name}
    return TableRow(
        cells=cells, job=job(name, measure), value_name="found", curve_name=name, **more
    )


def toy(*, axis: str = "") -> PaperTable:
    """Two measured lines and their difference; the full table has a third, of missing data."""

    def size(full: bool) -> TableExtent:
        a = line("a", paper_value=PaperValue(mean=9.0, standard_deviation=1.0), axis_position=1.0)
        b = line("b", paper_value=PaperValue(mean=7.0), axis_position=1.0)
        gain = TableRow(cells={"method": "a minus b"}, weighted_rows=((1.0, a), (-1.0, b)))
        return TableExtent([a, b, gain, *([line("c", impossible)] if full else ())], 2)

    return PaperTable(
        name="toy",
        source="nowhere, Table 0",
        title="A toy",
        unit="points",
        reading_guide="Made up.",
        omission="c",
        hours=1.0,
        make_extent=size,
        axis_title=axis,
    )


@pytest.mark.parametrize("means", [(-5.0, 3.0), (3.0, -5.0)], ids=["first", "last"])
def test_the_axis_reaches_the_curve_below_zero(means: tuple[float, float]) -> None:
    """Only the last curve was looked at, so a loss of another one was cut off."""
    rows = [
        {
            "table_row": line(name, axis_position=position),
            "interval": Interval(mean, mean - 1, mean + 1),
            "paper": None,
            "paper_sd": None,
        }
        for name, mean in zip(("a", "b"), means, strict=True)
        for position in (1.0, 2.0)
    ]
    axes = Figure().add_subplot()
    _draw_curves(axes, rows, toy(axis="x"))
    assert axes.get_ylim()[0] < min(means)


@pytest.mark.parametrize("table", TABLES.values(), ids=list(TABLES))
def test_every_line_is_measured_or_combines_some_that_are(table: PaperTable) -> None:
    runs = []
    for full in (False, True):
        size = table.make_extent(full)
        assert len({tuple(of.cells.values()) for of in size.rows}) == len(size.rows)
        assert len({tuple(of.cells) for of in size.rows}) == 1
        assert len({of.label for of in size.jobs}) == len(size.jobs)
        for of in size.rows:
            parts = [*of.candidate_rows, *(part for _, part in of.weighted_rows)]
            assert (of.job is None) is bool(parts)
            assert all(part in size.rows and (part.job or part.candidate_rows) for part in parts)
        runs.append((size.seed_count, {of.label for of in size.jobs}))
    assert (runs[0] != runs[1]) is bool(table.omission)


def test_figures_that_are_none_or_of_other_settings_are_refused(tmp_path: Path) -> None:
    def nothing(seed: int, name: str) -> Mapping[str, float]:
        return {"found": math.nan}

    path = tmp_path / "a.json"
    with pytest.raises(ModelError, match="found is no finite number"):
        job("a", nothing).load_or_measure(0, path)
    job("a").load_or_measure(0, path)
    with pytest.raises(CheckpointError, match="other settings"):
        replace(job("a"), settings={"name": "b"}).load_or_measure(0, path)


def test_a_job_that_an_earlier_version_kept_is_read(tmp_path: Path) -> None:
    settings = hashlib.sha256(b'{"name": "a", "seed": 0}').hexdigest()
    kept = {"settings": settings, "measured": {"figures": {"found": 5.0}, "seconds": 1.5}}
    path = tmp_path / "a-seed0.json"
    path.write_text(json.dumps(kept))
    assert job("a").load_or_measure(0, path) == {"found": 5.0}


def fill_table(table: PaperTable, folder: Path, **options: Any) -> StudyResults:
    return run_study(declare_study(table, folder, **options))


@pytest.mark.parametrize("axis", ["", "a number"])
def test_a_table_is_filled_beside_the_papers_figures(tmp_path: Path, axis: str) -> None:
    (part,) = fill_table(toy(axis=axis), tmp_path).parts
    a, b, gain = part.table.rows
    assert (a["mean"], a["difference"], b["difference"]) == (11.0, 2.0, 0.0)
    assert a["sd"] == pytest.approx(math.sqrt(2))
    assert a["in_sd"] == pytest.approx(2.0 / math.sqrt(2 + 1))
    assert b["in_sd"] is None, "the paper prints no deviation"
    assert gain["values"] == {0: 3.0, 1: 5.0}
    # 12.706 is the .975 quantile of Student's t for one degree of freedom.
    assert gain["high"] - 4.0 == pytest.approx(12.706, rel=1e-4)
    header, first, *_ = (tmp_path / "toy.csv").read_text().splitlines()
    assert header == "method,seeds,mean,sd,low,high,paper,paper_sd,difference,in_sd"
    assert first.startswith("a,2,11.0,1.414")
    for name in ("toy.md", "index.html"):
        assert "Left out, and run by --full: c." in (tmp_path / name).read_text()
    assert (tmp_path / "toy.png").read_bytes().startswith(b"\x89PNG")
    assert [picture.path.name for picture in part.pictures] == ["toy.png"]


JUDGED = {
    ("a", 0): {"held out": 9.0, "test": 1.0},
    ("b", 0): {"held out": 8.0, "test": 2.0},
    ("a", 1): {"held out": 7.0, "test": 3.0},
    ("b", 1): {"held out": 8.0, "test": 4.0},
    ("a", 2): {"held out": 7.0, "test": 5.0},
    ("b", 2): {"held out": 7.0, "test": 6.0},
    ("a", 3): {"held out": 7.0, "test": 7.0},
}


@pytest.mark.parametrize(
    ("seed", "chosen"),
    [(0, 1.0), (1, 4.0), (2, 5.0), (3, None)],
    ids=["the first", "the second", "the first of equal ones", "one is missing"],
)
def test_a_line_of_the_best_is_chosen_by_what_was_held_out(seed: int, chosen: float | None) -> None:
    """Never by the figure that it then shows."""
    points = [replace(line(name), value_name="test") for name in ("a", "b")]
    best = TableRow(cells={"method": "best"}, candidate_rows=points, choosing_value_name="held out")
    assert best.compute_values(JUDGED).get(seed) == chosen
    against = TableRow(cells={"method": "gain"}, weighted_rows=((1.0, best), (-1.0, points[0])))
    assert set(against.compute_values(JUDGED)) == {0, 1, 2}


@pytest.mark.parametrize("unit", ["points", "test accuracy, per cent", "accuracy, %"])
def test_the_interval_of_a_difference_is_not_cut_at_0(tmp_path: Path, unit: str) -> None:
    """A share of rows cannot be negative, but what one method adds to another can."""
    (table,) = fill_table(replace(toy(), unit=unit), tmp_path).tables
    a, _, gain = table.rows
    assert gain["limits"] == (gain["low"], gain["high"])
    assert gain["low"] < 0 < gain["high"]
    is_share = unit != "points"
    assert (a["limits"][0] == 0.0) is is_share, "its interval reaches below 0"
    assert "0.00 to" not in (tmp_path / "toy.md").read_text().split("a minus b")[1]


def test_a_job_is_run_once_goes_on_where_it_was_and_tells_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = iter([0.0, 1.0, 30.0, *[61.0] * 20])
    begun = fill_table(toy(), tmp_path, max_minutes=1.0, clock=lambda: next(ticks))
    assert "2 of 4 jobs are done." in begun.parts[0].notes
    rows = begun.tables[0].rows
    assert [row["seeds"] for row in rows] == [1, 1, 1]
    assert rows[0]["sd"] is None
    done = fill_table(toy(), tmp_path).tables[0]
    monkeypatch.setitem(VALUES, ("a", 0), 99.0)
    again = fill_table(toy(), tmp_path, is_full=True)
    rows = again.tables[0].rows
    assert [row["values"] for row in rows[:3]] == [row["values"] for row in done.rows]
    failures = {failure.trial: failure.message for failure in again.failures}
    assert failures == dict.fromkeys(["c-seed0", "c-seed1"], "DataError: no data for c")
    assert rows[3]["seeds"] == 0


def test_the_command_lists_fills_and_names_what_is_near(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("apfed_experiments.tables.TABLES", {"toy": toy()})
    (entry,) = run_as_json(capsys, "study", "table", "--list")["tables"]
    assert entry["name"] == "toy"
    wanted = ["study", "table", "toy", "--output", tmp_path, "--jobs", 1]
    filled = run_as_json(capsys, *wanted)
    assert filled["tables"]["toy"][0]["in_sd"] == pytest.approx(2.0 / math.sqrt(3))
    assert Path(filled["page"]).is_file()
    run_as_json(capsys, *wanted, "--full", code=3)
    assert (tmp_path / "toy-full.csv").is_file()
    assert execute(["study", "table"]) == 2
    with pytest.raises(ConfigError, match="did you mean 'toy'"):
        find_table("toyy")


@pytest.mark.parametrize(
    ("dataset", "printed"),
    [
        ("mnist", (36.13, 48.50, 10.51, 88.23, 88.80, 88.87)),
        ("fashion_mnist", (53.97, 49.22, 10.84, 85.47, 86.23, 86.12)),
        ("cifar10", (38.75, 34.71, 11.99, 52.26, 52.92, 54.80)),
        ("cifar100", (9.24, 8.00, 1.25, 20.45, 21.52, 23.30)),
    ],
)
def test_figures_of_apfed_are_those_of_its_rows_of_averages(
    dataset: str, printed: tuple[float, ...]
) -> None:
    of_set = [row[::2] for (name, _), row in apfed.PAPER_FIGURES.items() if name == dataset]
    assert len(of_set) == 5
    # Rounded by the paper, here and there downwards.
    assert np.abs(np.mean(of_set, axis=0) - printed).max() < 0.0101


def test_importance_keeps_the_longest_rows() -> None:
    weights = np.array([[0.0, 0.1], [3.0, 4.0], [1.0, 0.0], [0.0, 2.0]])
    assert select_features(weights, 0.5).tolist() == [1, 3]
    assert select_features(weights, 0.01).tolist() == [1]


def test_runs_are_those_that_tables_say() -> None:
    at_0 = [
        of for of in TABLES["apfed-lambda"].make_extent(False).rows if of.cells["lambda"] == "0"
    ]
    assert len(at_0) == 4
    assert {of.job.settings["config"]["method"]["name"] for of in at_0 if of.job} == {"single_view"}
    few = TABLES["apfed-few-labels"].make_extent(False)
    methods = {of.settings["config"]["method"]["name"] for of in few.jobs}
    assert methods == {"single_view", "apfed_r", "apfed_c"}
    data = [of.settings["config"]["data"] for of in few.jobs]
    assert {(each["labelled"], each["limit"]) for each in data} == {(500, 10_000)}
    assert {of.settings["config"]["train"]["epochs"] for of in few.jobs} == {13}
    assert all(line.paper_value is None for line in few.rows)
    config = Config.model_validate(
        TABLES["apfed-table2"].make_extent(True).jobs[0].settings["config"]
    )
    train = config.train
    assert (train.epochs, train.learning_rate, train.momentum) == (300, 1e-3, 0.9)
    scenario = SCENARIOS["breast_cancer"]
    config = scenario.make_config(scenario.make_data(2, 100), "apc_vfl", {})
    assert config.data.columns is not None
    assert config.data.columns["active"] == ("mean texture", "worst fractal dimension")
    assert len(load_data(config.data, seed=0).train_rows) == 500
    fitted = DistillationSettings.from_settings(config.method)
    assert (fitted.epochs, fitted.patience, fitted.batch_size) == (200, 10, 8)


def small(**distilled: object) -> dict[str, Any]:
    scenario = SCENARIOS["breast_cancer"]
    changes = {"method": {"epochs": 3, **distilled}}
    config = scenario.make_config(scenario.make_data(3, 100), "apc_vfl", changes)
    return {"config": config.model_dump(mode="json"), "scores": ["accuracy", "f1"]}


@pytest.mark.slow
def test_without_distillation_the_run_is_the_ablation() -> None:
    """Number for number: what taught the student is all that differs."""
    own = score_local(seed=1, **small())
    same = score_student(seed=1, **small(weight=0.0))
    other = score_student(seed=1, **small(weight=10.0))
    for score in ("code accuracy", "code f1"):
        assert same[score] == own[score]
    assert other["code accuracy"] != own["code accuracy"]
    assert 60 < own["columns accuracy"] < 95
    assert same["bytes"] > 100 * 256 * 4


def test_one_exchange_against_one_for_every_step() -> None:
    jobs = {of.label: of for of in TABLES["apc-vfl-splitnn"].make_extent(False).jobs}
    found = {}
    for name, section in (("apc_vfl", "method"), ("split_nn", "train")):
        settings = jobs[f"breast_cancer-{name}-n100"].settings
        config = {**settings["config"], section: {**settings["config"][section], "epochs": 2}}
        found[name] = measure_exchange(seed=0, config=config, way=settings["way"])
    assert found["apc_vfl"]["rounds"] == 1.0
    # 45 rows in batches of 8 make 6 steps, and 5 that are held out make one message an epoch.
    assert found["split_nn"]["rounds"] == 2 * (2 * 6 + 1)
    assert found["apc_vfl"]["counted"] == pytest.approx(50 * 256 * 4 / 1e6)
    assert found["split_nn"]["counted"] == pytest.approx(
        (2 * 50 * 256 + 12 * (128 * 256 + 256)) * 4 / 1e6
    )
    assert found["split_nn"]["megabytes"] > found["apc_vfl"]["megabytes"]
