from typing import Any

import pytest
import torch

from apfed_attacks.labels.semi_supervised import MixMatch, SemiSupervised
from apfed_attacks.run import mount
from secure_apfed.config import AttackChoice


def _mount(recording: Any, **options: Any) -> Any:
    choice = AttackChoice(name="semi_supervised", options={"iterations": 300, **options})
    return mount(recording, [choice], seed=0)


@pytest.mark.planted("semi_supervised")
def test_labels_are_read_out_of_a_leak(make_recording: Any) -> None:
    result = _mount(make_recording("labels"), labels_per_class=2)[1]
    assert result.score["balanced_accuracy"] > 0.8
    assert result.advantage > 0.2


@pytest.mark.slow
def test_without_a_leak_the_advantage_is_small(make_recording: Any) -> None:
    assert _mount(make_recording("nothing"), labels_per_class=4)[1].advantage < 0.1


def test_it_repeats_itself(make_recording: Any) -> None:
    recording = make_recording("labels")
    assert _mount(recording, iterations=20)[0] == _mount(recording, iterations=20)[0]


def test_without_representations_it_does_not_apply(make_recording: Any) -> None:
    (result, *_) = _mount(make_recording("nothing", method="single_view"))
    assert not result.applicable


def test_other_rows_help_where_classes_are_clusters() -> None:
    draw = torch.Generator().manual_seed(0)
    labels = torch.arange(300) % 3
    rows = torch.randn(300, 6, generator=draw) + 3 * torch.eye(3)[labels].repeat(1, 2)
    known = torch.full((300,), -1)
    known[:3] = labels[:3]
    rows = (rows - rows.mean(0)) / rows.std(0)
    options = SemiSupervised(iterations=400, labels_per_class=1)
    scores = MixMatch(options, 3, 0, torch.device("cpu")).scores(rows, known)
    assert scores.shape == (300, 3)
    assert float((scores.argmax(1) == labels).float().mean()) > 0.85


@pytest.mark.parametrize("bad", [{"temperature": 0}, {"alpha": -1}, {"decay": 1.0}])
def test_options_out_of_range_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        SemiSupervised(**bad)  # type: ignore[arg-type]
