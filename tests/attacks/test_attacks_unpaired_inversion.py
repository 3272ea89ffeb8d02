"""Unpaired inversion on planted leaks of skewed features, whose shapes say which is which."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from apfed_attacks.features.unpaired_inversion import UnpairedInversion
from apfed_attacks.recorded import reveal_features, view_of
from apfed_attacks.run import Trial
from apfed_attacks.scoring import DECOY
from apfed_attacks.view import Budget, Knowledge, KnownRows
from secure_apfed.data import ColumnEncoding

ITERATIONS = 500


def _skewed(own: torch.Tensor) -> torch.Tensor:
    """Two features, one with a long tail above, one below."""
    return torch.stack([own[:, 1].exp(), -own[:, 2].exp()], dim=1).clamp(-6, 6)


def _recording(make_recording: Any, *, released: bool = True) -> Any:
    """passive-1 holds the skewed features and releases a function of them, or noise."""

    def leak(labels: Any, own: Any, draw: torch.Generator, epoch: int) -> torch.Tensor:
        x = _skewed(own)
        if not released:
            return torch.randn(len(own), 3, generator=draw)
        mixed = torch.stack([x[:, 1] - 0.3 * x[:, 0], x[:, 0], x[:, 0] + x[:, 1]], dim=1)
        return torch.tanh(0.2 * mixed)

    recording = make_recording(leak, method="tvfl")
    data = recording.data
    table = data.passives[0]
    encoding = ColumnEncoding.plain(["above", "below"])
    victim = replace(table, features=_skewed(table.features), encoding=encoding)
    return replace(recording, data=replace(data, passives=(victim, *data.passives[1:])))


def _mount(recording: Any, **options: Any) -> Any:
    settings = {
        "iterations": ITERATIONS, "shadow_rows": 90, "hidden": 64, "conditioned": False,
        "likeness": 0.1, "decoded_likeness": 0.1, "starts": 3, **options,
    }  # fmt: skip
    attack = UnpairedInversion.model_validate(settings)
    return Trial(attack, recording, ("active",), "passive-1", seed=0).result()


@pytest.mark.slow
@pytest.mark.planted("unpaired_inversion")
def test_features_are_found_without_a_pair(make_recording: Any) -> None:
    result = _mount(_recording(make_recording))
    assert (result.adversary, result.metric) == ("active", "r2")
    assert result.score["r2"] > 0.5
    assert result.advantage > 0.5
    assert set(result.baselines) == {
        "mean of the public rows", "decoded x", f"decoded h{DECOY}",
    }  # fmt: skip
    assert result.counts["known"] == 90


def test_whose_the_public_rows_are_makes_no_difference_where_it_is_not_told(
    make_recording: Any,
) -> None:
    recording = _recording(make_recording)
    shadow = reveal_features(recording, "passive-1", 60, 0)
    attack = UnpairedInversion(iterations=20, starts=1, hidden=16, conditioned=False)
    # The same rows of features in the same order, said to be of the same people in another one.
    guesses = []
    for positions in (shadow.positions, shadow.positions.flip(0)):
        knowledge = Knowledge(
            classes=3, victim="passive-1", shadow=KnownRows(positions, shadow.values)
        )
        view = view_of(recording, ["active"], knowledge=knowledge, budget=Budget(iterations=20))
        guesses.append(attack.run(view, 0).attacks["decoded h"].values)
    assert (guesses[0] == guesses[1]).all()
