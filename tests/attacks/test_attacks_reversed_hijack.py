from typing import Any

import pytest
import torch
from torch import nn

from apfed_attacks.features.hijack import Beside, Hijack, ReversedHijack
from apfed_attacks.live.runs import play_answers
from apfed_attacks.run import mount
from apfed_attacks.scoring import DECOY
from secure_apfed.config import AttackChoice
from secure_apfed.seeds import seeded
from tests.attacks.live_runs import live_config

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")


def _explained(strength: float, steps: int) -> float:
    """Hijack a victim that has nothing else to learn; return R^2 of what its features decode to.

    One skewed feature: its distribution alone says which way up it is.
    """
    with seeded(0, "victim"):
        known, secret = torch.distributions.Exponential(1.0).sample((2, 1000, 1))
        encoder = nn.Sequential(nn.Linear(1, 32), nn.ReLU(), nn.Linear(32, 8))
    attack = ReversedHijack(strength=strength, penalty=0.1, rounds=2, hidden=64, ahead=300)
    nothing = Beside(known[:, :0], known[:, :0])
    adversary = Hijack(attack, (8,), known, nothing, seed=0)
    sgd = torch.optim.SGD(encoder.parameters(), lr=0.1)
    for step in range(steps):
        rows = torch.arange(64) + 64 * (step % 15)
        z = encoder(secret[rows])
        sgd.zero_grad()
        (z * adversary.answer(step, rows, z)).sum().div(64).backward()
        sgd.step()
    decoded = adversary.decoded(encoder(secret).detach())
    error = float((decoded - secret).square().sum())
    return 1 - error / float((secret - secret.mean()).square().sum())


@pytest.mark.planted("reversed_hijack")
def test_an_encoder_that_only_hears_the_adversary_is_hijacked() -> None:
    assert _explained(1.0, 600) > 0.8


def test_without_an_answer_nothing_is_decoded() -> None:
    assert _explained(1e-9, 200) < 0.3


def test_it_is_played_by_a_passive_among_honest_ones() -> None:
    config = live_config("apfed_c", train={"epochs": 2})
    result = play_answers(ReversedHijack(ahead=20, hidden=32), config, "passive-2")
    assert result.applicable
    assert (result.adversary, result.victim, result.role) == ("passive-2", "active", "passive")
    assert set(result.baselines) == {
        "mean of the outsiders", "ridge on x", f"decoded h{DECOY}",
    }  # fmt: skip
    assert result.knowledge["public_rows"] > 20
    assert result.counts["known"] == 0


def test_an_honest_run_is_not_one_of_this_attack(make_recording: Any) -> None:
    recording = make_recording("nothing")
    for result in mount(recording, [AttackChoice(name="reversed_hijack")], seed=0):
        assert result.reason is not None
        assert "played in a live run" in result.reason
