"""Decoys: releases exchanged between rows, and nothing else."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from apfed_attacks import ATTACKS
from apfed_attacks.interface import Guess, Prediction
from apfed_attacks.recorded import view_of
from apfed_attacks.run import Trial, exchanged, with_decoys
from apfed_attacks.scoring import DECOY
from apfed_attacks.view import (
    AdversaryView,
    Knowledge,
    Played,
    gradients,
    released_positions,
    representations,
)
from secure_apfed.exchange import Kind


def _view(recording: Any, party: str = "passive-1", played: Played | None = None) -> AdversaryView:
    return view_of(recording, [party], knowledge=Knowledge(classes=3), played=played)


def _decoy(view: AdversaryView, seed: int = 0) -> tuple[AdversaryView, Tensor]:
    decoy = exchanged(view, seed)
    assert decoy is not None
    assert decoy.stands_for is not None
    return decoy, decoy.stands_for


@pytest.mark.parametrize(("method", "reads"), [("apfed_c", 1), ("tvfl", 2)])
def test_releases_are_exchanged_alike_in_all_epochs(
    make_recording: Any, method: str, reads: int
) -> None:
    gradient = "nothing" if method == "tvfl" else None
    view = _view(make_recording("labels", method=method, gradient=gradient, epochs=3))
    decoy, stands_for = _decoy(view)
    observed = released_positions(view)
    assert torch.equal(stands_for[observed].sort().values, observed)
    assert float((stands_for[observed] != observed).float().mean()) > 0.95
    for epoch in view.epochs:
        for read in (representations, gradients)[:reads]:
            seen, moved = read(view, epoch), read(decoy, epoch)
            assert torch.equal(moved.positions, seen.positions)
            assert torch.equal(moved.at(stands_for[seen.positions]), seen.z)


def test_rows_that_got_gradients_are_exchanged_among_themselves(make_recording: Any) -> None:
    recording = make_recording("nothing", method="tvfl", gradient="nothing", epochs=1)
    kept = recording.transcript._epochs[0]
    last = max(item.step for item in kept)
    # As test rows: released and never answered.
    kept[:] = [item for item in kept if (item.kind, item.step) != (Kind.GRADIENTS, last)]
    view = _view(recording)
    observed, trained = released_positions(view), gradients(view, 0).positions
    rest = observed[~torch.isin(observed, trained)]
    assert len(rest)
    decoy, stands_for = _decoy(view)
    for group in (trained, rest):
        assert torch.equal(stands_for[group].sort().values, group)
    assert torch.equal(gradients(decoy, 0).positions, trained)


def test_nothing_but_releases_is_exchanged(make_recording: Any) -> None:
    view = _view(make_recording("labels"))
    decoy, _ = _decoy(view)
    others = [name for name in view.__dataclass_fields__ if name != "stands_for"]
    assert all(getattr(decoy, name) is getattr(view, name) for name in others)
    assert view.stands_for is None


def test_the_order_is_a_function_of_the_seed(make_recording: Any) -> None:
    view = _view(make_recording("labels"))
    assert torch.equal(_decoy(view, 1)[1], _decoy(view, 1)[1])
    assert not torch.equal(_decoy(view, 1)[1], _decoy(view, 2)[1])


def test_people_who_were_asked_about_are_exchanged_among_themselves(make_recording: Any) -> None:
    people = torch.tensor([40, 3, 17, 80, 3, 41, 60, 99])
    view = _view(make_recording("labels"), "active", Played("isolation", {"people": people}))
    _, stands_for = _decoy(view)
    assert set(stands_for[people].tolist()) == set(people.tolist())
    assert not torch.equal(stands_for[people], people)
    every = torch.cat([released_positions(view), people]).unique()
    assert torch.equal(stands_for[every].sort().values, every)
    assert not (stands_for[every] == every).any()


def test_people_whose_releases_nobody_kept_are_exchanged_too(make_recording: Any) -> None:
    people = torch.arange(300, 320)
    recording = make_recording("nothing", epochs=0)
    _, stands_for = _decoy(_view(recording, "active", Played("isolation", {"people": people})))
    assert torch.equal(stands_for[people].sort().values, people)
    assert torch.equal(stands_for[:300], torch.arange(300))


def test_a_view_without_releases_has_no_decoy(make_recording: Any) -> None:
    recording = make_recording("nothing")
    assert exchanged(_view(recording, "outsider"), 0) is None
    assert exchanged(_view(make_recording("nothing", epochs=0)), 0) is None
    one = Played("isolation", {"people": torch.tensor([3, 3])})
    assert exchanged(_view(make_recording("nothing", epochs=0), "active", one), 0) is None
    nobody = Played("isolation", {"people": torch.empty(0, dtype=torch.int64)})
    assert exchanged(_view(make_recording("nothing", epochs=0), "active", nobody), 0) is None


def _guess(positions: list[int], value: float) -> Guess:
    """Scores that tell whose they are."""
    scores = Prediction(np.array(positions, dtype=np.float64)[:, None] + value, clusters=True)
    every = {"attack": scores}
    return Guess(
        positions=torch.tensor(positions), attacks=every, baselines=every, references=every
    )


def test_rows_that_both_guess_are_kept() -> None:
    both = with_decoys(_guess([2, 5, 7, 8], 0.25), _guess([9, 8, 1, 5, 2], 0.5))
    assert both.positions.tolist() == [2, 5, 8]
    for kept in (both.attacks, both.baselines, both.references):
        assert kept["attack"].values.flatten().tolist() == [2.25, 5.25, 8.25]
    assert both.decoys["attack"].values.flatten().tolist() == [2.5, 5.5, 8.5]
    assert both.decoys["attack"].clusters


def test_guesses_about_other_rows_leave_none() -> None:
    both = with_decoys(_guess([1, 2], 0.0), _guess([3], 0.0))
    assert not len(both.positions)
    assert both.decoys["attack"].values.shape == (0, 1)


def _result(recording: Any, name: str, adversary: str = "passive-2") -> Any:
    return Trial(ATTACKS[name](), recording, (adversary,), "active", seed=0).result()


@pytest.mark.parametrize("lost", [2, 0])
def test_rows_that_miss_an_epoch_are_exchanged_with_others(make_recording: Any, lost: int) -> None:
    recording = make_recording("labels", epochs=3)
    whole = _result(recording, "temporal")
    del recording.transcript._epochs[lost][:4]  # two batches to two passives
    result = _result(recording, "temporal")
    assert 0 < result.counts["scored"] <= whole.counts["scored"]
    assert result.advantage > 0.3


@pytest.mark.parametrize("name", ["model_completion", "temporal"])
def test_decoys_of_a_leak_find_nothing(make_recording: Any, name: str) -> None:
    result = _result(make_recording("labels", epochs=2), name)
    decoys = {
        key.removesuffix(DECOY): figures["balanced_accuracy"]
        for key, figures in result.baselines.items()
        if key.endswith(DECOY)
    }
    assert set(decoys) == set(result.variants)
    assert result.score["balanced_accuracy"] > 0.8
    # Chance is a third; of several decoys one is lucky.
    assert max(decoys.values()) < 0.5
    assert abs(float(np.mean(list(decoys.values()))) - 1 / 3) < 0.08


def test_an_own_network_has_other_fresh_weights_as_its_decoy(make_recording: Any) -> None:
    network = torch.nn.Linear(2, 3)
    recording = make_recording("nothing", method="tvfl", epochs=1)
    recording = replace(recording, encoders={"passive-2": network})
    attack = ATTACKS["semi_supervised"].model_validate({"own_network": True, "iterations": 2})
    result = Trial(attack, recording, ("passive-2",), "active", seed=0).result()
    assert result.applicable
    decoys = [key for key in result.baselines if key.endswith(DECOY)]
    assert decoys == [f"own network, trained further{DECOY}"]
