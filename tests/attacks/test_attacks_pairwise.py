"""Pairwise alignment: nobody's row stands in for that of a person whom a party does not hold."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from apfed_attacks import ATTACKS
from apfed_attacks.columns import own_columns
from apfed_attacks.features.hijack import ReversedHijack
from apfed_attacks.interface import AttackResult, Guess
from apfed_attacks.live.runs import LiveRun, play_answers
from apfed_attacks.live.strategy import people_to_ask
from apfed_attacks.recorded import reveal_features, reveal_public, truth_of, view_of
from apfed_attacks.run import Trial, exchanged
from apfed_attacks.view import AdversaryView, AttackError, Knowledge, batches
from apfed_experiments.overlap import with_overlap
from secure_apfed.data import load_data
from tests.attacks.recordings import live_config

ROWS = 270
SOME, OTHERS = torch.arange(0, ROWS, 3), torch.arange(1, ROWS, 3)


@pytest.fixture(scope="module")
def recording(make_recording: Any) -> Any:
    """passive-1 does not hold a third of the people, passive-2 does not hold another third."""
    return _without(make_recording("nothing"), {"passive-1": SOME, "passive-2": OTHERS})


def _without(recording: Any, unknown: Mapping[str, Tensor]) -> Any:
    alignment = {name: rows.clone() for name, rows in recording.alignment.items()}
    for name, positions in unknown.items():
        alignment[name][positions] = -1
    return replace(recording, alignment=alignment)


def _view(recording: Any, *parties: str, victim: str | None = None) -> AdversaryView:
    return view_of(recording, parties, knowledge=Knowledge(classes=3, victim=victim))


def _held(recording: Any, party: str) -> Tensor:
    return recording.alignment[party] >= 0  # type: ignore[no-any-return]  # a tensor of bool


def test_there_is_no_truth_about_people_whom_the_victim_does_not_hold(recording: Any) -> None:
    whole = truth_of(recording)
    for party in ("passive-1", "passive-2"):
        held = _held(recording, party)
        assert torch.equal(whole.features[party].isnan().all(dim=1), ~held)
        assert torch.equal(truth_of(recording, party).trained, whole.trained[held[whole.trained]])
    assert torch.equal(truth_of(recording, "active").trained, whole.trained)


def test_features_are_revealed_of_people_whom_the_victim_holds(recording: Any) -> None:
    trained = truth_of(recording, "passive-1").trained
    known = reveal_features(recording, "passive-1", len(trained) - 1, 0)
    assert torch.isin(known.positions, trained).all()
    own = recording.data.passives[0].features
    assert torch.equal(known.values, own[recording.alignment["passive-1"][known.positions]])
    public = reveal_public(recording, ["passive-1", "passive-2"], ROWS, 0)
    assert len(public["active"]) > 0
    assert not any(rows.isnan().any() for rows in public.values())


def test_a_view_says_who_is_held_as_far_as_the_coalition_knows(recording: Any) -> None:
    everybody = torch.arange(ROWS)
    active, passive = _view(recording, "active"), _view(recording, "passive-1")
    assert torch.equal(active.holds("passive-1", everybody), _held(recording, "passive-1"))
    assert torch.equal(active.holds("passive-2", everybody), _held(recording, "passive-2"))
    assert active.holds("active", everybody).all()
    assert list(passive.held) == ["passive-1"]
    assert torch.equal(passive.holds("passive-1", SOME), torch.zeros(len(SOME), dtype=torch.bool))


def test_where_all_hold_everybody_nothing_is_filled(make_recording: Any) -> None:
    view = _view(make_recording("nothing"), "active", "passive-1")
    assert not view.held
    assert own_columns(view, torch.arange(ROWS)).shape == (ROWS, 5 + 4)


def test_own_columns_of_unknown_people_are_means_and_say_so(recording: Any) -> None:
    view = _view(recording, "passive-1", "passive-2")
    mean = recording.data.passives[0].features[
        recording.alignment["passive-1"][_held(recording, "passive-1")]
    ].mean(dim=0)  # fmt: skip
    for positions in (SOME, SOME[:2]):
        columns = own_columns(view, positions)
        assert columns.shape == (len(positions), 4 + 1 + 2 + 1)
        assert torch.allclose(columns[:, :4], mean.expand(len(positions), 4))
        assert columns[:, 4].tolist() == [1.0] * len(positions)
        assert columns[:, 7].tolist() == [0.0] * len(positions)
    known = own_columns(view, OTHERS)
    own = recording.data.passives[0].features[recording.alignment["passive-1"][OTHERS]]
    assert torch.equal(known[:, :5], torch.hstack([own, torch.zeros(len(own), 1)]))


def test_a_party_that_holds_nobody_has_columns_without_content(make_recording: Any) -> None:
    recording = _without(make_recording("nothing"), {"passive-2": torch.arange(ROWS)})
    columns = own_columns(_view(recording, "passive-2"), SOME)
    assert torch.equal(columns, torch.tensor([0.0, 0.0, 1.0]).expand(len(SOME), 3))


def _mounted(
    recording: Any, name: str, adversary: str, victim: str, **more: Any
) -> tuple[AttackResult, Guess]:
    found: list[Guess] = []
    result = Trial(
        ATTACKS[name](), recording, (adversary,), victim,
        seed=0, on_score=lambda _, guess: found.append(guess), **more,
    ).result()  # fmt: skip
    assert result.applicable, result.reason
    return result, found[0]


def test_only_people_whom_the_victim_holds_are_guessed_and_scored(recording: Any) -> None:
    view, draw = _view(recording, "active"), torch.Generator().manual_seed(0)
    opened = {
        step: torch.randn(len(rows), 6, generator=draw)
        for epoch in view.epochs
        for step, rows, _ in batches(view, epoch)
    }
    result, guess = _mounted(
        recording, "contrastive_inversion", "active", "passive-1", opened=opened
    )
    assert _held(recording, "passive-1")[guess.positions].all()
    assert result.counts["scored"] == len(guess.positions)
    assert result.counts["scored"] + 100 == len(truth_of(recording, "passive-1").trained)


def test_decoys_exchange_people_whom_the_victim_holds_among_themselves(recording: Any) -> None:
    held = _held(recording, "passive-1")
    view = _view(recording, "active", victim="passive-1")
    decoy = exchanged(view, 0)
    assert decoy is not None
    observed = truth_of(recording).trained
    taken = decoy.attributed(observed)
    assert torch.equal(held[taken], held[observed])
    assert torch.equal(taken.sort().values, observed)
    assert not (taken == observed).any()


def test_labels_are_guessed_of_everybody_whose_representations_a_passive_got(
    recording: Any,
) -> None:
    result, guess = _mounted(recording, "model_completion", "passive-1", "active")
    assert result.counts["scored"] == len(truth_of(recording).trained) - 12
    assert not _held(recording, "passive-1")[guess.positions].all()


@pytest.fixture(scope="module")
def live() -> tuple[Any, Any]:
    """A configuration with pairwise alignment, and data of which each passive lacks half."""
    config = live_config(
        "apfed_c", views=3, alignment={"mode": "pairwise", "protocol": "circuit"},
        train={"epochs": 1},
    )  # fmt: skip
    return config, with_overlap(load_data(config.data, seed=config.seed), 0.5, seed=1)


@pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")
def test_a_malicious_active_asks_about_people_whom_its_victim_holds(live: Any) -> None:
    run = LiveRun(*live)
    asked = people_to_ask(run, Knowledge(classes=10, victim="passive-2"), len(run.trained))
    rows = run.alignment["passive-2"]
    assert torch.equal(asked.sort().values, run.trained[rows[run.trained] >= 0].sort().values)
    unknown = run.trained[rows[run.trained] < 0]
    assert len(unknown)
    with pytest.raises(AttackError, match="passive-2 does not hold"):
        run.representations("passive-2", unknown)


@pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")
def test_a_passive_that_does_not_hold_everybody_can_play(live: Any) -> None:
    config, data = live
    attack = ReversedHijack(ahead=5, hidden=16)
    result = play_answers(attack, config, "passive-2", data=data)
    assert result.applicable, result.reason
    assert result.baselines["ridge on x"]["r2"] is not None
