"""What is read of votes and of the labels shown with them: planted leaks, and none."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from apfed_attacks.interface import AttackResult
from apfed_attacks.recorded import view_of
from apfed_attacks.run import mount, prepare
from apfed_attacks.view import Knowledge
from secure_apfed.config import AttackChoice, Config
from secure_apfed.runs.outcome import Recording
from secure_apfed.runs.run import run
from tests.attacks.ballots import Voting, ballot_of
from tests.attacks.test_attacks_null import why_not_zero
from tests.secure_apfed.small_runs import Said, small_config

OPENINGS = ("votes", "votes_randomised")
SEEDS = range(8)


def a_feature(own: Tensor, draw: torch.Generator) -> Tensor:
    """Votes that are a feature: its size, and its sign as the class."""
    del draw
    return torch.stack([own[:, 1], -own[:, 1], torch.zeros(len(own))], dim=1)


def nothing(own: Tensor, draw: torch.Generator) -> Tensor:
    return torch.rand(len(own), 3, generator=draw)


def attack(recording: Recording, name: str, seed: int = 0, **options: Any) -> list[AttackResult]:
    return list(mount(recording, [AttackChoice(name=name, options=options)], seed=seed))


def filled(make_recording: Any, method: str, voting: Voting, **others: Any) -> Recording:
    seed = others.get("seed", 5)
    return ballot_of(
        make_recording("nothing", epochs=0, seed=seed), method=method, voting=voting, **others
    )


@pytest.mark.planted("vote_regression")
@pytest.mark.parametrize("method", OPENINGS)
def test_votes_that_are_a_feature_are_read(make_recording: Any, method: str) -> None:
    recording = filled(make_recording, method, a_feature)
    result, other = attack(recording, "vote_regression", shadow_rows=60)
    assert result.victim == "passive-1"
    assert result.advantage is not None
    # One of four features, or its sign alone.
    assert result.advantage > (0.1 if method == "votes" else 0.04)
    assert other.advantage is not None
    assert abs(other.advantage) < 0.04  # of passive-2 the votes say nothing


@pytest.mark.null("vote_regression")
@pytest.mark.parametrize("method", OPENINGS)
def test_votes_of_chance_tell_no_features(make_recording: Any, method: str) -> None:
    advantages = []
    for seed in SEEDS:
        recording = filled(make_recording, method, nothing, seed=seed)
        result = attack(recording, "vote_regression", seed, shadow_rows=60, iterations=50)[0]
        assert result.advantage is not None
        advantages.append(result.advantage)
    assert why_not_zero(advantages) is None


@pytest.mark.planted("shown_labels")
@pytest.mark.parametrize("known", [0, 4])
def test_shown_labels_are_read_as_they_are_and_teach(make_recording: Any, known: int) -> None:
    recording = filled(make_recording, "votes", nothing)
    for result in attack(recording, "shown_labels", labels_per_class=known):
        assert result.advantage is not None
        assert result.advantage > 0.05
        share = 60 / result.counts["scored"]
        assert min(one["accuracy"] or 0 for one in result.variants.values()) > share


@pytest.mark.null("shown_labels")
def test_labels_of_chance_are_worth_nothing(make_recording: Any) -> None:
    advantages = []
    for seed in SEEDS:
        recording = filled(make_recording, "votes", nothing, true_labels=False, seed=seed)
        result = attack(recording, "shown_labels", seed, labels_per_class=4, iterations=50)[0]
        assert result.advantage is not None
        advantages.append(result.advantage)
    assert why_not_zero(advantages) is None


def config_of(method: Said, **changes: Any) -> Config:
    data = {"dataset": "breast_cancer", "overlap": 1.0, "labelled": 20}
    usual: dict[str, Any] = {
        "data": data, "model": {"network": "random_features"},
        "train": {"epochs": 1, "device": "cpu"}, "guard": {"mechanism": "none"},
        "secure_sum": {"scheme": "plain", "allow_single_passive": True},
    }  # fmt: skip
    return small_config(method, **{**usual, **changes})


@pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")
@pytest.mark.parametrize("method", OPENINGS)
def test_a_real_run_is_attacked(method: str) -> None:
    recording = run(config_of(method), None).recording
    features = attack(recording, "vote_regression", shadow_rows=30, iterations=50)[0]
    labels = attack(recording, "shown_labels", labels_per_class=1)[0]
    assert (features.role, labels.role) == ("active", "passive")
    assert features.advantage is not None
    assert labels.advantage is not None
    assert labels.advantage > 0


@pytest.mark.parametrize("name", ["vote_regression", "shown_labels"])
def test_where_nobody_votes_there_is_nothing_to_attack(make_recording: Any, name: str) -> None:
    for result in attack(make_recording("labels"), name):
        assert result.reason is not None
        assert "nobody votes" in result.reason


@pytest.mark.parametrize(
    ("party", "name"), [("active", "vote_regression"), ("passive-1", "shown_labels")]
)
def test_a_transcript_without_a_ballot_says_what_to_set(
    make_recording: Any, party: str, name: str
) -> None:
    empty = make_recording("nothing", epochs=0)
    config = filled(make_recording, "votes", nothing).config
    view = view_of(
        replace(empty, config=config), [party],
        knowledge=Knowledge(classes=3, victim="passive-1"),
    )  # fmt: skip
    reason = prepare(AttackChoice(name=name)).applicable(view)
    assert reason is not None
    assert "set transcript.keep" in reason
