"""Features out of sums that hold something of each row: representations, or pseudo-labels."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from secure_apfed.runs.outcome import Recording
from tests.attacks.recordings import ask, attacked, normal

SPLIT = "split_nn_sum"


def whole(recording: Recording) -> Tensor:
    """All passives' features side by side, by position."""
    tables = recording.data.passives
    return torch.hstack([one.features[recording.alignment[one.name]] for one in tables]).double()


def test_rounds_of_few_columns_add_up_beneath_the_pseudo_labels_sent(make_recording: Any) -> None:
    """Six features, three columns a round: two rounds tell what one does not."""
    empty = make_recording("nothing", epochs=0)
    rows = len(empty.alignment["active"])
    sent = [normal(rows, 3, seed=epoch) for epoch in range(2)]
    opened = [z + whole(empty) @ normal(6, 3, seed=7 + epoch) / 100 for epoch, z in enumerate(sent)]
    recording = ask(empty, "mmvfl", z=sent, opened=opened)
    for result in attacked(recording, "sum_regression", shadow_rows=40, iterations=20):
        reached = {name: figures["r2"] for name, figures in result.variants.items()}
        assert reached["ridge on all epochs"] > 0.95
        assert reached["ridge on rest of the sums"] < 0.9
        assert reached["ridge on sums"] < 0.5


def test_own_labels_are_no_news(make_recording: Any) -> None:
    """A sum that tells the active's labels again tells features that depend on them, too."""
    empty = make_recording("nothing", epochs=0)
    labels_N = empty.data.active.labels[empty.alignment["active"]]
    opened = torch.nn.functional.one_hot(labels_N, 3).double()
    result = attacked(
        ask(empty, SPLIT, opened=[opened]), "sum_regression", shadow_rows=60, iterations=20
    )[0]
    assert result.variants["ridge on sums"]["r2"] > result.baselines["ridge on x"]["r2"] > 0
    assert result.advantage < 0.02


# Labels out of the common pseudo-labels that MMVFL and FedMV send to passives.


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
    for result in attacked(ask(empty, "mmvfl", z=sent), "pseudo_labels", labels_per_class=known):
        assert {"largest of z", "largest of mean z"} < set(result.variants)
        assert result.score["balanced_accuracy"] > 0.98
        assert result.advantage > 0.2
        (first,) = result.references.values()
        assert first["balanced_accuracy"] < 0.5
