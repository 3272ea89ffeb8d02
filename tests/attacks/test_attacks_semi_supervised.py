"""MixMatch on the passive's own network: what training put into it, and nothing of the others."""

import copy
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from apfed_attacks.labels.completion import own_bottom
from apfed_attacks.labels.semi_supervised import MixMatch, SemiSupervised
from apfed_attacks.recorded import view_of
from apfed_attacks.view import AttackError, Knowledge
from tests.attacks.recordings import attacked

FURTHER, FRESH = "own network, trained further", "own network, fresh weights"


def _mount(recording: Any, **options: Any) -> Any:
    wanted = {"iterations": 200, "labels_per_class": 4, "own_network": True, **options}
    return attacked(recording, "semi_supervised", **wanted)


def _labels(recording: Any) -> torch.Tensor:
    """Of the rows of passive-1's table."""
    return torch.tensor([int(name.split("-")[1]) % 3 for name in recording.data.passives[0].ids])


def _network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 3))


def _in_sectors(recording: Any) -> Any:
    """Give passive-1 features that show a label by the sector of a circle, of 12, alone."""
    labels, draw = _labels(recording), torch.Generator().manual_seed(7)
    sector = labels + 3 * torch.randint(4, labels.shape, generator=draw)
    angle = (sector + 0.8 * torch.rand(labels.shape, generator=draw)) * math.tau / 12
    noise = 0.1 * torch.randn(len(labels), 2, generator=draw)
    features = torch.cat([torch.stack([angle.cos(), angle.sin()], dim=1), noise], dim=1)
    first, *others = recording.data.passives
    passives = (replace(first, features=features), *others)
    return replace(recording, data=replace(recording.data, passives=passives))


def _taught(recording: Any) -> nn.Module:
    """An encoder after joint training: all labels shaped it."""
    torch.manual_seed(1)
    encoder, head = _network(), nn.Linear(3, 3)
    adam = torch.optim.Adam([*encoder.parameters(), *head.parameters()], lr=0.01)
    for _ in range(400):
        h_ND = encoder(recording.data.passives[0].features)
        loss = nn.functional.cross_entropy(head(h_ND), _labels(recording))
        adam.zero_grad()
        loss.backward()
        adam.step()
    return encoder


@pytest.fixture(scope="module")
def recording(make_recording: Any) -> Any:
    return _in_sectors(make_recording("nothing", method="tvfl"))


@pytest.mark.planted("semi_supervised")
def test_a_network_that_learned_labels_gives_them_away(recording: Any) -> None:
    encoder = _taught(recording)
    before = copy.deepcopy(encoder.state_dict())
    known = replace(recording, encoders={"passive-1": encoder})
    first, _ = _mount(known, iterations=400, unlabelled_weight=5)
    assert list(first.variants) == [FURTHER]
    assert {FRESH, "MixMatch on x", "mlp on x"} <= set(first.baselines)
    assert first.score["balanced_accuracy"] > 0.65
    assert first.advantage > 0.2
    assert all(torch.equal(value, before[name]) for name, value in encoder.state_dict().items())


def test_a_network_that_learned_nothing_is_as_good_as_a_fresh_one(recording: Any) -> None:
    torch.manual_seed(2)
    first, _ = _mount(replace(recording, encoders={"passive-1": _network()}))
    assert first.advantage < 0.15


def test_without_a_network_it_does_not_apply(recording: Any, make_recording: Any) -> None:
    first, second = _mount(replace(recording, encoders={"passive-1": _network()}), iterations=2)
    assert first.applicable
    assert second.reason == (
        "passive-2 has no network to train further: the recording holds no encoder of passive-2 "
        "(tvfl)"
    )
    for result in _mount(make_recording("labels", method="apfed_c")):
        assert "has no network to train further" in result.reason


def test_a_coalition_needs_the_networks_of_all(recording: Any) -> None:
    both = {"passive-2": nn.Linear(2, 3), "passive-1": _network().double()}
    (result,) = _mount(replace(recording, encoders=both), iterations=2, coalition="all")
    assert result.adversary == "passive-1 + passive-2"
    assert result.applicable
    (result,) = _mount(replace(recording, encoders={"passive-1": both["passive-1"]}),
                       iterations=2, coalition="all")  # fmt: skip
    assert "no encoder of passive-2" in result.reason


@pytest.mark.parametrize("party", ["active", "passive-2", "aggregator", "eavesdropper", "outsider"])
def test_nobody_else_holds_the_network(recording: Any, party: str) -> None:
    encoder = _network()
    known = replace(recording, encoders={"passive-1": encoder})
    knowledge = Knowledge(classes=3)
    assert not view_of(known, [party], knowledge=knowledge).networks
    own = view_of(known, ["passive-1"], knowledge=knowledge).networks
    assert list(own) == ["passive-1"]
    assert own["passive-1"] is not encoder


def _holding(network: nn.Module, *shape: int) -> Any:
    """A view of a party with this network and rows of this shape."""
    return SimpleNamespace(networks={"own": network}, features={"own": torch.empty(1, *shape)})


def test_the_bottom_reads_images_and_constants() -> None:
    rows = torch.randn(6, 2 * 3 * 3)
    rows[:, 0] = 1.0
    convolution = nn.Conv2d(2, 4, 3)
    nn.init.zeros_(convolution.weight[0])
    network = nn.Sequential(convolution, nn.ReLU())
    bottom = own_bottom(_holding(network, 2, 3, 3), rows)
    h_ND = bottom(rows)
    assert h_ND.shape == (6, 4)
    assert torch.isfinite(h_ND).all()
    assert torch.allclose(h_ND.mean(dim=0), torch.zeros(4), atol=1e-5)


def test_fresh_weights_are_other_weights_and_scales_are_drawn_by_reset() -> None:
    linear, scale = nn.Linear(4, 3), nn.BatchNorm1d(3)
    nn.init.constant_(scale.weight, 9.0)
    network = nn.Sequential(linear, scale).eval()
    bottom = own_bottom(_holding(network, 4), torch.randn(5, 4), fresh=True)
    drawn = dict(bottom.named_parameters())
    assert not torch.equal(drawn["_networks.0.0.weight"], linear.weight)
    assert torch.equal(drawn["_networks.0.1.weight"], torch.ones(3))


def test_a_layer_that_cannot_be_drawn_anew_is_told() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.by = nn.Parameter(torch.ones(4))

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return rows * self.by

    with pytest.raises(AttackError, match="weights of a Scale cannot be drawn anew"):
        own_bottom(_holding(Scale(), 4), torch.randn(5, 4), fresh=True)


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
