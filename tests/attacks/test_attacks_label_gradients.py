from typing import Any

import pytest
import torch

from apfed_attacks.run import mount
from secure_apfed.config import AttackChoice


def cross_entropy_gradient(
    labels: Any, own: Any, draw: torch.Generator, epoch: int
) -> torch.Tensor:
    """Return J^T (p - y) of an untrained head, whose Jacobian differs a little from row to row."""
    error = 1 / 3 - torch.nn.functional.one_hot(labels, 3).float()
    head = torch.linspace(-1, 1, 18).sin().reshape(3, 6)
    mask = (torch.rand(len(labels), 6, generator=draw) > 0.3).float()
    return 1e-3 * mask * (error @ head)


def _mount(recording: Any, seed: int = 0, **options: Any) -> Any:
    choice = AttackChoice(name="label_gradients", options=options)
    return mount(recording, [choice], seed=seed)


@pytest.fixture(scope="module")
def leaking(make_recording: Any) -> Any:
    return make_recording("nothing", method="tvfl", gradient=cross_entropy_gradient)


@pytest.mark.planted("label_gradients")
@pytest.mark.parametrize("per_class", [4, 40])
def test_labels_are_found_in_gradients(leaking: Any, per_class: int) -> None:
    for result in _mount(leaking, labels_per_class=per_class):
        assert result.score["balanced_accuracy"] > 0.9
        assert result.advantage > 0.2


def test_rare_positives_are_found_by_the_gradients_length(make_recording: Any) -> None:
    def length(labels: torch.Tensor, own: Any, draw: torch.Generator, epoch: int) -> torch.Tensor:
        direction = torch.randn(len(labels), 6, generator=draw)
        return torch.nn.functional.normalize(direction) * 10.0 ** -labels[:, None].float()

    result = _mount(make_recording("nothing", method="tvfl", gradient=length))[1]
    assert result.advantage > 0.3


@pytest.mark.parametrize("leak", ["nothing", "echo"])
def test_without_a_leak_the_advantage_is_about_zero(make_recording: Any, leak: str) -> None:
    recording = make_recording("nothing", method="tvfl", gradient=leak)
    results = [_mount(recording, seed, labels_per_class=10)[0] for seed in range(2)]
    assert sum(result.advantage for result in results) / 2 < 0.06


def test_vanished_gradients_are_no_crash(make_recording: Any) -> None:
    def vanished(labels: Any, own: Any, draw: torch.Generator, epoch: int) -> torch.Tensor:
        return torch.zeros(len(labels), 6)

    result = _mount(make_recording("nothing", method="tvfl", gradient=vanished))[0]
    assert "changes nothing: either all rows' are the same" in result.reason


def test_in_apfed_a_passive_receives_no_label_gradient(make_recording: Any) -> None:
    for result in _mount(make_recording("labels")):
        assert result.reason == "apfed_c: a passive receives no gradient of the task loss"


def test_one_epoch_is_enough(make_recording: Any) -> None:
    recording = make_recording("nothing", method="tvfl", gradient=cross_entropy_gradient, epochs=1)
    result = _mount(recording)[0]
    assert result.applicable
    assert not any("last epoch" in name for name in result.variants)


def test_results_are_a_function_of_the_seed(leaking: Any) -> None:
    assert _mount(leaking, 1) == _mount(leaking, 1)
