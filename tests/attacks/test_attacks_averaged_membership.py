"""Who trained at another party, from the average of all parties' weights."""

from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn

from apfed_attacks.recorded import reveal_people, trained_alike
from apfed_attacks.view import AttackError
from secure_apfed.runs.outcome import Recording
from secure_apfed.runs.run import run
from tests.attacks.recordings import ByHeart, attacked
from tests.secure_apfed.small_runs import small_config

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")


@cache
def recording(method: str = "h_fedmv", clients: int = 3) -> Recording:
    changes: dict[str, Any] = {}
    if method == "h_fedmv":
        changes["data"] = {
            "dataset": "breast_cancer", "partition": "horizontal", "clients": clients,
        }  # fmt: skip
        sum_of_one = {"scheme": "plain", "masks": "none", "allow_single_passive": True}
        changes |= {"secure_sum": sum_of_one} if clients == 2 else {}
    return run(small_config(method, **changes), None).recording


attack = partial(attacked, name="averaged_membership")


def with_model(found: Recording, network: nn.Module) -> Recording:
    return replace(found, model=nn.Sequential(nn.Flatten(), network))


def _by_heart(found: Recording, *names: str) -> Recording:
    tables = [table for table in found.data.passives if table.name in names]
    labels = [table.labels for table in tables if table.labels is not None]
    known = torch.cat([one.features for one in tables]), torch.cat(labels)
    learnt = ByHeart(*known, lambda rows: torch.full((rows, 2), 0.5), torch.eye(2) - 0.5)
    return with_model(found, learnt)


@pytest.mark.planted("averaged_membership")
def test_an_average_that_fits_a_passives_people_gives_them_away() -> None:
    found = _by_heart(recording(), "passive-1")
    of_active = {one.victim: one for one in attack(found) if one.adversary == "active"}
    assert of_active["passive-1"].score["auc"] > 0.95
    assert of_active["passive-1"].advantage > 0.3
    assert of_active["passive-2"].advantage < 0.1


def test_what_is_learnt_of_all_passives_says_not_at_whom() -> None:
    """The others trained at the other passive, so the average fits them as well."""
    found = _by_heart(recording(), "passive-1", "passive-2")
    outside, elsewhere = (
        {one.victim: one for one in attack(found, strangers=who) if one.adversary == "active"}
        for who in ("outside", "elsewhere")
    )
    assert outside["passive-1"].score["auc"] > 0.95
    assert elsewhere["passive-1"].variants["fit"]["auc"] == 0.5


def test_a_passive_asks_who_trained_at_the_active() -> None:
    found = [(one.adversary, one.victim) for one in attack(recording(), candidates=20)]
    assert sorted(found) == [
        ("active", "passive-1"), ("active", "passive-2"),
        ("passive-1", "active"), ("passive-2", "active"),
    ]  # fmt: skip


def test_half_of_the_people_trained_at_the_victim_and_the_others_where_it_says() -> None:
    data = recording().data
    tables = {table.name: {tuple(row.tolist()) for row in table.features} for table in data.tables}
    tested = {tuple(row.tolist()) for row in data.active.features[data.test_rows]}
    for strangers, whose in (("outside", tested), ("elsewhere", tables["passive-2"])):
        people, members = reveal_people(
            recording(), "active", "passive-1", 40, 0, strangers  # type: ignore[arg-type]
        )  # fmt: skip
        assert int(members[:, 0].sum()) == 20
        for row, member in zip(people.features, members[:, 0].tolist(), strict=True):
            assert tuple(row.tolist()) in (tables["passive-1"] if member else whose)


def test_a_party_that_trains_alone_does_so_by_the_methods_equations() -> None:
    data = recording().data
    passive = data.passives[0]
    assert passive.labels is not None
    scores = trained_alike(recording(), 0)(passive.features, passive.labels)(passive.features)
    right = (scores.argmax(1) == passive.labels).float().mean()
    assert scores.shape == (142, 2)
    assert right > 0.9


def test_elsewhere_needs_a_third_party() -> None:
    with pytest.raises(AttackError, match="there are 0 others"):
        reveal_people(recording(clients=2), "active", "passive-1", 40, 0, "elsewhere")
    results = attack(recording(clients=2), strangers="elsewhere")
    assert not any(result.applicable for result in results)


@pytest.mark.slow
def test_averaged_recurrent_networks_are_taken_as_they_are() -> None:
    results = attack(recording("s_fedmv"), candidates=40)
    assert len(results) == 6
    assert all(result.applicable for result in results)
