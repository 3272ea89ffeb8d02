"""Headlines of attacks: one for each direction, and none where nothing was tried."""

from collections.abc import Mapping
from typing import Any

import pytest

from apfed_attacks.headlines import (
    Direction,
    list_directions,
    make_headlines,
    select_best_by_kind,
)
from apfed_attacks.interface import AttackResult
from apfed_experiments.report.who_learns import RULES, Role, RunFacts
from secure_apfed.exchange import Kind
from secure_apfed.methods import METHODS
from tests.secure_apfed.small_runs import small_config

ACTIVE_READS = "active reads features of passives"
PASSIVE_READS = "passive reads features of active"
LABELS_READ = "passive reads labels"


def result_of(advantage: float | None = None, **changes: Any) -> AttackResult:
    usual: dict[str, Any] = {
        "attack": "model_completion",
        "target": "labels",
        "victim": "active",
        "adversary": "passive-1",
        "role": "passive",
        "behaviour": "curious",
        "method": "apfed_c",
        "applicable": advantage is not None,
        "reason": None if advantage is not None else "apfed_c: nothing was kept",
        "metric": None if advantage is None else "balanced_accuracy",
        "advantage": advantage,
        "seed": 0,
    }
    return AttackResult(**{**usual, **changes})


OF_PASSIVE: Mapping[str, Any] = {
    "attack": "sum_regression",
    "target": "features",
    "victim": "passive-1",
    "adversary": "active",
    "role": "active",
    "metric": "r2",
}


def test_an_attack_of_one_direction_says_nothing_of_another() -> None:
    results = [result_of(0.0), result_of(**OF_PASSIVE), result_of(**OF_PASSIVE)]
    found = select_best_by_kind(make_headlines(results, small_config("apfed_c")))
    assert found[LABELS_READ].state == "nothing found"
    headline = found[ACTIVE_READS]
    assert (headline.state, headline.short_text) == ("not attacked", "not attacked")
    assert headline.text == "not attacked: 2 of 2 attacks declined: nothing was kept (2)"
    assert headline.as_json()["advantage"] is None
    assert found[PASSIVE_READS].text == ("not attacked: no attack of this direction was chosen")


def test_the_worst_of_a_direction_is_told_with_who_declined() -> None:
    first = {**OF_PASSIVE, "advantage": 0.1}
    other = {**OF_PASSIVE, "advantage": 0.4, "victim": "passive-2"}
    results = [result_of(**first), result_of(**other), result_of(**OF_PASSIVE)]
    headlines = make_headlines(results)
    assert [of.direction.title for of in headlines] == [
        "active reads features of passive-1",
        "active reads features of passive-2",
    ]
    assert headlines[0].text == (
        "+0.100, r2 over baseline, sum_regression by active; 1 of 2 attacks declined: nothing was "
        "kept (1)"
    )
    assert select_best_by_kind(headlines)[ACTIVE_READS].advantage == 0.4


@pytest.mark.parametrize("advantage", [-0.3, 0.0])
def test_an_advantage_of_nothing_is_nothing_found(advantage: float) -> None:
    (headline,) = make_headlines([result_of(advantage)])
    assert headline.state == "nothing found"
    assert headline.short_text == f"{advantage:+.3f}"


@pytest.mark.parametrize("kind", [ACTIVE_READS, PASSIVE_READS, LABELS_READ])
def test_not_applicable_names_what_is_not_sent(kind: str) -> None:
    found = select_best_by_kind(make_headlines([], small_config("single_view")))
    assert found[kind].text.startswith("not applicable: nothing that depends on the "), kind


# By message, of what kind of direction it lets its receiver read, where it is not merely names.
_TOLD: Mapping[tuple[Kind, Role], str] = {
    (Kind.SUM, Role.ACTIVE): ACTIVE_READS,
    (Kind.VOTES, Role.ACTIVE): ACTIVE_READS,
    (Kind.RIGHT_VOTES, Role.ACTIVE): ACTIVE_READS,
    (Kind.SINGULAR_VECTORS, Role.ACTIVE): ACTIVE_READS,
    (Kind.LABELS, Role.PASSIVE): LABELS_READ,
    (Kind.ENCRYPTED_LABELS, Role.PASSIVE): LABELS_READ,
    (Kind.GRADIENTS, Role.PASSIVE): LABELS_READ,
}


def list_directions_of_rules(method: str) -> set[str]:
    """The directions in which the tables of who learns what say that something is read."""
    config = small_config(method)
    facts = RunFacts.from_settings(config, passive_count=2, is_in_separate_processes=False)
    found = set()
    for rule in RULES:
        kind = _TOLD.get((rule.kind, rule.receiver or Role.DEALER))
        named = {part for whole in rule.condition.split("; ") for part in whole.split(" or ")}
        of_this_method = facts.method_facts & named
        if kind is not None and of_this_method and rule.holds_for(facts):
            found.add(kind)
    if "the active sends representations" in facts.method_facts:
        found |= {PASSIVE_READS, LABELS_READ}
    if "passives send representations" in facts.method_facts or config.method.has_gradient_sum:
        found.add(ACTIVE_READS)
    return found


@pytest.mark.parametrize("method", METHODS)
def test_what_who_learns_tells_is_attacked_or_said_not_to_be(method: str) -> None:
    headlines = select_best_by_kind(make_headlines([], small_config(method)))
    told = list_directions_of_rules(method)
    assert told <= set(headlines)
    states = {kind: headlines[kind].state for kind in told}
    assert states == dict.fromkeys(told, "not attacked")
    if method != "single_view":
        assert ACTIVE_READS in told, "or this test reads nothing"


@pytest.mark.parametrize("method", METHODS)
def test_every_run_speaks_of_the_three_directions(method: str) -> None:
    kinds = {direction.kind for direction in list_directions(small_config(method))}
    assert {ACTIVE_READS, PASSIVE_READS, LABELS_READ} <= kinds


AGGREGATOR_READS = Direction(reader="aggregator", target="features").kind


@pytest.mark.parametrize(
    ("scheme", "masks", "text"),
    [
        ("plain", "none", "not attacked: no attack of this direction was chosen"),
        ("plain", "pairwise", "not attacked: no attack of this direction was chosen"),
        ("ckks", "none", "not applicable: nothing to read: ciphertexts (ckks)"),
        ("bfv", "pairwise", "not applicable: nothing to read: ciphertexts (bfv + pairwise masks)"),
    ],
)
def test_what_the_aggregator_reads_is_never_left_out(scheme: str, masks: str, text: str) -> None:
    config = small_config("apfed_c", secure_sum={"scheme": scheme, "masks": masks, "clip": 1.0})
    assert select_best_by_kind(make_headlines([], config))[AGGREGATOR_READS].text == text


@pytest.mark.parametrize("method", METHODS)
def test_an_aggregator_has_a_headline_where_it_adds(method: str) -> None:
    config = small_config(method)
    adds = config.method.has_secure_sum or "tables are decomposed" in config.method.exchange_facts
    kinds = {direction.kind for direction in list_directions(config)}
    assert (AGGREGATOR_READS in kinds) is adds
