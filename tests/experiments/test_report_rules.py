"""Who learns what: the table answers for every message of every run, and the docs repeat it."""

from itertools import product
from pathlib import Path

import pytest

from experiments.report.coalitions import coalitions_in, limits_in
from experiments.report.entries import Role, Situation
from experiments.report.rules import RULES, rule_for
from experiments.report.threat_model import markdown
from protocols.sums import SECURE_SUMS
from secure_apfed.errors import ApfedError
from secure_apfed.exchange import Kind

MESSAGES = {
    "apfed": [
        (Kind.ALIGNMENT, Role.ACTIVE),
        (Kind.ALIGNMENT, Role.PASSIVE),
        (Kind.ALIGNMENT, Role.DEALER),
        (Kind.SUM_SETUP, Role.ACTIVE),
        (Kind.SUM_SETUP, Role.PASSIVE),
        (Kind.SUM_SETUP, Role.AGGREGATOR),
        (Kind.REPRESENTATIONS, Role.PASSIVE),
        (Kind.CONTRIBUTION, Role.AGGREGATOR),
        (Kind.SUM, Role.ACTIVE),
    ],
    "tvfl": [
        (Kind.ALIGNMENT, Role.ACTIVE),
        (Kind.ALIGNMENT, Role.PASSIVE),
        (Kind.ALIGNMENT, Role.DEALER),
        (Kind.REQUEST, Role.PASSIVE),
        (Kind.REPRESENTATIONS, Role.ACTIVE),
        (Kind.GRADIENTS, Role.PASSIVE),
    ],
}


SECOND_ROUND = [(Kind.SUM_REQUEST, Role.PASSIVE), (Kind.SUM_ANSWER, Role.AGGREGATOR)]


def situation(method: str = "apfed", secure_sum: str = "ckks", passives: int = 3) -> Situation:
    return Situation(method=method, secure_sum=secure_sum, guarded=True, passives=passives)


@pytest.mark.parametrize(
    ("method", "secure_sum", "guarded", "passives"),
    list(product(MESSAGES, SECURE_SUMS, [False, True], [1, 2, 3])),
)
def test_every_message_that_a_run_can_send_has_a_rule(
    method: str, secure_sum: str, guarded: bool, passives: int
) -> None:
    case = Situation(method=method, secure_sum=secure_sum, guarded=guarded, passives=passives)
    for kind, receiver in MESSAGES[method]:
        assert rule_for(kind, receiver, case).reads
    if method == "apfed" and SECURE_SUMS[secure_sum].rounds == 2:
        for kind, receiver in SECOND_ROUND:
            assert rule_for(kind, receiver, case).reads


def test_pairwise_alignment_is_told_as_what_it_opens() -> None:
    pairs = Situation(method="apfed", secure_sum="ckks", guarded=True, passives=3, pairwise=True)
    for kind, receiver in MESSAGES["apfed"]:
        assert rule_for(kind, receiver, pairs).reads
    assert "one passive alone knows" in rule_for(Kind.SUM, Role.ACTIVE, pairs).remains
    assert "one passive alone" not in rule_for(Kind.SUM, Role.ACTIVE, situation()).remains
    assert "each of them has" in rule_for(Kind.ALIGNMENT, Role.ACTIVE, pairs).reads
    assert "overlap with each passive" in " ".join(limits_in(pairs))
    assert "overlap with each passive" not in " ".join(limits_in(situation()))


def test_a_message_without_a_rule_is_an_error_and_not_an_empty_cell() -> None:
    with pytest.raises(ApfedError, match="nothing says what the aggregator learns of gradients"):
        rule_for(Kind.GRADIENTS, Role.AGGREGATOR, situation())


def test_one_passive_is_told_that_its_gradient_is_read() -> None:
    rule = rule_for(Kind.SUM, Role.ACTIVE, situation(passives=1))
    assert "gradient of the only passive" in rule.reads
    assert "sum of all" in rule_for(Kind.SUM, Role.ACTIVE, situation(passives=2)).reads


def test_the_plain_sum_is_told_to_hide_nothing() -> None:
    rule = rule_for(Kind.CONTRIBUTION, Role.AGGREGATOR, situation(secure_sum="plain"))
    assert "in the clear" in rule.reads


@pytest.mark.parametrize("name", SECURE_SUMS)
def test_every_sum_says_whether_the_aggregator_can_alter_it(name: str) -> None:
    kind = Kind.SUM_ANSWER if name == "crypten" else Kind.CONTRIBUTION
    remains = rule_for(kind, Role.AGGREGATOR, situation(secure_sum=name)).remains
    told = "not alter it" if name == "crypten" else "can alter the sum without being noticed"
    assert told in remains


def test_every_secure_sum_but_the_plain_one_names_its_coalition_with_the_key_holder() -> None:
    for name, kind in SECURE_SUMS.items():
        told = {one.who for one in coalitions_in(situation(secure_sum=name))}
        assert kind.unsafe or "active and aggregator" in told, name


def test_two_passives_are_told_what_one_of_them_learns_with_the_active() -> None:
    told = [one.learns for one in coalitions_in(situation(passives=2))]
    assert any("other passive's gradient" in learns for learns in told)
    assert not any(
        "other passive's gradient" in one.learns for one in coalitions_in(situation(passives=3))
    )


def test_a_guarded_run_says_that_training_is_not_private() -> None:
    told = " ".join(limits_in(situation()))
    assert "not differentially private training" in told
    assert "epsilon_y is infinite" in told
    assert "failed attack proves no privacy" in told


def test_the_threat_model_repeats_the_tables_word_for_word() -> None:
    text = Path("docs/threat-model.md").read_text(encoding="utf-8")
    assert markdown() in text


def test_the_markdown_holds_every_rule() -> None:
    assert all(f"| {rule.reads} |" in markdown() for rule in RULES)


def told_of(**changes: bool) -> str:
    usual = {"guarded": True, "label_dp": False, "private": False}
    case = Situation(method="apfed", secure_sum="ckks", passives=3, **{**usual, **changes})
    rule = rule_for(Kind.REPRESENTATIONS, Role.PASSIVE, case)
    return " ".join([*limits_in(case), rule.protects, rule.remains])


def test_limits_say_what_label_dp_and_private_training_give_and_no_more() -> None:
    assert "Labels have no differential privacy" in told_of()
    assert "no differential privacy" not in told_of(label_dp=True)
    assert "Test labels are not randomised" in told_of(label_dp=True)
    assert "encoder held fixed. It is not differentially private" in told_of(label_dp=True)
    assert "epsilon_model is not claimed" in told_of(label_dp=True)
    assert "no differential privacy" not in told_of(private=True)
    assert "not claimed" not in told_of(private=True)
    assert "not claimed" in told_of(private=True, guarded=False)


@pytest.mark.parametrize("method", ["apfed", "tvfl", "single_view"])
@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize("private", [True, False])
def test_computed_noise_is_told_once_wherever_a_figure_rests_on_it(
    method: str, guarded: bool, private: bool
) -> None:
    case = Situation(
        method=method, secure_sum="ckks", guarded=guarded, passives=3, private=private
    )  # fmt: skip
    used = private or (guarded and method != "single_view")
    assert sum("what floating point leaves" in one for one in limits_in(case)) == used
    assert sum("of this run alone, and of one row" in one for one in limits_in(case)) == 1


def test_a_model_of_the_active_alone_tells_of_labels() -> None:
    case = Situation(method="single_view", secure_sum="plain", guarded=False, passives=0)
    assert "epsilon_y is infinite" in " ".join(limits_in(case))


def test_noise_under_the_sum_is_told_as_what_it_gives_and_no_more() -> None:
    assert "Gradients carry no noise" in told_of()
    told = told_of(noisy=True)
    assert "Gradients carry no noise" not in told
    assert "networks held fixed, and by the noise of honest passives alone" in told
    assert "one passive alone, for which no epsilon is claimed" in told  # under ckks
    case = Situation(
        method="apfed", secure_sum="bfv + pairwise masks", guarded=True, passives=3, noisy=True
    )
    assert "for which no epsilon is claimed" not in " ".join(limits_in(case))
    assert "noise of each" in rule_for(Kind.SUM, Role.ACTIVE, case).reads


def test_defences_are_told_to_guarantee_nothing() -> None:
    assert "empirical" not in told_of()
    assert "none has an epsilon or any other guarantee" in told_of(defended=True)
