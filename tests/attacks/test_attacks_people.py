"""Attacks on people: who trained a model, or at another party, and whose IDs a peer has."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import nn

from apfed_attacks.live.stuffing import IdTables, play_stuffing
from apfed_attacks.people import membership
from apfed_attacks.people.id_stuffing import IdStuffing
from apfed_attacks.recorded import reveal_candidates, reveal_people
from apfed_attacks.view import AttackError
from secure_apfed.alignment.records import AlignmentHistory
from secure_apfed.runs.outcome import Recording
from secure_apfed.runs.run import run
from secure_apfed.settings import TrainSettings
from secure_apfed.settings.alignment import AlignmentSettings
from tests.attacks.recordings import ByHeart, run_attack
from tests.secure_apfed.small_runs import small_config

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")


# Membership: shadow models.


def _shadows(between: type[nn.Module] = nn.ReLU, **train: Any) -> membership.ShadowModels:
    settings = {"epochs": 2, "batch_size": 8, "learning_rate": 0.1, **train}
    return membership.ShadowModels(
        make_network=lambda: nn.Sequential(nn.Linear(3, 5), between(), nn.Linear(5, 2)),
        train=TrainSettings(**settings),
        seed=0,
        device=torch.device("cpu"),
    )


def _rows() -> tuple[torch.Tensor, torch.Tensor]:
    features = torch.randn(40, 3, generator=torch.Generator().manual_seed(1))
    return features, (features[:, 0] > 0).long()


# A chain of products, and through vmap.
@pytest.mark.parametrize(("bound", "between"), [(None, nn.Tanh), (0.5, nn.ReLU), (0.5, nn.Tanh)])
def test_all_models_at_once_are_the_models_one_by_one(
    bound: float | None, between: type[nn.Module]
) -> None:
    features, labels = _rows()
    shadows = _shadows(between, max_gradient_norm=bound)
    rows_SH = membership.draw_halves(6, 40, 0)
    together = shadows.train_and_score(features, labels, rows_SH)
    apart = shadows.score_one_by_one(features, labels, rows_SH)
    assert together.shape == (6, 40, 2)
    torch.testing.assert_close(together, apart, atol=2e-5, rtol=1e-4)
    assert not torch.allclose(together[0], together[1])


def test_halves_are_pairs_of_complements() -> None:
    rows_SH = membership.draw_halves(4, 10, 3)
    assert sorted([*rows_SH[0].tolist(), *rows_SH[1].tolist()]) == list(range(10))
    assert sorted([*rows_SH[2].tolist(), *rows_SH[3].tolist()]) == list(range(10))
    assert not torch.equal(rows_SH[0], rows_SH[2])
    assert membership.draw_halves(3, 11, 0).shape == (3, 5)


def test_batch_norm_is_refused() -> None:
    shadows = replace(
        _shadows(), make_network=lambda: nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    )
    with pytest.raises(AttackError, match="networks without buffers"):
        shadows.train_and_score(*_rows(), membership.draw_halves(2, 40, 0))


def test_logit_confidence_is_stable_for_sure_models() -> None:
    scores = torch.tensor([[800.0, 0.0], [0.0, 800.0], [1.0, 1.0]])
    phi = membership.compute_logit_confidence(scores, torch.tensor([0, 0, 1]))
    np.testing.assert_allclose(phi, [800, -800, 0], atol=1e-9)


@pytest.mark.parametrize("own", [False, True])
def test_the_ratio_favours_what_models_with_the_row_say(own: bool) -> None:
    draw = np.random.default_rng(0)
    inside = np.arange(64)[:, None] % 2 == np.zeros((1, 5), dtype=int)
    shadow = np.where(inside, 5.0, 1.0) + draw.normal(size=(64, 5))
    ratio = membership.compute_likelihood_ratio(
        np.array([5.0, 1, 5, 1, 3]), shadow, inside, has_own_variances=own
    )
    assert ratio[[0, 2]].min() > 1 > -1 > ratio[[1, 3]].max()


def model_by_heart(make_recording: Any) -> Recording:
    """The active's model is sure of the rows that it learnt, and guesses the others."""
    recording = make_recording("nothing")
    active = recording.data.active
    rows = recording.data.train_rows

    def guess(rows: int) -> torch.Tensor:
        return torch.randn(rows, 3, generator=torch.Generator().manual_seed(0))

    memory = ByHeart(active.features[rows], active.labels[rows], guess, 9 * torch.eye(3))
    return replace(recording, model=memory)  # type: ignore[no-any-return]  # of the fixture


def test_an_outsider_is_told_how_sure_the_model_is(make_recording: Any) -> None:
    (result,) = run_attack(model_by_heart(make_recording), "membership", shadow_models=4, epochs=1)
    assert (result.adversary, result.metric, result.target) == ("outsider", "auc", "membership")
    assert result.roc[0] == (0.0, 0.0)
    assert {"auc of aligned members", "auc of unaligned members"} >= set(result.risk)


def test_candidates_are_half_members_in_an_order_that_says_nothing(make_recording: Any) -> None:
    recording = make_recording("nothing")
    candidates, members = reveal_candidates(recording, 40, 0)
    assert len(candidates) == len(members) == 40
    assert int(members[:, 0].sum()) == 20
    assert 0 < int(members[:20, 0].sum()) < 20
    with pytest.raises(AttackError, match="two of each"):
        reveal_candidates(recording, 2, 0)


# Averaged membership: who trained at another party, from the average of all parties' weights.


@cache
def run_averaging(method: str = "h_fedmv", clients: int = 3) -> Recording:
    changes: dict[str, Any] = {}
    if method == "h_fedmv":
        data = {"dataset": "breast_cancer", "partition": "horizontal", "clients": clients}
        sum_of_one = {"scheme": "plain", "masks": "none", "allow_single_passive": True}
        changes = {"data": data, **({"secure_sum": sum_of_one} if clients == 2 else {})}
    return run(small_config(method, **changes), None).recording


def replace_model(found: Recording, network: nn.Module) -> Recording:
    return replace(found, model=nn.Sequential(nn.Flatten(), network))


def average_by_heart(*names: str, **options: Any) -> Any:
    """Results where the average fits these parties' people."""
    found = run_averaging()
    tables = [table for table in found.data.passives if table.name in names]
    labels = [table.labels for table in tables if table.labels is not None]
    known = torch.cat([table.features for table in tables]), torch.cat(labels)
    learnt = ByHeart(*known, lambda rows: torch.full((rows, 2), 0.5), torch.eye(2) - 0.5)
    return run_attack(replace_model(found, learnt), "averaged_membership", **options)


@pytest.mark.slow
def test_what_is_learnt_of_all_passives_says_not_at_whom() -> None:
    """The others trained at the other passive, so the average fits them as well."""

    def select_active_results(*names: str, strangers: str) -> dict[str, Any]:
        results = average_by_heart(*names, strangers=strangers)
        return {result.victim: result for result in results if result.adversary == "active"}

    assert select_active_results("passive-1", strangers="outside")["passive-2"].advantage < 0.1
    both = "passive-1", "passive-2"
    assert select_active_results(*both, strangers="outside")["passive-1"].score["auc"] > 0.95
    assert (
        select_active_results(*both, strangers="elsewhere")["passive-1"].variants["fit"]["auc"]
        == 0.5
    )


@pytest.mark.parametrize("strangers", ["outside", "elsewhere"])
def test_half_of_the_people_trained_at_the_victim_and_the_others_where_it_says(
    strangers: membership.Strangers,
) -> None:
    data = run_averaging().data
    tables = {table.name: {tuple(row.tolist()) for row in table.features} for table in data.tables}
    tested = {tuple(row.tolist()) for row in data.active.features[data.test_rows]}
    whose = {"outside": tested, "elsewhere": tables["passive-2"]}[strangers]
    people, members = reveal_people(run_averaging(), "active", "passive-1", 40, 0, strangers)
    assert int(members[:, 0].sum()) == 20
    rows = [tuple(row.tolist()) for row in people.features]
    sources = [tables["passive-1"] if member else whose for member in members[:, 0].tolist()]
    assert [row for row, source in zip(rows, sources, strict=True) if row not in source] == []


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("clients", [2, 3])
def test_elsewhere_needs_a_third_party_and_nobody_asks_about_itself(clients: int) -> None:
    results = run_attack(
        run_averaging(clients=clients), "averaged_membership", strangers="elsewhere"
    )
    passives = [f"passive-{at}" for at in range(1, clients)]
    pairs = [*(("active", name) for name in passives), *((name, "active") for name in passives)]
    assert [(result.adversary, result.victim) for result in results] == pairs
    assert {result.applicable for result in results} == {clients == 3}
    declined = [result.reason for result in results if not result.applicable]
    assert [why for why in declined if "holds no people to ask about" not in why] == []


@pytest.mark.slow
def test_averaged_recurrent_networks_are_taken_as_they_are() -> None:
    results = run_attack(run_averaging("s_fedmv"), "averaged_membership", candidates=40)
    assert len(results) == 6
    assert all(result.applicable for result in results)


# ID stuffing against the real intersections: held by each of their limits.

ROLES: tuple[Literal["active", "passive"], ...] = ("active", "passive")
CANDIDATES = 40


def people(first: int, last: int) -> list[str]:
    return [f"person {number}" for number in range(first, last)]


# 60 customers each, 30 of them in common.
TABLES = IdTables(own_ids=people(0, 60), victim_ids=people(30, 90), outsider_ids=people(90, 200))


def stuff(role: Any = "passive", history: Any = None, **options: Any) -> Any:
    choices = {key: options.pop(key) for key in ("intersections", "overstuff") if key in options}
    attack = IdStuffing(candidates=CANDIDATES, **choices)
    return play_stuffing(attack, TABLES, AlignmentSettings(**options), role=role, history=history)


@pytest.mark.parametrize("role", ROLES)
def test_the_agreed_size_bounds_the_guesses(role: Any) -> None:
    result, stuffed = stuff(role, maximum_ids=70)
    assert len(stuffed.tried_candidates) == 10 >= len(stuffed.found_candidates)
    assert result.score["auc"] < 0.75
    result, _ = stuff(role, maximum_ids=60)
    assert result.reason == "the protocol refused: the agreed size leaves no room for a guess"


@pytest.mark.parametrize("protocol", ["ecdh", "circuit"])
@pytest.mark.parametrize("role", ROLES)
def test_more_than_the_agreed_size_is_refused(role: Any, protocol: str) -> None:
    result, stuffed = stuff(role, protocol=protocol, maximum_ids=70, overstuff=True)
    assert not result.applicable
    assert result.reason.startswith("the protocol refused: ")
    assert "70" in result.reason
    assert not stuffed.tried_candidates


def test_repeated_intersections_try_all_and_the_history_stops_them(tmp_path: Path) -> None:
    _, stuffed = stuff(maximum_ids=70, intersections=9)
    assert len(stuffed.tried_candidates) == CANDIDATES
    history = AlignmentHistory(tmp_path / "alignments.jsonl", runs_with_a_peer=2)
    _, held = stuff(maximum_ids=70, intersections=9, history=history)
    assert len(held.tried_candidates) == 20
    assert "the limit is 2" in held.refusal
    result, nothing = stuff(maximum_ids=70, intersections=9, history=history)
    assert not result.applicable
    assert not nothing.tried_candidates


@pytest.mark.parametrize(
    ("role", "protocol"), [("passive", "ecdh"), ("passive", "circuit"), ("active", "circuit")]
)
def test_the_minimum_stops_members_and_circuits(role: Any, protocol: str) -> None:
    result, _ = stuff(role, protocol=protocol, minimum_rows=55)
    assert not result.applicable
    assert "agreed minimum of 55" in result.reason


def test_the_minimum_does_not_stop_the_hub_of_ecdh() -> None:
    result, stuffed = stuff("active", protocol="ecdh", minimum_rows=55)
    assert result.score["auc"] == 1.0
    assert len(stuffed.found_candidates) == CANDIDATES // 2


def test_too_many_candidates_say_what_there_is() -> None:
    with pytest.raises(AttackError, match="the victim has 30 IDs"):
        play_stuffing(IdStuffing(candidates=100), TABLES, AlignmentSettings())
