"""The papers' tables: jobs fill every line, run once, and stand beside what the papers print."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apfed_experiments.tables import TABLES, apfed, find_table
from apfed_experiments.tables.apc_vfl import SCENARIOS, alone, exchanged, helped
from apfed_experiments.tables.mmvfl import importance
from apfed_experiments.tables.table import FunctionJob, Line, PaperTable, Printed, Size, fill, write
from secure_apfed.cli import execute
from secure_apfed.data import load_data
from secure_apfed.errors import CheckpointError, ConfigError, DataError, ModelError
from secure_apfed.learning.autoencoder import DistillationSettings

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")
Measure = Callable[..., Mapping[str, float]]
VALUES = {("a", 0): 10.0, ("a", 1): 12.0, ("b", 0): 7.0, ("b", 1): 7.0}


def measured(*, seed: int, name: str) -> Mapping[str, float]:
    return {"found": VALUES[name, seed]}


def impossible(*, seed: int, name: str) -> Mapping[str, float]:
    raise DataError(f"no data for {name}")


def line(name: str, **more: object) -> Line:
    return Line(cells={"method": name}, series=name, **more)  # type: ignore[arg-type]


def job(name: str, seed: int, measure: Measure = measured) -> FunctionJob:
    return FunctionJob(
        label=name, seed=seed, measure=measure, settings={"name": name}, lines={name: "found"},
        cost=2.0 if name == "b" else 1.0,
    )  # fmt: skip


def toy(*, axis: str = "") -> PaperTable:
    """Two measured lines and their difference; the full table has a third, of missing data."""

    def size(full: bool) -> Size:
        lines = [
            line("a", paper=Printed(mean=9.0, sd=1.0), at=1.0),
            line("b", paper=Printed(mean=7.0), at=1.0),
            line("a minus b", combines={"a": 1.0, "b": -1.0}),
        ]
        jobs = [job(name, seed) for seed in (0, 1) for name in ("a", "b")]
        if full:
            lines.append(line("c"))
            jobs.append(job("c", 0, impossible))
        return Size(lines=lines, jobs=jobs)

    return PaperTable(
        name="toy", source="nowhere, Table 0", title="A toy", unit="points", reading="Made up.",
        leaves_out="c", hours=1.0, size=size, axis=axis,
    )  # fmt: skip


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("table", TABLES.values(), ids=list(TABLES))
def test_every_line_is_measured_or_combines_some_that_are(table: PaperTable, full: bool) -> None:
    size = table.size(full)
    names = [one.name for one in size.lines]
    filled = {name for one in size.jobs for name in one.lines}
    assert len(set(names)) == len(names)
    assert len({one.name for one in size.jobs}) == len(size.jobs)
    assert filled == {one.name for one in size.lines if not one.combines}
    assert all(set(one.combines) <= filled for one in size.lines)
    assert len({tuple(one.cells) for one in size.lines}) == 1
    if table.leaves_out:
        default, whole = (sum(job.cost for job in table.size(full).jobs) for full in (False, True))
        assert whole > default


def test_figures_that_are_none_or_of_other_settings_are_refused(tmp_path: Path) -> None:
    def nothing(seed: int, name: str) -> Mapping[str, float]:
        return {"found": math.nan}

    with pytest.raises(ModelError, match="found is no finite number"):
        job("a", 0, nothing).finish(tmp_path)
    assert not list(tmp_path.iterdir())
    job("a", 0).finish(tmp_path)
    with pytest.raises(CheckpointError, match="was measured with other settings"):
        replace(job("a", 0), settings={"name": "b"}).finish(tmp_path)


def test_a_table_is_filled_beside_the_papers_figures(tmp_path: Path) -> None:
    board = fill(toy(), tmp_path)
    a, b, gain = board.rows
    assert a["mean"] == 11.0
    assert a["sd"] == pytest.approx(math.sqrt(2))
    assert a["difference"] == 2.0
    assert a["in_sd"] == pytest.approx(2.0 / math.sqrt(2 + 1))
    assert b["difference"] == 0.0
    assert b["in_sd"] is None, "the paper prints no deviation"
    assert gain["values"] == {0: 3.0, 1: 5.0}
    # 12.706 is the .975 quantile of Student's t for one degree of freedom.
    assert gain["high"] - 4.0 == pytest.approx(12.706, rel=1e-4)


def test_a_job_is_run_once_and_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = iter([0.0, 1.0, 30.0, *[61.0] * 20])
    begun = fill(toy(), tmp_path, minutes=1.0, clock=lambda: next(ticks))
    assert (begun.forecast.done, begun.forecast.jobs) == (2, 4)
    assert [row["seeds"] for row in begun.rows] == [1, 1, 1]
    assert begun.rows[0]["sd"] is None
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "jobs").iterdir()}
    done = fill(toy(), tmp_path)
    assert done.forecast.done == 4
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    monkeypatch.setitem(VALUES, ("a", 0), 99.0)
    assert fill(toy(), tmp_path).rows == done.rows


def test_a_forecast_is_the_mean_of_what_is_done_times_what_is_left(tmp_path: Path) -> None:
    ticks = iter([0.0, 1.0, *[61.0] * 20])
    begun = fill(toy(), tmp_path, jobs=1, minutes=1.0, clock=lambda: next(ticks))
    (path,) = (tmp_path / "jobs").iterdir()
    content = json.loads(path.read_text())
    content["measured"]["seconds"] = 3600.0
    path.write_text(json.dumps(content))
    again = fill(toy(), tmp_path, minutes=0.0)
    # a took an hour and costs 1; one more a and two b, which cost 2, are left.
    assert again.forecast.hours == pytest.approx(5.0)
    assert again.forecast.full_hours == pytest.approx(1.0)
    assert again.forecast.sentence == (
        "1 of 4 jobs are done; the others take about 5.0 hours; the full table has 1 more, about "
        "1.0 hours, since these took 3.5 times what --list reckons with"
    )
    assert begun.forecast.done == 1


def test_what_fails_is_left_out_and_told(tmp_path: Path) -> None:
    board = fill(toy(), tmp_path, full=True)
    assert board.failures == {"c-seed0": "DataError: no data for c"}
    assert [row["seeds"] for row in board.rows] == [2, 2, 2, 0]


@pytest.mark.parametrize("axis", ["", "a number"])
def test_it_is_written_as_csv_markdown_and_a_picture(tmp_path: Path, axis: str) -> None:
    board = fill(toy(axis=axis), tmp_path)
    files = write(board, tmp_path)
    header, first, *_ = files["csv"].read_text().splitlines()
    assert header == "method,seeds,mean,sd,low,high,paper,paper_sd,difference,in_sd"
    assert first.startswith("a,2,11.0,1.414")
    page = files["md"].read_text()
    assert "| a | 11.00 ± 1.41 |" in page
    assert "Left out, and run by `--full`: c." in page
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in write(fill(toy(), tmp_path, full=True), tmp_path).values()} == {
        "toy-full.csv", "toy-full.md", "toy-full.png",
    }  # fmt: skip


def test_the_command_lists_fills_and_names_what_is_near(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("apfed_experiments.tables.TABLES", {"toy": toy()})
    assert execute(["table", "--list", "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)["tables"]
    assert entry["name"] == "toy"
    wanted = ["table", "toy", "--output", str(tmp_path), "--jobs", "1", "--json"]
    assert execute(wanted) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["lines"][0]["in_sd"] == pytest.approx(2.0 / math.sqrt(3))
    assert Path(told["files"]["md"]).is_file()
    assert execute([*wanted, "--full"]) == 3
    assert execute(["table"]) == 2
    with pytest.raises(ConfigError, match="did you mean 'toy'"):
        find_table("toyy")


def test_figures_of_apfed_are_those_of_its_rows_of_averages() -> None:
    averages = {
        "mnist": (36.13, 48.50, 10.51, 88.23, 88.80, 88.87),
        "fashion_mnist": (53.97, 49.22, 10.84, 85.47, 86.23, 86.12),
        "cifar10": (38.75, 34.71, 11.99, 52.26, 52.92, 54.80),
        "cifar100": (9.24, 8.00, 1.25, 20.45, 21.52, 23.30),
    }
    for dataset, printed in averages.items():
        of_set = [row[::2] for (name, _), row in apfed.PRINTED.items() if name == dataset]
        assert len(of_set) == 5
        # Rounded by the paper, here and there downwards.
        assert np.abs(np.mean(of_set, axis=0) - printed).max() < 0.0101


def test_importance_keeps_the_longest_rows() -> None:
    weights = np.array([[0.0, 0.1], [3.0, 4.0], [1.0, 0.0], [0.0, 2.0]])
    assert importance(weights, 0.5).tolist() == [1, 3]
    assert importance(weights, 0.01).tolist() == [1]


def test_lambda_0_is_the_active_alone_for_both_methods() -> None:
    size = TABLES["apfed-lambda"].size(False)
    at_0 = [one for one in size.jobs if any(name.endswith("/ 0") for name in one.lines)]
    assert {one.config.method.name for one in at_0} == {"single_view"}  # type: ignore[attr-defined]
    assert {name for one in at_0 for name in one.lines} == {
        "MNIST / APFed-R / 0", "MNIST / APFed-C / 0",
        "Fashion-MNIST / APFed-R / 0", "Fashion-MNIST / APFed-C / 0",
    }  # fmt: skip


def test_with_few_labels_each_method_takes_the_steps_of_the_active_alone() -> None:
    size = TABLES["apfed-few-labels"].size(False)
    configs = [one.config for one in size.jobs]  # type: ignore[attr-defined]
    assert {one.method.name for one in configs} == {"single_view", "apfed_r", "apfed_c"}
    assert {(one.data.labelled, one.data.limit, one.train.epochs) for one in configs} == {
        (500, 10_000, 13)
    }
    assert all(line.paper is None for line in size.lines)


def test_the_full_table_trains_as_the_paper_does() -> None:
    one, *_ = TABLES["apfed-table2"].size(True).jobs
    train = one.config.train  # type: ignore[attr-defined]
    assert (train.epochs, train.learning_rate, train.momentum) == (300, 1e-3, 0.9)
    scenario = SCENARIOS["breast_cancer"]
    config = scenario.config(scenario.data(2, 100), "apc_vfl", {})
    assert config.data.columns is not None
    assert config.data.columns["active"] == ("mean texture", "worst fractal dimension")
    assert len(load_data(config.data, seed=0).train_rows) == 500
    fitted = DistillationSettings.among(config.method)
    assert (fitted.epochs, fitted.patience, fitted.batch_size) == (200, 10, 8)


def small(**distilled: object) -> dict[str, Any]:
    scenario, changes = SCENARIOS["breast_cancer"], {"method": {"epochs": 3, **distilled}}
    config = scenario.config(scenario.data(3, 100), "apc_vfl", changes)
    return {"config": config.model_dump(mode="json"), "scores": ["accuracy", "f1"]}


def test_without_distillation_the_run_is_the_ablation() -> None:
    """Number for number: what taught the student is all that differs."""
    own = alone(seed=1, **small())
    same = helped(seed=1, **small(weight=0.0))
    other = helped(seed=1, **small(weight=10.0))
    assert same["code accuracy"] == own["code accuracy"]
    assert same["code f1"] == own["code f1"]
    assert other["code accuracy"] != own["code accuracy"]
    assert 60 < own["columns accuracy"] < 95
    assert same["bytes"] > 100 * 256 * 4


def test_one_exchange_against_one_for_every_step() -> None:
    jobs = {one.name: one for one in TABLES["apc-vfl-splitnn"].size(False).jobs}
    found = {}
    for name in ("apc_vfl", "split_nn"):
        settings = dict(jobs[f"breast_cancer-{name}-n100-seed0"].settings)  # type: ignore[attr-defined]
        config = dict(settings["config"])
        section = "train" if name == "split_nn" else "method"
        config[section] = {**config[section], "epochs": 2}
        found[name] = exchanged(seed=0, config=config, way=settings["way"])
    assert found["apc_vfl"]["rounds"] == 1.0
    # 45 rows in batches of 8 make 6 steps, and 5 that are held out make one message an epoch.
    assert found["split_nn"]["rounds"] == 2 * (2 * 6 + 1)
    assert found["apc_vfl"]["counted"] == pytest.approx(50 * 256 * 4 / 1e6)
    assert found["split_nn"]["counted"] == pytest.approx(
        (2 * 50 * 256 + 12 * (128 * 256 + 256)) * 4 / 1e6
    )
    assert found["split_nn"]["megabytes"] > found["apc_vfl"]["megabytes"]
