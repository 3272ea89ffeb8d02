from typing import Any

import pytest
import torch

from apfed_attacks.features.chosen_representations import ChosenRepresentations
from apfed_attacks.live.runs import ALL_RULES, LiveRun, play
from apfed_attacks.recorded import reveal_features, view_of
from apfed_attacks.view import Knowledge, Played
from tests.attacks.recordings import live_config

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")
UNPROTECTED: frozenset[Any] = frozenset()


def _recovered(run: LiveRun, attack: ChosenRepresentations) -> tuple[Any, Any]:
    """Play, and return what was recovered beside the truth before the question."""
    everybody = torch.arange(len(run.alignment["active"]))
    truth = [run.representations(name, everybody) for name in run.passives]
    shadow = reveal_features(run.recording, "passive-1", 10, 0)
    knowledge = Knowledge(classes=10, victim="passive-1", shadow=shadow)
    notes = attack.play(run, knowledge, 0)
    view = view_of(
        run.recording, ["active"], knowledge=knowledge, played=Played(attack.name, notes)
    )
    people, found = attack.representations(view)
    return found, torch.stack([z[people] for z in truth])


@pytest.mark.planted("chosen_representations")
def test_a_single_passives_representations_are_read_exactly() -> None:
    run = LiveRun(live_config("apfed_c", views=2), rules=UNPROTECTED)
    run.train(2)
    found, (truth,) = _recovered(run, ChosenRepresentations(people=128))
    assert float((found - truth).norm(dim=1).max()) < 5e-6


def test_of_several_passives_the_centred_sum_is_read_exactly() -> None:
    run = LiveRun(live_config("apfed_c"), rules=UNPROTECTED)
    run.train(2)
    found, truth = _recovered(run, ChosenRepresentations(people=64))
    total = truth.sum(dim=0)
    assert float((found - (total - total.mean(dim=0))).norm(dim=1).max()) < 5e-6


@pytest.mark.planted("chosen_representations")
def test_features_follow_from_a_single_passives_representations() -> None:
    config = live_config("apfed_c", views=2)
    (result,) = play(ChosenRepresentations(people=160, shadow_rows=60), config, rules=UNPROTECTED)
    assert (result.adversary, result.victim, result.behaviour) == (
        "active", "passive-1", "malicious",
    )  # fmt: skip
    assert result.applicable
    assert result.advantage is not None
    assert result.advantage > 0.1


def test_reconstructing_passives_are_not_its_victims() -> None:
    for result in play(ChosenRepresentations(people=64), live_config("apfed_r"), rules=UNPROTECTED):
        assert not result.applicable
        assert result.reason is not None
        assert "another objective" in result.reason


def test_leaving_rules_out_changes_nothing_in_an_honest_run() -> None:
    config = live_config("apfed_c", views=2, train={"precision": "float64"})
    states = []
    for rules in (UNPROTECTED, ALL_RULES):
        live = LiveRun(config, rules=rules)
        live.train(2)
        states.append(live.session.tensors())
    for party, one in states[0].items():
        for name, value in one.items():
            if not name.startswith("allowance"):  # which an unprotected passive does not count
                assert torch.equal(value, states[1][party][name]), (party, name)


@pytest.mark.refused("chosen_representations")
@pytest.mark.parametrize("views", [2, 4])
def test_the_protocol_refuses_one_direction(views: int) -> None:
    results = play(ChosenRepresentations(people=64), live_config("apfed_c", views=views))
    for result in results:
        assert result.reason is not None
        assert result.reason.startswith("the protocol refused: active sent a near-constant batch")


@pytest.mark.parametrize("evasion", [{"spread": 0.2}, {"decoys": 0.55}])
def test_what_spreads_a_little_more_is_answered_and_tells(evasion: dict[str, Any]) -> None:
    run = LiveRun(live_config("apfed_c", views=2))
    run.train(2)
    found, (truth,) = _recovered(run, ChosenRepresentations(people=28, **evasion))
    # An honest limit of the rule: centred, well above what a guess at the mean gives (0).
    middle = [one - one.mean(dim=0) for one in (found, truth)]
    assert float(torch.nn.functional.cosine_similarity(*middle).mean()) > 0.5
