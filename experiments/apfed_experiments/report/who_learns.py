"""The tables of who_learns.md on who can read what, and the facts of a run that select their rows.

docs/threat-model.md repeats the last two tables word for word, and the site shows all. A rule says
what the receiver of one kind of message reads by following the protocol, what protects the sender,
and what remains unprotected; coalitions and limits concern a whole run. The column "when" is a
condition on facts in words: `;` means and, ` or ` means or. A method's name is no fact.
"""

from dataclasses import dataclass
from enum import StrEnum
from importlib import resources

from apfed_protocols.sums import SECURE_SUMS
from secure_apfed.errors import ApfedError
from secure_apfed.exchange.envelope import Kind
from secure_apfed.exchange.secure_sums import find_sum_class
from secure_apfed.methods import METHODS
from secure_apfed.settings import BlackBoxSettings, RunSettings


class Role(StrEnum):
    """The role of a party in a run."""

    ACTIVE = "active"
    PASSIVE = "passive"
    AGGREGATOR = "aggregator"
    DEALER = "dealer"


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """The facts of a run that decide who can read what.

    Attributes:
        method_facts: what its method does, in words.
        secure_sum: key of `SECURE_SUMS`.
        passive_count: M, number of passives.
        has_guard: a guard clips representations and adds noise to them.
        has_pairwise_alignment: each passive takes part for the people that it shares with the
            active, whether or not other passives know them.
        has_label_dp: training labels are randomised.
        has_labels_after_exchange: no label is used in the exchange.
        has_dp_sgd: the active trains by DP-SGD.
        has_passive_noise: every passive adds noise, in the sum or to its votes.
        has_inductive_labellers: a row without a label changes no vote (a passive's row of class
            scores) but its own.
        has_labels_at_passives: some passive holds labels.
        has_defences: defences without a guarantee are on.
        is_in_separate_processes: each party has a process of its own.
        has_shared_seeds: initial weights come from one seed at all parties.
        has_black_boxes: some passive's objective is code that nobody else sees.
    """

    method_facts: frozenset[str]
    secure_sum: str
    passive_count: int
    has_guard: bool = False
    has_pairwise_alignment: bool = False
    has_label_dp: bool = False
    has_labels_after_exchange: bool = False
    has_dp_sgd: bool = False
    has_passive_noise: bool = False
    has_inductive_labellers: bool = False
    has_labels_at_passives: bool = False
    has_defences: bool = False
    is_in_separate_processes: bool = False
    has_shared_seeds: bool = False
    has_black_boxes: bool = False

    @classmethod
    def from_settings(
        cls, config: RunSettings, *, passive_count: int, is_in_separate_processes: bool
    ) -> "RunFacts":
        """Return the facts of a run with these settings, before or after it.

        `passive_count`: number of passives. `is_in_separate_processes`: whether each party has a
        process of its own.
        """
        return cls(
            method_facts=config.method.exchange_facts,
            secure_sum=find_sum_class(config.secure_sum).name,
            passive_count=passive_count,
            has_guard=config.guard.mechanism != "none",
            has_pairwise_alignment=config.alignment.mode == "pairwise",
            has_label_dp=config.labels.mechanism != "none",
            has_labels_after_exchange=config.train.is_exchange_label_free,
            has_dp_sgd=config.dp_sgd is not None,
            has_passive_noise=config.method.find_noise(config) is not None,
            has_inductive_labellers=config.method.has_inductive_votes,
            has_labels_at_passives=bool(config.data.labels_at),
            has_defences=bool(config.defences),
            is_in_separate_processes=is_in_separate_processes,
            has_shared_seeds=config.party_seeds == "shared_for_comparison",
            has_black_boxes=any(
                isinstance(passive.objective, BlackBoxSettings)
                for passive in config.passives.values()
            ),
        )

    @property
    def phrases(self) -> frozenset[str]:
        """The words of the column "when" that hold for this run."""
        return self.method_facts | {
            word for word, holds in _evaluate_phrases(self).items() if holds
        }


_METHOD_PHRASES = frozenset[str]().union(
    *(method.public_facts.exchange_facts for method in METHODS.values())
)


def _evaluate_phrases(facts: RunFacts) -> dict[str, bool]:
    """Return every word of the column "when" of who_learns.md, with whether it holds for a run.

    The words of methods are left out; `RunFacts.phrases` adds them.
    """
    has_passives = "passives take part" in facts.method_facts
    has_votes = "passives vote" in facts.method_facts
    has_sum = "contributions are summed" in facts.method_facts
    has_gradient_sum = "gradients are summed" in facts.method_facts
    # Methods whose noise, if there is any, is added to the passives' terms of a sum.
    can_have_sum_noise = not facts.method_facts.isdisjoint(
        {"gradients are summed", "representations are summed", "projections are summed"}
    )
    return {
        "always": True,
        "passives hold labels": facts.has_labels_at_passives,
        "noise on votes": has_votes and facts.has_passive_noise,
        "no noise on votes": has_votes and not facts.has_passive_noise,
        "votes move each other": has_votes and not facts.has_inductive_labellers,
        "votes stand alone": has_votes and facts.has_inductive_labellers,
        **{f"sum {name}": has_sum and facts.secure_sum == name for name in SECURE_SUMS},
        "a passive is a black box": has_gradient_sum and facts.has_black_boxes,
        "noise under the sum": facts.has_passive_noise and can_have_sum_noise,
        "no noise under the sum": has_gradient_sum and not facts.has_passive_noise,
        "guard on": facts.has_guard and "representations are sent" in facts.method_facts,
        "no guard": not facts.has_guard,
        "label DP": facts.has_label_dp,
        "no label DP": not facts.has_label_dp,
        "labels come after": facts.has_labels_after_exchange,
        "DP-SGD": facts.has_dp_sgd,
        "no DP-SGD": not facts.has_dp_sgd,
        "alignment pairwise": facts.has_pairwise_alignment,
        "alignment of all": "people are aligned" in facts.method_facts
        and not facts.has_pairwise_alignment,
        "defences on": has_passives and facts.has_defences,
        "in one process": has_passives and not facts.is_in_separate_processes,
        "in processes": has_passives and facts.is_in_separate_processes,
        "shared seeds": has_passives and facts.has_shared_seeds,
        "M = 1": facts.passive_count == 1,
        "M = 2": facts.passive_count == 2,
        "M >= 2": facts.passive_count >= 2,
        "M >= 3": facts.passive_count >= 3,
    }


ALL_PHRASES = _METHOD_PHRASES.union(
    _evaluate_phrases(RunFacts(method_facts=_METHOD_PHRASES, secure_sum="", passive_count=0))
)


@dataclass(frozen=True)
class _Row:
    """A row of a table in who_learns.md; `condition` is the condition under which it holds."""

    condition: str

    def __post_init__(self) -> None:
        """Raise ApfedError if the column "when" has a word that is no fact of a run.

        The column's parts are joined by "; " (and), the words of a part by " or ".
        """
        used_phrases = {word for part in self.condition.split("; ") for word in part.split(" or ")}
        if unknown_phrases := used_phrases - ALL_PHRASES:
            raise ApfedError(
                f"who_learns.md: {', '.join(sorted(unknown_phrases))} in {self.condition!r} is no "
                "fact "
                "of a "
                f"run; say it of runs or methods, or take one of {', '.join(sorted(ALL_PHRASES))}"
            )

    def holds_for(self, facts: RunFacts) -> bool:
        """Return whether the condition in the column "when" holds for a run.

        Of each part, which "; " separates, at least one word must hold.
        """
        true_phrases = facts.phrases
        alternatives_by_part = [set(part.split(" or ")) for part in self.condition.split("; ")]
        return all(true_phrases & alternatives for alternatives in alternatives_by_part)


@dataclass(frozen=True)
class Rule(_Row):
    """A rule on what the receiver of one kind of message learns.

    Attributes:
        receiver: role of the receiver; None: every role learns the same.
        reads: what the receiver learns by following the protocol.
        protects: what protects the sender.
        remains: what is not protected.
    """

    kind: Kind
    receiver: Role | None
    reads: str
    protects: str
    remains: str


@dataclass(frozen=True)
class Coalition(_Row):
    """Colluding parties, and what they learn from all that they hold together."""

    colluding_parties: str
    joint_knowledge: str


@dataclass(frozen=True)
class Limit(_Row):
    """A sentence on what a run does not protect."""

    sentence: str


_ANY_PARTY = "any party"
_TEXT = resources.files("apfed_experiments.report").joinpath("who_learns.md").read_text("utf-8")
_rules, _coalitions, _limits = (
    [row.removeprefix("| ").removesuffix(" |").split(" | ") for row in table.splitlines()[2:]]
    for table in _TEXT.strip().split("\n\n")
)
RULES = tuple(
    Rule(
        when,
        Kind(kind),
        None if receiver == _ANY_PARTY else Role(receiver),
        reads,
        protects,
        remains,
    )
    for kind, receiver, when, reads, protects, remains in _rules
)
COALITIONS = tuple(Coalition(when, who, learns) for who, when, learns in _coalitions)
LIMITS = tuple(Limit(when, sentence) for when, sentence in _limits)


def find_rule(kind: Kind, receiver: Role, facts: RunFacts) -> Rule:
    """Return the rule on what a role learns from messages of this kind in this run.

    Raises ApfedError: the table has none; a report without it would hide something.
    """
    for rule in RULES:
        if rule.kind is kind and rule.receiver in (None, receiver) and rule.holds_for(facts):
            return rule
    raise ApfedError(
        f"nothing says what the {receiver} learns of {kind} in {facts}; add a rule to who_learns.md"
    )
