"""Simulated runs have the weights of the parties that they leave out, and refuse the others."""

import warnings
from collections.abc import Mapping
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor

from apfed_protocols.errors import UnsafeChoiceWarning
from secure_apfed.config import Config
from secure_apfed.data import load_data
from secure_apfed.errors import ConfigError
from secure_apfed.methods import Simulation
from secure_apfed.methods.method import batches_of
from secure_apfed.runs.run import run
from secure_apfed.simulation import begin, simulate, train, why_not
from tests.secure_apfed.small_runs import small_config

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")

_MIXED = {
    "default": {"objective": {"name": "contrastive"}, "weight": 2.0},
    "passive-2": {"objective": {"name": "reconstruction"}},
}
CASES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "contrastive": ("apfed_c", {"passives": {"default": {"weight": 10.0}}}),
    "reconstruction": ("apfed_r", {"passives": {"default": {"weight": 0.5}}}),
    "both": ("apfed", {"passives": _MIXED}),
    "alone": ("single_view", {}),
    "typical": ("tvfl", {}),
    "split network": ("split_nn", {}),
    "some labels": ("apfed_c", {"data": {"labelled": 30}}),
    "some aligned": ("apfed_c", {"data": {"overlap": 0.4}}),
    "few aligned": ("apfed_r", {"data": {"overlap": 0.02}}),
    "bounded": ("apfed_c", {"train": {"max_gradient_norm": 0.05}}),
    "adamw": ("apfed_c", {"train": {"optimizer": "adamw", "weight_decay": 0.1, "warmup_steps": 4}}),
    "cosine": ("apfed_r", {"train": {"schedule_steps": 9, "warmup_steps": 2}}),
    "adam, typical": ("tvfl", {"train": {"optimizer": "adam", "learning_rate": 1e-3}}),
    "spread labels": ("apfed_c", {"train": {"spread_labels": True}, "data": {"labelled": 30}}),
    "whole maps": ("apfed_r", {"model": {"projection": "none"}}),
}


def config_of(method: str, changes: Mapping[str, Any]) -> Config:
    usual: dict[str, Any] = {
        "data": {"dataset": "digits", "views": 3, "limit": 200},
        "model": {"hidden": [16], "representation": 8, "projection": 8, "dropout": 0.5},
        "train": {"epochs": 2, "batch_size": 32, "learning_rate": 0.01, "precision": "float64"},
        "guard": {"mechanism": "none"},
        "secure_sum": {"scheme": "plain", "clip": None},
        "transcript": {"keep": "none"},
    }
    merged = {at: {**usual.get(at, {}), **changes.get(at, {})} for at in {**usual, **changes}}
    merged["train"]["device"] = "cpu"
    return small_config(method, **merged)


def weights_of(session: Simulation) -> dict[str, Tensor]:
    """Of all parties, with what their optimizers remember; not what was counted as sent."""
    return {
        f"{party}/{name}": value
        for party, tensors in session.tensors().items()
        for name, value in tensors.items()
        if not name.startswith(("guard", "allowance"))
    }


def train_by_messages(session: Simulation, config: Config) -> None:
    session.transcript.begin_epoch(0)
    batches = chain.from_iterable(
        batches_of(session.learner, config, epoch) for epoch in range(config.train.epochs)
    )
    for step, rows_B in enumerate(batches):
        session.step(step, rows_B)


@pytest.mark.parametrize("case", CASES)
def test_the_weights_are_those_of_parties_that_send_messages(case: str) -> None:
    config = config_of(*CASES[case])
    data = load_data(config.data, seed=config.seed)
    together, sent = begin(config, data), begin(config, data)
    train(together, config)
    train_by_messages(sent, config)
    assert weights_of(together)
    torch.testing.assert_close(weights_of(together), weights_of(sent), rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("method", "labelled"),
    [("apfed_c", 30), ("apfed_r", None), ("single_view", 30), ("tvfl", None)],
)
def test_accuracy_is_that_of_a_run(method: str, labelled: int | None) -> None:
    """Also where few rows have a label: those of the others are not learnt from."""
    config = config_of(method, {"data": {"labelled": labelled}, "train": {"epochs": 8}})
    simulated = simulate(config)
    played = run(config, None)
    # Where rows stand in the alignment is a secret order of the run, by which TVFL cuts batches.
    if method != "tvfl":
        assert simulated == played.accuracy
    assert simulated.keys() == played.accuracy.keys()


@pytest.mark.parametrize(
    ("method", "changes", "says"),
    [
        ("votes", {}, "method votes"),
        ("joint_teacher", {}, "method joint_teacher"),
        ("split_nn_sum", {}, "method split_nn_sum"),
        ("apfed_c", {"guard": {"mechanism": "gaussian", "epsilon": 8.0, "clip": 1.0}}, "guard"),
        ("apfed_c", {"secure_sum": {"masks": "pairwise"}}, "secure_sum"),
        ("apfed_c", {"secure_sum": {"clip": 1.0}}, "clip"),
        ("apfed_c", {"train": {"patience": 2}}, "patience"),
        ("apfed_c", {"labels": {"mechanism": "randomised_response", "epsilon": 1.0}}, "labels"),
        (
            "apfed_c",
            {"alignment": {"mode": "pairwise"}, "secure_sum": {"allow_single_passive": True}},
            "pairwise",
        ),
    ],
)
def test_what_is_accounted_for_is_refused(method: str, changes: dict[str, Any], says: str) -> None:
    config = config_of(method, changes)
    assert says in why_not(config)
    with pytest.raises(ConfigError, match=f"(?s)cannot be simulated.*{says}"):
        simulate(config)


def test_nothing_is_written_or_warned(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnsafeChoiceWarning)
        simulate(config_of("apfed_c", {}))
    assert not list(tmp_path.iterdir())
