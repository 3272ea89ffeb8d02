"""Who learns what: the table answers for every message of every run, and the docs repeat it."""

from importlib import resources
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from apfed_experiments.report.who_learns import COALITIONS, LIMITS, Limit, Role, RunFacts, rule_for
from apfed_protocols.sums import SECURE_SUMS
from apfed_protocols.sums.interface import Reading
from secure_apfed.errors import ApfedError
from secure_apfed.exchange import Kind
from secure_apfed.methods import METHODS
from secure_apfed.settings.method import VoteOpening

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
SUMMED = [*MESSAGES["apfed"][:6], (Kind.CONTRIBUTION, Role.AGGREGATOR), (Kind.SUM, Role.ACTIVE)]
# By how the active reads votes; for methods of the future, too.
VOTES: dict[VoteOpening, list[tuple[Kind, Role]]] = {
    "sum": [*SUMMED, (Kind.LABELS, Role.PASSIVE)],
    "randomised": [*MESSAGES["tvfl"][:3], (Kind.LABELS, Role.PASSIVE), (Kind.VOTES, Role.ACTIVE)],
    "moment": [(Kind.LABELS, Role.PASSIVE), (Kind.SUM, Role.ACTIVE)],
    "encrypted": [(Kind.ENCRYPTED_LABELS, Role.PASSIVE), (Kind.SUM, Role.ACTIVE)],
}
ASKED = [
    (Kind.ALIGNMENT, Role.ACTIVE),
    (Kind.ALIGNMENT, Role.PASSIVE),
    (Kind.SUM_SETUP, Role.PASSIVE),
    (Kind.BALLOT_SIZE, Role.PASSIVE),
    (Kind.BALLOT_SIZE, Role.AGGREGATOR),
    (Kind.CONTRIBUTION, Role.AGGREGATOR),
    (Kind.SUM, Role.ACTIVE),
]
MESSAGES |= {
    "votes_encrypted": [
        *ASKED,
        (Kind.ENCRYPTED_LABELS, Role.PASSIVE),
        (Kind.COMMITMENT, Role.PASSIVE),
        (Kind.COIN, Role.PASSIVE),
        (Kind.CHALLENGE, Role.ACTIVE),
    ],
    "votes_moment": [
        *ASKED,
        (Kind.SUM_SETUP, Role.ACTIVE),
        (Kind.BALLOT_SIZE, Role.DEALER),
        (Kind.LABELS, Role.PASSIVE),
        (Kind.DEALT, Role.ACTIVE),
        (Kind.DEALT, Role.AGGREGATOR),
        (Kind.SIGNS, Role.AGGREGATOR),
    ],
}
MESSAGES["vfedtrans"] = [
    (Kind.ALIGNMENT, Role.ACTIVE),
    (Kind.ALIGNMENT, Role.DEALER),
    (Kind.DEALT, Role.ACTIVE),
    (Kind.DEALT, Role.PASSIVE),
    (Kind.REQUEST, Role.PASSIVE),
    (Kind.CONTRIBUTION, Role.AGGREGATOR),
    (Kind.SINGULAR_VECTORS, Role.ACTIVE),
]
SECOND_ROUND = [(Kind.SUM_REQUEST, Role.PASSIVE), (Kind.SUM_ANSWER, Role.AGGREGATOR)]


def facts(
    method: str = "apfed", secure_sum: str = "ckks", passives: int = 3, **others: Any
) -> RunFacts:
    usual = {"secure_sum": secure_sum, "passives": passives, "guarded": True}
    return RunFacts(happens=METHODS[method].declared.happens, **{**usual, **others})


def voting(opening: VoteOpening, passives: int = 3, **others: Any) -> RunFacts:
    usual = {"secure_sum": "plain + pairwise masks", "passives": passives}
    by_opening = {one.settings.opens_votes: one.declared for one in METHODS.values()}
    return RunFacts(happens=by_opening[opening].happens, **{**usual, **others})


def limits_in(run: RunFacts) -> tuple[str, ...]:
    return tuple(limit.sentence for limit in LIMITS if limit.holds(run))


def coalitions_in(run: RunFacts) -> dict[str, str]:
    return {each.who: each.learns for each in COALITIONS if each.holds(run)}


@pytest.mark.parametrize(
    ("method", "secure_sum", "guarded", "passives"),
    list(product(MESSAGES, SECURE_SUMS, [False, True], [1, 2, 3])),
)
def test_every_message_that_a_run_can_send_has_a_rule(
    method: str, secure_sum: str, guarded: bool, passives: int
) -> None:
    case = facts(method, secure_sum, passives, guarded=guarded)
    for kind, receiver in MESSAGES[method]:
        assert rule_for(kind, receiver, case).reads
    if method == "apfed" and SECURE_SUMS[secure_sum].rounds == 2:
        for kind, receiver in SECOND_ROUND:
            assert rule_for(kind, receiver, case).reads


@pytest.mark.parametrize("receiver", [Role.ACTIVE, Role.PASSIVE, Role.AGGREGATOR, Role.DEALER])
def test_a_sign_of_life_is_told_to_show_sizes(receiver: Role) -> None:
    assert "about how large these are" in rule_for(Kind.ALIVE, receiver, facts()).remains


def test_pairwise_alignment_is_told_as_what_it_opens() -> None:
    pairs = facts(pairwise=True)
    for kind, receiver in MESSAGES["apfed"]:
        assert rule_for(kind, receiver, pairs).reads
    assert "one passive alone knows" in rule_for(Kind.SUM, Role.ACTIVE, pairs).remains
    assert "one passive alone" not in rule_for(Kind.SUM, Role.ACTIVE, facts()).remains
    assert "each of them has" in rule_for(Kind.ALIGNMENT, Role.ACTIVE, pairs).reads
    assert "overlap with each passive" in " ".join(limits_in(pairs))
    assert "overlap with each passive" not in " ".join(limits_in(facts()))


def test_a_message_without_a_rule_is_an_error_and_not_an_empty_cell() -> None:
    with pytest.raises(ApfedError, match="nothing says what the aggregator learns of gradients"):
        rule_for(Kind.GRADIENTS, Role.AGGREGATOR, facts())


def test_one_passive_is_told_that_its_gradient_is_read() -> None:
    rule = rule_for(Kind.SUM, Role.ACTIVE, facts(passives=1))
    assert "gradient of the only passive" in rule.reads
    assert "sum of all" in rule_for(Kind.SUM, Role.ACTIVE, facts(passives=2)).reads


def test_the_plain_sum_is_told_to_hide_nothing() -> None:
    rule = rule_for(Kind.CONTRIBUTION, Role.AGGREGATOR, facts(secure_sum="plain"))
    assert "in the clear" in rule.reads


@pytest.mark.parametrize("name", SECURE_SUMS)
def test_every_sum_says_whether_the_aggregator_can_alter_it(name: str) -> None:
    kind = Kind.SUM_ANSWER if name == "crypten" else Kind.CONTRIBUTION
    remains = rule_for(kind, Role.AGGREGATOR, facts(secure_sum=name)).remains
    told = "not alter it" if name == "crypten" else "can alter the sum without being noticed"
    assert told in remains


@pytest.mark.parametrize("name", SECURE_SUMS)
def test_the_tables_say_of_a_sum_word_for_word_what_its_class_says(name: str) -> None:
    run, kind = facts(secure_sum=name), SECURE_SUMS[name]
    for (message, receiver), reading in {
        (Kind.CONTRIBUTION, Role.AGGREGATOR): kind.leaks.contribution,
        (Kind.SUM_REQUEST, Role.PASSIVE): kind.leaks.request,
        (Kind.SUM_ANSWER, Role.AGGREGATOR): kind.leaks.answer,
    }.items():
        if reading is not None:
            rule = rule_for(message, receiver, run)
            assert (
                Reading(reads=rule.reads, protects=rule.protects, remains=rule.remains) == reading
            )
    if not kind.unsafe:  # under the plain sum the aggregator needs nobody
        assert coalitions_in(run)["active and aggregator"] == kind.leaks.active_and_aggregator


def test_two_passives_are_told_what_one_of_them_learns_with_the_active() -> None:
    assert "other passive's gradient" in " ".join(coalitions_in(facts(passives=2)).values())
    assert "other passive's gradient" not in " ".join(coalitions_in(facts(passives=3)).values())


def test_labels_that_passives_hold_are_told_to_be_read() -> None:
    for passives in (1, 2, 3):
        run = facts("mmvfl", passives=passives, labelled_passives=True)
        assert (
            "of whom a passive has a label, and which" in rule_for(Kind.SUM, Role.ACTIVE, run).reads
        )
        assert "labels that a passive holds are read by the active" in " ".join(limits_in(run))
    assert "has a label" not in rule_for(Kind.SUM, Role.ACTIVE, facts("mmvfl")).reads


def test_a_guarded_run_says_that_training_is_not_private() -> None:
    told = " ".join(limits_in(facts()))
    assert "not differentially private training" in told
    assert "epsilon_y is infinite" in told
    assert "failed attack proves no privacy" in told


def test_the_threat_model_repeats_coalitions_and_limits_word_for_word() -> None:
    """The site shows the table of messages on a page of its own."""
    tables = (
        resources.files("apfed_experiments.report").joinpath("who_learns.md").read_text("utf-8")
    )
    page = Path("docs/threat-model.md").read_text(encoding="utf-8")
    messages, *others = tables.strip().split("\n\n")
    assert messages.startswith("| message |")
    assert len(others) == 2
    assert [table for table in others if table not in page] == []


def test_a_row_that_holds_by_no_fact_of_a_run_is_refused() -> None:
    with pytest.raises(ApfedError, match=r"tvfl in 'tvfl; guard on' is no fact of a run"):
        Limit("tvfl; guard on", "Something.")


@pytest.mark.parametrize(
    ("opening", "passives", "noisy", "pairwise", "label_dp"),
    list(product(VOTES, [1, 2, 3], [False, True], [False, True], [False, True])),
)
def test_every_message_about_votes_has_a_rule_that_speaks_of_votes(
    opening: VoteOpening, passives: int, noisy: bool, pairwise: bool, label_dp: bool
) -> None:
    run = voting(opening, passives, noisy=noisy, pairwise=pairwise, label_dp=label_dp)
    for kind, receiver in VOTES[opening]:
        rule = rule_for(kind, receiver, run)
        told = f"{rule.reads} {rule.protects} {rule.remains}"
        assert "gradient" not in told
        assert "representation" not in told
    told = " ".join([*limits_in(run), *coalitions_in(run).values()])
    assert "Gradients carry no noise" not in told
    assert "passive's gradient, " not in told


def test_passives_are_told_to_read_the_labels_that_they_are_shown() -> None:
    def labels(opening: VoteOpening, **others: Any) -> str:
        rule = rule_for(Kind.LABELS, Role.PASSIVE, voting(opening, **others))
        return f"{rule.reads} {rule.protects}"

    for opening in ("sum", "randomised", "moment"):
        assert "every passive is shown every label" in labels(opening)
        assert "every passive is shown" not in labels(opening, label_dp=True)
    assert "as the label mechanism answers them" in labels("sum", label_dp=True)
    encrypted = rule_for(Kind.ENCRYPTED_LABELS, Role.PASSIVE, voting("encrypted"))
    assert "the labels as ciphertexts" in encrypted.reads
    assert "shown to every passive" not in " ".join(limits_in(voting("encrypted")))


def test_the_epsilon_on_votes_is_told_as_what_it_covers() -> None:
    def told(**others: Any) -> str:
        return " ".join(limits_in(voting("randomised", **others)))

    assert "Votes carry no noise" in told()
    assert "Votes carry no noise" not in told(noisy=True)
    assert "NOTHING is claimed for a person's record" in told(noisy=True)
    stand_alone = told(noisy=True, inductive=True)
    assert "NOTHING is claimed" not in stand_alone
    assert "covered only where the guarantee of this run says so" in stand_alone


def test_two_voters_are_told_what_one_of_them_learns_with_the_active() -> None:
    assert "other passive's votes" in " ".join(coalitions_in(voting("sum", 2)).values())
    assert "other passive's votes" not in " ".join(coalitions_in(voting("sum", 3)).values())
    assert "dealer" not in " ".join(coalitions_in(voting("sum")))
    assert "in the clear" in coalitions_in(voting("moment"))["active and aggregator"]


def told_of(**changes: Any) -> str:
    case = facts(**changes)
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
    case = facts(method, guarded=guarded, private=private)
    used = private or (guarded and method != "single_view")
    assert sum("what floating point leaves" in one for one in limits_in(case)) == used
    assert sum("of this run alone, and of one row" in one for one in limits_in(case)) == 1


def test_a_model_of_the_active_alone_tells_of_labels() -> None:
    case = facts("single_view", "plain", 0, guarded=False)
    assert "epsilon_y is infinite" in " ".join(limits_in(case))


def test_noise_under_the_sum_is_told_as_what_it_gives_and_no_more() -> None:
    assert "Gradients carry no noise" in told_of()
    told = told_of(noisy=True)
    assert "Gradients carry no noise" not in told
    assert "networks held fixed, and by the noise of honest passives alone" in told
    assert "one passive alone, for which no epsilon is claimed" in told  # under ckks
    case = facts(secure_sum="bfv + pairwise masks", noisy=True)
    assert "for which no epsilon is claimed" not in " ".join(limits_in(case))
    assert "noise of each" in rule_for(Kind.SUM, Role.ACTIVE, case).reads


def test_defences_are_told_to_guarantee_nothing() -> None:
    assert "empirical" not in told_of()
    assert "none has an epsilon or any other guarantee" in told_of(defended=True)


def test_what_is_decomposed_is_told_as_what_masks_do_not_hide() -> None:
    case = facts("vfedtrans", guarded=False)
    masked = rule_for(Kind.CONTRIBUTION, Role.AGGREGATOR, case)
    assert "contribution" not in masked.reads
    assert "no encryption" in masked.protects
    assert "singular values of each party's table" in masked.remains
    assert "epsilon is infinite" in rule_for(Kind.SINGULAR_VECTORS, Role.ACTIVE, case).protects
    told = coalitions_in(case)
    assert "up to one orthogonal transformation" in told["active and aggregator"]
    assert "exactly" in told["aggregator and dealer"]
    limits = " ".join(limits_in(case))
    assert "rests on no proof" in limits
    assert "passives' representations decided" not in limits
    assert "rests on no proof" not in " ".join(limits_in(facts("tvfl")))
