"""ID stuffing against the real intersections: without limits, and held by each of them."""

from pathlib import Path
from typing import Any, Literal

import pytest

from apfed_attacks.live.stuffing import Tables, play_stuffing
from apfed_attacks.people.id_stuffing import IdStuffing
from apfed_attacks.view import AttackError
from secure_apfed.alignment.records import AlignmentHistory
from secure_apfed.settings.alignment import AlignmentSettings

ROLES: tuple[Literal["active", "passive"], ...] = ("active", "passive")
CANDIDATES = 40


def _ids(first: int, last: int) -> list[str]:
    return [f"person {number}" for number in range(first, last)]


# 60 customers each, 30 of them in common.
TABLES = Tables(own=_ids(0, 60), victim=_ids(30, 90), outsiders=_ids(90, 200))


def _play(role: Any = "passive", history: Any = None, **options: Any) -> Any:
    choices = {key: options.pop(key) for key in ("intersections", "overstuff") if key in options}
    attack = IdStuffing(candidates=CANDIDATES, **choices)
    return play_stuffing(attack, TABLES, AlignmentSettings(**options), role=role, history=history)


@pytest.mark.planted("id_stuffing")
@pytest.mark.parametrize("protocol", ["ecdh", "circuit"])
@pytest.mark.parametrize("role", ROLES)
def test_without_limits_every_candidate_is_told_apart(role: Any, protocol: str) -> None:
    result, stuffed = _play(role, protocol=protocol)
    assert len(stuffed.tried) == CANDIDATES
    assert len(stuffed.found) == CANDIDATES // 2
    assert result.score["auc"] == 1.0
    assert result.advantage == 0.5
    assert result.adversary == role


@pytest.mark.parametrize("role", ROLES)
def test_the_agreed_size_bounds_the_guesses(role: Any) -> None:
    result, stuffed = _play(role, maximum_ids=70)
    assert len(stuffed.tried) == 10
    assert len(stuffed.found) <= 10
    assert result.score["auc"] < 0.75


@pytest.mark.parametrize("protocol", ["ecdh", "circuit"])
@pytest.mark.parametrize("role", ROLES)
def test_more_than_the_agreed_size_is_refused(role: Any, protocol: str) -> None:
    result, stuffed = _play(role, protocol=protocol, maximum_ids=70, overstuff=True)
    assert not result.applicable
    assert result.reason.startswith("the protocol refused: ")
    assert "70" in result.reason
    assert not stuffed.tried


def test_repeated_intersections_try_all_and_the_history_stops_them(tmp_path: Path) -> None:
    _, stuffed = _play(maximum_ids=70, intersections=9)
    assert len(stuffed.tried) == CANDIDATES
    history = AlignmentHistory(tmp_path / "alignments.jsonl", runs_with_a_peer=2)
    _, held = _play(maximum_ids=70, intersections=9, history=history)
    assert (held.runs, len(held.tried)) == (2, 20)
    assert "the limit is 2" in held.refusal
    result, nothing = _play(maximum_ids=70, intersections=9, history=history)
    assert not result.applicable
    assert not nothing.tried


def test_a_size_that_the_own_customers_fill_leaves_no_room() -> None:
    result, _ = _play(maximum_ids=60)
    assert result.reason == "the protocol refused: the agreed size leaves no room for a guess"


def test_the_minimum_stops_members_and_circuits_but_not_the_hub_of_ecdh() -> None:
    for role, protocol in (("passive", "ecdh"), ("passive", "circuit"), ("active", "circuit")):
        result, _ = _play(role, protocol=protocol, minimum_rows=55)
        assert not result.applicable
        assert "agreed minimum of 55" in result.reason
    result, stuffed = _play("active", protocol="ecdh", minimum_rows=55)
    assert result.score["auc"] == 1.0
    assert len(stuffed.found) == CANDIDATES // 2


def test_too_many_candidates_say_what_there_is() -> None:
    with pytest.raises(AttackError, match="the victim has 30 IDs"):
        play_stuffing(IdStuffing(candidates=100), TABLES, AlignmentSettings())
