"""Networks of a feature space of one's own: what fits what, and the penalties."""

import pytest
import torch
from torch import nn

from apfed_attacks.features.feature_space import decoder_for, simulator_for, slope_penalty


@pytest.mark.parametrize(
    ("features", "representation", "convolves"),
    [
        ((1, 28, 28), (16, 7, 7), True),
        ((1, 8, 8), (64, 4, 4), True),
        ((1, 14, 28), (64, 10, 24), True),
        ((3, 9, 7), (4, 2, 3), True),
        ((1, 2, 8), (32,), False),
        ((23,), (32,), False),
    ],
)
def test_rows_go_to_representations_and_back(
    features: tuple[int, ...], representation: tuple[int, ...], convolves: bool
) -> None:
    simulator = simulator_for(features, representation, 16, 4)
    decoder = decoder_for(features, representation, 16, 4)
    rows = torch.randn(5, torch.Size(features).numel())
    simulated = simulator(rows)
    assert simulated.shape == (5, torch.Size(representation).numel())
    assert decoder(simulated).shape == rows.shape
    assert any(isinstance(layer, nn.Conv2d) for layer in simulator.modules()) == convolves


def test_a_slope_costs_its_distance_from_what_is_asked() -> None:
    one, other = torch.randn(2, 6, 3)

    def judge(rows: torch.Tensor) -> torch.Tensor:
        return 3 * rows[:, 0]

    assert float(slope_penalty(judge, one, other)) == pytest.approx(4, abs=1e-5)
    assert float(slope_penalty(judge, one, other, slope=0)) == pytest.approx(9, abs=1e-5)


def test_no_slope_has_a_gradient_that_is_finite() -> None:
    flat = nn.Linear(3, 1)
    nn.init.zeros_(flat.weight)
    slope_penalty(flat, *torch.randn(2, 6, 3), slope=0).backward()
    assert flat.weight.grad is not None
    assert bool(flat.weight.grad.isfinite().all())
