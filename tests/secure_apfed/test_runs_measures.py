"""A run's measures, threshold, class weights and cross-checks: written, read again, or refused."""

import json
import math
import stat
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from apfed_experiments.baselines import RunGain, load_or_measure_baselines
from apfed_experiments.report import write_report
from secure_apfed.config import Config
from secure_apfed.data import UNLABELLED, load_data
from secure_apfed.errors import CheckpointError, ConfigError, ModelError
from secure_apfed.measures.table import ACCURACY, MEASURES, Scored, list_measure_names, measure_all
from secure_apfed.measures.tasks import Classification
from secure_apfed.methods import METHODS
from secure_apfed.privacy import accountants
from secure_apfed.privacy.accountants import ACCOUNTANTS, GaussianRelease, NoFigureError
from secure_apfed.runs.active_model import load_model
from secure_apfed.runs.folder import RunFolder, can_resume, load_scores
from secure_apfed.runs.outcome import load_outcome
from secure_apfed.runs.run import run
from tests.secure_apfed.small_runs import small_config

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")

ALL = set(list_measure_names("classification"))


def config_of(**settings: Any) -> Config:
    train = {
        "epochs": 3,
        "batch_size": 64,
        "learning_rate": 0.05,
        "device": "cpu",
        **settings.pop("train", {}),
    }
    return small_config(
        settings.pop("method", "single_view"),
        train=train,
        data=settings.pop("data", {"dataset": "breast_cancer", "active_view": 2}),
        guard={"mechanism": "none", "noise": "reproducible_insecure"},
        transcript={"keep": "none"},
        **settings,
    )


def load_kept_scores(folder: Path, threshold: float | None = None) -> Scored:
    kept = load_scores(RunFolder(folder), "single_view", threshold=threshold)
    assert kept is not None
    return kept


def test_all_measures_are_in_metrics_result_card_and_scores(tmp_path: Path) -> None:
    result = run(config_of(measure="auc"), tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    outcome = load_outcome(folder)
    card = json.loads(folder.model_card.read_text())
    lines = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    assert [set(line["measures"]["single_view"]) for line in lines] == [{"auc"}, {"auc"}, ALL]
    told = outcome.measures["single_view"]
    assert dict(told) == lines[-1]["measures"]["single_view"] == card["measures"]["single_view"]
    assert outcome.scores == result.scores == {"single_view": told["auc"]}
    assert told["accuracy"] == outcome.accuracy["single_view"]
    kept = load_kept_scores(folder.path)
    assert measure_all(kept) == pytest.approx(told)
    assert stat.S_IMODE(folder.test_scores.stat().st_mode) == 0o600
    data = result.recording.data
    rows = data.active.features[data.test_rows]
    model = load_model(folder.path)
    with pytest.raises(ModelError, match=r"reads rows of shape \(10,\), got \(3,\)"):
        model.predict(torch.zeros(2, 3))
    assert kept.scores == pytest.approx(model.predict(rows).numpy(), abs=1e-6)
    assert data.active.labels is not None
    assert kept.truth.tolist() == data.active.labels[data.test_rows].tolist()
    with pytest.raises(CheckpointError, match="no scores of other"):
        load_scores(folder, "other", threshold=None)
    folder.test_scores.write_bytes(folder.test_scores.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match="not as the run left it"):
        load_scores(folder, "single_view", threshold=None)


@pytest.mark.slow
def test_a_threshold_is_kept_and_decides(tmp_path: Path) -> None:
    run(config_of(threshold=1e-9), tmp_path / "number")
    lines = (tmp_path / "number/metrics.jsonl").read_text().splitlines()
    kept = load_kept_scores(tmp_path / "number")
    share = float(kept.truth.mean())
    assert [json.loads(line)["accuracy"]["single_view"] for line in lines] == [share] * 3
    result = run(config_of(threshold="f1"), tmp_path / "run")
    model = load_model(tmp_path / "run")
    assert result.threshold is not None
    assert model.threshold == result.threshold
    shares = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    shares[1] = torch.tensor([1 - result.threshold - 1e-3, result.threshold + 1e-3])
    assert model.decide_classes(shares).tolist() == [1, 1]
    kept = load_kept_scores(tmp_path / "run", result.threshold)
    assert ACCURACY.compute_value(kept) == result.accuracy["single_view"]


@pytest.mark.slow
def test_test_labels_choose_no_threshold() -> None:
    config = config_of(threshold="f1")
    data = load_data(config.data, seed=config.seed)
    assert data.active.labels is not None
    first = run(config, None, data=data)
    data.active.labels[data.test_rows] = 1 - data.active.labels[data.test_rows]
    other = run(config, None, data=data)
    assert first.threshold == other.threshold
    assert first.accuracy["single_view"] == pytest.approx(1 - other.accuracy["single_view"])


@pytest.mark.slow
def test_weights_of_classes_make_a_rare_one_found() -> None:
    config = config_of()
    data = load_data(config.data, seed=config.seed)
    labels = data.active.labels
    assert labels is not None
    rare = data.train_rows[labels[data.train_rows] == 0]
    often = data.train_rows[labels[data.train_rows] == 1]
    few = replace(data, train_rows=torch.cat([rare[:12], often[:200]]).sort().values)
    found = [
        run(config_of(train={"class_weights": weights, "epochs": 40}), None, data=few).measures[
            "single_view"
        ]["balanced_accuracy"]
        for weights in ("none", "balanced")
    ]
    assert found[1] > found[0] + 0.02


def test_the_weighted_loss_is_that_of_repeated_rows() -> None:
    scores = torch.randn(4, 2, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 0, 0, 1])
    weights = torch.tensor([4 / 6, 2.0])
    again = torch.tensor([0, 1, 2, 3, 3, 3])
    loss = Classification().compute_loss
    repeated = loss(scores[again], labels[again])
    assert float(loss(scores, labels, weights)) == pytest.approx(float(repeated))
    open_rows = torch.tensor([0, 0, 0, 1, UNLABELLED])
    more = torch.cat([scores, torch.ones(1, 2)])
    assert float(loss(more, open_rows, weights)) == pytest.approx(float(repeated))


@pytest.mark.parametrize("method", METHODS)
def test_who_does_not_weigh_classes_says_so(method: str) -> None:
    settings = METHODS[method].settings
    if settings.can_weight_classes:
        config_of(method=method, train={"class_weights": "balanced"})
        return
    with pytest.raises(ValidationError, match=r"train\.class_weights: method"):
        config_of(method=method, train={"class_weights": "balanced"})


NO_FIT: list[tuple[dict[str, Any], str]] = [
    ({"measure": "acu"}, "did you mean 'auc'"),
    ({"measure": "r2"}, "r2 is a measure of regression and poisson, and task is classification"),
    ({"threshold": "auc"}, "known are accuracy, balanced_accuracy, f1"),
    ({"threshold": 1.0}, "less than 1"),
    ({"threshold": "f1", "dp_sgd": {"noise_multiplier": 1.0, "clip": 1.0}}, "how many labels"),
    ({"method": "tvfl", "threshold": 0.4}, "does not predict alone"),
]


def test_what_does_not_fit_is_refused_before_training() -> None:
    config = config_of(threshold=0.4, data={"dataset": "digits", "limit": 300})
    with pytest.raises(ConfigError, match="has 10 classes and labels of 10; leave it out"):
        run(config, None)


@pytest.mark.parametrize(("settings", "said"), NO_FIT)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        config_of(**settings)


def test_baselines_are_chosen_by_the_measure(tmp_path: Path) -> None:
    data = {"dataset": "breast_cancer", "active_view": 2, "labelled": 16, "limit": 150}
    config = config_of(measure="log_loss", data=data)
    record = load_or_measure_baselines(config, tmp_path / "solo.json")
    values = [one.validation for one in record.baselines if one.validation is not None]
    assert record.measure == "log_loss"
    assert record.best.validation == min(values) != max(values)
    assert f"log loss {record.best.test:.3f} on" in record.describe_best()
    gain = RunGain(measure="log_loss", baseline="x", rows=9, reached=0.1, alone=0.225, value=0.125)
    assert record.describe_gain(gain).startswith("+0.125 against x on the same 9 test rows;")
    assert MEASURES["log_loss"].rank_value(math.inf) == -math.inf
    assert all(np.isfinite(one.test) for one in record.baselines)


@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")
def test_a_training_that_diverged_is_reported_as_such(tmp_path: Path) -> None:
    config = config_of(measure="auc", train={"learning_rate": 1e30})
    assert math.isnan(run(config, tmp_path / "run").scores["single_view"])
    kept = load_kept_scores(tmp_path / "run")
    assert np.isnan(kept.scores).any()
    assert "its training diverged" in write_report(tmp_path / "run").read_text()


# Cross-checks of epsilon: bounded, said where they are left out, and never a run's loss.

DELTA = 1e-5


def release(epsilon: float, releases: int) -> GaussianRelease:
    sigma = accountants.calibrate_sigma(epsilon, DELTA, releases, clip=0.5)
    return GaussianRelease(noise_multiplier=sigma)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("epsilon", [0.5, 20.0])
def test_a_foreseen_grid_is_the_librarys(epsilon: float, monkeypatch: pytest.MonkeyPatch) -> None:
    from dp_accounting.pld import privacy_loss_distribution

    mechanism = release(epsilon, 1)
    library = privacy_loss_distribution.from_gaussian_mechanism(mechanism.noise_multiplier)
    size = library._pmf_remove.size
    assert accountants._count_pld_grid_points(mechanism.noise_multiplier, 1) == pytest.approx(
        size, rel=0.01
    )
    monkeypatch.setattr(accountants, "MAX_GRID_POINTS", size / 2)
    with pytest.raises(NoFigureError, match=r"its grid would take .* points"):
        ACCOUNTANTS["pld"].get_epsilon(mechanism, releases=1, delta=DELTA / 3)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("epsilon", [0.5, 500.0])
def test_a_run_of_any_epsilon_is_finished(epsilon: float, tmp_path: Path) -> None:
    guard = {"mechanism": "gaussian", "epsilon": epsilon, "noise": "reproducible_insecure"}
    train = {"epochs": 1, "batch_size": 64, "device": "cpu"}
    result = run(small_config(guard=guard, train=train), tmp_path / "run")
    told = json.loads((tmp_path / "run" / "accountants.json").read_bytes())
    assert told == dict(result.privacy.accountants)
    assert str(told["pld"]).startswith("left out: its grid would take ") is (epsilon > 100)
    assert (f"(bound {accountants.MAX_GRID_POINTS:,})" in str(told["pld"])) is (epsilon > 100)
    assert told["gdp"] == pytest.approx(epsilon, rel=1e-3)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("diverges"), SystemExit(137)])
def test_a_cross_check_that_fails_leaves_the_finished_run(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its exit, as far as this process can play one that is killed then."""

    def fail(*args: Any, **options: Any) -> float:
        raise error

    monkeypatch.setattr(ACCOUNTANTS["pld"], "get_epsilon", fail)
    folder = RunFolder(tmp_path / "run")
    killed = isinstance(error, SystemExit)
    with pytest.raises(SystemExit) if killed else nullcontext():
        result = run(small_config(), folder.path)
        assert str(result.privacy.accountants["pld"]).startswith(f"failed: {type(error).__name__}")
        assert json.loads(folder.accountants.read_bytes()) == dict(result.privacy.accountants)
    folder.check_digests()
    load_model(folder.path)
    assert 7.9 < json.loads(folder.result.read_bytes())["privacy"]["epsilon_x"] <= 8.0
    assert (folder.get_party_path("active") / "ledger-active.jsonl").stat().st_size > 0
    assert not can_resume(folder.path, small_config())
    assert folder.accountants.exists() is not killed
