"""Labels out of the common pseudo-labels that MMVFL and FedMV send to passives."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from apfed_attacks.run import mount
from secure_apfed.config import AttackChoice
from secure_apfed.runs.outcome import Recording
from secure_apfed.runs.run import run
from tests.attacks.requested import ask
from tests.attacks.test_attacks_null import why_not_zero
from tests.secure_apfed.small_runs import small_config


def attack(recording: Recording, seed: int = 0, **options: Any) -> Any:
    choice = AttackChoice(name="pseudo_labels", options=options)
    return mount(recording, [choice], seed=seed)


def noise(recording: Recording, seed: int) -> Tensor:
    aligned = len(recording.alignment["active"])
    return torch.randn(aligned, 3, generator=torch.Generator().manual_seed(seed)) / 10


def drawn(recording: Recording, seed: int) -> Tensor:
    """Pseudo-labels that the labels have drawn."""
    labels_N = recording.data.active.labels
    assert labels_N is not None
    truth_NC = F.one_hot(labels_N[recording.alignment["active"]], 3)
    return 0.5 * truth_NC + noise(recording, seed)


@pytest.mark.planted("pseudo_labels")
@pytest.mark.parametrize("known", [0, 4])
def test_the_largest_column_of_the_last_round_is_the_label(make_recording: Any, known: int) -> None:
    empty = make_recording("nothing", epochs=0)
    sent = [noise(empty, 1), drawn(empty, 2), drawn(empty, 3)]
    for result in attack(ask(empty, "mmvfl", z=sent), labels_per_class=known):
        assert {"largest of z", "largest of mean z"} < set(result.variants)
        assert result.score["balanced_accuracy"] > 0.98
        assert result.advantage > 0.2
        (first,) = result.references.values()
        assert first["balanced_accuracy"] < 0.5


@pytest.mark.null("pseudo_labels")
@pytest.mark.parametrize("known", [0, 4])
def test_pseudo_labels_that_no_label_drew_tell_none(make_recording: Any, known: int) -> None:
    advantages = []
    for seed in range(8):
        empty = make_recording("nothing", epochs=0, seed=seed)
        sent = [noise(empty, 2 * seed), noise(empty, 2 * seed + 1)]
        result = attack(
            ask(empty, "v_fedmv", z=sent), seed, labels_per_class=known, iterations=20
        )[1]  # fmt: skip
        advantages.append(result.advantage)
    assert why_not_zero(advantages) is None


@pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")
@pytest.mark.parametrize("method", ["mmvfl", "v_fedmv"])
def test_a_real_run_gives_every_training_label_away(method: str) -> None:
    for result in attack(run(small_config(method), None).recording, labels_per_class=0):
        assert result.score["balanced_accuracy"] > 0.99
        assert result.variant == "largest of z"


def test_where_none_are_sent_or_kept_it_says_so(make_recording: Any) -> None:
    (first, *_) = attack(make_recording("labels"))
    assert first.reason == "apfed_c: no pseudo-labels are sent"
    (first, *_) = attack(ask(make_recording("nothing", epochs=0), "mmvfl", opened=()))
    assert "set transcript.keep" in (first.reason or "")
