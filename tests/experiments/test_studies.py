"""Studies: points that are run once, what is made of them, and what they write."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from apfed_experiments import main_job
from apfed_experiments.baselines import BaselineResult, BaselinesRecord, locate_baselines
from apfed_experiments.columns import Table
from apfed_experiments.finished import FinishedRun
from apfed_experiments.report.page import Part, write_study_page
from apfed_experiments.study import (
    Point,
    StudyRow,
    _run_task,
    centralise_data,
    collect_metrics,
    finish_trial,
    load_base_config,
)
from secure_apfed.config import Config
from secure_apfed.data import load_data
from secure_apfed.errors import CheckpointError, ConfigError, DataError
from secure_apfed.methods import method_settings
from secure_apfed.settings import plugins
from secure_apfed.settings.alignment import AlignmentSettings
from secure_apfed.settings.privacy import GuardSettings, LabelSettings
from tests.experiments.run_folder import make_attack_result, make_finished_run

pytestmark = [
    pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning"),
]
COMPARED = main_job.METHOD_COMPARISON
BY_KEY = {line.key: line for line in COMPARED.rows}
JOBS = {"main": main_job.MAIN, "methods": COMPARED}
SINGLE = BY_KEY["alone"]
TVFL = BY_KEY["tvfl"]
GUARDED = BY_KEY["apfed_c"]
NOISY = BY_KEY["votes-randomised-4"]
RIDGE = BaselinesRecord(
    settings="x",
    baselines=(BaselineResult(name="ridge", title="Ridge", validation=0.8, test=0.875),),
)


def small() -> Config:
    base = load_base_config("main-breast-cancer")
    train = base.train.model_copy(update={"epochs": 2, "evaluate_every": 2, "labels": "joint"})
    said = {
        "train": train,
        "method": method_settings("apfed_c"),
        "attacks": (),
        "alignment": AlignmentSettings(),
    }
    return base.model_copy(update={**said, "guard": GuardSettings(mechanism="none")})


def stamps(folder: Path, pattern: str) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob(pattern)}


@pytest.mark.parametrize("name", ["main-digits", "main-breast-cancer"])
def test_a_centralised_table_holds_everybodys_features_of_the_same_people(name: str) -> None:
    data = load_data(load_base_config(name).data, seed=3)
    whole = centralise_data(data)
    assert whole.passives == ()
    assert whole.active.ids == data.active.ids
    assert whole.active.labels is data.active.labels
    cut = 2 if name == "main-digits" else 1
    assert whole.active.features.shape[cut] == sum(of.features.shape[cut] for of in data.tables)
    # One person's row, put together by hand.
    person = data.active.ids[7]
    rows = [table.features[table.ids.index(person)] for table in data.tables]
    assert torch.equal(whole.active.features[7], torch.cat(rows, dim=cut - 1))


def test_strips_stand_in_the_order_of_the_image_whichever_the_active_holds() -> None:
    settings = load_base_config("main-digits").data
    first = centralise_data(load_data(settings, seed=0)).active
    third = centralise_data(
        load_data(settings.model_copy(update={"active_view": 3}), seed=0)
    ).active
    place = {person: row for row, person in enumerate(third.ids)}
    assert torch.equal(first.features, third.features[[place[person] for person in first.ids]])
    settings = small().data.model_copy(update={"overlap": 0.5})
    with pytest.raises(DataError, match=r"passive-1 does not know \d+ .* needs data.overlap: 1.0"):
        centralise_data(load_data(settings, seed=0))


@pytest.mark.parametrize("name", JOBS)
def test_lines_share_data_attacks_and_what_the_active_does_alone(name: str, tmp_path: Path) -> None:
    job = JOBS[name]
    base = load_base_config(job.config_names[0])
    for point in main_job.make_points(base, tmp_path, job.rows):
        config = point.make_trial(3).config
        assert (config.data, config.attacks, point.baseline_config) == (
            base.data,
            base.attacks,
            base,
        )
        assert config.seed == point.make_trial(3).baseline_config.seed == 3
    assert "at delta 1e-5" in job.reading_guide
    assert {load_base_config(config).delta for config in job.config_names} == {1e-5}


def test_lines_change_the_guard_that_they_name() -> None:
    base = load_base_config(COMPARED.config_names[0])
    assert main_job.build_row_config(GUARDED, base).guard == base.guard
    assert main_job.build_row_config(SINGLE, base).guard.mechanism == "none"


MAIN_BY_KEY = {line.key: line for line in main_job.MAIN.rows}


@pytest.mark.parametrize("key", [key for key in MAIN_BY_KEY if key.startswith("apfed")])
@pytest.mark.parametrize("name", main_job.MAIN.config_names)
def test_lines_of_the_main_job_are_protected_as_they_say(name: str, key: str) -> None:
    line = MAIN_BY_KEY[key]
    config = main_job.build_row_config(line, load_base_config(name))
    assert config.train.labels == "after"
    assert line.cells["protection"].endswith(f"epsilon {config.guard.epsilon:g}")
    is_encrypted = config.secure_sum.scheme == "ckks"
    assert line.cells["protection"].startswith("CKKS" if is_encrypted else "masks")
    assert is_encrypted or config.secure_sum.masks == "pairwise"
    assert (config.alignment.protocol == "circuit_crypten") == is_encrypted


def test_every_line_of_the_second_data_set_is_one_of_the_first() -> None:
    first, second = main_job.MAIN.config_names
    assert main_job.MAIN.list_rows(first) == main_job.MAIN_ROWS
    fewer = main_job.MAIN.list_rows(second)
    assert len(fewer) < len(main_job.MAIN_ROWS)
    assert all(line.settings == MAIN_BY_KEY[line.key].settings for line in fewer)
    assert main_job.METHOD_COMPARISON.list_rows(second) == main_job.METHOD_ROWS


def test_an_ablation_differs_from_its_line_by_whose_rows_passives_hold(tmp_path: Path) -> None:
    base = load_base_config("main-breast-cancer")
    points = {point.study_row.key: point for point in main_job.make_points(base, tmp_path)}
    ablated = {key: main_job.make_ablation(point) for key, point in points.items()}
    assert [key for key, point in ablated.items() if point] == [
        "apfed_c",
        "apfed_r",
        "votes-randomised",
    ]
    ablation = ablated["apfed_c"]
    assert ablation is not None
    whole = points["apfed_c"].load_tables(0)
    shuffled = ablation.load_tables(0)
    assert torch.equal(whole.active.features, shuffled.active.features)
    pairs = list(zip(whole.passives, shuffled.passives, strict=True))
    assert [one.ids for one, _ in pairs] == [other.ids for _, other in pairs]
    assert not any(torch.equal(one.features, other.features) for one, other in pairs)
    ordered = [(one.features.sort(0).values, other.features.sort(0).values) for one, other in pairs]
    assert all(torch.equal(one, other) for one, other in ordered)


@pytest.mark.parametrize("key", [line.key for line in main_job.MAIN_ROWS if line.cells["ablated"]])
def test_an_ablation_stands_beside_the_local_models_of_its_line(key: str, tmp_path: Path) -> None:
    base = load_base_config("main-breast-cancer")
    point = {point.study_row.key: point for point in main_job.make_points(base, tmp_path)}[key]
    ablation = main_job.make_ablation(point)
    assert ablation is not None
    measured = {
        locate_baselines(part.make_trial(0).baseline_config, part.folder)
        for part in (point, ablation)
    }
    assert len(measured) == 1, "local models of one data set and seed are measured twice"


@pytest.mark.slow
def test_a_point_is_run_once_and_read_and_other_settings_and_damage_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = LabelSettings(mechanism="randomised_response", epsilon=4.0)
    config = small().model_copy(update={"labels": answers})
    trial = Point(config=config, folder=tmp_path, has_metrics_only=True).make_trial(0)
    first = finish_trial(trial).outcome
    privacy = first.privacy
    assert (privacy.epsilon_x, privacy.epsilon_y, privacy.releases) == (math.inf, 4.0, 2)
    assert 0.5 < first.accuracy["apfed_c"] <= 1

    def never(*_: object, **__: object) -> None:
        raise AssertionError("run again")

    monkeypatch.setattr("apfed_experiments.study.run", never)
    assert finish_trial(trial).outcome == first
    train = trial.config.train.model_copy(update={"batch_size": 17})
    for changes in (
        {"config": trial.point.config.model_copy(update={"train": train})},
        {"centralised": True},
    ):
        other = dataclasses.replace(trial.point, **changes)
        with pytest.raises(CheckpointError, match="a run with other settings"):
            finish_trial(other.make_trial(0))
    whole = trial.path.read_text()
    for damage in ("", "{", "[]", '{"settings": "x"}', whole.replace("accuracy", "precision")):
        trial.path.write_text(damage)
        with pytest.raises(CheckpointError, match="holds no figures of a run"):
            finish_trial(trial)


@pytest.mark.slow
def test_a_run_folder_of_a_point_is_made_once(tmp_path: Path) -> None:
    base = load_base_config("main-breast-cancer")
    points = main_job.make_points(base, tmp_path, COMPARED.rows)
    point = next(point for point in points if point.study_row == TVFL)
    trial = point.make_trial(0)
    first = finish_trial(trial)
    written = stamps(trial.path, "result.json")
    assert finish_trial(trial) == first
    assert stamps(trial.path, "result.json") == written
    assert set(first.outcome.accuracy) == {"tvfl", "tvfl_0", "tvfl_a", "tvfl_r", "tvfl_alone"}
    figures = dataclasses.replace(point, has_metrics_only=True, folder=tmp_path / "figures")
    assert len(first.influence) == first.outcome.test_rows
    assert finish_trial(figures.make_trial(0)).influence == first.influence
    rows = collect_metrics([(trial, first)]).select_rows(point)
    assert set(rows["epsilon_x"]) == {math.inf}
    gains = [of.advantage for of in first.attacks or () if of.advantage is not None]
    told = rows["advantage"].dropna().tolist() if "advantage" in rows else []
    assert sorted(told) == sorted(gains)
    with pytest.raises(CheckpointError, match="a run with other settings"):
        finish_trial(
            dataclasses.replace(
                point, config=point.config.model_copy(update={"attacks": ()})
            ).make_trial(0)
        )


def lines_of(runs: Mapping[StudyRow, Sequence[FinishedRun]]) -> Table:
    points = [
        point
        for point in main_job.make_points(
            load_base_config(COMPARED.config_names[0]), Path("out"), COMPARED.rows
        )
        if point.study_row in runs
    ]
    found = [
        (point.make_trial(seed), run)
        for point in points
        for seed, run in enumerate(runs[point.study_row])
    ]
    return main_job.compare_points(points, collect_metrics(found))


def test_the_main_job_has_one_line_for_each_inference_and_a_page(tmp_path: Path) -> None:
    lines = lines_of(
        {
            SINGLE: [make_finished_run(0.9, epsilon=0.0, releases=0, wire_bytes=0)],
            TVFL: [
                make_finished_run({"tvfl": 0.9, "tvfl_0": 0.2}, attacks=[make_attack_result(0.1)])
            ],
            GUARDED: [make_finished_run(0.9, epsilon=epsilon) for epsilon in (8.0, 7.5)],
        }
    )
    assert [row[0] for row in lines.cells] == ["SingleVL", "TVFL, all parties", "TVFL-0", "APFed-C"]
    assert lines.rows[3]["summary"].epsilon_x == 8
    (line,) = lines_of({NOISY: [make_finished_run(0.9, epsilon=0.0)]}).rows
    assert line["epsilon"] == math.inf  # this outcome has no account of a passive
    lines = dataclasses.replace(lines, title="digits <4>")
    picture = main_job.draw_table(tmp_path / "digits.png", lines)
    part = Part(name="digits", table=lines, pictures=[picture])
    write_study_page(
        tmp_path / "index.html",
        title="All",
        reading_guide="How",
        parts=[part],
        reports=[("one", "a/report.html")],
    )
    page = (tmp_path / "index.html").read_text("utf-8")
    assert "digits &lt;4&gt;" in page
    assert 'href="a/report.html"' in page
    assert page.count("data:image/png;base64,") == 1
    assert "http" not in page


@pytest.mark.parametrize(
    ("local_models", "sentence"),
    [
        (None, "predicts 90.0 % of the active's test rows. Ablations"),
        (RIDGE, "the best local model 87.5 %. Gain +2.5 points, not yet corrected for the number"),
    ],
    ids=["without local models", "beside a local model"],
)
def test_the_first_line_of_the_main_job_is_described_in_a_sentence(
    local_models: BaselinesRecord | None, sentence: str
) -> None:
    base = load_base_config(main_job.MAIN.config_names[0])
    (point,) = (
        point
        for point in main_job.make_points(base, Path("out"))
        if point.study_row.key == main_job.MAIN.first_row_key
    )
    run = dataclasses.replace(make_finished_run(0.9), local_models=local_models)
    text = main_job._describe_first_row(
        base, point, collect_metrics([(point.make_trial(0), run)]), seed_count=1
    )
    assert text.startswith("First line of handwritten, 1 seed: APFed-C (CKKS + guard, epsilon 1)")
    assert sentence in text


def test_the_worst_attack_is_the_one_that_gains_most_on_average() -> None:
    def lines(*seeds: Mapping[str, float]) -> Table:
        runs = [
            make_finished_run(
                0.9, attacks=[make_attack_result(gain, adversary=who) for who, gain in seed.items()]
            )
            for seed in seeds
        ]
        return lines_of({GUARDED: runs})

    # The highest of each seed would be 0.3 where each of the two is 0.1 on average.
    (line,) = lines({"shop": 0.3, "bank": -0.1}, {"shop": -0.1, "bank": 0.3}).rows
    assert line["labels"].mean == pytest.approx(0.1)
    assert line["features"] is None
    (cells,) = lines({"shop": 0.1, "bank": math.nan}, {"shop": 0.1, "once": 0.9}).cells
    assert cells[-3:] == ("0.900 (1 of 2 seeds)", "not attacked", "not attacked")


def test_a_worker_takes_the_code_that_settings_of_the_caller_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        plugins, "_trusted_import_paths", set()
    )  # as in a process that has read no settings
    task = partial(
        plugins.require_trusted_code,
        "their_attacks:Mine",
        setting="attacks",
        only_earlier_settings=True,
    )
    with pytest.raises(ConfigError, match="only the party that runs code may name it"):
        _run_task("trial", task, user_modules=())
    assert _run_task("trial", task, user_modules=("their_attacks:Mine",)) == ("trial", None)
    assert plugins.list_trusted_code() == ("their_attacks:Mine",)
