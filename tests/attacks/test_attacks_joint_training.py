"""Attacks on TVFL, each on a planted leak, on none, and where it has nothing to read."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from apfed_attacks.labels.batch_labels import explain_labels
from apfed_attacks.run import mount
from secure_apfed.config import AttackChoice
from secure_apfed.data import VerticalData

NAMES = ("gradient_norm", "gradient_direction", "batch_labels", "spectral")


def _error(labels: Any, own: Any, draw: torch.Generator, epoch: int) -> torch.Tensor:
    """(p - y) J of a linear head that has learnt little."""
    logits = 0.1 * torch.randn(len(labels), 3, generator=draw)
    error = logits.softmax(1) - F.one_hot(labels, 3).float()
    return 1e-3 * error @ torch.linspace(-1, 1, 18).sin().reshape(3, 6)


def _clustered(labels: Any, own: Any, draw: torch.Generator, epoch: int) -> torch.Tensor:
    """Representations that training moved apart along two directions of eight."""
    h = torch.randn(len(labels), 8, generator=draw)
    h[:, 0] += 6.0 * (labels == 1)
    h[:, 1] += 6.0 * (labels == 2)
    return h


def _mount(recording: Any, name: str, **options: Any) -> Any:
    return mount(recording, [AttackChoice(name=name, options=options)], seed=0)


def _two_classes(recording: Any) -> Any:
    """Class b among the others: about a third."""
    data = recording.data
    labels = (data.active.labels == 1).long()
    relabelled = VerticalData(
        replace(data.active, labels=labels), data.passives, ("no", "yes"),
        data.train_rows, data.test_rows,
    )  # fmt: skip
    return replace(recording, data=relabelled)


@pytest.mark.planted("gradient_direction", "batch_labels")
@pytest.mark.parametrize(
    ("name", "options", "least"),
    [
        ("gradient_direction", {"labels_per_class": 1}, 0.9),
        ("batch_labels", {"labels_per_class": 1}, 0.8),
        ("batch_labels", {"labels_per_class": 0}, 0.8),
    ],
)
def test_labels_are_found_in_gradients(
    make_recording: Any, name: str, options: dict[str, Any], least: float
) -> None:
    recording = make_recording("nothing", method="tvfl", gradient=_error)
    result = _mount(recording, name, **options)[1]
    assert result.score["balanced_accuracy"] > least
    assert result.advantage > 0.2


@pytest.mark.planted("gradient_norm")
def test_rare_positives_have_long_gradients(make_recording: Any) -> None:
    def rare(labels: Any, own: Any, draw: torch.Generator, epoch: int) -> torch.Tensor:
        error = torch.where(labels == 1, 0.8, 0.2)[:, None]
        return error * F.normalize(torch.randn(len(labels), 6, generator=draw))

    recording = _two_classes(make_recording("nothing", method="tvfl", gradient=rare))
    result = _mount(recording, "gradient_norm")[1]
    assert result.score["auc"] > 0.99
    assert result.advantage > 0.4


def test_lengths_do_not_tell_three_classes_apart(make_recording: Any) -> None:
    recording = make_recording("nothing", method="tvfl", gradient=_error)
    assert "two classes" in (_mount(recording, "gradient_norm")[0].reason or "")
    two = _two_classes(recording)
    assert "no threshold" in (_mount(two, "gradient_norm", priors=False)[0].reason or "")


@pytest.mark.planted("spectral")
def test_classes_stand_out_in_the_passives_own_representations(make_recording: Any) -> None:
    result = _mount(make_recording(_clustered, method="tvfl"), "spectral")[1]
    assert result.score["balanced_accuracy"] > 0.9
    assert result.advantage > 0.3


@pytest.mark.parametrize("name", NAMES)
def test_without_a_leak_there_is_no_advantage(make_recording: Any, name: str) -> None:
    recording = make_recording("nothing", method="tvfl", gradient="nothing")
    if name == "gradient_norm":
        recording = _two_classes(recording)
    assert _mount(recording, name)[1].advantage < 0.1


@pytest.mark.parametrize("name", NAMES)
def test_apfed_and_single_view_give_nothing_to_read(make_recording: Any, name: str) -> None:
    for method in ("apfed_c", "single_view"):
        for result in _mount(make_recording("nothing", method=method), name):
            assert not result.applicable
            assert result.reason


@pytest.mark.parametrize("name", NAMES)
def test_the_eavesdropper_of_nothing_is_no_crash(make_recording: Any, name: str) -> None:
    def vanished(labels: Any, own: Any, draw: torch.Generator, epoch: int) -> torch.Tensor:
        return torch.zeros(len(labels), 6)

    recording = make_recording("nothing", method="tvfl", gradient=vanished)
    if name == "gradient_norm":
        recording = _two_classes(recording)
    result = _mount(recording, name)[1]
    assert result.advantage is None or result.advantage < 0.15


def test_the_fit_explains_gradients_of_a_linear_head() -> None:
    draw = torch.Generator().manual_seed(0)
    labels = torch.arange(60) % 3
    gradient = _error(labels, None, draw, 0)
    found, left = explain_labels(gradient, 3, rate=0.05, iterations=400, seed=0)
    assert left < 0.05
    assert found.shape == (60, 3)
    torch.testing.assert_close(found.sum(1), torch.ones(60, dtype=torch.float64))
