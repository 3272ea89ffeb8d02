from typing import Any

import pytest
import torch

from apfed_attacks.recorded import truth_of
from apfed_attacks.run import mount
from secure_apfed.config import AttackChoice


def _mount(recording: Any, seed: int = 0, **options: Any) -> Any:
    choice = AttackChoice(name="inverse_network", options=options)
    return mount(recording, [choice], seed=seed)


@pytest.fixture
def leaking(make_recording: Any) -> Any:
    """Release an invertible function of the active's features."""
    features = truth_of(make_recording("nothing")).features["active"]
    mix = torch.randn(5, 7, generator=torch.Generator().manual_seed(2))

    def leak(labels: Any, own: Any, draw: torch.Generator, epoch: int) -> torch.Tensor:
        return torch.tanh(0.2 * features @ mix)

    return make_recording(leak)


@pytest.mark.planted("inverse_network")
def test_planted_features_are_rebuilt(leaking: Any) -> None:
    for result in _mount(leaking, shadow_rows=60)[:2]:
        assert result.victim == "active"
        assert result.metric == "r2"
        assert result.score["r2"] > 0.9
        assert result.advantage > 0.4
        assert result.score["mse"] < result.baselines[result.baseline]["mse"]
        assert result.score["psnr"] > result.baselines[result.baseline]["psnr"]
        assert result.counts["known"] == 60


@pytest.mark.parametrize("leak", ["nothing", "echo"])
def test_without_a_leak_the_advantage_is_about_zero(make_recording: Any, leak: str) -> None:
    assert _mount(make_recording(leak))[0].advantage < 0.03


def test_what_the_own_features_tell_is_no_advantage(make_recording: Any) -> None:
    result = _mount(make_recording("nothing"))[0]
    # passive-1 knows something of the label, and so of the active's features.
    assert max(result.baselines[f"{how} on x"]["r2"] for how in ("ridge", "mlp")) > 0.1
    assert result.baselines[result.baseline]["r2"] > 0.1
    assert abs(result.advantage) < 0.03
    assert result.baselines["mean of the shadow rows"]["r2"] == pytest.approx(0, abs=0.05)


def test_who_receives_no_representation_has_nothing_to_invert(make_recording: Any) -> None:
    in_apfed = _mount(make_recording("nothing"))[2:]
    assert [result.adversary for result in in_apfed] == ["active", "active"]
    reason = "apfed_c: passive-2 releases no representation to active"
    assert in_apfed[1].reason == reason
    in_tvfl = _mount(make_recording("nothing", method="tvfl"))[:2]
    assert in_tvfl[0].reason == "tvfl: active releases no representation to passive-1"


def test_in_tvfl_the_active_inverts_each_passive(make_recording: Any) -> None:
    first, second = _mount(make_recording("copy", method="tvfl"))[2:]
    assert (first.role, first.victim) == ("active", "passive-1")
    assert first.score["r2"] > 0.85
    assert first.advantage > 0.5
    # What was planted says nothing of the second passive's features.
    assert (second.victim, second.applicable) == ("passive-2", True)
    assert second.advantage < 0.03


def test_too_many_shadow_rows_are_a_reason_not_a_crash(make_recording: Any) -> None:
    result = _mount(make_recording("nothing"), shadow_rows=1000)[0]
    assert not result.applicable
    assert "lower shadow_rows" in result.reason


@pytest.mark.slow
def test_results_are_a_function_of_the_seed(leaking: Any) -> None:
    assert _mount(leaking, 1) == _mount(leaking, 1)
    assert _mount(leaking, 1) != _mount(leaking, 2)
