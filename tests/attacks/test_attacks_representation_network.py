"""GRN on a planted network, without a leak, without the network, and on a recorded run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from apfed_attacks.recorded import reveal_encoder
from apfed_attacks.run import mount
from secure_apfed.config import AttackChoice
from secure_apfed.errors import CheckpointError
from secure_apfed.runs.outcome import load_recording
from secure_apfed.runs.run import run
from tests.attacks.live_runs import TWO_TABLES, live_config


def _mount(recording: Any, **options: Any) -> Any:
    choice = AttackChoice(name="representation_network", options={"iterations": 800, **options})
    return mount(recording, [choice], seed=0)


def _planted(make_recording: Any, encoder: nn.Module, *, released: bool = True) -> Any:
    """passive-1 releases what its encoder makes of its features, or noise."""

    def leak(labels: Any, own: Any, draw: torch.Generator, epoch: int) -> torch.Tensor:
        with torch.no_grad():
            return encoder(own) if released else torch.randn(len(own), 6, generator=draw)

    recording = make_recording(leak, method="tvfl")
    return replace(recording, encoders={"passive-1": encoder})


@pytest.fixture
def encoder() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 6))


@pytest.mark.planted("representation_network")
def test_features_are_found_through_a_known_encoder(make_recording: Any, encoder: Any) -> None:
    result = _mount(_planted(make_recording, encoder))[0]
    assert (result.adversary, result.victim) == ("active", "passive-1")
    assert result.variants["G(x, h)"]["r2"] > 0.8
    assert result.advantage > 0.4
    assert result.knowledge["encoder"] is True


def test_without_a_leak_there_is_no_advantage(make_recording: Any, encoder: Any) -> None:
    assert _mount(_planted(make_recording, encoder, released=False))[0].advantage < 0.05


def test_an_encoder_that_keeps_one_number_gives_little_away(make_recording: Any) -> None:
    torch.manual_seed(4)
    narrow = nn.Sequential(nn.Linear(4, 1), nn.Linear(1, 6))
    result = _mount(_planted(make_recording, narrow))[0]
    assert result.score["r2"] < 0.6


def test_without_the_encoder_it_does_not_apply(make_recording: Any, encoder: Any) -> None:
    first, second = _mount(_planted(make_recording, encoder), iterations=5)
    assert first.applicable
    assert second.reason == "active is not told the encoder of passive-2: the recording holds none"


@pytest.mark.parametrize("method", ["apfed_c", "single_view"])
def test_other_methods_release_nothing_to_the_active(make_recording: Any, method: str) -> None:
    for result in _mount(make_recording("nothing", method=method)):
        assert not result.applicable
        assert result.reason


def test_results_are_a_function_of_the_seed(make_recording: Any, encoder: Any) -> None:
    recording = _planted(make_recording, encoder)
    assert _mount(recording, iterations=5)[0] == _mount(recording, iterations=5)[0]


@pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")
def test_a_run_keeps_the_encoders_for_the_experimenter(tmp_path: Path) -> None:
    config = live_config("tvfl", data=TWO_TABLES, train={"epochs": 1})
    kept = run(config, tmp_path).recording
    loaded = load_recording(tmp_path, data=kept.data)
    rows = kept.data.passives[0].features[:5]
    encode, again = (reveal_encoder(one, "passive-1") for one in (kept, loaded))
    assert encode is not None
    assert again is not None
    assert torch.equal(encode(rows), again(rows))
    path = tmp_path / "encoders.safetensors"
    assert path.stat().st_mode & 0o077 == 0
    path.write_bytes(path.read_bytes()[:-4])
    (tmp_path / "SHA256SUMS").unlink()
    with pytest.raises(CheckpointError, match="does not hold the encoders"):
        load_recording(tmp_path, data=kept.data)
