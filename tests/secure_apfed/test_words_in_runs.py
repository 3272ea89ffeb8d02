"""Runs measure, on their first batch, the words that their epsilon rests on, and change nothing."""

import hashlib
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secure_apfed import PrivateRelease
from secure_apfed.config import Config
from secure_apfed.errors import PromiseError
from secure_apfed.labellers import LABELLERS, Logistic, Ridge, Spreading
from secure_apfed.measures.tasks import TASKS, Classification
from secure_apfed.methods import METHODS, noise_plans
from secure_apfed.networks.models import NETWORKS, Linear, Perceptron, Selu
from secure_apfed.networks.objectives import OBJECTIVES, Reconstruction
from secure_apfed.privacy.defences import DEFENCES
from secure_apfed.privacy.guard import GUARDS, GaussianGuard
from secure_apfed.runs.run import run
from tests.secure_apfed.small_runs import small_config
from tests.secure_apfed.test_guides import register

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")

ONE_EPOCH = {"epochs": 1, "batch_size": 64, "learning_rate": 0.05, "device": "cpu"}
NOISY_SUM = {"scheme": "plain", "masks": "pairwise", "clip": 1.0, "noise": {"epsilon": 8.0}}
THREE = {"dataset": "digits", "views": 4, "limit": 300, "labelled": 60}
NO_GUARD = {"mechanism": "none", "noise": "reproducible_insecure"}


def config_of(method: Any, **changes: Any) -> Config:
    return small_config(method, **{"train": ONE_EPOCH, **changes})


class MixingFamily(Perceptron):
    """The perceptron, and batch normalisation behind it."""

    def make_encoder(self, features: Any, settings: Any) -> nn.Module:
        width = settings.representation
        return nn.Sequential(super().make_encoder(features, settings), nn.BatchNorm1d(width))


class MixingLinear(Linear):
    def make_encoder(self, features: Any, settings: Any) -> nn.Module:
        return nn.Sequential(super().make_encoder(features, settings), Centre())


class MixingHead(Linear):
    def make_head(self, size: int, classes: int, settings: Any) -> nn.Module:
        return nn.Sequential(super().make_head(size, classes, settings), Centre())


class MixingSelu(Selu):
    def make_encoder(self, features: Any, settings: Any) -> nn.Module:
        layers = list(super().make_encoder(features, settings).children())
        return nn.Sequential(*layers, Centre())


class Centre(nn.Module):
    """Subtracts the batch's mean, in training and evaluation."""

    def forward(self, h_BD: Tensor) -> Tensor:
        return h_BD - h_BD.mean(0)


class CentredReconstruction(Reconstruction):
    """What docs/extend.md let newcomers copy: a batch's mean, and row_wise = True."""

    def forward(self, z_BD: Tensor, features_B: Tensor) -> Tensor:
        return F.mse_loss(self.decoder(z_BD), features_B - features_B.mean(0))


class SpreadsAlone(Spreading):
    inductive: ClassVar[bool] = True


class ScalesByAll(Logistic):
    name: ClassVar[str] = "logistic"

    def label_rows(self, features_UF: Any, labelled_n: Any, labels_n: Any, classes: int) -> Any:
        scaled_UF = features_UF / (0.1 + features_UF.std(0))
        return super().label_rows(scaled_UF, labelled_n, labels_n, classes)


class NeverNegative(Ridge):
    signed: ClassVar[bool] = False


class RidgeOnAll(Ridge):
    def compute_matrix(self, features_UF: Any, labelled_n: Any) -> Any:
        return super().compute_matrix(features_UF - features_UF.mean(0) ** 3, labelled_n)


class HalfOfTheNoise(GaussianGuard):
    def add_noise(self, clipped_BD: Tensor, *, step: int, rows: Tensor) -> Tensor:
        noisy_BD = super().add_noise(clipped_BD, step=step, rows=rows)
        return clipped_BD + (noisy_BD - clipped_BD) / 2


def compute_centred_loss(
    task: Classification, outputs_BK: Tensor, labels_B: Tensor, weights_K: Tensor | None = None
) -> Tensor:
    return F.cross_entropy(outputs_BK - outputs_BK.mean(0), labels_B)


Plant = tuple[Any, str, Any]
"""A table or class, a key of it, and the liar that takes its place."""

APFED = {"method": "apfed", "secure_sum": NOISY_SUM, "data": THREE}
RECONSTRUCTION = {"default": {"objective": {"name": "reconstruction"}}}
VOTES = {"data": THREE, "guard": NO_GUARD}
DP = {"dp_sgd": {"clip": 1.0, "epsilon": 20.0}, "data": {**THREE, "split": "at_random"}}
TEACHER = {
    "method": {"name": "joint_teacher_sum", "epsilon": 2.0},
    "data": THREE,
    "secure_sum": {"scheme": "plain", "masks": "pairwise", "clip": 1.0},
}

BROKEN: Mapping[str, tuple[Plant, dict[str, Any], str]] = {
    "apfed, encoder of the active": (
        (NETWORKS, "mlp", MixingFamily()),
        {"method": "apfed_c"},
        "active: its network mixes the rows of a batch in training mode: .*BatchNorm1d",
    ),
    "apfed_r, objective of passives": (
        (OBJECTIVES, "reconstruction", CentredReconstruction),
        APFED | {"method": "apfed_r"},
        "passive.*: CentredReconstruction says row_wise = True, but in its gradient replacing row",
    ),
    "apfed, objective of passives": (
        (OBJECTIVES, "reconstruction", CentredReconstruction),
        APFED | {"passives": RECONSTRUCTION},
        "CentredReconstruction says row_wise = True",
    ),
    "tvfl, encoder of passives": (
        (NETWORKS, "mlp", MixingFamily()),
        {"method": "tvfl"},
        "passive.*: Sequential mixes the rows of a batch in training mode",
    ),
    "split_nn, encoder of passives": (
        (NETWORKS, "linear", MixingLinear()),
        {"method": "split_nn", "model": {"network": "linear", "representation": 4}},
        "passive.*: Sequential mixes the rows of a batch .* the layer that does is 1 .Centre",
    ),
    "split_nn_sum, encoder of passives": (
        (NETWORKS, "mlp", MixingFamily()),
        {"method": "split_nn_sum", "secure_sum": NOISY_SUM, "data": THREE},
        "passive.*: Sequential mixes the rows of a batch in training mode",
    ),
    "apc_vfl, code of passives": (
        (NETWORKS, "selu", MixingSelu()),
        {"method": "apc_vfl"},
        "passive.*: Sequential mixes the rows of a batch in evaluation mode",
    ),
    "joint_teacher_sum, encoder of passives": (
        (NETWORKS, "linear", MixingLinear()),
        TEACHER,
        "passive.*: Sequential mixes the rows of a batch in evaluation mode",
    ),
    "joint_teacher_sum, head": (
        (NETWORKS, "linear", MixingHead()),
        TEACHER,
        "active: Sequential mixes the rows of a batch in evaluation mode",
    ),
    "joint_teacher_sum, labeller": (
        (LABELLERS, "logistic", ScalesByAll),
        TEACHER | {"method": {"name": "joint_teacher_sum", "epsilon": 2.0, "labels": "logistic"}},
        "active: the labeller ScalesByAll says inductive = True",
    ),
    "votes, labeller": (
        (LABELLERS, "spreading", SpreadsAlone),
        VOTES | {"method": {"name": "votes", "epsilon": 8.0}},
        "passive.*: the labeller SpreadsAlone says inductive = True",
    ),
    "votes, signs": (
        (LABELLERS, "ridge", NeverNegative),
        VOTES | {"method": {"name": "votes", "epsilon": 8.0, "labeller": "ridge"}},
        "passive.*: the labeller NeverNegative says signed = False",
    ),
    "votes_randomised, labeller": (
        (LABELLERS, "logistic", ScalesByAll),
        VOTES | {"method": {"name": "votes_randomised", "epsilon": 4.0, "labeller": "logistic"}},
        "the labeller ScalesByAll says inductive = True",
    ),
    "votes_rehearsal, labeller": (
        (LABELLERS, "logistic", ScalesByAll),
        VOTES | {"method": {"name": "votes_rehearsal", "epsilon": 4.0, "labeller": "logistic"}},
        "the labeller ScalesByAll says inductive = True",
    ),
    "votes_encrypted, labeller": (
        (LABELLERS, "ridge", RidgeOnAll),
        VOTES
        | {
            "method": {
                "name": "votes_encrypted",
                "epsilon": 8.0,
                "labeller": "ridge",
                "candidates": 2,
            }
        },
        "passive.*: the labeller RidgeOnAll says inductive = True",
    ),
    "apfed, guard": (
        (GUARDS, "gaussian", HalfOfTheNoise),
        {"method": "apfed_c"},
        "HalfOfTheNoise says sensitivity.. ",
    ),
    "tvfl, guard": (
        (GUARDS, "gaussian", HalfOfTheNoise),
        {"method": "tvfl"},
        "HalfOfTheNoise says sensitivity.. ",
    ),
    "single_view, network under DP-SGD": (
        (NETWORKS, "mlp", MixingHead()),
        DP | {"method": "single_view"},
        "active: its network mixes the rows of a batch",
    ),
    "apfed, loss under DP-SGD": (
        (Classification, "compute_loss", compute_centred_loss),
        DP | {"method": "apfed_c"},
        "active: the loss of Classification mixes the rows of a batch",
    ),
}


def make_changed_config(settings: dict[str, Any]) -> Config:
    settings = dict(settings)
    method = settings.pop("method")
    return config_of(method, **settings)


def plant(monkeypatch: pytest.MonkeyPatch, planted: Plant) -> None:
    table, key, liar = planted
    if isinstance(table, type):
        monkeypatch.setattr(table, key, liar)
    elif isinstance(table, dict):
        monkeypatch.setitem(table, key, liar)
    else:
        liar.name = key
        register(monkeypatch, table, liar)


@pytest.mark.sampled(every=15)
@pytest.mark.parametrize("name", BROKEN)
def test_a_run_stops_at_its_first_batch_where_a_word_is_broken(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted, settings, said = BROKEN[name]
    plant(monkeypatch, planted)
    with pytest.raises(PromiseError, match=said):
        run(make_changed_config(settings), None)


# What nobody counts an epsilon for is nobody's promise, and trains as it is.
WITHOUT_A_BOUND: Mapping[str, tuple[Plant, dict[str, Any]]] = {
    "apfed, encoder": (
        (NETWORKS, "mlp", MixingFamily()),
        {"method": "apfed_c", "guard": NO_GUARD},
    ),
    "apfed, objective": (
        (OBJECTIVES, "reconstruction", CentredReconstruction),
        {"method": "apfed_r"},
    ),
    "tvfl, encoder": ((NETWORKS, "mlp", MixingFamily()), {"method": "tvfl", "guard": NO_GUARD}),
    "votes": ((LABELLERS, "spreading", SpreadsAlone), VOTES | {"method": "votes"}),
}


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("name", WITHOUT_A_BOUND)
def test_without_a_bound_nothing_is_measured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planted, settings = WITHOUT_A_BOUND[name]
    plant(monkeypatch, planted)
    assert run(make_changed_config(settings), None).scores


def test_an_objective_that_admits_to_mix_rows_is_charged_for_a_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Honest(CentredReconstruction):
        row_wise: ClassVar[bool] = False

    config = make_changed_config(APFED | {"method": "apfed_r"})
    plan = noise_plans.NoisePlan(steps=2_000_000, honest=2)
    alone = noise_plans.make_sum_release(config, "passive-1", (4,), plan)
    monkeypatch.setitem(dict_of(OBJECTIVES), "reconstruction", Honest)
    mixed = noise_plans.make_sum_release(config, "passive-1", (4,), plan)
    assert mixed.sensitivity == pytest.approx(math.sqrt(64) * alone.sensitivity)
    assert mixed.epsilon_of(1, 1e-5) > alone.epsilon_of(1, 1e-5)
    assert run(config, None).scores


def dict_of(table: Mapping[str, Any]) -> dict[str, Any]:
    assert isinstance(table, dict)
    return table


EVERYTHING: Mapping[str, dict[str, Any]] = {
    "apfed_r under noise": APFED | {"method": "apfed_r"},
    "apfed_c with dropout": {
        "method": "apfed_c",
        "model": {"hidden": [8], "representation": 4, "projection": 4, "dropout": 0.5},
    },
    "apfed_c under DP-SGD": DP | {"method": "apfed_c"},
    "split_nn_sum": {"method": "split_nn_sum", "secure_sum": NOISY_SUM, "data": THREE},
    "tvfl, frozen": {
        "method": "tvfl",
        "guard": {"mechanism": "frozen_gaussian", "epsilon": 8.0, "noise": "reproducible_insecure"},
    },
    "votes": VOTES | {"method": {"name": "votes", "epsilon": 8.0, "labeller": "logistic"}},
}


SLOW = ("votes", "apfed_c under DP-SGD", "split_nn_sum", "apfed_c with dropout")


def parameters_digest(config: Config) -> str:
    """Return the digest of the active's model, or of what all say where none is kept."""
    result = run(config, None)
    found = hashlib.sha256(repr(sorted(result.scores.items())).encode())
    model = result.recording.model
    for tensor in model.state_dict().values() if model else ():
        found.update(tensor.numpy().tobytes())
    return found.hexdigest()


def numpy_state() -> bytes:
    state: Any = np.random.get_state()  # noqa: NPY002 - it is to stay as it was
    found: bytes = state[1].tobytes()
    return found


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in EVERYTHING],
)
def test_measuring_changes_no_parameter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_changed_config(EVERYTHING[name])
    before = torch.get_rng_state(), numpy_state()
    measured_words = parameters_digest(config)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == numpy_state()
    called: list[str] = []
    for module in [
        "secure_apfed.learning.trainers",
        "secure_apfed.methods.joint_teacher",
        "secure_apfed.labellers.voting",
        "secure_apfed.learning.release",
    ]:
        for check in (
            "check_row_wise",
            "check_objective",
            "check_loss",
            "check_votes",
            "require_short",
            "check_guard",
            "check_graph",
        ):
            monkeypatch.setattr(
                f"{module}.{check}", lambda *_, **__: called.append("x"), raising=False
            )
    assert parameters_digest(config) == measured_words
    assert called


# The channel alone: `PrivateRelease` sees h, and the encoder where it is shown.

MIXES: Mapping[str, Callable[[], nn.Module]] = {
    "batch normalisation": lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)),
    "batch normalisation first": lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 8)),
    "a mean": lambda: nn.Sequential(nn.Linear(6, 8), Centre()),
}


def release() -> PrivateRelease:
    return PrivateRelease(clip=1, epsilon=8, delta=1e-5, epochs=3, rows=32)


@pytest.mark.parametrize("name", MIXES)
def test_the_first_h_with_a_graph_is_refused_before_it_is_charged(name: str) -> None:
    guard = release()
    encoder = MIXES[name]()
    with pytest.raises(PromiseError, match="come from a network that mixes the rows"):
        guard(encoder(torch.randn(32, 6)), rows=range(32))
    assert guard.get_privacy_spent().releases == 0
    with pytest.raises(PromiseError, match=r"^PrivateRelease: Sequential mixes the rows"):
        guard.check_encoder(encoder, torch.randn(32, 6))
    with pytest.raises(PromiseError):
        guard(encoder(torch.randn(32, 6)), rows=range(32))


def test_a_mean_of_the_features_is_found_by_the_check_alone_and_the_report_says_so() -> None:
    encoder = nn.Sequential(Centre(), nn.Linear(6, 8))
    guard = release()
    assert "is not measured: call check_encoder(encoder, x)" in guard.report()
    guard(encoder(torch.randn(32, 6)), rows=range(32))
    assert "looked for in the graph of the first batch alone" in guard.report()
    with pytest.raises(PromiseError, match="mixes the rows of a batch"):
        guard.check_encoder(encoder, torch.randn(32, 6))
    guard.check_encoder(nn.Linear(6, 8), torch.randn(20, 6))
    assert "mixes no rows of a batch is measured on 20 rows" in guard.report()


def test_every_table_that_a_bound_rests_on_has_a_broken_word_here() -> None:
    tables = [NETWORKS, OBJECTIVES, LABELLERS, GUARDS, TASKS[Classification.name]]
    assert all(any(planted[0] is table for planted, *_ in BROKEN.values()) for table in tables)
    assert DEFENCES  # no bound rests on a defence: see tests/secure_apfed/test_words.py
    bounded = {str(settings["method"]) for _, settings, _ in BROKEN.values()}
    noised = [name for name in METHODS if any(name in said for said in bounded)]
    silent = set(METHODS) - set(noised)
    # These sum or decompose without noise, or tell a public code: no finite epsilon is counted.
    assert silent == {"mmvfl", "v_fedmv", "h_fedmv", "s_fedmv", "vfedtrans", "apfed_code"}
