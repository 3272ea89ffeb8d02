"""Feature-space hijacking: live against real passives of joint training, and against none."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from apfed_attacks.features.feature_space import decoder_for, simulator_for, slope_penalty
from apfed_attacks.features.hijack import FeatureSpaceHijack, Hijack, ReversedHijack
from apfed_attacks.live.runs import JointRun, play_answers
from apfed_attacks.scoring import DECOY
from apfed_protocols.errors import RemoteProtocolError
from secure_apfed.data import ColumnEncoding, PartyTable, VerticalData
from secure_apfed.exchange import Kind
from secure_apfed.seeds import seeded
from tests.attacks.recordings import live_config

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")
PEOPLE = 800
BASELINES = {"mean of the outsiders", "ridge on x", f"decoded h{DECOY}"}


def _data() -> VerticalData:
    """A passive with one skewed feature, whose distribution says which way up it is."""
    draw = torch.Generator().manual_seed(3)
    labels = torch.arange(PEOPLE) % 2
    own = torch.randn(PEOPLE, 3, generator=draw) + labels[:, None]
    secret = torch.empty(PEOPLE, 1).exponential_(generator=draw).clamp(max=4)
    other = torch.randn(PEOPLE, 2, generator=draw)
    ids = tuple(map(str, range(PEOPLE)))
    tables = [
        PartyTable(
            name=name, ids=ids, features=values, labels=labels if name == "active" else None,
            encoding=ColumnEncoding.plain([f"c{at}" for at in range(values.shape[1])]),
        )
        for name, values in (("active", own), ("passive-1", secret), ("passive-2", other))
    ]  # fmt: skip
    rows = torch.arange(PEOPLE)
    return VerticalData(
        table=tables[0], passives=tuple(tables[1:]), classes=("no", "yes"),
        train_rows=rows[200:], test_rows=rows[:200],
    )  # fmt: skip


def _everybody() -> dict[str, torch.Tensor]:
    return {name: torch.arange(PEOPLE) for name in ("active", "passive-1", "passive-2")}


def _config(epochs: int) -> Any:
    return live_config(
        "tvfl",
        model={"hidden": [32], "representation": 8},
        train={"epochs": epochs, "learning_rate": 0.1, "momentum": 0.5},
    )


def _times(factor: float) -> Any:
    """Answers with so many times what it was sent."""
    return SimpleNamespace(answer=lambda step, rows_B, z_BD: z_BD * factor)


def _decoded(adversary: Hijack, encoder: nn.Module, secret: torch.Tensor, steps: int) -> Any:
    """Train a victim that only hears the adversary; return what its features decode to."""
    sgd, batches = torch.optim.SGD(encoder.parameters(), lr=0.1), len(secret) // 64
    for step in range(steps):
        rows = torch.arange(64) + 64 * (step % batches)
        z = encoder(secret[rows])
        sgd.zero_grad()
        (z * adversary.answer(step, rows, z)).sum().div(64).backward()
        sgd.step()
    return adversary.space.decoded(encoder(secret).detach())


def played_hijack(strength: float, epochs: int = 60) -> Any:
    attack = FeatureSpaceHijack(strength=strength, hidden=64, penalty=0.1, rounds=2, ahead=300)
    result = play_answers(attack, _config(epochs), "passive-1", data=_data())
    assert (result.adversary, result.victim, result.role) == ("active", "passive-1", "active")
    assert set(result.baselines) == BASELINES
    return result


def test_own_features_say_which_way_up_a_symmetric_feature_is() -> None:
    with seeded(0, "victim"):
        known, secret = torch.randn(2, 640, 1)
        known_x, secret_x = torch.stack([known, secret]) + torch.randn(2, 640, 1)
        encoder = nn.Sequential(nn.Linear(1, 32), nn.ReLU(), nn.Linear(32, 8))
    attack = FeatureSpaceHijack(penalty=0.1, rounds=2, hidden=64, ahead=200)
    adversary = Hijack(attack, (8,), known, secret_x, known_x, seed=0)
    decoded = _decoded(adversary, encoder, secret, 300)
    # x alone explains half of it, and without x its sign is a guess.
    assert float((decoded - secret).square().mean()) < 0.25


def test_what_others_get_is_the_honest_gradient() -> None:
    data, states = _data(), []
    for deviates in (False, True):
        run = JointRun(_config(1), data, alignment=_everybody())
        if deviates:
            run.hand_over("passive-1", _times(0))
        run.train(1)
        (kept,) = run.recording.transcript.kept.values()
        states.append([item.payload for item in kept if item.kind is Kind.GRADIENTS][:2])
    (honest, other), (chosen, same) = states
    assert other == same
    assert honest != chosen


def test_a_gradient_that_is_not_finite_is_refused() -> None:
    run = JointRun(_config(1), _data())
    run.hand_over("passive-1", _times(float("nan")))
    with pytest.raises(RemoteProtocolError, match="not finite"):
        run.train(1)


# The reversed hijack: by a passive, through a sum.


def explained_by_hijack(strength: float, steps: int) -> float:
    """Hijack a victim that has nothing else to learn; return R^2 of what its features decode to.

    One skewed feature: its distribution alone says which way up it is.
    """
    with seeded(0, "victim"):
        known, secret = torch.distributions.Exponential(1.0).sample((2, 1000, 1))
        encoder = nn.Sequential(nn.Linear(1, 32), nn.ReLU(), nn.Linear(32, 8))
    attack = ReversedHijack(strength=strength, penalty=0.1, rounds=2, hidden=64, ahead=300)
    adversary = Hijack(attack, (8,), known, known, known[:, :0], seed=0)
    error = float((_decoded(adversary, encoder, secret, steps) - secret).square().sum())
    return 1 - error / float((secret - secret.mean()).square().sum())


def test_without_an_answer_nothing_is_decoded() -> None:
    assert explained_by_hijack(1e-9, 200) < 0.3


def test_it_is_played_by_a_passive_among_honest_ones() -> None:
    config = live_config("apfed_c", train={"epochs": 2})
    result = play_answers(ReversedHijack(ahead=20, hidden=32), config, "passive-2")
    assert result.applicable
    assert (result.adversary, result.victim, result.role) == ("passive-2", "active", "passive")
    assert set(result.baselines) == BASELINES
    assert result.knowledge["public_rows"] > 20
    assert result.counts["known"] == 0


# Networks of a feature space of one's own: what fits what, and the penalties.


@pytest.mark.parametrize(
    ("features", "representation", "convolves"),
    [
        ((1, 28, 28), (16, 7, 7), True), ((1, 14, 28), (64, 10, 24), True),
        ((3, 9, 7), (4, 2, 3), True), ((1, 2, 8), (32,), False), ((23,), (32,), False),
    ],
)  # fmt: skip
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
