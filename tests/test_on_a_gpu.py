"""Everything computes on the run's device: one case of each entry of each table, on a pretend GPU.

It is the second of two (`cuda:1`), so that whoever forgets which one is found out as well as whoever
forgets to move something. New entries of the tables are cases at once. `pytest -v` lists what ran.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attacks import ATTACKS, reading
from attacks.interface import Attack, AttackResult
from attacks.live.play import play, play_active, play_passive
from attacks.live.strategy import ActiveAttack, AnsweringAttack
from attacks.people.id_stuffing import IdStuffing
from attacks.run import mount, prepare
from experiments.solo import keep_solo
from secure_apfed.config import AttackChoice, Config
from secure_apfed.defences import DEFENCES, who_applies
from secure_apfed.learning.compute import Compute, find_device
from secure_apfed.methods import METHODS
from secure_apfed.models import NETWORKS
from secure_apfed.objectives import OBJECTIVES
from secure_apfed.privacy import GUARDS, LABEL_MECHANISMS
from secure_apfed.runs import Recording, load_model, run
from protocols.sums import SECURE_SUMS
from tests.pretend_device import CPU, DEVICES, DeviceError, Pretended, pretend_gpus
from tests.secure_apfed.small_runs import small_config

pytestmark = pytest.mark.filterwarnings("ignore::protocols.errors.UnsafeChoiceWarning")

_, HERE = DEVICES
TRAIN = {"epochs": 2, "batch_size": 50, "learning_rate": 0.05, "device": str(HERE)}
NOISE = {"noise": "reproducible_insecure"}
IMAGES = {"dataset": "digits", "views": 3, "overlap": 1.0, "limit": 100}


@pytest.fixture(autouse=True)
def seen() -> Iterator[Pretended]:
    with pretend_gpus() as seen:
        yield seen


def config_of(method: str, *, data: Mapping[str, Any] | None = None, **changes: Any) -> Config:
    """A small run on the second GPU; changes replace whole sections, of the data single keys."""
    few = small_config(method).data.model_dump(exclude_defaults=True)
    few = {**few, "limit": 100, **(data or {})} if "limit" not in few else few
    return small_config(method, **{"train": TRAIN, "data": few, **changes})


def _guard(name: str) -> Config:
    strength = {} if GUARDS[name].unsafe else {"sigma": 2.0}
    return config_of("apfed_c", guard={"mechanism": name, **strength, **NOISE})


def _labels(name: str) -> Config:
    strength = {} if LABEL_MECHANISMS[name].unsafe else {"epsilon": 4.0}
    return config_of("apfed_c", labels={"mechanism": name, **strength})


def _sum(name: str) -> Config:
    scheme, masks = SECURE_SUMS[name].scheme, SECURE_SUMS[name].masks
    return config_of(
        "apfed_r", train={**TRAIN, "epochs": 1},
        secure_sum={"scheme": scheme, "masks": masks, "clip": 1.0},
    )  # fmt: skip


def _network(name: str) -> Config:
    model: dict[str, Any] = {"network": name, "hidden": [8], "representation": 4, "projection": 4}
    if name == "gru":
        return config_of("s_fedmv")
    return config_of("single_view", model=model, data=IMAGES)


def _objective(name: str) -> Config:
    return config_of("apfed", passives={"default": {"objective": {"name": name}}})


def _defence(name: str) -> Config:
    method = next(one for one in ("apfed_c", "tvfl") if who_applies(name, METHODS[one].facts))
    return config_of(method, guard={"mechanism": "none", **NOISE}, defences=[{"kind": name}])


def _setting(method: str, **train: Any) -> Config:
    return config_of(method, train={**TRAIN, **train})


SETTINGS: Mapping[str, Any] = {
    "bfloat16, contrast": lambda: _setting("apfed_c", precision="bfloat16"),
    "bfloat16, reconstruction": lambda: _setting("apfed_r", precision="bfloat16"),
    "bfloat16, joint": lambda: _setting("tvfl", precision="bfloat16"),
    "float64": lambda: _setting("apfed_c", precision="float64"),
    "adamw, cosine": lambda: _setting(
        "apfed_c", optimizer="adamw", schedule="cosine", schedule_steps=9, max_gradient_norm=1.0
    ),
    "patience": lambda: _setting("apfed_c", patience=1, keep_best=True),
    "balanced": lambda: _setting("apfed_c", class_weights="balanced"),
    "spread labels": lambda: _setting("apfed_c", spread_labels=True),
    "DP-SGD": lambda: config_of("apfed_c", dp_sgd={"noise_multiplier": 1.0}),
    "noise under the sum": lambda: config_of(
        "apfed_r",
        secure_sum={"scheme": "plain", "masks": "pairwise", "clip": 1.0, "noise": {"epsilon": 50.0}},
    ),
    "noise under the joint sum": lambda: config_of(
        "split_nn_sum",
        secure_sum={"scheme": "plain", "masks": "pairwise", "clip": 1.0, "noise": {"epsilon": 50.0}},
    ),
    "pairwise": lambda: config_of(
        "apfed_c", alignment={"mode": "pairwise"},
        secure_sum={"scheme": "plain", "masks": "pairwise", "allow_single_passive": True},
    ),
    "images": lambda: config_of("apfed_c", model={"representation": 4}, data=IMAGES),
    "threshold": lambda: config_of("apfed_c", threshold="f1"),
    "few labels": lambda: config_of("apfed_c", data={"labelled": 20}),
    "regression": lambda: config_of(
        "apfed_c", task="regression", measure="r2", data={"dataset": "diabetes"}
    ),
    "anomaly": lambda: config_of(
        "apfed_r", task="anomaly", measure="auc", data={**IMAGES, "anomaly": "9"}
    ),
}

CASES: Mapping[str, Any] = {
    **{f"method {name}": lambda name=name: config_of(name) for name in METHODS},
    **{f"guard {name}": lambda name=name: _guard(name) for name in GUARDS},
    **{f"labels {name}": lambda name=name: _labels(name) for name in LABEL_MECHANISMS},
    **{f"sum {name}": lambda name=name: _sum(name) for name in SECURE_SUMS},
    **{f"network {name}": lambda name=name: _network(name) for name in NETWORKS},
    **{f"objective {name}": lambda name=name: _objective(name) for name in OBJECTIVES},
    **{f"defence {name}": lambda name=name: _defence(name) for name in DEFENCES},
    **SETTINGS,
}


def _check(seen: Pretended) -> None:
    """What was computed lay on the run's device: nothing on another, and nothing learnt on the CPU."""
    assert seen.on[HERE]
    assert not seen.on[DEVICES[0]]
    assert not seen.learnt_on_cpu


@pytest.mark.parametrize("name", CASES)
def test_a_run_computes_on_its_device(name: str, tmp_path: Path, seen: Pretended) -> None:
    config = CASES[name]()
    result = run(config, tmp_path / "run")
    assert result.accuracy or result.scores
    _check(seen)
    if (tmp_path / "run" / "model.safetensors").exists():
        load_model(tmp_path / "run")
