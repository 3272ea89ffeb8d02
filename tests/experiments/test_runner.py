"""Studies in one declaration: what the runner writes of all of them, and reads of earlier ones."""

import inspect
import json
import pickle
import shutil
from pathlib import Path

import pytest

from apfed_experiments import gains, main_job, who_helped
from apfed_experiments.columns import Table, make_plain_table, make_visible_column
from apfed_experiments.report.page import Part
from apfed_experiments.runner import Study, StudyResults, run_study
from apfed_experiments.study import Failure, OnDone, Point, StudyValues, load_base_config
from apfed_experiments.summary import Row
from secure_apfed.commands import finished
from secure_apfed.commands import study as commands
from tests.experiments.run_folder import make_votes_config

ROWS: list[Row] = [{"data": "digits", "r2": 0.5}, {"data": "wine", "r2": 0.25}]
STORED = Path(__file__).parents[1] / "data" / "studies" / "gains"
"""Of `secure-apfed study gains --only votes/wine/n9 --seeds 1`, of before there was a runner."""


def play(folder: Path | None, *failures: Failure) -> StudyResults:
    def measure(*, jobs: int, on_done: OnDone) -> StudyValues[list[Row]]:
        on_done(1, 1)
        return StudyValues(ROWS, failures)

    toy = Study(
        title="A <toy>",
        reading_guide="Read it so.",
        folder=folder,
        measure=measure,
        compare=lambda found: [
            Part(name="one.half", table=make_plain_table(found.values, "One"), notes=["A note."]),
            Part(name="two", table=Table([make_visible_column("data", "data")], found.values)),
        ],
    )
    return run_study(toy)


def test_every_part_is_written_in_every_form(tmp_path: Path) -> None:
    answer = play(tmp_path / "study")
    names = {path.name for path in (tmp_path / "study").iterdir()}
    tables = {f"{part}.{kind}" for part in ("one.half", "two") for kind in ("csv", "json", "md")}
    assert names == tables | {"index.html"}
    assert json.loads((tmp_path / "study" / "one.half.json").read_text()) == {"rows": ROWS}
    assert (tmp_path / "study" / "one.half.csv").read_text() == "data,r2\ndigits,0.5\nwine,0.25\n"
    assert answer.as_json()["tables"] == {"one.half": ROWS, "two": [{}, {}]}
    assert (tmp_path / "study").stat().st_mode & 0o077 == 0, "its owner's alone"


@pytest.mark.parametrize("quiet", [False, True])
def test_the_first_answer_is_shown_before_all_else_is_measured(
    quiet: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = []

    def measure_first(*, jobs: int, on_done: OnDone) -> list[str]:
        calls.append(f"first in {jobs}")
        return ["The first line gains 3 points."]

    def measure(*, jobs: int, on_done: OnDone) -> StudyValues[list[Row]]:
        calls.append(f"all in {jobs}")
        assert quiet or "gains 3 points" in capsys.readouterr().err
        return StudyValues(ROWS)

    study = Study(
        title="A study",
        reading_guide="",
        folder=None,
        measure=measure,
        compare=lambda found: [],
        measure_first=measure_first,
    )
    finished.run_study(study, 1, is_quiet=quiet)
    assert calls == (["all in 1"] if quiet else ["first in 1", "all in 1"])


@pytest.mark.parametrize("name", ["one.half.md", "two.md", "index.html"])
def test_what_failed_is_named_wherever_people_read(tmp_path: Path, name: str) -> None:
    answer = play(tmp_path, *(Failure(f"a-seed{seed}", "no data") for seed in range(2)))
    assert "Failed and left out: a-seed0, a-seed1: no data" in (tmp_path / name).read_text()
    assert answer.as_json()["failures"] == {"a-seed0": "no data", "a-seed1": "no data"}


@pytest.mark.parametrize("text", ["A &lt;toy&gt;", "Read it so.", "A note."])
def test_the_page_says_how_to_read_it(tmp_path: Path, text: str) -> None:
    play(tmp_path)
    assert text in (tmp_path / "index.html").read_text()


def test_a_study_without_a_folder_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert play(None).page is None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "command",
    [entry.callback for entry in commands.app.registered_commands],
    ids=lambda command: command.__name__,
)
def test_every_study_prints_one_object(command: object) -> None:
    assert callable(command)
    assert "as_json" in inspect.signature(command).parameters


def find_points(folder: Path) -> dict[str, Point]:
    base = load_base_config("main-breast-cancer")
    whole = next(p for p in main_job.make_points(base, folder) if p.study_row.key == "apfed_r")
    ablation = main_job.make_ablation(whole)
    assert ablation is not None
    case = gains.GainCase(method="votes", data_name="wine", labelled_count=9)
    return {
        "main": whole,
        "ablation": ablation,
        "gains": case.make_point(folder),
        "control": case.ablation.make_point(folder),
        "who helped": who_helped.make_points(make_votes_config(), folder, ("passive-1",))[1],
    }


@pytest.mark.parametrize("name", ["main", "ablation", "gains", "control", "who helped"])
def test_points_travel_to_workers(tmp_path: Path, name: str) -> None:
    trial = find_points(tmp_path)[name].make_trial(0)
    there = pickle.loads(pickle.dumps(trial))
    assert (there.path, there.settings_digest) == (trial.path, trial.settings_digest)


def test_figures_of_before_the_runner_are_read_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Digests hold, and tables are the same. Where that changes on purpose, play them again."""

    def train(*args: object, **kwargs: object) -> None:
        raise AssertionError("what lies there is trained again")

    for name in ("study.run", "gains.train_without_votes", "baselines.compare_baselines"):
        monkeypatch.setattr(f"apfed_experiments.{name}", train)
    folder = shutil.copytree(STORED, tmp_path / "gains")
    run_study(gains.declare_study(folder, [gains.CASES["votes/wine/n9"]], seed_count=1))
    read = json.loads((folder / "gains.json").read_text())
    assert read == json.loads((STORED / "gains.json").read_text())
