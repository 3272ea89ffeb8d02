"""Gains: paired by seed against a baseline that no test row chose; local models are kept once."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import ttest_1samp
from sklearn.linear_model import RidgeCV

from apfed_experiments.baselines import (
    compare_baselines,
    load_baselines,
    load_or_measure_baselines,
    make_fit_store,
    train_without_votes,
)
from apfed_experiments.columns import P_HOLM
from apfed_experiments.gains import (
    CASES,
    GainCase,
    compare_validation,
    count_decisions,
    declare_study,
    list_own_cases,
    sample_people,
    select_cases,
)
from apfed_experiments.runner import run_study
from apfed_experiments.summary import (
    Gain,
    Interval,
    Summary,
    adjust_p_values,
    estimate_seed_correlation,
    estimate_seed_covariance,
)
from secure_apfed.data import load_data
from secure_apfed.errors import CheckpointError, ConfigError
from secure_apfed.methods import METHODS
from secure_apfed.settings.data import DataSettings
from tests.experiments.run_folder import APFED, make_votes_config, own_tables


def test_intervals_of_one_of_equal_and_of_several_values() -> None:
    assert math.isnan(Interval.from_values([0.5]).low)
    assert Interval.from_values([0.5, 0.5]) == Interval(0.5, 0.5, 0.5)
    # 4.303 is the .975 quantile for two degrees of freedom; the standard error is 1 / sqrt 3, and
    # where a quarter of the rows tests (Nadeau and Bengio 2003) sqrt(1 / 3 + 1 / 3).
    several = Interval.from_values([1.0, 2.0, 3.0])
    assert several.mean == 2.0
    assert several.high - 2.0 == pytest.approx(4.3027 / math.sqrt(3), rel=1e-4)
    split = Interval.from_values([1.0, 2.0, 3.0], seed_correlation=0.25)
    assert split.high - 2.0 == pytest.approx(4.3027 * math.sqrt(2 / 3), rel=1e-4)


@pytest.mark.parametrize(
    ("dataset", "shared"), [("digits", 0.25), ("tables", 0.25), ("mnist", 0.0)]
)
def test_seeds_share_the_rows_that_are_split_again(dataset: str, shared: float) -> None:
    settings = DataSettings.model_construct(dataset=dataset)
    assert estimate_seed_correlation(settings, train_count=75, test_count=25) == pytest.approx(
        shared
    )


def test_two_seeds_covary_by_the_people_who_test_both() -> None:
    one = pd.Series([1.0, -1.0], ["a", "b"])
    other = pd.Series([2.0, -2.0], ["a", "c"])
    assert estimate_seed_covariance([one, other]) == pytest.approx(1 * 2 / (2 * 2))
    assert estimate_seed_covariance([one, -other]) == 0.0
    assert estimate_seed_covariance([one, other.rename({"a": "d"})]) == 0.0
    common = Interval.from_values([1.0, 2.0, 3.0], seed_covariance=0.5)
    assert common.high - 2.0 == pytest.approx(4.3027 * math.sqrt(1 / 3 + 0.5), rel=1e-4)


def test_p_values_are_students_and_holms() -> None:
    values = [0.3, 0.1, -0.2, 0.4, 0.5]
    expected = ttest_1samp(values, 0.0).pvalue
    assert Interval.from_values(values).compute_p_value(5) == pytest.approx(expected)
    assert Interval.from_values([0.1, 0.1]).compute_p_value(2) == 0.0
    assert Interval.from_values([0.0, 0.0]).compute_p_value(2) == 1.0
    gains = [
        Interval.from_values([value + shift for value in values]) for shift in (0.0, 0.3, 0.6, 0.25)
    ]
    one, three, four, two = (gain.compute_p_value(5) for gain in gains)
    assert adjust_p_values([*gains, None, Interval.from_values([1.0])], 5) == pytest.approx(
        [max(one, 2 * two), 3 * three, 4 * four, max(2 * two, 3 * three), math.nan, math.nan],
        nan_ok=True,
    )
    assert tuple(map(P_HOLM.format_value, (math.nan, 0.0004, 0.034))) == ("", "< 0.001", "0.034")


def test_the_epsilon_of_a_line_is_that_of_what_its_method_sends() -> None:
    sent = dict.fromkeys(("apfed_r", "split_nn", "single_view"), 8.0)
    summed = dict.fromkeys(("votes", "split_nn_sum", "mmvfl", "h_fedmv", "vfedtrans"), 2.0)
    line = Summary(
        seed_count=1,
        accuracy_by_inference={"accuracy": Interval.from_values([0.5])},
        epsilon_x=8.0,
        epsilon_y=math.inf,
        release_count=1,
        wire_bytes=1.0,
        leakage_by_direction={},
        epsilon_passives=2.0,
    )
    expected = {**sent, **summed}
    shown = {method: line.find_epsilon(METHODS[method].public_facts) for method in expected}
    assert shown == expected


def rows_of(accuracies: list[float], **baselines: list[tuple[float, float]]) -> pd.DataFrame:
    rows = [
        {"seed": seed, "target": "task", "metric": "accuracy", "name": "votes", "score": score}
        for seed, score in enumerate(accuracies)
    ]
    for name, values in baselines.items():
        rows += [
            {
                "seed": seed,
                "target": "solo",
                "metric": "accuracy",
                "name": name,
                "score": test,
                "baseline": held_out,
            }
            for seed, (held_out, test) in enumerate(values)
        ]
    return pd.DataFrame(rows).assign(shared=0.0)


def test_the_baseline_is_chosen_by_held_out_labels_and_hindsight_is_told() -> None:
    gain = Gain.from_rows(
        rows_of([0.8, 0.9], honest=[(0.7, 0.6), (0.7, 0.7)], lucky=[(0.5, 0.75), (0.6, 0.75)])
    )
    assert gain is not None
    assert gain.baseline == "honest"
    assert gain.gain_over_chosen.mean == pytest.approx(0.2)
    assert gain.gain_over_chosen.low == pytest.approx(0.2)
    assert gain.oracle == "lucky"
    assert gain.gain_over_oracle.mean == pytest.approx(0.1)
    assert gain.gain_over_ablation is None
    assert Gain.from_rows(rows_of([0.8])) is None
    beside = Gain.from_rows(rows_of([0.8, 0.9], honest=[(0.7, 0.6)] * 2), rows_of([0.78, 0.92]))
    assert beside is not None
    assert beside.gain_over_ablation is not None
    assert (beside.ablation_score, beside.gain_over_ablation.mean) == pytest.approx((0.85, 0.0))


@pytest.mark.parametrize(
    ("reached", "told"),
    [
        pytest.param([0.8, 0.82, 0.81], "Help paid", id="better"),
        pytest.param([0.71, 0.69, 0.7], "No help shown", id="near"),
        pytest.param([0.5, 0.52, 0.51], "Help cost", id="worse"),
        pytest.param([0.8], "One seed", id="one seed"),
    ],
)
def test_a_sentence_says_whether_help_paid(reached: list[float], told: str) -> None:
    near = [(0.7, 0.70), (0.7, 0.71), (0.7, 0.69)]
    gain = Gain.from_rows(rows_of(reached, alone=near[: len(reached)]))
    assert gain is not None
    assert gain.sentence.partition(":")[0] == told


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_every_case_is_a_run_and_its_control_the_same_without_help(case: GainCase) -> None:
    assert case.config.data.labelled == case.labelled_count
    assert case.baseline_config.data == case.config.data
    ours = case.config
    control = case.ablation.config
    assert case.ablation.baseline_config == case.baseline_config
    assert control.data == ours.data
    if case.method in ("apfed_code", "apfed_code-64") or "-after" in case.method:
        # its control has rows of others
        assert control == ours.model_copy(update={"name": control.name})
    elif case.method.startswith("apfed") and "code" not in case.method:
        assert {passive.weight for passive in control.passives.values()} == {0.0}
        assert (control.model, control.train) == (ours.model, ours.train)
    else:
        assert (control.model, control.train) == (
            case.baseline_config.model,
            case.baseline_config.train,
        )


def test_the_control_of_a_code_has_the_same_rows_of_other_people() -> None:
    case = GainCase(method="apfed_code", data_name="wine", labelled_count=9)
    mine, mixed = (one.make_point(Path()).load_tables(0) for one in (case, case.ablation))
    assert torch.equal(mine.active.features, mixed.active.features)
    for own, other in zip(mine.passives, mixed.passives, strict=True):
        assert own.ids == other.ids
        assert torch.equal(own.features.sort(0).values, other.features.sort(0).values)
        assert (own.features == other.features).all(1).double().mean() < 0.1


def test_a_student_without_help_reads_nothing_of_passives() -> None:
    point = GainCase(method="votes", data_name="wine", labelled_count=9).ablation.make_point(Path())
    config = point.make_trial(0).config
    data = load_data(config.data, seed=0)
    other = replace(
        data, passives=tuple(replace(table, features=-table.features) for table in data.passives)
    )
    said = [
        train_without_votes(config, held).score_rows(data.test_rows).scores
        for held in (data, other)
    ]
    assert (said[0] == said[1]).all()


def test_a_case_is_measured_and_written(tmp_path: Path) -> None:
    case = GainCase(method="votes", data_name="wine", labelled_count=9)
    (table,) = run_study(declare_study(tmp_path, [case], seed_count=2)).tables
    ((plain,), (cells,), (row,)) = table.export_rows(), table.cells, table.rows
    assert plain["control"] == "no-help/wine/n9"
    assert len(cells) == len(table.header)
    assert row["baseline"] in ("ridge", "logistic")


def test_votes_are_told_apart_by_what_they_would_have_brought(tmp_path: Path) -> None:
    cases = [CASES[name] for name in ("votes-judged/wine/n9", "votes-always/wine/n9")]
    gains, told = run_study(declare_study(tmp_path, cases, seed_count=2)).tables
    assert [row["help_used"][-4:] for row in gains.rows] == ["of 2", "of 2"]
    assert gains.rows[1]["help_used"] == "2 of 2"
    counted = [int(row[name].split()[0]) for row in told.rows for name in row if name != "help"]
    assert sum(counted) == 2
    assert sum(counted[:3]) == int(gains.rows[0]["help_used"][0])


def test_what_is_told_in_hindsight_is_over_the_model_that_stays() -> None:
    scores = {0: (0.5, 0.6, 0.9), 1: (0.7, 0.6, 0.6)}  # held out a and b, votes
    rows = [
        {
            "target": "solo",
            "metric": "accuracy",
            "seed": seed,
            "name": name,
            "baseline": held_out,
            "score": score,
            "help_used": seed == 0,
        }
        for seed, (a, b, _) in scores.items()
        for name, held_out, score in (("a", a, 0.8), ("b", b, 0.4))
    ]
    always = [{"target": "task", "seed": seed, "score": of[2]} for seed, of in scores.items()]
    told = compare_validation(pd.DataFrame(rows), pd.DataFrame(always))
    assert told["used"].tolist() == [True, False]
    assert told["gain"].tolist() == pytest.approx([0.9 - 0.4, 0.6 - 0.8])
    used, kept = count_decisions(told).rows
    assert (used["helps"], used["harms"], kept["harms"]) == ("1 (+50.0)", "0", "1 (-20.0)")


def test_tables_of_ones_own_are_cut_as_their_folder_says(tmp_path: Path) -> None:
    frame = pd.DataFrame(np.random.default_rng(0).normal(size=(90, 4)), columns=list("abcd"))
    frame.loc[3, "c"] = math.nan
    frame.insert(0, "id", [f"p{row}" for row in range(90)])
    frame["label"] = np.where(frame["a"] + frame["d"] > 0, "Hid", "hId")
    frame.to_csv(tmp_path / "vowels.csv.gz", index=False)
    splits = tmp_path / "splits.yaml"
    splits.write_text("vowels: {measure: macro_f1, rows: 90, active: [a], other: [b, c]}")
    (case,) = select_cases(["votes/vowels/n20"], list_own_cases(tmp_path))
    data = case.make_point(tmp_path).load_tables(0)
    assert (case.config.measure, data.classes) == ("f1", ("Hid", "hId"))
    assert [table.features.shape[1] for table in data.tables] == [1, 2]
    assert data.active.labels is not None
    assert len(data.labelled_rows) == 20
    for text, said in (
        ("[", "cannot be read"),
        ("[1]", "expected of each table"),
        ("vowels: {active: [a]}", "needs columns of the party active and of another"),
        ("vowels: {active: [a], other: [z]}", "lacks the columns z"),
        ("consonants: {active: [a], other: [b]}", "there is no consonants.csv"),
    ):
        splits.write_text(text)
        with pytest.raises(ConfigError, match=said):
            list_own_cases(tmp_path)


def test_each_passive_knows_its_own_share() -> None:
    config = GainCase(method="votes", data_name="digits-known-20", labelled_count=50).config
    data = load_data(config.data, seed=0)
    thinned = sample_people(data, 0.2, seed=0)
    train = {data.active.ids[row] for row in data.train_rows.tolist()}
    test = {data.active.ids[row] for row in data.test_rows.tolist()}
    known = [set(table.ids) for table in thinned.passives]
    assert [len(people & train) for people in known] == [round(0.2 * len(train))] * 3
    assert all(people >= test for people in known)
    assert len({frozenset(people) for people in known}) == 3
    for before, after in zip(data.passives, thinned.passives, strict=True):
        rows = [before.ids.index(person) for person in after.ids]
        assert torch.equal(after.features, before.features[rows])


@pytest.mark.slow
def test_numbers_and_people_apart_are_cases_too(tmp_path: Path) -> None:
    names = ("votes/diabetes/n60", "votes/breast-cancer-errors-known-50/n20")
    (table,) = run_study(
        declare_study(tmp_path, [CASES[name] for name in names], seed_count=1)
    ).tables
    numbers, apart = table.rows
    assert (numbers["measure"], apart["measure"]) == ("r2", "accuracy")
    assert numbers["gain"].mean == pytest.approx(numbers["reached"] - numbers["solo"])
    without = numbers["reached"] - numbers["no_help"]
    assert numbers["gain_no_help"].mean == pytest.approx(without)
    assert 0.5 < apart["reached"] <= 1


def test_baselines_are_of_the_data_and_of_the_actives_own_table(tmp_path: Path) -> None:
    config = make_votes_config(**APFED, data=own_tables(tmp_path))
    path = tmp_path / "solo.json"
    record = load_or_measure_baselines(config, path)
    assert load_baselines(config, path) == record
    assert record.rows == len(record.people) > 0
    assert f"on {record.rows} test rows" in record.describe_best()
    with pytest.raises(CheckpointError, match="other data or settings"):
        load_baselines(config.model_copy(update={"seed": 1}), path)
    (tmp_path / "shop.csv").write_text("id,c\np1,1\n")
    assert load_or_measure_baselines(config, path) == record
    own = pd.read_csv(tmp_path / "active.csv")
    own.assign(a=own["a"] + 1).to_csv(tmp_path / "active.csv", index=False)
    with pytest.raises(CheckpointError, match="a table that was edited since"):
        load_or_measure_baselines(config, path)


def test_a_study_fits_its_prior_once(tmp_path: Path) -> None:
    store = make_fit_store(tmp_path / "study")
    made = list[int]()

    def make() -> bytes:
        made.append(1)
        return b"fitted"

    assert store("mixmatch-1", make) == store("mixmatch-1", make) == b"fitted"
    assert made == [1]
    (path,) = (tmp_path / "study" / "fits").iterdir()
    path.write_bytes(b"another")
    with pytest.raises(CheckpointError, match="truncated or altered"):
        store("mixmatch-1", make)


def test_hidden_labels_do_not_reach_the_baselines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = GainCase(method="votes", data_name="wine", labelled_count=9).config
    spy = Mock(wraps=compare_baselines)
    monkeypatch.setattr("apfed_experiments.baselines.compare_baselines", spy)
    load_or_measure_baselines(config, tmp_path / "solo.json")
    ((task, *_), _) = spy.call_args
    assert len(task.labels) == len(task.labelled_indices) == 9


@pytest.mark.parametrize("dataset", ["wine", "diabetes"])
def test_baselines_of_many_labels_learn_from_a_sample_and_say_so(
    dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for where in ("apfed_experiments.baselines", "secure_apfed.baselines.interface"):
        monkeypatch.setattr(f"{where}.MAX_ROWS", 60)
    case = GainCase(method="votes", data_name=dataset, labelled_count=None)
    learnt = list[int]()

    def fit(of: Any, x_NF: Any, *rest: Any, **more: Any) -> Any:
        learnt.append(len(x_NF))
        return usual(of, x_NF, *rest, **more)

    usual = RidgeCV.fit
    monkeypatch.setattr(RidgeCV, "fit", fit)
    record = load_or_measure_baselines(case.config, tmp_path / "solo.json")
    assert record.sample == 60
    assert "fitted on 60 of" in record.describe_best()
    assert 40 <= max(learnt) <= 64  # each class at least once


def test_a_gain_in_a_loss_is_what_it_fell_by() -> None:
    rows = rows_of([0.4, 0.41], near=[(0.5, 0.5), (0.5, 0.52)], far=[(0.9, 0.9), (0.9, 0.9)])
    gain = Gain.from_rows(rows.assign(metric="log_loss"))
    assert gain is not None
    assert (gain.baseline, gain.oracle, gain.measure) == ("near", "near", "log_loss")
    assert gain.gain_over_chosen.mean == pytest.approx(0.105)
    assert "log loss over near, the best local model" in gain.sentence
    json.dumps(asdict(gain))
