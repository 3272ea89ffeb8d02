"""Who learns what: the table answers for every message of every run, and the docs repeat it."""

from importlib import resources
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from apfed_experiments.report.who_learns import COALITIONS, LIMITS, Limit, Role, RunFacts, find_rule
from apfed_protocols.sums import SECURE_SUMS
from secure_apfed.errors import ApfedError
from secure_apfed.exchange import Kind
from secure_apfed.methods import METHODS
from secure_apfed.settings.method import VoteProtocol


def messages(text: str) -> list[tuple[Kind, Role]]:
    """Kinds and who gets them, from lines such as "SUM_SETUP active passive"."""
    parts = [line.split() for line in text.strip().splitlines()]
    return [(Kind[kind], Role(role)) for kind, *roles in parts for role in roles]


ALIGNED = "ALIGNMENT active passive dealer"
SUMMED = f"""{ALIGNED}
SUM_SETUP active passive aggregator
CONTRIBUTION aggregator
SUM active"""
ASKED = """ALIGNMENT active passive
SUM_SETUP passive
BALLOT_SIZE passive aggregator
CONTRIBUTION aggregator
SUM active"""
MESSAGES = {
    "apfed": messages(f"{SUMMED}\nREPRESENTATIONS passive"),
    "tvfl": messages(f"{ALIGNED}\nREQUEST passive\nREPRESENTATIONS active\nGRADIENTS passive"),
    "votes_encrypted": messages(
        f"{ASKED}\nENCRYPTED_LABELS passive\nCOMMITMENT passive\nCOIN passive\nCHALLENGE active"
    ),
    "vfedtrans": messages(
        "ALIGNMENT active dealer\nDEALT active passive\nREQUEST passive\nCONTRIBUTION aggregator\n"
        "SINGULAR_VECTORS active"
    ),
}
# By how the active reads votes; for methods of the future, too.
VOTES: dict[VoteProtocol, list[tuple[Kind, Role]]] = {
    "sum": messages(f"{SUMMED}\nLABELS passive"),
    "randomised": messages(f"{ALIGNED}\nLABELS passive\nVOTES active"),
    "encrypted": messages("ENCRYPTED_LABELS passive\nSUM active"),
}
SECOND_ROUND = messages("SUM_REQUEST passive\nSUM_ANSWER aggregator")
OPENINGS = {of.settings.vote_protocol: of.public_facts for of in METHODS.values()}


def facts(
    method: str = "apfed", secure_sum: str = "ckks", passives: int = 3, **others: Any
) -> RunFacts:
    usual = {"secure_sum": secure_sum, "passive_count": passives, "has_guard": True}
    return RunFacts(method_facts=METHODS[method].public_facts.exchange_facts, **{**usual, **others})


def voting(opening: VoteProtocol, passives: int = 3, **others: Any) -> RunFacts:
    usual = {"secure_sum": "plain + pairwise masks", "passive_count": passives}
    return RunFacts(method_facts=OPENINGS[opening].exchange_facts, **{**usual, **others})


def coalitions_in(run: RunFacts) -> dict[str, str]:
    return {
        each.colluding_parties: each.joint_knowledge for each in COALITIONS if each.holds_for(run)
    }


def describe_limits(run: RunFacts, received: str = "") -> str:
    """All limits and coalitions, and the rules of these messages."""
    rules = (find_rule(kind, role, run) for kind, role in messages(received))
    return " ".join(
        [
            *(limit.sentence for limit in LIMITS if limit.holds_for(run)),
            *coalitions_in(run).values(),
            *(f"{rule.reads} {rule.protects} {rule.remains}" for rule in rules),
        ]
    )


@pytest.mark.parametrize("method", MESSAGES)
def test_every_message_that_a_run_can_send_has_a_rule(method: str) -> None:
    for secure_sum, guarded, passives in product(SECURE_SUMS, [False, True], [1, 2, 3]):
        case = facts(method, secure_sum, passives, has_guard=guarded)
        two = method == "apfed" and SECURE_SUMS[secure_sum].rounds == 2
        for kind, receiver in [*MESSAGES[method], *(SECOND_ROUND if two else ())]:
            assert find_rule(kind, receiver, case).reads
    for kind, receiver in MESSAGES["apfed"]:
        assert find_rule(kind, receiver, facts(has_pairwise_alignment=True)).reads
    for role in Role:
        assert "about how large these are" in find_rule(Kind.ALIVE, role, facts()).remains


def test_a_message_without_a_rule_and_a_row_without_a_fact_are_errors() -> None:
    with pytest.raises(ApfedError, match="nothing says what the aggregator learns of gradients"):
        find_rule(Kind.GRADIENTS, Role.AGGREGATOR, facts())
    with pytest.raises(ApfedError, match=r"tvfl in 'tvfl; guard on' is no fact of a run"):
        Limit("tvfl; guard on", "Something.")


@pytest.mark.parametrize("name", SECURE_SUMS)
def test_the_tables_say_of_a_sum_word_for_word_what_its_class_says(name: str) -> None:
    run = facts(secure_sum=name)
    kind = SECURE_SUMS[name]
    for (message, receiver), reading in {
        (Kind.CONTRIBUTION, Role.AGGREGATOR): kind.leaks.contribution,
        (Kind.SUM_REQUEST, Role.PASSIVE): kind.leaks.request,
        (Kind.SUM_ANSWER, Role.AGGREGATOR): kind.leaks.answer,
    }.items():
        if reading is not None:
            rule = find_rule(message, receiver, run)
            assert vars(reading).items() <= vars(rule).items()
    if not kind.unsafe:  # under the plain sum the aggregator needs nobody
        assert coalitions_in(run)["active and aggregator"] == kind.leaks.active_and_aggregator
    last = Kind.SUM_ANSWER if name == "crypten" else Kind.CONTRIBUTION
    said = "not alter it" if name == "crypten" else "can alter the sum without being noticed"
    assert said in find_rule(last, Role.AGGREGATOR, run).remains


def test_the_threat_model_repeats_coalitions_and_limits_word_for_word() -> None:
    """The site shows the table of messages on a page of its own."""
    tables = (
        resources.files("apfed_experiments.report").joinpath("who_learns.md").read_text("utf-8")
    )
    page = Path("docs/threat-model.md").read_text(encoding="utf-8")
    first, *others = tables.strip().split("\n\n")
    assert first.startswith("| message |")
    assert len(others) == 2
    assert [table for table in others if table not in page] == []


@pytest.mark.parametrize("opening", VOTES)
def test_every_message_about_votes_has_a_rule_that_speaks_of_votes(opening: VoteProtocol) -> None:
    either = [False, True]
    for passives, noisy, pairwise, label_dp in product([1, 2, 3], either, either, either):
        run = voting(
            opening,
            passives,
            has_passive_noise=noisy,
            has_pairwise_alignment=pairwise,
            has_label_dp=label_dp,
        )
        for kind, receiver in VOTES[opening]:
            rule = find_rule(kind, receiver, run)
            said = f"{rule.reads} {rule.protects} {rule.remains}"
            assert "gradient" not in said
            assert "representation" not in said
        assert "Gradients carry no noise" not in describe_limits(run)
        assert "passive's gradient, " not in describe_limits(run)


SUM = "SUM active"
SHOWN = "REPRESENTATIONS passive"
LABELS = "LABELS passive"
PAIRS = facts(has_pairwise_alignment=True)
SVD = facts("vfedtrans", has_guard=False)
# A run, messages, what is told of it, and what is not.
TOLD: tuple[tuple[RunFacts, str, tuple[str, ...], tuple[str, ...]], ...] = (
    (
        PAIRS,
        f"{SUM}\nALIGNMENT active",
        ("one passive alone knows", "each of them has", "overlap with each passive"),
        (),
    ),
    (facts(), SUM, (), ("one passive alone knows", "overlap with each passive")),
    (facts(passives=1), SUM, ("gradient of the only passive",), ()),
    (facts(passives=2), SUM, ("sum of all", "other passive's gradient"), ()),
    (facts(passives=3), "", (), ("other passive's gradient",)),
    (facts(secure_sum="plain"), "CONTRIBUTION aggregator", ("in the clear",), ()),
    *(
        (
            facts("mmvfl", passives=passives, has_labels_at_passives=True),
            SUM,
            (
                "of whom a passive has a label, and which",
                "labels that a passive holds are read by the active",
            ),
            (),
        )
        for passives in (1, 2, 3)
    ),
    (facts("mmvfl"), SUM, (), ("has a label",)),
    (
        facts(),
        SHOWN,
        (
            "not differentially private training",
            "epsilon_y is infinite",
            "Gradients carry no noise",
            "failed attack proves no privacy",
            "Labels have no differential privacy",
        ),
        ("empirical",),
    ),
    (
        facts(has_label_dp=True),
        SHOWN,
        (
            "Test labels are not randomised",
            "epsilon_model is infinite",
            "encoder held fixed. It is not differentially private",
        ),
        ("no differential privacy",),
    ),
    (
        facts(has_dp_sgd=True),
        SHOWN,
        (),
        ("no differential privacy", "epsilon_model is infinite"),
    ),
    (facts(has_dp_sgd=True, has_guard=False), SHOWN, ("epsilon_model is infinite",), ()),
    (facts(has_defences=True), SHOWN, ("None has an epsilon or any other guarantee",), ()),
    (
        facts(has_passive_noise=True),
        SHOWN,
        (
            "networks held fixed, and by the noise of honest passives alone",
            "one passive alone, for which there is no epsilon",
        ),
        ("Gradients carry no noise",),
    ),
    (
        facts(secure_sum="bfv + pairwise masks", has_passive_noise=True),
        SUM,
        ("noise of each",),
        ("for which there is no epsilon",),
    ),
    *(
        (voting(of), LABELS, ("every passive is shown every label",), ())
        for of in ("sum", "randomised")
    ),
    *(
        (
            voting(of, has_label_dp=True),
            LABELS,
            ("as the label mechanism answers them",),
            ("every passive is shown every label",),
        )
        for of in ("sum", "randomised")
    ),
    (
        voting("encrypted"),
        "ENCRYPTED_LABELS passive",
        ("the labels as ciphertexts",),
        ("shown to every passive",),
    ),
    (voting("randomised"), "", ("Votes carry no noise",), ()),
    (
        voting("randomised", has_passive_noise=True),
        "",
        ("There is NO guarantee for a person's record",),
        ("Votes carry no noise",),
    ),
    (
        voting("randomised", has_passive_noise=True, has_inductive_labellers=True),
        "",
        ("covered only where the guarantee of this run says so",),
        ("NO guarantee",),
    ),
    (voting("sum", 2), "", ("other passive's votes",), ()),
    (voting("sum", 3), "", (), ("other passive's votes",)),
    (
        SVD,
        "CONTRIBUTION aggregator\nSINGULAR_VECTORS active",
        (
            "no encryption",
            "singular values of each party's table",
            "epsilon is infinite",
            "up to one orthogonal transformation",
            "rests on no proof",
        ),
        ("passives' representations decided", "the contribution of"),
    ),
    (facts("tvfl"), "", (), ("rests on no proof",)),
    (facts(has_black_boxes=True), "", ("noise is charged for a whole batch",), ()),
    (facts(), "", (), ("black-box",)),
    (facts("tvfl", has_black_boxes=True), "", (), ("black-box",)),
    (facts("single_view", "plain", 0, has_guard=False), "", ("epsilon_y is infinite",), ()),
)


@pytest.mark.parametrize(("run", "received", "says", "never"), TOLD)
def test_what_protects_and_what_does_not_is_told_of_each_run(
    run: Any, received: str, says: tuple[str, ...], never: tuple[str, ...]
) -> None:
    text = describe_limits(run, received)
    assert [said for said in says if said not in text] == []
    assert [said for said in never if said in text] == []


def test_who_learns_what_with_another_party_is_told() -> None:
    assert "exactly" in coalitions_in(SVD)["aggregator and dealer"]
    assert "dealer" not in " ".join(coalitions_in(voting("sum")))


@pytest.mark.parametrize("method", ["apfed", "tvfl", "single_view"])
@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize("private", [True, False])
def test_computed_noise_is_told_once_wherever_a_figure_rests_on_it(
    method: str, guarded: bool, private: bool
) -> None:
    run = facts(method, has_guard=guarded, has_dp_sgd=private)
    used = private or (guarded and method != "single_view")
    assert describe_limits(run).count("what floating point leaves") == used
    assert describe_limits(run).count("of this run alone, and of one row") == 1
