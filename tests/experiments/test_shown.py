"""The settings under which methods are shown: one place, and no method undertrained."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import BaseModel

from apfed_experiments import main_job
from apfed_experiments.gains import CASES
from apfed_experiments.shown import JOINT_TRAINING, LABELS_AFTER, NETWORK
from apfed_experiments.study import load_base_config
from secure_apfed.baselines import BaselineTask, find_baseline
from secure_apfed.config import Config
from secure_apfed.data import load_data
from secure_apfed.methods import open_session
from secure_apfed.runs.run import run
from tests.secure_apfed.seats import active_of


def plain(section: BaseModel, **changes: Any) -> dict[str, Any]:
    return {**section.model_dump(mode="json", exclude_defaults=True), **changes}


def make_run_config(settings: Mapping[str, Any]) -> Config:
    """Return a run of APFed-R with these settings."""
    usual = {"name": "x", "method": "apfed_r", "data": {"dataset": "digits"}}
    return Config.model_validate({**usual, "guard": {"mechanism": "none"}, **settings})


@pytest.mark.parametrize("name", main_job.MAIN.config_names)
def test_the_main_job_trains_as_gains_are_measured(name: str) -> None:
    base = load_base_config(name)
    expected = make_run_config(LABELS_AFTER)
    assert plain(base.train, device="auto") == plain(expected.train, device="auto")
    assert plain(base.model, projection=0) == plain(expected.model, projection=0)
    assert base.passives == expected.passives


def test_a_case_of_gains_says_the_shown_settings() -> None:
    after = CASES["apfed_r-after/digits/n50/eps1"].config
    assert after.train == make_run_config(LABELS_AFTER).train
    joint = CASES["apfed_r/handwritten-zer/n50"].config
    assert joint.train == make_run_config(NETWORK).train


SETS: Mapping[str, Mapping[str, Any]] = {
    "digits": {"dataset": "digits", "views": 4, "labelled": 50},
    "numerals": {"dataset": "handwritten", "active_view": 1, "labelled": 50},
    "breast cancer": {"dataset": "breast_cancer", "active_view": 2, "labelled": 50},
}
SEEDS = range(3)


def single_view(data: Mapping[str, Any], seed: int, **train: Any) -> Config:
    return Config.model_validate(
        {
            "name": "alone",
            "method": "single_view",
            "seed": seed,
            "data": data,
            "model": {**NETWORK["model"]},
            "train": {**JOINT_TRAINING, "device": "cpu", **train},
            "guard": {"mechanism": "none"},
        }
    )


def network_alone(config: Config) -> float:
    """Return the accuracy of the baseline "own network" of this run."""
    data = load_data(config.data, seed=config.seed)
    labels = data.active.labels
    assert labels is not None
    train = data.train_rows
    known = data.labelled_rows
    positions = torch.isin(train, known).nonzero().flatten()
    task = BaselineTask.from_arrays(
        data.active.features[train],
        positions,
        labels[train[positions]],
        classes=len(data.classes),
        seed=config.seed,
        model=config.model,
        train=config.train,
    )
    predictor = find_baseline("network").fit(task)
    rows = data.active.features[data.test_rows].flatten(1).double().numpy()
    right = predictor.compute_scores(rows).argmax(1) == labels[data.test_rows].numpy()
    return float(right.mean())


@pytest.mark.slow
@pytest.mark.parametrize("name", SETS)
def test_the_network_without_help_is_not_below_the_same_network_as_a_baseline(name: str) -> None:
    """Lambda 0 is SingleVL: its training must not be what a gain is measured against."""
    differences = []
    for seed in SEEDS:
        config = single_view(SETS[name], seed)
        (reached,) = run(config, None).accuracy.values()
        differences.append(reached - network_alone(config))
    chance = 2 * float(np.std(differences, ddof=1)) / math.sqrt(len(differences))
    assert float(np.mean(differences)) > -max(chance, 0.03), [f"{d:+.3f}" for d in differences]


@pytest.mark.slow
@pytest.mark.parametrize("name", SETS)
def test_training_ends_near_the_floor_of_the_loss_on_labelled_rows(name: str) -> None:
    config = single_view(SETS[name], 0, spread_labels=False)
    data = load_data(config.data, seed=0)
    session = open_session(config, data)
    active = active_of(session)
    known = data.labelled_rows
    blind = math.log(len(data.classes))
    for step in range(int(2 * JOINT_TRAINING["epochs"])):
        active.trainer.train_on_batch(active.trainer.forward(step, known, None))
    assert active.trainer.compute_mean_loss(known) < 0.1 * blind
