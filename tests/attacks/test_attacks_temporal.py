from typing import Any

import pytest
import torch

from tests.attacks.recordings import attacked

SIGMA = 1.0


def fresh_noise(labels: Any, own: Any, draw: torch.Generator, epoch: int) -> torch.Tensor:
    signal = torch.nn.functional.one_hot(labels, 3).float()
    return signal + SIGMA * torch.randn(len(labels), 3, generator=draw)


def frozen_noise(labels: Any, own: Any, draw: torch.Generator, epoch: int) -> torch.Tensor:
    return fresh_noise(labels, own, torch.Generator().manual_seed(1), epoch)


def _both(recording: Any, **options: Any) -> tuple[Any, Any]:
    # passive-2, whose own features say nothing of the label
    names = ("temporal", "model_completion")
    first, second = (attacked(recording, name, **options)[1] for name in names)
    return first, second


@pytest.mark.planted("temporal")
def test_fresh_noise_averages_out_over_epochs(make_recording: Any) -> None:
    temporal, once = _both(make_recording(fresh_noise, epochs=12), labels_per_class=10)
    assert temporal.applicable
    assert temporal.advantage > once.advantage + 0.2
    assert temporal.score["balanced_accuracy"] > 0.85


def test_frozen_noise_does_not_average_out(make_recording: Any) -> None:
    temporal, once = _both(make_recording(frozen_noise, epochs=12), labels_per_class=10)
    assert temporal.advantage < once.advantage + 0.08


def test_a_course_of_time_is_found_that_no_epoch_shows(make_recording: Any) -> None:
    def drift(labels: Any, own: Any, draw: torch.Generator, epoch: int) -> torch.Tensor:
        start = 5 * torch.randn(len(labels), 3, generator=torch.Generator().manual_seed(1))
        return start + epoch * torch.nn.functional.one_hot(labels, 3)

    temporal, once = _both(make_recording(drift, epochs=2), labels_per_class=4)
    assert temporal.variant.endswith("last minus first epoch")
    assert temporal.score["balanced_accuracy"] > 0.95
    assert once.score["balanced_accuracy"] < 0.7


def test_a_row_that_missed_epochs_is_still_guessed(make_recording: Any) -> None:
    recording = make_recording("labels", epochs=3)
    del recording.transcript._epochs[1][:4]  # two batches to two passives
    (temporal, *_) = _both(recording)
    assert temporal.counts["scored"] + temporal.counts["known"] > 200
    assert temporal.score["balanced_accuracy"] > 0.8


@pytest.mark.parametrize(
    ("epochs", "forgotten", "reason"),
    [(1, None, "only one epoch was released"), (4, 1, "kept 3 of 4 epochs")],
)
def test_what_was_not_kept_is_said(
    make_recording: Any, epochs: int, forgotten: int | None, reason: str
) -> None:
    recording = make_recording("labels", epochs=epochs)
    if forgotten is not None:
        del recording.transcript._epochs[forgotten]
    temporal, _ = _both(recording)
    assert not temporal.applicable
    assert reason in temporal.reason
