"""A passive that spoils or steers: what it changes, and that it changes nothing without people."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from apfed_attacks.live.integrity import (
    POISONING_KINDS,
    PoisoningKind,
    PoisoningPlan,
    poison_gradients,
    poison_representations,
)
from apfed_attacks.live.runs import LiveRun, LiveSession, SummedRun, choose_backdoored_people
from secure_apfed.alignment.positions import find_positions_in_table_order
from tests.attacks.recordings import live_config

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")
PASSIVE = "passive-1"
METHODS = ("apfed_c", "split_nn_sum")
EPOCHS = {"apfed_c": 3, "split_nn_sum": 8}


def open_run(method: str) -> LiveRun | SummedRun:
    config = live_config(method, views=3)
    return SummedRun(config) if method == "split_nn_sum" else LiveRun(config)


def labels_of(run: LiveSession[Any]) -> Tensor:
    """Return the true labels, by position of the alignment."""
    active = run.data.active
    assert active.labels is not None
    return active.labels[run.alignment[active.name]]


def train_with_harm(
    method: str, harm: PoisoningKind, *, people: bool = True
) -> LiveRun | SummedRun:
    """Train a run in which a passive does harm; without `people` it has nobody to choose."""
    run = open_run(method)
    labels_N = labels_of(run)
    nobody_N = torch.zeros(len(labels_N), dtype=torch.bool)
    chosen_N = torch.arange(len(labels_N)) % 10 == 0
    steering = PoisoningPlan(
        kind=harm,
        is_backdoored=chosen_N if people else nobody_N,
        is_target=labels_N == 0 if people else nobody_N,
        row_norm=5.0,
    )
    if isinstance(run, SummedRun):
        poison_representations(run, PASSIVE, steering)
    else:
        poison_gradients(run, PASSIVE, steering)
    run.train_epochs(EPOCHS[method])
    return run


@pytest.fixture(scope="module")
def train_honestly() -> Callable[[str], LiveRun | SummedRun]:
    """Return what trains an honest run, once for each method."""
    trained: dict[str, LiveRun | SummedRun] = {}

    def train(method: str) -> LiveRun | SummedRun:
        if method not in trained:
            trained[method] = open_run(method)
            trained[method].train_epochs(EPOCHS[method])
        return trained[method]

    return train


def active_parameters(run: LiveRun | SummedRun) -> Tensor:
    """Return the parameters of all that the active trains, one after another."""
    modules: tuple[torch.nn.Module, ...]
    if isinstance(run, LiveRun):
        modules = (run.active_role.trainer.networks,)
    else:
        modules = (run.active_role.trainer.encoder, run.active_role.trainer.head)
    return torch.cat([value.flatten() for module in modules for value in module.parameters()])


@pytest.mark.parametrize("method", METHODS)
def test_a_backdoor_for_nobody_is_an_honest_run(
    method: str, train_honestly: Callable[[str], LiveRun | SummedRun]
) -> None:
    run = train_with_harm(method, "backdoor", people=False)
    assert torch.equal(active_parameters(run), active_parameters(train_honestly(method)))


@pytest.mark.parametrize("harm", POISONING_KINDS)
@pytest.mark.parametrize("method", METHODS)
def test_no_rule_of_the_protocol_refuses_the_harm_and_it_moves_the_model(
    method: str, harm: PoisoningKind, train_honestly: Callable[[str], LiveRun | SummedRun]
) -> None:
    run = train_with_harm(method, harm)
    assert not torch.equal(active_parameters(run), active_parameters(train_honestly(method)))


def test_a_backdoor_in_summed_representations_is_found(
    train_honestly: Callable[[str], LiveRun | SummedRun],
) -> None:
    run = train_with_harm("split_nn_sum", "backdoor")
    honest = train_honestly("split_nn_sum")
    assert isinstance(run, SummedRun)
    assert isinstance(honest, SummedRun)
    aligned = run.alignment[run.data.active.name]
    test_T = find_positions_in_table_order(aligned, run.data.test_rows)
    steered_T = test_T[(test_T % 10 == 0) & (labels_of(run)[test_T] != 0)]
    # Too few are asked about together otherwise.
    called_T = run.predict_jointly(test_T).argmax(dim=1) == 0
    honestly_T = honest.predict_jointly(test_T).argmax(dim=1) == 0
    is_steered_T = torch.isin(test_T, steered_T)
    assert called_T[is_steered_T].double().mean() > 0.8
    assert honestly_T[is_steered_T].double().mean() < 0.3


def test_a_backdoor_is_for_a_tenth_of_the_people() -> None:
    features_UF = torch.randn(200, 6, generator=torch.Generator().manual_seed(0)).numpy()
    chosen_U = choose_backdoored_people(features_UF)
    assert chosen_U.sum() == 20
    assert features_UF[chosen_U].sum(axis=1).min() >= features_UF[~chosen_U].sum(axis=1).max()
