"""Everything computes on the run's device: one case of each entry of each table, on a pretend GPU.

It is the second of two (`cuda:1`), so that whoever forgets which one is found out as well as
whoever forgets to move something. New entries of the tables are cases at once; `pytest -v` lists
what ran.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from apfed_attacks import ATTACKS, view
from apfed_attacks import run as mounting
from apfed_attacks.interface import AttackResult
from apfed_attacks.live.runs import play, play_answers
from apfed_attacks.live.strategy import ActiveAttack, AnsweringAttack
from apfed_attacks.people.id_stuffing import IdStuffing
from apfed_attacks.run import mount
from apfed_protocols.sums import SECURE_SUMS
from secure_apfed.config import AttackChoice, Config
from secure_apfed.data import ImageEncoding, PartyTable, VerticalData
from secure_apfed.defences import DEFENCES, who_applies
from secure_apfed.learning import descent as compute
from secure_apfed.learning.descent import Compute
from secure_apfed.methods import METHODS
from secure_apfed.models import NETWORKS
from secure_apfed.objectives import OBJECTIVES
from secure_apfed.privacy.guard import GUARDS, GaussianGuard
from secure_apfed.privacy.randomised_response import LABEL_MECHANISMS
from secure_apfed.runs.outcome import Recording
from secure_apfed.runs.run import run
from secure_apfed.runs.solo import load_model
from tests.attacks.recordings import live_config
from tests.pretend_device import DEVICES, DeviceError, Pretended, pretend_gpus
from tests.secure_apfed.small_runs import small_config

pytestmark = [
    pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning"),
    # The machine is a pretence; its libraries are not there.
    pytest.mark.filterwarnings("ignore:PyTorch was compiled without cuDNN"),
]

_, HERE = DEVICES
# What the active could do alone computes there, the same on every machine; and so does
# an autoencoder of K numbers.
ON_THE_CPU = ("secure_apfed/solo/", "secure_apfed/defences/trained.py")
TRAIN = {"epochs": 2, "batch_size": 50, "learning_rate": 0.05, "device": str(HERE)}
MASKED = {"scheme": "plain", "masks": "pairwise"}
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


def _protected(guard: str, labels: str) -> Config:
    """One of each table in one run."""
    sigma = {} if GUARDS[guard].unsafe else {"sigma": 2.0}
    epsilon = {} if LABEL_MECHANISMS[labels].unsafe else {"epsilon": 4.0}
    return config_of(
        "apfed_c", guard={"mechanism": guard, **sigma, **NOISE},
        labels={"mechanism": labels, **epsilon},
    )  # fmt: skip


def _sum(name: str) -> Config:
    scheme, masks = SECURE_SUMS[name].scheme, SECURE_SUMS[name].masks
    return config_of(
        "apfed_r", train={**TRAIN, "epochs": 1},
        secure_sum={"scheme": scheme, "masks": masks, "clip": 1.0},
    )  # fmt: skip


def _network(name: str) -> Config:
    if name == "gru":
        return config_of("s_fedmv")
    model = {"network": name, "hidden": [8], "representation": 4, "projection": 4}
    return config_of("single_view", model=model, data=IMAGES)


def _objective(name: str) -> Config:
    return config_of("apfed", passives={"default": {"objective": {"name": name}}})


def _defence(name: str) -> Config:
    method = next(one for one in ("apfed_c", "tvfl") if who_applies(name, METHODS[one].declared))
    few = {"steps": 300} if name == "confusional_labels" else {}
    return config_of(method, guard={"mechanism": "none", **NOISE}, defences=[{"kind": name, **few}])


def _setting(method: str, **train: Any) -> Config:
    return config_of(method, train={**TRAIN, **train})


SETTINGS: Mapping[str, Callable[[], Config]] = {
    "bfloat16, contrast": lambda: _setting("apfed_c", precision="bfloat16"),
    "bfloat16, reconstruction": lambda: _setting("apfed_r", precision="bfloat16"),
    "bfloat16, joint": lambda: _setting("tvfl", precision="bfloat16"),
    "adamw, cosine, balanced, threshold, float64": lambda: config_of(
        "apfed_c", threshold="f1",
        train={**TRAIN, "optimizer": "adamw", "schedule_steps": 9,
               "max_gradient_norm": 1.0, "class_weights": "balanced", "precision": "float64"},
    ),
    "patience": lambda: _setting("apfed_c", patience=1, keep_best=True),
    "few labels, spread": lambda: config_of(
        "apfed_c", train={**TRAIN, "spread_labels": True}, data={"labelled": 20}
    ),
    "DP-SGD": lambda: config_of("apfed_c", dp_sgd={"noise_multiplier": 1.0}),
    "noise under the sum": lambda: config_of(
        "apfed_r", secure_sum={**MASKED, "clip": 1.0, "noise": {"epsilon": 50.0}}
    ),
    "noise under the joint sum": lambda: config_of(
        "split_nn_sum", secure_sum={**MASKED, "clip": 1.0, "noise": {"epsilon": 50.0}}
    ),
    "pairwise": lambda: config_of(
        "apfed_c", alignment={"mode": "pairwise"},
        secure_sum={**MASKED, "allow_single_passive": True},
    ),
    "images": lambda: config_of("apfed_c", model={"representation": 4}, data=IMAGES),
    "regression": lambda: config_of(
        "apfed_c", task="regression", measure="r2", data={"dataset": "diabetes"}
    ),
    "anomaly": lambda: config_of(
        "apfed_r", task="anomaly", measure="auc", data={**IMAGES, "anomaly": "9"}
    ),
}  # fmt: skip

# Both tables from their first entries on, the shorter one again from its start.
PROTECTED = list(islice(
    zip(cycle(GUARDS), cycle(LABEL_MECHANISMS), strict=False),
    max(len(GUARDS), len(LABEL_MECHANISMS)),
))  # fmt: skip

CASES: Mapping[str, Callable[[], Config]] = {
    # That of `apfed` are the objectives below.
    **{f"method {name}": partial(config_of, name) for name in METHODS if name != "apfed"},
    **{f"guard {one}, labels {other}": partial(_protected, one, other) for one, other in PROTECTED},
    **{f"sum {name}": partial(_sum, name) for name in SECURE_SUMS},
    **{f"network {name}": partial(_network, name) for name in NETWORKS},
    **{f"objective {name}": partial(_objective, name) for name in OBJECTIVES},
    **{f"defence {name}": partial(_defence, name) for name in DEFENCES},
    **SETTINGS,
}
# Images of these channels and sides; the data sets that ship with a library are smaller.
LARGER = {"network conv_mnist": (1, 12), "network conv_cifar": (3, 16)}


def _images(channels: int, side: int) -> VerticalData:
    draw = torch.Generator().manual_seed(0)
    whole = ImageEncoding(channels=channels, height=side, width=side, end_row=side)
    table = PartyTable(
        name="active", ids=tuple(map(str, range(60))), labels=torch.arange(60) % 2,
        features=torch.rand(60, *whole.shape, generator=draw), encoding=whole,
    )  # fmt: skip
    return VerticalData(
        table=table, passives=(), classes=("no", "yes"),
        train_rows=torch.arange(40), test_rows=torch.arange(40, 60),
    )  # fmt: skip


def _check(seen: Pretended) -> None:
    """All lay on the run's device: nothing on another, and no network was taught on the CPU."""
    assert seen.on[HERE]
    assert not seen.on[DEVICES[0]]
    assert not {line for line in seen.learnt_on_cpu if not line.startswith(ON_THE_CPU)}


@pytest.mark.parametrize("name", CASES)
def test_a_run_computes_on_its_device(name: str, tmp_path: Path, seen: Pretended) -> None:
    data = _images(*LARGER[name]) if name in LARGER else None
    result = run(CASES[name](), tmp_path / "run", data=data)
    assert result.accuracy or result.scores
    _check(seen)
    if (tmp_path / "run" / "model.safetensors").exists():
        load_model(tmp_path / "run")


@cache
def _recorded(method: str) -> Recording:
    """One run a method, which all of its attacks read."""
    return run(config_of(method), None).recording


FEW = {"iterations": 3}
READS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "model_completion": ("apfed_c", {"labels_per_class": 4}),
    "temporal": ("apfed_c", {"labels_per_class": 0}),
    "semi_supervised": ("apfed_c", {"hidden": 8}),
    "semi_supervised, own network": ("tvfl", {"own_network": True, "hidden": 8}),
    "label_gradients": ("tvfl", {}),
    "gradient_norm": ("tvfl", {}),
    "gradient_direction": ("tvfl", {}),
    "batch_labels": ("tvfl", {"starts": 1}),
    "spectral": ("tvfl", {}),
    "shown_labels": ("votes", {}),
    "pseudo_labels": ("mmvfl", {}),
    "inverse_network": ("apfed_c", {"shadow_rows": 20}),
    "inverse_network, wide": ("apfed_c", {"shadow_rows": 20, "components": 2}),
    "unpaired_inversion": ("apfed_c", {"shadow_rows": 20, "hidden": 8, "starts": 1}),
    "representation_network": ("tvfl", {"shadow_rows": 20, "hidden": 8}),
    "vote_regression": ("votes", {"shadow_rows": 20}),
    "vector_regression": ("vfedtrans", {"shadow_rows": 20}),
    "contrastive_inversion": ("apfed_c", {"shadow_rows": 20}),
    "sum_regression": ("mmvfl", {"shadow_rows": 20}),
    "sum_regression, representations": ("split_nn_sum", {"shadow_rows": 20}),
    "membership": ("apfed_c", {"shadow_models": 4}),
    "averaged_membership": ("h_fedmv", {"candidates": 20}),
    "averaged_membership, sequences": ("s_fedmv", {"candidates": 20}),
}


@pytest.mark.parametrize("name", READS)
def test_an_attack_computes_on_the_device_of_the_run(name: str, seen: Pretended) -> None:
    method, options = READS[name]
    recording = _recorded(method)
    seen.forget()
    choice = AttackChoice(name=name.partition(",")[0], options={**FEW, **options})
    results = mount(recording, [choice], seed=0)
    _check_attack(results, seen)


def _check_attack(results: Sequence[AttackResult], seen: Pretended) -> None:
    assert any(one.applicable for one in results), [one.reason for one in results]
    _check(seen)


def _live(method: str) -> Config:
    train = {"device": str(HERE), "epochs": 1}
    return live_config(method, views=3, train=train)


PLAYED: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "chosen_representations": ("apfed_c", {"people": 30, "shadow_rows": 10}),
    "decoder_extraction": ("apfed_r", {"people": 40, "shadow_rows": 20}),
    "isolation": ("apfed_r", {"way": "subset", "people": 64, "shadow_rows": 20}),
    "hijack": ("tvfl", {"ahead": 2, "hidden": 8}),
    "reversed_hijack": ("apfed_c", {"ahead": 2, "hidden": 8}),
}


@pytest.mark.parametrize("name", PLAYED)
def test_an_attack_in_a_live_run_computes_on_its_device(name: str, seen: Pretended) -> None:
    method, options = PLAYED[name]
    attack, config = ATTACKS[name].model_validate({**FEW, **options}), _live(method)
    if isinstance(attack, ActiveAttack):
        results = play(attack, config, victims=["passive-1"], rules=())
    else:
        assert isinstance(attack, AnsweringAttack)
        results = (play_answers(attack, config, "passive-1"),)
    _check_attack(results, seen)


def test_every_attack_is_a_case() -> None:
    """The one that is left out asks an intersection, and computes with no number."""
    cases = {name.partition(",")[0] for name in (*READS, *PLAYED)}
    assert cases == set(ATTACKS) - {IdStuffing.name}


def _here(*shape: int) -> Tensor:
    return torch.ones(*shape, device=HERE)


REFUSED: Mapping[str, Callable[[], object]] = {
    "another device's operand": lambda: _here(2) + torch.ones(2),
    "another GPU's operand": lambda: _here(2) @ torch.ones(2, device=DEVICES[0]),
    "a network left behind": lambda: torch.nn.Linear(2, 2)(_here(1, 2)),
    "an index elsewhere": lambda: torch.ones(2)[_here(2).long()],
    "rows from elsewhere": lambda: _here(2, 2).index_put_((torch.arange(2),), torch.ones(2)),
    "numpy": lambda: _here(2).numpy(),
    "an array": lambda: np.asarray(_here(2)),
    "the CPU's generator": lambda: torch.rand(2, device=HERE, generator=torch.Generator()),
    "in place": lambda: _here(2).normal_(generator=torch.Generator()),
    "another GPU's generator": lambda: torch.rand(2, generator=torch.Generator(HERE)),
    "the CPU's solver": lambda: torch.linalg.lstsq(_here(2, 2), _here(2, 1), driver="gelsd"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_gpu_refuses_is_refused(name: str) -> None:
    with pytest.raises(DeviceError):
        REFUSED[name]()


def _by_numpy(guard: GaussianGuard, h_BD: Tensor, *, step: int, rows: Tensor) -> Tensor:
    return torch.from_numpy(h_BD.detach().numpy())


IN_A_RUN: Mapping[str, tuple[Any, str, Any]] = {
    "features left behind": (Compute, "place", lambda compute, values: values),
    "another GPU in a run": (compute, "find_device", lambda choice: DEVICES[0]),
    "numpy in a guard": (GaussianGuard, "release", _by_numpy),
}
IN_AN_ATTACK: Mapping[str, tuple[Any, str, Any]] = {
    "a view left behind": (view, "_placed", lambda values, device: values),
    "another GPU": (mounting, "find_device", lambda choice: DEVICES[0]),
    "the CPU": (mounting, "find_device", lambda choice: torch.device("cpu")),
}


@pytest.mark.parametrize("fault", [*IN_A_RUN, *IN_AN_ATTACK])
def test_a_planted_fault_is_found(
    fault: str, tmp_path: Path, seen: Pretended, monkeypatch: pytest.MonkeyPatch
) -> None:
    play_one = partial(test_a_run_computes_on_its_device, "method apfed_c", tmp_path)
    if fault in IN_AN_ATTACK:
        _recorded("tvfl")
        play_one = partial(
            test_an_attack_computes_on_the_device_of_the_run, "representation_network"
        )
    monkeypatch.setattr(*{**IN_A_RUN, **IN_AN_ATTACK}[fault])
    with pytest.raises((DeviceError, AssertionError)):
        play_one(seen)
