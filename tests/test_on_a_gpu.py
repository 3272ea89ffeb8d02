"""Everything computes on the run's device: one case of each entry of each table, on a pretend GPU,
the second of two, so that whoever forgets which one is found out as well.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from apfed_attacks import ATTACKS, view
from apfed_attacks import run as mounting
from apfed_attacks.interface import AttackResult
from apfed_attacks.live.runs import mount_answering_attack
from apfed_attacks.live.strategy import ActiveAttack, AnsweringAttack
from apfed_attacks.people.id_stuffing import IdStuffing
from apfed_protocols.sums import SECURE_SUMS
from secure_apfed.base.transfers import fetch_tensors, send_tensor
from secure_apfed.config import AttackChoice, Config
from secure_apfed.data import ImageEncoding, PartyTable, VerticalData
from secure_apfed.errors import ModelError
from secure_apfed.learning import descent as compute
from secure_apfed.methods import METHODS
from secure_apfed.networks.models import NETWORKS
from secure_apfed.privacy.defences import DEFENCES, describe_runners
from secure_apfed.privacy.guard import GUARDS, GaussianGuard
from secure_apfed.privacy.randomised_response import LABEL_MECHANISMS
from secure_apfed.runs import training_loop
from secure_apfed.runs.active_model import load_model
from secure_apfed.runs.outcome import Recording
from secure_apfed.runs.run import run
from secure_apfed.runs.training_loop import EpochLosses, TrainingLoop
from tests.attacks.recordings import live_config, play
from tests.pretend_device import DEVICES, DeviceError, Pretended, pretend_gpus
from tests.secure_apfed.small_runs import small_config
from tests.with_crypten import pair_of

pytestmark = [
    pytest.mark.every_teacher,
    pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning"),
    # The machine is a pretence; its libraries are not there.
    pytest.mark.filterwarnings("ignore:PyTorch was compiled without cuDNN"),
]

_, HERE = DEVICES
# What the active could do alone computes there, the same on every machine; and so does
# an autoencoder of K numbers.
ON_THE_CPU = ("secure_apfed/baselines/", "secure_apfed/learning/autoencoder.py")
TRAIN = {"epochs": 1, "batch_size": 50, "learning_rate": 0.05, "device": str(HERE)}
MASKED = {"scheme": "plain", "masks": "pairwise"}
NOISE = {"noise": "reproducible_insecure"}
IMAGES = {"dataset": "digits", "views": 3, "overlap": 1.0, "limit": 100}
BOTH = {
    "passive-1": {"objective": {"name": "contrastive"}},
    "default": {"objective": {"name": "reconstruction"}},
}


@pytest.fixture(autouse=True)
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pretended]:
    """Record where a run computes, whose teachers learn for a few steps only."""
    steps = {"networks._MIXMATCH_STEPS": 4, "networks._CODER_STEPS": 4, "classical._TREE_COUNT": 5}
    for name, few in steps.items():
        monkeypatch.setattr(f"secure_apfed.baselines.{name}", few)
    monkeypatch.setattr("secure_apfed.methods.student._TREE_COUNT", 5)
    with pretend_gpus() as seen:
        yield seen


def config_of(method: str, *, data: Mapping[str, Any] | None = None, **changes: Any) -> Config:
    """A small run on the second GPU; changes replace whole sections, of data and train keys."""
    few = small_config(method).data.model_dump(exclude_defaults=True)
    few |= {"limit": 60 if METHODS[method].public_facts.has_sequence_views else 100, **(data or {})}
    train = TRAIN | changes.pop("train", {})
    return small_config(method, **{"train": train, "data": few, **changes})


def _table(number: int) -> Callable[[], Config]:
    """The n-th entry of each table in one run, the shorter ones again from their start."""
    tables = SECURE_SUMS, GUARDS, LABEL_MECHANISMS, OF_APFED
    kind, guard, labels, defence = (list(table)[number % len(table)] for table in tables)
    sigma = {} if GUARDS[guard].unsafe else {"sigma": 2.0}
    epsilon = {} if LABEL_MECHANISMS[labels].unsafe else {"epsilon": 4.0}
    return lambda: config_of(
        "apfed_r",
        guard={"mechanism": guard, **sigma, **NOISE},
        labels={"mechanism": labels, **epsilon},
        defences=[{"kind": defence}],
        secure_sum={**pair_of(kind), "clip": 1.0},
        train={"epochs": 2},
    )


def _network(name: str) -> Config:
    numbers = 10 if name == "glm" else 4  # as many as there are digits
    model = {"network": name, "hidden": [8], "representation": numbers, "projection": 4}
    return config_of("single_view", model=model, data=IMAGES)


OF_APFED = [name for name in DEFENCES if describe_runners(name, METHODS["apfed_r"].public_facts)]
METHOD_RUNS = {name: partial(config_of, name) for name in METHODS}
METHOD_RUNS["apfed_c"] = partial(config_of, "apfed_c", train={"epochs": 2})
METHOD_RUNS["apfed"] = partial(config_of, "apfed", passives=BOTH)
_NETWORKS = {run().model.network for run in METHOD_RUNS.values()}

CASES: Mapping[str, Callable[[], Config]] = {
    **{f"{at}-th of each table": _table(at) for at in range(len(SECURE_SUMS))},
    **{f"network {name}": partial(_network, name) for name in NETWORKS if name not in _NETWORKS},
    **{
        f"defence {name}": partial(
            config_of, "tvfl", guard={"mechanism": "none", **NOISE}, defences=[{"kind": name}]
        )
        for name in DEFENCES
        if name not in OF_APFED
    },
    "bfloat16, contrast": lambda: config_of("apfed_c", train={"precision": "bfloat16"}),
    "bfloat16, joint": lambda: config_of("tvfl", train={"precision": "bfloat16"}),
    "adamw, cosine, balanced, threshold, float64, patience": lambda: config_of(
        "apfed_c",
        threshold="f1",
        train={
            "optimizer": "adamw",
            "schedule_steps": 9,
            "max_gradient_norm": 1.0,
            "epochs": 2,
            "class_weights": "balanced",
            "precision": "float64",
            "patience": 1,
            "keep_best": True,
        },
    ),
    "few labels, spread": lambda: config_of(
        "apfed_c", train={"spread_labels": True}, data={"labelled": 20}
    ),
    "DP-SGD": lambda: config_of("apfed_c", dp_sgd={"noise_multiplier": 1.0}),
    "noise under the sum": lambda: config_of(
        "apfed_r", secure_sum={**MASKED, "clip": 1.0, "noise": {"epsilon": 50.0}}
    ),
    "noise under the joint sum": lambda: config_of(
        "split_nn_sum", secure_sum={**MASKED, "clip": 1.0, "noise": {"epsilon": 50.0}}
    ),
    "pairwise, images": lambda: config_of(
        "apfed_c",
        alignment={"mode": "pairwise"},
        data=IMAGES,
        secure_sum={**MASKED, "allow_single_passive": True},
    ),
    "regression": lambda: config_of(
        "apfed_c", task="regression", measure="r2", data={"dataset": "diabetes"}
    ),
}
# Images of these channels and sides; the data sets that ship with a library are smaller.
LARGER = {"network conv_mnist": (1, 12), "network conv_cifar": (3, 16)}


def _images(channels: int, side: int) -> VerticalData:
    draw = torch.Generator().manual_seed(0)
    whole = ImageEncoding(channels=channels, height=side, width=side, end_row=side)
    table = PartyTable(
        name="active",
        ids=tuple(map(str, range(60))),
        labels=torch.arange(60) % 2,
        features=torch.rand(60, *whole.shape, generator=draw),
        encoding=whole,
    )
    return VerticalData(
        table=table,
        passives=(),
        classes=("no", "yes"),
        train_rows=torch.arange(40),
        test_rows=torch.arange(40, 60),
    )


def _check(seen: Pretended) -> None:
    """All lay on the run's device: nothing on another, and no network was taught on the CPU."""
    assert seen.on[HERE]
    assert not seen.on[DEVICES[0]]
    assert not {line for line in seen.learnt_on_cpu if not line.startswith(ON_THE_CPU)}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(every=22)
def test_a_run_computes_on_its_device(name: str, tmp_path: Path, seen: Pretended) -> None:
    data = _images(*LARGER[name]) if name in LARGER else None
    result = run(CASES[name](), tmp_path / "run", data=data)
    assert result.accuracy or result.scores
    _check(seen)
    if (tmp_path / "run" / "model.safetensors").exists():
        load_model(tmp_path / "run")


RECORDED: dict[str, tuple[Recording, Pretended]] = {}


def record_run(method: str, seen: Pretended) -> Recording:
    """Record one run of a method, which all of its attacks read."""
    if method not in RECORDED:
        seen.forget()
        RECORDED[method] = run(METHOD_RUNS[method](), None).recording, copy(seen)
    seen.forget()
    return RECORDED[method][0]


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("method", METHODS)
def test_a_method_computes_on_its_device(method: str, seen: Pretended) -> None:
    record_run(method, seen)
    _check(RECORDED[method][1])


FEW = {"iterations": 3}
READS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "model_completion": ("apfed_c", {"labels_per_class": 4}),
    "temporal": ("apfed_c", {"labels_per_class": 0}),
    "semi_supervised": ("apfed_c", {"hidden": 8}),
    "semi_supervised, own network": ("tvfl", {"own_network": True, "hidden": 8}),
    "label_gradients": ("tvfl", {}),
    "gradient_direction": ("tvfl", {}),
    "shown_labels": ("votes", {}),
    "pseudo_labels": ("mmvfl", {}),
    "inverse_network": ("apfed_c", {"shadow_rows": 20, "components": 2}),
    "unpaired_inversion": ("apfed_c", {"shadow_rows": 20, "hidden": 8, "starts": 1}),
    "representation_network": ("tvfl", {"shadow_rows": 20, "hidden": 8}),
    "vote_regression": ("votes", {"shadow_rows": 20}),
    "vector_regression": ("vfedtrans", {"shadow_rows": 20}),
    "contrastive_inversion": ("apfed_c", {"shadow_rows": 20}),
    "gradient_regression": ("apfed_r", {"shadow_rows": 20}),
    "gradient_projection": ("apfed_c", {"shadow_rows": 20}),
    "contribution_regression": ("apfed_r", {"shadow_rows": 20}),
    "sum_regression": ("mmvfl", {"shadow_rows": 20}),
    "sum_regression, representations": ("split_nn_sum", {"shadow_rows": 20}),
    "membership": ("apfed_c", {"shadow_models": 4}),
    "averaged_membership": ("h_fedmv", {"candidates": 20}),
    "averaged_membership, sequences": ("s_fedmv", {"candidates": 20}),
}
PLAYED: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "chosen_representations": ("apfed_c", {"people": 30, "shadow_rows": 10}),
    "decoder_extraction": ("apfed_r", {"people": 40, "shadow_rows": 20}),
    "isolation": ("apfed_r", {"way": "subset", "people": 64, "shadow_rows": 20}),
    "hijack": ("tvfl", {"ahead": 2, "hidden": 8}),
    "reversed_hijack": ("apfed_c", {"ahead": 2, "hidden": 8}),
}


@pytest.mark.parametrize("name", [*READS, *PLAYED])
@pytest.mark.sampled(every=2)
def test_an_attack_computes_on_its_device(name: str, seen: Pretended) -> None:
    method, options = {**READS, **PLAYED}[name]
    attack = ATTACKS[name.partition(",")[0]].model_validate({**FEW, **options})
    if name in PLAYED:
        config = live_config(method, views=3, train={"device": str(HERE), "epochs": 1})
        results: Sequence[AttackResult]
        if isinstance(attack, ActiveAttack):
            results = [play(attack, config, rules=())]
        else:
            assert isinstance(attack, AnsweringAttack)
            results = [mount_answering_attack(attack, config, "passive-1")]
    else:
        recording = record_run(method, seen)
        choice = AttackChoice(name=attack.name, options={**FEW, **options})
        results = mounting.run_attacks(recording, [choice], seed=0)
    assert any(result.applicable for result in results), [result.reason for result in results]
    _check(seen)


def test_every_attack_is_a_case() -> None:
    """The one that is left out asks an intersection, and computes with no number."""
    cases = {name.partition(",")[0] for name in (*READS, *PLAYED)}
    assert cases == set(ATTACKS) - {IdStuffing.name}


def _here(*shape: int) -> Tensor:
    return torch.ones(*shape, device=HERE)


OPEN = {"mechanism": "none", **NOISE}
# The most waits of a step: one at each party, for what it sends, and one more for the rows that a
# guard clips. There are two passives.
MAX_WAITS: Mapping[str, tuple[Callable[[], Config], int]] = {
    "apfed_c": (lambda: config_of("apfed_c", guard=OPEN), 3),
    "apfed_c, guard": (lambda: config_of("apfed_c"), 4),
    "apfed_c, frozen guard": (
        lambda: config_of(
            "apfed_c", guard={"mechanism": "frozen_gaussian", "epsilon": 8.0, **NOISE}
        ),
        4,
    ),
    "apfed_c, few labels": (
        lambda: config_of("apfed_c", guard=OPEN, data={"labelled": 20, "overlap": 0.7}),
        3,
    ),
    "apfed_r": (lambda: config_of("apfed_r", guard=OPEN), 3),
    "apfed_r, guard": (lambda: config_of("apfed_r"), 4),
    "split_nn": (lambda: config_of("split_nn", guard=OPEN), 3),
    "split_nn, guard": (lambda: config_of("split_nn"), 5),
    "split_nn_sum": (lambda: config_of("split_nn_sum"), 3),
    "split_nn_sum, noise": (
        lambda: config_of(
            "split_nn_sum", secure_sum={**MASKED, "clip": 1.0, "noise": {"epsilon": 50.0}}
        ),
        3,
    ),
    "joint_teacher_sum": (lambda: config_of("joint_teacher_sum"), 3),
    "single_view": (lambda: config_of("single_view"), 0),
}


def _waits_by_step(
    config: Config, seen: Pretended, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[str, ...]]:
    """By step of a run what it waited for, its loss included."""
    waits: list[tuple[str, ...]] = []
    count = TrainingLoop.count_step

    def count_waits(self: TrainingLoop, loss: Any) -> None:
        count(self, loss)
        waits.append(tuple(seen.waits))
        seen.waits.clear()

    monkeypatch.setattr(TrainingLoop, "count_step", count_waits)
    run(config, None)
    return waits


@pytest.mark.parametrize("case", MAX_WAITS)
@pytest.mark.sampled(every=4)
def test_a_step_waits_for_what_is_sent_alone(
    case: str, seen: Pretended, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step of an epoch beside: it measures, or follows an evaluation."""
    make, most = MAX_WAITS[case]
    train = {"epochs": 2, "batch_size": 20}
    made = make()
    config = made.model_copy(update={"train": made.train.model_copy(update=train)})
    waits = _waits_by_step(config, seen, monkeypatch)
    usual = waits[len(waits) // 2 + 1 :]
    assert len(usual) > 1
    assert {len(lines) for lines in usual} == {most}, usual[0]


def test_losses_on_a_gpu_are_read_together(
    seen: Pretended, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And their mean is that of all steps, as on the CPU."""
    monkeypatch.setattr(training_loop, "_LOSSES_AT_ONCE", 5)
    losses = EpochLosses()
    assert losses.read_mean() == 0.0
    for number in range(1, 13):
        losses.add(torch.full((), float(number), device=HERE))
        if losses.should_read_mean:
            assert losses.read_mean() == (number + 1) / 2
    assert len(seen.waits) == 3  # the first, then five and five
    assert losses.read_mean() == 6.5
    losses.add(7.5)
    assert losses.should_read_mean
    assert losses.read_mean() == pytest.approx(85.5 / 13)
    assert len(seen.waits) == 4


WAITS: Mapping[str, Callable[[], object]] = {
    "a number": lambda: _here(2).sum().item(),
    "a condition": lambda: bool(_here(1)),
    "a copy": lambda: _here(2).cpu(),
    "a copy to the GPU": lambda: torch.ones(2).to(HERE),
    "a copy that is not pinned": lambda: torch.ones(2).to(HERE, non_blocking=True),
    "a number for the GPU": lambda: _here(2).new_tensor(1.0),
    "a mask": lambda: _here(2)[_here(2).bool()],
    "an index from here": lambda: _here(2)[torch.tensor([0])],
    "an array": lambda: _here(2).numpy(force=True),
}


@pytest.mark.parametrize("case", WAITS)
def test_what_waits_for_a_gpu_is_counted(case: str, seen: Pretended) -> None:
    WAITS[case]()
    assert len(seen.waits) == 1


def test_a_batch_crosses_without_a_wait_and_back_for_one(seen: Pretended) -> None:
    sent = send_tensor(torch.arange(3.0, dtype=torch.float64), HERE, torch.float32)
    assert (sent.device, sent.dtype) == (HERE, torch.float32)
    assert send_tensor(sent, HERE, torch.float32) is sent
    assert not seen.waits
    one, two = fetch_tensors(sent, sent * 2)
    assert (one.tolist(), two.tolist()) == ([0, 1, 2], [0, 2, 4])
    assert len(seen.waits) == 1
    late = sent.to("cpu", non_blocking=True)
    with pytest.raises(DeviceError, match="nobody has waited for"):
        late.sum()


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


def test_what_a_gpu_refuses_is_refused() -> None:
    for refused in REFUSED.values():
        with pytest.raises(DeviceError):
            refused()


IN_A_RUN: Mapping[str, tuple[Any, str, Any]] = {
    "features left behind": (compute.Compute, "move_tensor", lambda compute, values: values),
    "another GPU in a run": (compute, "find_device", lambda choice: DEVICES[0]),
    "numpy in a guard": (GaussianGuard, "release", lambda _, h_BD, **of: h_BD.detach().numpy()),
}
IN_AN_ATTACK: Mapping[str, tuple[Any, str, Any]] = {
    "a view left behind": (view, "_move_floats", lambda values, device: values),
    "another GPU": (mounting, "find_device", lambda choice: DEVICES[0]),
    "the CPU": (mounting, "find_device", lambda choice: torch.device("cpu")),
}


@pytest.mark.parametrize("fault", [*IN_A_RUN, *IN_AN_ATTACK])
def test_a_planted_fault_is_found(
    fault: str, tmp_path: Path, seen: Pretended, monkeypatch: pytest.MonkeyPatch
) -> None:
    play_one = partial(test_a_run_computes_on_its_device, "1-th of each table", tmp_path)
    if fault in IN_AN_ATTACK:
        record_run("tvfl", seen)
        play_one = partial(test_an_attack_computes_on_its_device, "representation_network")
    monkeypatch.setattr(*{**IN_A_RUN, **IN_AN_ATTACK}[fault])
    # A guard is measured on the first batch, which meets the array before the device does; a
    # network's failure is explained as a ModelError.
    with pytest.raises((DeviceError, AssertionError, TypeError, ModelError)):
        play_one(seen)
